"""`LightModder` and `CameraModder`: where lights and cameras are, how lights shine, and what cameras see."""

from __future__ import annotations

from typing import Any, ClassVar

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.modders.base import Modder, Name, Seed, vector

__all__ = ["CameraModder", "LightModder"]

Vector = npt.NDArray[np.float64]


class PlacedModder(Modder):
    """Edits lights or cameras, which have a position and a direction, and may follow a body.

    Args, Attributes: as `Modder`.
    """

    _kind: ClassVar[str]  # "light" or "camera"
    _fields: ClassVar[str]  # the prefix of the names of their fields
    _spread: ClassVar[float]  # how far `rand_pos` moves them at most, as a part of the model's extent

    def __init__(self, model: mujoco.MjModel, *, seed: Seed = None, renderer: Any = None) -> None:
        super().__init__(model, seed=seed, renderer=renderer)
        data = mujoco.MjData(model)
        mujoco.mj_kinematics(model, data)
        # now, since other modders may turn bodies later
        self._xmat0 = np.array(data.xmat).reshape(-1, 3, 3)

    def get_pos(self, name: Name) -> Vector:
        """Return a copy of its position in its body's frame, in metres."""
        return self._copy("pos", name)

    def set_pos(self, name: Name, value: npt.ArrayLike) -> None:
        """Move it to a position in its body's frame, in metres; if it follows a body, it is moved by as much."""
        row, position = self._find(self._kind, name), vector("pos", value, 3)
        # the fields that count if it follows a body
        shift = self._rotation0(row) @ (position - self._field("pos")[row])
        for field in ("pos0", "poscom0"):
            self._set(field, row, self._field(field)[row] + shift)
        self._set("pos", row, position)

    def rand_pos(self, name: Name, spread: float | None = None) -> Vector:
        """Move it along each axis by at most `spread` metres; return its position.

        By default `spread` is a part of the model's extent: a tenth for lights, a fiftieth for cameras.
        """
        spread = self._spread * self.model.stat.extent if spread is None else spread
        self.set_pos(name, self.get_pos(name) + self.rng.uniform(-spread, spread, 3))
        return self.get_pos(name)

    def rand_all(self, name: Name) -> None:
        """Randomise one of them."""
        raise NotImplementedError

    def randomize(self) -> None:
        """Call `rand_all` for each one of the model."""
        for number in range(len(self._field("pos"))):
            self.rand_all(number)

    # ------------------------------------------------------------ for subclasses

    def _field(self, field: str) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = getattr(self.model, f"{self._fields}_{field}")
        return array

    def _set(self, field: str, row: int, value: Any) -> None:
        self._edit(f"{self._fields}_{field}", row, value)

    def _get(self, field: str, name: Name) -> Any:
        return self._field(field)[self._find(self._kind, name)]

    def _copy(self, field: str, name: Name) -> Vector:
        return np.array(self._get(field, name))

    def _rotation0(self, row: int) -> Vector:
        """Return the orientation of its body in the initial state, which the fields `pos0`, `dir0`, `mat0` refer to."""
        rotation: Vector = self._xmat0[int(self._field("bodyid")[row])]
        return rotation

    def _random_turn(self, angle: float) -> Vector:
        """Return a quaternion: a rotation about a random axis by at most `angle` degrees."""
        axis = self.rng.normal(size=3)
        quat = np.empty(4)
        mujoco.mju_axisAngle2Quat(quat, axis / np.linalg.norm(axis), np.radians(self.rng.uniform(-angle, angle)))
        return quat


class LightModder(PlacedModder):
    """Edits the lights of a model, by name or number.

    Every method takes a name or number first. A ValueError is raised if there is none of that name or a value is wrong;
    then nothing is edited. Methods that begin with `rand_`, except `rand_all`, return the values that they chose.

    Args, Attributes: as `Modder`.
    """

    _kind = _fields = "light"
    _spread = 0.1

    def get_lightid(self, name: Name) -> int:
        """Return the number of a light.

        Raises:
            ValueError: if there is no such light; the message lists the names.
        """
        return self._find("light", name)

    def get_dir(self, name: Name) -> Vector:
        """Return a copy of its direction in its body's frame."""
        return self._copy("dir", name)

    def set_dir(self, name: Name, value: npt.ArrayLike) -> None:
        """Turn it to a direction `(x, y, z)` in its body's frame, of any length but 0.

        Raises:
            ValueError: if it is all zeros, or not three finite numbers.
        """
        direction = vector("dir", value, 3)
        length = np.linalg.norm(direction)
        if length == 0:
            raise ValueError("dir: expected a direction, got zeros")
        row = self.get_lightid(name)
        direction = direction / length
        self._set("dir0", row, self._rotation0(row) @ direction)
        self._set("dir", row, direction)

    def get_ambient(self, name: Name) -> Vector:
        """Return a copy of its ambient colour, float32 from 0 to 1."""
        return self._copy("ambient", name)

    def set_ambient(self, name: Name, value: npt.ArrayLike) -> None:
        """Set its ambient colour: three numbers from 0 to 1."""
        self._set_colour("ambient", name, value)

    def get_diffuse(self, name: Name) -> Vector:
        """Return a copy of its diffuse colour, float32 from 0 to 1."""
        return self._copy("diffuse", name)

    def set_diffuse(self, name: Name, value: npt.ArrayLike) -> None:
        """Set its diffuse colour: three numbers from 0 to 1."""
        self._set_colour("diffuse", name, value)

    def get_specular(self, name: Name) -> Vector:
        """Return a copy of its specular colour, float32 from 0 to 1."""
        return self._copy("specular", name)

    def set_specular(self, name: Name, value: npt.ArrayLike) -> None:
        """Set its specular colour: three numbers from 0 to 1."""
        self._set_colour("specular", name, value)

    def get_active(self, name: Name) -> bool:
        """Return whether it is on."""
        return bool(self._get("active", name))

    def set_active(self, name: Name, value: bool) -> None:
        """Switch it on or off."""
        self._set("active", self.get_lightid(name), bool(value))

    def get_castshadow(self, name: Name) -> bool:
        """Return whether it casts shadows."""
        return bool(self._get("castshadow", name))

    def set_castshadow(self, name: Name, value: bool) -> None:
        """Have it cast shadows or not."""
        self._set("castshadow", self.get_lightid(name), bool(value))

    # ------------------------------------------------------------ at random

    def rand_dir(self, name: Name, angle: float = 30.0) -> Vector:
        """Turn it by at most `angle` degrees; return its direction."""
        turn = np.empty(9)
        mujoco.mju_quat2Mat(turn, self._random_turn(angle))
        self.set_dir(name, turn.reshape(3, 3) @ self.get_dir(name))
        return self.get_dir(name)

    def rand_ambient(self, name: Name) -> Vector:
        """Give it a random ambient colour, from 0 to 0.4; return the colour."""
        self.set_ambient(name, self.rng.uniform(0, 0.4, 3))
        return self.get_ambient(name)

    def rand_diffuse(self, name: Name) -> Vector:
        """Give it a random diffuse colour, from 0.3 to 1; return the colour."""
        self.set_diffuse(name, self.rng.uniform(0.3, 1, 3))
        return self.get_diffuse(name)

    def rand_specular(self, name: Name) -> Vector:
        """Give it a random specular colour, from 0 to 0.6; return the colour."""
        self.set_specular(name, self.rng.uniform(0, 0.6, 3))
        return self.get_specular(name)

    def rand_castshadow(self, name: Name) -> bool:
        """Have it cast shadows or not, with equal probability; return whether it does."""
        self.set_castshadow(name, bool(self.rng.random() < 0.5))
        return self.get_castshadow(name)

    def rand_all(self, name: Name) -> None:
        """Randomise its position, direction and colours. (Whether it is on and casts shadows does not change.)"""
        self.rand_pos(name)
        self.rand_dir(name)
        self.rand_ambient(name)
        self.rand_diffuse(name)
        self.rand_specular(name)

    def _set_colour(self, field: str, name: Name, value: npt.ArrayLike) -> None:
        colour = vector(field, value, 3)
        if not ((colour >= 0) & (colour <= 1)).all():
            raise ValueError(f"{field}: expected three numbers from 0 to 1, got {value!r}")
        self._set(field, self.get_lightid(name), colour)


class CameraModder(PlacedModder):
    """Edits the cameras of a model, by name or number. (The free camera is not one of them.)

    Every method takes a name or number first. A ValueError is raised if there is none of that name or a value is wrong;
    then nothing is edited. Methods that begin with `rand_`, except `rand_all`, return the values that they chose.

    Args, Attributes: as `Modder`.
    """

    _kind, _fields = "camera", "cam"
    _spread = 0.02

    def get_camid(self, name: Name) -> int:
        """Return the number of a camera.

        Raises:
            ValueError: if there is no such camera; the message lists the names.
        """
        return self._find("camera", name)

    def get_fovy(self, name: Name) -> float:
        """Return its vertical field of view, in degrees (for an orthographic camera, in metres)."""
        return float(self._get("fovy", name))

    def set_fovy(self, name: Name, value: float) -> None:
        """Set its vertical field of view: more than 0 and less than 180 degrees.

        Raises:
            ValueError: if it is out of range, or the camera has a sensor, which determines its field of view.
        """
        row = self.get_camid(name)
        if not 0 < value < 180:
            raise ValueError(f"fovy: expected more than 0 and less than 180 degrees, got {value!r}")
        if self.model.cam_sensorsize[row].any():
            raise ValueError(f"camera {name!r} has a sensor (sensorsize), whose intrinsics count, not fovy")
        self._set("fovy", row, value)

    def get_quat(self, name: Name) -> Vector:
        """Return a copy of its orientation in its body's frame, as a quaternion (w, x, y, z)."""
        return self._copy("quat", name)

    def set_quat(self, name: Name, value: npt.ArrayLike) -> None:
        """Set its orientation: a quaternion (w, x, y, z) of any length but 0. (With a target, it still looks at that.)

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
        """Change its field of view by at most a part of itself, `spread`; return it, in degrees.

        Raises:
            ValueError: as for `set_fovy`.
        """
        self.set_fovy(name, min(self.get_fovy(name) * self.rng.uniform(1 - spread, 1 + spread), 179.0))
        return self.get_fovy(name)

    def rand_quat(self, name: Name, angle: float = 5.0) -> Vector:
        """Turn it about a random axis by at most `angle` degrees; return its quaternion."""
        quat = np.empty(4)
        mujoco.mju_mulQuat(quat, self.get_quat(name), self._random_turn(angle))
        self.set_quat(name, quat)
        return self.get_quat(name)

    def rand_all(self, name: Name) -> None:
        """Randomise its position, orientation and field of view (unless it has a sensor)."""
        self.rand_pos(name)
        self.rand_quat(name)
        if not self._get("sensorsize", name).any():
            self.rand_fovy(name)
