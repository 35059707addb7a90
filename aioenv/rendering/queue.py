"""How the images of a `RenderPool` are ordered: calls are shared out among workers, and each share goes in pieces.

A worker has at most two pieces: one that it draws, one to go on with. A piece is drawn in a moment, so that a worker
that hangs is found out soon and one that draws slowly is not taken for it, and what the loop does for it is short.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.errors import RenderTimeout, SlotError, WorkerDied
from aioenv.ipc.frames import Frame, Kind
from aioenv.process.restart import Restarter
from aioenv.process.supervisor import Worker
from aioenv.rendering.draw_requests import (
    DrawSettings,
    ImageArrays,
    ImageBuffer,
    StateDetails,
    dump_drawing,
    dump_rest,
    load_time,
)
from aioenv.rendering.image_memory import ImageMemory
from aioenv.rendering.watchdog import FIRST_S, LAST_CHANCE_S
from aioenv.rendering.workers import error_of
from aioenv.spaces.layout import byte_view
from aioenv.tracing.timeline import Trace

__all__ = ["DrawRate", "RenderCall", "RenderQueue"]

Rows = npt.NDArray[np.int64]

# A piece shall take so long to draw, in seconds, but no more than this part of what a worker may take. (Shorter ones
# leave more to the loop, which does some 0.3 ms for each, with cold caches.)
PIECE_S = 0.1
PART_OF_TIMEOUT = 0.25
# What each more costs the loop is little, but 10,000 shall leave it free in between, however fast they are drawn.
PIECE_ROWS = 64
# To take this much from a worker, where it travels, costs the loop some 100 µs; to send so much, as long.
PIECE_BYTES = 256 << 10
SENT_BYTES = 64 << 10
MAX_FLYING = 2


class DrawRate:
    """How fast a pool draws states of one kind of call.

    Args:
        timeout_s: see `RenderQueue`.

    Attributes:
        state_s: how long the last ones took, each, in seconds; None: none has been drawn yet.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.state_s: float | None = None
        self._piece_s = PIECE_S if timeout_s is None else min(PIECE_S, PART_OF_TIMEOUT * timeout_s)

    @property
    def rows(self) -> int:
        """How many states a piece may have: one, until it is known how long that takes."""
        return max(1, int(self._piece_s / self.state_s)) if self.state_s else 1


class RenderCall:
    """One call: the states, how they are drawn, and where the images go.

    Args:
        states: float64 of shape `(N, nstate)`, the call's own.
        drawing: how all of them are drawn.
        pace: of calls with such a drawing.
        edits: fields of the model, one row a state; None if none is edited.
        looks: of each state its slot, and how often that was randomised: int64 of shape `(N, 2)`; None if nothing is.
        sheet: drawn on row by row; None if `out` is filled.
        blocks: makes sheets for pieces on their way to `out`.
        out: images that a user holds, filled as each piece is there; None if those of the sheet are handed out.
            Nothing is written to them once the call has ended, however it has.
        future: gets its result, of `finish`, when all images are there, or the first error.
        finish: gives the result.

    Attributes:
        flying: how many pieces are with workers: as long as there are any, the sheet may be written to.
        number: which call it is, in the timeline that is being collected.
    """

    def __init__(
        self,
        states: npt.NDArray[np.float64],
        drawing: DrawSettings,
        pace: DrawRate,
        edits: dict[str, npt.NDArray[Any]] | None,
        looks: npt.NDArray[np.int64] | None,
        sheet: ImageBuffer | None,
        blocks: ImageMemory,
        out: ImageArrays | None,
        future: asyncio.Future[Any],
        finish: Callable[[], Any],
    ) -> None:
        self.future = future
        self.flying = 0
        self.number: int | None = None
        self._states = states
        self._drawing = drawing
        self._pace = pace
        self._head = dump_drawing(drawing)
        self._edits = edits
        self._looks = looks
        self._sheet = sheet
        self._blocks = blocks
        self._out = out
        self._finish = finish
        self._open = len(states)
        sent = sum(array[0].nbytes for array in (states, *(edits or {}).values())) if len(states) else 1
        self._most_rows = max(1, min(PIECE_ROWS, SENT_BYTES // sent))
        if sheet is None or sheet.where is None:  # images travel, or are copied to where they belong
            image = drawing.width * drawing.height * len(drawing.views)
            a_row = image * (3 + 4 * drawing.depth + 8 * drawing.segmentation)
            self._most_rows = max(1, min(self._most_rows, PIECE_BYTES // a_row))

    @property
    def piece_rows(self) -> int:
        """How many rows the next piece shall have."""
        return min(self._most_rows, self._pace.rows)

    def pack(self, rows: Rows) -> tuple[memoryview, bytes, list[memoryview] | None, ImageArrays | None]:
        """A piece, ready to be sent.

        Returns:
            Its states; the drawing; where its images go, if they travel; and the images, if `land` is to be called
            with them.
        """
        sheet, staged, targets = self._sheet, None, rows.tolist()
        if sheet is None:
            drawing, targets = self._drawing, list(range(len(rows)))
            shape = (len(rows), len(drawing.views), drawing.height, drawing.width)
            sheet = self._blocks.sheet(shape, depth=drawing.depth, segmentation=drawing.segmentation)
            staged = sheet.images
        where, into = sheet.ask(targets)
        looks = None if self._looks is None else self._looks[rows].tolist()
        edits = None if self._edits is None else {name: values[rows] for name, values in self._edits.items()}
        return byte_view(self._states[rows]), self._head + dump_rest(StateDetails(looks, edits, where)), into, staged

    def land(self, rows: Rows, staged: ImageArrays | None, seconds: float) -> None:
        """The images of these rows are there; to draw them took so long."""
        self._pace.state_s = seconds / len(rows)
        if self.future.done():
            return
        if staged is not None:
            assert self._out is not None
            for target, array in zip(self._out.arrays, staged.arrays, strict=True):
                target[rows] = array.reshape(len(rows), *target.shape[1:])
        self._open -= len(rows)
        if self._open == 0:
            self.future.set_result(self._finish())

    def fail(self, error: Exception) -> None:
        """It can't be completed."""
        if not self.future.done():
            self.future.set_exception(error)


class _Piece:
    """Some rows of a call, for one worker."""

    __slots__ = ("call", "deaths", "rows")

    def __init__(self, call: RenderCall, rows: Rows) -> None:
        self.call = call
        self.rows = rows
        self.deaths = 0  # how many processes have died over it


class RenderQueue:
    """The pieces of one worker.

    Args:
        worker: the worker.
        restarter: what starts it again; None if nothing does.
        timeout_s: how long it may take over a piece before it is killed, in seconds; None for ever. The first piece of
            a process may take 10 seconds at least.
        retry: have its replacement draw, once, what it died over; otherwise those calls fail.

    Attributes:
        trace: the timeline that is being collected; None: none is.
    """

    def __init__(self, worker: Worker, restarter: Restarter | None, timeout_s: float | None, retry: bool) -> None:
        self._worker = worker
        self._restarter = restarter
        self._timeout_s = timeout_s
        self._retry = retry
        self._shares: deque[tuple[RenderCall, Rows]] = deque()
        self._again: deque[_Piece] = deque()
        self._flying: deque[_Piece] = deque()
        self._down = False  # it has died, and is being started again
        self._lost: WorkerDied | None = None  # it is not started again
        self._overdue = False  # it was killed for being late
        self._fresh = True  # its process has drawn nothing yet
        self._blamed = False  # the piece that it died over is known
        self._timer: asyncio.TimerHandle | None = None  # not set anew each time: that would cost more than all else
        self._since = 0.0
        self._loop = asyncio.get_running_loop()
        self.trace: Trace | None = None

    def add(self, call: RenderCall, rows: Rows) -> None:
        """Have these rows of a call drawn."""
        if self._lost is not None:
            call.fail(self._error(self._lost))
            return
        self._shares.append((call, rows))
        self._pump()

    def _pump(self) -> None:
        while not self._down and len(self._flying) < MAX_FLYING and (piece := self._next()) is not None:
            self._send(piece)

    def _next(self) -> _Piece | None:
        """The next piece that anybody waits for."""
        while self._again:
            piece = self._again.popleft()
            if not piece.call.future.done():
                return piece
        while self._shares:
            call, rows = self._shares.popleft()
            if call.future.done():
                continue
            count = call.piece_rows
            if len(rows) > count:
                self._shares.appendleft((call, rows[count:]))
            return _Piece(call, rows[:count])
        return None

    def _send(self, piece: _Piece) -> None:
        call = piece.call
        try:
            states, tail, into, staged = call.pack(piece.rows)
            on_reply = partial(self._on_outcome, piece, staged)
            if self.trace is not None:
                self.trace.step = call.number
            self._worker.submit(Kind.RENDER, [states], tail, into=into, on_reply=on_reply)
        except WorkerDied:  # its death is not known here yet
            self._again.appendleft(piece)
            self._down = True
            return
        except Exception as exc:
            call.fail(exc)
            return
        self._flying.append(piece)
        call.flying += 1
        if len(self._flying) == 1:
            self._watch()

    def _on_outcome(self, piece: _Piece, staged: ImageArrays | None, outcome: Frame | SlotError) -> None:
        self._flying.remove(piece)
        call = piece.call
        call.flying -= 1
        if isinstance(outcome, WorkerDied):
            self._on_death_over(piece, outcome)
            return
        self._fresh = False
        self._watch()
        error = error_of(self._worker, outcome)
        if error is not None:
            call.fail(error)
        else:
            try:
                assert isinstance(outcome, Frame)
                call.land(piece.rows, staged, load_time(outcome.tail))
            except Exception as exc:  # `out` is the user's: it may be read-only by now, say
                call.fail(exc)
        self._pump()

    def _on_death_over(self, piece: _Piece, death: WorkerDied) -> None:
        self._down = True
        # it draws one piece after the other: those behind the first had not begun
        guilty, self._blamed = not self._blamed, True
        piece.deaths += guilty
        if self._restarter is not None and (not guilty or (self._retry and piece.deaths == 1)):
            self._again.append(piece)
        else:
            piece.call.fail(self._late_error() if self._overdue else self._error(death))

    # ------------------------------------------------------------ time

    def _watch(self) -> None:
        """Something has been sent or has come: the time begins anew."""
        if self._timeout_s is not None:
            self._since = self._loop.time()
            if self._timer is None and self._flying:
                self._timer = self._loop.call_at(self._since + self._timeout_s, self._expire, None)

    def _expire(self, suspected: float | None) -> None:
        """The time is up: since `suspected` it has done nothing, or a first look is to be taken (None)."""
        self._timer = None
        if not self._flying or self._timeout_s is None:
            return
        due = self._since + (max(self._timeout_s, FIRST_S) if self._fresh else self._timeout_s)
        if self._loop.time() < due:  # it has finished something since the timer was set
            self._timer = self._loop.call_at(due, self._expire, None)
            return
        if suspected != self._since:  # the loop may have stood still: what came meanwhile is read first
            self._timer = self._loop.call_later(LAST_CHANCE_S, self._expire, self._since)
            return
        self._overdue = True
        piece = self._flying[0]
        if not self._retry or piece.deaths:
            piece.call.fail(self._late_error())  # now, not when the process is gone
        self._worker.strike(f"it finished no image for timeout_s={self._timeout_s}")

    def _late_error(self) -> RenderTimeout:
        again = "" if self._restarter is None else "; it is replaced"
        return RenderTimeout(
            f"render worker {self._worker.index} (pid {self._worker.pid}) finished no image for "
            f"timeout_s={self._timeout_s}{again}"
        )

    # ------------------------------------------------------------ the worker's end

    def on_death(self, worker: Worker) -> None:
        """The worker has died; its requests have failed."""
        self._down = self._fresh = True
        self._watch()
        death = worker.death()
        if self._restarter is None or not self._restarter.hold(worker, death, self._on_back, self._on_lost):
            self._on_lost(death)

    def _on_back(self) -> None:
        self._down = self._overdue = self._blamed = False
        self._pump()

    def _on_lost(self, death: WorkerDied) -> None:
        self._lost = death
        self.drop(self._error(death))

    def _error(self, death: WorkerDied) -> Exception:
        return error_of(self._worker, death) or death

    def drop(self, error: Exception) -> None:
        """Nothing is drawn any more: end every wait."""
        self._timeout_s = None
        for piece in (*self._again, *self._flying):
            piece.call.fail(error)
        for call, _ in self._shares:
            call.fail(error)
        self._again.clear()
        self._shares.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
