"""Compare the speed of two versions of aioenv, installed in two virtual environments.

    python -m benchmarks.versions OLD/bin/python NEW/bin/python --bar 0.95

A round starts three processes, each in an empty directory: the old version twice, and the new one. They run in turn,
for a fraction of a second each, many times, in every order: so the slow moments of a shared machine fall on all of
them. The ratio of a round is the median of its turns' ratios. The old version against itself says how precise the run
is. Intervals are 95 % bootstrap intervals of the median of the rounds' ratios, new to old: above 1 the new one is
faster.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

# This file runs in either version: `aioenv` is imported in functions, and only by public names that both have.

__all__ = ["ROWS", "interval", "main"]

LIMIT_S = 120.0  # of a turn
WARM_UP_S = 0.3
RESAMPLES = 10_000
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


# ------------------------------------------------------------ rows, which run in the measured version

Turns = Iterable[float]  # how many seconds each turn of a row takes
Tell = Callable[[float], object]  # takes the figure of a turn: the more, the better


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


def _rate(do: Callable[[], Any], seconds: float) -> float:
    """Return how often per second a function runs."""
    count, began, now = 0, time.perf_counter(), 0.0
    while now < seconds:
        do()
        count += 1
        now = time.perf_counter() - began
    return count / now


def _awaited(env: Any, n: int, turns: Turns, tell: Tell, *, render: bool = False, **keywords: Any) -> None:
    """Measure the batches per second of `await envs.step()`, with an image of each slot if asked for."""
    import aioenv

    async def run() -> None:
        if render:
            keywords["render"] = aioenv.RenderConfig(84, 84, quality="fast")
        async with aioenv.make_vec(env, n, **keywords) as envs:
            await envs.reset(seed=0)
            envs.action_space.seed(0)
            actions = envs.action_space.sample()
            for seconds in turns:
                count, began, now = 0, time.perf_counter(), 0.0
                while now < seconds:
                    await envs.step(actions)
                    if render:
                        await envs.render()
                    count += 1
                    now = time.perf_counter() - began
                tell(count / now)

    aioenv.run(run())


def _blocking(env: str, n: int, turns: Turns, tell: Tell, *, api: str) -> None:
    """Measure the batches per second of a blocking API: "sync", "drop-in" or "sb3"."""
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
        for seconds in turns:
            tell(_rate(partial(envs.step, actions), seconds))


def _startup(n: int, turns: Turns, tell: Tell) -> None:
    """Measure how often per second a vector env with a worker for each env could start, be reset and be closed."""
    import aioenv

    async def run() -> None:
        async with aioenv.make_vec("CartPole-v1", n, num_workers=n) as envs:
            await envs.reset(seed=0)

    for _ in turns:
        began = time.perf_counter()
        aioenv.run(run())
        tell(1 / (time.perf_counter() - began))


def _memory(n: int, turns: Turns, tell: Tell) -> None:
    """Measure the reciprocal of the proportional memory of a worker, in MiB."""
    import aioenv

    async def run() -> float:
        async with aioenv.make_vec("HalfCheetah-v5", n, num_workers=n) as envs:
            await envs.reset(seed=0)
            await envs.step(envs.action_space.sample())
            return 1024 * n / sum(_proportional_kib(worker.pid) for worker in envs.workers)

    for _ in turns:
        tell(aioenv.run(run()))


def _proportional_kib(pid: int | None) -> int:
    """Return the memory of a process, with its share of what others map too."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


ROWS: dict[str, Callable[[Turns, Tell], None]] = {
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
ALONE = ("start of 64 workers", "memory of a worker")  # one turn a process, while the others do not run


# ------------------------------------------------------------ the comparison


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median of some ratios, and its 95 % bootstrap interval."""
    drawn = np.random.default_rng(0).choice(np.array(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, 1), (2.5, 97.5))
    return statistics.median(ratios), float(low), float(high)


class _Measured:
    """A process that measures a row with the aioenv of an interpreter, turn by turn.

    Args:
        python: the interpreter.
        row: of `ROWS`.
    """

    def __init__(self, python: str, row: str) -> None:
        self._name = f"{row} with {python}"
        self._directory = tempfile.TemporaryDirectory()
        self._errors = tempfile.TemporaryFile("w+")
        # -P: else this folder would hide what is installed
        self._process = subprocess.Popen(
            [python, "-P", str(Path(__file__).resolve()), "--measure", row],
            cwd=self._directory.name,
            env={**os.environ, **_THREADS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def turn(self, seconds: float) -> float:
        """Return the figure of a turn.

        Raises:
            RuntimeError: if the process ends or takes longer than `LIMIT_S`.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._limit():
            with contextlib.suppress(BrokenPipeError):
                print(seconds, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{self._name} failed, or took longer than {LIMIT_S:g} s:\n{self._errors.read()}")
        return float(line)

    @contextlib.contextmanager
    def _limit(self) -> Iterator[None]:
        """Kill the process if the block takes longer than `LIMIT_S`."""
        timer = threading.Timer(LIMIT_S, self._process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        with self._limit(), self._process, contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the end of its input ends it
        self._errors.close()
        self._directory.cleanup()


def _figures(old: str, new: str, row: str, orders: Iterable[tuple[int, ...]], seconds: float) -> list[list[float]]:
    """Return the figures of some turns: the old version's, the old one's again, and the new one's."""
    pythons = (old, old, new)
    figures = []
    with contextlib.ExitStack() as stack:
        measured = []
        if row not in ALONE:
            measured = [stack.enter_context(_Measured(python, row)) for python in pythons]
            for process in measured:
                process.turn(WARM_UP_S)
        for order in orders:
            figures.append([0.0] * len(pythons))
            for k in order:
                if measured:
                    figures[-1][k] = measured[k].turn(seconds)
                else:
                    with _Measured(pythons[k], row) as process:
                        figures[-1][k] = process.turn(seconds)
    return figures


def _ratios(old: str, new: str, row: str, rounds: int, turns: int, seconds: float) -> list[list[float]]:
    """Return the ratios of each round: of the old version to itself, and of the new to the old one."""
    orders = itertools.cycle(itertools.permutations(range(3)))
    ratios: list[list[float]] = [[], []]
    for _ in range(rounds):
        figures = _figures(old, new, row, itertools.islice(orders, 1 if row in ALONE else turns), seconds)
        for k, kept in enumerate(ratios, 1):
            kept.append(statistics.median(turn[k] / turn[0] for turn in figures))
    return ratios


def main() -> int:
    """Compare two versions; return 1 if an interval begins below the bar."""
    parser = argparse.ArgumentParser("python -m benchmarks.versions", description=__doc__.split("\n\n")[0])
    parser.add_argument("old", help="the interpreter of the virtual environment with the old version")
    parser.add_argument("new", help="the interpreter of the one with the new version")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turns", type=int, default=12, help="of each process in a round")
    parser.add_argument("--seconds", type=float, default=0.15, help="of a turn")
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
            kept[row] = _ratios(args.old, args.new, row, args.rounds, args.turns, args.seconds)
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
        ROWS[sys.argv[2]](map(float, sys.stdin), partial(print, flush=True))
    else:
        sys.exit(main())
