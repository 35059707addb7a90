"""What the services of render workers have in common: states come, and images go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.ipc.frames import Frame, Header, Kind
from aioenv.rendering.buffer_mapper import BufferMapper
from aioenv.rendering.contexts import opengl_name
from aioenv.worker.service import PartialStep, Reply

__all__ = ["DrawingService"]


class DrawingService:
    """Answers each RENDER, whose fixed part is the states, one row after the other; for its tail see `drawing`.

    Args:
        state_size: how many float64 a row has.
    """

    def __init__(self, state_size: int) -> None:
        self._state_size = state_size
        self._easel = BufferMapper()

    def describe(self) -> str:
        """The name of the OpenGL implementation, if it can be had."""
        return opengl_name()

    def request_buffers(self, header: Header) -> Sequence[memoryview] | None:
        """States may be read anywhere."""
        return None

    def expected_buffers(self) -> None:
        """Nothing: how many states come differs."""

    def fast_path(self) -> None:
        """None: nothing is stepped."""

    def handle(self, frame: Frame | PartialStep) -> Reply:
        """Answer a RENDER.

        Raises:
            ValueError: if it is another request.
        """
        if isinstance(frame, PartialStep) or frame.kind is not Kind.RENDER:
            raise ValueError(f"a render worker has no answer to {frame.kind.name}")
        data = bytearray().join(frame.fixed)  # MuJoCo 3 takes no state that is read-only
        states = np.frombuffer(data, np.float64).reshape(len(data) // (8 * self._state_size), self._state_size)
        return self._render(states, frame.tail)

    def _render(self, states: npt.NDArray[np.float64], tail: Any) -> Reply:
        raise NotImplementedError

    def after_reply(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Free whatever OpenGL contexts there are."""
        raise NotImplementedError
