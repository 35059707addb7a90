"""`RenderPool`: images of MuJoCo states, drawn by processes of their own while the event loop goes on.

The functions before it check and parse its arguments; errors name the expected and the given value, and the remedy.
"""

from __future__ import annotations

import asyncio
import os
import reprlib
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import count
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Required, Self, TypeAlias, TypedDict, Unpack, overload

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.errors import ClosedError, RenderTimeout
from aioenv.ipc.memory import check_transport
from aioenv.native.loading import Model, load_model
from aioenv.process.async_resource import AsyncResource
from aioenv.process.restart_policy import RestartPolicy
from aioenv.process.supervisor import Worker
from aioenv.rendering.backends import candidate_backends
from aioenv.rendering.cameras import Camera, describe_option, find_camera
from aioenv.rendering.config import MAX_SIDE, Quality, check_int, parse_devices, parse_quality
from aioenv.rendering.draw_requests import DrawRequest, DrawSettings, dump_request, dump_settings
from aioenv.rendering.images import ImageArrays, ImageBuffer, ImageMemory, image_kinds
from aioenv.rendering.queue import DrawJob, PackedRequest, QueuePolicy, Rows
from aioenv.rendering.render_service import pool_service
from aioenv.rendering.workers import RenderWorkers
from aioenv.spaces.layout import byte_view
from aioenv.state.model_edits import SEEN, check_edit, field_of, has_field
from aioenv.state.render_source import dump_model
from aioenv.tracing.timeline import Trace, Traced, path_from_environment

__all__ = [
    "MAX_SLOTS",
    "DrawOptions",
    "DrawRate",
    "RenderCall",
    "RenderPool",
    "States",
    "check_data",
    "check_flags",
    "check_life",
    "check_timeout",
    "parse_edits",
    "parse_modders",
    "parse_out",
    "parse_size",
    "parse_slots",
    "parse_spec",
    "parse_states",
]


States: TypeAlias = "npt.ArrayLike | Sequence[mujoco.MjData]"


class DrawOptions(TypedDict, total=False):
    """The arguments of `RenderPool.render` that don't change the type of its result, for type checkers."""

    slots: Sequence[int] | npt.NDArray[np.integer[Any]] | None
    width: Required[int]
    height: Required[int]
    camera: Camera | Sequence[Camera]
    scene_option: mujoco.MjvOption | None
    randomize: bool
    edits: Mapping[str, npt.ArrayLike] | None
    out: Any
    copy: bool


# The pool keeps the last state of each slot.
MAX_SLOTS = 1 << 20


def _default_spec() -> int:
    """Return all parts of the state that an image can depend on."""
    part = mujoco.mjtState
    parts = ("FULLPHYSICS", "CTRL", "EQ_ACTIVE", "MOCAP_POS", "MOCAP_QUAT", "USERDATA")
    return sum(int(getattr(part, f"mjSTATE_{name}")) for name in parts)


def parse_modders(modder: Any) -> tuple[Callable[..., Any], ...]:
    """Return the callables that make modders: none, one, or several that are used together.

    Raises:
        ValueError: if one is not a class or another callable (but a modder, say).
    """
    makers = () if modder is None else tuple(modder) if isinstance(modder, (list, tuple)) else (modder,)
    for maker in makers:
        if not callable(maker):
            raise ValueError(
                f"modder: expected a class, as aioenv.TextureModder, of which each worker makes its own, got {maker!r}"
            )
    return makers


def check_timeout(name: str, timeout_s: float | None) -> None:
    """Raise a ValueError unless it is a positive number of seconds, or None."""
    number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and timeout_s > 0):
        raise ValueError(f"{name}: expected a positive number of seconds or None, got {timeout_s!r}")


def check_life(retry: Any, restart: Any, log_prefix: Any) -> None:
    """Raise a TypeError or a ValueError unless they are of the right types."""
    if not isinstance(retry, bool):
        raise ValueError(f"retry: expected True or False, got {retry!r}")
    if restart is not None and not isinstance(restart, RestartPolicy):
        raise TypeError(f"restart: expected an aioenv.RestartPolicy or None, got {restart!r}")
    if log_prefix is not None and not isinstance(log_prefix, str):
        raise ValueError(f"log_prefix: expected a str or None, got {log_prefix!r}")


def parse_spec(model: mujoco.MjModel, spec: Any) -> tuple[int, int]:
    """Return which parts of the state `states` consist of, and how many float64 a row has.

    Raises:
        ValueError: if there are no such parts, or the model has none of them.
    """
    if spec is None:
        spec = _default_spec()
    whole = isinstance(spec, (Integral, mujoco.mjtState)) and not isinstance(spec, bool)
    if not whole or not 0 <= int(spec) < 1 << int(mujoco.mjtState.mjNSTATE):
        raise ValueError(f"state_spec: expected parts of mujoco.mjtState, got {spec!r}")
    size = mujoco.mj_stateSize(model, int(spec))
    if size == 0:
        raise ValueError(f"state_spec: expected parts that the model has, got {spec}: it has none of them")
    return int(spec), size


def parse_size(width: int, height: int, max_image_size: int) -> tuple[int, int]:
    """Return the width and height of an image as ints.

    Raises:
        ValueError: if one is not a positive int, or the image is larger than `max_image_size`.
    """
    check_int("width", width, MAX_SIDE)
    check_int("height", height, MAX_SIDE)
    if width * height > max_image_size:
        raise ValueError(
            f"width, height: an image of {width} x {height} has {width * height} pixels, over "
            f"max_image_size={max_image_size}; make a RenderPool with a larger max_image_size"
        )
    return int(width), int(height)


def parse_slots(slots: Any, count: int | None, max_batch_size: int | None) -> npt.NDArray[np.int64]:
    """Return the slots to draw as an array of int64.

    Args:
        slots: the user's argument; not None.
        count: how many states there are; None if they are not given.
        max_batch_size: slots are smaller; None for 2**20.

    Raises:
        ValueError: if they are not distinct ints in range, or not one for each state.
    """
    numbers = np.asarray(slots)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ValueError(f"slots: expected a list of ints, got {slots!r}")
    numbers = numbers.astype(np.int64)
    if count is not None and len(numbers) != count:
        raise ValueError(f"slots: expected one for each of {count} states, got {len(numbers)}")
    most = (MAX_SLOTS if max_batch_size is None else max_batch_size) - 1
    if numbers.size and not (numbers.min() >= 0 and numbers.max() <= most):
        raise ValueError(f"slots: expected ints from 0 to {most}, got {numbers.tolist()}")
    if len(np.unique(numbers)) != len(numbers):
        raise ValueError(f"slots: expected each of them once, got {numbers.tolist()}")
    return numbers


def check_data(name: str, model: mujoco.MjModel, spec: int, data: Any) -> None:
    """Raise a ValueError unless these are data of such a model: MuJoCo reads as many numbers as the model has."""
    if isinstance(data, mujoco.MjData) and (data.model is model or _sizes(data.model, spec) == _sizes(model, spec)):
        return
    raise ValueError(f"{name}: expected an MjData of the pool's model, got {data!r}")


def _sizes(model: mujoco.MjModel, spec: int) -> list[int]:
    """Return how many float64 each part of a state has."""
    return [mujoco.mj_stateSize(model, 1 << bit) for bit in range(int(mujoco.mjtState.mjNSTATE)) if spec >> bit & 1]


def parse_states(model: mujoco.MjModel, spec: int, states: States) -> npt.NDArray[np.float64]:
    """Return a copy of states, float64 of shape `(N, nstate)`.

    Raises:
        ValueError: if the shape is another, or a state is of another model.
    """
    size = mujoco.mj_stateSize(model, spec)
    if isinstance(states, (list, tuple)) and states and isinstance(states[0], mujoco.MjData):
        rows = np.empty((len(states), size))
        for index, (row, data) in enumerate(zip(rows, states, strict=True)):
            check_data(f"states[{index}]", model, spec, data)
            mujoco.mj_getState(model, data, row, spec)
        return rows
    if isinstance(states, mujoco.MjData):
        raise ValueError("states: expected a list of MjData, got one; write [data]")
    try:
        array = np.array(states)
    except ValueError:  # rows of different lengths
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"states: expected an array of shape (N, {size}) of numbers, or a list of MjData, got "
            f"{type(states).__name__} {reprlib.repr(states)}"
        )
    array = array.astype(np.float64, order="C", copy=False)
    if array.size == 0 and array.shape[:1] == (0,):
        return np.empty((0, size))
    if array.ndim != 2 or array.shape[1] != size:
        raise ValueError(
            f"states: expected an array of shape (N, {size}), as RenderPool.get_state gives a row of it, or a list of "
            f"MjData, got shape {array.shape}. (Rows of another kind take another state_spec: this is {spec})"
        )
    return array


def parse_edits(
    model: mujoco.MjModel, edits: Mapping[str, npt.ArrayLike] | None, count: int
) -> dict[str, npt.NDArray[Any]] | None:
    """Return a copy of edits of the model, one row a state; None if there are none.

    Raises:
        ValueError: if a field can't be edited, or a shape is wrong.
    """
    if edits is None:
        return None
    if not isinstance(edits, Mapping):
        raise ValueError(f"edits: expected a dict of fields, of one row for each state, got {edits!r}")
    checked = {}
    for name, values in edits.items():
        if name not in SEEN or not has_field(model, name):
            seen = ", ".join(each for each in SEEN if has_field(model, each))
            raise ValueError(f"edits: expected fields that a picture shows, of {seen}; got {name!r}")
        field = np.asarray(field_of(model, name))
        array = np.array(values)
        if array.shape != (count, *field.shape):
            raise ValueError(
                f"edits[{name!r}]: expected shape {(count, *field.shape)}: the whole field for each state, got "
                f"{array.shape}"
            )
        if array.dtype.kind not in "biuf":
            raise ValueError(f"edits[{name!r}]: expected numbers, got an array of {array.dtype}")
        checked[name] = array.astype(field.dtype)
        check_edit(model, name, array, f"edits[{name!r}]")
    return checked or None


def check_flags(**flags: Any) -> None:
    """Raise a ValueError unless all of them are True or False."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"{name}: expected True or False, got {value!r}")


def parse_out(out: Any, shape: tuple[int, ...], *, depth: bool, segmentation: bool) -> ImageArrays:
    """Return the arrays that images are put into.

    Args:
        out: the user's argument: an array, or a tuple of one for each kind of image.
        shape: of the array of depth images.
        depth: whether there are depth images.
        segmentation: whether there are segmentation images.

    Raises:
        ValueError: if they are not such arrays.
    """
    # broadcast, without memory of their own: the user's arrays may be larger than memory, in a file say
    likes = (
        kind and np.broadcast_to(np.empty((), kind[1]), kind[0]) for kind in image_kinds(shape, depth, segmentation)
    )
    images = ImageArrays(*likes)  # type: ignore[arg-type]
    wanted = {name: array for name, array in images._asdict().items() if array is not None}
    if not isinstance(out, (np.ndarray, list, tuple)):
        raise ValueError(f"out: expected an array for {', '.join(wanted)}, or a tuple of them, got {out!r}")
    given = (out,) if isinstance(out, np.ndarray) else tuple(out)
    if len(given) != len(wanted):
        raise ValueError(f"out: expected arrays for {', '.join(wanted)}, got {len(given)}")
    for target, (name, array) in zip(given, wanted.items(), strict=True):
        if not isinstance(target, np.ndarray) or target.shape != array.shape or target.dtype != array.dtype:
            got = f"{target.dtype} {target.shape}" if isinstance(target, np.ndarray) else type(target).__name__
            raise ValueError(f"out: expected for {name} an array {array.dtype} {array.shape}, got {got}")
        if not target.flags.writeable:
            raise ValueError(f"out: the array for {name} is read-only")
    return ImageArrays(**{**images._asdict(), **dict(zip(wanted, given, strict=True))})


# How long a chunk takes to draw, in seconds, and as a part of `timeout_s` at most. So a worker that hangs is detected
# soon, and one that draws slowly is not mistaken for it. (Shorter chunks cost the loop more: some 0.3 ms each.)
CHUNK_S = 0.1
PART_OF_TIMEOUT = 0.25
# A call of 10,000 states leaves the loop free between its chunks, however fast they are drawn.
CHUNK_ROWS = 64
# To receive so many bytes of images, where they are sent, takes the loop some 100 us; to send so many of states, too.
CHUNK_BYTES = 256 << 10
SENT_BYTES = 64 << 10
# A worker has two chunks: it draws one, and goes on with the other at once.
MAX_IN_FLIGHT = 2
# How many batches of arrays there are with copy=False.
RING = 2
# For how many kinds of calls the time that their images take is remembered.
MAX_RATES = 64


class DrawRate:
    """The speed at which a pool draws the states of one kind of call.

    Args:
        timeout_s: see `RenderPool`.

    Attributes:
        state_s: how long one state took lately, in seconds; None before the first.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.state_s: float | None = None
        self._chunk_s = CHUNK_S if timeout_s is None else min(CHUNK_S, PART_OF_TIMEOUT * timeout_s)

    @property
    def rows(self) -> int:
        """The maximum number of states of a chunk: one, until it is known how long a state takes."""
        return max(1, int(self._chunk_s / self.state_s)) if self.state_s else 1


class RenderCall(DrawJob):
    """One call of a `RenderPool`. It fails with its first error; then the rest of it is not drawn.

    Args:
        states: float64 of shape `(N, nstate)`, not shared with the caller.
        settings: how they are drawn.
        rate: of calls with such settings.
        edits: fields of the model, one row a state; None if none is edited.
        looks: int64 of shape `(N, 2)`: each state's slot, and how often that was randomised; None without modders.
        buffer: the arrays that are drawn into; None if `out` is filled.
        memory: allocates buffers for chunks whose images are copied to `out`.
        out: the user's arrays, filled as chunks are drawn; None if those of the buffer are returned. Nothing is written
            to them once the call has ended, however it ended.
        future: gets `result` when all images are drawn, or the first error.
        result: the result of the call.
    """

    def __init__(
        self,
        states: npt.NDArray[np.float64],
        settings: DrawSettings,
        rate: DrawRate,
        edits: dict[str, npt.NDArray[Any]] | None,
        looks: npt.NDArray[np.int64] | None,
        buffer: ImageBuffer | None,
        memory: ImageMemory,
        out: ImageArrays | None,
        future: asyncio.Future[Any],
        result: Any,
    ) -> None:
        self.future = future
        self._states = states
        self._settings = settings
        self._dumped_settings = dump_settings(settings)
        self._rate = rate
        self._edits = edits or {}
        self._looks = looks
        self._buffer = buffer
        self._memory = memory
        self._out = out
        self._result = result
        self._undrawn = len(states)
        sent = sum(array[0].nbytes for array in (states, *self._edits.values())) if len(states) else 1
        self._most_rows = max(1, min(CHUNK_ROWS, SENT_BYTES // sent))
        if buffer is None or buffer.location is None:  # images are sent, or copied to where they belong
            pixels = settings.width * settings.height * len(settings.views)
            row_bytes = pixels * (3 + 4 * settings.depth + 8 * settings.segmentation)
            self._most_rows = max(1, min(self._most_rows, CHUNK_BYTES // row_bytes))

    @property
    def wanted(self) -> bool:
        """Whether the call goes on."""
        return not self.future.done()

    @property
    def chunk_rows(self) -> int:
        """The maximum number of rows of the next chunk."""
        return min(self._most_rows, self._rate.rows)

    def pack(self, worker: Worker, rows: Rows) -> PackedRequest:
        """Make the request for some rows."""
        buffer, staged, targets = self._buffer, None, rows.tolist()
        if buffer is None:
            settings, targets = self._settings, list(range(len(rows)))
            shape = (len(rows), *settings.state_shape)
            buffer = self._memory.new_buffer(shape, depth=settings.depth, segmentation=settings.segmentation)
            staged = buffer.images
        location, into = buffer.target(targets)
        looks = None if self._looks is None else self._looks[rows].tolist()
        edits = {name: values[rows] for name, values in self._edits.items()}
        payload = dump_request(DrawRequest(self._dumped_settings, location, edits, looks))
        return PackedRequest(byte_view(self._states[rows]), payload, into, staged)

    def on_drawn(self, rows: Rows, staged: ImageArrays | None, seconds: float) -> None:
        """Copy the images of some rows to `out` if necessary, and end the call with the last ones."""
        self._rate.state_s = seconds / len(rows)
        if self.future.done():
            return
        if staged is not None:
            assert self._out is not None
            try:
                for target, array in zip(self._out.arrays, staged.arrays, strict=True):
                    target[rows] = array.reshape(len(rows), *target.shape[1:])
            except Exception as exc:  # it is the user's array: it may be read-only by now, say
                self.on_failed(rows, exc)
                return
        self._undrawn -= len(rows)
        if self._undrawn == 0:
            self.future.set_result(self._result)

    def on_failed(self, rows: Rows, error: Exception) -> None:
        """End the call."""
        if not self.future.done():
            self.future.set_exception(error)


class _RingEntry(NamedTuple):
    """The buffer of a call with copy=False."""

    key: Any  # the shape and kinds of its images
    buffer: ImageBuffer
    call: RenderCall


class RenderPool(AsyncResource, Traced):
    """Render workers that draw states of one model.

    The constructor starts nothing. Use the pool as an async context manager, or await it and close it::

        async with aioenv.RenderPool(model, workers_per_device=2) as pool:
            images = await pool.render(states, width=84, height=84, camera="track")

    The pool belongs to the event loop that it was started on. Slot i is always drawn by worker `i % n`. No
    `if __name__ == "__main__"` guard is needed.

    Args:
        model: an MjModel, an MjSpec, or a path or a string of XML. Later edits of it have no effect.
        devices: the GPUs to draw on. A list of their numbers, as MuJoCo counts them: worker i gets
            `devices[i % len(devices)]` as MUJOCO_EGL_DEVICE_ID. Or how many: n for the first n, 1 for the one that
            MuJoCo chooses.
        workers_per_device: how many processes draw on each device. Without a GPU, the number of CPUs is a good choice.
        max_batch_size: how many slots there are; None for as many as are used, at most 2**20.
        max_image_size: how many pixels an image may have.
        modder: a class, or several, that randomise how the model looks (`aioenv.TextureModder`, say); each worker makes
            its own instances.
        seed: of the randomisation; None for another one each time. With the same seed a slot looks the same after the
            same number of randomisations. It depends neither on other draws nor on the number of workers.
        quality: "exact" (the pixels of `mujoco.Renderer`), "fast" (no shadows, reflections, multisampling;
            straight sides in fewer rings), "coarse" (round shapes with fewer sides, too), or a `RenderQuality`.
        start: how processes are started: "forkserver", "spawn", or None for the first where the platform has it.
        timeout_s: how long a worker may go without finishing an image that it owes before it is killed, in seconds;
            None for ever. The first images of a process take several times as long as the rest, so they may take 10
            seconds at least.
        retry: if a worker dies or hangs, have its replacement draw the same states again, once. Otherwise that call
            fails. Calls that the worker had not begun wait for the replacement in any case.
        restart: how often workers are replaced; None: never.
        state_spec: which parts of the state `states` consist of, of `mujoco.mjtState`; None for all parts that an image
            can depend on, controls, mocap bodies and userdata included.
        backend: "egl", "osmesa", "glfw" or "cgl". "auto": the best that works (EGL, GLFW if there is a display, OSMesa;
            on macOS CGL, GLFW). None: `MUJOCO_GL` if it is set, else "auto". (With `devices` EGL alone, as the others
            have none.)
        transport: how images are returned. "shared": workers draw into anonymous memory that they share with this
            process. "frames": through the channel. "auto": "shared" where the platform has it.
        channel, log_prefix, start_timeout_s: as those of `AsyncVectorEnv`.

    Attributes:
        model: the model.
        state_spec: which parts of the state `states` consist of.
        state_size: how many float64 a row of `states` has.
        num_workers: how many processes draw.
        devices: the device of each worker; None if MuJoCo chooses.
        closed: whether `close` has been called.

    Raises:
        TypeError, ValueError: if an argument is wrong. The message says what was expected.
    """

    _noun = "render pool"

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
        self.model = load_model(model)
        self.state_spec, self.state_size = parse_spec(self.model, state_spec)
        chosen = parse_devices(devices)
        check_int("workers_per_device", workers_per_device, 1024)
        check_int("max_image_size", max_image_size, 1 << 28)
        if max_batch_size is not None:
            check_int("max_batch_size", max_batch_size, MAX_SLOTS)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0):
            raise ValueError(f"seed: expected an int, 0 or more, or None, got {seed!r}")
        check_timeout("timeout_s", timeout_s)
        check_timeout("start_timeout_s", start_timeout_s)
        check_life(retry, restart, log_prefix)
        modders = parse_modders(modder)
        self.num_workers = workers_per_device * (1 if chosen is None else len(chosen))
        self.devices = None if chosen is None else tuple(chosen[i % len(chosen)] for i in range(self.num_workers))
        self._max_batch_size = max_batch_size
        self._max_image_size = max_image_size
        self._randomises = bool(modders)
        self._randomised = np.zeros(0, np.int64)  # how often each slot was randomised
        self._last = np.empty((0, self.state_size))  # the state that was given last for each slot
        self._num_slots = 0  # up to the highest that was drawn
        entropy = secrets.randbits(63) if seed is None else int(seed)
        try:
            self._workers = RenderWorkers(
                partial(
                    pool_service, dump_model(self.model), self.state_spec, parse_quality(quality), modders, entropy
                ),
                self.num_workers,
                QueuePolicy(timeout_s, MAX_IN_FLIGHT, int(retry), partial(_late_error, timeout_s, restart is not None)),
                backends=candidate_backends(backend, chosen),
                devices=self.devices,
                start=start,
                channel=channel,
                needed=("mujoco",),
                log_prefix=log_prefix,
                start_timeout_s=start_timeout_s,
                restart=restart,
                share=check_transport(transport) != "frames",
            )
        except TypeError as exc:
            if exc.__cause__ is None:
                raise
            raise TypeError(
                f"modder: it can't be sent to a worker, something of it does not pickle: {exc.__cause__}"
            ) from exc
        self._rate = lru_cache(MAX_RATES)(lambda *kind: DrawRate(timeout_s))
        self._ring: deque[_RingEntry] = deque(maxlen=RING)  # the arrays that copy=False returns
        self._next_number: Callable[[], int] = count(1).__next__  # of calls, in a timeline
        self.closed = False

    # ------------------------------------------------------------ start and end

    def __repr__(self) -> str:
        state = "closed" if self.closed else "running" if self._workers.queues else "not started"
        return f"<{type(self).__name__} num_workers={self._workers.count} {state}>"

    async def _ensure_started(self) -> Self:
        """Start the workers, once. If this is cancelled, they are ended.

        Raises:
            RenderError: if no OpenGL backend works, or a device does not exist; the message says what to install.
            WorkerStartError: if a worker failed to start for another reason, a modder that raised, say; it has the
                worker's traceback.
            StartTimeout: if no worker started within `start_timeout_s`: where it hung is in the message.
        """
        return await super()._ensure_started()

    async def _start(self) -> None:
        path = path_from_environment()
        await self._workers.start()
        if path is not None:
            self.trace(path)

    async def close(self) -> None:
        """End the workers. Calls that are being drawn fail with a ClosedError.

        Idempotent. If this is cancelled, the workers are killed at once.
        """
        await self._close_once(self._close)

    async def _close(self) -> None:
        try:
            self._workers.fail_all(ClosedError("the render pool was closed"))
        finally:  # no process may be left, even after an error
            try:
                await self._workers.close()
            finally:
                self._stop_trace()
                self._ring.clear()

    def _abandon(self) -> None:
        self._workers.abandon()
        self._stop_trace()

    def _check_running(self) -> asyncio.AbstractEventLoop:
        """Return the loop, if the pool is started, open, and used from its loop."""
        self._check_open()
        if self._loop is None or not self._workers.queues:
            raise RuntimeError(f"{self!r}: start it first, with `async with pool:` or `await pool`")
        self._check_loop()
        return self._loop

    @property
    def backend(self) -> str:
        """The OpenGL backend in use, once started."""
        return self._workers.backend

    @property
    def renderer(self) -> str:
        """The name of the OpenGL implementation, once started."""
        return self._workers.renderer

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids of the render workers, once started."""
        return self._workers.pids

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Collect a timeline of the workers, from now until the end of a `with` block over it, its `stop()` or `close`.

        Each span has the number of its call, from 1 (see `AsyncVectorEnv.trace`).

        Args:
            path: of the JSON file; an existing file is overwritten.

        Raises:
            RuntimeError: if a timeline is being collected already, or the pool is not started.
            ClosedError: if it is closed.
            OSError: if the file can't be written.
        """
        self._check_running()
        workers = self._workers

        def attach(trace: Trace | None) -> None:
            self._next_number = count(1).__next__
            for queue, worker in zip(workers.queues, workers.workers, strict=True):
                queue.trace = trace
                worker.trace(trace.tracks[worker.index] if trace is not None else None)

        return self._start_trace(path, [f"render worker {worker.index}" for worker in workers.workers], attach)

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

        If this is cancelled, states that no worker has begun are not drawn, and nothing more is written to `out`.

        Args:
            states: float64 of shape `(N, nstate)`, with rows as `get_state` returns them, or N `MjData`. None: the last
                states of the slots (at first, the model's initial state).
            slots: the slot of each state; None for 0 … N-1. Without states: the slots to draw. None: all of
                `max_batch_size`; without that, all slots up to the highest that was used, or one a worker.
            width: of an image, in pixels.
            height: of an image, in pixels.
            camera: a camera of the model by name or number, an `MjvCamera`, -1 or None for the free camera; or a list
                of C of them.
            scene_option: the visual options: groups of geoms, contact points, frames, labels and so on; None for
                MuJoCo's defaults. (Applied forces show only if `state_spec` has them.)
            depth: return distances too.
            segmentation: return the visible objects too.
            randomize: have the modders give each slot a new look first, which it keeps until the next time.
            edits: fields of the model with other values for each state, for this call alone, applied after modders:
                `{"geom_rgba": (N, ngeom, 4)}`, say.
            out: an array to fill and return, or a tuple of them if there are several results.
            copy: with False, the second next call with copy=False may write to the arrays that this one returns.

        Returns:
            Images, uint8 of shape `(N, height, width, 3)`, top row first, in the order of the states. With `depth` and
            `segmentation` a tuple of images, depths and objects. Depths are float32 `(N, height, width)`, distances
            from the camera's plane in metres. Objects are int32 `(N, height, width, 2)`: the id of the object and its
            `mujoco.mjtObj`, -1 for the background. With a list of cameras an axis of C comes second.

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
        """Draw states without waiting: return a future of the result of `render`.

        States and edits are copied. Any number of calls may be in flight: workers draw them in turn, and each worker
        has two small parts of them at most. To cancel the future drops what no worker has begun.

        Args, Raises: as `render`; the future has all later errors.
        """
        loop = self._check_running()
        width, height = parse_size(width, height, self._max_image_size)
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
        n = len(rows)
        checked_edits = parse_edits(self.model, edits, n)
        shape = (n, len(views), height, width) if several else (n, height, width)
        kinds = {"depth": depth, "segmentation": segmentation}
        filled = None if out is None else parse_out(out, shape, **kinds)
        # nothing can go wrong from here on
        self._grow(int(numbers.max()) + 1 if n else 0)
        self._last[numbers] = rows
        self._num_slots = max(self._num_slots, int(numbers.max()) + 1 if n else 0)
        looks = None
        if self._randomises:
            self._randomised[numbers] += randomize
            looks = np.stack([numbers, self._randomised[numbers]], axis=1)
        memory, key = self._workers.image_memory, (shape, depth, segmentation)
        buffer = None if copy or filled is not None else self._reusable(key)
        if filled is None and buffer is None:
            buffer = memory.new_buffer(shape, **kinds)
        arrays = (filled if buffer is None else buffer.images).arrays  # type: ignore[union-attr]
        result = arrays if len(arrays) > 1 else arrays[0]
        future: asyncio.Future[Any] = loop.create_future()
        settings = DrawSettings(width, height, views, depth, segmentation, option)
        rate = self._rate(width, height, len(views), depth, segmentation)
        call = RenderCall(rows, settings, rate, checked_edits, looks, buffer, memory, filled, future, result)
        if self._trace is not None:
            call.number = self._next_number()
        if not copy and buffer is not None:
            self._ring.append(_RingEntry(key, buffer, call))
        if not n:
            future.set_result(result)
        else:
            self._workers.draw(call, numbers)
        return future

    def _states_of(self, states: States | None, slots: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the slots to draw, and their states."""
        most = self._max_batch_size
        if states is not None:
            rows = parse_states(self.model, self.state_spec, states)
            if most is not None and len(rows) > most:
                raise ValueError(f"states: expected at most max_batch_size={most}, got {len(rows)}")
            numbers = np.arange(len(rows), dtype=np.int64)
            if slots is not None or len(rows) > MAX_SLOTS:
                numbers = parse_slots(numbers if slots is None else slots, len(rows), most)
            return numbers, rows
        if slots is None:
            slots = np.arange(most or self._num_slots or self.num_workers)
        numbers = parse_slots(slots, None, most)
        self._grow(int(numbers.max()) + 1 if len(numbers) else 0)
        return numbers, self._last[numbers]

    def _grow(self, length: int) -> None:
        """Extend the arrays of slots to at least this length."""
        more = length - len(self._last)
        if more > 0:
            initial = self.get_state(mujoco.MjData(self.model))
            self._last = np.concatenate([self._last, np.broadcast_to(initial, (more, self.state_size))])
            self._randomised = np.concatenate([self._randomised, np.zeros(more, np.int64)])

    def _reusable(self, key: Any) -> ImageBuffer | None:
        """Return the buffer of the second last call with copy=False, if it fits and is not drawn into any more."""
        if len(self._ring) == RING:
            entry = self._ring[0]
            if entry.key == key and entry.call.future.done() and not entry.call.in_flight:
                return entry.buffer
        return None

    def get_state(self, data: mujoco.MjData, out: npt.NDArray[np.float64] | None = None) -> npt.NDArray[np.float64]:
        """Return a row of `states`: the parts of `data` that an image depends on.

        Args:
            data: of the pool's model.
            out: float64 of shape `(state_size,)` to fill; None for a new array.

        Raises:
            ValueError: if it is the data of a model whose states have other sizes.
        """
        check_data("data", self.model, self.state_spec, data)
        row = np.empty(self.state_size) if out is None else out
        mujoco.mj_getState(self.model, data, row, self.state_spec)
        return row


def _late_error(timeout_s: float | None, restarts: bool, worker: Worker) -> RenderTimeout:
    again = "; it is replaced" if restarts else ""
    return RenderTimeout(
        f"render worker {worker.index} (pid {worker.pid}) finished no image for timeout_s={timeout_s}{again}"
    )
