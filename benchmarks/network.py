"""Steps over a network that delays: measured over a relay, and a model of how long a step takes.

A step of all slots takes `fixed + workers * a_worker + bytes / bandwidth` of this process's time, the time of a worker,
and a round trip. The constants are measured without a delay (`Model.fit`). `Model.step_s` predicts other numbers of
workers, observations and round trips.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import aioenv
from aioenv.cli.arguments import NoOp, Pixels
from aioenv.cli.contenders import ACTION_BATCHES, NotApplicable, TimedLoop, Workload
from aioenv.cluster.local import LocalCluster
from tests.kits.relay_kit import Relay, RelayedCluster

__all__ = [
    "DELAYS_MS",
    "MANY",
    "NETWORK",
    "NETWORK_ENVS",
    "NETWORK_KEYS",
    "NUM_ENVS",
    "PREDICTED",
    "PREDICTED_WORKERS",
    "ROUND_TRIPS_MS",
    "STEP_S",
    "WORKERS",
    "Measured",
    "Model",
    "measured_of",
    "step_bytes",
]

WORKERS = (2, 3, 4)
MANY = 16  # workers that share CPUs: for this process's time alone
DELAYS_MS = (0.2, 1.0, 10.0)  # each way
NUM_ENVS = 48  # which all these numbers divide
STEP_S = 2e-3  # how long a worker's step sleeps: workers that compute would share two CPUs
NETWORK_ENVS = {"noop": 16, "pixels": 84 * 84 * 4}  # an env -> the bytes of its observation
_FLAGS_BYTES, _ACTION_BYTES = 8 + 1 + 1, 8
_PROBES = 50  # messages that measure a round trip
_SOME_STEPS = 20  # at least so many: with the longest delay the suite's seconds have few

# Medians, in ms: a step over the relay without a delay and with each one, and the round trips of a byte then; a step
# without the relay, and the time of this process in it.
_DELAYS = (0.0, *DELAYS_MS)
_DIRECT, _OWN = "step ms", "own ms"
NETWORK_KEYS = (
    _DIRECT,
    _OWN,
    *(f"step ms, {delay:g}" for delay in _DELAYS),
    *(f"trip ms, {delay:g}" for delay in _DELAYS),
)


class Sleeping(NoOp):
    """An env that sleeps in each step.

    Args:
        env: makes the env whose space it has.
    """

    def __init__(self, env: type[NoOp]) -> None:
        super().__init__()
        inner = env()
        self.observation_space, self._obs = inner.observation_space, inner.reset()[0]

    def step(self, action: Any) -> Any:
        """Sleep, and return the same observation."""
        time.sleep(STEP_S)
        return super().step(action)


class RelayProcess:
    """A relay in a process of its own. It is the `relay` of a `RelayedCluster`."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=_relay, args=(theirs,))
        self._process.start()
        theirs.close()

    def port_to(self, port: int) -> int:
        """Return the port of the relay that leads to this port."""
        self._pipe.send(("port", port))
        return int(self._pipe.recv())

    def set_delay(self, seconds: float) -> None:
        """Delay everything from now on, each way."""
        self._pipe.send(("delay", seconds))
        self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()
        self._pipe.close()


def _relay(pipe: Any) -> None:
    relay: Any = Relay()
    with contextlib.closing(relay):
        for what, value in iter(pipe.recv, None):
            if what == "port":
                pipe.send(relay.port_to(value))
            else:
                relay.delay_s = value
                pipe.send(None)


@contextlib.contextmanager
def _probe(relay: RelayProcess) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect to this process over the relay; yield both ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = relay.port_to(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)) as one, listener.accept()[0] as other:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield one, other


def _round_trip_s(one: socket.socket, other: socket.socket) -> float:
    taken = []
    for _ in range(_PROBES):
        began = time.perf_counter()
        one.sendall(b".")
        other.recv(1)
        taken.append(time.perf_counter() - began)
    return 2 * float(np.median(taken))


async def _steps(envs: Any, workload: Workload, actions: list[Any]) -> tuple[float, float]:
    """Step for a while; return the median time of a step, and the mean time of this process in one, in seconds."""
    for number in range(_SOME_STEPS):
        await envs.step(actions[number])
    taken = []
    own = time.process_time()
    for number in TimedLoop(workload):
        began = time.perf_counter()
        await envs.step(actions[number % ACTION_BATCHES])
        taken.append(time.perf_counter() - began)
    return float(np.median(taken)), (time.process_time() - own) / len(taken)


async def _measure_steps(workload: Workload, num_workers: int, relay: RelayProcess) -> dict[str, float]:
    base = {"noop": NoOp, "pixels": Pixels}[workload.env]
    share = workload.num_envs // num_workers
    factories = [base if slot % share else partial(Sleeping, base) for slot in range(workload.num_envs)]
    actions = workload.actions()
    found: dict[str, float] = {}
    cluster: Any = LocalCluster()
    async with aioenv.AsyncVectorEnv(factories, num_workers=num_workers, cluster=cluster) as envs:
        await envs.reset(seed=0)
        found[_DIRECT], found[_OWN] = await _steps(envs, workload, actions)
    cluster = RelayedCluster(relay)  # type: ignore[arg-type]  # it calls `port_to`
    with _probe(relay) as ends:
        async with aioenv.AsyncVectorEnv(factories, num_workers=num_workers, cluster=cluster) as envs:
            await envs.reset(seed=0)
            for delay in _DELAYS:
                relay.set_delay(delay / 1e3)
                found[f"step ms, {delay:g}"], _ = await _steps(envs, workload, actions)
                found[f"trip ms, {delay:g}"] = _round_trip_s(*ends)
            relay.set_delay(0.0)
    return {key: 1e3 * found[key] for key in NETWORK_KEYS}


def _measure(num_workers: int, workload: Workload) -> dict[str, float]:
    """Measure the steps of some workers, in ms (see `NETWORK_KEYS`).

    Raises:
        NotApplicable: if the env is none of `NETWORK_ENVS`, or workers would have unequal shares.
    """
    if workload.env not in NETWORK_ENVS or workload.num_envs % num_workers:
        raise NotApplicable(f"takes {' or '.join(NETWORK_ENVS)}, and a number of envs that {num_workers} divides")
    with contextlib.closing(RelayProcess()) as relay:
        return aioenv.run(_measure_steps(workload, num_workers, relay))


NETWORK: dict[str, Callable[[Workload], dict[str, float]]] = {
    f"aioenv-{n}": partial(_measure, n) for n in (*WORKERS, MANY)
}


# ---------------------------------------------------------------- the model

# What was measured, by env and number of workers: `NETWORK_KEYS`, in ms.
Measured = Mapping[tuple[str, int], Mapping[str, float]]


@dataclass(frozen=True)
class Model:
    """How long a step of all slots takes, where workers take equally long and reply at the same time.

    Attributes:
        fixed_s, a_worker_s: this process's time in a step, and for each worker, in seconds.
        bytes_per_s: how fast this process sends and receives.
        wake_s: from the last request to the first reply, besides the worker's own step and the round trip: waking up
            both sides, and the worker's time for its frames, by env.
    """

    fixed_s: float
    a_worker_s: float
    bytes_per_s: float
    wake_s: Mapping[str, float]

    @classmethod
    def fit(cls, measured: Measured) -> Model:
        """Compute the constants from steps without the relay, by least squares."""
        rows = [(1.0, workers, step_bytes(env)) for env, workers in measured]
        own = [each[_OWN] / 1e3 for each in measured.values()]
        (fixed, a_worker, a_byte), *_ = np.linalg.lstsq(np.array(rows), np.array(own), rcond=None)
        model = cls(float(fixed), float(a_worker), 1 / float(a_byte), {})
        rest: dict[str, list[float]] = {}
        for (env, workers), each in measured.items():
            known = model.own_s(workers, step_bytes(env)) + STEP_S
            if workers != MANY:
                rest.setdefault(env, []).append(each[_DIRECT] / 1e3 - known)
        return cls(model.fixed_s, model.a_worker_s, model.bytes_per_s, {e: float(np.mean(r)) for e, r in rest.items()})

    def own_s(self, workers: int, bytes_of_step: float) -> float:
        """Return this process's time in a step."""
        return self.fixed_s + workers * self.a_worker_s + bytes_of_step / self.bytes_per_s

    def step_s(
        self, workers: int, bytes_of_step: float, worker_s: float, round_trip_s: float, *, link_bytes_per_s: float = 0
    ) -> float:
        """Predict how long a step takes, in seconds.

        Args:
            workers: how many.
            bytes_of_step: of all requests and replies.
            worker_s: how long a worker takes for its slots, wake-ups included.
            round_trip_s: the network's round trip.
            link_bytes_per_s: the bandwidth of this machine's network; 0 if it does not matter.
        """
        link_s = bytes_of_step / link_bytes_per_s if link_bytes_per_s else 0.0
        more_s = max(0.0, link_s - bytes_of_step / self.bytes_per_s)
        return self.own_s(workers, bytes_of_step) + more_s + worker_s + round_trip_s

    def of_measured(self, measured: Measured) -> dict[tuple[str, int, float], float]:
        """Compare with steps over the relay: the predicted over the measured rate, by env, workers and delay in ms.

        The relay's own time is known from a step without a delay.
        """
        found = {}
        for (env, workers), each in measured.items():
            if workers == MANY:
                continue
            relay_ms = each["step ms, 0"] - each[_DIRECT]
            for delay in DELAYS_MS:
                trip_ms = each[f"trip ms, {delay:g}"] - each["trip ms, 0"]
                predicted = self.step_s(workers, step_bytes(env), STEP_S + self.wake_s[env], trip_ms / 1e3)
                found[env, workers, delay] = each[f"step ms, {delay:g}"] / (1e3 * predicted + relay_ms)
        return found

    def predict(self, task: str, workers: int, round_trip_ms: float) -> tuple[float, float]:
        """Predict env-steps/s, and the share of the workers' time in which they step, of one of `PREDICTED`."""
        num_envs, worker_s, env = PREDICTED[task]
        more = {"worker_s": worker_s + self.wake_s[env], "link_bytes_per_s": LINK_BYTES_PER_S}
        step_s = self.step_s(workers, step_bytes(env, workers * num_envs), round_trip_s=round_trip_ms / 1e3, **more)
        return workers * num_envs / step_s, worker_s / step_s


def step_bytes(env: str, num_envs: int = NUM_ENVS) -> int:
    """Return the bytes of a step's requests and replies."""
    return num_envs * (NETWORK_ENVS[env] + _FLAGS_BYTES + _ACTION_BYTES)


# Name -> the envs of a worker, the time of their step in seconds, and an env with such observations.
PREDICTED = {"few bytes": (16, 5e-3, "noop"), "(84, 84, 4)": (16, 5e-3, "pixels")}
PREDICTED_WORKERS = (10, 100, 1000)
ROUND_TRIPS_MS = (0.2, 1.0, 10.0)
LINK_BYTES_PER_S = 25e9 / 8  # a network of 25 Gbit/s


def measured_of(rows: Iterable[Mapping[str, str]]) -> Measured:
    """Take what was measured out of the rows of the table `network`."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["unit"] in NETWORK_KEYS:
            key = row["task"], int(row["contender"].removeprefix("aioenv-"))
            found.setdefault(key, {})[row["unit"]] = float(row["median"])
    return {key: each for key, each in found.items() if len(each) == len(NETWORK_KEYS)}
