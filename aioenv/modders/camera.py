"""`CameraModder`: where cameras are and what they take in."""

from __future__ import annotations

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.modders.base import Name, vector
from aioenv.modders.placed import PlacedModder, Vector

__all__ = ["CameraModder"]


class CameraModder(PlacedModder):
    """Edits the cameras of a model, by name or number. (The free camera is none of the model's.)

    Every method takes its `name` first; a ValueError says if there is none of that name, or a value is not as it should
    be, and then nothing is edited. Those that begin with `rand_`, but for `rand_all`, give back what they have chosen.

    Args, Attributes: as `Modder`.
    """

    _kind, _fields = "camera", "cam"
    _spread = 0.02

    def get_camid(self, name: Name) -> int:
        """The number of a camera.

        Raises:
            ValueError: if there is none of that name; the message lists them.
        """
        return self._find("camera", name)

    def get_fovy(self, name: Name) -> float:
        """Its vertical field of view, in degrees (for an orthographic one, in metres)."""
        return float(self._get("fovy", name))

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
        self._set("fovy", row, value)

    def get_quat(self, name: Name) -> Vector:
        """A copy of its orientation in its body's frame, as a quaternion (w, x, y, z)."""
        return self._copy("quat", name)

    def set_quat(self, name: Name, value: npt.ArrayLike) -> None:
        """Turn it: a quaternion (w, x, y, z) of any length but 0. (One with a target looks at it all the same.)

        Raises:
            ValueError: if it is all zeros, or not four finite numbers.
        """
        quat = vector("quat", value, 4)
        length = np.linalg.norm(quat)
        if length == 0:
            raise ValueError("quat: expected a quaternion, got zeros")
        row = self.get_camid(name)
        quat = quat / length
        matrix = np.empty(9)
        mujoco.mju_quat2Mat(matrix, quat)
        turned = self._rotation0(row) @ matrix.reshape(3, 3)
        self._set("mat0", row, turned.reshape(9))
        self._set("quat", row, quat)

    # ------------------------------------------------------------ at random

    def rand_fovy(self, name: Name, spread: float = 0.1) -> float:
        """Change its field of view by at most a part of itself, `spread`; gives it, in degrees.

        Raises:
            ValueError: as for `set_fovy`.
        """
        self.set_fovy(name, min(self.get_fovy(name) * self.rng.uniform(1 - spread, 1 + spread), 179.0))
        return self.get_fovy(name)

    def rand_quat(self, name: Name, angle: float = 5.0) -> Vector:
        """Turn it about a random axis by at most `angle` degrees; gives its quaternion."""
        quat = np.empty(4)
        mujoco.mju_mulQuat(quat, self.get_quat(name), self._random_turn(angle))
        self.set_quat(name, quat)
        return self.get_quat(name)

    def rand_all(self, name: Name) -> None:
        """Another position, orientation and field of view (that of a camera with a sensor stays as it is)."""
        self.rand_pos(name)
        self.rand_quat(name)
        if not self._get("sensorsize", name).any():
            self.rand_fovy(name)
