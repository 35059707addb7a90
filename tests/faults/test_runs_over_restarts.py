"""Evaluations, rollouts and statistics of episodes while workers die or hang, and are started again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import aioenv

FAULTS = (5, 7)


class Episodes(gym.Env):
    """Episodes of three to eight steps, rewarded 1, 2, 3, …; in those of five and of seven the fault strikes once."""

    observation_space = spaces.Box(0, 9, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, armed: Path, fault: str) -> None:
        self._armed, self._fault = armed, fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        self._length = int(self.np_random.integers(3, 9))
        return np.array([self._length, 0.0]), {}

    def step(self, action):
        self._t += 1
        path = self._armed / str(self._length)
        if self._t == 2 and path.exists():
            path.unlink()
            if self._fault == "hangs":
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGKILL)
        return np.array([self._length, self._t], float), float(self._t), self._t == self._length, False, {}


def whole_episodes(rollout) -> list[float]:
    """The returns of episodes that ended in a rollout, of the rows that are valid."""
    returns = []
    for slot in range(rollout.reward.shape[1]):
        total, length = 0.0, 0
        for t in range(len(rollout.reward)):
            if rollout.valid[t, slot]:
                total, length = total + rollout.reward[t, slot], length + 1
            elif rollout.truncated[t, slot]:
                total, length = 0.0, 0  # it was lost
            if rollout.terminated[t, slot]:
                assert total == length * (length + 1) / 2, "steps of two episodes"
                returns.append(total)
                total, length = 0.0, 0
    return returns


async def play(mode, fault, path, *, armed):
    """The returns of an evaluation, how often each episode was begun, and those of a rollout, beside the statistics."""

    def arm():
        for length in FAULTS if armed else ():
            (path / str(length)).touch()

    policy = aioenv.RestartPolicy(max_restarts=50, backoff_s=0.01)
    options = {"restart": policy, "autoreset_mode": mode, "episode_stats": True}
    if fault == "hangs":
        options |= {"timeout_s": 0.5, "on_timeout": "restart"}
    async with aioenv.AsyncVectorEnv([lambda: Episodes(path, fault)] * 4, num_workers=2, **options) as envs:
        arm()
        evaluation = await aioenv.evaluate(envs, lambda obs: np.zeros(4, np.int64), 12, seed=3)
        assert envs.episode_stats.epoch()["episode_count"] == 12
        await envs.reset(seed=1)
        envs.episode_stats.clear()
        arm()
        returns = whole_episodes(await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 30))
        epoch = envs.episode_stats.epoch()
        assert (epoch["episode_count"], epoch["return/mean"]) == (len(returns), np.mean(returns))
    return evaluation.returns.tolist(), sum(episode.attempts for episode in evaluation.episodes)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.asyncio
async def test_no_episode_is_lost_mixed_up_or_counted_twice(mode, fault, tmp_path):
    quiet, _ = await play(mode, fault, tmp_path, armed=False)
    disturbed, attempts = await play(mode, fault, tmp_path, armed=True)
    assert disturbed == quiet and attempts >= len(quiet) + len(FAULTS)
