"""The arrays of a worker's rows: actions are read from them, results are written to them and sent from them.

They are the worker's own, which travel in frames, or lie in shared memory, of which there are several batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.ipc.frames import HEADER_BYTES, Buffer, Frame
from aioenv.spaces.autoreset import ResultArrays, Stepped
from aioenv.spaces.layout import Arrays, Layout, byte_view
from aioenv.speedups import compiled

__all__ = ["ActionRows", "ResultRows", "start_of_run"]

_ALIGNED = 64


class ActionRows:
    """The actions of n rows.

    Args:
        layout: of one action.
        n: how many rows.
        shared: for each shared batch, the rows' part of its action arrays by index of the leaf; one empty dict without
            shared memory.
        named: whether requests begin with the index of a shared batch.

    Attributes:
        views: the buffers that the fixed part of a request for all rows is read into.
    """

    def __init__(self, layout: Layout, n: int, shared: Sequence[dict[int, Any]], *, named: bool) -> None:
        self._layout = layout
        own = layout.zeros(n)
        self._batches = [[batch.get(i, array) for i, array in enumerate(own)] for batch in shared]
        self._shared_leaves = set(shared[0])
        self._batch = bytearray(named)  # of the last request that was read into `views`
        framed = [byte_view(array) for i, array in enumerate(own) if i not in self._shared_leaves]
        self.views: list[memoryview] = [memoryview(self._batch), *framed] if named else framed

    @property
    def array(self) -> Any:
        """The array that is read into `views`, if there is one and it travels in frames."""
        return self._batches[0][0]

    def unpack(self, frame: Frame) -> tuple[int, bytes]:
        """Return the index of a request's shared batch, and the actions that were not read into `views`."""
        batch, data = self._batch, b""
        # a request for a few rows may be as long as one for all, if its fixed part is the batch alone
        if frame.fixed is not self.views:
            # `_batch` may be that of the next request: one read can bring several
            data, size = b"".join(frame.fixed), len(self._batch)
            batch, data = bytearray(data[:size]), data[size:]
        return batch[0] if batch else 0, data

    def of_all(self, batch: int, objects: Sequence[Sequence[Any]]) -> list[Any]:
        """Return copies of the actions of all rows: envs may keep them, and the next ones overwrite the same memory."""
        return self._layout.rows([array.copy() for array in self._batches[batch]], objects)

    def of_some(self, batch: int, rows: Sequence[int], data: bytes, objects: Sequence[Sequence[Any]]) -> list[Any]:
        """Return copies of the actions of some rows, from the data that travelled and from shared memory."""
        shared = None
        if self._shared_leaves:
            index = list(rows)
            shared = {i: self._batches[batch][i][index] for i in self._shared_leaves}
        return self._layout.rows(self._layout.split(data, len(rows), shared), objects)


class ResultRows:
    """The latest results of n rows.

    Args:
        layout: of the observations.
        n: how many rows.
        shared: for each shared batch, the rows' part of its observation arrays by index of the leaf; one empty dict
            without shared memory.
        state: further arrays of n rows, which every reply carries.
        cast: whether observations may have another dtype than their space's, and another shape of the same size.

    Attributes:
        objects: the observations' object leaves, each a list of n.
        direct: for each shared batch the arrays that a step of successive rows may write standard results to at once;
            None if all results go through `store`.
    """

    def __init__(
        self, layout: Layout, n: int, shared: Sequence[dict[int, Any]], state: Arrays, cast: bool = False
    ) -> None:
        self.objects = layout.no_objects(n)
        own, at = [], HEADER_BYTES
        for number, leaf in enumerate(layout.leaves):
            own.append(_zeros_at(at, (0 if number in shared[0] else n, *leaf.shape), leaf.dtype))
            at += own[-1].nbytes
        self._writers = [
            layout.writer([batch.get(i, array) for i, array in enumerate(own)], self.objects, cast=cast)
            for batch in shared
        ]
        self._reward = np.zeros(n, np.float64)
        self._terminated = np.zeros(n, np.bool_)
        self._truncated = np.zeros(n, np.bool_)
        framed = [array for i, array in enumerate(own) if i not in shared[0]]
        self._reset_arrays: Arrays = [*framed, *state]
        self._step_arrays: Arrays = [*framed, self._reward, self._terminated, self._truncated, *state]
        # observations as the envs returned them: a shared batch may hold those of another step
        self._last: list[Any] = [None] * n
        self._views: dict[tuple[bool, int, int], Sequence[Buffer]] = {}
        self.direct: list[ResultArrays] | None = None
        if compiled and layout.is_numeric and not cast:
            flags = self._terminated, self._truncated
            trees = [layout.assemble([batch.get(i, array) for i, array in enumerate(own)], ()) for batch in shared]
            self.direct = [(tree, self._reward, *flags, self._last) for tree in trees]

    def direct_into(self, batch: int) -> ResultArrays | None:
        """Return the arrays of `direct` for a shared batch, if there are any."""
        return self.direct[batch] if self.direct is not None else None

    def store(self, batch: int, out: Stepped) -> None:
        """Store the results of a step; add a row whose values don't fit to `out.failures`."""
        if out.nonstandard:
            self.direct = None
        rows = out.rows
        start = start_of_run(rows)
        nonstandard = out.failures or out.exhausted
        if not nonstandard and start is not None:
            try:
                self._writers[batch].write_run(start, out.observations)
                self._last[start : start + len(rows)] = out.observations
            except Exception:
                start = None
        if nonstandard or start is None:
            self._store_one_by_one(batch, out)
        where: Any = list(rows) if start is None else slice(start, start + len(rows))
        try:
            self._reward[where] = out.rewards
            self._terminated[where] = out.terminated
            self._truncated[where] = out.truncated
        except Exception:  # a tensor that requires its gradient raises a RuntimeError, say
            for name, array, values in (
                ("reward", self._reward, out.rewards),
                ("terminated", self._terminated, out.terminated),
                ("truncated", self._truncated, out.truncated),
            ):
                _store_numbers(name, array, rows, values, out)

    def _store_one_by_one(self, batch: int, out: Stepped) -> None:
        failed = {row for row, _ in out.failures}
        for index, row in enumerate(out.rows):
            if row not in failed and not (out.observations[index] is None and row in out.exhausted):
                try:
                    self.write_observation(batch, row, out.observations[index])
                    continue
                except Exception as exc:
                    out.mark_failed(index, row, exc)
            self.rewrite_last(batch, [row])

    def write_observation(self, batch: int, row: int, obs: Any) -> None:
        """Write one observation.

        Raises:
            ValueError, TypeError: if it does not fit.
        """
        self._writers[batch].write(row, obs)
        self._last[row] = obs

    def rewrite_last(self, batch: int, rows: Sequence[int]) -> None:
        """Write the last observations that fitted once more."""
        write = self._writers[batch].write
        for row in rows:
            if self._last[row] is not None:
                write(row, self._last[row])

    def buffers(self, rows: Sequence[int], *, stepped: bool) -> Sequence[Buffer]:
        """Return the fixed part of a reply about some rows, after a step or after a reset."""
        arrays = self._step_arrays if stepped else self._reset_arrays
        start = start_of_run(rows)
        if start is None:
            return [byte_view(array[list(rows)]) for array in arrays]
        return self._buffers_of_run(arrays, stepped, start, len(rows))

    def step_buffers(self, start: int, count: int) -> Sequence[Buffer]:
        """Return the fixed part of a reply to a step of `count` successive rows."""
        return self._buffers_of_run(self._step_arrays, True, start, count)

    def _buffers_of_run(self, arrays: Arrays, stepped: bool, start: int, count: int) -> Sequence[Buffer]:
        key = stepped, start, count
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = [byte_view(array[start : start + count]) for array in arrays]
        return views


def _zeros_at(offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return zeros for a place in a frame, at an address from which the kernel copies them fast.

    The kernel copies a frame to the start of a page. AMD's processors take three times as long for a copy to an address
    that is 1 to 15 bytes behind the source, modulo the size of a page. So the source begins a little behind instead.
    """
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNED, np.uint8)
    start = (offset + -offset % 16 - memory.__array_interface__["data"][0]) % _ALIGNED
    return memory[start : start + size].view(dtype).reshape(shape)


def start_of_run(rows: Sequence[int]) -> int | None:
    """Return the first of some rows if they are successive, else None."""
    if isinstance(rows, range):
        return rows.start
    start = rows[0] if rows else 0
    return start if list(rows) == list(range(start, start + len(rows))) else None


def _store_numbers(
    name: str, array: np.ndarray[Any, Any], rows: Sequence[int], values: list[Any], out: Stepped
) -> None:
    """Store rewards or flags of which at least one is not a number; add its row to the failures."""
    for row, value in zip(rows, values, strict=True):
        try:
            array[row] = value
        except Exception as exc:
            array[row] = 0
            text = f"{name}: expected a number, got {value!r:.200}"
            if isinstance(exc, (TypeError, ValueError)):  # numpy's message would not help
                out.failures.append((row, (ValueError if isinstance(exc, ValueError) else TypeError)(text)))
            else:
                exc.add_note(text)
                out.failures.append((row, exc))
