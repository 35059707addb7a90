"""Weights of policies, on their way to the collectors: pickled once, with the data of arrays and tensors apart.

A tensor of torch travels as the numpy array over its memory. This package imports torch in no other case than that such
a tensor arrives in a process that has not imported it.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aioenv.definitions.table import DefinitionTable
from aioenv.ipc.frames import Buffer
from aioenv.ipc.messages import dump, load

__all__ = ["DumpedWeights", "dump_weights", "load_weights"]

# Arrays of fewer bytes travel within the pickle.
_SMALL = 1 << 10
_ALIGNMENT = 64  # of each buffer, in bytes
_MAIN = b"main__"  # a pickle has it that names something of the main module, which the receiver has as a definition


class DumpedWeights(NamedTuple):
    """Weights as they travel, which no later change of the caller's arrays reaches.

    Attributes:
        version: the number of the update.
        data: their pickle.
        sizes: the lengths of its buffers, in bytes.
        buffers: the data of its arrays, each followed by its padding.
    """

    version: int
    data: bytes
    sizes: tuple[int, ...]
    buffers: list[Buffer]


def dump_weights(version: int, weights: Any, table: DefinitionTable) -> DumpedWeights:
    """Copy weights into a form that can be sent.

    Args:
        version: the number of the update.
        weights: anything that pickles.
        table: the definitions that the receivers have.

    Raises:
        Exception: if they can't be pickled.
    """
    found: list[memoryview] = []

    def keep_apart(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if len(view) < _SMALL:
            return True
        found.append(view)
        return False

    file = io.BytesIO()
    try:
        _WeightsPickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=keep_apart).dump(weights)
        data = file.getvalue()
    except Exception:
        data = _MAIN
    if _MAIN in data:
        return DumpedWeights(version, dump(weights, table), (), [])
    buffers: list[Buffer] = []
    for view in found:
        buffers += bytes(view), bytes(-len(view) % _ALIGNMENT)
    return DumpedWeights(version, data, tuple(map(len, found)), buffers)


def load_weights(data: bytes, sizes: Sequence[int], received: Sequence[memoryview]) -> Any:
    """Return weights that were dumped; their arrays are views of the memory that was received.

    Args:
        data, sizes: see `DumpedWeights`.
        received: one buffer, with all of its buffers one after the other; empty if there are none.

    Raises:
        WireError: if they don't unpickle.
    """
    if not sizes:
        return load(data)
    (memory,) = received
    offset, buffers = 0, []
    for size in sizes:
        buffers.append(memory[offset : offset + size])
        offset += size + -size % _ALIGNMENT
    return pickle.loads(data, buffers=buffers)


class _WeightsPickler(pickle.Pickler):
    """Pickles tensors as arrays."""

    def reducer_override(self, obj: Any) -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or not isinstance(obj, torch.Tensor):
            return NotImplemented
        try:
            return _tensor, (np.ascontiguousarray(obj.detach().cpu().numpy()),)
        except (RuntimeError, TypeError):  # a sparse tensor, or one of a dtype that numpy lacks
            return NotImplemented


def _tensor(array: Any) -> Any:
    return importlib.import_module("torch").from_numpy(array)
