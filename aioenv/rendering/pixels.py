"""Images as observations, drawn in the env's own worker.

`PixelObservation` is a wrapper that goes around each env when its factory is called there, so that whatever is true of
observations (terminal ones, masked resets, rollouts, shared memory) is true of images too. All envs of a worker with
the same model draw in one OpenGL context, which is made when the first env is, long after the fork.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium import Env, Space, Wrapper, spaces
from gymnasium.utils import RecordConstructorArgs

from aioenv.host.physics.source import MujocoSource, find_source, read_state
from aioenv.rendering.config import RenderConfig
from aioenv.rendering.drawing import Images

if TYPE_CHECKING:
    from aioenv.rendering.batch_renderer import SourceRenderer

__all__ = ["PixelObservation", "PixelsRefused", "beside", "in_place", "space_beside", "with_pixels"]


class PixelsRefused(ValueError):
    """An env can't be drawn as asked; the parent raises a plain ValueError for it."""


class PixelObservation(Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """An env whose observations are images of it, alone or beside its own, as Gymnasium's `AddRenderObservation`.

    A MuJoCo env is drawn from its state with fresh kinematics, and with what was edited in its model since it was made;
    any other env by its own `render`. Where render workers draw (`config.workers`), the state stands in the place of
    the image, until the parent has it drawn.

    Args:
        env: the env; it is reset once, if it draws itself, to know its images.
        config: what to draw.

    Raises:
        PixelsRefused: if it has no such camera, no render mode, or the key of the image already.
        RenderError: if there is no OpenGL context to be had.
    """

    def __init__(self, env: Env[Any, Any], config: RenderConfig) -> None:
        RecordConstructorArgs.__init__(self, config=config, _disable_deepcopy=True)
        Wrapper.__init__(self, env)
        self._config = config
        self._base: Any = env.unwrapped
        self._model: Any = None  # that of the renderer, if this is a MuJoCo env
        self._renderer: _Shared | None = None
        source = find_source(env, by_camera=config.by_camera)
        self._state_size = 0
        self._state_parts: tuple[int, tuple[str, ...]] = (0, ())
        shape: tuple[int, ...] = (*config.shape, 3)
        if source is None:
            if wants := config.refused_by_envs:
                raise PixelsRefused(
                    "pixels: this env is no MuJoCo env, or it or a wrapper has a render of its own, so it draws "
                    f"itself, as it sees fit: not with {wants}"
                )
            shape = _shape_of_own_images(env)
        elif config.workers is None:
            self._take_renderer(source)
        else:
            self._state_size = source.state_size
            self._state_parts = (source.state_spec, source.fields)
        space: Any = spaces.Box(0, 255, shape, np.uint8)
        if self._state_size:
            space = spaces.Box(-np.inf, np.inf, (self._state_size,), np.float64)
        self._merges = isinstance(env.observation_space, spaces.Dict)
        self._shape = shape
        try:
            self.observation_space = space_beside(env.observation_space, space, config)
        except PixelsRefused:
            self._let_go()
            raise

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, and draw its first state."""
        obs, info = self.env.reset(seed=seed, options=options)
        return beside(obs, self._draw(), self._config, merges=self._merges), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and draw the state after it."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        obs = beside(obs, self._draw(), self._config, merges=self._merges)
        return obs, reward, terminated, truncated, info

    @property
    def drawn_by(self) -> str:
        """The name of the OpenGL implementation that draws here; empty if none does."""
        return "" if self._renderer is None else self._renderer.drawn_by

    def _draw(self) -> npt.NDArray[Any]:
        if self._state_size:
            state = np.empty(self._state_size)
            read_state(self._base.model, self._base.data, state, *self._state_parts)
            return state
        if self._model is None:
            # a copy: some envs give the same array each time
            return np.array(self.env.render())
        model = self._base.model
        if model is not self._model or self._renderer is None:  # the env has made itself another one
            self._let_go()  # (none is left of one that could not be drawn)
            source = find_source(self.env, by_camera=self._config.by_camera)
            assert source is not None
            self._take_renderer(source)
        assert self._renderer is not None
        return self._renderer.draw(model, self._base.data, self._shape)

    def _take_renderer(self, source: MujocoSource) -> None:
        self._renderer = _Shared.take(source, self._config)
        self._model = self._base.model

    def _let_go(self) -> None:
        renderer, self._renderer = self._renderer, None
        if renderer is not None:
            renderer.let_go()

    def close(self) -> None:
        """Close the env; the OpenGL context goes with the last env that draws in it."""
        self._let_go()
        super().close()


class _Known(threading.local):
    """Those of this thread, which alone may draw with them: a worker may be one of its parent's."""

    def __init__(self) -> None:
        self.all: list[_Shared] = []


_known = _Known()


class _Shared:
    """A renderer, and how many envs of this worker draw with it."""

    def __init__(self, source: MujocoSource, config: RenderConfig) -> None:
        from aioenv.rendering.batch_renderer import SourceRenderer  # imports MuJoCo

        self._source = source
        self._config = config
        self._users = 0
        try:
            self._renderer: SourceRenderer = SourceRenderer(source, config)
        except ValueError as exc:
            raise PixelsRefused(str(exc)) from None
        self.drawn_by = self._renderer.drawn_by

    @classmethod
    def take(cls, source: MujocoSource, config: RenderConfig) -> _Shared:
        """One for this model and view: that of another env, or a new one."""
        for known in _known.all:
            if known._source == source and known._config == config:
                break
        else:
            known = cls(source, config)
            _known.all.append(known)
        known._users += 1
        return known

    def let_go(self) -> None:
        """One env less draws with it; the last one frees the OpenGL context."""
        self._users -= 1
        if not self._users:
            _known.all.remove(self)
            self._renderer.close()

    def draw(self, model: Any, data: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """A new image of an env's state."""
        image: npt.NDArray[np.uint8] = np.empty(shape, np.uint8)
        views = image if image.ndim == 4 else image[None]
        self._renderer.draw_env(model, data, Images(views, None, None))
        return image


def _shape_of_own_images(env: Env[Any, Any]) -> tuple[int, ...]:
    """What an env that draws itself will draw.

    Raises:
        PixelsRefused: if that is no image.
    """
    if env.render_mode in (None, "human"):
        raise PixelsRefused(
            "pixels: this env is no MuJoCo env, or has a render of its own, so it draws itself, which takes an env "
            f'made with render_mode="rgb_array"; got render_mode={env.render_mode!r}. (Of a MuJoCo env cameras of the '
            "model that are named, RenderConfig(camera=…), are drawn in any case, unless a wrapper has a "
            "render of its own)"
        )
    env.reset()
    image = env.render()
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
        got = f"an array of {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
        raise PixelsRefused(f"pixels: expected env.render() to return an array of uint8, got {got}")
    return image.shape


def space_beside(own: Space[Any], image: Space[Any], config: RenderConfig) -> Space[Any]:
    """The space of observations with an image, as Gymnasium's `AddRenderObservation` makes it.

    Args:
        own: that of the env's own observations.
        image: that of the image, or of what stands in its place.
        config: says how they go together.

    Raises:
        PixelsRefused: if the key of the image is one of theirs already.
    """
    key = config.render_key
    if config.render_only:
        return image
    if not isinstance(own, spaces.Dict):
        return spaces.Dict({config.obs_key: own, key: image})
    if key in own.spaces:
        raise PixelsRefused(f"pixels: render_key={key!r} is a key of the observation space already: {own}")
    return _dict_like(own, {key: image, **own.spaces})


def beside(own: Any, image: Any, config: RenderConfig, *, merges: bool) -> Any:
    """An observation of that space, or a batch of them.

    Args:
        own: the env's.
        image: the image, or what stands in its place.
        config: says how they go together.
        merges: whether the env's own are Dicts.
    """
    if config.render_only:
        return image
    return {config.render_key: image, **own} if merges else {config.obs_key: own, config.render_key: image}


def in_place(space: Space[Any], config: RenderConfig) -> tuple[str | None, Space[Any]]:
    """Images in the place of what stands for them.

    Args:
        space: of `space_beside`.
        config: what is drawn.

    Returns:
        Where the images are: a key of the Dict, None if they are the whole observation. And the space with them.
    """
    image = spaces.Box(0, 255, (*config.shape, 3), np.uint8)
    if config.render_only:
        return None, image
    assert isinstance(space, spaces.Dict)
    key = config.render_key
    parts = {name: image if name == key else part for name, part in space.spaces.items()}
    return key, _dict_like(space, parts)


def _dict_like(space: spaces.Dict, parts: dict[str, Space[Any]]) -> spaces.Dict:
    """Make a space of parts, in an order as in another one; before Gymnasium 1.4 they are always sorted."""
    if hasattr(space, "sort_keys"):
        return spaces.Dict(parts, sort_keys=space.sort_keys)
    return spaces.Dict(parts)


def with_pixels(factories: Sequence[Callable[[], Any]], config: RenderConfig) -> list[Callable[[], Any]]:
    """Factories of the same envs, with images as observations."""
    config.check_pixels()
    known = {id(factory): partial(_make, factory, config) for factory in factories}
    return [known[id(factory)] for factory in factories]


def _make(factory: Callable[[], Env[Any, Any]], config: RenderConfig) -> Env[Any, Any]:
    env = factory()
    try:
        return PixelObservation(env, config)
    except BaseException:
        env.close()
        raise
