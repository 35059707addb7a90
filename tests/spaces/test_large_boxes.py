"""Observations of many megabytes: what Gymnasium keeps of their bounds is neither sent nor repeated."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import tracemalloc

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from aioenv.ipc.messages import load
from aioenv.worker.description import dumped_space

SHAPE = (8, 1000, 1000)
MIB = 1 << 20


class Large(gym.Env):
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, SHAPE, np.uint8)
        self._image = np.zeros(SHAPE, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._image, {}

    def step(self, action):
        self._image[-1, -1, -1] += 1 + action
        return self._image, 0.0, False, False, {}


@pytest.mark.parametrize("num_workers", [2, 1])
def test_the_parent_makes_no_arrays_of_bounds(num_workers):
    async def main() -> None:
        restart = aioenv.RestartPolicy()
        async with aioenv.AsyncVectorEnv([Large] * 2, num_workers=num_workers, restart=restart) as envs:
            await envs.reset()
            result = await envs.step([0, 1])
            assert result.obs.shape == (2, *SHAPE) and result.obs[:, -1, -1, -1].tolist() == [1, 2]
            # a worker is started again with them, too
            os.kill(envs.workers[0].pid, signal.SIGKILL)
            again = await envs.step([0, 0])
            assert again.obs.shape == (2, *SHAPE) and "restarted" in again.info
            assert envs.single_observation_space == Large().observation_space
            assert repr(envs.observation_space) == f"Box(0, 255, {(2, *SHAPE)}, uint8)"
            assert result.obs in envs.observation_space and result.obs[:, :5] not in envs.observation_space

    asyncio.run(main())
    tracemalloc.start()
    try:
        asyncio.run(_start_alone(num_workers))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 7 * MIB  # one array of bounds


async def _start_alone(num_workers: int) -> None:
    async with aioenv.AsyncVectorEnv([Large] * 2, num_workers=num_workers):
        pass


NESTED = {
    "image": spaces.Box(0.0, 1.0, (3, 400, 400), np.float32),
    "two": spaces.Tuple((spaces.Box(-1, 5, (1 << 20,), np.int8), spaces.Discrete(3))),
    "small": spaces.Box(-1, 1, (3,)),
    "uneven": spaces.Box(np.arange(1 << 18, dtype=np.float64), np.inf, (1 << 18,), np.float64),
}
SPACES = [
    spaces.Box(0, 255, (1024, 1024), np.uint8),
    spaces.Box(-np.inf, np.inf, (1 << 19,), np.float64),
    spaces.Box(-np.inf, 3, (1 << 18,), np.float32),
    spaces.Box(0, 1, (4, 1 << 18), np.bool_),
    spaces.Dict(NESTED),
    spaces.Tuple((NESTED["two"], NESTED["uneven"])),
    spaces.Box(np.zeros(1 << 20, np.uint8), np.r_[np.full(1 << 19, 8, np.uint8), np.full(1 << 19, 9, np.uint8)]),
    spaces.Box(-1, 1, (0, 5)),
]


class Has(gym.Env):
    def __init__(self, space) -> None:
        self.observation_space = space


@pytest.mark.parametrize("space", SPACES, ids=lambda space: f"{type(space).__name__}")
def test_spaces_arrive_and_batch_as_gymnasiums(space):
    from aioenv.spaces.layout import batch_space

    space.seed(5)
    back = load(dumped_space(Has(space), "observation_space"))
    theirs = batch_space(space, 3)
    assert back == space and _leaves(back) == _leaves(space)
    for ours in (batch_space(space, 3), batch_space(back, 3), pickle.loads(pickle.dumps(batch_space(space, 3)))):
        assert ours == theirs and repr(ours) == repr(theirs) and _leaves(ours) == _leaves(theirs)
        assert _same(ours.sample(), theirs.sample())
        theirs = batch_space(space, 3)
    assert batch_space(back, 3) == theirs
    assert _same(back.sample(), space.sample())


def test_what_is_large_and_even_is_a_few_bytes():
    assert len(dumped_space(Has(SPACES[0]), "observation_space")) < 2000
    assert len(dumped_space(Has(spaces.Dict(image=NESTED["image"], small=NESTED["small"])), "observation_space")) < 4000


def test_images_as_observations_have_bounds_without_memory():
    async def main() -> None:
        async with aioenv.make_vec("Reacher-v5", 2, pixels=aioenv.RenderConfig(480, 480, quality="fast")) as envs:
            low = envs.observation_space.low
            assert low.shape == (2, 480, 480, 3) and not any(low.strides) and low.dtype == np.uint8
            assert (await envs.reset()).obs in envs.observation_space

    asyncio.run(main())


def _leaves(space):
    """All that is kept of a space, as values."""
    if isinstance(space, spaces.Dict):
        return {key: _leaves(child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [_leaves(child) for child in space.spaces]
    if not isinstance(space, spaces.Box):
        return repr(space)
    kept = {name: value for name, value in vars(space).items() if name not in ("_np_random", "low_repr", "high_repr")}
    return {
        name: (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        for name, value in kept.items()
    }


def _same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    return np.array_equal(one, other)
