"""One worker process and the state machine of its life.

NEW ──start──▶ STARTING ──ready──▶ RUNNING ──close──▶ CLOSING ──exit──▶ DEAD
                   └──────fail/exit────┴───────exit──────────────────────▲
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

from aioenv.errors import EnvError, SlotError, WireError, WorkerDied, describe_exit
from aioenv.wire.frames import Buffer, Encoder, Frame, Header, Kind
from aioenv.wire.messages import Call, Failure, Start, dump_code, load
from aioenv.workers import faults
from aioenv.workers.channel import Channel, check_channel
from aioenv.workers.environment import worker_environment
from aioenv.workers.launch import check_start, launch
from aioenv.workers.output import OutputLog
from aioenv.workers.process import Process, kill_group

__all__ = ["OnReply", "Worker", "WorkerState"]

OnReply: TypeAlias = "Callable[[Frame | SlotError], None]"


class WorkerState(Enum):
    """Where a worker is in its life."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    CLOSING = "closing"
    DEAD = "dead"


_NEXT: dict[tuple[WorkerState, str], WorkerState] = {
    (WorkerState.NEW, "start"): WorkerState.STARTING,
    (WorkerState.STARTING, "ready"): WorkerState.RUNNING,
    (WorkerState.RUNNING, "close"): WorkerState.CLOSING,
    (WorkerState.NEW, "exit"): WorkerState.DEAD,
    (WorkerState.STARTING, "exit"): WorkerState.DEAD,
    (WorkerState.RUNNING, "exit"): WorkerState.DEAD,
    (WorkerState.CLOSING, "exit"): WorkerState.DEAD,
    (WorkerState.DEAD, "exit"): WorkerState.DEAD,
}

# Between the end of a process and the end of its streams: what it wrote before is read first, and a child of its
# own that holds the streams open does not hold us.
_LAST_BYTES_S = 0.25
_TERM_S = 1.0


class _Pending:
    """A request whose reply has not come."""

    __slots__ = ("into", "on_reply")

    def __init__(self, into: Sequence[memoryview] | None, on_reply: OnReply) -> None:
        self.into = into
        self.on_reply = on_reply


class Worker:
    """The parent's handle of one worker process.

    Args:
        service: a pickled callable that makes the service in the worker (`messages.dump_code`).
        index: its number among its like.
        slots: the slots that it holds, for errors and logs.
        role: what it is, in errors and logs.
        start: how it is started (see `launch.check_start`).
        channel: how frames reach it (see `channel.check_channel`).
        poll_s: how long it may poll for a request before it sleeps, in seconds.
        env: environment variables over those of this process.
        log_prefix: goes before each line that it prints.
        preload: modules that it imports first.
        needed: modules that its service will import, for a fork server to do it once for all.
        registry: Gymnasium's registry, as `host.registry.capture_registry` gives it.
        start_timeout_s: how long it may take to come up, in seconds.
        generation: how often this worker has been started before; its frames carry it.

    Attributes:
        description: what the service told about itself, once started.
        on_images: called with each IMAGES frame.
        on_death: called once, when the worker has ended without having been asked to.
    """

    def __init__(
        self,
        service: bytes,
        *,
        index: int,
        slots: tuple[int, ...] = (),
        role: str = "worker",
        start: str | None = None,
        channel: str = "auto",
        poll_s: float = 0.0,
        env: Mapping[str, str] | None = None,
        log_prefix: str | None = None,
        preload: Sequence[str] = (),
        needed: Sequence[str] = (),
        registry: dict[str, tuple[str, bytes]] | None = None,
        start_timeout_s: float = 60.0,
        generation: int = 0,
    ) -> None:
        self.index = index
        self.slots = slots
        self.state = WorkerState.NEW
        self.generation = generation
        self.description: Any = None
        self.on_images: Callable[[Frame], None] | None = None
        self.on_death: Callable[[Worker], None] | None = None
        self._label = f"{role} {index}"
        self._start = check_start(start)
        self._channel_kind = check_channel(channel)
        self._environ = worker_environment(env)
        self._log_prefix = log_prefix
        self._imports = (*preload, *needed)
        forked = self._start == "forkserver"
        self._message = Start(
            list(sys.path),
            registry or {},
            tuple(preload),
            service,
            self._environ if forked else None,
            os.getcwd() if forked else None,
            poll_s,
        )
        self._start_timeout_s = start_timeout_s
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._output: OutputLog | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._gone = asyncio.Event()  # the process has ended, and everything about it is cleared away
        self._pending: dict[int, _Pending] = {}
        self._next_request = 0
        self._fault: WireError | None = None

    def __repr__(self) -> str:
        return f"<{self._label} {self.state.value} pid={self.pid}>"

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """How the process ended: its exit code, `-N` for signal N; None while it runs."""
        return self._process.returncode if self._process else None

    @property
    def stderr(self) -> str:
        """The last lines that the worker printed."""
        return self._output.tail if self._output else ""

    def _go(self, event: str) -> None:
        self.state = _NEXT[self.state, event]

    # ------------------------------------------------------------ start

    async def start(self) -> None:
        """Start the process and wait until its service is up.

        If this is cancelled, the process is killed.

        Raises:
            WorkerStartError: if the service could not be made, the process ended, or `start_timeout_s` passed.
        """
        self._go("start")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._process = await launch(self._start, self._channel_kind, self._environ, self._imports)
                self._attach(self._process)
                ready: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
                self.submit(Kind.START, (), dump_code(self._message), on_reply=_settle(ready))
                frame = await ready
                if frame.kind is Kind.FAILURE:
                    raise faults.start_failed(self._identity, load(frame.tail))
                self.description = load(frame.tail)
        except BaseException as exc:
            await self.kill()
            if isinstance(exc, TimeoutError):
                message = f"{self._label} was not ready within start_timeout_s={self._start_timeout_s}"
                raise faults.start_error(self._identity, message) from None
            if isinstance(exc, WorkerDied):
                message = f"{self._label} (pid {self.pid}) {describe_exit(exc.returncode)} while starting"
                raise faults.start_error(self._identity, message) from None
            if isinstance(exc, WireError):
                message = f"{self._label} could not be understood: {exc}"
                raise faults.start_error(self._identity, message) from exc
            raise
        self._go("ready")

    def _attach(self, process: Process) -> None:
        loop = asyncio.get_running_loop()
        self._channel = process.channel(self._place, self._expect)
        self._encoder = Encoder()  # one a stream
        self._output = OutputLog(self._label, process.pid, self.slots, self._log_prefix)
        frames = loop.create_task(self._receive(self._channel), name=f"{self._label}: frames")
        output = loop.create_task(self._output.pump(process.output), name=f"{self._label}: output")
        watch = loop.create_task(self._watch(process, frames, output), name=f"{self._label}: watch")
        self._tasks = [frames, output, watch]

    # ------------------------------------------------------------ requests

    def submit(
        self,
        kind: Kind,
        fixed: Sequence[Buffer] = (),
        tail: Buffer = b"",
        *,
        into: Sequence[memoryview] | None = None,
        on_reply: OnReply,
    ) -> int:
        """Send a request; never blocks.

        Args:
            kind: what is asked.
            fixed: raw buffers; they must stay as they are until the reply.
            tail: what varies in length.
            into: where the fixed part of the reply shall be read into, if its length is the same.
            on_reply: called once, on the loop: with the RESULT or READY or FAILURE frame, or with a WorkerDied.

        Returns:
            The request's id.

        Raises:
            WorkerDied: if the worker is not there any more; `on_reply` is not called then.
            WireError: if the request is too large.
        """
        if self._channel is None or self.state is WorkerState.DEAD:
            raise self.death()
        request = self._next_request
        self._next_request = (request + 1) & 0xFFFFFFFF
        buffers = self._encoder.encode(kind, request, self.generation, fixed, tail)
        self._pending[request] = _Pending(into, on_reply)
        self._channel.send(buffers)
        return request

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the service.

        If this is cancelled, the worker still runs the method; the result is dropped.

        Raises:
            WorkerDied: if the worker ended before it answered.
            EnvError: if the method raised.
        """
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.submit(Kind.CALL, (), dump_code(Call(method, args, kwargs)), on_reply=_settle(reply))
        frame = await reply
        if frame.kind is Kind.FAILURE:
            raise self.failure(load(frame.tail))
        return load(frame.tail)

    def poll(self) -> None:
        """Take replies that have come already, without waiting for the loop."""
        if self._channel is not None:
            self._channel.poll()

    @property
    def busy(self) -> bool:
        """Whether any request has not been answered yet."""
        return bool(self._pending)

    def is_pending(self, request: int) -> bool:
        """Whether the reply to a request has not come yet."""
        return request in self._pending

    def failure(self, failure: Failure) -> EnvError:
        """What the worker tells of an exception, as an exception."""
        return faults.env_error(self._identity, failure)

    def failure_here(self, message: str, slots: Sequence[int]) -> EnvError:
        """An error of some slots that was found on this side."""
        return faults.env_error_here(self._identity, message, slots)

    def death(self) -> WorkerDied:
        """How the worker ended, as an exception."""
        return faults.worker_died(self._identity, self.returncode, self._fault)

    @property
    def _identity(self) -> faults.Identity:
        return faults.Identity(self._label, self.pid, self.slots, self.stderr)

    def _place(self, header: Header) -> Sequence[memoryview] | None:
        pending = self._pending.get(header.request)
        if pending is None or header.kind is not Kind.RESULT or header.generation != self.generation:
            return None
        return pending.into

    def _expect(self) -> Sequence[memoryview] | None:
        # replies are first in, first out
        for pending in self._pending.values():
            return pending.into
        return None

    def _on_frame(self, frame: Frame) -> None:
        if frame.generation != self.generation:
            return
        if frame.kind is Kind.IMAGES:
            if self.on_images is not None:
                self.on_images(frame)
            return
        pending = self._pending.pop(frame.request, None)
        if pending is not None:
            pending.on_reply(frame)

    # ------------------------------------------------------------ the end

    async def _receive(self, channel: Channel) -> None:
        try:
            await channel.receive(self._on_frame)
        except WireError as exc:
            self._fault = exc
        except (ConnectionError, BrokenPipeError):
            pass  # the process has ended; `_watch` says how

    async def _watch(self, process: Process, frames: asyncio.Task[None], output: asyncio.Task[None]) -> None:
        """Wait for the end of the process or of its stream, whichever comes first; then clear everything away."""
        exited = asyncio.ensure_future(process.exited.wait())
        await asyncio.wait([frames, exited], return_when=asyncio.FIRST_COMPLETED)
        if not exited.done() and self.state is not WorkerState.CLOSING:
            # a worker that has closed its stream, or broken it, is of no use any more
            await asyncio.wait([exited], timeout=_LAST_BYTES_S if self._fault is None else 0)
            if not exited.done():
                kill_group(process.pid, signal.SIGKILL)
        await asyncio.wait([frames, output], timeout=_LAST_BYTES_S)
        exited.cancel()
        await process.reap()
        self._clear_away()
        try:
            await process.release()
        finally:
            self._gone.set()

    def _clear_away(self) -> None:
        unasked = self.state is WorkerState.RUNNING
        self._go("exit")
        if self._channel is not None:
            self._channel.close()
        for task in self._tasks[:2]:
            task.cancel()
        pending, self._pending = self._pending, {}
        for request in pending.values():
            request.on_reply(self.death())
        if unasked and self.on_death is not None:
            self.on_death(self)

    async def close(self, grace_s: float = 1.0) -> None:
        """End the worker: ask it, after `grace_s` seconds SIGTERM, a second later SIGKILL. Idempotent.

        If this is cancelled, the worker is killed at once.
        """
        if self.state is WorkerState.NEW:
            self._go("exit")
            self._gone.set()
        if self.state is WorkerState.RUNNING:
            self._go("close")
            with contextlib.suppress(WorkerDied):
                self.submit(Kind.CLOSE, on_reply=lambda _: None)
        if self._process is None:
            return
        try:
            if await _within(self._gone, grace_s):
                return
            kill_group(self._process.pid, signal.SIGTERM)
            if await _within(self._gone, _TERM_S):
                return
        finally:
            if not self._gone.is_set():
                kill_group(self._process.pid, signal.SIGKILL)
        await self._gone.wait()

    async def kill(self) -> None:
        """End the worker at once, and wait until it is gone; a cancellation waits for that too."""
        if self._process is None:
            self._go("exit")
            return
        kill_group(self._process.pid, signal.SIGKILL)
        gone = asyncio.ensure_future(self._gone.wait())
        cancelled: asyncio.CancelledError | None = None
        while not gone.done():
            try:
                await asyncio.shield(gone)
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is not None:
            raise cancelled

    def abandon(self) -> None:
        """Kill the process without a loop to wait on: for `__del__` and the end of the interpreter."""
        if self._process is not None and self.state is not WorkerState.DEAD:
            self._process.abandon()


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _settle(future: asyncio.Future[Frame]) -> OnReply:
    def on_reply(outcome: Frame | SlotError) -> None:
        if future.done():
            return
        if isinstance(outcome, Frame):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    return on_reply
