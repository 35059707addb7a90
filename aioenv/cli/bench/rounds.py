"""Rounds: every contender in turn, each time in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from aioenv.cli.bench.contender import MARK
from aioenv.cli.bench.tasks import Task
from aioenv.cli.children import python

__all__ = ["Failed", "Outcomes", "foreign_load", "play", "play_tasks", "run_contender"]

# Threads inside an env or a numeric library would fight the contender's own processes for the CPUs.
THREAD_LIMITS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
START_AND_STOP_S = 180.0

# Not `python -m`: each of Gymnasium's workers would import the bench again, and they would take 2 to 4 times as long.
_CODE = "from aioenv.cli.bench.contender import main; main(*sys.argv[1:])"


class Failed(Exception):
    """A contender could not be measured; the message says why, on one line."""


@dataclasses.dataclass
class Outcomes:
    """What came of one contender with one env.

    Attributes:
        rounds: its results, one a round.
        problem: why it takes no (further) part; empty if nothing is wrong.
        broken: whether that is a fault, and not an env that it does not have.
    """

    rounds: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    problem: str = ""
    broken: bool = False


def play(
    task: Task, names: Iterable[str], rounds: int, progress: Callable[[str], None], *, once: Collection[str] = ()
) -> dict[str, Outcomes]:
    """A B C A B C …, so that what else the machine does falls on all alike.

    A contender that fails is not tried again.

    Args:
        task: what to step.
        names: the contenders.
        progress: called before each measurement, with what it is.
        once: contenders that take part in the first round alone.
    """
    return play_tasks({name: (name, task) for name in names}, rounds, progress, once=once)


def play_tasks(
    entries: Mapping[str, tuple[str, Task]],
    rounds: int,
    progress: Callable[[str], None],
    *,
    once: Collection[str] = (),
    outcomes: dict[str, Outcomes] | None = None,
) -> dict[str, Outcomes]:
    """As `play`, for entries that differ in their task: label → contender and task.

    Args:
        outcomes: those of rounds that these are to follow; they are added to.
    """
    outcomes = {} if outcomes is None else outcomes
    for number in range(rounds):
        for label, (name, task) in entries.items():
            outcome = outcomes.setdefault(label, Outcomes())
            if outcome.problem or (number and label in once):
                continue
            progress(f"{task.env} x {task.num_envs}, round {number + 1} of {rounds}: {label}")
            try:
                result = run_contender(name, task)
            except Failed as exc:
                outcome.problem, outcome.broken = str(exc), True
                continue
            if "not_applicable" in result:
                outcome.problem = result["not_applicable"]
            else:
                outcome.rounds.append(result)
    return outcomes


def run_contender(name: str, task: Task) -> dict[str, Any]:
    """One contender, one round, in a process of its own, in an empty directory: MuJoCo leaves a log where it runs.

    Returns:
        The fields of its result, and "others_cpus", where that can be known: how many CPUs other processes used
        meanwhile, on average.

    Raises:
        Failed: if it ends with an error, or does not end.
    """
    limit = task.seconds + task.warm_up_s + START_AND_STOP_S
    began, before = time.perf_counter(), _cpu_seconds_of_others()
    command = python(_CODE, name, json.dumps(dataclasses.asdict(task)))
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            done = _run(command, directory, limit)
    except subprocess.TimeoutExpired:
        raise Failed(f"did not end within {limit:.0f} s") from None
    failed = f"failed with status {done.returncode}"
    for line in reversed(done.stdout.splitlines()):
        if not line.startswith(MARK):
            continue
        result: dict[str, Any] = json.loads(line.removeprefix(MARK))
        if "raised" in result:
            raise Failed(f"{failed}: {result['raised']}")
        if done.returncode != 0:
            break
        if before is not None and (after := _cpu_seconds_of_others()) is not None:
            result["others_cpus"] = max(0.0, after - before) / (time.perf_counter() - began)
        return result
    # it had no time to say what went wrong
    said = [line.strip() for line in done.stderr.splitlines()]
    raise Failed(f"{failed}: {([line for line in said if line] or ['it printed nothing'])[-1]}")


def _run(command: list[str], directory: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, in a process group: if this raises, processes of the contender's own end with it."""
    with subprocess.Popen(
        command,
        env={**os.environ, **THREAD_LIMITS},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        process_group=0 if hasattr(os, "killpg") else None,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except BaseException:  # its time is up, Ctrl-C, a signal
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()  # after Ctrl-C `with` would not
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def foreign_load(seconds: float) -> float | None:
    """How many CPUs other processes use, on average over so many seconds from now; None where that can't be known."""
    began, before = time.perf_counter(), _cpu_seconds_of_others()
    time.sleep(seconds)
    after = _cpu_seconds_of_others()
    if before is None or after is None:
        return None
    return max(0.0, after - before) / (time.perf_counter() - began)


def _cpu_seconds_of_others() -> float | None:
    """CPU time that was not ours, nor that of children which have ended; None where there is no /proc."""
    try:
        first = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first.split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])
