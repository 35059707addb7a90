"""The start and close of a vector env over workers: its workers, its render pools, and its scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gymnasium.vector import AutoresetMode

from aioenv.core.images import PixelRenderer
from aioenv.core.scheduler import RequestScheduler
from aioenv.core.worker_pool import WorkerPool, WorkerPoolConfig
from aioenv.errors import ClosedError, RenderError, SpaceMismatchError, WorkerStartError
from aioenv.process.async_resource import gather_internal
from aioenv.rendering.backends import backend_environment, candidate_backends, no_backend_error, warn_of_software
from aioenv.rendering.config import BACKENDS, parse_devices, refused_by_envs
from aioenv.rendering.pixels import PixelsRefused, replace_states
from aioenv.rendering.step_images import StepImages
from aioenv.worker.mujoco_gl import choose_backend_here

if TYPE_CHECKING:
    from aioenv.process.supervisor import Worker
    from aioenv.rendering.config import RenderConfig
    from aioenv.rendering.step_pool import StepRenderPool
    from aioenv.state.render_source import MujocoSource

__all__ = ["CLOSE_GRACE_S", "NO_PHYSICS", "WorkerSession", "make_step_pool"]

NO_PHYSICS = (
    "render: this vector env has no model and physics_states, from which images could be drawn; "
    'backend="workers" takes envs that draw themselves; without render=, render() gives what this one draws'
)

# How long workers may take to close their envs by default, in seconds.
CLOSE_GRACE_S = 1.0


def make_step_pool(
    sources: Sequence[MujocoSource],
    render: RenderConfig,
    config: WorkerPoolConfig,
    timeout_s: float | None,
    on_timeout: str = "raise",
) -> StepRenderPool:
    """Make the pool that draws the states of slots with these sources; it is not started."""
    from aioenv.rendering.step_pool import StepRenderPool

    distinct = list(dict.fromkeys(sources))
    return StepRenderPool(
        distinct,
        [distinct.index(source) for source in sources],
        render,
        # (that of a vector env is about its own arrays)
        transport="auto" if config.vectorized else config.transport,
        start=config.start,
        channel=config.channel,
        log_prefix=config.log_prefix,
        start_timeout_s=config.start_timeout_s,
        restart=config.restart,
        timeout_s=timeout_s,
        on_timeout=on_timeout,
    )


class WorkerSession:
    """The processes of a vector env over workers, from their start to their close (see `Session`).

    Attributes:
        worker_pool: the workers.
        backend: what steps them; None until the start is complete.
        images: what draws their states, if that was asked for.
    """

    def __init__(
        self,
        config: WorkerPoolConfig,
        render: RenderConfig | None,
        pixels: RenderConfig | None,
        *,
        copy: bool,
        must_reset: bool,
        timeout_s: float | None,
        on_timeout: str,
    ) -> None:
        if render is not None and pixels is None and not config.vectorized:
            # for envs that draw themselves
            config = _on_backend(config, candidate_backends(_backend(config, render))[0], render)
        self.worker_pool = WorkerPool(config)
        self.backend: RequestScheduler | None = None
        self.images: StepImages | None = None
        self._pool: StepRenderPool | None = None
        self._pixels_pool: StepRenderPool | None = None
        self._config = config
        self._render = render
        self._pixels = pixels
        self._copy = copy
        self._must_reset = must_reset
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout

    async def start(self) -> None:
        """Start the workers, then the render pools. If anything fails, or this is cancelled, nothing is left.

        Raises:
            WorkerStartError, SpaceMismatchError, RenderError: see `AsyncVectorEnv`.
            ValueError: if pixels were asked for that an env does not have.
        """
        if self._pixels is None:
            await self.worker_pool.start()
        else:
            await self._start_drawing_workers(self._pixels)
        try:
            pixel_renderer = None
            if self._pixels is not None and (self._pixels.workers is not None or self._config.vectorized):
                pixel_renderer = await self._start_pixel_renderer(self._pixels)
            state_size, draws_late = 0, False
            if self._render is not None:
                state_size, draws_late = await self._start_images(self._render)
            await self.worker_pool.configure(state_size, draws_late)
        except GeneratorExit:  # its loop was closed
            self.abandon()
            raise
        except BaseException:
            await self._end()
            raise
        mode = self.worker_pool.metadata.get("autoreset_mode", self._config.autoreset_mode)  # a vector env has its own
        self.backend = RequestScheduler(
            self.worker_pool,
            self.images,
            state_size=state_size,
            mode=mode,
            must_reset=self._must_reset or (self._config.vectorized and mode is AutoresetMode.DISABLED),
            copy=self._copy,
            timeout_s=self._timeout_s,
            on_timeout=self._on_timeout,
            restart=self._config.restart,
            pixel_renderer=pixel_renderer,
        )
        self.backend.timeouts.pools = self.pools
        if self._config.inline and self._timeout_s is None and not self._drawn_by_envs(draws_late):
            self.worker_pool.allow_inline()

    def _drawn_by_envs(self, draws_late: bool) -> bool:
        """Return whether envs draw, which ties them to the thread on which they were made."""
        own_pixels = self._pixels is not None and self._pixels.workers is None
        return draws_late or own_pixels or any(mode is not None for mode in self.worker_pool.render_modes)

    @property
    def env_info(self) -> WorkerPool:
        """The spaces and metadata of the envs."""
        return self.worker_pool

    @property
    def workers(self) -> Sequence[Worker]:
        """The worker processes that hold the envs."""
        return self.worker_pool.workers

    async def _start_drawing_workers(self, pixels: RenderConfig) -> None:
        """Start workers that draw observations themselves, on the first OpenGL backend that works."""
        reasons: list[str] = []
        last: WorkerStartError | None = None
        backends = candidate_backends(_backend(self._config, pixels), parse_devices(pixels.devices))
        for backend in backends:
            if self._config.in_thread:
                choose_backend_here(backend)
            self.worker_pool = WorkerPool(_on_backend(self._config, backend, pixels))
            try:
                await self.worker_pool.start()
            except SpaceMismatchError as exc:
                if pixels.workers is None:
                    raise
                raise SpaceMismatchError(
                    f"{exc}. (pixels: where render workers draw, states stand for images on their way, and those of "
                    "different models differ: such envs take RenderConfig(workers=None), and draw themselves)"
                ) from None
            except WorkerStartError as exc:
                cause = exc.__cause__
                if isinstance(cause, PixelsRefused):
                    raise ValueError(str(cause)) from None
                if not isinstance(cause, RenderError):
                    raise
                last = exc
                reasons.append(f"{backend}: {cause}")
            else:
                warn_of_software(self.worker_pool.drawn_by, backends)
                return
        raise no_backend_error(reasons) from last

    async def _start_images(self, config: RenderConfig) -> tuple[int, bool]:
        """Start a pool that draws images, if every env is a MuJoCo env; else the workers draw themselves.

        Returns:
            How many float64 of state each reply carries a row, and whether the workers draw.
        """
        worker_pool = self.worker_pool
        num_envs = len(worker_pool.sources)
        sources = [source for source in worker_pool.sources if source is not None]
        if len(sources) < num_envs:
            if self._config.vectorized:
                raise RenderError(NO_PHYSICS)
            others = [slot for slot, source in enumerate(worker_pool.sources) if source is None]
            which = "these envs" if len(others) == num_envs else f"slots {others}"
            why = f"render: {which} are not MuJoCo envs, or have a render of their own, so all envs draw themselves"
            hint = (
                "(Of MuJoCo envs cameras of the model that are named, RenderConfig(camera=…), are drawn in any case, "
                "unless a wrapper has a render of its own)"
            )
            if wants := refused_by_envs(config):
                raise RenderError(f"{why}, as they see fit: not with {wants}. {hint}")
            for slot, mode in enumerate(worker_pool.render_modes):
                if mode != "rgb_array":
                    got = f"render_mode={mode!r} of slot {slot}"
                    raise RenderError(f'{why}, which takes render_mode="rgb_array"; got {got}. {hint}')
            if self._config.spares:
                raise RenderError(f"{why}: not with spare_envs=True, so far")
            self.images = StepImages(num_envs, None)
            return 0, True
        self._pool = make_step_pool(sources, config, self._config, self._timeout_s, self._on_timeout)
        await self._pool.start()
        self.images = StepImages(num_envs, self._pool, config.max_in_flight)
        return max(source.state_size for source in sources), False

    async def _start_pixel_renderer(self, config: RenderConfig) -> PixelRenderer | None:
        """Start the pool that draws observations; None if the envs are not all MuJoCo's, and draw themselves."""
        worker_pool = self.worker_pool
        sources = [source for source in worker_pool.sources if source is not None]
        if len(sources) < len(worker_pool.sources):
            return None
        self._pixels_pool = make_step_pool(sources, config, self._config, self._timeout_s, self._on_timeout)
        await self._pixels_pool.start()
        key, space = replace_states(worker_pool.single_observation_space, config)
        return PixelRenderer(self._pixels_pool, worker_pool.replace_leaf(key, space), key)

    @property
    def render_workers(self) -> Sequence[Worker]:
        """The render workers, for `render` and for observations."""
        return [worker for pool in self.pools for worker in pool.workers]

    async def close(self, grace_s: float) -> None:
        """End all processes; callers that wait for a result get a ClosedError.

        Args:
            grace_s: how long workers may take to close their envs before they are told by signals, in seconds.
        """
        try:
            if self.backend is not None:
                self.backend.close()
                if self.backend.restarter is not None:
                    await self.backend.restarter.close()
            if self.images is not None:
                self.images.fail_all(ClosedError("the vector env was closed"))
        finally:  # also after an error: no process may be left
            await self._end(grace_s)
            if self.backend is not None:
                self.backend.free()

    @property
    def pools(self) -> list[StepRenderPool]:
        """The pools that draw states, for `render` and for observations."""
        return [pool for pool in (self._pool, self._pixels_pool) if pool is not None]

    async def _end(self, grace_s: float = CLOSE_GRACE_S) -> None:
        ends = [self.worker_pool.close(grace_s)]
        ends += [pool.close() for pool in self.pools]
        await gather_internal(*ends)

    def forget_code(self) -> None:
        """Release the snapshot of the factories: no worker is started from it any more."""
        self._config = self._config._replace(code=None)
        self.worker_pool.forget_code()

    def abandon(self) -> None:
        """Kill every process without waiting."""
        if self.backend is not None and self.backend.restarter is not None:
            self.backend.restarter.abandon()
        self.worker_pool.abandon()
        for pool in self.pools:
            pool.abandon()


def _backend(config: WorkerPoolConfig, drawing: RenderConfig) -> str | None:
    """Return the OpenGL backend that the config of the drawing, or the variables of all workers, ask for."""
    given = {(variables or {}).get("MUJOCO_GL", "").lower() for variables in config.worker_env}
    if drawing.backend is None and len(given) == 1 and given <= {*BACKENDS}:
        return given.pop()
    return drawing.backend


def _on_backend(config: WorkerPoolConfig, backend: str, drawing: RenderConfig) -> WorkerPoolConfig:
    """Return the config with variables for drawing in workers; the user's own variables take precedence."""
    devices = parse_devices(drawing.devices)
    variables = []
    for index, given in enumerate(config.worker_env):
        chosen = backend_environment(backend, devices[index % len(devices)] if devices else None)
        if given and "MUJOCO_GL" in given:
            del chosen["PYOPENGL_PLATFORM"]  # which goes with it
        variables.append({**chosen, **(given or {})})
    return config._replace(worker_env=variables)
