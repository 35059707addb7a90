"""Rollouts for blocking code: the policy runs on the caller's thread."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

import aioenv
from aioenv import sync
from tests.kits.blocking_kit import Rung, handled
from tests.kits.counter_kit import Counter, counters


def balance(obs):
    return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)


def still(obs):
    return [0] * len(obs)


def test_the_same_results():
    threads = set()

    def policy(obs, slots):
        threads.add(threading.get_ident())
        return balance(obs), {"slot": slots}

    with sync.make_vec("CartPole-v1", 8, num_workers=2) as envs:
        envs.reset(seed=4)
        got = envs.rollout(policy, 40)
        envs.reset(seed=4)
        lockstep = envs.rollout(balance, 40, groups=1)
        for name in ("obs", "actions", "reward", "terminated", "truncated", "valid", "last_obs"):
            assert np.array_equal(getattr(got, name), getattr(lockstep, name)), name
        assert threads == {threading.get_ident()}
        assert got.extras["slot"].tolist() == [list(range(8))] * 40
        assert envs.stats().env_steps == 640


def test_episodes_of_a_vector_env_that_has_no_other_name():
    running = sync.VectorEnv(counters(2)).episodes(still, 3)
    gc.collect()
    assert {episode.number for episode in running} == {0, 1, 2}
    running = sync.VectorEnv(counters(2)).episodes(still, 3)
    next(running)
    del running  # with it, the vector env is forgotten
    gc.collect()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_policy_that_raises_ends_it(error):
    def policy(obs):
        if obs[0, 1] == 2:
            raise error("enough")
        return still(obs)

    with sync.VectorEnv(counters(4), num_workers=2) as envs:
        envs.reset()
        with pytest.raises(error, match="enough"):
            envs.rollout(policy, 10)
        assert (envs.rollout(still, 1).obs[0, :, 1] == 2).all()


def test_what_is_refused():
    async def policy(obs):
        return still(obs)

    with sync.VectorEnv(counters(4), num_workers=2) as envs:
        with pytest.raises(aioenv.ResetNeededError):
            envs.rollout(still, 1)
        envs.reset()
        with pytest.raises(TypeError, match="plain function"):
            envs.rollout(policy, 1)
        with pytest.raises(TypeError, match="expected a function"):
            envs.rollout(None, 1)
        with pytest.raises(aioenv.EnvError):
            envs.rollout(lambda obs: [Counter.RAISE] * len(obs), 1)


def test_what_an_interrupted_rollout_has_asked_for_is_no_result(monkeypatch):
    """It asks for the last observations first. `ready` ends if the answer comes between two of its looks."""

    def ring(*_):
        raise Rung

    with sync.VectorEnv(counters(2), num_workers=1) as envs, handled(signal.SIGALRM, ring):
        envs.reset(seed=0)
        envs.step([0, 0])
        worker = envs.workers[0].pid
        os.kill(worker, signal.SIGSTOP)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Rung):
            envs.rollout(still, 2)
        assert envs.outstanding
        recv = envs.recv

        def late(*args, **kwargs):
            os.kill(worker, signal.SIGCONT)
            while envs.outstanding:
                time.sleep(0.001)
            return recv(*args, **kwargs)

        monkeypatch.setattr(envs, "recv", late)
        assert list(envs.ready()) == []
        assert envs.step([0, 0]).obs[:, 1].tolist() == [2, 2]
