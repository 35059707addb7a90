"""Envs that tell their state themselves, and whose states change their length: resumed like all others."""

from __future__ import annotations

import os
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.stats import CountEpisodes, EpisodeCounter
from tests.faults.resume_kit import POLICY, compare, step_and_kill

pytestmark = pytest.mark.asyncio


class Diary(gym.Env):
    """Remembers all of its actions, of this episode and of those before, and sees a sum of them; begins with pages."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,))
    action_space = spaces.Box(-1, 1, (2,))

    def __init__(self, pages=0):
        self.actions = [np.ones(2, np.float32)] * pages
        self.t = 0

    def see(self):
        return np.array([*sum(self.actions, np.zeros(2)), self.np_random.random()], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def step(self, action):
        self.t += 1
        self.actions.append(np.array(action))
        return self.see(), float(len(self.actions)), self.t == 5, False, {"length": len(self.actions)}

    def get_state(self):
        return {"actions": list(self.actions), "t": self.t}

    def set_state(self, state):
        self.actions, self.t = list(state["actions"]), state["t"]


class Album(gym.Wrapper):
    """Around physics, whose last step is done again: keeps all observations, tells the mean of a number."""

    def __init__(self, env):
        super().__init__(env)
        self.seen = []

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        self.seen.append(obs)
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.seen.append(obs)
        return obs, reward, terminated, truncated, {**info, "mean": float(np.mean([o[0] for o in self.seen]))}

    def get_state(self):
        return list(self.seen)

    def set_state(self, state):
        self.seen = list(state)


KILLS = {2: (0, True), 7: (1, False), 16: (0, False), 17: (1, True)}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.value)
async def test_a_state_that_grows(mode):
    await compare(Diary, mode, 22, KILLS)


async def test_a_state_that_grows_around_physics():
    await compare(lambda: Album(gym.make("Hopper-v5", max_episode_steps=6)), AutoresetMode.NEXT_STEP, 19, KILLS)


@pytest.mark.parametrize("num_slots", [2, None])
@pytest.mark.parametrize("make", [Diary, partial(gym.make, "Hopper-v5", max_episode_steps=5)], ids=["own", "physics"])
async def test_episodes_keep_their_numbers(make, num_slots):
    """Those of a reset and of an automatic reset that are replayed; and neither takes another number."""
    with EpisodeCounter(num_slots) as counter:
        factories = [lambda slot=slot: CountEpisodes(make(), counter.at(slot)) for slot in range(2)]
        async with aioenv.AsyncVectorEnv(factories, num_workers=2, restart=POLICY) as envs:
            ids = [(await envs.reset(seed=0)).info["episode_id"].tolist()]
            actions = np.zeros(envs.action_space.shape, np.float32)
            for t in range(8):
                result = await step_and_kill(envs, actions, 0 if t in (0, 6) else None, True)
                assert "restarted" not in result.info
                ids.append(result.info["episode_id"].tolist())
        assert ids == [ids[0]] * 6 + [ids[6]] * 3
        assert sorted(ids[0] + ids[6]) == [0, 1, 2, 3] and counter.count == 4


async def test_a_state_that_is_larger_in_the_new_process(tmp_path):
    """Before its first reset, that is: what the room of a checkpoint is measured by."""

    def make(notes=tmp_path / "notes"):
        notes.mkdir(exist_ok=True)
        (notes / str(os.getpid())).touch()
        return Diary(pages=1000 * (len(list(notes.iterdir())) > 2))

    async with aioenv.AsyncVectorEnv([make] * 4, num_workers=2, restart=POLICY) as envs:
        await envs.reset(seed=1)
        lengths = []
        for t in range(14):
            actions = np.zeros((4, 2), np.float32)
            result = await step_and_kill(envs, actions, t % 2 if t % 5 == 4 else None, t % 2 == 0)
            assert not result.truncated.any() and "restarted" not in result.info
            lengths.append(result.reward)
        rows = np.array(lengths)
        assert rows.max() > 8 and (np.diff(rows[rows.any(axis=1)], axis=0) == 1).all()
