"""Episodes of `aioenv.adapters.sb3` are counted where Stable-Baselines3's `Monitor` is: beneath `wrappers=`."""

from __future__ import annotations

import functools
import importlib.util

import gymnasium as gym
import numpy as np
import pytest

import aioenv

INSTALLED = importlib.util.find_spec("stable_baselines3") is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="Stable-Baselines3 is not installed")


class Scale(gym.RewardWrapper):
    def reward(self, reward):
        return 0.01 * reward


class Lives(gym.Wrapper):
    """As Atari's EpisodicLifeEnv: every five steps an episode seems to be over, and the game goes on."""

    over = True

    def reset(self, **kwargs):
        self.n = 0
        if self.over:
            self.over = False
            return self.env.reset(**kwargs)
        return self.last, {}

    def step(self, action):
        self.last, reward, terminated, truncated, info = self.env.step(action)
        self.n += 1
        self.over = terminated or truncated
        return self.last, reward, terminated or self.n >= 5, truncated, info


@pytest.mark.parametrize("wrapper", [Scale, Lives])
@pytest.mark.parametrize(
    "given", [{}, {"episode_stats": True}, {"stats_prefix": "train"}, {"num_workers": 1}, {"num_workers": 0}], ids=str
)
def test_they_are_counted_beneath_wrappers(wrapper, given):
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.monitor import Monitor

    from aioenv.adapters import sb3

    theirs = make_vec_env("CartPole-v1", 3, seed=5, wrapper_class=wrapper)
    ours = sb3.make_vec("CartPole-v1", 3, seed=5, wrappers=[wrapper], **given)
    rng = np.random.default_rng(0)
    ends = dones = 0
    try:
        assert ours.env_is_wrapped(Monitor) == theirs.env_is_wrapped(Monitor) == [True] * 3
        assert np.array_equal(ours.reset(), theirs.reset())
        for _ in range(120):
            actions = rng.integers(0, 2, 3)
            (_, _, over, infos), (_, rewards, got_over, got) = theirs.step(actions), ours.step(actions)
            assert np.array_equal(over, got_over)
            dones += over.sum()
            for expected, info in zip(infos, got, strict=True):
                assert expected.keys() == info.keys()
                if "episode" in expected:
                    ends += 1
                    assert (info["episode"]["r"], info["episode"]["l"]) == pytest.approx(
                        (expected["episode"]["r"], expected["episode"]["l"])
                    )
                    assert info["episode"]["t"] >= 0
        assert ends and (wrapper is Scale) == (ends == dones)
        assert rewards.tolist() == [0.01 if wrapper is Scale else 1] * 3
    finally:
        theirs.close()
        ours.close()


def test_statistics_of_ones_own_are_of_what_the_wrappers_give():
    from aioenv.adapters import sb3

    stats = aioenv.EpisodeStats()
    envs = sb3.make_vec("CartPole-v1", 1, seed=5, wrappers=iter([Scale]), episode_stats=stats)
    try:
        envs.reset()
        info = {}
        while "episode" not in info:
            info = envs.step(np.zeros(1, int))[3][0]
        assert stats.epoch()["return/mean"] == pytest.approx(0.01 * info["episode"]["r"])
    finally:
        envs.close()


class Telling(gym.Wrapper):
    """Tells an episode itself, as a `Monitor` with keywords does."""

    def step(self, action):
        obs, reward, terminated, _, info = self.env.step(action)
        return obs, reward, terminated, True, {**info, "episode": {"r": -1.0, "l": 7, "t": 0.5, "cost": 2}}


def telling() -> gym.Env:
    return Telling(gym.make("CartPole-v1"))


@pytest.mark.parametrize("num_workers", [None, 0])
@pytest.mark.parametrize("kind", ["factories", "function", "wrapper", "inside"])
def test_what_an_env_tells_itself_stays(kind, num_workers):
    from aioenv.adapters import sb3

    if kind == "factories":
        envs = sb3.VecEnv([telling] * 2, episode_stats=True, num_workers=num_workers)
    elif kind == "wrapper":
        envs = sb3.make_vec("CartPole-v1", 2, wrappers=[Telling], num_workers=num_workers)
    else:
        envs = sb3.make_vec(telling, 2, wrappers=[Scale] * (kind == "inside"), num_workers=num_workers)
    try:
        envs.reset()
        for _ in range(30):
            for info in envs.step(np.zeros(2, int))[3]:
                assert info["episode"] == {"r": -1, "l": 7, "t": 0.5, "cost": 2}
        assert envs.reset_infos == [{}, {}]
    finally:
        envs.close()


def test_counts_are_of_a_state():
    from aioenv.adapters import sb3

    limit = functools.partial(gym.wrappers.TimeLimit, max_episode_steps=5)
    envs = sb3.make_vec(functools.partial(gym.make, "Hopper-v5", max_episode_steps=5), 1, seed=1, wrappers=[limit])

    def run(steps):
        for _ in range(steps):
            infos = envs.step(np.ones((1, 3), np.float32))[3]
        return infos[0].get("episode")

    try:
        envs.reset()
        assert run(2) is None
        state = envs._envs.get_state()
        first = run(3)
        run(4)
        envs._envs.set_state(state)
        again = run(3)
        assert again["l"] == first["l"] == 5
        assert again["r"] == first["r"]
    finally:
        envs.close()


def test_what_is_no_wrapper_is_told_as_it_was_given():
    from aioenv.adapters import sb3

    for wrong in (Scale, [Scale, 3]):
        with pytest.raises(TypeError, match=r"wrappers: expected a sequence of functions .* got (?!.*CountEpisodes)"):
            sb3.make_vec("CartPole-v1", 2, wrappers=wrong)
