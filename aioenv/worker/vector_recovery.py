"""Recover a vector env whose worker died: continue from checkpoints, or reset the lost episodes.

A checkpoint is a row of words for each slot. It holds the whole state, so no step is replayed. All slots are written
and restored at once, so they may have state in common.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from aioenv.ipc.messages import LostRow, dump
from aioenv.state.snapshot import Misfit
from aioenv.worker.vector_access import reset_vector_env, step_result, steps_some
from aioenv.worker.vector_states import find_layer, has_states

__all__ = ["Infos", "LostEnvReset", "Resumable", "VectorCheckpoints"]

Rows = npt.NDArray[np.float64]

# the words of a row: first these, then the env's own words, or the length of a pickle and the pickle
_STATUS, _CLOCK, _ENDED, _ENV = 0, 1, 2, 3
_VALID, _UNREADABLE, _NOT_STARTED = 1, 2, 3
_MISSING = {
    0: "there is no state",
    _UNREADABLE: "its state could not be read",
    _NOT_STARTED: "not all of its slots had begun an episode since it was started again",
}


class Resumable(Protocol):
    """A vector env, or a wrapper of one, that writes cheap checkpoints of all slots.

    Checkpoints are written with every step, as 64-bit words that are copied and compared but never calculated with.
    State that all slots have in common stands in each row. An env with `get_state` and `set_state` alone (see
    `StatefulVectorEnv`) can be resumed, too: then `get_state` is called with every step.
    """

    checkpoint_size: int  # float64s of a row; constant once the env is made

    def get_checkpoints(self, out: Rows) -> None:
        """Write the states of all slots into `out`, `(num_envs, checkpoint_size)`; also before the first reset."""

    def set_checkpoints(self, rows: Rows, newest: int) -> None:
        """Bring all slots into the states of rows that `get_checkpoints` wrote.

        Rows may have been written at different times, if some of the slots were reset last. So the state that slots
        have in common comes from row `newest`.
        """


class VectorCheckpoints:
    """The checkpoints of all slots of a vector env.

    Args:
        env: the vector env, with its wrappers.

    Attributes:
        size: the number of words of a row; 0 if the env can't be resumed.
        obstacle: why the env can't be resumed.
        array: float64 `(num_envs, size)`, once laid out.
        overflow: (row, pickle) of those captured last whose pickle did not fit.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self._n = env.num_envs
        self.size = 0
        self.obstacle: str | None = None
        self.overflow: Sequence[tuple[int, bytes]] = ()
        self._clock = 0
        try:
            self._holder = find_layer(env, lambda layer: has_states(layer) or _has_checkpoints(layer))
        except Misfit as exc:
            self.obstacle = str(exc)
            return
        self._pickles = not _has_checkpoints(self._holder)
        try:
            if self._pickles:
                self._least = _ENV + 1
                self.size = self._least + (2 * max(map(len, self._pack())) + 512) // 8  # states may grow a little
            else:
                self._least = self.size = _ENV + int(self._holder.checkpoint_size)
                self._holder.get_checkpoints(np.zeros((self._n, self.size - _ENV)))
        except Exception as exc:
            kind, name = type(self._holder).__name__, "get_state" if self._pickles else "get_checkpoints"
            self.size, self.obstacle = 0, f"{name} of {kind} raises before the first reset: {exc!r}"

    def lay_out(self, size: int) -> None:
        """Make rows of so many words, and write the first checkpoints.

        Raises:
            ValueError: if there are too few words.
        """
        if not self.size or size < self._least:
            why = f"it needs {self._least}" if self.size else self.obstacle
            raise ValueError(f"this vector env has no checkpoint of {size} words: {why}")
        self.array = np.zeros((self._n, size))
        self._words = self.array.view(np.uint64)
        # without the padding for envs that need more
        self._mine = self.array[:, _ENV:] if self._pickles else self.array[:, _ENV : self.size]
        self.capture(np.zeros(self._n, np.bool_), complete=True)

    def capture(self, ended: npt.NDArray[np.bool_], *, complete: bool) -> None:
        """Write the current states of all slots; this does not raise.

        Args:
            ended: whether each slot's episode has just ended.
            complete: False if some slots have no episode yet, so that these checkpoints can't be resumed.
        """
        words = self._words
        self._clock += 1
        words[:, _STATUS] = _NOT_STARTED
        if not complete:
            return
        words[:, _CLOCK] = self._clock
        words[:, _ENDED] = ended
        try:
            if self._pickles:
                self._write_pickles()
            else:
                self._holder.get_checkpoints(self._mine)
            words[:, _STATUS] = _VALID
        except Exception:
            words[:, _STATUS] = _UNREADABLE

    def _pack(self) -> list[bytes]:
        states = self._holder.get_state(list(range(self._n)))
        if len(states) != self._n:
            raise ValueError(f"it gave {len(states)} states for {self._n} slots")
        return [dump(state) for state in states]

    def _write_pickles(self) -> None:
        room = self._mine[:, 1:].view(np.uint8)
        self.overflow = overflow = []
        for row, data in enumerate(self._pack()):
            self._words[row, _ENV] = len(data)
            if len(data) > room.shape[1]:
                overflow.append((row, data))
            else:
                room[row, : len(data)] = np.frombuffer(data, np.uint8)

    def row(self, row: int) -> tuple[Rows, bytes | None]:
        """Return the last checkpoint of a row, and the pickle that did not fit in."""
        return self.array[row], dict(self.overflow).get(row)

    def restore(self, rows: Rows, overflow: Sequence[bytes | None]) -> npt.NDArray[np.bool_]:
        """Bring all slots into the states of another env's checkpoints; return whether each slot's episode has ended.

        Raises:
            ValueError: if they hold no states, or the env is in other states afterwards; the message says why.
        """
        words = np.ascontiguousarray(rows).view(np.uint64)
        for status in words[:, _STATUS].tolist():
            if status != _VALID:
                raise ValueError(_MISSING.get(status, "these are no checkpoints"))
        newest = int(words[:, _CLOCK].argmax())
        self._clock = int(words[newest, _CLOCK])
        if self._pickles:
            self._holder.set_state([self._unpack(*pair) for pair in zip(words, overflow, strict=True)], range(self._n))
        else:
            self._holder.set_checkpoints(words[:, _ENV : self.size].view(np.float64), newest)
        ended = words[:, _ENDED].astype(np.bool_)
        self.capture(ended, complete=True)
        if not self._pickles:  # the same state may pickle in two ways
            self._compare(words, newest)
        return ended

    def _unpack(self, words: npt.NDArray[np.uint64], overflow: bytes | None) -> Any:
        length = int(words[_ENV])
        room = words[_ENV + 1 :].view(np.uint8)
        data = room[:length].tobytes() if length <= len(room) else overflow
        if data is None:
            raise ValueError(f"the {length} bytes of a state are missing")
        return pickle.loads(data)

    def _compare(self, words: npt.NDArray[np.uint64], newest: int) -> None:
        """Check that the newest rows are restored exactly."""
        last = words[:, _CLOCK] == words[newest, _CLOCK]
        differs = np.argwhere((self._words != words)[last, _ENV : self.size])
        if len(differs):
            raise ValueError(
                f"get_checkpoints of {type(self._holder).__name__} does not tell what set_checkpoints was given: word "
                f"{differs[0][1]} of {self.size - _ENV}"
            )


def _has_checkpoints(layer: Any) -> bool:
    """Return whether a layer writes checkpoints, and no subclass of it has states, which they would lack."""
    names = "get_checkpoints", "set_checkpoints"
    if not all(callable(getattr(layer, name, None)) for name in names):
        return False
    return not has_states(layer) or _depth(layer, "get_checkpoints") <= _depth(layer, "get_state")


def _depth(layer: Any, name: str) -> int:
    """Return how far up the MRO of a layer the class is that defines a name."""
    return next((depth for depth, kind in enumerate(type(layer).__mro__) if name in vars(kind)), 0)


# ------------------------------------------------------------ resets of lost envs


# Infos of a vector env, each with the rows that it is about.
Infos = Sequence[tuple[Mapping[Any, Any], Sequence[int]]]

# The replacement of a row's next step: none; a reset; the end of the lost episode.
_NOT, _RESET, _LOST = 0, 1, 2


class LostEnvReset:
    """Ends lost episodes in the next step of their rows, and starts new ones as the env's autoreset mode requires.

    Usually all rows are lost at once, and the env is not stepped before it is reset. Where some rows were reset
    meanwhile, the env steps for those, and the others are reset by a mask.

    Args:
        env: the new vector env.
        lost: its rows that had begun an episode. A row whose episode was over has lost a new episode without steps.

    Attributes:
        started: for each row whether this env has started an episode in it or was put into a state. The state of
            another row is not the one of its last observation.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], lost: Iterable[LostRow]) -> None:
        self._env = env
        self._mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._pending = np.zeros(env.num_envs, np.int8)
        self._obs: dict[int, Any] = {}
        self._seed: int | None = None
        self._untouched = True  # the env was never reset
        self.started = np.zeros(env.num_envs, np.bool_)
        for row, seed, obs, *_ in lost:
            self._pending[row] = _LOST
            self._obs[row] = obs
            if self._seed is None and seed is not None:
                self._seed = seed  # one seed for all: a vector env spreads it over its slots

    @property
    def done(self) -> bool:
        """Whether the env can be stepped without this object from now on."""
        return bool(self.started.all()) and not self._pending.any()

    def is_lost(self, row: int) -> bool:
        """Return whether the next step of a row is the end of a lost episode."""
        return bool(self._pending[row] == _LOST)

    @property
    def last_obs(self) -> Any:
        """The last observations of all rows, as a batch; None if some rows are not lost."""
        if len(self._obs) < len(self._pending):
            return None
        return self._mixed(self._pending == _LOST, [self._obs[row] for row in range(len(self._pending))], None)

    def mark_started(self, rows: Sequence[int]) -> None:
        """Note that rows were reset or put into a state."""
        self._pending[list(rows)] = _NOT
        self.started[list(rows)] = True
        self._untouched &= not rows

    def prepare_states(self) -> None:
        """Reset an env that was never reset, before rows are put into states: the other rows are stepped along.

        The seed is kept: if no state fits, the next reset uses it again.
        """
        if self._untouched:
            self._env.reset(seed=self._seed)

    def reset(
        self, seed: Any, mask: npt.NDArray[np.bool_] | None, options: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all rows, or those in a mask."""
        if self._untouched:
            first, self._seed = self._seed, None
            if mask is None:
                seed = first if seed is None else seed
            else:  # rows that are stepped along must have started, too
                self._env.reset(seed=first)
        result = reset_vector_env(self._env, seed, mask, options)
        self.mark_started(np.flatnonzero(self._pending >= 0 if mask is None else mask).tolist())
        return result

    def step(self, actions: Any, rows: Sequence[int] | None = None) -> tuple[Any, Any, Any, Any, Infos]:
        """Step all rows, or some if the env can step some; return what its `step` does, with the infos by row."""
        n = self._env.num_envs
        asked = np.ones(n, np.bool_)
        if rows is not None:
            asked[:] = False
            asked[list(rows)] = True
        lost, resets = asked & (self._pending == _LOST), asked & (self._pending == _RESET)
        rest = asked & ~(lost | resets)
        obs, infos = None, []
        reward: npt.NDArray[Any] = np.zeros(n)
        terminated: npt.NDArray[Any] = np.zeros(n, np.bool_)
        truncated: npt.NDArray[Any] = np.zeros(n, np.bool_)
        if rest.any():
            alone = not rest.all() and steps_some(self._env)
            step = partial(self._env.step_some, slots=np.flatnonzero(rest)) if alone else self._env.step  # type: ignore[attr-defined]
            obs, *columns, info = step_result(step(actions))
            reward, terminated, truncated = (np.where(rest, column, 0) for column in columns)
            infos.append((info, np.flatnonzero(rest).tolist()))
        at_once = self._mode is AutoresetMode.SAME_STEP
        new = resets | lost if at_once else resets
        if new.any():
            fresh, info = self.reset(None, None if new.all() else new, None)
            obs = fresh if obs is None else self._mixed(new, fresh, obs)
            infos.append((info, np.flatnonzero(new).tolist()))
        if lost.any():
            old = [self._obs.pop(row, None) if lost[row] else self._obs.get(row) for row in range(n)]
            truncated = truncated | lost
            infos.append((_restarted(lost, old if at_once else None), np.flatnonzero(lost).tolist()))
            if not at_once:
                obs = self._mixed(lost, old, obs)
                self._pending[lost] = _RESET if self._mode is AutoresetMode.NEXT_STEP else _NOT
        return obs, reward, terminated.astype(np.bool_), truncated.astype(np.bool_), infos

    def _mixed(self, mask: npt.NDArray[np.bool_], ours: Any, theirs: Any) -> Any:
        """Return a batch of observations: `ours` where the mask is True, else `theirs`, a batch or None."""
        space, single, n = self._env.observation_space, self._env.single_observation_space, len(mask)
        mine = ours if isinstance(ours, list) else list(iterate(space, ours))
        rest = mine if theirs is None else list(iterate(space, theirs))
        each = [mine[row] if mask[row] else rest[row] for row in range(n)]
        if theirs is None:  # the other rows are not used
            each = [mine[int(mask.argmax())] if item is None else item for item in each]
        return concatenate(single, each, create_empty_array(single, n=n))  # type: ignore[arg-type]


def _restarted(lost: npt.NDArray[np.bool_], final_obs: Sequence[Any] | None) -> dict[str, Any]:
    """Return the info of the last step of lost episodes."""
    info: dict[str, Any] = {"restarted": lost.copy(), "_restarted": lost}
    if final_obs is not None:
        objects = np.empty(len(lost), object)
        for row, obs in enumerate(final_obs):
            objects[row] = obs
        info = {**info, "final_obs": objects, "_final_obs": lost, "final_info": dict(info), "_final_info": lost}
    return info
