"""Workers that connect over TCP, as those of a cluster do: results, faults, and what is left."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.cluster.local import LocalCluster
from aioenv.process import agent, remote
from aioenv.stats import NormalizeObservation
from aioenv.testing import VectorEnvContract
from tests.kits.process_kit import environment, has_ended, processes_with
from tests.kits.relay_kit import relayed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="agents take pidfds")

TAXI = "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"


class TestOneNode(VectorEnvContract):
    async def start(self, env_fns, **options):
        return await aioenv.AsyncVectorEnv(env_fns, num_workers=2, cluster=LocalCluster(), **options)


class TestMixed(VectorEnvContract):
    """One worker is local, the others are on two nodes."""

    async def start(self, env_fns, **options):
        workers = [1, len(env_fns) - 1] if len(env_fns) > 1 else [1]
        clusters = [None, LocalCluster(2)][: len(workers)]
        return await aioenv.AsyncVectorEnv(env_fns, num_workers=workers, cluster=clusters, **options)


@asynccontextmanager
async def cartpoles(num_envs=4, num_workers=2, cluster=None, env="CartPole-v1", **options):
    async with aioenv.make_vec(
        env, num_envs, num_workers=num_workers, cluster=cluster or LocalCluster(2), **options
    ) as envs:
        await envs.reset(seed=0)
        yield envs


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Ant-v5", TAXI])
@pytest.mark.asyncio
async def test_trajectories_equal_those_of_local_workers(env_id, mode):
    async def trajectory(**options):
        async with aioenv.make_vec(env_id, 3, num_workers=3, autoreset_mode=mode, **options) as envs:
            obs, _ = await envs.reset(seed=5)
            envs.action_space.seed(5)
            steps = [obs]
            for _ in range(120):
                obs, reward, terminated, truncated, _ = await envs.step(envs.action_space.sample())
                steps += [obs, reward, terminated, truncated]
                if mode is AutoresetMode.DISABLED and (ended := terminated | truncated).any():
                    obs, _ = await envs.reset(options={"reset_mask": ended})
                    steps.append(obs)
            return steps

    local, remote = await trajectory(), await trajectory(cluster=LocalCluster(2))
    assert len(local) == len(remote)
    for ours, theirs in zip(local, remote, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.asyncio
async def test_workers_tell_their_node_and_the_parent_listens_only_at_the_start():
    async with cartpoles(4, 4) as envs:
        assert [worker.node for worker in envs.workers] == ["node 0", "node 1", "node 0", "node 1"]
        assert {worker.memory for worker in envs.workers} == {None}
        listeners = {p.listener for p in envs._session.worker_pool._placements._by_worker.values()}
        assert not any(listener.listening for listener in listeners)


class Talks(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        print("hello from", os.getpid())
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action == 1:
            os.abort()
        if action == 2:
            raise ArithmeticError("of the env")
        if action == 3:
            import time

            time.sleep(3600)
        return np.zeros(1, np.float32), 1.0, False, False, {"data": [1, 2]}


def talkers(**options):
    options = {"num_workers": 2, "cluster": LocalCluster(2), **options}
    return aioenv.make_vec(Talks, 2, **options)


@pytest.mark.asyncio
async def test_output_becomes_log_records(caplog):
    caplog.set_level(logging.INFO, logger="aioenv.workers")
    async with talkers() as envs:
        pids = {worker.pid for worker in envs.workers}
        await envs.reset()
    said = [record for record in caplog.records if "hello from" in record.getMessage()]
    assert {record.pid for record in said} == pids


@pytest.mark.asyncio
async def test_errors_name_the_node():
    async with talkers() as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError, match=r"slot 1 \(worker 1, pid \d+ on node 1\): ArithmeticError") as caught:
            await envs.step([0, 2])
        assert caught.value.slots == (1,)
        await envs.reset(options={"reset_mask": np.array([False, True])})
        with pytest.raises(aioenv.WorkerDied, match=r"on node 0.*SIGABRT while it ran slot 0") as died:
            await envs.step([1, 0])
        assert died.value.slots == (0,) and died.value.returncode == -signal.SIGABRT
        assert "Fatal Python error" in died.value.stderr


@pytest.mark.asyncio
async def test_a_hung_env_is_named_and_replaced():
    async with talkers(timeout_s=3.0, on_timeout="restart", restart=aioenv.RestartPolicy()) as envs:
        await envs.reset()
        _, _, _, truncated, infos = await envs.step([3, 0])
        assert truncated.tolist() == [True, False] and infos["restarted"].tolist() == [True, False]
        assert (await envs.step([0, 0])).reward.tolist() == [0, 1]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.asyncio
async def test_a_killed_worker_is_placed_again(resume):
    policy, env = aioenv.RestartPolicy(resume=resume), "InvertedPendulum-v5"
    async with cartpoles(env=env, restart=policy) as envs, cartpoles(env=env, num_workers=1) as untouched:
        actions = np.full(envs.action_space.shape, 0.1, np.float32)
        for step in range(60):
            if step in (7, 19):
                os.kill(envs.workers[step % 2].pid, signal.SIGKILL)
            got, expected = await envs.step(actions), await untouched.step(actions)
            if resume:
                np.testing.assert_array_equal(got.obs, expected.obs)
        assert {worker.state for worker in envs.workers} == {"ready"}


@pytest.mark.asyncio
async def test_statistics_are_merged_by_the_parent():
    async def moments(cluster):
        stats = aioenv.SharedRunningStats((4,), 4, shared=cluster is None)
        factories = [partial(normalized, stats.at(slot)) for slot in range(4)]
        async with aioenv.AsyncVectorEnv(factories, num_workers=2, cluster=cluster) as envs:
            obs = [(await envs.reset(seed=3))[0]]
            obs += [(await envs.step([0, 1, 0, 1])).obs for _ in range(20)]
        with stats:
            return [*obs, stats.mean, stats.var, stats.count]

    np.testing.assert_equal(await moments(LocalCluster(2)), await moments(None))
    stats = aioenv.SharedRunningStats((4,), 1)
    with stats, pytest.raises(ValueError, match="shared=False"):
        aioenv.AsyncVectorEnv([partial(normalized, stats.at(0))], num_workers=1, cluster=LocalCluster())


def normalized(stats):
    return NormalizeObservation(gym.make("CartPole-v1"), stats)


def test_the_blocking_classes_take_a_cluster():
    with aioenv.sync.make_vec("CartPole-v1", 2, num_workers=2, cluster=LocalCluster(2)) as envs:
        obs, _ = envs.reset(seed=0)
        assert [worker.node for worker in envs.workers] == ["node 0", "node 1"]
    drop_in = aioenv.sync.AsyncVectorEnv(
        [partial(gym.make, "CartPole-v1")] * 2, num_workers=[1, 1], cluster=[None, LocalCluster()]
    )
    np.testing.assert_array_equal(drop_in.reset(seed=0)[0], obs)
    assert [worker.node for worker in drop_in.workers] == ["", "node 0"]
    drop_in.close()
    with pytest.raises(ValueError, match="max_concurrency"):
        aioenv.sync.AsyncVectorEnv([Talks], max_concurrency=1, num_workers=1, cluster=LocalCluster())


class TellsItsSeed(gym.Env):
    """Episodes of three steps, whose observation is their seed."""

    observation_space = gym.spaces.Box(0, 1 << 20, (1,), np.int64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self._obs, self._steps = np.array([-1 if seed is None else seed + (options or {}).get("add", 0)]), 0
        return self._obs, {}

    def step(self, action):
        self._steps += 1
        return self._obs, 1.0, self._steps == 3, False, {}


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.asyncio
async def test_a_plan_of_seeds_goes_on_after_a_restart(mode):
    async def seen(cluster):
        async with aioenv.make_vec(
            TellsItsSeed,
            4,
            num_workers=2,
            cluster=cluster,
            autoreset_mode=mode,
            restart=aioenv.RestartPolicy(),
            seed_plan=range(1000),
            autoreset_options=options,
        ) as envs:
            found = [(await envs.reset())[0]]
            for step in range(24):
                if step in (7, 13):
                    pid = envs.workers[1].pid
                    os.kill(pid, signal.SIGKILL)
                    async with asyncio.timeout(10):
                        while not has_ended(pid):
                            await asyncio.sleep(0)
                obs, _, terminated, truncated, _ = await envs.step([0] * 4)
                found += [obs, terminated, truncated]
                if mode is AutoresetMode.DISABLED and (ended := terminated | truncated).any():
                    found.append((await envs.reset(options={"reset_mask": ended}))[0])
            return found

    def options(slot, episode):
        return {"add": 10_000 * episode}

    np.testing.assert_equal(await seen(LocalCluster()), await seen(None))


def agents_of(envs):
    return [worker._connection._process._agent for worker in envs._session.worker_pool.workers]


@pytest.mark.asyncio
async def test_a_killed_agent_takes_its_worker_along():
    async with cartpoles() as envs:
        pid = envs.workers[0].pid
        os.kill(agents_of(envs)[0].pid, signal.SIGKILL)
        with pytest.raises(aioenv.WorkerDied, match="is lost: the connection to its agent has ended"):
            while True:
                await envs.step([0] * 4)
        async with asyncio.timeout(10):
            while not has_ended(pid):
                await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_cut_connections_end_steps_and_workers():
    with relayed() as cluster:
        async with cartpoles(cluster=cluster) as envs:
            pids = [worker.pid for worker in envs.workers]
            cluster.relay.cut()
            with pytest.raises(aioenv.WorkerDied):
                while True:
                    await envs.step([0] * 4)
            async with asyncio.timeout(10):
                while not all(map(has_ended, pids)):
                    await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_a_connection_that_swallows_everything_is_found():
    with relayed() as cluster:
        async with cartpoles(cluster=cluster) as envs:
            cluster.relay.frozen = True
            async with asyncio.timeout(15):
                with pytest.raises(aioenv.WorkerDied, match="no sign of life"):
                    await envs.step([0] * 4)
            cluster.relay.cut()


@pytest.mark.asyncio
async def test_a_timeout_on_a_frozen_connection_ends_in_time():
    with relayed() as cluster:
        async with cartpoles(cluster=cluster, timeout_s=0.5, on_timeout="kill") as envs:
            cluster.relay.frozen = True
            async with asyncio.timeout(5):
                with pytest.raises(aioenv.WorkerDied):
                    await envs.step([0] * 4)
            cluster.relay.cut()


@pytest.mark.asyncio
async def test_other_versions_are_refused_with_a_table(monkeypatch):
    ours = {**remote.versions(), "numpy": "0.1"}
    monkeypatch.setattr(remote, "versions", lambda: ours)
    with pytest.raises(aioenv.WorkerStartError, match=r"numpy +\d+\.\S+ +0.1 +<-"):
        async with cartpoles():
            pass


def test_two_checkouts_of_one_version_differ(tmp_path):
    source = Path(aioenv.__file__).parent
    copies = [shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("*.so")) for name in "ab"]
    (copies[1] / "process" / "agent.py").write_text("changed = True\n")
    same, changed = map(agent._source_digest, copies)
    assert same == agent._source_digest(source) != changed
    assert remote.versions()["aioenv"].endswith(f" {same}")


@pytest.mark.asyncio
async def test_too_many_workers_are_refused():
    with pytest.raises(aioenv.WorkerStartError, match=r"4 workers were asked for, .* has room for 3"):
        async with cartpoles(4, 4, cluster=LocalCluster(1, workers_per_node=3)):
            pass


@pytest.mark.asyncio
async def test_an_agent_that_ends_is_an_error(monkeypatch):
    monkeypatch.setattr(remote.handshake, "new_invitation", lambda host, *_: remote.Invitation(host, 9, b"0" * 16, b""))
    with pytest.raises(aioenv.WorkerStartError, match="the agent of the worker has ended: exit code 1"):
        async with cartpoles():
            pass


@pytest.mark.asyncio
async def test_a_cancelled_start_leaves_nothing():
    task = asyncio.ensure_future(
        aioenv.make_vec("CartPole-v1", 2, num_workers=2, cluster=LocalCluster())._ensure_started()
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_workers_end_with_their_parent():
    code = """
        import os, sys, asyncio, signal, aioenv
        from aioenv.cluster.local import LocalCluster
        async def main():
            async with aioenv.make_vec("CartPole-v1", 2, num_workers=2, cluster=LocalCluster()) as envs:
                await envs.reset()
                print(*(w.pid for w in envs.workers), flush=True)
                await asyncio.sleep(3600)
        asyncio.run(main())
    """
    mark = f"AIOENV_TEST_MARK={os.urandom(8).hex()}"
    name, value = mark.split("=")
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, env={**environment(), name: value}
    ) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2 and processes_with(mark) > {*pids}
        process.kill()

    async def gone():
        async with asyncio.timeout(10):
            while processes_with(mark):
                await asyncio.sleep(0.01)

    asyncio.run(gone())


@pytest.mark.asyncio
async def test_hostile_connections_are_closed_and_disturb_no_worker():
    class Slow(LocalCluster):
        """Places agents only when told to, so that the parent listens for long."""

        def __init__(self):
            super().__init__()
            self.port = asyncio.get_running_loop().create_future()

        def session(self, num_workers, start_timeout_s):
            session = super().session(num_workers, start_timeout_s)
            inner = session.place

            def later(index, invitation):
                if not self.port.done():
                    self.port.set_result(invitation.port)
                return inner(index, invitation)

            session.place = later
            return session

    cluster = Slow()
    starting = asyncio.ensure_future(
        aioenv.make_vec("CartPole-v1", 2, num_workers=2, cluster=cluster)._ensure_started()
    )
    port = await cluster.port
    socks = []
    for number in range(300):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", port))
        socks.append(sock)
        if number % 3 == 0:
            with suppress(OSError):
                sock.send(os.urandom(4096))
        await asyncio.sleep(0)
    envs = await starting
    try:
        await envs.reset(seed=0)
        assert (await envs.step([0, 1])).reward.tolist() == [1, 1]
    finally:
        for sock in socks:
            sock.close()
        await envs.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"debug": True}, "debug"),
        ({"spare_envs": True, "num_workers": 4}, "spare_envs"),
        ({"transport": "shared"}, "share no memory"),
        ({"cpu_affinity": "spread"}, "cpu_affinity"),
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": None}, "num_workers"),
        ({"num_workers": [1]}, "a list goes with a list"),
        ({"cluster": [None, LocalCluster()]}, "expected a list"),
        ({"cluster": [None, LocalCluster()], "num_workers": [1, 2]}, "3 for 2 slots"),
        ({"backend": "native"}, "cluster"),
    ],
)
def test_what_does_not_go_with_a_cluster(options, message):
    options = {"num_workers": 2, "cluster": LocalCluster(), **options}
    with pytest.raises(ValueError, match=message):
        aioenv.make_vec("CartPole-v1", 2, **options)


def test_no_cluster():
    with pytest.raises(TypeError, match="expected a RayCluster"):
        aioenv.make_vec("CartPole-v1", 2, num_workers=2, cluster="10.0.0.1")
