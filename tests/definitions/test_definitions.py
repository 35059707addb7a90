"""The snapshot of what factories reach: which worker gets what, large values, and what comes after the snapshot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.definitions import snapshot
from aioenv.definitions.restore import Code
from aioenv.definitions.snapshot import CodeSnapshot
from tests.kits.process_kit import environment

ACTIONS = np.zeros(4, np.int64)


class Holder(gym.Env):
    """Holds what it is given, and answers questions about it."""

    observation_space = action_space = gym.spaces.Discrete(9)

    def __init__(self, *given: Any) -> None:
        self.given = given

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {}

    def value(self, index=0):
        return self.given[index]

    def ask(self, function, *args):
        return function(self, *args)


def writable(env):
    return env.given[0].flags.writeable


def write(env, value):
    env.given[0][0] = value
    return float(env.given[0][0])


def first(env):
    return float(env.given[0][0])


def is_one(env):
    return env.given[0] is env.given[1]


def memory_of_the_parent() -> list[str]:
    """Its open memory with code of factories."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return [link for link in links if "aioenv-code" in link]


def run_script(folder: Path, code: str) -> subprocess.CompletedProcess:
    """Run code as a script, in a folder."""
    (folder / "script.py").write_text(code)
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=100)


linux = pytest.mark.skipif(not snapshot.CAN_SHARE, reason="takes memory without a name, and /proc")


@linux
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
@pytest.mark.asyncio
async def test_a_large_array_is_in_memory_once_and_a_worker_writes_to_a_copy(start):
    table = np.arange(100_000.0)
    factories = [partial(Holder, table, table, i) for i in range(4)]
    async with aioenv.AsyncVectorEnv(factories, num_workers=2, start=start) as envs:
        assert memory_of_the_parent() == []
        assert await envs.call("ask", is_one) == (True,) * 4
        assert await envs.call("ask", write, 7.0) == (7.0,) * 4
        assert table[0] == 0
        np.testing.assert_array_equal((await envs.call("value"))[3][1:], table[1:])
    async with aioenv.AsyncVectorEnv(factories, num_workers=2, start=start) as envs:
        assert await envs.call("ask", first) == (0.0,) * 4


@pytest.mark.parametrize("shared", [pytest.param(True, marks=linux), False])
@pytest.mark.parametrize(
    "value",
    [
        np.arange(200_000.0),
        np.arange(200_000.0).reshape(400, 500).T,
        np.arange(200_000.0)[::2],
        np.arange(9.0),
        [f"text {i}" for i in range(100_000)],
        {"nested": [np.ones((300, 300), np.float32), np.zeros(0)]},
    ],
    ids=["array", "transposed", "strided", "small", "strings", "nested"],
)
@pytest.mark.asyncio
async def test_values_of_any_size_arrive(value, shared, monkeypatch):
    monkeypatch.setattr(snapshot, "CAN_SHARE", shared)
    async with aioenv.AsyncVectorEnv([partial(Holder, value, i) for i in range(2)], num_workers=2) as envs:
        for got in await envs.call("value"):
            np.testing.assert_equal(got, value)


@linux
@pytest.mark.asyncio
async def test_a_read_only_array_stays_read_only():
    table = np.arange(100_000.0)
    table.flags.writeable = False
    async with aioenv.AsyncVectorEnv([partial(Holder, table)] * 2, num_workers=1) as envs:
        assert await envs.call("ask", writable) == (False, False)


@linux
@pytest.mark.asyncio
async def test_the_parent_keeps_the_memory_as_long_as_a_restart_may_need_it():
    table = np.arange(100_000.0)
    restart = aioenv.RestartPolicy()
    async with aioenv.AsyncVectorEnv(
        [partial(Holder, table, i) for i in range(4)], num_workers=2, restart=restart
    ) as envs:
        assert len(memory_of_the_parent()) == 1
        await envs.reset()
        table[:] = -1
        os.kill(envs.workers[1].pid, 9)
        await envs.step(ACTIONS)
        await envs.step(ACTIONS)
        assert await envs.call("ask", first) == (0.0,) * 4
    assert memory_of_the_parent() == []


@linux
@pytest.mark.asyncio
async def test_a_vector_env_that_never_starts_lets_go_of_the_memory():
    envs = aioenv.AsyncVectorEnv([partial(Holder, np.arange(100_000.0))])
    assert len(memory_of_the_parent()) == 1
    await envs.close()
    del envs
    assert memory_of_the_parent() == []
    with pytest.raises(TypeError, match=r"env_fns\[1\] can't be sent"):
        aioenv.AsyncVectorEnv([partial(Holder, np.arange(100_000.0)), partial(Holder, threading.Lock())])
    assert memory_of_the_parent() == []


@linux
@pytest.mark.asyncio
async def test_a_start_that_fails_lets_go_of_the_memory():
    def raises(table):
        raise RuntimeError("no env")

    with pytest.raises(aioenv.WorkerStartError, match="no env"):
        await aioenv.AsyncVectorEnv([partial(raises, np.arange(100_000.0))])
    assert memory_of_the_parent() == []


def code_of(factories: list[Any], workers: int) -> list[Code]:
    spans = np.array_split(np.arange(len(factories)), workers)
    made = CodeSnapshot(factories, [(int(span[0]), int(span[-1]) + 1) for span in spans])
    codes = [made.code(worker) for worker in range(workers)]
    return codes


def test_workers_whose_factories_name_the_same_definitions_get_the_same_bytes():
    def make(i):
        return Holder(i)

    codes = code_of([partial(make, i) for i in range(8)], 4)
    assert len({id(code.definitions) for code in codes}) == 1
    assert len({id(code.factories) for code in codes}) == 4
    codes = code_of([make] * 8, 4)
    assert len({id(code.factories) for code in codes}) == 1
    assert codes[0].pattern == (0, 0)


def test_a_worker_gets_what_its_own_factories_reach():
    def left():
        return Holder("left")

    def right():
        return Holder("right")

    codes = code_of([left, left, right, right], 2)
    assert b"left" in codes[0].definitions.pickles and b"right" not in codes[0].definitions.pickles
    assert b"right" in codes[1].definitions.pickles and b"left" not in codes[1].definitions.pickles


SCRIPT = """
import sys
import numpy as np
import gymnasium as gym
import aioenv.sync as sync
import heavy


class Plain(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {}

    def loaded(self):
        return "heavy" in sys.modules

    def ask(self, function, *args):
        return function(self, *args)

    def kind(self, thing):
        return type(thing).__name__, isinstance(thing, type(self).expected) if hasattr(type(self), "expected") else None


class Goal:
    def __init__(self, number):
        self.number = number


class Heavy(Plain):
    expected = Goal

    def step(self, action):
        return 0, heavy.VALUE, False, False, {}


def number(env, goal):
    return goal.number, type(goal) is Goal, sys.modules["__main__"].Goal is Goal


class Later:
    goal = Goal

    def __init__(self):
        self.other = Goal(5)


class Latest(Later):
    def answer(self):
        return Goal(self.other.number + 1).number


def answer(env, latest):
    return latest.answer(), type(latest.other) is Goal, type(latest).__mro__[1] is Later, Later.goal is Goal


with sync.VectorEnv([Heavy, Heavy, Plain, Plain], num_workers=2) as envs:
    envs.reset()
    print(envs.call("loaded"))
    print(envs.call("kind", Goal(1)))
    print(envs.call("ask", number, Goal(2)))
    print(envs.call("ask", answer, Latest()))
    print(envs.call("ask", number, Goal(3)))
    print(envs.call("ask", answer, Latest()))
"""


def test_a_worker_imports_only_what_its_own_factories_need(tmp_path):
    (tmp_path / "heavy.py").write_text("VALUE = 3.0\n")
    done = run_script(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded, kinds, *rest = done.stdout.splitlines()
    assert loaded == "(True, True, False, False)"
    assert kinds == "(('Goal', True), ('Goal', True), ('Goal', None), ('Goal', None))"
    assert rest[0] == rest[2].replace("3", "2") == str(((2, True, True),) * 4)
    assert rest[1] == rest[3] == str(((6, True, True, True),) * 4)


MANY = """
import gymnasium as gym
import aioenv.sync as sync


class Env(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(999)
    made = []

    def __init__(self, number):
        self.number = number
        Env.made.append(number)

    def reset(self, *, seed=None, options=None):
        return self.number, {}

    def step(self, action):
        return self.number, 0.0, False, False, {}


with sync.VectorEnv([lambda i=i: Env(i) for i in range(64)], num_workers=4) as envs:
    print(envs.reset()[0].tolist() == [*range(64)])
    print([len(made) for made in envs.get_attr("made")][::16])
"""


def test_each_of_many_lambdas_makes_its_own_env(tmp_path):
    done = run_script(tmp_path, MANY)
    assert done.stdout.splitlines() == ["True", "[16, 16, 16, 16]"], done.stdout + done.stderr


def test_defaults_that_cannot_be_sent_are_errors_where_they_are_used(tmp_path):
    code = (
        MANY.replace(
            "import gymnasium as gym\n", "import threading\nimport gymnasium as gym\nLOCK = threading.Lock()\n"
        )
        .replace(
            "def __init__(self, number):",
            "def __init__(self, number, lock=LOCK, *, more=LOCK):\n        self.lock = lock",
        )
        .replace("    def step", "    def locked(self):\n        return self.lock.locked()\n\n    def step")
        + "    try:\n        envs.call('locked')\n    except Exception as exc:\n        print(exc)\n"
    )
    done = run_script(tmp_path, code)
    assert done.stdout.startswith("True\n"), done.stdout + done.stderr
    assert re.search(r"UnsendableError: Env\.__init__\.__defaults__\[0\], could not be sent .*lock", done.stdout)


KEPT = """
import gc
import weakref

import gymnasium as gym
import numpy as np

import aioenv.sync as sync


class Env(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(9)
    seen = weakref.WeakSet()

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {}

    def use(self, function):
        Env.seen.add(function)
        return function()

    def alive(self):
        gc.collect()
        return len(Env.seen)


class Later:
    number = 4


def make(array):
    return lambda: (float(array.sum()), Later().number, Later)


here = weakref.WeakSet()
with sync.VectorEnv([Env] * 2, **OPTIONS) as envs:
    envs.reset()
    for index in range(5):
        function = make(np.full(3, index))
        here.add(function)
        results = envs.call("use", function)
        assert results == ((3.0 * index, 4, Later),) * 2, results
        del function
    gc.collect()
    print(len(here), max(envs.call("alive")))
"""


@pytest.mark.parametrize("options", ["{'num_workers': 2}", "{'debug': True}"], ids=["processes", "debug"])
def test_functions_in_messages_are_not_kept(options, tmp_path):
    done = run_script(tmp_path, KEPT.replace("**OPTIONS", f"**{options}"))
    assert done.stdout == "0 0\n", done.stdout + done.stderr
