"""Ways to name an env, workers that are started again, modules by value, processes that envs start."""

import functools
import multiprocessing
import os
import re
import signal
import sys
from pathlib import Path

import cloudpickle
import gymnasium as gym

import aioenv
from aioenv import sync
from tests.definitions.script_checks import (
    DEBUG,
    Plain,
    Skip,
    ask,
    check,
    counts,
    equal,
    main,
    options,
    raised,
    text_of,
    vector_env,
)

with open("runs.txt", "a") as runs:
    runs.write("run\n")

# ------------------------------------------------------------ Gymnasium's registry


class Counted(Plain):
    made = 0

    def __init__(self):
        Counted.made += 1
        self.number = Counted.made


class CountedByName(Plain):
    made = 0

    def __init__(self):
        CountedByName.made += 1
        self.number = CountedByName.made

    def kind(self):
        return type(self)


class CountedInMakeVec(CountedByName):
    pass


class CountedByAFunction(Plain):
    made = 0

    def __init__(self):
        CountedByAFunction.made += 1
        self.number = CountedByAFunction.made


class CountedByBoth(Plain):
    made = 0

    def __init__(self):
        CountedByBoth.made += 1
        self.number = CountedByBoth.made


def make_counted():
    return CountedByAFunction()


gym.register("ByClass-v0", entry_point=Counted, disable_env_checker=True)
gym.register("ByName-v0", entry_point="__main__:CountedByName", disable_env_checker=True)
gym.register("ByFunction-v0", entry_point=make_counted, disable_env_checker=True)
gym.register("Both-v0", entry_point="__main__:CountedByBoth", disable_env_checker=True)


@check
def registered_class():
    with sync.make_vec("ByClass-v0", 4, **options()) as envs:
        equal(envs.call("number"), counts())


@check
def registered_name():
    CountedByName.made = 10
    with sync.make_vec("ByName-v0", 4, **options()) as envs:
        equal(envs.call("number"), counts(11))
        assert envs.call("kind")[0] is CountedByName


@check
def registered_function():
    with vector_env([lambda: gym.make("ByFunction-v0") for _ in range(4)]) as envs:
        equal(envs.call("number"), counts())


@check
def registered_name_and_the_class():
    factories = [CountedByBoth, lambda: gym.make("Both-v0"), functools.partial(gym.make, "Both-v0")]
    equal(ask([*factories, aioenv.EnvCreator("Both-v0")], "number"), counts())


# ------------------------------------------------------------ one env in two slots


class Cached(Plain):
    pass


@functools.cache
def make_cached():
    return Cached()


ONLY = Cached()


def names_both(factories):
    text = str(raised(lambda: vector_env(factories, 1).close(), Exception))
    assert re.search(r"slots?\b.*\b0\b.*\b1\b", text), text


@check
def cached_env():
    names_both([make_cached] * 2)


@check
def cached_env_under_a_wrapper():
    names_both([lambda: gym.wrappers.TimeLimit(make_cached(), 5)] * 2)


@check
def env_that_is_a_global():
    names_both([lambda: ONLY, lambda: ONLY])


# ------------------------------------------------------------ workers that are started again

LIMIT = 1


class Limited(Plain):
    limit = 1

    def __init__(self, config=None):
        self.config = config

    def limits(self):
        return LIMIT, Limited.limit, limit_of_a_function(), self.config


def limit_of_a_function():
    return LIMIT


@check
def restarted_worker_has_the_same_definitions():
    global LIMIT
    if DEBUG:
        raise Skip("a thread can't be killed")
    config = {"limit": 1}
    with vector_env([functools.partial(Limited, config)] * 2, 1, restart=aioenv.RestartPolicy()) as envs:
        envs.reset()
        LIMIT = Limited.limit = config["limit"] = 2
        equal(envs.call("limits"), ((1, 1, 1, {"limit": 1}),) * 2)
        pid = envs.workers[0].pid
        os.kill(pid, signal.SIGKILL)
        equal(envs.step([0, 0])[3].tolist(), [True, True])
        assert envs.workers[0].pid != pid
        equal(envs.call("limits"), ((1, 1, 1, {"limit": 1}),) * 2)
    equal(ask([functools.partial(Limited, config)], "limits", workers=1), ((2, 2, 2, {"limit": 2}),))


class Restarted(Plain):
    made = 0

    def __init__(self):
        Restarted.made += 1
        self.number = Restarted.made

    def kind(self):
        return type(self)


@check
def restarted_worker_counts_from_the_start():
    if DEBUG:
        raise Skip("a thread can't be killed")
    with vector_env([Restarted] * 2, 1, restart=aioenv.RestartPolicy()) as envs:
        envs.reset()
        for _ in range(2):
            os.kill(envs.workers[0].pid, signal.SIGKILL)
            envs.step([0, 0])
            equal(envs.call("number"), (1, 2))
            assert envs.call("kind")[0] is Restarted


# ------------------------------------------------------------ modules by value

BY_VALUE = """
import pickle

from tests.definitions.script_checks import Plain

MADE = []
COUNT = 0


def helper():
    return "module"


class Data:
    pass


class Env(Plain):
    made = 0

    def __init__(self):
        global COUNT
        COUNT += 1
        Env.made += 1
        MADE.append(self)
        self.numbers = len(MADE), Env.made, count()

    def seen(self):
        namespace = globals()
        return helper(), __name__, namespace is count.__globals__, namespace["helper"] is helper

    def data(self):
        return Data()

    def is_data(self, value):
        return isinstance(value, Data)


def count():
    return COUNT
"""


def helper():
    return "script"


def by_value():
    """A module that workers can't import."""
    name = "by_value_module"
    if name not in sys.modules:
        Path("modules").mkdir()
        Path("modules", f"{name}.py").write_text(BY_VALUE)
        sys.path.insert(0, "modules")
        __import__(name)
        sys.path.remove("modules")
        cloudpickle.register_pickle_by_value(sys.modules[name])
    return sys.modules[name]


class Both(Plain):
    """Of the script, beside the module's."""

    def seen(self):
        return helper(), __name__


@check
def state_of_a_module_by_value():
    module = by_value()
    made = len(module.MADE)
    equal(ask([module.Env] * 4, "numbers"), tuple((made + n,) * 3 for n in counts()))


@check
def names_of_a_module_by_value_and_of_the_script():
    module = by_value()
    module_seen = ("module", "by_value_module", True, True)
    equal(
        ask([module.Env, Both, lambda: module.Env()], "seen", workers=1),
        (module_seen, ("script", "__main__"), module_seen),
    )


@check
def instances_of_a_module_by_value():
    module = by_value()
    with vector_env([module.Env] * 2, 1) as envs:
        module.Data.limit = 9
        equal(envs.call("is_data", module.Data()), (True, True))
        got = envs.call("data")
        equal(([type(data) is module.Data for data in got], module.Data.limit), ([True, True], 9))


# ------------------------------------------------------------ processes that an env starts


def leave(code):
    sys.exit(code)


class Starts(Plain):
    def start(self, method):
        process = multiprocessing.get_context(method).Process(target=leave, args=(7,))
        process.start()
        process.join(60)
        return process.exitcode

    def start_of_a_module(self, method):
        process = multiprocessing.get_context(method).Process(target=os.getcwd)
        process.start()
        process.join(60)
        return process.exitcode


def starts(name, method):
    if DEBUG:
        raise Skip("it starts processes of the script itself")
    with vector_env([Starts], 1) as envs:
        return envs.call(name, method)


def refused(method):
    text = text_of(raised(lambda: starts("start", method)))
    equal([word for word in ("fork", "module", method) if word not in text], [])
    assert "attribute lookup" not in text and "bootstrapping" not in text, text
    script_has_run_once()


@check
def process_by_spawn():
    refused("spawn")


@check
def process_by_a_fork_server():
    refused("forkserver")


@check
def process_by_fork():
    equal(starts("start", "fork"), (7,))


@check
def process_by_spawn_of_a_modules_function():
    equal(starts("start_of_a_module", "spawn"), (0,))
    script_has_run_once()


@check
def script_has_run_once():
    equal(Path("runs.txt").read_text(), "run\n")


main()
