"""What a task of NativeMujocoEnv's says of itself, in hooks, and what it says that with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space

from aioenv.native.slot_states import SlotStates

__all__ = ["Task"]

Array = npt.NDArray[Any]
Slots = npt.NDArray[np.int64]


class Task(SlotStates):
    """The part of `NativeMujocoEnv` that tasks override and call."""

    single_observation_space: Any
    observation_space: Any
    single_action_space: Any
    action_space: Any

    # ------------------------------------------------------------ what a task says

    def draw_start(self, slots: Slots) -> tuple[Array, Array]:
        """Where new episodes begin: positions `(k, nq)` and velocities `(k, nv)`, drawn with `uniform` or `normal`.

        The rest of MuJoCo's state begins as the model has it; `after_start` may write to it, and call
        `self.pool.forward(slots)` then.
        """
        raise _missing(self, "draw_start(slots)")

    def observe(self, slots: Any) -> Array:
        """Observations `(k, ...)` in a new array; `slots` indexes live arrays: all slots as a slice, or numbers."""
        raise _missing(self, "observe(slots)")

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """What the step that was made means: rewards, terminations (None: none), and columns of infos.

        All rows must be there, in arrays of which copies are taken; those of slots that have just begun an episode are
        not used, and what is remembered of them here, or written to MuJoCo's state, is put back. `obs` is what will be
        returned.
        """
        raise _missing(self, "outcome(actions, obs)")

    def start_info(self, slots: Any) -> dict[str, Array]:
        """Columns of infos of resets, `(k, ...)` each, in new arrays."""
        return {}

    def controls(self, actions: Array) -> Array:
        """The controls `(num_envs, nu)` that actions stand for: the actions themselves, unless a task says otherwise.

        What else an action does (move a `mocap` body, say) may be done here, too.
        """
        return actions

    def before_step(self) -> None:
        """Note what `outcome` will compare with; `qpos`, `qvel` and the others are still those before the step.

        Of fields that are parts of MuJoCo's state, that is. What is derived (`xpos`, say) is not there if the slot has
        just been put into a state: `remember` it in `after_start` and `outcome`.
        """

    def after_start(self, slots: Any) -> None:
        """Note what is needed of slots that have begun an episode (in arrays from `remember`)."""

    # ------------------------------------------------------------ what a task uses

    def set_observation_size(self, size: int) -> None:
        """Observations are float64 vectors of this size, without bounds."""
        self.set_observation_space(Box(-np.inf, np.inf, (size,), np.float64))

    def set_observation_space(self, space: Box) -> None:
        """Observations of one slot are of this space.

        Raises:
            TypeError: if a batch of such observations is no array.
        """
        self.single_observation_space, self.observation_space = space, self._batched("set_observation_space", space)

    def set_action_space(self, space: Space[Any]) -> None:
        """Actions of one slot are of this space, and `controls` says what they stand for; by default they are controls.

        Raises:
            TypeError: if a batch of such actions is no array.
        """
        self.single_action_space, self.action_space = space, self._batched("set_action_space", space)

    def _batched(self, setter: str, space: Space[Any]) -> Space[Any]:
        batched = batch_space(space, self.num_envs)
        if batched.shape is None:
            raise TypeError(f"{setter}: expected a space whose batches are arrays, got {space!r}")
        return batched

    def bind(self, name: str) -> Array:
        """The live array of a field of `MjData`, `(num_envs, ...)` (see `SimPool.bind`)."""
        return self.pool.bind(name)

    def remember(self, name: str, shape: int | tuple[int, ...] = (), dtype: Any = np.float64) -> Array:
        """An array `(num_envs, *shape)` of what a task knows of each slot from one step to the next.

        Its rows are part of the states of slots. Write into it; don't replace it.

        Raises:
            ValueError: if there is one of this name, in a class that this one is derived from, say.
            TypeError: if it could have Python objects in it.
        """
        if name in self._memory:
            raise ValueError(f"remember: {name!r} is there already; give each array a name of its own")
        if (kind := np.dtype(dtype)).hasobject:
            raise TypeError(f"remember: {name!r}: expected numbers, got dtype {kind}")
        shape = shape if isinstance(shape, (tuple, list)) else (shape,)
        self._memory[name] = array = np.zeros((self.num_envs, *shape), kind)
        return array

    def uniform(self, slots: Slots | slice, low: float, high: float, size: int) -> Array:
        """`(k, size)` numbers for k slots, each row drawn as `np_random.uniform(low, high, size)` of its slot.

        Raises:
            ValueError: if `high` is less than `low`.
            OverflowError: if one is no finite number, or they are too far apart.
        """
        if high < low:
            raise ValueError(f"uniform: expected low <= high, got {low} and {high}")
        if not math.isfinite(high - low):
            raise OverflowError(f"uniform: expected finite numbers whose difference is one, got {low} and {high}")
        numbers = range(self.num_envs)[slots] if isinstance(slots, slice) else slots.tolist()
        drawn = np.empty((len(numbers), size))
        rngs = self._rngs
        for slot, row in zip(numbers, drawn, strict=True):
            (rngs[slot] or self.rng(slot)).random(out=row)
        drawn *= high - low
        drawn += low
        return drawn

    def normal(self, slots: Slots | slice, size: int) -> Array:
        """`(k, size)` numbers for k slots, each row drawn as `np_random.standard_normal(size)` of its slot."""
        numbers = range(self.num_envs)[slots] if isinstance(slots, slice) else slots.tolist()
        drawn = np.empty((len(numbers), size))
        rngs = self._rngs
        for slot, row in zip(numbers, drawn, strict=True):
            (rngs[slot] or self.rng(slot)).standard_normal(out=row)
        return drawn

    def model_field(self, name: str) -> Array:
        """A field of the model with values for each slot, `(num_envs, ...)`; see `SimPool.model_field`."""
        return self.pool.model_field(name)

    def set_const(self, slots: Any = None) -> None:
        """Derive constants anew from changed fields of the model; see `SimPool.set_const`."""
        self.pool.set_const(slots)


def _missing(task: Task, hook: str) -> NotImplementedError:
    """The error of a task that lacks a hook."""
    return NotImplementedError(f"{type(task).__name__} has no {hook}: a NativeMujocoEnv needs one of its own")
