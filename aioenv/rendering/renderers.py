"""Drawing states with MuJoCo: the renderers of render workers, and of envs that draw their own observations.

`ModelRenderer` has the one function that draws a state. `SourceRenderer` draws an env of Gymnasium with its own camera
and options, `StepRenderer` many of them for a `StepRenderPool`. `PoolRenderer` draws the states of a `RenderPool`, with
modders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.ipc.messages import load
from aioenv.rendering.cameras import ResolvedCamera, make_option, source_view
from aioenv.rendering.config import RenderConfig, RenderQuality, parse_quality
from aioenv.rendering.contexts import opengl_name
from aioenv.rendering.draw_requests import DrawRequest, DrawSettings, ModelChanges
from aioenv.rendering.images import ImageArrays
from aioenv.rendering.offscreen import TEXTURED, OffscreenRenderer, acquire_offscreen, release_offscreen
from aioenv.state.assets import Assets
from aioenv.state.model_edits import field_of, implied_edits, set_field, write_fields
from aioenv.state.render_source import MujocoSource, load_model, patch_model, read_state

__all__ = ["ModderStack", "PoolRenderer", "SourceRenderer", "StepRenderer"]


class ModelRenderer:
    """Draws states of one model, from one camera or several, in an OpenGL context that is current.

    Args:
        model: the model.
        spec: which parts of the state states consist of, of `mujoco.mjtState`.
    """

    _offscreen: OffscreenRenderer

    def __init__(self, model: mujoco.MjModel, spec: int) -> None:
        self._model = model
        self._data = mujoco.MjData(model)
        self._spec = spec
        self._cameras: list[ResolvedCamera] = []
        self._option = mujoco.MjvOption()
        self._size = (0, 0)  # width and height of an image

    def _draw(self, model: mujoco.MjModel, state: npt.NDArray[np.float64], images: ImageArrays) -> None:
        """Draw one state.

        Args:
            model: the model, or one of an env that differs from it in fields only.
            state: without the source's fields.
            images: of shape `(cameras, height, width)`.
        """
        data = self._data
        mujoco.mj_setState(model, data, state, self._spec)
        try:
            # all derived quantities, tendons, flexes and lights included; a tenth of the cost of the smallest image
            mujoco.mj_forward(model, data)
        except mujoco.FatalError:
            self._data = mujoco.MjData(self._model)  # else objects on its stack would stay there until it is full
            raise
        offscreen = self._offscreen
        rgb, depth, segmentation = images
        for number, camera in enumerate(self._cameras):
            offscreen.update_scene(data, camera.camera, self._option, *self._size)
            offscreen.draw(rgb[number])
            if depth is not None or segmentation is not None:
                offscreen.draw_depth(
                    None if depth is None else depth[number], None if segmentation is None else segmentation[number]
                )


class SourceRenderer(ModelRenderer):
    """Draws states of an env of Gymnasium, in an OpenGL context that others with the same frame share.

    Args:
        source: the model and view.
        config: what to draw.
        base: draws the model that the source patches, maybe with some of the same patches; None if the source has the
            model itself.

    Attributes:
        drawn_by: the name of the OpenGL implementation.

    Raises:
        ValueError: if the model has no such camera; the message lists those that it has.
        RenderError: if no OpenGL context can be made.
    """

    def __init__(self, source: MujocoSource, config: RenderConfig, base: SourceRenderer | None = None) -> None:
        model: mujoco.MjModel = load_model(source.model) if base is None else copy(base._model)
        patch_model(model, source.patches)
        super().__init__(model, source.state_spec)
        self._size = (config.width, config.height)
        kinds = {name.partition("_")[0] for name, _ in source.patches}
        self._assets: Assets = Assets(model, None if base is None else base._assets, kinds)
        quality = parse_quality(config.quality)
        quality.prepare_model(model)
        self._cameras = [ResolvedCamera(source_view(model, source.view, camera)) for camera in config.cameras]
        for flag, value in source.visual_options:
            self._option.flags[flag] = value
        self._fields = source.fields
        self._first = int(source.numbered)
        self._own = np.empty(mujoco.mj_stateSize(model, source.state_spec))
        self._more = source.state_size - self._first - len(self._own)
        self._written = np.empty(0)  # the values of the fields that were written last
        self._offscreen = acquire_offscreen(model, self._assets, quality, source.max_geom)
        self._offscreen.make_current()
        self.drawn_by = opengl_name()

    @property
    def offscreen(self) -> OffscreenRenderer:
        """The offscreen renderer that it draws with, maybe with others; `draw` requires its context to be current."""
        return self._offscreen

    def draw(self, state: npt.NDArray[np.float64], edits: dict[str, Any], images: ImageArrays) -> None:
        """Draw one state, in the context that is current.

        Args:
            state: with the source's fields.
            edits: other fields of the model by name: always the same ones from the first call on.
            images: of shape `(cameras, height, width)`.
        """
        state = state[self._first :]
        size = len(self._own)
        state = state[: size + self._more]
        # most envs edit nothing from one image to the next, and to write all fields takes 6 % of a small image's time
        if self._fields and not np.array_equal(state[size:], self._written):
            self._written = state[size:].copy()
            write_fields(self._model, self._fields, self._written)
        for name, value in edits.items():
            set_field(self._model, name, value)
        self._offscreen.use_model(self._model, self._assets)
        self._draw(self._model, state[:size], images)

    def draw_env(self, model: mujoco.MjModel, data: mujoco.MjData, images: ImageArrays) -> None:
        """Draw the state of an env, whose data are not written to.

        Args:
            model: the env's own; it differs from the source's in fields that have been edited since, which show.
            data: its state.
            images: as for `draw`.
        """
        read_state(model, data, self._own, self._spec)
        self._offscreen.make_current()  # the env may draw, too
        self._offscreen.use_model(model, self._assets)
        self._draw(model, self._own, images)

    def close(self) -> None:
        """Free the OpenGL context, unless others draw in it."""
        release_offscreen(self._offscreen)


class StepRenderer:
    """Draws states of several models, and of models that come later.

    Args:
        sources: the models and views.
        config: what to draw.

    Raises:
        ValueError: if a model does not have the camera that `config` asks for.
    """

    def __init__(self, sources: Sequence[MujocoSource], config: RenderConfig) -> None:
        self.state_size = max(source.state_size for source in sources)
        self._sizes = [source.state_size for source in sources]
        self._config = config
        self._renderers: list[SourceRenderer] = []
        self._later: dict[bytes, SourceRenderer | Exception] = {}  # by key
        self._current: Any = None
        try:
            for source in sources:
                self._renderers.append(SourceRenderer(source, config))
        except BaseException:
            self.close()
            raise

    def describe(self) -> str:
        """Return the name of the OpenGL implementation, if it is known."""
        return opengl_name()

    def draw_request(
        self,
        states: npt.NDArray[np.float64],
        request: DrawRequest,
        settings: DrawSettings,
        images: ImageArrays,
        rows: Sequence[int],
    ) -> None:
        """Draw each state with the source that the request names, or the model that came for it."""
        sources, models = request.sources or [0] * len(states), request.models
        if models is not None and (models.new or models.dropped):
            self._change_models(models)
        for number, (state, row) in enumerate(zip(states, rows, strict=True)):
            renderer: SourceRenderer | Exception = self._renderers[sources[number]]
            if models is None or number not in models.keys:
                state = state[: self._sizes[sources[number]]]
            else:
                renderer = self._later[models.keys[number]]
            if models is not None and number in models.rows:
                state = np.frombuffer(bytearray(models.rows[number]), np.float64)  # (MuJoCo 3 writes to states)
            if isinstance(renderer, Exception):
                raise renderer
            if renderer.offscreen is not self._current:  # 3 % of a small image
                self._current = renderer.offscreen
                self._current.make_current()
            renderer.draw(state, {name: values[number] for name, values in request.edits.items()}, images.row(row))

    def _change_models(self, models: ModelChanges) -> None:
        gone = [self._later.pop(key) for key in models.dropped]
        for key, (first, data) in models.new.items():
            try:
                if not data:
                    raise ValueError(
                        "images: the model of this env was lost with a reply; it comes with its next reset"
                    )
                source: MujocoSource = load(data)
                base = None if source.model else self._renderers[first]
                self._later[key] = SourceRenderer(source, self._config, base)
            except Exception as exc:  # raised for each state that needs it: later requests don't repeat the model
                self._later[key] = exc
        for renderer in gone:  # last: a new renderer may use the same context
            if isinstance(renderer, SourceRenderer):
                renderer.close()
        self._current = None  # the context of the last one that was made or freed

    def close(self) -> None:
        """Free every OpenGL context."""
        later = [renderer for renderer in self._later.values() if isinstance(renderer, SourceRenderer)]
        renderers, self._renderers, self._later = [*self._renderers, *later], [], {}
        for renderer in renderers:
            renderer.close()


class PoolRenderer(ModelRenderer):
    """Draws states of a `RenderPool`'s model, with modders, and with edits that last for one state.

    Args:
        model: the bytes of an MJB file.
        state_spec: which parts of the state states consist of, of `mujoco.mjtState`.
        quality: the render quality.
        modders: makes the modders.
        seed: of the modders.
    """

    def __init__(
        self,
        model: bytes,
        state_spec: int,
        quality: RenderQuality,
        modders: Sequence[Callable[..., Any]],
        seed: int,
    ) -> None:
        super().__init__(load_model(model), state_spec)
        self.state_size = mujoco.mj_stateSize(self._model, state_spec)
        self._settings: DrawSettings | None = None  # those that the cameras and the option are of
        assets = Assets(self._model)
        self._offscreen = OffscreenRenderer(self._model, quality, assets=assets)
        try:
            self._modders = ModderStack(modders, self._offscreen, assets, seed)
        except BaseException:
            self._offscreen.close()
            raise

    def describe(self) -> str:
        """Return the name of the OpenGL implementation, if it is known."""
        return opengl_name()

    def draw_request(
        self,
        states: npt.NDArray[np.float64],
        request: DrawRequest,
        settings: DrawSettings,
        images: ImageArrays,
        rows: Sequence[int],
    ) -> None:
        """Draw each state with its look and its edits."""
        if settings is not self._settings:
            self._settings = settings
            self._cameras = [ResolvedCamera(view) for view in settings.views]
            self._option = make_option(settings.option)
            self._size = (settings.width, settings.height)
        for number, (state, row) in enumerate(zip(states, rows, strict=True)):
            if request.looks is not None:
                self._modders.apply(*request.looks[number])
            if not request.edits:
                self._draw(self._model, state, images.row(row))
                continue
            with self._edited({name: values[number] for name, values in request.edits.items()}):
                self._draw(self._model, state, images.row(row))

    @contextmanager
    def _edited(self, edits: dict[str, Any]) -> Iterator[None]:
        """Edit the model for one state, and restore it."""
        changes = dict(edits)
        for name in edits:
            for frame, values in implied_edits(self._model, name).items():
                # two fields may loosen the same frames: what either does (0 is mjSAMEFRAME_NONE) is loose
                changes[frame] = np.minimum(changes[frame], values) if frame in changes else values
        before = {name: np.array(field_of(self._model, name)) for name in changes}
        try:
            self._write(changes)
            yield
        finally:
            self._write(before)

    def _write(self, fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            set_field(self._model, name, value)
        if not fields.keys().isdisjoint(TEXTURED):
            self._offscreen.assign_textures()

    def close(self) -> None:
        """Free the OpenGL context."""
        self._offscreen.close()


class ModderStack:
    """Applies the looks that modders give a model, one at a time.

    A look is a function of the pool's seed, the slot and how often the slot was randomised. It depends neither on
    earlier images nor on the worker that draws.

    Args:
        modders: makes each modder, from the model and a function that it calls with each texture that it edits.
        offscreen: what draws the model.
        assets: of the model.
        seed: the pool's.
    """

    def __init__(
        self, modders: Sequence[Callable[..., Any]], offscreen: OffscreenRenderer, assets: Assets, seed: int
    ) -> None:
        self._seed = seed
        self._offscreen = offscreen
        self._assets = assets
        self._edited: set[int] = set()  # textures that are not uploaded yet
        self._modders = [modder(offscreen.model, renderer=self._edited.add) for modder in modders]
        for modder in self._modders:
            for method in ("reseed", "randomize", "restore"):
                if not callable(getattr(modder, method, None)):
                    raise TypeError(
                        f"modder: expected an aioenv.Modder, got {type(modder).__name__} without {method}()"
                    )
        self._applied: tuple[int, int] | None = (0, 0)  # slot and count; None if a modder has raised

    def apply(self, slot: int, count: int) -> None:
        """Give the model the look of a slot that was randomised `count` times; 0: its own look."""
        if not self._modders:
            return
        look = (slot, count) if count else (0, 0)
        if look != self._applied:
            self._applied = None
            for modder in reversed(self._modders):
                modder.restore()
            if count:
                self._randomize(slot, count)
            self._show_assets()
            self._applied = look
        while self._edited:
            self._offscreen.upload_texture(self._edited.pop())

    def _show_assets(self) -> None:
        """Show the height fields and meshes that the look has edited, and which textures materials have."""
        edited = {kind for modder in self._modders for kind in getattr(modder, "edited_kinds", set)()}
        kinds = edited & {"hfield", "mesh"}  # textures are uploaded by `apply`
        assets = Assets(self._offscreen.model, self._assets, kinds) if kinds else self._assets
        self._offscreen.use_model(self._offscreen.model, assets)

    def _randomize(self, slot: int, count: int) -> None:
        for number, modder in enumerate(self._modders):
            try:
                modder.reseed((self._seed, slot, count, number))
                modder.randomize()
            except Exception as exc:
                exc.add_note(
                    f"{type(modder).__name__} raised this for slot {slot}, randomised {count} times. It is asked again "
                    f"whenever that slot is drawn, until the slot gets another look, with "
                    f"render(slots=[{slot}], …, randomize=True)"
                )
                raise
