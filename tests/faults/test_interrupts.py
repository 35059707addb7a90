"""Ctrl-C in scripts, and exceptions of signal handlers in blocking code: aligned afterwards, and nothing left."""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
import uuid
from functools import partial

import numpy as np
import pytest

import aioenv.sync
from aioenv.process.channel import CHANNELS
from aioenv.process.launch import START_METHODS
from tests.faults.align_kit import Ledger, N, Reference, as_step, same
from tests.kits.blocking_kit import step_in_two
from tests.kits.compare import assert_same
from tests.kits.process_kit import kill_all, processes_with

# Steps [1, 0]; then [0, 2], in which slot 1 says "x" and waits at the gate; then, if it lives to, [1, 1] and [0, 1].
SCRIPT = """
import asyncio, json, os, sys
import gymnasium as gym, numpy as np
import aioenv, aioenv.sync

how, start, channel, said, gate = sys.argv[1:]

class Gated(gym.Env):
    observation_space = gym.spaces.Box(0, 1e9, (2,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.steps = self.digest = 0
        return np.zeros(2), {}

    def step(self, action):
        if action == 2:
            with open(said, "w") as file:
                file.write("x")
            with open(gate) as file:
                file.read()
        self.steps += 1
        self.digest = 10 * self.digest + int(action) + 1
        return np.array([self.steps, self.digest]), float(self.steps), False, False, {}

def let_go():
    os.close(os.open(gate, os.O_WRONLY))

told = []
def tell(name, result):
    told.append([name, result.obs.tolist(), result.reward.tolist()])

arguments = dict(env_fns=[Gated] * 2, num_workers=2, start=start, channel=channel)

async def main():
    async with aioenv.AsyncVectorEnv(**arguments) as envs:
        await envs.reset()
        tell("first", await envs.step([1, 0]))
        try:
            await envs.step([0, 2])
        except asyncio.CancelledError:
            if how == "async-uncaught":
                raise
            asyncio.current_task().uncancel()
            let_go()
        if how == "async-recv":
            tell("late", await envs.recv(2))
        for actions in ([1, 1], [0, 1]):
            tell("next", await envs.step(actions))

def block(envs):
    envs.reset()
    tell("first", Result(*envs.step(np.array([1, 0]))))
    try:
        envs.step(np.array([0, 2]))
    except KeyboardInterrupt:
        let_go()
    if how == "sync-recv":
        tell("late", envs.recv(2))
    for actions in ([1, 1], [0, 1]):
        tell("next", Result(*envs.step(np.array(actions))))
    envs.close()

if how.startswith("async"):
    asyncio.run(main())
else:
    from aioenv.core.results import StepResult as Result
    if how == "drop-in":
        block(aioenv.sync.AsyncVectorEnv([Gated] * 2, num_workers=2))
    else:
        block(aioenv.sync.VectorEnv(**arguments))
print(json.dumps(told))
"""

FIRST = ["first", [[1, 2], [1, 1]], [1, 1]]
LATE = ["late", [[2, 21], [2, 13]], [2, 2]]
NEXT = [["next", [[3, 212], [3, 132]], [3, 3]], ["next", [[4, 2121], [4, 1322]], [4, 4]]]
EXPECTED = {
    "async": [FIRST, *NEXT],
    "async-recv": [FIRST, LATE, *NEXT],
    "sync": [FIRST, *NEXT],
    "sync-recv": [FIRST, LATE, *NEXT],
    "drop-in": [FIRST, *NEXT],
}


@pytest.fixture
def interrupted(tmp_path):
    """Run the script, send SIGINT to its process group in the middle of its second step, and give what it printed."""
    said, gate = str(tmp_path / "said"), str(tmp_path / "gate")
    os.mkfifo(said)
    os.mkfifo(gate)
    mark = f"AIOENV_TEST={uuid.uuid4()}"
    env = {**os.environ, **dict([mark.split("=")]), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(how: str, start: str, channel: str) -> tuple[int, str, str]:
        fifo = os.open(said, os.O_RDWR)  # for writing too, so that it has no end
        command = [sys.executable, "-c", SCRIPT, how, start, channel, said, gate]
        try:
            with subprocess.Popen(
                command, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as script:
                try:
                    assert select.select([fifo], [], [], 60)[0], "it did not get that far"
                    os.killpg(script.pid, signal.SIGINT)
                    out, errors = script.communicate(timeout=20)
                finally:
                    script.kill()
            deadline = time.monotonic() + 1
            while processes_with(mark):
                assert time.monotonic() < deadline, "something is left of it"
            return script.returncode, out, errors
        finally:
            os.close(fifo)
            kill_all(mark)

    return run


# Each way to wait meets each start method and each channel; but for the drop-in, which is told neither.
SAMPLE, REST = [], []
for number, how in enumerate(EXPECTED):
    for place, way in enumerate(itertools.product(START_METHODS, CHANNELS)):
        chosen = place in ((0, 3), (1, 2))[number % 2] if how != "drop-in" else place == 0
        (SAMPLE if chosen else REST).append((how, *way))


@pytest.mark.parametrize(
    ("how", "start", "channel"), [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.stress) for case in REST)]
)
def test_ctrl_c_in_the_middle_of_a_step(how, start, channel, interrupted):
    returncode, out, errors = interrupted(how, start, channel)
    assert returncode == 0, errors
    assert json.loads(out) == EXPECTED[how]


@pytest.mark.parametrize(("start", "channel"), list(zip(START_METHODS, CHANNELS, strict=False)))
def test_ctrl_c_that_is_not_caught(start, channel, interrupted):
    """Although an env still hangs."""
    returncode, out, errors = interrupted("async-uncaught", start, channel)
    assert returncode == -signal.SIGINT and out == "" and "KeyboardInterrupt" in errors


# ---------------------------------------------------------------- a signal handler raises, at a random instant


class Interrupted(Exception):
    pass


class Alarm:
    """Has a signal handler raise while a function runs, if that takes long enough."""

    def __init__(self) -> None:
        self._armed = False
        self.rang = 0

    def _ring(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            raise Interrupted

    def run(self, function, after_s: float):
        """What the function returns; None if it was interrupted, which may also have been just before or after it."""
        before = signal.signal(signal.SIGALRM, self._ring)
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, after_s)
            result = function()
            self._armed = False
            return result
        except Interrupted:
            self.rang += 1
            return None
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def race(cases: int, seed: int) -> None:
    """Interrupted steps and resets, each followed by a step: they were done in all slots, or in none."""
    rng = random.Random(seed)
    alarm = Alarm()
    reference = Reference(Ledger)

    def random_actions() -> np.ndarray:
        return np.array([rng.randrange(1000) for _ in range(N)])

    with aioenv.sync.VectorEnv([lambda: Ledger(0.0005)] * N, num_workers=2) as envs:
        assert_same(as_step(envs.reset(seed=0)), reference.reset(seed=0))
        times = []
        for _ in range(7):
            actions = random_actions()
            began = time.perf_counter()
            got = envs.step(actions)
            times.append(time.perf_counter() - began)
            assert_same(as_step(got), reference.step(actions))
        duration_s = statistics.median(times)
        for case in range(cases):
            with_it = reference.copy()
            actions = random_actions()
            step = partial(envs.step if case % 2 else partial(step_in_two, envs), actions)
            operation = step if case % 4 else partial(envs.reset, seed=case)
            got = alarm.run(operation, rng.uniform(1e-6, 2 * duration_s))
            expected = with_it.step(actions) if case % 4 else with_it.reset(seed=case)
            if got is not None:
                assert_same(as_step(got), expected)
            following = random_actions()
            late = as_step(envs.step(following))
            if got is None and same(late, reference.copy().step(following)):
                reference.step(following)  # it had not been sent
                continue
            assert_same(late, with_it.step(following))
            reference = with_it
    assert alarm.rang >= cases // 10


@pytest.mark.usefixtures("way")
def test_blocking_calls_interrupted_at_random_instants():
    race(60, seed=1)


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("way")
def test_blocking_calls_interrupted_at_five_hundred_instants():
    race(500, seed=2)
