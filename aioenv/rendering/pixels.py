"""Images as observations: `PixelObservation` draws them in the env's own worker, `PixelStates` leaves that to others.

`PixelObservation` goes around each env when its factory is called in the worker. So all features of observations
(terminal ones, masked resets, rollouts, shared memory) work for images too. All envs of a worker with the same model
draw in one OpenGL context, which is made with the first env, after the fork. `with_pixels` wraps factories.

`PixelStates` goes around a vector env, in this process or in a worker, and draws nothing. States stand in its
observations until render workers draw them.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Env, ObservationWrapper, Space, Wrapper, spaces
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers import DelayObservation, FrameStackObservation, GrayscaleObservation, ResizeObservation

from aioenv.rendering.config import RenderConfig, check_pixels, is_sized, refused_by_envs
from aioenv.rendering.images import ImageArrays, side_by_side
from aioenv.spaces.layout import batch_space
from aioenv.state.assets import LATE
from aioenv.state.render_source import EnvRenderable, MujocoSource, find_physics, find_source, has_source
from aioenv.worker import worker_context
from aioenv.worker.making import explain_no_env, make_env, make_vector_env
from aioenv.worker.vector_access import reset_result, step_result, steps_some

if TYPE_CHECKING:
    from aioenv.rendering.renderers import SourceRenderer

__all__ = [
    "PixelObservation",
    "PixelStates",
    "PixelsRefused",
    "add_image",
    "add_image_space",
    "replace_states",
    "with_pixel_states",
    "with_pixels",
]

AnyVectorEnv = VectorEnv[Any, Any, Any]

if TYPE_CHECKING:
    AnyVectorWrapper: TypeAlias = VectorWrapper[Any, Any, Any, Any, Any]
else:
    AnyVectorWrapper = VectorWrapper  # which is generic from Gymnasium 1.4 on


# Wrappers that treat images as other observations. (Subclasses may do something else.)
_IMAGE_WRAPPERS = (DelayObservation, FrameStackObservation, GrayscaleObservation, ResizeObservation)


class PixelsRefused(ValueError):
    """An env can't be drawn as asked; the parent raises a plain ValueError for it."""


class PixelObservation(Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """An env whose observations are its images, alone or beside its own, as with Gymnasium's `AddRenderObservation`.

    A MuJoCo env is drawn from its state with fresh kinematics, and with the edits of its model; any other env by its
    own `render`. Where render workers draw (`config.workers`), the state takes the place of the image until the parent
    has it drawn.

    Args:
        env: the env.
        config: what to draw.
        own_shape: of the images of an env that draws itself; None to reset it once and draw it.

    Raises:
        PixelsRefused: if the env has no such camera, no render mode, another size than was asked for, or a key of the
            image's name.
        RenderError: if no OpenGL context can be made.
    """

    def __init__(self, env: Env[Any, Any], config: RenderConfig, own_shape: tuple[int, ...] | None = None) -> None:
        RecordConstructorArgs.__init__(self, config=config, own_shape=own_shape, _disable_deepcopy=True)
        Wrapper.__init__(self, env)
        self._config = config
        self._base: Any = env.unwrapped
        self._renderer: _SharedRenderer | None = None
        source = find_source(env, by_camera=config.by_camera)
        self._state_size = 0
        self._renderable: EnvRenderable | None = None
        if source is not None:
            self._renderable = EnvRenderable(env, source, by_camera=config.by_camera, looks=config.edits)
        shape: tuple[int, ...] = (*config.shape, 3)
        if source is None:
            shape = own_shape if own_shape is not None else _shape_of_own_images(env, config)
        elif config.workers is None:
            self._renderer = _SharedRenderer.acquire(source, config)
        else:
            self._state_size = source.state_size
        space: Any = spaces.Box(0, 255, shape, np.uint8)
        if self._state_size:
            space = spaces.Box(-np.inf, np.inf, (self._state_size,), np.float64)
        self._merges = isinstance(env.observation_space, spaces.Dict)
        self._shape = shape
        try:
            self.observation_space = add_image_space(env.observation_space, space, config)
        except PixelsRefused:
            self._release_renderer()
            raise

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode, and draw its first state."""
        renderable = self._renderable
        if renderable is not None:
            renderable.note_episode_end()
        obs, info = self.env.reset(seed=seed, options=options)
        if renderable is not None:
            renderable.expect_edit()
        return add_image(obs, self._draw(), self._config, merges=self._merges), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and draw the state after it."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        obs = add_image(obs, self._draw(), self._config, merges=self._merges)
        return obs, reward, terminated, truncated, info

    def render(self) -> Any:
        """Return the image of the latest observation, several cameras side by side."""
        renderable = self._renderable
        if renderable is None:
            return self.env.render()
        if self._state_size:  # render workers draw observations; this image is drawn here
            if self._renderer is None or not self._renderer.draws(renderable.source):
                self._change_renderer(renderable.source)
            image = self._draw_model()
        else:
            image = self._draw()
        return side_by_side(image) if self._config.several else image

    @property
    def drawn_by(self) -> str:
        """The name of the OpenGL implementation that draws in this process; empty if none does."""
        return "" if self._renderer is None else self._renderer.drawn_by

    def _draw(self) -> npt.NDArray[Any]:
        renderable = self._renderable
        if renderable is None:
            # a copy: some envs give the same array each time
            return np.array(self.env.render())
        if self._state_size:
            state = np.empty(self._state_size)
            renderable.read(state)
            return state
        if renderable.refresh() or self._renderer is None:  # (None after a model that could not be drawn)
            self._change_renderer(renderable.source)
            if renderable.late:
                renderable.clear_late()
                logging.getLogger(None if worker_context.owns_process() else "aioenv.workers").warning(LATE)
        return self._draw_model()

    def _draw_model(self) -> npt.NDArray[np.uint8]:
        assert self._renderer is not None
        return self._renderer.draw(self._base.model, self._base.data, self._shape)

    def _change_renderer(self, source: MujocoSource) -> None:
        before, self._renderer = self._renderer, None
        try:
            self._renderer = _SharedRenderer.acquire(source, self._config)
        finally:
            if before is not None:  # last: the next one may draw in the same OpenGL context
                before.release()

    def _release_renderer(self) -> None:
        renderer, self._renderer = self._renderer, None
        if renderer is not None:
            renderer.release()

    def close(self) -> None:
        """Close the env; the OpenGL context is freed with the last env that draws in it."""
        self._release_renderer()
        super().close()


class _ThreadRenderers(threading.local):
    """The renderers of one thread, which alone may draw with them: a worker may be a thread of its parent."""

    def __init__(self) -> None:
        self.all: list[_SharedRenderer] = []


_renderers = _ThreadRenderers()


class _SharedRenderer:
    """A renderer, and how many envs of this worker draw with it."""

    def __init__(self, source: MujocoSource, config: RenderConfig) -> None:
        from aioenv.rendering.renderers import SourceRenderer  # imports MuJoCo

        self._source = source
        self._config = config
        self._users = 0
        try:
            self._renderer: SourceRenderer = SourceRenderer(source, config, _base_of(source, config))
        except ValueError as exc:
            raise PixelsRefused(str(exc)) from None
        self.drawn_by = self._renderer.drawn_by

    @classmethod
    def acquire(cls, source: MujocoSource, config: RenderConfig) -> _SharedRenderer:
        """Return a renderer of this model and view: that of another env, or a new one."""
        for known in _renderers.all:
            if known._source == source and known._config == config:
                break
        else:
            known = cls(source, config)
            _renderers.all.append(known)
        known._users += 1
        return known

    def draws(self, source: MujocoSource) -> bool:
        """Return whether it draws this model and view."""
        return self._source == source

    def release(self) -> None:
        """End the use by one env; the last one frees the OpenGL context."""
        self._users -= 1
        if not self._users:
            _renderers.all.remove(self)
            self._renderer.close()

    def draw(self, model: Any, data: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Draw a new image of an env's state."""
        image: npt.NDArray[np.uint8] = np.empty(shape, np.uint8)
        views = image if image.ndim == 4 else image[None]
        self._renderer.draw_env(model, data, ImageArrays(views, None, None))
        return image


def _base_of(source: MujocoSource, config: RenderConfig) -> SourceRenderer | None:
    """Return a renderer of the same model with some of the same patches; None if there is none."""
    names = {name for name, _ in source.patches}
    for known in _renderers.all if names else ():
        theirs = {name for name, _ in known._source.patches}
        if known._config == config and theirs <= names and known._source.model == source.model:
            return known._renderer
    return None


def _shape_of_own_images(env: Env[Any, Any], config: RenderConfig) -> tuple[int, ...]:
    """Reset and draw an env that draws itself; return the shape of its image.

    Raises:
        PixelsRefused: if that is not an image, or not as it was asked for.
    """
    if wants := refused_by_envs(config):
        raise PixelsRefused(
            "pixels: this env is no MuJoCo env, or it or a wrapper has a render of its own, so it draws "
            f"itself, as it sees fit: not with {wants}"
        )
    if env.render_mode in (None, "human"):
        raise PixelsRefused(
            "pixels: this env is no MuJoCo env, or has a render of its own, so it draws itself, which takes an env "
            f'made with render_mode="rgb_array"; got render_mode={env.render_mode!r}. (Of a MuJoCo env cameras of the '
            "model that are named, RenderConfig(camera=…), are drawn in any case, unless a wrapper has a "
            "render of its own)"
        )
    env.reset(seed=0)
    image = env.render()
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
        got = f"an array of {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
        raise PixelsRefused(f"pixels: expected env.render() to return an array of uint8, got {got}")
    if is_sized(config) and image.shape[:2] != config.shape:
        height, width = image.shape[:2]
        raise PixelsRefused(
            f"pixels: this env draws itself, {width} x {height} pixels, and RenderConfig asked for "
            f"width={config.width}, height={config.height}. Make the env draw in that size (make_vec(…, width=…, "
            "height=…), where it takes them), or leave the size out of RenderConfig: it is the env's then"
        )
    return image.shape


def _set_size(env: Env[Any, Any], config: RenderConfig) -> None:
    """Have Gymnasium's renderer of an env, or of an env that it holds, draw in the size that was asked for.

    A renderer that has drawn already keeps its size.
    """
    module = sys.modules.get("gymnasium.envs.mujoco.mujoco_rendering")
    if module is None or not is_sized(config):
        return
    seen = {id(env.unwrapped)}
    envs: list[Any] = [env.unwrapped]
    for one in envs:  # (the loop appends to it)
        for value in list(getattr(one, "__dict__", {}).values()):
            if isinstance(value, module.MujocoRenderer) and not value._viewers:
                value.width, value.height = int(config.width), int(config.height)
                buffer = value.model.vis.global_
                buffer.offwidth = max(buffer.offwidth, value.width)
                buffer.offheight = max(buffer.offheight, value.height)
            elif isinstance(value, Env) and id(value.unwrapped) not in seen:
                seen.add(id(value.unwrapped))
                envs.append(value.unwrapped)


def add_image_space(own: Space[Any], image: Space[Any], config: RenderConfig) -> Space[Any]:
    """Return the space of observations with an image, as Gymnasium's `AddRenderObservation` makes it.

    Args:
        own: of the env's own observations.
        image: of the image, or of the state in its place.
        config: how the two are combined.

    Raises:
        PixelsRefused: if the observations have a key of the image's name.
    """
    key = config.render_key
    if config.render_only:
        return image
    if not isinstance(own, spaces.Dict):
        return spaces.Dict({config.obs_key: own, key: image})
    if key in own.spaces:
        raise PixelsRefused(f"pixels: render_key={key!r} is a key of the observation space already: {own}")
    return _dict_like(own, {key: image, **own.spaces})


def add_image(own: Any, image: Any, config: RenderConfig, *, merges: bool) -> Any:
    """Return an observation of that space, or a batch of them.

    Args:
        own: the env's own.
        image: the image, or the state in its place.
        config: how the two are combined.
        merges: whether the env's own observations are Dicts.
    """
    if config.render_only:
        return image
    return {config.render_key: image, **own} if merges else {config.obs_key: own, config.render_key: image}


def replace_states(space: Space[Any], config: RenderConfig) -> tuple[str | None, Space[Any]]:
    """Return the space of observations in which images replace states.

    Args:
        space: of `add_image_space`, with states.
        config: the settings of the images.

    Returns:
        The key of the image in the Dict, or None if it is the whole observation; and the space.
    """
    image = spaces.Box(0, 255, (*config.shape, 3), np.uint8)
    if config.render_only:
        return None, image
    assert isinstance(space, spaces.Dict)
    key = config.render_key
    parts = {name: image if name == key else part for name, part in space.spaces.items()}
    return key, _dict_like(space, parts)


def _dict_like(space: spaces.Dict, parts: dict[str, Space[Any]]) -> spaces.Dict:
    """Make a Dict of parts that sorts keys as another one does; before Gymnasium 1.4 they are always sorted."""
    if hasattr(space, "sort_keys"):
        return spaces.Dict(parts, sort_keys=space.sort_keys)
    return spaces.Dict(parts)


def with_pixels(factories: Sequence[Callable[[], Any]], config: RenderConfig) -> list[Callable[[], Any]]:
    """Wrap factories, so that the observations of their envs are images."""
    check_pixels(config)
    known = {id(factory): _PixelFactory(factory, config) for factory in factories}
    return [known[id(factory)] for factory in factories]


class _PixelFactory:
    """A factory of the same envs, with images as observations."""

    def __init__(self, factory: Callable[[], Any], config: RenderConfig) -> None:
        self._factory, self._wrappers = _split(factory) if config.render_only else (factory, ())
        self._config = config
        self._own_shape: tuple[int, ...] | None = None  # of images of envs that draw themselves

    def __call__(self) -> Env[Any, Any]:
        made: Env[Any, Any] = self._factory()
        env = made
        if explain_no_env(env):
            return env  # the caller raises an error that names its type
        try:
            wrappers = [*_image_wrappers(env), *self._wrappers] if self._config.render_only else []
            if wrappers and self._config.workers is not None:
                raise PixelsRefused(
                    f"pixels: {', '.join(map(_name, wrappers))} takes images that workers draw themselves: "
                    "RenderConfig(workers=None). Render workers draw the observation as it is"
                )
            if not has_source(env, by_camera=self._config.by_camera):
                made = env = self._undrawn(env)
            made = PixelObservation(env, self._config, self._own_shape)
            _warn_of_replaced(env, self._config)
            return _rewrap(made, wrappers)
        except BaseException:
            made.close()
            raise

    def _undrawn(self, env: Env[Any, Any]) -> Env[Any, Any]:
        """Find out, once, the shapes of images of envs that draw themselves; return an env that was not reset or drawn.

        Drawing may change an env permanently (where its camera looks, say), and takes a reset. So one env is drawn and
        closed, and another one is returned.
        """
        _set_size(env, self._config)
        if self._own_shape is not None:
            return env
        self._own_shape = _shape_of_own_images(env, self._config)
        try:
            another: Env[Any, Any] = self._factory()
        except Exception:  # some can't exist twice at a time: they have a port, or a device
            env.close()
            another = self._factory()
        else:
            if another.unwrapped is not env.unwrapped:  # the factory may return the same env each time
                env.close()
        _set_size(another, self._config)
        return another


# ------------------------------------------------------------ the wrappers around an env


def _split(factory: Callable[[], Any]) -> tuple[Callable[[], Any], Sequence[Callable[[Any], Any]]]:
    """Return a factory without its wrappers of images, and these: most refuse the observations of a state."""
    if not isinstance(factory, partial) or factory.func is not make_env:
        return factory, ()
    env, wrappers, *rest = factory.args
    images = [wrapper for wrapper in wrappers if getattr(wrapper, "func", wrapper) in _IMAGE_WRAPPERS]
    others = tuple(wrapper for wrapper in wrappers if wrapper not in images)
    return partial(make_env, env, others, *rest), images


def _image_wrappers(env: Env[Any, Any]) -> list[Callable[[Any], Any]]:
    """Return the wrappers around an env that apply to its images, as functions, the innermost first."""
    layers = [layer for layer in reversed(_layers(env)) if type(layer) in _IMAGE_WRAPPERS]
    kinds: list[Callable[..., Any]] = [type(layer) for layer in layers]
    return [partial(kind, **layer._saved_kwargs) for kind, layer in zip(kinds, layers, strict=True)]


def _rewrap(pixels: Any, wrappers: Sequence[Callable[[Any], Any]]) -> Env[Any, Any]:
    """Put wrappers around a `PixelObservation`; they get its `drawn_by`.

    Raises:
        PixelsRefused: if a wrapper does not take images.
    """
    env: Any = pixels
    for wrapper in wrappers:
        try:
            env = wrapper(env)
            env.drawn_by = pixels.drawn_by
        except Exception as exc:
            name = _name(wrapper)
            raise PixelsRefused(f"pixels: {name} can't be put around the images: {type(exc).__name__}: {exc}") from exc
    return env  # type: ignore[no-any-return]


def _name(wrapper: Any) -> str:
    """Return the name of a wrapper's class, be it the class or a partial of it."""
    name: str = getattr(wrapper, "func", wrapper).__name__
    return name


def _warn_of_replaced(env: Env[Any, Any], config: RenderConfig) -> None:
    """Warn if wrappers changed the observations that images replace."""
    replaced = [layer for layer in _layers(env) if _changes_observations(layer)] if config.render_only else []
    if replaced:
        warnings.warn(
            f"pixels: images replace the observations, and with them what {_names(replaced)} made of them; "
            "RenderConfig(render_only=False) keeps both",
            stacklevel=2,
        )


def _changes_observations(layer: Any) -> bool:
    if type(layer) in _IMAGE_WRAPPERS:
        return False
    return isinstance(layer, ObservationWrapper) or layer.observation_space != layer.env.observation_space


def _layers(env: Any) -> list[Any]:
    """Return the wrappers around an env, the outermost first."""
    layers = []
    while isinstance(env, Wrapper):
        layers.append(env)
        env = env.env
    return layers


def _names(layers: list[Any]) -> str:
    return ", ".join(type(layer).__name__ for layer in layers)


class PixelStates(AnyVectorWrapper):
    """A vector env whose observations are the states that images are drawn from, alone or beside its own.

    Args:
        env: a vector env with a MuJoCo `model` and `physics_states` (see `PhysicsBatch`).
        config: the settings of the images.

    Raises:
        PixelsRefused: if it lacks these, or the states of terminal images, or has a key of the image's name.
        ValueError: see `PhysicsReader`.
    """

    def __init__(self, env: AnyVectorEnv, config: RenderConfig) -> None:
        super().__init__(env)
        physics = find_physics(env)
        if physics is None:
            raise PixelsRefused(
                "pixels: this vector env has no model and physics_states, from which images could be drawn; use "
                'backend="workers", whose envs may draw themselves'
            )
        if env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP and not physics.has_finals:
            raise PixelsRefused(
                f"pixels: {type(env.unwrapped).__name__} has no final_physics_states, from which terminal images could "
                "be drawn under SAME_STEP; use another autoreset mode"
            )
        self._physics = physics
        self._config = config
        self._merges = isinstance(env.single_observation_space, spaces.Dict)
        state = spaces.Box(-np.inf, np.inf, (physics.source.state_size,), np.float64)
        self.single_observation_space = add_image_space(env.single_observation_space, state, config)
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset slots."""
        obs, info = reset_result(self.env.reset(seed=seed, options=options))
        return self._observe(obs), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every slot."""
        return self._shown(*step_result(self.env.step(actions)))

    @property
    def step_some(self) -> Callable[..., Any] | None:
        """The method that steps some of the slots (see `steps_some`); None if the env can't."""
        return self._step_some if steps_some(self.env) else None

    def _step_some(self, actions: Any, slots: npt.NDArray[np.int64]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return self._shown(*step_result(self.env.step_some(actions, slots)))  # type: ignore[attr-defined]

    def _shown(
        self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]
    ) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if "final_obs" in info:
            info = {**info, "final_obs": self._finals(info["final_obs"])}
        return self._observe(obs), reward, terminated, truncated, info

    def _observe(self, obs: Any) -> Any:
        states = np.empty((self.num_envs, self._physics.source.state_size))
        self._physics.read(None, states)
        return add_image(obs, states, self._config, merges=self._merges)

    def _finals(self, finals: Any) -> Any:
        slots = [slot for slot, obs in enumerate(finals) if obs is not None]
        each: Any = np.full(self.num_envs, None, object)
        for slot, state in zip(slots, self._physics.read_finals(slots), strict=True):
            each[slot] = add_image(finals[slot], state, self._config, merges=self._merges)
        return each


def with_pixel_states(make: Callable[..., AnyVectorEnv], config: RenderConfig) -> Callable[..., AnyVectorEnv]:
    """Wrap a function that makes a vector env, so that its observations are such states.

    Raises:
        ValueError: if such images can't be observations.
    """
    check_pixels(config)
    return partial(_make, make, config)


def _make(make: Callable[..., AnyVectorEnv], config: RenderConfig, *, num_envs: int) -> AnyVectorEnv:
    env = make_vector_env(make, num_envs)
    try:
        return PixelStates(env, config)
    except BaseException:
        env.close()
        raise
