"""Where a worker's actions are read: into its own arrays, as frames bring them, or where they lie in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aioenv.ipc.frames import Buffer, Frame
from aioenv.spaces.autoreset import ResultArrays, Stepped
from aioenv.spaces.layout import Arrays, Layout, byte_view
from aioenv.speedups import compiled

__all__ = ["Actions", "ResultRows", "run_of"]


class Actions:
    """The actions of n rows.

    Args:
        layout: of one action.
        n: how many rows.
        shared: for each lane of shared memory, the rows' part of its action arrays by number of leaf; one empty dict
            without shared memory.
        laned: whether requests name a lane.

    Attributes:
        views: where the fixed part of a request for all rows is read into.
    """

    def __init__(self, layout: Layout, n: int, shared: Sequence[dict[int, Any]], *, laned: bool) -> None:
        self._layout = layout
        own = layout.zeros(n)
        self._lanes = [[lane.get(i, array) for i, array in enumerate(own)] for lane in shared]
        self._shared = set(shared[0])
        self._lane = bytearray(laned)  # of the last request that was read into `views`
        framed = [byte_view(array) for i, array in enumerate(own) if i not in self._shared]
        self.views: list[memoryview] = [memoryview(self._lane), *framed] if laned else framed

    @property
    def array(self) -> Any:
        """What is read into `views`, if that is one array, and travels."""
        return self._lanes[0][0]

    def open(self, frame: Frame) -> tuple[int, bytes]:
        """The lane that a request is about, and the actions that were not read into `views`."""
        lane, data = self._lane, b""
        # a request for a few rows may be as long as one for all, if it has nothing but the lane
        if frame.fixed is not self.views:
            # `_lane` may be the next request's already: several come in one read
            data, size = b"".join(frame.fixed), len(self._lane)
            lane, data = bytearray(data[:size]), data[size:]
        return lane[0] if lane else 0, data

    def of_all(self, lane: int, objects: Sequence[Sequence[Any]]) -> list[Any]:
        """The actions of all rows; copies, since envs may keep them, and the next are read into the same memory."""
        return self._layout.rows([array.copy() for array in self._lanes[lane]], objects)

    def of_some(self, lane: int, rows: Sequence[int], data: bytes, objects: Sequence[Sequence[Any]]) -> list[Any]:
        """The actions of some rows: those that travelled, and those in shared memory; likewise copies."""
        here = None
        if self._shared:
            index = list(rows)
            here = {i: self._lanes[lane][i][index] for i in self._shared}
        return self._layout.rows(self._layout.split(data, len(rows), here), objects)


# ------------------------------------------------------------ results


class ResultRows:
    """The latest results of n rows.

    Args:
        layout: of the observations.
        n: how many rows.
        shared: for each lane of shared memory, the rows' part of its observation arrays by number of leaf; one empty
            dict without shared memory.
        state: arrays of n rows that ride on every reply.
        cast: whether observations may have another dtype than their space's, and another shape of that size.

    Attributes:
        objects: the observations' object leaves, each a list of n.
        lanes: by lane, where a step of rows that follow one another may put usual results at once; None: `store` them.
    """

    def __init__(
        self, layout: Layout, n: int, shared: Sequence[dict[int, Any]], state: Arrays, cast: bool = False
    ) -> None:
        self.objects = layout.no_objects(n)
        own = [np.zeros((0 if i in shared[0] else n, *leaf.shape), leaf.dtype) for i, leaf in enumerate(layout.leaves)]
        self._writers = [
            layout.writer([lane.get(i, array) for i, array in enumerate(own)], self.objects, cast=cast)
            for lane in shared
        ]
        self._reward = np.zeros(n, np.float64)
        self._terminated = np.zeros(n, np.bool_)
        self._truncated = np.zeros(n, np.bool_)
        framed = [array for i, array in enumerate(own) if i not in shared[0]]
        self._reset_arrays: Arrays = [*framed, *state]
        self._step_arrays: Arrays = [*framed, self._reward, self._terminated, self._truncated, *state]
        # observations, as the envs gave them: a lane of shared memory holds those of another step
        self._last: list[Any] = [None] * n
        self._views: dict[tuple[bool, int, int], Sequence[Buffer]] = {}
        self.lanes: list[ResultArrays] | None = None
        if compiled and layout.is_numeric and not cast:
            flags = self._terminated, self._truncated
            trees = [layout.assemble([lane.get(i, array) for i, array in enumerate(own)], ()) for lane in shared]
            self.lanes = [(tree, self._reward, *flags, self._last) for tree in trees]

    def into(self, lane: int) -> ResultArrays | None:
        """One of `lanes`, if there are any."""
        return self.lanes[lane] if self.lanes is not None else None

    def store(self, lane: int, out: Stepped) -> None:
        """Put in what a step gave; a row whose values don't fit is added to `out.failures`."""
        if out.nonstandard:
            self.lanes = None
        rows = out.rows
        start = run_of(rows)
        odd = out.failures or out.exhausted
        if not odd and start is not None:
            try:
                self._writers[lane].write_run(start, out.observations)
                self._last[start : start + len(rows)] = out.observations
            except Exception:
                start = None
        if odd or start is None:
            self._store_one_by_one(lane, out)
        where: Any = list(rows) if start is None else slice(start, start + len(rows))
        try:
            self._reward[where] = out.rewards
            self._terminated[where] = out.terminated
            self._truncated[where] = out.truncated
        except Exception:  # a tensor that wants its gradient raises a RuntimeError, say
            for name, array, values in (
                ("reward", self._reward, out.rewards),
                ("terminated", self._terminated, out.terminated),
                ("truncated", self._truncated, out.truncated),
            ):
                _store_numbers(name, array, rows, values, out)

    def _store_one_by_one(self, lane: int, out: Stepped) -> None:
        failed = {row for row, _ in out.failures}
        for index, row in enumerate(out.rows):
            if row not in failed and not (out.observations[index] is None and row in out.exhausted):
                try:
                    self.keep(lane, row, out.observations[index])
                    continue
                except Exception as exc:
                    out.mark_failed(index, row, exc)
            self.show(lane, [row])

    def keep(self, lane: int, row: int, obs: Any) -> None:
        """Put in one observation.

        Raises:
            ValueError, TypeError: if it does not fit.
        """
        self._writers[lane].write(row, obs)
        self._last[row] = obs

    def show(self, lane: int, rows: Sequence[int]) -> None:
        """Put in, once more, the last observations that fitted."""
        write = self._writers[lane].write
        for row in rows:
            if self._last[row] is not None:
                write(row, self._last[row])

    def buffers(self, rows: Sequence[int], *, stepped: bool) -> Sequence[Buffer]:
        """What travels of some rows, after a step or after a reset."""
        arrays = self._step_arrays if stepped else self._reset_arrays
        start = run_of(rows)
        if start is None:
            return [byte_view(array[list(rows)]) for array in arrays]
        return self._run(arrays, stepped, start, len(rows))

    def stepped_run(self, start: int, count: int) -> Sequence[Buffer]:
        """As `buffers`, of so many rows from one on, after a step."""
        return self._run(self._step_arrays, True, start, count)

    def _run(self, arrays: Arrays, stepped: bool, start: int, count: int) -> Sequence[Buffer]:
        key = stepped, start, count
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = [byte_view(array[start : start + count]) for array in arrays]
        return views


def run_of(rows: Sequence[int]) -> int | None:
    """Where rows begin, if they follow one another; else None."""
    if isinstance(rows, range):
        return rows.start
    start = rows[0] if rows else 0
    return start if list(rows) == list(range(start, start + len(rows))) else None


def _store_numbers(
    name: str, array: np.ndarray[Any, Any], rows: Sequence[int], values: list[Any], out: Stepped
) -> None:
    """Store rewards or flags of which at least one is not a number; say whose."""
    for row, value in zip(rows, values, strict=True):
        try:
            array[row] = value
        except Exception as exc:
            array[row] = 0
            said = f"{name}: expected a number, got {value!r:.200}"
            if isinstance(exc, (TypeError, ValueError)):  # numpy's words and frames tell nobody anything
                out.failures.append((row, (ValueError if isinstance(exc, ValueError) else TypeError)(said)))
            else:
                exc.add_note(said)
                out.failures.append((row, exc))
