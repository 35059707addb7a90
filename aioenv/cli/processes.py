"""Processes that commands start, the CPU time that other processes use, and the signals that end a command.

At import time this module needs only the standard library: `aioenv doctor` uses it where packages are broken.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import aioenv

__all__ = [
    "EndedBySignal",
    "LoadMeter",
    "foreign_load",
    "python_command",
    "run_in_group",
    "signals_raise",
    "standard_library_end",
    "start_text_process",
]

# Further signals are ignored for so long after the first: a terminal that is closed sends more than one.
CLEANUP_S = 3.0
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def standard_library_end(path: Sequence[str]) -> int:
    """Return the index behind the standard library in an import path.

    A directory that is inserted there shadows installed modules, but none of the standard library.
    """
    here = os.path.dirname(os.__file__)
    own = [i for i, entry in enumerate(path) if entry == here or os.path.basename(entry) == "lib-dynload"]
    return max(own, default=-1) + 1


def python_command(code: str, *args: str) -> list[str]:
    """Return the command that runs code, with arguments, and imports from where this process does.

    The working directory of this process is on the path too, behind the standard library, wherever the command runs.
    The environment stays as it is: processes that the code starts get the path from the code, or need none.
    """
    from aioenv.process.environment import import_path

    path = list(import_path())
    more = [home] if (home := str(Path(aioenv.__file__).resolve().parents[1])) not in path else []
    try:
        here = os.getcwd()
    except OSError:  # it has been removed
        pass
    else:
        path = [entry for entry in path if entry != here]
        more = list(dict.fromkeys([*more, here]))
    index = standard_library_end(path)
    path[index:index] = more
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!a}\n{code}", *args]


def start_text_process(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process without input; its errors are read as text, invalid bytes included.

    Args:
        options: further arguments of `subprocess.Popen`.
    """
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", **options
    )


def run_in_group(command: Sequence[str], limit_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a process in a group of its own, which is killed as a whole if this raises.

    Args:
        command: what to run.
        limit_s: how long it may take, in seconds.
        options: further arguments of `subprocess.Popen`.

    Raises:
        subprocess.TimeoutExpired: if it takes longer.
    """
    group = 0 if hasattr(os, "killpg") else None
    with start_text_process(command, stdout=subprocess.PIPE, process_group=group, **options) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except BaseException:  # the time limit, Ctrl-C, a signal
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()  # after Ctrl-C `with` would not
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class LoadMeter:
    """Measures how many CPUs other processes use, on average since it was made."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), _cpu_seconds_of_others()

    def read(self) -> float | None:
        """Return the number of CPUs; None where it can't be known."""
        after = _cpu_seconds_of_others()
        if self._before is None or after is None:
            return None
        return max(0.0, after - self._before) / (time.perf_counter() - self._began)


def foreign_load(seconds: float) -> float | None:
    """Measure how many CPUs other processes use in the next so many seconds; None where that can't be known."""
    meter = LoadMeter()
    time.sleep(seconds)
    return meter.read()


def _cpu_seconds_of_others() -> float | None:
    """Return the machine's CPU time without ours and our ended children's; None where there is no /proc."""
    try:
        first = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first.split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])


class EndedBySignal(SystemExit):
    """A signal asks this process to end; event loops let a SystemExit through, as they do a KeyboardInterrupt.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.signum).name}"


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise `EndedBySignal` in this block, unless they are ignored (`nohup`) or handled.

    Outside the main thread, which alone can set signal handlers, this is a no-op.
    """
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [signum for signum in _SIGNALS if signal.getsignal(signum) == signal.SIG_DFL]

    deaf_until = float("-inf")

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal deaf_until
        if (now := time.monotonic()) >= deaf_until:
            deaf_until = now + CLEANUP_S
            raise EndedBySignal(signum)

    for signum in ours:
        signal.signal(signum, end)
    try:
        yield
    finally:
        for signum in ours:
            signal.signal(signum, signal.SIG_DFL)
