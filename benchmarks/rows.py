"""The rows of the suite: envs, their number, and contenders; and how long a row takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aioenv.cli.contenders import MAX_PROCESSES
from benchmarks.cluster import TIANSHOU
from benchmarks.collectors import COLLECTOR_ENVS
from benchmarks.contenders import CONTENDERS
from benchmarks.delayed_rollouts import DELAYED, DELAYED_ENVS
from benchmarks.metrics import METRICS
from benchmarks.network import NETWORK_ENVS
from benchmarks.resets import LONGER, RESET_ENVS

__all__ = ["AWAITED", "CHEAP_ENVS", "CHEAP_TASKS", "COST_ENVS", "ROWS", "Row", "estimate_s"]

GYMNASIUM = ("gymnasium-async", "gymnasium-sync")
BARE = ("bare", "bare-all", "bare-lockstep")
RAW = ("raw-batch", "raw-loop")
RAW_STILL = ("raw-batch-still", "raw-loop-still")
GROUPS = ("aioenv-groups", "aioenv-workers")
POLICY = ("aioenv-policy", "aioenv-policy-groups", "aioenv-policy-workers")
BLOCKING = ("aioenv-sync", "aioenv-drop-in", "aioenv-sb3")
# "auto" chooses among the first of these, which are awaited as it is.
AWAITED = ("aioenv", "aioenv-in-process", "aioenv-native")
CHEAP = (*AWAITED, "aioenv-auto", "aioenv-in-process-sync", *GYMNASIUM, "sb3-dummy")
# Each takes seconds to import, and most of them a process an env.
SLOW = ("sb3-subproc", "tianshou-subproc", "torchrl-parallel")
OTHERS = (*SLOW, "pufferlib", "envpool")

# The tasks that Gymnasium has as -v5; the first have more goals.
MUJOCO_GOALS = ("Ant", "Humanoid", "Hopper", "HalfCheetah")
MUJOCO_MORE = (
    "HumanoidStandup",
    "InvertedDoublePendulum",
    "InvertedPendulum",
    "Pusher",
    "Reacher",
    "Swimmer",
    "Walker2d",
)
# Metrics that take as long as the clock runs.
CLOCKED = (
    "latency",
    "uneven",
    "images",
    "pool-fast",
    "pool-exact",
    "render-workers",
    "loop-time",
    "cluster",
    "collectors",
)
SLOW_METRICS = ("memory", "pool-exact", "render-workers", "cluster", "network", "network-rollouts")
# Metrics with several rows: the keys of their rows, and the envs.
ROWS_OF = {
    "resets": {f"resets-{env.removesuffix('Resets-v0').lower()}": env for env in RESET_ENVS},
    "collectors": COLLECTOR_ENVS,
    "cluster": {"cluster-cartpole": "CartPole-v1", "cluster-ant": "Ant-v5", "cluster-pixels": "pixels"},
    "network": {f"network-{env}": env for env in NETWORK_ENVS},
    "network-rollouts": DELAYED_ENVS,
}
OVER_NETWORK = ("aioenv", "aioenv-tcp", "aioenv-ray")
CONTENDERS_OF = {
    "cluster-cartpole": (*OVER_NETWORK, "ray-actors", TIANSHOU),
    "cluster-ant": OVER_NETWORK,
    "cluster-pixels": (*OVER_NETWORK, "sockets"),
}
COST_ENVS = (1, 4, 16, 64, 256, 1024, 4096)
CHEAP_ENVS = (1, 4, 8, 16, 64)
CHEAP_TASKS = {"cartpole": "CartPole-v1", "halfcheetah": "HalfCheetah-v5"}


@dataclass(frozen=True)
class Row:
    """One row of the suite.

    Attributes:
        key: its name, in files and with `--rows`.
        env, num_envs: the env, and how many.
        contenders: names in `CONTENDERS`, or all of the metric's.
        metric: "throughput", "cost" (throughput over the number of envs), "policy" (throughput with a policy that takes
            time), "cheap" (throughput of few envs, and the choice of `backend="auto"`), or a name in `METRICS`.
        once: contenders that take part in the first round alone.
        quick: whether `--quick` measures it too.
    """

    key: str
    env: str
    num_envs: int
    contenders: tuple[str, ...]
    metric: str = "throughput"
    once: tuple[str, ...] = ()
    quick: bool = True

    @property
    def timed(self) -> bool:
        """Whether it measures env-steps/s."""
        return self.metric not in METRICS

    @property
    def entries(self) -> list[str]:
        """Its contenders whose package is installed, by their names in `metrics.CONTENDERS`."""
        if not self.timed:
            return [f"{self.metric}: {name}" for name in self.contenders]
        return [name for name in self.contenders if CONTENDERS[name].installed]

    @property
    def entries_once(self) -> list[str]:
        """Those of its entries that take part in the first round alone."""
        return [name for name in self.entries if name.rpartition(": ")[2] in self.once]

    @property
    def missing(self) -> list[str]:
        """Its contenders whose package is missing."""
        return [name for name in self.contenders if self.timed and not CONTENDERS[name].installed]


def _rows() -> Iterable[Row]:
    peers = (*GYMNASIUM, *OTHERS, *BARE)
    yield Row("noop-1", "noop", 1, ("aioenv", *BLOCKING, *peers))
    yield Row("noop-64", "noop", 64, ("aioenv", "aioenv-one", *peers))
    variants = ("aioenv-asyncio", *BLOCKING, *GROUPS, "aioenv-native", "aioenv-native-sync")
    yield Row("cartpole-8", "CartPole-v1", 8, ("aioenv", *BLOCKING, "aioenv-one", "aioenv-native", *peers))
    yield Row("cartpole-64", "CartPole-v1", 64, ("aioenv", *variants, *peers, "sb3-dummy"))
    yield Row("cartpole-1024", "CartPole-v1", 1024, ("aioenv", "aioenv-native", *peers))
    contenders = ("aioenv", *GROUPS, "aioenv-native", "aioenv-native-sync", *RAW, *RAW_STILL, *peers)
    for name in MUJOCO_GOALS:
        torch = ("aioenv-torch-native",) if name == "HalfCheetah" else ()
        yield Row(f"{name.lower()}-64", f"{name}-v5", 64, (*contenders, *torch))
    for name in MUJOCO_GOALS:
        yield Row(f"{name.lower()}-policy", f"{name}-v5", 64, POLICY, metric="policy")
    for name in MUJOCO_MORE:
        yield Row(f"{name.lower()}-64", f"{name}-v5", 64, contenders, once=SLOW, quick=False)
    yield Row("pixels-64", "pixels", 64, ("aioenv", "aioenv-views", "aioenv-torch", *peers))
    for n in COST_ENVS:
        names = (*AWAITED, *GYMNASIUM, "envpool")
        yield Row(f"cost-{n}", "CartPole-v1", n, names, metric="cost", quick=n <= 1024)
    for name, env in CHEAP_TASKS.items():
        for n in CHEAP_ENVS:
            yield Row(f"cheap-{name}-{n}", env, n, CHEAP, metric="cheap", quick=n in (1, 8))
    for name, metric in METRICS.items():
        for key, env in ROWS_OF.get(name, {name: metric.env}).items():
            measures = CONTENDERS_OF.get(key, tuple(metric.measures))
            once = (TIANSHOU,) if TIANSHOU in measures else ()
            yield Row(key, env, metric.num_envs, measures, name, once, quick=name not in SLOW_METRICS)


ROWS: dict[str, Row] = {row.key: row for row in _rows()}

# Seconds on a machine of two CPUs with nothing else to do, for the estimate alone.
_IMPORTS_S = 1.3
_HEAVY_IMPORTS_S = {
    "sb3-subproc": 4.0,
    "sb3-dummy": 4.0,
    "tianshou-subproc": 4.5,
    "torchrl-parallel": 5.0,
    "aioenv-sb3": 4.0,
}
_A_PROCESS_S = {"torchrl-parallel": 0.06, "tianshou-subproc": 0.03, "sb3-subproc": 0.015, "gymnasium-async": 0.012}
_AN_ENV_S = 0.001
_WARM_UP_S = 0.3
_METRIC_S = {
    "startup: gymnasium-forkserver": 12.0,
    "startup: aioenv-spawn": 14.0,
    "memory: gymnasium-forkserver": 4.0,
    "memory: aioenv-spawn": 4.0,
    "images: gymnasium-async": 12.0,
    "overlap: aioenv": 20.0,
    **{f"training: {name}": 5.0 for name in METRICS["training"].measures},
    **dict.fromkeys(
        ("training-sb3: sb3-dummy", "training-sb3: aioenv-sb3", "training-sb3: aioenv-sb3-in-process"), 9.0
    ),
    **{
        f"{metric}: {name}": 9.0
        for metric in ("training-continuous", "training-sac")
        for name in METRICS[metric].measures
    },
    **dict.fromkeys(("cluster: aioenv-ray", "cluster: ray-actors"), 10.0),
    f"cluster: {TIANSHOU}": 60.0,
    **{f"network: aioenv-{n}": 8.0 for n in (2, 3, 4, 16)},
    **{f"network-rollouts: {name}": 22.0 for name in DELAYED},
    **{f"render-workers: aioenv-{n}": 4.0 + n for n in (1, 2, 4, 8)},
}


def estimate_s(row: Row, rounds: int, seconds: float) -> float:
    """Estimate how long a row takes, in seconds."""
    total = 0.0
    for name in row.entries:
        if not row.timed:
            each = _METRIC_S.get(name, _IMPORTS_S + 0.5) + (seconds if row.metric in CLOCKED else 0.0)
            each += LONGER * (seconds + _WARM_UP_S) if row.metric == "resets" else 0.0
        elif name in _A_PROCESS_S and row.num_envs > MAX_PROCESSES:
            each = _HEAVY_IMPORTS_S.get(name, _IMPORTS_S)
        else:
            each = _HEAVY_IMPORTS_S.get(name, _IMPORTS_S) + 0.3 + seconds
            each += row.num_envs * _A_PROCESS_S.get(name, _AN_ENV_S)
        total += each * (1 if name in row.entries_once else rounds)
    return total
