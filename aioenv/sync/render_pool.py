"""`aioenv.sync.RenderPool`: a render pool for blocking code, and futures of its images."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any, Literal, Unpack, overload

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.rendering.render_pool import DrawOptions, States
from aioenv.rendering.render_pool import RenderPool as AsyncRenderPool
from aioenv.sync.blocking import BlockingResource, BlockingTrace, like_method, signed

__all__ = ["RenderPool"]


class RenderPool(BlockingResource):
    """`aioenv.RenderPool` for blocking code: it runs on a loop thread of its own::

        with aioenv.sync.RenderPool(model, workers_per_device=2) as pool:
            images = pool.render(states, width=84, height=84)

    The constructor starts the workers. A pool that the program drops is closed when it is collected, or at the end of
    the program.

    Arguments, attributes and errors are those of `aioenv.RenderPool`.

    Attributes:
        closed: whether `close` has been called.
    """

    @like_method(AsyncRenderPool.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pool = pool = AsyncRenderPool(*args, **kwargs)
        self.model = pool.model
        self.state_spec: int = pool.state_spec
        self.state_size: int = pool.state_size
        self.num_workers: int = pool.num_workers
        self.devices: tuple[int, ...] | None = pool.devices
        self._start_on_thread(pool)

    @property
    def backend(self) -> str:
        """The OpenGL backend (see `aioenv.RenderPool.backend`)."""
        return self._pool.backend

    @property
    def renderer(self) -> str:
        """OpenGL's name of the renderer (see `aioenv.RenderPool.renderer`)."""
        return self._pool.renderer

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The pids of the workers (see `aioenv.RenderPool.pids`)."""
        return self._pool.pids

    def get_state(self, data: mujoco.MjData, out: npt.NDArray[np.float64] | None = None) -> npt.NDArray[np.float64]:
        """Return a row of `states`, from which `data` can be drawn (see `aioenv.RenderPool.get_state`)."""
        return self._pool.get_state(data, out)

    @overload
    def render(
        self,
        states: States | None = None,
        *,
        depth: Literal[False] = False,
        segmentation: Literal[False] = False,
        **how: Unpack[DrawOptions],
    ) -> npt.NDArray[np.uint8]: ...
    @overload
    def render(
        self,
        states: States | None = None,
        *,
        depth: bool = False,
        segmentation: bool = False,
        **how: Unpack[DrawOptions],
    ) -> Any: ...
    @signed(AsyncRenderPool.render)
    def render(self, states: Any = None, **how: Any) -> Any:
        """Draw states, and wait for the images: see `aioenv.RenderPool.render`.

        If the wait is interrupted (Ctrl-C), images that no worker has begun are not drawn.
        """
        return self._portal.call(self._pool.render, states, **how)

    @overload
    def submit(
        self,
        states: States | None = None,
        *,
        depth: Literal[False] = False,
        segmentation: Literal[False] = False,
        **how: Unpack[DrawOptions],
    ) -> Future[npt.NDArray[np.uint8]]: ...
    @overload
    def submit(
        self,
        states: States | None = None,
        *,
        depth: bool = False,
        segmentation: bool = False,
        **how: Unpack[DrawOptions],
    ) -> Future[Any]: ...
    @signed(AsyncRenderPool.submit)
    def submit(self, states: Any = None, **how: Any) -> Future[Any]:
        """Start to draw states, and return a future of the images that `render` returns.

        Its `result(timeout)` waits; cancelling it drops images that no worker has begun.

        Raises:
            ValueError: if an argument is wrong; nothing is sent then. The future raises later errors.
        """
        outcome: Future[Any] = Future()
        self._portal.run(_submit, self._pool, states, how, outcome)
        return outcome

    def trace(self, path: str | os.PathLike[str]) -> BlockingTrace:
        """Collect a timeline until the end of a `with` block over it (see `aioenv.RenderPool.trace`)."""
        return BlockingTrace(self._portal, self._pool.trace, path)

    def __repr__(self) -> str:
        return f"<aioenv.sync.RenderPool num_workers={self.num_workers} {'closed' if self.closed else 'running'}>"

    def close(self) -> None:
        """End the workers and the loop thread. Idempotent."""
        if not self.closed:
            self._end()
            self.closed = True  # only now: a caller that was interrupted or refused may close it again


def _submit(pool: AsyncRenderPool, states: Any, how: dict[str, Any], outcome: Future[Any]) -> None:
    """Submit on the loop, and link the two futures, so that they end together."""
    inner = pool.submit(states, **how)
    loop = inner.get_loop()

    def on_done(inner: Any) -> None:
        error = None if inner.cancelled() else inner.exception()
        if inner.cancelled():
            outcome.cancel()
        if not outcome.set_running_or_notify_cancel():  # it also tells waits for several futures of a cancelled one
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(inner.result())

    def on_outcome(outcome: Future[Any]) -> None:
        if outcome.cancelled() and not loop.is_closed():
            loop.call_soon_threadsafe(inner.cancel)

    inner.add_done_callback(on_done)
    outcome.add_done_callback(on_outcome)
