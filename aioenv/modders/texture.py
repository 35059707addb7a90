"""`TextureModder`: what is painted on geoms, and on the sky."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.modders.base import Modder, Name, Seed, fraction

__all__ = ["Texture", "TextureModder"]

SKYBOX = "skybox"
_KINDS = {
    int(mujoco.mjtTexture.mjTEXTURE_2D): "2d",
    int(mujoco.mjtTexture.mjTEXTURE_CUBE): "cube",
    int(mujoco.mjtTexture.mjTEXTURE_SKYBOX): "skybox",
}
# In a material's list of textures: where the one is that the classic renderer shows. (It leaves out the role rgba.)
_ROLE = int(mujoco.mjtTextureRole.mjTEXROLE_RGB)

Bitmap = npt.NDArray[np.uint8]


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

    Geoms that share a texture change together (`geoms_sharing`). Opacity stays as it is. Textures of one channel are
    refused: the renderer does not show them. Every method takes a geom's `name` first; a ValueError says if it has no
    texture that can be painted, or a colour is none, and then nothing is painted. Those that paint give the bitmap,
    uint8 `(height, width, channels)`, a view of the model.

    Args:
        model, seed, renderer: as `Modder`.
        names: what `randomize` paints; None for all textures that geoms show, and the sky.

    Attributes: as `Modder`.

    Raises:
        ValueError: if `names` has a geom that the model has not, or one without a texture of its own.
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
        """One geom for each texture that can be painted, and the sky."""
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
        """The texture of a geom, or of the sky.

        Raises:
            ValueError: if there is none, or none that can be painted; the message says why.
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
        """The texture that colours a material; -1 if none does."""
        return -1 if material < 0 else int(self.model.mat_texid[material, _ROLE])

    def _why_not(self, texture: int) -> str | None:
        """Why a texture can't be painted; None if it can."""
        if self.model.tex_adr[texture] < 0:
            return "the model only refers to it; embed it first, with mujoco.mj_embedAssets"
        if (channels := int(self.model.tex_nchannel[texture])) not in (3, 4):
            return f"it has nchannel={channels}, and MuJoCo's classic renderer shows only textures of 3 or 4"
        return None

    def geoms_sharing(self, name: Name) -> list[int]:
        """The numbers of all geoms that show the texture of this one, itself among them."""
        texture = self.get_texture(name).id
        materials = self.model.geom_matid.tolist()
        return [geom for geom, material in enumerate(materials) if self._texture_of(material) == texture]

    def upload_texture(self, name: Name) -> None:
        """Have the renderer see the texture as it is in the model. (All methods that paint do that themselves.)"""
        self._tell(self.get_texture(name).id)

    def get_checker_matrices(self, name: Name) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """The black and the white fields of a checker of single texels, bool of shape `(height, width)`."""
        texture = self.get_texture(name)
        rows, columns = np.indices((texture.height, texture.width))
        first = (rows + columns) % 2 == 0
        return first, ~first

    def whiten_materials(self, names: Iterable[Name] | None = None) -> None:
        """Make materials white and opaque, which would else tint what is painted.

        Args:
            names: geoms whose materials are meant; None for all materials.
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
            rgb1: where it begins: three numbers from 0 to 255.
            rgb2: where it ends.
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
            rgb2: the other one.
            fraction: how much of the texels, chosen at random, gets `rgb2`, from 0 to 1.
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
        self._tell(texture.id)
        return texture.bitmap

    # ------------------------------------------------------------ at random

    def get_rand_rgb(self, n: int = 1) -> Any:
        """A random colour, uint8 of shape (3,); a tuple of them if n is more than 1."""
        colours = self.rng.integers(0, 256, (n, 3), np.uint8)
        return colours[0] if n == 1 else tuple(colours)

    def rand_rgb(self, name: Name) -> Bitmap:
        """Paint it in a random colour."""
        return self.set_rgb(name, self.get_rand_rgb())

    def rand_checker(self, name: Name) -> Bitmap:
        """Paint a checker of random colours."""
        return self.set_checker(name, *self.get_rand_rgb(2))

    def rand_gradient(self, name: Name) -> Bitmap:
        """Paint a gradient of random colours, vertical or not with equal chances."""
        vertical = bool(self.rng.random() < 0.5)
        one, two = self.get_rand_rgb(2)
        return self.set_gradient(name, one, two, vertical)

    def rand_noise(self, name: Name) -> Bitmap:
        """Paint noise of random colours; from 0.1 to 0.9 of the texels in the second."""
        share = self.rng.uniform(0.1, 0.9)
        one, two = self.get_rand_rgb(2)
        return self.set_noise(name, one, two, share)

    def rand_all(self, name: Name) -> Bitmap:
        """One of the four others, with equal chances."""
        painters = (self.rand_rgb, self.rand_checker, self.rand_gradient, self.rand_noise)
        return painters[self.rng.integers(len(painters))](name)

    def randomize(self) -> None:
        """Whiten the materials of all textures that were named to the constructor, and `rand_all` each of them."""
        for name in self._names:
            self.rand_all(name)
            texture = self.get_texture(name).id
            for material in range(self.model.nmat):
                if self._texture_of(material) == texture:
                    self._edit("mat_rgba", material, 1.0)


def _fraction(value: float) -> float:
    return fraction("fraction", value)


def _colour(name: str, value: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Three numbers from 0 to 255.

    Raises:
        ValueError: if it is something else.
    """
    colour = np.asarray(value, np.float64)
    if colour.shape != (3,) or not ((colour >= 0) & (colour <= 255)).all():
        raise ValueError(f"{name}: expected three numbers from 0 to 255, got {value!r}")
    if colour.any() and (colour < 1).all():
        raise ValueError(f"{name}: expected three numbers from 0 to 255, got {value!r}, which would be black")
    return colour
