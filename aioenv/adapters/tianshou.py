"""A Tianshou `BaseVectorEnv` over worker processes of several envs each, in place of its `SubprocVectorEnv`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Env, Space, spaces

try:
    from tianshou.env import BaseVectorEnv as _BaseVectorEnv
except ImportError as exc:
    raise ImportError("aioenv.adapters.tianshou needs Tianshou: pip install tianshou") from exc

from aioenv import sync
from aioenv.core.results import Ready
from aioenv.core.scheduler import RequestScheduler
from aioenv.core.slots import SlotState
from aioenv.errors import ActionError, SlotError
from aioenv.rollout.subset import row_infos
from aioenv.spaces.infos import RowDicts, merge_infos_or_rows
from aioenv.spaces.seeding import check_options
from aioenv.vector_env import AsyncVectorEnv

__all__ = ["TianshouVectorEnv"]

_OF_ENVS = ("metadata", "reward_range", "spec", "action_space", "observation_space")


class TianshouVectorEnv(_BaseVectorEnv):  # type: ignore[misc]  # Tianshou need not be installed where types are checked
    """A `BaseVectorEnv` of Tianshou 2: give it to a `Collector`, or to an experiment.

    Observations, rewards, flags and infos are those of `SubprocVectorEnv`, with "env_id". With `wait_num` or `timeout`
    it is asynchronous, as theirs: a step returns when `wait_num` envs are ready, or after `timeout` seconds with all
    that are ready, at least one. Errors are aioenv's: an exception of an env is an `EnvError` that names the slot, the
    end of a worker a `WorkerDied`. An error's slots are ready afterwards, as are those of its `partial`. After Ctrl-C
    or a `StepTimeout` in a `reset`, or in a `step` that is not asynchronous, the late results are dropped.

    Args:
        env_fns: a factory for each slot; or a vector env of `aioenv.sync` that has
            `autoreset_mode=AutoresetMode.DISABLED`, which `close` then closes, too.
        wait_num: how many envs a step waits for; None: all that it steps.
        timeout: how long a step waits, in seconds; None: without limit.
        **kwargs: for `aioenv.sync.VectorEnv`: `num_workers`, `timeout_s`, `restart` and so on.

    Raises:
        ValueError: if there is another autoreset mode, or `wait_num` or `timeout` is out of range.
        TypeError: if observations are Tuples, which Tianshou refuses, too.
        WorkerStartError, SpaceMismatchError: as `aioenv.sync.VectorEnv`.
    """

    def __init__(
        self,
        env_fns: Iterable[Callable[[], Env[Any, Any]]] | sync.VectorEnv,
        wait_num: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(env_fns, sync.VectorEnv):
            if kwargs:
                raise TypeError(f"{', '.join(kwargs)}: for the vector env that is given, when it is made")
            envs = env_fns
        else:
            envs = sync.VectorEnv(env_fns, **{"autoreset_mode": "Disabled", **kwargs})
        self._envs = envs
        try:
            if envs.autoreset_mode.value != "Disabled":
                raise ValueError(
                    "autoreset_mode: Tianshou resets envs itself, so it takes AutoresetMode.DISABLED, the vector env "
                    f"has {envs.autoreset_mode}"
                )
            if isinstance(envs.single_observation_space, spaces.Tuple):
                raise TypeError("single_observation_space: Tianshou does not take a Tuple; make it a Dict")
            self.env_num = n = envs.num_envs
            if wait_num is not None and not 1 <= wait_num <= n:
                raise ValueError(f"wait_num: expected 1 to {n}, got {wait_num}")
            if timeout is not None and timeout <= 0:
                raise ValueError(f"timeout: expected a positive number of seconds, got {timeout}")
            backend = envs._envs._backend
            if isinstance(backend, RequestScheduler):  # infos are split again, and each env's must be as it was
                backend.merge_infos = merge_infos_or_rows
        except BaseException:
            envs.close()
            raise
        self.wait_num = wait_num or n
        self.timeout = timeout
        self.is_async = self.wait_num != n or timeout is not None
        self.waiting_id: list[int] = []
        self.ready_id = list(range(n))
        self.is_closed = False
        self._interrupted = False  # whether a request may have left results that nothing waits for

    def __getattribute__(self, key: str) -> Any:
        """Attributes of the envs are lists of one a slot, as in `BaseVectorEnv`."""
        if key in _OF_ENVS:
            return self.get_env_attr(key)
        return object.__getattribute__(self, key)

    # ------------------------------------------------------------ attributes of envs

    def get_env_attr(self, key: str, id: Any = None) -> list[Any]:
        """Read an attribute of the envs of some slots, or of the outermost wrapper that has it; nothing is called.

        Raises:
            EnvError, WorkerDied: as `AsyncVectorEnv.call_at`.
        """
        slots = self._ready(id)
        if key in ("action_space", "observation_space"):
            return [getattr(self._envs, f"single_{key}")] * len(slots)
        return list(self._envs.call_at(slots, "get_wrapper_attr", key))

    def set_env_attr(self, key: str, value: Any, id: Any = None) -> None:
        """Set an attribute of the envs of some slots, where `AsyncVectorEnv.set_attr` would.

        Raises:
            EnvError, WorkerDied: as `AsyncVectorEnv.call_at`.
        """
        self._envs.call_at(self._ready(id), "set_wrapper_attr", key, value)

    # ------------------------------------------------------------ steps

    def reset(self, env_id: Any = None, **kwargs: Any) -> tuple[Any, np.ndarray[Any, Any]]:
        """Begin episodes in some slots.

        Args:
            env_id: a slot number, or some; None: all.
            **kwargs: `seed`, of each env, and `options`.

        Returns:
            Observations and infos, one a slot, in the order of `env_id`.

        Raises:
            EnvError, WorkerDied, StepTimeout: as `AsyncVectorEnv.recv`.
        """
        slots = self._ready(env_id)
        seed = kwargs.pop("seed", None)
        seeds: Any = [seed] * len(slots) if isinstance(seed, (int, np.integer)) else seed  # each env gets the same
        with self._request():
            if self.waiting_id:  # their results would come here, too, by `recv`
                ready = self._envs._portal.call(_reset_some, self._envs._envs, slots, seed=seeds, **kwargs)
            else:
                self._envs.send_reset(slots, seed=seeds, **kwargs)
                ready = self._envs.recv(min_slots=len(slots))
            obs, _, _, _, infos = self._results(ready, slots)
        return obs, _objects(infos)

    def step(self, action: Any, id: Any = None) -> tuple[Any, Any, Any, Any, np.ndarray[Any, Any]]:
        """Step some slots.

        Args:
            action: one for each of `id`, or a dict of batches for a Dict space; None, if this is asynchronous: take
                results alone.
            id: a slot number, or some; None: all.

        Returns:
            Observations, rewards, terminated, truncated and infos, one a slot: of `id`, in its order; or of the slots
            that are ready, if this is asynchronous, each named by "env_id" in its info.

        Raises:
            ValueError: if there is no action, and this is not asynchronous or no env is stepping.
            PausedError: if one of them is paused, or its env has no further episode. Nothing was sent.
            ActionError, EnvError, WorkerDied, StepTimeout, ResetNeededError: as `AsyncVectorEnv.send` and `recv`.
        """
        self._prepare()
        if action is None and not self.is_async:
            raise ValueError("action: expected actions, got None: wait_num= makes it asynchronous")
        if action is None and not self.waiting_id:
            raise ValueError("action: expected actions, got None, but no env is stepping whose result could be taken")
        with self._request():
            if not self.is_async:
                slots = [int(slot) for slot in self._wrap_id(id)]
                self._envs.send(_batch(self._envs.single_action_space, action), slots)
                ready = self._envs.recv(min_slots=len(slots))
            else:
                if action is not None:
                    slots = self._ready(id)
                    self.waiting_id += slots
                    self.ready_id = [slot for slot in self.ready_id if slot not in slots]
                    self._envs.send(_batch(self._envs.single_action_space, action), slots)
                ready = self._envs.recv(min(self.wait_num, len(self.waiting_id)), deadline_s=self.timeout)
                if not len(ready.slots):
                    ready = self._envs.recv()
                slots = ready.slots.tolist()
                self.waiting_id = [slot for slot in self.waiting_id if slot not in slots]
                self.ready_id += slots
        obs, reward, terminated, truncated, infos = self._results(ready, slots)
        for info, slot in zip(infos, slots, strict=True):
            info["env_id"] = slot
        return obs, reward, terminated, truncated, _objects(infos)

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        """Note what a request that fails leaves behind: slots that nothing will come from are ready again."""
        try:
            yield
        except BaseException:
            self._interrupted = True
            backend = self._envs._envs._backend
            assert backend is not None  # it was started
            busy = (SlotState.IN_FLIGHT, SlotState.READY)
            going = [slot for slot in self.waiting_id if backend.table.state(slot) in busy]
            self.ready_id += dict.fromkeys(slot for slot in self.waiting_id if slot not in going)  # each once
            self.waiting_id = going
            raise

    def _results(self, ready: Ready, slots: Sequence[int]) -> tuple[Any, Any, Any, Any, list[dict[str, Any]]]:
        """Return results in the order of `slots`, with observations as `np.stack` makes a batch of single ones."""
        order = np.searchsorted(ready.slots, slots)
        infos = row_infos(ready.info, len(slots))
        space, obs = self._envs.single_observation_space, ready.obs
        obs = obs[order] if isinstance(obs, np.ndarray) else _objects([_row(space, obs, i) for i in order])
        return obs, ready.reward[order], ready.terminated[order], ready.truncated[order], [infos[i] for i in order]

    # ------------------------------------------------------------ seeds, images, end

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[Any]:
        """Reset every slot with a seed of its own, as `SubprocVectorEnv` does; return the seeds.

        Args:
            seed: an int seeds slot i with `seed + i`; a list has a seed for each slot.
        """
        self._prepare()
        seeds = [seed] * self.env_num if seed is None else seed
        seeds = [seeds + slot for slot in range(self.env_num)] if isinstance(seeds, (int, np.integer)) else list(seeds)
        self._envs.reset(seed=seeds)
        return [[one] for one in seeds]

    def render(self, **kwargs: Any) -> list[Any]:
        """Return the images that the envs draw.

        Raises:
            RuntimeError: if envs are still stepping.
        """
        self._prepare()
        if self.waiting_id:
            raise RuntimeError(f"Environments {self.waiting_id} are still stepping, cannot render them now.")
        return list(self._envs.call("render", **kwargs))

    def close(self) -> None:
        """Close the vector env. Idempotent."""
        self.is_closed = True
        self._envs.close()

    def _prepare(self) -> None:
        """Drop what an interrupted request has left.

        Raises:
            ClosedError: if this is closed.
            StepTimeout: if late results don't come in time.
        """
        if self.is_closed:
            raise self._envs._portal.closed_error()
        if self._interrupted:
            self._envs._portal.call(_drop_results, self._envs._envs, keep=bool(self.waiting_id))
            self._interrupted = False

    def _ready(self, id: Any) -> list[int]:
        """Return slot numbers.

        Raises:
            ClosedError: if this is closed.
            AssertionError: if one is stepping, as theirs.
        """
        self._prepare()
        slots = [int(slot) for slot in self._wrap_id(id)]
        if self.is_async:
            self._assert_id(slots)
        return slots


async def _reset_some(
    envs: AsyncVectorEnv, slots: list[int], *, seed: Any = None, options: dict[str, Any] | None = None
) -> Ready:
    """Reset slots, and wait for them alone while others step.

    If this is cancelled, or times out, a later `_drop_results` drops the results.
    """
    seeds = [None] * len(slots) if seed is None else list(seed)
    if len(seeds) != len(slots):
        raise ValueError(f"seed: expected one for each of {len(slots)} envs, got {len(seeds)}")
    check_options(options)
    backend = envs._check_running()
    numbers = np.sort(backend.table.slot_numbers(slots))
    backend.table.leave_out_paused(numbers, "reset", by_name=True)
    group = backend.group(numbers)
    try:
        with envs._clock.envs:
            group.send_reset(group.slots, dict(zip(slots, seeds, strict=True)), options, "reset")
            outcome = await group.recv()
    finally:
        group.close()
    obs = backend.observations.assemble(outcome.obs, outcome.objects)
    infos = row_infos(backend.rollout_backend().merge(outcome.infos, by_slot=True), envs.num_envs)
    info = RowDicts({row: infos[slot] for row, slot in enumerate(group.slots.tolist())})
    ready = Ready(group.slots, obs, outcome.reward, outcome.terminated, outcome.truncated, info)
    if outcome.error is not None:
        raise SlotError.join(list(outcome.error.errors), ready)
    return ready


async def _drop_results(envs: AsyncVectorEnv, *, keep: bool) -> None:
    """Wait for results that an interrupted request has left, and drop them; `keep` those of steps under way."""
    await envs._check_running().drain()
    while not keep and envs.outstanding:
        with contextlib.suppress(SlotError):  # its slots have to be reset, which the next step says
            await envs.recv()


def _batch(space: Space[Any], actions: Any, path: str = "") -> Any:
    """Return actions of a Dict or Tuple space, one a slot, as a batch; others as they are.

    Raises:
        ActionError: if one of them does not have the parts of the space.
    """
    if not isinstance(actions, (list, tuple, np.ndarray)):
        return actions  # a dict of batches
    if isinstance(space, spaces.Dict):
        keys = sorted(space.spaces)
        for one in actions:
            if not isinstance(one, Mapping) or one.keys() != space.spaces.keys():
                raise ActionError(f"actions{path}: expected a dict of {keys} for each slot, got {one!r}")
        return {key: _batch(space[key], [one[key] for one in actions], f"{path}[{key!r}]") for key in keys}
    if isinstance(space, spaces.Tuple):
        for one in actions:
            if not isinstance(one, (tuple, list, np.ndarray)) or len(one) != len(space.spaces):
                raise ActionError(f"actions{path}: expected a tuple of {len(space.spaces)} for each slot, got {one!r}")
        parts = enumerate(space.spaces)
        return tuple(_batch(part, [one[i] for one in actions], f"{path}[{i}]") for i, part in parts)
    return actions


def _row(space: Space[Any], batch: Any, row: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _row(part, batch[key], row) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):  # batches of Text, Graph and Sequence spaces are tuples, too: of the slots
        return tuple(_row(part, column, row) for part, column in zip(space.spaces, batch, strict=True))
    return batch[row]


def _objects(items: list[Any]) -> np.ndarray[Any, Any]:
    """Return an array of objects."""
    array = np.empty(len(items), object)
    array[:] = items
    return array
