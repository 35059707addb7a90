"""The memory of the render pool: images' memory is used again, goes without being shared, and stays flat."""

from __future__ import annotations

import asyncio
import gc
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import aioenv
from aioenv.ipc import memory
from aioenv.ipc.memory import SharedMemory
from aioenv.rendering import images, render_pool
from aioenv.rendering.draw_requests import DrawSettings
from tests.kits.process_kit import environment, run_alone
from tests.kits.render_pool_kit import PLAIN, SMALL, differ, held, pool_of, some_states


@pytest.mark.asyncio
async def test_the_memory_of_images_is_used_again_once_they_are_released(monkeypatch):
    async with pool_of(workers_per_device=1) as pool:
        states = some_states(pool, 4)
        draw = partial(pool.render, states, **SMALL)

        async def place() -> int:
            return (await draw()).__array_interface__["data"][0]

        # the last call is let go of when the loop turns again
        places = [await place() for _ in range(8)]
        assert len(set(places)) <= 2
        kept = await draw()
        row = (await draw())[2, 3:]  # a view is enough to keep it
        expected = kept.copy()
        for _ in range(8):
            other = await pool.render(states[::-1], **SMALL)
            assert not np.shares_memory(other, kept) and not np.shares_memory(other, row)
        assert np.array_equal(kept, expected) and np.array_equal(row, expected[2, 3:])
        # what is too large to be kept, the system has back with the images
        monkeypatch.setattr(memory, "KEPT_BYTES", 1 << 20)
        many = await pool.render(np.tile(states, (50, 1)), width=200, height=200)
        assert held(pool) > many.nbytes
        del many
        await draw()
        assert held(pool) < 1 << 20
        last = await draw()
    assert np.array_equal(kept, expected) and np.array_equal(last, expected)


def rows_of_a_chunk(
    side: int, memory: images.ImageMemory, state_s: float | None, *, out: bool = False, size: int = 40
) -> int:
    """How many of a thousand states, of so many numbers, a worker gets at once that takes so long over each."""
    shape, rate = (1000, side, side), render_pool.DrawRate(60.0)
    rate.state_s = state_s
    buffer = memory.new_buffer(shape, depth=False, segmentation=False)
    settings, future = DrawSettings(side, side, (None,), False, False), asyncio.get_running_loop().create_future()
    drawn = (None, buffer.images) if out else (buffer, None)
    states = np.zeros((1000, size))
    call = render_pool.RenderCall(states, settings, rate, None, None, drawn[0], memory, drawn[1], future, None)
    return call.chunk_rows


@pytest.mark.asyncio
async def test_a_chunk_is_drawn_in_a_moment_and_takes_the_loop_no_longer_than_one_that_travels():
    memory = SharedMemory.create()
    assert memory is not None
    shared, sent = images.ImageMemory(memory), images.ImageMemory(None)
    for kind in (shared, sent):
        assert rows_of_a_chunk(84, kind, None) == 1  # who knows how long it takes
        assert rows_of_a_chunk(8, kind, 3600.0) == 1
        assert rows_of_a_chunk(8, kind, 0.03) == 3
        assert rows_of_a_chunk(8, kind, 1e-6) == render_pool.CHUNK_ROWS
        assert rows_of_a_chunk(8, kind, 1e-6, size=1000) == render_pool.SENT_BYTES // 8000
    assert rows_of_a_chunk(84, shared, 0.001) == rows_of_a_chunk(512, shared, 0.001) == render_pool.CHUNK_ROWS
    for kind, out in ((sent, False), (sent, True), (shared, True)):
        assert rows_of_a_chunk(84, kind, 0.001, out=out) == render_pool.CHUNK_BYTES // (84 * 84 * 3)
        assert rows_of_a_chunk(512, kind, 0.001, out=out) == 1
    memory.close()
    for timeout_s, rows in ((None, 100), (1.0, 100), (0.2, 50), (0.001, 1)):
        rate = render_pool.DrawRate(timeout_s)
        rate.state_s = 0.001
        assert rate.rows == rows


@pytest.mark.asyncio
async def test_the_length_of_chunks_is_learnt_from_the_workers():
    async with pool_of(workers_per_device=1) as pool:
        rate = pool._rate(24, 18, 1, False, False)
        assert rate.state_s is None
        await pool.render(**SMALL, slots=range(5))
        assert 0 < rate.state_s < 60
        assert pool._rate(24, 18, 1, True, False).state_s is None


@pytest.mark.asyncio
async def test_without_memory_to_share_images_travel(monkeypatch):
    async with pool_of() as pool:
        states = some_states(pool, 4)
        shared = await pool.render(states, **SMALL)
        with monkeypatch.context() as patch:
            patch.setattr(pool._workers.memory, "fd", -1)  # no more is to be had
            large = await pool.render(states, width=124, height=118)
            out = await pool.render(states, width=124, height=118, out=np.empty_like(large))
        assert np.array_equal(large, out) and differ(large)
    monkeypatch.setattr(memory, "AVAILABLE", False)
    with pytest.raises(ValueError, match='transport="shared": this platform has no memory'):
        pool_of(transport="shared")
    async with pool_of() as pool:
        assert pool._workers.memory is None
        assert np.array_equal(await pool.render(states, **SMALL), shared)


def resident(pid: int | str) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def holdings() -> tuple[int, int, list[str]]:
    """How many descriptors, threads and mappings of shared memory this process has."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    here = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return *here, [line for line in maps if "memfd:aioenv" in line]


@pytest.mark.stress
@pytest.mark.asyncio
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", ["shared", "frames"])
async def test_memory_stays_flat_over_twenty_thousand_batches(transport):
    async with pool_of(modder=aioenv.TextureModder, transport=transport) as pool:
        states = some_states(pool, 2)
        out = np.empty((2, 18, 24, 3), np.uint8)
        sizes = []
        for count in (4_000, 16_000):
            for number in range(count):
                how = ({}, {"copy": False}, {"out": out}, {"depth": True})[number % 4]
                await pool.render(states, **SMALL, randomize=number % 10 == 0, **how)
            sizes.append([resident(pid) for pid in ("self", *pool.pids)])
        print(transport, "MiB before, after:", *([round(size / 2**20, 1) for size in some] for some in sizes))
        assert all(after < before * 1.02 for before, after in zip(*sizes, strict=True)), sizes
        assert transport == "frames" or held(pool) < 1 << 20


@pytest.mark.stress
@pytest.mark.asyncio
@pytest.mark.timeout(1200)
async def test_memory_stays_flat_over_two_hundred_pools():
    sizes, held_then = [], []
    for count in (20, 180):
        for _ in range(count):
            async with pool_of(workers_per_device=1) as pool:
                await pool.render(**SMALL)
        gc.collect()
        sizes.append(resident("self"))
        held_then.append(holdings())
    print("MiB before, after:", *(round(size / 2**20, 1) for size in sizes), held_then)
    assert sizes[1] < sizes[0] * 1.02, sizes
    assert all(after <= before for before, after in zip(*held_then, strict=True)) and held_then[1][2] == []


# In a process of its own: makes and frees contexts, and tells what it holds after the first ones and in the end.
CONTEXTS = """
import os, sys
import mujoco, numpy as np
from aioenv.rendering.offscreen import OffscreenRenderer
from aioenv.rendering.config import FAST
def held():
    size = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return size, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
model = mujoco.MjModel.from_xml_string(sys.stdin.read())
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
image = np.empty((18, 24, 3), np.uint8)
for count in (20, 180):
    for _ in range(count):
        drawn = OffscreenRenderer(model, FAST)
        drawn.update_scene(data, mujoco.MjvCamera(), mujoco.MjvOption(), 24, 18)
        drawn.draw(image)
        drawn.close()
    print(*held())
"""


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["egl", "osmesa"])
def test_two_hundred_contexts_leave_nothing(backend):
    env = {**environment(), "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend, "LP_NUM_THREADS": "0"}
    sunny = PLAIN.replace("<light ", '<light directional="true" ')  # for which a second context of MuJoCo's is made
    done = run_alone(CONTEXTS, stdin=sunny, env=env, timeout_s=600)
    (size, *before), (later, *after) = (map(int, line.split()) for line in done.stdout.splitlines())
    print(backend, "MiB before, after:", round(size / 2**20, 1), round(later / 2**20, 1), before, after)
    assert later < size * 1.02 and after == before
