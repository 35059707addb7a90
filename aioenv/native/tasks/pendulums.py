"""InvertedPendulum and InvertedDoublePendulum."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.native.tasks.noisy_start import NoisyStart

__all__ = ["InvertedDoublePendulum", "InvertedPendulum"]

Array = npt.NDArray[Any]

CAMERA = {"trackbodyid": 0, "distance": 2.04}


class InvertedPendulum(NoisyStart):
    """`InvertedPendulum-v5`; arguments as of `gymnasium.envs.mujoco.inverted_pendulum_v5.InvertedPendulumEnv`."""

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "inverted_pendulum.xml",
        frame_skip: int = 2,
        default_camera_config: dict[str, Any] | None = CAMERA,
        reset_noise_scale: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config, reset_noise_scale, **kwargs)
        self.set_observation_size(4)

    def observe(self, slots: Any) -> Array:
        """Positions, velocities."""
        return np.concatenate((self.qpos[slots], self.qvel[slots]), axis=1)

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """1 while the pole stands."""
        terminated = np.abs(obs[:, 1]) > 0.2
        if not np.isfinite(obs).all():
            terminated |= ~np.isfinite(obs).all(axis=1)
        reward = (~terminated).astype(np.int64)
        return reward.astype(np.float64), terminated, {"reward_survive": reward}


class InvertedDoublePendulum(NoisyStart):
    """`InvertedDoublePendulum-v5`; arguments as of
    `gymnasium.envs.mujoco.inverted_double_pendulum_v5.InvertedDoublePendulumEnv`.
    """

    normal_velocities = True

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "inverted_double_pendulum.xml",
        frame_skip: int = 5,
        default_camera_config: dict[str, Any] | None = None,
        healthy_reward: float = 10.0,
        reset_noise_scale: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config, reset_noise_scale, **kwargs)
        self._healthy_reward = healthy_reward
        self._tip = self.bind("site_xpos")[:, 0]
        self._constraint = self.bind("qfrc_constraint")
        self.set_observation_size(9)

    def observe(self, slots: Any) -> Array:
        """The cart's position, the poles' angles, velocities, the force of the cart's constraint."""
        qpos = self.qpos[slots]
        angles = qpos[:, 1:].copy()
        velocities = np.clip(self.qvel[slots], -10, 10)
        force = np.clip(self._constraint[slots, :1], -10, 10)
        return np.concatenate((qpos[:, :1], np.sin(angles), np.cos(angles), velocities, force), axis=1)

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Something for standing, less for distance and speed."""
        y = self._tip[:, 2]
        terminated = y <= 1
        x2, y2, v1, v2 = _squares(np.stack((self._tip[:, 0], y - 2, self.qvel[:, 1], self.qvel[:, 2])))
        distance = 0.01 * x2 + y2
        speed = 1e-3 * v1 + 5e-3 * v2
        survive = ~terminated * self._healthy_reward
        info = {"reward_survive": survive, "distance_penalty": -distance, "velocity_penalty": -speed}
        return survive - distance - speed, terminated, info


def _squares(values: Array) -> Array:
    """`x ** 2` as numpy computes it of one number: by the C library's `pow`, which may differ from `x * x` in a bit."""
    return np.array([x**2 for x in values.ravel().tolist()]).reshape(values.shape)
