"""What runs in a worker of a `RenderPool`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.rendering.cameras import ResolvedCamera
from aioenv.rendering.draw_requests import DrawSettings, ImageArrays, dump_time, load_request
from aioenv.rendering.drawing_service import DrawingService
from aioenv.rendering.offscreen import TEXTURED, OffscreenRenderer
from aioenv.rendering.quality import RenderQuality
from aioenv.rendering.scene_option import make_option
from aioenv.state.model_edits import field_of, loosened, set_field
from aioenv.state.render_source import load_model
from aioenv.worker.service import Reply

__all__ = ["ModderStack", "PoolService"]


class ModderStack:
    """The looks that modders give a model, one at a time.

    A look is a function of the pool's seed, the slot and how often the slot was randomised: it depends neither on what
    was drawn before nor on which worker draws.

    Args:
        modders: makes each modder, from the model and what is to be told of edited textures.
        canvas: what is drawn with.
        seed: the pool's.
    """

    def __init__(self, modders: Sequence[Callable[..., Any]], canvas: OffscreenRenderer, seed: int) -> None:
        self._seed = seed
        self._canvas = canvas
        self._edited: set[int] = set()  # textures that OpenGL does not know of yet
        self._modders = [modder(canvas.model, renderer=self._edited.add) for modder in modders]
        for modder in self._modders:
            for method in ("reseed", "randomize", "restore"):
                if not callable(getattr(modder, method, None)):
                    raise TypeError(
                        f"modder: expected an aioenv.Modder, got {type(modder).__name__} without {method}()"
                    )
        self._worn: tuple[int, int] | None = (0, 0)  # slot and count; None: some, but which?

    def wear(self, slot: int, count: int) -> None:
        """Give the model the look of a slot that was randomised so often; 0: its own."""
        if not self._modders:
            return
        look = (slot, count) if count else (0, 0)
        if look != self._worn:
            self._worn = None
            for modder in reversed(self._modders):
                modder.restore()
            if count:
                self._dress(slot, count)
            self._canvas.assign_textures()
            self._worn = look
        while self._edited:
            self._canvas.upload_texture(self._edited.pop())

    def _dress(self, slot: int, count: int) -> None:
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


class PoolService(DrawingService):
    """Draws states of one model: the service of a `RenderPool`'s workers.

    Args:
        model: the bytes of an MJB file.
        state_spec: which parts of the state come, of `mujoco.mjtState`.
        quality: what is drawn.
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
        self._model = load_model(model)
        super().__init__(mujoco.mj_stateSize(self._model, state_spec))
        self._data = mujoco.MjData(self._model)
        self._spec = state_spec
        self._canvas = OffscreenRenderer(self._model, quality)
        try:
            self._wardrobe = ModderStack(modders, self._canvas, seed)
        except BaseException:
            self._canvas.close()
            raise

    def _render(self, states: npt.NDArray[np.float64], tail: Any) -> Reply:
        began = perf_counter()
        drawing, rest = load_request(tail)
        a_state = (len(drawing.views), drawing.height, drawing.width)
        kinds = {"depth": drawing.depth, "segmentation": drawing.segmentation}
        images, rows = self._easel.put_up(rest.where, len(states), a_state, **kinds)
        eyes = [ResolvedCamera(view) for view in drawing.views]
        option = make_option(drawing.option)
        for number, (state, row) in enumerate(zip(states, rows, strict=True)):
            if rest.looks is not None:
                self._wardrobe.wear(*rest.looks[number])
            if rest.edits is None:
                self._draw(state, drawing, option, eyes, images.row(row))
                continue
            with self._edited(rest.edits, number):
                self._draw(state, drawing, option, eyes, images.row(row))
        return self._easel.reply(rest.where, images)._replace(tail=dump_time(perf_counter() - began))

    def _draw(
        self,
        state: npt.NDArray[np.float64],
        drawing: DrawSettings,
        option: mujoco.MjvOption,
        eyes: Sequence[ResolvedCamera],
        images: ImageArrays,
    ) -> None:
        mujoco.mj_setState(self._model, self._data, state, self._spec)
        try:
            # all derived quantities, tendons, flexes and lights included; a tenth of the cost of the smallest image
            mujoco.mj_forward(self._model, self._data)
        except mujoco.FatalError:
            self._data = mujoco.MjData(self._model)  # what it had on its stack would stay there, until that is full
            raise
        canvas = self._canvas
        rgb, depth, segmentation = images
        for number, eye in enumerate(eyes):
            canvas.look(self._data, eye.camera, option, drawing.width, drawing.height)
            canvas.draw(rgb[number])
            if depth is not None or segmentation is not None:
                canvas.measure(
                    None if depth is None else depth[number], None if segmentation is None else segmentation[number]
                )

    @contextmanager
    def _edited(self, edits: dict[str, npt.NDArray[Any]], row: int) -> Iterator[None]:
        """The model with the edits of one state, taken back afterwards."""
        changes: dict[str, Any] = {name: rows[row] for name, rows in edits.items()}
        for name in list(changes):
            for frame, values in loosened(self._model, name).items():
                # two fields may loosen the same frames: what either does (0 is mjSAMEFRAME_NONE) is loose
                changes[frame] = np.minimum(changes[frame], values) if frame in changes else values
        before = {name: np.array(field_of(self._model, name)) for name in changes}
        try:
            for name, value in changes.items():
                set_field(self._model, name, value)
            if not changes.keys().isdisjoint(TEXTURED):
                self._canvas.assign_textures()
            yield
        finally:
            for name, value in before.items():
                set_field(self._model, name, value)
            if not changes.keys().isdisjoint(TEXTURED):
                self._canvas.assign_textures()

    def close(self) -> None:
        """Free the OpenGL context."""
        self._canvas.close()
