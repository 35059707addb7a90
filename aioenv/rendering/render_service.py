"""The service of a render worker: `RenderService` answers draw requests; `renderers.py` draws.

The parent names `pool_service` and `step_service` without importing MuJoCo, which takes 0.1 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from aioenv.ipc.frames import Frame, Header, Kind
from aioenv.rendering.draw_requests import DrawRequest, DrawSettings, dump_seconds, load_request, load_settings
from aioenv.rendering.images import BufferMapper, ImageArrays
from aioenv.spaces.layout import byte_view
from aioenv.worker.service import PartialStep, Reply

if TYPE_CHECKING:
    from aioenv.rendering.config import RenderConfig, RenderQuality
    from aioenv.state.render_source import MujocoSource

__all__ = ["RenderService", "Renderer", "pool_service", "step_service"]


class Renderer(Protocol):
    """Draws the states of requests: a `StepRenderer`, or a `PoolRenderer`.

    Attributes:
        state_size: how many float64 a row of states has.
    """

    state_size: int

    def describe(self) -> str:
        """Return the name of the OpenGL implementation, if it is known."""

    def draw_request(
        self,
        states: npt.NDArray[np.float64],
        request: DrawRequest,
        settings: DrawSettings,
        images: ImageArrays,
        rows: Sequence[int],
    ) -> None:
        """Draw each state into its row of the images, of shape `(n, *settings.state_shape)`."""

    def close(self) -> None:
        """Free the OpenGL contexts."""


class RenderService:
    """The service of a render worker: answers each RENDER frame (see `draw_requests`).

    Args:
        renderer: draws.
        settings: how, where a request does not say it; None if each request says it.
    """

    def __init__(self, renderer: Renderer, settings: DrawSettings | None = None) -> None:
        self._renderer = renderer
        self._buffers = BufferMapper()
        self._dumped: bytes | None = None  # the settings of the last request
        self._settings = settings

    def describe(self) -> str:
        """Return the name of the OpenGL implementation, if it is known."""
        return self._renderer.describe()

    def request_buffers(self, header: Header) -> Sequence[memoryview] | None:
        """Return None: states may be read into any memory."""
        return None

    def expected_buffers(self) -> None:
        """Return None: the length of a request is not known beforehand."""

    def fast_path(self) -> None:
        """Return None: nothing is stepped."""

    def handle(self, frame: Frame | PartialStep) -> Reply:
        """Draw the states of a RENDER frame.

        Raises:
            ValueError: if it is another request.
        """
        if isinstance(frame, PartialStep) or frame.kind is not Kind.RENDER:
            raise ValueError(f"a render worker has no answer to {frame.kind.name}")
        started = perf_counter()
        size = self._renderer.state_size
        data = bytearray().join(frame.fixed)  # MuJoCo 3 takes no state that is read-only
        states = np.frombuffer(data, np.float64).reshape(len(data) // (8 * size), size)
        request = load_request(frame.payload)
        if request.settings is not None and request.settings != self._dumped:
            self._settings, self._dumped = load_settings(request.settings), request.settings
        settings = self._settings
        assert settings is not None
        images, rows = self._buffers.arrays(
            request.location,
            len(states),
            settings.state_shape,
            depth=settings.depth,
            segmentation=settings.segmentation,
        )
        self._renderer.draw_request(states, request, settings, images, rows)
        fixed = [byte_view(array) for array in images.arrays] if request.location is None else ()
        return Reply(fixed, dump_seconds(perf_counter() - started))

    def after_reply(self) -> None:
        """Do nothing: no work is put off."""

    def close(self) -> None:
        """Free the OpenGL contexts."""
        self._renderer.close()


def pool_service(
    model: bytes, state_spec: int, quality: RenderQuality, modders: Sequence[Callable[..., Any]], seed: int
) -> RenderService:
    """Make the service of a `RenderPool`'s worker (see `PoolRenderer`)."""
    from aioenv.rendering.renderers import PoolRenderer

    return RenderService(PoolRenderer(model, state_spec, quality, modders, seed))


def step_service(sources: Sequence[MujocoSource], config: RenderConfig) -> RenderService:
    """Make the service of a `StepRenderPool`'s worker (see `StepRenderer`)."""
    from aioenv.rendering.renderers import StepRenderer

    settings = DrawSettings(config.width, config.height, config.cameras, config.depth, config.segmentation)
    return RenderService(StepRenderer(sources, config), settings)
