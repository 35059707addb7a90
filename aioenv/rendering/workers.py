"""The render workers of a pool: how they come up on an OpenGL backend that works, are started again, and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aioenv.definitions.restore import Shipped
from aioenv.definitions.snapshot import CodeSnapshot
from aioenv.errors import RenderError, SlotError, StartTimeout, WorkerStartError
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.memory import Shared
from aioenv.ipc.messages import dump_code, load
from aioenv.process.async_resource import to_the_end, together
from aioenv.process.channel import check_channel
from aioenv.process.launch import check_start
from aioenv.process.restart import Restarter, RestartPolicy
from aioenv.process.supervisor import Worker
from aioenv.rendering.backends import environment, no_backend_works, warn_of_software

__all__ = ["MAX_DEFAULT_WORKERS", "HasRenderWorkers", "RenderWorkers", "error_of"]

MAX_DEFAULT_WORKERS = 4


class RenderWorkers:
    """Render workers, all with the same service.

    Args:
        service: a callable that makes the service; the snapshot of what it reaches is taken here.
        count: how many workers.
        backends: OpenGL backends to try, in order.
        devices: for each worker, the device that it is to draw on, or None to let MuJoCo choose.
        start, channel: how workers are started and reached (see `AsyncVectorEnv`).
        needed: modules that the service will import (see `Worker`).
        log_prefix: goes before what the workers print.
        start_timeout_s: how long they may take to come up, in seconds.
        restart: start workers again that died; None: they are lost.
        redraws: whether what such a worker drew is drawn again, for the log.
        share: have memory that the workers share with this process, where the platform has it.

    Attributes:
        count: how many workers.
        workers: the workers, once started.
        memory: what they share, once started.
        restarter: what starts them again, if anything does.
        backend: the OpenGL backend in use, once started.
        renderer: the name of the OpenGL implementation, once started.
        on_death: called with each worker that has died by itself, after its requests have failed.
    """

    def __init__(
        self,
        service: Any,
        count: int,
        *,
        backends: Sequence[str],
        devices: Sequence[int] | None = None,
        start: str | None = None,
        channel: str = "auto",
        needed: Sequence[str] = (),
        log_prefix: str | None = None,
        start_timeout_s: float = 60.0,
        restart: RestartPolicy | None = None,
        redraws: bool = True,
        share: bool = False,
    ) -> None:
        self.workers: list[Worker] = []
        self.memory: Shared | None = None
        self.restarter: Restarter | None = None
        self.backend = ""
        self.renderer = ""
        self.on_death: Callable[[Worker], None] = self.bring_back
        self._program: CodeSnapshot | None = CodeSnapshot([service], [(0, 1)])
        self.count = count
        self._backends = backends
        self._devices = devices
        self._start_method = check_start(start)
        self._channel = check_channel(channel)
        self._needed = needed
        self._log_prefix = log_prefix
        self._start_timeout_s = start_timeout_s
        self._restart = restart
        self._meaning = "what it drew is drawn again" if redraws else "a call that it was drawing fails"
        self._share = share

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids of the workers."""
        return tuple(worker.pid for worker in self.workers)

    async def start(self) -> None:
        """Start the workers, on the first backend that works. If this is cancelled, they are ended.

        Warns with a SoftwareRenderWarning if the CPU draws though there is a GPU.

        Raises:
            RenderError: if no backend works; the message says what each one reported, and what to install.
            WorkerStartError: if a worker did not come up for a reason that is not OpenGL's; it has the traceback.
            StartTimeout: if none came up in time, on any backend.
        """
        self.memory = Shared.create() if self._share else None
        try:
            await self._start_any()
        except BaseException:
            self._let_go()
            raise

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
                self.backend = backend
                self.renderer = str(self.workers[0].description)
                warn_of_software(self.renderer, self._backends)
                return
        if all(isinstance(error, StartTimeout) for error in errors):  # what hangs is a modder, or the machine
            raise errors[-1]
        raise no_backend_works(reasons) from errors[-1]

    async def _start_all(self, backend: str) -> None:
        """Start the first worker, to see whether the backend works, and then the others."""
        assert self._program is not None
        said: set[str] = set()
        workers = [
            Worker(
                dump_code(Shipped(0)),
                code=self._program.code(0),
                definitions=self._program.table,
                index=index,
                role="render worker",
                start=self._start_method,
                channel=self._channel,
                env=environment(backend, self._devices[index] if self._devices is not None else None),
                log_prefix=self._log_prefix,
                said=said,
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
            await together(*(worker.start() for worker in workers[1:]))
        except GeneratorExit:  # its loop was closed
            self.abandon()
            raise
        except BaseException:
            await to_the_end(together(*(worker.kill() for worker in workers)))
            self.workers = []
            raise
        if self._restart is None:
            self._forget_code()
        else:
            self.restarter = Restarter(
                workers, self._restart, meaning=self._meaning, restore=_nothing, lost=lambda *_: None
            )
        for worker in workers:
            worker.on_death = lambda worker: self.on_death(worker)

    def bring_back(self, worker: Worker) -> None:
        """Start a worker again that has died, if that is to be done."""
        if self.restarter is not None:
            self.restarter.begin(worker, worker.death())

    async def close(self) -> None:
        """End the workers. Idempotent; if this is cancelled, they are killed at once."""
        try:
            if self.restarter is not None:
                await self.restarter.close()
        finally:
            try:
                await together(*(worker.close() for worker in self.workers))
            finally:
                self._let_go()

    def abandon(self) -> None:
        """Kill the workers without waiting; where a loop still runs, what they owe fails there."""
        if self.restarter is not None:
            self.restarter.abandon()
        for worker in self.workers:
            worker.abandon()
        self._let_go()

    def _forget_code(self) -> None:
        """Let go of the snapshot of the service: no worker is started from it any more."""
        self._program = None
        for worker in self.workers:
            worker.forget_code()

    def _let_go(self) -> None:
        """Close the memory's descriptor: what is mapped lives as long as anybody has an array of it."""
        self._forget_code()
        memory, self.memory = self.memory, None
        for worker in self.workers:
            worker.memory = None  # or its next process would be given a descriptor that is closed
        if memory is not None:
            memory.close()


class HasRenderWorkers:
    """What a pool tells of its workers."""

    _crew: RenderWorkers

    @property
    def backend(self) -> str:
        """The OpenGL backend in use, once started."""
        return self._crew.backend

    @property
    def renderer(self) -> str:
        """The name of the OpenGL implementation, once started."""
        return self._crew.renderer

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids of the render workers, once started."""
        return self._crew.pids


async def _nothing(worker: Worker) -> None:
    """A render worker knows nothing that its start does not tell it."""


def error_of(worker: Worker, outcome: Frame | SlotError) -> RenderError | None:
    """What a reply says went wrong, if anything did."""
    if isinstance(outcome, SlotError):
        error = RenderError(f"render worker {worker.index} is gone: {outcome}")
        error.__cause__ = outcome
        for note in getattr(outcome, "__notes__", ()):
            error.add_note(note)
        return error
    if outcome.kind is Kind.FAILURE:
        failure = load(outcome.tail)
        text = f"{failure.type_name}: {failure.message}\n{failure.traceback}"
        return RenderError(f"render worker {worker.index} failed: {text}")
    return None
