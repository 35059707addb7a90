"""An invalid result or an exception of one env touches its own slot alone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from tests.kits.compare import assert_same


class Gradient:
    """A number that is none yet, as a tensor that wants its gradient."""

    def __float__(self):
        raise RuntimeError("call detach() first")


class Ambiguous(dict):
    def __bool__(self):
        raise ValueError("ambiguous")


class Odd(gym.Env):
    """Returns, or raises, what it is told to by `odd`."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)
    odd: Any = None

    def __init__(self, number: int) -> None:
        self.number = number

    def reset(self, *, seed=None, options=None):
        info = {} if options is None or self.number else options["info"]
        return np.zeros(1, np.float32), info

    def step(self, action):
        if isinstance(self.odd, BaseException):
            raise self.odd
        reward, info = self.odd or (1.0, {"number": self.number})
        return np.full(1, self.number, np.float32), reward, False, False, info

    def fail(self, error):
        if self.number == 0:
            raise error
        return self.number


def make(number: int, odd: Any = None) -> Odd:
    env = Odd(number)
    env.odd = odd
    return env


class Locked(Odd):
    """Its first info does not pickle."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        lock, self.lock = self.lock, None
        return obs, reward, terminated, truncated, {**info, **({"lock": lock} if lock else {})}

    def reset(self, *, seed=None, options=None):
        self.lock = threading.Lock() if seed is not None and self.number == 0 else None
        return super().reset(seed=seed)


@pytest.mark.asyncio
async def test_infos_that_come_beside_one_that_does_not_pickle():
    """How they are laid out is told once: in the reply that could not be sent as it was, here."""
    async with aioenv.AsyncVectorEnv([lambda: Locked(0), lambda: Locked(1)], num_workers=1) as envs:
        await envs.reset(seed=0)
        for _ in range(2):
            with pytest.raises(aioenv.EnvError, match="pickle") as caught:
                await envs.step([0, 0])
            assert caught.value.slots == (0,) and caught.value.partial.info["number"].tolist() == [0, 1]
            await envs.reset(seed=0)
        await envs.reset()
        assert (await envs.step([0, 0])).info["_number"].all()


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        ((1.0, ["no dict"]), TypeError),
        ((1.0, "no dict"), TypeError),
        ((1.0, np.arange(2)), TypeError),
        ((1.0, Ambiguous()), ValueError),
        ((10**400, {}), OverflowError),
        ((Gradient(), {}), RuntimeError),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (GeneratorExit(), GeneratorExit),
        (BaseException("panic"), BaseException),
    ],
    ids="list text array ambiguous huge gradient cancelled interrupt exit panic".split(),
)
@pytest.mark.asyncio
async def test_of_a_step(odd, cause):
    factories = [lambda: make(0, odd), lambda: make(1), lambda: make(2)]
    async with aioenv.AsyncVectorEnv(factories, debug=True) as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError) as caught:
            await envs.step([0, 0, 0])
        error = caught.value
        assert error.slots == (0,) and type(error.__cause__) is cause
        obs, reward, _, _, info = error.partial
        assert obs[1:, 0].tolist() == [1, 2] and reward[1:].tolist() == [1, 1]
        assert info["number"].tolist() == [0, 1, 2] and info["_number"].tolist() == [False, True, True]
        await envs.set_attr("odd", None)
        await envs.reset(options={"reset_mask": np.array([True, False, False]), "info": {}})
        assert (await envs.step([0, 0, 0])).reward.tolist() == [1, 1, 1]


@pytest.mark.parametrize("info", [["no dict"], np.arange(2)], ids=["list", "array"])
@pytest.mark.asyncio
async def test_of_a_reset(info):
    async with aioenv.AsyncVectorEnv([lambda i=i: make(i) for i in range(3)], debug=True) as envs:
        with pytest.raises(aioenv.EnvError) as caught:
            await envs.reset(options={"info": info})
        assert caught.value.slots == (0,)
        await envs.reset()


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt, BaseException])
@pytest.mark.asyncio
async def test_of_a_call(kind):
    async with aioenv.AsyncVectorEnv([lambda i=i: make(i) for i in range(3)], debug=True) as envs:
        with pytest.raises(aioenv.EnvError) as caught:
            await envs.call("fail", kind("no"))
        assert caught.value.slots == (0,) and caught.value.partial == (None, 1, 2)


@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")
def test_the_blocking_drop_in_does_not_raise_what_is_not_its_own():
    with aioenv.sync.AsyncVectorEnv([lambda: make(0, KeyboardInterrupt()), lambda: make(1)], num_workers=1) as envs:
        envs.reset()
        with pytest.raises(aioenv.EnvError, match="KeyboardInterrupt"):
            envs.step([0, 0])
        assert envs.call("number") == (0, 1)


@pytest.mark.asyncio
async def test_a_rollout_of_no_steps_prints():
    async with aioenv.make_vec(lambda: make(0), 2, debug=True) as envs:
        await envs.reset()
        rollout = await envs.rollout(lambda obs: np.zeros(len(obs), int), 1)
        assert repr(rollout) == "<Rollout steps=1 num_envs=2 valid=100%>"
        none = rollout._replace(reward=rollout.reward[:0], valid=rollout.valid[:0])  # as of a first step that timed out
        assert repr(none) == "<Rollout steps=0 num_envs=2>"


class Lists(gym.Env):
    """Observes a list, with a lock in it if it is told so."""

    observation_space = spaces.Sequence(spaces.Discrete(9))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return (), {}

    def step(self, action):
        return (1, threading.Lock() if action else 2), 1.0, False, False, {}


@pytest.mark.asyncio
async def test_of_an_observation_that_does_not_travel():
    async with aioenv.AsyncVectorEnv([Lists] * 3, debug=True) as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError, match="the observation of this env can't be pickled") as caught:
            await envs.step([0, 1, 0])
        assert caught.value.slots == (1,)
        obs, reward, *_ = caught.value.partial
        assert (obs[0], obs[2]) == ((1, 2), (1, 2)) and reward[[0, 2]].tolist() == [1, 1]
        await envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert (await envs.step([0, 0, 0])).obs == ((1, 2),) * 3


class OwnFinal(gym.Env):
    """Tells its infos under the keys of autoresets; its episodes are of as many steps as it is told."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self.length = length

    def _say(self, time):
        self.time = time
        own = {"time": time, "deep": {"time": time, f"at{time % 2}": time}}
        return np.full(1, time, np.float32), {"final_obs": f"own {time}", "final_info": own}

    def reset(self, *, seed=None, options=None):
        return self._say(0)

    def step(self, action):
        obs, info = self._say(self.time + 1)
        return obs, 1.0, self.time == self.length, False, info


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.asyncio
async def test_infos_under_the_keys_of_autoresets(num_workers):
    factories = [lambda i=i: OwnFinal(5 - i) for i in range(3)]
    theirs = SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP)
    async with aioenv.AsyncVectorEnv(factories, num_workers=num_workers, autoreset_mode="SameStep", debug=True) as envs:
        assert_same(tuple(await envs.reset()), tuple(theirs.reset()))
        for _ in range(6):
            assert_same(tuple(await envs.step([0] * 3)), tuple(theirs.step([0] * 3)))
    theirs.close()
