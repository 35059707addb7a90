"""The worker's end of a channel: blocking reads and writes of frames on two descriptors, with polling before sleep."""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from aioenv import speedups
from aioenv.ipc import frame_io
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import Buffer, Encoder, Frame, Kind
from aioenv.worker.service import FastPath, PartialStep, Service

__all__ = ["MAX_POLL_S", "SpinPoller", "WorkerEnd", "spin_until"]

# Room for one step's frame of images, so that a reply seldom waits for its reader. Linux caps what an
# unprivileged process may ask for at 1 MiB (/proc/sys/fs/pipe-max-size).
PIPE_BYTES = 1 << 20

# The longest that a worker may poll for the next request, in seconds.
MAX_POLL_S = 200e-6

_MISSES = 8  # misses in a row until polling pauses
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 2048


class WorkerEnd:
    """Frames over two descriptors.

    Args:
        read_fd: frames are read from here.
        write_fd: frames are written here; the same one if it is a socket.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._decoder = Decoder(None, _nothing)
        self._encoder = Encoder()
        self._fast_path: Callable[[], FastPath | None] = _nothing
        self._poller = SpinPoller(0.0)
        self._spin, self._sleep = _wait_functions(read_fd)
        if read_fd != write_fd:  # the parent has enlarged the buffers of a socket
            for fd in (read_fd, write_fd):
                _enlarge(fd)

    def use(self, service: Service) -> None:
        """Ask this service from now on where to read requests into, and what C needs to answer steps itself."""
        self._decoder.buffers_for, self._decoder.predict_buffers = service.request_buffers, service.expected_buffers
        self._fast_path = service.fast_path

    def poll(self, poll_s: float) -> None:
        """Poll up to `poll_s` seconds for each next frame before the process sleeps."""
        self._poller = SpinPoller(min(poll_s, MAX_POLL_S))

    def read(self) -> Frame | PartialStep | None:
        """Return the next frame, or a step that C could not finish; None once the parent has closed the stream.

        Raises:
            WireError: if the bytes that come are not a frame.
            OSError: if the parent is gone.
        """
        decoder = self._decoder
        seconds = self._wait() if decoder.error is None and not decoder.frames else 0.0
        while not decoder.frames:
            fast_path = None if speedups.serve_steps is None else self._fast_path()
            got = self._serve(fast_path, seconds) if fast_path is not None else None
            if isinstance(got, tuple):
                return PartialStep.from_tuple(got)
            if got is not None and got < 0:  # C has answered every request that came
                seconds = self._wait_after_replies(-got - 1, seconds)
                continue
            if got is None:
                got = frame_io.read(self._read_fd, decoder)
            elif got:
                frame_io.decode_external_read(decoder, got)
            if not got:
                return None
        return decoder.frames.popleft()

    def _serve(self, fast_path: FastPath, seconds: float) -> Any:
        assert speedups.serve_steps is not None
        return speedups.serve_steps(self._read_fd, self._write_fd, self._decoder, self._encoder, fast_path, seconds)

    def _wait(self) -> float:
        """Wait until there is something to read; return how long to poll after the next reply, in seconds."""
        poller = self._poller
        seconds = poller.next_wait()
        if not seconds or not poller.record(self._spin(seconds)):
            self._sleep()
        return seconds

    def _wait_after_replies(self, hits: int, seconds: float) -> float:
        """Wait as `_wait`, after C has polled: with success after `hits` replies, and without after the last one."""
        if not seconds:
            return self._wait()
        if hits:
            self._poller.record(True)
        self._poller.record(False)
        self._sleep()
        return self._poller.next_wait()

    def write(
        self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer] = (), payload: Buffer = b""
    ) -> None:
        """Write a frame, however many system calls that takes.

        Raises:
            WireError: if it is too large.
            OSError: if the parent is gone.
        """
        rest = frame_io.write(self._write_fd, self._encoder, kind, request, generation, fixed, payload)
        while rest:
            rest = frame_io.write_remaining(self._write_fd, rest)


def _nothing() -> None:
    """Return None: there is no service yet."""


def _wait_functions(fd: int) -> tuple[Callable[[float], bool], Callable[[], object]]:
    """Return two functions: one polls for input for some seconds and returns whether there is any, the other sleeps.

    A process that sleeps in a read of a Unix socket is woken, for nothing, when the peer reads earlier bytes: there is
    room again. This costs an interrupt of an idle CPU, which the peer waits for. `poll` for input avoids it.
    """
    if not hasattr(select, "poll"):  # Windows: just read
        return lambda seconds: True, lambda: None
    poll = select.poll()
    poll.register(fd, select.POLLIN)

    def readable() -> bool:
        if poll.poll(0):
            return True
        os.sched_yield()  # to a parent on this CPU, which may be about to write
        return False

    spin = partial(spin_until, readable) if speedups.spin is None else partial(speedups.spin, fd)
    return spin, partial(poll.poll, None)


def _enlarge(fd: int) -> None:
    """Enlarge the kernel's buffer of a pipe or socket: the default of 64 KiB costs a context switch for each fill."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):  # a pipe, of a user that has too many large ones
            return
        import socket

        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIPE_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIPE_BYTES)


# ------------------------------------------------------------ polling


def spin_until(ready: Callable[[], object], seconds: float) -> bool:
    """Call `ready` until it returns something true, for so many seconds at most; return whether it did."""
    deadline = perf_counter() + seconds
    while not ready():
        if perf_counter() > deadline:
            return False
    return True


class SpinPoller:
    """Polls for a moment before a sleep, since a wake-up takes longer than the moment; pauses where it doesn't pay.

    After some misses in a row it pauses for a number of waits, which doubles each time, and then tries as often again.
    (Both sides have to poll for a while before either hits.) A hit resets all of this.

    Args:
        poll_s: how long a wait may last, in seconds; 0 means to never poll.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._misses = 0
        self._paused_waits = 0  # left until it polls again
        self._next_pause = _FIRST_PAUSE

    def wait(self, ready: Callable[[], object]) -> bool:
        """Call `ready` until it returns something true or the moment is over; return False at once while paused."""
        seconds = self.next_wait()
        return self.record(spin_until(ready, seconds)) if seconds else False

    def next_wait(self) -> float:
        """Return how long the next wait may last, in seconds; 0 while polling pauses."""
        if not self._paused_waits:
            return self._poll_s
        self._paused_waits -= 1
        return 0.0

    def record(self, hit: bool) -> bool:
        """Record whether a wait was a hit; return the same."""
        if hit:
            self._misses = 0
            self._next_pause = _FIRST_PAUSE
            return True
        self._misses += 1
        if self._misses >= _MISSES:
            self._misses = 0
            self._paused_waits = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        return False
