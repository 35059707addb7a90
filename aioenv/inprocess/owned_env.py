"""`OwnedEnv`: one env and its thread; how it is made and closed, and the work that runs where the env lives."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from aioenv.core.results import ResetResult, StepResult
from aioenv.errors import StartTimeout, WorkerStartError
from aioenv.inprocess.requests import LastResults, clear_other_slots, owned, owned_info
from aioenv.ipc.messages import reason_of, traceback_of
from aioenv.process.env_thread import INLINE_LIMIT_S, EnvThread, RunTimes
from aioenv.rendering.step_images import ImageRequest
from aioenv.spaces.layout import Layout
from aioenv.worker.vector_access import check_numbers, reset_vector_env, step_result, steps_some, take_observations

if TYPE_CHECKING:
    from aioenv.state.render_source import PhysicsReader

__all__ = ["END_S", "SINGLE_ARRAY", "OwnedEnv", "ends_program"]

_log = logging.getLogger("aioenv")

Slots = npt.NDArray[np.int64]

# How long an idle thread may take to end, in seconds.
END_S = 1.0
# Spaces whose batch is one array.
SINGLE_ARRAY = (Box, Discrete, MultiBinary, MultiDiscrete)
_FLOAT64, _BOOL = np.dtype(np.float64), np.dtype(np.bool_)


def ends_program(exc: BaseException) -> bool:
    """Return whether an exception that was raised on the loop is not the env's own, such as Ctrl-C.

    A CancelledError counts as the env's own: the loop cancels nothing in the middle of a call. A task that let it
    through would end silently.
    """
    return not isinstance(exc, (Exception, asyncio.CancelledError))


class OwnedEnv:
    """One vector env, on a thread of its own or on the loop's.

    `step`, `reset` and `read_obs` run on the thread that calls them; the caller sees to it that there is one at a time.

    Args:
        num_envs: the number of slots.
        inline: whether the env has no thread of its own.

    Attributes:
        env: the env itself; None before the start and after the end.
        thread: its thread; None if it has none.
        physics: reads the states that images are drawn from; None if there are none.
        step_times, reset_times: how long steps and resets take, and so where they run.
        last_step_s: when the last step ended, by `perf_counter`.
        last_results: the last result of every slot.
        layout: of the observations that the env gives.
    """

    physics: PhysicsReader | None = None
    step_times: RunTimes
    reset_times: RunTimes
    last_results: LastResults
    layout: Layout

    def __init__(self, num_envs: int, *, inline: bool) -> None:
        self.env: Any = None
        self.thread: EnvThread | None = None
        self._num_envs = num_envs
        self._inline = inline
        self._ending = False
        self._column_shape = (num_envs,)
        self._obs_space: Space[Any] | None = None
        self._actions: Layout | None = None
        self.last_step_s = 0.0

    # ------------------------------------------------------------ start and end

    async def start(self, make: Callable[[], Any], timeout_s: float) -> None:
        """Make the env where it will live.

        Args:
            make: makes the env.
            timeout_s: the limit, in seconds. An env without a thread of its own can't be interrupted.

        Raises:
            WorkerStartError: if `make` raised; as a StartTimeout if it took too long.
        """

        def make_here() -> None:
            self.env = make()

        limit = asyncio.timeout(timeout_s)
        try:
            if self._inline:
                make_here()
            else:
                self.thread = EnvThread()
                async with limit:
                    await self.thread.run(make_here)
        except BaseException as exc:
            self.end()
            if isinstance(exc, TimeoutError) and limit.expired():  # the thread ends when `make` returns
                assert self.thread is not None
                self.thread.detach()
                message = f"the vector env was not made within start_timeout_s={timeout_s}"
                raise self._start_error(StartTimeout, message) from exc
            if isinstance(exc, Exception) or (self.thread is None and not ends_program(exc)):
                if self.thread is not None:
                    await self.thread.join(END_S)
                text = traceback_of(exc)
                message = f"the vector env could not be made: {reason_of(exc)}\n{text}"
                raise self._start_error(WorkerStartError, message, text) from exc
            if self.thread is not None and not isinstance(exc, asyncio.CancelledError):  # then `close` waits for it
                self.thread.detach()
            raise

    def _start_error(self, kind: type[WorkerStartError], message: str, text: str = "") -> WorkerStartError:
        return kind(message, slots=tuple(range(self._num_envs)), pid=os.getpid(), traceback=text)

    def configure(self, actions: Layout, *, inline: bool | None, checks_obs: bool) -> None:
        """Prepare for the first reset, once the spaces are known.

        Args:
            actions: the layout of single actions.
            inline: whether steps and resets run on the loop; None to choose by measured run times.
            checks_obs: whether to check observations of composite spaces, too.
        """
        env, single = self.env, self.env.single_observation_space
        self.layout = Layout(single)
        self._actions = actions if steps_some(env) else None
        self._obs_space = env.observation_space if checks_obs or isinstance(single, SINGLE_ARRAY) else None
        self.last_results = LastResults(self._num_envs, keeps_obs=self._actions is None)
        self.step_times, self.reset_times = RunTimes(INLINE_LIMIT_S, inline), RunTimes(INLINE_LIMIT_S, inline)

    def end(self) -> None:
        """Close the env after its current work, once; doesn't wait."""
        if self._ending:
            return
        self._ending = True
        if self.thread is None:
            self._close_env()
        else:
            self.thread.finish(self._close_env)

    def _close_env(self) -> None:
        env, self.env = self.env, None
        try:
            if env is not None:
                env.close()
        except BaseException as exc:
            if self.thread is None and ends_program(exc):
                raise
            _log.warning("the vector env raised when it was closed", exc_info=True)

    async def join(self, grace_s: float) -> bool:
        """Wait at most `grace_s` seconds for the thread to end; return whether it has ended."""
        return self.thread is None or await self.thread.join(grace_s)

    def detach(self) -> None:
        """Stop waiting for the thread to end."""
        if self.thread is not None:
            self.thread.detach()

    # ------------------------------------------------------------ work, on the thread that calls it

    def step(self, actions: Any, copy: bool, images: ImageRequest | None, slots: Slots | None = None) -> StepResult:
        """Step the env, and check its results; any exception is the env's.

        Args:
            actions: a checked batch of actions of all slots.
            copy: whether the observations must be in arrays that the env doesn't keep.
            images: gets the states that images are drawn from.
            slots: the slots that are stepped, ascending; None for all.
        """
        start_s = perf_counter()
        # unpacked at once: a name for the whole result would keep `owned` from taking over its arrays
        obs, reward, terminated, truncated, info = step_result(
            self.env.step(actions) if slots is None else self.env.step_some(actions, slots)
        )
        self.last_step_s = end_s = perf_counter()
        self.step_times.record(end_s - start_s)
        if images is not None:
            self._read_states(images)
        if not self._fits_space(obs):
            obs = self._cast_obs(obs)
        result = StepResult(
            owned(obs) if copy else obs,
            self._column("reward", reward, _FLOAT64),
            self._column("terminated", terminated, _BOOL),
            self._column("truncated", truncated, _BOOL),
            owned_info(info) if info else {},
        )
        self.last_results.record_step(obs, terminated, truncated, slots)
        return result if slots is None else clear_other_slots(result, slots)

    def reset(
        self,
        seed: Any,
        mask: npt.NDArray[np.bool_] | None,
        options: dict[str, Any] | None,
        images: ImageRequest | None,
    ) -> ResetResult:
        """Reset the slots of a mask (None: all), and check the results; any exception is the env's."""
        start_s = perf_counter()
        obs, info = reset_vector_env(self.env, seed, mask, options)
        self.reset_times.record(perf_counter() - start_s)
        self.last_results.record_reset(obs, mask)
        if images is not None:
            self._read_states(images)
        if not self._fits_space(obs):
            obs = self._cast_obs(obs)
        return ResetResult(owned(obs), owned_info(info) if info else {})

    def read_obs(self) -> ResetResult:
        """Return the latest observations of all slots."""
        obs = self.last_results.obs
        if (actions := self._actions) is not None:
            nothing = actions.assemble(actions.zeros(self._num_envs), actions.no_objects(self._num_envs))
            obs = self.env.step_some(nothing, np.zeros(0, np.int64))[0]
        return ResetResult(owned(obs if self._fits_space(obs) else self._cast_obs(obs)), {})

    def _read_states(self, images: ImageRequest) -> None:
        """Copy the current states of the env into an image request."""
        assert self.physics is not None
        some = None if len(images.slots) == self._num_envs else images.slots.tolist()
        images.states = np.empty((len(images.slots), self.physics.source.state_size))
        self.physics.read(some, images.states)

    def _fits_space(self, obs: Any) -> bool:
        """Return whether observations have the space's type; those of composite spaces may go unchecked."""
        space = self._obs_space
        return space is None or (type(obs) is np.ndarray and obs.shape == space.shape and obs.dtype == space.dtype)

    def _cast_obs(self, obs: Any) -> Any:
        """Return observations in the array type of the space, if they can be cast."""
        return self.layout.assemble(*take_observations(self.layout, obs, self._num_envs))

    def _column(self, name: str, values: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return a checked copy of rewards or flags."""
        if type(values) is not np.ndarray or values.dtype.kind not in "biuf":
            check_numbers(name, values)
        array = np.array(values, dtype)
        if array.shape != self._column_shape:
            raise ValueError(f"{name}: expected shape {self._column_shape}, got {array.shape}")
        return array
