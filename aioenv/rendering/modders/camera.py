"""`CameraModder`: where cameras are and what they take in."""

from __future__ import annotations

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.rendering.modders.base import Modder, Name, vector

__all__ = ["CameraModder"]

Vector = npt.NDArray[np.float64]


class CameraModder(Modder):
    """Edits the cameras of a model, by name or number. (The free camera is none of the model's.)

    Args, Attributes: as `Modder`.
    """

    def get_camid(self, name: Name) -> int:
        """The number of a camera.

        Raises:
            ValueError: if there is none of that name; the message lists them.
        """
        return self._find("camera", name)

    def get_fovy(self, name: Name) -> float:
        """Its vertical field of view, in degrees (for an orthographic one, in metres)."""
        return float(self.model.cam_fovy[self.get_camid(name)])

    def set_fovy(self, name: Name, value: float) -> None:
        """Set its vertical field of view: more than 0 and less than 180 degrees.

        Raises:
            ValueError: if it is out of range, or the camera has a sensor, which says what it sees.
        """
        row = self.get_camid(name)
        if not 0 < value < 180:
            raise ValueError(f"fovy: expected more than 0 and less than 180 degrees, got {value!r}")
        if self.model.cam_sensorsize[row].any():
            raise ValueError(f"camera {name!r} has a sensor (sensorsize), whose intrinsics count, not fovy")
        self._edit("cam_fovy", row, value)

    def get_pos(self, name: Name) -> Vector:
        """A copy of its position in its body's frame, in metres."""
        return np.array(self.model.cam_pos[self.get_camid(name)])

    def set_pos(self, name: Name, value: npt.ArrayLike) -> None:
        """Move it to a position in its body's frame, in metres; one that follows a body is moved by as much."""
        self._move("cam", self.get_camid(name), vector("pos", value, 3))

    def get_quat(self, name: Name) -> Vector:
        """A copy of its orientation in its body's frame, as a quaternion (w, x, y, z)."""
        return np.array(self.model.cam_quat[self.get_camid(name)])

    def set_quat(self, name: Name, value: npt.ArrayLike) -> None:
        """Turn it: a quaternion (w, x, y, z) of any length but 0. (One with a target looks at it all the same.)"""
        quat = vector("quat", value, 4)
        length = np.linalg.norm(quat)
        if length == 0:
            raise ValueError("quat: expected a quaternion, got zeros")
        row = self.get_camid(name)
        quat = quat / length
        matrix = np.empty(9)
        mujoco.mju_quat2Mat(matrix, quat)
        turned = self._rotation0(int(self.model.cam_bodyid[row])) @ matrix.reshape(3, 3)
        self._edit("cam_mat0", row, turned.reshape(9))
        self._edit("cam_quat", row, quat)

    # ------------------------------------------------------------ at random

    def rand_fovy(self, name: Name, spread: float = 0.1) -> float:
        """Change its field of view by at most this part of itself."""
        self.set_fovy(name, min(self.get_fovy(name) * self.rng.uniform(1 - spread, 1 + spread), 179.0))
        return self.get_fovy(name)

    def rand_pos(self, name: Name, spread: float | None = None) -> Vector:
        """Move it by at most `spread` metres along each axis: a fiftieth of the model's extent unless it is given."""
        spread = 0.02 * self.model.stat.extent if spread is None else spread
        self.set_pos(name, self.get_pos(name) + self.rng.uniform(-spread, spread, 3))
        return self.get_pos(name)

    def rand_quat(self, name: Name, angle: float = 5.0) -> Vector:
        """Turn it about a random axis by at most `angle` degrees."""
        quat = np.empty(4)
        mujoco.mju_mulQuat(quat, self.get_quat(name), self._random_turn(angle))
        self.set_quat(name, quat)
        return self.get_quat(name)

    def rand_all(self, name: Name) -> None:
        """Another position, orientation and field of view (that of a camera with a sensor stays as it is)."""
        self.rand_pos(name)
        self.rand_quat(name)
        if not self.model.cam_sensorsize[self.get_camid(name)].any():
            self.rand_fovy(name)

    def randomize(self) -> None:
        """`rand_all` of every camera."""
        for number in range(self.model.ncam):
            self.rand_all(number)
