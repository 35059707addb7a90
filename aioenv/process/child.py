"""A child process of this one: whether it has ended, how, and what it has left to this process.

Exit codes are read here and not by `subprocess`, which says 0 where other code has taken them (`waitpid(-1)`), or the
kernel has (SIGCHLD is ignored).
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

_REAP_S = 2.0  # how long a killed process may take to be gone: a driver may hold it
_ORPHANS_S = 0.25  # the same for those that it has started
_PAUSE_S = 0.002

# `ioctl(pidfd, PIDFD_GET_INFO, struct pidfd_info)` of Linux: a mask first, the exit code last, in 64 bytes.
_GET_INFO, _INFO_BYTES, _EXIT, _EXIT_AT = 0xC040FF0B, 64, 1 << 3, 60
_GET_CHILD_SUBREAPER = 37  # of prctl


def _pidfds() -> bool:
    """Whether there are pidfds: some sandboxes have none."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


PIDFDS = _pidfds()
# Whether the kernel tells the exit code of a process that another has reaped: from 6.15 on.
KERNEL_TELLS = PIDFDS and tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 15)


def kill_group(pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that leads a group, and whatever it has started that is still in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(pid, sig)
        else:
            os.kill(pid, sig)


class Child:
    """A child that leads a session of its own.

    Args:
        process: what `subprocess` has started, just now.

    Attributes:
        pid: its process id.
        pidfd: a descriptor of it, which is readable when it has ended; None where there are none.
        reaped: whether it has ended and its exit code was taken.
        returncode: how it ended: its exit code, `-N` for signal N; None while it is not known.

    Raises:
        OSError: if there is no room for the descriptor; the process is killed.
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
                self.bury()
                raise

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.reaped or self._within(0)

    def _within(self, timeout_s: float) -> bool:
        """Whether it ends within so many seconds."""
        if self.pidfd is not None:
            return _is_ready(self.pidfd, select.POLLIN, timeout_s)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def reap(self) -> None:
        """Take its exit code, once it has ended. Idempotent."""
        if self.reaped:
            return
        if self.pidfd is None:
            code: int | None = self._process.wait()
            if code == 0 and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                code = None
        else:
            try:
                # by its descriptor: its number may be that of another child of this process by now
                ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
                assert ended is not None
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            except ChildProcessError:
                code = exit_code(self.pidfd)
        self._process.returncode = 0 if code is None else code  # else `subprocess` would look for it
        self.returncode, self.reaped = code, True

    def bury(self) -> None:
        """Kill it with its group, and wait until they are gone and what became this process's is reaped.

        It is not waited for ever: a driver may hold it.
        """
        if not self.reaped:  # so the number is still its own
            kill_group(self.pid)
            if not self._within(_REAP_S):
                return
            self.reap()
        deadline = time.monotonic() + _ORPHANS_S
        while not reap_orphans(self.pid) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)

    def wake(self) -> None:
        """Have it go on, if it was stopped (SIGSTOP)."""
        if self.pidfd is not None:
            with contextlib.suppress(OSError):  # it has ended
                signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)

    def close(self) -> None:
        """Close its descriptor. Idempotent."""
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)


def _is_ready(fd: int, events: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(fd, events)
    return bool(poller.poll(timeout_s * 1000))


def exit_code(pidfd: int) -> int | None:
    """Ask the kernel how a process ended that another has reaped; None if it does not tell."""
    if not KERNEL_TELLS:
        return None
    import fcntl

    _is_ready(pidfd, 0, 0.1)  # POLLHUP: it is reaped, and only then the kernel knows
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
    """Reap processes that this one has adopted from a session whose leader has been reaped, as far as they have ended.

    Process 1 of a container adopts all orphans, and any process can ask for those of its descendants
    (`PR_SET_CHILD_SUBREAPER`). No other children are touched: they are of other sessions.

    Returns:
        Whether none of them still runs.
    """
    if not _adopts():
        return True
    alone = True
    with contextlib.suppress(ChildProcessError):  # there are no more of its group
        while os.waitpid(-session, os.WNOHANG)[0]:
            pass
        alone = False
    for pid in _children_of(session):  # such as have moved to other groups
        with contextlib.suppress(ChildProcessError):
            alone &= bool(os.waitpid(pid, os.WNOHANG)[0])
    return alone


def _adopts() -> bool:
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
    """Children of this process that are of this session."""
    with contextlib.suppress(OSError, ValueError):  # no /proc, or that of another namespace
        if int(os.readlink("/proc/self")) != os.getpid():
            return
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                with open(f"/proc/self/task/{task}/children", "rb") as file:
                    children = file.read().split()
                for pid in map(int, children):
                    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                        # after the name, which may have parentheses: the state, the parent, the group, the session
                        if int(file.read().rpartition(b")")[2].split()[3]) == session:
                            yield pid


_FIELDS = {"Rss": "rss", "Pss": "pss", "Private_Dirty": "private_dirty", "Private_Clean": "private_clean"}


class ProcessMemory(NamedTuple):
    """The memory of one process, in bytes.

    Attributes:
        rss: all that is mapped and in memory.
        pss: the same, with pages that n processes share counted as 1/n.
        private_dirty: what it alone has and has written to: what one more process like it costs.
        private_clean: what it alone has mapped of files.
    """

    rss: int
    pss: int
    private_dirty: int
    private_clean: int

    @property
    def uss(self) -> int:
        """All that it alone has. A file that a lone process has mapped counts, and no longer once others have too."""
        return self.private_dirty + self.private_clean


def process_memory(pid: int) -> ProcessMemory | None:
    """The memory of a process, as the kernel sums it up in /proc; None if it is gone, or there is no /proc.

    The kernel walks all its pages for that: 2 to 10 ms for one with MuJoCo.
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
