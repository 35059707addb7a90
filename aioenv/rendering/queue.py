"""`RenderQueue`: the draw requests of one render worker, for `RenderPool` and for the images of steps alike.

A pool makes a `DrawJob` of each call and shares its states out among the queues of its workers. A queue sends them in
chunks, watches that the worker makes progress (`Watchdog`), and repeats lost chunks when a worker is restarted. The two
pools differ in their jobs and in their `QueuePolicy` only.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aioenv.errors import RenderError, SlotError, WorkerDied
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.messages import load
from aioenv.process.restart import Restarter
from aioenv.process.supervisor import Worker
from aioenv.rendering.draw_requests import load_seconds
from aioenv.rendering.images import ImageArrays
from aioenv.tracing.timeline import Trace

__all__ = ["DrawJob", "PackedRequest", "QueuePolicy", "RenderQueue", "Rows", "Watchdog"]

Rows = npt.NDArray[np.int64]

# The loop may have been blocked: replies that came meanwhile are read before a worker is called late.
LAST_CHANCE_S = 0.1
# The first request of a process takes longer than the rest: shaders are compiled, meshes and textures uploaded.
FIRST_S = 10.0


class Watchdog:
    """Calls `on_late` when a worker that owes replies has sent none for too long.

    Args:
        timeout_s: how long that is, in seconds; None for ever. The first reply of a process may take 10 seconds.
        on_late: called once each time.

    Attributes:
        first: whether the process has sent no reply yet.
    """

    def __init__(self, timeout_s: float | None, on_late: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self.first = True
        self._owed = 0
        self._since = 0.0
        # set again only when it expires: to set it for each request would cost more than all the rest
        self._timer: asyncio.TimerHandle | None = None

    def sent(self) -> None:
        """Note that the worker was sent a request."""
        self._owed += 1
        if self._timeout_s is None:
            return
        if self._owed == 1:
            self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._since + self._timeout_s, self._expire, None)

    def answered(self, *, died: bool) -> None:
        """Note that a request was answered, or that the worker died over it."""
        self.first = died
        self._owed -= 1
        if self._timeout_s is not None:
            self._since = self._loop.time()

    def _expire(self, suspected: float | None) -> None:
        """Look whether the worker is late.

        Args:
            suspected: since when the worker has sent nothing, if this is the second look; None for the first look.
        """
        self._timer = None
        if not self._owed or self._timeout_s is None:
            return
        deadline = self._since + (max(self._timeout_s, FIRST_S) if self.first else self._timeout_s)
        if self._loop.time() < deadline:  # it has answered something since the timer was set
            self._timer = self._loop.call_at(deadline, self._expire, None)
        elif suspected != self._since:
            self._timer = self._loop.call_later(LAST_CHANCE_S, self._expire, self._since)
        else:
            self._on_late()

    def close(self) -> None:
        """Stop watching."""
        self._timeout_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class PackedRequest(NamedTuple):
    """Some rows of a job, ready to be sent.

    Attributes:
        states: the fixed part.
        payload: the rest (see `draw_requests.dump_request`).
        into: the arrays that images are read into if they are sent with the reply.
        staged: images that the job has to copy to where they belong; None if there is nothing to copy.
    """

    states: memoryview
    payload: bytes
    into: list[memoryview] | None
    staged: ImageArrays | None = None


class DrawJob(ABC):
    """States that were given to a pool at once, row by row, and what becomes of their images.

    Attributes:
        in_flight: how many chunks are with workers; as long as there are any, the job's buffer may be written to.
        number: the number of the call in the timeline that is being collected.
    """

    in_flight = 0
    number: int | None = None

    @property
    @abstractmethod
    def wanted(self) -> bool:
        """Whether there is a reason to draw the remaining rows."""

    @property
    @abstractmethod
    def chunk_rows(self) -> int:
        """The maximum number of rows of the next chunk."""

    @abstractmethod
    def pack(self, worker: Worker, rows: Rows) -> PackedRequest:
        """Make the request for some rows, to be sent to this worker at once."""

    @abstractmethod
    def on_drawn(self, rows: Rows, staged: ImageArrays | None, seconds: float) -> None:
        """Take the images of some rows, which took the worker so many seconds."""

    @abstractmethod
    def on_failed(self, rows: Rows, error: Exception) -> None:
        """Note that these rows can't be drawn."""


class QueuePolicy(NamedTuple):
    """The limits of a pool on its workers, and its callbacks for them.

    Attributes:
        timeout_s: how long a worker may finish nothing before it is late, in seconds; None for ever.
        max_in_flight: how many chunks a worker has at most: one to draw, others to go on with; None for all at once.
        max_redraws: how often a chunk is drawn again whose worker died over it; None for any number of times. Chunks
            behind it in the same worker are always drawn again.
        on_late: called with a late worker before it is killed. It returns the error of the chunk that was being drawn;
            None: the worker's death.
    """

    timeout_s: float | None
    max_in_flight: int | None
    max_redraws: int | None
    on_late: Callable[[Worker], Exception | None]


class _Chunk:
    """Some rows of a job that are sent in one request."""

    __slots__ = ("deaths", "failed", "job", "rows")

    def __init__(self, job: DrawJob, rows: Rows) -> None:
        self.job = job
        self.rows = rows
        self.deaths = 0  # how many processes have died over it
        self.failed = False

    def fail(self, error: Exception) -> None:
        """Fail its rows, once."""
        if not self.failed:
            self.failed = True
            self.job.on_failed(self.rows, error)


class RenderQueue:
    """The queue of rows that one render worker draws, first in, first out.

    Args:
        worker: the worker.
        restarter: restarts it when it died; None: its loss is final.
        policy: the limits of the worker.

    Attributes:
        trace: the timeline that is being collected, if the jobs of the pool are numbered.
    """

    def __init__(self, worker: Worker, restarter: Restarter | None, policy: QueuePolicy) -> None:
        self._worker = worker
        self._restarter = restarter
        self._policy = policy
        self._shares: deque[tuple[DrawJob, Rows]] = deque()
        self._repeated: deque[_Chunk] = deque()
        self._in_flight: deque[_Chunk] = deque()
        self._down = False  # the process has died, and is being restarted
        self._end_error: Callable[[], Exception] | None = None  # makes errors of jobs, if nothing is drawn any more
        self._late_error: Exception | None = None  # the process was killed for being late
        self._blamed = False  # the chunk that the process died over is known
        self._watchdog = Watchdog(policy.timeout_s, self._on_late)
        self.trace: Trace | None = None

    @property
    def recovering(self) -> bool:
        """Whether the worker draws the first request of its process."""
        return bool(self._in_flight) and self._watchdog.first

    def add(self, job: DrawJob, rows: Rows) -> None:
        """Have these rows of a job drawn; never blocks."""
        if self._end_error is not None:
            job.on_failed(rows, self._end_error())
            return
        self._shares.append((job, rows))
        self._send_more()

    def _send_more(self) -> None:
        most = self._policy.max_in_flight
        while not self._down and (most is None or len(self._in_flight) < most) and (chunk := self._next()) is not None:
            self._send(chunk)

    def _next(self) -> _Chunk | None:
        """Return the next chunk that is still wanted."""
        while self._repeated:
            chunk = self._repeated.popleft()
            if chunk.job.wanted:
                return chunk
        while self._shares:
            job, rows = self._shares.popleft()
            if not job.wanted:
                continue
            count = job.chunk_rows
            if len(rows) > count:
                self._shares.appendleft((job, rows[count:]))
            return _Chunk(job, rows[:count])
        return None

    def _send(self, chunk: _Chunk) -> None:
        job = chunk.job
        try:
            states, payload, into, staged = job.pack(self._worker, chunk.rows)
            on_reply = partial(self._on_reply, chunk, staged)
            if self.trace is not None:
                self.trace.step = job.number
            self._worker.submit(Kind.RENDER, [states], payload, into=into, on_reply=on_reply)
        except WorkerDied:  # `on_death` will be called
            self._repeated.appendleft(chunk)
            self._down = True
            return
        except Exception as exc:
            chunk.fail(exc)
            return
        self._in_flight.append(chunk)
        job.in_flight += 1
        self._watchdog.sent()

    def _on_reply(self, chunk: _Chunk, staged: ImageArrays | None, outcome: Frame | SlotError) -> None:
        self._in_flight.remove(chunk)
        chunk.job.in_flight -= 1
        self._watchdog.answered(died=isinstance(outcome, WorkerDied))
        if isinstance(outcome, WorkerDied):
            self._on_death_over(chunk, outcome)
            return
        error = _reply_error(self._worker, outcome)
        if error is not None:
            chunk.fail(error)
        elif not chunk.failed:
            assert isinstance(outcome, Frame)
            chunk.job.on_drawn(chunk.rows, staged, load_seconds(outcome.payload))
        self._send_more()

    def _on_death_over(self, chunk: _Chunk, death: SlotError) -> None:
        """Repeat a chunk that was lost with its process, or fail it."""
        self._down = True
        # a worker draws one chunk after the other: it had not begun those behind the first
        if not self._blamed:
            self._blamed = True
            chunk.deaths += 1
        if self._restarter is not None and self._redraws(chunk):
            self._repeated.append(chunk)
        else:
            chunk.fail(self._late_error or self._error(death))

    def _redraws(self, chunk: _Chunk) -> bool:
        most = self._policy.max_redraws
        return not chunk.failed and (most is None or chunk.deaths <= most)

    def _on_late(self) -> None:
        self._late_error = self._policy.on_late(self._worker)
        chunk, most = self._in_flight[0], self._policy.max_redraws
        if self._late_error is not None and most is not None and chunk.deaths >= most:
            chunk.fail(self._late_error)  # now, not when the process is gone
        self._worker.kill(f"it finished no image for timeout_s={self._policy.timeout_s}")

    # ------------------------------------------------------------ the worker's end

    def on_death(self, worker: Worker) -> None:
        """Have the worker restarted, after its requests have failed with its death."""
        self._down = self._watchdog.first = True
        death = worker.death_error()
        if self._restarter is None or not self._restarter.queue_request(worker, death, self._on_back, self._on_lost):
            self._on_lost(death)

    def _on_back(self) -> None:
        self._down = self._blamed = False
        self._late_error = None
        self._send_more()

    def _on_lost(self, death: WorkerDied) -> None:
        self._end(lambda: self._error(death))

    def _error(self, death: SlotError) -> Exception:
        return _reply_error(self._worker, death) or death

    def close(self, error: Exception) -> None:
        """Fail all rows of the queue, and those that are added later."""
        self._end(lambda: error)

    def _end(self, make_error: Callable[[], Exception]) -> None:
        self._end_error = make_error
        self._watchdog.close()
        chunks, shares = [*self._repeated, *self._in_flight], [*self._shares]
        self._repeated.clear()
        self._shares.clear()
        for chunk in chunks:
            chunk.fail(make_error())
        for job, rows in shares:
            job.on_failed(rows, make_error())


def _reply_error(worker: Worker, outcome: Frame | SlotError) -> RenderError | None:
    """Return the error of a reply; None if it has the images."""
    if isinstance(outcome, SlotError):
        error = RenderError(f"render worker {worker.index} is gone: {outcome}")
        error.__cause__ = outcome
        for note in getattr(outcome, "__notes__", ()):
            error.add_note(note)
        return error
    if outcome.kind is Kind.FAILURE:
        failure = load(outcome.payload)
        text = f"{failure.type_name}: {failure.message}\n{failure.traceback}"
        return RenderError(f"render worker {worker.index} failed: {text}")
    return None
