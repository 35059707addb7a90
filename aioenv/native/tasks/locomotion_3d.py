"""Ant, Humanoid and HumanoidStandup: bodies that move in three dimensions and pay for contact forces."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.native.tasks.common import NoisyStart, norm, parse_range, square_sum

__all__ = ["Ant", "Humanoid", "HumanoidStandup"]

Array = npt.NDArray[Any]

ANT_CAMERA = {"distance": 4.0}
HUMANOID_CAMERA = {"trackbodyid": 1, "distance": 4.0, "lookat": np.array((0.0, 0.0, 2.0)), "elevation": -20.0}
STANDUP_CAMERA = HUMANOID_CAMERA | {"lookat": np.array((0.0, 0.0, 0.8925))}


class Ant(NoisyStart):
    """`Ant-v5`; arguments as of `gymnasium.envs.mujoco.ant_v5.AntEnv`."""

    post_constraint = True
    normal_velocities = True

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "ant.xml",
        frame_skip: int = 5,
        default_camera_config: dict[str, Any] | None = ANT_CAMERA,
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
        self._healthy_z_range = parse_range("healthy_z_range", healthy_z_range)
        self._contact_force_range = parse_range("contact_force_range", contact_force_range)
        self._seen = self.qpos[:, 2:] if exclude_current_positions_from_observation else self.qpos
        self._sees_forces = include_cfrc_ext_in_observation
        self._forces = self.bind("cfrc_ext").reshape(self.num_envs, -1)
        self._main_body = main_body
        # the position lags behind qpos by a substep
        self._xy = self.bind("xpos")[:, self.model.body(main_body).id, :2]
        self._xy_before = self.remember("xy", (2,))
        forces = self._forces.shape[1] - 6  # without the world's
        self.set_observation_size(self._seen.shape[1] + self.model.nv + forces * include_cfrc_ext_in_observation)

    def after_start(self, slots: Any) -> None:
        """Note the initial position."""
        self._xy_before[slots] = self._xy[slots]

    def observe(self, slots: Any) -> Array:
        """Return positions, velocities and contact forces."""
        if not self._sees_forces:
            return np.concatenate((self._seen[slots], self.qvel[slots]), axis=1)
        forces = np.clip(self._forces[slots], *self._contact_force_range)
        return np.concatenate((self._seen[slots], self.qvel[slots], forces[:, 6:]), axis=1)

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Reward speed and being healthy, minus the costs of controls and contacts."""
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
        """Return the position."""
        return self.ground_position(slots)


class _HumanoidTask(NoisyStart):
    """The base of Humanoid and HumanoidStandup: their observations and costs."""

    post_constraint = True

    def __init__(
        self,
        num_envs: int,
        xml_file: str,
        frame_skip: int,
        default_camera_config: dict[str, Any] | None,
        *,
        reset_noise_scale: float = 1e-2,
        exclude_current_positions_from_observation: bool = True,
        include_cinert_in_observation: bool = True,
        include_cvel_in_observation: bool = True,
        include_qfrc_actuator_in_observation: bool = True,
        include_cfrc_ext_in_observation: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config, reset_noise_scale, **kwargs)
        self._forces = self.bind("cfrc_ext").reshape(self.num_envs, -1)
        self._tendons = self.bind("ten_length"), self.bind("ten_velocity")
        self._parts = [self.qpos[:, 2:] if exclude_current_positions_from_observation else self.qpos, self.qvel]
        # without the world's body and the root's joint
        for field, skipped, is_seen in (
            ("cinert", 10, include_cinert_in_observation),
            ("cvel", 6, include_cvel_in_observation),
            ("qfrc_actuator", 6, include_qfrc_actuator_in_observation),
            ("cfrc_ext", 6, include_cfrc_ext_in_observation),
        ):
            if is_seen:
                self._parts.append(self.bind(field).reshape(self.num_envs, -1)[:, skipped:])
        self.set_observation_size(sum(part.shape[1] for part in self._parts))

    def observe(self, slots: Any) -> Array:
        """Return positions, velocities, and the fields that the arguments include."""
        return np.concatenate([part[slots] for part in self._parts], axis=1)

    def start_info(self, slots: Any) -> dict[str, Array]:
        """Return the position."""
        length, velocity = self._tendons
        return {
            "x_position": self.qpos[slots, 0].copy(),
            "y_position": self.qpos[slots, 1].copy(),
            "tendon_length": length[slots].copy(),
            "tendon_velocity": velocity[slots].copy(),
        }

    def _costs(self, weight: float, forces_weight: float, limits: tuple[float, float]) -> Any:
        """Return the costs of controls and contacts; MuJoCo zeroes the controls of unstable simulations."""
        contacts = np.clip(forces_weight * square_sum(self._forces), *limits)
        return weight * square_sum(self._ctrl), contacts


class Humanoid(_HumanoidTask):
    """`Humanoid-v5`; arguments as of `gymnasium.envs.mujoco.humanoid_v5.HumanoidEnv`."""

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "humanoid.xml",
        frame_skip: int = 5,
        default_camera_config: dict[str, Any] | None = HUMANOID_CAMERA,
        *,
        forward_reward_weight: float = 1.25,
        ctrl_cost_weight: float = 0.1,
        contact_cost_weight: float = 5e-7,
        contact_cost_range: tuple[float, float] = (-np.inf, 10.0),
        healthy_reward: float = 5.0,
        terminate_when_unhealthy: bool = True,
        healthy_z_range: tuple[float, float] = (1.0, 2.0),
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config, **kwargs)
        self._forward_reward_weight = forward_reward_weight
        self._ctrl_cost_weight = ctrl_cost_weight
        self._contact_cost_weight = contact_cost_weight
        self._contact_cost_range = parse_range("contact_cost_range", contact_cost_range)
        self._healthy_reward = healthy_reward
        self._terminate_when_unhealthy = terminate_when_unhealthy
        self._healthy_z_range = parse_range("healthy_z_range", healthy_z_range)
        self._xipos = self.bind("xipos")
        self._xipos_before = self.remember("xipos", self._xipos.shape[1:])

    def _centre_of_mass(self, xipos: Array) -> Array:
        """Return the centres of mass, x and y, which lag behind qpos by a substep."""
        masses = self.pool.changed_field("body_mass")
        if masses is None:
            masses, spec = self.model.body_mass, "b,nbj->nj"
            total: Any = masses.sum()
        else:
            spec, total = "nb,nbj->nj", masses.sum(axis=1)[:, None]
        centre: Array = (np.einsum(spec, masses, xipos) / total)[:, :2]
        return centre

    def after_start(self, slots: Any) -> None:
        """Note the initial position."""
        self._xipos_before[slots] = self._xipos[slots]

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Reward speed and being healthy, minus the costs of controls and contacts."""
        velocity = (self._centre_of_mass(self._xipos) - self._centre_of_mass(self._xipos_before)) / self.dt
        self._xipos_before[...] = self._xipos
        x_velocity, y_velocity = velocity[:, 0].copy(), velocity[:, 1].copy()
        low, high = self._healthy_z_range
        z = self.qpos[:, 2]
        healthy = (low < z) & (z < high)
        forward = self._forward_reward_weight * x_velocity
        survive = healthy * self._healthy_reward
        ctrl_cost, contact_cost = self._costs(
            self._ctrl_cost_weight, self._contact_cost_weight, self._contact_cost_range
        )
        info = {
            **self.start_info(slice(None)),
            "x_velocity": x_velocity,
            "y_velocity": y_velocity,
            "reward_survive": survive,
            "reward_forward": forward,
            "reward_ctrl": -ctrl_cost,
            "reward_contact": -contact_cost,
        }
        reward = forward + survive - (ctrl_cost + contact_cost)
        return reward, ~healthy if self._terminate_when_unhealthy else None, info

    def start_info(self, slots: Any) -> dict[str, Array]:
        """Return the position."""
        xy = np.ascontiguousarray(self.qpos[slots, :2])
        return {**super().start_info(slots), "distance_from_origin": norm(xy)}


class HumanoidStandup(_HumanoidTask):
    """`HumanoidStandup-v5`; arguments as of `gymnasium.envs.mujoco.humanoidstandup_v5.HumanoidStandupEnv`."""

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "humanoidstandup.xml",
        frame_skip: int = 5,
        default_camera_config: dict[str, Any] | None = STANDUP_CAMERA,
        *,
        uph_cost_weight: float = 1,
        ctrl_cost_weight: float = 0.1,
        impact_cost_weight: float = 0.5e-6,
        impact_cost_range: tuple[float, float] = (-np.inf, 10.0),
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config, **kwargs)
        # uph_cost_weight is not used, as in Gymnasium's
        self._ctrl_cost_weight = ctrl_cost_weight
        self._impact_cost_weight = impact_cost_weight
        self._impact_cost_range = parse_range("impact_cost_range", impact_cost_range)

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Reward height, minus the costs of controls and contacts."""
        up = self.qpos[:, 2] / self.model.opt.timestep
        ctrl_cost, impact_cost = self._costs(self._ctrl_cost_weight, self._impact_cost_weight, self._impact_cost_range)
        info = {
            **self.start_info(slice(None)),
            "reward_linup": up,
            "reward_quadctrl": -ctrl_cost,
            "reward_impact": -impact_cost,
        }
        return up - ctrl_cost - impact_cost + 1, None, info

    def start_info(self, slots: Any) -> dict[str, Array]:
        """Return the position."""
        return {**super().start_info(slots), "z_distance_from_origin": self.qpos[slots, 2] - self.init_qpos[2]}
