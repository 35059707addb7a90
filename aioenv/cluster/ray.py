"""Workers on a Ray cluster. Ray places and watches their agents; frames travel over TCP, not through Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from aioenv.errors import WorkerStartError
from aioenv.ipc.handshake import Invitation
from aioenv.process.agent import run_agent
from aioenv.process.async_resource import internal_task, wait_through_cancel

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

__all__ = ["RayCluster"]

_STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
_RELEASE_S = 5.0  # how long Ray may take to end an actor, in seconds

# The sessions that use the Ray that this process has started: it is shut down with the last one.
_own_sessions = 0
_init_lock = threading.Lock()


class RayCluster:
    """Machines of a Ray cluster, for `cluster=`. Each worker has an actor of Ray, in one placement group.

    The actor starts the worker as a process of its own, and watches it. The worker connects to this process over TCP.
    Each connection proves that it knows a secret of this vector env, but frames are not encrypted. Use networks that
    you trust. `RAY_USE_TLS` is refused, since frames would not be protected by it. The nodes need the same versions of
    Python, aioenv, numpy, Gymnasium and MuJoCo as this process, and the modules that the factories import.

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
        ImportError: if Ray is not installed: `pip install 'aioenv[ray]'`.
        ValueError: if an argument is not one of its values.
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
            raise ImportError("RayCluster needs Ray: pip install 'aioenv[ray]'") from exc
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
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
            raise ValueError("RAY_USE_TLS is set, but frames between workers and this process would not be encrypted")
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

    @property
    def address(self) -> tuple[str, Sequence[int]]:
        """See `ClusterSession`."""
        import ray

        return self._cluster.listen or (ray.util.get_node_ip_address(), ())

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
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
        }
        if self._cluster.runtime_env:
            options["runtime_env"] = self._cluster.runtime_env
        actor = ray.remote(_AgentActor).options(**options).remote()
        return RayAgent(actor, invitation)

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

    def run(self, invitation: tuple[str, int, bytes, bytes]) -> None:
        """Run the agent until its worker has ended, or its parent is gone."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        run_agent(Invitation(*invitation), f"node {node[:8]} ({ray.util.get_node_ip_address()})")


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
        why = "it has finished" if error is None else str(error).strip()
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

    async def release(self) -> None:
        """See `Agent`. An agent ends by itself when its connection to this process has ended."""
        if not self.ended.done():
            await wait_through_cancel(internal_task(asyncio.wait([self.ended], timeout=_RELEASE_S)))
        self.kill()


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
