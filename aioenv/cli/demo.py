"""Step MuJoCo envs and draw them at the same time, and make a video of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

import aioenv
from aioenv.cli.arguments import out_file, positive_int, size
from aioenv.cli.terminal import progress, say, show_table
from aioenv.loops.record import TiledVideo, check_name, fps_of
from aioenv.platform import usable_cpus
from aioenv.rendering.step_pool import StepRenderPool
from aioenv.state.render_source import MujocoSource, find_source, read_state

__all__ = ["HELP", "add_arguments", "run"]

HELP = "step MuJoCo envs and draw them at the same time, and make a video of it"

ENV = "HalfCheetah-v5"
WARM_UP_STEPS = 20
# Images are kept until a chunk is full, and then encoded. The clock is stopped meanwhile, so the encoder is not
# measured. 50 steps of 16 images of 160 x 120 are 46 MB.
CHUNK_STEPS = 50


@dataclass(frozen=True)
class DemoSettings:
    """The envs, steps and images of the demo, the same in every measurement."""

    num_envs: int
    steps: int
    render: aioenv.RenderConfig
    out: Path

    def actions(self, space: Any) -> npt.NDArray[Any]:
        """Sample random actions for every step and env, the same in every measurement."""
        space.seed(0)
        return np.stack([space.sample() for _ in range(self.steps)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--steps", type=positive_int, default=1000, help="steps of every env (default: 1000)")
    parser.add_argument("--num-envs", type=positive_int, default=16, help="how many envs (default: 16)")
    parser.add_argument("--out", type=out_file, default=Path("out/demo.mp4"), help="the video (default: out/demo.mp4)")
    parser.add_argument(
        "--size", type=size, default=(160, 120), metavar="WxH", help="of one image, in pixels (default: 160x120)"
    )
    parser.add_argument("--no-images", action="store_true", help="only physics")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 on success, with images or without."""
    width, height = args.size
    try:
        # the env's own view stands still, and the cheetahs soon leave it
        render = aioenv.RenderConfig(width=width, height=height, camera="track", quality="fast")
        check_name(args.out)
    except ValueError as exc:
        print(f"aioenv demo: {exc}", file=sys.stderr)
        return 1
    return aioenv.run(demo(DemoSettings(args.num_envs, args.steps, render, args.out), images=not args.no_images))


async def demo(settings: DemoSettings, *, images: bool) -> int:
    """Measure physics, images and both at once, in turn; the last makes the video."""
    n, cpus = settings.num_envs, usable_cpus()
    workers = "1 worker process" if min(n, cpus) == 1 else f"{min(n, cpus)} worker processes"
    say(f"{n} x {ENV}, {settings.steps:,} steps, in {workers} on {cpus} CPUs")
    video: TiledVideo | None = None
    unable: Exception | None = None
    try:
        video = TiledVideo(settings.out) if images else None
    except (ImportError, OSError) as exc:
        unable = exc
    problem: Exception | None = None
    async with contextlib.AsyncExitStack() as stack:
        measurements = [await physics_alone(settings, stack)]
        if images:
            try:
                measurements += [await images_alone(settings, stack), await overlapped(settings, stack, video)]
            except aioenv.RenderError as exc:
                problem = exc
        await measure(settings, measurements)
    print_table(settings, measurements)
    if problem is not None:
        say(f"\nNo pictures this time, because nothing can be drawn here: {problem}")
    elif video is not None:
        say(f"Video: {video.path.resolve()}", wrap=False)
    elif images:
        say(f"No video was made: {unable}")
    return 0


# ---------------------------------------------------------------- measurements


@dataclass
class Measurement:
    """One measurement, which takes turns with the others.

    Attributes:
        label: its name in the table.
        chunk: does the steps from one number up to another.
        physics, images: whether it steps envs, and whether it draws them.
        after: called after a chunk with the clock stopped.
        detail: the renderer.
        seconds: how long the chunks took so far.
    """

    label: str
    chunk: Callable[[int, int], Coroutine[Any, Any, None]]
    physics: bool
    images: bool
    after: Callable[[], Coroutine[Any, Any, None]] | None = None
    detail: str = ""
    seconds: float = 0.0


async def measure(settings: DemoSettings, measurements: list[Measurement]) -> None:
    """Do all steps of all measurements, a chunk of each in turn: a busy machine disturbs them alike."""
    shown = measurements[-1]
    with progress(settings.steps) as show:
        for start in range(0, settings.steps, CHUNK_STEPS):
            stop = min(start + CHUNK_STEPS, settings.steps)
            rate = f"{start * settings.num_envs / shown.seconds:,.0f}" if start else "…"
            show(f"{rate} env-steps/s" + f", {rate} images/s" * shown.images, stop - start)
            for one in measurements:
                began = time.perf_counter()
                await one.chunk(start, stop)
                one.seconds += time.perf_counter() - began
                if one.after is not None:
                    await one.after()


async def physics_alone(settings: DemoSettings, stack: contextlib.AsyncExitStack) -> Measurement:
    """Prepare all steps without images."""
    envs = await stack.enter_async_context(aioenv.make_vec(ENV, num_envs=settings.num_envs))
    actions = settings.actions(envs.action_space)

    async def chunk(start: int, stop: int) -> None:
        for t in range(start, stop):
            await envs.step(actions[t])

    await envs.reset(seed=0)
    await chunk(0, min(WARM_UP_STEPS, settings.steps))
    await envs.reset(seed=0)
    return Measurement("physics alone", chunk, physics=True, images=False)


class RandomWalk(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that collects the states of many random steps, in a worker."""

    def walk(self, steps: int) -> tuple[MujocoSource, npt.NDArray[np.float64]]:
        """Return the source of the env's images, and its states, float64 of shape `(steps, state size)`."""
        source = find_source(self.env)
        assert source is not None  # it is a MuJoCo env
        states = np.zeros((steps, source.state_size))  # the number of the initial model is 0
        base: Any = self.env.unwrapped
        self.env.action_space.seed(0)
        self.env.reset(seed=0)
        for row in states:
            _, _, terminated, truncated, _ = self.env.step(self.env.action_space.sample())
            read_state(base.model, base.data, row[int(source.numbered) :], source.state_spec, source.fields)
            if terminated or truncated:
                self.env.reset()
        return source, states


async def images_alone(settings: DemoSettings, stack: contextlib.AsyncExitStack) -> Measurement:
    """Prepare all images without steps, drawn by a pool of their own.

    The states come from one random walk; each slot is some steps further into it than the slot before. They are as many
    as the overlapped measurement draws, and of the same kind.

    Raises:
        RenderError: if no OpenGL backend works.
    """
    async with aioenv.make_vec(ENV, wrappers=[RandomWalk]) as one:
        source, states = await one.call_at(0, "walk", settings.steps)
    n = settings.num_envs
    slots = np.arange(n)
    ahead = slots * max(1, len(states) // n)
    pool = StepRenderPool([source], [0] * n, settings.render)
    await pool.start()
    stack.push_async_callback(pool.close)

    async def chunk(start: int, stop: int) -> None:
        for t in range(start, stop):
            await draw_states(pool, slots.tolist(), states[(t + ahead) % len(states)])

    await chunk(0, min(WARM_UP_STEPS, settings.steps))
    detail = f"{pool.backend}, {pool.renderer}" if pool.renderer else pool.backend
    return Measurement("images alone", chunk, physics=False, images=True, detail=detail)


async def overlapped(settings: DemoSettings, stack: contextlib.AsyncExitStack, video: TiledVideo | None) -> Measurement:
    """Prepare all steps and all images, which are drawn while the next step is taken."""
    envs = await stack.enter_async_context(aioenv.make_vec(ENV, num_envs=settings.num_envs, render=settings.render))
    actions = settings.actions(envs.action_space)
    taken: list[npt.NDArray[np.uint8]] = []

    async def chunk(start: int, stop: int) -> None:
        step = asyncio.ensure_future(envs.step(actions[start]))
        for t in range(start, stop):
            await step
            if t + 1 < stop:
                step = asyncio.ensure_future(envs.step(actions[t + 1]))  # the next step is in flight …
            taken.append(await envs.render())  # … while the images of this one are drawn

    async def encode() -> None:
        if video is not None:
            await video.write(taken)
        taken.clear()

    await envs.reset(seed=0)
    await chunk(0, min(WARM_UP_STEPS, settings.steps))
    taken.clear()
    await envs.reset(seed=0)
    if video is not None:
        video.fps = fps_of(envs.metadata)
        stack.push_async_callback(video.close)
    return Measurement("both overlapped", chunk, physics=True, images=True, after=encode)


async def draw_states(pool: StepRenderPool, slots: list[int], states: npt.NDArray[np.float64]) -> None:
    """Have the pool draw one state a slot.

    Raises:
        RenderError: if one could not be drawn.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_done(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    pool.submit(slots, states, pool.new_buffer(len(slots)), 0, on_done)
    await done


# ---------------------------------------------------------------- the table


def print_table(settings: DemoSettings, measurements: list[Measurement]) -> None:
    """Print how long each measurement took, and how much time the overlap saved."""
    total = settings.num_envs * settings.steps
    rows = []
    for one in measurements:
        rate = f"{total / one.seconds:,.0f}"
        rows.append((one.label, f"{one.seconds:.2f}", rate if one.physics else "-", rate if one.images else "-"))
    say()
    show_table(("", "seconds", "env-steps/s", "images/s"), rows)
    if len(measurements) < 3:
        return
    physics, images, both = (one.seconds for one in measurements)
    one_by_one = physics + images
    saved = (one_by_one - both) / one_by_one
    say(
        f"\nThe overlap {'saved' if saved >= 0 else 'cost'} {abs(saved):.0%}: physics and then images take "
        f"{one_by_one:.2f} s, both at once {both:.2f} s (encoding the video not counted).",
        "bold",
    )
    config = settings.render
    say(f"Images: {config.width} x {config.height}, {config.quality}, drawn by {measurements[1].detail}.")
    if "pipe" in measurements[1].detail:  # llvmpipe, softpipe
        say("This is software OpenGL: it needs the CPUs that physics needs, so only their idle time can be saved.")
