"""Rollouts: many steps of every slot, with one group's policy running while the other groups' envs step."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode

from aioenv.core.backend import RolloutBackend, SlotGroup
from aioenv.errors import ActionError, PausedError, ResetNeededError, SlotError, StepTimeout
from aioenv.rollout.recorder import RecordedTurn, Rollout, RolloutRecorder
from aioenv.spaces.infos import Column, Columns, Schema

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.waits import Clock

__all__ = ["Policy", "Rollouts", "are_pairs", "hint_for", "split_answer", "takes", "takes_slots"]

Policy = Callable[..., Any | Awaitable[Any]]

# What an episode's last observation is told as where the rollout itself resets (DISABLED), as SAME_STEP tells it.
_FINAL_OBS = Schema((Column(("final_obs",), None, ()),), False, False)
# What policies mostly give, if not something to await.
_ANSWERS = frozenset((np.ndarray, tuple))
_SPLITS = ("slots", "workers")


class Rollouts:
    """Runs rollouts of a started vector env; see `AsyncVectorEnv.rollout`.

    Args:
        scheduler: knows the spaces and the slots.
        make_backend: makes what a rollout is sent over, for each anew.
        clock: counts how long the caller waits.
        mode: the autoreset mode.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        make_backend: Callable[[], RolloutBackend],
        clock: Clock,
        mode: AutoresetMode,
    ) -> None:
        self._scheduler = scheduler
        self._make_backend = make_backend
        self._clock = clock
        self._mode = mode

    async def run(self, policy: Policy, steps: int, groups: int, split: str) -> Rollout:
        """Collect `steps` steps of every slot."""
        _check(self._scheduler, policy, steps, groups, split)
        backend = self._make_backend()
        found = backend.split(int(groups), whole_workers=split == "workers")
        return await _RolloutRun(self._scheduler, backend, found, self._clock, self._mode, policy, int(steps)).run()


def _check(scheduler: RequestScheduler, policy: Policy, steps: int, groups: int, split: str) -> None:
    """Raise unless there can be such a rollout (see `AsyncVectorEnv.rollout`)."""
    for name, value in (("steps", steps), ("groups", groups)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"rollout: {name}: expected a positive int, got {value!r}")
    if split not in _SPLITS:
        raise ValueError(f"rollout: split: expected one of {_SPLITS}, got {split!r}")
    if not callable(policy):
        raise TypeError(f"rollout: policy: expected a function of observations, got {policy!r}")
    if not len(live := scheduler.table.live):
        raise PausedError("rollout: all slots are paused; resume() some first")
    if len(unseen := np.intersect1d(scheduler.table.unseen(), live)):
        raise ResetNeededError(
            f"rollout: slots {unseen.tolist()} have no observation to begin with: they were never reset, or a "
            "state was set since; reset() or step() them first"
        )


class _RolloutRun:
    """One rollout."""

    def __init__(
        self,
        scheduler: RequestScheduler,
        backend: RolloutBackend,
        groups: Sequence[SlotGroup],
        clock: Clock,
        mode: AutoresetMode,
        policy: Policy,
        steps: int,
    ) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self._clock = clock
        self._mode = mode
        self._policy = policy
        self._takes_slots = takes_slots(policy)
        self._steps = steps
        self._observations = scheduler.fleet.observations
        self._turns = [
            RecordedTurn(group, f"group {i} of {len(groups)} ({len(group.slots)} slots)")
            for i, group in enumerate(groups)
        ]
        next_step = mode is AutoresetMode.NEXT_STEP
        self._record = RolloutRecorder(scheduler, steps, backend.merge, resets_next_step=next_step)
        self._actions_are_pairs = are_pairs(scheduler.fleet.single_action_space)

    async def run(self) -> Rollout:
        try:
            await self._look()
            for _ in range(self._steps):
                for turn in self._turns:
                    await self._take(turn)
                    await self._act(turn)
            self._backend.sent()
            for turn in self._turns:
                await self._take(turn)
        except SlotError as error:
            raise await self._stop(error) from error.__cause__
        except BaseException as error:
            self._abandon()
            if isinstance(error, StepTimeout):
                error.partial = self._record.result(self._turns)
            raise
        finally:
            for turn in self._turns:
                turn.group.close()
        self._backend.ended(self._record.seen(self._turns))
        return self._record.result(self._turns)

    async def _look(self) -> None:
        """Find out what the envs are at: observations, and where an automatic reset is due."""
        table = self._scheduler.table
        wait = self._clock.envs.begin()
        try:
            seen = await self._backend.look(pending_reset=self._mode is AutoresetMode.NEXT_STEP)
        finally:
            wait.end()
        for turn in self._turns:
            rows = np.searchsorted(seen.slots, turn.slots)
            turn.obs = [array[rows] for array in seen.obs]
            turn.objects = [[column[row] for row in rows.tolist()] for column in seen.objects]
            turn.due = seen.pending_reset[rows]
            over = table.over(turn.slots)
            turn.over = over if over.any() else None
            self._record.saw(turn)
        # those that were paused when the groups were made; another task may have paused more meanwhile
        groups = np.concatenate([turn.slots for turn in self._turns])
        if len(groups) < self._scheduler.num_envs:
            paused = np.ones(self._scheduler.num_envs, np.bool_)
            paused[groups] = False
            rows = np.flatnonzero(paused[seen.slots])
            resting = [array[rows] for array in seen.obs]
            objects = [[column[row] for row in rows.tolist()] for column in seen.objects]
            self._record.rest(np.flatnonzero(paused), seen.slots[rows], resting, objects)

    # ------------------------------------------------------------ one step of one group

    async def _act(self, turn: RecordedTurn) -> None:
        """Let the policy choose, and send what it chose."""
        if turn.over is not None:
            await self._reset(turn, turn.over)
        try:
            answer = self._ask(turn)
            if type(answer) not in _ANSWERS and inspect.isawaitable(answer):  # to ask takes longer
                answer = await answer
            actions, extras = split_answer(answer, self._actions_are_pairs)
            self._record.extras_of(turn, extras)
        except Exception as exc:
            exc.add_note(f"in the policy of a rollout: {turn.name}, step {turn.acted}")
            raise
        wait = self._clock.envs.begin()  # a vector env in this process may step here and now
        try:
            arrays, objects = turn.group.send(actions)
        except ActionError as exc:
            hint = hint_for(actions, self._scheduler.fleet.single_action_space)
            raise ActionError(f"rollout, {turn.name}, step {turn.acted}: {exc}{hint}") from exc
        finally:
            wait.end()
        self._record.did(turn, arrays, objects)
        turn.acted += 1

    def _ask(self, turn: RecordedTurn) -> Any:
        """What the policy says, or something to await that gives it."""
        obs = self._observations.assemble(turn.obs, turn.objects)
        return self._policy(obs, slots=turn.slots.copy()) if self._takes_slots else self._policy(obs)

    async def _take(self, turn: RecordedTurn) -> None:
        """Wait for the results of what was sent last, if anything was."""
        group = turn.group
        if not group.in_flight:
            return
        wait = self._clock.envs.begin()
        try:
            came = await group.recv()
        finally:
            wait.end()
        turn.obs, turn.objects = came.obs, came.objects
        self._record.saw(turn)
        self._record.received(turn, came)
        if came.valid is not None:
            self._record.invalidate(turn, ~came.valid)
        if exhausted := self._scheduler.table.exhausted:
            self._record.invalidate(turn, np.isin(turn.slots, list(exhausted)) & ~(came.terminated | came.truncated))
        turn.taken += 1
        if self._mode is AutoresetMode.DISABLED:
            over = came.terminated | came.truncated
            turn.over = None
            if over.any():
                turn.over = over
                self._tell_ends(turn, over)
        if came.error is not None:
            raise came.error

    def _tell_ends(self, turn: RecordedTurn, over: npt.NDArray[np.bool_]) -> None:
        """Put last observations into the infos of the step that was just taken, where nothing else does (DISABLED)."""
        rows = np.flatnonzero(over)
        terminal = self._observations.rows(
            [array[rows] for array in turn.obs], [[column[i] for i in rows] for column in turn.objects]
        )
        self._record.infos[turn.taken - 1].append(Columns(turn.slots[rows], _FINAL_OBS, [terminal]))

    async def _reset(self, turn: RecordedTurn, over: npt.NDArray[np.bool_]) -> None:
        """Reset the slots whose episodes are over, where nothing else does (DISABLED)."""
        rows = np.flatnonzero(over)
        slots = turn.slots[rows]
        turn.over = None
        turn.group.send_reset(slots)
        wait = self._clock.envs.begin()
        try:
            came = await turn.group.recv()
        finally:
            wait.end()
        # others may hold these
        turn.obs = [array.copy() for array in turn.obs]
        turn.objects = [list(column) for column in turn.objects]
        for array, fresh in zip(turn.obs, came.obs, strict=True):
            array[rows] = fresh
        for column, items in zip(turn.objects, came.objects, strict=True):
            for row, item in zip(rows.tolist(), items, strict=True):
                column[row] = item
        self._record.saw(turn)
        if came.error is not None:
            raise came.error

    # ------------------------------------------------------------ the end before time

    async def _stop(self, error: SlotError) -> SlotError:
        """Some slots have failed: take what is in flight, send nothing more; gives the error of all."""
        errors = list(error.errors)
        try:
            for turn in self._turns:
                try:
                    await self._take(turn)
                except SlotError as more:
                    errors += more.errors
        except BaseException as another:
            self._abandon()
            if isinstance(another, StepTimeout):
                another.partial = self._record.result(self._turns)
            raise
        return SlotError.join(errors, self._record.result(self._turns))

    def _abandon(self) -> None:
        for turn in self._turns:
            turn.group.abandon()


def are_pairs(space: Space[Any]) -> bool:
    """Whether an action is itself a pair whose second element is a dict."""
    return isinstance(space, spaces.Tuple) and [type(s) for s in space][1:] == [spaces.Dict]


def split_answer(answer: Any, pairs: bool) -> tuple[Any, dict[str, Any]]:
    """What a policy has answered: actions, and what it gave beside them; with `pairs` there is nothing beside."""
    pair = type(answer) is tuple and len(answer) == 2 and isinstance(answer[1], dict)
    return answer if pair and not pairs else (answer, {})


def hint_for(actions: Any, space: Space[Any]) -> str:
    """What to say of actions that did not fit, if a policy seems to have given values and the like beside them."""
    beside = type(actions) is tuple and any(getattr(part, "shape", ()) for part in actions)
    return '; a policy gives actions, or (actions, {"value": …})' * (beside and not isinstance(space, spaces.Tuple))


def takes_slots(policy: Policy) -> bool:
    """Whether a policy has a parameter `slots`."""
    return takes(policy, "slots")


def takes(policy: Policy, name: str) -> bool:
    """Whether a policy has a parameter of this name."""
    try:
        parameter = inspect.signature(policy).parameters.get(name)
    except (TypeError, ValueError):  # a function of C that does not tell
        return False
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
