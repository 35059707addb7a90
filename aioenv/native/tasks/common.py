"""Shared by the tasks: `NoisyStart`, whose episodes begin near the model's defaults, and arithmetic on rows.

The arithmetic gives the same bits as numpy gives for a single row.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from numpy import vecdot  # numpy 2: before it, float32 costs came out as float64

from aioenv.native.mujoco_env import NativeMujocoEnv

__all__ = ["NoisyStart", "adjacent_view", "clamp", "negated", "norm", "parse_range", "square_sum"]

Array = npt.NDArray[Any]


def norm(rows: Array) -> Array:
    """Return `np.linalg.norm` of each row: the root of its BLAS dot product with itself."""
    lengths: Array = np.sqrt(vecdot(rows, rows))
    return lengths


def square_sum(rows: Array) -> Array:
    """Return `np.sum(np.square(row))` of each row, in the dtype of the rows."""
    total: Array = np.add.reduce(np.square(rows), axis=1)
    return total


def clamp(values: Array, limit: float) -> None:
    """Clip numbers to -limit … limit in place, as `np.clip`, but without its detour through Python."""
    np.minimum(np.maximum(values, -limit, out=values), limit, out=values)


def negated(weight: float) -> float:
    """Negate a weight, so that `values * negated(weight)` is `-(weight * values)`, zeros included, in one operation."""
    if isinstance(weight, (np.unsignedinteger, np.bool_)):
        weight = weight * np.float32(1)  # unsigned types have no sign: use the dtype of their products with float32
    return -weight or weight * -0.0


def adjacent_view(left: Array, right: Array) -> Array:
    """Make one live view of two arrays `(n, ...)` with adjacent rows, such as positions and velocities."""
    first, second = (array.__array_interface__["data"][0] for array in (left, right))
    if first + left.shape[1] * left.itemsize != second or left.strides[0] != right.strides[0]:
        raise ValueError(
            f"expected rows one behind the other, got {left.shape} at {first} and {right.shape} at {second}"
        )
    shape = (len(left), left.shape[1] + right.shape[1])
    return np.lib.stride_tricks.as_strided(left, shape, left.strides)


class NoisyStart(NativeMujocoEnv):
    """A task whose episodes begin at the model's defaults plus noise.

    Args:
        num_envs, xml_file, frame_skip, default_camera_config, **kwargs: as of `NativeMujocoEnv`.
        reset_noise_scale: the bound of uniform noise, and the standard deviation of normal noise.
    """

    #: whether the noise on velocities is normal; noise on positions is uniform
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
        """Draw noise around the model's defaults; each slot draws its positions first."""
        scale, nq, nv = self._reset_noise_scale, self.model.nq, self.model.nv
        if self.normal_velocities:
            qpos = self.init_qpos + self.uniform(slots, -scale, scale, nq)
            return qpos, self.init_qvel + scale * self.normal(slots, nv)
        noise = self.uniform(slots, -scale, scale, nq + nv)
        return self.init_qpos + noise[:, :nq], self.init_qvel + noise[:, nq:]

    def ground_position(self, slots: Any) -> dict[str, Array]:
        """Return infos of the position of the body on the ground."""
        xy = np.ascontiguousarray(self.qpos[slots, :2])
        return {"x_position": xy[:, 0].copy(), "y_position": xy[:, 1].copy(), "distance_from_origin": norm(xy)}


def parse_range(name: str, value: Any) -> tuple[Any, Any]:
    """Return the lower and upper limit of a range that is an argument.

    Raises:
        ValueError: if it is not a pair of numbers.
    """
    try:
        low, high = value
    except (TypeError, ValueError):
        low = high = ""
    if isinstance(low, str) or isinstance(high, str):
        raise ValueError(f"{name}: expected two numbers, (low, high), got {value!r}")
    return low, high
