"""Run every library's vector env through every fault, and write docs/explanation/faults-of-vector-envs.csv.

    python -m benchmarks.reliability                      # run all, print the table
    python -m benchmarks.reliability --write docs/explanation/faults-of-vector-envs.csv
    python -m benchmarks.reliability --only gymnasium --scenario interrupted

Each pair runs in a session of its own, is given up when nothing happens for a while, and is killed afterwards.
Processes that still run a second after its end count as orphans. Libraries that are not installed say "not run".
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from aioenv.testing import FaultyEnv, faulty_envs
from aioenv.testing.leak_check import Resources

N = 3
FAULTY = 1  # the slot that has the fault; it strikes in step 3
START_S = 120.0  # for imports, and until the workers run
STARTS = ("start", "a cycle")
HANG_S = 8.0  # a child that reports nothing for so long hangs
EXIT_S = 20.0  # for the interpreter to end by itself
ORPHAN_S = 1.0
LATE_S = 0.05  # of the 0.2 s that a slow step takes

# ---------------------------------------------------------------- the libraries


class Peer:
    """One library's vector env of `N` envs; the others override what they do differently."""

    packages: tuple[str, ...] = ()
    title = ""
    own_envs = False  # it brings envs of its own, and can't run Python ones

    def __init__(self, factories: list[Any]) -> None:
        self.timeout_s: float | None = None
        self.envs = self.make(factories)

    def make(self, factories: list[Any]) -> Any:
        raise NotImplementedError

    def reset(self) -> Any:
        return self.envs.reset()

    def step(self, actions: Any = None) -> tuple[Any, Any]:
        """Step all envs; return observations and rewards."""
        result = self.envs.step(np.zeros(N, np.int64) if actions is None else actions)
        return result[0], result[1]

    def recv(self) -> Any:
        return self.envs.step_wait()

    def close(self) -> None:
        self.envs.close()

    def pid(self, slot: int) -> int:
        return int(self.envs.processes[slot].pid)

    bad_actions: Any = np.zeros(N - 1, np.int64)


class Aioenv(Peer):
    packages, title = ("aioenv",), "aioenv"

    def make(self, factories: list[Any]) -> Any:
        import aioenv.sync

        return aioenv.sync.VectorEnv(factories, num_workers=N)

    def recv(self) -> Any:
        return self.envs.recv()

    def pid(self, slot: int) -> int:
        return int(self.envs.workers[slot].pid)


class Gymnasium(Peer):
    packages, title = ("gymnasium",), "Gymnasium AsyncVectorEnv"

    def make(self, factories: list[Any]) -> Any:
        return gymnasium.vector.AsyncVectorEnv(factories)

    def step(self, actions: Any = None) -> tuple[Any, Any]:
        self.envs.step_async(np.zeros(N, np.int64) if actions is None else actions)
        result = self.envs.step_wait(timeout=self.timeout_s)
        return result[0], result[1]


class AioenvDropIn(Gymnasium):
    """The class that has timeouts of single calls, as Gymnasium's."""

    def make(self, factories: list[Any]) -> Any:
        import aioenv.sync

        return aioenv.sync.AsyncVectorEnv(factories, num_workers=N)


class StableBaselines3(Peer):
    packages, title = ("stable_baselines3",), "SB3 SubprocVecEnv"

    def make(self, factories: list[Any]) -> Any:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        return SubprocVecEnv(factories)


class Tianshou(Peer):
    packages, title = ("tianshou",), "Tianshou SubprocVectorEnv"

    def make(self, factories: list[Any]) -> Any:
        from tianshou.env import SubprocVectorEnv

        return SubprocVectorEnv(factories)

    def pid(self, slot: int) -> int:
        return int(self.envs.workers[slot].process.pid)

    def recv(self) -> Any:
        raise Unsupported("no such call")


class EnvPool(Peer):
    packages, title = ("envpool",), "EnvPool"
    own_envs = True
    bad_actions = np.zeros((N, 4))  # Ant-v4 wants 8

    def make(self, factories: list[Any]) -> Any:
        import envpool

        return envpool.make("Ant-v4", env_type="gymnasium", num_envs=N)

    def step(self, actions: Any = None) -> tuple[Any, Any]:
        return super().step(np.zeros((N, 8)) if actions is None else actions)

    def recv(self) -> Any:
        return self.envs.recv()


PEERS: dict[str, type[Peer]] = {
    "aioenv": Aioenv,
    "gymnasium": Gymnasium,
    "sb3": StableBaselines3,
    "tianshou": Tianshou,
    "envpool": EnvPool,
}


class Unsupported(Exception):
    """The library has no such thing."""


class Interrupted(Exception):
    """The exception of the signal handler, as KeyboardInterrupt is that of Ctrl-C."""


# ---------------------------------------------------------------- in the child: one library, one scenario

_say_lock = threading.Lock()
_report: Any = None


def say(**words: Any) -> None:
    with _say_lock:
        _report.write(json.dumps(words) + "\n")
        _report.flush()


def attempt(name: str, function: Callable[[], Any], why: str = "") -> Any:
    """Try something, and report how it went; a good message contains `why`."""
    say(begin=name)
    began = time.monotonic()
    try:
        result = function()
    except Unsupported as exc:
        say(end=name, absent=str(exc))
        return None
    except (Exception, SystemExit) as exc:
        text = " ".join([str(exc), *getattr(exc, "__notes__", ())])
        say(end=name, raised=type(exc).__name__, says_why=bool(why) and why in text, s=time.monotonic() - began)
        return None
    say(end=name, s=time.monotonic() - began)
    return result


class LockInfo(FaultyEnv):
    """Its third step returns an info that can't be pickled."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {"lock": threading.Lock()} if self.t == 3 else info


def lock_infos() -> list[Any]:
    """Return factories of which one makes a `LockInfo`."""
    factories: list[Any] = list(faulty_envs(N, None))
    factories[FAULTY] = lambda: LockInfo(slot=FAULTY)
    return factories


def started(peer: type[Peer], fault: Any = None, factories: list[Any] | None = None) -> Peer:
    """Return a vector env that has done two steps."""
    envs = peer(factories or list(faulty_envs(N, fault, slot=FAULTY, at=3)))
    envs.reset()
    for _ in range(2):
        envs.step()
    return envs


def check(result: Any, t: int) -> None:
    """Report whether a step's observations and rewards are those of step t, in all slots."""
    if result is None:
        return
    obs, reward = result
    right = np.asarray(obs)[:, 2].tolist() == [t] * N == np.asarray(reward).tolist()
    say(end="right", right=right, obs=np.asarray(obs)[:, 2].tolist(), reward=np.asarray(reward).tolist())


@contextlib.contextmanager
def interrupted(after_s: float) -> Iterator[None]:
    def handler(*_: Any) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def step_fails(fault: str, why: str) -> Callable[[type[Peer]], None]:
    def scenario(peer: type[Peer]) -> None:
        envs = started(peer, factories=lock_infos()) if fault == "lock" else started(peer, fault)
        attempt("step", envs.step, why)
        attempt("reset", envs.reset)
        attempt("close", envs.close)

    return scenario


def killed_idle(peer: type[Peer]) -> None:
    envs = started(peer)
    os.kill(envs.pid(FAULTY), signal.SIGKILL)
    with contextlib.suppress(OSError):  # until it is gone, or a zombie
        while Path(f"/proc/{envs.pid(FAULTY)}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            pass
    attempt("step", envs.step, "SIGKILL")
    attempt("reset", envs.reset)
    attempt("close", envs.close)


def start_fails(fault: str, why: str) -> Callable[[type[Peer]], None]:
    def scenario(peer: type[Peer]) -> None:
        def start() -> Any:
            envs = peer(list(faulty_envs(N, fault, "factory", slot=FAULTY)))  # type: ignore[arg-type]
            envs.reset()
            return envs

        attempt("start", start, why)

    return scenario


def prints(peer: type[Peer]) -> None:
    envs = started(peer, "prints")
    check(attempt("step", envs.step), 3)
    attempt("close", envs.close)


def timed_out(peer: type[Peer]) -> None:
    if peer not in (Aioenv, Gymnasium):
        attempt("step", lambda: (_ for _ in ()).throw(Unsupported("no timeouts")))
        return
    envs = started(AioenvDropIn if peer is Aioenv else peer, "slow")
    envs.timeout_s = LATE_S
    attempt("step", envs.step)
    envs.timeout_s = None  # the next step may wait for the slow one
    check(attempt("next", envs.step), 4)
    attempt("close", envs.close)


def interrupted_step(peer: type[Peer]) -> None:
    envs = started(peer, "slow")
    with interrupted(LATE_S):
        attempt("step", envs.step)
    check(attempt("next", envs.step), 4)
    attempt("close", envs.close)


def close_while_hung(peer: type[Peer]) -> None:
    envs = started(peer, "hangs")
    with interrupted(LATE_S):
        attempt("step", envs.step)
    attempt("close", envs.close)


def close_twice(peer: type[Peer]) -> None:
    envs = peer(list(faulty_envs(N, None)))
    envs.reset()
    attempt("close", envs.close)
    attempt("again", envs.close)
    attempt("step", envs.step)


def killed_parent(fault: str | None) -> Callable[[type[Peer]], None]:
    def scenario(peer: type[Peer]) -> None:
        envs = started(peer, fault)
        if fault is None:
            say(kill=True)
            signal.pause()
        threading.Timer(0.5, lambda: say(kill=True)).start()
        envs.step()

    return scenario


def leaks(peer: type[Peer]) -> None:
    def cycle() -> None:
        envs = peer(list(faulty_envs(N, None)))
        envs.reset()
        envs.step()
        envs.close()

    cycle()  # what is kept for good
    before = Resources.now()
    for _ in range(5):
        say(begin="a cycle")
        cycle()
    deadline = time.monotonic() + 2
    while (left := Resources.now().since(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    say(end="leaks", left=left)


def wrong_shape(peer: type[Peer]) -> None:
    envs = peer(list(faulty_envs(N, None)))
    envs.reset()
    attempt("step", lambda: envs.step(envs.bad_actions), "expected")
    attempt("close", envs.close)


def recv_alone(peer: type[Peer]) -> None:
    envs = peer(list(faulty_envs(N, None)))
    envs.reset()
    attempt("recv", envs.recv)
    attempt("close", envs.close)


SCENARIOS: dict[str, tuple[str, Callable[[type[Peer]], None]]] = {
    "killed_in_step": ("a worker is killed (SIGKILL) during a step", step_fails("sigkill", "SIGKILL")),
    "killed_idle": ("a worker is killed while idle; then a step", killed_idle),
    "factory_raises": ("a factory raises", start_fails("raises", "the fault has struck")),
    "factory_exits": ("a factory calls `os._exit(7)`", start_fails("os_exit", "code 7")),
    "raises": ("`step` raises a ValueError", step_fails("raises", "the fault has struck")),
    "raises_two_args": (
        "`step` raises an exception whose constructor takes two arguments",
        step_fails("raises_two_args", "the fault has struck"),
    ),
    "raises_local": (
        "`step` raises an exception of a class defined in a function",
        step_fails("raises_local", "the fault has struck"),
    ),
    "unpicklable_info": ("an info can't be pickled", step_fails("lock", "pickle")),
    "prints": ("an env prints 200 kB to descriptor 1", prints),
    "sys_exit": ("`step` calls `sys.exit(7)`", step_fails("sys_exit", "code 7")),
    "os_exit": ("`step` calls `os._exit(7)`", step_fails("os_exit", "code 7")),
    "timed_out": ("a step times out; then another step", timed_out),
    "interrupted": ("a step is interrupted by a signal (Ctrl-C); then another step", interrupted_step),
    "close_while_hung": ("an env hangs, the step is interrupted; then `close()`", close_while_hung),
    "close_twice": ("`close()` twice, then a step", close_twice),
    "parent_killed_idle": ("the parent is killed while idle", killed_parent(None)),
    "parent_killed_hung": ("the parent is killed while an env hangs with the GIL held", killed_parent("hangs_in_c")),
    "leaks": ("five times start, step, close", leaks),
    "wrong_shape": ("actions of a wrong shape", wrong_shape),
    "recv_alone": ("waiting for a result that nothing was sent for", recv_alone),
}
# scenarios that need no env written in Python
FOR_OWN_ENVS = {"close_twice", "parent_killed_idle", "leaks", "wrong_shape", "recv_alone"}


def run_child(library: str, scenario: str, report_fd: int) -> None:
    global _report
    _report = os.fdopen(report_fd, "w")
    os.set_inheritable(report_fd, False)
    say(begin="start")
    SCENARIOS[scenario][1](PEERS[library])
    say(end="all")


# ---------------------------------------------------------------- in the parent: watch, kill, count, report


def bearing(mark: str) -> set[int]:
    """Find the processes that have this among their environment variables, zombies aside."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark.encode() in environ.read_bytes():
                found.add(int(environ.parent.name))
    return found


def run_pair(library: str, scenario: str) -> dict[str, Any]:
    """Run one scenario to its end, or until it hangs; then end it, and count the processes that are left."""
    mark = f"AIOENV_RELIABILITY={uuid.uuid4()}"
    reader, writer = os.pipe()
    command = [sys.executable, __file__, "--child", library, scenario, str(writer)]
    environ = {**os.environ, **dict([mark.split("=")]), "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command,
        env=environ,
        pass_fds=[writer],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    lines, hung = [], False
    try:
        for line in _lines(reader):
            if line is None:
                hung = True
                break
            lines.append(line)
            if "kill" in line or line.get("end") == "all":
                break
    finally:
        os.close(reader)
    ended = not hung and bool(lines) and lines[-1].get("end") == "all"
    stuck_at_exit = False
    if ended:
        try:
            process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            stuck_at_exit = True
    process.kill()
    process.wait()
    deadline = time.monotonic() + ORPHAN_S
    while (left := bearing(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return {"lines": lines, "hung": hung, "exit hangs": stuck_at_exit, "orphans": len(left)}


def _lines(fd: int) -> Iterator[dict[str, Any] | None]:
    """Read the child's reports; None if there is none for too long."""
    data, timeout_s = b"", START_S
    while True:
        if not select.select([fd], [], [], timeout_s)[0]:
            yield None
            return
        chunk = os.read(fd, 65536)
        if not chunk:
            return
        *whole, data = (data + chunk).split(b"\n")
        for line in whole:
            words = json.loads(line)
            timeout_s = START_S if words.get("begin") in STARTS else HANG_S
            yield words


def describe(outcome: dict[str, Any]) -> str:
    """Describe an outcome in a few words, for a cell of the table."""
    words = []
    begun = None
    for line in outcome["lines"]:
        if "begin" in line:
            begun = line["begin"]
            continue
        name = line.get("end")
        if name in (begun, "all"):
            begun = None
        if "absent" in line:
            return str(line["absent"])
        if name == "right":
            numbers = f"observations of step {_few(line['obs'])}, rewards {_few(line['reward'])}"
            words.append("right" if line["right"] else f"**wrong**: {numbers}")
        elif name == "leaks":
            words.append("nothing left" if not line["left"] else f"**left**: {len(line['left'])} things")
        elif "raised" in line:
            why = ", says why" if line["says_why"] else ""
            words.append(f"{name}: `{line['raised']}`{why}")
        elif name not in (None, "all", "start") and not (name in ("step", "next") and _is_checked(outcome["lines"])):
            words.append(f"{name}: ok")
    if outcome["hung"]:
        words.append(f"**{begun or 'it'} hangs**")
    elif begun is not None and not any("kill" in line for line in outcome["lines"]):
        words.append(f"**the process ends in {begun}**")
    if outcome["exit hangs"]:
        words.append("**the exit hangs**")
    if outcome["orphans"]:
        words.append(f"**{outcome['orphans']} {'orphan' if outcome['orphans'] == 1 else 'orphans'}**")
    elif any("kill" in line for line in outcome["lines"]):
        words.append("nothing left")
    return "; ".join(words)


def _is_checked(lines: list[dict[str, Any]]) -> bool:
    return any(line.get("end") == "right" for line in lines)


def _few(numbers: list[float]) -> str:
    return "[" + ", ".join(f"{number:g}" for number in numbers) + "]"


def installed(peer: type[Peer]) -> str | None:
    """Return its version; None if it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(peer.packages[0].replace("_", "-"))
    if peer is Aioenv:
        return ""
    return None


def table(libraries: list[str], scenarios: list[str], jobs: int, log: Path | None) -> list[list[str]]:
    """Run all pairs that are not in the log, and put the outcomes into a table, its head first."""
    there = [name for name in libraries if installed(PEERS[name]) is not None]
    pairs = [(name, s) for s in scenarios for name in there if not PEERS[name].own_envs or s in FOR_OWN_ENVS]

    cells: dict[tuple[str, str], str] = {}
    if log is not None and log.exists():
        known = [line.split(" · ", 2) for line in log.read_text().splitlines()]
        cells = {(name, scenario): cell for name, scenario, cell in known}

    def run(pair: tuple[str, str]) -> None:
        cells[pair] = describe(run_pair(*pair))
        line = " · ".join([*pair, cells[pair]])
        print(line, file=sys.stderr, flush=True)
        if log is not None:
            with log.open("a") as file:
                file.write(line + "\n")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, [pair for pair in pairs if pair not in cells]))
    heads = [f"{PEERS[name].title} {installed(PEERS[name]) or ''}".strip() for name in libraries]
    rows = [["fault", *heads]]
    for scenario in scenarios:
        row = [cells.get((name, scenario), "does not apply" if name in there else "not run") for name in libraries]
        rows.append([cell.replace("`", "").replace("**", "") for cell in (SCENARIOS[scenario][0], *row)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PEERS, action="append", help="a library (again for more)")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="a scenario (again for more)")
    parser.add_argument("--jobs", type=int, default=2, help="how many pairs at once")
    parser.add_argument("--log", type=Path, help="a file of outcomes: those that are in it are not run again")
    parser.add_argument("--write", type=argparse.FileType("w", encoding="utf-8"), help="a CSV file for the table")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        library, scenario, fd = args.child
        run_child(library, scenario, int(fd))
        return
    rows = table(args.only or list(PEERS), args.scenario or list(SCENARIOS), args.jobs, args.log)
    csv.writer(args.write or sys.stdout, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
