"""A worker on a thread of this process, in place of a worker process: the same requests, without bytes between.

Requests are jobs of the thread. Where that is allowed, short steps and resets run on the caller's thread instead, which
saves two thread switches; C runs a plain step at once, without a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt

from aioenv import speedups
from aioenv.definitions.table import current_table, set_current_table
from aioenv.errors import WireError
from aioenv.ipc.frames import Buffer, Frame, Header, Kind
from aioenv.ipc.memory import CurrentRow
from aioenv.ipc.messages import reason_of
from aioenv.platform import HeldSignals, raised_by_handler
from aioenv.process.env_thread import YIELD_AFTER_S, EnvThread, RunTimes
from aioenv.process.process import Output

if TYPE_CHECKING:
    from aioenv.definitions.table import DefinitionTable
    from aioenv.process.connection import OutstandingRequests
    from aioenv.spaces.autoreset import ResultArrays
    from aioenv.worker.loop import RequestServer
    from aioenv.worker.service import FastPath, PartialStep, Service

__all__ = ["MakeServer", "ThreadChannel", "ThreadProcess"]

_log = logging.getLogger("aioenv")

# Steps below this limit run on the caller's thread, in seconds: as long as anything may block a loop. The two thread
# switches that they would take otherwise cost 100 µs and more.
_INLINE_LIMIT_S = YIELD_AFTER_S
_STEP = Kind.STEP  # an attribute of an enum costs a step 70 ns
# How long a thread may take to end once its channel is closed, in seconds. It takes longer while its env runs.
_END_S = 0.2
_JOIN_S = 1.0

# Makes the server of a worker, on its thread: from its end of the channel, the cell of its current row, and a
# descriptor of shared memory (or None), which it closes.
MakeServer: TypeAlias = "Callable[[ThreadChannel, memoryview, int | None], RequestServer]"
_OnExit = Callable[[int], None]


class ThreadChannel:
    """Requests to a worker on a thread, and its replies (see `Channel`).

    Args:
        thread: the worker's thread.
        requests: the outstanding requests, which name the buffers for the fixed parts of replies.
        on_exit: called with the exit code when the worker ends, by CLOSE or because an env ends its program.
    """

    def __init__(self, thread: EnvThread, requests: OutstandingRequests, on_exit: _OnExit) -> None:
        self.server: RequestServer | None = None
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._thread = thread
        self._requests = requests
        self._on_exit = on_exit
        self._on_frame: Callable[[Frame], None] | None = None  # set by `receive`
        self._early: list[Frame] = []  # that came before
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._service: Service | None = None
        self._table: DefinitionTable | None = None  # of the worker: its classes keep their identity in replies
        self._fast_path: FastPath | None = None  # of the service, as long as C alone has stepped since
        self._times: dict[Kind, RunTimes] = {}  # by kind of the requests that may run on the caller's thread
        self._inline = False  # whether a request runs on the caller's thread at the moment

    def allow_inline(self, *, always: bool = False) -> None:
        """Let short steps and resets run on the caller's thread from now on."""
        kinds = (Kind.STEP, Kind.RESET)
        inline = True if always else None
        self._times = {kind: RunTimes(_INLINE_LIMIT_S, inline, _INLINE_LIMIT_S) for kind in kinds}

    @contextlib.contextmanager
    def all_on_thread(self) -> Iterator[None]:
        """Run nothing on the caller's thread for the length of a block."""
        times, self._times = self._times, {}
        try:
            yield
        finally:
            self._times = times

    # ------------------------------------------------------------ requests (see `Channel`)

    def send(self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer], payload: Buffer) -> None:
        """Give the worker a request; a short one is answered before this returns (see `Channel`)."""
        if self._ended.done():
            return
        frame = Frame(kind, request, generation, [memoryview(part) for part in fixed], self._view_of(payload))
        self._fast_path = None
        times = self._times.get(kind)
        if times is not None and times.inline and not self._thread.jobs:
            self._run_inline(frame)
        else:
            self._thread.submit(partial(self._serve, frame), self._on_served)

    def _view_of(self, payload: Buffer) -> memoryview:
        """Return a view of the message that this thread has pickled; it keeps the definitions that the message names.

        A reply may be read long after its delivery, by the task that waits for it.
        """
        named = self._table.take_recent() if self._table is not None else []
        return memoryview(_Message(payload, named) if named else payload)

    @property
    def steps_inline(self) -> bool:
        """Whether the next step is going to run on the caller's thread."""
        return self._inline_times(0.0) is not None

    def _inline_times(self, limit_s: float) -> RunTimes | None:
        """Return what measures steps, if the next one may run on the thread of a caller with this limit."""
        times = self._times.get(_STEP)
        if times is None or self._thread.jobs or not (times.inline or times.inline_for(limit_s)) or self._ended.done():
            return None
        return times

    @property
    def results(self) -> ResultArrays:
        """The results of the last `step` that C has finished, in arrays of the worker."""
        assert self._fast_path is not None
        return self._fast_path.into[0]  # type: ignore[no-any-return]

    def step(
        self,
        first: int,
        count: int,
        actions: npt.NDArray[Any] | list[Any],
        into: list[memoryview] | None,
        *,
        limit_s: float = 0.0,
    ) -> bytes | tuple[Any, ...] | None:
        """Step successive rows on the caller's thread, by C, if their steps are short.

        Args:
            first, count: the rows.
            actions: one a row, in a list, or in an array that nothing else uses: envs may keep them.
            into: the buffers for the results; None: they stay in the worker's arrays (see `results`).
            limit_s: steps are also short below this; for a caller who blocks no loop.

        Returns:
            The payload of the reply; the fields of a `PartialStep` that `finish_step` must finish (see
            `speedups.step_here`); or None if nothing was done.
        """
        times, fast_path = self._inline_times(limit_s), self._fast_path
        if times is None or speedups.step_here is None:
            return None
        if fast_path is None:
            fast_path = self._fast_path = self._service.fast_path() if self._service is not None else None
            if fast_path is None:
                return None
        self._requests.allocate_id()  # a rollout must know that there was a step
        start_s = perf_counter()
        result = speedups.step_here(fast_path, first, count, actions, into)
        times.record(perf_counter() - start_s)
        return result

    def infos_of(self, started: PartialStep) -> list[tuple[int, dict[str, Any]]] | None:
        """Return the infos of a step that C has finished but for these, with their rows.

        Returns:
            They may hold objects that an env is going to change. None if Python must finish `started`.
        """
        assert self._fast_path is not None
        done = started.row == started.rows.stop and self._fast_path.write_extras is None
        return started.infos if done else None

    def finish_step(self, started: PartialStep) -> None:
        """Finish a step that C has started, on the caller's thread, and deliver the reply before this returns.

        Raises:
            BaseException: if a signal handler, that of Ctrl-C say, has interrupted an env: what the handler raised. The
                reply was delivered, with an error of that slot.
        """
        self._fast_path = None
        error = started.outcome
        if not (isinstance(error, BaseException) and raised_by_handler(error)):
            self._run_inline(started)
            return
        if isinstance(error, SystemExit):  # the program's, not the env's
            started = started._replace(outcome=_interrupted(error))
        self._run_inline(started)
        raise error

    def _run_inline(self, frame: Frame | PartialStep) -> None:
        more, error = None, None
        table = current_table()
        with HeldSignals(twice=False):  # a handler that raises would seem to be the env's error, or lose the reply
            self._inline = True
            set_current_table(self._table)
            try:
                more = self._serve(frame)
            except (Exception, SystemExit) as exc:
                error = exc
            finally:
                set_current_table(table)
                self._inline = False
            self._on_served(more, error)

    def _serve(self, frame: Frame | PartialStep) -> bool:
        """Answer a request, on the thread that calls it."""
        if isinstance(frame, Frame):
            frame = self._placed(frame)
        times = self._times.get(frame.kind)
        start_s = perf_counter()
        assert self.server is not None
        try:
            more = self.server.serve(frame)
        except SystemExit as error:
            if os.getpid() != self._pid:  # a child that an env has forked, and not this program, is to end
                os._exit(_exit_code(error))
            raise
        if times is not None:
            times.record(perf_counter() - start_s)
        return more

    def _placed(self, frame: Frame) -> Frame:
        """Copy the fixed part of a request to where the service expects it, as a read would."""
        if self._service is None or not frame.fixed:
            return frame
        size = sum(map(len, frame.fixed))
        header = Header(frame.kind, frame.request, frame.generation, size, len(frame.payload), 0, 0)
        into = self._service.request_buffers(header)
        if into is None or sum(map(len, into)) != size:
            return frame
        _copy(frame.fixed, into)
        return frame._replace(fixed=into)

    def _on_served(self, more: bool | None, error: BaseException | None) -> None:
        """Note on the loop that a request was served."""
        if isinstance(error, SystemExit):
            self._on_exit(_exit_code(error))
        elif error is not None:
            self._end(WireError(f"a request could not be served: {type(error).__name__}: {error}"))
        elif not more:
            self._on_exit(0)

    # ------------------------------------------------------------ replies (see `ReplyWriter`)

    def use(self, service: Service) -> None:
        """See `ReplyWriter`."""
        self._table = current_table()
        self._service = service
        self._fast_path = None

    def write(
        self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer] = (), payload: Buffer = b""
    ) -> None:
        """Take a reply of the service: copy its arrays to where the caller wants them, and deliver it on the loop."""
        into: Sequence[memoryview] = ()
        if fixed:
            pending = self._requests.pending.get(request)
            into = (pending.into if pending is not None else None) or ()
            _copy(fixed, into)
        frame = Frame(kind, request, generation, into, self._view_of(payload))
        if self._inline:
            self._deliver(frame)
        else:
            self._thread.publish(self._deliver, frame)

    def _deliver(self, frame: Frame) -> None:
        if self._ended.done():
            return
        if self._on_frame is None:  # uvloop may call a reader before a task that was made earlier
            self._early.append(frame)
        else:
            self._hand_over(self._on_frame, frame)

    def _hand_over(self, on_frame: Callable[[Frame], None], frame: Frame) -> None:
        try:
            on_frame(frame)
        except BaseException as exc:
            self._end(exc if isinstance(exc, Exception) else WireError("this process was interrupted"))
            if not isinstance(exc, Exception):
                raise

    # ------------------------------------------------------------ the end, and what only sockets have (see `Channel`)

    async def receive(self, on_frame: Callable[[Frame], None]) -> None:
        """Deliver replies until the channel is closed (see `Channel`)."""
        self._on_frame = on_frame
        early, self._early = self._early, []
        for frame in early:  # also if the worker has ended meanwhile: they came before its end
            self._hand_over(on_frame, frame)
        await self._ended

    def poll(self, poll_s: float = 0.0) -> None:
        """Deliver replies that are there (see `Channel`). For `poll_s` of a `ReplyWriter` there is no use here."""
        self._thread.poll()

    @property
    def poll_fd(self) -> int | None:
        """The descriptor that is readable when `poll` can deliver something (see `Channel`)."""
        return None if self._ended.done() else self._thread.result_fd

    @property
    def reader_disabled(self) -> bool:
        """False: the loop always watches the thread."""
        return False

    def enable_reader(self) -> None:
        """Do nothing: the loop always watches the thread."""

    def close_service(self) -> None:
        """Close the service, on its thread, and forget it: what it holds is freed at once."""
        server, self.server, self._service, self._fast_path = self.server, None, None, None
        if server is not None:
            server.close()

    def close(self) -> None:
        """Take no more requests, and deliver no more replies."""
        self._end(None)

    def _end(self, exc: Exception | None) -> None:
        """Let `receive` return, or raise this."""
        if self._ended.done() or self._loop.is_closed():
            return
        if exc is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(exc)


class _Message(bytes):
    """A pickle, and the definitions that it names, of a table whose own references are weak (see `LiveTable`)."""

    named: list[Any]

    def __new__(cls, data: Buffer, named: list[Any]) -> _Message:
        self = super().__new__(cls, data)
        self.named = named
        return self


def _exit_code(error: SystemExit) -> int:
    """Return the exit code of a process that ends by this; print what is none, as Python does."""
    code = 0 if error.code is None else error.code
    if isinstance(code, int):
        return code
    if sys.stderr is not None:
        sys.stderr.write(f"{code}\n")
    return 1


def _interrupted(error: SystemExit) -> RuntimeError:
    """Return the error of a slot whose env was interrupted because the program is to end."""
    wrapped = RuntimeError(f"it was interrupted by a signal, whose handler raised {reason_of(error)}")
    wrapped.__cause__ = error
    return wrapped


def _copy(parts: Sequence[Buffer], into: Sequence[memoryview]) -> None:
    """Copy buffers into others that have the same sizes, or at least the same size in all.

    Raises:
        WireError: if they have not.
    """
    if [len(part) for part in parts] != [len(part) for part in into]:
        if sum(map(len, parts)) != sum(map(len, into)):
            raise WireError(f"expected {sum(map(len, into))} bytes of arrays, got {sum(map(len, parts))}")
        parts, start = [b"".join(parts)], 0
        for part in into:
            part[:] = parts[0][start : start + len(part)]
            start += len(part)
        return
    for source, target in zip(parts, into, strict=True):
        target[:] = source


class ThreadProcess:
    """A thread in place of a process (see `Process`).

    It can't be killed: a thread that hangs in an env is left running, as a daemon, which does not keep the program from
    ending. What its envs print goes where this process prints, and breakpoints stop at this terminal.

    Args:
        make_server: makes what answers requests.
        memory: a descriptor of shared memory that the worker owns; None: it shares none.
        name: the name of the thread.

    Raises:
        OSError, RuntimeError: if the thread can't be started; the descriptor is still open then.
    """

    def __init__(self, make_server: MakeServer, memory: int | None, name: str) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self.current_row: CurrentRow | None = CurrentRow(None)
        self.node = ""
        self.fault: str | None = None
        self.exited = asyncio.Event()
        no_output = asyncio.StreamReader()  # a thread prints where this process prints
        no_output.feed_eof()
        self.output = Output(no_output, self.exited)
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._thread = EnvThread(f"aioenv-{name}")
        self._channel: ThreadChannel | None = None
        self._ending = False
        self._make_server = make_server
        self._memory = memory

    def open_channel(self, requests: OutstandingRequests) -> ThreadChannel:
        """See `Process`."""
        assert self.current_row is not None
        channel = self._channel = ThreadChannel(self._thread, requests, self._finish)
        make_server, current_row, memory = self._make_server, self.current_row.cell, self._memory

        def begin() -> None:
            channel.server = make_server(channel, current_row, memory)

        self._thread.submit(begin, lambda _, error: self._finish(1) if error is not None else None)
        return channel

    def _finish(self, code: int) -> None:
        """Close the service after the current job, then end the thread; doesn't wait."""
        if self._ending:
            return
        self._ending = True
        channel = self._channel

        def last() -> None:
            if channel is not None:
                channel.close_service()

        self._thread.submit(last, lambda _, __: self._on_end(code))
        self._thread.finish(lambda: None)

    def _on_end(self, code: int) -> None:
        if not self.exited.is_set():
            self.returncode = code
            self.exited.set()
            if self._channel is not None:  # as the stream of a process ends: each reply was delivered before
                self._channel.close()

    def signal(self, sig: signal.Signals) -> None:
        """See `Process`. Any signal ends the thread after its current job."""
        if self._channel is not None:
            self._channel.close()
        self._finish(0)

    def request_stack_dump(self) -> bool:
        """See `Process`: a debugger shows the stack."""
        return False

    async def reap(self) -> None:
        """See `Process`. A thread that hangs in an env is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self.exited.wait()
        if self.exited.is_set():
            return
        with contextlib.suppress(Exception):  # of a log handler: the end must be reported
            _log.warning(
                "%s has not ended: a thread can't be killed, so it is left to itself (it is a daemon, and does not "
                "keep the program from ending); with worker processes (num_workers=1 or more, without debug=True) envs "
                "can be killed",
                self._name,
            )
        self.returncode = -signal.SIGKILL
        self.exited.set()

    async def release(self) -> None:
        """See `Process`."""
        if not await self._thread.join(_JOIN_S if self.returncode != -signal.SIGKILL else 0):
            self._thread.detach()

    def abandon(self) -> None:
        """See `Process`."""
        self._finish(0)
        self._thread.detach()
