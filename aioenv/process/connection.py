"""One process of a worker, from when it runs to when nothing is left of it, and the conversation with it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from aioenv.errors import SlotError, WireError
from aioenv.ipc.frames import Buffer, Frame, Header, Kind, new_tuple
from aioenv.process.async_resource import own_task, to_the_end
from aioenv.process.channel import Channel
from aioenv.process.output import OutputLog
from aioenv.process.process import Process
from aioenv.speedups.attributes import read_by_c

__all__ = ["Connection", "CountedReply", "OnReply", "PendingReply", "Requests"]

OnReply: TypeAlias = "Callable[[Frame | SlotError], None]"


class CountedReply(NamedTuple):
    """A reply that only needs to be counted, if it is a RESULT and its batch request is awaited as a whole.

    Then its part has `arrived`, one less of the whole is `open`, and `done` is resolved when none is.

    Attributes:
        part: the `WorkerRequest`.
        whole: its `BatchRequest`.
        read: takes the reply's payload.
        always: whether `read` is called for an empty payload, too.
    """

    part: Any
    whole: Any
    read: Callable[[memoryview], None]
    always: bool


class PendingReply(NamedTuple):
    """A request whose reply has not come.

    Attributes:
        into: where the fixed part of the reply goes; None: into memory of its own.
        on_reply: is called with the reply.
        counted: how to count the reply, if nothing else need be done with it; None: `on_reply` does more.
    """

    into: Sequence[memoryview] | None
    on_reply: OnReply
    counted: CountedReply | None = None


@read_by_c
class Requests:
    """The requests of one process.

    C (`speedups.send_express`, `take_express`) adds to them and takes from them, too.

    Args:
        generation: how often its worker has been started; all frames carry it.

    Attributes:
        generation: as given.
        next: the id of the next one.
        pending: those that have not been answered, by id.
        abandoned: whether nobody waits for the replies any more.
    """

    __slots__ = ("abandoned", "generation", "next", "pending")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.next = 0
        self.pending: dict[int, PendingReply] = {}
        self.abandoned = False

    def number(self) -> int:
        """An id for the next request."""
        request = self.next
        self.next = (request + 1) & 0xFFFFFFFF
        return request

    def add(self, request: int, pending: PendingReply) -> None:
        """This has been sent."""
        self.pending[request] = pending
        self.abandoned = False

    def place(self, header: Header) -> Sequence[memoryview] | None:
        """Where the fixed part of a frame goes (see `Decoder`)."""
        pending = self.pending.get(header.request)
        if pending is None or header.kind is not Kind.RESULT or header.generation != self.generation:
            return None
        return pending.into

    def expect(self) -> Sequence[memoryview] | None:
        """Where that of the next one probably goes."""
        for pending in self.pending.values():
            return pending.into
        return None


_log = logging.getLogger("aioenv")

# Between the end of a process and the end of its streams: what it wrote before is read first, and a child of its
# own that holds the streams open does not hold us.
_LAST_BYTES_S = 0.25
# Between the end of its stream and its own: an interpreter that has nobody to answer takes this long to go, when
# CPUs are scarce, and its exit code says more than our SIGKILL.
_EXIT_S = 1.0
_TERM_S = 1.0
# How long a worker may take to say where it is: one that is stopped, or was starved, does not.
_WHERE_S = 0.25
# How `faulthandler` begins what it prints, what each frame looks like, and the outermost one of a worker.
_STACK, _FRAME, _OUTERMOST = "Stack (most recent call first)", '  File "', '  File "<string>", line 1 in <module>'
# as it writes paths: what is not ASCII is escaped, and links are not followed
_PACKAGE = str(Path(__file__).absolute().parents[1]).encode("ascii", "backslashreplace").decode()
_OURS = tuple(f"{_FRAME}{_PACKAGE}/{layer}/" for layer in ("spaces", "state", "worker"))


class Connection:
    """A process and its channel.

    Args:
        process: the process.
        output: where what it prints goes.
        name: goes into the names of tasks.
        generation: all frames of this process carry it.
        on_end: called once, when the process has ended and all that it wrote has been read.

    Attributes:
        on_images: called with each IMAGES frame.
        requests: what has been asked of it and has not been answered.
        channel: how frames get to it and back.
        fault: how its stream was broken, if it was.
    """

    def __init__(
        self,
        process: Process,
        output: OutputLog,
        *,
        name: str,
        generation: int,
        on_end: Callable[[Connection], None],
    ) -> None:
        self.on_images: Callable[[Frame], None] | None = None
        self.fault: WireError | None = None
        self._name = name
        self._process = process
        self._output = output
        self._on_end = on_end
        self._told_to_end = False
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._gone = asyncio.Event()  # the process has ended, and everything about it is cleared away
        self.requests = Requests(generation)
        self.channel: Channel = process.channel(self.requests)
        self._last_row: int | None = None
        self._frames = own_task(self._receive(), name=f"{name}: frames")
        self._prints = own_task(output.pump(process.output), name=f"{name}: output")
        self._watcher = own_task(self._watch(), name=f"{name}: watch")

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How the process ended: its exit code, `-N` for signal N; None while it runs."""
        return self._process.returncode

    @property
    def stderr(self) -> str:
        """The last lines that it printed."""
        return self._output.tail

    @property
    def row(self) -> int | None:
        """The row that it runs, or ran when it ended; None if none."""
        marker = self._process.marker
        return marker.row if marker is not None else self._last_row

    # ------------------------------------------------------------ requests

    def submit(
        self, kind: Kind, fixed: Sequence[Buffer], tail: Buffer, into: Sequence[memoryview] | None, on_reply: OnReply
    ) -> int:
        """Send a request (see `Worker.submit`)."""
        requests = self.requests
        request = requests.number()
        self.channel.send(kind, request, requests.generation, fixed, tail)
        requests.add(request, new_tuple(PendingReply, (into, on_reply, None)))
        return request

    def poll(self) -> None:
        """Take replies that have come already, without waiting for the loop."""
        self.channel.poll()

    @property
    def waitable(self) -> int | None:
        """A descriptor to wait on for replies (see `Channel.waitable`)."""
        return self.channel.waitable

    def listen(self) -> None:
        """Have the loop look for what comes from it, if it did not."""
        self.channel.listen()

    def _on_frame(self, frame: Frame) -> None:
        requests = self.requests
        if frame.generation != requests.generation:
            return
        if frame.kind is Kind.IMAGES:
            if self.on_images is not None:
                self.on_images(frame)
            return
        pending = requests.pending.pop(frame.request, None)
        if pending is not None:
            try:
                pending.on_reply(frame)
            except BaseException:
                requests.pending[frame.request] = pending  # it hears of the end that this brings, at least
                raise

    async def where(self) -> str:
        """The Python frames that its main thread is in, the innermost first; "" if it does not say."""
        lines: list[str] = []
        said = asyncio.Event()

        def hear(more: Sequence[str]) -> None:
            lines.extend(more)
            if _OUTERMOST in more:
                said.set()

        self._output.listener = hear
        try:
            if self._process.ask_where():
                await _within(said, _WHERE_S)
        finally:
            self._output.listener = None
        return "\n".join(_frames(lines))

    # ------------------------------------------------------------ the end

    async def _receive(self) -> None:
        try:
            await self.channel.receive(self._on_frame)
        except WireError as exc:
            self.fault = exc
        except (ConnectionError, BrokenPipeError):
            pass  # the process has ended; `_watch` says how
        except Exception as exc:  # in handling a reply: nobody may wait for ever
            self.fault = WireError(f"its reply could not be handled: {type(exc).__name__}: {exc}")
            _log.exception("a reply of %s could not be handled", self._name)

    async def _watch(self) -> None:
        try:
            await self._see_the_end()
        except GeneratorExit:  # its loop was closed: nobody else looks after the process
            self.abandon()
            raise
        finally:
            if not self._loop.is_closed():
                self._gone.set()

    async def _see_the_end(self) -> None:
        """Wait for the end of the process or of its stream, whichever comes first; then clear everything away."""
        process, frames = self._process, self._frames
        exited = own_task(process.exited.wait())
        await asyncio.wait([frames, exited], return_when=asyncio.FIRST_COMPLETED)
        self.listen()
        if not exited.done() and not self._told_to_end:
            # a worker that has closed its stream, or broken it, is of no use any more
            await asyncio.wait([exited], timeout=_EXIT_S if self.fault is None else 0)
            if not exited.done():
                if self.fault is None:
                    self.fault = WireError(f"it closed its end, and had not exited {_EXIT_S:g} s later")
                process.signal(signal.SIGKILL)
        await asyncio.wait([frames, self._prints], timeout=_LAST_BYTES_S)
        exited.cancel()
        await process.reap()
        self._last_row = self.row
        self.channel.close()
        frames.cancel()
        self._prints.cancel()
        try:
            self._on_end(self)
        finally:
            await process.release()

    async def end(self, grace_s: float, late: Callable[[], None]) -> None:
        """The process has been asked to end: after `grace_s` seconds SIGTERM, a second later SIGKILL.

        If this is cancelled, it is killed at once.

        Args:
            grace_s: in seconds.
            late: called when these have passed.
        """
        self._told_to_end = True
        try:
            if await _within(self._gone, grace_s):
                return
            late()
            self._process.signal(signal.SIGTERM)
            if await _within(self._gone, _TERM_S):
                return
        finally:
            self.kill()
        await self._gone.wait()

    def kill(self) -> None:
        """Kill the process and its group, without waiting."""
        if not self._gone.is_set():
            self._process.signal(signal.SIGKILL)

    async def gone(self) -> None:
        """Wait until nothing is left; a cancellation waits for that too. The end must be near."""
        await to_the_end(own_task(self._gone.wait()))

    def abandon(self) -> None:
        """Kill the process without a loop to wait on."""
        if self._pid == os.getpid():  # a forked copy has nothing to end
            if not self._loop.is_running():
                self.channel.close()
            self._process.abandon()


def _frames(lines: Sequence[str]) -> Iterator[str]:
    """The frames in what `faulthandler` has printed, without those that every worker has."""
    stack = dropwhile(lambda line: not line.startswith(_STACK), lines)
    frames = (line for line in stack if line.startswith(_FRAME))
    return takewhile(lambda line: not line.startswith(_OURS), frames)


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
