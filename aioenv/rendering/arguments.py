"""Check and parse the arguments of `RenderPool`; errors say what was expected and got, and how to mend it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Required, TypeAlias, TypedDict

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.process.restart_policy import RestartPolicy
from aioenv.rendering.cameras import Camera
from aioenv.rendering.config import MAX_SIDE, check_int
from aioenv.rendering.images import ImageArrays, image_kinds
from aioenv.state.model_edits import SEEN, check_edit, field_of, has_field

__all__ = [
    "MAX_SLOTS",
    "DrawOptions",
    "States",
    "check_data",
    "check_flags",
    "check_life",
    "check_timeout",
    "parse_edits",
    "parse_modders",
    "parse_out",
    "parse_size",
    "parse_slots",
    "parse_spec",
    "parse_states",
]

States: TypeAlias = "npt.ArrayLike | Sequence[mujoco.MjData]"


class DrawOptions(TypedDict, total=False):
    """The arguments of `RenderPool.render` that don't change the type of its result, for type checkers."""

    slots: Sequence[int] | npt.NDArray[np.integer[Any]] | None
    width: Required[int]
    height: Required[int]
    camera: Camera | Sequence[Camera]
    scene_option: mujoco.MjvOption | None
    randomize: bool
    edits: Mapping[str, npt.ArrayLike] | None
    out: Any
    copy: bool


# The pool keeps the last state of each slot.
MAX_SLOTS = 1 << 20


def _default_spec() -> int:
    """Return all parts of the state that an image can depend on."""
    part = mujoco.mjtState
    parts = ("FULLPHYSICS", "CTRL", "EQ_ACTIVE", "MOCAP_POS", "MOCAP_QUAT", "USERDATA")
    return sum(int(getattr(part, f"mjSTATE_{name}")) for name in parts)


def parse_modders(modder: Any) -> tuple[Callable[..., Any], ...]:
    """Return the callables that make modders: none, one, or several that are used together.

    Raises:
        ValueError: if one is not a class or another callable (but a modder, say).
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
    number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and timeout_s > 0):
        raise ValueError(f"{name}: expected a positive number of seconds or None, got {timeout_s!r}")


def check_life(retry: Any, restart: Any, log_prefix: Any) -> None:
    """Raise a TypeError or a ValueError unless they are of the right types."""
    if not isinstance(retry, bool):
        raise ValueError(f"retry: expected True or False, got {retry!r}")
    if restart is not None and not isinstance(restart, RestartPolicy):
        raise TypeError(f"restart: expected an aioenv.RestartPolicy or None, got {restart!r}")
    if log_prefix is not None and not isinstance(log_prefix, str):
        raise ValueError(f"log_prefix: expected a str or None, got {log_prefix!r}")


def parse_spec(model: mujoco.MjModel, spec: Any) -> tuple[int, int]:
    """Return which parts of the state `states` consist of, and how many float64 a row has.

    Raises:
        ValueError: if there are no such parts, or the model has none of them.
    """
    if spec is None:
        spec = _default_spec()
    whole = isinstance(spec, (Integral, mujoco.mjtState)) and not isinstance(spec, bool)
    if not whole or not 0 <= int(spec) < 1 << int(mujoco.mjtState.mjNSTATE):
        raise ValueError(f"state_spec: expected parts of mujoco.mjtState, got {spec!r}")
    size = mujoco.mj_stateSize(model, int(spec))
    if size == 0:
        raise ValueError(f"state_spec: expected parts that the model has, got {spec}: it has none of them")
    return int(spec), size


def parse_size(width: int, height: int, max_image_size: int) -> tuple[int, int]:
    """Return the width and height of an image as ints.

    Raises:
        ValueError: if one is not a positive int, or the image is larger than `max_image_size`.
    """
    check_int("width", width, MAX_SIDE)
    check_int("height", height, MAX_SIDE)
    if width * height > max_image_size:
        raise ValueError(
            f"width, height: an image of {width} x {height} has {width * height} pixels, over "
            f"max_image_size={max_image_size}; make a RenderPool with a larger max_image_size"
        )
    return int(width), int(height)


def parse_slots(slots: Any, count: int | None, max_batch_size: int | None) -> npt.NDArray[np.int64]:
    """Return the slots to draw as an array of int64.

    Args:
        slots: the user's argument; not None.
        count: how many states there are; None if they are not given.
        max_batch_size: slots are smaller; None for 2**20.

    Raises:
        ValueError: if they are not distinct ints in range, or not one for each state.
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


def check_data(name: str, model: mujoco.MjModel, spec: int, data: Any) -> None:
    """Raise a ValueError unless these are data of such a model: MuJoCo reads as many numbers as the model has."""
    if isinstance(data, mujoco.MjData) and (data.model is model or _sizes(data.model, spec) == _sizes(model, spec)):
        return
    raise ValueError(f"{name}: expected an MjData of the pool's model, got {data!r}")


def _sizes(model: mujoco.MjModel, spec: int) -> list[int]:
    """Return how many float64 each part of a state has."""
    return [mujoco.mj_stateSize(model, 1 << bit) for bit in range(int(mujoco.mjtState.mjNSTATE)) if spec >> bit & 1]


def parse_states(model: mujoco.MjModel, spec: int, states: States) -> npt.NDArray[np.float64]:
    """Return a copy of states, float64 of shape `(N, nstate)`.

    Raises:
        ValueError: if the shape is another, or a state is of another model.
    """
    size = mujoco.mj_stateSize(model, spec)
    if isinstance(states, (list, tuple)) and states and isinstance(states[0], mujoco.MjData):
        rows = np.empty((len(states), size))
        for index, (row, data) in enumerate(zip(rows, states, strict=True)):
            check_data(f"states[{index}]", model, spec, data)
            mujoco.mj_getState(model, data, row, spec)
        return rows
    if isinstance(states, mujoco.MjData):
        raise ValueError("states: expected a list of MjData, got one; write [data]")
    try:
        array = np.array(states)
    except ValueError:  # rows of different lengths
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"states: expected an array of shape (N, {size}) of numbers, or a list of MjData, got "
            f"{type(states).__name__} {reprlib.repr(states)}"
        )
    array = array.astype(np.float64, order="C", copy=False)
    if array.size == 0 and array.shape[:1] == (0,):
        return np.empty((0, size))
    if array.ndim != 2 or array.shape[1] != size:
        raise ValueError(
            f"states: expected an array of shape (N, {size}), as RenderPool.get_state gives a row of it, or a list of "
            f"MjData, got shape {array.shape}. (Rows of another kind take another state_spec: this is {spec})"
        )
    return array


def parse_edits(
    model: mujoco.MjModel, edits: Mapping[str, npt.ArrayLike] | None, count: int
) -> dict[str, npt.NDArray[Any]] | None:
    """Return a copy of edits of the model, one row a state; None if there are none.

    Raises:
        ValueError: if a field can't be edited, or a shape is wrong.
    """
    if edits is None:
        return None
    if not isinstance(edits, Mapping):
        raise ValueError(f"edits: expected a dict of fields, of one row for each state, got {edits!r}")
    checked = {}
    for name, values in edits.items():
        if name not in SEEN or not has_field(model, name):
            seen = ", ".join(each for each in SEEN if has_field(model, each))
            raise ValueError(f"edits: expected fields that a picture shows, of {seen}; got {name!r}")
        field = np.asarray(field_of(model, name))
        array = np.array(values)
        if array.shape != (count, *field.shape):
            raise ValueError(
                f"edits[{name!r}]: expected shape {(count, *field.shape)}: the whole field for each state, got "
                f"{array.shape}"
            )
        if array.dtype.kind not in "biuf":
            raise ValueError(f"edits[{name!r}]: expected numbers, got an array of {array.dtype}")
        checked[name] = array.astype(field.dtype)
        check_edit(model, name, array, f"edits[{name!r}]")
    return checked or None


def check_flags(**flags: Any) -> None:
    """Raise a ValueError unless all of them are True or False."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"{name}: expected True or False, got {value!r}")


def parse_out(out: Any, shape: tuple[int, ...], *, depth: bool, segmentation: bool) -> ImageArrays:
    """Return the arrays that images are put into.

    Args:
        out: the user's argument: an array, or a tuple of one for each kind of image.
        shape: of the array of depth images.
        depth: whether there are depth images.
        segmentation: whether there are segmentation images.

    Raises:
        ValueError: if they are not such arrays.
    """
    # broadcast, without memory of their own: the user's arrays may be larger than memory, in a file say
    likes = (
        kind and np.broadcast_to(np.empty((), kind[1]), kind[0]) for kind in image_kinds(shape, depth, segmentation)
    )
    images = ImageArrays(*likes)  # type: ignore[arg-type]
    wanted = {name: array for name, array in images._asdict().items() if array is not None}
    if not isinstance(out, (np.ndarray, list, tuple)):
        raise ValueError(f"out: expected an array for {', '.join(wanted)}, or a tuple of them, got {out!r}")
    given = (out,) if isinstance(out, np.ndarray) else tuple(out)
    if len(given) != len(wanted):
        raise ValueError(f"out: expected arrays for {', '.join(wanted)}, got {len(given)}")
    for target, (name, array) in zip(given, wanted.items(), strict=True):
        if not isinstance(target, np.ndarray) or target.shape != array.shape or target.dtype != array.dtype:
            got = f"{target.dtype} {target.shape}" if isinstance(target, np.ndarray) else type(target).__name__
            raise ValueError(f"out: expected for {name} an array {array.dtype} {array.shape}, got {got}")
        if not target.flags.writeable:
            raise ValueError(f"out: the array for {name} is read-only")
    return ImageArrays(**{**images._asdict(), **dict(zip(wanted, given, strict=True))})
