"""Workers that Ray places: results, faults, and what is left."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.cluster import ray as ray_module
from aioenv.process import remote
from aioenv.testing import VectorEnvContract
from tests.cluster.test_many_workers import up_steps_and_closes
from tests.cluster.test_remote_collectors import (
    LARGE,
    PLASMA,
    a_replaced_collector_gets_the_newest_weights,
    large,
    of_mapped,
    one_round,
    unpicklable_weights_change_nothing,
    weights_are_mapped,
)
from tests.kits.cluster_kit import Play, again, agent_of, kill_driver, refused, resumed
from tests.kits.compare import assert_same
from tests.kits.process_kit import environment, run_alone
from tests.kits.tls_kit import make_authority, needs_openssl

ray = pytest.importorskip("ray")

from tests.kits.ray_kit import agent_pid, left_on_ray, nothing_left_on_ray, on_ray, ray_of, raylet_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning:ray")  # of Ray's own

TAXI = "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"
ENVS = [
    "CartPole-v1", "Pendulum-v1", TAXI, "Blackjack-v1", "Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5",
    "InvertedPendulum-v5", "Pusher-v5", "Swimmer-v5", "Walker2d-v5",
]  # fmt: skip
MODES = list(AutoresetMode)
# every mode, with a small, a discrete and a large observation
SAMPLE = [("CartPole-v1", MODES[0]), (TAXI, MODES[1]), ("Ant-v5", MODES[2])]


@pytest.fixture(scope="module")
def nodes():
    """A Ray of two nodes."""
    with ray_of(2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_left_behind(nodes, tmp_path, monkeypatch):
    """In the place of the fixture of all tests: connections of Ray itself stay."""
    monkeypatch.chdir(tmp_path)
    with nothing_left_on_ray():
        yield


class TestOneNode(VectorEnvContract):
    async def start(self, env_fns, **options):
        cluster = on_ray(strategy="STRICT_PACK")
        return await aioenv.AsyncVectorEnv(env_fns, num_workers=2, cluster=cluster, **options)


class TestTwoNodes(VectorEnvContract):
    async def start(self, env_fns, **options):
        cluster = on_ray(strategy="STRICT_SPREAD")
        return await aioenv.AsyncVectorEnv(env_fns, num_workers=2, cluster=cluster, **options)


async def trajectory(env_id, mode, **options):
    async with aioenv.make_vec(env_id, 4, num_workers=2, autoreset_mode=mode, **options) as envs:
        found = [tuple(await envs.reset(seed=5))]
        envs.action_space.seed(5)
        for _ in range(300):
            step = await envs.step(envs.action_space.sample())
            found.append(tuple(step))
            if mode is AutoresetMode.DISABLED and (ended := step.terminated | step.truncated).any():
                found.append(tuple(await envs.reset(options={"reset_mask": ended})))
        return found


@pytest.mark.parametrize(
    ("env_id", "mode"),
    [
        pytest.param(*cell, marks=[] if cell in SAMPLE else [pytest.mark.cluster])
        for cell in itertools.product(ENVS, MODES)
    ],
)
@pytest.mark.asyncio
async def test_trajectories_equal_those_of_local_workers(env_id, mode):
    assert_same(await trajectory(env_id, mode, cluster=on_ray()), await trajectory(env_id, mode))


@pytest.mark.asyncio
async def test_some_workers_are_here_and_others_on_ray():
    async with aioenv.make_vec("CartPole-v1", 3, num_workers=[1, 2], cluster=[None, on_ray()]) as envs:
        assert [bool(worker.node) for worker in envs.workers] == [False, True, True]
        await envs.reset(seed=0)
        assert (await envs.step([0, 1, 0])).reward.tolist() == [1, 1, 1]


@pytest.mark.asyncio
async def test_ray_says_where_to_listen():
    async with aioenv.make_vec("CartPole-v1", 1, num_workers=1, cluster=aioenv.RayCluster()) as envs:
        (worker,) = envs.workers
        address = ray.util.get_node_ip_address()
        assert address in worker.node and any(node["NodeID"][:8] in worker.node for node in ray.nodes())
        (placement,) = envs._session.worker_pool._placements._by_worker.values()
        assert placement.session.address == (address, ())


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.asyncio
async def test_a_killed_node_is_replaced(nodes, resume):
    """With `resume=True` no step is lost; without it, the slots of the node begin new episodes."""
    nodes.add_node(num_cpus=8)  # as room for the worker of the other
    head = ray.get_runtime_context().get_node_id()[:8]
    options = {"restart": aioenv.RestartPolicy(resume=resume), "cluster": on_ray(strategy="STRICT_SPREAD")}
    # without resume an env whose episodes do not end meanwhile: else it is lost between two of them, without a trace
    env = "InvertedPendulum-v5" if resume else "HalfCheetah-v5"
    async with (
        aioenv.make_vec(env, 4, num_workers=2, **options) as envs,
        aioenv.make_vec(env, 4, num_workers=1) as untouched,
    ):
        assert_same(tuple(await envs.reset(seed=3)), tuple(await untouched.reset(seed=3)))
        lost = next(worker for worker in envs.workers if head not in worker.node)
        others = np.setdiff1d(np.arange(4), lost.slots)
        actions = np.full(envs.action_space.shape, 0.05, np.float32)
        restarted = np.zeros(4, bool)
        index, deadline = envs.workers.index(lost), time.monotonic() + 60
        for number in itertools.count():
            if number == 20:
                await asyncio.to_thread(nodes.remove_node, raylet_of(nodes, lost), allow_graceful=False)
            if number > 40 and envs.workers[index].pid != lost.pid:
                break
            assert time.monotonic() < deadline
            got, expected = await envs.step(actions), await untouched.step(actions)
            if resume:
                assert_same(tuple(got), tuple(expected), f"step {number}")
            else:
                assert_same([one[others] for one in got[:4]], [one[others] for one in expected[:4]], f"step {number}")
            if "restarted" in got.info:
                restarted |= got.info["restarted"]
                assert (got.truncated == got.info["restarted"]).all()
        assert np.flatnonzero(restarted).tolist() == ([] if resume else [*lost.slots])
        assert lost.node not in [worker.node for worker in envs.workers]


@pytest.mark.asyncio
async def test_more_workers_than_room_are_refused_in_time():
    started = time.monotonic()
    with pytest.raises(aioenv.WorkerStartError, match=r"room for 40 workers of \{'CPU': 1\}.*has CPU: 16.* are free"):
        await aioenv.make_vec("CartPole-v1", 40, num_workers=40, cluster=on_ray(), start_timeout_s=2)
    assert time.monotonic() - started < 4


@pytest.mark.asyncio
async def test_an_env_that_can_not_be_made_leaves_nothing():
    with pytest.raises(aioenv.WorkerStartError, match="of the test"):
        await aioenv.AsyncVectorEnv([Unmakable] * 2, num_workers=2, cluster=on_ray())


class Unmakable(gym.Env):
    def __init__(self):
        raise ArithmeticError("of the test")


@pytest.mark.asyncio
async def test_a_cancelled_start_leaves_nothing():
    starting = asyncio.ensure_future(
        aioenv.make_vec("CartPole-v1", 2, num_workers=2, cluster=on_ray())._ensure_started()
    )
    async with asyncio.timeout(30):
        while not ray._private.state.actors(actor_state_name="PENDING_CREATION"):
            await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


# ---------------------------------------------------------------- faults


@again
@resumed
@pytest.mark.asyncio
async def test_an_actor_is_killed(again, resume, record_property):
    async with Play(on_ray(), 2, resume) as play:
        os.kill(agent_pid(play.envs.workers[0]), signal.SIGKILL)
        message = "on node [0-9a-f]{8} .* is lost: .* its agent has ended: .* its worker process has died"
        await play.held(message, record_property, "actor of Ray killed")


@pytest.mark.asyncio
async def test_ray_says_that_it_was_told_to_kill_an_actor():
    async with aioenv.make_vec("CartPole-v1", 2, num_workers=2, cluster=on_ray()) as envs:
        await envs.reset()
        ray.kill(agent_of(envs)._actor)
        begun = time.monotonic()
        with pytest.raises(aioenv.WorkerDied, match=r"its agent has ended: .* killed by `ray\.kill`"):
            while True:
                await envs.step([0, 1])
        assert time.monotonic() - begun < 5


OUT_OF_MEMORY = """
import asyncio
import aioenv, ray
from ray.cluster_utils import Cluster

async def main():
    # Ray kills each actor at once: it believes that memory runs out
    config = {"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 50}
    cluster = Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False, "_system_config": config})
    ray.init(cluster.address, log_to_driver=False)
    try:
        async with aioenv.make_vec("CartPole-v1", 1, num_workers=1, cluster=aioenv.RayCluster()) as envs:
            await envs.reset()
            while True:
                await envs.step([0])
    except (aioenv.WorkerDied, aioenv.WorkerStartError) as error:
        print(error)
        assert "running low on memory" in str(error)
    else:
        raise AssertionError
    finally:
        ray.shutdown()
        cluster.shutdown()

asyncio.run(main())
"""


def test_ray_says_that_it_has_killed_an_actor_since_memory_runs_out():
    run_alone(OUT_OF_MEMORY, timeout_s=100)


@again
@resumed
@pytest.mark.asyncio
async def test_a_raylet_is_killed(nodes, again, resume, record_property):
    nodes.add_node(num_cpus=8)  # as room for the worker of the other
    head = ray.get_runtime_context().get_node_id()[:8]
    async with Play(on_ray(strategy="STRICT_SPREAD"), 2, resume) as play:
        play.victim = next(number for number, worker in enumerate(play.envs.workers) if head not in worker.node)
        lost = play.envs.workers[play.victim]
        killing = asyncio.to_thread(nodes.remove_node, raylet_of(nodes, lost), allow_graceful=False)
        killing = asyncio.ensure_future(killing)
        # the agent may still tell that the worker was killed with its node
        how = "is lost: the connection to its agent has ended|was killed by SIGKILL"
        message = f"on {re.escape(lost.node)}.* ({how})"
        await play.held(message, record_property, "raylet killed")
        await killing
        if resume:
            assert play.envs.workers[play.victim].node != lost.node


@again
def test_the_parent_is_killed(nodes, again, record_property):
    kill_driver(
        nodes.address, ray.util.get_node_ip_address(), record_property, "parent of workers on Ray killed", left_on_ray
    )


@pytest.mark.asyncio
async def test_versions_differ(record_property, monkeypatch):
    ours = {**remote.versions(), "mujoco": "0.1"}
    monkeypatch.setattr(remote, "versions", lambda: ours)
    message = r"a worker on node [0-9a-f]{8} .* has other versions than this process:\n(.*\n)+  mujoco +\d\S+ +0.1 +<-"
    await refused(on_ray(), message, record_property, "version skew, on Ray", 30.0)  # to start an actor takes long


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.asyncio
async def test_a_thousand_slots_on_fifty_actors():
    """Fractions of CPUs, since 50 actors do not fit on two nodes of 8 CPUs otherwise."""
    await up_steps_and_closes(on_ray(cpus_per_worker=0.01))


# ---------------------------------------------------------------- weights of collectors


def spread() -> aioenv.RayCluster:
    return on_ray(strategy="STRICT_SPREAD")


@pytest.mark.asyncio
async def test_weights_of_collectors_are_mapped_from_rays_object_store():
    await weights_are_mapped(spread(), memory=(PLASMA, PLASMA))


@pytest.mark.asyncio
async def test_weights_are_copied_where_the_object_store_can_not_be_opened(monkeypatch):
    """As where Ray's node process belongs to another user."""

    class WithoutParent(ray_module._AgentActor):
        def give(self, number, references):
            os.getppid = os.getpid
            super().give(number, references)

    monkeypatch.setattr(ray_module, "_AgentActor", WithoutParent)
    await weights_are_mapped(spread())


@pytest.mark.asyncio
async def test_a_replaced_collector_gets_the_newest_weights():
    await a_replaced_collector_gets_the_newest_weights(spread())


@pytest.mark.asyncio
async def test_unpicklable_weights_change_nothing():
    await unpicklable_weights_change_nothing(spread())


@pytest.mark.asyncio
async def test_old_weights_are_freed_on_all_nodes():
    async with of_mapped(spread()) as collecting:
        await one_round(collecting)
        for version in range(1, 11):
            await collecting.update(large(version))
            await one_round(collecting)
        async with asyncio.timeout(10):
            while await asyncio.to_thread(stored) > 2.5 * LARGE:  # the newest weights, once a node
                await asyncio.sleep(0.05)
    async with asyncio.timeout(10):
        while await asyncio.to_thread(stored) > 0:
            await asyncio.sleep(0.05)


def stored() -> float:
    """The bytes in the object stores of all nodes."""
    there, free = ray.cluster_resources(), ray.available_resources()
    return there["object_store_memory"] - free["object_store_memory"]


# ---------------------------------------------------------------- TLS

ENCRYPTED = """
import asyncio, os, sys
import numpy as np
import aioenv, ray
from aioenv.process.remote import Listener
from ray.cluster_utils import Cluster

async def main():
    cluster = Cluster(True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    cluster.add_node(num_cpus=4)
    ray.init(cluster.address, log_to_driver=False)
    encrypted, prepare = [], Listener._prepare

    def spy(self, sock):
        plain = prepare(self, sock)
        encrypted.append(plain is not sock)
        return plain

    Listener._prepare = spy
    try:
        on_ray = aioenv.RayCluster(strategy="STRICT_SPREAD")
        async with (
            aioenv.make_vec("CartPole-v1", 4, num_workers=2, cluster=on_ray) as there,
            aioenv.make_vec("CartPole-v1", 4, num_workers=2) as here,
        ):
            assert (await there.reset(seed=1)).obs.tolist() == (await here.reset(seed=1)).obs.tolist()
            for step in range(100):
                actions = np.arange(4) % 2
                for one, other in zip((await there.step(actions))[:4], (await here.step(actions))[:4]):
                    np.testing.assert_array_equal(one, other)
        assert encrypted == [True] * 4
        # certificates of another authority: Ray is connected already, with the right ones
        for name, value in zip(("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"), sys.argv[1:]):
            os.environ[name] = value
        try:
            await aioenv.make_vec("CartPole-v1", 1, num_workers=1, cluster=aioenv.RayCluster())
        except aioenv.WorkerStartError as error:
            assert "CERTIFICATE_VERIFY_FAILED" in str(error), error
        else:
            raise AssertionError
    finally:
        ray.shutdown()
        cluster.shutdown()

asyncio.run(main())
"""


@needs_openssl
def test_rays_certificates_protect_frames(tmp_path):
    ours, others = make_authority(tmp_path, "ours", ray.util.get_node_ip_address()), make_authority(tmp_path, "others")
    names = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"
    variables = {**environment(), "RAY_USE_TLS": "1", **dict(zip(names, ours, strict=True))}
    run_alone(ENCRYPTED, *others, env=variables, timeout_s=200)


# ---------------------------------------------------------------- Ray's own life


LIFETIMES = """
import asyncio, sys
import aioenv, ray

async def main():
    if sys.argv[1] == "of the user":
        ray.init("local", num_cpus=2, include_dashboard=False)
    made = [aioenv.make_vec("CartPole-v1", 1, num_workers=1, cluster=aioenv.RayCluster("local")) for _ in range(2)]
    for envs in made:
        await envs
        await envs.reset(seed=0)
    for envs in made:
        assert ray.is_initialized()
        await envs.close()
    assert ray.is_initialized() == (sys.argv[1] == "of the user")

asyncio.run(main())
"""


@pytest.mark.parametrize("whose", ["of the user", "of aioenv"])
def test_a_local_ray_ends_with_the_last_vector_env_unless_the_user_has_started_it(whose):
    run_alone(LIFETIMES, whose, timeout_s=100)


@pytest.mark.asyncio
async def test_a_process_can_not_be_connected_to_two_rays(nodes):
    async with aioenv.make_vec("CartPole-v1", 1, num_workers=1, cluster=on_ray(address=nodes.address)) as envs:
        await envs.reset()
    with pytest.raises(aioenv.WorkerStartError, match=r"is connected to the Ray at .*, not to 10\.0\.0\.1:6379"):
        await aioenv.make_vec("CartPole-v1", 1, num_workers=1, cluster=on_ray(address="10.0.0.1:6379"))


def test_what_does_not_go_with_ray(monkeypatch):
    with pytest.raises(ValueError, match=r"ray://.*listen="):
        aioenv.RayCluster("ray://head:10001")
    aioenv.RayCluster("ray://head:10001", listen=("127.0.0.1", ()))
    with pytest.raises(ValueError, match="strategy: expected one of 'SPREAD'"):
        aioenv.RayCluster(strategy="EVEN")
    for name in ("cpus_per_worker", "gpus_per_worker"):
        with pytest.raises(ValueError, match=f"{name}: expected a number from 0"):
            aioenv.RayCluster(**{name: -1})
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_CA_CERT", "ca.crt")
    with pytest.raises(ValueError, match="RAY_USE_TLS is set, but not RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY"):
        aioenv.RayCluster()
