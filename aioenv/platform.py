"""Limits of this process: usable CPUs, kills for memory, whether it may start workers, and signals held back."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Any

__all__ = [
    "INTERRUPTING",
    "HeldSignals",
    "check_nested_start",
    "cpu_quota",
    "declare_worker_process",
    "limit_cpus",
    "oom_kills",
    "raised_by_handler",
    "usable_cpus",
]


_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

_cpu_share: int | None = None  # of a worker
_is_worker_process = False


def usable_cpus() -> int:
    """Return how many CPUs this process may use, by its affinity, its container's quota, and its share as a worker."""
    if hasattr(os, "process_cpu_count"):  # it respects `python -X cpu_count` and PYTHON_CPU_COUNT
        cpus = os.process_cpu_count() or 1
    elif hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    quota = cpu_quota()
    if quota is not None:
        cpus = max(1, min(cpus, math.ceil(quota)))
    return cpus if _cpu_share is None else min(cpus, _cpu_share)


def limit_cpus(share: int | None) -> None:
    """Limit `usable_cpus` of this process, a worker among others, to its share; None: no limit."""
    global _cpu_share
    _cpu_share = share


def cpu_quota(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> float | None:
    """Return the CPU limit of this process's control groups (`docker --cpus`, Kubernetes' `limits.cpu`).

    Args:
        mount: where control groups are mounted.
        membership: the file that lists the groups of this process.

    Returns:
        CPUs, the least of all groups; None if there is no limit.
    """
    quotas = []
    for group in _groups(mount, membership, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            if (both := group / "cpu.max").exists():
                quota, period = both.read_text(encoding="utf-8").split()
            else:
                quota, period = (
                    (group / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")
                )
            if quota != "max" and int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def oom_kills(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return how many processes of this process's control group the out-of-memory killer has killed.

    Args:
        mount: see `cpu_quota`.
        membership: see `cpu_quota`.

    Returns:
        The number so far; None if the kernel does not count them.
    """
    for group in _groups(mount, membership, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                for line in (group / name).read_text(encoding="utf-8").splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
    return None


def _groups(mount: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of the groups of this process for a controller, innermost first.

    Both versions of control groups may be in use. Inside a container the mounted group may be the process's own,
    despite its path.
    """
    with contextlib.suppress(OSError):
        for line in membership.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            number, names, path = line.split(":", 2)
            if number == "0":
                root = mount
            elif controller in names.split(","):
                root = next((at for at in (mount / names, mount / controller) if at.is_dir()), mount / names)
            else:
                continue
            own = root / path.lstrip("/")
            yield from (group for group in (own, *own.parents) if group == root or root in group.parents)


def declare_worker_process() -> None:
    """Remember that this process is a worker or a fork server (see `check_nested_start`)."""
    global _is_worker_process
    _is_worker_process = True


def check_nested_start() -> None:
    """Refuse to start envs from a module that workers import: they would start envs without end.

    Raises:
        WorkerStartError: if this is a worker or a fork server in the middle of an import.
    """
    if not _is_worker_process:
        return
    # by the attribute with which `import` itself marks unfinished modules
    unfinished = [name for name, module in list(sys.modules.items()) if _is_initializing(module)]
    if unfinished:
        from aioenv.errors import WorkerStartError  # here: `aioenv doctor` works without Gymnasium, which it imports

        raise WorkerStartError(
            f"module {unfinished[-1]} starts envs when it is imported, and their workers import it again, "
            "without end. Code for the main program alone belongs under "
            "`if __name__ == '__main__':`"
        )


def _is_initializing(module: object) -> bool:
    try:
        spec = object.__getattribute__(module, "__spec__")  # a lazy module would load itself to answer `getattr`
    except AttributeError:
        return False
    return bool(getattr(spec, "_initializing", False))


try:  # the public functions take 25 µs a step more, for the names of handlers
    from _signal import getsignal  # type: ignore[import-not-found]
    from _signal import signal as handle
except ImportError:
    from signal import getsignal
    from signal import signal as handle


_ALL = tuple(sorted(map(int, signal.valid_signals())))
# Those that programs usually handle, for holders that have no time to look at all.
_USUAL = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
INTERRUPTING = tuple(int(getattr(signal, name)) for name in _USUAL if hasattr(signal, name))


class HeldSignals:
    """A `with` block in which no Python signal handler runs: signals that arrive are handled at its end.

    On other threads than the main one none ever runs, and this does nothing.

    Args:
        *numbers: which signals; none: all.
        twice: hold repeated signals of the same number, too; False: a second one is handled at once.
    """

    __slots__ = ("_arrived", "_handlers", "_numbers", "_twice")

    def __init__(self, *numbers: int, twice: bool = True) -> None:
        self._numbers = numbers or _ALL
        self._twice = twice
        self._handlers: list[tuple[int, Callable[[int, FrameType | None], Any]]] = []
        self._arrived: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> list[tuple[int, FrameType | None]]:
        """Hold back signals, and return the list of those that have arrived, which grows."""
        if threading.current_thread() is threading.main_thread():
            try:
                for number in self._numbers:
                    handler = getsignal(number)
                    # other signals are ignored, end the process, or have a handler in C
                    if callable(handler):
                        self._handlers.append((number, handler))
                        handle(number, self._hold)
            except BaseException:  # raised by a handler that was not held back yet
                self.__exit__()
                raise
        return self._arrived

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._restore()
        finally:
            self._tell()

    def _restore(self) -> None:
        try:
            while self._handlers:
                handle(*self._handlers[-1])
                self._handlers.pop()
        finally:
            if self._handlers:  # a handler that was restored has raised
                self._restore()

    def _tell(self) -> None:
        try:
            while self._arrived:
                number, frame = self._arrived[0]
                handler = getsignal(number)
                there = callable(handler)
                del self._arrived[0]  # no other handler can run between this and the call
                if there:
                    handler(number, frame)
        finally:
            if self._arrived:  # a handler has raised
                self._tell()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._twice or all(number != other for other, _ in self._arrived):
            self._arrived.append((number, frame))
        else:
            dict(self._handlers)[number](number, frame)


def raised_by_handler(error: BaseException) -> bool:
    """Return whether a signal handler of this process has raised an exception, which seems to come from other code."""
    if isinstance(error, KeyboardInterrupt):  # the default handler leaves no frame
        return True
    codes = {_code_of(handler) for number in _ALL if callable(handler := getsignal(number))} - {None}
    traceback = error.__traceback__ if codes else None
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _code_of(function: Any) -> Any:
    """Return the code of a function, or of what a partial function, a method or a callable object calls."""
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, FunctionType | MethodType):
        function = type(function).__call__
    return getattr(function, "__code__", None)
