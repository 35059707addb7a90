"""Workers that connect over TCP, and workers on Ray, against local ones; and what else steps envs on Ray.

Ray runs on this machine alone. It is started for each measurement, unless RAY_ADDRESS names one that runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

import aioenv
from aioenv.cli.contenders import NotApplicable, Throughput, Workload, measure_blocking, step_aioenv
from aioenv.cluster.local import LocalCluster
from aioenv.platform import usable_cpus
from benchmarks.resets import RATE

__all__ = ["CLUSTER", "TIANSHOU"]

TIANSHOU = "tianshou-ray"  # starts a process an env, each of which takes Ray half a second
RAY_WARM_UP_S = 1.0  # until the first calls have made connections
_LONGER = 2  # times the suite's seconds: a step of 64 Ants takes 20 ms
_FLAGS_BYTES = 8 + 1 + 1  # reward, terminated, truncated


@contextlib.contextmanager
def _ray(*packages: str) -> Iterator[Any]:
    """Start Ray in this process.

    Raises:
        NotApplicable: if it, or another package that is needed, is not installed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("ray", *packages)):
        raise NotApplicable("not installed")
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if "RAY_ADDRESS" in os.environ:
        ray.init(**options)
    else:  # "local": a Ray that runs already is left alone
        ray.init("local", num_cpus=usable_cpus(), include_dashboard=False, **options)
    try:
        yield ray
    finally:
        ray.shutdown()


def _warm(workload: Workload) -> Workload:
    return replace(workload, warm_up_s=max(RAY_WARM_UP_S, workload.warm_up_s))


def _aioenv(workload: Workload, **keywords: Any) -> Throughput:
    return step_aioenv(workload, keywords={"num_workers": usable_cpus(), **keywords}, start=None, channel="auto")


def _aioenv_on_ray(workload: Workload) -> Throughput:
    with _ray():
        return _aioenv(_warm(workload), cluster=aioenv.RayCluster())


def _shares(workload: Workload) -> list[slice]:
    """Split the envs into as many shares as there are CPUs."""
    count = min(usable_cpus(), workload.num_envs)
    bounds = [workload.num_envs * i // count for i in range(count + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


# ---------------------------------------------------------------- bare sockets


class Sockets:
    """A process for each usable CPU, which answers each request over TCP with as many bytes as a step's results have.

    Args:
        workload: says how many bytes there are; its envs are not stepped.

    Raises:
        NotApplicable: if observations are no Box, or actions no arrays.
    """

    def __init__(self, workload: Workload) -> None:
        with contextlib.closing(workload.make_env()) as env:
            space = env.observation_space
        actions = workload.actions()[0]
        if not isinstance(space, spaces.Box) or not isinstance(actions, np.ndarray):
            raise NotApplicable("takes observations that are a Box, and actions that are arrays")
        self._row_bytes = int(np.prod(space.shape)) * space.dtype.itemsize + _FLAGS_BYTES
        self._num_envs = workload.num_envs
        self._shares = _shares(workload)
        self._socks: list[socket.socket] = []
        self._processes: list[multiprocessing.Process] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for share in self._shares:
                rows = share.stop - share.start
                args = (listener, actions[share].nbytes, rows * self._row_bytes)
                self._processes.append(process := multiprocessing.Process(target=_answer, args=args))
                process.start()
                self._socks.append(listener.accept()[0])
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def step(self, actions: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Send each process its actions, and receive all answers into a new array."""
        for sock, share in zip(self._socks, self._shares, strict=True):
            sock.sendall(actions[share].tobytes())
        batch = np.empty((self._num_envs, self._row_bytes), np.uint8)
        for sock, share in zip(self._socks, self._shares, strict=True):
            if sock.recv_into(batch[share].data, flags=socket.MSG_WAITALL) != batch[share].nbytes:
                raise RuntimeError("a process has ended; its error is printed above")
        return batch

    def close(self) -> None:
        """End the processes."""
        for sock in self._socks:
            sock.close()
        for process in self._processes:
            process.join()


def _answer(listener: socket.socket, request_bytes: int, reply_bytes: int) -> None:
    with socket.create_connection(listener.getsockname()) as sock:
        listener.close()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reply = bytes(reply_bytes)
        while len(sock.recv(request_bytes, socket.MSG_WAITALL)) == request_bytes:
            sock.sendall(reply)


def _sockets(workload: Workload) -> Throughput:
    return measure_blocking(workload, lambda: Sockets(workload), lambda sockets: sockets.step)


# ---------------------------------------------------------------- others on Ray


class Envs:
    """Gymnasium's SyncVectorEnv in an actor of Ray.

    Args:
        factories: of its envs.
    """

    def __init__(self, factories: Sequence[Callable[[], Any]]) -> None:
        from gymnasium.vector import SyncVectorEnv

        self._envs = SyncVectorEnv(factories)

    def reset(self, seed: int) -> Any:
        """Reset all envs."""
        return self._envs.reset(seed=seed)

    def step(self, actions: Any) -> Any:
        """Step all envs."""
        return self._envs.step(actions)


def _actors(workload: Workload) -> Throughput:
    """Measure an actor for each CPU, which all get their actions before their results are awaited together."""
    shares = _shares(workload)

    def begin(actors: Any) -> Callable[[Any], Any]:
        ray.get([actor.reset.remote(share.start) for actor, share in zip(actors.held, shares, strict=True)])

        def step(actions: Any) -> Any:
            parts = zip(actors.held, shares, strict=True)
            return ray.get([actor.step.remote(actions[share]) for actor, share in parts])

        return step

    class Actors:
        def __init__(self) -> None:
            make = ray.remote(Envs).options(num_cpus=1)
            self.held = [make.remote(workload.factories[share]) for share in shares]

        def close(self) -> None:
            self.held.clear()

    with _ray() as ray:
        return measure_blocking(_warm(workload), Actors, begin)


def _tianshou(workload: Workload) -> Throughput:
    """Measure Tianshou's vector env on Ray.

    Its actors get their class by value: else each imports Tianshou and torch, which takes minutes for 64 on two CPUs.
    The speed of steps is the same.
    """
    with _ray("tianshou") as ray:
        import tianshou.env.worker.ray
        from tianshou.env import RayVectorEnv

        def begin(envs: Any) -> Callable[[Any], Any]:
            envs.reset()

            def step(actions: Any) -> None:
                _, _, terminated, truncated, _ = envs.step(actions)
                ended = np.flatnonzero(terminated | truncated)
                if len(ended):  # it leaves resets to the caller
                    envs.reset(ended)

            return step

        ray.cloudpickle.register_pickle_by_value(tianshou.env.worker.ray)
        return measure_blocking(_warm(workload), lambda: RayVectorEnv(workload.factories), begin)


def _measure(step: Callable[[Workload], Throughput], workload: Workload) -> dict[str, float]:
    done = step(replace(workload, seconds=_LONGER * workload.seconds))
    return {RATE: done.env_steps / done.seconds}


_STEPS: dict[str, Callable[[Workload], Throughput]] = {
    "aioenv": _aioenv,
    "aioenv-tcp": lambda load: _aioenv(load, cluster=LocalCluster()),
    "aioenv-ray": _aioenv_on_ray,
    "sockets": _sockets,
    "ray-actors": _actors,
    TIANSHOU: _tianshou,
}
CLUSTER: dict[str, Callable[[Workload], dict[str, float]]] = {
    name: partial(_measure, step) for name, step in _STEPS.items()
}
