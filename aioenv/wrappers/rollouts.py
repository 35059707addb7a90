"""`WrapperRollouts`: rollouts of a wrapped vector env, whose slots step all together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from gymnasium.vector import AutoresetMode

from aioenv.core.backend import Backend, InitialState, StepOutcome
from aioenv.core.waits import Clock
from aioenv.errors import ResetNeededError, SlotError
from aioenv.rollout.recorder import Rollout
from aioenv.rollout.rollout import Policy, Rollouts
from aioenv.spaces.infos import Columns, merge_infos
from aioenv.spaces.layout import Arrays, Layout
from aioenv.worker.vector_access import take_observations

if TYPE_CHECKING:
    from aioenv.wrappers.vector_wrapper import VectorWrapper

__all__ = ["WrapperRollouts"]


class WrapperRollouts:
    """As much of a backend as a rollout needs (see `Backend` and `RolloutBackend`), over a wrapper's step and reset.

    Args:
        envs: a wrapper, of which no request is in flight.
    """

    def __init__(self, envs: VectorWrapper) -> None:
        self._envs = envs
        self.num_envs = envs.num_envs
        self.table = envs.unwrapped._check_running().table
        self.observations = Layout(envs.single_observation_space)
        self.actions = Layout(envs.single_action_space)
        self.single_action_space = envs.single_action_space

    async def run(self, policy: Policy, steps: int) -> Rollout:
        """Collect `steps` steps of every slot."""
        # the vector env's own clock runs in its steps
        return await Rollouts(cast(Backend, self), Clock(), self._envs.autoreset_mode).run(policy, steps, 1, "slots")

    def rollout_backend(self) -> WrapperRollouts:
        """Return this."""
        return self

    def split(self, groups: int, *, whole_workers: bool) -> list[_AllSlots]:
        """Return the one group of all slots."""
        return [_AllSlots(self._envs, self.observations, self.actions)]

    async def look(self, *, pending_reset: bool) -> InitialState:
        """Return the observations that were returned last."""
        envs, n = self._envs, self.num_envs
        if envs.last_obs is None:
            raise ResetNeededError("rollout: there is no observation to begin with: reset() first")
        arrays, objects = take_observations(self.observations, envs.last_obs, n)
        resets = envs.pending_reset if envs.autoreset_mode is AutoresetMode.NEXT_STEP else np.zeros(n, np.bool_)
        return InitialState(np.arange(n), arrays, [list(column) for column in objects], resets)

    def sent(self) -> None:
        """Do nothing (see `RolloutBackend.sent`)."""

    def ended(self, state: InitialState | None) -> None:
        """Do nothing (see `RolloutBackend.ended`)."""

    def merge(self, infos: Sequence[Any], *, by_slot: bool = False) -> dict[str, Any]:
        """Return the info of a step, with last observations that the rollout has added."""
        (info,) = [piece for piece in infos if not isinstance(piece, Columns)]
        return {**info, **merge_infos([piece for piece in infos if isinstance(piece, Columns)], self.num_envs)}


class _AllSlots:
    """All slots of a wrapped vector env (see `SlotGroup`). A request is sent when it is waited for."""

    def __init__(self, envs: VectorWrapper, observations: Layout, actions: Layout) -> None:
        self.slots = np.arange(envs.num_envs)
        self._envs = envs
        self._observations = observations
        self._layout = actions
        self._actions: Any = None
        self._resets: Any = None  # the slots of a reset
        self.in_flight = False

    def send(self, actions: Any) -> tuple[Arrays, Sequence[Sequence[Any]]]:
        """Check the actions of a step (see `SlotGroup.send`)."""
        arrays, objects = self._layout.take_apart(actions, len(self.slots))
        self._actions, self._resets, self.in_flight = self._layout.assemble(arrays, objects), None, True
        return arrays, objects

    def send_reset(self, slots: Any, *, automatic: bool) -> None:
        """Note the slots of a reset (see `SlotGroup.send_reset`)."""
        self._resets, self.in_flight = slots, True

    async def recv(self) -> StepOutcome:
        """Step or reset (see `SlotGroup.recv`)."""
        envs, n, error = self._envs, len(self.slots), None
        self.in_flight = False
        result: Any
        try:
            if self._resets is not None:
                mask = np.zeros(n, np.bool_)
                mask[self._resets] = True
                result = await envs.reset(options={"reset_mask": mask})
            else:
                result = await envs.step(self._actions)
        except SlotError as exc:
            if exc.partial is None:
                raise
            result, error = exc.partial, exc
        info = envs.last_info  # always a dict
        arrays, objects = take_observations(self._observations, result.obs, n)
        slots = self.slots if self._resets is None else self._resets
        valid = np.ones(n, np.bool_)
        if self._resets is not None:
            arrays = [array[slots] for array in arrays]
            objects = [[column[slot] for slot in slots.tolist()] for column in objects]
            nothing = np.zeros(len(slots), np.bool_)
            return StepOutcome(arrays, objects, np.zeros(len(slots)), nothing, nothing, None, [info], error)
        if error is not None:
            valid[list(error.slots)] = False
        for key, invalid in (("_active", False), ("restarted", True)):
            if key in info:
                valid &= info[key] != invalid
        columns = [list(column) for column in objects]
        return StepOutcome(arrays, columns, result.reward, result.terminated, result.truncated, valid, [info], error)

    def abandon(self) -> None:
        """Do nothing: the wrapper keeps the request for its `recv`."""

    def close(self) -> None:
        """Do nothing (see `SlotGroup.close`)."""
