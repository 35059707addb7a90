"""A Ray of simulated nodes of this machine, and what vector envs have left on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

import aioenv
from aioenv.testing.leak_check import Resources
from tests.kits.cluster_kit import PORTS, left_here
from tests.kits.process_kit import has_ended

# Ray notices a dead node 5 s after its end, not after 15
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}
HEAD = {"include_dashboard": False, "_system_config": QUICK}  # a dashboard takes ten processes


@contextmanager
def ray_of(num_nodes: int, num_cpus: int = 8) -> Iterator[Cluster]:
    """Start a Ray of so many nodes, and connect this process to it."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": num_cpus, **HEAD})
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(num_cpus=num_cpus)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def on_ray(**options) -> aioenv.RayCluster:
    """A RayCluster whose workers connect to one of `PORTS`."""
    return aioenv.RayCluster(**{"listen": (ray.util.get_node_ip_address(), PORTS), **options})


def agent_pid(worker) -> int:
    """The process of the actor that has started a worker."""
    return int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])


def raylet_of(cluster: Cluster, worker):
    """The node of a cluster that a worker is on."""
    (node,) = (node for node in cluster.list_all_nodes() if node.node_id[:8] in worker.node)
    return node


def left_on_ray() -> list[str]:
    """Actors, their processes, placement groups and connections that are there."""
    ours, groups = actors().values(), placement_group_table().values()
    left = [f"actor, {actor['State']}" for actor in ours if actor["State"] != "DEAD"]
    left += [f"placement group, {group['state']}" for group in groups if group["state"] != "REMOVED"]
    left += [f"process of an actor, {actor['Pid']}" for actor in ours if actor["Pid"] and not has_ended(actor["Pid"])]
    return left + left_here()


@contextmanager
def nothing_left_on_ray(timeout_s: float = 10.0) -> Iterator[None]:
    """Fail if the block leaves anything on Ray or in this process; Ray's own nodes and connections may stay."""
    before = Resources.now()
    yield
    deadline = time.monotonic() + timeout_s
    while left := [
        *left_on_ray(),
        *(one for one in Resources.now().since(before) if "→ socket:" not in one and "(raylet)" not in one),
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
