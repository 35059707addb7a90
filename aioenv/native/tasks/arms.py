"""Reacher and Pusher: arms on a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.native.arithmetic import less, norm, side_by_side, square_sum
from aioenv.native.mujoco_env import NativeMujocoEnv

__all__ = ["Pusher", "Reacher"]

Array = npt.NDArray[Any]

PUSHER_CAMERA = {"trackbodyid": -1, "distance": 4.0}
REACHER_CAMERA = {"trackbodyid": 0}


def _draw(
    rng: np.random.Generator,
    low: tuple[float, float],
    width: tuple[float, float],
    is_good: Callable[[float, float], bool],
) -> tuple[float, float]:
    """Two numbers as `rng.uniform` draws them, until they are good; without arrays, which take ten times as long."""
    random = rng.random
    while True:
        x = low[0] + width[0] * random()
        y = low[1] + width[1] * random()
        if is_good(x, y):
            return x, y


def _distance(x: float, y: float, limit: float) -> float:
    """How far off, by `np.linalg.norm` where the last bits might decide about the limit."""
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
        self._goal_and_speeds = side_by_side(self.qpos[:, 2:], self.qvel[:, :2])
        self.set_observation_size(10)

    def draw_start(self, slots: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Noise on the arm, and a goal that it can reach."""
        qpos = self.uniform(slots, -0.1, 0.1, self.model.nq) + self.init_qpos
        qpos[:, -2:] = [_draw(self.rng(slot), (-0.2, -0.2), (0.4, 0.4), _is_within_reach) for slot in slots.tolist()]
        qvel = self.init_qvel + self.uniform(slots, -0.005, 0.005, self.model.nv)
        qvel[:, -2:] = 0
        return qpos, qvel

    def observe(self, slots: Any) -> Array:
        """Angles, the goal, speeds, the way to the goal."""
        angles = self._angles[slots].copy()
        way = self._fingertip[slots] - self._target[slots]
        parts = (np.cos(angles), np.sin(angles), self._goal_and_speeds[slots], way[:, :2])
        return np.concatenate(parts, axis=1)

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Less the distance, less what the controls cost."""
        distance = norm(self._fingertip - self._target) * less(self._reward_dist_weight)
        control = square_sum(actions) * less(self._reward_control_weight)
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
        """The object somewhere, but not at the goal; noise on speeds."""
        qpos = np.repeat(self.init_qpos[None], len(slots), axis=0)
        qpos[:, -2:] = 0  # the goal
        qpos[:, -4:-2] = [_draw(self.rng(slot), (-0.3, -0.2), (0.3, 0.4), _is_apart) for slot in slots.tolist()]
        qvel = self.init_qvel + self.uniform(slots, -0.005, 0.005, self.model.nv)
        qvel[:, -4:] = 0
        return qpos, qvel

    def observe(self, slots: Any) -> Array:
        """The arm's angles and speeds, where its tip, the object and the goal are."""
        places = (self._tip[slots], self._object[slots], self._goal[slots])
        return np.concatenate((self.qpos[slots, :7], self.qvel[slots, :7], *places), axis=1)

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Less the distances of arm and object and of object and goal, less what the controls cost."""
        near = norm(self._object - self._tip) * less(self._reward_near_weight)
        distance = norm(self._object - self._goal) * less(self._reward_dist_weight)
        control = square_sum(actions) * less(self._reward_control_weight)
        info = {"reward_dist": distance, "reward_ctrl": control, "reward_near": near}
        return distance + control + near, None, info
