"""Compare the speed of two versions of aioenv, installed in two virtual environments.

    python -m benchmarks.versions OLD/bin/python NEW/bin/python --bar 0.95

Each measurement is a process of its own, in an empty directory. A round measures both versions, and which one comes
first alternates. The first version is compared with itself as well: its interval says how precise the run is.
Intervals are 95 % bootstrap intervals of the median of the paired ratios, new to old: above 1 the new one is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

# This file runs in either version: `aioenv` is imported in functions, and only by public names that both have.

__all__ = ["ROWS", "interval", "main"]

LIMIT_S = 120.0  # of a measurement
WARM_UP_S = 0.3
RESAMPLES = 10_000
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


# ------------------------------------------------------------ rows, which run in the measured version


class NoOp(gymnasium.Env[Any, Any]):
    """Returns the same observation in each step.

    Args:
        shape, dtype: of the observation.
    """

    action_space = spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (4,), dtype: type = np.float32) -> None:
        high = 255 if dtype is np.uint8 else 1
        self.observation_space = spaces.Box(0, high, shape, dtype)
        self._obs: npt.NDArray[Any] = np.zeros(shape, dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return zeros."""
        return self._obs, {}

    def step(self, action: Any) -> Any:
        """Return zeros."""
        return self._obs, 0.0, False, False, {}


def _times(seconds: float) -> Iterator[None]:
    """Yield as long as the clock runs."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield


def _awaited(env: Any, n: int, seconds: float, *, render: bool = False, **keywords: Any) -> float:
    """Return the batches per second of `await envs.step()`, with an image of each slot if asked for."""
    import aioenv

    async def run() -> float:
        if render:
            keywords["render"] = aioenv.RenderConfig(84, 84, quality="fast")
        async with aioenv.make_vec(env, n, **keywords) as envs:
            await envs.reset(seed=0)
            envs.action_space.seed(0)
            actions = envs.action_space.sample()
            for budget in (WARM_UP_S, seconds):
                count, began = 0, time.perf_counter()
                for _ in _times(budget):
                    await envs.step(actions)
                    if render:
                        await envs.render()
                    count += 1
            return count / (time.perf_counter() - began)

    return aioenv.run(run())


def _blocking(env: str, n: int, seconds: float, *, api: str) -> float:
    """Return the batches per second of a blocking API: "sync", "drop-in" or "sb3"."""
    import aioenv

    if api == "sb3":
        from aioenv.adapters.sb3 import VecEnv

        envs: Any = VecEnv([partial(gymnasium.make, env)] * n)
        envs.reset()
        actions = np.array([envs.action_space.sample() for _ in range(n)])
    else:
        if api == "sync":
            envs = aioenv.sync.make_vec(env, n)
        else:
            envs = aioenv.sync.AsyncVectorEnv([partial(gymnasium.make, env)] * n)
        envs.reset(seed=0)
        envs.action_space.seed(0)
        actions = envs.action_space.sample()
    with contextlib.closing(envs):
        for budget in (WARM_UP_S, seconds):
            count, began = 0, time.perf_counter()
            for _ in _times(budget):
                envs.step(actions)
                count += 1
        return count / (time.perf_counter() - began)


def _startup(n: int, seconds: float) -> float:
    """Return how often per second a vector env with a worker for each env could start, be reset and be closed."""
    import aioenv

    async def run() -> float:
        began = time.perf_counter()
        async with aioenv.make_vec("CartPole-v1", n, num_workers=n) as envs:
            await envs.reset(seed=0)
        return 1 / (time.perf_counter() - began)

    return aioenv.run(run())


def _memory(n: int, seconds: float) -> float:
    """Return the reciprocal of the proportional memory of a worker, in MiB."""
    import aioenv

    async def run() -> float:
        async with aioenv.make_vec("HalfCheetah-v5", n, num_workers=n) as envs:
            await envs.reset(seed=0)
            await envs.step(envs.action_space.sample())
            return 1024 * n / sum(_proportional_kib(worker.pid) for worker in envs.workers)

    return aioenv.run(run())


def _proportional_kib(pid: int | None) -> int:
    """Return the memory of a process, with its share of what others map too."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


ROWS: dict[str, Callable[[float], float]] = {
    "no-op x 1": partial(_awaited, NoOp, 1),
    "no-op x 64": partial(_awaited, NoOp, 64),
    "CartPole x 8": partial(_awaited, "CartPole-v1", 8),
    "CartPole x 64": partial(_awaited, "CartPole-v1", 64),
    "CartPole x 64, sync": partial(_blocking, "CartPole-v1", 64, api="sync"),
    "CartPole x 64, drop-in": partial(_blocking, "CartPole-v1", 64, api="drop-in"),
    "CartPole x 64, sb3": partial(_blocking, "CartPole-v1", 64, api="sb3"),
    "(84, 84, 4) x 64": partial(_awaited, partial(NoOp, (84, 84, 4), np.uint8), 64),
    "Ant x 64": partial(_awaited, "Ant-v5", 64),
    "Humanoid x 64": partial(_awaited, "Humanoid-v5", 64),
    "Hopper x 64": partial(_awaited, "Hopper-v5", 64),
    "HalfCheetah x 64": partial(_awaited, "HalfCheetah-v5", 64),
    "CartPole x 64, native": partial(_awaited, "CartPole-v1", 64, backend="native"),
    "Ant x 64, native": partial(_awaited, "Ant-v5", 64, backend="native"),
    "HalfCheetah x 64, native": partial(_awaited, "HalfCheetah-v5", 64, backend="native"),
    "pixels fast x 16": partial(_awaited, "HalfCheetah-v5", 16, render=True),
    "start of 64 workers": partial(_startup, 64),
    "memory of a worker": partial(_memory, 16),
}


# ------------------------------------------------------------ the comparison


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median of some ratios, and its 95 % bootstrap interval."""
    drawn = np.random.default_rng(0).choice(np.array(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, 1), (2.5, 97.5))
    return statistics.median(ratios), float(low), float(high)


def _measure(python: str, row: str, seconds: float) -> float:
    """Measure a row with the aioenv of an interpreter.

    Raises:
        RuntimeError: if that fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        # -P: else this folder would hide what is installed
        done = subprocess.run(
            [python, "-P", str(Path(__file__).resolve()), "--measure", row, str(seconds)],
            cwd=directory,
            env={**os.environ, **_THREADS},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    if done.returncode:
        raise RuntimeError(f"{row} failed with {python}:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def _paired(first: str, second: str, row: str, rounds: int, seconds: float) -> list[float]:
    """Return the ratio of each round, second to first."""
    ratios = []
    for number in range(rounds):
        order = (first, second) if number % 2 == 0 else (second, first)
        rates = [_measure(python, row, seconds) for python in order]
        ratios.append(rates[1] / rates[0] if number % 2 == 0 else rates[0] / rates[1])
    return ratios


def main() -> int:
    """Compare two versions; return 1 if an interval begins below the bar."""
    parser = argparse.ArgumentParser("python -m benchmarks.versions", description=__doc__.split("\n\n")[0])
    parser.add_argument("old", help="the interpreter of the virtual environment with the old version")
    parser.add_argument("new", help="the interpreter of the one with the new version")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement")
    parser.add_argument("--bar", type=float, default=0.95, help="the least lower end of an interval")
    parser.add_argument("--json", type=Path, help="keep the ratios there; rows that it has are not measured again")
    args = parser.parse_args()
    kept: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        kept = json.loads(args.json.read_text())
    medians, below = [], []
    print(f"{'row':26}{'old / old':>24}{'new / old':>24}")
    for row in args.rows:
        if row not in kept:
            pairs = ((args.old, args.old), (args.old, args.new))
            kept[row] = [_paired(*pair, row, args.rounds, args.seconds) for pair in pairs]
            if args.json is not None:
                args.json.write_text(json.dumps(kept, indent=1))
        same, changed = map(interval, kept[row])
        texts = [f"{median:.3f} [{low:.3f}, {high:.3f}]" for median, low, high in (same, changed)]
        missed = changed[1] < args.bar
        print(f"{row:26}{texts[0]:>24}{texts[1]:>24}{'  below the bar' * missed}", flush=True)
        medians.append(changed[0])
        below += [row] * missed
    mean = statistics.geometric_mean(medians)
    print(f"geometric mean of the medians: {mean:.3f}; below {args.bar:g}: {', '.join(below) or 'none'}")
    return int(bool(below))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(ROWS[sys.argv[2]](float(sys.argv[3])))
    else:
        sys.exit(main())
