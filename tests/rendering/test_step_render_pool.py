"""Images of a vector env in shared memory: right, never overwritten while in use, never waited for in vain."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

import aioenv
from aioenv import sync
from aioenv.core.slots import SlotState
from aioenv.ipc import memory
from aioenv.rendering.step_pool import StepRenderPool
from tests.kits.mocap_kit import STATE, MocapEnv, make
from tests.kits.render_pool_kit import ASSETS, differ

N = 3
CONFIG = aioenv.RenderConfig(32, 24, quality="fast", workers=1, max_in_flight=1)
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (100, N, 6)).astype(np.float32)


def mapped() -> set[str]:
    """What this process has mapped of memory without a name, but for garbage."""
    gc.collect()
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:aioenv" in line}


def pool_of(envs):
    return envs._session._pool or envs._session._pixels_pool


def shared(envs) -> int:
    """Bytes that images take in shared memory."""
    return os.fstat(pool_of(envs)._workers.memory.fd).st_blocks * 512


def renders(way: str, **arguments):
    config = aioenv.RenderConfig(32, 24, quality="fast", workers=2)
    return aioenv.make_vec("HalfCheetah-v5", N, num_workers=2, **{way: config}, **arguments)


async def images_of(envs, way: str, action=None):
    obs = (await (envs.reset(seed=0) if action is None else envs.step(action)))[0]
    return obs if way == "pixels" else await envs.render()


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["render", pytest.param("pixels", marks=pytest.mark.stress)])
async def test_images_in_use_stay_while_a_hundred_batches_are_drawn(way, monkeypatch):
    before = mapped()
    with monkeypatch.context() as patch:  # images travel, since they shall, or since nothing can be shared
        patch.setattr(memory, "AVAILABLE", way == "render")
        async with renders(way, transport="frames" if way == "render" else "auto") as envs:
            assert pool_of(envs)._workers.memory is None
            expected = [(await images_of(envs, way, action)).copy() for action in (None, *ACTIONS)]
    async with renders(way) as envs:
        held, views, places = {}, {}, set()
        for step, action in enumerate((None, *ACTIONS)):
            images = await images_of(envs, way, action)
            assert images.shape == (N, 24, 32, 3) and images.dtype == np.uint8 and images.flags.writeable
            assert np.array_equal(images, expected[step])
            places.add(images.__array_interface__["data"][0])
            if step % 10 == 0:
                held[step] = images
            elif step % 10 == 5:
                views[step] = images[1, ::2]
            del images
        assert len(places) < 40 and 0 < shared(envs) < 40 * (1 << 14)  # a batch takes two pages
        for step, images in held.items():
            images[0, 0] = step  # they are the caller's own
        monkeypatch.setattr(pool_of(envs)._workers.memory, "fd", -1)  # no more is to be had
        again = [await images_of(envs, way, action) for action in (None, *ACTIONS[:30])]
        assert all(map(np.array_equal, again, expected))
        monkeypatch.undo()
    for step, images in held.items():
        assert (images[0, 0] == step).all() and np.array_equal(images[:, 1:], expected[step][:, 1:])
    assert all(np.array_equal(view, expected[step][1, ::2]) for step, view in views.items())
    assert mapped() - before
    del held, views, again, images
    assert not mapped() - before


async def stopped(envs, action) -> int:
    """Have a step whose images are with a render worker that stands still; gives its pid."""
    pid = pool_of(envs).pids[0]
    os.kill(pid, signal.SIGSTOP)
    await envs.step(action)
    return pid


@pytest.mark.asyncio
async def test_a_render_worker_that_dies_over_an_image_and_waits_that_are_cancelled():
    restart = aioenv.RestartPolicy(backoff_s=0.01)
    async with aioenv.make_vec("HalfCheetah-v5", N, render=CONFIG, num_workers=1, restart=restart) as envs:
        await envs.reset(seed=0)
        expected = [await images_of(envs, "render", action) for action in ACTIONS[:4]]
        copies = [images.copy() for images in expected]
        await envs.reset(seed=0)
        await envs.render()
        pid = await stopped(envs, ACTIONS[0])
        waiting = asyncio.ensure_future(envs.render())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        os.kill(pid, signal.SIGKILL)
        assert np.array_equal(await envs.render(), copies[0])  # drawn again, by another
        for step in (1, 2, 3):
            assert np.array_equal(await images_of(envs, "render", ACTIONS[step]), copies[step])
        assert all(map(np.array_equal, expected, copies))
    async with aioenv.make_vec("HalfCheetah-v5", N, render=CONFIG, num_workers=1) as envs:
        await envs.reset(seed=0)
        images = await images_of(envs, "render", ACTIONS[0])
        pid = await stopped(envs, ACTIONS[1])
        stream = envs.render_stream(buffer=2000)
        for _ in range(400):
            await envs.step(ACTIONS[1])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(aioenv.RenderError, match=r"render worker 0.*SIGKILL"):
            await envs.render()
        for _ in range(400):
            with pytest.raises(aioenv.RenderError, match=r"render worker 0.*SIGKILL"):
                await anext(stream)
        assert np.array_equal(images, copies[0])
    assert np.array_equal(images, copies[0])


async def two_late(envs) -> int:
    """Have both slots step while the render worker stands still (the first is being drawn, the second waits)."""
    await envs.reset(seed=0)
    await envs.render()
    pid = pool_of(envs).pids[0]
    os.kill(pid, signal.SIGSTOP)
    for slot in (0, 1):
        envs.send(ACTIONS[0, :1], [slot])
        await envs.recv()
    return pid


async def pending(make: Callable[[], object]) -> asyncio.Future:
    """Something that is awaited, and has begun."""
    future = asyncio.ensure_future(make())
    await asyncio.sleep(0)
    assert not future.done()
    return future


@pytest.mark.asyncio
async def test_close_ends_every_wait_for_images():
    """Also of those that wait for others to be drawn, and are not the newest."""
    async with aioenv.make_vec("HalfCheetah-v5", 2, render=CONFIG, num_workers=1) as envs:
        pid = await two_late(envs)
        waiting = await pending(envs.render)
        stream, other = envs.render_stream(), envs.render_stream()
        for _ in range(3):
            envs.send(ACTIONS[0, :1], [1])
            await envs.recv()
        reading, ended = await pending(stream.next), await pending(other.next)
        await other.aclose()
        assert await ended is None
        closing = await pending(envs.close)
        os.kill(pid, signal.SIGCONT)
        await closing
        with pytest.raises(aioenv.RenderError, match="the vector env was closed"):
            await waiting
        assert await reading is None


@pytest.mark.asyncio
async def test_of_a_stream_that_close_ends_what_is_drawn_can_be_taken():
    async with aioenv.make_vec("HalfCheetah-v5", N, render=CONFIG, num_workers=1) as envs:
        stream, small, other = envs.render_stream(), envs.render_stream(buffer=1), envs.render_stream()
        drawn = [await images_of(envs, "render", action) for action in (None, *ACTIONS[:2])]
        await other.aclose()
        await stopped(envs, ACTIONS[2])
        waiting = await pending(small.next)
        closing = asyncio.ensure_future(envs.close())
        assert await waiting is None
        await closing
    items = [item async for item in stream]
    assert [step for step, _ in items] == [0, 1, 2]
    assert all(np.array_equal(images, same) for (_, images), same in zip(items, drawn, strict=True))
    assert [item async for item in small] == [item async for item in other] == []
    with sync.make_vec("HalfCheetah-v5", N, render=CONFIG, num_workers=1) as blocking:
        stream = blocking.render_stream()
        blocking.reset(seed=0)
        blocking.render()
    ((step, images),) = stream
    assert step == 0 and np.array_equal(images, drawn[0])


@pytest.mark.asyncio
async def test_while_nothing_is_drawn_little_is_kept_and_what_is_shown_is_not_dropped():
    async with aioenv.make_vec("HalfCheetah-v5", N, render=CONFIG, num_workers=1) as envs:
        await envs.reset(seed=0)
        expected = [await images_of(envs, "render", action) for action in ACTIONS[:22]]
        await envs.reset(seed=0)
        await envs.render()
        pid = await stopped(envs, ACTIONS[0])
        for action in ACTIONS[1:21]:
            await envs.step(action)
        images = envs._session.images
        assert len(images._queue) <= 3 and len(images._unfinished) <= 4 and shared(envs) <= 32 * (1 << 14)
        os.kill(envs.workers[0].pid, signal.SIGSTOP)  # else that step may be over before it is cancelled
        step = await pending(lambda: envs.step(ACTIONS[21]))
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        os.kill(envs.workers[0].pid, signal.SIGCONT)
        while envs._backend.table.count(SlotState.READY) < N:
            await asyncio.sleep(0)
        os.kill(envs.workers[0].pid, signal.SIGSTOP)  # so that step 22 is in flight when step 20's images are asked for
        another = await pending(lambda: envs.step(ACTIONS[22]))
        render = await pending(envs.render)
        os.kill(envs.workers[0].pid, signal.SIGCONT)
        os.kill(pid, signal.SIGCONT)
        assert np.array_equal(await render, expected[20])
        await another


@pytest.mark.asyncio
async def test_a_stream_gives_what_is_drawn_however_slow():
    async with aioenv.make_vec("HalfCheetah-v5", N, render=CONFIG, num_workers=1) as envs:
        await envs.reset(seed=0)
        expected = [await images_of(envs, "render", action) for action in ACTIONS[:8]]
        await envs.reset(seed=0)
        await envs.render()
        stream = envs.render_stream(buffer=1)
        pid = await stopped(envs, ACTIONS[0])
        item = await pending(stream.next)
        for action in ACTIONS[1:7]:
            await envs.step(action)
        os.kill(pid, signal.SIGCONT)
        number, images = await item
        assert np.array_equal(images, expected[0])
        later, images = await stream.next()  # what came between was dropped
        assert later == number + 6 and np.array_equal(images, expected[6])
        # a cancelled wait loses nothing, also if another item came meanwhile
        pid = await stopped(envs, ACTIONS[7])
        item = await pending(stream.next)
        item.cancel()
        with pytest.raises(asyncio.CancelledError):
            await item
        os.kill(pid, signal.SIGCONT)
        number, images = await stream.next()
        assert number == later + 1 and np.array_equal(images, expected[7])


@pytest.mark.asyncio
@pytest.mark.parametrize("where", [{"num_workers": 1}, {"backend": "native"}], ids=str)
async def test_closing_with_images_that_only_a_stream_still_wants(where):
    async with aioenv.make_vec("HalfCheetah-v5", N, render=CONFIG, **where) as envs:
        await envs.reset(seed=0)
        await envs.render()
        stream = envs.render_stream(buffer=100)
        pid = await stopped(envs, ACTIONS[0])
        for action in ACTIONS[1:6]:  # of these each slot keeps two itself
            await envs.step(action)
        closing = await pending(envs.close)
        os.kill(pid, signal.SIGCONT)
        await closing
        assert await stream.next() is None


@pytest.mark.asyncio
async def test_render_claims_the_images_of_all_slots():
    async with aioenv.make_vec("HalfCheetah-v5", 2, render=CONFIG, num_workers=1) as envs:
        pid = await two_late(envs)
        rendering = await pending(envs.render)
        for _ in range(3):  # newer ones come than those that are claimed
            envs.send(ACTIONS[1, :1], [1])
            await envs.recv()
        os.kill(pid, signal.SIGCONT)
        claimed = await rendering
        newest = await envs.render()
        assert np.array_equal(newest[0], claimed[0]) and not np.array_equal(newest[1], claimed[1])
        await envs.reset(seed=0)
        for slot in (0, 1):
            envs.send(ACTIONS[0, :1], [slot])
            await envs.recv()
        assert np.array_equal(await envs.render(), claimed)


def resident(pid: int | str) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.stress
@pytest.mark.asyncio
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["render", "pixels"])
async def test_memory_stays_flat_over_thousands_of_batches(way):
    async with renders(way) as envs:
        await envs.reset(seed=0)
        sizes = []
        for count in (1_000, 4_000):
            for number in range(count):
                images = await images_of(envs, way, ACTIONS[number % 100])
                kept = images if number % 3 else images[0]
                if number % 50 == 0:  # slots by themselves, too
                    envs.send(ACTIONS[0, :1], [number % N])
                    await envs.recv()
            sizes.append([resident(pid) for pid in ("self", *pool_of(envs).pids)])
        print(way, "MiB before, after:", *([round(size / 2**20, 1) for size in some] for some in sizes), len(kept))
        assert all(after < before * 1.02 for before, after in zip(*sizes, strict=True)), sizes
        assert shared(envs) < 1 << 20


@pytest.mark.asyncio
async def test_what_one_taker_of_a_stream_gives_up_another_gets():
    async with aioenv.make_vec("HalfCheetah-v5", N, render=CONFIG, num_workers=1) as envs:
        await envs.reset(seed=0)
        await envs.render()
        stream = envs.render_stream()
        pid = await stopped(envs, ACTIONS[0])
        first = await pending(stream.next)
        second = await pending(stream.next)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        os.kill(pid, signal.SIGCONT)
        _, images = await asyncio.wait_for(second, 30)
        assert np.array_equal(images, await envs.render())


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
async def test_where_an_episode_ends_images_are_of_the_state_that_was_returned(mode):
    """Under SAME_STEP of the new episode's first."""
    size = {"width": 32, "height": 24, "camera": "track"}
    config = aioenv.RenderConfig(**size, quality="fast", workers=1)
    kwargs = {"name": "HalfCheetah-v5", "wrappers": [lambda env: TimeLimit(env, 2)], "autoreset_mode": mode}
    async with (
        aioenv.make_vec(make, N, **kwargs, render=config, num_workers=2) as envs,
        aioenv.RenderPool(ASSETS / "half_cheetah.xml", quality="fast", state_spec=STATE) as pool,
    ):
        await envs.reset(seed=0)
        ends = []
        for action in ACTIONS[:4]:
            ends.append((await envs.step(action)).truncated.all())
            images = await envs.render()
            assert np.array_equal(images, await pool.render(await envs.call("whole_state"), **size)) and differ(images)
        assert ends == [False, True, False, mode == "SameStep"]


class Counted(MocapEnv):
    """Counts its steps in a file; one waits in each for another file."""

    def __init__(self, steps: Path, gate: Path | None = None):
        super().__init__()
        self.steps, self.gate = steps, gate

    def step(self, action):
        with self.steps.open("a") as file:
            file.write("*")
        while self.gate is not None and not self.gate.exists():
            time.sleep(0.002)
        return super().step(action)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["render", "pixels"])
async def test_states_are_drawn_as_they_arrive_while_other_workers_still_step(way, tmp_path, monkeypatch):
    """Slot 1's step ends when slot 0's image of the same step is there."""
    gate, submit = tmp_path / "gate", StepRenderPool.submit

    def open_the_gate(pool, slots, states, buffer, first, on_done, context=None):
        def done(error):
            if list(slots) == [0]:
                gate.touch()
            on_done(error)

        submit(pool, slots, states, buffer, first, done, context)

    factories = [lambda: Counted(tmp_path / "0"), lambda: Counted(tmp_path / "1", gate)]
    config = aioenv.RenderConfig(16, 12, quality="fast", workers=1)
    async with aioenv.AsyncVectorEnv(factories, num_workers=2, timeout_s=30, **{way: config}) as envs:
        await envs.reset(seed=0)
        monkeypatch.setattr(StepRenderPool, "submit", open_the_gate)
        await envs.step(np.zeros((2, 3)))
        assert gate.exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_images_of_returned_states_do_not_wait_for_a_late_slot_of_a_cancelled_step(max_in_flight, tmp_path):
    gate = tmp_path / "gate"
    factories = [lambda: Counted(tmp_path / "0"), lambda: Counted(tmp_path / "1", gate)]
    config = aioenv.RenderConfig(16, 12, quality="fast", workers=1, max_in_flight=max_in_flight)
    async with aioenv.AsyncVectorEnv(factories, num_workers=2, render=config) as envs:
        stream = envs.render_stream(100)
        await envs.reset(seed=0)
        first = await envs.render()
        step = await pending(lambda: envs.step(np.ones((2, 3))))
        while envs.workers[0].state != "ready":
            await asyncio.sleep(0.002)
        step.cancel()
        assert (await envs.recv()).slots.tolist() == [0]
        async with asyncio.timeout(30):
            second = await envs.render()
            for _ in range(3):
                envs.send(np.ones((1, 3)), [0])
                await envs.recv()
            third = await envs.render()
            items = [await anext(stream) for _ in range(5)]
        assert envs.workers[1].state == "draining"
        assert [number for number, _ in items] == [0, 1, 2, 3, 4]
        assert np.array_equal(items[1][1], second) and np.array_equal(items[4][1], third)
        for before, after in ((first, second), (second, third)):
            assert not np.array_equal(before[0], after[0]) and np.array_equal(before[1], after[1])
        gate.touch()
        assert (await envs.recv()).slots.tolist() == [1]
        last = await envs.render()
        assert np.array_equal(last[0], third[0]) and not np.array_equal(last[1], third[1])


@pytest.mark.asyncio
@pytest.mark.parametrize("where", [{"num_workers": 1}, {"backend": "native"}])
async def test_every_result_gives_a_stream_one_item(where):
    config = aioenv.RenderConfig(16, 12, quality="fast", workers=1)
    async with aioenv.make_vec("HalfCheetah-v5", N, render=config, **where) as envs:
        stream, actions = envs.render_stream(100), ACTIONS[0]
        await envs.reset(seed=0)
        for _ in range(2):  # the first one has to ask for observations
            await envs.rollout(lambda obs: actions, 2, groups=1)
        await envs.step(actions)
        envs.pause(range(N))
        await envs.step(actions)
        await envs.step(actions)
        await envs.render()
        items = stream._items
        assert [number for number, _ in items] == list(range(8))
        images = [(await anext(stream))[1] for _ in range(8)]
        changed = [not np.array_equal(a, b) for a, b in pairwise(images)]
        assert changed == [True] * 5 + [False] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("where", [{"num_workers": 2}, {"num_workers": 0}, {"backend": "native"}])
async def test_paused_slots_that_were_never_reset_are_black(where):
    config = aioenv.RenderConfig(16, 12, quality="fast", workers=1)
    async with aioenv.make_vec("HalfCheetah-v5", N, render=config, **where) as envs:
        stream = envs.render_stream(100)
        envs.pause(1)
        with pytest.raises(aioenv.RenderError, match=r"slots \[0, 1, 2\] have no state yet"):
            await envs.render()
        await envs.reset(seed=0)
        image = await envs.render()
        assert image.any(axis=(1, 2, 3)).tolist() == [True, False, True]
        assert np.array_equal((await anext(stream))[1], image)
        envs.resume(1)
        with pytest.raises(aioenv.RenderError, match=r"slots \[1\] have no state yet"):
            await envs.render()
        await envs.reset(seed=0)
        assert (await envs.render()).any(axis=(1, 2, 3)).all()


class Drawing(gym.Env):
    """An env that draws the image that it was made with."""

    observation_space = action_space = gym.spaces.Discrete(2)
    render_mode = "rgb_array"

    def __init__(self, image):
        self.image = image

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {}

    def render(self):
        return self.image


@pytest.mark.asyncio
async def test_a_paused_slot_that_was_never_reset_is_black_beside_images_that_envs_draw():
    white = np.full((4, 5, 3), 255, np.uint8)
    async with aioenv.AsyncVectorEnv([lambda: Drawing(white)] * 2, num_workers=1, render=aioenv.RenderConfig()) as envs:
        envs.pause(1)
        await envs.reset(seed=0)
        assert np.array_equal(await envs.render(), [white, 0 * white])


@pytest.mark.asyncio
async def test_while_images_of_one_group_are_drawn_the_other_group_steps(tmp_path):
    """The render worker of the first group's images stands still from the third step on; the second group makes it."""
    files = [tmp_path / "0", tmp_path / "1"]
    factories = [lambda file=file: Counted(file) for file in files]
    config = aioenv.RenderConfig(16, 12, quality="fast", workers=2)
    async with aioenv.AsyncVectorEnv(factories, num_workers=2, pixels=config) as envs:
        await envs.reset(seed=0)
        expected = await envs.rollout(lambda obs, slots: np.zeros((len(slots), 3)), 5, groups=1)
        for file in files:
            file.write_text("")
        await envs.reset(seed=0)
        pid = pool_of(envs).pids[0]

        def policy(obs, slots):
            if slots[0] == 0 and len(files[0].read_text()) == 2:
                os.kill(pid, signal.SIGSTOP)
            return np.zeros((len(slots), 3))

        rollout = await pending(lambda: envs.rollout(policy, 5, groups=2))
        async with asyncio.timeout(30):
            while [len(file.read_text()) for file in files] != [3, 3]:
                await asyncio.sleep(0.002)
        assert not rollout.done()
        os.kill(pid, signal.SIGCONT)
        assert np.array_equal((await rollout).obs, expected.obs)


@pytest.mark.parametrize("which", ["render", "pixels"])
def test_the_parent_draws_nothing_and_imports_no_mujoco(which):
    # 0.1 s of the loop, and 30 MB
    script = f"""
import sys, aioenv
async def main():
    drawing = {{"{which}": aioenv.RenderConfig(16, 16, quality="fast", workers=1)}}
    async with aioenv.make_vec("InvertedPendulum-v5", 1, **drawing) as envs:
        result = await envs.reset(seed=0)
        await envs.step(envs.action_space.sample())
        image = (await envs.render())[0] if "{which}" == "render" else result.obs[0]
    print(image.shape, image.any(), "mujoco" in sys.modules)
aioenv.run(main())
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "(16, 16, 3) True False\n"
