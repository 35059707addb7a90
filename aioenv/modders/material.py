"""`MaterialModder`: how surfaces take the light."""

from __future__ import annotations

import numpy as np

from aioenv.modders.base import Modder, Name, fraction

__all__ = ["MaterialModder"]


class MaterialModder(Modder):
    """Edits materials, addressed by a geom that has them, by its name or number.

    Geoms that share a material change together (`geoms_sharing`). Every method takes a geom's `name` first; a
    ValueError says if there is none, it has no material, or a value is not as it should be, and then nothing is edited.
    Those that begin with `rand_`, but for `rand_all`, give back what they have chosen.

    Args, Attributes: as `Modder`.
    """

    def get_mat_id(self, name: Name) -> int:
        """The number of a geom's material.

        Raises:
            ValueError: if there is no such geom, or it has no material.
        """
        material = int(self.model.geom_matid[self._find("geom", name)])
        if material < 0:
            raise ValueError(f"geom {name!r} has no material; give it one in the model, <geom material=…>")
        return material

    def geoms_sharing(self, name: Name) -> list[int]:
        """The numbers of all geoms with the material of this one, itself among them."""
        return [int(geom) for geom in np.flatnonzero(self.model.geom_matid == self.get_mat_id(name))]

    def get_specularity(self, name: Name) -> float:
        """How bright its highlights are, from 0 to 1."""
        return float(self.model.mat_specular[self.get_mat_id(name)])

    def set_specularity(self, name: Name, value: float) -> None:
        """Set how bright its highlights are, from 0 to 1."""
        self._edit("mat_specular", self.get_mat_id(name), fraction("specularity", value))

    def get_shininess(self, name: Name) -> float:
        """How small its highlights are, from 0 to 1."""
        return float(self.model.mat_shininess[self.get_mat_id(name)])

    def set_shininess(self, name: Name, value: float) -> None:
        """Set how small its highlights are, from 0 to 1."""
        self._edit("mat_shininess", self.get_mat_id(name), fraction("shininess", value))

    def get_reflectance(self, name: Name) -> float:
        """How much it mirrors, from 0 to 1."""
        return float(self.model.mat_reflectance[self.get_mat_id(name)])

    def set_reflectance(self, name: Name, value: float) -> None:
        """Set how much it mirrors, from 0 to 1. (Only planes and boxes mirror.)"""
        self._edit("mat_reflectance", self.get_mat_id(name), fraction("reflectance", value))

    def get_texrepeat(self, name: Name) -> tuple[float, float]:
        """How often its texture is repeated, along each axis."""
        x, y = self.model.mat_texrepeat[self.get_mat_id(name)].tolist()
        return x, y

    def set_texrepeat(self, name: Name, repeat_x: float, repeat_y: float) -> None:
        """Set how often its texture is repeated over the geom, whatever its size.

        Args:
            name: of a geom.
            repeat_x: how often along the texture's x, more than 0.
            repeat_y: likewise along y.

        Raises:
            ValueError: if one is not positive.
        """
        if not (repeat_x > 0 and repeat_y > 0):
            raise ValueError(f"texrepeat: expected two positive numbers, got {(repeat_x, repeat_y)!r}")
        material = self.get_mat_id(name)
        self._edit("mat_texuniform", material, False)
        self._edit("mat_texrepeat", material, (repeat_x, repeat_y))

    # ------------------------------------------------------------ at random

    def rand_specularity(self, name: Name) -> float:
        """Another specularity, from 0.1 to 0.3."""
        self.set_specularity(name, self.rng.uniform(0.1, 0.3))
        return self.get_specularity(name)

    def rand_shininess(self, name: Name) -> float:
        """Another shininess, from 0.1 to 0.6."""
        self.set_shininess(name, self.rng.uniform(0.1, 0.6))
        return self.get_shininess(name)

    def rand_reflectance(self, name: Name) -> float:
        """Another reflectance, from 0.1 to 0.6."""
        self.set_reflectance(name, self.rng.uniform(0.1, 0.6))
        return self.get_reflectance(name)

    def rand_texrepeat(self, name: Name, max_repeat: int = 5) -> tuple[float, float]:
        """Repeat its texture another number of times, from 1 to `max_repeat`, along each axis."""
        x, y = self.rng.integers(1, max_repeat, 2, endpoint=True).tolist()
        self.set_texrepeat(name, x, y)
        return self.get_texrepeat(name)

    def rand_all(self, name: Name) -> None:
        """Another specularity, shininess and reflectance."""
        self.rand_specularity(name)
        self.rand_shininess(name)
        self.rand_reflectance(name)

    def randomize(self) -> None:
        """`rand_all` of every material that a geom has, once each."""
        materials, first = np.unique(self.model.geom_matid, return_index=True)
        for material, geom in zip(materials.tolist(), first.tolist(), strict=True):
            if material >= 0:
                self.rand_all(geom)
