"""The arguments of `RenderPool`, checked: what was expected, what was got, what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.rendering.config import MAX_SIDE, check_devices, check_int
from aioenv.rendering.drawing import EDITABLE, Images

__all__ = [
    "MAX_SLOTS",
    "Model",
    "States",
    "check_devices",
    "check_edits",
    "check_modders",
    "check_out",
    "check_size",
    "check_slots",
    "check_timeout",
    "default_spec",
    "take_model",
    "take_states",
]

Model: TypeAlias = "mujoco.MjModel | mujoco.MjSpec | str | os.PathLike[str]"
States: TypeAlias = "npt.ArrayLike | Sequence[mujoco.MjData]"


# Of each slot the pool keeps the last state.
MAX_SLOTS = 1 << 20


def take_model(model: Model) -> mujoco.MjModel:
    """A model of one's own, from whatever describes it.

    Raises:
        TypeError: if it is nothing of the kind.
        ValueError, FileNotFoundError: if MuJoCo can't make a model of it.
    """
    if isinstance(model, mujoco.MjModel):
        return model
    if isinstance(model, mujoco.MjSpec):
        return model.compile()
    if isinstance(model, str) and model.lstrip().startswith("<"):
        return mujoco.MjModel.from_xml_string(model)
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model: expected an MjModel, an MjSpec, a path or a string of XML, got {type(model).__name__}")
    path = Path(model)
    if not path.is_file():
        raise FileNotFoundError(f"model: there is no file {str(path)!r}")
    if path.suffix == ".mjb":
        return mujoco.MjModel.from_binary_path(str(path))
    return mujoco.MjModel.from_xml_path(str(path))


def default_spec() -> int:
    """All parts of the state that a picture can depend on."""
    part = mujoco.mjtState
    parts = ("FULLPHYSICS", "CTRL", "EQ_ACTIVE", "MOCAP_POS", "MOCAP_QUAT", "USERDATA")
    return sum(int(getattr(part, f"mjSTATE_{name}")) for name in parts)


def check_modders(modder: Any) -> tuple[Callable[..., Any], ...]:
    """What makes the modders: none, one, or several that are used together.

    Raises:
        ValueError: if one is not a class (or another callable), but a modder, say.
    """
    makers = () if modder is None else tuple(modder) if isinstance(modder, (list, tuple)) else (modder,)
    for maker in makers:
        if not callable(maker):
            raise ValueError(
                f"modder: expected a class, as aioenv.TextureModder, of which each worker makes its own, got {maker!r}"
            )
    return makers


def check_timeout(name: str, timeout_s: float | None) -> None:
    """Raise a ValueError unless it is a positive number of seconds, or None."""
    if timeout_s is not None and (isinstance(timeout_s, bool) or not timeout_s > 0):
        raise ValueError(f"{name}: expected a positive number of seconds or None, got {timeout_s!r}")


def check_size(width: int, height: int, max_image_size: int) -> None:
    """Check the size of an image.

    Raises:
        ValueError: if it is none, or larger than was said when the pool was made.
    """
    check_int("width", width, MAX_SIDE)
    check_int("height", height, MAX_SIDE)
    if width * height > max_image_size:
        raise ValueError(
            f"width, height: an image of {width} x {height} has {width * height} pixels, over "
            f"max_image_size={max_image_size}; make a RenderPool with a larger max_image_size"
        )


def check_slots(slots: Any, count: int | None, max_batch_size: int | None) -> npt.NDArray[np.int64]:
    """The slots to draw.

    Args:
        slots: what the user gave; not None.
        count: how many states there are; None if they are not given.
        max_batch_size: slots are smaller; None for 2**20.

    Raises:
        ValueError: if they are not different ints in range, or not one for each state.
    """
    numbers = np.asarray(slots)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ValueError(f"slots: expected a list of ints, got {slots!r}")
    numbers = numbers.astype(np.int64)
    if count is not None and len(numbers) != count:
        raise ValueError(f"slots: expected one for each of {count} states, got {len(numbers)}")
    most = (MAX_SLOTS if max_batch_size is None else max_batch_size) - 1
    if numbers.size and not (numbers.min() >= 0 and numbers.max() <= most):
        raise ValueError(f"slots: expected ints from 0 to {most}, got {numbers.tolist()}")
    if len(np.unique(numbers)) != len(numbers):
        raise ValueError(f"slots: expected each of them once, got {numbers.tolist()}")
    return numbers


def take_states(model: mujoco.MjModel, spec: int, states: States) -> npt.NDArray[np.float64]:
    """States as an array of one's own, float64 of shape `(N, nstate)`.

    Raises:
        ValueError: if the shape is another, or a state is of another model.
    """
    size = mujoco.mj_stateSize(model, spec)
    if isinstance(states, (list, tuple)) and states and isinstance(states[0], mujoco.MjData):
        rows = np.empty((len(states), size))
        for index, (row, data) in enumerate(zip(rows, states, strict=True)):
            if not isinstance(data, mujoco.MjData) or mujoco.mj_stateSize(data.model, spec) != size:
                raise ValueError(f"states[{index}]: expected an MjData of the pool's model, got {data!r}")
            mujoco.mj_getState(model, data, row, spec)
        return rows
    if isinstance(states, mujoco.MjData):
        raise ValueError("states: expected a list of MjData, got one; write [data]")
    array = np.array(states, dtype=np.float64, order="C")
    if array.size == 0 and array.shape[:1] == (0,):
        return np.empty((0, size))
    if array.ndim != 2 or array.shape[1] != size:
        raise ValueError(
            f"states: expected an array of shape (N, {size}), as RenderPool.get_state gives a row of it, or a list of "
            f"MjData, got shape {array.shape}. (Rows of another kind take another state_spec: this is {spec})"
        )
    return array


def check_edits(
    model: mujoco.MjModel, edits: Mapping[str, npt.ArrayLike] | None, count: int
) -> dict[str, npt.NDArray[Any]] | None:
    """Edits of the model, one row a state, as arrays of one's own.

    Raises:
        ValueError: if a field can't be edited, or a shape is wrong.
    """
    if not edits:
        return None
    checked = {}
    for name, values in edits.items():
        if name not in EDITABLE:
            raise ValueError(f"edits: expected fields that a picture shows, of {', '.join(EDITABLE)}; got {name!r}")
        field = getattr(model, name)
        array = np.array(values)
        if array.shape != (count, *field.shape):
            raise ValueError(
                f"edits[{name!r}]: expected shape {(count, *field.shape)}: the whole field for each state, got "
                f"{array.shape}"
            )
        checked[name] = array.astype(field.dtype)
    return checked


def check_out(out: Any, images: Images) -> Images:
    """The arrays that images shall be put into.

    Args:
        out: what the user gave: an array, or as many as there are kinds of images.
        images: arrays of the shapes and dtypes that are wanted.

    Raises:
        ValueError: if they are not such arrays.
    """
    wanted = {name: array for name, array in images._asdict().items() if array is not None}
    given = (out,) if isinstance(out, np.ndarray) else tuple(out)
    if len(given) != len(wanted):
        raise ValueError(f"out: expected arrays for {', '.join(wanted)}, got {len(given)}")
    for target, (name, array) in zip(given, wanted.items(), strict=True):
        if not isinstance(target, np.ndarray) or target.shape != array.shape or target.dtype != array.dtype:
            got = f"{target.dtype} {target.shape}" if isinstance(target, np.ndarray) else type(target).__name__
            raise ValueError(f"out: expected for {name} an array {array.dtype} {array.shape}, got {got}")
        if not target.flags.writeable:
            raise ValueError(f"out: the array for {name} is read-only")
    return Images(**{**images._asdict(), **dict(zip(wanted, given, strict=True))})
