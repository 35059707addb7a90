"""What contenders have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from aioenv.cli.bench.tasks import Measured, Task, clock_blocking

__all__ = ["MAX_PROCESSES", "NotApplicable", "refuse_many_processes", "stepped"]

# More processes than this say nothing about a vector env that is not known already.
MAX_PROCESSES = 64


class NotApplicable(Exception):
    """This contender does not have this env; the message says so."""


def refuse_many_processes(task: Task) -> None:
    """For a contender that takes a process for each env.

    Raises:
        NotApplicable: if those would be more than `MAX_PROCESSES`.
    """
    if task.num_envs > MAX_PROCESSES:
        raise NotApplicable(f"a process an env: not measured with more than {MAX_PROCESSES}")


def stepped(task: Task, make: Callable[[list[Any]], Any]) -> Measured:
    """Measure what has Gymnasium's `reset(seed=)` and `step`, made from a list of factories."""

    def begin(envs: Any) -> Callable[[Any], Any]:
        envs.reset(seed=0)
        step: Callable[[Any], Any] = envs.step
        return step

    return clock_blocking(task, partial(make, [task.make_env] * task.num_envs), begin)
