"""Blocking code steps native tasks on its own thread: same results, no other caller between, Ctrl-C loses nothing."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv

import aioenv
from aioenv import sync
from aioenv.platform import HeldSignals
from aioenv.testing import leak_check
from tests.kits.blocking_kit import Rung, check_forked_copy, handled

N = 2
ACTIONS = np.zeros((N, 1), np.float32)


class Steps(VectorEnv):
    """Counts its steps, and does in each what it is told to; any thread may step it."""

    any_thread = True
    single_observation_space = observation_space = Box(0, 1e9, (), np.float64)
    single_action_space = Box(-1, 1, (1,), np.float32)
    action_space = Box(-1, 1, (N, 1), np.float32)

    def __init__(self, num_envs, during=lambda: None):
        self.num_envs, self.during, self.threads = num_envs, during, set()
        self.observation_space = Box(0, 1e9, (num_envs,), np.float64)
        self.count = np.zeros(num_envs)

    def reset(self, *, seed=None, options=None):
        self.count[:] = 0
        return self.count.copy(), {}

    def step(self, actions):
        self.threads.add(threading.current_thread().name)
        self.count += 1
        self.during()
        self.count += 1
        none = np.zeros(self.num_envs, np.bool_)
        return self.count.copy(), np.ones(self.num_envs), none, none.copy(), {}

    def called_on(self):
        return set(self.threads)


class Bound(Steps):
    any_thread = False


def interrupt():
    """Ctrl-C, and the moment in which Python would see it."""
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass


def make(env=Steps, during=lambda: None, **kwargs):
    return sync.make_vec(lambda num_envs: env(num_envs, during), N, backend="native", **kwargs)


def test_it_is_the_callers_thread():
    with make() as envs:
        envs.reset()
        for _ in range(3):
            assert envs.step(ACTIONS).reward.tolist() == [1.0, 1.0]
        assert envs.get_attr("threads")[0] == {"MainThread"}


@pytest.mark.parametrize("how", [{"timeout_s": 30.0}, {"env": Bound}], ids=["timeout", "bound"])
def test_it_is_not_where_that_was_not_asked_for(how):
    with make(**how) as envs:
        envs.reset()
        envs.step(ACTIONS)
        assert "MainThread" not in envs.get_attr("threads")[0]


@pytest.mark.parametrize("task", ["CartPole-v1", "Hopper-v5"])
@pytest.mark.parametrize("copy", [True, False])
def test_the_same_results(task, copy):
    async def awaited():
        async with aioenv.make_vec(task, 3, backend="native", episode_stats=True) as envs:
            await envs.reset(seed=4)
            results = [await envs.step(actions) for actions in batches(envs.action_space)]
            return results, counted(envs.episode_stats.epoch())

    def counted(epoch):
        return {name: value for name, value in epoch.items() if not name.startswith("time")}

    def batches(space):
        space.seed(0)
        return [space.sample() for _ in range(60)]

    results, epoch = aioenv.run(awaited())
    with sync.make_vec(task, 3, backend="native", episode_stats=True, copy=copy) as envs:
        envs.reset(seed=4)
        for actions, expected in zip(batches(envs.action_space), results, strict=True):
            result = envs.step(actions)
            for mine, theirs in zip(result[:4], expected[:4], strict=True):
                assert mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes()
            assert result.info.keys() == expected.info.keys()
        assert counted(envs.episode_stats.epoch()) == epoch and epoch["episode_count"] > 0
        assert envs.stats().env_steps == 180


def test_errors_and_misuse_are_the_same():
    def fail():
        raise ValueError("no")

    with make(during=fail) as envs:
        envs.reset()
        with pytest.raises(aioenv.ActionError):
            envs.step(np.zeros((5, 1), np.float32))
        with pytest.raises(aioenv.EnvError, match="no") as caught:
            envs.step(ACTIONS)
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(aioenv.EnvError, match="reset"):
            envs.step(ACTIONS)
        envs.reset()
        envs.send(ACTIONS)
        with pytest.raises(aioenv.PendingCallError):
            envs.step(ACTIONS)
    with pytest.raises(aioenv.ClosedError):
        envs.step(ACTIONS)


def test_other_threads_wait_until_the_step_is_over():
    begun, go = threading.Event(), threading.Event()

    def during():
        begun.set()
        assert go.wait(30)

    with make(during=during) as envs:
        envs.reset()
        seen = []
        other = threading.Thread(target=lambda: (begun.wait(30), go.set(), seen.append(envs.get_attr("count"))))
        other.start()
        assert envs.step(ACTIONS).obs.tolist() == [2.0, 2.0]
        other.join()
        assert np.ravel(seen[0]).tolist() == [2.0] * N  # never 1, in the middle


def test_while_something_else_runs_on_the_loop_it_is_the_loops_turn():
    begun, go = threading.Event(), threading.Event()

    def during():
        if not begun.is_set():
            begun.set()
            assert go.wait(30)

    with make(during=during) as envs:
        envs.reset()
        envs.send(ACTIONS)  # on the env's own thread
        assert begun.wait(30)
        with pytest.raises(aioenv.PendingCallError):
            envs.step(ACTIONS)
        go.set()
        assert envs.recv(N).obs.tolist() == [2.0, 2.0]
        assert envs.step(ACTIONS).obs.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("copy", [True, False])
def test_ctrl_c_waits_for_the_step_whose_result_waits_for_recv(copy):
    once = [interrupt]

    with make(during=lambda: once.pop()() if once else None, copy=copy) as envs:
        envs.reset()
        with pytest.raises(KeyboardInterrupt):
            envs.step(ACTIONS)
        assert envs.recv(N).obs.tolist() == [2.0, 2.0]
        assert envs.step(ACTIONS).obs.tolist() == [4.0, 4.0]
        once.append(interrupt)
        with pytest.raises(KeyboardInterrupt):
            envs.step(ACTIONS)
        assert envs.step(ACTIONS).obs.tolist() == [8.0, 8.0]  # untaken results are dropped
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_signals_wait_for_the_step_as_well():
    once = [lambda: signal.raise_signal(signal.SIGALRM)]

    def ring(*_):
        raise Rung

    with handled(signal.SIGALRM, ring), make(during=lambda: once.pop()() if once else None) as envs:
        envs.reset()
        with pytest.raises(Rung):
            envs.step(ACTIONS)
        assert envs.recv(N).obs.tolist() == [2.0, 2.0]
        assert envs.step(ACTIONS).obs.tolist() == [4.0, 4.0]


def test_a_second_ctrl_c_does_not_wait():
    again = [True]

    def during():
        if again:
            again.clear()
            interrupt()
            interrupt()

    with make(during=during) as envs:
        envs.reset()
        with pytest.raises(KeyboardInterrupt):
            envs.step(ACTIONS)
        with pytest.raises(aioenv.EnvError, match="reset"):  # it was left half done
            envs.step(ACTIONS)
        envs.reset()
        assert envs.step(ACTIONS).obs.tolist() == [2.0, 2.0]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_leave_signals_alone():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with HeldSignals(signal.SIGINT, twice=False):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    with HeldSignals(signal.SIGINT, twice=False):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with HeldSignals(signal.SIGINT, twice=False):
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_forked_copy_says_so():
    with leak_check(), make() as envs:
        envs.reset()
        check_forked_copy(envs, ACTIONS)
