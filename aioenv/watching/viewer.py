"""`Viewer`: the page of a run, as the run has it: a process that serves it, and a task that sends it updates."""

from __future__ import annotations

import asyncio
import errno
import html
import importlib.util
import json
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from aioenv.errors import ClosedError, RenderError, describe_exit
from aioenv.process.async_resource import internal_task, wait_through_cancel
from aioenv.process.channel import PipeReader, PipeWriter
from aioenv.process.child import Child, kill_group
from aioenv.process.environment import bootstrap, worker_environment
from aioenv.rendering.step_images import NoImage
from aioenv.watching.messages import PageUpdate, Setup, Source, pack
from aioenv.watching.observer import SlotObserver

if TYPE_CHECKING:
    from aioenv.core.backend import Backend
    from aioenv.core.waits import Stats
    from aioenv.rendering.step_images import StepImages

__all__ = ["Viewer", "check_watch"]

_log = logging.getLogger("aioenv")

_START_S = 60.0  # the viewer imports MuJoCo and viser
_END_S = 1.0  # after the end of its input it has nothing to do
_IDLE_S = 1.0  # updates are so far apart while the run stands still, or no browser shows the page
# The longer side of an image that an update may have; larger ones are thinned out, as sixteen of 480 x 480 at 15 a
# second would take the run 8 % of a CPU.
_SIDE = 200
_NO_IMAGES = (
    "watch: the page shows states or images that come with the results: make the vector env with "
    'render=aioenv.RenderConfig(workers=0), and envs that are not MuJoCo\'s with render_mode="rgb_array", too'
)


def check_watch(slots: Any, port: Any, fps: Any, num_envs: int) -> npt.NDArray[np.int64]:
    """Check the arguments of `watch`, and return the slots that are shown, ascending.

    Raises:
        ValueError, IndexError: if an argument is not one of its values.
        ImportError: if viser is not installed.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ValueError(f"watch: port: expected an int from 0 (any that is free) to 65535, got {port!r}")
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0.1 <= fps <= 60:
        raise ValueError(f"watch: fps: expected a number from 0.1 to 60, got {fps!r}")
    if isinstance(slots, (int, np.integer)) and not isinstance(slots, bool):
        if slots < 1:
            raise ValueError(f"watch: slots: expected how many, or a sequence of slot numbers, got {slots!r}")
        numbers = np.arange(min(int(slots), num_envs))
    else:
        listed = [*slots] if hasattr(slots, "__iter__") and not isinstance(slots, (str, bytes)) else []
        if not listed or not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in listed):
            raise ValueError(f"watch: slots: expected how many, or a sequence of slot numbers, got {slots!r}")
        if wrong := [int(n) for n in listed if not 0 <= n < num_envs]:
            raise IndexError(f"watch: slots {wrong} are not from 0 to {num_envs - 1}")
        numbers = np.unique(np.array(listed, np.int64))
    if importlib.util.find_spec("viser") is None:
        raise ImportError("watch takes viser: pip install viser", name="viser")
    return numbers


class Viewer:
    """The page of a run, from `AsyncVectorEnv.watch` until it is closed; an async context manager.

    Attributes:
        url: the address of the page, on this machine.
        slots: the slots that it shows, ascending.
        visitors: how many browsers show the page. Without any an update is sent once a second.
        dropped: how many updates were dropped since the page was still busy with an earlier one.
        closed: whether it was closed, by itself or with the vector env.
    """

    def __init__(
        self,
        backend: Backend,
        slots: npt.NDArray[np.int64],
        *,
        num_envs: int,
        mode: AutoresetMode,
        stats: Callable[[], Stats],
        fps: float,
    ) -> None:
        if backend.images is None:
            raise RenderError(_NO_IMAGES)
        self.url = ""
        self.slots = tuple(slots.tolist())
        self.visitors = self.dropped = 0
        self.closed = False
        self._slots = slots
        self._images: StepImages = backend.images
        self._pool = self._images.pool
        self._backend = backend
        self._stats = stats
        self._period_s = 1 / fps
        state_size = 0 if self._pool is None else max(source.state_size for source in self._pool.sources)
        whole, restarts = not backend.table.steps, backend.history is not None
        self._observer = SlotObserver(slots, num_envs, state_size, mode, whole=whole, restarts=restarts)
        self._child: Child | None = None
        self._input: PipeWriter | None = None
        self._output: PipeReader | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sent_models: set[bytes] = set()
        self._sent_images: dict[int, Any] = {}  # by row
        self._warned = False  # of an image that can't be shown
        self._counted = perf_counter(), stats().env_steps
        self._rate = 0.0
        self._summaries = 0

    # ------------------------------------------------------------ start and end

    async def start(self, title: str, port: int) -> None:
        """Start the process, and wait until it serves the page. If this is cancelled or fails, nothing is left of it.

        Raises:
            ClosedError: if it was closed meanwhile.
            OSError: if the port is taken or not for this user, or the process can't be started.
            RenderError: if the process has failed.
        """
        sources = () if self._pool is None else tuple(self._pool.sources)
        source_of = () if self._pool is None else tuple(self._pool.source_numbers(self._slots).tolist())
        # the viewer draws nothing itself, and an OpenGL that is not there must not keep it from importing MuJoCo
        environ = worker_environment({"MUJOCO_GL": "disable"})
        process = subprocess.Popen(  # noqa: ASYNC220 (asyncio's own blocks for as long)
            bootstrap("viewer_process", "", "watching"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,  # Ctrl-C goes to the run alone
        )
        assert process.stdin is not None and process.stdout is not None
        reads, writes = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        process.stdin.close()
        process.stdout.close()
        self._child = Child(process)
        output = self._output = PipeReader(reads, 1 << 16)
        self._input = PipeWriter(writes)
        try:
            self._input.writelines(pack(Setup(title, port, self.slots, sources, source_of)))
            self.url = await self._read_address(output, port)
        except BaseException as exc:
            closed = self.closed
            self.abandon()
            if closed and isinstance(exc, RenderError):
                raise ClosedError("watch: the vector env was closed meanwhile") from None
            raise
        self._backend.attach_observer(self._observer)
        self._tasks = [internal_task(self._send_updates()), internal_task(self._count_visitors(output))]

    async def _read_address(self, output: PipeReader, port: int) -> str:
        try:
            async with asyncio.timeout(_START_S):
                line = await output.stream.readline()
        except TimeoutError:
            raise RenderError(f"watch: the page was not served within {_START_S:g} s") from None
        answer = json.loads(line) if line else {"error": "its process has ended; its output says why"}
        if "errno" in answer:
            why = "is taken" if answer["errno"] == errno.EADDRINUSE else f"can't be used: {answer['error']}"
            raise OSError(answer["errno"], f"watch: port {port} {why}; port=0 takes any that is free")
        if "error" in answer:
            raise RenderError(f"watch: the page can't be served: {answer['error']}")
        return str(answer["url"])

    async def close(self) -> None:
        """End the page and its process. Idempotent; if this is cancelled, the process is killed."""
        self._detach()
        child, self._child = self._child, None
        if child is not None:
            task = internal_task(asyncio.to_thread(_end, child))
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                kill_group(child.pid, signal.SIGKILL)
                await wait_through_cancel(task)
                raise

    def abandon(self) -> None:
        """End the page and kill its process, without a loop to wait on. Idempotent."""
        self._detach()
        child, self._child = self._child, None
        if child is not None:
            child.kill_and_reap()
            child.close()

    def _detach(self) -> None:
        """Send nothing more; the process ends as its input has ended."""
        if not self.closed:
            self.closed = True
            self._backend.attach_observer(None)
        for task in self._tasks:
            if not task.get_loop().is_closed():
                task.cancel()
        for pipe in (self._input, self._output):
            if pipe is not None:
                pipe.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Viewer {self.url} of {len(self.slots)} slots{', closed' if self.closed else ''}>"

    def _repr_html_(self) -> str:
        url = html.escape(self.url)
        if self.closed:  # the link would lead nowhere
            return f"{url} showed {len(self.slots)} slots; it is closed"
        return f'<a href="{url}" target="_blank">{url}</a> shows {len(self.slots)} slots'

    # ------------------------------------------------------------ updates

    async def _count_visitors(self, output: PipeReader) -> None:
        while line := await output.stream.readline():
            self.visitors = json.loads(line)["visitors"]

    async def _send_updates(self) -> None:
        """Send the newest states at most `fps` times a second; an update for which the pipe has no room is dropped."""
        child, pipe = self._child, self._input
        assert child is not None and pipe is not None
        version: Any = None
        last_s = 0.0
        while True:
            await asyncio.sleep(self._period_s)
            if child.ended:
                _log.warning(
                    "watch: the process of the page has ended (%s); the run goes on", describe_exit(_exit_code(child))
                )
                self._detach()
                return
            now = perf_counter()
            seen = (self._observer.version, self._backend.table.paused is None)
            if (seen == version or not self.visitors) and now - last_s < _IDLE_S:
                continue
            if pipe.get_write_buffer_size():
                self.dropped += 1
                continue
            version, last_s = seen, now
            try:
                update = self._make_update(now)
            except Exception:  # of one update: the run and the page go on
                _log.warning("watch: an update could not be made", exc_info=True)
                continue
            pipe.writelines(pack(update))

    def _make_update(self, now: float) -> PageUpdate:
        """Return the slots as they are now."""
        observer, slots = self._observer, self._slots
        states, known, images = None, observer.known, {}
        edits: dict[str, npt.NDArray[Any]] = {}
        models: dict[int, bytes] = {}
        new: dict[bytes, Source] = {}
        rows: dict[int, bytes] = {}
        if self._pool is not None:
            states = observer.states
            context = self._pool.context_of(slots.tolist(), states)
            edits, rows = context.edits, context.rows
            for row, (key, (first, data)) in context.models.items():
                models[row] = key
                if key not in self._sent_models:
                    new[key] = Source(first, data)
            self._sent_models = set(models.values())  # the page forgets others
        else:
            for row, image in enumerate(self._images.last_drawn(slots)):
                if image is None or image is self._sent_images.get(row):
                    continue
                if (why := _why_not_shown(image)) is None:
                    self._sent_images[row] = image
                    images[row] = _thinned(image)
                elif not self._warned and row not in self._sent_images:  # else its tile stays as it is
                    self._warned = True
                    _log.warning("watch: slot %d is not shown: %s", self.slots[row], why)
            known = np.array([row in self._sent_images for row in range(len(slots))])
        paused = self._backend.table.paused
        lengths = np.where(observer.whole, observer.lengths, -1)
        hidden = np.zeros(len(slots), np.bool_) if paused is None else paused[slots]
        return PageUpdate(
            states, known, edits, models, new, rows, images, observer.returns, lengths, observer.last_returns, hidden,
            self._summary(now),
        )  # fmt: skip

    def _summary(self, now: float) -> dict[str, str]:
        """Return the numbers of the run, once a second; else nothing."""
        then, steps = self._counted
        if now - then < _IDLE_S and self._summaries:
            return {}
        stats = self._stats()
        if now - then >= _IDLE_S:
            # `stats(reset=True)` counts from zero again
            self._rate = max(0, stats.env_steps - steps) / (now - then)
            self._counted = now, stats.env_steps
        self._summaries += 1
        recent = self._observer.recent
        return {
            "env-steps a second": f"{self._rate:,.0f}",
            "env-steps": f"{stats.env_steps:,}",
            "episodes ended": f"{self._observer.episodes:,}",
            "mean return": f"{np.mean(recent):,.1f} (the last {len(recent)})" if recent else "-",
        }


def _end(child: Child) -> None:
    """Wait for the end of a process, which is near, and reap it; kill it if it takes too long."""
    child.wait(_END_S)
    child.kill_and_reap()
    child.close()


def _exit_code(child: Child) -> int:
    child.reap()
    return child.returncode or 0


def _why_not_shown(image: Any) -> str | None:
    """Return why what an env has drawn can't be shown; None if it can."""
    if isinstance(image, NoImage):
        return image.why
    if not isinstance(image, np.ndarray):
        return f"its render gives {type(image).__name__}, not an array"
    grey_or_colours = image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3, 4))
    if not grey_or_colours or not image.size or image.dtype.kind not in "uif":
        return f"its render gives {image.dtype} of shape {image.shape}, which is no image"
    return None


def _thinned(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    step = -(-max(image.shape[:2]) // _SIDE)
    return image[::step, ::step]
