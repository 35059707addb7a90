"""Workloads, and the rounds in which contenders step them: in turn, each time in a process of its own.

A contender is a vector env, or a loop that vector envs are compared with. Its name is a key of `CONTENDERS` in the
module that is its registry, by default `aioenv.cli.contenders`. The value's method `measure(workload)` steps the
contender in the process that calls it, and returns numbers by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from aioenv.cli.env_ids import env_factory
from aioenv.cli.processes import LoadMeter, python_command, run_in_group

__all__ = [
    "ACTION_BATCHES",
    "PEERS",
    "ContenderFailed",
    "NotApplicable",
    "Outcome",
    "Throughput",
    "TimedLoop",
    "Workload",
    "measure_blocking",
    "measure_here",
    "play_rounds",
    "rows_of_batch",
    "run_contender",
]

# Different batches of actions, used in turn.
ACTION_BATCHES = 64
PEERS = "aioenv.cli.contenders"  # the registry of `aioenv bench`

# Threads inside an env or a numeric library would fight the contender's own processes for the CPUs.
THREAD_LIMITS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
START_AND_STOP_S = 180.0
MAX_MESSAGE = 400  # characters of an error, which stands in a table

# Not `python -m`: Gymnasium's workers would import the main module again, and start 2 to 4 times as slowly.
_CODE = "from aioenv.cli.rounds import measure_here; measure_here(*sys.argv[1:])"
_MARK = "aioenv-bench-result:"  # before the result, on the last line that a contender's process prints


class NotApplicable(Exception):
    """This contender does not have this env, or can't run here; the message says why."""


@dataclass(frozen=True)
class Throughput:
    """The speed of one contender in one round.

    Attributes:
        steps: batches stepped while the clock ran.
        seconds: how long that took.
        env_steps: steps of single envs.
        start_s: seconds from the constructor's call until every env was reset.
    """

    steps: int
    seconds: float
    env_steps: int
    start_s: float


@dataclass(frozen=True)
class Workload:
    """An env, how many of it are stepped, for how long, and how aioenv is to do it.

    Attributes:
        env: an id of Gymnasium, or the name of a synthetic env.
        num_envs: how many.
        seconds: how long to step with the clock running.
        warm_up_s: how long to step before that.
        start, channel: how aioenv starts its workers and talks to them.
        keywords: more arguments of `aioenv.make_vec`, by name.
        groups, split: into how many groups aioenv splits the slots, and whether a group holds whole workers.
        loop: aioenv's event loop, "uvloop" or "asyncio".
    """

    env: str
    num_envs: int
    seconds: float
    warm_up_s: float = 0.3
    start: Literal["forkserver", "spawn"] | None = None
    channel: Literal["auto", "scatter", "streams"] = "auto"
    keywords: dict[str, Any] = field(default_factory=dict)
    groups: int = 1
    split: Literal["slots", "workers"] = "slots"
    loop: str = "uvloop"

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for aioenv's own vector envs."""
        return {"start": self.start, "channel": self.channel, **self.keywords}

    @property
    def make_env(self) -> Callable[[], Any]:
        """A factory of one env, the same for every contender."""
        return env_factory(self.env)

    @property
    def factories(self) -> list[Callable[[], Any]]:
        """A factory for each env."""
        return [self.make_env] * self.num_envs

    def actions(self) -> list[Any]:
        """Sample batches of actions, the same for every contender: arrays, of most spaces."""
        env = self.make_env()
        space = batch_space(env.action_space, self.num_envs)
        env.close()
        space.seed(0)
        return [space.sample() for _ in range(ACTION_BATCHES)]


def rows_of_batch(batch: Any, slots: npt.NDArray[np.int64], space: gymnasium.Space[Any]) -> Any:
    """Take the actions of some slots out of a batch.

    Args:
        batch: the actions of all slots.
        slots: which to take.
        space: the space of one action.
    """
    if isinstance(batch, np.ndarray):
        return batch[slots]
    if isinstance(space, spaces.Dict):
        return {key: rows_of_batch(batch[key], slots, one) for key, one in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(rows_of_batch(one_batch, slots, one) for one_batch, one in zip(batch, space.spaces, strict=True))
    return tuple(batch[slot] for slot in slots)


class TimedLoop:
    """Count from 0 as long as the warm-up lasts, then again from 0 while the clock runs::

        for number in (loop := TimedLoop(workload)):
            envs.step(actions[number % ACTION_BATCHES])

    Attributes:
        count: how many iterations the clock ran for, at least one.
        seconds: how long these took.
    """

    count: int
    seconds: float

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __iter__(self) -> Iterator[int]:
        for budget in (self._workload.warm_up_s, self._workload.seconds):
            count = 0
            began = time.perf_counter()
            end = began + budget
            while (now := time.perf_counter()) < end or not count:
                yield count
                count += 1
        self.count, self.seconds = count, now - began

    def throughput(self, start_s: float, steps: int = 1) -> Throughput:
        """Return the throughput of a contender that started within `start_s` and made so many steps an iteration."""
        steps *= self.count
        return Throughput(steps, self.seconds, steps * self._workload.num_envs, start_s)


def reset_seeded(envs: Any) -> Any:
    """Reset envs as Gymnasium's API does, and return the function that steps them."""
    envs.reset(seed=0)
    return envs.step


def measure_blocking(
    workload: Workload, make: Callable[[], Any], begin: Callable[[Any], Callable[[Any], Any]] = reset_seeded
) -> Throughput:
    """Start a contender, warm it up, count how many batches it steps, and close it.

    Args:
        make: makes the envs.
        begin: resets them, and returns the function that steps them.
    """
    actions = workload.actions()
    began = time.perf_counter()
    with contextlib.closing(make()) as envs:
        step = begin(envs)
        start_s = time.perf_counter() - began
        for number in (loop := TimedLoop(workload)):
            step(actions[number % ACTION_BATCHES])
    return loop.throughput(start_s)


class ContenderFailed(Exception):
    """A contender could not be measured; the message says why, on one line."""


@dataclass
class Outcome:
    """The results of one contender with one env.

    Attributes:
        rounds: its results, one a round.
        problem: why it takes no (further) part; empty if nothing is wrong.
        broken: whether the problem is a fault, and not an env that the contender does not have.
    """

    rounds: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    broken: bool = False


def play_rounds(
    entries: Mapping[str, tuple[str, Workload]],
    rounds: int,
    progress: Callable[[str], None],
    *,
    registry: str = PEERS,
    once: Collection[str] = (),
    outcomes: dict[str, Outcome] | None = None,
) -> dict[str, Outcome]:
    """Measure A B C A B C …, so that other load on the machine falls on all alike.

    A contender that fails is not tried again.

    Args:
        entries: label → contender and workload.
        rounds: how many.
        progress: called before each measurement with a text that describes it.
        registry: the module that the contenders' names belong to.
        once: labels of contenders that take part in the first round alone.
        outcomes: results by label, which these are added to; None for a new dict.
    """
    outcomes = {} if outcomes is None else outcomes
    for number in range(rounds):
        for label, (name, workload) in entries.items():
            outcome = outcomes.setdefault(label, Outcome())
            if outcome.problem or (number and label in once):
                continue
            progress(f"{workload.env} x {workload.num_envs}, round {number + 1} of {rounds}: {label}")
            try:
                result = run_contender(name, workload, registry)
            except ContenderFailed as exc:
                outcome.problem, outcome.broken = str(exc), True
                continue
            if "not_applicable" in result:
                outcome.problem = result["not_applicable"]
            else:
                outcome.rounds.append(result)
    return outcomes


def run_contender(name: str, workload: Workload, registry: str = PEERS) -> dict[str, Any]:
    """Measure one contender once, in a process of its own, in an empty directory: MuJoCo leaves a log where it runs.

    Returns:
        The registry's numbers, or "not_applicable" with a reason; and "others_cpus", where that can be known: how many
        CPUs other processes used meanwhile, on average.

    Raises:
        ContenderFailed: if it ends with an error, or does not end.
    """
    limit = workload.seconds + workload.warm_up_s + START_AND_STOP_S
    meter = LoadMeter()
    command = python_command(_CODE, registry, name, json.dumps(dataclasses.asdict(workload)))
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            done = run_in_group(command, limit, cwd=directory, env={**os.environ, **THREAD_LIMITS})
    except subprocess.TimeoutExpired:
        raise ContenderFailed(f"did not end within {limit:.0f} s") from None
    failed = f"failed with status {done.returncode}"
    for line in reversed(done.stdout.splitlines()):
        if not line.startswith(_MARK):
            continue
        result: dict[str, Any] = json.loads(line.removeprefix(_MARK))
        if "raised" in result:
            raise ContenderFailed(f"{failed}: {result['raised']}")
        if done.returncode != 0:
            break
        if (load := meter.read()) is not None:
            result["others_cpus"] = load
        return result
    # the process died before it could report an error
    said = [line.strip() for line in done.stderr.splitlines()]
    raise ContenderFailed(f"{failed}: {([line for line in said if line] or ['it printed nothing'])[-1]}")


def measure_here(registry: str, name: str, workload_json: str) -> None:
    """Measure a contender in this process, and print the result or the error: the other end of `run_contender`."""
    result: dict[str, Any] = {}
    try:
        result = importlib.import_module(registry).CONTENDERS[name].measure(Workload(**json.loads(workload_json)))
    except NotApplicable as exc:
        result = {"not_applicable": str(exc)}
    except BaseException as exc:
        result = {"raised": _one_line(exc)}
        raise
    finally:
        print(f"\n{_MARK}{json.dumps(result)}", flush=True)


def _one_line(exc: BaseException) -> str:
    """Describe an exception on one line: the first of a group, without a worker's traceback."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    message = " ".join(str(exc).partition("Traceback (most recent call last)")[0].split())
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}…"
    return f"{type(exc).__name__}: {message}" if message else type(exc).__name__
