"""What a `RenderPool` asks of its workers: the tail of a RENDER. The fixed part is the states, one row each.

And the images that come back, of any pool.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["EDITABLE", "Drawing", "Images", "allocate"]

# Fields of a model whose rows can be edited for a single image: what a picture shows, and where it is.
EDITABLE = (
    "body_pos body_quat geom_rgba geom_pos geom_quat geom_size geom_matid site_rgba site_pos site_quat site_size "
    "site_matid mat_rgba mat_emission mat_specular mat_shininess mat_reflectance mat_metallic mat_roughness "
    "mat_texrepeat mat_texid tendon_rgba tendon_width tendon_matid skin_rgba skin_matid flex_rgba flex_matid "
    "light_pos light_pos0 light_poscom0 light_dir light_dir0 light_ambient light_diffuse light_specular "
    "light_active light_castshadow light_attenuation light_cutoff light_exponent light_intensity light_range "
    "light_bulbradius cam_pos cam_pos0 cam_poscom0 cam_quat cam_mat0 cam_fovy cam_intrinsic"
).split()


class Drawing(NamedTuple):
    """How to draw some states."""

    width: int
    height: int
    views: tuple[Any, ...]  # see `cameras.View`
    depth: bool
    segmentation: bool
    looks: list[tuple[int, int]] | None = None  # of each state: its slot, and how often that was randomised
    edits: dict[str, npt.NDArray[Any]] | None = None  # fields of the model, one row a state


class Images(NamedTuple):
    """The images of some states, in the order in which they travel; None for what was not asked for."""

    rgb: npt.NDArray[np.uint8]
    depth: npt.NDArray[np.float32] | None
    segmentation: npt.NDArray[np.int32] | None

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Those that there are."""
        return tuple(array for array in self if array is not None)

    def row(self, row: int) -> Images:
        """Those of one state; views."""
        rgb, depth, segmentation = self
        return Images(
            rgb[row],
            None if depth is None else depth[row],
            None if segmentation is None else segmentation[row],
        )


def allocate(shape: tuple[int, ...], *, depth: bool, segmentation: bool) -> Images:
    """New images; `shape` is all of a depth image's, with the axes of states and cameras before it."""
    return Images(
        np.empty((*shape, 3), np.uint8),
        np.empty(shape, np.float32) if depth else None,
        np.empty((*shape, 2), np.int32) if segmentation else None,
    )
