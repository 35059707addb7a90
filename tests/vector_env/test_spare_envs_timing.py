"""`spare_envs=True` where resets take long: who waits for what, and that results do not depend on it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioenv
from aioenv.core.spares import spare_seed
from tests.kits.compare import assert_same
from tests.kits.loop_kit import LOOPS, run_on
from tests.vector_env.spares_kit import MODES, Gated, Gates

modes = pytest.mark.parametrize("mode", MODES)
loops = pytest.mark.parametrize("loop", LOOPS)
LENGTH = 3


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path)


@asynccontextmanager
async def started(gates: Gates, mode: Any, n: int = 2, **options: Any) -> AsyncIterator[aioenv.AsyncVectorEnv]:
    """A vector env after a reset, whose slot 0 has episodes of 3 steps, and the others of 100."""
    factories = [partial(Gated, gates.folder, slot, LENGTH if slot == 0 else 100) for slot in range(n)]
    async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode, **options) as envs:
        await envs.reset(seed=7)
        yield envs


async def to_last_step(envs: aioenv.AsyncVectorEnv, mode: str) -> None:
    """Go on until the next step begins slot 0's next episode."""
    for _ in range(LENGTH if mode == "NextStep" else LENGTH - 1):
        await envs.step([0] * envs.num_envs)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something is so; the test's own timeout ends it otherwise."""
    while not condition():
        await asyncio.sleep(0)


def first(result: Any, slot: int = 0) -> list[int]:
    """Episode, step, and which env."""
    return [int(number) for number in result.obs[slot][:3]]


@modes
@loops
def test_a_ready_spare_env_is_used_at_once(mode: str, loop: str, gates: Gates) -> None:
    """Also while the env whose episode has ended is still being reset."""

    async def main() -> None:
        gates.close(0, 2)  # of the first env, for the third episode
        async with started(gates, mode) as envs:
            await until(lambda: envs.workers[2].state == "ready")
            await to_last_step(envs, mode)
            step = await envs.step([0, 0])
            assert first(step) == [1, 0, 1]
            assert step.terminated[0] == (mode == "SameStep")
            assert step.info["drawn"][0] > 0
            for _ in range(LENGTH - 1):
                step = await envs.step([0, 0])
            assert first(step) == [1, LENGTH - 1, 1]
            assert (envs.stats().spare_waits, envs.stats().spare_wait_s) == (0, 0)
            gates.open(0, 2)

    run_on(loop, main())


@modes
@loops
def test_a_step_waits_until_the_spare_env_is_ready(mode: str, loop: str, gates: Gates) -> None:
    async def main() -> None:
        gates.close(0, 1)
        async with started(gates, mode) as envs:
            await to_last_step(envs, mode)
            step = asyncio.ensure_future(envs.step([0, 0]))
            await asyncio.sleep(0)
            await until(lambda: _waiting(envs) == 1)  # its own env has replied
            await until(lambda: envs.workers[1].state == "ready")  # so has the other slot's
            assert not step.done()
            assert envs.workers[2].state == "busy"
            await asyncio.to_thread(gates.open, 0, 1)
            assert first(await step) == [1, 0, 1]
            stats = envs.stats(reset=True)
            assert stats.spare_waits == 1
            assert stats.spare_wait_s > 0
            assert "waits for spare envs: 1" in str(stats)
            assert (envs.stats().spare_waits, envs.stats().spare_wait_s) == (0, 0)

    run_on(loop, main())


@modes
@loops
def test_other_slots_do_not_wait(mode: str, loop: str, gates: Gates) -> None:
    """`recv` hands out the others, and the slot when its spare env is ready."""

    async def main() -> None:
        gates.close(0, 1)
        async with started(gates, mode, 3) as envs:
            await to_last_step(envs, mode)
            envs.send([0, 0, 0])
            done = {1: 0, 2: 0}
            while min(done.values()) < 20:
                ready = await envs.recv(min_slots=1)
                assert 0 not in ready.slots
                for slot in ready.slots.tolist():
                    done[slot] += 1
                envs.send([0] * len(ready.slots), slots=ready.slots)
            await envs.recv(min_slots=2)
            with pytest.raises(aioenv.PendingCallError):
                await envs.step_at(0, 0)
            assert (await envs.step_at(1, 0)).info["t"] > 20
            await asyncio.to_thread(gates.open, 0, 1)
            ready = await envs.recv(min_slots=1)
            assert ready.slots.tolist() == [0]
            assert first(ready) == [1, 0, 1]
            assert envs.stats().spare_waits == 1

    run_on(loop, main())


@modes
def test_a_paused_slot_goes_on_being_prepared(mode: str, gates: Gates) -> None:
    async def main() -> None:
        gates.close(0, 1)
        async with started(gates, mode) as envs:
            await to_last_step(envs, mode)
            envs.pause(0)
            for _ in range(4):
                assert first(await envs.step([0, 0])) == [0, LENGTH - (mode == "SameStep"), 0]
            await asyncio.to_thread(gates.open, 0, 1)
            await until(lambda: envs.workers[2].state == "ready")
            envs.resume(0)
            assert first(await envs.step([0, 0])) == [1, 0, 1]
            assert envs.stats().spare_waits == 0

    asyncio.run(main())


@modes
def test_a_reset_of_the_user_does_not_wait_for_the_spare_env(mode: str, gates: Gates) -> None:
    """It discards what is being prepared: masked, whole, and of a single slot. Each reset has its seed."""

    async def main() -> None:
        gates.close(0, 1)
        async with started(gates, mode) as envs:
            await to_last_step(envs, mode)
            masked = await envs.reset(options={"reset_mask": np.array([True, False])})
            whole = await envs.reset(seed=4)
            single = await envs.reset_at(0, seed=5)
            assert [int(obs[2]) for obs in (masked.obs[0], whole.obs[0], single.obs)] == [0, 0, 0]
            assert (await envs.get_attr("seeds"))[0] == [7, None, 4, 5]
            await asyncio.to_thread(gates.open, 0, 1)
            await to_last_step(envs, mode)
            assert first(await envs.step([0, 0]))[1:] == [0, 1]
            assert (await envs.get_attr("seeds"))[0] == [spare_seed(7), None, spare_seed(4), spare_seed(5)]

    asyncio.run(main())


# ------------------------------------------------------------ without a plan: the same for any timing

Order = list[list[tuple[int, bool]]]  # by round: slots, and whether they get ready before the step that needs them


async def record(gates: Gates, mode: Any, order: Order) -> list[Any]:
    """Return the results of two slots, each of whose resets in a spare env is let go in its turn."""
    rounds = len(order)
    for slot in range(2):
        gates.close(slot, *range(1, rounds + 2))
    factories = [partial(Gated, gates.folder, slot, LENGTH) for slot in range(2)]
    async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode) as envs:
        found: list[Any] = [await envs.reset(seed=7)]
        for number, slots in enumerate(order, 1):
            found += [await envs.step([0, 1]) for _ in range(LENGTH if mode == "NextStep" else LENGTH - 1)]
            step = None
            late = sum(not before for _, before in slots)
            for slot, before in sorted(slots, key=lambda each: not each[1]):
                if not before and step is None:
                    step = asyncio.ensure_future(envs.step([1, 0]))
                    await until(lambda late=late: _waiting(envs) == late)  # type: ignore[misc]
                await asyncio.to_thread(gates.open, slot, number)
                worker = slot + 2 * (number % 2)
                await until(lambda worker=worker: envs.workers[worker].state == "ready")  # type: ignore[misc]
            found.append(await (step or envs.step([1, 0])))
            assert first(found[-1]) == first(found[-1], 1) == [number, 0, number % 2]
        for slot in range(2):
            await asyncio.to_thread(gates.open, slot, rounds + 1)
        assert envs.stats().spare_waits == sum(not before for slots in order for _, before in slots)
        return [*found, await envs.get_attr("seeds")]


def _waiting(envs: aioenv.AsyncVectorEnv) -> int:
    """Return how many slots wait for a spare env now."""
    spares = envs._backend.spares  # type: ignore[union-attr]
    return sum(slot.waiting is not None for slot in spares._slots)  # type: ignore[union-attr]


@modes
@loops
def test_without_a_plan_results_do_not_depend_on_timing(mode: str, loop: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    ways = [[(a, one), (1 - a, other)] for a in (0, 1) for one in (True, False) for other in (True, False)]
    runs = []
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        runs.append(run_on(loop, record(Gates(folder), mode, rng.sample(ways, 4))))
    for run in runs[1:]:
        assert_same(run, runs[0])
    assert [seeds[0] for seeds in runs[0][-1]] == [7, 8]  # after an even number of changes the first envs run


@modes
def test_seeds_of_the_second_envs(mode: str, gates: Gates) -> None:
    """As documented; a reset without a seed lets both generators go on."""

    async def main() -> None:
        factories = [partial(Gated, gates.folder, slot, 2) for slot in range(2)]
        derived = int(np.random.SeedSequence(3, spawn_key=(1,)).generate_state(1)[0]) >> 2
        ran = set()
        async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode) as envs:
            await envs.reset(seed=[3, None])
            for _ in range(12):
                spare = int((await envs.step([0, 0])).obs[0][2])
                seeded, unseeded = await envs.get_attr("seeds")
                assert seeded == [derived if spare else 3] + [None] * (len(seeded) - 1)
                assert set(unseeded) == {None}
                ran.add(spare)
        assert ran == {0, 1}

    asyncio.run(main())
