"""Calls of a vector env in this process: its methods, attributes and states."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.core.timeouts import images_late
from aioenv.errors import PendingCallError
from aioenv.inprocess.life import SoloLife, ends_program
from aioenv.worker.vector_access import VectorCalls

__all__ = ["SoloCalls"]


class SoloCalls(SoloLife):
    """What `Solo` has beside steps and resets. It always goes to the env's own thread, if there is one."""

    async def call_service(
        self, slots: Iterable[int] | None, what: str, method: str, arguments: Callable[[list[int]], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """Call a method of `VectorCalls` (see `RequestScheduler.call_service`); the env must have nothing in flight."""
        rows = np.sort(self.table.slot_numbers(slots)).tolist()
        self.table.check_call(self._all, what)
        work = partial(self._call, method, rows, *arguments(rows))
        if self._thread is None:
            return tuple(work())
        result = asyncio.shield(self._thread.ask(work))
        return tuple(await self._patiently(result, None, f"{what} goes on, but its result is dropped"))

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(VectorCalls(self._env), method)(*args)
        except BaseException as exc:  # here, where a StopIteration or a TimeoutError can be nobody's but the env's
            if self._thread is None and ends_program(exc):
                raise
            raise self._error(exc) from exc

    def model_field(self, name: str) -> npt.NDArray[Any]:
        """The live array of a field of the models (see `NativeVectorEnv.model_field`).

        Raises:
            ValueError: if it has no models of its slots, or there is no such field.
            PendingCallError: if it is doing something.
        """
        self.table.check_call(self._all, "model_field")
        if self._thread is not None and self._thread.jobs:  # a step that nobody waits for any more
            raise PendingCallError(
                "model_field: the vector env is still busy with a step that was cancelled", "model_field"
            )
        find = getattr(self._env.unwrapped, "model_field", None)
        if find is None:
            raise ValueError(f"model_field: {type(self._env.unwrapped).__name__} is no NativeMujocoEnv")
        array: npt.NDArray[Any] = find(name)
        return array

    @property
    def timeouts(self) -> SoloCalls:
        """What waits for images."""
        return self

    async def wait_for_images(self, what: str, drawn: Callable[[], Awaitable[object]]) -> None:
        """Wait until images are drawn (see `ReplyTimeouts.wait_for_images`)."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await drawn()
        except TimeoutError:
            raise images_late(what, self.pools, self._timeout_s) from None
