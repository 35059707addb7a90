"""`LightModder`: where lights are and how they shine."""

from __future__ import annotations

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.modders.base import Name, vector
from aioenv.modders.placed import PlacedModder, Vector

__all__ = ["LightModder"]


class LightModder(PlacedModder):
    """Edits the lights of a model, by name or number.

    Every method takes its `name` first; a ValueError says if there is none of that name, or a value is not as it should
    be, and then nothing is edited. Those that begin with `rand_`, but for `rand_all`, give back what they have chosen.

    Args, Attributes: as `Modder`.
    """

    _kind = _fields = "light"
    _spread = 0.1

    def get_lightid(self, name: Name) -> int:
        """The number of a light.

        Raises:
            ValueError: if there is none of that name; the message lists them.
        """
        return self._find("light", name)

    def get_dir(self, name: Name) -> Vector:
        """A copy of its direction in its body's frame."""
        return self._copy("dir", name)

    def set_dir(self, name: Name, value: npt.ArrayLike) -> None:
        """Turn it to a direction `(x, y, z)` in its body's frame; any length but 0 will do.

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
        """A copy of its ambient colour, float32 from 0 to 1."""
        return self._copy("ambient", name)

    def set_ambient(self, name: Name, value: npt.ArrayLike) -> None:
        """Set its ambient colour: three numbers from 0 to 1."""
        self._set_colour("ambient", name, value)

    def get_diffuse(self, name: Name) -> Vector:
        """A copy of its diffuse colour, float32 from 0 to 1."""
        return self._copy("diffuse", name)

    def set_diffuse(self, name: Name, value: npt.ArrayLike) -> None:
        """Set its diffuse colour: three numbers from 0 to 1."""
        self._set_colour("diffuse", name, value)

    def get_specular(self, name: Name) -> Vector:
        """A copy of its specular colour, float32 from 0 to 1."""
        return self._copy("specular", name)

    def set_specular(self, name: Name, value: npt.ArrayLike) -> None:
        """Set its specular colour: three numbers from 0 to 1."""
        self._set_colour("specular", name, value)

    def get_active(self, name: Name) -> bool:
        """Whether it is on."""
        return bool(self._get("active", name))

    def set_active(self, name: Name, value: bool) -> None:
        """Switch it on or off."""
        self._set("active", self.get_lightid(name), bool(value))

    def get_castshadow(self, name: Name) -> bool:
        """Whether it casts shadows."""
        return bool(self._get("castshadow", name))

    def set_castshadow(self, name: Name, value: bool) -> None:
        """Have it cast shadows or not."""
        self._set("castshadow", self.get_lightid(name), bool(value))

    # ------------------------------------------------------------ at random

    def rand_dir(self, name: Name, angle: float = 30.0) -> Vector:
        """Turn it by at most `angle` degrees."""
        turn = np.empty(9)
        mujoco.mju_quat2Mat(turn, self._random_turn(angle))
        self.set_dir(name, turn.reshape(3, 3) @ self.get_dir(name))
        return self.get_dir(name)

    def rand_ambient(self, name: Name) -> Vector:
        """Give it another ambient colour, from 0 to 0.4."""
        self.set_ambient(name, self.rng.uniform(0, 0.4, 3))
        return self.get_ambient(name)

    def rand_diffuse(self, name: Name) -> Vector:
        """Give it another diffuse colour, from 0.3 to 1."""
        self.set_diffuse(name, self.rng.uniform(0.3, 1, 3))
        return self.get_diffuse(name)

    def rand_specular(self, name: Name) -> Vector:
        """Give it another specular colour, from 0 to 0.6."""
        self.set_specular(name, self.rng.uniform(0, 0.6, 3))
        return self.get_specular(name)

    def rand_castshadow(self, name: Name) -> bool:
        """Have it cast shadows, or not, with equal chances."""
        self.set_castshadow(name, bool(self.rng.random() < 0.5))
        return self.get_castshadow(name)

    def rand_all(self, name: Name) -> None:
        """Another position, direction and colours. (It stays on or off, and its shadows as they are.)"""
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
