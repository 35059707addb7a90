"""What was asked of a vector env in this process, and the results that nobody has taken yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from aioenv.core.episode_tracker import InProcessEpisodeTracker
from aioenv.core.images.image_requests import ImageRequest, StepImages
from aioenv.core.images.pixel_renderer import ResultPixelRenderer
from aioenv.core.results import Ready, ResetResult, StepResult
from aioenv.core.slots import SlotState, SlotTable
from aioenv.errors import ClosedError, EnvError
from aioenv.inprocess.pieces import gather_infos, gather_obs

__all__ = ["InProcessRequest", "InProcessRequests"]

Slots = npt.NDArray[np.int64]

_ALL = slice(None)
_NONE = np.zeros(0, np.bool_)


class InProcessRequest:
    """One step or reset.

    Attributes:
        slots: int64, ascending: those whose results it gives. The value is a batch of all slots all the same.
        waiting: whether somebody awaits it; otherwise `recv` takes it.
        value: the result, or the error; None until it is there.
        untaken: bool `(len(slots),)`, which of them nobody has taken yet, once `recv` may take them.
        done: resolved when the value is there.
        shot: the images of it, if images are drawn.
        resets: the slots that it resets; None: it is a step.
        counted: whether those who count episodes know of it.
        beside: the images of other slots that are seen, too, as they were.
        drawn: the slots whose images are drawn, if observations are images.
    """

    __slots__ = ("beside", "counted", "done", "drawn", "resets", "shot", "slots", "untaken", "value", "waiting")

    def __init__(self, slots: Slots, done: asyncio.Future[None], *, waiting: bool, resets: Slots | None = None) -> None:
        self.slots = self.drawn = slots
        self.resets = resets
        self.counted = False
        self.waiting = waiting
        self.value: StepResult | ResetResult | EnvError | None = None
        self.untaken = _NONE
        self.done = done
        self.shot: ImageRequest | None = None
        self.beside: dict[int, ImageRequest] = {}


class InProcessRequests:
    """The flights of one vector env.

    Args:
        table: the states of its slots, kept up to date here.
        num_envs: how many there are.
        error_of: what the vector env's error is if its result can't be taken.

    Attributes:
        abandoned: cancelled or timed out; their results wait for `recv`.
        images: where the states that come with results go; None if nobody wants images.
        painter: draws the images that are observations; None if there are none.
        episodes: counts episodes; None: nobody does.
    """

    def __init__(self, table: SlotTable, num_envs: int, error_of: Callable[[BaseException], EnvError]) -> None:
        self._table = table
        self._error_of = error_of
        self._n = num_envs
        self._all = np.arange(num_envs)
        self._loop = asyncio.get_running_loop()
        self._ready: list[InProcessRequest] = []
        self._open: set[InProcessRequest] = set()  # in flight
        self.abandoned: list[InProcessRequest] = []
        self._arrival = asyncio.Event()
        self._closing = False
        self.images: StepImages | None = None
        self.painter: ResultPixelRenderer | None = None
        self.episodes: InProcessEpisodeTracker | None = None

    def begin(
        self, slots: Slots, *, waiting: bool, resets: Slots | None = None, shows_all: bool = False
    ) -> InProcessRequest:
        """Something is asked of these slots; with `shows_all` the others are seen, too, as they were.

        Raises:
            ClosedError: if nothing comes any more.
        """
        if self._closing:  # while a rollout waited for its policy, say
            raise ClosedError("the vector env was closed meanwhile")
        flight = InProcessRequest(slots, self._loop.create_future(), waiting=waiting, resets=resets)
        self._table.move(_ALL if len(slots) == self._n else slots, SlotState.IN_FLIGHT)
        self._open.add(flight)
        if self.images is not None and len(slots):
            flight.shot = self.images.begin(slots)
        if shows_all:
            flight.drawn = self._all
            if self.images is not None:
                flight.beside = self.images.newest(np.setdiff1d(self._all, slots))
        return flight

    def arrive(self, flight: InProcessRequest, value: Any) -> None:
        """Its result is there; where observations are images, it is when they are drawn."""
        if self.episodes is not None and not flight.counted:
            try:
                self.episodes.note(flight.slots, flight.resets, value)
            except Exception as exc:  # whatever it is: nobody may wait for ever
                value = self._error_of(exc)
        if self.images is None and self.painter is None:
            self._land(flight, value)
            return
        try:
            self._have_drawn(flight, value)
        except Exception as exc:
            self._land(flight, self._error_of(exc))

    def _have_drawn(self, flight: InProcessRequest, value: Any) -> None:
        shot, images = flight.shot, self.images
        if images is not None and shot is not None:
            if shot.states is None:
                assert isinstance(value, EnvError)
                images.give_up(None, None, shot, shot.slots, value)
            else:
                images.draw(shot, shot.slots, shot.states)
        if self.painter is not None and not isinstance(value, EnvError):
            self.painter.paint(value, flight.drawn, partial(self._land, flight))
        else:
            self._land(flight, value)

    def _land(self, flight: InProcessRequest, value: Any) -> None:
        if isinstance(value, EnvError) and len(flight.slots):
            value.concern(tuple(flight.slots.tolist()))
        flight.value = value
        if not flight.done.done():
            flight.done.set_result(None)
        if not flight.waiting:
            self._offer(flight)

    def settle(self, flight: InProcessRequest) -> None:
        """Its result is handed out: the slots are free again."""
        self._open.discard(flight)
        self.release(_ALL if len(flight.slots) == self._n else flight.slots)
        if self.images is not None:
            # (one without states is of a step that has failed)
            self.images.show_again({slot: shot for slot, shot in flight.beside.items() if shot.states is not None})
            self._show([(flight, flight.slots)])

    def _show(self, taken: list[tuple[InProcessRequest, Slots]]) -> None:
        """One result is handed out, of so many flights."""
        if self.images is None:
            return
        shots = [(flight.shot, slots) for flight, slots in taken if flight.shot is not None]
        for shot, slots in shots:
            self.images.show(shot, slots)
        if shots:
            self.images.publish()

    def release(self, slots: Slots | slice) -> None:
        """These slots are free again."""
        self._table.move(slots, SlotState.IDLE)
        self._arrival.set()  # there may be nothing left to wait for

    def abandon(self, flight: InProcessRequest) -> None:
        """Nobody awaits it any more; a cancelled future is replaced by one that tells when the value is there."""
        flight.waiting = False
        self.abandoned.append(flight)
        if flight.done.cancelled():
            flight.done = self._loop.create_future()
        if flight.value is not None:
            if not flight.done.done():
                flight.done.set_result(None)
            self._offer(flight)

    def close(self) -> None:
        """Nothing comes any more: end every wait."""
        self._closing = True
        self._arrival.set()
        for flight in self._open:
            if not flight.done.done():
                flight.done.set_result(None)

    def _offer(self, flight: InProcessRequest) -> None:
        self._open.discard(flight)
        flight.untaken = np.ones(len(flight.slots), np.bool_)
        if not len(flight.slots):  # of a batch of which all slots are paused
            return
        if flight.resets is not None and not len(flight.resets):  # a look: nothing was asked of the env
            self.release(flight.slots)
            return
        self._ready.append(flight)
        self._table.move(flight.slots, SlotState.READY)
        self._arrival.set()

    def drop_abandoned(self) -> list[int]:
        """Forget the results of what was abandoned, all of which is there; gives slots whose episodes ended in it."""
        ended: list[int] = []
        for flight in self.abandoned:
            if flight not in self._ready:
                continue
            self._ready.remove(flight)
            left = flight.slots[flight.untaken]
            self._table.move(left, SlotState.IDLE)
            if isinstance(flight.value, EnvError):
                self._table.fail(flight.value)
            elif isinstance(flight.value, StepResult):
                ends = flight.value.terminated | flight.value.truncated
                self._table.note_ends(left, ends[left])  # what was taken may have been reset since
                ended += left[ends[left]].tolist()
            self._table.note_taken(left)
        self.abandoned = []
        return sorted(ended)

    @property
    def outstanding(self) -> bool:
        """Whether anything is in flight or ready."""
        return bool(self._ready) or self._table.count(SlotState.IN_FLIGHT) > 0

    def has(self, min_slots: int) -> bool:
        """Whether so many slots are ready, or all that can be."""
        ready = self._table.count(SlotState.READY)
        return ready >= min(min_slots, ready + self._table.count(SlotState.IN_FLIGHT))

    async def wait(self, min_slots: int) -> None:
        """Wait until it is so.

        Raises:
            ClosedError: if the vector env is closed meanwhile.
        """
        while not self.has(min_slots):
            self._arrival.clear()
            await self._arrival.wait()
            if self._closing:
                raise ClosedError("the vector env was closed while recv() waited")

    def take(self, max_slots: int | None, single: Space[Any], batched: Space[Any]) -> tuple[Ready, Sequence[EnvError]]:
        """The results of up to `max_slots` slots, oldest first, in the order of slots; and the errors among them."""
        room = self._n if max_slots is None else max_slots
        taken: list[tuple[InProcessRequest, Slots]] = []
        for flight in self._ready:
            rows = np.flatnonzero(flight.untaken)
            if not isinstance(flight.value, EnvError):  # that is one error, of all of its slots
                rows = rows[:room]
            if len(rows):
                room -= len(rows)
                flight.untaken[rows] = False
                taken.append((flight, flight.slots[rows]))
        self._ready = [flight for flight in self._ready if flight.untaken.any()]
        self.abandoned = [flight for flight in self.abandoned if flight.value is None or flight.untaken.any()]
        for _, mine in taken:
            self._table.move(mine, SlotState.IDLE)
        self._show(taken)
        errors = [flight.value for flight, _ in taken if isinstance(flight.value, EnvError)]
        good = [(flight, mine) for flight, mine in taken if not isinstance(flight.value, EnvError)]
        return self._ready_of(good, single, batched), errors

    def _ready_of(self, taken: list[tuple[InProcessRequest, Slots]], single: Space[Any], batched: Space[Any]) -> Ready:
        if len(taken) == 1 and len(taken[0][1]) == self._n:
            return self._whole(*taken[0])
        slots = np.concatenate([mine for _, mine in taken] or [np.zeros(0, np.int64)])
        order = np.argsort(slots)
        where = np.argsort(order)  # where the i-th taken slot stands in the result
        n = len(slots)
        reward, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        place: list[Slots] = []
        for flight, mine in taken:
            place.append(where[: len(mine)])
            where = where[len(mine) :]
            if isinstance(flight.value, StepResult):
                reward[place[-1]] = flight.value.reward[mine]
                terminated[place[-1]] = flight.value.terminated[mine]
                truncated[place[-1]] = flight.value.truncated[mine]
        values: list[Any] = [flight.value for flight, _ in taken]
        obs = gather_obs(single, batched, [(v.obs, mine) for v, (_, mine) in zip(values, taken, strict=True)], order)
        infos = [(v.info, mine) for v, (_, mine) in zip(values, taken, strict=True)]
        return Ready(slots[order], obs, reward, terminated, truncated, gather_infos(infos, self._n, place, n))

    def _whole(self, flight: InProcessRequest, slots: Slots) -> Ready:
        value = flight.value
        if isinstance(value, StepResult):
            return Ready(slots.copy(), *value)
        assert isinstance(value, ResetResult)
        none, never = np.zeros(self._n), np.zeros(self._n, np.bool_)
        return Ready(slots.copy(), value.obs, none, never, never.copy(), value.info)
