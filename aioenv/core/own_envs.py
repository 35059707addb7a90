"""Whether each slot has an env of its own: two slots with one env would step each other's."""

from __future__ import annotations

from collections.abc import Iterable

from aioenv.errors import WorkerStartError
from aioenv.process.supervisor import Worker

__all__ = ["check_own_envs"]


def check_own_envs(workers: Iterable[Worker]) -> None:
    """Raise if two slots have the same env, at whatever depth of their wrappers.

    Processes have envs of their own; workers that are threads (`debug=True`) share those of this process.

    Args:
        workers: just started, in the order of their slots; `description` is still what their services told.

    Raises:
        WorkerStartError: naming both slots.
    """
    owners: dict[tuple[int | None, int], int] = {}  # slots by process and `id`
    for worker in workers:
        for slot, description in zip(worker.slots, worker.description, strict=True):
            for number, name in description.layers:
                owner = owners.setdefault((worker.pid, number), slot)
                if owner != slot:
                    raise WorkerStartError(
                        f"slots {owner} and {slot} have the same env, a {name}: each step of one slot would also be a "
                        "step of the other. A factory must make a new env in each call, but one returned, or wrapped, "
                        "an env that was made before (by functools.lru_cache, a global or a singleton)",
                        slots=(owner, slot),
                        pid=worker.pid,
                    )
