"""`PixelStates`: a vector env with images as observations, in whose place states stand until render workers draw them.

The wrapper is where the vector env is, in this process or in a worker, and draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from aioenv.rendering.config import RenderConfig
from aioenv.rendering.pixels import PixelsRefused, add_image, add_image_space
from aioenv.spaces.large_boxes import batch_space
from aioenv.state.render_source import find_physics
from aioenv.worker.making import make_vector_env
from aioenv.worker.vector_access import reset_result, step_result, steps_some

__all__ = ["PixelStates", "with_pixel_states"]

AnyVectorEnv = VectorEnv[Any, Any, Any]

if TYPE_CHECKING:
    AnyVectorWrapper: TypeAlias = VectorWrapper[Any, Any, Any, Any, Any]
else:
    AnyVectorWrapper = VectorWrapper  # which is generic from Gymnasium 1.4 on


class PixelStates(AnyVectorWrapper):
    """A vector env whose observations are the states that images are drawn from, alone or beside its own.

    Args:
        env: a vector env with a MuJoCo `model` and `physics_states` (see `PhysicsBatch`).
        config: what is drawn.

    Raises:
        PixelsRefused: if it lacks these, or the states of terminal images, or has a key of the image's name.
        ValueError: see `PhysicsReader`.
    """

    def __init__(self, env: AnyVectorEnv, config: RenderConfig) -> None:
        super().__init__(env)
        physics = find_physics(env)
        if physics is None:
            raise PixelsRefused(
                "pixels: this vector env has no model and physics_states, from which images could be drawn; use "
                'backend="workers", whose envs may draw themselves'
            )
        if env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP and not physics.has_finals:
            raise PixelsRefused(
                f"pixels: {type(env.unwrapped).__name__} has no final_physics_states, from which terminal images could "
                "be drawn under SAME_STEP; use another autoreset mode"
            )
        self._physics = physics
        self._config = config
        self._merges = isinstance(env.single_observation_space, spaces.Dict)
        state = spaces.Box(-np.inf, np.inf, (physics.source.state_size,), np.float64)
        self.single_observation_space = add_image_space(env.single_observation_space, state, config)
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset slots."""
        obs, info = reset_result(self.env.reset(seed=seed, options=options))
        return self._observe(obs), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every slot."""
        return self._shown(*step_result(self.env.step(actions)))

    @property
    def step_some(self) -> Callable[..., Any] | None:
        """The method that steps some of the slots (see `steps_some`); None if the env can't."""
        return self._step_some if steps_some(self.env) else None

    def _step_some(self, actions: Any, slots: npt.NDArray[np.int64]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return self._shown(*step_result(self.env.step_some(actions, slots)))  # type: ignore[attr-defined]

    def _shown(
        self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]
    ) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if "final_obs" in info:
            info = {**info, "final_obs": self._finals(info["final_obs"])}
        return self._observe(obs), reward, terminated, truncated, info

    def _observe(self, obs: Any) -> Any:
        states = np.empty((self.num_envs, self._physics.source.state_size))
        self._physics.read(None, states)
        return add_image(obs, states, self._config, merges=self._merges)

    def _finals(self, finals: Any) -> Any:
        slots = [slot for slot, obs in enumerate(finals) if obs is not None]
        each: Any = np.full(self.num_envs, None, object)
        for slot, state in zip(slots, self._physics.read_finals(slots), strict=True):
            each[slot] = add_image(finals[slot], state, self._config, merges=self._merges)
        return each


def with_pixel_states(make: Callable[..., AnyVectorEnv], config: RenderConfig) -> Callable[..., AnyVectorEnv]:
    """Wrap a function that makes a vector env, so that its observations are such states.

    Raises:
        ValueError: if such images can't be observations.
    """
    config.check_pixels()
    return partial(_make, make, config)


def _make(make: Callable[..., AnyVectorEnv], config: RenderConfig, *, num_envs: int) -> AnyVectorEnv:
    env = make_vector_env(make, num_envs)
    try:
        return PixelStates(env, config)
    except BaseException:
        env.close()
        raise
