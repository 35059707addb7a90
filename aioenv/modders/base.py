"""`Modder`, the base class of modders: edits a model, restores it, and has all its randomness from one seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.state.model_edits import check_edit, implied_edits

__all__ = ["Modder", "Name", "Seed"]

Name: TypeAlias = "str | int"
Seed: TypeAlias = "int | Sequence[int] | np.random.Generator | None"


# The name under which all bytes of a texture are remembered, in place of a field.
_TEXTURE = "texture"


class Modder:
    """Edits how a model looks. `restore` undoes all its edits, and keeps those that others made of other fields.

    Subclasses make a new look in `randomize`, with all their randomness from `rng`, and edit by `_edit`. In a
    `RenderPool` each worker makes its own modders; before each `randomize` the model is as it was loaded and `rng` is
    seeded anew.

    Args:
        model: the model; it is edited in place.
        seed: of the randomness: an int, a generator, or None for another one each time.
        renderer: shows edited textures, of which OpenGL has copies: a `mujoco.Renderer`, an `MjrContext` (that must be
            current whenever a texture is edited), a function of a texture's number, or None.

    Attributes:
        model: the model.
        rng: the source of all randomness.

    Raises:
        TypeError: if `model` is no MjModel, or `renderer` none of the above.
    """

    def __init__(self, model: mujoco.MjModel, *, seed: Seed = None, renderer: Any = None) -> None:
        if not isinstance(model, mujoco.MjModel):
            raise TypeError(f"model: expected an MjModel, got {model!r}")
        self.model = model
        self.rng = np.random.default_rng(seed)
        self._upload = _uploader(model, renderer)
        self._before: dict[tuple[str, int], npt.NDArray[Any]] = {}  # rows of fields as they were

    def reseed(self, seed: Seed) -> None:
        """Seed the randomness again."""
        self.rng = np.random.default_rng(seed)

    def randomize(self) -> None:
        """Give everything that this modder edits a random look."""
        raise NotImplementedError(f"{type(self).__name__} does not say what a new look is: write randomize()")

    def restore(self) -> None:
        """Undo all edits."""
        before, self._before = self._before, {}
        for (field, row), value in before.items():
            if field == _TEXTURE:
                self._texels(row)[:] = value
                self._upload(row)
            else:
                getattr(self.model, field)[row] = value

    def edited_kinds(self) -> set[str]:
        """Return the prefixes of the fields that are edited: "geom", "hfield", …"""
        return {field.partition("_")[0] for field, _ in self._before}

    # ------------------------------------------------------------ for subclasses

    def _edit(self, field: str, row: int, value: Any) -> None:
        """Write a row of a field, for `restore` to undo.

        Args:
            field: the name of an array of the model. A row of `tex_data` is a byte of a texture.
            row: its number; negative ones count from the end.
            value: the new value of the row.

        Raises:
            ValueError: if there is no such field, or the value can't be drawn, such as the number of a material that
                the model does not have.
            IndexError: if the field has no such row.
        """
        array = getattr(self.model, field, None)
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{type(self).__name__}: edit: expected the name of an array of MjModel, got {field!r}")
        row = range(len(array))[row]  # or a row with two numbers might be restored to a value in between
        if field == "tex_data":
            texture = int(np.searchsorted(self.model.tex_adr, row, "right")) - 1
            self._edit_texture(texture)[row - int(self.model.tex_adr[texture])] = value
            self._upload(texture)
            return
        edited = np.array(array[row : row + 1])
        edited[0] = value
        check_edit(self.model, field, edited, f"{type(self).__name__}: edit of {field} {row}")
        for frame, values in implied_edits(self.model, field, row).items():  # else MuJoCo may ignore it
            for other in np.flatnonzero(getattr(self.model, frame) != values).tolist():
                self._write(frame, other, values[other])
        self._write(field, row, value)

    def _write(self, field: str, row: int, value: Any) -> None:
        array = getattr(self.model, field)
        if (field, row) not in self._before:
            self._before[field, row] = np.array(array[row])
        array[row] = value

    def _texels(self, texture: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a texture, a view of the model."""
        model = self.model
        start = int(model.tex_adr[texture])
        size = int(model.tex_height[texture]) * int(model.tex_width[texture]) * int(model.tex_nchannel[texture])
        texels: npt.NDArray[np.uint8] = model.tex_data[start : start + size]
        return texels

    def _edit_texture(self, texture: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a texture that is about to be edited, for `restore` to undo."""
        texels = self._texels(texture)
        if (_TEXTURE, texture) not in self._before:
            self._before[_TEXTURE, texture] = texels.copy()
        return texels

    def _find(self, kind: str, name: Name) -> int:
        """Return the number of a light, camera or geom, given its name or number.

        Raises:
            ValueError: if there is no such name; the message lists the names.
        """
        what = getattr(mujoco.mjtObj, f"mjOBJ_{kind.upper()}")
        count = {"light": self.model.nlight, "camera": self.model.ncam, "geom": self.model.ngeom}[kind]
        if isinstance(name, str):
            number = mujoco.mj_name2id(self.model, what, name)
            if number == -1:
                names = [n for i in range(count) if (n := mujoco.mj_id2name(self.model, what, i))]
                raise ValueError(f"the model has no {kind} {name!r}; it has {names}")
            return int(number)
        if isinstance(name, bool) or not isinstance(name, (int, np.integer)) or not 0 <= name < count:
            raise ValueError(f"expected a {kind}'s name, or its number of {count}, got {name!r}")
        return int(name)


def vector(name: str, value: npt.ArrayLike, count: int) -> npt.NDArray[np.float64]:
    """Return so many finite numbers as an array.

    Raises:
        ValueError: if it is something else.
    """
    array = np.asarray(value, np.float64)
    if array.shape != (count,) or not np.isfinite(array).all():
        raise ValueError(f"{name}: expected {count} finite numbers, got {value!r}")
    return array


def fraction(name: str, value: float) -> float:
    """Return a number from 0 to 1 as a float.

    Raises:
        ValueError: if it is something else.
    """
    if not isinstance(value, (int, float, np.integer, np.floating)) or not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {value!r}")
    return float(value)


def _uploader(model: mujoco.MjModel, renderer: Any) -> Callable[[int], Any]:
    if renderer is None:
        return lambda texture: None
    if isinstance(renderer, mujoco.MjrContext):
        return lambda texture: mujoco.mjr_uploadTexture(model, renderer, texture)
    if isinstance(renderer, mujoco.Renderer):

        def upload(texture: int) -> None:
            # (its contexts are not public)
            if renderer._gl_context:
                renderer._gl_context.make_current()
            mujoco.mjr_uploadTexture(model, renderer._mjr_context, texture)

        return upload
    if callable(renderer):
        return renderer  # type: ignore[no-any-return]
    raise TypeError(
        f"renderer: expected a mujoco.Renderer, an MjrContext or a function of a texture's number, got {renderer!r}"
    )
