"""The vector envs that `aioenv bench` compares, their workloads, and the rounds in which they are stepped.

Contenders are stepped in turn, each time in a process of its own. A contender is a vector env, or a loop that vector
envs are compared with. Its name is a key of `CONTENDERS` in the module that is its registry, by default this one. The
value's method `measure(workload)` steps the contender in the process that calls it, and returns numbers by name. Other
libraries' vector envs have their defaults, and are started and stepped as their own documentation shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import batch_space, iterate

import aioenv
from aioenv import sync
from aioenv.cli.arguments import SYNTHETIC, env_factory, native_problem
from aioenv.cli.processes import LoadMeter, python_command, run_in_group
from aioenv.platform import usable_cpus

__all__ = [
    "ACTION_BATCHES",
    "CONTENDERS",
    "MAX_PROCESSES",
    "PEERS",
    "Contender",
    "ContenderFailed",
    "NotApplicable",
    "Outcome",
    "Throughput",
    "TimedLoop",
    "Workload",
    "measure_blocking",
    "measure_here",
    "natively",
    "play_rounds",
    "rows_of_batch",
    "run_contender",
    "step_aioenv",
    "step_bare",
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
_CODE = "from aioenv.cli.contenders import measure_here; measure_here(*sys.argv[1:])"
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
        backend: where aioenv's envs stepped ("workers", "in_process", "native"), where that is told.
    """

    steps: int
    seconds: float
    env_steps: int
    start_s: float
    backend: str = ""


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


# Steps between two looks at the clock, if there is time for them; the groups run dry at the end of each rollout.
ROLLOUT_STEPS = 64
# More processes say nothing new about a vector env that takes a process for each env.
MAX_PROCESSES = 64

Wrap = Callable[[Any], Any]


@dataclass(frozen=True)
class Contender:
    """Something that steps envs.

    Attributes:
        label: its name in tables.
        package: the module that it needs.
        step: steps it in this process.
        process_per_env: whether it takes a process for each env.
    """

    label: str
    package: str
    step: Callable[[Workload], Throughput]
    process_per_env: bool = False

    @property
    def installed(self) -> bool:
        """Whether its package is installed."""
        return importlib.util.find_spec(self.package) is not None

    def measure(self, workload: Workload) -> dict[str, Any]:
        """Step it in this process; returns the fields of its `Throughput`.

        Raises:
            NotApplicable: if it does not have this env, or would take too many processes.
        """
        if self.process_per_env and workload.num_envs > MAX_PROCESSES:
            raise NotApplicable(f"a process an env: not measured with more than {MAX_PROCESSES}")
        return dataclasses.asdict(self.step(workload))


# ---------------------------------------------------------------- aioenv


def step_aioenv(
    workload: Workload, *, wrap: Wrap = lambda envs: envs, keywords: dict[str, Any] | None = None, **changes: Any
) -> Throughput:
    """Measure the async API, step after step or in rollouts of several groups.

    Args:
        workload: what to step, and how.
        wrap: wraps the vector env for stepping.
        keywords: more arguments of the vector env.
        changes: other values of the workload's attributes.

    Raises:
        NotApplicable: if there is nothing to split into groups.
    """
    workload = replace(workload, keywords={**workload.keywords, **(keywords or {})}, **changes)
    if workload.groups > 1 and workload.num_envs < 2:
        raise NotApplicable("takes two envs")
    if workload.split == "workers" and usable_cpus() == 1:
        raise NotApplicable("takes two workers")
    work = (_roll_out if workload.groups > 1 else _step)(workload, wrap)
    return asyncio.run(work) if workload.loop == "asyncio" else aioenv.run(work)


def _make(workload: Workload) -> Any:
    if "backend" in workload.keywords:
        # synthetic envs are no ids
        return aioenv.make_vec(SYNTHETIC.get(workload.env, workload.env), workload.num_envs, **workload.options)
    return aioenv.AsyncVectorEnv(workload.factories, **workload.options)


async def _step(workload: Workload, wrap: Wrap) -> Throughput:
    actions = workload.actions()
    began = time.perf_counter()
    async with _make(workload) as envs:
        wrapped = wrap(envs)
        await wrapped.reset(seed=0)
        start_s = time.perf_counter() - began
        for number in (loop := TimedLoop(workload)):
            await wrapped.step(actions[number % ACTION_BATCHES])
        return replace(loop.throughput(start_s), backend=envs.backend)


async def _roll_out(workload: Workload, wrap: Wrap) -> Throughput:
    actions = itertools.cycle(workload.actions())
    began = time.perf_counter()
    async with _make(workload) as envs:
        await envs.reset(seed=0)

        def in_turn(obs: Any, slots: Any) -> Any:
            return rows_of_batch(next(actions), slots, envs.single_action_space)

        start_s = time.perf_counter() - began
        roll_out = partial(wrap(envs).rollout, in_turn, groups=workload.groups, split=workload.split)
        steps = await _steps_that_fit(roll_out, workload.seconds)
        for _ in (loop := TimedLoop(workload)):
            await roll_out(steps)
    return loop.throughput(start_s, steps)


async def _steps_that_fit(roll_out: Callable[[int], Awaitable[Any]], seconds: float) -> int:
    """Return how many steps of a rollout there is time for, at least one: with slow envs 64 would take minutes."""
    for _ in range(2):  # the first is slower than those that follow
        began = time.perf_counter()
        await roll_out(1)
        fit = seconds / (time.perf_counter() - began)
        if fit >= ROLLOUT_STEPS:
            return ROLLOUT_STEPS
    return max(1, int(fit))


def natively(workload: Workload) -> Workload:
    """Return the same workload for the env's vectorised version in this process, where nothing is said of workers.

    Raises:
        NotApplicable: if there is none.
    """
    if problem := native_problem(workload.env):
        raise NotApplicable(problem)
    return _without_processes(workload, backend="native")


def _without_processes(workload: Workload, **keywords: Any) -> Workload:
    """Return the same workload with further keywords, where nothing is said of how processes start or talk."""
    return replace(workload, start=None, channel="auto", keywords={**workload.keywords, **keywords})


def _blocking(make: Callable[[Workload], Any]) -> Callable[[Workload], Throughput]:
    """Return a function that measures the blocking vector env which `make` makes of a workload."""
    return lambda workload: measure_blocking(workload, lambda: make(workload))


# ---------------------------------------------------------------- other libraries


def _reset_sb3(envs: Any) -> Any:
    envs.seed(0)
    envs.reset()
    return envs.step


def _sb3(name: str, workload: Workload, **options: Any) -> Throughput:
    """Measure one of Stable-Baselines3's vector envs.

    `SubprocVecEnv` is forked, which is not its default: with that every process imports torch, which takes minutes for
    64 envs on two CPUs. The speed of steps is the same.
    """
    from stable_baselines3.common import vec_env

    return measure_blocking(workload, partial(getattr(vec_env, name), workload.factories, **options), _reset_sb3)


def _sb3_aioenv(workload: Workload) -> Throughput:
    """Measure aioenv as Stable-Baselines3 steps it, with the infos that it wants."""
    from aioenv.adapters.sb3 import VecEnv

    return measure_blocking(workload, lambda: VecEnv(workload.factories, **workload.options), _reset_sb3)


def _tianshou(workload: Workload) -> Throughput:
    from tianshou.env import SubprocVectorEnv

    def begin(envs: Any) -> Callable[[Any], Any]:
        envs.seed(0)
        envs.reset()

        def step(actions: Any) -> None:
            _, _, terminated, truncated, _ = envs.step(actions)
            ended = np.flatnonzero(terminated | truncated)
            if len(ended):  # it leaves resets to the caller
                envs.reset(ended)

        return step

    return measure_blocking(workload, lambda: SubprocVectorEnv(workload.factories), begin)


def _torchrl(workload: Workload) -> Throughput:
    """Measure it forked, for the same reason as SB3's."""
    import torch
    from torchrl.envs import GymWrapper, ParallelEnv

    def create(make: Callable[[], Any]) -> Any:
        return GymWrapper(make(), categorical_action_encoding=True)

    def begin(envs: Any) -> Callable[[Any], Any]:
        envs.set_seed(0)
        data = envs.reset()

        def step(actions: Any) -> None:
            nonlocal data
            _, data = envs.step_and_maybe_reset(data.set("action", torch.from_numpy(actions)))

        return step

    makes = [{"make": make} for make in workload.factories]
    make_all = partial(ParallelEnv, workload.num_envs, create, create_env_kwargs=makes, mp_start_method="fork")
    return measure_blocking(workload, make_all, begin)


def _pufferlib(workload: Workload) -> Throughput:
    """Measure it with as many processes as CPUs, as far as their number divides that of the envs."""
    from pufferlib import vector
    from pufferlib.emulation import GymnasiumPufferEnv

    make = partial(
        vector.make,
        partial(GymnasiumPufferEnv, env_creator=workload.make_env),
        num_envs=workload.num_envs,
        backend=vector.Multiprocessing,
        num_workers=max(n for n in range(1, usable_cpus() + 1) if workload.num_envs % n == 0),
        overwork=True,  # it counts cores, and we CPUs
    )
    return measure_blocking(workload, make)


def _envpool(workload: Workload) -> Throughput:
    """Measure its own C++ envs, on threads."""
    import envpool

    if workload.env in SYNTHETIC or workload.env not in envpool.list_all_envs():
        raise NotApplicable(f"has no {workload.env}")

    def begin(envs: Any) -> Any:
        envs.reset()
        return envs.step

    make = partial(envpool.make, workload.env, env_type="gymnasium", num_envs=workload.num_envs, seed=0)
    return measure_blocking(workload, make, begin)


def step_bare(workload: Workload, ready: Callable[[], Any] = lambda: None) -> Throughput:
    """Measure one env, stepped without any vector env, reset when its episode ends.

    Args:
        workload: what to step; each batch of actions is taken one by one.
        ready: called once the env is reset.
    """

    def begin(env: Any) -> Callable[[Any], Any]:
        env.reset(seed=0)
        space = batch_space(env.action_space, workload.num_envs)
        ready()

        def step(actions: Any) -> None:
            for action in actions if isinstance(actions, np.ndarray) else iterate(space, actions):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

        return step

    return measure_blocking(workload, workload.make_env, begin)


CONTENDERS: dict[str, Contender] = {
    "aioenv": Contender("aioenv (uvloop)", "uvloop", step_aioenv),
    "aioenv-asyncio": Contender("aioenv (asyncio)", "aioenv", partial(step_aioenv, loop="asyncio")),
    # faster where a step is shorter than it takes to wake two processes
    "aioenv-one": Contender("aioenv (num_workers=1)", "uvloop", partial(step_aioenv, keywords={"num_workers": 1})),
    "aioenv-views": Contender("aioenv (copy=False)", "aioenv", partial(step_aioenv, keywords={"copy": False})),
    "aioenv-groups": Contender("aioenv (groups=2)", "aioenv", partial(step_aioenv, groups=2)),
    "aioenv-workers": Contender(
        "aioenv (groups=2, split=workers)", "aioenv", partial(step_aioenv, groups=2, split="workers")
    ),
    "aioenv-native": Contender("aioenv (backend=native)", "aioenv", lambda load: step_aioenv(natively(load))),
    "aioenv-native-sync": Contender(
        "aioenv.sync (backend=native)",
        "aioenv",
        _blocking(lambda load: sync.make_vec(load.env, load.num_envs, **natively(load).options)),
    ),
    "aioenv-sync": Contender(
        "aioenv.sync", "aioenv", _blocking(lambda load: sync.VectorEnv(load.factories, **load.options))
    ),
    "aioenv-in-process": Contender(
        "aioenv (num_workers=0)", "aioenv", lambda load: step_aioenv(_without_processes(load, num_workers=0))
    ),
    "aioenv-in-process-sync": Contender(
        "aioenv.sync (num_workers=0)",
        "aioenv",
        _blocking(lambda load: sync.VectorEnv(load.factories, **_without_processes(load, num_workers=0).options)),
    ),
    "aioenv-auto": Contender(
        "aioenv (backend=auto)", "aioenv", lambda load: step_aioenv(_without_processes(load, backend="auto"))
    ),
    # the drop-in: Gymnasium's AsyncVectorEnv, imported from here
    "aioenv-drop-in": Contender(
        "aioenv.sync.AsyncVectorEnv",
        "aioenv",
        _blocking(lambda load: sync.AsyncVectorEnv(load.factories, num_workers=load.keywords.get("num_workers"))),
    ),
    "aioenv-sb3": Contender("aioenv.adapters.sb3", "stable_baselines3", _sb3_aioenv),
    "gymnasium-async": Contender(
        "gymnasium AsyncVectorEnv",
        "gymnasium",
        _blocking(lambda load: AsyncVectorEnv(load.factories)),
        process_per_env=True,
    ),
    "gymnasium-sync": Contender(
        "gymnasium SyncVectorEnv", "gymnasium", _blocking(lambda load: SyncVectorEnv(load.factories))
    ),
    "sb3-subproc": Contender(
        "SB3 SubprocVecEnv",
        "stable_baselines3",
        partial(_sb3, "SubprocVecEnv", start_method="fork"),
        process_per_env=True,
    ),
    "sb3-dummy": Contender("SB3 DummyVecEnv", "stable_baselines3", partial(_sb3, "DummyVecEnv")),
    "tianshou-subproc": Contender("Tianshou SubprocVectorEnv", "tianshou", _tianshou, process_per_env=True),
    "torchrl-parallel": Contender("TorchRL ParallelEnv", "torchrl", _torchrl, process_per_env=True),
    "pufferlib": Contender("PufferLib Multiprocessing", "pufferlib", _pufferlib),
    "envpool": Contender("EnvPool", "envpool", _envpool),
    "bare": Contender("bare loop, one env", "gymnasium", step_bare),
}
