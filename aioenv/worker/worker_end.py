"""Polling for a moment before going to sleep: to be woken takes longer than the moment."""

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

__all__ = ["MAX_POLL_S", "SpinPoller", "WorkerEnd", "look_for"]

# The longest that a worker may spin for what comes next, in seconds.
MAX_POLL_S = 200e-6

_MISSES = 8  # so many in a row, and polling rests
_FIRST_REST, _LONGEST_REST = 32, 2048


def look_for(ready: Callable[[], object], seconds: float) -> bool:
    """Call `ready` until it gives something true, for so many seconds at most; whether it did."""
    deadline = perf_counter() + seconds
    while not ready():
        if perf_counter() > deadline:
            return False
    return True


class SpinPoller:
    """Waits a moment for something; gives it up where it does not pay.

    After some misses in a row it rests for a number of waits, which doubles each time, and then tries as often
    again: both sides of a conversation have to poll for a while before either hits. A hit makes everything as at
    the start.

    Args:
        poll_s: how long a wait may last, in seconds; 0: never poll.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._misses = 0
        self._resting = 0
        self._rest = _FIRST_REST

    def wait(self, ready: Callable[[], object]) -> bool:
        """Call `ready` until it gives something true, or the moment is over; False at once while polling rests."""
        seconds = self.turn()
        return self.note(look_for(ready, seconds)) if seconds else False

    def turn(self) -> float:
        """How long the next wait may last, in seconds; 0 while polling rests."""
        if not self._resting:
            return self._poll_s
        self._resting -= 1
        return 0.0

    def note(self, hit: bool) -> bool:
        """What came of a wait; gives it back."""
        if hit:
            self._misses = 0
            self._rest = _FIRST_REST
            return True
        self._misses += 1
        if self._misses >= _MISSES:
            self._misses = 0
            self._resting = self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
        return False


# ------------------------------------------------------------ the worker's end of a channel


# Room for one step's frame of images, so that a reply seldom waits for its reader. Linux caps what an
# unprivileged process may ask for at 1 MiB (/proc/sys/fs/pipe-max-size).
PIPE_BYTES = 1 << 20


class WorkerEnd:
    """Frames over two descriptors.

    Args:
        read_fd: frames come from here.
        write_fd: and go here; a socket is both.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._decoder = Decoder(None, _nowhere)
        self._encoder = Encoder()
        self._express: Callable[[], FastPath | None] = _nowhere
        self._poller = SpinPoller(0.0)
        self._look, self._sleep = _waits(read_fd)
        if read_fd != write_fd:  # else a socket that the parent has made
            for fd in (read_fd, write_fd):
                _enlarge(fd)

    def aim(self, service: Service) -> None:
        """From now on, ask a service where the fixed part of a frame goes, and how C answers by itself."""
        self._decoder.place, self._decoder.expect = service.place, service.expect
        self._express = service.express

    def poll(self, poll_s: float) -> None:
        """From now on, poll up to `poll_s` seconds for the next frame before the process sleeps."""
        self._poller = SpinPoller(min(poll_s, MAX_POLL_S))

    def read(self) -> Frame | PartialStep | None:
        """The next frame, or a step that C could not answer by itself; None once the parent has closed the stream.

        Raises:
            WireError: if what comes is not a frame.
            OSError: if the parent is gone.
        """
        decoder = self._decoder
        seconds = self._wait() if decoder.error is None and not decoder.frames else 0.0
        while not decoder.frames:
            plan = None if speedups.serve_express is None else self._express()
            got = self._serve(plan, seconds) if plan is not None else None
            if isinstance(got, tuple):
                return PartialStep.of(got)
            if got is not None and got < 0:  # what has come is answered
                seconds = self._wait_on(-got - 1, seconds)
                continue
            if got is None:
                got = frame_io.read(self._read_fd, decoder)
            elif got:
                frame_io.look(decoder, got)
            if not got:
                return None
        return decoder.frames.popleft()

    def _serve(self, plan: FastPath, seconds: float) -> Any:
        assert speedups.serve_express is not None
        return speedups.serve_express(self._read_fd, self._write_fd, self._decoder, self._encoder, plan, seconds)

    def _wait(self) -> float:
        """Wait until there is something to read; gives how long not to sleep after a reply, in seconds."""
        poller = self._poller
        seconds = poller.turn()
        if not seconds or not poller.note(self._look(seconds)):
            self._sleep()
        return seconds

    def _wait_on(self, hits: int, seconds: float) -> float:
        """Likewise, after replies: behind so many of them something came within `seconds`, but not behind the last."""
        if not seconds:
            return self._wait()
        if hits:
            self._poller.note(True)
        self._poller.note(False)
        self._sleep()
        return self._poller.turn()

    def write(
        self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer] = (), tail: Buffer = b""
    ) -> None:
        """Write a frame, however many writes that takes.

        Raises:
            WireError: if it is too large.
            OSError: if the parent is gone.
        """
        rest = frame_io.write(self._write_fd, self._encoder, kind, request, generation, fixed, tail)
        while rest:
            rest = frame_io.write_rest(self._write_fd, rest)


def _nowhere() -> None:
    """Before anybody has said where to."""


def _waits(fd: int) -> tuple[Callable[[float], bool], Callable[[], object]]:
    """Two functions: one tells whether there is something to read within some seconds, the other returns once there is.

    Whoever sleeps in a read of a Unix socket is woken, for nothing, when the peer reads what was written before (there
    is room again): an interrupt for an idle CPU, which the peer waits for. Whoever polls for input is not.
    """
    if not hasattr(select, "poll"):  # Windows: never poll, just read
        return lambda seconds: True, lambda: None
    poll = select.poll()
    poll.register(fd, select.POLLIN)

    def readable() -> bool:
        if poll.poll(0):
            return True
        os.sched_yield()  # to a parent that is on this CPU: it may be about to write
        return False

    look = partial(look_for, readable) if speedups.spin is None else partial(speedups.spin, fd)
    return look, partial(poll.poll, None)


def _enlarge(fd: int) -> None:
    """Make the kernel's buffer of a pipe or socket larger: the default of 64 KiB costs a switch for each fill."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):  # a pipe, of a user who has too many large ones
            return
        import socket

        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIPE_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIPE_BYTES)
