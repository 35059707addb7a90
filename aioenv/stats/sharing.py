"""Share statistics between processes: a block of anonymous memory, and this process's registry of statistics.

A block is shared by pickling its handle; its lock is released when the process that holds it dies.

A pickled handle names a descriptor of its process; the process that unpickles it opens `/proc/PID/fd/N`. (A number
alone means nothing in a worker. A descriptor sent beside the handle would have to go through every way to start a
worker. `pidfd_getfd` needs the right to trace.) The lock needs an open file of its own, too: the kernel releases a
`flock` with the last descriptor of that file, however the process ends.
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
    "counting",
    "counting_paused",
    "note_pickled",
    "record_pickled",
    "unshared_stats",
]

LOCK_TIMEOUT_S = 5.0
_POLL_S = 20e-6
HEADER = 64  # bytes before the data, which identify the block
_MAGIC = struct.Struct("<16s16sQ")  # a name, a random key, the size of the data
_NAME = b"aioenv shared 1\0"

# A process has one mapping of each block, so that it never waits for itself.
_open: weakref.WeakValueDictionary[bytes, SharedBlock] = weakref.WeakValueDictionary()
_open_lock = threading.Lock()


def can_share() -> bool:
    """Return whether this platform has anonymous memory that other processes can open."""
    return hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")


class SharedBlock:
    """Anonymous memory, zero at first, that is shared with every process that unpickles it; and a lock.

    Other processes can open the block as long as the process that made it keeps it; those that have it keep it.

    Args:
        size: bytes.
        shared: False for memory of this process alone, which can't be pickled.

    Attributes:
        data: a memoryview of its bytes.
        shared: whether other processes can open it.
        key: identifies the block in any process.
        closed: whether `close` was called.
    """

    def __init__(self, size: int, *, shared: bool = True) -> None:
        self.shared = shared
        self.key = secrets.token_bytes(16)
        if not shared:
            # copy-on-write: a forked child gets a copy of its own
            self._set_up(-1, mmap.mmap(-1, HEADER + size, access=mmap.ACCESS_COPY))
            _open[self.key] = self  # only for `_after_fork`
            return
        fd = os.memfd_create("aioenv-stats", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, HEADER + size)
            memory = mmap.mmap(fd, HEADER + size)
            try:
                lock = _open_again(f"/proc/self/fd/{fd}")
            except OSError:
                memory.close()  # it has a descriptor, too, which the traceback would keep open
                raise
            _MAGIC.pack_into(memory, 0, _NAME, self.key, size)
            self._set_up(lock, memory)
        finally:
            os.close(fd)
        _open[self.key] = self

    def _set_up(self, fd: int, memory: mmap.mmap) -> None:
        self.data = memoryview(memory)[HEADER:]
        self._fd = fd  # of the lock; the mapping has a descriptor of its own, which a forked child inherits
        self._thread_lock = threading.Lock()
        # the process that made the block serves others, so it waits with a limit
        self._lock_flags = LOCK_EX | LOCK_NB if self.shared else 0
        self.closed = False
        # views keep the memory; the descriptor is closed
        self._finalizer = weakref.finalize(self, _close_fd, fd)
        self._finalizer.atexit = False  # exit handlers may still read it

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock. A process that dies while holding it releases it."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> None:
        """Acquire the lock. The process that made the block waits 5 s at most; others wait without a limit.

        Raises:
            TimeoutError: if the lock was held longer.
            ClosedError: if the block is closed.
        """
        self._thread_lock.acquire()
        try:
            if self.closed:
                raise ClosedError("these shared statistics are closed")
            if self.shared:
                flock(self._fd, self._lock_flags)
        except BlockingIOError:
            self._acquire_with_timeout()
        except BaseException:
            self.release()
            raise

    def _acquire_with_timeout(self) -> None:
        began = time.monotonic()
        try:
            while True:
                time.sleep(_POLL_S)  # a holder needs microseconds
                try:
                    return flock(self._fd, self._lock_flags)
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
        """Release the lock."""
        try:
            if self.shared and not self.closed:
                flock(self._fd, LOCK_UN)
        finally:
            self._thread_lock.release()

    def close(self) -> None:
        """Close the lock; the memory is freed with its last view. Other processes keep theirs. Idempotent."""
        with self._thread_lock:
            self.closed = True
            self._finalizer()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.closed:
            raise ClosedError("these shared statistics are closed: they can't be sent to a worker")
        if not self.shared:
            raise TypeError("memory of one process alone can't be pickled")
        return _reopen, (self.key, os.getpid(), self._fd, len(self.data))

    def _after_fork(self) -> None:
        """Open the file of the lock again in a forked child: parent and child would share one lock."""
        self._thread_lock = threading.Lock()
        if self.shared and not self.closed:
            self._lock_flags = LOCK_EX
            fd = _open_again(f"/proc/self/fd/{self._fd}")
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)


def _open_again(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _close_fd(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _reopen(key: bytes, pid: int, fd: int, size: int) -> SharedBlock:
    """Unpickle a handle: return the process's only mapping of the block."""
    with _open_lock:
        block = _open.get(key)
        if block is None or block.closed:
            block = _open[key] = _attach(key, pid, fd, size)
        return block


def _attach(key: bytes, pid: int, fd: int, size: int) -> SharedBlock:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        own = _open_again(path)
        try:
            memory = mmap.mmap(own, HEADER + size)
            if _MAGIC.unpack_from(memory) != (_NAME, key, size):
                raise ValueError("it is something else by now")
            lock = _open_again(f"/proc/self/fd/{own}")
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
    block._lock_flags = LOCK_EX
    return block


def _after_fork() -> None:
    global _open_lock
    _open_lock = threading.Lock()
    for block in list(_open.values()):
        with contextlib.suppress(OSError):
            block._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# By key: statistics that are not in shared memory. A process has one of each, however often it is unpickled.
unshared_stats: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
# Whether new samples count in this process.
counting = True

_local = threading.local()  # `found`: the statistics that a thread has pickled, by id


def note_pickled(stats: Any) -> None:
    """Record, for `record_pickled`, that these statistics are being pickled."""
    found: dict[int, Any] | None = getattr(_local, "found", None)
    if found is not None:
        found[id(stats)] = stats


@contextlib.contextmanager
def record_pickled() -> Iterator[list[Any]]:
    """Yield a list that gets, at the end of the block, all statistics that this thread has pickled within it."""
    listed: list[Any] = []
    _local.found = {}
    try:
        yield listed
    finally:
        listed.extend(_local.found.values())
        _local.found = None


@contextlib.contextmanager
def counting_paused() -> Iterator[None]:
    """Ignore new samples in this process within the block: they were counted before."""
    global counting
    counting = False
    try:
        yield
    finally:
        counting = True
