"""Tasks that are nobody else's, and waiting for them to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["own_task", "to_the_end", "together"]

T = TypeVar("T")


def own_task(coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """A task on the running loop that `asyncio.all_tasks()` does not tell of.

    Who cancels all tasks, as `asyncio.run` does when its main coroutine has returned, means those of the program: one
    that is cancelled so may still have to close a vector env, and waits for the end of workers, of which tasks like
    this know. What is left of it when its loop is closed ends with it, silently.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    asyncio._unregister_task(task)  # see "Extending" in asyncio's documentation
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task


def together(*coroutines: Coroutine[Any, Any, T]) -> asyncio.Future[list[T]]:
    """As `asyncio.gather`, of tasks of one's own."""
    return asyncio.gather(*map(own_task, coroutines))


async def to_the_end(task: asyncio.Future[Any]) -> None:
    """Wait for what takes little time, also if this is cancelled, however often; its error is not raised.

    Raises:
        CancelledError: after that, if this was cancelled.
    """
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
