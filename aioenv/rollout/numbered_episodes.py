"""`NumberedEpisodes`: episodes 0 … n-1, each run to its end exactly once, on the next slot that is free.

All slots step together, and a slot whose episode has ended begins the next one while the others step. The slot of an
episode depends only on the lengths of episodes, not on the number or speed of workers.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence, Set
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioenv.assign import draw_seeds
from aioenv.errors import ActionError, EpisodesDone, PausedError, PendingCallError
from aioenv.rollout.rollout import Policy, extras_hint, has_parameter, is_pair_space, split_answer
from aioenv.rollout.subset import row_info
from aioenv.spaces.layout import Arrays
from aioenv.spaces.seeding import normalize_seeds

if TYPE_CHECKING:
    from aioenv.core.backend import Backend, SlotGroup, StepOutcome
    from aioenv.core.waits import Clock

__all__ = ["Episode", "NumberedEpisodes", "episode_seeds"]

Slots = npt.NDArray[np.int64]


class Episode(NamedTuple):
    """One episode, from its reset to its end.

    Attributes:
        number: from 0.
        seed: the seed that it was reset with.
        slot: the slot that ran it.
        total_reward: the sum of its rewards, its return.
        length: the number of its steps.
        time_s: the time that these took, with the policy and the other slots, in seconds.
        terminated: whether it was terminated; False: it was truncated.
        attempts: how often it was begun; more than once if a worker that was restarted had lost it.
        info: the info of its last step, as its env returned it.
    """

    number: int
    seed: int | None
    slot: int
    total_reward: float
    length: int
    time_s: float
    terminated: bool
    attempts: int
    info: dict[str, Any]


class NumberedEpisodes:
    """Runs episodes by number on a started vector env; see `AsyncVectorEnv.episodes`.

    Args:
        backend: steps the envs.
        clock: counts how long the caller waits.
    """

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._latest: list[_EpisodesRun] | None = None  # the run of the latest iteration, until it ends

    def iterate(
        self, policy: Policy, n: int, seed: int | Sequence[int | None] | None, owner: object
    ) -> AsyncGenerator[Episode, None]:
        """Return an iterator over episodes 0 … n-1.

        Args:
            policy, n, seed: as of `AsyncVectorEnv.episodes`.
            owner: an object that must not be collected, and so closed, before the iterator is.
        """
        if not callable(policy):
            raise TypeError(f"episodes: policy: expected a function of observations, got {policy!r}")
        _, seeds = episode_seeds(n, seed)
        for slot in range(self._backend.num_envs):
            self._backend.check_steps_some("episodes", np.array([slot]))
        runs: list[_EpisodesRun] = []

        def end() -> None:
            if runs:
                runs.pop().end()

        return _EpisodeIterator(self._episodes(policy, seeds, runs, end), end, owner)

    async def _episodes(
        self, policy: Policy, seeds: Sequence[int | None], runs: list[_EpisodesRun], end: Callable[[], None]
    ) -> AsyncGenerator[Episode, None]:
        backend = self._backend
        await backend.drain()
        if backend.outstanding:
            raise PendingCallError("episodes: requests are in flight, or results were not taken; recv() takes them")
        if self._latest:  # an iteration that was left early, and is still referenced
            self._latest.pop().end()
        self._latest = runs
        run = _EpisodesRun(backend, _EpisodeStepper(backend), self._clock, policy, seeds)
        runs.append(run)
        try:
            while run.busy:
                for episode in await run.advance():
                    yield episode
        finally:
            end()


def episode_seeds(n: int, seed: int | Sequence[int | None] | None) -> tuple[int | None, list[int | None]]:
    """Return the entropy of the seeds of n episodes (None if they were given as a list), and the seeds.

    Raises:
        ValueError: if n is not positive, or there are more or fewer seeds than that.
        TypeError: if seeds are no ints.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"episodes: expected a positive int, got {n!r}")
    if seed is None or isinstance(seed, (int, np.integer)):
        entropy, drawn = draw_seeds(seed, int(n))
        return entropy, [*drawn]
    seeds = normalize_seeds(seed)
    if len(seeds) != n:
        raise ValueError(f"seed: expected an int, None, or a list of one for each of {n} episodes, got {len(seeds)}")
    return None, seeds


class _EpisodeIterator(AsyncGenerator[Episode, None]):
    """An iterator over episodes that ends when it is collected, as after a `break`.

    A plain generator ends in a later turn of the loop, and slots would stay paused until then.

    Args:
        inner: the generator of episodes.
        end: ends the run of episodes; idempotent.
        owner: an object that must not be collected before this is.
    """

    def __init__(self, inner: AsyncGenerator[Episode, None], end: Callable[[], None], owner: object) -> None:
        self._inner = inner
        self._end = end
        self._owner = owner

    async def asend(self, value: None) -> Episode:
        return await self._inner.asend(value)

    async def athrow(self, *args: Any) -> Episode:
        return await self._inner.athrow(*args)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def __del__(self) -> None:
        self._end()


class _RunningEpisode:
    """An episode that is running, or about to be."""

    __slots__ = ("attempts", "length", "number", "start_s", "total_reward")

    def __init__(self, number: int, attempts: int) -> None:
        self.number = number
        self.attempts = attempts
        self.total_reward = 0.0
        self.length = 0
        self.start_s = perf_counter()


class _EpisodesRun:
    """Runs the episodes of one iteration.

    Attributes:
        busy: whether an episode is running or to be run.
    """

    def __init__(
        self,
        backend: Backend,
        stepper: _EpisodeStepper,
        clock: Clock,
        policy: Policy,
        seeds: Sequence[int | None],
    ) -> None:
        table, n = backend.table, backend.num_envs
        if not len(table.active):
            raise PausedError("episodes: all slots are paused; resume() some first")
        self._backend = backend
        self._stepper = stepper
        self._clock = clock
        self._policy = policy
        self._parameters = [name for name in ("slots", "episodes", "started") if has_parameter(policy, name)]
        self._pairs = is_pair_space(backend.single_action_space)
        self._seeds = seeds
        self._queue = deque(range(len(seeds)))
        self._running: dict[int, _RunningEpisode] = {}  # by slot
        self._to_reset: dict[int, _RunningEpisode] = {}  # to be reset next
        self._reserved: dict[int, int] = {}  # by slot, the number of the episode that its spare env begins meanwhile
        self._started = np.zeros(n, np.bool_)
        self._paused: list[int] = []
        self._ended = False
        self._requests_before = self._count_requests()
        for slot in table.active.tolist():
            self._start_next(slot)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._to_reset)

    def _count_requests(self) -> tuple[int, int]:
        """Return how many steps and resets the slots have been sent, here and by other code."""
        return self._backend.table.steps, self._backend.table.resets

    def end(self) -> None:
        """Resume the slots that were paused here; no further episode is run."""
        self._ended = True
        self._stepper.close()
        if self._backend.spares is not None:
            self._backend.spares.release(range(self._backend.num_envs))
        own = [slot for slot in self._paused if slot not in self._backend.table.exhausted]
        self._backend.table.resume(np.array(own, np.int64))

    def _start_next(self, slot: int) -> None:
        """Begin the next episode on a free slot, or pause the slot."""
        number = self._reserved.pop(slot, None)
        if number is not None or self._queue:
            self._to_reset[slot] = _RunningEpisode(self._queue.popleft() if number is None else number, 1)
        else:
            self._paused.append(slot)
            self._backend.table.pause([slot])

    async def advance(self) -> list[Episode]:
        """Step each slot, or reset it where an episode begins; return the episodes that have ended."""
        stepped = sorted(self._running)
        actions: tuple[Any, Any] = await self._call_policy() if stepped else ([], [])
        if self._ended:
            raise PendingCallError(
                "episodes: another iteration (or evaluation) has begun meanwhile, and has the slots now; let one end "
                "before the next"
            )
        if self._count_requests() != self._requests_before:  # the episodes would be wrong
            raise PendingCallError(
                "episodes: other code has stepped or reset the slots, or set their states, meanwhile; let the "
                "iteration end before that, or take a vector env of its own"
            )
        reset, self._to_reset = self._to_reset, {}
        seeds = {slot: self._seeds[running.number] for slot, running in reset.items()}
        for running in reset.values():
            running.start_s = perf_counter()
        wait = self._clock.envs.begin()
        try:
            result = await self._stepper.step(stepped, *actions, seeds)
        finally:
            wait.end()
        self._requests_before = self._count_requests()
        for column in self._stepper.objects:  # slots without an episode show another slot's observation instead of None
            shown = next((item for item in column if item is not None), None)
            if any(item is None for item in column):
                column[:] = [shown if item is None else item for item in column]
        ended = self._collect(stepped, result) if result is not None else []
        self._started[:] = False
        for slot, running in reset.items():
            if slot in self._backend.table.exhausted:
                if (reserved := self._reserved.pop(slot, None)) is not None:
                    self._queue.appendleft(reserved)
                self._queue.appendleft(running.number)
            else:
                self._running[slot] = running
                self._started[slot] = True
        self._reserve(reset)
        self._redistribute()
        return ended

    def _reserve(self, slots: Iterable[int]) -> None:
        """Let the spare envs of slots, if there are any, begin the episodes that the slots run next."""
        if (spares := self._backend.spares) is None:
            return
        for slot in slots:
            if self._queue and slot in self._running and slot not in self._reserved:
                self._reserved[slot] = self._queue.popleft()
                spares.reserve(slot, self._seeds[self._reserved[slot]])

    async def _call_policy(self) -> tuple[Any, Any]:
        """Return the actions of the policy for all slots, as arrays and objects."""
        n, backend = self._backend.num_envs, self._backend
        given: dict[str, Any] = {}
        if "slots" in self._parameters:
            given["slots"] = np.arange(n)
        if "started" in self._parameters:
            given["started"] = self._started.copy()
        if "episodes" in self._parameters:
            given["episodes"] = np.array([self._running[i].number if i in self._running else -1 for i in range(n)])
        obs = backend.observations.assemble(
            [array.copy() for array in self._stepper.obs], [list(c) for c in self._stepper.objects]
        )
        answer = self._policy(obs, **given)
        if inspect.isawaitable(answer):
            answer = await answer
        actions = split_answer(answer, self._pairs)[0]
        try:
            return backend.actions.take_apart(actions, n)
        except ActionError as exc:
            if hint := extras_hint(actions, backend.single_action_space):
                raise ActionError(f"{exc}{hint}") from exc
            raise

    def _collect(self, stepped: list[int], result: _SteppedSlots) -> list[Episode]:
        """Add the result of a step to the running episodes; return those that have ended, and start others there."""
        now = perf_counter()
        ended: list[Episode] = []
        over = result.terminated | result.truncated
        for row, slot in enumerate(stepped):
            running = self._running[slot]
            running.total_reward += float(result.reward[row])
            running.length += 1
            if not over[row]:
                continue
            del self._running[slot]
            if row in result.lost and not result.terminated[row]:
                self._to_reset[slot] = _RunningEpisode(running.number, running.attempts + 1)
                continue
            own = result.info(row)
            ended.append(
                Episode(
                    running.number,
                    self._seeds[running.number],
                    slot,
                    running.total_reward,
                    running.length,
                    now - running.start_s,
                    bool(result.terminated[row]),
                    running.attempts,
                    own.get("final_info", own),
                )
            )
            self._start_next(slot)
        return ended

    def _redistribute(self) -> None:
        """Resume paused slots if exhausted ones have put episodes back into the queue.

        Raises:
            EpisodesDone: if no slot can run the episodes that are left.
        """
        exhausted = self._backend.table.exhausted
        free = [slot for slot in self._paused if slot not in exhausted]
        while self._queue and free:
            slot = free.pop(0)
            self._paused.remove(slot)
            self._backend.table.resume(np.array([slot]))
            self._start_next(slot)
        if self._queue and not self.busy:
            raise EpisodesDone(
                f"episodes: {len(self._queue)} of {len(self._seeds)} could not be run: the envs of slots "
                f"{sorted(exhausted)} have no further episode"
            )


# ------------------------------------------------------------ one step of the slots


class _SteppedSlots(NamedTuple):
    """The result of a step of k slots.

    Attributes:
        reward: float64 `(k,)`; terminated, truncated: bool `(k,)`.
        info: returns the info dict of one of them, given its place among the k.
        lost: the places of slots whose episodes were lost with a worker that was restarted.
    """

    reward: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    info: Callable[[int], dict[str, Any]]
    lost: Set[int] = frozenset()


class _EpisodeStepper:
    """Steps some slots and resets others at the same time, as two groups of a backend.

    Args:
        backend: steps the envs.

    Attributes:
        obs, objects: the last observations of all slots, one row a slot.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        layout = backend.observations
        self.obs = layout.zeros(backend.num_envs)
        self.objects = layout.no_objects(backend.num_envs)
        self._groups: dict[bool, SlotGroup] = {}  # True: the one that was stepped last; False: reset last

    async def step(
        self, stepped: Sequence[int], arrays: Arrays, objects: list[list[Any]], seeds: Mapping[int, int | None]
    ) -> _SteppedSlots | None:
        """Step some slots and reset others.

        If this is cancelled, or fails, the requests in flight are abandoned.

        Args:
            stepped: slots, ascending.
            arrays, objects: actions of all slots, taken apart; rows of slots that are not stepped are not used.
            seeds: the seeds of the slots that are reset.

        Returns:
            The result of the step; None if no slot was stepped.
        """
        asked: list[SlotGroup] = []
        outcomes = []
        try:
            if stepped:
                group = self._group(list(stepped), stepped=True)
                chosen = [[column[slot] for slot in stepped] for column in objects]
                group.send_arrays([array[list(stepped)] for array in arrays], chosen, "episodes")
                asked.append(group)
            if seeds:
                group = self._group(sorted(seeds), stepped=False)
                group.send_reset(group.slots, seeds, None, "episodes", automatic=True)
                asked.append(group)
            for group in asked:
                outcome = await group.recv()
                if outcome.error is not None:
                    raise outcome.error
                outcomes.append(outcome)
        except BaseException:
            for group in asked:
                group.abandon()
            raise
        for group, outcome in zip(asked, outcomes, strict=True):
            _put_rows(self.obs, self.objects, group.slots, outcome.obs, outcome.objects)
        return self._stepped(asked[0].slots, outcomes[0]) if stepped else None

    def _group(self, slots: list[int], *, stepped: bool) -> SlotGroup:
        group = self._groups.get(stepped)
        if group is None or group.slots.tolist() != slots:
            if group is not None:
                group.close()
            group = self._groups[stepped] = self._backend.group(np.array(slots))
        return group

    def close(self) -> None:
        """Release the memory of results."""
        for group in self._groups.values():
            group.close()

    def _stepped(self, slots: npt.NDArray[np.int64], outcome: StepOutcome) -> _SteppedSlots:
        merged: list[dict[str, Any]] = []

        def info(row: int) -> dict[str, Any]:
            if not merged:
                merged.append(self._backend.rollout_backend().merge(outcome.infos, by_slot=True))
            return row_info(merged[0], int(slots[row]))

        lost = frozenset() if outcome.valid is None else frozenset(np.flatnonzero(~outcome.valid).tolist())
        return _SteppedSlots(outcome.reward, outcome.terminated, outcome.truncated, info, lost)


def _put_rows(
    obs: Arrays, objects: list[list[Any]], slots: npt.NDArray[np.int64], rows: Arrays, items: list[list[Any]]
) -> None:
    """Put the observations of some slots into arrays and lists with one row a slot."""
    for mine, theirs in zip(obs, rows, strict=True):
        mine[slots] = theirs
    for column, values in zip(objects, items, strict=False):
        for slot, item in zip(slots.tolist(), values, strict=True):
            column[slot] = item
