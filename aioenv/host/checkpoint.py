"""Checkpoints: what a MuJoCo env is, in a row of float64, so that it can go on in another process.

A checkpoint is not all that an env is: derived fields (`xpos`, `cfrc_ext`, …) are left out, though some tasks' next
reward reads them. Who resumes an env restores the checkpoint *before* its last operation and does that again: then
they are there too, and the checkpoint after shows whether all is as it was.

    1 | physics (mjSTATE_INTEGRATION) | counters of wrappers | what the autoreset owes | 1, PCG64 state (5 words)

The random generator's words are raw bits that only look like float64: they are copied, never calculated with.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Env, wrappers

__all__ = ["Checkpoint", "Obstacle"]

Row = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

# What wrappers of Gymnasium know of an episode. One that is in neither list may know anything.
COUNTERS: dict[type, dict[str, type]] = {
    wrappers.TimeLimit: {"_elapsed_steps": int},
    wrappers.OrderEnforcing: {"_has_reset": bool},
    wrappers.RecordEpisodeStatistics: {"episode_count": int, "episode_returns": float, "episode_lengths": int},
}
# What others do once, and had done before the process that resumes.
DONE: dict[type, tuple[str, ...]] = {
    wrappers.PassiveEnvChecker: ("checked_reset", "checked_step", "checked_data_reuse"),
}
# The functions that some of these are given are taken to be pure.
STATELESS = frozenset(
    {
        wrappers.ClipAction,
        wrappers.ClipReward,
        wrappers.DiscretizeAction,
        wrappers.DiscretizeObservation,
        wrappers.DtypeObservation,
        wrappers.FilterObservation,
        wrappers.FlattenObservation,
        wrappers.GrayscaleObservation,
        wrappers.RescaleAction,
        wrappers.RescaleObservation,
        wrappers.ReshapeObservation,
        wrappers.ResizeObservation,
        wrappers.TransformAction,
        wrappers.TransformObservation,
        wrappers.TransformReward,
    }
)
_RNG_WORDS = 5  # state, increment (128 bits each), and half a word that may be left over, with a flag
_ABSENT = -1.0  # a counter that is None


class Obstacle(Exception):
    """An env can't be resumed; the message says why."""


class Checkpoint:
    """Reads and restores the checkpoint of one env.

    Args:
        env: a MuJoCo env, in known wrappers.

    Attributes:
        size: how many float64 it takes.

    Raises:
        Obstacle: if the env is none of Gymnasium's kind of MuJoCo env, or a wrapper is not known.
    """

    def __init__(self, env: Env[Any, Any]) -> None:
        mujoco = sys.modules.get("mujoco")
        self._base: Any = env.unwrapped
        self._model, self._data = getattr(self._base, "model", None), getattr(self._base, "data", None)
        if mujoco is None or not isinstance(self._model, mujoco.MjModel) or not isinstance(self._data, mujoco.MjData):
            raise Obstacle(f"{type(self._base).__name__} is not a MuJoCo env (it has no `model` and `data`)")
        self._mujoco: Any = mujoco
        self._counters: list[tuple[Any, str, type]] = []
        self._done: list[tuple[Any, str]] = []
        while env is not self._base:
            kind: type = type(env)
            if kind not in COUNTERS and kind not in STATELESS and kind not in DONE:
                raise Obstacle(f"nobody knows what its wrapper {kind.__name__} remembers between steps")
            self._counters += [(env, name, as_type) for name, as_type in COUNTERS.get(kind, {}).items()]
            self._done += [(env, name) for name in DONE.get(kind, ())]
            env = env.env  # type: ignore[attr-defined]
        self._signature = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        physics = mujoco.mj_stateSize(self._model, self._signature)
        self._physics = slice(1, 1 + physics)
        self._counts = slice(1 + physics, 1 + physics + len(self._counters))
        self._due = self._counts.stop
        self._has_rng = self._due + 1
        self._words = slice(self._has_rng + 1, self._has_rng + 1 + _RNG_WORDS)
        self.size = self._words.stop
        self._generator: Any = None  # the one that `_raw` is of
        self._raw: tuple[Words, Words] | None = None
        self.bind(np.zeros(self.size))

    def bind(self, out: Row) -> None:
        """Let `read` write into `out`, of shape `(size or more,)`."""
        self._out = out
        self._out_physics = out[self._physics]
        self._out_words = out[self._words].view(np.uint64)
        self._generator = None

    def read(self, due: int) -> None:
        """Write the checkpoint to where it is bound; `due`: what the autoreset owes (a small int)."""
        out = self._out
        out[0] = 1.0
        self._mujoco.mj_getState(self._model, self._data, self._out_physics, self._signature)
        index = self._counts.start
        for wrapper, name, _ in self._counters:
            value = getattr(wrapper, name)
            out[index] = _ABSENT if value is None else value
            index += 1
        out[self._due] = due
        generator = self._base._np_random
        if generator is None:
            out[self._has_rng] = 0.0
            return
        if generator is not self._generator:
            self._generator = generator
            self._raw = _raw_words(generator.bit_generator)
            out[self._has_rng] = 1.0
        if self._raw is None:
            self._out_words[:] = _words(generator.bit_generator)
        else:
            self._out_words[:4], self._out_words[4:] = self._raw

    def restore(self, row: Row) -> int:
        """Make the env what a checkpoint says; gives what the autoreset owes. Derived fields are not those of then."""
        if row[0] != 1.0:  # there was nothing before
            return 0
        physics = np.ascontiguousarray(row[self._physics])
        self._mujoco.mj_setState(self._model, self._data, physics, self._signature)
        self._mujoco.mj_forward(self._model, self._data)
        self._mujoco.mj_setState(self._model, self._data, physics, self._signature)
        for (wrapper, name, as_type), value in zip(self._counters, row[self._counts], strict=True):
            setattr(wrapper, name, None if value == _ABSENT else as_type(value))
        for wrapper, name in self._done:
            setattr(wrapper, name, True)
        if row[self._has_rng]:
            _set_words(self._base.np_random.bit_generator, row[self._words].view(np.uint64))
        return int(row[self._due])

    def difference(self, expected: Row, row: Row) -> str | None:
        """What differs between two checkpoints, bit by bit; None if nothing does."""
        theirs, mine = expected[: self.size].view(np.uint64), row[: self.size].view(np.uint64)
        where = np.flatnonzero(theirs != mine)
        if not len(where):
            return None
        index = int(where[0])
        if self._physics.start <= index < self._physics.stop:
            what = f"element {index - self._physics.start} of its physics state"
        elif self._counts.start <= index < self._counts.stop:
            wrapper, name, _ = self._counters[index - self._counts.start]
            what = f"{type(wrapper).__name__}.{name}"
        elif index == self._due:
            what = "what its autoreset owes"
        else:
            return "its random generator is in another state after its last operation was repeated"
        return f"{what} is {row[index]!r} instead of {expected[index]!r} after its last operation was repeated"


def _words(bits: Any) -> npt.NDArray[np.uint64]:
    """The state of a PCG64 generator as five words."""
    state = bits.state
    numbers, mask = state["state"], (1 << 64) - 1
    return np.array(
        [
            numbers["state"] & mask,
            numbers["state"] >> 64,
            numbers["inc"] & mask,
            numbers["inc"] >> 64,
            state["has_uint32"] | state["uinteger"] << 32,
        ],
        np.uint64,
    )


def _set_words(bits: Any, words: npt.NDArray[np.uint64]) -> None:
    low, high, inc_low, inc_high, rest = (int(word) for word in words)
    bits.state = {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": inc_high << 64 | inc_low},
        "has_uint32": rest & 0xFFFFFFFF,
        "uinteger": rest >> 32,
    }


class _Pcg64(ctypes.Structure):
    """numpy's `pcg64_state`: a pointer to state and increment; then the flag, and the half word."""

    _fields_ = (("numbers", ctypes.c_void_p), ("has_uint32", ctypes.c_int), ("uinteger", ctypes.c_uint32))


def _raw_words(bits: Any) -> tuple[Words, Words] | None:
    """The same words as two views of numpy's own memory, to be read in a tenth of the time; None if that can't be.

    The layout is numpy's business: the views are only used where they read as `_words` does.
    """
    try:
        address = bits.ctypes.state_address
        numbers = (ctypes.c_uint64 * 4).from_address(_Pcg64.from_address(address).numbers)
        rest = (ctypes.c_uint64 * 1).from_address(address + _Pcg64.has_uint32.offset)
        views = np.ctypeslib.as_array(numbers), np.ctypeslib.as_array(rest)
        expected = _words(bits)
    except (AttributeError, TypeError, ValueError, KeyError):
        return None
    return views if np.concatenate(views).tolist() == expected.tolist() else None
