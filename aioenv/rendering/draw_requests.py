"""The messages between render pools and their workers: the payloads of RENDER frames and of their replies.

The fixed part of a RENDER frame is the states, one row after the other; its payload is a `DrawRequest`. The reply has
the images as its fixed part unless the worker draws into shared memory. Its payload is how long the drawing took.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

from aioenv.ipc.messages import dump, load
from aioenv.rendering.images import ImageLocation

__all__ = [
    "DrawRequest",
    "DrawSettings",
    "Edits",
    "ModelChanges",
    "dump_request",
    "dump_seconds",
    "dump_settings",
    "load_request",
    "load_seconds",
    "load_settings",
]

# Fields of the model by name, one row a state.
Edits: TypeAlias = dict[str, npt.NDArray[Any]]

_SECONDS = struct.Struct("<d")


class DrawSettings(NamedTuple):
    """The settings by which states are drawn.

    Attributes:
        width: of an image, in pixels.
        height: of an image, in pixels.
        views: the cameras: of a `RenderPool` as `cameras.View`, of a `StepRenderPool` as `RenderConfig.cameras`.
        depth: whether there are depth images.
        segmentation: whether there are segmentation images.
        option: the visual options (see `cameras.Option`).
    """

    width: int
    height: int
    views: tuple[Any, ...]
    depth: bool
    segmentation: bool
    option: Any = None

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of one state's depth images."""
        return len(self.views), self.height, self.width


class ModelChanges(NamedTuple):
    """The models that some states need besides those that a worker of a `StepRenderPool` was started with.

    Attributes:
        new: models that the worker does not have, by key: the number of the slot's source at the start, and the source
            of now, pickled. A source without a model patches the one of the start.
        dropped: keys of models that the worker does not need any more.
        keys: the keys of the models of some states, by their numbers in the request. Other states are drawn with the
            sources of the start.
        rows: states that are longer than a row, by their numbers in the request.
    """

    new: dict[bytes, tuple[int, bytes]]
    dropped: list[bytes]
    keys: dict[int, bytes]
    rows: dict[int, bytes]


class DrawRequest(NamedTuple):
    """A draw request, without the states.

    Attributes:
        settings: how they are drawn, as `dump_settings` gives it; None for the settings that the worker was started
            with.
        location: where in shared memory the worker draws; None if the images are sent with the reply.
        edits: fields of the model, one row a state.
        looks: of a `RenderPool` with modders, each state's slot and how often that was randomised.
        sources: of a `StepRenderPool`, the number of each state's source; None if there is only one.
        models: of a `StepRenderPool`, models that have come since the start.
    """

    settings: bytes | None
    location: ImageLocation | None
    edits: Edits
    looks: list[list[int]] | None = None
    sources: list[int] | None = None
    models: ModelChanges | None = None


def dump_settings(settings: DrawSettings) -> bytes:
    """Pickle settings, once for all requests of a call."""
    return dump(tuple(settings))


def load_settings(data: bytes) -> DrawSettings:
    """Unpickle settings."""
    return DrawSettings(*load(data))


def dump_request(request: DrawRequest) -> bytes:
    """Pickle a request. (Plain tuples take a sixth of the time of named ones.)"""
    settings, location, edits, looks, sources, models = request
    return dump((settings, location and tuple(location), edits, looks, sources, models and tuple(models)))


def load_request(payload: memoryview) -> DrawRequest:
    """Unpickle a request."""
    settings, location, edits, looks, sources, models = load(payload)
    location = location and ImageLocation(*location)
    return DrawRequest(settings, location, edits, looks, sources, models and ModelChanges(*models))


def dump_seconds(seconds: float) -> bytes:
    """Pack how long a worker took to draw, the payload of its reply."""
    return _SECONDS.pack(seconds)


def load_seconds(payload: memoryview) -> float:
    """Unpack how long a worker took to draw, in seconds."""
    return float(_SECONDS.unpack(payload)[0])
