"""Drawing many states, in the process of a render worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.ipc.messages import load
from aioenv.rendering import context_pool
from aioenv.rendering.cameras import ResolvedCamera, of_source
from aioenv.rendering.config import RenderConfig
from aioenv.rendering.contexts import opengl_name
from aioenv.rendering.draw_requests import Edits, ImageArrays, load_sources
from aioenv.rendering.drawing_service import DrawingService
from aioenv.rendering.offscreen import OffscreenRenderer
from aioenv.rendering.quality import parse_quality
from aioenv.state.assets import Assets
from aioenv.state.model_edits import set_field, write_fields
from aioenv.state.render_source import MujocoSource, load_model, patch_model, read_state
from aioenv.worker.service import Reply

__all__ = ["BatchRenderer", "RenderService", "SourceRenderer"]


class SourceRenderer:
    """Draws states of one model from one view or several, in an OpenGL context that others of its frame share.

    Args:
        source: the model and view.
        config: what to draw.
        base: draws what the source patches, or with some of the same patches; None: the source has the model itself.

    Attributes:
        drawn_by: the name of the OpenGL implementation.

    Raises:
        ValueError: if the model has no such camera; the message lists those that it has.
        RenderError: if there is no OpenGL context to be had.
    """

    def __init__(self, source: MujocoSource, config: RenderConfig, base: SourceRenderer | None = None) -> None:
        self._size = (config.width, config.height)
        self._model: mujoco.MjModel = load_model(source.model) if base is None else copy(base._model)
        patch_model(self._model, source.patches)
        self._data = mujoco.MjData(self._model)
        kinds = {name.partition("_")[0] for name, _ in source.patches}
        self._assets: Assets = Assets(self._model, None if base is None else base._assets, kinds)
        quality = parse_quality(config.quality)
        quality.prepare_model(self._model)
        self._eyes = [ResolvedCamera(of_source(self._model, source.view, camera)) for camera in config.cameras]
        self._option = mujoco.MjvOption()
        for flag, value in source.visual_options:
            self._option.flags[flag] = value
        self._spec, self._fields = source.state_spec, source.fields
        self._first = int(source.numbered)
        self._own = np.empty(mujoco.mj_stateSize(self._model, self._spec))
        self._more = source.state_size - self._first - len(self._own)
        self._worn = np.empty(0)  # what the fields were set to last
        self._canvas = context_pool.take(self._model, self._assets, quality, source.max_geom)
        self._canvas.make_current()
        self.drawn_by = opengl_name()

    @property
    def canvas(self) -> OffscreenRenderer:
        """What it draws in, maybe with others; `draw` takes it to be current."""
        return self._canvas

    def draw(self, state: npt.NDArray[np.float64], edits: dict[str, Any], out: ImageArrays) -> None:
        """Draw one state into `out`, of shape (cameras, height, width), in the context that is current.

        Args:
            state: with the source's fields.
            edits: other fields of the model by name, each time the same ones from the first on.
            out: what is drawn on.
        """
        state = state[self._first :]
        size = len(self._own)
        state = state[: size + self._more]
        # most envs edit nothing from one image to the next, and to write all fields takes 6 % of a small image's time
        if self._fields and not np.array_equal(state[size:], self._worn):
            self._worn = state[size:].copy()
            write_fields(self._model, self._fields, self._worn)
        mujoco.mj_setState(self._model, self._data, state[:size], self._spec)
        for name, value in edits.items():
            set_field(self._model, name, value)
        self._draw(self._model, out)

    def draw_env(self, model: mujoco.MjModel, data: mujoco.MjData, out: ImageArrays) -> None:
        """Draw the state of an env, whose data are left as they are.

        Args:
            model: the env's own, equal to the source's but for fields that have been edited since, which show.
            data: its state.
            out: as for `draw`.
        """
        read_state(model, data, self._own, self._spec)
        mujoco.mj_setState(model, self._data, self._own, self._spec)
        self._canvas.make_current()  # the env may draw, too
        self._draw(model, out)

    def _draw(self, model: mujoco.MjModel, out: ImageArrays) -> None:
        data, canvas = self._data, self._canvas
        try:
            # all derived quantities, tendons, flexes and lights included; a tenth of the cost of the smallest image
            mujoco.mj_forward(model, data)
        except mujoco.FatalError:
            self._data = mujoco.MjData(self._model)  # what it had on its stack would stay there, until that is full
            raise
        canvas.show(model, self._assets)
        rgb, depth, segmentation = out
        for number, eye in enumerate(self._eyes):
            canvas.look(data, eye.camera, self._option, *self._size)
            canvas.draw(rgb[number])
            if depth is not None or segmentation is not None:
                canvas.measure(
                    None if depth is None else depth[number], None if segmentation is None else segmentation[number]
                )

    def close(self) -> None:
        """Free the OpenGL context, unless others draw in it."""
        context_pool.give_back(self._canvas)


class BatchRenderer:
    """Draws states of several models, and of others that come later.

    Args:
        sources: the models and views.
        config: what to draw.

    Raises:
        ValueError: if a model does not have the camera that `config` asks for.
    """

    def __init__(self, sources: Sequence[MujocoSource], config: RenderConfig) -> None:
        self._config = config
        self._renderers: list[SourceRenderer] = []
        self._later: dict[bytes, SourceRenderer | Exception] = {}
        self._current: Any = None
        try:
            for source in sources:
                self._renderers.append(SourceRenderer(source, config))
        except BaseException:
            self.close()
            raise

    def learn(self, new: Mapping[bytes, tuple[int, bytes]], dropped: Sequence[bytes]) -> None:
        """Models come, and others are needed no longer.

        Args:
            new: by their keys, sources, pickled, and before each the number of the one that it may patch.
            dropped: keys.
        """
        gone = [self._later.pop(key) for key in dropped]
        for key, (first, data) in new.items():
            try:
                if not data:
                    raise ValueError(
                        "images: the model of this env was lost with a reply; it comes with its next reset"
                    )
                source: MujocoSource = load(data)
                base = None if source.model else self._renderers[first]
                self._later[key] = SourceRenderer(source, self._config, base)
            except Exception as exc:  # told of each state that needs it: the next ones come without the model
                self._later[key] = exc
        for renderer in gone:  # at the end: a context that they leave may be that of a new one
            if isinstance(renderer, SourceRenderer):
                renderer.close()
        self._current = None  # whichever was made or freed last

    def render(
        self,
        which: Sequence[int | bytes],
        states: Sequence[npt.NDArray[np.float64]],
        edits: Edits,
        images: ImageArrays,
        rows: Sequence[int],
    ) -> None:
        """Draw k states.

        Args:
            which: for each state, the number of its source, or the key of one that was learned.
            states: float64 of shape `(state_size,)` each.
            edits: fields of the models.
            images: of shape `(n, cameras, height, width)`.
            rows: for each state, which of them is drawn on.
        """
        for number, (index, state, row) in enumerate(zip(which, states, rows, strict=True)):
            renderer = self._later[index] if isinstance(index, bytes) else self._renderers[index]
            if isinstance(renderer, Exception):
                raise renderer
            if renderer.canvas is not self._current:  # 3 % of a small image
                self._current = renderer.canvas
                self._current.make_current()
            own = {name: values[number] for name, values in edits.items()}
            renderer.draw(state, own, images.row(row))

    def close(self) -> None:
        """Free every OpenGL context."""
        later = [renderer for renderer in self._later.values() if isinstance(renderer, SourceRenderer)]
        renderers, self._renderers, self._later = [*self._renderers, *later], [], {}
        for renderer in renderers:
            renderer.close()


class RenderService(DrawingService):
    """A `BatchRenderer` as the service of a render worker."""

    def __init__(self, sources: Sequence[MujocoSource], config: RenderConfig) -> None:
        super().__init__(max(source.state_size for source in sources))
        self._config = config
        self._renderer = BatchRenderer(sources, config)
        self._sizes = [source.state_size for source in sources]

    def _render(self, states: npt.NDArray[np.float64], tail: Any) -> Reply:
        sources, where, edits, later = load_sources(tail)
        which: list[int | bytes] = list(sources or [0] * len(states))
        of_each = [state[: self._sizes[index]] for index, state in zip(which, states, strict=True)]  # type: ignore[index]
        if later is not None:
            if later.new or later.dropped:
                self._renderer.learn(later.new, later.dropped)
            for number, key in later.keys.items():
                which[number], of_each[number] = key, states[number]
            for number, row in later.rows.items():
                of_each[number] = np.frombuffer(bytearray(row), np.float64)  # MuJoCo 3 takes no state that is read-only
        config = self._config
        a_state = (len(config.cameras), config.height, config.width)
        kinds = {"depth": config.depth, "segmentation": config.segmentation}
        images, rows = self._easel.put_up(where, len(states), a_state, **kinds)
        self._renderer.render(which, of_each, edits, images, rows)
        return self._easel.reply(where, images)

    def close(self) -> None:
        """Free the OpenGL contexts."""
        self._renderer.close()
