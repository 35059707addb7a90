"""`FrameStackObservation`: a vector wrapper that stacks the last observations of each slot, which Gymnasium lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from aioenv.rollout.recorder import of_slot
from aioenv.spaces.layout import Arrays, Layout, batch_space
from aioenv.worker.vector_access import take_observations

__all__ = ["FrameStackObservation"]

Bools = npt.NDArray[np.bool_]

if TYPE_CHECKING:
    _Wrapper = gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]
else:  # it takes no types before Gymnasium 1.4
    _Wrapper = gymnasium.vector.VectorWrapper


class FrameStackObservation(_Wrapper):
    """Stack the last observations of each slot; results are those of Gymnasium's wrapper of this name around each env.

    It is a wrapper of blocking vector envs, Gymnasium's and aioenv's; `aioenv.wrappers.FrameStack` is for asynchronous
    ones.
    Observations have shape `(num_envs, stack_size, *shape)`, the newest last; in Dict and Tuple spaces each array has.
    A slot's stack starts again with each of its episodes, in every autoreset mode, and by a reset with a mask. Under
    SAME_STEP an element of `info["final_obs"]` is the stack of the episode that ended. Paused slots keep their stacks.
    A state that is set has no stack: in a new wrapper the first observation after it begins one.

    Args:
        env: the vector env. Its observations are arrays, in dicts and tuples.
        stack_size: the number of observations in a stack.
        padding_type: what stands in for observations before the first one of an episode: "reset" (the first one),
            "zero", or an observation.

    Raises:
        TypeError: if `stack_size` is no int, or the observation space has parts that are no arrays.
        ValueError: if `stack_size` is less than 1, or `padding_type` is none of these.
    """

    def __init__(
        self, env: gymnasium.vector.VectorEnv[Any, Any, Any], stack_size: int, *, padding_type: Any = "reset"
    ) -> None:
        super().__init__(env)
        if isinstance(stack_size, bool) or not isinstance(stack_size, (int, np.integer)):
            raise TypeError(f"stack_size: expected an int, got {stack_size!r}")
        if stack_size < 1:
            raise ValueError(f"stack_size: expected a positive int, got {stack_size}")
        space: Space[Any] = env.single_observation_space
        self._layout = Layout(space)
        if self._layout.num_objects:
            raise TypeError(f"expected an observation space of arrays, in Dict and Tuple, got {space}")
        n = env.num_envs
        padding = self._layout.zeros(1)
        if not isinstance(padding_type, str):
            if not space.contains(padding_type):
                raise ValueError(f"padding_type: expected 'reset', 'zero' or an observation of {space}")
            padding = self._split(self._layout.batch_of_one(padding_type), 1)
        elif padding_type not in ("reset", "zero"):
            raise ValueError(f"padding_type: expected 'reset', 'zero' or an observation, got {padding_type!r}")
        self._padding = None if isinstance(padding_type, str) and padding_type == "reset" else padding
        self.stack_size = int(stack_size)
        self.single_observation_space = batch_space(space, self.stack_size)
        self.observation_space = batch_space(self.single_observation_space, n)
        self._mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        # by array leaf, (num_envs, stack_size, *shape): a ring, whose newest element is at `_newest`
        self._frames = [np.zeros((n, self.stack_size, *leaf.shape), leaf.dtype) for leaf in self._layout.leaves]
        self._newest = np.zeros(n, np.int64)
        self._ended = np.zeros(n, np.bool_)  # whether the next step of a slot resets it
        self._blank = np.ones(n, np.bool_)  # whether a slot's stack has no observation, as where only a state was set
        self.rows: Bools | None = None  # the slots of which the next result is; None: all

    def _split(self, obs: Any, n: int) -> Arrays:
        """Return the arrays of n observations, which are only read."""
        leaf = self._layout.leaves[0]
        single = type(obs) is np.ndarray and self._layout.is_single_array
        if single and obs.dtype == leaf.dtype and obs.shape == (n, *leaf.shape):
            return [obs]
        arrays: Arrays = take_observations(self._layout, obs, n)[0]
        return arrays

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every slot, or in those of `options["reset_mask"]`; the others keep their stacks."""
        mask = None if options is None else options.get("reset_mask")  # the vector env may take it out
        obs, info = self.env.reset(seed=seed, options=options)
        begun = np.ones(self.num_envs, np.bool_) if mask is None else np.array(mask)
        begun &= self._real(info)
        self._begin(begun, self._split(obs, self.num_envs))
        return self._stacks(), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every slot, and stack the observations."""
        obs, reward, terminated, truncated, info = self.env.step(actions)
        arrays = self._split(obs, self.num_envs)
        real, ended = self._real(info), terminated | truncated
        if self._mode is AutoresetMode.SAME_STEP:
            begun = ended & real
            if "final_obs" in info and begun.any():
                info = {**info, "final_obs": self._final_stacks(info)}
        else:
            begun = self._ended & real if self._mode is AutoresetMode.NEXT_STEP else np.zeros_like(real)
        begun |= self._blank & real
        going_on = real & ~begun
        self._newest[going_on] = (self._newest[going_on] + 1) % self.stack_size
        whole = going_on.all()
        slots = np.flatnonzero(going_on)
        for frames, array in zip(self._frames, arrays, strict=True):
            frames[slots, self._newest[slots]] = array if whole else array[slots]  # without a copy, if it can be
        if begun.any():
            self._begin(begun, arrays)
        if self._mode is not AutoresetMode.SAME_STEP:
            self._ended = np.where(real, ended, self._ended)
        return self._stacks(), reward, terminated, truncated, info

    def _real(self, info: dict[str, Any]) -> Bools:
        """Return which slots have a new observation.

        Raises:
            TypeError: if the infos are no dict, which alone says that.
        """
        if not isinstance(info, dict):
            raise TypeError(
                f"FrameStackObservation: expected infos as a dict, got a {type(info).__name__}: put DictInfoToList "
                "around it, not inside"
            )
        real = np.ones(self.num_envs, np.bool_) if self.rows is None else self.rows.copy()
        if "_active" in info:  # not those of paused slots
            real &= info["_active"]
        return real

    def _begin(self, begun: Bools, arrays: Arrays) -> None:
        slots = np.flatnonzero(begun)
        self._ended[slots] = self._blank[slots] = False
        self._newest[slots] = self.stack_size - 1
        for i, (frames, array) in enumerate(zip(self._frames, arrays, strict=True)):
            frames[slots] = array[slots][:, None] if self._padding is None else self._padding[i][:, None]
            frames[slots, -1] = array[slots]

    def _stacks(self) -> Any:
        """Return the stacks of all slots, in new arrays."""
        order = (self._newest[:, None] + np.arange(1, self.stack_size + 1)) % self.stack_size
        slots = np.arange(self.num_envs)[:, None]
        return self._layout.assemble([frames[slots, order] for frames in self._frames], ())

    def _final_stacks(self, info: dict[str, Any]) -> npt.NDArray[Any]:
        """Return the stacks of episodes that ended in this step, as an array of objects."""
        last = info["final_obs"]
        found = np.full(self.num_envs, None, object)
        for slot in np.flatnonzero(info.get("_final_obs", np.ones(self.num_envs, np.bool_))).tolist():
            arrays = self._split(self._layout.batch_of_one(of_slot(last, slot)), 1)
            if self._blank[slot]:
                for frames, array in zip(self._frames, self._padding or arrays, strict=True):
                    frames[slot] = array
            order = (self._newest[slot] + np.arange(2, self.stack_size + 1)) % self.stack_size
            stacks = [
                np.concatenate([frames[slot, order], array])[None]
                for frames, array in zip(self._frames, arrays, strict=True)
            ]
            (found[slot],) = self._layout.rows(stacks, ())
        return found
