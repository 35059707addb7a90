"""A child process: its end, its exit code, the orphans that it leaves behind, and its memory.

Exit codes are read here and not by `subprocess`. It reports 0 if other code has reaped the child (`waitpid(-1)`), or
the kernel has (SIGCHLD is ignored).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["KERNEL_TELLS", "PIDFDS", "Child", "ProcessMemory", "kill_group", "process_memory", "reap_orphans"]

_REAP_S = 2.0  # how long a killed process may take to end: a driver may hold it
_ORPHANS_S = 0.25  # the same for its orphans
_PAUSE_S = 0.002

# Linux: `ioctl(pidfd, PIDFD_GET_INFO, struct pidfd_info)`; the mask is first, the exit code last, in 64 bytes.
_GET_INFO, _INFO_BYTES, _EXIT, _EXIT_AT = 0xC040FF0B, 64, 1 << 3, 60
_GET_CHILD_SUBREAPER = 37  # of prctl


def _pidfds() -> bool:
    """Return whether there are pidfds: some sandboxes have none."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


PIDFDS = _pidfds()
# Whether the kernel tells the exit code of a process that another process has reaped: since Linux 6.15.
KERNEL_TELLS = PIDFDS and tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 15)


def kill_group(pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the process group that a process leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(pid, sig)
        else:
            os.kill(pid, sig)


class Child:
    """A child process that leads a session of its own.

    Args:
        process: the process, which has just been started.

    Attributes:
        pid: the process id.
        pidfd: a descriptor of the process, readable when it has ended; None where the platform has none.
        reaped: whether it has ended and its exit code was read.
        returncode: the exit code, or `-N` for signal N; None while, or if, it is unknown.

    Raises:
        OSError: if there are no descriptors left; the process is killed.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.reaped = False
        self.returncode: int | None = None
        self.pidfd: int | None = None
        if PIDFDS:
            try:
                self.pidfd = os.pidfd_open(process.pid)
            except OSError:
                self.kill_and_reap()
                raise

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.reaped or self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return False after the timeout."""
        if self.pidfd is not None:
            return _is_ready(self.pidfd, select.POLLIN, timeout_s)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def reap(self) -> None:
        """Read its exit code; it must have ended. Idempotent."""
        if self.reaped:
            return
        if self.pidfd is None:
            code: int | None = self._process.wait()
            if code == 0 and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                code = None
        else:
            try:
                # by pidfd: if other code has reaped it, its number may belong to another child by now
                ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
                assert ended is not None
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            except ChildProcessError:
                code = exit_code(self.pidfd)
        self._process.returncode = 0 if code is None else code  # otherwise `subprocess` would wait for it
        self.returncode, self.reaped = code, True

    def kill_and_reap(self) -> None:
        """Kill it with its group, wait until they are gone, and reap it and the orphans that this process adopted.

        The wait is bounded: a driver may hold a process for long.
        """
        if not self.reaped:  # so the number has not been reused
            kill_group(self.pid)
            if not self.wait(_REAP_S):
                return
            self.reap()
        deadline = time.monotonic() + _ORPHANS_S
        while not reap_orphans(self.pid) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)

    def wake(self) -> None:
        """Continue it if it was stopped (SIGSTOP)."""
        if self.pidfd is not None:
            with contextlib.suppress(OSError):  # it has ended
                signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)

    def close(self) -> None:
        """Close its pidfd. Idempotent."""
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)


def _is_ready(fd: int, events: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(fd, events)
    return bool(poller.poll(timeout_s * 1000))


def exit_code(pidfd: int) -> int | None:
    """Ask the kernel for the exit code of a process that another process has reaped; None if it can't tell."""
    if not KERNEL_TELLS:
        return None
    import fcntl

    _is_ready(pidfd, 0, 0.1)  # waits for POLLHUP, which means reaped: only then the kernel knows the code
    info = bytearray(_INFO_BYTES)
    struct.pack_into("<Q", info, 0, _EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", info)
    (status,) = struct.unpack_from("=i", info, _EXIT_AT)
    return os.waitstatus_to_exitcode(status) if mask & _EXIT else None


# ------------------------------------------------------------ orphans


def reap_orphans(session: int) -> bool:
    """Reap the ended orphans of a session that this process has adopted; the session's leader must have been reaped.

    Process 1 of a container adopts all orphans, and any process can adopt those of its descendants
    (`PR_SET_CHILD_SUBREAPER`). Other children are not touched: they belong to other sessions.

    Returns:
        Whether it found none. One that it has reaped may have left others, so the caller has to look again.
    """
    if not _adopts():
        return True
    found_none = True
    with contextlib.suppress(ChildProcessError):  # none is left in its group
        while os.waitpid(-session, os.WNOHANG)[0]:
            pass
        found_none = False
    for pid in _children_of(session):  # those that have moved to other groups
        found_none = False  # even if it ends now: this process adopts its children after they were listed
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return found_none


def _adopts() -> bool:
    """Return whether this process adopts orphans."""
    if sys.platform != "linux":
        return False
    if os.getpid() == 1:
        return True
    asked = ctypes.c_int()
    return _libc().prctl(_GET_CHILD_SUBREAPER, ctypes.byref(asked), 0, 0, 0) == 0 and bool(asked.value)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _children_of(session: int) -> Iterator[int]:
    """Yield the children of this process that belong to this session."""
    with contextlib.suppress(OSError, ValueError):  # no /proc, or the /proc of another namespace
        if int(os.readlink("/proc/self")) != os.getpid():
            return
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                with open(f"/proc/self/task/{task}/children", "rb") as file:
                    children = file.read().split()
                for pid in map(int, children):
                    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                        # after the name, which may contain parentheses: state, parent, group, session
                        if int(file.read().rpartition(b")")[2].split()[3]) == session:
                            yield pid


_FIELDS = {"Rss": "rss", "Pss": "pss", "Private_Dirty": "private_dirty", "Private_Clean": "private_clean"}


class ProcessMemory(NamedTuple):
    """The memory of one process, in bytes.

    Attributes:
        rss: all resident pages.
        pss: the same, with pages that n processes share counted as 1/n.
        private_dirty: pages that only this process has and has written to: the cost of one more such process.
        private_clean: pages of files that only this process has mapped.
    """

    rss: int
    pss: int
    private_dirty: int
    private_clean: int

    @property
    def uss(self) -> int:
        """The pages that only this process has. A mapped file counts until another process maps it too."""
        return self.private_dirty + self.private_clean


def process_memory(pid: int) -> ProcessMemory | None:
    """Return the memory of a process from /proc; None if the process is gone, or there is no /proc.

    The kernel walks all of its pages: 2 to 10 ms for a process with MuJoCo.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return None
    sizes = dict.fromkeys(_FIELDS.values(), 0)
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in _FIELDS:
            sizes[_FIELDS[name]] = int(rest.split()[0]) * 1024
    return ProcessMemory(**sizes)
