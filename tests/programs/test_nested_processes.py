"""Processes that envs start with multiprocessing: the user's script does not run a second time for them."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.machinery
import multiprocessing
import operator
import os
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import errors, sync
from aioenv.process.launch import START_METHODS
from tests.kits.process_kit import environment

LONG_S = 30.0  # nothing here takes so long unless it hangs
SPAWNED = ("spawn", "forkserver")
DEFINITIONS = """
import enum, functools

def work(x):
    return 10 * x

@functools.lru_cache
def cached(x):
    return 10 * x

class Data:
    def __init__(self, x=0):
        self.x = x

    def work(self):
        return 10 * self.x

class Colour(enum.Enum):
    RED = 1
"""
SCRIPT = f"""
with open({{marker!r}}, "a") as marker:
    marker.write(__name__)
{DEFINITIONS}
"""


def tell(queue, function, *args):
    """In a process: the value of a function, and what there is of a script."""
    queue.put((function(*args), hasattr(sys.modules["__main__"], "work")))


def double(x):
    return 2 * x


class Nests(gym.Env):
    """Starts processes. Its worker's `__main__` has what a script defines, and says where that lies."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, script=None, module=None):
        self.main = sys.modules["__main__"]
        self.kept = []
        if script is not None:
            self.main.__file__ = script
        if module is not None:
            self.main.__spec__ = importlib.machinery.ModuleSpec(module, None)
        exec(DEFINITIONS, vars(self.main))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def modules(self):
        """Those of multiprocessing that starting a process imports."""
        names = ("spawn", "popen_spawn_posix", "popen_forkserver", "forkserver", "pool")
        return [name for name in names if f"multiprocessing.{name}" in sys.modules]

    def of(self, what):
        """Something that refers to the script, by its name here."""
        main = self.main
        return {
            "double": double,
            "work": main.work,
            "cached": main.cached,
            "lambda": eval("lambda x: x", vars(main)),
            "partial": functools.partial(main.work),
            "method": main.Data(4).work,
            "class": main.Data,
            "instance": main.Data(4),
            "member": main.Colour.RED,
            "list": [main.Data],
        }[what]

    def process(self, method, what):
        """Run a function in a process of its own."""
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=tell, args=(queue, self.of(what), 4))
        process.start()
        got = queue.get(timeout=LONG_S)
        process.join()
        return got

    def target(self, method, what):
        """The function is the target itself."""
        process = multiprocessing.get_context(method).Process(target=self.of(what), args=(4,))
        process.start()
        process.join()
        return process.exitcode

    def data(self, method, what):
        """What refers to the script is an argument."""
        process = multiprocessing.get_context(method).Process(target=operator.truth, args=(self.of(what),))
        process.start()
        process.join()
        return process.exitcode

    def pool(self, method, what):
        with multiprocessing.get_context(method).Pool(2) as pool:
            return pool.map_async(self.of(what), [1, 2]).get(timeout=LONG_S)

    def pool_after(self, method, what):
        """An error of one task is none of the next."""
        with multiprocessing.get_context(method).Pool(1) as pool:
            try:
                pool.apply_async(self.of(what), [1]).get(timeout=LONG_S)
            except aioenv.AioenvError as exc:
                return type(exc).__name__, pool.apply_async(double, [4]).get(timeout=LONG_S)

    def initializer(self, method, what):
        with multiprocessing.get_context(method).Pool(1, self.of(what), [1]) as pool:
            return pool.apply_async(double, [4]).get(timeout=LONG_S)

    def executor(self, method, what):
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
            return executor.submit(self.of(what), 4).result(timeout=LONG_S)

    def executor_after(self, method, what):
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
            before = executor.submit(double, 3).result(timeout=LONG_S)
            error = executor.submit(self.of(what), 4).exception(timeout=LONG_S)
            return before, type(error).__name__, executor.submit(double, 4).result(timeout=LONG_S)

    def default(self, method, what):
        """A process of whatever kind is the default."""
        multiprocessing.set_start_method(method, force=True)
        process = multiprocessing.Process(target=self.of(what), args=(4,))
        process.start()
        process.join()
        return process.exitcode

    def manager(self, method):
        with multiprocessing.get_context(method).Manager() as manager:
            return dict(manager.dict(a=1))

    def leave(self, method, kind):
        """Start processes, and forget them; gives the process group that they are in."""
        context = multiprocessing.get_context(method)
        if kind == "pool":
            pool = context.Pool(2)
            pool.map(double, [1])
            self.kept.append(pool)
        else:
            process = context.Process(target=time.sleep, args=(600,), daemon=kind == "daemon")
            process.start()
            self.kept.append(process)
        return os.getpgrp()


@pytest.fixture(params=["file", "module"])
def script(request, tmp_path, monkeypatch):
    """Arguments of `Nests`, and the file that the script writes if it is run."""
    marker, path = tmp_path / "marker", tmp_path / "the_script.py"
    path.write_text(SCRIPT.format(marker=str(marker)))
    monkeypatch.syspath_prepend(str(tmp_path))  # `python -m the_script`
    given = {"script": str(path), "module": "the_script" if request.param == "module" else None}
    return given, marker


@pytest.fixture(params=START_METHODS)
def nests(request, script):
    given, marker = script
    envs = sync.make_vec(Nests, 1, start=request.param, timeout_s=2 * LONG_S, **given)

    def call(name, *args):
        return envs.call(name, *args)[0]

    yield call
    envs.close(grace_s=LONG_S)  # a worker that is killed leaves the names of its semaphores
    assert not marker.exists(), "the script ran a second time"


def refused(call, *args):
    with pytest.raises(aioenv.EnvError) as caught:
        call(*args)
    cause = caught.value.__cause__
    assert isinstance(cause, errors.NestedProcessError), cause
    return str(cause)


@pytest.mark.parametrize("method", SPAWNED)
def test_a_module_works_as_ever(nests, method):
    assert nests("process", method, "double") == (8, False)
    assert nests("pool", method, "double") == [2, 4]
    assert nests("executor", method, "double") == 8
    assert nests("default", method, "double") == 0
    assert nests("manager", method) == {"a": 1}


@pytest.mark.parametrize("method", SPAWNED)
def test_a_function_of_the_script_is_refused_by_name(nests, method):
    message = refused(nests, "target", method, "work")
    assert message.startswith("work is defined in the script (__main__)")
    assert method in message and 'get_context("fork")' in message and "module" in message
    assert refused(nests, "process", method, "work") == message
    assert refused(nests, "default", method, "work") == message
    assert refused(nests, "initializer", method, "work") == message
    assert nests("process", method, "double") == (8, False)


@pytest.mark.parametrize("method", SPAWNED)
def test_a_pool_raises_it_too_and_does_not_hang(nests, method):
    assert refused(nests, "pool", method, "work").startswith("work is defined in the script")
    assert nests("pool_after", method, "work") == ("NestedProcessError", 8)
    assert refused(nests, "executor", method, "work").startswith("work is defined in the script")
    assert nests("executor_after", method, "work") == (6, "NestedProcessError", 8)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("cached", "cached"),
        ("lambda", "<lambda>"),
        ("partial", "work"),
        ("method", "Data"),
        ("class", "Data"),
        ("instance", "Data"),
        ("member", "Colour"),
        ("list", "Data"),
    ],
)
def test_whatever_refers_to_the_script_is_refused(what, name, tmp_path):
    given = {"script": str(tmp_path / "none.py")}
    with sync.make_vec(Nests, 1, **given) as envs:
        for method in SPAWNED:
            assert refused(envs.call, "data", method, what).startswith(f"{name} is defined in the script")


def test_fork_may_use_the_script(nests):
    for _ in range(2):
        assert nests("process", "fork", "work") == (40, True)
        assert nests("target", "fork", "method") == 1  # the method takes no argument
        assert nests("data", "fork", "instance") == 0
        assert nests("pool", "fork", "work") == [10, 20]
        assert nests("executor", "fork", "work") == 40
        assert nests("manager", "fork") == {"a": 1}
        refused(nests, "pool", "spawn", "work")  # processes that have ended change nothing for others


def test_nothing_is_imported_for_it():
    for start in START_METHODS:
        with sync.make_vec(Nests, 1, start=start) as envs:
            assert envs.call("modules")[0] == []


WHOLE = """
import multiprocessing, sys
import gymnasium as gym, numpy as np
import aioenv
from aioenv import sync

print("the script runs", flush=True)

def work(x):
    return 10 * x

class Own(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def start(self, method):
        with multiprocessing.get_context(method).Pool(1) as pool:
            return pool.map_async(work, [1, 2]).get(timeout=30)

with sync.VectorEnv([Own], start=sys.argv[1]) as envs:
    for method in ("spawn", "forkserver"):
        try:
            print(envs.call("start", method)[0])
        except aioenv.EnvError as exc:
            print(type(exc.__cause__).__name__)
"""


@pytest.mark.parametrize("start", START_METHODS)
def test_a_whole_script_without_a_guard(start, tmp_path):
    path = tmp_path / "whole.py"
    path.write_text(WHOLE)
    command = [sys.executable, str(path), start]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment())
    assert done.stdout.splitlines() == ["the script runs", "NestedProcessError", "NestedProcessError"]


def group(number):
    """Processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == number and state != "Z":
            found.append(path.parent.name)
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["process", "daemon", "pool"])
@pytest.mark.parametrize("method", SPAWNED)
@pytest.mark.parametrize("start", START_METHODS)
def test_what_an_env_forgets_ends_with_its_worker(start, method, kind):
    envs = sync.make_vec(Nests, 1, start=start)
    (number,) = envs.call("leave", method, kind)
    assert len(group(number)) >= 2
    envs.close(grace_s=0.5 if kind == "process" else LONG_S)  # only the end of its worker ends that one
    limit = time.monotonic() + 5
    while (left := group(number)) and time.monotonic() < limit:
        time.sleep(0.01)
    assert left == []


def test_this_process_is_as_it_was_with_debug():
    with sync.make_vec("CartPole-v1", 1, debug=True) as envs:
        envs.reset()
    assert not hasattr(multiprocessing.reduction.ForkingPickler, "reducer_override")
    assert multiprocessing.context.SpawnProcess._Popen.__module__ == "multiprocessing.context"
