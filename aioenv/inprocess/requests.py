"""Requests to an env in this process, and their results until the caller takes them.

started ──complete──▶ (images drawn) ──▶ done ──┬─ awaited by `step`, `reset`: hand_out
                                                └─ sent by `send`, or abandoned: take_ready, discard_abandoned
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from aioenv.core.episode_tracker import InProcessEpisodeTracker
from aioenv.core.images import ResultPixelRenderer
from aioenv.core.results import Ready, ResetResult, StepResult
from aioenv.core.slots import SlotState, SlotTable
from aioenv.errors import ClosedError, EnvError
from aioenv.rendering.step_images import ImageRequest, StepImages
from aioenv.spaces.layout import Layout

if TYPE_CHECKING:
    from aioenv.core.backend import ResultObserver

__all__ = [
    "InProcessRequest",
    "InProcessRequests",
    "LastResults",
    "clear_other_slots",
    "gather_infos",
    "gather_obs",
    "owned",
    "owned_info",
]


Rows = npt.NDArray[np.int64]

_NUMERIC = "biufc"


# ---------------------------------------------------------------- ownership


def owned(value: Any) -> Any:
    """Return a batch in arrays that no other code holds: copied unless the env has dropped them.

    An array is returned as it is if it owns its memory and only the caller of this function has a reference. So is a
    value that is not an array.
    """
    if isinstance(value, np.ndarray):
        if value.flags.owndata and _ref_count(value) <= _UNSHARED:
            return value
        return value.copy()
    if isinstance(value, Mapping):
        return {key: owned(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(owned(item) for item in value)
    return value


def owned_info(info: Any) -> Any:
    """Return an info dict in arrays that no other code holds.

    If the env has dropped the dict, too, it is updated in place, array by array.
    """
    if type(info) is not dict or _ref_count(info) > _UNSHARED:
        return owned(info)
    for key in _shared_keys(info, _UNSHARED_IN_DICT):
        info[key] = owned(info[key])
    return info


def _ref_count(value: Any) -> int:
    return sys.getrefcount(value)


def _ref_count_in_owned(value: Any) -> int:
    return _ref_count(value)


def _unshared_count() -> int:
    """Return the reference count that `owned` sees of an array which its env has dropped.

    It depends on the Python version, so it is measured through the same sequence of calls.
    """
    value, _ = _new_array()
    return _ref_count_in_owned(value)


def _new_array() -> tuple[Any, Any]:
    return np.empty(0), None


def _shared_keys(values: dict[Any, Any], unshared: int) -> list[Any]:
    """Return the keys whose values are no arrays, are referenced elsewhere, or are views of other arrays."""
    return [
        key
        for key, value in values.items()
        if not (type(value) is np.ndarray and sys.getrefcount(value) <= unshared and value.flags.owndata)
    ]


_UNSHARED = _unshared_count()
_UNSHARED_IN_DICT = next(count for count in range(100) if not _shared_keys({"": np.empty(0)}, count))


# ---------------------------------------------------------------- rows


def clear_other_slots(result: StepResult, slots: Rows) -> StepResult:
    """Set reward 0 and flags False, in place, for all slots but these; an env may report anything for the others."""
    others = np.ones(len(result.reward), np.bool_)
    others[slots] = False
    for column in (result.reward, result.terminated, result.truncated):
        column[others] = 0
    return result


def gather_obs(single: Space[Any], batched: Space[Any], pieces: Sequence[tuple[Any, Rows]], order: Rows) -> Any:
    """Gather rows of several batches of observations into one batch.

    Args:
        single: the space of one observation.
        batched: the space of a whole batch.
        pieces: batches, and the rows that are taken from each.
        order: element i of the result is element `order[i]` of all pieces, one after the other.
    """
    elements: list[Any] = []
    for obs, rows in pieces:
        each = list(iterate(batched, obs))
        elements += [each[row] for row in rows.tolist()]
    if not elements:
        layout = Layout(single)
        return layout.assemble(layout.empty(0), layout.no_objects(0))
    elements = [elements[i] for i in order.tolist()]
    return concatenate(single, elements, create_empty_array(single, n=len(elements)))  # type: ignore[arg-type]


def gather_infos(
    pieces: Sequence[tuple[Mapping[Any, Any], Rows]], num_envs: int, targets: Sequence[Rows], n: int
) -> dict[Any, Any]:
    """Gather rows of several infos into the info of a batch of n, without keys that none of these rows has.

    Args:
        pieces: infos of batches of `num_envs`, and the rows that are taken from each.
        num_envs: the number of slots.
        targets: for each piece, the rows of the result that it fills.
        n: the number of rows of the result.
    """
    result: dict[Any, Any] = {}
    for (info, rows), target in zip(pieces, targets, strict=True):
        absent = {key for key, mask in info.items() if _is_mask(key, mask, info, num_envs) and not mask[rows].any()}
        absent.update([key[1:] for key in absent])
        for key, value in info.items():
            if key in absent:
                continue
            if isinstance(value, Mapping):
                earlier = result.get(key, {})
                inner = gather_infos([(value, rows)], num_envs, [target], n)
                result[key] = _put_rows(earlier, inner, target) if earlier else inner
            elif isinstance(value, np.ndarray) and value.ndim and len(value) == num_envs:
                array = result[key] = _column_for(result.get(key), value, n)
                if array.shape[1:] == value.shape[1:]:
                    array[target] = value[rows]
                else:
                    for row, item in zip(target.tolist(), value[rows], strict=True):
                        array[row] = item
            else:
                result[key] = value
    return result


def _is_mask(key: Any, mask: Any, info: Mapping[Any, Any], num_envs: int) -> bool:
    """Return whether a value is one of Gymnasium's masks, which tell the rows that have another key."""
    if not isinstance(key, str) or key[:1] != "_" or key[1:] not in info:
        return False
    return isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (num_envs,)


def _column_for(known: Any, value: npt.NDArray[Any], n: int) -> npt.NDArray[Any]:
    """Return a column of n rows that can hold rows of `value`, and holds the `known` ones."""
    shape, dtype = value.shape[1:], value.dtype
    if isinstance(known, np.ndarray):
        if known.dtype == dtype and known.shape[1:] == shape:
            return known
        if known.shape[1:] == shape:
            numeric = known.dtype.kind in _NUMERIC and dtype.kind in _NUMERIC
            dtype = np.result_type(known, value) if numeric else np.dtype(object)
        else:
            shape, dtype = (), np.dtype(object)
    array: npt.NDArray[Any] = np.full((n, *shape), None if dtype.hasobject else 0, dtype)
    if isinstance(known, np.ndarray):
        for row, item in enumerate(known):
            array[row] = item
    return array


def _put_rows(earlier: dict[Any, Any], later: dict[Any, Any], rows: Rows) -> dict[Any, Any]:
    """Put rows of `later` into `earlier`, in place."""
    for key, value in later.items():
        known = earlier.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            _put_rows(known, value, rows)
        elif isinstance(value, np.ndarray) and isinstance(known, np.ndarray) and known.shape == value.shape:
            known[rows] = value[rows]
        else:
            earlier[key] = value
    return earlier


Slots = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_ALL = slice(None)
_NONE = np.zeros(0, np.bool_)


class InProcessRequest:
    """One step or reset of an env in this process.

    Attributes:
        slots: int64, ascending: the slots whose results are asked for. The value is a batch of all slots in any case.
        awaited: whether a caller awaits the result; otherwise `recv` takes it.
        value: the result or the error; None until it has arrived.
        untaken: bool `(len(slots),)`, the slots whose results `recv` may still take; empty before `recv` may.
        done: resolved when the value has arrived.
        images: the images of the result, if images are drawn.
        resets: the slots that are reset; None for a step.
        looks: whether it only asks for observations.
        episodes_counted: whether the result is in the episode statistics already.
        other_images: the last images of slots that the result shows, but that were not asked.
        drawn_slots: the slots whose observations are drawn, if observations are images.
    """

    __slots__ = (
        "awaited",
        "done",
        "drawn_slots",
        "episodes_counted",
        "images",
        "looks",
        "other_images",
        "resets",
        "slots",
        "untaken",
        "value",
    )

    def __init__(
        self, slots: Slots, done: asyncio.Future[None], *, awaited: bool, resets: Slots | None, looks: bool
    ) -> None:
        self.slots = self.drawn_slots = slots
        self.resets = resets
        self.looks = looks
        self.episodes_counted = False
        self.awaited = awaited
        self.value: StepResult | ResetResult | EnvError | None = None
        self.untaken = _NONE
        self.done = done
        self.images: ImageRequest | None = None
        self.other_images: dict[int, ImageRequest] = {}


class InProcessRequests:
    """The requests of one env, from start to hand-over.

    Args:
        table: the states of the slots, which the requests keep up to date.
        num_envs: the number of slots.
        error_of: turns an exception into the env's error, for results that can't be processed.

    Attributes:
        abandoned: requests that were cancelled or timed out; `recv` takes their results.
        images: draws the states that come with results; None if no images were asked for.
        pixel_renderer: draws observations that are images; None if there are none.
        episodes: counts episodes; None if they are not counted.
        observer: is told of each result; None: none is.
    """

    def __init__(self, table: SlotTable, num_envs: int, error_of: Callable[[BaseException], EnvError]) -> None:
        self._table = table
        self._error_of = error_of
        self._num_envs = num_envs
        self._all_slots = np.arange(num_envs)
        self._loop = asyncio.get_running_loop()
        self._ready: list[InProcessRequest] = []
        self._in_flight: set[InProcessRequest] = set()
        self.abandoned: list[InProcessRequest] = []
        self._arrival = asyncio.Event()
        self._closed = False
        self.images: StepImages | None = None
        self.pixel_renderer: ResultPixelRenderer | None = None
        self.episodes: InProcessEpisodeTracker | None = None
        self.observer: ResultObserver | None = None

    # ------------------------------------------------------------ one request

    def start(
        self,
        slots: Slots,
        *,
        awaited: bool,
        resets: Slots | None = None,
        shows_all: bool = False,
        looks: bool = False,
    ) -> InProcessRequest:
        """Start a request, and mark its slots as in flight.

        Args:
            slots: the slots that are asked, ascending.
            awaited: whether a caller will await the result.
            resets: the slots that are reset; None for a step.
            shows_all: whether the result also shows the other slots, as they were.
            looks: whether it only asks for observations; their images are those of earlier requests.

        Raises:
            ClosedError: if the vector env was closed.
        """
        if self._closed:  # while a rollout waited for its policy, for example
            raise ClosedError("the vector env was closed meanwhile")
        request = InProcessRequest(slots, self._loop.create_future(), awaited=awaited, resets=resets, looks=looks)
        self._table.move(_ALL if len(slots) == self._num_envs else slots, SlotState.IN_FLIGHT)
        self._in_flight.add(request)
        if self.images is not None and len(slots) and not looks:
            request.images = self.images.new_request(slots)
        if shows_all:
            request.drawn_slots = self._all_slots
            if self.images is not None and self.images.draws:
                request.other_images = self.images.newest_requests(np.setdiff1d(self._all_slots, slots))
        return request

    def complete(self, request: InProcessRequest, value: Any) -> None:
        """Process the env's result; the request is done at once, or when observations that are images are drawn."""
        if self.episodes is not None and not request.episodes_counted:
            try:
                self.episodes.note(request.slots, request.resets, value)
            except Exception as exc:  # any error must end the caller's wait
                value = self._error_of(exc)
        if self.observer is not None:
            states = None if request.images is None else request.images.states
            self.observer.note_result(request.slots, request.resets, value, states)
        if self.images is None and self.pixel_renderer is None:
            self._resolve(request, value)
            return
        try:
            self._draw(request, value)
        except Exception as exc:
            self._resolve(request, self._error_of(exc))

    def _draw(self, request: InProcessRequest, value: Any) -> None:
        """Have the images of a result drawn, then resolve the request."""
        mine, images = request.images, self.images
        if images is not None and images.draws and mine is not None:
            if mine.states is None:
                assert isinstance(value, EnvError)
                images.fail(None, None, mine, mine.slots, value)
            else:
                images.draw(mine, mine.slots, mine.states)
        if self.pixel_renderer is not None and not isinstance(value, EnvError):
            self.pixel_renderer.draw(value, request.drawn_slots, partial(self._resolve, request))
        else:
            self._resolve(request, value)

    def _resolve(self, request: InProcessRequest, value: Any) -> None:
        if isinstance(value, EnvError) and len(request.slots):
            value.concern(tuple(request.slots.tolist()))
        request.value = value
        if not request.done.done():
            request.done.set_result(None)
        if not request.awaited:
            self._make_ready(request)

    def hand_out(self, request: InProcessRequest) -> None:
        """Free the slots of a request whose result the caller gets now, and show its images."""
        self._in_flight.discard(request)
        self.free_slots(_ALL if len(request.slots) == self._num_envs else request.slots)
        if self.images is not None and self.images.draws:
            # (a request without states is a step that has failed)
            others = {slot: images for slot, images in request.other_images.items() if images.states is not None}
            self.images.set_current_of_each(others)
            self._show_images([(request, request.slots)])

    def _show_images(self, taken: list[tuple[InProcessRequest, Slots]]) -> None:
        """Show the images of one result, which may come from several requests."""
        if self.images is None or not self.images.draws:
            return
        shown = [(request.images, slots) for request, slots in taken if request.images is not None]
        for images, slots in shown:
            self.images.set_current(images, slots)
        if not all(request.looks for request, _ in taken):
            self.images.end_result()

    def free_slots(self, slots: Slots | slice) -> None:
        """Mark slots as idle again."""
        self._table.move(slots, SlotState.IDLE)
        self._arrival.set()  # a `recv` may have nothing left to wait for

    def abandon(self, request: InProcessRequest) -> None:
        """Leave the result to `recv`, since no caller awaits it any more.

        A future that was cancelled is replaced by one that is resolved when the value has arrived.
        """
        request.awaited = False
        self.abandoned.append(request)
        if request.done.cancelled():
            request.done = self._loop.create_future()
        if request.value is not None:
            if not request.done.done():
                request.done.set_result(None)
            self._make_ready(request)

    def _make_ready(self, request: InProcessRequest) -> None:
        """Let `recv` take the result of a request."""
        self._in_flight.discard(request)
        request.untaken = np.ones(len(request.slots), np.bool_)
        if not len(request.slots):  # all slots of the batch are paused
            return
        if request.resets is not None and not len(request.resets):  # it only asked for observations
            self.free_slots(request.slots)
            return
        self._ready.append(request)
        self._table.move(request.slots, SlotState.READY)
        self._arrival.set()

    def close(self) -> None:
        """End every wait: no result will arrive any more."""
        self._closed = True
        self._arrival.set()
        for request in self._in_flight:
            if not request.done.done():
                request.done.set_result(None)

    def discard_abandoned(self) -> list[int]:
        """Discard the results of abandoned requests, all of which have arrived.

        Returns:
            The slots whose episodes ended in them, ascending.
        """
        ended: list[int] = []
        for request in self.abandoned:
            if request not in self._ready:
                continue
            self._ready.remove(request)
            untaken = request.slots[request.untaken]
            self._table.move(untaken, SlotState.IDLE)
            if isinstance(request.value, EnvError):
                self._table.fail(request.value)
            elif isinstance(request.value, StepResult):
                ends = request.value.terminated | request.value.truncated
                self._table.note_ends(untaken, ends[untaken])  # the others may have been reset since
                ended += untaken[ends[untaken]].tolist()
            self._table.note_taken(untaken)
        self.abandoned = []
        return sorted(ended)

    # ------------------------------------------------------------ results for `recv`

    @property
    def outstanding(self) -> bool:
        """Whether a request is in flight or a result is ready."""
        return bool(self._ready) or self._table.count(SlotState.IN_FLIGHT) > 0

    def has_ready(self, min_slots: int) -> bool:
        """Return whether so many slots are ready, or all slots that can become ready."""
        ready = self._table.count(SlotState.READY)
        return ready >= min(min_slots, ready + self._table.count(SlotState.IN_FLIGHT))

    async def wait_ready(self, min_slots: int) -> None:
        """Wait until `has_ready(min_slots)`.

        Raises:
            ClosedError: if the vector env is closed meanwhile.
        """
        while not self.has_ready(min_slots):
            self._arrival.clear()
            await self._arrival.wait()
            if self._closed:
                raise ClosedError("the vector env was closed while recv() waited")

    def take_ready(
        self, max_slots: int | None, single: Space[Any], batched: Space[Any]
    ) -> tuple[Ready, Sequence[EnvError]]:
        """Take the results of up to `max_slots` slots, oldest first.

        Args:
            max_slots: the largest number of slots; None for all that are ready.
            single: the space of one observation.
            batched: the space of a batch of them.

        Returns:
            The results, ordered by slot, and the errors of those that failed.
        """
        room = self._num_envs if max_slots is None else max_slots
        taken: list[tuple[InProcessRequest, Slots]] = []
        for request in self._ready:
            rows = np.flatnonzero(request.untaken)
            if not isinstance(request.value, EnvError):  # an error is one result of all its slots
                rows = rows[:room]
            if len(rows):
                room -= len(rows)
                request.untaken[rows] = False
                taken.append((request, request.slots[rows]))
        self._ready = [request for request in self._ready if request.untaken.any()]
        self.abandoned = [request for request in self.abandoned if request.value is None or request.untaken.any()]
        for _, slots in taken:
            self._table.move(slots, SlotState.IDLE)
        self._show_images(taken)
        errors = [request.value for request, _ in taken if isinstance(request.value, EnvError)]
        results = [(request, slots) for request, slots in taken if not isinstance(request.value, EnvError)]
        return self._gather(results, single, batched), errors

    def _gather(self, taken: list[tuple[InProcessRequest, Slots]], single: Space[Any], batched: Space[Any]) -> Ready:
        """Gather rows of several results into one, ordered by slot."""
        if len(taken) == 1 and len(taken[0][1]) == self._num_envs:
            return self._whole(*taken[0])
        slots = np.concatenate([mine for _, mine in taken] or [np.zeros(0, np.int64)])
        order = np.argsort(slots)
        positions = np.argsort(order)  # of the i-th taken slot in the result
        n = len(slots)
        reward, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        targets: list[Slots] = []
        for request, mine in taken:
            targets.append(positions[: len(mine)])
            positions = positions[len(mine) :]
            if isinstance(request.value, StepResult):
                reward[targets[-1]] = request.value.reward[mine]
                terminated[targets[-1]] = request.value.terminated[mine]
                truncated[targets[-1]] = request.value.truncated[mine]
        values: list[Any] = [request.value for request, _ in taken]
        obs = gather_obs(single, batched, [(v.obs, mine) for v, (_, mine) in zip(values, taken, strict=True)], order)
        infos = [(v.info, mine) for v, (_, mine) in zip(values, taken, strict=True)]
        info = gather_infos(infos, self._num_envs, targets, n)
        return Ready(slots[order], obs, reward, terminated, truncated, info)

    def _whole(self, request: InProcessRequest, slots: Slots) -> Ready:
        """Return one result of all slots without copying it."""
        value = request.value
        if isinstance(value, StepResult):
            return Ready(slots.copy(), *value)
        assert isinstance(value, ResetResult)
        reward, flags = np.zeros(self._num_envs), np.zeros(self._num_envs, np.bool_)
        return Ready(slots.copy(), value.obs, reward, flags, flags.copy(), value.info)


class LastResults:
    """The last result of every slot, from which a rollout starts.

    The thread that runs the env updates it; others read it while nothing is in flight. A step is recorded by reference,
    which costs no copy. Callers get copies of the flags, and may share only observations that the env has dropped.

    Args:
        num_envs: the number of slots.
        keeps_obs: whether to keep observations, for an env that can't be asked for them.

    Attributes:
        obs: the latest observations of all slots, as the env gave them; None if they are not kept.
    """

    __slots__ = ("_ended", "_flags", "_keeps_obs", "obs")

    def __init__(self, num_envs: int, *, keeps_obs: bool) -> None:
        self._ended: Bools = np.zeros(num_envs, np.bool_)
        self._flags: tuple[Any, Any] | None = None  # of the last whole step, if that is newer than `_ended`
        self._keeps_obs = keeps_obs
        self.obs: Any = None

    def record_step(self, obs: Any, terminated: Any, truncated: Any, slots: Slots | None) -> None:
        """Record the result of a step of some slots; None for all."""
        if self._keeps_obs:
            self.obs = obs
        if slots is None:
            self._flags = terminated, truncated
        elif len(slots):
            ended = self.ended()
            ended[slots] = _either(terminated, truncated)[slots]
            self._ended, self._flags = ended, None

    def record_reset(self, obs: Any, mask: Bools | None) -> None:
        """Record the result of a reset of the slots in a mask; None for all."""
        if self._keeps_obs:
            self.obs = obs
        self._ended, self._flags = (np.zeros_like(self._ended) if mask is None else self.ended() & ~mask), None

    def ended(self) -> Bools:
        """Return, in a new array, the slots whose last step ended an episode, with no reset since."""
        return self._ended.copy() if self._flags is None else _either(*self._flags)


def _either(terminated: Any, truncated: Any) -> Bools:
    return np.logical_or(np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_))
