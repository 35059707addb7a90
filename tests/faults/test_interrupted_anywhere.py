"""Handlers of signals raise wherever they can in blocking code: nothing is off by one, nothing hangs."""

from __future__ import annotations

import dis
import itertools
import opcode
import signal
import sys
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import sync
from aioenv.sync import blocking, portal
from tests.kits.blocking_kit import handled, paused, step_in_two

N = 2
ACTIONS = np.zeros(N, np.int64)
LAYERS = tuple(str(Path(aioenv.__file__).parent / layer) for layer in ("sync", "core", "rollout", "inprocess"))
# Handlers run after these.
CHECKED = [opcode.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "RESUME")]


class Count(gym.Env):
    """Counts its steps."""

    observation_space = gym.spaces.Box(0, 1e9, (), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.count = 0.0
        return np.array(self.count), {}

    def step(self, action):
        self.count += 1
        return np.array(self.count), 1.0, False, False, {}


class Interrupted(Exception):
    pass


class Instants:
    """The instants of a call at which a handler can run, in the rooms that blocking code is made of.

    Args:
        returns: also where a function is about to return. No handler runs there if its value is that of a function in
            Python.
    """

    def __init__(self, *, returns: bool = True) -> None:
        self._returns = returns
        self._points = {}

    def run(self, function, number):
        """Call it, with a handler that raises at instant `number` (-1: at none).

        Returns:
            What it returns, None if that was interrupted; and whether there was such an instant.
        """
        self._left = number if number >= 0 else sys.maxsize
        before, handler = sys.gettrace(), signal.signal(signal.SIGUSR1, self._raise)
        sys.settrace(self._enter)
        try:
            return function(), self._left < 0
        except Interrupted:
            return None, True
        finally:
            sys.settrace(before)
            signal.signal(signal.SIGUSR1, handler)

    def _raise(self, *_):
        raise Interrupted

    def _enter(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(LAYERS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._go

    def _go(self, frame, event, arg):
        if event == "opcode" and frame.f_lasti in self._points_of(frame.f_code):
            self._left -= 1
            if self._left == -1:
                signal.raise_signal(signal.SIGUSR1)
        return self._go

    def _points_of(self, code):
        if code not in self._points:
            instructions = list(dis.get_instructions(code))
            tries = dis.Bytecode(code).exception_entries

            def catches(instruction):
                return [each.target for each in tries if each.start <= instruction.offset < each.end]

            self._points[code] = {
                two.offset
                for one, two in itertools.pairwise(instructions)
                if one.opcode in CHECKED
                and catches(one) == catches(two)  # what a handler raises comes from the first of the two
                and (self._returns or two.opname != "RETURN_VALUE")
            }
        return self._points[code]


def send_and_recv(envs):
    envs.send(ACTIONS)
    return envs.recv(N)[1:]


def in_two(envs):
    envs.step_async(ACTIONS)
    return envs.step_wait()


def wait_with_timeout(envs):
    envs.step_async(ACTIONS)
    return envs.step_wait(30)


WAYS = {
    "step": (sync.VectorEnv, lambda envs: envs.step(ACTIONS)),
    "begin, wait": (sync.VectorEnv, lambda envs: step_in_two(envs, ACTIONS)),
    "send, recv": (sync.VectorEnv, send_and_recv),
    "drop-in": (sync.AsyncVectorEnv, lambda envs: envs.step(ACTIONS)),
    "step_async, step_wait": (sync.AsyncVectorEnv, in_two),
    "step_wait(timeout)": (sync.AsyncVectorEnv, wait_with_timeout),
}


def take_what_is_owed(envs):
    if isinstance(envs, sync.VectorEnv):
        while envs.outstanding:
            envs.recv(N)
    elif envs._pending is not None:
        envs.step_wait()


def interrupt_all(way, pauses, first, stride):
    kind, step = WAYS[way]
    instants = Instants()
    number, misses, count = first, 0, 0
    with kind([Count] * N, num_workers=2) as envs:
        envs.reset()
        portal = envs._portal
        for _ in range(2):  # from Python 3.12 on, code is prepared for tracing when it is first traced
            count = instants.run(lambda: step(envs), -1)[0][0][0]
        while misses < 5:
            if pauses:
                paused(envs)
            result, there = instants.run(lambda: step(envs), number)
            misses = 0 if there else misses + 1
            if result is not None:
                assert result[0].tolist() == [count + 1] * N, number
            take_what_is_owed(envs)
            following = envs.step(ACTIONS)[0]
            least = 1 if result is None else 2
            assert following[0] == following[1] and least <= following[0] - count <= 2, (number, count, following)
            assert not portal._calls, number  # or the loop would never pause again
            count = following[0]
            number += stride
    # Python 3.13 traces fewer opcodes after an exception
    assert number > 10 or sys.version_info >= (3, 13), "hardly anything was interrupted"


@pytest.mark.parametrize("pauses", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_steps_interrupted_anywhere(way, pauses, monkeypatch):
    # how long the loop pauses: until a turn is requested, or not at all
    monkeypatch.setattr(portal, "MAX_PAUSE_S", 60.0 if pauses else 0.0)
    monkeypatch.setattr(blocking, "MAX_PAUSE_S", 60.0)
    interrupt_all(way, pauses, sum(map(ord, way)) % 7, 7)


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pauses", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_steps_interrupted_everywhere(way, pauses, monkeypatch):
    monkeypatch.setattr(portal, "MAX_PAUSE_S", 10e-3 if pauses else 0.0)
    interrupt_all(way, pauses, 0, 1)


MADE = {
    "workers": lambda: sync.VectorEnv([Count] * N, num_workers=2),
    "in process": lambda: sync.VectorEnv([Count] * N, num_workers=0),
    "native": lambda: sync.make_vec(lambda num_envs: gym.vector.SyncVectorEnv([Count] * num_envs), N, backend="native"),
}


@pytest.mark.parametrize("timeout_s", [None, 30.0])
@pytest.mark.parametrize("made", MADE)
def test_a_step_that_is_over_when_its_caller_is_interrupted_waits_for_recv(made, timeout_s, monkeypatch):
    wait = portal.PortalCall.wait
    armed = []

    def interrupted(call, limit_s=None):
        ended = wait(call, limit_s)
        if armed and call._function in armed[0]:
            armed.clear()
            raise Interrupted
        return ended

    monkeypatch.setattr(portal.PortalCall, "wait", interrupted)
    monkeypatch.setattr(portal, "MAX_PAUSE_S", 0.0)
    monkeypatch.setattr(blocking.BlockingStepper, "step_inline", lambda *args, **kwargs: None)
    with MADE[made]() as envs:
        envs.reset()
        for count in (1, 3):
            armed.append((blocking._step, blocking._result))
            with pytest.raises(Interrupted):
                envs.step(ACTIONS, timeout_s=timeout_s)
            assert envs.outstanding
            if count == 1:
                ready = envs.recv(N)
                assert ready.obs.tolist() == [1] * N and ready.slots.tolist() == [0, 1]
                assert envs.step(ACTIONS).obs.tolist() == [2] * N
            else:
                assert envs.step(ACTIONS).obs.tolist() == [4] * N, "it is dropped"
            assert not envs.outstanding
        assert envs.stats().env_steps == 4 * N


def still(obs):
    return ACTIONS[: len(obs)]


@pytest.mark.parametrize("made", MADE)
def test_the_result_of_a_step_interrupted_anywhere_waits_for_recv(made, monkeypatch):
    monkeypatch.setattr(portal, "MAX_PAUSE_S", 0.0)
    instants = Instants(returns=False)
    number, there, count = 0, True, 0
    with MADE[made]() as envs:
        envs.reset()
        for _ in range(2):  # as above
            count = instants.run(lambda: envs.step(ACTIONS), -1)[0].obs[0]
        while there:
            result, there = instants.run(lambda: envs.step(ACTIONS), number)
            results = [] if result is None else [result.obs]
            while envs.outstanding:
                results.append(envs.recv(N).obs)
            results.append(envs.step(ACTIONS).obs)
            assert [obs.tolist() for obs in results] == [[count + k + 1] * N for k in range(len(results))], number
            count += len(results)
            number += 1
    assert number > 10


RUNS = {
    "rollout": lambda envs: envs.rollout(still, 2),
    "episodes": lambda envs: list(envs.episodes(still, N)),
    "evaluate": lambda envs: sync.evaluate(envs, still, N),
}


@pytest.mark.parametrize("run", RUNS)
def test_runs_interrupted_anywhere(run):
    instants = Instants()
    number, there = 0, True
    with sync.VectorEnv([lambda: gym.wrappers.TimeLimit(Count(), 2)] * N, num_workers=2) as envs:
        envs.reset()
        for _ in range(2):  # as above
            instants.run(lambda: RUNS[run](envs), -1)
        while there:
            _, there = instants.run(lambda: RUNS[run](envs), number)
            assert not envs._portal._calls, number
            envs.reset()  # drops what is left
            assert envs.step(ACTIONS)[0].tolist() == [1] * N, number
            number += 1
    assert number > 10


class Rings:
    """Is pickled while a signal arrives."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGUSR1)
        return Rings, ()


@pytest.mark.parametrize("num_workers", [1, 0])
def test_a_handler_that_raises_while_code_is_collected_is_no_object_that_does_not_pickle(num_workers):
    rings = Rings()

    def interrupt(*_):
        raise Interrupted

    with handled(signal.SIGUSR1, interrupt), pytest.raises(Interrupted):
        sync.VectorEnv([lambda: rings and Count()], num_workers=num_workers)


def test_a_close_that_was_interrupted_is_made_good_by_the_next():
    instants = Instants()
    number, there = 0, True
    while there:
        envs = sync.VectorEnv([Count], num_workers=1)
        _, there = instants.run(envs.close, number)
        closing = threading.Thread(target=envs.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive() and not envs._portal._thread.is_alive(), number
        number += 1
