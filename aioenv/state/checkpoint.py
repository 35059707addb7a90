"""Checkpoints: the state to continue from after a worker's death, as a row of 64-bit words that each reply carries.

A row holds MuJoCo's integration state, not the values derived from it. So the checkpoint *before* an operation and the
operation itself are kept. Replaying the operation restores the derived quantities, which the next reward may depend on.
The checkpoint *after* it tells whether the replay was exact. Words are copied and compared but never calculated with:
some are float64, some integers, some neither.

The state that an env returns itself is pickled, and its length may change. A row has room for twice the first length; a
longer pickle overflows, and is sent beside the row.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Env

from aioenv.ipc.messages import dump
from aioenv.mujoco_versions import lets_sleep
from aioenv.spaces.seeding import generator_from_words, live_state, seed_from_words, seed_words, state_words
from aioenv.state.model_edits import ModelEdits, may_edit
from aioenv.state.snapshot import KINDS, REMEDY, inspect_stack, mark_in_progress, python_values

__all__ = ["Checkpoints", "RowCheckpoint"]

Words = npt.NDArray[np.uint64]

# the words of a row: first these, then two for each counter, then the physics or the pickled states
_STATUS, _PENDING_RESET, _RNG, _SEED, _PYTHON, _MODEL, _REST = 0, 1, 2, 7, 10, 11, 12
_NAMES = ("status", "autoreset due", *["rng"] * 5, *["seed"] * 3, "Python attributes", "the model")
_VALID = 1
_MISSING = {
    0: "there is no state",
    2: "its random generator is not PCG64",
    3: "a wrapper counts in something that is no number",
    5: "its state could not be read",
}
_WORD = struct.Struct("<q")
_FLOAT = struct.Struct("<d")


class _NotRepresentable(Exception):
    """A state can't be written as words; the argument is the status."""


class RowCheckpoint:
    """Writes the state of one env as words, and restores it.

    Args:
        env: the env, with its wrappers.

    Attributes:
        size: the number of words of a row; 0 if the env can't be resumed.
        least: the number of words that a row must have.
        obstacle: why the env can't be resumed.
        overflow: the pickle that was written last if it did not fit into the row; else None.
    """

    def __init__(self, env: Env[Any, Any]) -> None:
        self._env = env
        stack = inspect_stack(env)
        self._base: Any = stack.base
        self._own = stack.own
        self._physics = stack.physics
        self.obstacle = stack.obstacle
        self.size = self.least = 0
        self.overflow: bytes | None = None
        self._names = list(_NAMES)
        self._counters = [(vars(wrapper), name) for wrapper, name in stack.counters]
        for wrapper, name in stack.counters:
            self._names += [f"{type(wrapper).__name__}.{name}"] * 2
        self._digests = stack.physics and not type(self._base).__module__.startswith("gymnasium.envs.mujoco.")
        self._model_edits = ModelEdits() if stack.physics and may_edit(env) else None
        self._generator: Any = None
        self._rng_bytes: tuple[memoryview, memoryview] | None = None  # where the generator keeps its state
        if self.obstacle is None:
            self._measure()

    def _measure(self) -> None:
        size = len(self._names)
        self._physics_at = size
        if self._physics:
            import mujoco

            model = self._base.model
            if lets_sleep(model):
                self.obstacle = f"the model of {type(self._base).__name__} lets bodies sleep, which no state tells"
                return
            self._signature = int(mujoco.mjtState.mjSTATE_INTEGRATION)
            self._read = mujoco.mj_getState
            self._physics_size = mujoco.mj_stateSize(model, self._signature)
            for name, part in sorted(mujoco.mjtState.__members__.items(), key=lambda item: int(item[1])):
                bits = int(part)
                if bits & (bits - 1) == 0 and bits & self._signature:  # parts, not their unions
                    count = mujoco.mj_stateSize(model, bits)
                    short = name.removeprefix("mjSTATE_").lower()
                    self._names += [short] if count == 1 else [f"{short}[{i}]" for i in range(count)]
            size += self._physics_size
        self._own_at = size
        if self._own:
            try:
                length = len(self._pack())
            except Exception as exc:
                self.obstacle = f"get_state() of {type(self._own[0]).__name__} raises before the first reset: {exc!r}"
                return
            self.least = size + 1
            size += 1 + (2 * length + 512) // 8  # states may grow a little
        self.size = size
        self.least = self.least or size

    def _pack(self) -> bytes:
        return dump([holder.get_state() for holder in self._own])

    # ------------------------------------------------------------ writing

    def bind(self, row: npt.NDArray[np.float64]) -> Callable[[int], None]:
        """Return a function `capture(pending_reset)` that writes the env's state into this row; it does not raise."""
        words = row.view(np.uint64)
        # writing to a memoryview takes half the time of writing to an array
        cells, signed = words.data, row.view(np.int64).data
        rng, rng_rest = _bytes_of(words[_RNG : _RNG + 4]), _bytes_of(words[_RNG + 4 : _RNG + 5])
        physics = row[self._physics_at : self._own_at] if self._physics else None
        base, digests, own, edits = self._base, self._digests, self._own, self._model_edits
        self._generator = None  # so that its seed is written into this row, too
        counters = [(_REST + 2 * i, *counter) for i, counter in enumerate(self._counters)]
        seen: dict[int, Any] = dict.fromkeys((at for at, _, _ in counters), self)  # a value that no counter has

        def capture(pending_reset: int) -> None:
            cells[_STATUS] = 0
            try:
                cells[_PENDING_RESET] = pending_reset
                generator = base._np_random
                if generator is None or generator is not self._generator:
                    self._find_generator_state(words)
                if self._rng_bytes is not None:
                    rng[:], rng_rest[:] = self._rng_bytes
                else:
                    words[_RNG : _RNG + 5] = state_words(self._generator)
                for at, attributes, name in counters:
                    value, last = attributes[name], seen[at]
                    if value is last:
                        continue
                    if type(value) is int and type(last) is int:
                        signed[at + 1] = value
                    else:
                        words[at : at + 2] = _encode(value)
                    seen[at] = value
                if physics is not None:
                    self._read(base.model, base.data, physics, self._signature)
                if digests:
                    words[_PYTHON] = _digest(base)
                if edits is not None:
                    words[_MODEL] = edits.digest(base.model)
                if own:
                    self._write_own(words)
                cells[_STATUS] = _VALID
            except _NotRepresentable as exc:
                cells[_STATUS] = exc.args[0]
            except Exception:
                cells[_STATUS] = 5

        return capture

    def _find_generator_state(self, words: Words) -> None:
        """Find where the env's new random generator keeps its state, and write its seed."""
        generator = self._base.np_random  # makes one, if there is none
        self._rng_bytes = self._generator = None
        if type(generator.bit_generator) is not np.random.PCG64:
            raise _NotRepresentable(2)
        words[_SEED : _SEED + 3] = seed_words(getattr(self._base, "_np_random_seed", None))
        self._generator = generator
        if (raw := live_state(generator)) is not None:
            self._rng_bytes = _bytes_of(raw[0]), _bytes_of(raw[1])

    def _write_own(self, words: Words) -> None:
        data = self._pack()
        at = self._own_at
        words[at] = len(data)
        room = words[at + 1 :].view(np.uint8)
        self.overflow = data if len(data) > len(room) else None
        if self.overflow is None:
            room[: len(data)] = np.frombuffer(data, np.uint8)

    # ------------------------------------------------------------ reading

    def restore(self, row: npt.NDArray[np.float64], overflow: bytes | None = None) -> int:
        """Bring the env into the state of a row; return its pending reset (see `Autoreset`).

        Args:
            row: a row that `capture` wrote.
            overflow: the pickle that did not fit into it.

        Raises:
            ValueError: if the row holds no state; the message says why.
        """
        words = np.array(row).view(np.uint64)
        status = int(words[_STATUS])
        if status != _VALID:
            raise ValueError(_MISSING.get(status, "this is no checkpoint"))
        self._base._np_random = generator_from_words(words[_RNG : _RNG + 5].tolist())
        self._base._np_random_seed = seed_from_words(words[_SEED : _SEED + 3].tolist())
        if self._physics:
            import mujoco

            state = words[self._physics_at : self._own_at].view(np.float64)
            mujoco.mj_setState(self._base.model, self._base.data, state, self._signature)
        for holder, state in zip(self._own, self._own_states(words, overflow), strict=True):
            holder.set_state(state)
        mark_in_progress(self._env)
        for i, (attributes, name) in enumerate(self._counters):
            attributes[name] = _decode(*words[_REST + 2 * i : _REST + 2 * i + 2].tolist())
        return int(words[_PENDING_RESET])

    def restore_wrappers(self, row: npt.NDArray[np.float64], overflow: bytes | None = None) -> None:
        """Restore the own states of wrappers that a replay has left in others, such as the number of an episode.

        Args:
            row: a row that `capture` wrote after the operation that was replayed. Without a state it changes nothing.
            overflow: the pickle that did not fit into it.

        Raises:
            ValueError: if that is missing.
        """
        words = np.array(row).view(np.uint64)
        if words[_STATUS] != _VALID:
            return
        for holder, state in zip(self._own, self._own_states(words, overflow), strict=True):
            if dump(holder.get_state()) != dump(state):
                holder.set_state(state)

    def _own_states(self, words: Words, overflow: bytes | None) -> list[Any]:
        if not self._own:
            return []
        length = int(words[self._own_at])
        room = words[self._own_at + 1 :].view(np.uint8)
        data = room[:length].tobytes() if length <= len(room) else overflow
        if data is None:
            raise ValueError(f"the {length} bytes that {type(self._own[0]).__name__} gave are missing")
        states: list[Any] = pickle.loads(data)
        return states

    def difference(self, got: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> str | None:
        """Return the name of the first word that differs, and its two values; None if no word differs.

        Pickled states are not compared: the same state may pickle in two ways.
        """
        status = int(np.array(expected[:1]).view(np.uint64)[0])
        if status != _VALID:
            return _MISSING.get(status, "this is no checkpoint")
        stop = self._own_at
        a, b = np.array(got[:stop]), np.array(expected[:stop])
        where = np.flatnonzero(a.view(np.uint64) != b.view(np.uint64))
        if not where.size:
            return None
        first = int(where[0])
        name = self._names[first]
        if first == _PYTHON:
            return f"{name} of {type(self._base).__name__} differ; {REMEDY}"
        if first == _MODEL:
            return f"fields of the model of {type(self._base).__name__}, which it edits, differ; {REMEDY}"
        kind = np.float64 if first >= self._physics_at else np.uint64
        return f"{name}: expected {b.view(kind)[first]}, got {a.view(kind)[first]} ({where.size} words differ)"

    @property
    def replays(self) -> bool:
        """Whether the operation must be replayed; a state that the env returns itself is taken to be complete."""
        return self._physics


class Checkpoints:
    """The checkpoints of all rows of a worker.

    Args:
        rows: one `RowCheckpoint` a row, whose sizes are all above 0.
        size: how many words each row has room for.
        pending_resets: the replacement of the next step of each row: the same list object that steps change.

    Attributes:
        array: float64 `(rows, size)`.
        overflow: (row, pickle) of those captured last whose pickle did not fit.
    """

    def __init__(self, rows: Sequence[RowCheckpoint], size: int, pending_resets: Sequence[int]) -> None:
        self.array = np.zeros((len(rows), size), np.float64)
        self.rows = rows
        self._pending_resets = pending_resets
        self._captures = [row.bind(self.array[i]) for i, row in enumerate(rows)]
        self._grows = any(row.least < row.size for row in rows)
        self.overflow: Sequence[tuple[int, bytes]] = ()

    def capture(self, rows: Sequence[int]) -> None:
        """Write the current states of these rows."""
        pending_resets = self._pending_resets
        for row in rows:
            self._captures[row](pending_resets[row])
        if self._grows:
            self.overflow = [(row, data) for row in rows if (data := self.rows[row].overflow) is not None]


def _bytes_of(words: Words) -> memoryview:
    return words.data.cast("B")


def _encode(value: Any) -> Words:
    """Encode the kind and value of a counter."""
    kind = type(value)
    if kind not in KINDS:
        raise _NotRepresentable(3)
    if value is None:
        data = _WORD.pack(0)
    elif kind in (float, np.float64, np.float32):
        data = _FLOAT.pack(value)
    else:
        data = _WORD.pack(int(value))
    return np.frombuffer(_WORD.pack(KINDS.index(kind)) + data, np.uint64)


def _decode(kind_index: int, word: int) -> Any:
    kind = KINDS[kind_index]
    if kind is type(None):
        return None
    data = struct.pack("<Q", word)
    number = _FLOAT.unpack(data)[0] if kind in (float, np.float64, np.float32) else _WORD.unpack(data)[0]
    return kind(number)


def _digest(base: Any) -> int:
    """Return a checksum of the simple Python attributes of an env."""
    parts = b"".join(
        name.encode() + (value.tobytes() if type(value) is np.ndarray else repr(value).encode())
        for name, value in python_values(base).items()
    )
    return zlib.crc32(parts) | (len(parts) << 32)
