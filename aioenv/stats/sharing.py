"""How processes share statistics: a block of anonymous memory, and this process's registry of statistics.

A block is shared by pickling its handle; its lock is released when the process that holds it dies.

A pickled handle says whose descriptor it is; who unpickles it opens `/proc/PID/fd/N`. (A descriptor's number means
nothing in a worker, one sent beside the handle would have to go through every way to start a worker, and
`pidfd_getfd` needs the right to trace.) To open anew, rather than to inherit, is what the lock needs, too: `flock`
belongs to an open file, and the kernel releases it with the last descriptor of that, however the process ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from aioenv.errors import ClosedError

if sys.platform != "win32":
    from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock

__all__ = [
    "HEADER",
    "SharedBlock",
    "can_share",
    "collected",
    "copies",
    "counting",
    "note_pickled",
    "uncounted",
]

LOCK_TIMEOUT_S = 5.0
_PAUSE_S = 20e-6
HEADER = 64  # bytes before the data: who made this
_MAGIC = struct.Struct("<16s16sQ")  # a name, a random key, the size of the data
_NAME = b"aioenv shared 1\0"

# One mapping for each block in a process, so that a process never waits for itself.
_open: weakref.WeakValueDictionary[bytes, SharedBlock] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def can_share() -> bool:
    """Whether this platform has memory without a name that other processes can open."""
    return hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")


class SharedBlock:
    """Zeros at first; shared with every process that unpickles it, or private if the platform can't share.

    The block lives as long as the process that made it keeps it; then those that have opened it keep theirs.

    Args:
        size: bytes.
        shared: False for memory of this process alone: pickled, it becomes an error.

    Attributes:
        data: a memoryview of its bytes.
        shared: whether other processes can open it.
        key: which block it is, in any process.
        closed: whether `close` was called.
    """

    def __init__(self, size: int, *, shared: bool = True) -> None:
        self.shared = shared
        self.key = secrets.token_bytes(16)
        if not shared:
            # (without saying so a forked child would write to it, too)
            self._set_up(-1, mmap.mmap(-1, HEADER + size, access=mmap.ACCESS_COPY))
            _open[self.key] = self  # for `_after_fork`: nobody asks for it by its key
            return
        fd = os.memfd_create("aioenv-stats", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, HEADER + size)
            memory = mmap.mmap(fd, HEADER + size)
            try:
                lock = _open_anew(f"/proc/self/fd/{fd}")
            except OSError:
                memory.close()  # it has a descriptor, too, which the traceback would keep
                raise
            _MAGIC.pack_into(memory, 0, _NAME, self.key, size)
            self._set_up(lock, memory)
        finally:
            os.close(fd)
        _open[self.key] = self

    def _set_up(self, fd: int, memory: mmap.mmap) -> None:
        self.data = memoryview(memory)[HEADER:]
        self._fd = fd  # of the lock alone: the mapping has one of its own, which a forked child inherits
        self._threads = threading.Lock()
        # who made it has others to serve, and waits with a limit
        self._how = LOCK_EX | LOCK_NB if self.shared else 0
        self.closed = False
        # what still views the memory keeps it; the descriptor goes
        self._finalizer = weakref.finalize(self, _let_go, fd)
        self._finalizer.atexit = False  # exit hooks may yet read it

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock: no other thread or process does. Who dies while holding it does not keep it."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> None:
        """Take the lock; waits for who holds it. In the process that made the block, which has others to serve, 5 s.

        Raises:
            TimeoutError: if that was not long enough.
            ClosedError: if the block is closed.
        """
        self._threads.acquire()
        try:
            if self.closed:
                raise ClosedError("these shared statistics are closed")
            if self.shared:
                flock(self._fd, self._how)
        except BlockingIOError:
            self._acquire_soon()
        except BaseException:
            self.release()
            raise

    def _acquire_soon(self) -> None:
        began = time.monotonic()
        try:
            while True:
                time.sleep(_PAUSE_S)  # holders need microseconds
                try:
                    return flock(self._fd, self._how)
                except BlockingIOError:
                    if time.monotonic() - began > LOCK_TIMEOUT_S:
                        raise TimeoutError(
                            f"another process has held the lock of shared statistics for {LOCK_TIMEOUT_S} s: it hangs "
                            "or is stopped, and the lock is free when it ends"
                        ) from None
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the lock back."""
        try:
            if self.shared and not self.closed:
                flock(self._fd, LOCK_UN)
        finally:
            self._threads.release()

    def close(self) -> None:
        """Let go of the lock, and with the last view of it of the memory; other processes keep theirs. Idempotent."""
        with self._threads:
            self.closed = True
            self._finalizer()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.closed:
            raise ClosedError("these shared statistics are closed: they can't be sent to a worker")
        if not self.shared:
            raise TypeError("memory of one process alone can't be pickled")
        return _reopen, (self.key, os.getpid(), self._fd, len(self.data))

    def _after_fork(self) -> None:
        """In a forked child: an open file of its own, or parent and child would hold each other's lock."""
        self._threads = threading.Lock()
        if self.shared and not self.closed:
            self._how = LOCK_EX
            fd = _open_anew(f"/proc/self/fd/{self._fd}")
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)


def _open_anew(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _let_go(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _reopen(key: bytes, pid: int, fd: int, size: int) -> SharedBlock:
    """What a handle is unpickled with: the block, of which there is one in a process."""
    with _opening:
        block = _open.get(key)
        if block is None or block.closed:
            block = _open[key] = _attach(key, pid, fd, size)
        return block


def _attach(key: bytes, pid: int, fd: int, size: int) -> SharedBlock:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        own = _open_anew(path)
        try:
            memory = mmap.mmap(own, HEADER + size)
            if _MAGIC.unpack_from(memory) != (_NAME, key, size):
                raise ValueError("it is something else by now")
            lock = _open_anew(f"/proc/self/fd/{own}")
        finally:
            os.close(own)
    except (OSError, ValueError) as exc:
        if isinstance(exc, PermissionError):
            remedy = "this process may not open it: use shared=False, and merge in the parent"
        else:
            remedy = "it has let go of them; keep them there for as long as workers may start"
        raise RuntimeError(f"shared statistics of process {pid} can't be opened ({exc}): {remedy}") from exc
    block = SharedBlock.__new__(SharedBlock)
    block.shared = True
    block.key = key
    block._set_up(lock, memory)
    block._how = LOCK_EX
    return block


def _after_fork() -> None:
    global _opening
    _opening = threading.Lock()
    for block in list(_open.values()):
        with contextlib.suppress(OSError):
            block._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# Statistics that are not in shared memory: a process has one of each, however often it is unpickled.
copies: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
# Whether samples count.
counting = True

_local = threading.local()  # `found`: what is being pickled in a thread


def note_pickled(stats: Any) -> None:
    """These are being pickled."""
    found: dict[int, Any] | None = getattr(_local, "found", None)
    if found is not None:
        found[id(stats)] = stats


@contextlib.contextmanager
def collected() -> Iterator[list[Any]]:
    """A list which at the end of the block has all statistics that this thread has pickled in it."""
    listed: list[Any] = []
    _local.found = {}
    try:
        yield listed
    finally:
        listed.extend(_local.found.values())
        _local.found = None


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """What this process sees meanwhile does not count: it was seen before."""
    global counting
    counting = False
    try:
        yield
    finally:
        counting = True
