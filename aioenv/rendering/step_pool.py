"""The pool that draws what a vector env's steps return, while physics goes on."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from aioenv.errors import RenderError, SlotError, WorkerDied, WorkerStartError
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.memory import check_transport
from aioenv.platform import usable_cpus
from aioenv.process.connection import OnReply
from aioenv.process.restart import RestartPolicy
from aioenv.process.supervisor import Worker
from aioenv.rendering.backends import candidates
from aioenv.rendering.config import RenderConfig, check_devices
from aioenv.rendering.draw_requests import ImageBuffer, ModelChanges, RenderContext, dump_sources
from aioenv.rendering.image_memory import ImageMemory
from aioenv.rendering.step_service import render_service
from aioenv.rendering.watchdog import Watchdog
from aioenv.rendering.workers import MAX_DEFAULT_WORKERS, HasRenderWorkers, RenderWorkers, error_of
from aioenv.spaces.layout import byte_view
from aioenv.state.assets import LATE
from aioenv.state.model_edits import SHOWN
from aioenv.state.render_source import MujocoSource, RenderUpdate

__all__ = ["StepRenderPool"]

_log = logging.getLogger("aioenv")
# Models that a render worker keeps beside those of its slots: terminal observations are of others.
_SPARE_MODELS = 2
# The keys of models that a render worker has, the longest unused first.
_Known: TypeAlias = "OrderedDict[bytes, None]"


class StepRenderPool(HasRenderWorkers):
    """Render workers for the slots of a vector env.

    Slot i is always drawn by render worker i % n, so that nothing depends on who was free.

    Args:
        sources: the distinct models and views.
        slot_source: for each slot, the number of its source.
        config: what to draw.
        transport: how images come back (see `RenderPool`).
        start, channel: how workers are started and reached (see `AsyncVectorEnv`).
        log_prefix: goes before what the workers print.
        start_timeout_s: how long they may take to come up, in seconds.
        restart: start workers again that died, and draw again what they had not; None: their slots have no images.
        timeout_s: how long a worker may finish nothing that it was given before it is late, in seconds; None for ever.
        on_timeout: what becomes of one that is: with "kill" it is killed; with "raise" or "restart" it is killed and
            started again, if `restart` is given, and left alone if not.

    Attributes:
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
        self._timeout_s = timeout_s if restart is not None or on_timeout == "kill" else None
        self._forsakes = on_timeout == "kill"
        self._watches: dict[Worker, Watchdog] = {}
        self.replaced = 0
        self._config = config
        self._sources, self._slot_source = sources, np.asarray(slot_source)
        self._fields: dict[str, npt.NDArray[Any]] = {}
        self._numbered = any(source.numbered for source in sources)
        self._is_numbered = np.array([source.numbered for source in sources])[self._slot_source]
        self._parcels: dict[int, dict[int, RenderUpdate]] = {}  # by slot and number
        self._newest: dict[int, tuple[int, int]] = {}  # of each slot, the numbers of its last model and last long row
        self._known: dict[Worker, _Known] = {}
        default = min(usable_cpus(), MAX_DEFAULT_WORKERS)
        count = min(config.workers or default, len(slot_source))
        devices = check_devices(config.devices)
        self._crew = RenderWorkers(
            partial(render_service, list(sources), config),
            count,
            backends=candidates(config.backend, devices),
            devices=[devices[i % len(devices)] for i in range(count)] if devices is not None else None,
            start=start,
            channel=channel,
            log_prefix=log_prefix,
            start_timeout_s=start_timeout_s,
            restart=restart,
            share=check_transport(transport) != "frames",
        )
        self._blocks = ImageMemory(None)

    @property
    def workers(self) -> Sequence[Worker]:
        """The render workers, once started."""
        return self._crew.workers

    async def start(self) -> None:
        """Start the workers, on the first backend that works. If this is cancelled, they are ended.

        Raises:
            RenderError: if no backend works; the message says what each one reported, and what to install.
            ValueError: if a model does not have the camera that was asked for.
            WorkerStartError: if a worker did not come up for another reason.
        """
        try:
            await self._crew.start()
        except WorkerStartError as exc:
            if isinstance(exc.__cause__, ValueError):
                raise exc.__cause__ from None
            raise
        self._blocks = ImageMemory(self._crew.memory)
        if self._timeout_s is not None:
            for worker in self._crew.workers:
                self._watches[worker] = Watchdog(self._timeout_s, partial(self._on_late, worker))

    def _on_late(self, worker: Worker) -> None:
        """A worker has finished nothing for too long."""
        self.replaced += 1
        if self._forsakes and self._crew.restarter is not None:
            self._crew.restarter.forsake(worker)
        worker.strike(f"it finished no image for timeout_s={self._timeout_s}")

    @property
    def recovering(self) -> list[Worker]:
        """Those that are being started again, or draw their first image."""
        restarter, watches = self._crew.restarter, self._watches
        return [
            w
            for w in self._crew.workers
            if (restarter is not None and restarter.restarts(w)) or (w.busy and w in watches and watches[w].fresh)
        ]

    @property
    def owing(self) -> list[Worker]:
        """Those that have something to draw, or are being started again."""
        recovering = self.recovering
        return [worker for worker in self._crew.workers if worker.busy or worker in recovering]

    def sheet(self, n: int) -> ImageBuffer:
        """What the images of n slots are drawn on; nobody else has it."""
        config = self._config
        return self._blocks.sheet((n, *config.shape), depth=config.depth, segmentation=config.segmentation)

    def show(self, name: str, field: npt.NDArray[Any]) -> None:
        """Draw each slot with its own values of a field of the model, as they are when its state comes.

        Args:
            name: of a field; nothing comes of one that no picture shows, or that comes with the states.
            field: live, of shape `(num_envs, ...)`.
        """
        if name in SHOWN and not any(name in source.fields for source in self._sources):
            self._fields[name] = field

    def receive(self, parcels: Sequence[tuple[int, RenderUpdate]]) -> None:
        """Models have come, of slots whose states come next, and rows that are longer than others.

        Args:
            parcels: slots, and what came.
        """
        came: dict[int, list[RenderUpdate]] = {}
        for slot, parcel in parcels:
            came.setdefault(slot, []).append(parcel)
            if parcel.late:
                _log.warning("slot %d: %s", slot, LATE)
        for slot, each in came.items():
            before, newest = self._parcels.get(slot, {}), self._newest.get(slot, (0, 0))
            # terminal observations may be of these
            kept = {number: before[number] for number in newest if number in before}
            self._parcels[slot] = {**kept, **{parcel.number: parcel for parcel in each}}
            model = max((parcel.number for parcel in each if parcel.key), default=newest[0])
            row = min((parcel.number for parcel in each if not parcel.key), default=newest[1])
            self._newest[slot] = model, row

    def beside(self, slots: Sequence[int], states: npt.NDArray[np.float64]) -> RenderContext:
        """What states that have come now are drawn with: fields that are shown, and models that came later.

        Args:
            slots: theirs.
            states: float64 of shape `(k, state_size)`.
        """
        beside = RenderContext({name: field[list(slots)] for name, field in self._fields.items()}, {}, {})
        if self._numbered:
            for index in np.flatnonzero((states[:, 0] != 0) & self._is_numbered[list(slots)]).tolist():
                parcels = self._parcels.get(slots[index], {})
                number = int(states[index, 0])
                if number in parcels and number < 0:
                    row = beside.rows[index] = parcels[number].data
                    number = int(np.frombuffer(row, np.float64, 1)[0])
                if number:  # without data the render worker says so
                    parcel = parcels.get(number)
                    first = int(self._slot_source[slots[index]])
                    key, data = (b"", b"") if parcel is None else (parcel.key, parcel.data)
                    beside.models[index] = (b"%d %b" % (first, key), (first, data))
        return beside

    def submit(
        self,
        slots: Sequence[int],
        states: npt.NDArray[np.float64],
        sheet: ImageBuffer,
        first: int,
        on_done: Callable[[RenderError | None], None],
        beside: RenderContext | None = None,
    ) -> None:
        """Draw states; never blocks.

        Args:
            slots: k slots.
            states: float64 of shape `(k, state_size)`; copied.
            sheet: what they are drawn on.
            first: the row of the first of them; the others follow, in the order of `slots`.
            on_done: called once, on the loop, when all images are there, or with the first error when all that
                could be drawn is; its `slots` are all that could not, whose rows are zero.
            beside: of `beside`, if that was taken earlier.
        """
        beside = self.beside(slots, states) if beside is None else beside
        numbers = np.asarray(slots, np.int64)
        owners = numbers % len(self._crew.workers)
        shares = [(w, np.flatnonzero(owners == w.index)) for w in self._crew.workers]
        shares = [(worker, rows) for worker, rows in shares if len(rows)]
        left = len(shares)
        first_error: RenderError | None = None
        missing: list[int] = []

        def on_reply(worker: Worker, rows: npt.NDArray[np.int64], outcome: Frame | SlotError) -> None:
            nonlocal left, first_error
            left -= 1
            error = error_of(worker, outcome)
            if error is not None:
                first_error = first_error or error
                missing.extend(numbers[rows].tolist())
                for images in sheet.images.arrays:  # the worker writes there no more
                    images[rows + first] = 0
            if left == 0:
                if first_error is not None:
                    first_error.slots = tuple(sorted(missing))
                on_done(first_error)

        for worker, rows in shares:
            sources = None if len(self._sources) == 1 else self._slot_source[numbers[rows]].tolist()
            self._draw(
                worker,
                states[rows],
                sources,
                _of_rows(beside, rows),
                sheet,
                (rows + first).tolist(),
                partial(on_reply, worker, rows),
            )
        if not shares:
            on_done(None)

    def _draw(
        self,
        worker: Worker,
        states: npt.NDArray[np.float64],
        sources: list[int] | None,
        beside: RenderContext,
        sheet: ImageBuffer,
        rows: list[int],
        on_reply: OnReply,
    ) -> None:
        """Send one request, and again if the worker dies over it and is started again."""
        again = partial(self._draw, worker, states, sources, beside, sheet, rows, on_reply)

        def on_outcome(outcome: Frame | SlotError) -> None:
            # (`again` has the sheet, which must stay as long as the worker may draw on it)
            if isinstance(outcome, WorkerDied):
                self._known.pop(worker, None)
            if watch is not None and sent:
                watch.came(died=isinstance(outcome, WorkerDied))
            restarter = self._crew.restarter
            if restarter is not None and isinstance(outcome, WorkerDied):
                if restarter.hold(worker, outcome, again, on_reply):
                    return
            on_reply(outcome)

        where, into = sheet.ask(rows)
        watch, sent = self._watches.get(worker), False
        try:
            later = self._later(worker, beside) if beside.models or beside.rows else None
            tail = dump_sources(sources, where, beside.edits, later)
            worker.submit(Kind.RENDER, [byte_view(states)], tail, into=into, on_reply=on_outcome)
        except SlotError as exc:
            on_outcome(exc)
            return
        if watch is not None:
            sent = True
            watch.sent()

    def _later(self, worker: Worker, beside: RenderContext) -> ModelChanges:
        """What a worker is told of models, of which it keeps as many as its slots have had last, and a few."""
        known = self._known.setdefault(worker, OrderedDict())
        new: dict[bytes, tuple[int, bytes]] = {}
        for key, data in beside.models.values():
            if key not in known:
                known[key] = None
                new[key] = data
            known.move_to_end(key)
        most = max(len(beside.models), len(self._slot_source) // len(self._crew.workers) + _SPARE_MODELS)
        dropped = [known.popitem(last=False)[0] for _ in range(len(known) - most)]
        return ModelChanges(new, dropped, {index: key for index, (key, _) in beside.models.items()}, beside.rows)

    async def close(self) -> None:
        """End the workers. Idempotent; if this is cancelled, they are killed at once."""
        self._unwatch()
        try:
            await self._crew.close()
        finally:
            self._blocks.clear()

    def abandon(self) -> None:
        """Kill the workers without waiting."""
        self._unwatch()
        self._crew.abandon()
        self._blocks.clear()

    def _unwatch(self) -> None:
        watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.close()


def _of_rows(beside: RenderContext, rows: npt.NDArray[np.int64]) -> RenderContext:
    """Of some rows alone."""
    edits = {name: values[rows] for name, values in beside.edits.items()}
    if not beside.models and not beside.rows:
        return beside._replace(edits=edits)
    where = {row: index for index, row in enumerate(rows.tolist())}
    models = {where[row]: model for row, model in beside.models.items() if row in where}
    return RenderContext(edits, models, {where[row]: data for row, data in beside.rows.items() if row in where})
