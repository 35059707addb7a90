"""Calls of a vector env in this process: its methods, attributes and images."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from aioenv.engine.solo_life import SoloLife
from aioenv.errors import ClosedError, RenderError, StepTimeout
from aioenv.host.vector_access import call_vector_env, set_vector_attr

__all__ = ["SoloCalls"]


class SoloCalls(SoloLife):
    """What `Solo` has beside steps and resets. It always goes to the env's own thread, if there is one."""

    async def call(self, slots: Sequence[int] | None, name: str, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...]:
        """Call a method, or read an attribute (see `call_vector_env`)."""
        numbers = self.table.named(slots)
        work = partial(self._call, np.sort(numbers).tolist(), name, args, kwargs)
        return tuple(await self._ask(f"call({name!r})", work))

    def _call(self, *args: Any) -> Any:
        return call_vector_env(self._env, *args)

    async def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute (see `set_vector_attr`); a list or tuple has one value a slot."""
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        await self._ask(f"set_attr({name!r})", lambda: set_vector_attr(self._env, name, values))

    async def render(self) -> Any:
        """What the env's own `render` gives: images of the state that it is in."""
        if self.render_mode is None:
            raise RenderError("render: the vector env was made without a render_mode")
        return await self._ask("render", lambda: self._env.render())

    async def _ask(self, what: str, work: Callable[[], Any]) -> Any:
        self.table.check_call(np.arange(self.num_envs), what)
        try:
            if self._thread is None:
                return work()
            result = asyncio.shield(self._thread.ask(work))
            return await self._patiently(result, None, f"{what} goes on, but its result is dropped")
        except (StepTimeout, ClosedError):
            raise
        except Exception as exc:
            raise self._error(exc) from exc
