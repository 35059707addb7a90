"""Ant: four legs that are paid for speed along x, and pay for being touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.native.arithmetic import square_sum
from aioenv.native.tasks.noisy_start import NoisyStart, limits

__all__ = ["Ant"]

Array = npt.NDArray[Any]

CAMERA = {"distance": 4.0}


class Ant(NoisyStart):
    """`Ant-v5`; arguments as of `gymnasium.envs.mujoco.ant_v5.AntEnv`."""

    post_constraint = True
    normal_velocities = True

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "ant.xml",
        frame_skip: int = 5,
        default_camera_config: dict[str, Any] | None = CAMERA,
        forward_reward_weight: float = 1,
        ctrl_cost_weight: float = 0.5,
        contact_cost_weight: float = 5e-4,
        healthy_reward: float = 1.0,
        main_body: int | str = 1,
        terminate_when_unhealthy: bool = True,
        healthy_z_range: tuple[float, float] = (0.2, 1.0),
        contact_force_range: tuple[float, float] = (-1.0, 1.0),
        reset_noise_scale: float = 0.1,
        exclude_current_positions_from_observation: bool = True,
        include_cfrc_ext_in_observation: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config, reset_noise_scale, **kwargs)
        self._forward_reward_weight = forward_reward_weight
        self._ctrl_cost_weight = ctrl_cost_weight
        self._contact_cost_weight = contact_cost_weight
        self._healthy_reward = healthy_reward
        self._terminate_when_unhealthy = terminate_when_unhealthy
        self._healthy_z_range = limits("healthy_z_range", healthy_z_range)
        self._contact_force_range = limits("contact_force_range", contact_force_range)
        self._seen = self.qpos[:, 2:] if exclude_current_positions_from_observation else self.qpos
        self._sees_forces = include_cfrc_ext_in_observation
        self._forces = self.bind("cfrc_ext").reshape(self.num_envs, -1)
        self._main_body = main_body
        # its position, which lags behind qpos by a substep
        self._xy = self.bind("xpos")[:, self.model.body(main_body).id, :2]
        self._xy_before = self.remember("xy", (2,))
        forces = self._forces.shape[1] - 6  # not the world's
        self.set_observation_size(self._seen.shape[1] + self.model.nv + forces * include_cfrc_ext_in_observation)

    def after_start(self, slots: Any) -> None:
        """Note where it begins."""
        self._xy_before[slots] = self._xy[slots]

    def observe(self, slots: Any) -> Array:
        """Positions, velocities, forces of contacts."""
        if not self._sees_forces:
            return np.concatenate((self._seen[slots], self.qvel[slots]), axis=1)
        forces = np.clip(self._forces[slots], *self._contact_force_range)
        return np.concatenate((self._seen[slots], self.qvel[slots], forces[:, 6:]), axis=1)

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Speed, and something for standing, less what controls and contacts cost."""
        velocity = (self._xy - self._xy_before) / self.dt
        self._xy_before[...] = self._xy
        x_velocity, y_velocity = velocity[:, 0].copy(), velocity[:, 1].copy()
        low, high = self._healthy_z_range
        z = self.qpos[:, 2]
        healthy = (low <= z) & (z <= high)
        for part in (self.qpos, self.qvel):
            healthy &= np.isfinite(part).all(axis=1)
        forward = x_velocity * self._forward_reward_weight
        survive = healthy * self._healthy_reward
        ctrl_cost = self._ctrl_cost_weight * square_sum(actions)
        forces = np.clip(self._forces, *self._contact_force_range)
        contact_cost = self._contact_cost_weight * square_sum(forces)
        info = {
            **self.start_info(slice(None)),
            "x_velocity": x_velocity,
            "y_velocity": y_velocity,
            "reward_forward": forward,
            "reward_ctrl": -ctrl_cost,
            "reward_contact": -contact_cost,
            "reward_survive": survive,
        }
        reward = forward + survive - (ctrl_cost + contact_cost)
        return reward, ~healthy if self._terminate_when_unhealthy else None, info

    def start_info(self, slots: Any) -> dict[str, Array]:
        """Where it is."""
        return self.place(slots)
