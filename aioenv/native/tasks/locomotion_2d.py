"""HalfCheetah, Hopper, Walker2d and Swimmer: planar bodies that are rewarded for speed along x."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.native.tasks.common import NoisyStart, adjacent_view, clamp, negated, parse_range, square_sum

__all__ = ["HalfCheetah", "Hopper", "Swimmer", "Walker2d"]

Array = npt.NDArray[Any]

CHEETAH_CAMERA = {"distance": 4.0}
HOPPER_CAMERA = {"trackbodyid": 2, "distance": 3.0, "lookat": np.array((0.0, 0.0, 1.15)), "elevation": -20.0}
WALKER_CAMERA = HOPPER_CAMERA | {"distance": 4.0}


class _PlanarRobot(NoisyStart):
    """The base of planar tasks: observations are positions, without the first ones, and velocities."""

    _skipped = 1
    _speed_limit: float | None = None

    def __init__(
        self,
        num_envs: int,
        xml_file: str,
        frame_skip: int,
        default_camera_config: dict[str, Any] | None,
        *,
        forward_reward_weight: float = 1.0,
        ctrl_cost_weight: float = 0.1,
        reset_noise_scale: float = 0.1,
        exclude_current_positions_from_observation: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config, reset_noise_scale, **kwargs)
        self._forward_reward_weight = forward_reward_weight
        self._ctrl_cost_weight = ctrl_cost_weight
        self._skip = self._skipped if exclude_current_positions_from_observation else 0
        self._seen = adjacent_view(self.qpos[:, self._skip :], self.qvel)
        self._x = self.qpos[:, 0]
        self.set_observation_size(self.model.nq + self.model.nv - self._skip)
        self._x_before = np.zeros(self.num_envs)

    def before_step(self) -> None:
        """Note x."""
        self._x_before[...] = self._x

    def observe(self, slots: Any) -> Array:
        """Return positions and velocities."""
        obs: Array = self._seen[slots].copy()
        if self._speed_limit is not None:
            clamp(obs[:, -self.model.nv :], self._speed_limit)
        return obs


class HalfCheetah(_PlanarRobot):
    """`HalfCheetah-v5`; arguments as of `gymnasium.envs.mujoco.half_cheetah_v5.HalfCheetahEnv`."""

    normal_velocities = True

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "half_cheetah.xml",
        frame_skip: int = 5,
        default_camera_config: dict[str, Any] | None = CHEETAH_CAMERA,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config, **kwargs)

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Reward speed, minus the cost of controls."""
        x = self._x.copy()
        x_velocity = (x - self._x_before) / self.dt
        forward = self._forward_reward_weight * x_velocity
        control = square_sum(actions) * negated(self._ctrl_cost_weight)
        info = {"x_position": x, "x_velocity": x_velocity, "reward_forward": forward, "reward_ctrl": control}
        return forward + control, None, info

    def start_info(self, slots: Any) -> dict[str, Array]:
        """Return the initial position."""
        return {"x_position": self._x[slots].copy()}


class Swimmer(_PlanarRobot):
    """`Swimmer-v5`; arguments as of `gymnasium.envs.mujoco.swimmer_v5.SwimmerEnv`."""

    _skipped = 2

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "swimmer.xml",
        frame_skip: int = 4,
        default_camera_config: dict[str, Any] | None = None,
        *,
        ctrl_cost_weight: float = 1e-4,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_envs, xml_file, frame_skip, default_camera_config, ctrl_cost_weight=ctrl_cost_weight, **kwargs
        )
        self._xy = self.qpos[:, :2]
        self._xy_before = np.zeros((self.num_envs, 2))

    def before_step(self) -> None:
        """Note x and y."""
        self._xy_before[...] = self._xy

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Reward speed, minus the cost of controls."""
        velocity = (self._xy - self._xy_before) / self.dt
        x_velocity, y_velocity = velocity[:, 0].copy(), velocity[:, 1].copy()
        forward = self._forward_reward_weight * x_velocity
        cost = self._ctrl_cost_weight * square_sum(actions)
        info = {
            **self.start_info(slice(None)),
            "x_velocity": x_velocity,
            "y_velocity": y_velocity,
            "reward_forward": forward,
            "reward_ctrl": -cost,
        }
        return forward - cost, None, info

    def start_info(self, slots: Any) -> dict[str, Array]:
        """Return the position."""
        return self.ground_position(slots)


class _PlanarWalker(_PlanarRobot):
    """The base of Hopper and Walker2d, whose episodes end when they fall."""

    _speed_limit = 10

    def __init__(
        self,
        num_envs: int,
        xml_file: str,
        frame_skip: int,
        default_camera_config: dict[str, Any] | None,
        healthy_z_range: tuple[float, float],
        healthy_angle_range: tuple[float, float],
        *,
        ctrl_cost_weight: float = 1e-3,
        healthy_reward: float = 1.0,
        terminate_when_unhealthy: bool = True,
        reset_noise_scale: float = 5e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_envs,
            xml_file,
            frame_skip,
            default_camera_config,
            ctrl_cost_weight=ctrl_cost_weight,
            reset_noise_scale=reset_noise_scale,
            **kwargs,
        )
        self._healthy_reward = healthy_reward
        self._terminate_when_unhealthy = terminate_when_unhealthy
        self._healthy_z_range = parse_range("healthy_z_range", healthy_z_range)
        self._healthy_angle_range = parse_range("healthy_angle_range", healthy_angle_range)
        self._z, self._angle = self.qpos[:, 1], self.qpos[:, 2]

    def _is_healthy(self) -> Array:
        (min_z, max_z), (min_angle, max_angle) = self._healthy_z_range, self._healthy_angle_range
        healthy: Array = (self._z > min_z) & (self._z < max_z)
        healthy &= self._angle > min_angle
        healthy &= self._angle < max_angle
        return healthy

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Reward speed and being healthy, minus the cost of controls."""
        info = self.start_info(slice(None))
        x_velocity = (info["x_position"] - self._x_before) / self.dt
        healthy = self._is_healthy()
        survive = healthy * self._healthy_reward
        forward = self._forward_reward_weight * x_velocity
        cost = self._ctrl_cost_weight * square_sum(actions)
        info |= {
            "x_velocity": x_velocity,
            "reward_forward": forward,
            "reward_ctrl": -cost,
            "reward_survive": survive,
        }
        return forward + survive - cost, ~healthy if self._terminate_when_unhealthy else None, info

    def start_info(self, slots: Any) -> dict[str, Array]:
        """Return the position."""
        return {
            "x_position": self._x[slots].copy(),
            "z_distance_from_origin": self._z[slots] - self.init_qpos[1],
        }


class Hopper(_PlanarWalker):
    """`Hopper-v5`; arguments as of `gymnasium.envs.mujoco.hopper_v5.HopperEnv`."""

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "hopper.xml",
        frame_skip: int = 4,
        default_camera_config: dict[str, Any] | None = HOPPER_CAMERA,
        *,
        healthy_state_range: tuple[float, float] = (-100.0, 100.0),
        healthy_z_range: tuple[float, float] = (0.7, float("inf")),
        healthy_angle_range: tuple[float, float] = (-0.2, 0.2),
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_envs, xml_file, frame_skip, default_camera_config, healthy_z_range, healthy_angle_range, **kwargs
        )
        self._healthy_state_range = parse_range("healthy_state_range", healthy_state_range)

    def _is_healthy(self) -> Array:
        low, high = self._healthy_state_range
        healthy = super()._is_healthy()
        for part in (self.qpos[:, 2:], self.qvel):
            healthy &= ((low < part) & (part < high)).all(axis=1)
        return healthy


class Walker2d(_PlanarWalker):
    """`Walker2d-v5`; arguments as of `gymnasium.envs.mujoco.walker2d_v5.Walker2dEnv`."""

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "walker2d_v5.xml",
        frame_skip: int = 4,
        default_camera_config: dict[str, Any] | None = WALKER_CAMERA,
        *,
        healthy_z_range: tuple[float, float] = (0.8, 2.0),
        healthy_angle_range: tuple[float, float] = (-1.0, 1.0),
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_envs, xml_file, frame_skip, default_camera_config, healthy_z_range, healthy_angle_range, **kwargs
        )
