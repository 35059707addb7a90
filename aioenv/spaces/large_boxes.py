"""Large Box spaces whose bounds are all equal, as those of images: their bounds take no memory when batched or sent.

Gymnasium keeps four arrays as large as an observation for each `Box`. To pickle, check and repeat those of 50 MB takes
seconds. Here an array of equal bounds becomes a read-only view of one number (`numpy.broadcast_to`).
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space as gymnasium_batch_space

__all__ = ["batch_space", "packed"]

_LARGE = 1 << 20  # equal bounds of this many bytes or more are not kept as arrays


def batch_space(space: Space[Any], n: int) -> Space[Any]:
    """Batch `n` of a space as Gymnasium's `batch_space` does, without arrays of large, equal bounds."""
    small, shapes = _narrowed(space, n)
    if shapes is None:
        return gymnasium_batch_space(space, n)
    batched: Space[Any] = _widened(gymnasium_batch_space(small, n), shapes, (n,))
    return batched


def packed(space: Space[Any]) -> Any:
    """Return an object that unpickles as the space; its pickle has no large arrays of equal bounds."""
    small, shapes = _narrowed(space, 1)
    return space if shapes is None else _Packed(small, shapes)


class _Packed:
    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _widened, self._parts


def _narrowed(space: Space[Any], n: int) -> tuple[Space[Any], Any]:
    """Replace large boxes of equal bounds by boxes of one element; return the space and the shapes of those boxes.

    The shapes are None where there is no such box; those of a Dict or Tuple are by its keys.
    """
    if type(space) is spaces.Box:
        bounds = _bounds(space)
        if max((array.nbytes for array in bounds.values()), default=0) * n < _LARGE:
            return space, None
        if not all(map(_is_constant, bounds.values())):
            return space, None
        small = copy.copy(space)
        for name, array in bounds.items():
            setattr(small, name, array[(slice(1),) * array.ndim].copy())
        small._shape = (1,) * len(space.shape)
        return small, space.shape
    if type(space) is spaces.Dict or type(space) is spaces.Tuple:
        children = space.spaces
        items = children.items() if isinstance(children, dict) else enumerate(children)
        narrowed = {key: _narrowed(child, n) for key, child in items}
        shapes = {key: shape for key, (_, shape) in narrowed.items() if shape is not None}
        if shapes:
            found: Any = copy.copy(space)
            small_ones = {key: child for key, (child, _) in narrowed.items()}
            found.spaces = small_ones if isinstance(children, dict) else tuple(small_ones.values())
            return found, shapes
    return space, None


def _widened(space: Any, shapes: Any, lead: tuple[int, ...] = ()) -> Any:
    """Give boxes of one element their shapes back, with `lead` before them; the space itself is changed."""
    if isinstance(shapes, dict):
        for key, shape in shapes.items():
            _widened(space.spaces[key], shape, lead)
        return space
    shape = (*lead, *shapes)
    for name, array in _bounds(space).items():
        number = array.reshape(-1)[0]
        setattr(space, name, np.broadcast_to(np.array(number, array.dtype), shape))
    space._shape = shape
    return space


def _bounds(box: spaces.Box) -> dict[str, np.ndarray[Any, Any]]:
    """Return all arrays of a box that have its shape: the bounds, and the masks of bounded elements."""
    return {
        name: value for name, value in vars(box).items() if isinstance(value, np.ndarray) and value.shape == box.shape
    }


def _is_constant(array: np.ndarray[Any, Any]) -> bool:
    return bool(array.size) and (not any(array.strides) or bool(array.min() == array.max()))
