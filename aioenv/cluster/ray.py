"""Workers on a Ray cluster. Ray places and watches their agents; frames travel over TCP, not through Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from aioenv.errors import WorkerStartError
from aioenv.ipc.handshake import Invitation
from aioenv.ipc.shared_data import MappedFile, MemoryCopy, give_data, inbox_pair, open_mapped, refuse_data
from aioenv.process.agent import run_agent
from aioenv.process.async_resource import internal_task, wait_through_cancel
from aioenv.process.remote import SharedData
from aioenv.process.tls import TlsFiles

if TYPE_CHECKING:
    import socket

    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

__all__ = ["RayCluster"]

_log = logging.getLogger("aioenv")

_STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
# Lines of Ray's errors, or beginnings of what follows, that say nothing about this actor's end.
_NO_REASON = re.compile(r"The actor died unexpectedly|\t(class_name|actor_id|pid|name|namespace|ip): ")
_RELEASE_S = 5.0  # how long Ray may take to end an actor, in seconds
_FETCH_S = 30.0  # how long Ray may take to bring data to a node, in seconds
# Fewer bytes go through the connections. There, 8 collectors on two nodes of one machine take 54 ms for 4 MiB, and
# 250 ms for 16 MiB; through the object store 40 and 87 ms. With 2 collectors, 8 MiB take as long in either way.
_SHARED_FROM = 4 << 20

# The sessions that use the Ray that this process has started: it is shut down with the last one.
_own_sessions = 0
_init_lock = threading.Lock()


class RayCluster:
    """Machines of a Ray cluster, for `cluster=`. Each worker has an actor of Ray, in one placement group.

    The actor starts the worker as a process of its own, and watches it. The worker connects to this process over TCP.
    Each connection proves that it knows a secret of this vector env. With `RAY_USE_TLS=1` frames are encrypted, with
    Ray's certificates (`RAY_TLS_SERVER_CERT`, `RAY_TLS_SERVER_KEY`, `RAY_TLS_CA_CERT`, here and on the nodes). Without
    it they are not: use networks that you trust. The nodes need the same versions of Python, aioenv, numpy, Gymnasium
    and MuJoCo as this process, and the modules that the factories import.

    Args:
        address: the address of the cluster, as of `ray.init`: "auto", "local", "ray://host:10001" …. None: the Ray that
            this process is connected to, or that `ray.init()` finds (`RAY_ADDRESS`, `ray start`), or else a local one.
            A Ray that this starts ends with the last vector env that uses it.
        cpus_per_worker: the CPUs that Ray reserves for each worker.
        gpus_per_worker: the GPUs that Ray reserves for each worker, for envs that need one.
        resources: other resources of Ray for each worker.
        strategy: how Ray spreads workers over nodes: "SPREAD", "PACK", "STRICT_SPREAD" or "STRICT_PACK".
        runtime_env: Ray's runtime environment of the workers (packages, files, variables).
        listen: the address that this process listens on and nodes can reach, and the ports to try, none of them being
            any: `("10.0.0.1", range(7000, 7100))`. None: the address that Ray knows, and any port. "ray://" needs it.

    Raises:
        ImportError: if Ray is not installed: `pip install 'ray[default]'`.
        ValueError: if an argument is not one of its values, or `RAY_USE_TLS` is set without certificates.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus_per_worker: float = 1,
        gpus_per_worker: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD",
        runtime_env: Mapping[str, Any] | None = None,
        listen: tuple[str, Sequence[int]] | None = None,
    ) -> None:
        try:
            import ray  # noqa: F401
        except ImportError as exc:
            raise ImportError("RayCluster needs Ray: pip install 'ray[default]'") from exc
        if strategy not in _STRATEGIES:
            raise ValueError(f"strategy: expected one of {', '.join(map(repr, _STRATEGIES))}, got {strategy!r}")
        for name, number in (("cpus_per_worker", cpus_per_worker), ("gpus_per_worker", gpus_per_worker)):
            if not isinstance(number, (int, float)) or isinstance(number, bool) or number < 0:
                raise ValueError(f"{name}: expected a number from 0, got {number!r}")
        if address is not None and address.startswith("ray://") and listen is None:
            raise ValueError(
                f"address={address!r}: nodes may not reach a process behind Ray's client; say where they can: "
                "listen=(host, ports)"
            )
        self.tls = _tls_of_ray()
        self.address = address
        self.listen = listen
        self.strategy = strategy
        self.runtime_env = dict(runtime_env or {})
        self.bundle = {"CPU": cpus_per_worker, "GPU": gpus_per_worker, **(resources or {})}
        self.bundle = {name: amount for name, amount in self.bundle.items() if amount}

    def __repr__(self) -> str:
        return f"RayCluster(address={self.address!r})"

    def session(self, num_workers: int, start_timeout_s: float) -> RaySession:
        """Return a session for the workers of one vector env; it is not started."""
        return RaySession(self, num_workers, start_timeout_s)


class RaySession:
    """The placement group of one vector env (see `ClusterSession`).

    Args:
        cluster: where.
        num_workers: the number of bundles.
        start_timeout_s: how long Ray may take to reserve them, in seconds.
    """

    def __init__(self, cluster: RayCluster, num_workers: int, start_timeout_s: float) -> None:
        self._cluster = cluster
        self._num_workers = num_workers
        self._start_timeout_s = start_timeout_s
        self._group: PlacementGroup | None = None
        self._owns_ray = False
        self._shared = 0  # data so far

    @property
    def address(self) -> tuple[str, Sequence[int]]:
        """See `ClusterSession`."""
        import ray

        return self._cluster.listen or (ray.util.get_node_ip_address(), ())

    @property
    def tls(self) -> TlsFiles | None:
        """See `ClusterSession`."""
        return self._cluster.tls

    async def start(self) -> None:
        """See `ClusterSession`."""
        try:
            await _in_thread(self._connect)
            await self._reserve()
        except BaseException:
            await wait_through_cancel(internal_task(self.close()))
            raise

    def _connect(self) -> None:
        global _own_sessions
        import ray

        with _init_lock:
            if not ray.is_initialized():
                try:
                    ray.init(self._cluster.address, include_dashboard=False, log_to_driver=True)
                except (ConnectionError, RuntimeError, ValueError) as exc:
                    raise WorkerStartError(f"{self._cluster!r} can't be reached: {exc}") from exc
                self._owns_ray = True
            else:
                self._check_address()
                self._owns_ray = bool(_own_sessions)
            _own_sessions += self._owns_ray

    def _check_address(self) -> None:
        """Raise a WorkerStartError if the cluster is not the one that this process is connected to."""
        import ray

        asked = self._cluster.address
        if asked is None or ":" not in asked or asked.startswith("ray://"):
            return
        connected = ray.get_runtime_context().gcs_address
        if asked != connected:
            raise WorkerStartError(f"this process is connected to the Ray at {connected}, not to {asked}")

    async def _reserve(self) -> None:
        import ray

        bundles = [self._cluster.bundle] * self._num_workers
        self._group = group = ray.util.placement_group(bundles, strategy=self._cluster.strategy)
        ready = asyncio.wrap_future(group.ready().future())
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await ready
        except TimeoutError:
            raise WorkerStartError(
                f"{self._cluster!r} had no room for {self._num_workers} workers of {self._cluster.bundle} within "
                f"start_timeout_s={self._start_timeout_s:g}, strategy={self._cluster.strategy!r}; it has "
                f"{_amounts(ray.cluster_resources())}, of which {_amounts(ray.available_resources())} are free"
            ) from None

    def place(self, index: int, invitation: Invitation) -> RayAgent:
        """See `ClusterSession`."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._cluster.bundle
        options: dict[str, Any] = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "resources": {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
            "max_restarts": 0,
            "max_concurrency": 2,  # data are given while the agent runs
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
        }
        if self._cluster.runtime_env:
            options["runtime_env"] = self._cluster.runtime_env
        actor = ray.remote(_AgentActor).options(**options).remote()
        return RayAgent(actor, invitation)

    def share(self, parts: Sequence[memoryview]) -> SharedData | None:
        """See `ClusterSession`. Ray takes the data to each node once, and its workers map them there."""
        import ray

        # behind Ray's client, this process has no object store
        if sum(map(len, parts)) < _SHARED_FROM or ray.util.client.ray.is_connected():
            return None
        try:
            reference = ray.put([np.frombuffer(part, np.uint8) for part in parts])
            arrays = ray.get(reference)
        except Exception:  # the object store is full, or Ray is going down: frames carry them
            _log.warning("Ray's object store does not take %d bytes", sum(map(len, parts)), exc_info=True)
            return None
        self._shared += 1
        offsets = tuple(array.ctypes.data - arrays[0].ctypes.data for array in arrays)
        return SharedData(self._shared, [array.data for array in arrays], offsets, reference)

    async def close(self) -> None:
        """See `ClusterSession`."""
        await _in_thread(self.abandon)

    def abandon(self) -> None:
        """See `ClusterSession`."""
        global _own_sessions
        import ray

        with _init_lock:
            group, self._group = self._group, None
            if group is not None and ray.is_initialized():
                with contextlib.suppress(Exception):  # Ray is going down: nothing is left then
                    ray.util.remove_placement_group(group)
            owned, self._owns_ray = self._owns_ray, False
            _own_sessions -= owned
            if owned and not _own_sessions:
                ray.shutdown()


class _AgentActor:
    """The actor that runs an agent (see `process/agent.py`)."""

    def __init__(self) -> None:
        self._inbox, self._workers_end = inbox_pair()

    def run(self, invitation: tuple[str, int, bytes, bytes]) -> None:
        """Run the agent until its worker has ended, or its parent is gone."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        run_agent(
            Invitation(*invitation),
            f"node {node[:8]} ({ray.util.get_node_ip_address()})",
            self._workers_end,
            _tls_of_ray(),
        )

    def give(self, number: int, references: Sequence[ObjectRef[Any]]) -> None:
        """Let the worker map data in Ray's object store of this node; Ray keeps them while it uses them.

        Args:
            number: see `SharedData`.
            references: one, to the arrays; in a list, so that Ray does not take it for the arrays.
        """
        import ray

        try:
            arrays = ray.get(references[0], timeout=_FETCH_S)
            begin, last = arrays[0].ctypes.data, arrays[-1]
            size = last.ctypes.data + last.nbytes - begin
            file = open_mapped(begin)
            if file is None:
                memory = np.lib.stride_tricks.as_strided(arrays[0], (size,))
                copy = MemoryCopy([memory.data])
                give_data(self._inbox, number, copy.fd, 0, size)
            else:
                with file:
                    _lend(self._inbox, number, file, size, arrays)
        except Exception as exc:
            sys.stderr.write(f"weights can't be had from Ray's object store: {exc}\n")
            with contextlib.suppress(OSError):  # the worker has ended
                refuse_data(self._inbox, number)


def _lend(inbox: socket.socket, number: int, file: MappedFile, size: int, arrays: Any) -> None:
    """Give data, and keep the arrays until the worker does not use them any more."""
    reader, loan = os.pipe()
    try:
        give_data(inbox, number, file.fd, file.offset, size, loan)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(loan)
    threading.Thread(target=_keep, args=(arrays, reader), name="loan of weights", daemon=True).start()


def _keep(arrays: Any, reader: int) -> None:
    with open(reader, "rb", 0) as pipe:
        pipe.read()
    del arrays


class RayAgent:
    """An agent in an actor of Ray (see `Agent`).

    Args:
        actor: the actor.
        invitation: what the agent needs.
    """

    def __init__(self, actor: ActorHandle[Any], invitation: Invitation) -> None:
        self._actor: ActorHandle[Any] | None = actor
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        reference = actor.run.remote(tuple(invitation))
        reference.future().add_done_callback(self._on_end)

    def _on_end(self, done: Future[None]) -> None:
        error = done.exception()
        why = "it has finished" if error is None else _reason(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._set_ended, why)

    def _set_ended(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)

    def kill(self) -> None:
        """See `Agent`."""
        import ray

        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():
            with contextlib.suppress(Exception):  # Ray is going down, and its actors with it
                ray.kill(actor)

    def give(self, data: SharedData) -> None:
        """See `Agent`."""
        if self._actor is not None:
            with contextlib.suppress(Exception):  # Ray is going down
                self._actor.give.remote(data.number, [data.source])

    async def release(self) -> None:
        """See `Agent`. An agent ends by itself when its connection to this process has ended."""
        if not self.ended.done():
            await wait_through_cancel(internal_task(asyncio.wait([self.ended], timeout=_RELEASE_S)))
        self.kill()


def _tls_of_ray() -> TlsFiles | None:
    """Return the certificates that Ray uses in this process; None if it uses none.

    Raises:
        ValueError: if it is told to, but not which.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):  # as Ray reads it
        return None
    names = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"
    if missing := [name for name in names if not os.environ.get(name)]:
        raise ValueError(f"RAY_USE_TLS is set, but not {', '.join(missing)}")
    return TlsFiles(*(os.environ[name] for name in names))


def _reason(error: BaseException) -> str:
    """Return the sentences of Ray's error that say why an actor has ended."""
    from ray.exceptions import RayTaskError

    lines = str(error).strip().splitlines()
    if isinstance(error, RayTaskError):  # a traceback of the agent
        return lines[-1].strip()
    # the first lines of some errors only say which actor it is
    told = " ".join(line.strip() for line in lines if not _NO_REASON.match(line))
    return told.partition(" Some common causes")[0]


async def _in_thread(function: Callable[[], None]) -> None:
    """Call a function of Ray that blocks, on a thread; if this is cancelled, wait for its end all the same."""
    call = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        await asyncio.shield(call)
    except asyncio.CancelledError:
        await wait_through_cancel(call)
        raise


def _amounts(resources: Mapping[str, float]) -> str:
    shown = {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}
    return ", ".join(f"{name}: {amount:g}" for name, amount in sorted(shown.items()) if name != "memory") or "nothing"
