"""Faults between machines: each is named in time, the other slots go on, and nothing is left.

`make test` plays each once, `make cluster-faults` 20 times. Agents are processes here, which connect over TCP;
`test_ray.py` has the faults of Ray.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import pytest

import aioenv
from aioenv.cluster.local import LocalCluster, LocalSession
from aioenv.ipc import handshake
from aioenv.process import remote
from aioenv.process.async_resource import internal_task
from tests.kits.cluster_kit import LIMIT_S, PORTS, Play, again, agent_of, kill_driver, left_here, refused, resumed
from tests.kits.relay_kit import Relay, RelayedCluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="agents take pidfds")


@pytest.fixture(autouse=True)
def no_process_and_no_socket_left(nothing_left_behind):
    yield
    deadline = time.monotonic() + LIMIT_S
    while left := left_here():
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.fixture
def relay():
    relay = Relay()
    yield relay
    relay.close()


def local(num_nodes: int = 2) -> LocalCluster:
    return LocalCluster(num_nodes, ports=PORTS)


def behind(relay: Relay) -> list[LocalCluster]:
    """Clusters of which the first is behind a relay."""
    cluster = RelayedCluster(relay)
    cluster.ports = PORTS
    return [cluster, local(1)]


@again
@resumed
@pytest.mark.asyncio
async def test_an_agent_is_killed(again, resume, record_property):
    async with Play(local(), 2, resume) as play:
        os.kill(agent_of(play.envs).pid, signal.SIGKILL)
        await play.held("on node 0.* is lost: .*; its agent has ended: exit code -9", record_property, "agent killed")


@again
@resumed
@pytest.mark.asyncio
async def test_a_worker_is_killed(again, resume, record_property):
    async with Play(local(), 2, resume) as play:
        os.kill(play.envs.workers[0].pid, signal.SIGKILL)
        await play.held("on node 0.* was killed by SIGKILL", record_property, "worker killed")


@again
@resumed
@pytest.mark.asyncio
async def test_a_connection_is_cut(again, resume, record_property, relay):
    async with Play(behind(relay), [1, 1], resume) as play:
        relay.cut()
        await play.held("on node 0.* is lost: the connection to its agent has ended", record_property, "connection cut")


@again
@resumed
@pytest.mark.asyncio
async def test_a_connection_is_half_open(again, resume, record_property, relay):
    async with Play(behind(relay), [1, 1], resume) as play:
        relay.frozen = True
        thawing = asyncio.ensure_future(thaw_once_noticed(relay, play))
        await play.held("on node 0.* no sign of life", record_property, "half-open connection")
        await thawing


@again
@resumed
@pytest.mark.asyncio
async def test_a_connection_is_half_open_with_a_timeout(again, resume, record_property, relay):
    policy = "restart" if resume else "kill"
    async with Play(behind(relay), [1, 1], resume, timeout_s=0.5, on_timeout=policy) as play:
        relay.frozen = True
        thawing = asyncio.ensure_future(thaw_once_noticed(relay, play))
        message = "on node 0.* was killed: no reply within timeout_s=0.5"
        await play.held(message, record_property, "half-open connection, timeout_s=0.5")
        assert await thawing < 2.5


async def thaw_once_noticed(relay, play) -> float:
    """Cut the frozen connections and let new ones through, once the worker counts as dead; return when that was."""
    seconds = await play.noticed()
    relay.cut()
    relay.frozen = False
    return seconds


@again
def test_the_parent_is_killed(again, record_property):
    kill_driver("", "", record_property, "parent killed", left_here)


@again
@pytest.mark.asyncio
async def test_versions_differ(again, record_property, monkeypatch):
    ours = {**remote.versions(), "mujoco": "0.1"}
    monkeypatch.setattr(remote, "versions", lambda: ours)
    message = r"a worker on node \d has other versions than this process:\n(.*\n)+  mujoco +\d\S+ +0.1 +<-"
    await refused(local(), message, record_property, "version skew")


class ChangedSession(LocalSession):
    """Passes each invitation through a function."""

    def __init__(self, cluster, num_workers, change) -> None:
        super().__init__(cluster, num_workers)
        self._change = change

    def place(self, index, invitation):
        return super().place(index, self._change(invitation))


class ChangedCluster(LocalCluster):
    def __init__(self, change) -> None:
        super().__init__(ports=PORTS)
        self._change = change

    def session(self, num_workers, start_timeout_s):
        return ChangedSession(self, num_workers, self._change)


@again
@pytest.mark.asyncio
async def test_an_agent_has_another_secret(again, record_property):
    cluster = ChangedCluster(lambda invitation: invitation._replace(secret=bytes(32)))
    await refused(cluster, "does not know the secret of the invitation", record_property, "wrong secret")


@again
@pytest.mark.asyncio
async def test_an_impostor_has_another_secret(again, record_property):
    """It knows the id of an invitation, and gets neither a worker's place nor a byte after the challenge."""
    impostors = []

    def with_impostors(invitation):
        for role in (handshake.CONTROL, handshake.FRAMES):
            impostor = socket.create_connection((invitation.host, invitation.port))
            impostor.sendall(handshake.hello(invitation, role) + bytes(handshake.PROOF_BYTES))
            impostors.append(impostor)
        return invitation

    record_property("fault", "wrong secret of an impostor")
    begun = time.monotonic()
    async with Play(ChangedCluster(with_impostors), 2, False) as play:
        record_property("named_s", time.monotonic() - begun)
        await play.steps(10)
    for impostor in impostors:
        with impostor:
            impostor.settimeout(LIMIT_S)
            received = impostor.makefile("rb").read()
            assert len(received) == handshake.CHALLENGE_BYTES


# Connects again and again; at most so many connections are open at a time.
HOSTILE = """
import os, socket, sys
host, port, count, most = sys.argv[1], *map(int, sys.argv[2:])
open_ones, data, done = [], [b"", b"aioenv", os.urandom(1 << 12), bytes(1 << 20)], 0
while done < count:
    sock = socket.socket()
    try:
        sock.connect((host, port))
        sock.setblocking(False)
        sock.send(data[done % len(data)])
    except BlockingIOError:
        pass
    except ConnectionRefusedError:
        break
    except OSError:
        sock.close()
        continue
    open_ones.append(sock)
    done += 1
    if len(open_ones) > most:
        open_ones.pop(0).close()
    if done == count // 2:
        print("half", flush=True)
print(done, flush=True)
sys.stdin.readline()
"""


class LateAgent:
    """An agent that is placed once a future is done (see `remote.Agent`)."""

    def __init__(self, gate, place) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended = self._loop.create_future()
        self._agent = None
        self._placing = internal_task(self._place(gate, place))

    async def _place(self, gate, place) -> None:
        await asyncio.wait([gate])
        self._agent = place()
        self._agent.ended.add_done_callback(lambda done: self.ended.set_result(done.result()))

    def kill(self) -> None:
        self._placing.cancel()
        if self._agent is not None:
            self._agent.kill()

    async def release(self) -> None:
        self.kill()
        if self._agent is not None:
            await self._agent.release()


class AttackedCluster(LocalCluster):
    """Starts attackers with the first agent. Its worker comes up in the midst of the attack, the others after it."""

    def __init__(self, count: int) -> None:
        super().__init__(ports=PORTS)
        self._count = count
        self.attackers: list[subprocess.Popen] = []
        self.done = 0  # connections

    def session(self, num_workers, start_timeout_s):
        session = super().session(num_workers, start_timeout_s)
        place = session.place

        def place_later(index, invitation):
            if not self.attackers:
                self._attack(invitation.host, invitation.port)
            return LateAgent(self._all if index else self._half, partial(place, index, invitation))

        session.place = place_later
        return session

    def _attack(self, host: str, port: int) -> None:
        command = [sys.executable, "-c", HOSTILE, host, str(port), str(self._count // 2), "400"]
        self.attackers += [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        self._half, self._all = internal_task(self._say("half\n")), internal_task(self._wait_for_all())

    async def _say(self, line: str) -> None:
        for attacker in self.attackers:
            assert await asyncio.to_thread(attacker.stdout.readline) == line

    async def _wait_for_all(self) -> None:
        await self._half
        for attacker in self.attackers:
            self.done += int(await asyncio.to_thread(attacker.stdout.readline))

    def close(self) -> None:
        for attacker in self.attackers:
            attacker.communicate()


@again
@pytest.mark.asyncio
async def test_10_000_hostile_connections(again, record_property):
    """They send nothing, less than a HELLO, garbage, and a mebibyte, while workers come up."""
    record_property("fault", "10,000 hostile connections")
    cluster = AttackedCluster(10_000)
    begun = time.monotonic()
    try:
        async with Play(cluster, 2, False) as play:
            record_property("named_s", time.monotonic() - begun)
            await play.steps(20)
        assert cluster.done == 10_000
    finally:
        cluster.close()


@pytest.mark.asyncio
async def test_connections_that_take_all_descriptors_are_closed():
    """The parent has a few descriptors left, and the agent connects after the hostile connections."""
    hostile, limits = [], resource.getrlimit(resource.RLIMIT_NOFILE)

    def attacked(invitation):
        loop = asyncio.get_running_loop()
        hostile.extend(socket.create_connection((invitation.host, invitation.port)) for _ in range(50))
        loop.call_later(0, resource.setrlimit, resource.RLIMIT_NOFILE, (hostile[-1].fileno() + 20, limits[1]))
        return invitation

    try:
        async with aioenv.make_vec("CartPole-v1", 1, num_workers=1, cluster=ChangedCluster(attacked)) as envs:
            await envs.reset()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for one in hostile:
            one.close()
