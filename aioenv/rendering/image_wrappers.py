"""Observation wrappers around envs whose observations become images: applied to the images, or said to be replaced."""

from __future__ import annotations

import warnings
from typing import Any

from gymnasium import Env, ObservationWrapper, Wrapper
from gymnasium.wrappers import DelayObservation, FrameStackObservation, GrayscaleObservation, ResizeObservation

from aioenv.rendering.config import RenderConfig

__all__ = ["PixelsRefused", "of_images", "put_around", "warn_of_replaced"]

# A wrapper of these very classes does with images what it does with observations, given its own arguments.
_OF_IMAGES = (DelayObservation, FrameStackObservation, GrayscaleObservation, ResizeObservation)


class PixelsRefused(ValueError):
    """An env can't be drawn as asked; the parent raises a plain ValueError for it."""


def of_images(env: Env[Any, Any], config: RenderConfig) -> list[Any]:
    """The wrappers around an env that are applied to its images, the outermost first.

    Beside images (`render_only=False`) the env's own observations stay as they are, and images are as they are drawn.

    Raises:
        PixelsRefused: if there are any, and render workers draw: what they draw is an observation as it is.
    """
    found = [layer for layer in _layers(env) if type(layer) in _OF_IMAGES] if config.render_only else []
    if found and config.workers is not None:
        raise PixelsRefused(
            f"pixels: {_names(found)} takes images that workers draw themselves: RenderConfig(workers=None). Render "
            "workers draw the observation as it is"
        )
    return found


def put_around(pixels: Any, wrappers: list[Any]) -> Env[Any, Any]:
    """Put such wrappers around a `PixelObservation`; the outermost tells `drawn_by`, too.

    Raises:
        PixelsRefused: if one does not take images.
    """
    env = pixels
    for layer in reversed(wrappers):
        try:
            env = type(layer)(env, **layer._saved_kwargs)
            env.drawn_by = pixels.drawn_by
        except Exception as exc:
            name = type(layer).__name__
            raise PixelsRefused(f"pixels: {name} can't be put around the images: {type(exc).__name__}: {exc}") from exc
    return env  # type: ignore[no-any-return]


def warn_of_replaced(env: Env[Any, Any], config: RenderConfig) -> None:
    """Warn if wrappers change observations that images replace."""
    replaced = [layer for layer in _layers(env) if _changes_observations(layer)] if config.render_only else []
    if replaced:
        warnings.warn(
            f"pixels: images replace the observations, and with them what {_names(replaced)} made of them; "
            "RenderConfig(render_only=False) keeps both",
            stacklevel=2,
        )


def _changes_observations(layer: Any) -> bool:
    if type(layer) in _OF_IMAGES:
        return False
    return isinstance(layer, ObservationWrapper) or layer.observation_space != layer.env.observation_space


def _layers(env: Any) -> list[Any]:
    """The wrappers around an env, the outermost first."""
    layers = []
    while isinstance(env, Wrapper):
        layers.append(env)
        env = env.env
    return layers


def _names(layers: list[Any]) -> str:
    return ", ".join(type(layer).__name__ for layer in layers)
