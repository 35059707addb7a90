"""`RenderQuality`: what "exact", "fast" and "coarse" mean, in MuJoCo's terms.

On software OpenGL nearly all of an image's cost is the shadow map. HalfCheetah at 84x84 takes 20 to 30 ms by default,
and 0.6 ms without shadows, reflections and multisampling. Most of the rest is not pixels but vertices. Planes are cut
into up to 200 x 200 patches (3 ms, where a model asks for it); round shapes come next.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from aioenv.state.mujoco_versions import has_only_directional_lights

if TYPE_CHECKING:
    import mujoco

__all__ = ["COARSE", "EXACT", "FAST", "Quality", "RenderQuality", "parse_quality"]

# Switches that are ints: name, minimum and maximum.
_NUMBERS = (
    ("shadow_map", 0, 16_384),
    ("samples", 0, 64),
    ("slices", 3, 1_000),
    ("stacks", 2, 1_000),
    ("side_stacks", 2, 1_000),
    ("plane_patches", 1, 200),
)


@dataclass(frozen=True)
class RenderQuality:
    """The details that images show. The default is "exact": the pixels of `mujoco.Renderer`.

    Args:
        shadows: cast shadows, which cost software OpenGL up to 40 times the rest of the image.
        shadow_map: the side of the shadow map, in texels; None for the model's (4096 by default).
        reflections: draw reflections: the scene once more for each reflecting plane.
        samples: multisampling: how many samples a pixel; 0 for none, None for the model's (4 by default).
        slices: how many sides round shapes (spheres, capsules, cylinders, …) have at most; None for the model's (28 by
            default).
        stacks: how many rings spheres and the ends of capsules have at most; None for the model's (16 by default).
        side_stacks: how many rings straight sides have at most: those of cylinders, capsules and the sky, and half as
            many for the lids of cylinders; None for as many as `stacks`. Outlines don't change. Light is computed at
            vertices, so only models whose lights are all directional when the OpenGL context is made are drawn with
            fewer rings. There 4 rings change 3 of 10,000 pixels of Gymnasium's tasks by 2 of 255 or more.
        plane_patches: how many patches a side a finite plane is cut into at most; None for its third size (up to 200).
            Light is computed at vertices, so only models whose lights are all directional are drawn with fewer patches
            than they ask for. There 32 patches change a pixel by 2 of 255.
        buffer: the size of the buffer that images are drawn in. "image": that of the image, the least to clear and to
            read. "model": at least the model's `offwidth` and `offheight`. Pixels are the same.

    Raises:
        ValueError: if a switch is neither True nor False, a number is out of range, or a word is none of those above.
    """

    shadows: bool = True
    shadow_map: int | None = None
    reflections: bool = True
    samples: int | None = None
    slices: int | None = None
    stacks: int | None = None
    side_stacks: int | None = None
    plane_patches: int | None = None
    buffer: Literal["image", "model"] = "image"

    def __post_init__(self) -> None:
        for name in ("shadows", "reflections"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name, least, most in _NUMBERS:
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most
            ):
                raise ValueError(f"{name}: expected an int from {least} to {most} or None, got {value!r}")
        if self.buffer not in ("image", "model"):
            raise ValueError(f"buffer: expected 'image' or 'model', got {self.buffer!r}")

    def prepare_model(self, model: mujoco.MjModel) -> None:
        """Write to a model, before its OpenGL context is made from it."""
        quality = model.vis.quality
        if not self.shadows:
            quality.shadowsize = 0
        elif self.shadow_map is not None:
            quality.shadowsize = self.shadow_map
        if self.samples is not None:
            quality.offsamples = self.samples
        if self.slices is not None:
            quality.numslices = min(quality.numslices, self.slices)
        if self.stacks is not None:
            quality.numstacks = min(quality.numstacks, self.stacks)

    @contextlib.contextmanager
    def prepared_planes(self, model: mujoco.MjModel) -> Iterator[None]:
        """Set the patches of planes while an OpenGL context is made, and restore them."""
        import mujoco

        if self.plane_patches is None or not has_only_directional_lights(model):
            yield
            return
        sizes = model.geom_size
        before = sizes.copy()
        # the patches of infinite planes are MuJoCo's own
        planes = (model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE) & (sizes[:, :2] > 0).all(axis=1)
        least = 2 * sizes[planes, :2].max(axis=1) / self.plane_patches
        sizes[planes, 2] = sizes[planes, 2].clip(min=least)
        try:
            yield
        finally:
            sizes[:] = before

    def side_stacks_of(self, model: mujoco.MjModel) -> int | None:
        """Return how many rings a model's straight sides have; None for as many as its other round shapes."""
        few = self.side_stacks
        fewer = few is not None and few < model.vis.quality.numstacks
        return few if fewer and has_only_directional_lights(model) else None

    def prepare_scene(self, scene: mujoco.MjvScene) -> None:
        """Set a scene's flags."""
        import mujoco

        if not self.shadows:
            scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        if not self.reflections:
            scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False


EXACT = RenderQuality()
FAST = RenderQuality(shadows=False, reflections=False, samples=0, side_stacks=4, plane_patches=32)
COARSE = dataclasses.replace(FAST, slices=14, stacks=8)

# A user's argument.
Quality: TypeAlias = "Literal['exact', 'fast', 'coarse'] | RenderQuality"


def parse_quality(quality: Quality) -> RenderQuality:
    """Return a quality by its name, or as it is.

    Raises:
        ValueError: if it is neither a name nor a `RenderQuality`.
    """
    if isinstance(quality, RenderQuality):
        return quality
    named = {"exact": EXACT, "fast": FAST, "coarse": COARSE}
    if not isinstance(quality, str) or quality not in named:
        raise ValueError(f"quality: expected one of {list(named)} or a RenderQuality, got {quality!r}")
    return named[quality]
