"""Spare envs with `restart=`: either env of a slot is killed at random moments; results stay aligned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from tests.faults.spares_kit import MODES, Hold, Twin, until, waits
from tests.faults.test_close import wait_until_gone
from tests.faults.test_spare_envs_faults import episodes, started, who
from tests.kits.loop_kit import LOOPS, run_on

N = 3
PLAN = list(range(1000, 5000))
# the numbers of an observation
SLOT, SPARE, PID, SEED, T, ACTION = range(6)


class Named(gymnasium.Env[Any, Any]):
    """Its observations name slot, env, process, the seed of the episode, step and action; its episodes have 2-5 steps.

    Args:
        slot: its slot.
        slow_s, reset_s: how long a step and a reset take, in seconds.
    """

    observation_space = spaces.Box(-1e9, 1e9, (6,), np.float64)
    action_space = spaces.Discrete(900)

    def __init__(self, slot: int, slow_s: float, reset_s: float) -> None:
        self.slot, self.slow_s, self.reset_s = slot, slow_s, reset_s
        self.spare, self.seed, self.t = aioenv.is_spare_env(), 0, 0

    def _observe(self, action: int) -> Any:
        return np.array([self.slot, self.spare, os.getpid(), self.seed, self.t, action], np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        time.sleep(self.reset_s)
        assert seed is not None
        self.seed, self.t = seed, 0
        return self._observe(-1), {"begun": seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.slow_s)
        self.t += 1
        over = self.t == length(self.seed)
        return self._observe(int(action)), self.seed + self.t / 8, over, False, {"t": self.t}


def length(seed: float) -> int:
    return 2 + int(seed) * 7 % 4


class Checked:
    """Steps a vector env of `Named` envs, and checks that each result follows from the one before and the action.

    Args:
        envs: started.
        same_step: whether its mode is SAME_STEP.
        seed: of the actions.

    Attributes:
        pids: of all workers that have stepped.
        lost: how many episodes were lost with their workers.
        failed: how many slots had to be reset.
    """

    def __init__(self, envs: aioenv.AsyncVectorEnv, *, same_step: bool, seed: int) -> None:
        self.envs, self.same_step, self.rng = envs, same_step, random.Random(seed)
        self.last: Any = [None] * N
        self.over = [False] * N
        self.pids: set[int] = set()
        self.lost = self.failed = 0

    async def reset(self, slots: tuple[int, ...] = tuple(range(N))) -> None:
        before = list(self.last)
        obs, info = await self.envs.reset(options={"reset_mask": np.isin(np.arange(N), slots)})
        for slot in slots:
            self._begins(slot, obs[slot], before[slot])
            assert info["begun"][slot] == obs[slot, SEED]

    async def step(self) -> None:
        actions = np.array([self.rng.randrange(900) for _ in range(N)])
        try:
            result = await self.envs.step(actions)
        except aioenv.SlotError as error:
            assert isinstance(error, aioenv.WorkerDied)
            if error.partial is not None:  # else nothing was sent: the slots had failed before
                self._take(error.partial, actions, error.slots)
            self.failed += len(error.slots)
            await self.reset(error.slots)
        else:
            self._take(result, actions, ())

    def _take(self, result: Any, actions: Any, failed: tuple[int, ...]) -> None:
        for slot in set(range(N)).difference(failed):
            self._check(slot, result, int(actions[slot]))

    def _check(self, slot: int, result: Any, action: int) -> None:
        obs, reward, terminated, truncated, info = result
        new, last, cut = obs[slot], self.last[slot], bool(truncated[slot])
        if self.over[slot]:  # NEXT_STEP: the action is not used
            assert (reward[slot], terminated[slot], cut) == (0, False, False)
            return self._begins(slot, new, last)
        ended = cut or bool(terminated[slot])
        final = info["final_obs"][slot] if self.same_step and ended else new
        if cut:  # the last observation stays
            self.lost += 1
            assert final.tolist() == last.tolist()
            assert reward[slot] == 0
            assert info["restarted"][slot]
        else:
            expected = [slot, last[SPARE], last[PID], last[SEED], last[T] + 1, action]
            assert final.tolist() == [float(number) for number in expected], (slot, final, last)
            assert reward[slot] == last[SEED] + final[T] / 8
            assert terminated[slot] == (final[T] == length(last[SEED]))
            assert "restarted" not in info or not info["restarted"][slot]
        if ended and self.same_step:
            return self._begins(slot, new, last)
        self.last[slot], self.over[slot] = new.copy(), ended
        return None

    def _begins(self, slot: int, new: Any, last: Any) -> None:
        """Check the first observation of an episode: its seed is one of the slot's, later than all before."""
        assert (new[SLOT], new[T], new[ACTION]) == (slot, 0, -1)
        assert (new[SEED] - PLAN[0]) % N == slot
        assert last is None or new[SEED] > last[SEED]
        self.pids.add(int(new[PID]))
        self.last[slot], self.over[slot] = new.copy(), False


async def kill_at_random(mode: Any, kills: int, seed: int, *, max_restarts: int) -> Checked:
    """Kill so many workers at random moments; then step on without any loss, unless they are not started again."""
    rng, killed = random.Random(seed), 0
    restart = aioenv.RestartPolicy(max_restarts=max_restarts, backoff_s=0.0)
    factories = [partial(Named, slot, 0.0005, 0.004) for slot in range(N)]
    async with aioenv.AsyncVectorEnv(
        factories, spare_envs=True, autoreset_mode=mode, restart=restart, seed_plan=PLAN
    ) as envs:
        checked = Checked(envs, same_step=mode is MODES[1], seed=seed)
        loop, numbers = asyncio.get_running_loop(), list(range(2 * N))

        def kill() -> None:
            nonlocal killed
            worker = envs.workers[rng.choice(numbers)]
            if worker.state in ("ready", "busy", "draining") and worker.pid is not None and killed < kills:
                killed += 1
                with contextlib.suppress(ProcessLookupError):  # its end was not noticed yet
                    os.kill(worker.pid, signal.SIGKILL)

        async def disturb() -> None:
            while killed < kills:
                for _ in range(rng.choice([1, 1, 1, 2])):  # at times two at once, be it of one slot
                    loop.call_later(rng.uniform(0, 0.01), kill)
                for _ in range(rng.randrange(1, 12)):
                    await asyncio.wait_for(checked.step(), 20)

        await checked.reset()
        if max_restarts < kills:
            with pytest.raises(aioenv.WorkerDied):  # from a reset, since workers of its slot are gone
                await disturb()
        else:
            await disturb()
            assert checked.failed == 0
            while any(worker.state not in ("ready", "busy") for worker in envs.workers):
                await asyncio.wait_for(checked.step(), 20)
            await step_on(checked, 12)
            lost = checked.lost
            await step_on(checked, 40)
            assert checked.lost == lost
        pids = [worker.pid for worker in envs.workers if worker.pid is not None]
    wait_until_gone([*pids, *checked.pids])
    return checked


async def step_on(checked: Checked, number: int) -> None:
    for _ in range(number):
        await asyncio.wait_for(checked.step(), 20)


modes = pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])


@pytest.fixture
def hold(tmp_path: Any) -> Hold:
    return Hold(tmp_path)


@modes
@pytest.mark.parametrize("ready", [True, False])
def test_an_env_is_killed_while_a_step_waits_for_its_reset(mode: Any, ready: bool, hold: Hold) -> None:
    """The episode begins in the slot's other env, as soon as that is reset."""

    async def main() -> None:
        async with started(mode, hold, "1-1", restart=aioenv.RestartPolicy()) as envs:
            if not ready:
                hold.hold("1-0")
            step = asyncio.ensure_future(envs.step([0] * N))
            await until(lambda: waits(envs, 1))
            if ready:
                await until(lambda: envs.workers[1].state == "ready")
            pid = envs.workers[N + 1].pid
            assert pid is not None
            hold.forget("1-1")
            os.kill(pid, signal.SIGKILL)
            if not ready:
                await until(lambda: envs.workers[N + 1].pid != pid)
                assert not step.done()
                hold.release("1-0")
            assert who(await step) == (0, 2, 0)
            assert len(await episodes(envs)) > 3

    asyncio.run(main())


@modes
@pytest.mark.parametrize("seeds", [[5, 6, 7], [None, None, None]], ids=["seeds", "no seeds"])
def test_a_numbered_episode_keeps_its_seed_if_its_env_is_killed_in_the_reset(
    mode: Any, seeds: list[int | None], hold: Hold
) -> None:
    """Without seeds, one that follows from the slot's last one: the same faults give the same episodes."""

    async def main() -> dict[int, float]:
        drawn: dict[int, float] = {}

        def policy(obs: Any, started: Any, episodes: Any) -> Any:
            drawn.update({int(episodes[slot]): float(obs[slot, -1]) for slot in np.flatnonzero(started)})
            return np.zeros(1, int)

        factories = [partial(Twin, 0, hold=hold.folder)]
        restart = aioenv.RestartPolicy()
        async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode, restart=restart) as envs:
            await envs.reset(seed=1)
            await envs.call("who", spares=True)  # the spare env is reset, too
            hold.hold("0-1")
            iterator = envs.episodes(policy, len(seeds), seed=seeds)
            found = [await anext(iterator)]
            following = asyncio.ensure_future(anext(iterator))
            await until(lambda: waits(envs, 0))
            hold.forget("0-1")
            assert envs.workers[1].pid is not None
            os.kill(envs.workers[1].pid, signal.SIGKILL)
            found += [await following, await anext(iterator)]
            assert [episode.seed for episode in found] == seeds
        return drawn

    drawn = asyncio.run(main())
    if None in seeds:
        assert drawn == asyncio.run(main())
    else:
        assert drawn == {number: np.random.default_rng(seed).random() for number, seed in enumerate(seeds)}


@modes
def test_a_reset_that_a_new_process_repeats_begins_a_whole_episode(mode: Any, hold: Hold) -> None:
    """Not one that the next step cuts."""

    async def main() -> None:
        factories = [partial(Twin, slot, hold=hold.folder) for slot in range(2)]
        restart = aioenv.RestartPolicy()
        async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode, restart=restart) as envs:
            hold.hold("1-0")
            reset = asyncio.ensure_future(envs.reset(seed=0))
            await until(lambda: envs.workers[1].state == "busy")
            pid = envs.workers[1].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: envs.workers[1].pid not in (pid, None))
            await asyncio.to_thread(hold.release, "1-0")
            assert who(await reset) == (0, 1, 0)
            step = await envs.step([0] * 2)
            assert who(step) == (0, 1, 1)
            assert not step.truncated.any()

    asyncio.run(main())


@pytest.mark.usefixtures("own_fork_server")
@modes
def test_thirty_workers_killed_at_random_moments(mode: Any) -> None:
    """Each step returns: an episode is cut, or goes on, or its next one has begun in the other env."""
    checked = run_on("asyncio", kill_at_random(mode, 30, seed=1, max_restarts=1000))
    assert checked.lost > 3


@modes
@pytest.mark.asyncio
async def test_a_reset_of_other_slots_shows_the_last_observation_of_a_lost_episode(mode: Any) -> None:
    """The process in place of the lost one has none, and the episode's end shows it once more."""
    factories = [partial(gymnasium.make, "CartPole-v1")] * 2
    restart = aioenv.RestartPolicy(backoff_s=0.0)
    async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode, restart=restart) as envs:
        await envs.reset(seed=0)
        last = (await envs.step([0, 1])).obs[1]
        worker = envs._session.worker_pool.members[1].worker
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while worker.generation == 0 and worker.state.value == "ready":
                await asyncio.sleep(0)
        obs, _ = await envs.reset(options={"reset_mask": np.array([True, False])})
        assert obs[1].tolist() == last.tolist()
        obs, _, _, truncated, info = await envs.step([0, 1])
        final = info["final_obs"][1] if mode is MODES[1] else obs[1]
        assert truncated.tolist() == [False, True] and final.tolist() == last.tolist()


@pytest.mark.usefixtures("own_fork_server")
@modes
def test_workers_killed_more_often_than_they_are_started_again(mode: Any) -> None:
    """Each step returns, or names the slots that must be reset; they go on in the env that they have left."""
    checked = run_on("asyncio", kill_at_random(mode, 10_000, seed=4, max_restarts=3))
    assert checked.failed


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("seed", [2, 3])
@modes
def test_three_hundred_workers_killed_at_random_moments(mode: Any, loop: str, seed: int) -> None:
    checked = run_on(loop, kill_at_random(mode, 300, seed=seed, max_restarts=1000))
    assert checked.lost > 30
