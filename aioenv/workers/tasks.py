"""Tasks that are nobody else's, and waiting for them to the end."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

__all__ = ["hiding_tasks", "own_task", "to_the_end", "together"]

T = TypeVar("T")


def own_task(coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """A task on the running loop that `asyncio.all_tasks()` does not tell of.

    Who cancels all tasks, as `asyncio.run` does when its main coroutine has returned, means those of the program: one
    that is cancelled so may still have to close a vector env, and waits for the end of workers, of which tasks like
    this know. What is left of it when its loop is closed ends with it, silently.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    _hide(task)
    return task


def _hide(task: asyncio.Task[Any]) -> None:
    asyncio._unregister_task(task)  # see "Extending" in asyncio's documentation
    task._log_destroy_pending = False  # type: ignore[attr-defined]


async def hiding_tasks(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine of asyncio's that begins with making tasks: those are not told of either.

    A subprocess's pipes are connected by such a task. If that is cancelled before it has begun, nobody says so to who
    waits for it.
    """
    return await _step_and_hide(coroutine)


@types.coroutine
def _step_and_hide(coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    before = asyncio.all_tasks()
    try:
        waits_for = coroutine.send(None)
        for task in asyncio.all_tasks() - before:
            _hide(task)
        while True:
            try:
                sent = yield waits_for
            except BaseException as exc:
                waits_for = coroutine.throw(exc)
            else:
                waits_for = coroutine.send(sent)
    except StopIteration as end:
        result: T = end.value
        return result


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
