"""What of a model OpenGL has copies of: whether it was edited, and what tells one content from another.

Height fields, textures, meshes and skins are uploaded once, fog and the like are set once. They are too large, or
change too seldom, to go beside each state as the fields in `edits` do.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import cache
from hashlib import blake2b
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from aioenv.ipc.frames import crc32
from aioenv.state.model_edits import SHOWN
from aioenv.state.mujoco_versions import array_names

if TYPE_CHECKING:
    import mujoco

__all__ = ["LATE", "LOOKS", "AssetWatch", "Assets", "Looks", "Part", "part_of", "shape_sum"]

# When to look for edits, in the words of `RenderConfig`.
Looks: TypeAlias = Literal["each reset", "each step", "never"]
LOOKS: tuple[Looks, ...] = ("each reset", "each step", "never")

# What to tell of edits that images have missed.
LATE = (
    "images: an env has edited in a step what OpenGL has a copy of (a height field, texture, mesh or fog), and images "
    "since then may show what was there before. From now on its edits are looked for in each step, which "
    'RenderConfig(edits="each step") has from the start'
)

# One thing that is uploaded: "hfield", "tex" or "mesh", and its number.
Part: TypeAlias = "tuple[str, int]"

# Arrays of numbers that a picture shows and that don't go beside the states.
_ARRAYS = (
    "hfield_size hfield_data tex_data mesh_vert mesh_normal mesh_texcoord mesh_face mesh_facenormal mesh_facetexcoord "
    "skin_vert skin_texcoord skin_face skin_bonebindpos skin_bonebindquat skin_bonevertid skin_bonevertweight "
    "flex_vert flex_vert0 flex_node flex_node0 flex_texcoord"
).split()
_VISUAL = "global_ quality headlight map scale rgba".split()
# Of these everything is made when an OpenGL context is: by what is there for each prefix, and how it is laid out.
_LAID_OUT = (
    "hfield_nrow hfield_ncol hfield_adr tex_type tex_height tex_width tex_nchannel tex_adr tex_colorspace mesh_vertadr "
    "mesh_vertnum mesh_faceadr mesh_facenum mesh_normaladr mesh_texcoordadr mesh_graphadr"
).split()
_SKINS = ("skin_texcoord", "skin_face")
# Of arrays with names that begin so the parts are uploaded, and nothing else depends on them.
_UPLOADED = ("hfield_", "tex_", "mesh_")
# The longest pause between two looks in steps, where edits are looked for at resets.
_MAX_PAUSE = 1024


@cache
def _visual_names(part: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of a part of `model.vis` the names of numbers, and those of arrays, that don't go beside the states."""
    import mujoco

    there = getattr(mujoco.MjModel.from_xml_string("<mujoco/>").vis, part)
    names = [n for n in dir(there) if not n.startswith("_") and f"vis.{part}.{n}" not in SHOWN]
    arrays = tuple(name for name in names if isinstance(getattr(there, name), np.ndarray))
    numbers = tuple(n for n in names if n not in arrays and isinstance(getattr(there, n), (int, float)))
    return numbers, arrays


class _WatchedArray:
    """All of a model that a picture shows and that does not go beside the states; live."""

    def __init__(self, model: mujoco.MjModel) -> None:
        stat = model.stat
        self._numbers: list[tuple[Any, Any]] = [(attrgetter("extent", "meansize", "meanmass"), stat)]
        self._small: list[npt.NDArray[Any]] = [stat.center]
        for part in _VISUAL:
            owner = getattr(model.vis, part)
            numbers, arrays = _visual_names(part)
            if numbers:
                self._numbers.append((attrgetter(*numbers), owner))
            self._small += [getattr(owner, name) for name in arrays]
        found = {name: getattr(model, name, None) for name in _ARRAYS}
        self.arrays = {name: array for name, array in found.items() if array is not None and array.size}

    def numbers(self) -> tuple[Any, ...]:
        """Single numbers, and colours."""
        small: list[Any] = self._small
        return (b"".join(small), *[get(owner) for get, owner in self._numbers])

    def sums(self) -> tuple[Any, ...]:
        """Cheap to compare; another one if anything is another."""
        return (*self.numbers(), *[crc32(array, 0) for array in self.arrays.values()])


def shape_sum(model: mujoco.MjModel) -> int:
    """A checksum of the shapes that bodies may run into and that `editable_fields` leaves out."""
    total = 0
    for name in ("hfield_data", "mesh_vert", "mesh_face"):
        total = crc32(getattr(model, name), total)
    return total


class AssetWatch:
    """Tells when an env has edited what OpenGL has copies of.

    Args:
        model: the model.
        looks: when to look. At each reset means also: after whatever else may have edited it, and now and then in
            steps, as all images until the next reset would show what was there before.

    Attributes:
        late: whether an edit has been found that was made in a step, and images may have missed; who tells clears it.
    """

    def __init__(self, model: mujoco.MjModel, looks: Looks) -> None:
        self.late = False
        self._looks = looks
        self._fresh = False
        self._pause = self._left = 1
        self.take(model)

    def take(self, model: mujoco.MjModel) -> None:
        """Look at another model from now on."""
        self._fresh = False
        self._watched = _WatchedArray(model)
        self._sums = self._first = self._watched.sums() if self._looks != "never" else ()

    def look(self) -> bool:
        """Whether an edit is found, and the next image is to show it."""
        if not self._fresh:
            if self._looks == "never":
                return False
            if self._looks == "each reset":
                self._left -= 1
                if self._left:
                    return False
                self._pause = min(2 * self._pause, _MAX_PAUSE)
                self._left = self._pause
        fresh, self._fresh = self._fresh, False
        if self._looks == "never" or not self._differs():
            return False
        if not fresh:
            self._find_late()
        return True

    def edited(self) -> dict[str, npt.NDArray[Any]] | None:
        """The arrays that are others than at first, once `look` has found that; None if more is than such arrays."""
        arrays = self._watched.arrays
        count = len(self._sums) - len(arrays)
        if self._sums[:count] != self._first[:count]:
            return None
        pairs = zip(arrays, self._sums[count:], self._first[count:], strict=True)
        names = [name for name, now, first in pairs if now != first]
        return {name: arrays[name] for name in names} if all(n.startswith(_UPLOADED) for n in names) else None

    def _differs(self) -> bool:
        sums = self._watched.sums()
        before, self._sums = self._sums, sums
        return sums != before

    def _find_late(self) -> None:
        """An edit was made in a step: there may be more of them."""
        if self._looks == "each reset":
            self.late = True
            self._looks = "each step"

    def end(self) -> None:
        """An episode is over: whatever is found to be edited now was so in a step."""
        if self._looks == "each reset" and not self._fresh and self._differs():
            self._find_late()
            self._sums = ()  # so that the next look finds it, too

    def begin(self) -> None:
        """The model may have been edited: look at it before the next image."""
        self._fresh = True


class Assets:
    """What tells contents of OpenGL contexts apart.

    Args:
        model: the model.
        like: those of a model that differs in nothing but arrays of the `kinds`; None: of none.
        kinds: as parts have them.

    Attributes:
        frame: the same for models that one context can serve; the rest can be uploaded to it.
        parts: of each part that can be uploaded, a digest.
    """

    def __init__(self, model: mujoco.MjModel, like: Assets | None = None, kinds: Container[str] = ()) -> None:
        self.parts: dict[Part, bytes] = {}
        self.frame: bytes = _frame_of(model) if like is None else like.frame
        for kind, count in (("hfield", model.nhfield), ("tex", model.ntex), ("mesh", model.nmesh)):
            for part in ((kind, number) for number in range(count)):
                self.parts[part] = part_of(model, part) if like is None or kind in kinds else like.parts[part]


def _frame_of(model: mujoco.MjModel) -> bytes:
    import mujoco

    names: tuple[str, ...] = ("ngeom", "nsite", "nmat", "nmesh", "nhfield", "ntex", "nskin", "nflex")
    names = tuple(name for name in (*names, *_LAID_OUT, *_flexes(model), *_SKINS) if hasattr(model, name))
    planes = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
    numbers = repr(_WatchedArray(model).numbers()).encode()
    return _digest(numbers, planes, *[np.asarray(getattr(model, name)) for name in names])


def _flexes(model: mujoco.MjModel) -> Iterator[str]:
    """The arrays by which a scene is laid out when it is made."""
    for name in array_names(model):
        if name.startswith(("flex", "skin_")) and getattr(model, name).dtype.kind in "iub":
            yield name


def part_of(model: mujoco.MjModel, part: Part) -> bytes:
    """The digest of a part as it is now."""
    kind, i = part
    if kind == "tex":
        start = int(model.tex_adr[i])
        end = start + int(model.tex_height[i]) * int(model.tex_width[i]) * int(model.tex_nchannel[i])
        return _digest(model.tex_data[start:end])
    if kind == "hfield":
        start = int(model.hfield_adr[i])
        count = int(model.hfield_nrow[i]) * int(model.hfield_ncol[i])
        return _digest(model.hfield_size[i], model.hfield_data[start : start + count])
    pieces = []
    for names, first, count in (
        (("mesh_vert",), model.mesh_vertadr[i], model.mesh_vertnum[i]),
        (("mesh_face", "mesh_facenormal", "mesh_facetexcoord"), model.mesh_faceadr[i], model.mesh_facenum[i]),
        (("mesh_normal",), model.mesh_normaladr[i], model.mesh_normalnum[i]),
        (("mesh_texcoord",), model.mesh_texcoordadr[i], model.mesh_texcoordnum[i]),
    ):
        if first >= 0:
            pieces += [getattr(model, name)[first : first + count] for name in names]
    return _digest(*pieces)


def _digest(*pieces: Any) -> bytes:
    digest = blake2b(digest_size=16)
    for piece in pieces:
        data: Any = np.ascontiguousarray(piece) if isinstance(piece, np.ndarray) else piece
        digest.update(data)
    return digest.digest()
