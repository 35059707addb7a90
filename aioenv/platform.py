"""Limits of this process: the CPUs that it may use, kills for memory, and whether it may start workers."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from aioenv.errors import WorkerStartError

__all__ = [
    "check_nested_start",
    "cpu_quota",
    "declare_worker_process",
    "leave_cpus_to_others",
    "oom_kills",
    "usable_cpus",
]

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


_declared = False


def declare_worker_process() -> None:
    """Remember that this process is a worker or a fork server (see `check_nested_start`)."""
    global _declared
    _declared = True


def check_nested_start() -> None:
    """See that nothing is about to be started without end.

    Raises:
        WorkerStartError: if this is a worker or a fork server, in the middle of an import.
    """
    if not _declared:
        return
    # what `import` itself goes by to tell that a module is half done
    half_done = [name for name, module in list(sys.modules.items()) if _is_half_done(module)]
    if half_done:
        raise WorkerStartError(
            f"module {half_done[-1]} starts envs when it is imported, and their workers import it again, so that there "
            "would be no end of them. What only the main program shall do belongs under "
            "`if __name__ == '__main__':`"
        )


def _is_half_done(module: object) -> bool:
    try:
        spec = object.__getattribute__(module, "__spec__")  # a lazy module would load itself to answer `getattr`
    except AttributeError:
        return False
    return bool(getattr(spec, "_initializing", False))
