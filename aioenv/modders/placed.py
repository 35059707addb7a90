"""What modders of lights and cameras have in common: these are somewhere, look somewhere, and may follow a body."""

from __future__ import annotations

from typing import Any, ClassVar

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.modders.base import Modder, Name, Seed, vector

__all__ = ["PlacedModder", "Vector"]

Vector = npt.NDArray[np.float64]


class PlacedModder(Modder):
    """Edits things of a model that have a place, by name or number.

    Subclasses say in `rand_all` what else there is to change.

    Args, Attributes: as `Modder`.
    """

    _kind: ClassVar[str]  # "light" or "camera"
    _fields: ClassVar[str]  # how the names of their fields begin
    _spread: ClassVar[float]  # how far `rand_pos` moves them at most, over the model's extent

    def __init__(self, model: mujoco.MjModel, *, seed: Seed = None, renderer: Any = None) -> None:
        super().__init__(model, seed=seed, renderer=renderer)
        data = mujoco.MjData(model)
        mujoco.mj_kinematics(model, data)
        # now: later other modders may have turned bodies
        self._xmat0 = np.array(data.xmat).reshape(-1, 3, 3)

    def get_pos(self, name: Name) -> Vector:
        """A copy of its position in its body's frame, in metres."""
        return self._copy("pos", name)

    def set_pos(self, name: Name, value: npt.ArrayLike) -> None:
        """Move it to a position in its body's frame, in metres; one that follows a body is moved by as much."""
        row, position = self._find(self._kind, name), vector("pos", value, 3)
        # where it follows a body, other fields count
        shift = self._rotation0(row) @ (position - self._field("pos")[row])
        for field in ("pos0", "poscom0"):
            self._set(field, row, self._field(field)[row] + shift)
        self._set("pos", row, position)

    def rand_pos(self, name: Name, spread: float | None = None) -> Vector:
        """Move it along each axis, by at most `spread` metres; gives its position.

        Unless that is given, it is a part of the model's extent: a tenth for lights, a fiftieth for cameras.
        """
        spread = self._spread * self.model.stat.extent if spread is None else spread
        self.set_pos(name, self.get_pos(name) + self.rng.uniform(-spread, spread, 3))
        return self.get_pos(name)

    def rand_all(self, name: Name) -> None:
        """Another look of one of them."""
        raise NotImplementedError

    def randomize(self) -> None:
        """`rand_all` of every one that the model has."""
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
        """The orientation of its body where the model begins: what follows bodies keeps its place as it was there."""
        rotation: Vector = self._xmat0[int(self._field("bodyid")[row])]
        return rotation

    def _random_turn(self, angle: float) -> Vector:
        """A quaternion: a turn about a random axis by at most `angle` degrees."""
        axis = self.rng.normal(size=3)
        quat = np.empty(4)
        mujoco.mju_axisAngle2Quat(quat, axis / np.linalg.norm(axis), np.radians(self.rng.uniform(-angle, angle)))
        return quat
