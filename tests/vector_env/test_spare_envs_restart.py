"""`spare_envs=True` with `restart=`: where an episode goes on when one of a slot's two workers has died."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import aioenv

pytestmark = pytest.mark.asyncio

MODES = ["NextStep", "SameStep"]
LENGTH = 4


class Episodes(gymnasium.Env[Any, Any]):
    """Episodes of `LENGTH` steps; its observations are (which of the slot's envs, its resets, step)."""

    observation_space = Box(0, 1000, (3,), np.float64)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.spare = aioenv.is_spare_env()
        self.episode = self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.obs(), {"fresh": self.episode}

    def obs(self) -> Any:
        return np.array([self.spare, self.episode, self.t], np.float64)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.obs(), 1.0, self.t == LENGTH, False, {}


async def kill(envs: aioenv.AsyncVectorEnv, slot: int, *, spare: bool) -> None:
    """Kill the worker of one of a slot's two envs, and wait until its process is noticed to be gone."""
    worker = envs.workers[slot + spare * envs.num_envs]
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    while envs.workers[slot + spare * envs.num_envs].pid == worker.pid and (
        envs.workers[slot + spare * envs.num_envs].state != "dead"
    ):
        await asyncio.sleep(0)


@pytest.mark.parametrize("mode", MODES)
async def test_an_episode_that_was_lost_ends_and_the_other_env_goes_on(mode: str) -> None:
    """The step after the death of the live worker is the truncated end of its episode."""
    restart = aioenv.RestartPolicy()
    async with aioenv.AsyncVectorEnv([Episodes] * 2, spare_envs=True, autoreset_mode=mode, restart=restart) as envs:
        await envs.reset(seed=0)
        actions = np.zeros(2, np.int64)
        await envs.step(actions)
        await kill(envs, 1, spare=False)
        step = await envs.step(actions)
        assert step.truncated.tolist() == [False, True]
        assert step.obs[0].tolist() == [0, 1, 2]
        if mode == "NextStep":
            assert step.info["restarted"].tolist() == [False, True]
            assert step.obs[1].tolist() == [0, 1, 1]  # its last observation
            step = await envs.step(actions)
        else:
            assert step.info["final_obs"][1].tolist() == [0, 1, 1]
            assert step.info["final_info"]["restarted"].tolist() == [False, True]
            assert step.info["restarted"].tolist() == [False, True]
        assert step.obs[1].tolist() == [1, 1, 0]  # the first one of the other env
        assert step.info["fresh"][1] == 1
        while step.obs[1][0] == 1:  # until the worker is back
            step = await envs.step(actions)
        assert step.obs[1].tolist() == [0, 1, 0]  # with a new env


@pytest.mark.parametrize("mode", MODES)
async def test_the_end_of_a_spare_worker_costs_no_episode(mode: str) -> None:
    """The spare env is made anew and reset; the running episode does not notice."""
    restart = aioenv.RestartPolicy()
    async with aioenv.AsyncVectorEnv([Episodes], spare_envs=True, autoreset_mode=mode, restart=restart) as envs:
        await envs.reset(seed=0)
        actions = np.zeros(1, np.int64)
        await envs.step(actions)
        await kill(envs, 0, spare=True)
        seen: list[tuple[float, ...]] = []
        while (1, 1, LENGTH - 1) not in seen:  # until the worker is back; other episodes run in the first env
            step = await envs.step(actions)
            assert not step.truncated.any()
            assert "restarted" not in step.info
            seen.append(tuple(step.obs[0].tolist()))
        assert seen[: LENGTH - 2] == [(0, 1, t) for t in range(2, LENGTH)]


@pytest.mark.parametrize("mode", MODES)
async def test_both_workers_of_a_slot_may_die(mode: str) -> None:
    """The step waits for the first one that is back."""
    restart = aioenv.RestartPolicy()
    async with aioenv.AsyncVectorEnv([Episodes] * 2, spare_envs=True, autoreset_mode=mode, restart=restart) as envs:
        await envs.reset(seed=0)
        actions = np.zeros(2, np.int64)
        await envs.step(actions)
        await kill(envs, 0, spare=True)
        await kill(envs, 0, spare=False)
        step = await envs.step(actions)
        assert step.truncated.tolist() == [True, False]
        if mode == "NextStep":
            step = await envs.step(actions)
        assert step.obs[0].tolist()[1:] == [1, 0]
        for _ in range(3 * LENGTH):
            step = await envs.step(actions)
        assert not step.truncated.any()


@pytest.mark.parametrize("mode", MODES)
async def test_a_slot_that_is_not_restarted_goes_on_in_its_other_env_after_a_reset(mode: str) -> None:
    """Without `restart=` the death is reported, and a reset begins an episode in the env that is left."""
    async with aioenv.AsyncVectorEnv([Episodes] * 2, spare_envs=True, autoreset_mode=mode) as envs:
        await envs.reset(seed=0)
        actions = np.zeros(2, np.int64)
        await kill(envs, 0, spare=False)
        with pytest.raises(aioenv.WorkerDied, match="must be reset"):
            await envs.step(actions)
        reset = await envs.reset(options={"reset_mask": np.array([True, False])})
        assert reset.obs[0].tolist() == [1, 2, 0]  # the one that was prepared is discarded
        for _ in range(3 * LENGTH):
            await envs.step(actions)
        await kill(envs, 0, spare=True)
        with pytest.raises(aioenv.WorkerDied):
            await envs.step(actions)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_numbered_episodes_are_the_same_with_spare_envs(mode: str, restarted: bool) -> None:
    """Each slot reserves the next number; seeds and returns are those of a run without spare envs."""
    runs = []
    for spares in (False, True):
        restart = aioenv.RestartPolicy() if restarted else None
        async with aioenv.make_vec("CartPole-v1", 3, spare_envs=spares, autoreset_mode=mode, restart=restart) as envs:
            found = []
            async for episode in envs.episodes(lambda obs: (obs[:, 2] > 0).astype(np.int64), 12, seed=5):
                found.append((episode.number, episode.seed, episode.total_reward, episode.length))
                if spares and restarted and len(found) == 4:
                    await kill(envs, 1, spare=False)
            runs.append(sorted(found))
            await envs.reset(seed=1)
            for _ in range(50):
                await envs.step(np.zeros(3, np.int64))
    assert runs[0] == runs[1]
