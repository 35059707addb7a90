"""What "exact" and "fast" mean, in MuJoCo's terms.

On software OpenGL nearly all of an image's cost is the shadow map: HalfCheetah at 84x84 takes 20 to 30 ms as it
comes, and 0.6 ms without shadows, reflections and multisampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import mujoco

__all__ = ["EXACT", "FAST", "Quality", "RenderQuality", "parse_quality"]


@dataclass(frozen=True)
class RenderQuality:
    """What is drawn and what is left out. As it comes it is "exact": the pixels of `mujoco.Renderer`.

    Args:
        shadows: cast shadows, which cost software OpenGL up to 40 times the rest of the image.
        shadow_map: the side of the shadow map, in texels; None for what the model says (4096 unless it says more).
        reflections: draw what reflecting planes show: the scene once more for each of them.
        samples: multisampling: how many samples a pixel; 0 for none, None for what the model says (4).
        buffer: how large the buffer is that images are drawn in: "image" (as large as the image, the least to clear
            and to read) or "model" (at least as large as the model's `offwidth` and `offheight`). Pixels are the same.

    Raises:
        ValueError: if a switch is neither True nor False, a number is negative, or a word is none of those above.
    """

    shadows: bool = True
    shadow_map: int | None = None
    reflections: bool = True
    samples: int | None = None
    buffer: Literal["image", "model"] = "image"

    def __post_init__(self) -> None:
        for name in ("shadows", "reflections"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name, most in (("shadow_map", 16_384), ("samples", 64)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most):
                raise ValueError(f"{name}: expected an int from 0 to {most} or None, got {value!r}")
        if self.buffer not in ("image", "model"):
            raise ValueError(f"buffer: expected 'image' or 'model', got {self.buffer!r}")

    def prepare_model(self, model: mujoco.MjModel) -> None:
        """Set up a model before its OpenGL context is made, which allocates by it."""
        quality = model.vis.quality
        if not self.shadows:
            quality.shadowsize = 0
        elif self.shadow_map is not None:
            quality.shadowsize = self.shadow_map
        if self.samples is not None:
            quality.offsamples = self.samples

    def prepare_scene(self, scene: mujoco.MjvScene) -> None:
        """Set a scene's flags."""
        import mujoco

        if not self.shadows:
            scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        if not self.reflections:
            scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False


EXACT = RenderQuality()
FAST = RenderQuality(shadows=False, reflections=False, samples=0)

# What users write.
Quality: TypeAlias = "Literal['exact', 'fast'] | RenderQuality"


def parse_quality(quality: Quality) -> RenderQuality:
    """A quality by its name, or as it is.

    Raises:
        ValueError: if it is neither a name nor a `RenderQuality`.
    """
    if isinstance(quality, RenderQuality):
        return quality
    named = {"exact": EXACT, "fast": FAST}
    if not isinstance(quality, str) or quality not in named:
        raise ValueError(f"quality: expected one of {sorted(named)} or a RenderQuality, got {quality!r}")
    return named[quality]
