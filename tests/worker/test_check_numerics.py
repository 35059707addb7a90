"""`check_numerics=True`: NaN and infinite rewards and observations are errors that name slot and step."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

import aioenv
from aioenv import sync

MODES = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.value)
NAN, INF = float("nan"), float("inf")


class Bad(gym.Env):
    """Slot 1 gives a bad number where it is told to: in such a step of its second episode (0: the reset)."""

    action_space = spaces.Discrete(2)

    def __init__(self, number: int, told: dict[str, Any], step: int, space: spaces.Space | None = None) -> None:
        self.number, self.told, self.bad_step = number, told if number == 1 else {}, step
        self.observation_space = spaces.Box(-INF, INF, (3,), np.float32) if space is None else space
        self.episode = 0

    def _obs(self):
        if self.episode == 2 and self.time == self.bad_step and "obs" in self.told:
            return self.told["obs"]
        return self._zeros(self.observation_space)

    def _zeros(self, space):
        if isinstance(space, spaces.Dict):
            return {key: self._zeros(part) for key, part in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(map(self._zeros, space.spaces))
        if isinstance(space, spaces.Graph):
            return spaces.GraphInstance(np.zeros((2, 2), np.float32), None, None)
        return () if isinstance(space, spaces.Sequence) else np.zeros(space.shape, space.dtype)

    def reset(self, *, seed=None, options=None):
        self.time, self.episode = 0, self.episode + 1
        return self._obs(), {}

    def step(self, action):
        self.time += 1
        bad = self.episode == 2 and self.time == self.bad_step
        reward = self.told.get("reward", 1.0) if bad else 1.0
        return self._obs(), reward, self.time == 3, False, {"number": self.number}


def until_error(envs, mode, said, steps=12):
    """Step until there is an error, under DISABLED with resets."""
    envs.reset()
    with pytest.raises(aioenv.EnvError, match=said) as caught:
        for _ in range(steps):
            result = envs.step(np.zeros(envs.num_envs, np.int64))
            over = result.terminated | result.truncated
            if mode is AutoresetMode.DISABLED and over.any():
                envs.reset(options={"reset_mask": over})
    return caught.value


KINDS = [{"debug": True}, {"num_workers": 2}, {"num_workers": 1, "transport": "shared", "copy": False}]


@MODES
@pytest.mark.parametrize("kwargs", KINDS, ids=["debug", "frames", "shared"])
@pytest.mark.parametrize(
    ("told", "step", "said"),
    [
        ({"reward": NAN}, 2, r"slot 1 .*reward: nan in step 2 since its reset"),
        ({"reward": np.float32(-INF)}, 3, r"slot 1 .*reward: -inf in step 3"),
        ({"obs": np.array([0, NAN, 0], np.float32)}, 1, r"slot 1 .*observation\[1\]: nan in step 1"),
        ({"obs": np.array([0, 0, INF], np.float32)}, 3, r"slot 1 .*observation\[2\]: inf in step 3"),
        ({"obs": np.array([-INF, 0, 0], np.float32)}, 0, r"slot 1 .*observation\[0\]: -inf in its reset"),
    ],
    ids=["nan-reward", "inf-reward", "nan-obs", "inf-obs", "reset"],
)
def test_it_names_slot_and_step(told, step, said, kwargs, mode):
    makers = [lambda i=i: Bad(i, told, step) for i in range(3)]
    with sync.VectorEnv(makers, autoreset_mode=mode, check_numerics=True, **kwargs) as envs:
        error = until_error(envs, mode, said)
        assert error.slots == (1,)
        cause = error.__cause__
        assert isinstance(cause, aioenv.NumericsError) and isinstance(cause, ValueError) and cause.step == step
        partial = error.partial
        if hasattr(partial, "reward"):
            assert partial.reward.tolist()[::2] == partial.reward.tolist()[::-2] and partial.reward[1] == 0
        mask = np.array([mode is AutoresetMode.DISABLED, True, mode is AutoresetMode.DISABLED])
        envs.reset(options={"reset_mask": mask})  # it is well again
        envs.step(np.zeros(3, np.int64))


@pytest.mark.parametrize(
    ("space", "obs", "where"),
    [
        (spaces.Box(-1, 1, (), np.float64), np.array(NAN), r"observation: nan"),
        (spaces.Box(-1, 1, (2, 2), np.float16), np.array([[0, 0], [INF, 0]], np.float16), r"observation\[1, 0\]: inf"),
        (
            spaces.Box(-1, 1, (70, 70), np.float32),
            np.where(np.arange(4900).reshape(70, 70) == 141, np.nan, 0).astype(np.float32),
            r"observation\[2, 1\]: nan",
        ),
        (spaces.Box(-1, 1, (2,), np.float64), [0.0, NAN], r"observation\[1\]: nan"),
        (
            spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (2,))),
            {"a": 0, "b": np.array([NAN, 0], np.float32)},
            r"observation\['b'\]\[0\]: nan",
        ),
        (
            spaces.Tuple((spaces.Box(-1, 1, (1,)), spaces.Dict(c=spaces.Box(-1, 1, (1,))))),
            (np.zeros(1, np.float32), {"c": np.array([INF], np.float32)}),
            r"observation\[1\]\['c'\]\[0\]: inf",
        ),
        (
            spaces.Sequence(spaces.Box(-1, 1, (1,))),
            (np.zeros(1, np.float32), np.array([NAN], np.float32)),
            r"observation\[1\]\[0\]: nan",
        ),
        (
            spaces.Graph(spaces.Box(-1, 1, (2,)), None),
            spaces.GraphInstance(np.array([[0, NAN], [0, 0]], np.float32), None, None),
            r"observation\[0\]\[0, 1\]: nan",
        ),
    ],
    ids="scalar half large list dict tuple sequence graph".split(),
)
def test_every_sort_of_space(space, obs, where):
    makers = [lambda i=i: Bad(i, {"obs": obs}, 2, space) for i in range(2)]
    with sync.VectorEnv(makers, check_numerics=True, num_workers=1) as envs:
        assert until_error(envs, AutoresetMode.NEXT_STEP, f"slot 1 .*{where} in step 2").slots == (1,)


def test_images_and_ints_have_none():
    space = spaces.Dict(image=spaces.Box(0, 255, (4, 4, 3), np.uint8), text=spaces.Discrete(3))
    with sync.VectorEnv([lambda: Bad(0, {}, 0, space)] * 2, check_numerics=True, debug=True) as envs:
        envs.reset()
        for _ in range(8):
            envs.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("kwargs", KINDS, ids=["debug", "frames", "shared"])
def test_off_by_default(kwargs):
    makers = [lambda i=i: Bad(i, {"reward": NAN, "obs": np.full(3, NAN, np.float32)}, 2) for i in range(2)]
    with sync.VectorEnv(makers, **kwargs) as envs:
        envs.reset()
        rewards = [envs.step(np.zeros(2, np.int64)).reward.copy() for _ in range(8)]
        assert np.isnan(rewards).any()


@pytest.mark.asyncio
async def test_in_send_rollouts_and_numbered_episodes():
    def make(step):
        return [lambda i=i: Bad(i, {"reward": NAN}, step) for i in range(3)]

    said = r"slot 1 .*reward: nan in step 2 since its reset"
    async with aioenv.AsyncVectorEnv(make(2), check_numerics=True, num_workers=1) as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError, match=said):
            for _ in range(9):
                envs.send(np.zeros(3, np.int64))
                while envs.outstanding:
                    await envs.recv()
    async with aioenv.AsyncVectorEnv(make(2), check_numerics=True, num_workers=2, autoreset_mode="SameStep") as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError, match=said) as caught:
            await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 9)
        assert caught.value.partial.valid[:, 0].any()
    async with aioenv.AsyncVectorEnv(make(2), check_numerics=True, debug=True) as envs:
        with pytest.raises(aioenv.EnvError, match=said):
            async for _ in envs.episodes(lambda obs: np.zeros(len(obs), np.int64), 12):
                pass


class Batch(VectorEnv):
    """One vector env that gives a bad number in slot 3."""

    single_observation_space, single_action_space = spaces.Dict(a=spaces.Box(-INF, INF, (2,))), spaces.Discrete(2)
    told: Any = None

    def __init__(self, num_envs: int, first: str, mode: AutoresetMode, some: bool = False) -> None:
        self.num_envs, self.told, self.mode = num_envs, first, mode
        self.metadata = {"autoreset_mode": mode}
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.time, self.over = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.bool_)
        self.episode = np.zeros(num_envs, np.int64)

    def _see(self):
        return {"a": np.zeros((self.num_envs, 2), np.float32)}

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        self.time[mask], self.over[mask] = 0, False
        self.episode[mask] += 1
        obs = self._see()
        if self.told == "reset" and self.episode[-1] > 1:
            obs["a"][-1, 1] = NAN
        return obs, {}

    def step(self, actions):
        begins = self.over if self.mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, np.bool_)
        self.time = np.where(begins, 0, self.time + 1)
        self.episode += begins
        over = self.time == 3
        obs, reward, info = self._see(), np.ones(self.num_envs), {}
        bad = self.episode[-1] == 2
        if bad and self.time[-1] == 2 and self.told == "reward":
            reward[-1] = INF
        if bad and self.time[-1] == 1 and self.told == "obs":
            obs["a"][-1, 0] = NAN
        if over.any() and self.mode is AutoresetMode.SAME_STEP:
            last = np.full(self.num_envs, None, object)
            for slot in np.flatnonzero(over):
                last[slot] = {"a": np.full(2, NAN if slot + 1 == self.num_envs and bad and self.told == "final" else 0)}
            info = {"final_obs": last, "_final_obs": over.copy()}
            self.time[over] = 0
            self.episode += over
        self.over = over
        return obs, reward, over, np.zeros(self.num_envs, np.bool_), info


SAID = {
    "reward": r"slot 3: reward: inf in step 2 since its reset",
    "obs": r"slot 3: observation\['a'\]\[0\]: nan in step 1",
    "reset": r"slot 3: observation\['a'\]\[1\]: nan in its reset",
    "final": r"slot 3: final observation\['a'\]\[0\]: nan in step 3",
}
WHERE = [(first, mode) for first in ("reward", "obs") for mode in AutoresetMode]
WHERE += [("reset", AutoresetMode.DISABLED), ("final", AutoresetMode.SAME_STEP)]


@pytest.mark.parametrize("num_workers", [None, 2])
@pytest.mark.parametrize(("first", "mode"), WHERE, ids=lambda value: getattr(value, "value", value))
def test_vector_envs(first, mode, num_workers):
    said = SAID[first]
    kwargs = {"first": first, "mode": mode}
    with sync.make_vec(Batch, 4, backend="native", num_workers=num_workers, check_numerics=True, **kwargs) as envs:
        # of two shares it is in the last slot of each
        error = until_error(envs, mode, said if num_workers is None else said.replace("slot 3", "slot 1"))
        assert 3 in error.slots and isinstance(error.__cause__, aioenv.NumericsError)
        assert re.search(said, str(error.errors[-1].__cause__))
    with sync.make_vec(Batch, 4, backend="native", num_workers=num_workers, **kwargs) as envs:
        envs.reset()
        envs.step(np.zeros(4, np.int64))


@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [None, 2])
async def test_native_tasks_that_diverge(num_workers):
    """Infinite controls, and what is asked of some slots: state, pauses and rollouts of groups work as without."""
    kwargs = {"backend": "native", "num_workers": num_workers, "check_numerics": True}
    async with aioenv.make_vec("HalfCheetah-v5", 4, **kwargs) as envs:
        async with aioenv.make_vec("HalfCheetah-v5", 4, backend="native", num_workers=num_workers) as plain:
            actions = np.full((4, 6), 0.3, np.float32)
            for each in (envs, plain):
                await each.reset(seed=1)
                each.pause(2)
                await each.step(actions)
                each.resume()
            first, second = [
                await each.rollout(lambda obs: np.full((len(obs), 6), 0.1, np.float32), 4) for each in (envs, plain)
            ]
            assert first.obs.tobytes() == second.obs.tobytes()
            assert (await envs.get_state([0]))[0].arrays.keys() == (await plain.get_state([0]))[0].arrays.keys()
        actions[1] = np.nan
        with pytest.raises(aioenv.EnvError, match=r"slot 1: (reward|observation\[\d+\]): nan in step 6"):
            await envs.step(actions)
