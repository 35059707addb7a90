"""What of this machine the process may use: its CPUs, and whether the kernel has killed for memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cpu_quota", "leave_cpus_to_others", "oom_kills", "usable_cpus"]

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

_share: int | None = None  # a worker's of the CPUs


def usable_cpus() -> int:
    """How many CPUs this process may use: by its affinity, its container's quota, and as one of several workers."""
    if hasattr(os, "process_cpu_count"):  # as `python -X cpu_count` and PYTHON_CPU_COUNT have it
        cpus = os.process_cpu_count() or 1
    elif hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    quota = cpu_quota()
    if quota is not None:
        cpus = max(1, min(cpus, math.ceil(quota)))
    return cpus if _share is None else min(cpus, _share)


def leave_cpus_to_others(share: int | None) -> None:
    """Let `usable_cpus` of this process say `share` at most: it is a worker, and there are others. None: all it may."""
    global _share
    _share = share


def cpu_quota(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> float | None:
    """How many CPUs' time the control groups of this process may use (`docker --cpus`, Kubernetes' `limits.cpu`).

    Args:
        mount: where control groups are mounted.
        membership: which of them this process is in.

    Returns:
        CPUs, the least of all groups; None where there is no limit.
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
    """How many processes of this process's control group the kernel has killed because memory ran out.

    Args:
        mount: see `cpu_quota`.
        membership: likewise.

    Returns:
        The number so far; None where nobody counts.
    """
    for group in _groups(mount, membership, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                for line in (group / name).read_text(encoding="utf-8").splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
    return None


def _groups(mount: Path, membership: Path, controller: str) -> Iterator[Path]:
    """The directories of the groups of this process that a controller may have, innermost first.

    Both versions of control groups may be there. Inside a container what is mounted may be the process's own group,
    whatever the path to it says.
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
