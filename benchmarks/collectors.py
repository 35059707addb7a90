"""Rollouts with a policy: collectors, and as many plain processes that keep their rollouts to themselves.

The plain processes loop over `rollout` of a vector env of their own, with the same policy. Nothing is faster on these
CPUs, so what collectors take more is the cost of handing rollouts out. RLlib's env runners are measured too, where the
environment variable RLLIB_PYTHON names a Python that has them (see `rllib_runners.py`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import aioenv
from aioenv.cli.contenders import NotApplicable, Workload
from aioenv.platform import usable_cpus

__all__ = ["COLLECTED_KEYS", "COLLECTOR_ENVS", "by_collectors", "by_processes", "by_rllib"]

COLLECTED_KEYS = ("env-steps/s", "CPU µs a step")
COLLECTOR_ENVS = {"collectors": "CartPole-v1", "collectors-halfcheetah": "HalfCheetah-v5"}
STEPS = 128
HIDDEN = 64
READY_S = 120.0
RLLIB_PYTHON = "RLLIB_PYTHON"  # an environment variable


class SmallPolicy:
    """Two hidden layers of 64, with a value beside each action; of torch where it is installed, else of numpy.

    Args:
        inputs, outputs: the sizes of an observation and of its actions; outputs 0: the better one of two.
        torch: whether to use torch.
    """

    def __init__(self, inputs: int, outputs: int, torch: bool) -> None:
        rng = np.random.default_rng(0)
        sizes = (inputs, HIDDEN, HIDDEN, (outputs or 2) + 1)
        weights = [(rng.standard_normal(size) / np.sqrt(size[0])).astype(np.float32) for size in pairwise(sizes)]
        self._discrete = not outputs
        self._torch: Any = None
        self._weights: list[Any] = weights
        if torch:
            import torch as library

            library.set_num_threads(1)
            self._torch = library
            self._weights = [library.from_numpy(array) for array in weights]

    def __call__(self, obs: Any) -> Any:
        """Return actions and values."""
        values = obs.astype(np.float32)
        if self._torch is not None:
            with self._torch.inference_mode():
                values = self._torch.from_numpy(values)
                for weights in self._weights:
                    values = self._torch.tanh(values @ weights)
                values = values.numpy()
        else:
            for weights in self._weights:
                values = np.tanh(values @ weights)
        actions = values[:, :-1].argmax(1) if self._discrete else values[:, :-1]
        return actions, {"value": values[:, -1]}


def _policy(workload: Workload, torch: bool) -> Any:
    """Return a factory of the policy.

    Raises:
        NotApplicable: if torch is not installed, or the env is none of these.
    """
    _check_env(workload)
    if torch:
        try:
            import torch as library  # noqa: F401
        except ImportError:
            raise NotApplicable("it needs torch") from None
    if not Path("/proc/self/task").exists():
        raise NotApplicable("it reads CPU times from /proc")
    inputs, outputs = (4, 0) if workload.env == "CartPole-v1" else (17, 6)
    return partial(SmallPolicy, inputs, outputs, torch)


def _check_env(workload: Workload) -> None:
    if workload.env not in COLLECTOR_ENVS.values():
        raise NotApplicable(f"takes one of {', '.join(COLLECTOR_ENVS.values())}")


def _told(env_steps: float, seconds: float, cpu_s: float) -> dict[str, float]:
    return dict(zip(COLLECTED_KEYS, (env_steps / seconds, cpu_s / env_steps * 1e6), strict=True))


# ---------------------------------------------------------------- plain processes


def by_processes(torch: bool, workload: Workload) -> dict[str, float]:
    """Measure a process a CPU, all at once."""
    policy, count = _policy(workload, torch), usable_cpus()
    barrier = multiprocessing.Barrier(count)
    running = []
    for _ in range(count):
        reading, writing = multiprocessing.Pipe(duplex=False)
        share = workload.num_envs // count
        process = multiprocessing.Process(target=_loop, args=(workload, share, policy, barrier, writing))
        process.start()
        writing.close()
        running.append((process, reading))
    found = []
    for process, pipe in running:
        found.append(pipe.recv())
        process.join()
    steps, cpu_s = sum(each[0] for each in found), sum(each[2] for each in found)
    rate = sum(each[0] / each[1] for each in found)
    return _told(steps, steps / rate, cpu_s)


def _loop(workload: Workload, num_envs: int, policy: Any, barrier: Any, pipe: Any) -> None:
    pipe.send(aioenv.run(_rollouts(workload, num_envs, policy(), barrier)))


async def _rollouts(workload: Workload, num_envs: int, policy: Any, barrier: Any) -> tuple[int, float, float]:
    async with aioenv.make_vec(workload.env, num_envs, num_workers=0) as envs:
        await envs.reset(seed=0)
        await envs.rollout(policy, STEPS, 1)
        barrier.wait(READY_S)
        count = 0
        began, cpu_s = time.perf_counter(), time.process_time()
        while time.perf_counter() < began + workload.seconds:
            await envs.rollout(policy, STEPS, 1)
            count += 1
        return count * STEPS * num_envs, time.perf_counter() - began, time.process_time() - cpu_s


# ---------------------------------------------------------------- collectors


def by_collectors(torch: bool, prefetch: int, workload: Workload) -> dict[str, float]:
    """Measure a collector a CPU; the learner only takes the rollouts."""
    return aioenv.run(_collect(workload, _policy(workload, torch), prefetch))


async def _collect(workload: Workload, policy: Any, prefetch: int) -> dict[str, float]:
    async with aioenv.RolloutCollector(
        workload.env, workload.num_envs, policy=policy, steps=STEPS, seed=0, prefetch=prefetch
    ) as collector:
        for _ in range(2 * collector.num_collectors):
            await anext(collector)
        steps = 0
        began, cpu_s = time.perf_counter(), _cpu_s(collector.pids)
        while time.perf_counter() < began + workload.seconds:
            steps += (await anext(collector)).reward.size
        return _told(steps, time.perf_counter() - began, _cpu_s(collector.pids) - cpu_s)


def _cpu_s(pids: Iterable[int | None]) -> float:
    """Return the CPU time of processes and of this one."""
    total = time.process_time()
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):  # finer than the ticks of /proc/PID/stat
            total += int(file.read_text(encoding="utf-8").split()[0]) / 1e9
    return total


# ---------------------------------------------------------------- RLlib


def by_rllib(workload: Workload) -> dict[str, float]:
    """Measure an actor with an env runner of RLlib a CPU.

    Raises:
        NotApplicable: if there is no Python that has RLlib, or the env is none of these.
    """
    _check_env(workload)
    if not (python := os.environ.get(RLLIB_PYTHON)):
        raise NotApplicable(f"{RLLIB_PYTHON} names no Python with RLlib")
    count = usable_cpus()
    numbers = {
        "runners": count,
        "envs": workload.num_envs // count,
        "steps": STEPS,
        "hidden": HIDDEN,
        "seconds": workload.seconds,
    }
    arguments = [f"--{name}={value}" for name, value in numbers.items()]
    program = str(Path(__file__).with_name("rllib_runners.py"))
    done = subprocess.run([python, program, workload.env, *arguments], stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return _told(found["env_steps"], found["seconds"], found["cpu_s"])
