"""Blocking code steps envs inline, in place of the loop's thread: same results, nothing lost, no hang."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from aioenv import sync
from aioenv.sync import blocking, portal
from aioenv.sync.portal import LoopHandoff
from aioenv.testing import leak_check
from tests.kits.blocking_kit import Rung, check_forked_copy, handled, paused
from tests.kits.compare import assert_same

N = 4
ACTIONS = np.zeros(N, np.int64)
GO, KILL, RAISE, GATE = 0, 1, 2, 3


class Told(gym.Env):
    """Counts its steps, and does in each what the action says."""

    observation_space = gym.spaces.Box(0, 1e9, (), np.float64)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, gate=None):
        self.gate = gate

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0.0
        return np.array(self.count), {}

    def step(self, action):
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == RAISE:
            raise ValueError("told to")
        if action == GATE:
            with open(self.gate) as file:
                file.read()
        self.count += 1
        return np.array(self.count), 1.0, False, False, {"count": self.count}


@pytest.fixture
def inline_calls(monkeypatch):
    """A loop that pauses until a turn is requested, and the outcomes of all inline calls."""
    outcomes = []
    run_inline = LoopHandoff.run_inline

    def noted(self, function, *args):
        outcome = True  # if it raises, too
        try:
            outcome = run_inline(self, function, *args)
        finally:
            outcomes.append(outcome)
        return outcome

    monkeypatch.setattr(portal, "MAX_PAUSE_S", 60.0)
    monkeypatch.setattr(blocking, "MAX_PAUSE_S", 60.0)
    monkeypatch.setattr(LoopHandoff, "run_inline", noted)
    return outcomes


@pytest.fixture
def gate(tmp_path):
    os.mkfifo(tmp_path / "gate")
    return str(tmp_path / "gate")


def let_go(gate, before=lambda: None):
    """Once an env waits there, call `before`, and let it go on."""
    fd = os.open(gate, os.O_WRONLY)
    before()
    os.close(fd)


def ring_and_let_go(gate):
    let_go(gate, lambda: os.kill(os.getpid(), signal.SIGALRM))


def make(*args, **kwargs):
    envs = sync.VectorEnv([lambda: Told(*args)] * N, num_workers=2, **kwargs)
    envs.reset()
    return paused(envs)


def act(**actions):
    """Actions: GO, but for those named s0 ... s3."""
    return np.array([actions.get(f"s{slot}", GO) for slot in range(N)])


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("copy", [True, False])
def test_the_results_are_the_same(inline_calls, mode, copy):
    factories = [lambda: gym.make("CartPole-v1")] * N
    reference = SyncVectorEnv(factories, autoreset_mode=mode)
    with sync.VectorEnv(factories, num_workers=2, autoreset_mode=mode, copy=copy) as envs:
        assert_same(tuple(envs.reset(seed=1)), reference.reset(seed=1))
        paused(envs)
        inline_calls.clear()
        for _ in range(200):
            actions = np.random.default_rng(0).integers(0, 2, N)
            assert_same(tuple(envs.step(actions)), reference.step(actions))
        assert inline_calls == [True] * 200
    reference.close()


def test_results_as_they_come(inline_calls):
    with make() as envs:
        inline_calls.clear()
        counts = np.zeros(N)
        envs.send(ACTIONS)
        while counts.min() < 10:
            ready = envs.recv(1, 2)
            assert 1 <= len(ready.slots) <= 2
            counts[ready.slots] += 1
            assert np.array_equal(ready.obs, counts[ready.slots])
            envs.send(ACTIONS[: len(ready.slots)], ready.slots)
        assert sum(len(ready.slots) for ready in envs.ready()) == N
        assert False not in inline_calls
        with pytest.raises(aioenv.NoAsyncCallError):
            envs.recv()
        with pytest.raises(ValueError, match="min_slots"):
            envs.recv(0)


def test_waits_are_counted(inline_calls):
    with make() as envs:
        envs.stats(reset=True)
        for _ in range(5):
            envs.step(ACTIONS)
        assert envs.stats().env_steps == 5 * N
        assert envs.stats().env_s > 0


def test_the_drop_in(inline_calls):
    with contextlib.closing(sync.AsyncVectorEnv([Told] * N, num_workers=2)) as envs:
        envs.reset()
        envs.step(ACTIONS)
        paused(envs)
        envs.step_async(ACTIONS)
        with pytest.raises(aioenv.PendingCallError):
            envs.step_async(ACTIONS)
        assert envs.step_wait()[0].tolist() == [2.0] * N
        assert inline_calls[-2:] == [True, True]
        envs.step_async(ACTIONS)  # forgotten by an interrupted program, say
        envs._pending = None
        envs._state = type(envs._state).DEFAULT
        gc.collect()
        assert envs.step(ACTIONS)[0].tolist() == [4.0] * N


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_the_drop_in_waits_for_what_was_begun(inline_calls, gate, timeout):
    with contextlib.closing(sync.AsyncVectorEnv([lambda: Told(gate)] * N, num_workers=2)) as envs:
        envs.reset()
        paused(envs)
        envs.step_async(act(s3=GATE))
        with pytest.raises(aioenv.StepTimeout):
            envs.step_wait(timeout=0)
        let_go(gate)
        envs.step_async(ACTIONS)
        assert envs.step_wait(timeout)[0].tolist() == [2.0] * N


# ---------------------------------------------------------------- what goes wrong


def test_wrong_actions_and_envs_that_raise(inline_calls):
    with make() as envs:
        inline_calls.clear()
        with pytest.raises(aioenv.ActionError):
            envs.step(ACTIONS[:2])
        with pytest.raises(aioenv.EnvError, match="told to") as caught:
            envs.step(act(s1=RAISE))
        assert caught.value.slots == (1,)
        assert caught.value.partial.obs.tolist() == [1.0, 0.0, 1.0, 1.0]
        with pytest.raises(aioenv.EnvError, match="reset"):
            envs.step(ACTIONS)
        envs.reset()
        assert envs.step(ACTIONS).obs.tolist() == [1.0] * N
        assert inline_calls[:3] == [True] * 3


def test_a_worker_that_dies_is_noticed_at_once(inline_calls):
    with make() as envs:
        with pytest.raises(aioenv.WorkerDied) as caught:
            envs.step(act(s2=KILL))
        assert caught.value.slots == (2, 3)
        assert caught.value.partial.obs[:2].tolist() == [1.0, 1.0]


def test_a_worker_that_died_before_is_started_again(inline_calls):
    with make(restart=aioenv.RestartPolicy(backoff_s=0)) as envs:
        pid = envs.workers[1].pid
        os.kill(pid, signal.SIGKILL)
        result = envs.step(ACTIONS)
        assert result.obs[:2].tolist() == [1.0, 1.0]
        assert envs.workers[1].pid != pid
        while result.truncated.any():
            result = envs.step(ACTIONS)
        for _ in range(3):
            paused(envs)
            envs.step(ACTIONS)
        assert inline_calls[-1]


def test_a_short_timeout(inline_calls, gate):
    with make(gate, timeout_s=0.05) as envs:
        with pytest.raises(aioenv.StepTimeout, match=r"slots \[2, 3\]"):
            envs.step(act(s3=GATE))
        let_go(gate)
        assert envs.recv(N, deadline_s=30).obs.tolist() == [1.0] * N


class Large(gym.Env):
    """Takes more than a socket does at once, and says when it has it."""

    observation_space = action_space = gym.spaces.Box(-1, 1, (500_000,), np.float64)

    def __init__(self, said=os.devnull):
        self.said = said

    def reset(self, *, seed=None, options=None):
        return np.zeros(500_000), {}

    def step(self, action):
        with open(self.said, "w") as file:
            file.write("x")
        return action, 0.0, False, False, {}


def test_large_frames(inline_calls):
    with sync.VectorEnv([Large] * 2, num_workers=2, transport="frames") as envs:
        envs.reset()
        paused(envs)
        actions = np.random.default_rng(0).uniform(-1, 1, (2, 500_000))
        for _ in range(3):
            assert np.array_equal(envs.step(actions).obs, actions)


def test_the_loop_sends_the_rest_between_calls(inline_calls, gate):
    with sync.VectorEnv([lambda: Large(gate)], num_workers=1, transport="frames") as envs:
        envs.reset()
        actions = np.zeros((1, 500_000))
        for begin in (envs._begin_step, envs.send):
            paused(envs)
            begin(actions)
            with open(gate) as file:
                assert file.read() == "x"
            envs.recv()
        assert True in inline_calls


# ---------------------------------------------------------------- who else is there


def test_a_long_step_leaves_the_loop_to_others(gate, monkeypatch):
    with make(gate) as envs:
        results = []
        stepper = threading.Thread(target=lambda: results.append(envs.step(act(s0=GATE))))
        stepper.start()
        while not envs.outstanding:
            pass
        assert envs.active_slots.tolist() == [0, 1, 2, 3]
        let_go(gate)
        stepper.join()
        assert results[0].obs.tolist() == [1.0] * N


def test_closed_by_another_thread_meanwhile(gate):
    with make(gate) as envs:
        errors = []

        def step():
            try:
                envs.step(act(s0=GATE))
            except aioenv.ClosedError as exc:
                errors.append(exc)

        stepper = threading.Thread(target=step)
        stepper.start()
        while not envs.outstanding:
            pass
        envs.close(grace_s=0)
        stepper.join()
        assert len(errors) == 1


def test_many_threads_and_one_lock(inline_calls):
    with make() as envs:
        lock = threading.Lock()
        seen = []

        def work():
            for _ in range(50):
                with lock:
                    seen.append(envs.step(ACTIONS).obs[0])

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [*range(1, 151)]


def test_an_inline_call_that_would_wait_for_itself_raises(inline_calls):
    with make() as envs:
        caught = []

        def inline(_):
            for call in (
                lambda: envs.step(ACTIONS),
                lambda: envs.get_attr("count"),
                lambda: envs._portal.run(id, 1),
            ):
                with pytest.raises(aioenv.LoopError):
                    call()
                caught.append(call)

        assert envs._portal.run_inline(inline)
        assert len(caught) == 3
        assert envs.step(ACTIONS).obs.tolist() == [1.0] * N


def test_on_a_running_loop(inline_calls):
    async def main():
        with make() as envs:
            for _ in range(3):
                envs.step(ACTIONS)
            assert inline_calls[-1]
            return asyncio.get_running_loop()

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(main()) is loop
    loop.close()


def test_nothing_runs_inline_in_debug_mode(inline_calls, monkeypatch):
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    monkeypatch.setattr(portal, "MAX_PAUSE_S", 10e-3)
    with sync.VectorEnv([Told] * N, num_workers=2) as envs:
        if not envs._portal._loop.get_debug():
            pytest.skip("this loop has no debug mode by that variable")
        envs.reset()
        for _ in range(3):
            envs.step(ACTIONS)
        assert True not in inline_calls


def test_nothing_runs_inline_where_the_loop_is_needed(inline_calls):
    with sync.make_vec("HalfCheetah-v5", 2, render=aioenv.RenderConfig(width=16, height=16)) as envs:
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())
        assert True not in inline_calls
    with sync.VectorEnv([Told] * N, num_workers=2, channel="streams") as envs:
        envs.reset()
        envs.step(ACTIONS)
        assert True not in inline_calls


def test_it_ends_while_the_loop_pauses(inline_calls):
    with leak_check():
        make().close()
        envs = make()
        del envs
        gc.collect()


def test_a_forked_copy_says_so(inline_calls):
    with leak_check(), make() as envs:
        check_forked_copy(envs, ACTIONS)


# ---------------------------------------------------------------- signals


def test_a_handler_that_raises_leaves_the_result_to_recv(inline_calls, gate):
    def ring(*_):
        raise Rung

    with make(gate) as envs, handled(signal.SIGALRM, ring):
        opener = threading.Thread(target=ring_and_let_go, args=[gate])
        opener.start()
        with pytest.raises(Rung):
            envs.step(act(s1=GATE))
        opener.join()
        assert envs.recv(N).obs.tolist() == [1.0] * N
        assert envs.step(ACTIONS).obs.tolist() == [2.0] * N


def test_a_handler_that_returns_changes_nothing(inline_calls, gate):
    rang = []
    with make(gate) as envs, handled(signal.SIGALRM, lambda *args: rang.append(args)):
        opener = threading.Thread(target=ring_and_let_go, args=[gate])
        opener.start()
        assert envs.step(act(s1=GATE)).obs.tolist() == [1.0] * N
        opener.join()
        assert [number for number, _ in rang] == [signal.SIGALRM]
