"""`rollout.next_obs`: what each step led to, in every autoreset mode; and episodes that end in the last row."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

import aioenv
from aioenv import sync
from tests.kits.zoo import SPACES, Sampler

N, STEPS = 5, 17
MODES = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.value)


def element(tree: Any, step: int, slot: int) -> Any:
    """One observation of a rollout's."""
    if isinstance(tree, dict):
        return {key: element(child, step, slot) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(element(child, step, slot) for child in tree)
    assert tree.shape[:2] == (STEPS, N)
    return tree[step, slot]


def same(a: Any, b: Any) -> bool:
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in b)
    if isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return (type(a) is str and a == b) or np.array_equal(a, b)


async def led_to(envs: Any, steps: int) -> list[list[Any]]:
    """What each step of a plain loop leads to, slot by slot: last observations where episodes end."""
    found, over = [], np.zeros(N, np.bool_)
    for _ in range(steps):
        if envs.autoreset_mode is AutoresetMode.DISABLED and over.any():
            await envs.reset(options={"reset_mask": over})
        obs, _, terminated, truncated, info = await envs.step(np.zeros(N, np.int64))
        over = terminated | truncated
        row = list(copy.deepcopy(tuple(iterate(envs.observation_space, obs))))
        for slot in np.flatnonzero(over) if envs.autoreset_mode is AutoresetMode.SAME_STEP else ():
            row[slot] = info["final_obs"][slot]
        found.append(row)
    return found


def zeros(obs: Any, slots: Any) -> Any:
    return np.zeros(len(slots), np.int64)


@pytest.mark.sampled(2)
@pytest.mark.asyncio
@MODES
@pytest.mark.parametrize(("transport", "groups"), [("frames", 1), ("shared", 2)])
@pytest.mark.parametrize("space", SPACES)
async def test_of_every_sort_of_space(space, mode, transport, groups):
    async with aioenv.AsyncVectorEnv(
        [partial(Sampler, space)] * N, num_workers=2, transport=transport, autoreset_mode=mode
    ) as envs:
        await envs.reset(seed=4)
        expected = await led_to(envs, STEPS)
        await envs.reset(seed=4)
        rollout = await envs.rollout(zeros, STEPS, groups)
        assert rollout.terminated.any() and rollout.truncated.any()
        next_obs = rollout.next_obs
        for step, row in enumerate(expected):
            for slot, obs in enumerate(row):
                assert same(element(next_obs, step, slot), obs), (step, slot)


class Counting(gym.Env):
    """Observes how many steps there were, in an array that it uses again; its episodes have `length` of them."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int, number: int = 0) -> None:
        self.length, self.number, self.episode = length, number, -1
        self.obs = np.zeros(2)

    def _see(self):
        self.obs[:] = self.time + 100 * self.number, self.episode
        return self.obs

    def reset(self, *, seed=None, options=None):
        self.time, self.episode = 0, self.episode + 1
        return self._see(), {}

    def step(self, action):
        self.time += 1
        if action and self.number == 1 and self.time == 2:
            raise ValueError("no")
        return self._see(), 1.0, self.time == self.length, False, {}


@pytest.mark.asyncio
@pytest.mark.parametrize("kwargs", [{"debug": True}, {"num_workers": 2, "copy": False}], ids=str)
@pytest.mark.parametrize("steps", [3, 6, 7])
async def test_disabled_tells_of_an_episode_that_ends_in_the_last_row(kwargs, steps):
    makers = [lambda i=i: Counting(3, i) for i in range(2)]
    async with aioenv.AsyncVectorEnv(makers, autoreset_mode="Disabled", **kwargs) as envs:
        await envs.reset()

        def policy(obs):
            obs[...] = -1  # it is the policy's
            return np.zeros(len(obs), np.int64)

        first = await envs.rollout(policy, steps)
        second = await envs.rollout(policy, steps)
        ends = 0
        for rollout in (first, second):
            for step, slot in np.argwhere(rollout.terminated):
                ends += 1
                assert rollout.infos[step]["_final_obs"][slot]
                assert rollout.infos[step]["final_obs"][slot].tolist()[0] == 3 + 100 * slot
                assert rollout.next_obs[step, slot].tolist() == rollout.infos[step]["final_obs"][slot].tolist()
            assert sum("final_obs" in info for info in rollout.infos) == rollout.terminated.any(1).sum()
        assert ends == 2 * (2 * steps // 3)


@MODES
def test_of_blocking_code(mode):
    with sync.VectorEnv([lambda: Counting(2)] * N, autoreset_mode=mode, debug=True) as envs:
        envs.reset()
        rollout = envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 6)
    time = rollout.next_obs[:, 0, 0].tolist()
    assert time == ([1, 2, 0, 1, 2, 0] if mode is AutoresetMode.NEXT_STEP else [1, 2] * 3)
    valid = rollout.valid[:, 0].tolist()
    assert valid == ([True, True, False] * 2 if mode is AutoresetMode.NEXT_STEP else [True] * 6)
    assert (rollout.next_obs[rollout.valid][:, 0] - rollout.obs[rollout.valid][:, 0] == 1).all()


def test_it_is_made_once_and_is_the_callers_own():
    with sync.VectorEnv([lambda: Counting(2)] * N, autoreset_mode="SameStep", debug=True) as envs:
        envs.reset()
        rollout = envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 6)
    assert rollout.next_obs is rollout.next_obs and not np.shares_memory(rollout.next_obs, rollout.obs)
    expected = rollout.next_obs.tolist()
    fresh = rollout._replace(reward=rollout.reward * 2)
    assert type(fresh) is aioenv.Rollout and fresh.next_obs.tolist() == expected
    there = pickle.loads(pickle.dumps(rollout._replace(extras={})))
    assert type(there) is aioenv.Rollout and there.next_obs.tolist() == expected
    obs, *_, extras = rollout  # as ever, it has its fields and no more
    assert obs is rollout.obs and extras == {} and len(rollout) == len(rollout._fields) == 9


@MODES
@pytest.mark.parametrize("num_workers", [1, 2])
def test_of_a_rollout_that_an_env_has_ended(mode, num_workers):
    makers = [lambda i=i: Counting(9, i) for i in range(3)]
    with sync.VectorEnv(makers, autoreset_mode=mode, num_workers=num_workers) as envs:
        envs.reset()
        with pytest.raises(aioenv.EnvError) as caught:
            envs.rollout(lambda obs: np.ones(len(obs), np.int64), 4, 3, split="workers")
    rollout = caught.value.partial
    for step, slot in np.argwhere(rollout.valid):
        assert rollout.next_obs[step, slot, 0] == rollout.obs[step, slot, 0] + 1, (step, slot)
    assert rollout.valid[:, 0].any()


class Batched(VectorEnv):
    """Tells last observations as one array for all slots, as some vector envs do."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_observation_space, single_action_space = Counting.observation_space, Counting.action_space

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.time = num_envs, np.zeros(num_envs)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def _see(self):
        return np.stack([self.time, np.arange(self.num_envs)], axis=1)

    def reset(self, *, seed=None, options=None):
        self.time = np.arange(self.num_envs, dtype=np.float64) % 2
        return self._see(), {}

    def step(self, actions):
        self.time = self.time + 1
        over, last = self.time == 3, self._see()
        self.time[over] = 0
        info = {"final_obs": last, "_final_obs": over} if over.any() else {}
        return self._see(), np.ones(self.num_envs), over, np.zeros(self.num_envs, np.bool_), info


@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [0, 2])
async def test_of_vector_envs(num_workers):
    async with aioenv.NativeVectorEnv(Batched, 4, num_workers=num_workers) as envs:
        await envs.reset()
        rollout = await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 9)
    assert (rollout.next_obs[..., 0] - rollout.obs[..., 0] == 1).all() and rollout.terminated.sum() == 12
    assert (rollout.next_obs[..., 1] == (np.arange(4) % 2 if num_workers else np.arange(4))).all()


@pytest.mark.asyncio
@MODES
@pytest.mark.parametrize("groups", [1, 2])
async def test_of_native_tasks(mode, groups):
    async def run(**kwargs):
        async with aioenv.make_vec("Hopper-v5", 4, autoreset_mode=mode, max_episode_steps=5, **kwargs) as envs:
            await envs.reset(seed=3)
            return (await envs.rollout(lambda obs: np.zeros((len(obs), 3), np.float32), 10, groups)).next_obs

    native, single = await run(backend="native"), await run(num_workers=1)
    assert native.tobytes() == single.tobytes()


@pytest.mark.asyncio
async def test_paused_slots_stay_where_they_are():
    makers = [lambda i=i: Counting(2, i) for i in range(3)]
    async with aioenv.AsyncVectorEnv(makers, num_workers=1, autoreset_mode="Disabled") as envs:
        await envs.reset()
        envs.pause(1)
        rollout = await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 4)
    assert (rollout.next_obs[:, 1] == rollout.obs[:, 1]).all() and rollout.next_obs[:, 2, 0].tolist() == [201, 202] * 2


@pytest.mark.asyncio
async def test_a_key_of_the_envs_own():
    """Under NEXT_STEP nothing is taken from infos, whatever they are called."""

    class Own(Counting):
        def step(self, action):
            obs, reward, terminated, truncated, _ = super().step(action)
            return obs, reward, terminated, truncated, {"final_obs": "mine"}

    async with aioenv.AsyncVectorEnv([lambda: Own(2)] * 2, debug=True) as envs:
        await envs.reset()
        rollout = await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 3)
        assert rollout.next_obs[:, 0, 0].tolist() == [1, 2, 0]
        assert rollout._replace(extras={}).next_obs[:, 0, 0].tolist() == [1, 2, 0]
