"""`RenderPool`: images of MuJoCo states, drawn in processes of their own while the loop goes on."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, Unpack, overload

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.ipc.memory import check_transport
from aioenv.native.loading import Model, take_model
from aioenv.process.restart import RestartPolicy
from aioenv.rendering.arguments import (
    MAX_SLOTS,
    DrawOptions,
    States,
    check_data,
    check_devices,
    check_edits,
    check_flags,
    check_life,
    check_modders,
    check_out,
    check_size,
    check_slots,
    check_timeout,
    take_spec,
    take_states,
)
from aioenv.rendering.backends import candidates
from aioenv.rendering.cameras import Camera, find_camera
from aioenv.rendering.config import check_int
from aioenv.rendering.draw_requests import DrawSettings, ImageBuffer
from aioenv.rendering.image_memory import ImageMemory
from aioenv.rendering.pool_life import PoolLife
from aioenv.rendering.pool_service import PoolService
from aioenv.rendering.quality import Quality, parse_quality
from aioenv.rendering.queue import DrawRate, RenderCall
from aioenv.rendering.scene_option import describe_option
from aioenv.rendering.workers import RenderWorkers
from aioenv.state.render_source import dump_model

__all__ = ["RenderPool"]

# How many batches of arrays there are with copy=False.
TURNS = 2
# Of how many kinds of calls it is kept how long their images take.
MAX_PACES = 64


class _Turn(NamedTuple):
    """The sheet of a call with copy=False."""

    key: Any  # what they suit
    sheet: ImageBuffer
    call: RenderCall


class RenderPool(PoolLife):
    """Render workers that draw states of one model.

    Nothing is started by the constructor. Use it as an async context manager, or await it and close it::

        async with aioenv.RenderPool(model, workers_per_device=2) as pool:
            images = await pool.render(states, width=84, height=84, camera="track")

    It belongs to the event loop that it was started on. Slot i is always drawn by worker `i % n`. No
    `if __name__ == "__main__"` guard is needed.

    Args:
        model: an MjModel, an MjSpec, or a path or a string of XML. Workers get it as it is now.
        devices: which GPUs to draw on: a list of their numbers, as MuJoCo counts them (worker i gets
            `devices[i % len(devices)]` as MUJOCO_EGL_DEVICE_ID), or how many: n for the first n, 1 for the one that
            MuJoCo chooses by itself.
        workers_per_device: how many processes draw on each. Without a GPU, as many as there are CPUs.
        max_batch_size: how many slots there are; None for as many as are used, at most 2**20.
        max_image_size: how many pixels an image may have.
        modder: a class, or several, that randomise how the model looks (`aioenv.TextureModder`, say): each worker makes
            its own.
        seed: of the randomisation; None for another one each time. With the same seed a slot looks the same after the
            same number of randomisations, whatever else was drawn, by however many workers.
        quality: "exact" (the pixels of `mujoco.Renderer`), "fast" (no shadows, reflections, multisampling;
            straight sides in fewer rings), "coarse" (round shapes with fewer sides, too), or a `RenderQuality`.
        start: how processes are started: "forkserver", "spawn", or None for the first where the platform has it.
        timeout_s: how long a worker may go without finishing an image that it owes before it is killed, in seconds;
            None for ever. What a process draws first takes several times as long as the rest, so that may take 10
            seconds at least.
        retry: have the replacement of a worker that died or hung draw, once, what it was drawing. Otherwise that call
            fails; calls that it had not begun on wait for the replacement in any case.
        restart: how often workers are replaced; None: never.
        state_spec: which parts of the state `states` consist of, of `mujoco.mjtState`; None for all that a picture
            can depend on, controls, mocap bodies and userdata included.
        backend: "egl", "osmesa", "glfw" or "cgl"; "auto" for the best that works (EGL, GLFW if there is a display,
            OSMesa; on macOS CGL, GLFW); None for `MUJOCO_GL` if it is set, else "auto". (With `devices` EGL alone, as
            the others know none.)
        transport: how images come back: "shared" (workers draw into anonymous memory that this process has too),
            "frames" (through the channel), or "auto", which is the first where the platform has it.
        channel, log_prefix, start_timeout_s: as those of `AsyncVectorEnv`.

    Attributes:
        model: the model.
        state_spec: which parts of the state `states` consist of.
        state_size: of how many float64.
        num_workers: how many processes draw.
        devices: the device of each worker; None if MuJoCo chooses.

    Raises:
        TypeError, ValueError: if an argument is wrong. The message says what was expected.
    """

    def __init__(
        self,
        model: Model,
        *,
        devices: int | Sequence[int] = 1,
        workers_per_device: int = 1,
        max_batch_size: int | None = None,
        max_image_size: int = 512 * 512,
        modder: Any = None,
        seed: int | None = None,
        quality: Quality = "exact",
        start: Literal["forkserver", "spawn"] | None = None,
        timeout_s: float | None = 60.0,
        retry: bool = False,
        restart: RestartPolicy | None = RestartPolicy(),  # noqa: B008  (it is frozen)
        state_spec: int | None = None,
        backend: Literal["auto", "egl", "osmesa", "glfw", "cgl"] | None = None,
        transport: Literal["auto", "frames", "shared"] = "auto",
        channel: Literal["auto", "scatter", "streams"] = "auto",
        log_prefix: str | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        self.model = take_model(model)
        self.state_spec, self.state_size = take_spec(self.model, state_spec)
        chosen = check_devices(devices)
        check_int("workers_per_device", workers_per_device, 1024)
        check_int("max_image_size", max_image_size, 1 << 28)
        if max_batch_size is not None:
            check_int("max_batch_size", max_batch_size, MAX_SLOTS)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0):
            raise ValueError(f"seed: expected an int, 0 or more, or None, got {seed!r}")
        check_timeout("timeout_s", timeout_s)
        check_timeout("start_timeout_s", start_timeout_s)
        check_life(retry, restart, log_prefix)
        modders = check_modders(modder)
        self.num_workers = workers_per_device * (1 if chosen is None else len(chosen))
        self.devices = None if chosen is None else tuple(chosen[i % len(chosen)] for i in range(self.num_workers))
        self._max_batch_size = max_batch_size
        self._max_image_size = max_image_size
        self._randomises = bool(modders)
        self._randomised = np.zeros(0, np.int64)  # how often each slot was
        self._last = np.empty((0, self.state_size))  # the state that was given last for each slot
        entropy = secrets.randbits(63) if seed is None else int(seed)
        try:
            crew = RenderWorkers(
                partial(PoolService, dump_model(self.model), self.state_spec, parse_quality(quality), modders, entropy),
                self.num_workers,
                backends=candidates(backend, chosen),
                devices=self.devices,
                start=start,
                channel=channel,
                needed=("mujoco",),
                log_prefix=log_prefix,
                start_timeout_s=start_timeout_s,
                restart=restart,
                redraws=retry,
                share=check_transport(transport) != "frames",
            )
        except TypeError as exc:
            if exc.__cause__ is None:
                raise
            raise TypeError(
                f"modder: it can't be sent to a worker, something of it does not pickle: {exc.__cause__}"
            ) from exc
        super().__init__(crew, timeout_s, retry)
        self._blocks = ImageMemory(None)
        self._pace = lru_cache(MAX_PACES)(lambda *kind: DrawRate(timeout_s))
        self._turns: deque[_Turn] = deque(maxlen=TURNS)  # what copy=False hands out
        self.closed = False

    async def _start(self) -> None:
        await super()._start()
        self._blocks = ImageMemory(self._crew.memory)

    async def _close(self) -> None:
        try:
            await super()._close()
        finally:
            self._blocks.clear()
            self._turns.clear()

    # ------------------------------------------------------------ images

    @overload
    async def render(
        self,
        states: States | None = None,
        *,
        depth: Literal[False] = False,
        segmentation: Literal[False] = False,
        **how: Unpack[DrawOptions],
    ) -> npt.NDArray[np.uint8]: ...
    @overload
    async def render(
        self,
        states: States | None = None,
        *,
        depth: bool = False,
        segmentation: bool = False,
        **how: Unpack[DrawOptions],
    ) -> Any: ...
    async def render(
        self,
        states: States | None = None,
        *,
        slots: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        width: int,
        height: int,
        camera: Camera | Sequence[Camera] = None,
        scene_option: mujoco.MjvOption | None = None,
        depth: bool = False,
        segmentation: bool = False,
        randomize: bool = False,
        edits: Mapping[str, npt.ArrayLike] | None = None,
        out: Any = None,
        copy: bool = True,
    ) -> Any:
        """Draw states, and wait for the images.

        If this is cancelled, what no worker has begun is not drawn, and nothing is written to `out` any more.

        Args:
            states: float64 of shape `(N, nstate)`, whose rows are as `get_state` gives them, or N `MjData`; None for
                the states that were given last for the slots (at first, the model's initial one).
            slots: the slot of each state; None for 0 … N-1. (Without states: which slots; None for all: as many
                as `max_batch_size` says, or as were used; if none was, one a worker.)
            width: of an image, in pixels.
            height: likewise.
            camera: a camera of the model by name or number, an `MjvCamera`, -1 or None for the free camera; or a list
                of C of them.
            scene_option: what is visible: groups of geoms, contact points, frames, labels and so on; None for what
                MuJoCo shows by itself. (Forces that were applied show only if `state_spec` has them.)
            depth: give distances too.
            segmentation: give what is where too.
            randomize: have the modders give each slot another look first. It lasts until the next time.
            edits: fields of the model that are other ones for each state, for this call alone, over what modders do:
                `{"geom_rgba": (N, ngeom, 4)}`, say.
            out: an array to fill and return, or a tuple of them if there are several results.
            copy: with False results are arrays that the second next call with copy=False may write to.

        Returns:
            Images, uint8 of shape `(N, height, width, 3)`, top row first, in the order of the states. With `depth`
            and `segmentation` a tuple of these, then float32 `(N, height, width)` (distances from the camera's plane,
            in metres), then int32 `(N, height, width, 2)` (id of the object and its `mujoco.mjtObj`; -1 where nothing
            is). With a list of cameras an axis of C comes second.

        Raises:
            ValueError: if an argument is wrong; nothing is sent then.
            RenderError: if a worker could not draw, or died.
            RenderTimeout: if a worker finished nothing for `timeout_s`.
            ClosedError: if the pool is closed, or is closed meanwhile.
        """
        return await self.submit(
            states,
            slots=slots,
            width=width,
            height=height,
            camera=camera,
            scene_option=scene_option,
            depth=depth,
            segmentation=segmentation,
            randomize=randomize,
            edits=edits,
            out=out,
            copy=copy,
        )

    @overload
    def submit(
        self,
        states: States | None = None,
        *,
        depth: Literal[False] = False,
        segmentation: Literal[False] = False,
        **how: Unpack[DrawOptions],
    ) -> asyncio.Future[npt.NDArray[np.uint8]]: ...
    @overload
    def submit(
        self,
        states: States | None = None,
        *,
        depth: bool = False,
        segmentation: bool = False,
        **how: Unpack[DrawOptions],
    ) -> asyncio.Future[Any]: ...
    def submit(
        self,
        states: States | None = None,
        *,
        slots: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        width: int,
        height: int,
        camera: Camera | Sequence[Camera] = None,
        scene_option: mujoco.MjvOption | None = None,
        depth: bool = False,
        segmentation: bool = False,
        randomize: bool = False,
        edits: Mapping[str, npt.ArrayLike] | None = None,
        out: Any = None,
        copy: bool = True,
    ) -> asyncio.Future[Any]:
        """Have states drawn, without waiting: gives at once a future of what `render` returns.

        States and edits are copied. Any number of calls may be under way: workers draw them in turn, and only two small
        pieces a worker are in flight. To cancel the future drops what no worker has begun.

        Args, Raises: as `render`; what goes wrong later comes out of the future.
        """
        loop = self._check_running()
        width, height = check_size(width, height, self._max_image_size)
        check_flags(depth=depth, segmentation=segmentation, randomize=randomize, copy=copy)
        several = isinstance(camera, (list, tuple))
        views = tuple(find_camera(self.model, each) for each in (camera if several else [camera]))  # type: ignore[union-attr]
        if not views:
            raise ValueError("camera: expected at least one, got an empty list")
        option = describe_option(scene_option)
        if randomize and not self._randomises:
            raise ValueError(
                "randomize: the pool has no modder; make it with RenderPool(…, modder=aioenv.TextureModder)"
            )
        numbers, rows = self._states_of(states, slots)
        count = len(rows)
        checked_edits = check_edits(self.model, edits, count)
        shape = (count, len(views), height, width) if several else (count, height, width)
        kinds = {"depth": depth, "segmentation": segmentation}
        filled = None if out is None else check_out(out, shape, **kinds)
        # nothing can go wrong from here on
        self._grow(int(numbers.max()) + 1 if count else 0)
        self._last[numbers] = rows
        looks = None
        if self._randomises:
            self._randomised[numbers] += randomize
            looks = np.stack([numbers, self._randomised[numbers]], axis=1)
        drawing = DrawSettings(width, height, views, depth, segmentation, option)
        turn = None if copy or filled is not None else self._take_turn((shape, depth, segmentation))
        sheet = None if filled is not None else turn or self._blocks.sheet(shape, **kinds)
        arrays = (filled if sheet is None else sheet.images).arrays  # type: ignore[union-attr]
        result = arrays if len(arrays) > 1 else arrays[0]
        future: asyncio.Future[Any] = loop.create_future()
        pace = self._pace(width, height, len(views), depth, segmentation)
        call = RenderCall(
            rows, drawing, pace, checked_edits, looks, sheet, self._blocks, filled, future, lambda: result
        )
        if self._trace is not None:
            call.number = self._number()
        if not copy and sheet is not None:
            self._turns.append(_Turn((shape, depth, segmentation), sheet, call))
        if not count:
            future.set_result(result)
            return future
        owners = numbers % len(self._lanes)
        for index, lane in enumerate(self._lanes):
            share = np.flatnonzero(owners == index)
            if len(share):
                lane.add(call, share)
        return future

    def _states_of(self, states: States | None, slots: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The slots to draw, and their states."""
        most = self._max_batch_size
        if states is not None:
            rows = take_states(self.model, self.state_spec, states)
            if most is not None and len(rows) > most:
                raise ValueError(f"states: expected at most max_batch_size={most}, got {len(rows)}")
            numbers = np.arange(len(rows), dtype=np.int64)
            if slots is not None or len(rows) > MAX_SLOTS:
                numbers = check_slots(numbers if slots is None else slots, len(rows), most)
            return numbers, rows
        if slots is None:
            slots = np.arange(most or len(self._last) or self.num_workers)
        numbers = check_slots(slots, None, most)
        self._grow(int(numbers.max()) + 1 if len(numbers) else 0)
        return numbers, self._last[numbers]

    def _grow(self, count: int) -> None:
        """Know so many slots."""
        more = count - len(self._last)
        if more > 0:
            initial = self.get_state(mujoco.MjData(self.model))
            self._last = np.concatenate([self._last, np.broadcast_to(initial, (more, self.state_size))])
            self._randomised = np.concatenate([self._randomised, np.zeros(more, np.int64)])

    def _take_turn(self, key: Any) -> ImageBuffer | None:
        """The sheet of the call before the last one, if it suits and nothing is drawn on it any more."""
        if len(self._turns) == TURNS:
            turn = self._turns[0]
            if turn.key == key and turn.call.future.done() and not turn.call.flying:
                return turn.sheet
        return None

    def get_state(self, data: mujoco.MjData, out: npt.NDArray[np.float64] | None = None) -> npt.NDArray[np.float64]:
        """A row of `states`: what a picture of `data` depends on.

        Args:
            data: of the pool's model.
            out: float64 of shape `(state_size,)` to fill; None for a new array.

        Raises:
            ValueError: if they are of a model whose state is another.
        """
        check_data("data", self.model, self.state_spec, data)
        row = np.empty(self.state_size) if out is None else out
        mujoco.mj_getState(self.model, data, row, self.state_spec)
        return row
