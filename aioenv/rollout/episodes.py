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
from aioenv.rollout.episode_stepper import EpisodeStepper, GroupEpisodeStepper, SteppedSlots
from aioenv.rollout.pausing import ActiveSlots
from aioenv.rollout.rollout import Policy, are_pairs, hint_for, split_answer, takes
from aioenv.spaces.seeding import listed_seeds

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.waits import Clock

__all__ = ["Episode", "Numbered", "episode_seeds"]

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


class Numbered:
    """The part of a vector env that runs episodes by number."""

    num_envs: int
    _clock: Clock
    _live: ActiveSlots | None
    _latest: list[_EpisodesRun] | None = None  # the run of the latest iteration, until it ends

    if TYPE_CHECKING:

        @property
        def _running(self) -> RequestScheduler: ...

    def episodes(
        self, policy: Policy, n: int, *, seed: int | Sequence[int | None] | None = None
    ) -> AsyncGenerator[Episode, None]:
        """Run episodes 0 … n-1, each exactly once and to its end, however long each is::

            async for episode in envs.episodes(policy, 100, seed=0):
                print(episode.number, episode.total_reward)

        They come as they end. Episode k begins with a reset with a seed of its own, so that its result, for a
        deterministic policy that treats row by row, depends neither on how many slots and workers there are nor on
        what was lost on the way; and since those that count are chosen before they are run, short ones are not
        over-represented. A slot with nothing left to do is paused, until the end of the iteration. Afterwards, or when
        the iteration is left early, `reset` before you step. Where envs reset by themselves in the last step of an
        episode (`AutoresetMode.SAME_STEP`), they are reset twice.

        With `restart=RestartPolicy()` an episode that a worker has lost is run again, with its seed. If this is
        cancelled, the policy raises, or something goes wrong in an env, what is in flight is left as by a cancelled
        `step`.

        Args:
            policy: `policy(obs)` gives a batch of actions for the observations of all slots, `(num_envs, …)`: rows of
                slots that are not stepped just now are ignored. Of the parameters that it names it gets `slots` (as for
                `rollout`: here always all of them), `episodes`, int64 `(num_envs,)`, which episode each row is of, -1
                for none; and `started`, bool `(num_envs,)`, whose observation is an episode's first one: there a
                recurrent policy clears its state. It may be a coroutine function.
            n: how many.
            seed: an int, or None for fresh entropy, from which a seed is drawn for each episode; or a list of n.

        Raises:
            ValueError, TypeError: if an argument is none of the values that it may have.
            PausedError: if all slots are paused.
            PendingCallError: if a slot has a request in flight, or a result that nobody took; or another iteration
                has begun since: it has the slots; or they were stepped or reset by somebody else meanwhile.
            EpisodesDone: if envs have no further episode before n have been run.
            ActionError, EnvError, WorkerDied, StepTimeout: as for `step`.
        """
        schedule = self._running
        if not callable(policy):
            raise TypeError(f"episodes: policy: expected a function of observations, got {policy!r}")
        _, seeds = episode_seeds(n, seed)
        runs: list[_EpisodesRun] = []

        def end() -> None:
            if runs:
                runs.pop().end()
                self._live = None

        return _Iteration(self._episodes(schedule, policy, seeds, runs, end), end)

    async def _episodes(
        self,
        schedule: RequestScheduler,
        policy: Policy,
        seeds: Sequence[int | None],
        runs: list[_EpisodesRun],
        end: Callable[[], None],
    ) -> AsyncGenerator[Episode, None]:
        await schedule.drain()
        if schedule.outstanding:
            raise PendingCallError("episodes: there are requests in flight, or results that nobody took; recv() them")
        if self._latest:  # an iteration that was left early, and that somebody still holds
            self._latest.pop().end()
            self._live = None
        self._latest = runs
        run = _EpisodesRun(schedule, self._walk(schedule), self._clock, policy, seeds)
        runs.append(run)
        try:
            while run.busy:
                for episode in await run.advance():
                    yield episode
        finally:
            end()

    def _walk(self, schedule: RequestScheduler) -> EpisodeStepper:
        return GroupEpisodeStepper(schedule)


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
    seeds = listed_seeds(seed)
    if len(seeds) != n:
        raise ValueError(f"seed: expected an int, None, or a list of one for each of {n} episodes, got {len(seeds)}")
    return None, seeds


class _Iteration(AsyncGenerator[Episode, None]):
    """An iteration over episodes that ends when it is let go of, as by `break`.

    A generator's own end comes with a later turn of the loop: until then what is paused would stay so.

    Args:
        inner: the episodes.
        end: ends what they began; idempotent.
    """

    def __init__(self, inner: AsyncGenerator[Episode, None], end: Callable[[], None]) -> None:
        self._inner = inner
        self._end = end

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
        schedule: RequestScheduler,
        walk: EpisodeStepper,
        clock: Clock,
        policy: Policy,
        seeds: Sequence[int | None],
    ) -> None:
        table, n = schedule.table, schedule.num_envs
        if not len(table.active):
            raise PausedError("episodes: all slots are paused; resume() some first")
        self._schedule = schedule
        self._walk = walk
        self._clock = clock
        self._policy = policy
        self._wanted = [name for name in ("slots", "episodes", "started") if takes(policy, name)]
        self._pairs = are_pairs(schedule.single_action_space)
        self._seeds = seeds
        self._queue = deque(range(len(seeds)))
        self._running: dict[int, _Attempt] = {}  # by slot
        self._begin: dict[int, _Attempt] = {}  # to be reset next
        self._started = np.zeros(n, np.bool_)
        self._paused: list[int] = []
        self._over = False
        self._counted = self._count()
        for slot in table.active.tolist():
            self._next(slot)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._begin)

    def _count(self) -> tuple[int, int]:
        """How many steps and resets there have been, whosever they were."""
        return self._schedule.table.steps, self._schedule.table.resets

    def end(self) -> None:
        """Resume what was paused here; there are no more episodes."""
        self._over = True
        own = [slot for slot in self._paused if slot not in self._schedule.table.exhausted]
        self._schedule.table.resume(np.array(own, np.int64))

    def _next(self, slot: int) -> None:
        """A slot is free: begin another episode, or pause it."""
        if self._queue:
            self._begin[slot] = _Attempt(self._queue.popleft(), 1)
        else:
            self._paused.append(slot)
            self._schedule.table.pause([slot])

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
            moved = await self._walk.move(stepped, *actions, seeds)
        finally:
            wait.end()
        self._counted = self._count()
        for column in self._walk.objects:  # slots without a first episode show another's, rather than None
            shown = next((item for item in column if item is not None), None)
            if any(item is None for item in column):
                column[:] = [shown if item is None else item for item in column]
        ended = self._take(stepped, moved) if moved is not None else []
        self._started[:] = False
        for slot, attempt in reset.items():
            if slot in self._schedule.table.exhausted:
                self._queue.appendleft(attempt.number)
            else:
                self._running[slot] = attempt
                self._started[slot] = True
        self._share_out()
        return ended

    async def _ask(self) -> tuple[Any, Any]:
        """What the policy would have all slots do, taken apart."""
        n, worker_pool = self._schedule.num_envs, self._schedule.worker_pool
        given: dict[str, Any] = {}
        if "slots" in self._wanted:
            given["slots"] = np.arange(n)
        if "started" in self._wanted:
            given["started"] = self._started.copy()
        if "episodes" in self._wanted:
            given["episodes"] = np.array([self._running[i].number if i in self._running else -1 for i in range(n)])
        obs = worker_pool.observations.assemble(
            [array.copy() for array in self._walk.obs], [list(c) for c in self._walk.objects]
        )
        answer = self._policy(obs, **given)
        if inspect.isawaitable(answer):
            answer = await answer
        actions = split_answer(answer, self._pairs)[0]
        try:
            return worker_pool.actions.take_apart(actions, n)
        except ActionError as exc:
            if hint := hint_for(actions, worker_pool.single_action_space):
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
        exhausted = self._schedule.table.exhausted
        free = [slot for slot in self._paused if slot not in exhausted]
        while self._queue and free:
            slot = free.pop(0)
            self._paused.remove(slot)
            self._schedule.table.resume(np.array([slot]))
            self._next(slot)
        if self._queue and not self.busy:
            raise EpisodesDone(
                f"episodes: {len(self._queue)} of {len(self._seeds)} could not be run: the envs of slots "
                f"{sorted(exhausted)} have no further episode"
            )
