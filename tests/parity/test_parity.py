"""Bit for bit what `gymnasium.vector.SyncVectorEnv` gives, whatever the workers and the loop.

`make test` runs a sample of the grid in which every env, mode, number of workers and loop appears; `make parity`
runs all of it.
"""

from __future__ import annotations

import functools
import itertools
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from aioenv.process.channel import CHANNELS
from aioenv.process.launch import START_METHODS
from tests.kits.compare import assert_same
from tests.kits.loop_kit import LOOPS, run_on
from tests.kits.version_kit import needs_gymnasium, version_of
from tests.kits.zoo import SPACES, Sampler

STEPS = 300
FEW_STEPS = 120  # of a sample, where it makes no difference: the classic envs are truncated after up to 200
NUM_ENVS = 5

TAXI = "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"
CLASSIC = ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", TAXI, "Blackjack-v1"]
MUJOCO = [
    "Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "HumanoidStandup-v5", "InvertedDoublePendulum-v5",
    "InvertedPendulum-v5", "Pusher-v5", "Reacher-v5", "Swimmer-v5", "Walker2d-v5",
]  # fmt: skip
ENVS = {
    **{name: functools.partial(gym.make, name) for name in CLASSIC + MUJOCO},
    **{f"observes {space}": functools.partial(Sampler, space) for space in SPACES},
    **{f"acts {space}": functools.partial(Sampler, "box", space) for space in ("dict", "tuple", "text", "nested")},
}
# one line an axis: what is not the loop goes to AsyncVectorEnv
AXES = {
    "autoreset_mode": list(AutoresetMode),
    "num_workers": [1, 2, 3],
    "start": list(START_METHODS),
    "channel": list(CHANNELS),
    "loop": list(LOOPS),
}

TRANSPORTS = ["frames", "shared"]


def grid(full: bool):
    """(env, *a point of every axis); in the sample each env meets one point, and the points go round."""
    points = list(itertools.product(*AXES.values()))
    for number, env in enumerate(ENVS):
        # 35 has no factor in common with the 72 points: neighbours differ in every axis
        chosen = range(len(points)) if full else [number * 35 % len(points)]
        for index in chosen:
            # not an axis, which would double the grid: each value of every other axis meets both alike
            transport = TRANSPORTS[(number + index + index // 2 + index // 4) % 2]
            point = {**dict(zip(AXES, points[index], strict=True)), "transport": transport}
            yield named(env, point)


def grid_in_this_process(full: bool):
    """Likewise with `num_workers=0`, where no process is started and no channel opened."""
    points = list(itertools.product(AXES["autoreset_mode"], AXES["loop"]))
    for number, env in enumerate(ENVS):
        for mode, loop in points if full else [points[number % len(points)]]:
            yield named(env, {"autoreset_mode": mode, "num_workers": 0, "loop": loop})


def named(env, point):
    name = "-".join(str(getattr(p, "value", p)) for p in (env, *point.values()))
    return pytest.param(env, point, id=name)


async def compare(make, autoreset_mode, steps, **options):
    """Step both with the same seeds and actions, and compare everything."""
    reference = SyncVectorEnv([make] * NUM_ENVS, autoreset_mode=autoreset_mode)
    factories = [make] * NUM_ENVS
    async with aioenv.AsyncVectorEnv(factories, autoreset_mode=autoreset_mode, **options) as envs:
        assert envs.observation_space == reference.observation_space
        assert envs.action_space == reference.action_space
        assert_same(envs.metadata, reference.metadata)
        assert_same(tuple(await envs.reset(seed=3)), reference.reset(seed=3), "reset")
        reference.action_space.seed(5)
        ended = np.zeros(NUM_ENVS, bool)
        for t in range(steps):
            if t % 50 == 49:
                ended = ended | (np.arange(NUM_ENVS) % 2 == 0)
            if (autoreset_mode is AutoresetMode.DISABLED or t % 50 == 49) and ended.any():
                masked = tuple(await envs.reset(options={"reset_mask": ended}))
                assert_same(masked, reference.reset(options={"reset_mask": ended}), f"masked reset before step {t}")
            actions = reference.action_space.sample()
            expected = reference.step(actions)
            assert_same(tuple(await envs.step(actions)), expected, f"step {t}")
            ended = expected[2] | expected[3]
    reference.close()


def run(env, point, steps):
    if version_of("gymnasium") < (1, 4) and env.endswith(("text", "nested")):
        pytest.skip("before Gymnasium 1.4 samples of Text depend on the process")
    options = {name: value for name, value in point.items() if name != "loop"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium's about the envs themselves
        run_on(point["loop"], compare(ENVS[env], steps=steps, **options))


@pytest.mark.parametrize(("env", "point"), [*grid(full=False), *grid_in_this_process(full=False)])
def test_sample(env, point):
    run(env, point, STEPS if env in CLASSIC else FEW_STEPS)


@pytest.mark.parity
@pytest.mark.parametrize(("env", "point"), [*grid(full=True), *grid_in_this_process(full=True)])
def test_grid(env, point):
    run(env, point, STEPS)


def test_the_sample_meets_every_point_of_every_axis():
    met = [param.values[1] for param in grid(full=False)]
    assert {axis: {point[axis] for point in met} for axis in AXES} == {a: set(v) for a, v in AXES.items()}


@needs_gymnasium("1.4")  # the types of its errors
def test_list_seeds_and_masked_resets():
    async def main():
        make = ENVS["CartPole-v1"]
        reference = SyncVectorEnv([make] * 4)
        async with aioenv.AsyncVectorEnv([make] * 4, num_workers=3) as envs:
            seeds = [11, None, 7, 7]
            got, _ = await envs.reset(seed=seeds)
            expected, _ = reference.reset(seed=seeds)
            seeded = [0, 2, 3]
            assert_same(got[seeded], expected[seeded])
            mask = np.array([True, False, False, True])
            options = {"reset_mask": mask, "low": -0.01, "high": 0.01}
            got, _ = await envs.reset(seed=5, options=options)
            assert "reset_mask" in options  # the caller's dict is left alone
            expected, _ = reference.reset(seed=5, options=dict(options))
            assert_same(got[seeded], expected[seeded])
            for options, error in [
                ({"reset_mask": [True] * 4}, TypeError),
                ({"reset_mask": np.ones(3, bool)}, ValueError),
                ({"reset_mask": np.ones(4, int)}, TypeError),
                ({"reset_mask": np.zeros(4, bool)}, ValueError),
            ]:
                with pytest.raises(error) as mine:
                    await envs.reset(options=dict(options))
                with pytest.raises(error) as theirs:
                    reference.reset(options=dict(options))
                assert str(mine.value) == str(theirs.value)
            with pytest.raises(ValueError, match="length must match num_envs=4 but got length=3"):
                await envs.reset(seed=[1, 2, 3])
        reference.close()

    run_on("asyncio", main())


@needs_gymnasium("1.4")  # samples of Text
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("env", ["observes nested", "observes dict", "CartPole-v1"])
def test_copy_false(env, num_workers, loop):
    """Compared at once, before the memory is used again."""
    run_on(loop, compare(ENVS[env], AutoresetMode.SAME_STEP, FEW_STEPS, num_workers=num_workers, copy=False))


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.array([0.0]), np.array([-0.0])),
        (np.array([1.0]), np.array([np.nan])),
        ({"a": 1}, {"a": 1, "_a": True}),
        ((1, 2), (1, 3)),
        (1, 1.0),
        (np.array([{"x": np.zeros(1)}], object), np.array([{"x": np.ones(1)}], object)),
    ],
)
def test_the_comparison_sees_differences(got, expected):
    with pytest.raises(AssertionError):
        assert_same(got, expected)
    assert_same(expected, expected)
