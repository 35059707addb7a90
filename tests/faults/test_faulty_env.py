"""`FaultyEnv` does what it says, in other people's vector envs and by itself."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import PassiveEnvChecker

from aioenv.testing import FAULTS, MOMENTS, FaultyEnv, faulty_envs
from aioenv.testing.faulty_env import (
    FLOOD_BYTES,
    HUGE_BYTES,
    PRINTED_BYTES,
    SLOW_S,
    FaultFactory,
    TwoArgumentError,
    makes_sense,
)
from tests.faults.play import members

ACTIONS = np.zeros(3, np.int64)
EXCEPTIONS = {
    "raises": ValueError,
    "raises_two_args": TwoArgumentError,
    "raises_local": Exception,
    "raises_unpicklable": RuntimeError,
    "sys_exit": SystemExit,
}


def trajectory(*fault, **kwargs):
    """What Gymnasium's own SyncVectorEnv gets of three envs, the second of which has a fault."""
    envs = gym.vector.SyncVectorEnv(faulty_envs(3, *fault, slot=1, length=2, **kwargs))
    results = [envs.reset(seed=1)]
    results += [envs.step(ACTIONS) for _ in range(4)]
    results += [envs.call("answer"), envs.render()]
    envs.close()
    return results


def assert_alike(mine, other):
    if isinstance(mine, dict):
        assert mine.keys() == other.keys()
        mine, other = list(mine.values()), list(other.values())
    if isinstance(mine, list | tuple):
        for a, b in zip(mine, other, strict=True):
            assert_alike(a, b)
    else:
        np.testing.assert_array_equal(mine, other, strict=True)


def test_it_is_an_env_as_gymnasium_wants_one():
    env = PassiveEnvChecker(FaultyEnv(length=3))  # what it does not like is a warning, and so an error
    for _ in range(2):
        env.reset(seed=1)
        for _ in range(3):
            env.step(0)
        env.render()
    env.close()


def test_it_shows_its_slot_its_episode_and_its_step():
    _, first, second, third, fourth, answers, images = trajectory(None)
    assert first[0].tolist() == [[0, 1, 1], [1, 1, 1], [2, 1, 1]]
    assert second[1].tolist() == [2, 2, 2]
    assert second[3].all()
    assert third[0].tolist() == [[0, 2, 0], [1, 2, 0], [2, 2, 0]]  # the step that resets
    assert fourth[1].tolist() == [1, 1, 1]
    assert answers == (1, 1001, 2001)
    assert [image.tolist() for image in images] == [np.full((4, 4, 3), 1).tolist()] * 3


@pytest.mark.parametrize("when", ["factory", "reset", "step", "render", "call", "close"])
@pytest.mark.parametrize("fault", ["slow", "prints", "floods_stderr"])
def test_faults_that_let_it_go_on_change_nothing(fault, when, capfd):
    expected = trajectory(None)
    assert_alike(trajectory(fault, when), expected)
    out, err = capfd.readouterr()
    assert (len(out), len(err)) == {"prints": (PRINTED_BYTES, 0), "floods_stderr": (0, FLOOD_BYTES)}.get(fault, (0, 0))


def test_slow_is_slow():
    env = FaultyEnv("slow", "reset", at=2)
    env.reset()
    began = time.monotonic()
    env.reset()
    assert time.monotonic() - began >= SLOW_S


@pytest.mark.parametrize("when", ["reset", "step"])
def test_wrong_values_are_of_that_one_moment(when):
    right = trajectory(None)
    place = 0 if when == "reset" else 2
    at = 1 if when == "reset" else 2
    result = trajectory("nan", when, at=at)
    assert np.isnan(result[place][0][1]).all()
    assert when == "reset" or np.isnan(result[place][1][1])
    for i in {0, 1, 2, 3, 4} - {place}:
        assert_alike(result[i], right[i])
    for fault in ("wrong_shape", "wrong_dtype"):
        with pytest.raises((ValueError, TypeError)):
            trajectory(fault, when, at=at)
    huge = trajectory("huge_info", when, at=at)[place][-1]["huge"]
    assert huge[1].nbytes == HUGE_BYTES and (huge[1] == 7).all()
    assert not huge[0].any()


@pytest.mark.parametrize("fault", EXCEPTIONS)
@pytest.mark.parametrize("when", ["reset", "step", "render", "call"])
def test_it_strikes_once_when_it_is_told_to(fault, when):
    env = FaultyEnv(fault, when, at=2)
    env.reset() if when != "reset" else None
    act = {"reset": env.reset, "step": lambda: env.step(0), "render": env.render, "call": env.answer}[when]
    act()
    with pytest.raises(EXCEPTIONS[fault], match="7" if fault == "sys_exit" else "the fault has struck"):
        act()
    act()


@pytest.mark.parametrize("fault", EXCEPTIONS)
def test_a_factory_strikes_when_it_is_unpickled(fault):
    factory = FaultyEnv.factory(fault, "import", 3)
    data = pickle.dumps(factory)
    with pytest.raises(EXCEPTIONS[fault]):
        pickle.loads(data)
    with pytest.raises(EXCEPTIONS[fault]):  # it was not unpickled: a forked process, say
        factory()
    factory()
    env = pickle.loads(pickle.dumps(FaultyEnv.factory(fault, "step", 3)))()
    assert env.reset()[0].tolist() == [3, 1, 0]


def test_what_the_exceptions_are_like():
    with pytest.raises(TwoArgumentError) as caught:
        FaultyEnv("raises_two_args", "reset").reset()
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(caught.value))
    for fault in ("raises_local", "raises_unpicklable"):
        with pytest.raises(Exception, match="struck") as other:
            FaultyEnv(fault, "reset").reset()
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
            pickle.dumps(other.value)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("burns", "step"), "fault: expected one of raises, .*got 'burns'"),
        (("raises", "lunch"), "when: expected one of import, .*got 'lunch'"),
        (("wrong_shape", "close"), "can't strike at 'close', but at reset, step"),
        (("nan", "import"), "can't strike at 'import'"),
        (("raises", "step", 0, 0), "at: expected a number from 1, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, match):
    for make in (FaultyEnv, FaultyEnv.factory, FaultFactory):
        with pytest.raises(ValueError, match=match):
            make(*arguments)
    with pytest.raises(ValueError, match="slot: expected a number from 0 to 2, got 3"):
        faulty_envs(3, "raises", slot=3)


def test_every_fault_has_its_moments():
    assert len(FAULTS) == 21 and len(MOMENTS) == 7
    for fault in FAULTS:
        assert any(makes_sense(fault, when) for when in MOMENTS)
        for when in MOMENTS:
            if makes_sense(fault, when):
                FaultyEnv.factory(fault, when)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def status_of(pid, field):
    """A field of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(field + ":"))


ALONE = """
import os, sys
import gymnasium as gym
from aioenv.testing import faulty_envs

mine = {name for name in sys.modules if name.startswith("aioenv.")}
assert mine == {"aioenv.testing", "aioenv.testing.faulty_env", "aioenv.testing.leak_check"}, mine
envs = gym.vector.SyncVectorEnv(faulty_envs(2, sys.argv[1], "reset", slot=1))
print(os.getpid(), flush=True)
try:
    envs.reset()
except MemoryError:
    bytearray(1 << 30)  # the limit is as it was
    os._exit(40)
os._exit(50)
"""


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("sys_exit", 7),
        ("os_exit", 7),
        ("segfault", -signal.SIGSEGV),
        ("sigkill", -signal.SIGKILL),
        ("out_of_memory", 40),
        ("closes_fds", 50),
        ("forks", 50),
        ("hangs", -signal.SIGTERM),
        ("hangs_in_c", -signal.SIGTERM),
        ("ignores_sigterm", -signal.SIGKILL),
    ],
)
def test_what_becomes_of_the_process(fault, status):
    """Alone, with nothing of aioenv but its testing room; what hangs sleeps, and gets SIGTERM, then SIGKILL."""
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, fault], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        if status in (-signal.SIGTERM, -signal.SIGKILL) and fault != "sigkill":
            wait_for(lambda: status_of(process.pid, "State").startswith("S"))
            if fault == "ignores_sigterm":
                wait_for(lambda: int(status_of(process.pid, "SigIgn"), 16) & 1 << (signal.SIGTERM - 1))
            process.terminate()
        if fault == "ignores_sigterm":
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            process.kill()
        assert process.wait(30) == status
        assert bool(members([process.pid])) == (fault == "forks")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
