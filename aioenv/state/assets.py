"""Model data that OpenGL holds copies of: find out whether an env has edited it, and tell contents apart by digests.

Height fields, textures, meshes and skins are uploaded once; fog and the like are set once. They are too large, or
change too seldom, to be sent with each state as the fields in `model_edits.py` are.
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
from aioenv.mujoco_versions import array_names
from aioenv.state.model_edits import SHOWN

if TYPE_CHECKING:
    import mujoco

__all__ = ["LATE", "LOOKS", "AssetId", "AssetWatch", "Assets", "Looks", "part_of", "shape_sum"]

# When to look for edits: the values of `RenderConfig.edits`.
Looks: TypeAlias = Literal["each reset", "each step", "never"]
LOOKS: tuple[Looks, ...] = ("each reset", "each step", "never")

# The warning about edits that images may have missed.
LATE = (
    "images: an env has edited in a step data of which OpenGL has a copy (a height field, texture, mesh or fog), and "
    "images since then may show the old data. From now on its edits are looked for in each step, which "
    'RenderConfig(edits="each step") has from the start'
)

# One part that is uploaded: "hfield", "tex" or "mesh", and its number.
AssetId: TypeAlias = "tuple[str, int]"

# Arrays that an image shows and that are not sent with the states.
_ARRAYS = (
    "hfield_size hfield_data tex_data mesh_vert mesh_normal mesh_texcoord mesh_face mesh_facenormal mesh_facetexcoord "
    "skin_vert skin_texcoord skin_face skin_bonebindpos skin_bonebindquat skin_bonevertid skin_bonevertweight "
    "flex_vert flex_vert0 flex_node flex_node0 flex_texcoord"
).split()
_VISUAL = "global_ quality headlight map scale rgba".split()
# Arrays that say which assets there are and how they are laid out; an OpenGL context is built from them.
_LAID_OUT = (
    "hfield_nrow hfield_ncol hfield_adr tex_type tex_height tex_width tex_nchannel tex_adr tex_colorspace mesh_vertadr "
    "mesh_vertnum mesh_faceadr mesh_facenum mesh_normaladr mesh_texcoordadr mesh_graphadr"
).split()
_SKINS = ("skin_texcoord", "skin_face")
# Prefixes of arrays whose parts can be uploaded again, since nothing else depends on them.
_UPLOADED = ("hfield_", "tex_", "mesh_")
# The largest number of steps between two checks in steps, where edits are looked for at resets.
_MAX_PAUSE = 1024


@cache
def _visual_names(part: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of numbers and those of arrays in a part of `model.vis` that are not sent with the states."""
    import mujoco

    there = getattr(mujoco.MjModel.from_xml_string("<mujoco/>").vis, part)
    names = [n for n in dir(there) if not n.startswith("_") and f"vis.{part}.{n}" not in SHOWN]
    arrays = tuple(name for name in names if isinstance(getattr(there, name), np.ndarray))
    numbers = tuple(n for n in names if n not in arrays and isinstance(getattr(there, n), (int, float)))
    return numbers, arrays


class _UploadedData:
    """Live views of everything in a model that an image shows and that is not sent with the states."""

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
        """Return single numbers, and colours."""
        small: list[Any] = self._small
        return (b"".join(small), *[get(owner) for get, owner in self._numbers])

    def sums(self) -> tuple[Any, ...]:
        """Return checksums, which are cheap to compare: they differ if anything does."""
        return (*self.numbers(), *[crc32(array, 0) for array in self.arrays.values()])


def shape_sum(model: mujoco.MjModel) -> int:
    """Return a checksum of the shapes that bodies may collide with and that `editable_fields` leaves out."""
    total = 0
    for name in ("hfield_data", "mesh_vert", "mesh_face"):
        total = crc32(getattr(model, name), total)
    return total


class AssetWatch:
    """Finds out when an env has edited data that OpenGL has copies of.

    Args:
        model: the model.
        looks: when to look. "each reset" means also after calls, and now and then in steps, as all images until the
            next reset would show the old content.

    Attributes:
        late: whether an edit was found that was made in a step, so that images may have missed it. The caller clears it
            once it has warned.
    """

    def __init__(self, model: mujoco.MjModel, looks: Looks) -> None:
        self.late = False
        self._looks = looks
        self._edit_expected = False
        self._pause = self._steps_left = 1
        self.watch(model)

    def watch(self, model: mujoco.MjModel) -> None:
        """Watch another model from now on."""
        self._edit_expected = False
        self._data = _UploadedData(model)
        self._sums = self._first = self._data.sums() if self._looks != "never" else ()

    def check(self) -> bool:
        """Return whether an edit was found, which the next image must show."""
        if not self._edit_expected:
            if self._looks == "never":
                return False
            if self._looks == "each reset":
                self._steps_left -= 1
                if self._steps_left:
                    return False
                self._pause = min(2 * self._pause, _MAX_PAUSE)
                self._steps_left = self._pause
        expected, self._edit_expected = self._edit_expected, False
        if self._looks == "never" or not self._differs():
            return False
        if not expected:
            self._note_late_edit()
        return True

    def edited_arrays(self) -> dict[str, npt.NDArray[Any]] | None:
        """Return the arrays that differ from the first ones, as the last `check` found; None if other data differs."""
        arrays = self._data.arrays
        count = len(self._sums) - len(arrays)
        if self._sums[:count] != self._first[:count]:
            return None
        pairs = zip(arrays, self._sums[count:], self._first[count:], strict=True)
        names = [name for name, now, first in pairs if now != first]
        return {name: arrays[name] for name in names} if all(n.startswith(_UPLOADED) for n in names) else None

    def _differs(self) -> bool:
        sums = self._data.sums()
        before, self._sums = self._sums, sums
        return sums != before

    def _note_late_edit(self) -> None:
        """Note an edit that was made in a step, and check each step from now on: there may be more."""
        if self._looks == "each reset":
            self.late = True
            self._looks = "each step"

    def note_episode_end(self) -> None:
        """Note that an episode has ended: an edit that is found now was made in one of its steps."""
        if self._looks == "each reset" and not self._edit_expected and self._differs():
            self._note_late_edit()
            self._sums = ()  # so that the next check finds it, too

    def expect_edit(self) -> None:
        """Check the model before the next image, since it may have been edited."""
        self._edit_expected = True


class Assets:
    """Digests that tell the contents of OpenGL contexts apart.

    Args:
        model: the model.
        like: the assets of a model that differs in nothing but arrays of the `kinds`; None if there is none.
        kinds: kinds of parts ("hfield", "tex", "mesh").

    Attributes:
        frame: a digest of the arrays that an OpenGL context is built from; the parts can be uploaded to it later.
        parts: a digest of each part that can be uploaded.
    """

    def __init__(self, model: mujoco.MjModel, like: Assets | None = None, kinds: Container[str] = ()) -> None:
        self.parts: dict[AssetId, bytes] = {}
        self.frame: bytes = _frame_of(model) if like is None else like.frame
        for kind, count in (("hfield", model.nhfield), ("tex", model.ntex), ("mesh", model.nmesh)):
            for part in ((kind, number) for number in range(count)):
                self.parts[part] = part_of(model, part) if like is None or kind in kinds else like.parts[part]


def _frame_of(model: mujoco.MjModel) -> bytes:
    import mujoco

    names: tuple[str, ...] = ("ngeom", "nsite", "nmat", "nmesh", "nhfield", "ntex", "nskin", "nflex")
    names = tuple(name for name in (*names, *_LAID_OUT, *_flexes(model), *_SKINS) if hasattr(model, name))
    planes = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
    numbers = repr(_UploadedData(model).numbers()).encode()
    return _digest(numbers, planes, *[np.asarray(getattr(model, name)) for name in names])


def _flexes(model: mujoco.MjModel) -> Iterator[str]:
    """Return the names of the arrays that say how a scene of flexes and skins is laid out."""
    for name in array_names(model):
        if name.startswith(("flex", "skin_")) and getattr(model, name).dtype.kind in "iub":
            yield name


def part_of(model: mujoco.MjModel, part: AssetId) -> bytes:
    """Return the digest of a part as it is now."""
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
