"""The reference: every public name is in it, and says something."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys

import aioenv
from tests.docs.pages import installed, reference_names
from tests.kits.process_kit import run_alone

MODULES = ("aioenv", "aioenv.sync", "aioenv.stats", "aioenv.envs", "aioenv.testing", "aioenv.wrappers")


def test_every_public_name_is_in_the_reference_once():
    names = {module: names for module, names in reference_names().items() if not module.startswith("aioenv.adapters")}
    objects = [getattr(importlib.import_module(module), name) for module in names for name in names[module]]
    assert len(objects) == len({id(value) for value in objects})
    for module in MODULES:
        home = importlib.import_module(module)
        for name in home.__all__:
            value = getattr(home, name)
            if not inspect.ismodule(value) and name != "__version__":
                assert any(value is other for other in objects), f"{module}.{name}"


def test_every_public_name_says_something():
    for module, names in reference_names().items():
        if not installed(module):
            continue
        for name in names:
            value = getattr(importlib.import_module(module), name)
            assert inspect.getdoc(value), f"{module}.{name}"
            members = vars(value) if inspect.isclass(value) else {}
            for member, function in members.items():
                if inspect.isfunction(function) and not member.startswith("_"):
                    assert inspect.getdoc(getattr(value, member)), f"{module}.{name}.{member}"


def test_every_class_tells_its_arguments():
    """`inspect` must find them, as notebooks and editors do."""
    for name in aioenv.__all__:
        value = getattr(aioenv, name)
        if inspect.isclass(value) and not issubclass(value, BaseException):
            inspect.signature(value)
    assert "max_episode_steps" in str(inspect.signature(aioenv.EnvCreator("CartPole-v1", max_episode_steps=3)))


def test_what_the_package_shows_is_what_it_has():
    code = (
        "import aioenv; aioenv.stats.EpisodeStats, aioenv.envs.ActorID, aioenv.testing.leak_check, aioenv.adapters;"
        "import aioenv.wrappers;"
        "print([name for name in dir(aioenv) if name[0] != '_' and name not in aioenv.__all__])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['adapters', 'envs', 'stats', 'testing', 'wrappers']\n", done.stdout + done.stderr


def test_a_name_stays_what_it_is():
    """A module of the same name takes its place in the package when it is imported."""
    code = """
    import importlib, inspect
    for module in ("aioenv", "aioenv.sync", "aioenv.stats", "aioenv.envs", "aioenv.testing", "aioenv.wrappers"):
        home = importlib.import_module(module)
        for name in home.__all__:
            first = getattr(home, name)
            assert getattr(home, name) is first, f"{module}.{name}"
            assert not inspect.ismodule(first) or first.__name__ == "aioenv.sync", f"{module}.{name}"
    """
    run_alone(code)
