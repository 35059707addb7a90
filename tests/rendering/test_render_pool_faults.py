"""The render pool when things go wrong: starts that fail (RP10), workers that die or hang (RP13), and its end (RP2)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import aioenv
from aioenv.process.supervisor import Worker
from tests.kits.process_kit import environment, run_alone
from tests.kits.render_pool_kit import SMALL, differ, pool_of, some_states
from tests.kits.version_kit import needs

# ------------------------------------------------------------ the end


def our_tasks(name: str) -> list[asyncio.Task]:
    """Tasks of this loop that `asyncio.all_tasks` does not tell of, and that have yet to end."""
    tasks = [each for each in gc.get_objects() if isinstance(each, asyncio.Task) and not each.done()]
    return [task for task in tasks if name in task.get_name() and task.get_loop() is asyncio.get_running_loop()]


async def ends_of_workers() -> None:
    """Wait until the processes of all workers are known to have ended."""
    ends = our_tasks(": watch")
    assert ends
    await asyncio.wait(ends, timeout=30)


@pytest.mark.asyncio
async def test_rp2_closed_twice_forgotten_or_cancelled_nothing_is_left():
    pool = await pool_of(workers_per_device=1)
    future = pool.submit(**SMALL, slots=range(500))
    await pool.close()
    with pytest.raises(aioenv.ClosedError):
        await future
    await pool.close()
    assert "closed" in repr(pool)
    del pool, future
    forgotten = await pool_of(workers_per_device=1)
    with pytest.warns(ResourceWarning, match="its workers were killed"):
        del forgotten
        gc.collect()
    await ends_of_workers()
    starting = asyncio.ensure_future(pool_of(workers_per_device=1)._ensure_started())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    never = pool_of()
    with pytest.raises(RuntimeError, match="start it first"):
        never.submit(**SMALL)
    await never.close()


# ------------------------------------------------------------ starts that fail


class Raises(aioenv.Modder):
    """Can't be made."""

    def __init__(self, model, **kwargs):
        raise RuntimeError("no such modder today")


class RaisesValueError(aioenv.Modder):
    """Can't be made either, for what many a mistake is called."""

    def __init__(self, model, **kwargs):
        raise ValueError("two are none")


class Exits(aioenv.Modder):
    """Takes its process with it."""

    def __init__(self, model, **kwargs):
        os._exit(7)


class Hangs(aioenv.Modder):
    """Is never made."""

    def __init__(self, model, **kwargs):
        threading.Event().wait()


@pytest.mark.asyncio
async def test_rp10_a_start_that_fails_is_told_at_once_with_the_workers_traceback():
    async with asyncio.timeout(45):
        with pytest.raises(aioenv.RenderError, match="there is no device 99 here") as caught:
            await pool_of(devices=[99], workers_per_device=1, backend="egl")
        assert "Traceback" in caught.value.__cause__.traceback and "offscreen.py" in caught.value.__cause__.traceback
        for modder, why in ((Raises, "no such modder today"), (RaisesValueError, "two are none")):
            with pytest.raises(aioenv.WorkerStartError, match=why) as caught:
                await pool_of(modder=modder, workers_per_device=1)
            assert "Traceback" in caught.value.traceback and "test_render_pool_faults.py" in caught.value.traceback


@pytest.mark.asyncio
async def test_rp10_a_modder_that_hangs_is_not_told_as_opengl_that_does_not_work():
    with pytest.raises(aioenv.StartTimeout, match="start_timeout_s=3") as caught:
        await pool_of(modder=Hangs, backend="egl", start_timeout_s=3)
    assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, aioenv.WorkerStartError)


@pytest.mark.stress
@pytest.mark.asyncio
async def test_rp10_where_warnings_are_errors_a_pool_that_would_warn_leaves_no_process(monkeypatch):
    workers = []

    def refuse(*_: object) -> None:
        workers.extend(pool._workers.workers)
        raise aioenv.SoftwareRenderWarning("a test")

    monkeypatch.setattr("aioenv.rendering.workers.warn_of_software", refuse)
    pool = pool_of(workers_per_device=1)
    with pytest.raises(aioenv.SoftwareRenderWarning):
        await pool
    assert [worker.state.value for worker in workers] == ["closed"]


@pytest.mark.asyncio
async def test_rp10_modders_that_are_none():
    with pytest.raises(aioenv.RenderError, match="exited with code 7"):
        await pool_of(modder=Exits, backend="egl")
    with pytest.raises(aioenv.WorkerStartError, match=r"expected an aioenv\.Modder, got dict"):
        await pool_of(modder=lambda model, renderer: {})


# ------------------------------------------------------------ workers that raise, die or hang


class Faulty(aioenv.Modder):
    """In slots of a blue ball: raises, hangs or dies, as a file says, which it removes first."""

    where: str

    def randomize(self):
        self._edit("geom_rgba", 1, self.rng.uniform(0, 1, 4))
        path = Path(self.where)
        with open(path, "a+") as file:
            file.seek(0)
            faults = file.read()
            file.truncate(0)
            file.write(faults[1:])
        match faults[:1]:
            case "r":
                raise ValueError("a fault of the modder")
            case "h":
                while True:
                    time.sleep(10)
            case "k":
                os.kill(os.getpid(), signal.SIGKILL)


def faulty(path: Path):
    return type("FaultyThere", (Faulty,), {"where": str(path)})


@pytest.mark.asyncio
async def test_rp13_a_worker_that_raises_dies_or_hangs_fails_its_call_and_is_replaced(tmp_path, caplog):
    path = tmp_path / "faults"
    path.write_text("")
    async with pool_of(modder=faulty(path), seed=0, timeout_s=1.0, workers_per_device=2) as pool:
        draw = partial(pool.render, camera="side", **SMALL)
        await draw(slots=[0, 1], randomize=True)
        pids = pool.pids
        path.write_text("r")
        with pytest.raises(aioenv.RenderError, match=r"a fault of the modder[\s\S]*Traceback") as caught:
            await draw(slots=[0], randomize=True)
        assert "FaultyThere raised this for slot 0, randomised 2 times" in str(caught.value)
        assert differ(await draw(slots=[0, 1])) and pool.pids == pids
        path.write_text("k")
        innocent = pool.submit(slots=[1], camera="side", **SMALL)
        with pytest.raises(
            aioenv.RenderError, match=r"render worker 0 is gone: render worker 0 \(pid \d+\) was killed by SIGKILL"
        ):
            await draw(slots=[0], randomize=True)
        assert (await innocent).shape == (1, 18, 24, 3)
        assert "it is restarted, a call that it was drawing fails" in caplog.text
        path.write_text("h")
        started = time.monotonic()
        failing = pool.submit(slots=[1], camera="side", **SMALL, randomize=True)
        waiting = pool.submit(slots=[1], camera="side", **SMALL)  # behind it, and of no fault
        with pytest.raises(aioenv.RenderTimeout, match=r"render worker 1 .*timeout_s=1\.0; it is replaced"):
            await failing
        assert time.monotonic() - started < 3
        assert (await waiting).shape == (1, 18, 24, 3)
        assert not set(pids) & set(pool.pids)


@pytest.mark.asyncio
@pytest.mark.parametrize("restart", [aioenv.RestartPolicy(), None])
async def test_rp13_a_worker_that_dies_while_others_start_is_replaced_or_lost(restart, monkeypatch):
    start = Worker.start

    async def start_and_lose_the_first(worker: Worker) -> None:
        await start(worker)
        if worker.index == 1:
            await pool._workers.workers[0].kill_and_wait("a test")

    monkeypatch.setattr(Worker, "start", start_and_lose_the_first)
    pool = pool_of(restart=restart)
    async with asyncio.timeout(60), pool:
        if restart is not None:
            assert differ(await pool.render(some_states(pool, 4), **SMALL))
            return
        with pytest.raises(aioenv.RenderError, match="render worker 0 is gone"):
            await pool.render(slots=[0], **SMALL)
        await pool.render(slots=[1], **SMALL)


@pytest.mark.asyncio
async def test_rp13_with_retry_what_a_worker_died_over_is_drawn_once_again(tmp_path, caplog):
    path = tmp_path / "faults"
    path.write_text("")
    async with pool_of(modder=faulty(path), seed=0, timeout_s=1.0, workers_per_device=1, retry=True) as pool:
        draw = partial(pool.render, camera="side", slots=range(3), **SMALL)
        expected = [await draw(randomize=True) for _ in range(3)]
    async with pool_of(modder=faulty(path), seed=0, timeout_s=1.0, workers_per_device=1, retry=True) as pool:
        draw = partial(pool.render, camera="side", slots=range(3), **SMALL)
        drawn = []
        for fault in ("k", "h"):
            path.write_text(fault)
            drawn.append(await draw(randomize=True))
        drawn.append(await draw(randomize=True))
        assert np.array_equal(drawn, expected)
        assert "it is restarted, what it drew is drawn again" in caplog.text
        path.write_text("kk")
        with pytest.raises(aioenv.RenderError, match="SIGKILL"):
            await draw(randomize=True)
        with pytest.raises(aioenv.RenderError, match="SIGKILL") as caught:  # for good, and at once
            await draw()
        assert "It is not restarted any more: 3 restarts in 60 s." in caught.value.__notes__


class Slow(aioenv.Modder):
    """Takes its time, as a CPU does over shadows."""

    def randomize(self):
        time.sleep(0.04)


@pytest.mark.asyncio
async def test_rp13_a_worker_that_draws_slowly_is_not_taken_for_one_that_hangs():
    """All of them take longer than `timeout_s`, and each of them much less, however small."""
    async with pool_of(modder=Slow, seed=0, timeout_s=1.0, workers_per_device=1) as pool:
        pids = pool.pids
        assert (await pool.render(slots=range(50), width=8, height=8, randomize=True)).shape == (50, 8, 8, 3)
        assert pool.pids == pids


class SlowAtFirst(aioenv.Modder):
    """Takes its time over its first look, as OpenGL over its first image."""

    def randomize(self):
        if not hasattr(self, "begun"):
            self.begun = True
            time.sleep(1.5)


@pytest.mark.asyncio
async def test_rp13_the_first_image_of_a_process_may_take_longer_than_the_rest():
    async with pool_of(modder=SlowAtFirst, seed=0, timeout_s=0.7, workers_per_device=1) as pool:
        pids = pool.pids
        assert (await pool.render(**SMALL, slots=range(3), randomize=True)).shape == (3, 18, 24, 3)
        assert pool.pids == pids


@pytest.mark.asyncio
async def test_rp13_a_loop_that_stood_still_is_no_timeout():
    """A stream hands on what has come one turn of the loop later: after the timer, though the worker was not late."""
    async with pool_of(workers_per_device=1, timeout_s=0.7, channel="streams") as pool:
        await pool.render(**SMALL, slots=range(2))
        pids, drawn = pool.pids, pool.submit(**SMALL, slots=range(2))
        time.sleep(1.0)  # noqa: ASYNC251 (as other code may; meanwhile the images are drawn)
        assert (await drawn).shape == (2, SMALL["height"], SMALL["width"], 3)
        assert pool.pids == pids


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["pool", "envs", "pixels"])
async def test_what_is_forgotten_is_not_started_again_and_ends_every_wait(kind):
    """Workers are killed with their owner, while their loop runs on."""
    future = None
    if kind == "pool":
        forgotten = await pool_of(workers_per_device=1)
        future = forgotten.submit(**SMALL, slots=range(500))
    else:
        images = aioenv.RenderConfig(8, 8, quality="fast", workers=1)
        forgotten = await aioenv.make_vec(
            "HalfCheetah-v5", 1, restart=aioenv.RestartPolicy(), **({"pixels": images} if kind == "pixels" else {})
        )
    with pytest.warns(ResourceWarning, match="its workers were killed"):
        del forgotten
        gc.collect()
    await ends_of_workers()
    assert not our_tasks("restart of")
    if future is not None:
        with pytest.raises(aioenv.RenderError, match="render worker 0 is gone"):
            await asyncio.wait_for(future, 30)


# ------------------------------------------------------------ MuJoCo raises

CRAMPED = """
<mujoco>
  <size memory="24K"/>
  <worldbody>
    <geom type="plane" size="1 1 .1"/>
    <body pos="0 0 .1"><freejoint/><geom type="capsule" size=".1 .1"/></body>
  </worldbody>
</mujoco>
"""
# What MuJoCo leaves on its stack with each of its errors are some 200 bytes.
ERRORS = 200


@needs("mujoco", "3.17")  # which raises this error: 3.3 warns, and draws
@pytest.mark.asyncio
async def test_a_worker_in_which_mujoco_raises_again_and_again_lives_on():
    async with pool_of(CRAMPED, workers_per_device=1) as pool:
        model = pool.model
        drawn = await pool.render(slots=[0], **SMALL)
        for _ in range(ERRORS):
            with pytest.raises(aioenv.RenderError, match="contact frame undefined"):
                await pool.render(slots=[0], edits={"geom_quat": np.zeros((1, model.ngeom, 4))}, **SMALL)
        assert np.array_equal(await pool.render(slots=[0], **SMALL), drawn)


# In a process of its own, with an OpenGL that needs no display: what draws the states of envs.
DRAWS = """
import sys
import mujoco, numpy as np
import aioenv
from aioenv.state.render_source import read_state, source_of
from aioenv.rendering.renderers import SourceRenderer
from aioenv.rendering.images import allocate

model = mujoco.MjModel.from_xml_string(sys.stdin.read())
source = source_of(model, None, ("geom_quat", "geom_sameframe"))
row, spoilt = np.empty((2, source.state_size))
read_state(model, mujoco.MjData(model), row, source.state_spec, source.fields)
spoilt[:] = row
spoilt[-5 * model.ngeom :] = 0
renderer = SourceRenderer(source, aioenv.RenderConfig(width=24, height=18, quality="fast"))
images = allocate((3, 1, 18, 24), depth=False, segmentation=False)
renderer.draw(row, {}, images.row(0))
errors = 0
for _ in range(int(sys.argv[1])):
    try:
        renderer.draw(spoilt, {}, images.row(1))
    except mujoco.FatalError:
        errors += 1
renderer.draw(row, {}, images.row(2))
renderer.close()
print(errors, np.array_equal(images.rgb[2], images.rgb[0]))
"""


@needs("mujoco", "3.17")
def test_what_draws_the_states_of_envs_lives_on_likewise():
    env = {**environment(), "MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"}
    assert run_alone(DRAWS, str(ERRORS), stdin=CRAMPED, env=env).stdout.split() == [str(ERRORS), "True"]
