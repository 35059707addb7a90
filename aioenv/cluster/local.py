"""A cluster of this machine alone: its agents are processes, which connect over TCP as those of other machines do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from aioenv.errors import WorkerStartError
from aioenv.ipc.handshake import Invitation
from aioenv.ipc.shared_data import MemoryCopy, give_data, inbox_pair
from aioenv.process.async_resource import internal_task, wait_through_cancel
from aioenv.process.child import Child
from aioenv.process.environment import import_path
from aioenv.process.remote import SharedData
from aioenv.process.tls import TlsFiles

__all__ = ["LocalCluster"]

# Fewer bytes go through the connections: to map memory takes as long.
_SHARED_FROM = 1 << 16


class LocalCluster:
    """Places workers on this machine, as processes that connect over TCP: to try what a cluster would do.

    Workers without `cluster=` are faster: they share memory with this process.

    Args:
        num_nodes: the number of machines that it pretends to have; workers are spread over them in turn.
        workers_per_node: the room of each; None: no limit.
        host: the address to listen on, an address of this machine.
        ports: the ports to try; none: any.
        tls: certificates for TLS, of both sides; None: without TLS.
    """

    def __init__(
        self,
        num_nodes: int = 1,
        *,
        workers_per_node: int | None = None,
        host: str = "127.0.0.1",
        ports: Sequence[int] = (),
        tls: TlsFiles | None = None,
    ) -> None:
        self.num_nodes = num_nodes
        self.workers_per_node = workers_per_node
        self.host = host
        self.ports = tuple(ports)
        self.tls = tls

    def __repr__(self) -> str:
        return f"LocalCluster(num_nodes={self.num_nodes})"

    def session(self, num_workers: int, start_timeout_s: float) -> LocalSession:
        """Return a session for the workers of one vector env; it is not started."""
        return LocalSession(self, num_workers)


class LocalSession:
    """The workers of one vector env (see `ClusterSession`)."""

    def __init__(self, cluster: LocalCluster, num_workers: int) -> None:
        self._cluster = cluster
        self._num_workers = num_workers
        self._shared = 0  # data so far

    @property
    def address(self) -> tuple[str, Sequence[int]]:
        """See `ClusterSession`."""
        return self._cluster.host, self._cluster.ports

    @property
    def tls(self) -> TlsFiles | None:
        """See `ClusterSession`."""
        return self._cluster.tls

    async def start(self) -> None:
        """See `ClusterSession`."""
        cluster = self._cluster
        if cluster.workers_per_node is not None and self._num_workers > cluster.num_nodes * cluster.workers_per_node:
            raise WorkerStartError(
                f"{self._num_workers} workers were asked for, and {cluster!r} has room for "
                f"{cluster.num_nodes * cluster.workers_per_node}"
            )

    def share(self, parts: Sequence[memoryview]) -> SharedData | None:
        """See `ClusterSession`."""
        if sum(map(len, parts)) < _SHARED_FROM:
            return None
        try:
            copy = MemoryCopy(parts)
        except OSError:
            return None
        self._shared += 1
        return SharedData(self._shared, copy.parts, copy.offsets, copy)

    def place(self, index: int, invitation: Invitation) -> ProcessAgent:
        """See `ClusterSession`."""
        return ProcessAgent(invitation, f"node {index % self._cluster.num_nodes}", self._cluster.tls)

    async def close(self) -> None:
        """See `ClusterSession`."""

    def abandon(self) -> None:
        """See `ClusterSession`."""


class ProcessAgent:
    """An agent that is a child of this process (see `Agent`).

    Args:
        invitation: what it needs.
        node: the name of its machine.
        tls: its certificates; None: without TLS.

    Raises:
        OSError: if the process can't be started.
    """

    def __init__(self, invitation: Invitation, node: str, tls: TlsFiles | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        code = f"import sys; sys.path[:] = {[*import_path()]!a}; from aioenv.process.agent import main; main({node!r})"
        self._inbox, theirs = inbox_pair()
        inbox = theirs.fileno()
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[inbox],
            )
        except BaseException:
            self._inbox.close()
            raise
        finally:
            theirs.close()
        self._child = Child(process)
        assert process.stdin is not None and process.stderr is not None
        self._stderr = process.stderr
        os.set_blocking(self._stderr.fileno(), False)
        words = [invitation.host, str(invitation.port), invitation.id.hex(), invitation.secret.hex(), str(inbox)]
        words.append(json.dumps(tls))
        with contextlib.suppress(BrokenPipeError), process.stdin:  # a pipe has room for a line
            process.stdin.write(" ".join(words).encode() + b"\n")
        assert self._child.pidfd is not None
        self._loop.add_reader(self._child.pidfd, self._on_end)

    @property
    def pid(self) -> int:
        """The process id of the agent."""
        return self._child.pid

    def give(self, data: SharedData) -> None:
        """See `Agent`."""
        with contextlib.suppress(OSError):  # it has ended
            give_data(self._inbox, data.number, data.source.fd, 0, data.source.size)

    def _on_end(self) -> None:
        child = self._child
        if child.pidfd is not None:
            self._loop.remove_reader(child.pidfd)
        child.kill_and_reap()
        if not self.ended.done():
            errors = (self._stderr.read() or b"").decode(errors="replace").strip()
            last = errors.rpartition("\n")[2]
            self.ended.set_result(f"exit code {child.returncode}" + (f": {last}" if last else ""))

    def kill(self) -> None:
        """See `Agent`."""
        if self._child.pidfd is None:
            return
        self._child.kill_and_reap()
        if not self._loop.is_running():
            if not self._loop.is_closed():
                self._loop.remove_reader(self._child.pidfd)
            self._close()

    async def release(self) -> None:
        """See `Agent`. It ends by itself when its connection to this process has ended."""
        if not self.ended.done():
            done = internal_task(asyncio.wait([self.ended], timeout=1.0))
            await wait_through_cancel(done)
            if not self.ended.done():
                self._on_end()
        self._close()

    def _close(self) -> None:
        self._child.close()
        self._stderr.close()
        self._inbox.close()
