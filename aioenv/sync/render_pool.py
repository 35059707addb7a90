"""`RenderPool` for blocking code."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future, InvalidStateError
from typing import Any

from aioenv.rendering.render_pool import RenderPool as AsyncRenderPool
from aioenv.sync.blocking import Blocking
from aioenv.sync.tracing import BlockingTrace

__all__ = ["RenderPool"]


_TELLING = frozenset("model state_spec state_size num_workers devices backend renderer pids get_state".split())


class RenderPool(Blocking):
    """`aioenv.RenderPool` for blocking code: it runs on a loop thread of its own::

        with aioenv.sync.RenderPool(model, workers_per_device=2) as pool:
            images = pool.render(states, width=84, height=84)

    The constructor starts the workers. One that is forgotten is closed when it is collected, or at the end of the
    program.

    Args:
        model: as `aioenv.RenderPool`, as are the keyword arguments, and all errors.

    Attributes:
        closed: whether `close` has been called.
    """

    def __init__(self, model: Any, **arguments: Any) -> None:
        self._pool = AsyncRenderPool(model, **arguments)
        self._run(self._pool)

    def __getattr__(self, name: str) -> Any:
        """Attributes of `aioenv.RenderPool` that tell of it: `num_workers`, `state_size`, `get_state`, …"""
        if name in _TELLING:
            return getattr(self._pool, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def render(self, states: Any = None, **how: Any) -> Any:
        """Draw states, and wait for the images: see `aioenv.RenderPool.render`.

        If the wait is interrupted (Ctrl-C), what no worker has begun is not drawn.
        """
        return self._portal.call(self._pool.render, states, **how)

    def submit(self, states: Any = None, **how: Any) -> Future[Any]:
        """Have states drawn, and go on: gives a future of what `render` returns.

        Its `result(timeout)` waits; to cancel it drops what no worker has begun.

        Raises:
            ValueError: if an argument is wrong; nothing is sent then. What goes wrong later comes out of the future.
        """
        outcome: Future[Any] = Future()
        self._portal.run_soon(_submit, self._pool, states, how, outcome)
        return outcome

    def trace(self, path: str | os.PathLike[str]) -> BlockingTrace:
        """Collect a timeline, until the end of a `with` block over it (see `aioenv.RenderPool.trace`)."""
        return BlockingTrace(self._portal, self._pool.trace, path)

    def close(self) -> None:
        """End the workers and the loop thread. Idempotent."""
        if not self.closed:
            self.closed = True
            self._end()


def _submit(pool: AsyncRenderPool, states: Any, how: dict[str, Any], outcome: Future[Any]) -> None:
    """On the loop's thread: submit, and have both futures end together."""
    inner = pool.submit(states, **how)
    loop = inner.get_loop()

    def on_done(inner: Any) -> None:
        error = None if inner.cancelled() else inner.exception()
        with contextlib.suppress(InvalidStateError):  # it was cancelled meanwhile, by another thread
            if inner.cancelled():
                outcome.cancel()
            elif error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(inner.result())

    def on_outcome(outcome: Future[Any]) -> None:
        if outcome.cancelled() and not loop.is_closed():
            loop.call_soon_threadsafe(inner.cancel)

    inner.add_done_callback(on_done)
    outcome.add_done_callback(on_outcome)
