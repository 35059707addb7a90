"""Checkpoints of a vector env: what it takes to go on after a worker's death, a row of words for each of its slots.

They are the whole of its state, so nothing is done again. All slots are written and restored at once, so they may have
things in common.
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

# the words of a row: first these, then what the env wrote, or the length of a pickle and the pickle
_STATUS, _CLOCK, _OVER, _ENV = 0, 1, 2, 3
_VALID, _UNREADABLE, _ANEW = 1, 2, 3
_MISSING = {
    0: "there is no state",
    _UNREADABLE: "its state could not be read",
    _ANEW: "not all of its slots had begun an episode since it was started again",
}


class Resumable(Protocol):
    """What a vector env (or a wrapper of one, for all that is in it) may have to be resumed cheaply.

    It is for any number of slots what `get_state` and `set_state` are for some (see `Stateful`), but written with every
    step, as 64-bit words which are copied and compared, and never calculated with. What all slots have in common stands
    in each row. An env that has only `get_state` and `set_state` can be resumed too: those are called with every step.
    """

    checkpoint_size: int  # how many float64 a row has; once the env is made it does not change

    def get_checkpoints(self, out: Rows) -> None:
        """Write the states of all slots into `out`, `(num_envs, checkpoint_size)`; before the first reset too."""

    def set_checkpoints(self, rows: Rows, newest: int) -> None:
        """Bring all slots into the states of such rows.

        They were not all written at the same time where a part of the slots was reset last: what slots have in common
        is to be taken from row `newest`.
        """


class VectorCheckpoints:
    """The checkpoints of all slots of a vector env.

    Args:
        env: the vector env, with its wrappers.

    Attributes:
        size: how many words a row would have; 0 if the env can't be resumed.
        obstacle: why not.
        array: float64 `(num_envs, size)`, once laid out.
        beyond: rows, and what did not fit into them when they were captured last.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self._n = env.num_envs
        self.size = 0
        self.obstacle: str | None = None
        self.beyond: Sequence[tuple[int, bytes]] = ()
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
        """Make rows of so many words, and write the first ones.

        Raises:
            ValueError: if they don't suffice.
        """
        if not self.size or size < self._least:
            why = f"it needs {self._least}" if self.size else self.obstacle
            raise ValueError(f"this vector env has no checkpoint of {size} words: {why}")
        self.array = np.zeros((self._n, size))
        self._words = self.array.view(np.uint64)
        # without padding, if another env needs more
        self._mine = self.array[:, _ENV:] if self._pickles else self.array[:, _ENV : self.size]
        self.capture(np.zeros(self._n, np.bool_), whole=True)

    def capture(self, over: npt.NDArray[np.bool_], *, whole: bool) -> None:
        """Write the state that all slots are in now; does not raise.

        Args:
            over: whose episode has just ended.
            whole: False if some have not begun, so that nobody could go on from here.
        """
        words = self._words
        self._clock += 1
        words[:, _STATUS] = _ANEW
        if not whole:
            return
        words[:, _CLOCK] = self._clock
        words[:, _OVER] = over
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
        self.beyond = beyond = []
        for row, data in enumerate(self._pack()):
            self._words[row, _ENV] = len(data)
            if len(data) > room.shape[1]:
                beyond.append((row, data))
            else:
                room[row, : len(data)] = np.frombuffer(data, np.uint8)

    def row(self, row: int) -> tuple[Rows, bytes | None]:
        """What was captured of a row last, and what did not fit in."""
        return self.array[row], dict(self.beyond).get(row)

    def restore(self, rows: Rows, beyond: Sequence[bytes | None]) -> npt.NDArray[np.bool_]:
        """Bring all slots into the states of rows that were captured elsewhere; whose episodes have just ended.

        Raises:
            ValueError: if they hold no states, or the env is in others afterwards; the message says why.
        """
        words = np.ascontiguousarray(rows).view(np.uint64)
        for status in words[:, _STATUS].tolist():
            if status != _VALID:
                raise ValueError(_MISSING.get(status, "these are no checkpoints"))
        newest = int(words[:, _CLOCK].argmax())
        self._clock = int(words[newest, _CLOCK])
        if self._pickles:
            self._holder.set_state([self._unpack(*pair) for pair in zip(words, beyond, strict=True)], range(self._n))
        else:
            self._holder.set_checkpoints(words[:, _ENV : self.size].view(np.float64), newest)
        over = words[:, _OVER].astype(np.bool_)
        self.capture(over, whole=True)
        if not self._pickles:  # the same state may pickle in two ways
            self._compare(words, newest)
        return over

    def _unpack(self, words: npt.NDArray[np.uint64], beyond: bytes | None) -> Any:
        length = int(words[_ENV])
        room = words[_ENV + 1 :].view(np.uint8)
        data = room[:length].tobytes() if length <= len(room) else beyond
        if data is None:
            raise ValueError(f"the {length} bytes of a state are missing")
        return pickle.loads(data)

    def _compare(self, words: npt.NDArray[np.uint64], newest: int) -> None:
        """See that the rows that were written last came out as they were."""
        last = words[:, _CLOCK] == words[newest, _CLOCK]
        differs = np.argwhere((self._words != words)[last, _ENV : self.size])
        if len(differs):
            raise ValueError(
                f"get_checkpoints of {type(self._holder).__name__} does not tell what set_checkpoints was given: word "
                f"{differs[0][1]} of {self.size - _ENV}"
            )


def _has_checkpoints(layer: Any) -> bool:
    """Whether a layer has them, and no subclass has states of its own, which they would know nothing of."""
    names = "get_checkpoints", "set_checkpoints"
    if not all(callable(getattr(layer, name, None)) for name in names):
        return False
    return not has_states(layer) or _depth(layer, "get_checkpoints") <= _depth(layer, "get_state")


def _depth(layer: Any, name: str) -> int:
    """How many subclasses there are of the one that has defined something."""
    return next((depth for depth, kind in enumerate(type(layer).__mro__) if name in vars(kind)), 0)


# ------------------------------------------------------------ resets of lost envs


# Infos of a vector env, and the rows that they are of.
Infos = Sequence[tuple[Mapping[Any, Any], Sequence[int]]]

# Instead of a step, a row's next step is: nothing else; a reset; the end of the episode that was lost.
_NOT, _RESET, _LOST = 0, 1, 2


class LostEnvReset:
    """Tells the ends of lost episodes in the next step of their rows, and begins others as the env's mode wants it.

    As a rule all rows are lost at once, and the env is not stepped before it is reset. Where some have been reset by
    themselves meanwhile, it steps for those, and the others are reset by a mask.

    Args:
        env: the new vector env.
        lost: its rows that had begun an episode. Those whose episode was over have lost one without any step.

    Attributes:
        begun: for each row whether this env has begun an episode in it, or was put into a state: else it does not show
            what is told of the row.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], lost: Iterable[LostRow]) -> None:
        self._env = env
        self._mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._due = np.zeros(env.num_envs, np.int8)
        self._obs: dict[int, Any] = {}
        self._seed: int | None = None
        self._untouched = True  # whether the env was never reset
        self.begun = np.zeros(env.num_envs, np.bool_)
        for row, seed, obs, _, _ in lost:
            self._due[row] = _LOST
            self._obs[row] = obs
            if self._seed is None and seed is not None:
                self._seed = seed  # one for all: a vector env spreads it over its slots itself, if it has one each

    @property
    def is_over(self) -> bool:
        """Whether the env can be stepped from now on as any other."""
        return bool(self.begun.all()) and not self._due.any()

    @property
    def last_obs(self) -> Any:
        """The last observations of all rows, as a batch; None if some are not lost."""
        if len(self._obs) < len(self._due):
            return None
        return self._mixed(self._due == _LOST, [self._obs[row] for row in range(len(self._due))], None)

    def go_on(self, rows: Sequence[int]) -> None:
        """These rows have been reset, or put into a state."""
        self._due[list(rows)] = _NOT
        self.begun[list(rows)] = True
        self._untouched = False

    def reset(
        self, seed: Any, mask: npt.NDArray[np.bool_] | None, options: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all rows, or those of a mask."""
        if self._untouched:
            first, self._seed = self._seed, None
            if mask is None:
                seed = first if seed is None else seed
            else:  # what it steps beside the others must have begun, too
                self._env.reset(seed=first)
        result = reset_vector_env(self._env, seed, mask, options)
        self.go_on(np.flatnonzero(self._due >= 0 if mask is None else mask).tolist())
        return result

    def step(self, actions: Any, rows: Sequence[int] | None = None) -> tuple[Any, Any, Any, Any, Infos]:
        """What a step of all rows gives, or of some (where the env can do that)."""
        n = self._env.num_envs
        asked = np.ones(n, np.bool_)
        if rows is not None:
            asked[:] = False
            asked[list(rows)] = True
        lost, resets = asked & (self._due == _LOST), asked & (self._due == _RESET)
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
                self._due[lost] = _RESET if self._mode is AutoresetMode.NEXT_STEP else _NOT
        return obs, reward, terminated.astype(np.bool_), truncated.astype(np.bool_), infos

    def _mixed(self, mask: npt.NDArray[np.bool_], ours: Any, theirs: Any) -> Any:
        """A batch of observations: where the mask is True `ours`, else `theirs`, which is a batch, or None."""
        space, single, n = self._env.observation_space, self._env.single_observation_space, len(mask)
        mine = ours if isinstance(ours, list) else list(iterate(space, ours))
        rest = mine if theirs is None else list(iterate(space, theirs))
        each = [mine[row] if mask[row] else rest[row] for row in range(n)]
        if theirs is None:  # nobody looks at the others
            each = [mine[int(mask.argmax())] if item is None else item for item in each]
        return concatenate(single, each, create_empty_array(single, n=n))  # type: ignore[arg-type]


def _restarted(lost: npt.NDArray[np.bool_], final_obs: Sequence[Any] | None) -> dict[str, Any]:
    """The info of the last step of lost episodes."""
    info: dict[str, Any] = {"restarted": lost.copy(), "_restarted": lost}
    if final_obs is not None:
        objects = np.empty(len(lost), object)
        for row, obs in enumerate(final_obs):
            objects[row] = obs
        info = {**info, "final_obs": objects, "_final_obs": lost, "final_info": dict(info), "_final_info": lost}
    return info
