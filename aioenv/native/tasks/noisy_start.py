"""What most tasks have in common: an episode begins near the model's defaults."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from aioenv.native.arithmetic import norm
from aioenv.native.mujoco_env import NativeMujocoEnv

__all__ = ["NoisyStart", "limits"]

Array = npt.NDArray[Any]


class NoisyStart(NativeMujocoEnv):
    """A task whose episodes begin at the model's defaults plus noise.

    Args:
        num_envs, xml_file, frame_skip, default_camera_config, **kwargs: as of `NativeMujocoEnv`.
        reset_noise_scale: how far uniform noise goes either way, and the standard deviation of normal noise.
    """

    #: whether the noise on velocities is normal; that on positions is uniform
    normal_velocities: ClassVar[bool] = False

    def __init__(
        self,
        num_envs: int,
        xml_file: str,
        frame_skip: int,
        default_camera_config: dict[str, Any] | None,
        reset_noise_scale: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, xml_file, frame_skip, default_camera_config=default_camera_config, **kwargs)
        self._reset_noise_scale = reset_noise_scale

    def draw_start(self, slots: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Noise around the model's defaults; each slot draws its positions first."""
        scale, nq, nv = self._reset_noise_scale, self.model.nq, self.model.nv
        if self.normal_velocities:
            qpos = self.init_qpos + self.uniform(slots, -scale, scale, nq)
            return qpos, self.init_qvel + scale * self.normal(slots, nv)
        noise = self.uniform(slots, -scale, scale, nq + nv)
        return self.init_qpos + noise[:, :nq], self.init_qvel + noise[:, nq:]

    def place(self, slots: Any) -> dict[str, Array]:
        """Infos of where the body is on the ground."""
        xy = np.ascontiguousarray(self.qpos[slots, :2])
        return {"x_position": xy[:, 0].copy(), "y_position": xy[:, 1].copy(), "distance_from_origin": norm(xy)}


def limits(name: str, value: Any) -> tuple[Any, Any]:
    """The lower and the upper limit of a range that was given as an argument.

    Raises:
        ValueError: if they are not two.
    """
    try:
        low, high = value
    except (TypeError, ValueError):
        low = high = ""
    if isinstance(low, str) or isinstance(high, str):
        raise ValueError(f"{name}: expected two numbers, (low, high), got {value!r}")
    return low, high
