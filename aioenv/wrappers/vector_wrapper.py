"""`VectorWrapper`: runs a vector wrapper of Gymnasium on the batches of an asynchronous vector env."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorActionWrapper, VectorRewardWrapper
from gymnasium.wrappers.utils import RunningMeanStd
from gymnasium.wrappers.vector import NormalizeReward, RecordEpisodeStatistics

from aioenv.core.results import Ready, ResetResult, StepResult
from aioenv.core.session import CLOSE_GRACE_S
from aioenv.errors import NoAsyncCallError, SlotError, StepTimeout
from aioenv.rollout.recorder import Rollout
from aioenv.rollout.rollout import Policy
from aioenv.spaces.layout import Layout
from aioenv.vector_env import AsyncVectorEnv
from aioenv.worker.vector_access import take_observations
from aioenv.wrappers.batches import spread, take_rows
from aioenv.wrappers.rollouts import WrapperRollouts

__all__ = ["VectorWrapper"]

_log = logging.getLogger("aioenv")

Envs: TypeAlias = "AsyncVectorEnv | VectorWrapper"
Bools = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.int64]

if TYPE_CHECKING:  # it takes no types before Gymnasium 1.4
    GymnasiumWrapper = gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]
else:
    GymnasiumWrapper = gymnasium.vector.VectorWrapper

# Methods of `AsyncVectorEnv` that a wrapper does not have.
_REFUSED = {
    **dict.fromkeys(
        ("send", "send_reset", "ready", "step_at", "reset_at", "episodes"),
        "it gives results of some slots, and this wrapper computes on whole batches: use step(), reset() or rollout()",
    ),
    "set_state": "the state of an env has nothing of what a wrapper keeps for its slot: reset() instead",
}

# Gymnasium's wrappers that draw in `step` and `reset`.
_DRAWING = tuple(
    getattr(gymnasium.wrappers.vector, name)
    for name in ("RecordVideo", "HumanRendering")
    if hasattr(gymnasium.wrappers.vector, name)
)

# Gymnasium's methods that return observations as they are: other wrappers may have written to the array.
_KEEP_OBS = {
    method
    for kind in (gymnasium.vector.VectorWrapper, VectorActionWrapper, VectorRewardWrapper)
    for method in (kind.reset, kind.step)
} | {method for kind in (NormalizeReward, RecordEpisodeStatistics) for method in (kind.reset, kind.step)}


class _Request(NamedTuple):
    """A step or reset as the wrapped vector env was asked for it."""

    actions: Any = None
    seed: Any = None
    options: dict[str, Any] | None = None
    is_reset: bool = False


class _Taken(NamedTuple):
    """The result of a cancelled request: whole, the slots that have one, and their error."""

    result: StepResult | ResetResult
    slots: Slots
    error: SlotError | None


class _LastBatch(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A vector env whose `step` and `reset` return the result that the asynchronous one has just given."""

    def __init__(self, envs: Envs) -> None:
        self.num_envs = envs.num_envs
        self.single_observation_space, self.observation_space = envs.single_observation_space, envs.observation_space
        self.single_action_space, self.action_space = envs.single_action_space, envs.action_space
        self.metadata, self.spec, self.render_mode = envs.metadata, envs.spec, envs.render_mode
        self.result: Any = None
        self.actions: Any = None

    def _take(self) -> Any:
        result, self.result = self.result, None  # its memory is used again once it is released
        if result is None:
            raise TypeError(
                "a vector wrapper steps or resets more than once in a `step` or `reset`, and there is the result of "
                "one step or reset: put it around a blocking vector env of aioenv.sync.make_vec"
            )
        return result

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._take()

    def step(self, actions: Any) -> Any:
        if self.result is not None and actions is not self.actions:
            raise TypeError(
                "a vector wrapper has changed the actions in `step`, after they were sent: derive it from "
                "gymnasium.vector.VectorActionWrapper, and change them in `actions`"
            )
        return self._take()

    def close(self, **kwargs: Any) -> None:
        """Do nothing: `VectorWrapper.close` closes the asynchronous one."""


class VectorWrapper:
    """Wrap an asynchronous vector env in a vector wrapper of Gymnasium, or in one of yours::

        from gymnasium.wrappers.vector import RescaleObservation

        envs = VectorWrapper(aioenv.make_vec("CartPole-v1", 8), RescaleObservation, min_obs=-1.0, max_obs=1.0)
        async with envs:
            obs, info = await envs.reset(seed=0)

    The wrapper's own code computes on the batch that the wrapped vector env has just returned. So results, spaces and
    refusals are those of the same wrapper around `aioenv.sync.make_vec`. Wrappers can be nested.

    `async with` or `await` start the vector env as well, if it is not running, and `close` closes it. Attributes that a
    wrapper does not have are those of Gymnasium's wrapper, which can be set, too (`envs.obs_rms = statistics`), then
    those of the wrapped vector env: `render`, `call`, `stats`, `pause` and so on. There is no `send`, `send_reset`,
    `ready`, `step_at`, `reset_at`, `episodes` and `set_state`: their results are not whole batches, and the wrapper
    would miss them.

    A slot that has failed is missing from the result, which is `error.partial` then: the wrapper sees reward 0, flags
    False, and zeros or an old observation in its row.

    Args:
        envs: an `AsyncVectorEnv`, `NativeVectorEnv`, or another wrapper.
        wrapper: a subclass of `gymnasium.vector.VectorWrapper`, or a function that is called with a vector env and
            returns an instance of one. It must not change actions in `step`, nor step, reset or draw by itself.
        *args: further arguments of `wrapper`.
        **kwargs: keyword arguments of `wrapper`.

    Attributes:
        env: the wrapped vector env or wrapper.
        num_envs: the number of slots.

    Raises:
        TypeError: if `envs` is something else; if `wrapper` is no such wrapper.
        ValueError: if the wrapper refuses the vector env. It is made when the vector env is started.
    """

    _gymnasium: GymnasiumWrapper | None = None  # made once the spaces are known
    _left: _Request | None = None  # was cancelled or timed out; its result was not taken yet
    _settled: _Taken | None = None  # that result, until another request is sent
    # of the last results
    last_obs: Any = None  # a copy
    _memory: Any = None  # of that copy
    last_info: Any = None
    pending_reset: Bools

    def __init__(
        self,
        envs: Envs,
        wrapper: Callable[..., GymnasiumWrapper],
        /,  # the wrapper may have any argument
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not isinstance(envs, (AsyncVectorEnv, VectorWrapper)):
            hint = "; it goes into the wrapper of gymnasium.wrappers.vector itself"
            raise TypeError(
                f"envs: expected an aioenv.AsyncVectorEnv or a wrapper of one, got {type(envs).__name__}"
                + hint * isinstance(envs, gymnasium.vector.VectorEnv)
            )
        _check_draws_not(wrapper)
        self.env = envs
        self.num_envs: int = envs.num_envs
        self._make, self._args, self._kwargs = wrapper, args, kwargs
        self.pending_reset = np.zeros(self.num_envs, np.bool_)
        running = envs._gymnasium if isinstance(envs, VectorWrapper) else envs._backend
        if running is not None:
            self._make_wrapper()

    def _make_wrapper(self) -> None:
        self._batch = _LastBatch(self.env)
        made = self._make(self._batch, *self._args, **self._kwargs)
        if not isinstance(made, gymnasium.vector.VectorWrapper):
            raise TypeError(f"wrapper: expected a gymnasium.vector.VectorWrapper, got {type(made).__name__}")
        _check_draws_not(type(made))
        self._changes_actions = isinstance(made, VectorActionWrapper)
        if self._changes_actions and type(made).step is not VectorActionWrapper.step:
            raise TypeError(
                f"wrapper: {type(made).__name__} is a VectorActionWrapper with a `step` of its own: split it in two"
            )
        # Gymnasium then writes results into the array that it was given
        self._writes = bool(getattr(made, "same_out", False))
        self._keeps_obs = {type(made).reset, type(made).step} <= _KEEP_OBS
        self._gymnasium = made
        early = [name for name in vars(self) if name not in ("env", "num_envs") and self._is_gymnasiums(name)]
        for name in early:  # attributes that were set before the start
            setattr(made, name, self.__dict__.pop(name))

    @property
    def wrapper(self) -> Any:
        """The wrapper of Gymnasium, around a stand-in that returns the last batch.

        Raises:
            RuntimeError: if the vector env is not started.
        """
        if self._gymnasium is None:
            raise RuntimeError(f"{self!r}: start it first, with `async with envs:` or `await envs`")
        return self._gymnasium

    @property
    def unwrapped(self) -> AsyncVectorEnv:
        """The vector env below all wrappers. Wrappers do not see the steps and resets that it is asked for itself."""
        return self.env.unwrapped if isinstance(self.env, VectorWrapper) else self.env

    # ------------------------------------------------------------ start and close

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ensure_started().__await__()

    async def __aenter__(self) -> Self:
        return await self._ensure_started()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _ensure_started(self) -> Self:
        await self.env
        if self._gymnasium is None:
            try:
                self._make_wrapper()
            except BaseException:
                await self.env.close()
                raise
        return self

    async def close(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """Close the vector env (see `AsyncVectorEnv.close`)."""
        await self.env.close(grace_s=grace_s)

    def __repr__(self) -> str:
        name = type(self).__name__ if type(self) is not VectorWrapper else getattr(self._make, "__name__", "wrapper")
        return f"<{name}, {self.env!r}>"

    # ------------------------------------------------------------ attributes

    @property
    def single_observation_space(self) -> Space[Any]:
        """The observation space of one slot, as the wrapper changed it."""
        return self.wrapper.single_observation_space  # type: ignore[no-any-return]

    @property
    def observation_space(self) -> Space[Any]:
        """The space of a batch of observations, as the wrapper changed it."""
        return self.wrapper.observation_space  # type: ignore[no-any-return]

    @property
    def single_action_space(self) -> Space[Any]:
        """The action space of one slot, as the wrapper changed it."""
        return self.wrapper.single_action_space  # type: ignore[no-any-return]

    @property
    def action_space(self) -> Space[Any]:
        """The space of a batch of actions, as the wrapper changed it."""
        return self.wrapper.action_space  # type: ignore[no-any-return]

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the first env, with `autoreset_mode`, as the wrapper changed it."""
        return self.wrapper.metadata  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED:
            raise AttributeError(f"{type(self).__name__} has no {name}: {_REFUSED[name]}")
        if name.startswith("_") or "env" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._gymnasium if self._is_gymnasiums(name) else self.env, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__ and not hasattr(type(self), name) and self._is_gymnasiums(name):
            setattr(self._gymnasium, name, value)
        else:
            super().__setattr__(name, value)

    def _is_gymnasiums(self, name: str) -> bool:
        """Return whether a public attribute is that of Gymnasium's wrapper."""
        theirs = self._gymnasium
        if theirs is None or name.startswith("_"):
            return False
        its_own = hasattr(type(theirs), name) and not hasattr(gymnasium.vector.VectorWrapper, name)
        return name in vars(theirs) or its_own

    # ------------------------------------------------------------ steps

    async def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> ResetResult:
        """Begin an episode in every slot, or in those of `options["reset_mask"]`, and wrap the result.

        Args, Raises: see `AsyncVectorEnv.reset`; also what the wrapper raises. If this is cancelled, or times out, the
        envs are reset all the same, as with `step`.
        """
        self._check_reset(options)
        await self._settle()
        request = _Request(seed=seed, options=options, is_reset=True)
        result = await self._outcome(request, self.env.reset(seed=seed, options=options, timeout_s=timeout_s))
        assert isinstance(result, ResetResult)
        return result

    async def step(self, actions: Any, *, timeout_s: float | None = None) -> StepResult:
        """Step every slot, and wrap the result.

        If this is cancelled, or times out, after the actions were sent, the envs are stepped all the same. `recv` takes
        the wrapped result. A later `step`, `reset` or `rollout` first waits for it, and drops it once it is sent,
        with a warning if an episode ended. In any case the wrapper sees it, once, before the next one.

        Args, Raises: see `AsyncVectorEnv.step`; also what the wrapper raises.
        """
        wrapper = self.wrapper
        await self._settle()
        if self._changes_actions:
            actions = wrapper.actions(copy.deepcopy(actions) if self._writes else actions)
        result = await self._outcome(_Request(actions), self.env.step(actions, timeout_s=timeout_s))
        assert isinstance(result, StepResult)
        return result

    async def recv(self) -> Ready:
        """Take the result of a step or reset that was cancelled or timed out, wrapped.

        If this is cancelled, no result is taken and none is lost.

        Raises:
            NoAsyncCallError: if there is none.
            EnvError, WorkerDied, StepTimeout: as for `AsyncVectorEnv.recv`.
        """
        self.unwrapped._check_running()
        taken, self._settled = await self._take() or self._settled, None
        if taken is None:
            raise NoAsyncCallError("recv: no step or reset was cancelled or has timed out", "recv")
        result, slots, error = taken
        if isinstance(result, ResetResult):
            flags = np.zeros(self.num_envs, np.bool_)
            result = StepResult(result.obs, np.zeros(self.num_envs), flags, flags, result.info)
        ready = Ready(slots, *take_rows(self.single_observation_space, result, slots))
        if error is not None:
            _set_partial(error, ready)
            raise error
        return ready

    async def rollout(self, policy: Policy, steps: int) -> Rollout:
        """Collect `steps` steps of every slot, all of it wrapped (see `AsyncVectorEnv.rollout`).

        All slots step in turn with the policy, since the wrapper computes on whole batches. A rollout begins with the
        observations that were returned last. Under `AutoresetMode.DISABLED` it resets slots with a mask, without
        `autoreset_options`; a wrapper that refuses masks refuses this, too.

        Args, Returns, Raises: see `AsyncVectorEnv.rollout`.
        """
        await self._settle()
        self._drop_settled()
        return await WrapperRollouts(self).run(policy, steps)

    async def _outcome(
        self, request: _Request, result: Coroutine[Any, Any, StepResult | ResetResult]
    ) -> StepResult | ResetResult:
        """Wait for the result of a request, and wrap it; also the partial one of an error."""
        try:
            value = await result
        except SlotError as error:
            if error.partial is not None:
                self._drop_settled()
                _set_partial(error, self._see(request, error.partial, self._without(error.slots)))
            raise
        except BaseException as exc:
            sent = not isinstance(exc, Exception) or isinstance(exc, StepTimeout)
            if sent and self._is_left():
                self._drop_settled()
                self._left = request
            raise
        self._drop_settled()
        return self._see(request, value, None)

    def _is_left(self) -> bool:
        """Whether the wrapped vector env has a result that was not taken."""
        if isinstance(self.env, VectorWrapper):
            return self.env._left is not None
        return not self.env.closed and self.env.outstanding

    def _without(self, slots: tuple[int, ...]) -> Bools:
        rows = np.ones(self.num_envs, np.bool_)
        rows[list(slots)] = False
        return rows

    async def _settle(self) -> None:
        """Let the wrapper see the result of a cancelled request, if there is one, before the next request.

        It is dropped when that was sent. Until then `recv` has it: the next request may be refused.
        """
        self._settled = await self._take() or self._settled

    def _drop_settled(self) -> None:
        """Drop the result of a cancelled request; the next one was sent."""
        taken, self._settled = self._settled, None
        if taken is None or isinstance(taken.result, ResetResult):
            return
        ended = np.flatnonzero(taken.result.terminated | taken.result.truncated)
        if len(ended):
            _log.warning(
                "the result of a cancelled or timed-out step was dropped, and with it the ends of the episodes in "
                "slots %s; recv() would have taken it",
                ended.tolist(),
            )

    async def _take(self) -> _Taken | None:
        """Take and wrap the result of a cancelled request; None if there is none. If this is cancelled, it stays."""
        if self._left is None:
            return None
        taken = await (self.env._take() if isinstance(self.env, VectorWrapper) else _take_from(self.env))
        request, self._left = self._left, None
        if taken is None:  # `recv` of the vector env itself took it
            return None
        rows = None
        if len(taken.slots) < self.num_envs:
            rows = np.zeros(self.num_envs, np.bool_)
            rows[taken.slots] = True
        result: Any = taken.result
        if request.is_reset and not isinstance(result, ResetResult):
            result = ResetResult(result.obs, result.info)
        return taken._replace(result=self._see(request, result, rows))

    # ------------------------------------------------------------ what the wrapper sees

    def _check_reset(self, options: dict[str, Any] | None) -> None:
        """Raise if the wrapper would refuse these options once the envs were reset."""

    def _see(self, request: _Request, result: Any, rows: Bools | None) -> StepResult | ResetResult:
        """Have the wrapper see a result, and note the observations for a rollout.

        Args:
            request: the request.
            result: a whole batch.
            rows: bool `(num_envs,)`: whether a slot has a result of the request; None: all slots have.
        """
        seen: StepResult | ResetResult
        inner = self.env if isinstance(self.env, VectorWrapper) else None
        info = result.info if inner is None else inner.last_info  # always a dict; DictInfoToList makes lists
        idle = self._idle_slots(info, rows)
        if request.is_reset:
            seen = self._see_reset(request, result, rows)
            mask = (request.options or {}).get("reset_mask")
            self.pending_reset = self.pending_reset & (idle if mask is None else idle | ~mask)
        else:
            seen = self._see_step(request.actions, result, rows)
            self.pending_reset = np.where(idle, self.pending_reset, seen.terminated | seen.truncated)
        self.last_info = seen.info if isinstance(seen.info, dict) else info
        if self._keeps_obs and seen.obs is result.obs and inner is not None:
            self.last_obs = inner.last_obs
        else:
            # the arrays are the caller's, who may write to them
            obs = seen.obs if rows is None or self.last_obs is None else self._with_last(seen.obs, rows)
            self.last_obs = self._memory = _copied(obs, self._memory)
        return seen

    def _idle_slots(self, info: Any, rows: Bools | None) -> Bools:
        """Return the slots that a step or reset has left out: they are paused, have failed, or have no result."""
        idle = np.zeros(self.num_envs, np.bool_) if rows is None else ~rows
        return idle | ~info["_active"] if isinstance(info, dict) and "_active" in info else idle

    def _with_last(self, obs: Any, rows: Bools) -> Any:
        """Return observations in which the slots without a result have the ones that were returned last."""
        layout = Layout(self.single_observation_space)
        try:
            arrays, columns = take_observations(layout, obs, self.num_envs)
            last, last_columns = take_observations(layout, self.last_obs, self.num_envs)
        except ValueError:  # they do not fit the space, as a rollout will say
            return obs
        for array, new in zip(last, arrays, strict=True):
            array[rows] = new[rows]
        objects = [
            [new if has_one else old for new, old, has_one in zip(*pair, rows.tolist(), strict=True)]
            for pair in zip(columns, last_columns, strict=True)
        ]
        return layout.assemble(last, objects)

    def _see_reset(self, request: _Request, result: ResetResult, rows: Bools | None) -> ResetResult:
        self._batch.result = self._own(result)
        options = None if request.options is None else dict(request.options)  # Gymnasium takes the mask out of it
        return ResetResult(*self.wrapper.reset(seed=request.seed, options=options))

    def _see_step(self, actions: Any, result: StepResult, rows: Bools | None) -> StepResult:
        if self._changes_actions:
            return result
        self._batch.result, self._batch.actions = self._own(result), actions
        return StepResult(*self.wrapper.step(actions))

    def _own(self, result: Any) -> Any:
        """Return a result in whose observations the wrapper may write: the vector env may need its own again."""
        if self._writes and not self._changes_actions:
            return result._replace(obs=copy.deepcopy(result.obs))
        return result

    # ------------------------------------------------------------ states

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Return the running statistics of this wrapper and of those that it wraps, to be saved with the policy.

        Each is an array of its own: `numpy.savez(path, **envs.state_dict())`. They do not depend on the number of
        slots. What a wrapper keeps of the current episodes is not among them.

        Returns:
            Arrays by name, "NormalizeObservation.obs_rms.mean" say. If a stack has two wrappers of a kind, the name of
            the outer one ends with a number: "NormalizeObservation2.obs_rms.mean".
        """
        return {
            f"{name}.{field}": np.array(getattr(stats, field))
            for name, stats in self._statistics().items()
            for field in ("mean", "var", "count")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Args:
            state: arrays by name; also the file that `numpy.load` opens.

        Raises:
            ValueError: if these are other names or shapes than those of `state_dict`. Nothing is loaded then.
        """
        known = self.state_dict()
        loaded = {name: np.asarray(state[name]) for name in state}
        if loaded.keys() != known.keys():
            raise ValueError(f"state: expected {sorted(known)}, got {sorted(loaded)}")
        for name, array in loaded.items():
            if array.shape != known[name].shape:
                raise ValueError(f"state: {name}: expected shape {known[name].shape}, got {array.shape}")
        for name, stats in self._statistics().items():
            # in the dtype that was saved: Gymnasium's begin in the space's, and are float64 from the first result on
            stats.mean, stats.var = loaded[f"{name}.mean"].copy(), loaded[f"{name}.var"].copy()
            stats.count = float(loaded[f"{name}.count"])

    def _statistics(self) -> dict[str, RunningMeanStd]:
        """Return the running statistics of all wrappers, the innermost one's first, by name."""
        found = self.env._statistics() if isinstance(self.env, VectorWrapper) else {}
        kind = name = type(self.wrapper).__name__
        number = 1
        while any(known.startswith(f"{name}.") for known in found):
            number += 1
            name = f"{kind}{number}"
        mine = {key: value for key, value in vars(self.wrapper).items() if isinstance(value, RunningMeanStd)}
        return {**found, **{f"{name}.{key}": value for key, value in mine.items()}}

    @property
    def autoreset_mode(self) -> AutoresetMode:
        """The autoreset mode of the vector env."""
        mode: AutoresetMode = self.env.autoreset_mode
        return mode


def _check_draws_not(kind: Any) -> None:
    """Raise a TypeError if a wrapper draws."""
    if isinstance(kind, type) and issubclass(kind, _DRAWING):
        raise TypeError(
            f"wrapper: {kind.__name__} calls render() in `step`, which an asynchronous vector env must be awaited for: "
            "use aioenv.record for a video, or `await envs.render()` for images"
        )


async def _take_from(envs: AsyncVectorEnv) -> _Taken | None:
    """Take the result of a cancelled step or reset of a vector env, as a whole batch; None if there is none."""
    if not envs.outstanding:
        return None
    error = None
    try:
        ready = await envs.recv(envs.num_envs)
    except SlotError as exc:
        error, ready = exc, exc.partial
    return _Taken(StepResult(*spread(envs.single_observation_space, ready, envs.num_envs)), ready.slots, error)


def _copied(obs: Any, memory: Any) -> Any:
    """Return a copy of observations; objects that are no arrays are not copied.

    Args:
        obs: the observations.
        memory: an earlier copy, whose arrays are written to where they fit: new memory costs more than the copy.
    """
    if isinstance(obs, dict):
        memory = memory if isinstance(memory, dict) else {}
        return {key: _copied(part, memory.get(key)) for key, part in obs.items()}
    if type(obs) is tuple:
        memory = memory if type(memory) is tuple and len(memory) == len(obs) else [None] * len(obs)
        return tuple(map(_copied, obs, memory))
    if not isinstance(obs, np.ndarray):
        return obs
    if not isinstance(memory, np.ndarray) or memory.shape != obs.shape or memory.dtype != obs.dtype:
        memory = np.empty_like(obs)
    memory[...] = obs
    return memory


def _set_partial(error: SlotError, partial: Any) -> None:
    for one in (error, *error.errors):
        one.partial = partial
