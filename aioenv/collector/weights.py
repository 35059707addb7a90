"""Weights of policies, on their way to the collectors: pickled once, with the data of arrays and tensors apart.

A tensor of torch travels as the numpy array over its memory, or over its bytes if numpy lacks the dtype. This package
imports torch in no other case than that such a tensor arrives in a process that has not imported it.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aioenv.definitions.table import DefinitionTable
from aioenv.ipc.frames import Buffer
from aioenv.ipc.messages import dump, load
from aioenv.ipc.shared_data import ALIGNMENT

if TYPE_CHECKING:
    from aioenv.process.remote import ClusterSession, Placements, SharedData

__all__ = ["DumpedWeights", "Spans", "dump_weights", "load_weights", "shared_spans"]

Spans: TypeAlias = "tuple[tuple[int, int], ...]"

# Arrays of fewer bytes travel within the pickle.
_SMALL = 1 << 10
_MAIN = b"main__"  # a pickle has it that names something of the main module, which the receiver has as a definition


class DumpedWeights(NamedTuple):
    """Weights as they travel, which no later change of the caller's arrays reaches.

    Attributes:
        version: the number of the update.
        data: their pickle.
        spans: the offset and the length of each of its buffers, in bytes, as they travel in a message.
        buffers: the data of its arrays, each followed by its padding.
        shared: by session, the same data where the collectors of a cluster read them.
    """

    version: int
    data: bytes
    spans: Spans
    buffers: list[Buffer]
    shared: Mapping[ClusterSession, SharedData]


def dump_weights(version: int, weights: Any, table: DefinitionTable, placements: Placements) -> DumpedWeights:
    """Copy weights into a form that can be sent.

    Args:
        version: the number of the update.
        weights: anything that pickles.
        table: the definitions that the receivers have.
        placements: where the receivers are.

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
        return DumpedWeights(version, dump(weights, table), (), [], {})
    shared = placements.share(found) if found else {}
    copies: Iterable[Buffer] = next(iter(shared.values())).parts if shared else map(bytes, found)
    buffers: list[Buffer] = []
    spans, offset = [], 0
    for copy in copies:
        padding = -len(copy) % ALIGNMENT
        buffers += copy, bytes(padding)
        spans.append((offset, len(copy)))
        offset += len(copy) + padding
    return DumpedWeights(version, data, tuple(spans), buffers, shared)


def shared_spans(weights: DumpedWeights, data: SharedData) -> Spans:
    """Return the offset and the length of each buffer of weights, in shared data."""
    return tuple((offset, size) for offset, (_, size) in zip(data.offsets, weights.spans, strict=True))


def load_weights(data: bytes, spans: Spans, received: Sequence[memoryview]) -> Any:
    """Return weights that were dumped; their arrays are views of the memory that was received.

    Args:
        data, spans: see `DumpedWeights`.
        received: one buffer, which has all of its buffers; empty if there are none.

    Raises:
        WireError: if they don't unpickle.
    """
    if not spans:
        return load(data)
    (memory,) = received
    return pickle.loads(data, buffers=[memory[offset : offset + size] for offset, size in spans])


class _WeightsPickler(pickle.Pickler):
    """Pickles tensors as arrays."""

    def reducer_override(self, obj: Any) -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or not isinstance(obj, torch.Tensor):
            return NotImplemented
        if type(obj) is torch.nn.Parameter:  # of a whole module; those of a state dict are plain tensors
            return _parameter, (obj.detach(), obj.requires_grad)
        try:
            tensor = obj.detach().cpu().contiguous()
            try:
                return _tensor, (tensor.numpy(),)
            except TypeError:  # numpy lacks the dtype, as bfloat16
                return _tensor, (tensor.view(torch.uint8).numpy(), obj.dtype)
        except (RuntimeError, TypeError):  # sparse, say
            return NotImplemented


def _tensor(array: Any, dtype: Any = None) -> Any:
    tensor = importlib.import_module("torch").from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype)


def _parameter(tensor: Any, requires_grad: bool) -> Any:
    return importlib.import_module("torch").nn.Parameter(tensor, requires_grad)
