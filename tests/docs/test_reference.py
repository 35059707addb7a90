"""The page "Reference": every public name is on it, and says something."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import aioenv
from tests.kits.process_kit import run_alone

SCRIPT = Path(__file__).parents[2] / "docs" / "reference.py"


def reference():
    spec = importlib.util.spec_from_file_location("reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_there_and_says_something():
    module = reference()
    page = module.page()
    parts = re.split(r"^###+ (.+)\n", page, flags=re.MULTILINE)
    text = dict(zip(parts[1::2], parts[2::2], strict=True))
    names = [(module_name, importlib.import_module(module_name)) for module_name in module.MODULES]
    for module_name, home in names:
        for name in home.__all__:
            value = getattr(home, name)
            if inspect.ismodule(value) or name == "__version__":
                continue
            assert f"{module_name}.{name}" in text or getattr(aioenv, name, None) is value, name
    for heading, said in text.items():
        if not heading.startswith("Errors of"):
            assert re.sub(r"```.*?```|\(attribute\)", "", said, flags=re.DOTALL).strip(), f"{heading} says nothing"
    assert {"aioenv.AsyncVectorEnv.step", "aioenv.sync.VectorEnv.step", "aioenv.WorkerDied"} <= text.keys()
    assert "**Raises**\n\n- `ActionError`: if" in text["aioenv.AsyncVectorEnv.step"]
    assert " at 0x" not in page


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
        "print([name for name in dir(aioenv) if name[0] != '_' and name not in aioenv.__all__])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['adapters', 'envs', 'stats', 'testing']\n", done.stdout + done.stderr


def test_a_name_stays_what_it_is():
    """A module of the same name takes its place in the package when it is imported."""
    code = """
    import importlib, inspect
    for module in ("aioenv", "aioenv.sync", "aioenv.stats", "aioenv.envs", "aioenv.testing"):
        home = importlib.import_module(module)
        for name in home.__all__:
            first = getattr(home, name)
            assert getattr(home, name) is first, f"{module}.{name}"
            assert not inspect.ismodule(first) or first.__name__ == "aioenv.sync", f"{module}.{name}"
    """
    run_alone(code)
