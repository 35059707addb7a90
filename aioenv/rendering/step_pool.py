"""`StepRenderPool`: render workers that draw the states that a vector env's steps return, while physics goes on."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioenv.errors import RenderError, WorkerStartError
from aioenv.ipc.memory import check_transport
from aioenv.platform import usable_cpus
from aioenv.process.restart_policy import RestartPolicy
from aioenv.process.supervisor import Worker
from aioenv.rendering.backends import candidate_backends
from aioenv.rendering.config import RenderConfig, parse_devices
from aioenv.rendering.draw_requests import DrawRequest, Edits, ModelChanges, dump_request
from aioenv.rendering.images import ImageArrays, ImageBuffer
from aioenv.rendering.queue import DrawJob, PackedRequest, QueuePolicy, Rows
from aioenv.rendering.render_service import step_service
from aioenv.rendering.workers import RenderWorkers
from aioenv.spaces.layout import byte_view
from aioenv.state.assets import LATE
from aioenv.state.model_edits import SHOWN
from aioenv.state.render_source import MujocoSource, RenderUpdate, process_of

__all__ = ["RenderContext", "StepRenderPool"]

_log = logging.getLogger("aioenv")

# The processes of a slot whose models are kept: those of its two envs, and earlier ones that a result may still show.
_PROCESSES = 4

_MAX_DEFAULT_WORKERS = 4
# Models that a render worker keeps besides those of its slots: terminal observations have other ones.
_SPARE_MODELS = 2


class RenderContext(NamedTuple):
    """The edits and models with which some states of a vector env are drawn, as they were when the states arrived.

    Attributes:
        edits: fields of the model, one row a state.
        models: for states whose model has come since the start, by their number: the model's key, and its entry in
            `ModelChanges.new`.
        rows: states that are longer than a row.
    """

    edits: Edits
    models: dict[int, tuple[bytes, tuple[int, bytes]]]
    rows: dict[int, bytes]

    def of_rows(self, rows: Rows) -> RenderContext:
        """Return the context of some of the states."""
        edits = {name: values[rows] for name, values in self.edits.items()}
        if not self.models and not self.rows:
            return self._replace(edits=edits)
        places = {row: index for index, row in enumerate(rows.tolist())}
        models = {places[row]: model for row, model in self.models.items() if row in places}
        return RenderContext(edits, models, {places[row]: data for row, data in self.rows.items() if row in places})


class _KnownModels:
    """The models that a process has, by key, the least recently used first."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.keys: OrderedDict[bytes, None] = OrderedDict()


class StepRenderPool:
    """Render workers for the slots of a vector env.

    Slot i is always drawn by render worker `i % n`, so that nothing depends on which worker was idle.

    Args:
        sources: the distinct models and views.
        slot_source: for each slot, the number of its source.
        config: what to draw.
        transport: how images come back (see `RenderPool`).
        start, channel: how workers are started and reached (see `AsyncVectorEnv`).
        log_prefix: the prefix of the workers' output.
        start_timeout_s: how long they may take to start, in seconds.
        restart: restart workers that died, and draw their remaining states; None: their slots have no images.
        timeout_s: how long a worker may finish nothing that it was given before it is late, in seconds; None for ever.
        on_timeout: with "kill" a late worker is killed and not replaced. With "raise" or "restart" it is killed and
            restarted if `restart` is given, and left alone otherwise.

    Attributes:
        draws: whether it draws; with `workers=0` it keeps the models of the slots alone.
        replaced: how many workers were killed for being late.
    """

    def __init__(
        self,
        sources: Sequence[MujocoSource],
        slot_source: Sequence[int],
        config: RenderConfig,
        *,
        transport: str = "auto",
        start: str | None = None,
        channel: str = "auto",
        log_prefix: str | None = None,
        start_timeout_s: float = 60.0,
        restart: RestartPolicy | None = None,
        timeout_s: float | None = None,
        on_timeout: str = "raise",
    ) -> None:
        self._kills_for_good = on_timeout == "kill"
        self._timeout_s = timeout_s if restart is not None or self._kills_for_good else None
        self.replaced = 0
        self.draws = config.workers != 0
        self._config = config
        self._sources, self._slot_source = sources, np.asarray(slot_source)
        self._fields: dict[str, npt.NDArray[Any]] = {}
        self._numbered = any(source.numbered for source in sources)
        self._is_numbered = np.array([source.numbered for source in sources])[self._slot_source]
        self._updates: dict[int, dict[int, RenderUpdate]] = {}  # by slot and number
        # by slot and process, of which it may have two: the numbers of the last model and the last long row
        self._newest: dict[int, dict[int, tuple[int, int]]] = {}
        self._known: dict[Worker, _KnownModels] = {}
        wanted = min(usable_cpus(), _MAX_DEFAULT_WORKERS) if config.workers is None else config.workers
        count = min(wanted, len(slot_source))
        devices = parse_devices(config.devices)
        self._workers = RenderWorkers(
            partial(step_service, list(sources), config),
            count,
            QueuePolicy(self._timeout_s, None, None, self._on_late),
            backends=candidate_backends(config.backend, devices),
            devices=[devices[i % len(devices)] for i in range(count)] if devices is not None else None,
            start=start,
            channel=channel,
            log_prefix=log_prefix,
            start_timeout_s=start_timeout_s,
            restart=restart,
            share=check_transport(transport) != "frames",
        )

    # ------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Start the workers, on the first backend that works. If this is cancelled, they are ended.

        Raises:
            RenderError: if no backend works; the message has the report of each one, and says what to install.
            ValueError: if a model does not have the camera that was asked for.
            WorkerStartError: if a worker failed to start for another reason.
        """
        if not self.draws:
            return
        try:
            await self._workers.start()
        except WorkerStartError as exc:
            if isinstance(exc.__cause__, ValueError):
                raise exc.__cause__ from None
            raise

    async def close(self) -> None:
        """End the workers. Idempotent; if this is cancelled, they are killed at once."""
        try:
            self._workers.fail_all(RenderError("the render workers were closed"))
        finally:
            await self._workers.close()

    def abandon(self) -> None:
        """Kill the workers without waiting."""
        self._workers.abandon()

    def _on_late(self, worker: Worker) -> None:
        """Count a worker that is about to be killed; with on_timeout="kill" it is not restarted."""
        self.replaced += 1
        if self._kills_for_good and self._workers.restarter is not None:
            self._workers.restarter.disable_restart(worker)

    @property
    def sources(self) -> Sequence[MujocoSource]:
        """The distinct models and views at the start."""
        return self._sources

    def source_numbers(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return for each of these slots the number of its source at the start."""
        numbers: npt.NDArray[np.int64] = self._slot_source[slots]
        return numbers

    @property
    def workers(self) -> Sequence[Worker]:
        """The render workers, once started."""
        return self._workers.workers

    @property
    def backend(self) -> str:
        """The OpenGL backend in use, once started."""
        return self._workers.backend

    @property
    def renderer(self) -> str:
        """The name of the OpenGL implementation, once started."""
        return self._workers.renderer

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids of the render workers, once started."""
        return self._workers.pids

    @property
    def recovering(self) -> list[Worker]:
        """The workers that are being restarted, or draw their first images."""
        restarter, queues = self._workers.restarter, self._workers.queues
        return [
            worker
            for worker, queue in zip(self.workers, queues, strict=True)
            if (restarter is not None and restarter.is_restarting(worker))
            or (self._timeout_s is not None and queue.recovering)
        ]

    @property
    def owing(self) -> list[Worker]:
        """The workers that have something to draw, or are being restarted."""
        recovering = self.recovering
        return [worker for worker in self.workers if worker.busy or worker in recovering]

    # ------------------------------------------------------------ models

    def show_field(self, name: str, field: npt.NDArray[Any]) -> None:
        """Draw each slot with its own values of a field of the model, as they are when its state arrives.

        Args:
            name: of a field; a no-op if no image depends on it, or if it comes with the states.
            field: live, of shape `(num_envs, ...)`.
        """
        if name in SHOWN and not any(name in source.fields for source in self._sources):
            self._fields[name] = field

    def update_models(self, updates: Sequence[tuple[int, RenderUpdate]]) -> None:
        """Store new models, and states that are longer than a row, before the states that are drawn with them.

        Args:
            updates: slots, each with its update.
        """
        by_slot: dict[int, list[RenderUpdate]] = {}
        for slot, update in updates:
            by_slot.setdefault(slot, []).append(update)
            if update.late:
                _log.warning("slot %d: %s", slot, LATE)
        for slot, each in by_slot.items():
            before, by_process = self._updates.get(slot, {}), self._newest.setdefault(slot, {})
            # terminal observations, and those of the slot's other env, may be of these
            kept = {number: before[number] for newest in by_process.values() for number in newest if number in before}
            self._updates[slot] = {**kept, **{update.number: update for update in each}}
            process = process_of(each[0].number)
            newest = by_process.pop(process, (0, 0))
            model = max((update.number for update in each if update.key), default=newest[0])
            row = min((update.number for update in each if not update.key), default=newest[1])
            by_process[process] = model, row
            while len(by_process) > _PROCESSES:
                del by_process[next(iter(by_process))]  # of one that has ended

    def context_of(self, slots: Sequence[int], states: npt.NDArray[np.float64]) -> RenderContext:
        """Return what states that arrive now are drawn with.

        Args:
            slots: the slot of each state.
            states: float64 of shape `(k, state_size)`.
        """
        context = RenderContext({name: field[list(slots)] for name, field in self._fields.items()}, {}, {})
        if self._numbered:
            for index in np.flatnonzero((states[:, 0] != 0) & self._is_numbered[list(slots)]).tolist():
                updates = self._updates.get(slots[index], {})
                number = int(states[index, 0])
                if number in updates and number < 0:
                    row = context.rows[index] = updates[number].data
                    number = int(np.frombuffer(row, np.float64, 1)[0])
                if number:  # without data the render worker says so
                    update = updates.get(number)
                    first = int(self._slot_source[slots[index]])
                    key, data = (b"", b"") if update is None else (update.key, update.data)
                    context.models[index] = (b"%d %b" % (first, key), (first, data))
        return context

    def _model_changes(self, worker: Worker, context: RenderContext) -> ModelChanges | None:
        """Return the changes to the models of a worker, which keeps as many as its slots had last, and a few more."""
        if not context.models and not context.rows:
            return None
        known = self._known.get(worker)
        if known is None or known.generation != worker.generation:
            known = self._known[worker] = _KnownModels(worker.generation)
        keys = known.keys
        new: dict[bytes, tuple[int, bytes]] = {}
        for key, data in context.models.values():
            if key not in keys:
                keys[key] = None
                new[key] = data
            keys.move_to_end(key)
        most = max(len(context.models), len(self._slot_source) // self._workers.count + _SPARE_MODELS)
        dropped = [keys.popitem(last=False)[0] for _ in range(len(keys) - most)]
        return ModelChanges(new, dropped, {index: key for index, (key, _) in context.models.items()}, context.rows)

    # ------------------------------------------------------------ drawing

    def new_buffer(self, n: int) -> ImageBuffer:
        """Return a buffer for the images of n slots that is used for nothing else."""
        config = self._config
        shape = (n, *config.shape)
        return self._workers.image_memory.new_buffer(shape, depth=config.depth, segmentation=config.segmentation)

    def submit(
        self,
        slots: Sequence[int],
        states: npt.NDArray[np.float64],
        buffer: ImageBuffer,
        first: int,
        on_done: Callable[[RenderError | None], None],
        context: RenderContext | None = None,
    ) -> None:
        """Draw states; never blocks.

        Args:
            slots: k slots.
            states: float64 of shape `(k, state_size)`; copied.
            buffer: the arrays that are drawn into.
            first: the row of the first state; the others follow, in the order of `slots`.
            on_done: called once, on the loop, when all images are drawn or have failed, with the first error or None.
                The error's `slots` are those of all failed images, whose rows are zero.
            context: of `context_of`, if that was called earlier.
        """
        context = self.context_of(slots, states) if context is None else context
        numbers = np.asarray(slots, np.int64)
        sources = None if len(self._sources) == 1 else self._slot_source[numbers]
        job = _StepJob(numbers, states.copy(), sources, context, self._model_changes, buffer, first, on_done)
        if len(numbers):
            self._workers.draw(job, numbers)
        else:
            on_done(None)


class _StepJob(DrawJob):
    """Some slots of a step. Each share that a worker draws is one request: it is as small as the step is.

    Args:
        slots: the slots.
        states: their states, not shared with the caller.
        sources: the number of each slot's source; None if there is only one.
        context: the edits and models that they are drawn with.
        changes: makes the changes to the models of a worker.
        buffer, first, on_done: see `StepRenderPool.submit`.
    """

    wanted = True

    def __init__(
        self,
        slots: Rows,
        states: npt.NDArray[np.float64],
        sources: npt.NDArray[np.int64] | None,
        context: RenderContext,
        changes: Callable[[Worker, RenderContext], ModelChanges | None],
        buffer: ImageBuffer,
        first: int,
        on_done: Callable[[RenderError | None], None],
    ) -> None:
        self._slots = slots
        self._states = states
        self._sources = sources
        self._context = context
        self._changes = changes
        self._buffer = buffer
        self._first = first
        self._on_done = on_done
        self._undrawn = len(slots)
        self._error: RenderError | None = None
        self._missing: list[int] = []

    @property
    def chunk_rows(self) -> int:
        """All rows of a share."""
        return len(self._slots)

    def pack(self, worker: Worker, rows: Rows) -> PackedRequest:
        """Make the request for a share."""
        location, into = self._buffer.target((rows + self._first).tolist())
        whole = len(rows) == len(self._slots)
        context = self._context if whole else self._context.of_rows(rows)
        states = self._states if whole else self._states[rows]
        sources = None if self._sources is None else self._sources[rows].tolist()
        models = self._changes(worker, context)
        request = DrawRequest(None, location, context.edits, sources=sources, models=models)
        return PackedRequest(byte_view(states), dump_request(request), into)

    def on_drawn(self, rows: Rows, staged: ImageArrays | None, seconds: float) -> None:
        """Note that the rows of a share are drawn."""
        self._end(rows)

    def on_failed(self, rows: Rows, error: Exception) -> None:
        """Zero the rows of a share, which its worker does not write to any more."""
        if not isinstance(error, RenderError):
            reason, error = error, RenderError(f"states can't be drawn: {type(error).__name__}: {error}")
            error.__cause__ = reason
        self._error = self._error or error
        self._missing.extend(self._slots[rows].tolist())
        for images in self._buffer.images.arrays:
            images[rows + self._first] = 0
        self._end(rows)

    def _end(self, rows: Rows) -> None:
        self._undrawn -= len(rows)
        if self._undrawn == 0:
            if self._error is not None:
                self._error.slots = tuple(sorted(self._missing))
            self._on_done(self._error)
