"""CPython keeps the attributes of envs where a step finds them fastest: nothing asks for their `__dict__`."""

from __future__ import annotations

import gc
import sys
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import TimeLimit

import aioenv


class Attributes(gym.Wrapper[Any, Any, Any, Any]):
    """Tells which of the envs that it wraps have a dict of their attributes: one asked for it."""

    def envs_with_dicts(self) -> list[str]:
        found, env = [], self.env
        while True:
            if any(type(held) is dict and ("env" in held or "spec" in held) for held in gc.get_referents(env)):
                found.append(type(env).__name__)
            if not isinstance(env, gym.Wrapper):
                return found
            env = env.env


# classes of their own: CPython gives up on a class to whose objects other tests have given many attributes
class Pole(CartPoleEnv):
    pass


class Limit(TimeLimit):
    pass


def make() -> Attributes:
    env = Pole()
    env.spec = EnvSpec("Pole-v0", Pole)
    return Attributes(Limit(env, 9))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "options",
    [{"num_workers": 0}, {"num_workers": 1, "episode_stats": True}, {"restart": aioenv.RestartPolicy()}],
    ids=["in this process", "a worker", "restarted"],
)
async def test_envs_have_no_dict_of_attributes(options):
    async with aioenv.AsyncVectorEnv([make, make], **options) as envs:
        await envs.reset(seed=0)
        await envs.step(envs.action_space.sample())
        assert await envs.call("envs_with_dicts") == ([], [])


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="attributes stay where they are")
def test_dicts_are_found():
    env = make()
    assert env.envs_with_dicts() == []
    assert vars(env.unwrapped) and vars(env.env)
    assert env.envs_with_dicts() == ["Limit", "Pole"]
