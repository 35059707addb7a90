"""Finding out whether envs that share a worker sleep rather than compute: then they should not share one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gymnasium import logger

__all__ = ["SleepDetector"]

_ENOUGH_S = 1.0  # so long must have been waited before anything can be said
_LONG_STEP_S = 2e-3  # in shorter steps the waiting may be ours
_BUSY = 0.3  # CPUs that workers use or wait for, in sum, while one waits for them: below, they sleep


class SleepDetector:
    """Watches the first steps, and warns once if workers were hardly busy while they were waited for.

    Args:
        pids: the workers.
        num_envs: how many envs share them.
    """

    def __init__(self, pids: Sequence[int], num_envs: int) -> None:
        self._pids = pids
        self._num_envs = num_envs
        self._steps = 0
        self._waited_s = 0.0
        self._before_s = _cpu_seconds(pids)

    def note(self, seconds: float) -> bool:
        """A step has taken so long; whether the next one should be noted too."""
        self._steps += 1
        self._waited_s += seconds
        if self._before_s is None:
            return False
        if self._waited_s < _ENOUGH_S:
            return True
        now_s = _cpu_seconds(self._pids)
        if now_s is not None and self._waited_s / self._steps > _LONG_STEP_S:
            busy = (now_s - self._before_s) / self._waited_s
            if busy < _BUSY:
                logger.warn(
                    f"{self._num_envs} envs share {len(self._pids)} workers and take turns, but while steps were "
                    f"waited for, the workers used {busy:.2f} CPUs: these envs sleep rather than compute. Give "
                    f"num_workers={self._num_envs}, so that they sleep side by side."
                )
        return False


def _cpu_seconds(pids: Sequence[int]) -> float | None:
    """CPU time that processes have used so far, or, on a busy machine, have waited for, in seconds.

    None where there is no /proc, or one has ended.
    """
    ticks = delay_ns = 0
    try:
        for pid in pids:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            delay_ns += _delay_ns(pid)
    except OSError:
        return None
    return ticks / os.sysconf("SC_CLK_TCK") + delay_ns / 1e9


def _delay_ns(pid: int) -> int:
    """How long a process has been ready to run and had no CPU; 0 where the kernel does not count it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1])
    except (FileNotFoundError, IndexError):
        return 0
