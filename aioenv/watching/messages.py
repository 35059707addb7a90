"""The messages from a run to the process that shows it, over its standard input."""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from aioenv.state.render_source import MujocoSource

__all__ = ["PageUpdate", "Setup", "Source", "pack", "read"]

_LENGTH = struct.Struct("<Q")


class Setup(NamedTuple):
    """The first message.

    Attributes:
        title: the name of the env, and how many slots there are.
        port: the port to listen on; 0 for any that is free.
        slots: the slots that are shown, ascending.
        sources: the distinct models at the start; empty if the envs draw themselves.
        source_of: for each of the slots shown, the number of its model at the start.
    """

    title: str
    port: int
    slots: tuple[int, ...]
    sources: tuple[MujocoSource, ...]
    source_of: tuple[int, ...]


class Source(NamedTuple):
    """A model that has come since the start.

    Attributes:
        first: the number of the slot's model at the start.
        data: the source, pickled; without a model of its own it patches that of the start. Empty if it was lost.
    """

    first: int
    data: bytes


class PageUpdate(NamedTuple):
    """The slots that are shown, as they are now: row i is of the i-th.

    Attributes:
        states: float64 `(k, n)`, with the fields of the source; None if the envs draw themselves.
        known: bool `(k,)`: whether a slot has a state, or an image.
        edits: more fields of the models by name, one row a state.
        models: the key of each row's model, for those whose model has come since the start.
        new: these models by key, when they are needed for the first time.
        rows: states that are longer than a row, by row.
        images: by row, the images that have changed since the last update.
        returns, lengths: of the current episodes, length -1 if it began unseen; last_returns: of the ones before, NaN
            if there is none.
        paused: bool `(k,)`.
        summary: numbers of the whole run, by name; empty if they are as before.
    """

    states: npt.NDArray[np.float64] | None
    known: npt.NDArray[np.bool_]
    edits: dict[str, npt.NDArray[Any]]
    models: dict[int, bytes]
    new: dict[bytes, Source]
    rows: dict[int, bytes]
    images: dict[int, npt.NDArray[np.uint8]]
    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    last_returns: npt.NDArray[np.float64]
    paused: npt.NDArray[np.bool_]
    summary: dict[str, str]


def pack(message: Setup | PageUpdate) -> list[bytes]:
    """Return the buffers of a message."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return [_LENGTH.pack(len(data)), data]


def read(stream: BinaryIO) -> Any:
    """Read the next message; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    data = stream.read(size)
    return None if len(data) < size else pickle.loads(data)
