"""InvertedPendulum, InvertedDoublePendulum, Reacher and Pusher: balance a pole, or move an arm to a goal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.native.mujoco_env import NativeMujocoEnv
from aioenv.native.tasks.common import NoisyStart, adjacent_view, clamp, negated, norm, square_sum

__all__ = ["InvertedDoublePendulum", "InvertedPendulum", "Pusher", "Reacher"]

Array = npt.NDArray[Any]

PENDULUM_CAMERA = {"trackbodyid": 0, "distance": 2.04}
PUSHER_CAMERA = {"trackbodyid": -1, "distance": 4.0}
REACHER_CAMERA = {"trackbodyid": 0}

_WEIGHTS = np.array([[0.01], [1.0], [1e-3], [5e-3]])  # of the squares of x, y, and both speeds


class InvertedPendulum(NoisyStart):
    """`InvertedPendulum-v5`; arguments as of `gymnasium.envs.mujoco.inverted_pendulum_v5.InvertedPendulumEnv`."""

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "inverted_pendulum.xml",
        frame_skip: int = 2,
        default_camera_config: dict[str, Any] | None = PENDULUM_CAMERA,
        reset_noise_scale: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config, reset_noise_scale, **kwargs)
        self._seen = adjacent_view(self.qpos, self.qvel)
        self.set_observation_size(4)

    def observe(self, slots: Any) -> Array:
        """Return positions and velocities."""
        obs: Array = self._seen[slots].copy()
        return obs

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Reward 1 while the pole stands."""
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
        """Return the cart's position, the poles' angles, velocities, and the force of the cart's constraint."""
        qpos, qvel = self.qpos[slots], self.qvel[slots]
        angles = qpos[:, 1:].copy()
        parts = (qpos[:, :1], np.sin(angles), np.cos(angles), qvel, self._constraint[slots, :1])
        obs = np.concatenate(parts, axis=1)
        clamp(obs[:, -qvel.shape[1] - 1 :], 10)
        return obs

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Reward standing, minus penalties for distance and speed."""
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


def _draw_until(
    rng: np.random.Generator,
    low: tuple[float, float],
    width: tuple[float, float],
    is_accepted: Callable[[float, float], bool],
) -> tuple[float, float]:
    """Draw two numbers as `rng.uniform` does until they are accepted; without arrays, which take ten times as long."""
    random = rng.random
    while True:
        x = low[0] + width[0] * random()
        y = low[1] + width[1] * random()
        if is_accepted(x, y):
            return x, y


def _distance(x: float, y: float, limit: float) -> float:
    """Return the distance from 0, by `np.linalg.norm` where the last bits might decide about the limit."""
    distance = math.hypot(x, y)
    return distance if abs(distance - limit) > 1e-9 else float(np.linalg.norm(np.array([x, y])))


def _is_within_reach(x: float, y: float) -> bool:
    return _distance(x, y, 0.2) < 0.2


def _is_apart(x: float, y: float) -> bool:
    return _distance(x, y, 0.17) > 0.17


class Reacher(NativeMujocoEnv):
    """`Reacher-v5`; arguments as of `gymnasium.envs.mujoco.reacher_v5.ReacherEnv`."""

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "reacher.xml",
        frame_skip: int = 2,
        default_camera_config: dict[str, Any] | None = REACHER_CAMERA,
        reward_dist_weight: float = 1,
        reward_control_weight: float = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config=default_camera_config, **kwargs)
        self._reward_dist_weight = reward_dist_weight
        self._reward_control_weight = reward_control_weight
        xpos = self.bind("xpos")
        self._fingertip, self._target = (xpos[:, self.model.body(name).id] for name in ("fingertip", "target"))
        self._angles = self.qpos[:, :2]
        self._goal_and_speeds = adjacent_view(self.qpos[:, 2:], self.qvel[:, :2])
        self.set_observation_size(10)

    def draw_start(self, slots: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Draw noise on the arm, and a goal within its reach."""
        qpos = self.uniform(slots, -0.1, 0.1, self.model.nq) + self.init_qpos
        qpos[:, -2:] = [
            _draw_until(self.rng(slot), (-0.2, -0.2), (0.4, 0.4), _is_within_reach) for slot in slots.tolist()
        ]
        qvel = self.init_qvel + self.uniform(slots, -0.005, 0.005, self.model.nv)
        qvel[:, -2:] = 0
        return qpos, qvel

    def observe(self, slots: Any) -> Array:
        """Return angles, the goal, speeds, and the vector to the goal."""
        angles = self._angles[slots].copy()
        way = self._fingertip[slots] - self._target[slots]
        parts = (np.cos(angles), np.sin(angles), self._goal_and_speeds[slots], way[:, :2])
        return np.concatenate(parts, axis=1)

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Penalise the distance and the controls."""
        distance = norm(self._fingertip - self._target) * negated(self._reward_dist_weight)
        control = square_sum(actions) * negated(self._reward_control_weight)
        return distance + control, None, {"reward_dist": distance, "reward_ctrl": control}


class Pusher(NativeMujocoEnv):
    """`Pusher-v5`; arguments as of `gymnasium.envs.mujoco.pusher_v5.PusherEnv`."""

    def __init__(
        self,
        num_envs: int,
        xml_file: str = "pusher_v5.xml",
        frame_skip: int = 5,
        default_camera_config: dict[str, Any] | None = PUSHER_CAMERA,
        reward_near_weight: float = 0.5,
        reward_dist_weight: float = 1,
        reward_control_weight: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config=default_camera_config, **kwargs)
        self._reward_near_weight = reward_near_weight
        self._reward_dist_weight = reward_dist_weight
        self._reward_control_weight = reward_control_weight
        xpos = self.bind("xpos")
        self._tip, self._object, self._goal = (
            xpos[:, self.model.body(name).id] for name in ("tips_arm", "object", "goal")
        )
        self.set_observation_size(23)

    def draw_start(self, slots: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Draw a place of the object apart from the goal, and noise on speeds."""
        qpos = np.repeat(self.init_qpos[None], len(slots), axis=0)
        qpos[:, -2:] = 0  # the goal
        qpos[:, -4:-2] = [_draw_until(self.rng(slot), (-0.3, -0.2), (0.3, 0.4), _is_apart) for slot in slots.tolist()]
        qvel = self.init_qvel + self.uniform(slots, -0.005, 0.005, self.model.nv)
        qvel[:, -4:] = 0
        return qpos, qvel

    def observe(self, slots: Any) -> Array:
        """Return the arm's angles and speeds, and the positions of its tip, the object and the goal."""
        places = (self._tip[slots], self._object[slots], self._goal[slots])
        return np.concatenate((self.qpos[slots, :7], self.qvel[slots, :7], *places), axis=1)

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Penalise the distances from arm to object and from object to goal, and the controls."""
        near = norm(self._object - self._tip) * negated(self._reward_near_weight)
        distance = norm(self._object - self._goal) * negated(self._reward_dist_weight)
        control = square_sum(actions) * negated(self._reward_control_weight)
        info = {"reward_dist": distance, "reward_ctrl": control, "reward_near": near}
        return distance + control + near, None, info
