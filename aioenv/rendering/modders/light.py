"""`LightModder`: where lights are and how they shine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.rendering.modders.base import Modder, Name, vector

__all__ = ["LightModder"]

Vector = npt.NDArray[np.float64]


class LightModder(Modder):
    """Edits the lights of a model, by name or number.

    Args, Attributes: as `Modder`.
    """

    def get_lightid(self, name: Name) -> int:
        """The number of a light.

        Raises:
            ValueError: if there is none of that name; the message lists them.
        """
        return self._find("light", name)

    def get_pos(self, name: Name) -> Vector:
        """A copy of its position in its body's frame, in metres."""
        return self._copy("pos", name)

    def set_pos(self, name: Name, value: npt.ArrayLike) -> None:
        """Move it to a position in its body's frame, in metres; one that follows a body is moved by as much."""
        self._move("light", self.get_lightid(name), vector("pos", value, 3))

    def get_dir(self, name: Name) -> Vector:
        """A copy of its direction in its body's frame."""
        return self._copy("dir", name)

    def set_dir(self, name: Name, value: npt.ArrayLike) -> None:
        """Turn it; any length but 0 will do."""
        direction = vector("dir", value, 3)
        length = np.linalg.norm(direction)
        if length == 0:
            raise ValueError("dir: expected a direction, got zeros")
        row = self.get_lightid(name)
        direction = direction / length
        self._edit("light_dir0", row, self._rotation0(int(self.model.light_bodyid[row])) @ direction)
        self._edit("light_dir", row, direction)

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
        self._edit("light_active", self.get_lightid(name), bool(value))

    def get_castshadow(self, name: Name) -> bool:
        """Whether it casts shadows."""
        return bool(self._get("castshadow", name))

    def set_castshadow(self, name: Name, value: bool) -> None:
        """Have it cast shadows or not."""
        self._edit("light_castshadow", self.get_lightid(name), bool(value))

    # ------------------------------------------------------------ at random

    def rand_pos(self, name: Name, spread: float | None = None) -> Vector:
        """Move it by at most `spread` metres along each axis: a tenth of the model's extent unless it is given."""
        spread = 0.1 * self.model.stat.extent if spread is None else spread
        self.set_pos(name, self.get_pos(name) + self.rng.uniform(-spread, spread, 3))
        return self.get_pos(name)

    def rand_dir(self, name: Name, angle: float = 30.0) -> Vector:
        """Turn it by at most `angle` degrees."""
        self.set_dir(name, self._tilted(self.get_dir(name), angle))
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

    def randomize(self) -> None:
        """`rand_all` of every light."""
        for number in range(self.model.nlight):
            self.rand_all(number)

    def _get(self, field: str, name: Name) -> Any:
        return getattr(self.model, f"light_{field}")[self.get_lightid(name)]

    def _copy(self, field: str, name: Name) -> Vector:
        return np.array(self._get(field, name))

    def _set_colour(self, field: str, name: Name, value: npt.ArrayLike) -> None:
        colour = vector(field, value, 3)
        if not ((colour >= 0) & (colour <= 1)).all():
            raise ValueError(f"{field}: expected three numbers from 0 to 1, got {value!r}")
        self._edit(f"light_{field}", self.get_lightid(name), colour)
