"""Asynchronous twins of Gymnasium's vector wrappers, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.wrappers import vector

from aioenv.wrappers.frame_stack import FrameStackObservation
from aioenv.wrappers.vector_wrapper import Envs, VectorWrapper

__all__ = [
    "ClipAction",
    "ClipReward",
    "DtypeObservation",
    "FlattenObservation",
    "FrameStack",
    "NormalizeObservation",
    "NormalizeReward",
    "RecordEpisodeStatistics",
    "RescaleAction",
    "TransformAction",
    "TransformObservation",
    "TransformReward",
]

Bools = npt.NDArray[np.bool_]


class _Normalizer(VectorWrapper):
    """A wrapper whose running statistics can be frozen."""

    @property
    def update_running_mean(self) -> bool:
        """Whether results are counted in the running statistics; set it to False for an evaluation."""
        counts: bool = self.wrapper.update_running_mean
        return counts

    @update_running_mean.setter
    def update_running_mean(self, setting: bool) -> None:
        self.wrapper.update_running_mean = setting


class NormalizeObservation(_Normalizer):
    """Normalize observations to mean 0 and variance 1, by running statistics of all slots.

    As Gymnasium's wrapper, it refuses the modes SAME_STEP and DISABLED, and resets of some slots. For these there is
    `aioenv.stats.NormalizeObservation`, which is put around each env. Rows of slots that have failed are not counted.

    Args:
        envs: the vector env, or a wrapper of it.
        epsilon: added to the variance.

    Attributes:
        obs_rms: the statistics: `mean`, `var` and `count`.
    """

    def __init__(self, envs: Envs, epsilon: float = 1e-8) -> None:
        super().__init__(envs, vector.NormalizeObservation, epsilon=epsilon)

    def _make_wrapper(self) -> None:
        try:
            super()._make_wrapper()
        except (ValueError, AssertionError) as exc:  # Gymnasium 1.2 asserts
            exc.add_note("aioenv.stats.NormalizeObservation, in wrappers= of make_vec, takes every autoreset mode")
            raise

    def _check_reset(self, options: dict[str, Any] | None) -> None:
        if options is not None and not np.all(options.get("reset_mask", True)):
            raise ValueError("NormalizeObservation: as Gymnasium's, it can't reset some slots alone. Nothing was sent")

    def _see_reset(self, request: Any, result: Any, rows: Bools | None) -> Any:
        return self._counted(result, rows, lambda: super(NormalizeObservation, self)._see_reset(request, result, rows))

    def _see_step(self, actions: Any, result: Any, rows: Bools | None) -> Any:
        return self._counted(result, rows, lambda: super(NormalizeObservation, self)._see_step(actions, result, rows))

    def _counted(self, result: Any, rows: Bools | None, see: Callable[[], Any]) -> Any:
        """Have Gymnasium's wrapper see a result, and count the given rows of it alone."""
        if rows is None or not self.update_running_mean:
            return see()
        if rows.any():
            self.wrapper.obs_rms.update(result.obs[rows])
        self.update_running_mean = False
        try:
            return see()
        finally:
            self.update_running_mean = True


class NormalizeReward(_Normalizer):
    """Divide rewards by the standard deviation of discounted returns, by running statistics of all slots.

    A reset, also one of some slots, starts the returns of all slots again, as with Gymnasium's wrapper.

    Args:
        envs: the vector env, or a wrapper of it.
        gamma: the discount.
        epsilon: added to the variance.

    Attributes:
        return_rms: the statistics: `mean`, `var` and `count`.
    """

    def __init__(self, envs: Envs, gamma: float = 0.99, epsilon: float = 1e-8) -> None:
        super().__init__(envs, vector.NormalizeReward, gamma=gamma, epsilon=epsilon)


class RecordEpisodeStatistics(VectorWrapper):
    """Put returns, lengths and times of episodes into the infos of the steps that end them.

    `episode_stats=True` of `make_vec` counts the same, also with `send` and over restarts; don't use both. Steps
    and resets that leave a paused slot out do not count there.

    Args:
        envs: the vector env, or a wrapper of it.
        buffer_length: how many of the last episodes the queues have.
        stats_key: the key in infos.

    Attributes:
        episode_count: the number of episodes that have ended.
        return_queue, length_queue, time_queue: deques of the last episodes' returns, lengths, and times in seconds.
    """

    def __init__(self, envs: Envs, buffer_length: int = 100, stats_key: str = "episode") -> None:
        super().__init__(envs, vector.RecordEpisodeStatistics, buffer_length=buffer_length, stats_key=stats_key)

    def _see_reset(self, request: Any, result: Any, rows: Bools | None) -> Any:
        theirs, idle = self.wrapper, self._idle_slots(result.info, rows)
        names = ("episode_returns", "episode_lengths", "episode_start_times", "prev_dones")
        kept = {name: getattr(theirs, name)[idle] for name in names}
        seen = super()._see_reset(request, result, rows)
        for name, values in kept.items():
            getattr(theirs, name)[idle] = values
        return seen

    def _see_step(self, actions: Any, result: Any, rows: Bools | None) -> Any:
        theirs, idle = self.wrapper, self._idle_slots(result.info, rows)
        lengths, ended = theirs.episode_lengths[idle], theirs.prev_dones
        seen = super()._see_step(actions, result, rows)
        theirs.episode_lengths[idle] = lengths
        # in a new array: this one is in the infos, and Gymnasium's `reset` would write to it
        theirs.prev_dones = np.where(idle, ended, theirs.prev_dones)
        return seen


class ClipReward(VectorWrapper):
    """Clip rewards.

    Args:
        envs: the vector env, or a wrapper of it.
        min_reward, max_reward: the bounds; None: no bound.
    """

    def __init__(
        self,
        envs: Envs,
        min_reward: float | npt.NDArray[Any] | None = None,
        max_reward: float | npt.NDArray[Any] | None = None,
    ) -> None:
        super().__init__(envs, vector.ClipReward, min_reward=min_reward, max_reward=max_reward)


class TransformReward(VectorWrapper):
    """Apply a function to the rewards of a batch.

    Args:
        envs: the vector env, or a wrapper of it.
        func: gets and returns an array of shape `(num_envs,)`.
    """

    def __init__(self, envs: Envs, func: Callable[[Any], Any]) -> None:
        super().__init__(envs, vector.TransformReward, func)


class TransformObservation(VectorWrapper):
    """Apply a function to batches of observations. As Gymnasium's wrapper, it refuses the mode SAME_STEP.

    Args:
        envs: the vector env, or a wrapper of it.
        func: gets a batch of observations and returns one.
        observation_space: the new space of a batch; None: made of `single_observation_space`.
        single_observation_space: the new space of one slot; None: it stays.
    """

    def __init__(
        self,
        envs: Envs,
        func: Callable[[Any], Any],
        observation_space: Space[Any] | None = None,
        single_observation_space: Space[Any] | None = None,
    ) -> None:
        super().__init__(envs, vector.TransformObservation, func, observation_space, single_observation_space)


class FlattenObservation(VectorWrapper):
    """Flatten observations to vectors. As Gymnasium's wrapper, it refuses the mode SAME_STEP.

    Args:
        envs: the vector env, or a wrapper of it.
    """

    def __init__(self, envs: Envs) -> None:
        super().__init__(envs, vector.FlattenObservation)


class DtypeObservation(VectorWrapper):
    """Cast observations to another dtype. As Gymnasium's wrapper, it refuses the mode SAME_STEP.

    Args:
        envs: the vector env, or a wrapper of it.
        dtype: the new dtype.
    """

    def __init__(self, envs: Envs, dtype: Any) -> None:
        super().__init__(envs, vector.DtypeObservation, dtype)


class TransformAction(VectorWrapper):
    """Apply a function to batches of actions before they are sent.

    Args:
        envs: the vector env, or a wrapper of it.
        func: gets a batch of actions and returns one for the wrapped vector env.
        action_space: the new space of a batch; None: made of `single_action_space`.
        single_action_space: the new space of one slot; None: it stays.
    """

    def __init__(
        self,
        envs: Envs,
        func: Callable[[Any], Any],
        action_space: Space[Any] | None = None,
        single_action_space: Space[Any] | None = None,
    ) -> None:
        super().__init__(envs, vector.TransformAction, func, action_space, single_action_space)


class ClipAction(VectorWrapper):
    """Clip actions to the bounds of the action space; the caller's array stays as it is.

    Args:
        envs: the vector env, or a wrapper of it.
    """

    def __init__(self, envs: Envs) -> None:
        super().__init__(envs, vector.ClipAction)


class RescaleAction(VectorWrapper):
    """Rescale actions from given bounds to those of the action space.

    Args:
        envs: the vector env, or a wrapper of it.
        min_action, max_action: the bounds of the new action space.
    """

    def __init__(self, envs: Envs, min_action: float | npt.NDArray[Any], max_action: float | npt.NDArray[Any]) -> None:
        super().__init__(envs, vector.RescaleAction, min_action=min_action, max_action=max_action)


class FrameStack(VectorWrapper):
    """Stack the last observations of each slot, images too: shape `(num_envs, stack_size, *shape)`, the newest last.

    A slot's stack starts again with each of its episodes, in every autoreset mode. Under SAME_STEP an element of
    `info["final_obs"]` is the stack of the episode that ended. Results are those of Gymnasium's `FrameStackObservation`
    around each env. Paused slots keep their stacks. A stack of 4 images costs a copy of 4 images a step and slot.

    Args:
        envs: the vector env, or a wrapper of it. Its observations are arrays, in dicts and tuples.
        stack_size: the number of observations in a stack.
        padding_type: what stands in for observations before the first one of an episode: "reset" (the first one),
            "zero", or an observation.
    """

    def __init__(self, envs: Envs, stack_size: int, *, padding_type: Any = "reset") -> None:
        super().__init__(envs, FrameStackObservation, stack_size, padding_type=padding_type)

    def _see(self, request: Any, result: Any, rows: Bools | None) -> Any:
        self.wrapper.rows = rows
        try:
            return super()._see(request, result, rows)
        finally:
            self.wrapper.rows = None
