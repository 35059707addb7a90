"""The OpenGL contexts of this thread: models that differ only in what can be uploaded share one."""

from __future__ import annotations

import threading
from typing import Any

import mujoco

from aioenv.rendering.offscreen import OffscreenRenderer
from aioenv.rendering.quality import RenderQuality
from aioenv.state.assets import Assets

__all__ = ["give_back", "take"]

# Contexts that nobody draws in stay for a while: an env that makes itself one model after another may come back to it.
_IDLE = 2


class _Shelf(threading.local):
    """Those of one thread, which alone may draw with them: a worker may be one of its parent's."""

    def __init__(self) -> None:
        self.users: dict[OffscreenRenderer, int] = {}
        self.keys: dict[Any, OffscreenRenderer] = {}
        self.idle: list[Any] = []  # keys, the longest idle first


_shelf = _Shelf()


def take(model: mujoco.MjModel, assets: Assets, quality: RenderQuality, max_geom: int) -> OffscreenRenderer:
    """A canvas for a model: that of another one, or a new one, for which `quality` writes into the model.

    Raises:
        RenderError: if there is no OpenGL context to be had.
    """
    shelf = _shelf
    key = (assets.frame, quality, max_geom)
    canvas = shelf.keys.get(key)
    if canvas is None:
        canvas = OffscreenRenderer(model, quality, max_geom, assets)
        shelf.keys[key], shelf.users[canvas] = canvas, 0
    elif key in shelf.idle:
        shelf.idle.remove(key)
    shelf.users[canvas] += 1
    return canvas


def give_back(canvas: OffscreenRenderer) -> None:
    """One who draws in it less; with the last of all the contexts go that nobody draws in."""
    shelf = _shelf
    shelf.users[canvas] -= 1
    if not shelf.users[canvas]:
        shelf.idle.append(next(key for key, known in shelf.keys.items() if known is canvas))
    most = _IDLE if any(shelf.users.values()) else 0
    while len(shelf.idle) > most:
        gone = shelf.keys.pop(shelf.idle.pop(0))
        del shelf.users[gone]
        gone.close()
