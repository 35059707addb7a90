"""Spare envs under cancellations, timeouts, killed workers and ends at any moment: aligned, and nothing is left."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

import aioenv
import aioenv.sync
from tests.faults.align_kit import CancelAt
from tests.faults.play import within
from tests.faults.spares_kit import DIE, MODES, WAIT, Driver, Hold, N, Twin, killed, until, waits
from tests.faults.test_alignment import sweep_lives
from tests.faults.test_close import wait_until_gone
from tests.faults.test_interrupted_anywhere import Instants
from tests.faults.test_interrupts import Alarm
from tests.kits.loop_kit import LOOPS, run_on
from tests.kits.process_kit import run_alone

SLOW_S, RESET_S = 0.0005, 0.02
loops = pytest.mark.parametrize("loop", LOOPS)
modes = pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])


def twins(slow_s: float = SLOW_S, reset_s: float = RESET_S, hold: str = ""):
    return [partial(Twin, slot, slow_s, reset_s, hold) for slot in range(N)]


@loops
@modes
def test_all_workers_are_known_and_end_whichever_runs_the_episode(mode, loop):
    async def main():
        async with aioenv.AsyncVectorEnv(twins(0, 0), autoreset_mode=mode, spare_envs=True) as envs:
            pids = [worker.pid for worker in envs.workers]
            assert len(set(pids)) == 2 * N
            await envs.reset(seed=0)
            spare = (await envs.get_attr("spare"))[0]
            while (await envs.get_attr("spare"))[0] == spare:
                await envs.step([0] * N)
            assert [worker.pid for worker in envs.workers] == pids

    run_on(loop, main())


# ---------------------------------------------------------------- one worker is killed


@pytest.fixture
def hold(tmp_path):
    return Hold(tmp_path)


@asynccontextmanager
async def started(mode, hold: Hold | None = None, *held: str, **options):
    """A vector env after its reset, whose resets wait at these names; slot 1 changes envs in the step to come."""
    folder = hold.folder if hold is not None else ""
    if hold is not None:
        hold.hold(*held)
    async with aioenv.AsyncVectorEnv(twins(0, 0, folder), autoreset_mode=mode, spare_envs=True, **options) as envs:
        await envs.reset(seed=0)
        for _ in range(2 if mode is MODES[0] else 1):
            await envs.step([0] * N)
        yield envs


def who(result, slot: int = 1) -> tuple[int, ...]:
    """Which env of a slot an observation is of, and the number of its reset, and of its step since then."""
    return tuple(result.obs[slot, 1:4].astype(int).tolist())


MASK = {"reset_mask": np.array([False, True, False])}


async def episodes(envs, slot: int = 1) -> list[tuple[int, int]]:
    """The envs that run a slot's next episodes, and the number of their resets; nothing fails."""
    found = []
    for _ in range(20):
        seen = who(await envs.step([0] * N), slot)[:2]
        if seen not in found:
            found.append(seen)
    return found


async def assert_alone(envs, spare: int, caplog, *, warned: bool) -> None:
    """Slot 1 goes on in one env, which is reset for each episode; no episode is left out."""
    ran = await episodes(envs)
    assert ran == [(spare, ran[0][1] + number) for number in range(len(ran))] and len(ran) > 3
    others = await episodes(envs, 0)
    assert [one[0] for one in others[1:]] == [1 - one[0] for one in others[:-1]]
    gone = [record for record in caplog.records if "the spare env of slot 1 is gone" in record.message]
    assert len(gone) == warned and all(record.name == "aioenv" for record in gone)


@modes
@pytest.mark.parametrize("moment", ["idle", "in its step", "after its step", "after its step, before others"])
def test_the_env_that_runs_the_episode_is_killed(mode, moment, hold, caplog):
    async def main():
        async with started(mode, hold, "step") as envs:
            await envs.reset(seed=0)
            told = "must be reset first"
            if moment == "idle":
                await killed(envs, 1)
            elif moment == "in its step":
                told = r"slots \[1\]\) was killed by SIGKILL"
            elif moment == "after its step":
                envs.send([0] * N)
                await until(lambda: envs.workers[1].state == "ready")
                await killed(envs, 1)
                assert who(await envs.recv(N)) == (0, 2, 1)
            else:
                step = asyncio.ensure_future(envs.step([WAIT, 0, 0]))
                await until(lambda: envs.workers[0].state == "busy" and envs.workers[1].state == "ready")
                await killed(envs, 1)
                hold.release("step")
                assert who(await step) == (0, 2, 1)
            with pytest.raises(aioenv.WorkerDied, match=told) as caught:
                await envs.step([0, DIE, 0])
            assert caught.value.slots == (1,)
            if moment == "in its step":
                assert who(caught.value.partial, 0) == (0, 2, 1) and who(caught.value.partial, 2) == (0, 2, 1)
            with pytest.raises(aioenv.WorkerDied, match="must be reset first"):
                await envs.step([0] * N)
            assert who(await envs.reset(options=MASK)) == (1, 3, 0)
            await assert_alone(envs, 1, caplog, warned=False)

    asyncio.run(main())


@modes
@pytest.mark.parametrize("moment", ["idle", "in its reset", "in its next reset", "while the step waits for the other"])
def test_the_spare_env_is_killed(mode, moment, hold, caplog):
    held = {"in its reset": ["1-1"], "while the step waits for the other": ["1-1"]}.get(moment, [])

    async def main():
        async with started(mode, hold, *held) as envs:
            if "next" in moment:
                hold.hold("1-0")
                assert who(await envs.step([0] * N)) == (1, 1, 0)
                await killed(envs, 1)
                hold.forget("1-0")
                await assert_alone(envs, 1, caplog, warned=True)
            elif "waits" in moment:
                hold.hold("1-0")
                step = asyncio.ensure_future(envs.step([0] * N))
                await until(lambda: waits(envs, 1))
                await killed(envs, 1)
                hold.forget("1-0")
                assert not step.done()
                hold.release("1-1")
                assert who(await step) == (1, 1, 0)
                await assert_alone(envs, 1, caplog, warned=True)
            else:
                await killed(envs, N + 1)
                if held:
                    hold.forget(*held)
                assert who(await envs.step([0] * N)) == (0, 2, 0)
                await assert_alone(envs, 0, caplog, warned=True)

    asyncio.run(main())


@modes
def test_an_env_is_killed_while_a_step_waits_for_its_reset(mode, hold, caplog):
    async def main():
        async with started(mode, hold, "1-1") as envs:
            step = asyncio.ensure_future(envs.step([0] * N))
            await until(lambda: waits(envs, 1))
            await killed(envs, N + 1)
            hold.forget("1-1")
            with pytest.raises(aioenv.WorkerDied, match="spare worker 1") as caught:
                await step
            assert caught.value.slots == (1,) and caught.value.pid == envs.workers[N + 1].pid
            assert {who(caught.value.partial, slot)[0] for slot in (0, 2)} == {0}
            assert who(await envs.reset(options=MASK)) == (0, 3, 0)
            await assert_alone(envs, 0, caplog, warned=False)

    asyncio.run(main())


@modes
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("moment", ["idle", "waiting"])
def test_both_envs_of_a_slot_are_killed(mode, first, moment, hold):
    """It is dead, as the slot of a dead worker is without spare envs."""

    async def main():
        async with started(mode, hold, *(["1-1"] if moment == "waiting" else [])) as envs:
            if moment == "waiting":
                step = asyncio.ensure_future(envs.step([0] * N))
                await until(lambda: waits(envs, 1))
            await killed(envs, *((1, N + 1) if first == 0 else (N + 1, 1)))
            if moment == "waiting":
                hold.forget("1-1")
                with pytest.raises(aioenv.WorkerDied) as caught:
                    await step
                assert caught.value.slots == (1,) and caught.value.partial is not None
            for ask in (
                envs.step,
                lambda _: envs.reset(),
                lambda _: envs.reset(options={"reset_mask": ~MASK["reset_mask"]}),
            ):
                with pytest.raises(aioenv.WorkerDied, match="was killed by SIGKILL") as caught:
                    await ask([0] * N)
                assert caught.value.slots == (1,)
            envs.pause(1)
            assert who(await envs.step([0] * N), 0)[0] in (0, 1)

    asyncio.run(main())


# ---------------------------------------------------------------- one hangs, or raises


@modes
def test_a_spare_env_hangs_in_its_reset(mode, hold):
    async def main():
        async with started(mode, hold, "1-1") as envs:
            with pytest.raises(aioenv.StepTimeout, match=r"slots \[1\] \(running just now: \[1\]\)") as caught:
                await envs.step([0] * N, timeout_s=0.2)
            assert caught.value.slots == caught.value.running == (1,)
            assert who(caught.value.partial, 0)[0] == 0 and not caught.value.partial.obs[1].any()
            hold.release("1-1")
            assert who(await envs.recv(N)) == (1, 1, 0)
            ran = await episodes(envs)
            assert [one[0] for one in ran[1:]] == [1 - one[0] for one in ran[:-1]]

    asyncio.run(main())


@modes
def test_a_spare_env_that_hangs_in_its_reset_is_killed(mode, hold, caplog):
    async def main():
        async with started(mode, hold, "1-1", on_timeout="kill", timeout_s=0.5) as envs:
            with pytest.raises(aioenv.WorkerDied, match=r"no reply within timeout_s=0\.5") as caught:
                await envs.step([0] * N)
            assert caught.value.slots == (1,) and caught.value.pid == envs.workers[N + 1].pid
            hold.forget("1-1")
            assert who(await envs.reset(options=MASK)) == (0, 3, 0)
            await assert_alone(envs, 0, caplog, warned=False)

    asyncio.run(main())


@modes
def test_a_call_names_the_slot_whose_spare_env_hangs(mode, hold):
    async def main():
        async with started(mode, hold, "1-1", timeout_s=0.2) as envs:
            with pytest.raises(aioenv.StepTimeout, match=r"no reply from slots \[1\] \(running") as caught:
                await envs.set_attr("level", 3)
            assert caught.value.slots == caught.value.running == (1,)
            hold.release("1-1")
            assert await envs.get_attr("level") == (3, 3, 3)
            await episodes(envs)
            assert await envs.get_attr("level") == (3, 3, 3)

    asyncio.run(main())


@modes
def test_a_spare_env_dies_before_it_has_an_attribute(mode, hold, caplog):
    """Its slot goes on, and the attribute of the other env is set."""

    async def main():
        async with started(mode, hold, "1-1") as envs:
            setting = asyncio.ensure_future(envs.set_attr("level", 3))
            await asyncio.sleep(0)
            await killed(envs, N + 1)
            hold.forget("1-1")
            await setting
            assert await envs.get_attr("level") == (3, 3, 3)
            await assert_alone(envs, 0, caplog, warned=True)

    asyncio.run(main())


@modes
def test_a_spare_env_refuses_an_attribute(mode):
    async def main():
        async with started(mode) as envs:
            with pytest.raises(aioenv.EnvError, match=r"spare worker 0.*ValueError: no such level") as caught:
                await envs.set_attr("level", [-1, 1, 2])
            assert caught.value.slots == (0,)
            assert await envs.get_attr("level") == (-1, 1, 2)
            assert who(await envs.step([0] * N)) == (1, 1, 0)
            assert (await envs.get_attr("level"))[1] == 1

    asyncio.run(main())


# ---------------------------------------------------------------- random cancellations, timeouts and kills


async def disturb(mode, cases: int, *, seed: int, copy: bool = True) -> None:
    async with aioenv.AsyncVectorEnv(twins(), autoreset_mode=mode, spare_envs=True, copy=copy) as envs:
        driver = Driver(envs, mode, seed)
        await driver.begin()
        await driver.run(cases)
        assert envs.stats().spare_waits, "none waited for a spare env"


@modes
@pytest.mark.usefixtures("way")
def test_cancellations_and_timeouts_at_random_instants(mode):
    run_on("asyncio", disturb(mode, 25, seed=1))


@modes
def test_cancellations_and_timeouts_on_uvloop_without_copies(mode):
    run_on("uvloop", disturb(mode, 25, seed=2, copy=False))


@pytest.mark.stress
@pytest.mark.timeout(300)
@loops
@modes
@pytest.mark.usefixtures("way")
def test_five_hundred_cancellations_and_timeouts(mode, loop):
    run_on(loop, disturb(mode, 500, seed=3, copy=loop == "asyncio"))


async def kill(mode, cases: int, *, seed: int, on_timeout: str = "raise") -> None:
    """Until there were so many kills, or so many workers were killed for being late."""
    done = deaths = 0
    while done < cases:
        async with aioenv.AsyncVectorEnv(twins(), autoreset_mode=mode, spare_envs=True, on_timeout=on_timeout) as envs:
            driver = Driver(envs, mode, seed + done, kills=True)
            await driver.begin()
            done += 1 + await driver.survive(cases=cases - done, on_timeout=on_timeout == "kill")
            deaths += driver.deaths
    assert deaths


@modes
def test_workers_killed_at_random_instants(mode):
    run_on("asyncio", kill(mode, 12, seed=5))


@modes
def test_late_workers_are_killed(mode):
    run_on("asyncio", kill(mode, 12, seed=6, on_timeout="kill"))


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("on_timeout", ["raise", "kill"])
@loops
@modes
def test_two_hundred_killed_workers(mode, loop, on_timeout):
    run_on(loop, kill(mode, 200, seed=7, on_timeout=on_timeout))


# ---------------------------------------------------------------- ends


async def start_cancelled_at(k: int) -> bool:
    envs = aioenv.AsyncVectorEnv(twins(0, 0)[:2], spare_envs=True)
    cancel = await CancelAt(k).run(envs._ensure_started())
    assert envs.closed is cancel.hit
    if not cancel.hit:
        assert (await envs.reset(seed=0)).obs[:, 2].tolist() == [1, 1]
    await envs.close()
    assert [worker.state for worker in envs.workers] in ([], ["closed"] * 4)
    return cancel.hit


async def close_cancelled_at(k: int, mode, again: bool) -> bool:
    """Close while envs are being reset, and a step that is not awaited waits for one."""
    envs = await aioenv.AsyncVectorEnv(twins()[:2], autoreset_mode=mode, spare_envs=True)
    await envs.reset(seed=0)
    for _ in range(2):
        await envs.step([0, 0])
    envs.send([0, 0])
    cancel = await CancelAt(k).run(envs.close())
    assert envs.closed
    if again:
        await envs.close()
        assert [worker.state for worker in envs.workers] == ["closed"] * 4
    return cancel.hit


@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=[pytest.mark.stress, pytest.mark.timeout(300)])])
@loops
def test_a_start_that_is_cancelled_leaves_nothing(loop, stride):
    """At each 17th await point, beginning with the first; `make stress` takes them all."""
    assert sweep_lives(loop, start_cancelled_at, stride=stride) > 9


@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=[pytest.mark.stress, pytest.mark.timeout(300)])])
@pytest.mark.parametrize(("loop", "again"), [("asyncio", True), ("uvloop", False)])
@modes
def test_a_close_that_is_cancelled_leaves_nothing(mode, loop, again, stride):
    """Likewise, at each ninth; whether another close follows it or not."""
    assert sweep_lives(loop, partial(close_cancelled_at, mode=mode, again=again), stride=stride) > 3


@pytest.mark.usefixtures("own_fork_server")
@loops
@modes
def test_close_while_a_step_waits_for_a_reset_that_hangs(mode, loop, hold):
    async def main():
        async with started(mode, hold, "1-1") as envs:
            step = asyncio.ensure_future(envs.step([0] * N))
            await until(lambda: waits(envs, 1))
            pids = [worker.pid for worker in envs.workers]
            with within(5):
                await envs.close(grace_s=0.1)
            with pytest.raises(aioenv.ClosedError):
                await step
            wait_until_gone(pids)

    run_on(loop, main())


@pytest.mark.usefixtures("own_fork_server")
@loops
@modes
def test_one_that_is_forgotten_while_envs_are_reset(mode, loop, hold):
    async def main():
        async with started(mode, hold, "0-1", "1-1") as envs:
            step = asyncio.ensure_future(envs.step([0] * N))
            await until(lambda: waits(envs, 1))
            pids = [worker.pid for worker in envs.workers]
            with pytest.warns(ResourceWarning, match="its workers were killed"):
                envs.__del__()
            wait_until_gone(pids)
            step.cancel()
            await asyncio.wait([step])
            envs.closed = False

    run_on(loop, main())


@pytest.mark.parametrize("end", ["close", "forget"])
@loops
def test_the_loop_is_closed_while_envs_are_reset(loop, end, tmp_path):
    """No process and no descriptor is left."""
    code = """
        import asyncio, gc, os, sys
        from pathlib import Path
        import aioenv
        from tests.faults.spares_kit import Hold, N, until, waits
        from tests.faults.test_spare_envs_faults import twins

        hold = Hold(Path(sys.argv[3]))

        async def main():
            envs = await aioenv.AsyncVectorEnv(twins(0, 0, hold.folder), spare_envs=True)
            hold.hold("0-1", "1-1")
            await envs.reset(seed=0)
            for _ in range(2):
                await envs.step([0] * N)
            envs.send([0] * N)
            await until(lambda: waits(envs, 1))
            hold.forget("0-1", "1-1")
            return envs

        counts = []
        for _ in range(3):  # the first round opens what a loop shares with the next
            envs = {"asyncio": asyncio, "uvloop": aioenv}[sys.argv[1]].run(main())
            pids = [worker.pid for worker in envs.workers]
            if sys.argv[2] == "close":
                asyncio.run(envs.close())
            del envs
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
            print(*pids)
        assert counts[1] == counts[0] and counts[2] == counts[0], counts
    """
    done = run_alone(code, loop, end, str(tmp_path))
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(set(pids)) == 3 * 2 * N
    wait_until_gone(pids)


def interrupt_at_random(mode, cases: int, seed: int) -> None:
    """Steps and resets of blocking code, interrupted, each followed by a step: done in all slots, or in none."""
    alarm, driver = Alarm(), None
    with aioenv.sync.VectorEnv(twins(), autoreset_mode=mode, spare_envs=True) as envs:
        driver = Driver(envs, mode, seed)
        driver.block(partial(Alarm.run, alarm), cases)
    assert alarm.rang >= cases // 10


@modes
def test_blocking_calls_interrupted_at_random_instants(mode):
    interrupt_at_random(mode, 60, seed=8)


@pytest.mark.stress
@pytest.mark.timeout(300)
@modes
@pytest.mark.usefixtures("way")
def test_blocking_calls_interrupted_at_five_hundred_instants(mode):
    interrupt_at_random(mode, 500, seed=9)


# ---------------------------------------------------------------- Ctrl-C in async code


class Interrupts(Instants):
    """Raises a KeyboardInterrupt at an instant of the code that lets envs change places."""

    def _raise(self, *_):
        raise KeyboardInterrupt

    def _enter(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith("core/spares.py"):
            return None
        return super()._enter(frame, event, arg)


def interrupt_at(loop, driver: Driver, instants: Interrupts, number: int) -> bool:
    """Interrupt one step at an instant, if there is such a one; what follows is aligned, or asks for a reset."""
    task = loop.create_task(driver.new_step()())
    there = True
    try:
        _, there = instants.run(lambda: loop.run_until_complete(asyncio.wait([task])), number)
    except KeyboardInterrupt:
        loop.call_soon(loop.stop)  # in place of that which the interrupted call may have left behind
        loop.run_forever()

    async def settle():
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            driver.model.take(range(N), task.result())
        elif not task.cancelled() and isinstance(task.exception(), aioenv.SlotError):
            driver.note_error(task.exception())
        while driver.envs.outstanding:
            await asyncio.wait_for(driver.recv(1), 20)
        driver.model.doubt()
        for _ in range(driver.rng.randrange(4, 10)):
            driver.note_deaths()
            if driver.model.failed:
                await asyncio.wait_for(driver.try_(driver.new_reset(sorted(driver.model.failed))), 20)
            else:
                await asyncio.wait_for(driver.try_(driver.new_step()), 20)

    loop.run_until_complete(settle())
    return there


def interrupt_everywhere(mode, stride: int) -> None:
    loop, instants, number, misses = asyncio.new_event_loop(), Interrupts(), 0, 0
    while misses < 20:
        envs = aioenv.AsyncVectorEnv(twins(0, 0.002), autoreset_mode=mode, spare_envs=True)

        async def start(envs=envs, seed=number):
            await envs
            driver = Driver(envs, mode, seed, kills=True)
            await driver.begin()
            return driver

        driver = loop.run_until_complete(start())
        while misses < 20 and all(worker.state != "dead" for worker in envs.workers):  # with fewer, less happens
            there = interrupt_at(loop, driver, instants, number)
            misses = 0 if there else misses + 1
            number += stride * there
        loop.run_until_complete(envs.close())
    loop.close()
    assert number > 2 * stride


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=[pytest.mark.stress, pytest.mark.timeout(300)])])
@modes
def test_ctrl_c_while_envs_change_places(mode, stride):
    interrupt_everywhere(mode, stride)
