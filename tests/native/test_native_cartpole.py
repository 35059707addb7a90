"""CartPole as one vector env in all three autoreset modes: what `SyncVectorEnv` gives, bit for bit."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from aioenv import sync
from tests.kits.compare import assert_same

N = 5
SEEDS = [3, 11, 4, 8, 2]
MODES = list(AutoresetMode)
WHERE = pytest.mark.parametrize("num_workers", [None, 2], ids=["here", "workers"])


def single(mode, **kwargs):
    return closing(SyncVectorEnv([partial(gym.make, "CartPole-v1", **kwargs)] * N, autoreset_mode=mode))


def native(mode, **kwargs):
    return sync.make_vec("CartPole-v1", N, backend="native", autoreset_mode=mode, **kwargs)


def run(ours, theirs, steps, seed, reset_seeds=(None,), rng=None):
    """Step both alike, under DISABLED with resets of what is over; gives how many episodes have ended."""
    rng = np.random.default_rng(5) if rng is None else rng
    if seed is not None:
        assert_same(tuple(ours.reset(seed=seed)), theirs.reset(seed=seed))
    ends = 0
    for step in range(steps):
        actions = rng.integers(2, size=N)
        got, expected = tuple(ours.step(actions)), theirs.step(actions)
        if ours.autoreset_mode is AutoresetMode.NEXT_STEP:  # Gymnasium's class has -0.0 for some rewards
            got[1][...] += 0.0
        assert_same(got, expected, f"step {step}")
        over = got[2] | got[3]
        ends += int(over.sum())
        if over.any() and ours.metadata["autoreset_mode"] is AutoresetMode.DISABLED:
            again = reset_seeds[step % len(reset_seeds)]
            options = [{"reset_mask": over.copy()} for _ in range(2)]  # Gymnasium takes it out
            assert_same(tuple(ours.reset(seed=again, options=options[0])), theirs.reset(seed=again, options=options[1]))
    return ends


@pytest.mark.sampled(2)
@WHERE
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("kwargs", [{}, {"max_episode_steps": 7}, {"sutton_barto_reward": True}], ids=str)
def test_as_single_envs(mode, kwargs, num_workers):
    with native(mode, num_workers=num_workers, **kwargs) as ours, single(mode, **kwargs) as theirs:
        assert ours.metadata["autoreset_mode"] is mode and ours.autoreset_mode is mode
        assert run(ours, theirs, 120, SEEDS, (None, 7, [1, 2, None, 4, 5])) > 15
        assert_same(tuple(ours.reset()), theirs.reset())  # each goes on with its own generator
        assert run(ours, theirs, 40, None) > 2


@WHERE
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.value)
def test_one_seed_for_all(mode, num_workers):
    """Of these modes Gymnasium has no vectorized version; so slot i is seeded as elsewhere, with `seed + i`."""
    with native(mode, num_workers=num_workers) as ours, single(mode) as theirs:
        assert run(ours, theirs, 60, 7) > 5


def test_bounds_of_starts_are_of_one_reset():
    with native("SameStep", max_episode_steps=3) as ours, single("SameStep", max_episode_steps=3) as theirs:
        options = {"low": -0.2, "high": 0.3}
        assert_same(tuple(ours.reset(seed=1, options=dict(options))), theirs.reset(seed=1, options=dict(options)))
        assert run(ours, theirs, 12, None) >= 3 * N


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_changed_parameters(mode):
    with native(mode) as ours, single(mode) as theirs:
        for envs in (ours, theirs):
            envs.set_attr("gravity", 15.0)
            envs.set_attr("kinematics_integrator", "semi-implicit")
        assert run(ours, theirs, 60, SEEDS) > 3
        for envs in (ours, theirs):
            envs.set_attr("kinematics_integrator", "euler")
        run(ours, theirs, 30, None)


def test_an_episode_that_is_over_must_be_reset():
    with native("Disabled", max_episode_steps=2) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(N, np.int64))
        envs.step(np.zeros(N, np.int64))
        with pytest.raises(aioenv.AioenvError, match=r"reset"):
            envs.step(np.zeros(N, np.int64))
        envs.reset(options={"reset_mask": np.ones(N, np.bool_)})
        envs.step(np.zeros(N, np.int64))


@pytest.mark.asyncio
@WHERE
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.value)
@pytest.mark.parametrize("groups", [1, 2])
async def test_rollouts_of_groups(mode, groups, num_workers):
    """Each slot draws from a generator of its own, so that it does not matter who steps with whom."""

    def policy(obs):
        return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)

    found = []
    for backend in ({"backend": "native", "num_workers": num_workers}, {"num_workers": 1}):
        async with aioenv.make_vec("CartPole-v1", N, max_episode_steps=9, autoreset_mode=mode, **backend) as envs:
            await envs.reset(seed=3)
            rollout = await envs.rollout(policy, 30, groups)
            found.append((*rollout[:7], list(rollout.infos)))
    assert found[0][3].any() or found[0][4].any()
    assert_same(found[0], found[1])


@pytest.mark.asyncio
async def test_paused_slots_stay_as_they_are():
    """What a step computes of them is put back: no episode of theirs ends, and nothing is drawn for them."""
    kwargs = {"max_episode_steps": 4, "autoreset_mode": "SameStep"}
    async with aioenv.make_vec("CartPole-v1", N, backend="native", **kwargs) as ours:
        async with aioenv.make_vec("CartPole-v1", N, num_workers=1, **kwargs) as theirs:
            rng = np.random.default_rng(1)
            for envs in (ours, theirs):
                await envs.reset(seed=1)
            for step in range(40):
                if step in (3, 17):
                    for envs in (ours, theirs):
                        envs.pause([0, 3])
                if step in (12, 30):
                    for envs in (ours, theirs):
                        envs.resume()
                actions = rng.integers(2, size=N)
                assert_same(tuple(await ours.step(actions)), tuple(await theirs.step(actions)))


def test_loops_that_want_the_next_episode_at_once():
    """CleanRL's loop, in Gymnasium's words."""
    with native("SameStep", max_episode_steps=6, episode_stats=True) as envs:
        obs, _ = envs.reset(seed=0)
        lengths = []
        for _ in range(20):
            obs, _, terminated, truncated, infos = envs.step(np.ones(N, np.int64))
            real_next = obs.copy()
            for slot in np.flatnonzero(terminated | truncated):
                real_next[slot] = infos["final_obs"][slot]
                lengths.append(infos["episode"]["l"][slot])
            assert ((real_next == obs).all(axis=1) == ~(terminated | truncated)).all()
        assert set(lengths) == {6}


def test_stable_baselines_takes_it():
    pytest.importorskip("stable_baselines3")
    from stable_baselines3 import PPO

    from aioenv.adapters import sb3

    envs = sb3.make_vec("CartPole-v1", 4, backend="native", seed=1)
    try:
        PPO("MlpPolicy", envs, n_steps=16, batch_size=32, n_epochs=1, seed=1, device="cpu").learn(128)
    finally:
        envs.close()
