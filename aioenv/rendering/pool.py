"""The parent's side of rendering: a pool of render workers that draws states while physics goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from aioenv.batching.layout import byte_view
from aioenv.errors import RenderError, SlotError, WorkerDied, WorkerStartError
from aioenv.host.mujoco_source import MujocoSource
from aioenv.rendering.backends import INSTALL_HINT, candidates, environment
from aioenv.rendering.batch_renderer import RenderService
from aioenv.rendering.config import RenderConfig
from aioenv.wire.frames import Frame, Kind
from aioenv.wire.messages import dump_code, load
from aioenv.workers.environment import usable_cpus
from aioenv.workers.restart import RestartPolicy
from aioenv.workers.restarter import Restarter
from aioenv.workers.supervisor import OnReply, Worker

__all__ = ["RenderPool"]

MAX_DEFAULT_WORKERS = 4


class RenderPool:
    """Render workers for the slots of a vector env.

    Slot i is always drawn by render worker i % n, so that nothing depends on who was free.

    Args:
        sources: the distinct models and views.
        slot_source: for each slot, the number of its source.
        config: what to draw.
        start, channel: how workers are started and reached (see `AsyncVectorEnv`).
        log_prefix: goes before what the workers print.
        start_timeout_s: how long they may take to come up, in seconds.
        restart: start workers again that died, and draw again what they had not; None: their slots have no images.

    Attributes:
        backend: the OpenGL backend in use, once started.
        renderer: the name of the OpenGL implementation, once started.
        image_shape: (height, width, 3).
    """

    def __init__(
        self,
        sources: Sequence[MujocoSource],
        slot_source: Sequence[int],
        config: RenderConfig,
        *,
        start: str | None = None,
        channel: str = "auto",
        log_prefix: str | None = None,
        start_timeout_s: float = 60.0,
        restart: RestartPolicy | None = None,
    ) -> None:
        self.backend = ""
        self.renderer = ""
        self.image_shape = (config.height, config.width, 3)
        self._service = dump_code(partial(RenderService, list(sources), config))
        self._slot_source = np.asarray(slot_source, np.uint32)
        self._one_source = len(sources) == 1
        self._config = config
        default = min(usable_cpus(), MAX_DEFAULT_WORKERS)
        self._num_workers = min(config.num_workers or default, len(slot_source))
        self._start_method = start
        self._channel = channel
        self._log_prefix = log_prefix
        self._start_timeout_s = start_timeout_s
        self._workers: list[Worker] = []
        self._restart = restart
        self._restarter: Restarter | None = None

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids of the render workers."""
        return tuple(worker.pid for worker in self._workers)

    async def start(self) -> None:
        """Start the workers, on the first backend that works. If this is cancelled, they are ended.

        Raises:
            RenderError: if no backend works; the message says what each one reported, and what to install.
            ValueError: if a model does not have the camera that was asked for.
        """
        reasons: list[str] = []
        for backend in candidates(self._config.backend):
            try:
                await self._start_all(backend)
            except WorkerStartError as exc:
                if isinstance(exc.__cause__, ValueError):
                    raise exc.__cause__ from None
                reason = exc.__cause__ or (str(exc).splitlines() or ["?"])[0]
                reasons.append(f"{backend}: {type(reason).__name__ if exc.__cause__ else ''} {reason}".strip())
            else:
                self.backend = backend
                self.renderer = self._workers[0].description
                return
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise RenderError(f"no OpenGL backend works here:\n{listed}\n{INSTALL_HINT}")

    async def _start_all(self, backend: str) -> None:
        """Start the first worker, to see whether the backend works, and then the others."""
        workers = [
            Worker(
                self._service,
                index=index,
                role="render worker",
                start=self._start_method,
                channel=self._channel,
                env=environment(backend),
                log_prefix=self._log_prefix,
                start_timeout_s=self._start_timeout_s,
            )
            for index in range(self._num_workers)
        ]
        try:
            await workers[0].start()
            await asyncio.gather(*(worker.start() for worker in workers[1:]))
        except BaseException:
            await asyncio.gather(*(worker.kill() for worker in workers))
            raise
        self._workers = workers
        if self._restart is not None:
            self._restarter = Restarter(
                workers, self._restart, meaning="what it drew is drawn again", restore=_nothing, lost=lambda *_: None
            )
            for worker in workers:
                worker.on_death = self._on_death

    def _on_death(self, worker: Worker) -> None:
        if self._restarter is not None:
            self._restarter.begin(worker, worker.death())

    def submit(
        self,
        slots: Sequence[int],
        states: npt.NDArray[np.float64],
        images: npt.NDArray[np.uint8],
        on_done: Callable[[Exception | None], None],
    ) -> None:
        """Draw states; never blocks.

        Args:
            slots: k slots.
            states: float64 of shape `(k, state_size)`; copied.
            images: uint8 of shape `(k, height, width, 3)`, filled in place, in the order of `slots`.
            on_done: called once, on the loop, when all images are there, or with the first error when all that
                could be drawn is.
        """
        numbers = np.asarray(slots)
        owners = numbers % len(self._workers)
        shares = [(w, np.flatnonzero(owners == w.index)) for w in self._workers]
        shares = [(worker, rows) for worker, rows in shares if len(rows)]
        left = len(shares)
        first_error: Exception | None = None

        def on_reply(worker: Worker, outcome: Frame | SlotError) -> None:
            nonlocal left, first_error
            left -= 1
            error = _error_of(worker, outcome)
            first_error = first_error or error
            if left == 0:
                on_done(first_error)

        for worker, rows in shares:
            tail = b"" if self._one_source else self._slot_source[numbers[rows]].tobytes()
            into = [byte_view(images[row]) for row in rows.tolist()]
            self._draw(worker, byte_view(states[rows]), tail, into, partial(on_reply, worker))

    def _draw(
        self, worker: Worker, states: memoryview, tail: bytes, into: Sequence[memoryview], on_reply: OnReply
    ) -> None:
        """Send one request, and again if the worker dies over it and is started again."""

        def on_outcome(outcome: Frame | SlotError) -> None:
            if self._restarter is not None and isinstance(outcome, WorkerDied):
                again = partial(self._draw, worker, states, tail, into, on_reply)
                if self._restarter.hold(worker, outcome, again, on_reply):
                    return
            on_reply(outcome)

        try:
            worker.submit(Kind.RENDER, [states], tail, into=into, on_reply=on_outcome)
        except SlotError as exc:
            on_outcome(exc)

    async def close(self) -> None:
        """End the workers. Idempotent; if this is cancelled, they are killed at once."""
        if self._restarter is not None:
            await self._restarter.close()
        await asyncio.gather(*(worker.close() for worker in self._workers))

    def abandon(self) -> None:
        """Kill the workers without waiting."""
        for worker in self._workers:
            worker.abandon()


async def _nothing(worker: Worker) -> None:
    """A render worker knows nothing that its start does not tell it."""


def _error_of(worker: Worker, outcome: Frame | SlotError) -> Exception | None:
    if isinstance(outcome, SlotError):
        return RenderError(f"render worker {worker.index} is gone: {outcome}")
    if outcome.kind is Kind.FAILURE:
        failure = load(outcome.tail)
        text = f"{failure.type_name}: {failure.message}\n{failure.traceback}"
        return RenderError(f"render worker {worker.index} failed: {text}")
    return None
