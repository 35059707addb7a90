"""The goals that aioenv must reach, judged by a run of the suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aioenv.cli.bench import load_mark
from benchmarks.cluster import TIANSHOU
from benchmarks.collectors import COLLECTOR_ENVS
from benchmarks.delayed_rollouts import DELAY_MS, DELAYED_ENVS, LOSS
from benchmarks.network import DELAYS_MS, NETWORK_ENVS, Model
from benchmarks.rows import AWAITED, CHEAP_ENVS, CHEAP_TASKS, MUJOCO_GOALS, MUJOCO_MORE, RAW

__all__ = ["Goal", "goals", "judge", "print_goals"]

Rows = dict[str, Any]
# A number, and the results that it was computed from; None if it was not measured.
Found = tuple[float, list[dict[str, Any]]] | None


@dataclass(frozen=True)
class Goal:
    """A number that a run must reach.

    Attributes:
        text: its name.
        floor: the number must reach it, or stay below.
        target: the number should reach it, or stay below.
        find: takes the number from the rows of a run.
        at_most: whether less is better.
    """

    text: str
    floor: float
    target: float
    find: Callable[[Rows], Found]
    at_most: bool = False

    def met(self, value: float, bar: float) -> bool:
        """Check whether a number is as good as the bar."""
        return value <= bar if self.at_most else value >= bar


def _result(rows: Rows, row: str, contender: str) -> dict[str, Any] | None:
    for result in rows.get(row, {}).get("results", ()):
        if result["contender"] == contender and result["rounds"]:
            return dict(result)
    return None


def _ratio(row: str, ours: str, other: str) -> Callable[[Rows], Found]:
    def find(rows: Rows) -> Found:
        result, base = _result(rows, row, ours), _result(rows, row, other)
        if result is None or base is None:
            return None
        return result["ratios"][other], [result, base]

    return find


def _of_fastest(row: str, ours: str, others: tuple[str, ...]) -> Callable[[Rows], Found]:
    """Find the ratio of our rate to the fastest of the others' that were measured."""

    def find(rows: Rows) -> Found:
        found = [ratio for other in others if (ratio := _ratio(row, ours, other)(rows)) is not None]
        return min(found, key=lambda each: each[0], default=None)

    return find


def _of_cpus_bare(row: str, cpus: int) -> Callable[[Rows], Found]:
    def find(rows: Rows) -> Found:
        found = _ratio(row, "aioenv", "bare")(rows)
        return found and (found[0] / cpus, found[1])

    return find


def _cost(row: str, base: str) -> Callable[[Rows], Found]:
    """Find the cost of an env-step in one row over the cost in another."""

    def find(rows: Rows) -> Found:
        result, other = _result(rows, row, "aioenv"), _result(rows, base, "aioenv")
        if result is None or other is None:
            return None
        return other["env_steps_per_s"] / result["env_steps_per_s"], [result, other]

    return find


def _number(row: str, contender: str, key: str) -> Callable[[Rows], Found]:
    def find(rows: Rows) -> Found:
        result = _result(rows, row, contender)
        return None if result is None else (result[key], [result])

    return find


def _off_model(delay_ms: float) -> Callable[[Rows], Found]:
    """Find how far steps over a network with this delay are from the model, at most, in percent."""

    def find(rows: Rows) -> Found:
        results = {
            (env, int(result["contender"].removeprefix("aioenv-"))): result
            for env in NETWORK_ENVS
            for result in rows.get(f"network-{env}", {}).get("results", ())
            if result["rounds"]
        }
        if len({env for env, _ in results}) < 2:  # the model needs observations of two sizes
            return None
        compared = Model.fit(results).of_measured(results)
        off = [abs(ratio - 1) for (_, _, delay), ratio in compared.items() if delay == delay_ms]
        return (100 * max(off), list(results.values())) if off else None

    return find


def goals(cpus: int) -> list[Goal]:
    """List the goals for a machine of so many CPUs (they were set for 2)."""
    bare = f"of {cpus} x the bare loop"
    mujoco = (("Ant", 0.90, 0.93), ("Humanoid", 0.90, 0.93), ("Hopper", 0.88, 0.92), ("HalfCheetah", 0.83, 0.88))
    found = [
        Goal("CartPole-v1 x 64, x Async", 10, 12, _ratio("cartpole-64", "aioenv", "gymnasium-async")),
        Goal("CartPole-v1 x 64, x Sync", 1.5, 1.6, _ratio("cartpole-64", "aioenv", "gymnasium-sync")),
        Goal(f"CartPole-v1 x 64, {bare}", 0.70, 0.75, _of_cpus_bare("cartpole-64", cpus)),
        Goal("CartPole-v1 x 64, blocking code, x await", 1 / 1.2, 1, _ratio("cartpole-64", "aioenv-sync", "aioenv")),
        Goal("CartPole-v1 x 8, x Async", 4, 5, _ratio("cartpole-8", "aioenv", "gymnasium-async")),
        Goal("CartPole-v1 x 8, one worker, x Async", 4, 5, _ratio("cartpole-8", "aioenv-one", "gymnasium-async")),
        Goal("CartPole-v1, cost per env x 1024 over x 64", 1.1, 1.0, _cost("cartpole-1024", "cartpole-64"), True),
        Goal("CartPole-v1 x 64 native, x EnvPool", 2, 2, _ratio("cartpole-64", "aioenv-native", "envpool")),
    ]
    for name, floor, target in mujoco:
        found.append(Goal(f"{name}-v5 x 64, {bare}", floor, target, _of_cpus_bare(f"{name.lower()}-64", cpus)))
    for contender, what in (("aioenv-groups", ""), ("aioenv-workers", " of whole workers")):
        for name, _, _ in mujoco:
            better = _ratio(f"{name.lower()}-64", contender, "aioenv")
            found.append(Goal(f"{name}-v5 x 64, two groups{what}, x lock-step", 1, 1, better))
    for name, _, _ in mujoco:
        better = _ratio(f"{name.lower()}-policy", "aioenv-policy-workers", "aioenv-policy")
        found.append(Goal(f"{name}-v5 x 64 with a policy, two groups of whole workers, x lock-step", 1, 1, better))
    envpool = {"Humanoid": (1.15, 1.15), "Walker2d": (1.2, 1.2), "HalfCheetah": (1.05, 1.1), "Ant": (1.05, 1.1)}
    for name in (*MUJOCO_GOALS, *MUJOCO_MORE):
        row = f"{name.lower()}-64"
        for contender, what in (("aioenv-native", "native"), ("aioenv-native-sync", "native, blocking code")):
            found.append(Goal(f"{name}-v5 x 64 {what}, of its physics", 0.90, 0.94, _of_fastest(row, contender, RAW)))
            if bars := {**envpool, "Hopper": (0.97, 1.0)}.get(name):
                found.append(Goal(f"{name}-v5 x 64 {what}, x EnvPool", *bars, _ratio(row, contender, "envpool")))
    found += [
        Goal("(84, 84, 4) uint8 x 64, x Async", 7, 8, _ratio("pixels-64", "aioenv", "gymnasium-async")),
        Goal("the same with copy=False, x Async", 10, 10, _ratio("pixels-64", "aioenv-views", "gymnasium-async")),
        Goal("no-op x 64, x Async", 25, 30, _ratio("noop-64", "aioenv", "gymnasium-async")),
        Goal("no-op x 64, one worker, x Async", 25, 30, _ratio("noop-64", "aioenv-one", "gymnasium-async")),
        Goal("round trip of one no-op, x Async", 0.6, 0.6, _ratio("latency", "aioenv", "gymnasium-async"), True),
        Goal(
            "the same from blocking code, x Async", 0.6, 0.6, _ratio("latency", "aioenv-sync", "gymnasium-async"), True
        ),
        Goal(
            "callbacks' CPU time of a step of 64, p99, µs",
            500,
            500,
            _number("loop-time", "aioenv-asyncio", "callbacks p99"),
            True,
        ),
        Goal("uneven x 32, recv x lock-step", 1.8, 1.8, _ratio("uneven", "aioenv-recv", "aioenv-step")),
        Goal("shared statistics, µs an update", 10, 10, _number("stats", "aioenv-slots", "update µs"), True),
        Goal("uneven x 32, least share of a slot", 0.5, 0.5, _number("uneven", "aioenv-recv", "least share")),
        Goal("images as observations, fast, x Async", 40, 40, _ratio("images", "aioenv-fast", "gymnasium-async")),
        Goal("the same native, x Async", 40, 40, _ratio("images", "aioenv-native-fast", "gymnasium-async")),
        Goal("images as observations, exact, x Async", 1, 1, _ratio("images", "aioenv-exact", "gymnasium-async")),
        Goal("physics and images at once, of the longer", 1.1, 1.1, _number("overlap", "aioenv", "of longer"), True),
        Goal("physics and images at once, of both", 0.58, 0.58, _number("overlap", "aioenv", "of serial"), True),
        Goal(f"84x84 images, fast, {bare}", 0.93, 0.93, _of_cpus_bare("pool-fast", cpus)),
        Goal("84x84 images, exact, of bare loops at once", 0.95, 0.95, _ratio("pool-exact", "aioenv", "bare-all")),
        Goal("84x84 images, fast, of loops alike at once", 0.93, 0.93, _ratio("pool-fast", "aioenv", "bare-all-alike")),
        Goal(
            "84x84 images, exact, of loops alike at once", 0.95, 0.95, _ratio("pool-exact", "aioenv", "bare-all-alike")
        ),
    ]
    for key, what in (("sleeping", "as long as an episode"), ("half", "half as long")):
        hidden = _ratio(f"resets-{key}", "aioenv-spares", "aioenv-instant")
        found.append(Goal(f"resets {what}, spare envs, x resets that take no time", 0.9, 0.9, hidden))
    recv = _ratio("resets-sleeping", "aioenv-recv", "bare")
    found.append(Goal("resets as long as an episode, recv, x bare processes", 0.92, 0.92, recv))
    for contender, where in (("aioenv-tcp", "over TCP"), ("aioenv-ray", "on Ray")):
        for key, name, other, bar in (
            ("cartpole", "CartPole-v1", "aioenv", 0.7),
            ("ant", "Ant-v5", "aioenv", 0.93),
            ("pixels", "(84, 84, 4) uint8", "sockets", 0.6),
        ):
            of_what = "local workers" if other == "aioenv" else "bare sockets"
            found.append(
                Goal(f"{name} x 64 {where}, x {of_what}", bar, bar, _ratio(f"cluster-{key}", contender, other))
            )
    for other, what, bar in ((TIANSHOU, "Tianshou's", 8.0), ("ray-actors", "actors of 32 envs", 6.0)):
        found.append(
            Goal(f"CartPole-v1 x 64 on Ray, x {what}", bar, bar, _ratio("cluster-cartpole", "aioenv-ray", other))
        )
    for delay in DELAYS_MS:
        found.append(Goal(f"steps with {delay:g} ms each way, % off the model", 15, 15, _off_model(delay), True))
    for key, env in DELAYED_ENVS.items():
        lost = _number(key, "aioenv-prefetch", LOSS)
        found.append(Goal(f"{env}, rollouts of collectors with {DELAY_MS:g} ms each way, % lost", 3, 3, lost, True))
    for key, env in COLLECTOR_ENVS.items():
        for kind in ("", "-torch"):
            handed = _ratio(key, f"aioenv{kind}", f"processes{kind}")
            found.append(Goal(f"{env} x 64, collectors{kind}, x plain processes", 0.93, 0.93, handed))
        runners = _ratio(key, "aioenv-torch", "rllib")
        found.append(Goal(f"{env} x 64, collectors-torch, x RLlib's env runners", 3, 3, runners))
    for n, bar in ((1, 1.0), (4, 1.15), (8, 1.2), (16, 1.2), (64, 1.2)):
        here = _ratio(f"cheap-cartpole-{n}", "aioenv-in-process", "gymnasium-sync")
        found.append(Goal(f"CartPole-v1 x {n}, num_workers=0, x Sync", bar, bar, here))
    for n, bar in ((1, 0.9), (8, 1.15)):
        here = _ratio(f"cheap-cartpole-{n}", "aioenv-in-process-sync", "gymnasium-sync")
        found.append(Goal(f"CartPole-v1 x {n}, num_workers=0, blocking code, x Sync", bar, bar, here))
    for name, env in CHEAP_TASKS.items():
        for n in CHEAP_ENVS:
            of_fastest = _of_fastest(f"cheap-{name}-{n}", "aioenv-auto", AWAITED)
            found.append(Goal(f"{env} x {n}, backend=auto, x the fastest backend", 0.9, 1, of_fastest))
    found += [
        Goal(
            "PPO of 8 CartPoles, num_workers=0, x Sync",
            1,
            1,
            _ratio("training", "aioenv-in-process-sync", "gymnasium-sync"),
        ),
        Goal("PPO of 8 CartPoles, backend=auto, x Sync", 1, 1, _ratio("training", "aioenv-auto", "gymnasium-sync")),
        Goal(
            "PPO of 8 HalfCheetahs, backend=auto, x Sync",
            1,
            1,
            _ratio("training-continuous", "aioenv-auto", "gymnasium-sync"),
        ),
        Goal("SAC of 8 Hoppers, backend=auto, x Sync", 1, 1, _ratio("training-sac", "aioenv-auto", "gymnasium-sync")),
        Goal(
            "SB3's PPO of 8 CartPoles, num_workers=0, x Dummy",
            1,
            1,
            _ratio("training-sb3", "aioenv-sb3-in-process", "sb3-dummy"),
        ),
    ]
    return found


def judge(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare a run with each goal that it measured: "goal", "floor", "target", "found", "verdict", "mark"."""
    rows = []
    for goal in goals(content["machine"]["usable_cpus"]):
        found = goal.find(content["rows"])
        if found is None:
            continue
        sign = "≤" if goal.at_most else "≥"
        row: dict[str, Any] = {
            "goal": goal.text,
            "floor": f"{sign} {goal.floor:.3g}",
            "target": f"{sign} {goal.target:g}",
        }
        value, results = found
        met = "target" if goal.met(value, goal.target) else "floor" if goal.met(value, goal.floor) else "MISSED"
        rows.append({**row, "found": value, "verdict": met, "mark": max(map(load_mark, results))})
    return rows


def print_goals(content: dict[str, Any]) -> None:
    """Print a line for each goal that was measured."""
    rows = judge(content)
    if not rows:
        return
    width = max(len(row["goal"]) for row in rows)
    print(f"\n{'':<{width}}{'floor':>8}{'target':>8}{'found':>8}")
    for row in rows:
        numbers = f"{row['floor']:>8}{row['target']:>8}{row['found']:>8.2f}"
        print(f"{row['goal']:<{width}}{numbers}  {row['verdict']}{row['mark']}")
