"""What "exact" and "fast" mean, in MuJoCo's terms.

On software OpenGL nearly all of an image's cost is the shadow map: HalfCheetah at 84x84 takes 20 to 30 ms as it
comes, and 0.6 ms with the three things below left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mujoco

__all__ = ["prepare_model", "prepare_scene"]


def prepare_model(model: mujoco.MjModel, width: int, height: int, *, fast: bool) -> None:
    """Set up a model before its OpenGL context is made: the size of the buffer, and what it allocates."""
    # the buffer is as large as the image: pixels are the same, and less memory is cleared for each
    model.vis.global_.offwidth = width
    model.vis.global_.offheight = height
    if fast:
        model.vis.quality.offsamples = 0
        model.vis.quality.shadowsize = 0


def prepare_scene(scene: mujoco.MjvScene, *, fast: bool) -> None:
    """Set a scene's flags."""
    if fast:
        import mujoco

        scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
