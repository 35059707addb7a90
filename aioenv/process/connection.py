"""The connection with one process of a worker: its outstanding requests, its replies, and its end.

A reply is matched to its request by id, in `Connection._on_frame`, or by C for replies to plain steps.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aioenv.errors import SlotError, WireError
from aioenv.ipc.frames import Buffer, Frame, Header, Kind, new_tuple
from aioenv.process.async_resource import internal_task, wait_through_cancel
from aioenv.process.channel import Channel
from aioenv.process.failures import OutputLog
from aioenv.process.process import Process
from aioenv.process.thread_process import ThreadChannel
from aioenv.speedups import read_by_c

if TYPE_CHECKING:
    from aioenv.worker.service import PartialStep

__all__ = ["Connection", "FastReply", "OnReply", "OutstandingRequests", "PendingReply"]

_log = logging.getLogger("aioenv")

# Time between the end of a process and the end of its streams. Its last bytes are read first, but a child process that
# holds the streams open does not delay this.
_LAST_BYTES_S = 0.25
# Time between the end of the stream and the end of the process. An interpreter takes this long to exit when CPUs are
# scarce, and its exit code says more than a SIGKILL from here.
_EXIT_S = 1.0
_TERM_S = 1.0
# How long a worker may take to print its stack: one that is stopped, or starved, does not.
_STACK_S = 0.25
# The first line of `faulthandler`'s output, the prefix of each frame, and a worker's outermost frame.
_STACK, _FRAME, _OUTERMOST = "Stack (most recent call first)", '  File "', '  File "<string>", line 1 in <module>'
# as `faulthandler` writes paths: non-ASCII characters are escaped, and links are not resolved
_PACKAGE = str(Path(__file__).absolute().parents[1]).encode("ascii", "backslashreplace").decode()
_OWN_FRAMES = tuple(f"{_FRAME}{_PACKAGE}/{layer}/" for layer in ("spaces", "state", "worker"))

OnReply: TypeAlias = "Callable[[Frame | SlotError], None]"


class FastReply(NamedTuple):
    """Data from which C processes a reply without `on_reply`, while the batch request is awaited as a whole.

    C reads the payload, marks the part as `arrived`, counts `open` down, and resolves `done` at zero.

    Attributes:
        part: the `WorkerRequest`.
        whole: its `BatchRequest`; only while that is `waiting`. None: `read` does all this, for `recv`.
        read: reads the payload; if it returns True, the reply is held back, and C does not mark and count it.
        always: whether to call `read` even if the payload is empty.
    """

    part: Any
    whole: Any
    read: Callable[[memoryview], bool | None]
    always: bool


class PendingReply(NamedTuple):
    """A request whose reply has not come.

    Attributes:
        into: the buffers for the fixed part of the reply; None: the reply has no fixed part.
        on_reply: called with the reply.
        fast_path: lets C process the reply, if it is a RESULT; None: only `on_reply` can process it.
    """

    into: Sequence[memoryview] | None
    on_reply: OnReply
    fast_path: FastReply | None = None


@read_by_c
class OutstandingRequests:
    """The requests of one process that have not been answered.

    C (`speedups.send_steps`, `take_replies`) adds and removes requests too.

    Args:
        generation: how often the worker has been restarted, 0 for the first process; all its frames carry it.

    Attributes:
        generation: as given.
        next_id: the id of the next request.
        pending: the requests that have not been answered, by id, the oldest first.
        abandoned: whether no caller waits for the replies any more.
    """

    __slots__ = ("abandoned", "generation", "next_id", "pending")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.next_id = 0
        self.pending: dict[int, PendingReply] = {}
        self.abandoned = False

    def allocate_id(self) -> int:
        """Return an id for the next request."""
        request = self.next_id
        self.next_id = (request + 1) & 0xFFFFFFFF
        return request

    def add(self, request: int, pending: PendingReply) -> None:
        """Add a request that has been sent."""
        self.pending[request] = pending
        self.abandoned = False

    def buffers_for(self, header: Header) -> Sequence[memoryview] | None:
        """Return the buffers for a frame's fixed part (see `Decoder`)."""
        pending = self.pending.get(header.request)
        if pending is None or header.kind is not Kind.RESULT or header.generation != self.generation:
            return None
        return pending.into

    def predict_buffers(self) -> Sequence[memoryview] | None:
        """Return the buffers for the next frame's fixed part, if replies come in order (see `Decoder`)."""
        for pending in self.pending.values():
            return pending.into
        return None


class Connection:
    """A process, from its launch until nothing is left of it, and its channel.

    Args:
        process: the process.
        output: reads its output.
        name: appears in the names of tasks.
        generation: all frames of this process carry it.
        on_end: called once, when the process has ended and everything that it wrote has been read.

    Attributes:
        on_images: called with each IMAGES frame.
        requests: its outstanding requests.
        channel: its channel.
        fault: the error that broke its stream; None while it is whole.
        node: the name of its machine; empty: this one.
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
        self.node = process.node
        self._name = name
        self._process = process
        self._output = output
        self._on_end = on_end
        self._asked_to_end = False
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._cleaned_up = asyncio.Event()  # the process has ended, and all of its resources are released
        self.requests = OutstandingRequests(generation)
        self.channel: Channel = process.open_channel(self.requests)
        self._last_row: int | None = None
        self._frames_task = internal_task(self._receive(), name=f"{name}: frames")
        self._output_task = internal_task(output.pump(process.output), name=f"{name}: output")
        self._end_task = internal_task(self._watch(), name=f"{name}: watch")

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or `-N` for signal N; None while it runs."""
        return self._process.returncode

    @property
    def lost(self) -> str | None:
        """Why nothing more can be heard of the process; None if that is not so."""
        return self._process.fault

    @property
    def stderr(self) -> str:
        """The last lines that it printed."""
        return self._output.last_lines

    @property
    def row(self) -> int | None:
        """The row that it runs, or ran when it ended; None if none."""
        current_row = self._process.current_row
        return current_row.row if current_row is not None else self._last_row

    # ------------------------------------------------------------ requests

    def submit(
        self, kind: Kind, fixed: Sequence[Buffer], payload: Buffer, into: Sequence[memoryview] | None, on_reply: OnReply
    ) -> int:
        """Send a request (see `Worker.submit`)."""
        requests = self.requests
        request = requests.allocate_id()
        # before it is sent: a worker in this process may answer at once
        requests.add(request, new_tuple(PendingReply, (into, on_reply, None)))
        try:
            self.channel.send(kind, request, requests.generation, fixed, payload)
        except BaseException:
            requests.pending.pop(request, None)
            raise
        return request

    def finish_step(self, partial: PartialStep, into: Sequence[memoryview], on_reply: OnReply) -> None:
        """Let a worker in this process finish a step that C has started on the caller's thread.

        Args:
            partial: of `ThreadChannel.step`.
            into, on_reply: as for `submit`; `on_reply` is called before this returns, unless the worker ends.
        """
        requests, channel = self.requests, self.channel
        assert isinstance(channel, ThreadChannel)
        request = requests.allocate_id()
        requests.add(request, new_tuple(PendingReply, (into, on_reply, None)))
        channel.finish_step(partial._replace(request=request, generation=requests.generation))

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
                requests.pending[frame.request] = pending  # the error ends the connection, and with it this request
                raise

    async def current_stack(self) -> str:
        """Return the Python frames of its main thread, the innermost first; "" if it does not print them in time."""
        lines: list[str] = []
        complete = asyncio.Event()

        def on_lines(more: Sequence[str]) -> None:
            lines.extend(more)
            if _OUTERMOST in more:
                complete.set()

        self._output.listener = on_lines
        try:
            if self._process.request_stack_dump():
                await _wait_event(complete, _STACK_S)
        finally:
            self._output.listener = None
        return "\n".join(_env_frames(lines))

    # ------------------------------------------------------------ the end

    async def _receive(self) -> None:
        try:
            await self.channel.receive(self._on_frame)
        except WireError as exc:
            self.fault = exc
        except (ConnectionError, BrokenPipeError):
            pass  # the process has ended; `_watch` finds out how
        except Exception as exc:  # in a reply's handler: no caller may wait forever
            self.fault = WireError(f"its reply could not be handled: {type(exc).__name__}: {exc}")
            _log.exception("a reply of %s could not be handled", self._name)

    async def _watch(self) -> None:
        try:
            await self._await_end()
        except GeneratorExit:  # the loop was closed: no other task ends the process
            self.abandon()
            raise
        finally:
            if not self._loop.is_closed():
                self._cleaned_up.set()

    async def _await_end(self) -> None:
        """Wait for the end of the process or of its stream, whichever comes first; then release everything."""
        process, frames = self._process, self._frames_task
        exited = internal_task(process.exited.wait())
        await asyncio.wait([frames, exited], return_when=asyncio.FIRST_COMPLETED)
        self.channel.enable_reader()
        if not exited.done() and not self._asked_to_end:
            # a worker that has closed its stream, or broken it, is of no more use
            await asyncio.wait([exited], timeout=_EXIT_S if self.fault is None else 0)
            if not exited.done():
                if self.fault is None:
                    self.fault = WireError(f"it closed its end, and had not exited {_EXIT_S:g} s later")
                process.signal(signal.SIGKILL)
        await asyncio.wait([frames, self._output_task], timeout=_LAST_BYTES_S)
        exited.cancel()
        await process.reap()
        self._last_row = self.row
        self.channel.close()
        frames.cancel()
        self._output_task.cancel()
        try:
            self._on_end(self)
        finally:
            await process.release()

    async def end(self, grace_s: float, on_late: Callable[[], None]) -> None:
        """Wait for a process that was asked to end; after `grace_s` seconds SIGTERM, a second later SIGKILL.

        If this is cancelled, the process is killed at once.

        Args:
            grace_s: in seconds.
            on_late: called when these have passed.
        """
        self._asked_to_end = True
        try:
            if await _wait_event(self._cleaned_up, grace_s):
                return
            on_late()
            self._process.signal(signal.SIGTERM)
            if await _wait_event(self._cleaned_up, _TERM_S):
                return
        finally:
            self.kill()
        await self._cleaned_up.wait()

    def kill(self) -> None:
        """Kill the process and its group, without waiting."""
        if not self._cleaned_up.is_set():
            self._process.signal(signal.SIGKILL)

    async def cleaned_up(self) -> None:
        """Wait until nothing is left of the process, even if cancelled. It must have been killed, or be ending."""
        await wait_through_cancel(internal_task(self._cleaned_up.wait()))

    def abandon(self) -> None:
        """Kill the process without a loop to wait on."""
        if self._pid == os.getpid():  # a forked copy owns nothing
            if not self._loop.is_running():
                self.channel.close()
            self._process.abandon()


def _env_frames(lines: Sequence[str]) -> list[str]:
    """Return the frames in `faulthandler`'s output, without this package's outer frames, which every worker has."""
    stack = dropwhile(lambda line: not line.startswith(_STACK), lines)
    frames = [line for line in takewhile(lambda line: line != _OUTERMOST, stack) if line.startswith(_FRAME)]
    # from the end: an env may hang in a function of MuJoCo's that a worker wraps
    while frames and frames[-1].startswith(_OWN_FRAMES):
        frames.pop()
    return frames


async def _wait_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event; return False after the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
