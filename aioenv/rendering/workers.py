"""The render workers of a pool: how they start on an OpenGL backend that works, restart, and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aioenv.definitions.restore import FactoryReference
from aioenv.definitions.snapshot import CodeSnapshot
from aioenv.errors import RenderError, StartTimeout, WorkerStartError
from aioenv.ipc.memory import SharedMemory
from aioenv.ipc.messages import dump_code
from aioenv.process.async_resource import gather_internal, wait_through_cancel
from aioenv.process.channel import check_channel
from aioenv.process.launch import check_start
from aioenv.process.restart import Restarter
from aioenv.process.restart_policy import RestartPolicy
from aioenv.process.supervisor import Worker, WorkerState
from aioenv.rendering.backends import backend_environment, no_backend_error, warn_of_software
from aioenv.rendering.images import ImageMemory
from aioenv.rendering.queue import DrawJob, QueuePolicy, RenderQueue, Rows

__all__ = ["RenderWorkers"]


class RenderWorkers:
    """Render workers, all with the same service, each with its queue.

    Args:
        service: a callable that makes the service; the snapshot of its code is taken here.
        count: how many workers.
        policy: of their queues.
        backends: OpenGL backends to try, in order.
        devices: for each worker, the device that it draws on; None to let MuJoCo choose.
        start, channel: how workers are started and reached (see `AsyncVectorEnv`).
        needed: modules that the service will import (see `Worker`).
        log_prefix: the prefix of the workers' output.
        start_timeout_s: how long they may take to start, in seconds.
        restart: restart workers that died; None: they are lost.
        share: have memory that the workers share with this process, where the platform has it.

    Attributes:
        count: how many workers.
        workers: the workers, once started.
        queues: their queues, once started.
        memory: the memory that they share, once started.
        image_memory: allocates the buffers that they draw into.
        restarter: restarts them; None if they are not restarted.
        backend: the OpenGL backend in use, once started.
        renderer: the name of the OpenGL implementation, once started.
    """

    def __init__(
        self,
        service: Any,
        count: int,
        policy: QueuePolicy,
        *,
        backends: Sequence[str],
        devices: Sequence[int] | None = None,
        start: str | None = None,
        channel: str = "auto",
        needed: Sequence[str] = (),
        log_prefix: str | None = None,
        start_timeout_s: float = 60.0,
        restart: RestartPolicy | None = None,
        share: bool = False,
    ) -> None:
        self.workers: list[Worker] = []
        self.queues: list[RenderQueue] = []
        self.memory: SharedMemory | None = None
        self.image_memory = ImageMemory(None)
        self.restarter: Restarter | None = None
        self.backend = ""
        self.renderer = ""
        self._program: CodeSnapshot | None = CodeSnapshot([service], [(0, 1)])
        self.count = count
        self._policy = policy
        self._backends = backends
        self._devices = devices
        self._start_method = check_start(start)
        self._channel = check_channel(channel)
        self._needed = needed
        self._log_prefix = log_prefix
        self._start_timeout_s = start_timeout_s
        self._restart = restart
        self._share = share

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids of the workers."""
        return tuple(worker.pid for worker in self.workers)

    def draw(self, job: DrawJob, slots: Rows) -> None:
        """Share the rows of a job out, given the slot of each: slot i is drawn by worker `i % count`; never blocks.

        So nothing depends on which worker was idle.
        """
        owners = slots % len(self.queues)
        for index, queue in enumerate(self.queues):
            rows = np.flatnonzero(owners == index)
            if len(rows):
                queue.add(job, rows)

    async def start(self) -> None:
        """Start the workers, on the first backend that works. If this is cancelled, they are ended.

        Warns with a SoftwareRenderWarning if the CPU draws though there is a GPU.

        Raises:
            RenderError: if no backend works; the message has the report of each one, and says what to install.
            WorkerStartError: if a worker failed to start for another reason than OpenGL; it has the traceback.
            StartTimeout: if no worker started in time, on any backend.
        """
        self.memory = SharedMemory.create() if self._share else None
        try:
            await self._start_any()
        except BaseException:
            self._free()
            raise
        self.image_memory = ImageMemory(self.memory)

    async def _start_any(self) -> None:
        reasons: list[str] = []
        errors: list[WorkerStartError] = []
        for backend in self._backends:
            try:
                await self._start_all(backend)
            except WorkerStartError as exc:
                cause = exc.__cause__
                if exc.traceback and not isinstance(cause, RenderError):
                    raise
                errors.append(exc)
                reasons.append(f"{backend}: {cause or (str(exc).splitlines() or ['?'])[0]}")
            else:
                return
        if all(isinstance(error, StartTimeout) for error in errors):  # a modder hangs, or the machine
            raise errors[-1]
        raise no_backend_error(reasons) from errors[-1]

    async def _start_all(self, backend: str) -> None:
        """Start the first worker, to see whether the backend works, and then the others."""
        assert self._program is not None
        seen_warnings: set[str] = set()
        workers = [
            Worker(
                dump_code(FactoryReference(0)),
                code=self._program.code(0),
                definitions=self._program.table,
                index=index,
                role="render worker",
                start=self._start_method,
                channel=self._channel,
                env=backend_environment(backend, self._devices[index] if self._devices is not None else None),
                log_prefix=self._log_prefix,
                seen_warnings=seen_warnings,
                needed=self._needed,
                start_timeout_s=self._start_timeout_s,
            )
            for index in range(self.count)
        ]
        self.workers = workers
        for worker in workers:
            worker.memory = self.memory
        try:
            await workers[0].start()
            await gather_internal(*(worker.start() for worker in workers[1:]))
            self.backend, self.renderer = backend, str(workers[0].description)
            warn_of_software(self.renderer, self._backends)  # raises where warnings are errors
        except GeneratorExit:  # its loop was closed
            self.abandon()
            raise
        except BaseException:
            await wait_through_cancel(gather_internal(*(worker.close_now() for worker in workers)))
            self.workers = []
            raise
        if self._restart is None:
            self._forget_code()
        else:
            redraws = self._policy.max_redraws != 0
            meaning = "what it drew is drawn again" if redraws else "a call that it was drawing fails"
            self.restarter = Restarter(workers, self._restart, meaning=meaning, restore=_nothing, lost=lambda *_: None)
        self.queues = [RenderQueue(worker, self.restarter, self._policy) for worker in workers]
        for worker, queue in zip(workers, self.queues, strict=True):
            worker.on_death = queue.on_death
            if worker.state is WorkerState.DEAD:  # it has died while others started
                queue.on_death(worker)

    def fail_all(self, error: Exception) -> None:
        """Fail all rows of all queues, as the pool is being closed."""
        for queue in self.queues:
            queue.close(error)

    async def close(self) -> None:
        """End the workers. Idempotent; if this is cancelled, they are killed at once."""
        try:
            if self.restarter is not None:
                await self.restarter.close()
        finally:
            try:
                await gather_internal(*(worker.close() for worker in self.workers))
            finally:
                self._free()

    def abandon(self) -> None:
        """Kill the workers without waiting; if the loop still runs, their requests fail there."""
        if self.restarter is not None:
            self.restarter.abandon()
        for worker in self.workers:
            worker.abandon()
        self._free()

    def _forget_code(self) -> None:
        """Free the snapshot of the service: no worker is started from it any more."""
        self._program = None
        for worker in self.workers:
            worker.forget_code()

    def _free(self) -> None:
        """Close the memory's descriptor; mappings live as long as the arrays over them."""
        self._forget_code()
        self.image_memory.clear()
        memory, self.memory = self.memory, None
        for worker in self.workers:
            worker.memory = None  # or its next process would be given a descriptor that is closed
        if memory is not None:
            memory.close()


async def _nothing(worker: Worker) -> None:
    """Restore nothing: a render worker needs only what its start tells it."""
