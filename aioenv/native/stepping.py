"""How the slots of a native task are reset and stepped: the rules of `SyncVectorEnv`, for all of them at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv.errors import ClosedError, ResetNeededError
from aioenv.native.hooks import check_columns, check_controls, check_obs, check_outcome, check_start
from aioenv.native.infos import final_info, leave_out, merge_infos, own, whole
from aioenv.native.task import Array, Slots, Task
from aioenv.spaces.seeds import spread_seeds

__all__ = ["Stepping"]

ALL = slice(None)
_NONE = np.zeros(0, np.int64)
_ONE = np.array(1)


class Stepping(Task, VectorEnv[Any, Any, Any]):
    """The part of `NativeMujocoEnv` that is reset and stepped.

    A step: `before_step`, `controls`, physics (for slots whose episode is over under NEXT_STEP: a new start instead),
    `after_start` if there was any, `observe`, `outcome`.
    """

    autoreset_mode: AutoresetMode
    frame_skip: int
    max_episode_steps: int | None
    _ctrl: Array
    _ones: npt.NDArray[np.bool_]
    _numbers: Slots
    _is_strange: bool  # whether hooks are somebody else's

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin an episode in every slot, or in those that the boolean array `options["reset_mask"]` names.

        Args:
            seed: None, an int (slot i gets `seed + i`), or one for each slot.
            options: may have a `reset_mask`.

        Returns:
            Observations of all slots (zeros of those that were never reset), and infos of those that were reset.

        Raises:
            ValueError, TypeError: if there is not one seed a slot, or the mask is none.
        """
        self._check_open()
        seeds = spread_seeds(seed, self._numbers, self.num_envs)
        mask = None if options is None else options.get("reset_mask")
        if mask is None:
            slots = self._numbers
        else:
            self._check_mask(mask)
            slots = np.flatnonzero(mask)
        seeded = {slot: seeding.np_random(seeds[slot]) for slot in slots.tolist() if seeds[slot] is not None}
        for slot, (rng, number) in seeded.items():
            self._rngs[slot], self._seeds[slot] = rng, number
        qpos, qvel = self._draw(slots)
        self.pool.start(None if mask is None else slots, qpos, qvel)
        self._forget_last(slots)
        self._begun[slots] = True
        self._all_begun = mask is None or bool(self._begun.all())
        self._elapsed[slots] = 0
        self._over = _NONE if mask is None else self._over[~mask[self._over]]
        where = ALL if mask is None else slots
        self.after_start(where)
        info = self._tell(where, len(slots))
        return self._observe_all(), merge_infos({}, info, slots, self.num_envs)

    def _observe_all(self) -> Array:
        obs = own(self._observe(ALL, self.num_envs))
        if not self._all_begun:
            obs[~self._begun] = 0
        if self._last:
            obs[list(self._last)] = [seen for seen, _ in self._last.values()]
        return obs

    def _keep_last(self, slots: Slots) -> None:
        kept = zip(self._observe_all()[slots], self.observed_physics_states(slots), strict=True)
        self._last.update(zip(slots.tolist(), kept, strict=True))

    def _forget_last(self, slots: Slots) -> None:
        """These slots are reset or stepped."""
        for slot in slots.tolist() if self._last else ():
            self._last.pop(slot, None)

    # hooks, whose results are looked at unless the task is one of ours

    def _draw(self, slots: Slots) -> tuple[Array, Array]:
        start = self.draw_start(slots)
        return check_start(self, start, len(slots)) if self._is_strange else start

    def _controls(self, actions: Array) -> Array:
        controls = self.controls(actions)
        return check_controls(self, controls, self._ctrl.shape) if self._is_strange else controls

    def _observe(self, slots: Any, count: int) -> Array:
        obs = self.observe(slots)
        return check_obs(self, obs, count) if self._is_strange else obs

    def _tell(self, slots: Any, count: int) -> dict[str, Array]:
        columns = self.start_info(slots)
        return check_columns(self, "start_info", columns, count) if self._is_strange else columns

    def _check_mask(self, mask: Any) -> None:
        if not isinstance(mask, np.ndarray):
            raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"`options['reset_mask']` must have shape `({self.num_envs},)`, got {mask.shape}")
        if mask.dtype != np.bool_:
            raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
        if not mask.any():
            raise ValueError(
                f"`options['reset_mask']` must contain a boolean array with at least one True value, got {mask}"
            )

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError.of(repr(self))

    def step(self, actions: Any) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step every slot; all that is returned is the caller's own.

        Args:
            actions: a batch of `action_space`, `(num_envs, nu)` unless a task says otherwise; rows of slots that begin
                an episode instead are not used.

        Returns:
            Observations, rewards (float64), terminations and truncations (bool), infos.

        Raises:
            ResetNeededError: if it was never reset, or an episode is over and `autoreset_mode` is DISABLED.
            ValueError: if `actions` has another shape.
        """
        return self._step(actions, None)

    def step_some(self, actions: Any, slots: Slots) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step some of the slots; the others are as they were, and take no physics.

        Args:
            actions: a batch for all slots, as for `step`; rows of other slots are not used.
            slots: which, int64, ascending; may be none.

        Returns:
            As `step`: rows of other slots have their last observation (zeros, if they were never reset), reward 0,
            flags False, and nothing in infos.

        Raises:
            ResetNeededError: if one of them was never reset, or its episode is over and `autoreset_mode` is DISABLED.
            ValueError: if `actions` has another shape.
        """
        if len(slots) == self.num_envs:
            return self._step(actions, None)
        rest = self._ones.copy()
        rest[slots] = False
        # hooks treat all rows: what they write of other slots is put back
        kept = self._keep(rest.nonzero()[0])
        try:
            return self._step(actions, rest)
        finally:
            self._put_back(*kept)

    def _keep(self, slots: Slots) -> tuple[Slots, list[Array], Array | None]:
        """What hooks may have written of some slots: what is remembered, and of somebody else's task the physics."""
        physics = self.pool.get_states(slots) if self._is_strange and len(slots) else None
        return slots, [array[slots] for array in self._memory.values()], physics

    def _put_back(self, slots: Slots, memory: list[Array], physics: Array | None) -> None:
        for array, rows in zip(self._memory.values(), memory, strict=True):
            array[slots] = rows
        if physics is not None and not self.closed:
            self.pool.set_states(physics, slots)

    def _step(
        self, actions: Any, rest: npt.NDArray[np.bool_] | None
    ) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step all slots, but for those of a mask."""
        actions = np.asarray(actions, order="C")  # sums of rows depend on it
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions: expected shape {self.action_space.shape}, got {actions.shape}")
        if not self._all_begun and (rest is None or not (self._begun | rest).all() or self.closed):
            self._check_open()
            raise ResetNeededError("Cannot call env.step() before calling env.reset()")
        starts, due = _NONE, self._over
        if rest is not None:
            due = due[~rest[due]]
        if len(due):
            if self.autoreset_mode is AutoresetMode.NEXT_STEP:
                starts = due
            elif self.autoreset_mode is AutoresetMode.DISABLED:
                raise ResetNeededError(
                    f"the episodes of slots {due.tolist()} are over: reset them with "
                    "options['reset_mask'], or choose another autoreset_mode"
                )
        self._forget_last(self._numbers if rest is None else (~rest).nonzero()[0])
        self.before_step()
        self._physics(self._controls(actions), starts, rest)
        obs = self._observe_all()
        # hooks treat all rows: what they write of slots that have just begun is put back
        fresh = self._keep(starts) if len(starts) else None
        outcome = self.outcome(actions, obs)
        if fresh is not None:
            self._put_back(*fresh)
        reward, terminated, columns = check_outcome(self, outcome) if self._is_strange else outcome
        if terminated is None:
            terminated = np.zeros(self.num_envs, np.bool_)
        elapsed = self._elapsed
        elapsed += _ONE if rest is None else ~rest
        if len(starts):
            elapsed[starts] = 0
        limit = self.max_episode_steps
        truncated = terminated & False if limit is None else elapsed >= limit
        reward = own(reward) if reward.dtype == np.float64 else reward.astype(np.float64)
        if rest is not None:
            reward[rest] = 0.0
            terminated[rest] = truncated[rest] = False
        first = 0 if rest is None else int(rest.argmin())  # of those that are stepped
        if len(starts):
            reward[starts] = 0.0
            terminated[starts] = False
            info = merge_infos(columns, self._tell(starts, len(starts)), starts, self.num_envs, first)
        else:
            info = {}
        over = (terminated | truncated).nonzero()[0]
        self._over = over if rest is None else np.union1d(over, self._over[rest[self._over]])
        if len(over) and self.autoreset_mode is AutoresetMode.SAME_STEP:
            info = self._begin_anew(over, obs, columns, first)
        elif not len(starts):
            info = whole(columns, self._ones)
        if rest is not None:
            info = leave_out(info, rest)
        return obs, reward, terminated, truncated, info

    def _physics(self, controls: Array, starts: Slots, rest: npt.NDArray[np.bool_] | None) -> None:
        """Step the simulations, but for those that begin an episode, and those of a mask."""
        if rest is None and not len(starts):
            self._ctrl[...] = controls
            self.pool.advance(self.frame_skip)
            return
        live = self._ones.copy() if rest is None else ~rest
        live[starts] = False
        slots = live.nonzero()[0]
        if rest is None:
            self._ctrl[...] = controls  # a start has its controls set to zero
        else:
            self._ctrl[slots] = controls[slots]
        if len(starts):
            qpos, qvel = self._draw(starts)
            self.pool.start_and_step(starts, qpos, qvel, slots, self.frame_skip)
            self.after_start(starts)
        elif len(slots):
            self.pool.step(slots, nstep=self.frame_skip)

    def _begin_anew(self, over: Slots, obs: Array, columns: dict[str, Array], first: int) -> dict[str, Any]:
        """Begin the next episodes in the step that has ended the last ones."""
        info = final_info(obs, columns, over, self.num_envs)
        self._finals = over, self.pool.get_states(over)
        self.pool.start(over, *self._draw(over))
        self._elapsed[over] = 0
        self._over = _NONE
        self.after_start(over)
        obs[over] = self._observe(over, len(over))
        info.update(merge_infos(columns, self._tell(over, len(over)), over, self.num_envs, first))
        return info
