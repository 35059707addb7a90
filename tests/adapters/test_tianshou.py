"""`aioenv.adapters.tianshou` against Tianshou's own `DummyVectorEnv`, and under its collector."""

from __future__ import annotations

import functools
import os
import signal

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import errors
from aioenv.testing import leak_check
from tests.kits.zoo import Sampler

pytest.importorskip("torch")
pytest.importorskip("tianshou")

from aioenv.adapters.tianshou import TianshouVectorEnv

pytestmark = pytest.mark.filterwarnings("ignore")  # Tianshou's own


def make(limit=12):
    return gym.make("CartPole-v1", max_episode_steps=limit)


def same(ours, theirs) -> None:
    assert ours.shape == theirs.shape and ours.dtype.kind == theirs.dtype.kind
    if ours.dtype != object:
        assert np.array_equal(ours, theirs)
    else:
        assert [repr(plain(one)) for one in ours] == [repr(plain(one)) for one in theirs]


def plain(value):
    """Infos of several envs are merged, and split again: numbers may be Python's or numpy's."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in sorted(value.items())}
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("space", ["cartpole", "box", "image", "discrete", "dict"])
def test_it_steps_as_theirs(space, num_workers):
    from tianshou.env import DummyVectorEnv

    factory = make if space == "cartpole" else functools.partial(Sampler, space, rich_infos=False)
    theirs, ours = DummyVectorEnv([factory] * 4), TianshouVectorEnv([factory] * 4, num_workers=num_workers)
    rng = np.random.default_rng(0)
    try:
        assert len(ours) == len(theirs) == ours.env_num and not ours.is_async
        assert ours.action_space == theirs.action_space
        assert ours.observation_space == theirs.observation_space
        assert ours.seed(3) == theirs.seed(3)
        for mine, other in zip(ours.reset(), theirs.reset(), strict=True):
            same(mine, other)
        for _ in range(40):
            ids = rng.permutation(4)[: rng.integers(1, 5)]
            actions = np.array([ours.action_space[0].sample() for _ in ids])
            mine, other = ours.step(actions, ids), theirs.step(actions, ids)
            for one, two in zip(mine, other, strict=True):
                same(one, two)
            assert [info["env_id"] for info in mine[4]] == ids.tolist()
            if len(ended := ids[np.flatnonzero(mine[2] | mine[3])]):
                for one, two in zip(ours.reset(ended), theirs.reset(ended), strict=True):
                    same(one, two)
        for one, two in zip(ours.reset(2, seed=9), theirs.reset(2, seed=9), strict=True):
            same(one, two)
    finally:
        ours.close()
        theirs.close()


def test_waiting_for_some():
    """As their asynchronous ones: `waiting_id`, `ready_id`, and results of those that are ready."""
    envs = TianshouVectorEnv([make] * 4, wait_num=2, num_workers=4)
    try:
        assert envs.is_async
        envs.reset()
        result = envs.step(np.zeros(4, int))
        ids = [info["env_id"] for info in result[4]]
        assert len(ids) >= 2 and set(envs.ready_id) == set(ids)
        assert set(envs.waiting_id) == {0, 1, 2, 3} - set(ids)
        if envs.waiting_id:
            with pytest.raises(AssertionError, match="which is stepping now"):
                envs.reset(envs.waiting_id)
        taken = len(ids)
        while envs.waiting_id:
            taken += len(envs.step(None)[0])
        assert taken == 4
        envs.reset()
    finally:
        envs.close()
    envs = TianshouVectorEnv([make] * 2, timeout=30.0, num_workers=1)
    envs.reset()
    assert len(envs.step(np.zeros(2, int))[0]) == 2
    envs.close()


def test_attributes_and_misuse():
    with leak_check():
        envs = TianshouVectorEnv([make] * 2, num_workers=1)
        assert envs.get_env_attr("gravity", 1) == [9.8]
        envs.set_env_attr("gravity", 3.0, [0])
        assert envs.get_env_attr("gravity") == [3.0, 9.8]
        assert [spec.id for spec in envs.spec] == ["CartPole-v1"] * 2
        assert envs.metadata[0]["render_fps"] == 50
        with pytest.raises(ValueError, match="action: expected actions"):
            envs.step(None)
        envs.close()
        envs.close()
        with pytest.raises(errors.ClosedError):
            envs.reset()
        given = aioenv.sync.VectorEnv([make], num_workers=0)
        with pytest.raises(ValueError, match=r"AutoresetMode.DISABLED, the vector env has .*NEXT_STEP"):
            TianshouVectorEnv(given)
        with pytest.raises(TypeError, match="num_workers: for the vector env that is given"):
            TianshouVectorEnv(given, num_workers=1)
        given.close()
        with pytest.raises(ValueError, match="wait_num: expected 1 to 2, got 3"):
            TianshouVectorEnv([make] * 2, 3, num_workers=0)
        with pytest.raises(TypeError, match="Tianshou does not take a Tuple"):
            TianshouVectorEnv([functools.partial(Sampler, "tuple")], num_workers=0)


def test_its_wrapper_goes_around():
    from tianshou.env import DummyVectorEnv, VectorEnvNormObs

    theirs, ours = DummyVectorEnv([make] * 3), TianshouVectorEnv([make] * 3, num_workers=2)
    normal = [VectorEnvNormObs(envs) for envs in (theirs, ours)]
    try:
        for envs in normal:
            envs.seed(2)
        one, two = [envs.reset()[0] for envs in normal]
        for step in range(30):
            assert np.array_equal(one, two)
            results = [envs.step(np.full(3, step % 3 != 0, int)) for envs in normal]
            one, two = [result[0] for result in results]
            if len(ended := np.flatnonzero(results[0][2] | results[0][3])):
                for envs in normal:
                    envs.reset(ended)
        assert np.array_equal(normal[0].get_obs_rms().mean, normal[1].get_obs_rms().mean)
        for envs in normal:
            envs.set_env_attr("mark", 5, [1, 2])
            assert envs.get_env_attr("mark", [1, 2]) == [5, 5]
    finally:
        theirs.close()
        ours.close()


def test_a_worker_that_dies_is_named():
    envs = TianshouVectorEnv([make] * 2, num_workers=2)
    try:
        envs.reset()
        os.kill(envs._envs.workers[1].pid, signal.SIGKILL)
        with pytest.raises(errors.WorkerDied) as error:
            envs.step(np.zeros(2, int))
        assert error.value.slots == (1,)
    finally:
        envs.close()


@pytest.mark.parametrize("kwargs", [{"num_workers": 2}, {"num_workers": 0}], ids=str)
def test_its_collectors(kwargs):
    """The buffer has whole episodes, whose next observations are not those of other episodes.

    Not `AsyncCollector`: in Tianshou 2.0.1 it raises an IndexError over its own vector envs, too.
    """
    import torch
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.utils.net.common import Net

    with leak_check():
        envs = TianshouVectorEnv([make] * 4, **kwargs)
        space, actions = envs.observation_space[0], envs.action_space[0]
        torch.manual_seed(0)
        policy = DiscreteQLearningPolicy(
            model=Net(state_shape=space.shape, action_shape=2, hidden_sizes=[16]),
            action_space=actions,
            observation_space=space,
            eps_training=1.0,
        )
        buffer = VectorReplayBuffer(4000, 4)
        collector = Collector(policy, envs, buffer)
        collector.reset()
        stats = collector.collect(n_step=400)
        assert stats.n_collected_steps >= 400 and stats.n_collected_episodes > 10
        for index in buffer.sample_indices(0):
            following = buffer.next(index)
            if not (buffer.done[index] or following == index):
                assert np.array_equal(buffer.obs_next[index], buffer.obs[following])
        assert (np.asarray(stats.lens) <= 12).all()
        envs.close()
