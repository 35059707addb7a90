"""`Rollouts`: many steps of every slot, with one group's policy running while the other groups' envs step."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode

from aioenv.core.backend import Backend, RolloutBackend, SlotGroup
from aioenv.errors import ActionError, PausedError, ResetNeededError, SlotError, StepTimeout
from aioenv.rollout.recorder import GroupProgress, Rollout, RolloutRecorder
from aioenv.spaces.infos import Column, Columns, Schema

if TYPE_CHECKING:
    from aioenv.core.waits import Clock

__all__ = [
    "Policy",
    "Rollouts",
    "extras_hint",
    "has_parameter",
    "is_pair_space",
    "is_torch_module",
    "split_answer",
    "takes_slots",
]

Policy = Callable[..., Any | Awaitable[Any]]

# The info of an episode's last observation under DISABLED, where the rollout itself resets; as that of SAME_STEP.
_FINAL_OBS = Schema((Column(("final_obs",), None, ()),), False, False)
# The usual types of a policy's answer, which are not awaitable.
_ANSWERS = frozenset((np.ndarray, tuple))
_SPLITS = ("slots", "workers")


class Rollouts:
    """Runs rollouts of a started vector env; see `AsyncVectorEnv.rollout`.

    Args:
        backend: steps the envs.
        clock: counts how long the caller waits.
        mode: the autoreset mode.
    """

    def __init__(self, backend: Backend, clock: Clock, mode: AutoresetMode) -> None:
        self._backend = backend
        self._clock = clock
        self._mode = mode

    async def run(self, policy: Policy, steps: int, groups: int, split: str) -> Rollout:
        """Collect `steps` steps of every slot."""
        _check(self._backend, policy, steps, groups, split)
        rollouts = self._backend.rollout_backend()
        found = rollouts.split(int(groups), whole_workers=split == "workers")
        return await _RolloutRun(self._backend, rollouts, found, self._clock, self._mode, policy, int(steps)).run()


def _check(backend: Backend, policy: Policy, steps: int, groups: int, split: str) -> None:
    """Raise if arguments or slots don't allow a rollout (see `AsyncVectorEnv.rollout`)."""
    for name, value in (("steps", steps), ("groups", groups)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"rollout: {name}: expected a positive int, got {value!r}")
    if split not in _SPLITS:
        raise ValueError(f"rollout: split: expected one of {_SPLITS}, got {split!r}")
    if not callable(policy):
        raise TypeError(f"rollout: policy: expected a function of observations, got {policy!r}")
    if not len(live := backend.table.active):
        raise PausedError("rollout: all slots are paused; resume() some first")
    if len(unseen := np.intersect1d(backend.table.unseen(), live)):
        raise ResetNeededError(
            f"rollout: slots {unseen.tolist()} have no observation to begin with: they were never reset, or a "
            "state was set since; reset() or step() them first"
        )


class _RolloutRun:
    """One rollout."""

    def __init__(
        self,
        backend: Backend,
        rollouts: RolloutBackend,
        groups: Sequence[SlotGroup],
        clock: Clock,
        mode: AutoresetMode,
        policy: Policy,
        steps: int,
    ) -> None:
        self._backend = backend
        self._rollouts = rollouts
        self._clock = clock
        self._mode = mode
        self._policy = policy
        self._takes_slots = takes_slots(policy)
        self._steps = steps
        self._observations = backend.observations
        self._groups = [
            GroupProgress(group, f"group {i} of {len(groups)} ({len(group.slots)} slots)")
            for i, group in enumerate(groups)
        ]
        next_step = mode is AutoresetMode.NEXT_STEP
        self._recorder = RolloutRecorder(backend, steps, rollouts.merge, resets_next_step=next_step)
        self._actions_are_pairs = is_pair_space(backend.single_action_space)

    async def run(self) -> Rollout:
        try:
            await self._read_initial_state()
            for _ in range(self._steps):
                for progress in self._groups:
                    await self._receive(progress)
                    await self._act(progress)
            self._rollouts.sent()
            for progress in self._groups:
                await self._receive(progress)
        except SlotError as error:
            raise await self._end_early(error) from error.__cause__
        except BaseException as error:
            self._abandon()
            if isinstance(error, StepTimeout):
                error.partial = self._recorder.rollout(self._groups)
            raise
        finally:
            for progress in self._groups:
                progress.group.close()
        self._rollouts.ended(self._recorder.final_state(self._groups))
        return self._recorder.rollout(self._groups)

    async def _read_initial_state(self) -> None:
        """Get the latest observations, and the slots whose next step will be an automatic reset."""
        table = self._backend.table
        wait = self._clock.envs.begin()
        try:
            state = await self._rollouts.look(pending_reset=self._mode is AutoresetMode.NEXT_STEP)
        finally:
            wait.end()
        for progress in self._groups:
            rows = np.searchsorted(state.slots, progress.slots)
            progress.obs = [array[rows] for array in state.obs]
            progress.objects = [[column[row] for row in rows.tolist()] for column in state.objects]
            progress.pending_reset = state.pending_reset[rows]
            ended = table.over(progress.slots)
            progress.ended = ended if ended.any() else None
            self._recorder.record_observations(progress)
        # slots that were paused when the groups were made; another task may have paused more since
        stepped = np.concatenate([progress.slots for progress in self._groups])
        if len(stepped) < self._backend.num_envs:
            paused = np.ones(self._backend.num_envs, np.bool_)
            paused[stepped] = False
            rows = np.flatnonzero(paused[state.slots])
            obs = [array[rows] for array in state.obs]
            objects = [[column[row] for row in rows.tolist()] for column in state.objects]
            self._recorder.record_paused(np.flatnonzero(paused), state.slots[rows], obs, objects)

    # ------------------------------------------------------------ one step of one group

    async def _act(self, progress: GroupProgress) -> None:
        """Call the policy, and send its actions."""
        if progress.ended is not None:
            await self._reset_ended(progress, progress.ended)
        try:
            answer = self._call_policy(progress)
            if type(answer) not in _ANSWERS and inspect.isawaitable(answer):  # `isawaitable` is slow
                answer = await answer
            actions, extras = split_answer(answer, self._actions_are_pairs)
            self._recorder.record_extras(progress, extras)
        except Exception as exc:
            exc.add_note(f"in the policy of a rollout: {progress.name}, step {progress.steps_sent}")
            raise
        wait = self._clock.envs.begin()  # a vector env in this process may step during the call
        try:
            arrays, objects = progress.group.send(actions)
        except ActionError as exc:
            hint = extras_hint(actions, self._backend.single_action_space)
            raise ActionError(f"rollout, {progress.name}, step {progress.steps_sent}: {exc}{hint}") from exc
        finally:
            wait.end()
        self._recorder.record_actions(progress, arrays, objects)
        progress.steps_sent += 1

    def _call_policy(self, progress: GroupProgress) -> Any:
        """Return the answer of the policy, or an awaitable of it."""
        obs = self._observations.assemble(progress.obs, progress.objects)
        return self._policy(obs, slots=progress.slots.copy()) if self._takes_slots else self._policy(obs)

    async def _receive(self, progress: GroupProgress) -> None:
        """Wait for the result of the group's last step, if one is in flight."""
        group = progress.group
        if not group.in_flight:
            return
        wait = self._clock.envs.begin()
        try:
            outcome = await group.recv()
        finally:
            wait.end()
        progress.obs, progress.objects = outcome.obs, outcome.objects
        self._recorder.record_observations(progress)
        self._recorder.record_outcome(progress, outcome)
        if outcome.valid is not None:
            self._recorder.mark_invalid(progress, ~outcome.valid)
        if exhausted := self._backend.table.exhausted:
            self._recorder.mark_invalid(
                progress, np.isin(progress.slots, list(exhausted)) & ~(outcome.terminated | outcome.truncated)
            )
        progress.steps_received += 1
        if self._mode is AutoresetMode.DISABLED:
            ended = outcome.terminated | outcome.truncated
            progress.ended = None
            if ended.any():
                progress.ended = ended
                self._add_final_obs(progress, ended)
        if outcome.error is not None:
            raise outcome.error

    def _add_final_obs(self, progress: GroupProgress, ended: npt.NDArray[np.bool_]) -> None:
        """Add the last observations of episodes to the infos of the step just received (under DISABLED)."""
        rows = np.flatnonzero(ended)
        terminal = self._observations.rows(
            [array[rows] for array in progress.obs], [[column[i] for i in rows] for column in progress.objects]
        )
        self._recorder.infos[progress.steps_received - 1].append(Columns(progress.slots[rows], _FINAL_OBS, [terminal]))

    async def _reset_ended(self, progress: GroupProgress, ended: npt.NDArray[np.bool_]) -> None:
        """Reset the slots whose episodes are over (under DISABLED)."""
        rows = np.flatnonzero(ended)
        slots = progress.slots[rows]
        progress.ended = None
        progress.group.send_reset(slots, automatic=True)
        wait = self._clock.envs.begin()
        try:
            outcome = await progress.group.recv()
        finally:
            wait.end()
        # the policy may have kept these
        progress.obs = [array.copy() for array in progress.obs]
        progress.objects = [list(column) for column in progress.objects]
        for array, fresh in zip(progress.obs, outcome.obs, strict=True):
            array[rows] = fresh
        for column, items in zip(progress.objects, outcome.objects, strict=True):
            for row, item in zip(rows.tolist(), items, strict=True):
                column[row] = item
        self._recorder.record_observations(progress)
        if outcome.error is not None:
            raise outcome.error

    # ------------------------------------------------------------ errors

    async def _end_early(self, error: SlotError) -> SlotError:
        """After an error of some slots, receive the steps in flight; return the error of all slots."""
        errors = list(error.errors)
        try:
            for progress in self._groups:
                try:
                    await self._receive(progress)
                except SlotError as more:
                    errors += more.errors
        except BaseException as another:
            self._abandon()
            if isinstance(another, StepTimeout):
                another.partial = self._recorder.rollout(self._groups)
            raise
        return SlotError.join(errors, self._recorder.rollout(self._groups))

    def _abandon(self) -> None:
        """Leave the requests in flight to `recv` of the vector env."""
        for progress in self._groups:
            progress.group.abandon()


def is_pair_space(space: Space[Any]) -> bool:
    """Return whether an action is itself a pair whose second element is a dict."""
    return isinstance(space, spaces.Tuple) and [type(s) for s in space][1:] == [spaces.Dict]


def split_answer(answer: Any, pairs: bool) -> tuple[Any, dict[str, Any]]:
    """Return the actions and the extras in a policy's answer; with `pairs`, an action is a pair, so all is actions."""
    pair = type(answer) is tuple and len(answer) == 2 and isinstance(answer[1], dict)
    return answer if pair and not pairs else (answer, {})


def extras_hint(actions: Any, space: Space[Any]) -> str:
    """Return a hint about actions that did not fit if the policy seems to have returned a tuple with values."""
    beside = type(actions) is tuple and any(getattr(part, "shape", ()) for part in actions)
    return '; a policy gives actions, or (actions, {"value": …})' * (beside and not isinstance(space, spaces.Tuple))


def takes_slots(policy: Policy) -> bool:
    """Return whether a policy has a parameter `slots`."""
    return has_parameter(policy, "slots")


def has_parameter(policy: Policy, name: str) -> bool:
    """Return whether a policy has a parameter of this name."""
    try:
        # a policy that was made of another one has its parameters, as for `signature`
        found: Any = inspect.unwrap(policy, stop=lambda function: hasattr(function, "__signature__"))
        # calls of a module take anything, and hand it on
        parameter = inspect.signature(found.forward if is_torch_module(found) else found).parameters.get(name)
    except (TypeError, ValueError):  # a function of C without a signature
        return False
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def is_torch_module(policy: Any) -> bool:
    """Return whether a policy is a `torch.nn.Module`; torch is not imported for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(policy, torch.nn.Module)
