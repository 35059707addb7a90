"""Slots whose envs have no further episode: they are paused, by themselves."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from tests.kits.loop_kit import run_on

MODES = list(AutoresetMode)


class Shard(gym.Env):
    """Runs the episodes that its config lists, each two steps long, and no others."""

    observation_space = gym.spaces.Box(0, 100, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config, done=StopIteration):
        self.episodes = config["episodes"]
        self.done = done

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if not self.episodes:
            raise self.done("that was the last one")
        self.episode, self.t = self.episodes.pop(0), 0
        return self.observe(), {"episode": self.episode}

    def observe(self):
        return np.array([self.episode, self.t], np.float32)

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, self.t == 2, False, {}


def hand_out(config, slot):
    config["episodes"] = list(slot.episodes)


def shards(n, episodes):
    plan = aioenv.plan_workers(n, mode="eval", episodes=range(1, episodes + 1), num_workers=2)
    return aioenv.construct_envs({}, Shard, plan, configure=hand_out)


@pytest.mark.parametrize(("mode", "transport"), [*zip(MODES, ["frames", "shared", "auto"], strict=True)])
def test_ce_a_slot_whose_episodes_are_done_is_paused_and_none_is_there_twice(mode, transport):
    async def main():
        finished = []
        envs = aioenv.AsyncVectorEnv(shards(3, 7), num_workers=2, autoreset_mode=mode, transport=transport)
        async with envs:
            assert envs.exhausted == ()
            await envs.reset(seed=0)
            for _ in range(20):
                result = await envs.step(np.zeros(3, np.int64))
                over = result.terminated
                final = result.info.get("final_obs", result.obs)
                finished += [int(final[slot][0]) for slot in over.nonzero()[0]]
                assert (result.reward[over] == 1).all()
                if mode is AutoresetMode.DISABLED and over.any():
                    await envs.reset(options={"reset_mask": over})
                if not len(envs.active_slots):
                    break
            assert sorted(finished) == [1, 2, 3, 4, 5, 6, 7]
            assert envs.exhausted == (0, 1, 2)
            assert result.obs[:, 0].tolist() == [7, 5, 6]  # the last observations stay
            result = await envs.step(np.zeros(3, np.int64))
            assert not result.info["_active"].any() and not result.reward.any()
            assert result.obs.tolist() == [[7, 2], [5, 2], [6, 2]]
            # once more is no error
            envs.resume_all()
            assert envs.exhausted == ()
            result = await envs.step(np.zeros(3, np.int64))
            assert not result.info["_active"].any() and not result.terminated.any()
            assert envs.exhausted == (0, 1, 2)
            # new episodes
            await envs.set_attr("episodes", [[8], [9], []])
            envs.resume_all()
            obs, info = await envs.reset()
            assert obs.tolist() == [[8, 0], [9, 0], [6, 2]]
            assert info["episode"].tolist() == [8, 9, 0]
            assert info["_active"].tolist() == [True, True, False]
            assert envs.exhausted == (2,)

    run_on("uvloop", main())


def test_stop_iteration_is_an_error_unless_the_env_is_finite():
    async def main():
        make = partial(Shard, {"episodes": []})
        async with aioenv.AsyncVectorEnv([make, partial(make, done=aioenv.EpisodesDone)]) as envs:
            with pytest.raises(aioenv.EnvError, match="StopIteration: that was the last one") as caught:
                await envs.reset()
            assert caught.value.slots == (0,)
            assert "finite_episodes = True" in str(caught.value)
            assert envs.exhausted == (1,)

    run_on("asyncio", main())


def test_an_exhausted_slot_tells_so_where_slots_are_treated_alone():
    async def main():
        async with aioenv.AsyncVectorEnv(shards(2, 2), num_workers=2) as envs:
            await envs.reset()
            rollout = await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 5)
            assert rollout.valid.tolist() == [[True] * 2] * 2 + [[False] * 2] * 3
            assert rollout.last_obs.tolist() == [[1, 2], [2, 2]]
            assert envs.exhausted == (0, 1)
            envs.resume()
            assert (await envs.reset_at(0))[1] == {"_active": False}
            envs.send([0], [1])
            ready = await envs.recv()
            assert (ready.obs.tolist(), ready.info["_active"].tolist()) == ([[2, 2]], [False])

    run_on("asyncio", main())
