"""Numbered episodes, each run to its end exactly once, on whichever slot is free.

All slots step together, and a slot whose episode has ended begins the next one while the others step. Which slot gets
which episode depends on nothing but how long they are: not on how many workers there are, nor on how fast.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioenv.assign import draw_seeds
from aioenv.errors import ActionError, EpisodesDone, PausedError, PendingCallError
from aioenv.rollout.episode_stepper import EpisodeStepper, SteppedSlots
from aioenv.rollout.rollout import Policy, are_pairs, hint_for, split_answer, takes
from aioenv.rollout.subset import Pausing, check_steps_some
from aioenv.spaces.seeding import normalize_seeds

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.waits import Clock

__all__ = ["Episode", "NumberedEpisodes", "episode_seeds"]

Slots = npt.NDArray[np.int64]


class Episode(NamedTuple):
    """One episode, from its reset to its end.

    Attributes:
        number: from 0.
        seed: what it was reset with.
        slot: where it ran.
        total_reward: the sum of its rewards, its return.
        length: how many steps it took.
        time_s: how long that took, with the policy and the other slots, in seconds.
        terminated: whether it ended by itself; False: it was truncated.
        attempts: how often it was begun: more than once if workers that were restarted had lost it.
        info: of its last step, as its env gave it.
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
        scheduler: knows the spaces and the slots.
        make_stepper: makes what steps and resets the slots, for each iteration anew.
        pausing: knows the last observations of paused slots.
        clock: counts how long the caller waits.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        make_stepper: Callable[[], EpisodeStepper],
        pausing: Pausing,
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._make_stepper = make_stepper
        self._pausing = pausing
        self._clock = clock
        self._latest: list[_EpisodesRun] | None = None  # the run of the latest iteration, until it ends

    def iterate(
        self, policy: Policy, n: int, seed: int | Sequence[int | None] | None, owner: object
    ) -> AsyncGenerator[Episode, None]:
        """Return an iterator over episodes 0 … n-1.

        Args:
            policy: as of `AsyncVectorEnv.episodes`.
            n: likewise.
            seed: likewise.
            owner: what must not be collected, and so closed, before the iterator is.
        """
        if not callable(policy):
            raise TypeError(f"episodes: policy: expected a function of observations, got {policy!r}")
        _, seeds = episode_seeds(n, seed)
        for slot in range(self._scheduler.num_envs):
            check_steps_some(self._scheduler, "episodes", [slot])
        runs: list[_EpisodesRun] = []

        def end() -> None:
            if runs:
                runs.pop().end()
                self._pausing.forget()

        return _Iteration(self._episodes(policy, seeds, runs, end), end, owner)

    async def _episodes(
        self, policy: Policy, seeds: Sequence[int | None], runs: list[_EpisodesRun], end: Callable[[], None]
    ) -> AsyncGenerator[Episode, None]:
        scheduler = self._scheduler
        await scheduler.drain()
        if scheduler.outstanding:
            raise PendingCallError("episodes: there are requests in flight, or results that nobody took; recv() them")
        if self._latest:  # an iteration that was left early, and is still referenced
            self._latest.pop().end()
            self._pausing.forget()
        self._latest = runs
        run = _EpisodesRun(scheduler, self._make_stepper(), self._clock, policy, seeds)
        runs.append(run)
        try:
            while run.busy:
                for episode in await run.advance():
                    yield episode
        finally:
            end()


def episode_seeds(n: int, seed: int | Sequence[int | None] | None) -> tuple[int | None, list[int | None]]:
    """What seeds of n episodes are drawn from (None if they were given as a list), and the seeds.

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


class _Iteration(AsyncGenerator[Episode, None]):
    """An iteration over episodes that ends when it is let go of, as by `break`.

    A generator's own end comes with a later turn of the loop: until then what is paused would stay so.

    Args:
        inner: the episodes.
        end: ends what they began; idempotent.
        owner: what must not be collected before this is.
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


class _Attempt:
    """An episode that is being run."""

    __slots__ = ("attempts", "began", "length", "number", "total")

    def __init__(self, number: int, attempts: int) -> None:
        self.number = number
        self.attempts = attempts
        self.total = 0.0
        self.length = 0
        self.began = perf_counter()


class _EpisodesRun:
    """All episodes of one iteration.

    Attributes:
        busy: whether any is left.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        stepper: EpisodeStepper,
        clock: Clock,
        policy: Policy,
        seeds: Sequence[int | None],
    ) -> None:
        table, n = scheduler.table, scheduler.num_envs
        if not len(table.live):
            raise PausedError("episodes: all slots are paused; resume() some first")
        self._scheduler = scheduler
        self._stepper = stepper
        self._clock = clock
        self._policy = policy
        self._wanted = [name for name in ("slots", "episodes", "started") if takes(policy, name)]
        self._pairs = are_pairs(scheduler.fleet.single_action_space)
        self._seeds = seeds
        self._queue = deque(range(len(seeds)))
        self._running: dict[int, _Attempt] = {}  # by slot
        self._begin: dict[int, _Attempt] = {}  # to be reset next
        self._started = np.zeros(n, np.bool_)
        self._paused: list[int] = []
        self._over = False
        self._counted = self._count()
        for slot in table.live.tolist():
            self._next(slot)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._begin)

    def _count(self) -> tuple[int, int]:
        """How many steps and resets there have been, whosever they were."""
        return self._scheduler.table.steps, self._scheduler.table.resets

    def end(self) -> None:
        """Resume what was paused here; there are no more episodes."""
        self._over = True
        own = [slot for slot in self._paused if slot not in self._scheduler.table.exhausted]
        self._scheduler.table.resume(np.array(own, np.int64))

    def _next(self, slot: int) -> None:
        """A slot is free: begin another episode, or pause it."""
        if self._queue:
            self._begin[slot] = _Attempt(self._queue.popleft(), 1)
        else:
            self._paused.append(slot)
            self._scheduler.table.pause([slot])

    async def advance(self) -> list[Episode]:
        """A step of every slot: of its env, or the reset that begins an episode. Gives the episodes that have ended."""
        stepped = sorted(self._running)
        actions: tuple[Any, Any] = await self._ask() if stepped else ([], [])
        if self._over:
            raise PendingCallError(
                "episodes: another iteration (or evaluation) has begun meanwhile, and has the slots now; let one end "
                "before the next"
            )
        if self._count() != self._counted:  # the episodes would be neither's
            raise PendingCallError(
                "episodes: the slots were stepped or reset, or their states set, by somebody else meanwhile; let the "
                "iteration end before that, or take a vector env of its own"
            )
        reset, self._begin = self._begin, {}
        seeds = {slot: self._seeds[attempt.number] for slot, attempt in reset.items()}
        for attempt in reset.values():
            attempt.began = perf_counter()
        wait = self._clock.envs.begin()
        try:
            moved = await self._stepper.move(stepped, *actions, seeds)
        finally:
            wait.end()
        self._counted = self._count()
        for column in self._stepper.objects:  # slots without a first episode show another's, rather than None
            shown = next((item for item in column if item is not None), None)
            if any(item is None for item in column):
                column[:] = [shown if item is None else item for item in column]
        ended = self._take(stepped, moved) if moved is not None else []
        self._started[:] = False
        for slot, attempt in reset.items():
            if slot in self._scheduler.table.exhausted:
                self._queue.appendleft(attempt.number)
            else:
                self._running[slot] = attempt
                self._started[slot] = True
        self._share_out()
        return ended

    async def _ask(self) -> tuple[Any, Any]:
        """What the policy would have all slots do, taken apart."""
        n, fleet = self._scheduler.num_envs, self._scheduler.fleet
        given: dict[str, Any] = {}
        if "slots" in self._wanted:
            given["slots"] = np.arange(n)
        if "started" in self._wanted:
            given["started"] = self._started.copy()
        if "episodes" in self._wanted:
            given["episodes"] = np.array([self._running[i].number if i in self._running else -1 for i in range(n)])
        obs = fleet.observations.assemble(
            [array.copy() for array in self._stepper.obs], [list(c) for c in self._stepper.objects]
        )
        answer = self._policy(obs, **given)
        if inspect.isawaitable(answer):
            answer = await answer
        actions = split_answer(answer, self._pairs)[0]
        try:
            return fleet.actions.take_apart(actions, n)
        except ActionError as exc:
            if hint := hint_for(actions, fleet.single_action_space):
                raise ActionError(f"{exc}{hint}") from exc
            raise

    def _take(self, stepped: list[int], moved: SteppedSlots) -> list[Episode]:
        """Take in a step; gives the episodes that have ended, and lets their slots go on."""
        now = perf_counter()
        ended: list[Episode] = []
        over = moved.terminated | moved.truncated
        for row, slot in enumerate(stepped):
            attempt = self._running[slot]
            attempt.total += float(moved.reward[row])
            attempt.length += 1
            if not over[row]:
                continue
            del self._running[slot]
            if row in moved.lost and not moved.terminated[row]:
                self._begin[slot] = _Attempt(attempt.number, attempt.attempts + 1)
                continue
            own = moved.info(row)
            ended.append(
                Episode(
                    attempt.number,
                    self._seeds[attempt.number],
                    slot,
                    attempt.total,
                    attempt.length,
                    now - attempt.began,
                    bool(moved.terminated[row]),
                    attempt.attempts,
                    own.get("final_info", own),
                )
            )
            self._next(slot)
        return ended

    def _share_out(self) -> None:
        """Let slots go on that were paused, should others have given episodes back.

        Raises:
            EpisodesDone: if nobody can run what is left.
        """
        exhausted = self._scheduler.table.exhausted
        free = [slot for slot in self._paused if slot not in exhausted]
        while self._queue and free:
            slot = free.pop(0)
            self._paused.remove(slot)
            self._scheduler.table.resume(np.array([slot]))
            self._next(slot)
        if self._queue and not self.busy:
            raise EpisodesDone(
                f"episodes: {len(self._queue)} of {len(self._seeds)} could not be run: the envs of slots "
                f"{sorted(exhausted)} have no further episode"
            )
