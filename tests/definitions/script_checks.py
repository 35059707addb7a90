"""What the scripts in `scripts/` share: each has checks, and reports what became of them.

`script_kit.run_checks` runs such a script.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import traceback

import gymnasium as gym

import aioenv
from aioenv import sync

START = os.environ["SCRIPT_START"]  # "forkserver", "spawn" or "debug"
DEBUG = START == "debug"

_checks = []


def check(function):
    """Mark a function as a check: it raises if something is wrong."""
    _checks.append((function.__name__, function))
    return function


def options(workers=2):
    """With `debug=True` there is one worker, a thread: two would make envs in any order, in the same process."""
    return {"debug": True, "num_workers": 1} if DEBUG else {"start": START, "num_workers": workers}


def vector_env(factories, workers=2, **more):
    return sync.VectorEnv(factories, **options(workers), **more)


def counts(first=1):
    """What four envs count that are made in a process of four, or in two of two."""
    return tuple(first + i for i in ((0, 1, 2, 3) if DEBUG else (0, 1, 0, 1)))


def equal(got, expected):
    assert got == expected, f"got {got!r}, expected {expected!r}"


def ask(factories, name, *args, workers=2):
    """Make a vector env, reset it, and call a method of its envs."""
    with vector_env(factories, workers) as envs:
        envs.reset()
        return envs.call(name, *args)


def infos(factories, workers=1):
    """The infos of one step, of one key: a column of each."""
    with vector_env(factories, workers) as envs:
        envs.reset()
        return envs.step([0] * len(factories))[4]


def same_again(value):
    return pickle.loads(pickle.dumps(value))


def text_of(exc):
    """An error's message, with the traceback of the worker and the notes."""
    return "\n".join([str(exc), getattr(exc, "traceback", ""), *getattr(exc, "__notes__", ())])


def raised(function, kind=aioenv.AioenvError):
    """What a function raises."""
    try:
        got = function()
    except kind as exc:
        return exc
    raise AssertionError(f"expected {kind.__name__}, got {got!r}")


class Plain(gym.Env):
    """A base of envs that a module defines."""

    observation_space = action_space = gym.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {}


class Numbered(type):
    """A metaclass that is told a number."""

    def __new__(cls, name, bases, attributes, number=None):
        assert "number" in attributes or number is not None, "it has no number"
        return super().__new__(cls, name, bases, {"number": number, **attributes})

    def __init__(cls, name, bases, attributes, number=None):
        super().__init__(name, bases, attributes)


class OfModule(metaclass=Numbered, number=0):
    """A base of classes that must have a number."""


class Skip(Exception):
    """A check can't be made here."""


def _outcome(function):
    try:
        if inspect.iscoroutinefunction(function):
            aioenv.run(function())
        else:
            function()
    except Skip as exc:
        return f"skip: {exc}"
    except BaseException:
        return traceback.format_exc()
    return "ok"


def main():
    """Run every check. The report says of each "ok", "skip: why", or the traceback."""
    report = {}
    with vector_env([Plain], 1):  # the fork server lasts as long as a vector env that uses it: one for all checks
        for name, function in _checks:
            report[name] = _outcome(function)
    with open(os.environ["SCRIPT_REPORT"], "w") as file:
        json.dump(report, file)
