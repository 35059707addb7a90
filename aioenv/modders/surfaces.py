"""`MaterialModder` and `TextureModder`: how surfaces reflect light, and the textures of geoms and of the sky."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.modders.base import Modder, Name, Seed, fraction

__all__ = ["MaterialModder", "Texture", "TextureModder"]

SKYBOX = "skybox"
_KINDS = {
    int(mujoco.mjtTexture.mjTEXTURE_2D): "2d",
    int(mujoco.mjtTexture.mjTEXTURE_CUBE): "cube",
    int(mujoco.mjtTexture.mjTEXTURE_SKYBOX): "skybox",
}
# The index of the texture that the classic renderer shows, in a material's list. (It ignores the role rgba.)
_ROLE = int(mujoco.mjtTextureRole.mjTEXROLE_RGB)

Bitmap = npt.NDArray[np.uint8]


class MaterialModder(Modder):
    """Edits materials, addressed by a geom that has them, by its name or number.

    Geoms that share a material change together (`geoms_sharing`). Every method takes a geom's name or number first. A
    ValueError is raised if there is no such geom, it has no material, or a value is wrong; then nothing is edited.
    Methods that begin with `rand_`, except `rand_all`, return the values that they chose.

    Args, Attributes: as `Modder`.
    """

    def get_mat_id(self, name: Name) -> int:
        """Return the number of a geom's material.

        Raises:
            ValueError: if there is no such geom, or it has no material.
        """
        material = int(self.model.geom_matid[self._find("geom", name)])
        if material < 0:
            raise ValueError(f"geom {name!r} has no material; give it one in the model, <geom material=…>")
        return material

    def geoms_sharing(self, name: Name) -> list[int]:
        """Return the numbers of all geoms with the material of this one, itself included."""
        return [int(geom) for geom in np.flatnonzero(self.model.geom_matid == self.get_mat_id(name))]

    def get_specularity(self, name: Name) -> float:
        """Return how bright its highlights are, from 0 to 1."""
        return float(self.model.mat_specular[self.get_mat_id(name)])

    def set_specularity(self, name: Name, value: float) -> None:
        """Set how bright its highlights are, from 0 to 1."""
        self._edit("mat_specular", self.get_mat_id(name), fraction("specularity", value))

    def get_shininess(self, name: Name) -> float:
        """Return how small its highlights are, from 0 to 1."""
        return float(self.model.mat_shininess[self.get_mat_id(name)])

    def set_shininess(self, name: Name, value: float) -> None:
        """Set how small its highlights are, from 0 to 1."""
        self._edit("mat_shininess", self.get_mat_id(name), fraction("shininess", value))

    def get_reflectance(self, name: Name) -> float:
        """Return how much it reflects, from 0 to 1."""
        return float(self.model.mat_reflectance[self.get_mat_id(name)])

    def set_reflectance(self, name: Name, value: float) -> None:
        """Set how much it reflects, from 0 to 1. (Only planes and boxes reflect.)"""
        self._edit("mat_reflectance", self.get_mat_id(name), fraction("reflectance", value))

    def get_texrepeat(self, name: Name) -> tuple[float, float]:
        """Return how often its texture is repeated along each axis."""
        x, y = self.model.mat_texrepeat[self.get_mat_id(name)].tolist()
        return x, y

    def set_texrepeat(self, name: Name, repeat_x: float, repeat_y: float) -> None:
        """Set how often its texture is repeated over the geom, for any size.

        Args:
            name: of a geom.
            repeat_x: how often along the texture's x axis, more than 0.
            repeat_y: how often along its y axis, more than 0.

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
        """Set a random specularity, from 0.1 to 0.3; return it."""
        self.set_specularity(name, self.rng.uniform(0.1, 0.3))
        return self.get_specularity(name)

    def rand_shininess(self, name: Name) -> float:
        """Set a random shininess, from 0.1 to 0.6; return it."""
        self.set_shininess(name, self.rng.uniform(0.1, 0.6))
        return self.get_shininess(name)

    def rand_reflectance(self, name: Name) -> float:
        """Set a random reflectance, from 0.1 to 0.6; return it."""
        self.set_reflectance(name, self.rng.uniform(0.1, 0.6))
        return self.get_reflectance(name)

    def rand_texrepeat(self, name: Name, max_repeat: int = 5) -> tuple[float, float]:
        """Repeat its texture a random number of times, from 1 to `max_repeat`, along each axis; return the numbers."""
        x, y = self.rng.integers(1, max_repeat, 2, endpoint=True).tolist()
        self.set_texrepeat(name, x, y)
        return self.get_texrepeat(name)

    def rand_all(self, name: Name) -> None:
        """Randomise its specularity, shininess and reflectance."""
        self.rand_specularity(name)
        self.rand_shininess(name)
        self.rand_reflectance(name)

    def randomize(self) -> None:
        """Call `rand_all` once for each material that a geom has."""
        materials, first = np.unique(self.model.geom_matid, return_index=True)
        for material, geom in zip(materials.tolist(), first.tolist(), strict=True):
            if material >= 0:
                self.rand_all(geom)


class Texture(NamedTuple):
    """A texture of a model.

    Attributes:
        id: its number.
        type: "2d", "cube" or "skybox". The last two are six squares, one below the other.
        height: in texels.
        width: in texels.
        channels: 3, or 4 with opacity.
        bitmap: uint8 of shape `(height, width, channels)`, a view of the model.
    """

    id: int
    type: str
    height: int
    width: int
    channels: int
    bitmap: Bitmap


class TextureModder(Modder):
    """Paints textures, addressed by a geom that shows them, by its name or number; "skybox" is the sky.

    Geoms that share a texture change together (`geoms_sharing`). Opacity does not change. Textures of one channel are
    refused: the renderer does not show them. Every method takes a geom's name or number first. A ValueError is raised
    if it has no texture that can be painted, or a colour is wrong; then nothing is painted. Methods that paint return
    the bitmap, uint8 `(height, width, channels)`, a view of the model.

    Args:
        model, seed, renderer: as `Modder`.
        names: the geoms that `randomize` paints; None for all textures that geoms show, and the sky.

    Attributes: as `Modder`.

    Raises:
        ValueError: if `names` has a geom that does not exist, or whose texture can't be painted.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        *,
        seed: Seed = None,
        renderer: Any = None,
        names: Iterable[Name] | None = None,
    ) -> None:
        super().__init__(model, seed=seed, renderer=renderer)
        self._names = self._all_names() if names is None else list(names)
        for name in self._names:
            self.get_texture(name)

    def _all_names(self) -> list[Name]:
        """Return one geom for each texture that can be painted, and the sky."""
        names: list[Name] = []
        known = set()
        for geom in range(self.model.ngeom):
            texture = self._texture_of(int(self.model.geom_matid[geom]))
            if texture >= 0 and texture not in known and self._why_not(texture) is None:
                known.add(texture)
                names.append(geom)
        sky = self._sky()
        return [*names, SKYBOX] if sky >= 0 and self._why_not(sky) is None else names

    # ------------------------------------------------------------ textures

    def get_texture(self, name: Name) -> Texture:
        """Return the texture of a geom, or of the sky.

        Raises:
            ValueError: if there is none, or it can't be painted; the message says why.
        """
        if name == SKYBOX and mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_GEOM, SKYBOX) == -1:
            number = self._sky()
            if number < 0:
                raise ValueError('the model has no skybox; give it one: <texture type="skybox" …>')
        else:
            number = self._texture_of(self._material_of(name))
            if number < 0:
                raise ValueError(
                    f"the material of geom {name!r} has no texture in the role rgb, the only one that MuJoCo's classic "
                    "renderer shows; give it one: <material texture=…>"
                )
        why_not = self._why_not(number)
        if why_not is not None:
            raise ValueError(f"the texture of {name!r} can't be painted: {why_not}")
        model = self.model
        height, width, channels = (int(f[number]) for f in (model.tex_height, model.tex_width, model.tex_nchannel))
        bitmap = self._texels(number).reshape(height, width, channels)
        return Texture(number, _KINDS[int(model.tex_type[number])], height, width, channels, bitmap)

    def _sky(self) -> int:
        skies = np.flatnonzero(self.model.tex_type == int(mujoco.mjtTexture.mjTEXTURE_SKYBOX))
        return int(skies[0]) if len(skies) else -1

    def _material_of(self, name: Name) -> int:
        material = int(self.model.geom_matid[self._find("geom", name)])
        if material < 0:
            raise ValueError(f"geom {name!r} has no material, and so no texture; give it one: <geom material=…>")
        return material

    def _texture_of(self, material: int) -> int:
        """Return the texture that colours a material; -1 if there is none."""
        return -1 if material < 0 else int(self.model.mat_texid[material, _ROLE])

    def _why_not(self, texture: int) -> str | None:
        """Return why a texture can't be painted; None if it can."""
        if self.model.tex_adr[texture] < 0:
            return "the model only refers to it; embed it first, with mujoco.mj_embedAssets"
        if (channels := int(self.model.tex_nchannel[texture])) not in (3, 4):
            return f"it has nchannel={channels}, and MuJoCo's classic renderer shows only textures of 3 or 4"
        return None

    def geoms_sharing(self, name: Name) -> list[int]:
        """Return the numbers of all geoms that show the texture of this one, itself included."""
        texture = self.get_texture(name).id
        materials = self.model.geom_matid.tolist()
        return [geom for geom, material in enumerate(materials) if self._texture_of(material) == texture]

    def upload_texture(self, name: Name) -> None:
        """Upload the texture of the model to the renderer. (All methods that paint do that themselves.)"""
        self._upload(self.get_texture(name).id)

    def get_checker_matrices(self, name: Name) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return the black and the white fields of a checker of single texels, bool of shape `(height, width)`."""
        texture = self.get_texture(name)
        rows, columns = np.indices((texture.height, texture.width))
        first = (rows + columns) % 2 == 0
        return first, ~first

    def whiten_materials(self, names: Iterable[Name] | None = None) -> None:
        """Make materials white and opaque: other colours tint the textures.

        Args:
            names: geoms whose materials are whitened; None for all materials.
        """
        chosen = range(self.model.nmat) if names is None else [self._material_of(name) for name in names]
        for material in dict.fromkeys(chosen):
            self._edit("mat_rgba", material, 1.0)

    # ------------------------------------------------------------ painting

    def set_rgb(self, name: Name, rgb: npt.ArrayLike) -> Bitmap:
        """Paint it in one colour: three numbers from 0 to 255."""
        return self._paint(name, lambda texture: _colour("rgb", rgb))

    def set_checker(self, name: Name, rgb1: npt.ArrayLike, rgb2: npt.ArrayLike) -> Bitmap:
        """Paint a checker of single texels in two colours."""
        one, two = _colour("rgb1", rgb1), _colour("rgb2", rgb2)
        return self._paint(name, lambda texture: np.where(self.get_checker_matrices(name)[0][..., None], one, two))

    def set_gradient(self, name: Name, rgb1: npt.ArrayLike, rgb2: npt.ArrayLike, vertical: bool = True) -> Bitmap:
        """Paint a gradient.

        Args:
            name: of a geom, or "skybox".
            rgb1: the first colour: three numbers from 0 to 255.
            rgb2: the last colour.
            vertical: from top to bottom; else from left to right.
        """
        one, two = _colour("rgb1", rgb1), _colour("rgb2", rgb2)

        def gradient(texture: Texture) -> npt.NDArray[Any]:
            share = np.linspace(0, 1, texture.height if vertical else texture.width)
            share = share[:, None, None] if vertical else share[None, :, None]
            return one + share * (two - one)

        return self._paint(name, gradient)

    def set_noise(self, name: Name, rgb1: npt.ArrayLike, rgb2: npt.ArrayLike, fraction: float = 0.9) -> Bitmap:
        """Paint noise.

        Args:
            name: of a geom, or "skybox".
            rgb1: one colour: three numbers from 0 to 255.
            rgb2: the other colour.
            fraction: the part of the texels, chosen at random, that gets `rgb2`, from 0 to 1.
        """
        one, two = _colour("rgb1", rgb1), _colour("rgb2", rgb2)
        share = _fraction(fraction)

        def noise(texture: Texture) -> npt.NDArray[Any]:
            chosen = self.rng.random((texture.height, texture.width)) < share
            return np.where(chosen[..., None], two, one)

        return self._paint(name, noise)

    def _paint(self, name: Name, picture: Any) -> Bitmap:
        texture = self.get_texture(name)
        colours = np.broadcast_to(picture(texture), (texture.height, texture.width, 3))
        self._edit_texture(texture.id)
        texture.bitmap[..., :3] = np.rint(colours)
        self._upload(texture.id)
        return texture.bitmap

    # ------------------------------------------------------------ at random

    def get_rand_rgb(self, n: int = 1) -> Any:
        """Return a random colour, uint8 of shape (3,); a tuple of them if n is more than 1."""
        colours = self.rng.integers(0, 256, (n, 3), np.uint8)
        return colours[0] if n == 1 else tuple(colours)

    def rand_rgb(self, name: Name) -> Bitmap:
        """Paint it in a random colour."""
        return self.set_rgb(name, self.get_rand_rgb())

    def rand_checker(self, name: Name) -> Bitmap:
        """Paint a checker of random colours."""
        return self.set_checker(name, *self.get_rand_rgb(2))

    def rand_gradient(self, name: Name) -> Bitmap:
        """Paint a gradient of random colours, vertical or not with equal probability."""
        vertical = bool(self.rng.random() < 0.5)
        one, two = self.get_rand_rgb(2)
        return self.set_gradient(name, one, two, vertical)

    def rand_noise(self, name: Name) -> Bitmap:
        """Paint noise of random colours, with 0.1 to 0.9 of the texels in the second one."""
        share = self.rng.uniform(0.1, 0.9)
        one, two = self.get_rand_rgb(2)
        return self.set_noise(name, one, two, share)

    def rand_all(self, name: Name) -> Bitmap:
        """Call one of the four other methods, with equal probability."""
        painters = (self.rand_rgb, self.rand_checker, self.rand_gradient, self.rand_noise)
        return painters[self.rng.integers(len(painters))](name)

    def randomize(self) -> None:
        """Call `rand_all` for each texture that the constructor was given, and whiten its materials."""
        for name in self._names:
            self.rand_all(name)
            texture = self.get_texture(name).id
            for material in range(self.model.nmat):
                if self._texture_of(material) == texture:
                    self._edit("mat_rgba", material, 1.0)


def _fraction(value: float) -> float:
    return fraction("fraction", value)


def _colour(name: str, value: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return three numbers from 0 to 255 as an array.

    Raises:
        ValueError: if it is something else.
    """
    colour = np.asarray(value, np.float64)
    if colour.shape != (3,) or not ((colour >= 0) & (colour <= 255)).all():
        raise ValueError(f"{name}: expected three numbers from 0 to 255, got {value!r}")
    if colour.any() and (colour < 1).all():
        raise ValueError(f"{name}: expected three numbers from 0 to 255, got {value!r}, which would be black")
    return colour
