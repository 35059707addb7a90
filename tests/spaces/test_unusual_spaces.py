"""Spaces with little in them, or numbers of few bytes: as Gymnasium has them, wherever they go through."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from tests.kits.version_kit import version_of

SMALL = []
if version_of("gymnasium") >= (1, 3):
    SMALL = [(spaces.Discrete(5, dtype=np.int8), [0, 4], [0, 300])]


class Sampled(gym.Env):
    """Observes samples of its space; episodes end with the third step."""

    def __init__(self, observation: gym.Space, action: gym.Space) -> None:
        self.observation_space, self.action_space = copy.deepcopy(observation), copy.deepcopy(action)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.left = 3
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        fits = self.action_space.contains(np.asarray(action) if self.action_space.shape is not None else action)
        return self.observation_space.sample(), float(fits), self.left == 0, False, {"action": repr(action)}


EMPTY = [
    spaces.Dict({}),
    spaces.Tuple(()),
    spaces.Dict(a=spaces.Dict({}), b=spaces.Discrete(3)),
    spaces.Tuple((spaces.Tuple(()), spaces.Text(3))),
]


def equal(a, b) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(equal, a, b))
    return bool(np.array_equal(a, b))


@pytest.mark.parametrize(
    ("space", "acts", "debug"),
    [(space, acts, True) for space in EMPTY for acts in (False, True)]
    + [(EMPTY[0], True, False), (EMPTY[3], False, False)],
)
@pytest.mark.asyncio
async def test_dicts_and_tuples_with_nothing_in_them(space, acts, debug):
    other = spaces.Discrete(2)
    factory = [lambda: Sampled(*((other, space) if acts else (space, other)))] * 3
    mode = AutoresetMode.SAME_STEP
    theirs = SyncVectorEnv(factory, autoreset_mode=mode)
    theirs.action_space.seed(0)
    async with aioenv.AsyncVectorEnv(factory, num_workers=2, autoreset_mode=mode, debug=debug) as envs:
        assert equal(tuple(await envs.reset(seed=0)), tuple(theirs.reset(seed=0)))
        for _ in range(4):
            actions = theirs.action_space.sample()
            result = await envs.step(actions)
            if acts:  # Gymnasium can't take such actions apart
                assert result.reward.tolist() == [1] * 3
            else:
                assert equal(tuple(result), tuple(theirs.step(actions)))
        whole = envs.action_space.sample
        rollout = await envs.rollout(lambda _: whole(), 2, groups=1)
        assert rollout.reward.tolist() == [[1] * 3] * 2
        assert len(await aioenv.evaluate(envs, lambda _: whole(), 4, seed=0)) == 2
        await envs.reset()
        obs, _ = await envs.reset_at(1, seed=3)
        assert envs.single_observation_space.contains(obs)
        assert (await envs.step_at(1, envs.single_action_space.sample())).reward == 1
        if acts and not space.spaces:
            with pytest.raises(aioenv.ActionError, match=r"actions: expected (\{\}|\(\)), got \[0, 0, 0\]"):
                await envs.step([0, 0, 0])
    theirs.close()


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        *SMALL,
        (spaces.MultiBinary(2), [[0, 1], [1, 1]], [[0, 1], [1, 257]]),
        (spaces.Box(0, 255, (), np.uint8), [0, 255], [0, -1]),
        (spaces.Discrete(5), np.uint64([0, 4]), np.uint64([0, 2**63 + 1])),
    ],
    ids=str,
)
@pytest.mark.asyncio
async def test_no_action_becomes_another_number(space, good, bad):
    async with aioenv.make_vec(lambda: Sampled(spaces.Discrete(2), space), 2, debug=True) as envs:
        await envs.reset()
        await envs.step(good)
        with pytest.raises(aioenv.ActionError, match=r"actions: expected u?int\d+, -?\d+ to \d+, got numbers from"):
            await envs.step(bad)
        await envs.step(good)


class Word(gym.Space):
    """A space of one's own; nothing says when two of them are the same."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word

    def sample(self, mask=None, probability=None):
        return self.word

    def contains(self, x):
        return x == self.word


class Speaks(gym.Env):
    def __init__(self, word: str = "yes") -> None:
        self.observation_space = Word(word)
        self.action_space = spaces.Tuple((Word("go"), spaces.Discrete(2)))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action[1]), False, False, {}


@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [1, 3])
async def test_spaces_without_an_equality_are_compared_by_what_they_hold(num_workers):
    async with aioenv.AsyncVectorEnv([Speaks] * 3, num_workers=num_workers) as envs:
        assert (await envs.reset()).obs == ("yes", "yes", "yes")
        result = await envs.step((["go", "go", "go"], np.array([0, 1, 0])))
        assert result.reward.tolist() == [0, 1, 0]
    with pytest.raises(aioenv.SpaceMismatchError, match="Slot 2 has <"):
        await aioenv.AsyncVectorEnv([Speaks, Speaks, lambda: Speaks("no")], num_workers=num_workers)
