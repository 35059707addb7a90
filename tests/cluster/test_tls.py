"""TLS between machines, with agents that are processes; `test_ray.py` has it on Ray."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from contextlib import suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.cluster.local import LocalCluster, LocalSession, ProcessAgent
from aioenv.ipc import handshake
from aioenv.process.tls import TlsFiles, TlsRelay
from aioenv.testing import VectorEnvContract
from tests.cluster.test_remote_collectors import rollouts
from tests.collector.collector_kit import FIELDS, Linear
from tests.kits.cluster_kit import LIMIT_S, Play, resumed
from tests.kits.relay_kit import Relay, RelayedCluster
from tests.kits.tls_kit import make_authority, needs_openssl

pytestmark = [needs_openssl, pytest.mark.skipif(sys.platform != "linux", reason="agents take pidfds")]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("others"), "others")


class TestContract(VectorEnvContract):
    @pytest.fixture(autouse=True)
    def files(self, ours):
        self.cluster = LocalCluster(2, tls=ours)

    async def start(self, env_fns, **options):
        return await aioenv.AsyncVectorEnv(env_fns, num_workers=2, cluster=self.cluster, **options)


@pytest.mark.asyncio
async def test_large_observations_go_through(ours):
    """Several times as many bytes as the relay holds."""
    cluster = LocalCluster(tls=ours)
    async with aioenv.make_vec(Images, 8, num_workers=2, cluster=cluster) as envs:
        obs, _ = await envs.reset()
        for step in range(1, 5):
            obs = (await envs.step(np.arange(8))).obs
            assert (obs == (np.arange(8) + step).reshape(8, 1, 1, 1)).all()


class Images(gym.Env):
    """1 MiB of the slot's action, plus the number of steps."""

    observation_space = gym.spaces.Box(0, 255, (1024, 1024, 1), np.uint8)
    action_space = gym.spaces.Discrete(100)

    def reset(self, *, seed=None, options=None):
        self._steps = 0
        return np.zeros((1024, 1024, 1), np.uint8), {}

    def step(self, action):
        self._steps += 1
        return np.full((1024, 1024, 1), action + self._steps, np.uint8), 0.0, False, False, {}


@pytest.mark.asyncio
async def test_rollouts_equal_those_of_local_collectors(ours):
    def collector(cluster=None):
        return aioenv.RolloutCollector(
            "CartPole-v1", 4, policy=Linear, steps=30, num_collectors=2, mode="sync", seed=3, cluster=cluster
        )

    for here, there in zip(await rollouts(collector()), await rollouts(collector(LocalCluster(tls=ours))), strict=True):
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(here, name), getattr(there, name))


@resumed
@pytest.mark.asyncio
async def test_a_connection_is_cut(ours, resume, record_property):
    relay = Relay()
    cluster = RelayedCluster(relay)
    cluster.tls = ours
    try:
        async with Play([cluster, LocalCluster(tls=ours)], [1, 1], resume) as play:
            relay.cut()
            await play.held("on node 0.* is lost", record_property, "connection cut, TLS")
    finally:
        relay.close()


@resumed
@pytest.mark.asyncio
async def test_a_connection_is_half_open(ours, resume, record_property):
    relay = Relay()
    cluster = RelayedCluster(relay)
    cluster.tls = ours
    try:
        async with Play([cluster, LocalCluster(tls=ours)], [1, 1], resume) as play:
            relay.frozen = True

            async def thaw():
                while play.envs.workers[0].state in ("ready", "busy", "draining"):
                    await asyncio.sleep(0.005)
                relay.cut()
                relay.frozen = False

            thawing = asyncio.ensure_future(thaw())
            await play.held("no sign of life", record_property, "half-open connection, TLS")
            await thawing
    finally:
        relay.close()


# ---------------------------------------------------------------- refusals


class OtherSession(LocalSession):
    """Its agents have other certificates than its parent."""

    def __init__(self, cluster, num_workers, theirs) -> None:
        super().__init__(cluster, num_workers)
        self._theirs = theirs

    def place(self, index, invitation):
        return ProcessAgent(invitation, "node 0", self._theirs)


class OtherCluster(LocalCluster):
    def __init__(self, tls, theirs) -> None:
        super().__init__(tls=tls)
        self._theirs = theirs

    def session(self, num_workers, start_timeout_s):
        return OtherSession(self, num_workers, self._theirs)


async def started(cluster) -> None:
    async with aioenv.make_vec("CartPole-v1", 1, num_workers=1, cluster=cluster) as envs:
        await envs.reset()


@pytest.mark.asyncio
async def test_an_agent_of_another_authority_is_refused_by_both_sides(ours, others, caplog):
    with pytest.raises(aioenv.WorkerStartError, match=r"agent of the worker has ended.*CERTIFICATE_VERIFY_FAILED"):
        await started(OtherCluster(ours, others))
    # it takes the parent's certificate, but shows one of another authority
    mixed = others._replace(authority=ours.authority)
    caplog.clear()
    with pytest.raises(aioenv.WorkerStartError, match=r"agent of the worker has ended.*(?i:unknown.ca)"):
        await started(OtherCluster(ours, mixed))
    assert "was refused" in caplog.text and "CERTIFICATE_VERIFY_FAILED" in caplog.text


@pytest.mark.asyncio
async def test_an_agent_without_tls_is_refused(ours, caplog):
    with pytest.raises(aioenv.WorkerStartError, match="agent of the worker has ended"):
        await started(OtherCluster(ours, None))
    assert "was refused" in caplog.text


@pytest.mark.asyncio
async def test_a_parent_without_tls_is_refused(ours):
    with pytest.raises(aioenv.WorkerStartError, match=r"agent of .* has ended.*(EOF|WRONG_VERSION|reset|closed)"):
        await started(OtherCluster(None, ours))


class SpiedCluster(LocalCluster):
    """Tells its invitations."""

    def __init__(self, tls, spy) -> None:
        super().__init__(tls=tls)
        self._spy = spy

    def session(self, num_workers, start_timeout_s):
        session = super().session(num_workers, start_timeout_s)
        place = session.place

        def place_and_tell(index, invitation):
            self._spy(invitation)
            return place(index, invitation)

        session.place = place_and_tell
        return session


@pytest.mark.asyncio
async def test_a_peer_without_a_certificate_reads_nothing(ours, caplog):
    """Though it knows an invitation, it gets no challenge."""
    caplog.set_level(logging.WARNING, logger="aioenv")
    peers = []

    def greet(invitation) -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(ours.authority)
        with socket.create_connection((invitation.host, invitation.port)) as raw:
            raw.settimeout(LIMIT_S)
            with suppress(ConnectionError, ssl.SSLError), context.wrap_socket(raw) as sock:
                with suppress(ConnectionError, ssl.SSLError):
                    sock.sendall(handshake.hello(invitation, handshake.CONTROL))
                return sock.recv(1000)
        return b""

    def spy(invitation):
        peers.append(asyncio.ensure_future(asyncio.to_thread(greet, invitation)))

    async with aioenv.make_vec("CartPole-v1", 1, num_workers=1, cluster=SpiedCluster(ours, spy)) as envs:
        assert await peers[0] == b""
        await envs.reset()
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in caplog.text


def with_both_authorities(ours, others, folder: Path) -> list[TlsFiles]:
    both = folder / "both.crt"
    both.write_text(Path(ours.authority).read_text() + Path(others.authority).read_text())
    return [files._replace(authority=str(both)) for files in (ours, others)]


@pytest.mark.asyncio
async def test_a_machine_in_between_is_refused_although_its_certificate_is_good(ours, others, tmp_path):
    """It decrypts and encrypts, with a certificate that both sides take, and does not know the secret."""
    ours, others = with_both_authorities(ours, others, tmp_path)
    between = []

    def stand_between(listener, port) -> None:
        with listener:
            sock, _ = listener.accept()
        worker = TlsRelay().plain(others.context(server=True).wrap_socket(sock, server_side=True))
        parent = socket.create_connection(("127.0.0.1", port))
        parent = TlsRelay().plain(others.context(server=False).wrap_socket(parent))
        with worker, parent:
            hello = worker.recv(handshake.HELLO_BYTES, socket.MSG_WAITALL)
            parent.sendall(hello)
            challenge = parent.recv(handshake.CHALLENGE_BYTES, socket.MSG_WAITALL)
            assert len(challenge) == handshake.CHALLENGE_BYTES
            worker.sendall(challenge)
            assert worker.recv(1) == b""

    class Between(LocalSession):
        def place(self, index, invitation):
            listener = socket.create_server(("127.0.0.1", 0))
            between.append(asyncio.ensure_future(asyncio.to_thread(stand_between, listener, invitation.port)))
            return super().place(index, invitation._replace(port=listener.getsockname()[1]))

    cluster = LocalCluster(tls=ours)
    cluster.session = lambda num_workers, start_timeout_s: Between(cluster, num_workers)
    with pytest.raises(aioenv.WorkerStartError, match="does not know the secret"):
        await started(cluster)
    await asyncio.gather(*between)


@pytest.mark.asyncio
async def test_a_connection_without_a_handshake_ends_with_the_start(ours):
    silent = []
    spy = lambda invitation: silent.append(socket.create_connection((invitation.host, invitation.port)))  # noqa: E731
    async with aioenv.make_vec("CartPole-v1", 1, num_workers=1, cluster=SpiedCluster(ours, spy)):
        with silent[0]:
            silent[0].settimeout(LIMIT_S)
            with suppress(ConnectionError):
                assert await asyncio.to_thread(silent[0].recv, 1) == b""


@pytest.mark.asyncio
async def test_a_file_that_is_missing_is_named(ours, tmp_path):
    files = ours._replace(key=str(tmp_path / "missing.key"))
    with pytest.raises(aioenv.WorkerStartError, match=r"missing\.key"):
        await started(LocalCluster(tls=files))


# ---------------------------------------------------------------- the relay


def relayed_pair(ours) -> tuple[socket.socket, socket.socket]:
    """The plain ends of a connection."""
    one, other = socket.socketpair()
    server = ours.context(server=True).wrap_socket(one, server_side=True, do_handshake_on_connect=False)
    client = ours.context(server=False).wrap_socket(other, do_handshake_on_connect=False)
    return TlsRelay().plain(server), TlsRelay().plain(client)


@pytest.mark.asyncio
async def test_both_ways_at_once_with_full_buffers(ours):
    """Both sides write much more than is held before they read."""
    data = np.random.default_rng(0).bytes(12 << 20)
    pair = relayed_pair(ours)

    def read(sock) -> bytes:
        received = bytearray()
        while len(received) < len(data):
            received += sock.recv(1 << 20)
        return bytes(received)

    with pair[0], pair[1]:
        async with asyncio.timeout(60):
            writing = [asyncio.create_task(asyncio.to_thread(sock.sendall, data)) for sock in pair]
            received = await asyncio.gather(*(asyncio.to_thread(read, sock) for sock in pair))
            await asyncio.gather(*writing)
    assert received == [data, data]


def test_the_last_bytes_arrive_before_the_end(ours):
    one, other = relayed_pair(ours)
    with one, other:
        one.sendall(bytes(1 << 16))
        one.close()
        received = other.makefile("rb").read()
    assert received == bytes(1 << 16)


def test_a_peer_that_takes_nothing_holds_no_connection(ours):
    """The thread ends soon although the peer does not read the last bytes."""
    one, other = socket.socketpair()
    client = ours.context(server=False).wrap_socket(other, do_handshake_on_connect=False)
    server = TlsRelay().plain(
        ours.context(server=True).wrap_socket(one, server_side=True, do_handshake_on_connect=False)
    )
    client.do_handshake()
    with client, server:
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                server.send(bytes(1 << 20))
