"""InvertedPendulum and InvertedDoublePendulum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.native.arithmetic import clamp, side_by_side
from aioenv.native.tasks.noisy_start import NoisyStart

__all__ = ["InvertedDoublePendulum", "InvertedPendulum"]

Array = npt.NDArray[Any]

CAMERA = {"trackbodyid": 0, "distance": 2.04}

_WEIGHTS = np.array([[0.01], [1.0], [1e-3], [5e-3]])  # of the squares of x, y, and both speeds


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
        self._seen = side_by_side(self.qpos, self.qvel)
        self.set_observation_size(4)

    def observe(self, slots: Any) -> Array:
        """Positions, velocities."""
        obs: Array = self._seen[slots].copy()
        return obs

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """1 while the pole stands."""
        stands = np.abs(obs[:, 1]) <= 0.2
        if not math.isfinite(np.vdot(obs, obs)):  # or it has overflowed
            stands &= np.isfinite(obs).all(axis=1)
        return stands.astype(np.float64), ~stands, {"reward_survive": stands.astype(np.int64)}


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
        self._squares = np.empty((4, self.num_envs))
        self.set_observation_size(9)

    def observe(self, slots: Any) -> Array:
        """The cart's position, the poles' angles, velocities, the force of the cart's constraint."""
        qpos, qvel = self.qpos[slots], self.qvel[slots]
        angles = qpos[:, 1:].copy()
        parts = (qpos[:, :1], np.sin(angles), np.cos(angles), qvel, self._constraint[slots, :1])
        obs = np.concatenate(parts, axis=1)
        clamp(obs[:, -qvel.shape[1] - 1 :], 10)
        return obs

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Something for standing, less for distance and speed."""
        x, y = self._tip[:, 0], self._tip[:, 2]
        terminated = y <= 1
        squares = self._squares
        squares[0] = x
        np.subtract(y, 2, squares[1])
        squares[2:] = self.qvel[:, 1:3].T
        # as numpy squares one number, by the C library's `pow`, which may differ from `x * x` in a bit
        np.float_power(squares, 2, squares)
        squares *= _WEIGHTS
        distance, speed = squares[::2] + squares[1::2]
        survive = ~terminated * self._healthy_reward
        info = {"reward_survive": survive, "distance_penalty": -distance, "velocity_penalty": -speed}
        return survive - distance - speed, terminated, info
