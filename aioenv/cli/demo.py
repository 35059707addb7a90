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
from aioenv.cli.options import out_file, positive_int, size
from aioenv.loops.progress import progress_bar
from aioenv.loops.video import TiledVideo, check_name, fps_of
from aioenv.platform import usable_cpus
from aioenv.rendering.step_pool import StepRenderPool
from aioenv.state.render_source import MujocoSource, find_source, read_state

__all__ = ["HELP", "add_arguments", "run"]

HELP = "step MuJoCo envs and draw them at the same time, and make a video of it"

ENV = "HalfCheetah-v5"
WARM_UP_STEPS = 20
# Images are kept until a chunk is full, and then encoded with the clock stopped: the encoder is no part of what
# is measured. 50 steps of 16 images of 160 x 120 are 46 MB.
CHUNK_STEPS = 50


@dataclass(frozen=True)
class Plan:
    """What the demo does; every measurement does all of it."""

    num_envs: int
    steps: int
    render: aioenv.RenderConfig
    out: Path

    def actions(self, space: Any) -> npt.NDArray[Any]:
        """Random actions for every step and env, the same in every measurement."""
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
    """Run the demo; 0 if it went well, with images or without."""
    width, height = args.size
    try:
        # the env's own view stands still, and the cheetahs soon run out of it
        render = aioenv.RenderConfig(width=width, height=height, camera="track", quality="fast")
        check_name(args.out)
    except ValueError as exc:
        print(f"aioenv demo: {exc}", file=sys.stderr)
        return 1
    return aioenv.run(demo(Plan(args.num_envs, args.steps, render, args.out), images=not args.no_images))


async def demo(plan: Plan, *, images: bool) -> int:
    """Measure physics, images and both at once, in turn; the last makes the video."""
    n, cpus = plan.num_envs, usable_cpus()
    workers = "1 worker process" if min(n, cpus) == 1 else f"{min(n, cpus)} worker processes"
    print(f"{n} x {ENV}, {plan.steps:,} steps, in {workers} on {cpus} CPUs")
    video: TiledVideo | None = None
    unable: Exception | None = None
    try:
        video = TiledVideo(plan.out) if images else None
    except (ImportError, OSError) as exc:
        unable = exc
    problem: Exception | None = None
    async with contextlib.AsyncExitStack() as stack:
        runs = [await physics_alone(plan, stack)]
        if images:
            try:
                runs += [await images_alone(plan, stack), await overlapped(plan, stack, video)]
            except aioenv.RenderError as exc:
                problem = exc
        await measure(plan, runs)
    print_table(plan, runs)
    if problem is not None:
        print(f"\nNo pictures this time, because nothing can be drawn here: {problem}")
    elif video is not None:
        print(f"Video: {video.path.resolve()}")
    elif images:
        print(f"No video was made: {unable}")
    return 0


# ---------------------------------------------------------------- what is measured


@dataclass
class Run:
    """One of the things that are measured.

    Attributes:
        label: what to call it.
        chunk: does the steps from one number up to another.
        physics, images: whether it steps envs, and whether it draws them.
        after: what to do after a chunk with the clock stopped.
        seconds: how long the chunks took so far.
    """

    label: str
    chunk: Callable[[int, int], Coroutine[Any, Any, None]]
    physics: bool
    images: bool
    after: Callable[[], Coroutine[Any, Any, None]] | None = None
    detail: str = ""
    seconds: float = 0.0


async def measure(plan: Plan, runs: list[Run]) -> None:
    """Do all steps of all runs: a chunk of each in turn, so that a busy machine disturbs them alike."""
    bar = progress_bar(plan.steps)
    shown = runs[-1]
    try:
        for start in range(0, plan.steps, CHUNK_STEPS):
            stop = min(start + CHUNK_STEPS, plan.steps)
            for run in runs:
                began = time.perf_counter()
                await run.chunk(start, stop)
                run.seconds += time.perf_counter() - began
                if run.after is not None:
                    await run.after()
            rate = stop * plan.num_envs / shown.seconds
            bar.set_postfix_str(f"{rate:,.0f} env-steps/s" + f", {rate:,.0f} images/s" * shown.images, False)
            bar.update(stop - start)
    finally:
        bar.close()


async def physics_alone(plan: Plan, stack: contextlib.AsyncExitStack) -> Run:
    """All steps, with nothing drawn."""
    envs = await stack.enter_async_context(aioenv.make_vec(ENV, num_envs=plan.num_envs))
    actions = plan.actions(envs.action_space)

    async def chunk(start: int, stop: int) -> None:
        for t in range(start, stop):
            await envs.step(actions[t])

    await envs.reset(seed=0)
    await chunk(0, min(WARM_UP_STEPS, plan.steps))
    await envs.reset(seed=0)
    return Run("physics alone", chunk, physics=True, images=False)


class RandomWalk(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Runs in a worker: collects the states of many random steps."""

    def walk(self, steps: int) -> tuple[MujocoSource, npt.NDArray[np.float64]]:
        """What to draw the env from, and its states, float64 of shape `(steps, state size)`."""
        source = find_source(self.env)
        assert source is not None  # it is a MuJoCo env
        states = np.zeros((steps, source.state_size))  # of the model as it is at the start: its number is 0
        base: Any = self.env.unwrapped
        self.env.action_space.seed(0)
        self.env.reset(seed=0)
        for row in states:
            _, _, terminated, truncated, _ = self.env.step(self.env.action_space.sample())
            read_state(base.model, base.data, row[int(source.numbered) :], source.state_spec, source.fields)
            if terminated or truncated:
                self.env.reset()
        return source, states


async def images_alone(plan: Plan, stack: contextlib.AsyncExitStack) -> Run:
    """All images, with nothing stepped, by a pool of their own.

    The states are those of one random walk, each slot some steps further into it than the one before: as many
    states as the overlapped run draws, and of the same kind.

    Raises:
        RenderError: if no OpenGL backend works.
    """
    async with aioenv.make_vec(ENV, wrappers=[RandomWalk]) as one:
        source, states = await one.call_at(0, "walk", plan.steps)
    n = plan.num_envs
    slots = np.arange(n)
    ahead = slots * max(1, len(states) // n)
    pool = StepRenderPool([source], [0] * n, plan.render)
    await pool.start()
    stack.push_async_callback(pool.close)

    async def chunk(start: int, stop: int) -> None:
        for t in range(start, stop):
            await draw_states(pool, slots.tolist(), states[(t + ahead) % len(states)])

    await chunk(0, min(WARM_UP_STEPS, plan.steps))
    detail = f"{pool.backend}, {pool.renderer}" if pool.renderer else pool.backend
    return Run("images alone", chunk, physics=False, images=True, detail=detail)


async def overlapped(plan: Plan, stack: contextlib.AsyncExitStack, video: TiledVideo | None) -> Run:
    """All steps and all images: the images of a state are drawn while the next step is taken."""
    envs = await stack.enter_async_context(aioenv.make_vec(ENV, num_envs=plan.num_envs, render=plan.render))
    actions = plan.actions(envs.action_space)
    taken: list[npt.NDArray[np.uint8]] = []

    async def chunk(start: int, stop: int) -> None:
        step = asyncio.ensure_future(envs.step(actions[start]))
        for t in range(start, stop):
            await step
            if t + 1 < stop:
                step = asyncio.ensure_future(envs.step(actions[t + 1]))  # the next step is on its way …
            taken.append(await envs.render())  # … while the state of this one is drawn

    async def encode() -> None:
        if video is not None:
            await video.write(taken)
        taken.clear()

    await envs.reset(seed=0)
    await chunk(0, min(WARM_UP_STEPS, plan.steps))
    taken.clear()
    await envs.reset(seed=0)
    if video is not None:
        video.fps = fps_of(envs.metadata)
        stack.push_async_callback(video.close)
    return Run("both overlapped", chunk, physics=True, images=True, after=encode)


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


# ---------------------------------------------------------------- what is shown


def print_table(plan: Plan, runs: list[Run]) -> None:
    """How long each measurement took, and what the overlap saved."""
    total = plan.num_envs * plan.steps
    print(f"\n{'':<17}{'seconds':>9}{'env-steps/s':>14}{'images/s':>11}")
    for run in runs:
        rate = f"{total / run.seconds:,.0f}"
        columns = f"{rate if run.physics else '-':>14}{rate if run.images else '-':>11}"
        print(f"{run.label:<17}{run.seconds:>9.2f}{columns}")
    if len(runs) < 3:
        return
    physics, images, both = (run.seconds for run in runs)
    one_by_one = physics + images
    saved = (one_by_one - both) / one_by_one
    print(
        f"\nThe overlap {'saved' if saved >= 0 else 'cost'} {abs(saved):.0%}: physics and then images take "
        f"{one_by_one:.2f} s, both at once {both:.2f} s (encoding the video not counted)."
    )
    config = plan.render
    print(f"Images: {config.width} x {config.height}, {config.quality}, drawn by {runs[1].detail}.")
    if "pipe" in runs[1].detail:  # llvmpipe, softpipe
        print("That is software OpenGL: it needs the CPUs that physics needs, so only their idle time can be saved.")
