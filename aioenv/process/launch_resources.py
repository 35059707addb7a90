"""What is held for a worker that is being started, known to whoever gives it up, with a loop to wait on or without."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack

from aioenv.process.child import Child
from aioenv.process.forkserver import ForkServer

__all__ = ["LaunchResources"]


class LaunchResources:
    """All that is opened for a worker that is being started, until its `Process` has it.

    Attributes:
        server: the fork server that forks it, or guards it.
        spawned: its process, where that is a child of this one.
    """

    def __init__(self) -> None:
        self.server: ForkServer | None = None
        self.spawned: Child | None = None
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._mine = ExitStack()
        self._theirs = ExitStack()

    def mine(self, close: Callable[[], object]) -> None:
        """Keep something of this side, which this closes."""
        self._mine.callback(close)

    def theirs(self, fd: int) -> int:
        """Keep a descriptor for the worker, until it has a copy."""
        self._theirs.callback(os.close, fd)
        return fd

    def close_theirs(self) -> None:
        """The worker has its own."""
        self._theirs.close()

    def hand_over(self) -> Callable[[], None]:
        """A `Process` has all of it now; gives what closes this side's."""
        self.server = self.spawned = None
        return self._mine.pop_all().close

    async def release(self) -> None:
        """Let go of all of it."""
        self._close()
        server, self.server = self.server, None
        if server is not None:
            await server.release()

    def abandon(self) -> None:
        """Let go of all of it without a loop to wait on; where that runs, whoever starts the worker is to do it."""
        if self._loop.is_running() or self._pid != os.getpid():  # a forked copy has nothing to end
            return
        self._close()
        server, self.server = self.server, None
        if server is not None:
            server.abandon()

    def _close(self) -> None:
        spawned, self.spawned = self.spawned, None
        if spawned is not None:
            spawned.bury()
            spawned.close()
            if self.server is not None:
                self.server.let_go(spawned.pid)
        self._theirs.close()
        self._mine.close()
