"""Measure start-up time and memory of vector envs whose factories carry a large table, beside Gymnasium's.

    python -m benchmarks.heavy_factories                         # all rows
    python -m benchmarks.heavy_factories --case partial --mb 10  # one case, with a smaller table

The cases:

- partial: `[functools.partial(TableEnv, table, i) for i in range(16)]`;
- id: `make_vec("Table-v0", 8, table=table)`, with the wrappers that `gymnasium.make` adds;
- global: 16 envs whose `step` reads a global of the script.

Each row is measured in a process of its own. The columns, in MB of 10**6 bytes:

- seconds: from the call of the constructor to the end of the first reset;
- parent peak: growth of the parent's RSS at its highest, over the RSS before the constructor (the table is there then);
- parent: growth of its PSS two seconds after the reset; memfd: pages of memfds that it holds open, mapped or not;
- worker peak, RSS, PSS, dirty: of the worker of slot 0; dirty is Private_Dirty, the pages that it does not share;
- all: the PSS of all processes together and the memfd pages that none maps, less the parent's before the constructor.

The envs of Gymnasium's rows are classes of this file, which its workers import with spawn.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

MB = 10**6
CASES = {"partial": (16, (2, 16)), "id": (8, (2, 8)), "global": (16, (2, 16))}  # envs, numbers of aioenv's workers
CONTENDERS = ("aioenv forkserver", "aioenv spawn", "Gymnasium fork", "Gymnasium spawn")
SETTLE_S = 2.0
LIMIT_S = 300.0
COLUMNS = ("seconds", "parent peak", "parent", "memfd", "worker peak", "RSS", "PSS", "dirty", "all")

# Set by the process that runs the rows; workers of spawn, which import this file, inherit it.
SIZE = "HEAVY_FACTORIES_GLOBAL_MB"


def make_table(mb: int) -> npt.NDArray[np.float64]:
    """Make a table of so many MB, and write all of its pages."""
    return np.arange(mb * MB // 8, dtype=np.float64)


TABLE = make_table(int(os.environ[SIZE])) if SIZE in os.environ else np.zeros(1)


class TableEnv(gymnasium.Env[npt.NDArray[np.float64], Any]):
    """An env that reads a table which it is given; `info` has the process id."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, table: npt.NDArray[np.float64], index: int = 0, render_mode: str | None = None) -> None:
        self.table, self.at, self.render_mode = table, index, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[npt.NDArray[np.float64], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        return self.table[self.at : self.at + 1].copy(), {"pid": os.getpid()}

    def step(self, action: Any) -> tuple[npt.NDArray[np.float64], float, bool, bool, dict[str, Any]]:
        """Read the next element."""
        self.at = (self.at + 1) % len(self.table)
        return self.table[self.at : self.at + 1].copy(), 0.0, False, False, {}


class GlobalEnv(TableEnv):
    """An env that reads the global table."""

    def __init__(self) -> None:
        self.at = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[npt.NDArray[np.float64], dict[str, Any]]:
        """Begin an episode."""
        return TABLE[:1].copy(), {"pid": os.getpid()}

    def step(self, action: Any) -> tuple[npt.NDArray[np.float64], float, bool, bool, dict[str, Any]]:
        """Read the next element."""
        self.at = (self.at + 1) % len(TABLE)
        return TABLE[self.at : self.at + 1].copy(), 0.0, False, False, {}


# ---------------------------------------------------------------- memory


def memory_of(pid: int | str) -> dict[str, int]:
    """Read `smaps_rollup` of a process and the peak of its RSS, in bytes."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    peak = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert peak is not None
    return {**{name: int(kb) * 1024 for name, kb in found.items()}, "Peak": int(peak[1]) * 1024}


def memfd_pages(pids: list[int]) -> int:
    """Return the size of the memfds that these processes have open, in bytes, each counted once."""
    pages: dict[int, int] = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(link).startswith("/memfd:"):
                    status = link.stat()
                    pages[status.st_ino] = status.st_blocks * 512
            except FileNotFoundError:
                continue
    return sum(pages.values())


def descendants(pid: int) -> list[int]:
    """Find the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(status.parent.name))
    found, waiting = [], [pid]
    while waiting:
        waiting += (new := children.get(waiting.pop(), []))
        found += new
    return found


# ---------------------------------------------------------------- one row


def maker(case: str, contender: str, num_workers: int, mb: int) -> Callable[[], Any]:
    """Prepare the table, imports and the registration, which are not measured; returns the constructor's call."""
    library, start = contender.split()
    num_envs = CASES[case][0]
    ours: dict[str, Any] = {"num_workers": num_workers, "start": start, "start_timeout_s": LIMIT_S}
    sync = importlib.import_module("aioenv.sync") if library == "aioenv" else None
    if case == "id":
        gymnasium.register("Table-v0", entry_point=lambda **kwargs: TableEnv(**kwargs), max_episode_steps=1000)
        table = make_table(mb)
        if sync is not None:
            return lambda: sync.make_vec("Table-v0", num_envs, table=table, **ours)
        return lambda: gymnasium.make_vec("Table-v0", num_envs, "async", {"context": start}, table=table)
    factories: list[Callable[[], Any]] = [GlobalEnv] * num_envs
    if case == "partial":
        table = make_table(mb)
        factories = [functools.partial(TableEnv, table, i) for i in range(num_envs)]
    if sync is not None:
        return lambda: sync.VectorEnv(factories, **ours)
    return lambda: gymnasium.vector.AsyncVectorEnv(factories, context=start)


def measure(make: Callable[[], Any]) -> dict[str, float]:
    """Make a vector env, reset it, and return the time and memory that it took."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the RSS begins here
    before = memory_of("self")
    began = time.perf_counter()
    envs = make()
    try:
        _, info = envs.reset(seed=0)
        seconds = time.perf_counter() - began
        time.sleep(SETTLE_S)
        envs.step(envs.action_space.sample())
        parent, worker = memory_of("self"), memory_of(int(info["pid"][0]))
        pids = descendants(os.getpid())
        every = [parent, *map(memory_of, pids)]
        memfds = memfd_pages([os.getpid(), *pids])
        unmapped = max(0, memfds - sum(one["Pss_Shmem"] for one in every))
        sizes = (
            parent["Peak"] - before["Rss"],
            parent["Pss"] - before["Pss"],
            memfd_pages([os.getpid()]),
            *(worker[name] for name in ("Peak", "Rss", "Pss", "Private_Dirty")),
            sum(one["Pss"] for one in every) + unmapped - before["Pss"],
        )
        return dict(zip(COLUMNS, (seconds, *(size / MB for size in sizes)), strict=True))
    finally:
        envs.close()


# ---------------------------------------------------------------- all rows


def run_row(case: str, contender: str, num_workers: int, mb: int) -> list[str]:
    """Measure in a process of its own; returns a row of the table."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if case == "global":
        environ[SIZE] = str(mb)
    row = ["--row", json.dumps([case, contender, num_workers, mb])]
    problem = ""
    try:
        done = subprocess.run(
            [sys.executable, __file__, *row], env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode:
            problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:120]
    except subprocess.TimeoutExpired:
        problem = f"over {LIMIT_S:.0f} s"
    name = f"{contender}, {num_workers}"
    if problem:
        return [f"{name}: {problem}", *[""] * len(COLUMNS)]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return [name, f"{found['seconds']:.2f}", *(f"{found[column]:.0f}" for column in COLUMNS[1:])]


def main() -> None:
    """Run the chosen rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="only this case; may be repeated")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="only this one; may be repeated")
    parser.add_argument("--mb", type=int, default=100, help="size of the table in MB (default: 100)")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(measure(maker(*json.loads(options.row)))))
        return
    from aioenv.cli.terminal import progress, show_table  # here, since workers of spawn import this file

    for case in options.case or CASES:
        num_envs, numbers = CASES[case]
        todo = [
            (contender, num_workers)
            for contender in options.contender or CONTENDERS
            for num_workers in (numbers if contender.startswith("aioenv") else (num_envs,))
        ]
        rows = []
        with progress(len(todo)) as show:
            for contender, num_workers in todo:
                show(f"{case}: {contender}, {num_workers}")
                rows.append(run_row(case, contender, num_workers, options.mb))
        show_table(("processes", *COLUMNS), rows, title=f"{case}: {num_envs} envs, a table of {options.mb} MB")


if __name__ == "__main__":
    main()
