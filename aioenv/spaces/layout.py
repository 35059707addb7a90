"""`Layout`: batches of a Gymnasium space as flat arrays, and back; `SharedLayout`: which of these lie in shared memory.

Both ends of a connection build the same `Layout` from the same space, so no shapes travel with a step. A space is a
tree with two kinds of leaves:

* *array leaves* (Box, Discrete, MultiDiscrete, MultiBinary): one array of shape `(n, *shape)` a batch. They are the
  fixed part of a frame. An empty Dict or Tuple is an array leaf of no bytes, whose length is that of the batch.
* *object leaves* (Text, Graph, Sequence, OneOf, custom spaces): a list of n Python objects a batch.

`Layout.take_apart` splits the actions of a whole batch into leaves, `Writer` writes observations into their rows, and
`Layout.assemble` makes the batch of arrays and objects that `gymnasium.vector` would have made.

Shared memory holds several *shared batches*. A request names one of them in one byte before the rest of its fixed part.
The worker reads its slots' actions there and writes their observations there, so neither travels. Both sides map the
same memory and make the same views of it.

Large Box spaces have functions of their own. Gymnasium keeps four arrays as large as an observation for each `Box`. To
pickle, check and repeat those of 50 MB takes seconds. Here an array of equal bounds becomes a read-only view of one
number (`numpy.broadcast_to`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space as gymnasium_batch_space
from gymnasium.vector.utils import concatenate, create_empty_array

from aioenv.errors import ActionError
from aioenv.spaces.checks import Range, check_range, fit_actions, has_fast_check, range_of
from aioenv.speedups import within

__all__ = [
    "BATCH_INDEX_BYTES",
    "COPIED",
    "SHARED_BYTES",
    "Arrays",
    "Layout",
    "Leaf",
    "SharedBatch",
    "SharedLayout",
    "Writer",
    "batch_space",
    "byte_view",
    "choose_shared_layout",
    "packed",
]


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


Arrays: TypeAlias = "list[np.ndarray[Any, Any]]"
Objects: TypeAlias = "list[Sequence[Any]]"

_ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Leaf(NamedTuple):
    """An array leaf: its path in the space (as "['key'][0]"), and shape and dtype of one row."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class _ArrayNode(NamedTuple):
    number: int


class _ObjectNode(NamedTuple):
    number: int
    space: Space[Any]


class _DictNode(NamedTuple):
    children: dict[Any, _Node]


class _TupleNode(NamedTuple):
    children: tuple[_Node, ...]


class _EmptyNode(NamedTuple):
    """A Dict or Tuple without elements, which has an array leaf of no bytes."""

    number: int
    value: dict[Any, Any] | tuple[Any, ...]


_Node: TypeAlias = "_ArrayNode | _ObjectNode | _DictNode | _TupleNode | _EmptyNode"


# C fills at most this many arrays.
_MAX_C_LEAVES = 16


def _is_numeric(node: _Node, leaves: Sequence[Leaf]) -> bool:
    match node:
        case _ArrayNode(number):
            return leaves[number].dtype.kind in "biuf"
        case _DictNode(children):
            return all(type(key) is str and _is_numeric(child, leaves) for key, child in children.items())
        case _TupleNode(children):
            return all(_is_numeric(child, leaves) for child in children)
        case _:
            return False


def byte_view(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the memory of a C-contiguous array as bytes, without a copy, as frames take it."""
    try:
        return memoryview(array).cast("B")  # type: ignore[arg-type]
    except (TypeError, ValueError):  # an empty array, or a dtype that `memoryview` has no code for
        return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


class Layout:
    """The tree of a space: its array leaves in order, and the number of its object leaves.

    Attributes:
        space: the space of one element.
        leaves: the array leaves, in the order of the buffers in a frame.
        num_objects: how many object leaves the space has.
        ranges: the ranges that `take_apart` checks, by number of array leaf.
        fast_range: the only range, if `speedups.within` can check it; else None.

    Args:
        space: as above.
        bounded: whether `take_apart` refuses numbers outside a Discrete, MultiDiscrete or MultiBinary space.
    """

    def __init__(self, space: Space[Any], *, bounded: bool = False) -> None:
        self.space = space
        self._bounded = bounded
        self.ranges: dict[int, Range] = {}
        self.leaves: list[Leaf] = []
        self.num_objects = 0
        self._root = self._build(space, "")
        self.fast_range: tuple[int, int] | None = None
        if type(self._root) is _ArrayNode and self.ranges and has_fast_check(self.ranges[0], self.leaves[0].dtype):
            self.fast_range = self.ranges[0]

    def _build(self, space: Space[Any], path: str) -> _Node:
        if isinstance(space, (spaces.Dict, spaces.Tuple)) and not space.spaces:
            self.leaves.append(Leaf(path, (0,), np.dtype(np.bool_)))
            return _EmptyNode(len(self.leaves) - 1, {} if isinstance(space, spaces.Dict) else ())
        if isinstance(space, spaces.Dict):
            return _DictNode({k: self._build(s, f"{path}[{k!r}]") for k, s in space.spaces.items()})
        if isinstance(space, spaces.Tuple):
            return _TupleNode(tuple(self._build(s, f"{path}[{i}]") for i, s in enumerate(space.spaces)))
        if isinstance(space, _ARRAY_SPACES) and space.dtype is not None and not space.dtype.hasobject:
            self.leaves.append(Leaf(path, tuple(space.shape or ()), _shared_dtype(space.dtype)))
            if self._bounded and (known := range_of(space)) is not None:
                self.ranges[len(self.leaves) - 1] = known
            return _ArrayNode(len(self.leaves) - 1)
        self.num_objects += 1
        return _ObjectNode(self.num_objects - 1, space)

    @property
    def is_single_array(self) -> bool:
        """Whether a batch is one array of numbers, and nothing else."""
        return type(self._root) is _ArrayNode and self.leaves[0].dtype.kind in "biuf"

    @property
    def is_numeric(self) -> bool:
        """Whether a batch consists of arrays of numbers, in tuples and in dicts with strings as keys."""
        return not self.num_objects and len(self.leaves) <= _MAX_C_LEAVES and _is_numeric(self._root, self.leaves)

    def empty(self, n: int, without: Container[int] = ()) -> Arrays:
        """Make an array of shape `(n, *shape)` for each array leaf, not initialised.

        Args:
            n: how many elements.
            without: numbers of leaves whose arrays have length 0.
        """
        return [np.empty((0 if i in without else n, *leaf.shape), leaf.dtype) for i, leaf in enumerate(self.leaves)]

    def zeros(self, n: int) -> Arrays:
        """Make arrays as `empty` does, but zero."""
        return [np.zeros((n, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def no_objects(self, n: int) -> list[list[Any]]:
        """Make a list of n Nones for each object leaf."""
        return [[None] * n for _ in range(self.num_objects)]

    def empty_steps(self, steps: int, n: int) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
        """Make arrays for several steps, `(steps, n, …)`: of array leaves, not initialised, and of object leaves."""
        arrays = [np.empty((steps, n, *leaf.shape), leaf.dtype) for leaf in self.leaves]
        return arrays, [np.full((steps, n), None, object) for _ in range(self.num_objects)]

    def assemble(self, arrays: Sequence[np.ndarray[Any, Any]], objects: Sequence[Sequence[Any]]) -> Any:
        """Make the batch as `gymnasium.vector` gives it: dicts and tuples of these very arrays (zero-copy).

        Object leaves are joined by Gymnasium's `concatenate`: a tuple of n objects for its own spaces, and for custom
        ones the registered type. Arrays of objects (see `empty_steps`) are left as they are.
        """
        if type(self._root) is _ArrayNode:
            return arrays[0]
        return self._assemble(self._root, arrays, objects)

    def _assemble(self, node: _Node, arrays: Any, objects: Any) -> Any:
        match node:
            case _ArrayNode(index):
                return arrays[index]
            case _ObjectNode(index, space):
                items = objects[index]
                if isinstance(items, np.ndarray):
                    return items
                return concatenate(space, items, create_empty_array(space, n=len(items)))  # type: ignore[arg-type]
            case _DictNode(children):
                return {key: self._assemble(child, arrays, objects) for key, child in children.items()}
            case _TupleNode(children):
                return tuple(self._assemble(child, arrays, objects) for child in children)
            case _EmptyNode(_, value):
                return value.copy() if isinstance(value, dict) else value

    def rows(self, arrays: Sequence[np.ndarray[Any, Any]], objects: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the batch as a list of single elements; rows of arrays are views, scalars are numpy scalars."""
        if type(self._root) is _ArrayNode:
            return list(arrays[0])
        return list(self._rows(self._root, arrays, objects))

    def _rows(self, node: _Node, arrays: Any, objects: Any) -> Iterable[Any]:
        match node:
            case _ArrayNode(index):
                return list(arrays[index])
            case _ObjectNode(index, _):
                return list(objects[index])
            case _DictNode(children):
                columns = [self._rows(child, arrays, objects) for child in children.values()]
                return [dict(zip(children, row, strict=True)) for row in zip(*columns, strict=True)]
            case _TupleNode(children):
                return list(zip(*(self._rows(c, arrays, objects) for c in children), strict=True))
            case _EmptyNode(index, value):
                return [value.copy() if isinstance(value, dict) else value for _ in range(len(arrays[index]))]

    def split(self, data: bytes, n: int, shared: Mapping[int, np.ndarray[Any, Any]] | None = None) -> Arrays:
        """Return the arrays of n elements: those in `shared` by number of leaf, the others copied from their bytes."""
        arrays: Arrays = []
        offset = 0
        for number, leaf in enumerate(self.leaves):
            if shared and number in shared:
                arrays.append(shared[number])
                continue
            array = np.frombuffer(data, leaf.dtype, n * math.prod(leaf.shape), offset).reshape((n, *leaf.shape)).copy()
            offset += array.nbytes
            arrays.append(array)
        return arrays

    def take_apart(
        self, batch: Any, n: int, used: np.ndarray[Any, np.dtype[np.int64]] | None = None
    ) -> tuple[Arrays, Objects]:
        """Check a batch of n actions as a whole, and split it into arrays and objects.

        Args:
            batch: shaped like the batched space; array leaves may be anything that `numpy.asarray` takes.
            n: how many elements it must have.
            used: rows whose ranges are checked; None: all.

        Returns:
            New C-contiguous arrays of shape `(n, *shape)` and the leaves' dtypes, and sequences of n objects.

        Raises:
            ActionError: if a shape or a structure differs, if a dtype can't be cast without changing values in kind
                (float to int) or range, or if the layout is `bounded` and a number is not in its space. The message
                says where, what was expected, and what was got.
        """
        if type(self._root) is _ArrayNode:
            array = fit_actions(batch, n, *self.leaves[0])
            if self.ranges and not (self.fast_range and within(array, *self.fast_range)):  # type: ignore[misc]
                self.check_ranges([array], used)
            return [array], []
        arrays: Arrays = [None] * len(self.leaves)  # type: ignore[list-item]
        objects: Objects = [()] * self.num_objects
        self._take_apart(self._root, batch, n, "", arrays, objects)
        if self.ranges:
            self.check_ranges(arrays, used)
        return arrays, objects

    def check_ranges(self, arrays: Arrays, used: np.ndarray[Any, np.dtype[np.int64]] | None = None) -> None:
        """Raise an ActionError if a number is outside its space; `used` as for `take_apart`."""
        for number, known in self.ranges.items():
            array = arrays[number]
            if used is not None:  # the message names a row of the batch
                rest = np.setdiff1d(np.arange(len(array)), used)
                array = array.copy()
                array[rest] = known.low
            check_range(array, known, self.leaves[number].path)

    def _take_apart(self, node: _Node, value: Any, n: int, path: str, arrays: Arrays, objects: Objects) -> None:
        match node:
            case _ArrayNode(index):
                arrays[index] = fit_actions(value, n, *self.leaves[index])
            case _ObjectNode(index, _):
                if not hasattr(value, "__len__") or len(value) != n:
                    got = f"{len(value)} of them" if hasattr(value, "__len__") else type(value).__name__
                    raise ActionError(f"actions{path}: expected a sequence of {n} elements, got {got}")
                objects[index] = value
            case _DictNode(children):
                if not hasattr(value, "keys") or set(value.keys()) != set(children):
                    got = str(sorted(value.keys())) if hasattr(value, "keys") else type(value).__name__
                    raise ActionError(f"actions{path}: expected a dict of {sorted(children)}, got {got}")
                for key, child in children.items():
                    self._take_apart(child, value[key], n, f"{path}[{key!r}]", arrays, objects)
            case _TupleNode(children):
                if not isinstance(value, (tuple, list)) or len(value) != len(children):
                    got = f"{len(value)}" if hasattr(value, "__len__") else type(value).__name__
                    raise ActionError(f"actions{path}: expected a tuple of {len(children)}, got {got}")
                for i, child in enumerate(children):
                    self._take_apart(child, value[i], n, f"{path}[{i}]", arrays, objects)
            case _EmptyNode(index, empty):
                if value is None or not isinstance(value, type(empty)) or len(value):
                    raise ActionError(f"actions{path}: expected {empty!r}, got {value!r}")
                arrays[index] = np.zeros((n, 0), np.bool_)

    def batch_of_one(self, value: Any) -> Any:
        """Return a single action as a batch; if it does not fit, `take_apart` refuses the result."""
        return self._batch_of_one(self._root, value)

    def _batch_of_one(self, node: _Node, value: Any) -> Any:
        match node:
            case _ArrayNode():
                return [value]
            case _ObjectNode():
                return (value,)
            case _DictNode(children) if hasattr(value, "keys") and set(value.keys()) == set(children):
                return {key: self._batch_of_one(child, value[key]) for key, child in children.items()}
            case _TupleNode(children) if isinstance(value, (tuple, list)) and len(value) == len(children):
                return tuple(self._batch_of_one(child, item) for child, item in zip(children, value, strict=True))
        return value

    def writer(self, arrays: Arrays, objects: list[list[Any]], *, cast: bool = False) -> Writer:
        """Make a `Writer` of elements into rows of `arrays` and `objects`.

        Args:
            arrays, objects: one for each leaf.
            cast: whether to cast and reshape any value that has as many numbers as the space.
        """
        return Writer(self._root, self.leaves, arrays, objects, cast)


class Writer:
    """Writes elements of a space into rows: one by one, or successive rows at a fraction of the cost."""

    def __init__(
        self, root: _Node, leaves: Sequence[Leaf], arrays: Arrays, objects: list[list[Any]], cast: bool
    ) -> None:
        self._leaves = leaves
        self._arrays = arrays
        self._objects = objects
        self._one = self._compile(root, _casting_writer if cast else _array_writer, _set_item)
        self._run = self._compile(root, _array_run_writer, _set_items)

    def write(self, row: int, value: Any) -> None:
        """Write one element into its row.

        Raises:
            ValueError, TypeError: if it does not fit the space's shape, dtype or structure.
        """
        self._one(row, value)

    def write_run(self, start: int, values: Sequence[Any]) -> None:
        """Write elements into successive rows.

        Raises:
            Exception: if one may not fit; `write` says which, and why.
        """
        self._run(start, values)

    def _compile(self, node: _Node, of_array: Any, of_objects: Any, path: str = "") -> Callable[[int, Any], None]:
        match node:
            case _ArrayNode(index):
                write: Callable[[int, Any], None] = of_array(self._arrays[index], self._leaves[index])
                return write
            case _ObjectNode(index, _):
                return partial(of_objects, self._objects[index])
            case _DictNode(children):
                named: Iterable[tuple[Any, _Node]] = children.items()
            case _TupleNode(children):
                named = enumerate(children)
            case _EmptyNode():
                named = ()
        items = [(key, self._compile(child, of_array, of_objects, f"{path}[{key!r}]")) for key, child in named]
        if of_array is _array_run_writer:
            return partial(_write_all_of_run, items)
        return partial(_write_all, items, path, isinstance(node, _DictNode))


def _write_all(
    items: list[tuple[Any, Callable[[int, Any], None]]], path: str, is_dict: bool, row: int, value: Any
) -> None:
    for key, write in items:
        try:
            item = value[key]
        except Exception as exc:
            keys = [key for key, _ in items]
            expected = f"a dict with the keys {keys}" if is_dict else f"a tuple of {len(keys)}"
            got = f"the keys {list(value)}" if isinstance(value, dict) else f"{value!r:.80}"
            raise ValueError(f"observation{path}: expected {expected}, got {got}") from exc
        write(row, item)


def _write_all_of_run(items: list[tuple[Any, Callable[[int, Any], None]]], start: int, values: Sequence[Any]) -> None:
    for key, write in items:
        write(start, [value[key] for value in values])


def _set_item(column: list[Any], row: int, value: Any) -> None:
    column[row] = value


def _set_items(column: list[Any], start: int, values: Sequence[Any]) -> None:
    column[start : start + len(values)] = values


def _array_writer(array: np.ndarray[Any, Any], leaf: Leaf) -> Callable[[int, Any], None]:
    path, shape, dtype = leaf
    ndarray = np.ndarray

    def write(row: int, value: Any) -> None:
        if type(value) is not ndarray:
            value = np.asarray(value)
        if value.dtype is not dtype and not np.can_cast(value.dtype, dtype, "same_kind"):
            raise TypeError(f"observation{path}: expected dtype {dtype}, got {value.dtype}")
        # numpy would broadcast a wrong shape in silence
        if value.shape != shape:
            raise ValueError(f"observation{path}: expected shape {shape}, got {value.shape}")
        array[row] = value

    return write


def _casting_writer(array: np.ndarray[Any, Any], leaf: Leaf) -> Callable[[int, Any], None]:
    """Write as Gymnasium does to its shared memory, but refuse too few numbers (it repeats them) and None."""
    path, shape, dtype = leaf
    size = math.prod(shape)

    def write(row: int, value: Any) -> None:
        if value is None:
            raise TypeError(f"observation{path}: expected dtype {dtype}, got None")
        value = np.asarray(value, dtype)
        if value.size != size:
            raise ValueError(f"observation{path}: expected shape {shape}, got {value.shape}")
        array[row] = value.reshape(shape)

    return write


def _array_run_writer(array: np.ndarray[Any, Any], leaf: Leaf) -> Callable[[int, Any], None]:
    """Write all rows in one call of numpy; it raises for anything unusual, which `_array_writer` then looks at."""
    path, shape, dtype = leaf
    if not shape:

        def write_scalars(start: int, values: Sequence[Any]) -> None:
            new = np.array(values)
            if new.shape != (len(values),) or not np.can_cast(new.dtype, dtype, "same_kind"):
                raise TypeError(f"observation{path}: expected numbers of {dtype}")
            array[start : start + len(values)] = new

        return write_scalars

    length = shape[0]
    flat = array.reshape(len(array) * length, *shape[1:])

    def write(start: int, values: Sequence[Any]) -> None:
        # rows that are too long could make up for others that are too short
        if set(map(len, values)) != {length}:
            raise ValueError(f"observation{path}: expected shape {shape}")
        np.concatenate(values, out=flat[start * length : (start + len(values)) * length])

    return write


# An array is shared from this many bytes a worker and step on. Below, a socket is as fast, and the parent's memory
# stays private (docs/explanation/designs-that-were-tried.md has the measurement).
SHARED_BYTES = 1 << 15
# The shared batch whose rows the parent copies as they arrive: each belongs to one request a slot. The others are
# handed to the caller without a copy, once the whole batch is there.
COPIED = 0
# The byte that names each shared batch in a frame.
BATCH_INDEX_BYTES = [bytes([number]) for number in range(256)]
_ALIGNMENT = 64  # bytes, of each array: a cache line


class SharedBatch(NamedTuple):
    """One batch in shared memory: arrays of shape `(num_envs, *shape)` by number of leaf."""

    observations: dict[int, np.ndarray[Any, Any]]
    actions: dict[int, np.ndarray[Any, Any]]


class SharedLayout(NamedTuple):
    """The layout of the shared memory, which parent and workers know."""

    num_envs: int
    num_batches: int
    observations: tuple[int, ...]  # the numbers of the array leaves that are shared
    actions: tuple[int, ...]

    def size(self, observations: Layout, actions: Layout) -> int:
        """Return how many bytes of memory it takes."""
        leaves = self._leaves(observations, actions)
        return self.num_batches * sum(_aligned_bytes(leaf, self.num_envs) for leaf in leaves)

    def batches(self, memory: Any, observations: Layout, actions: Layout) -> list[SharedBatch]:
        """Make views of the memory, which all processes share."""
        offset = 0
        batches = []
        for _ in range(self.num_batches):
            arrays = []
            for leaf in self._leaves(observations, actions):
                arrays.append(np.ndarray((self.num_envs, *leaf.shape), leaf.dtype, memory, offset))
                offset += _aligned_bytes(leaf, self.num_envs)
            split = len(self.observations)
            batches.append(
                SharedBatch(
                    dict(zip(self.observations, arrays[:split], strict=True)),
                    dict(zip(self.actions, arrays[split:], strict=True)),
                )
            )
        return batches

    def _leaves(self, observations: Layout, actions: Layout) -> list[Leaf]:
        return [observations.leaves[i] for i in self.observations] + [actions.leaves[i] for i in self.actions]


def choose_shared_layout(
    transport: str, observations: Layout, actions: Layout, num_envs: int, num_workers: int, num_batches: int
) -> SharedLayout | None:
    """Choose the arrays that a transport shares: large ones for "auto", all for "shared"; None if there are none."""

    def chosen(layout: Layout) -> tuple[int, ...]:
        least = 1 if transport == "shared" else SHARED_BYTES
        share = -(-num_envs // num_workers)
        return tuple(i for i, leaf in enumerate(layout.leaves) if _row_bytes(leaf) * share >= least)

    if transport == "frames":
        return None
    shared = SharedLayout(num_envs, num_batches, chosen(observations), chosen(actions))
    return shared if shared.observations or shared.actions else None


def _row_bytes(leaf: Leaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize


def _aligned_bytes(leaf: Leaf, num_envs: int) -> int:
    return -(-_row_bytes(leaf) * num_envs // _ALIGNMENT) * _ALIGNMENT


def _shared_dtype(dtype: Any) -> np.dtype[Any]:
    """Return numpy's own object for a dtype; a space that was pickled has another, and C compares objects."""
    own: np.dtype[Any] = np.dtype(dtype)
    shared = np.dtype(own.type)
    return shared if shared == own else own
