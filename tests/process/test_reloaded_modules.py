"""Modules that this process has loaded anew: workers that are made then have the new code, those that live the old."""

from __future__ import annotations

import importlib
import os
import sys

import pytest

import aioenv
from aioenv.process.forkserver import AVAILABLE
from tests.kits.process_kit import run_alone

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not AVAILABLE, reason="no fork server on this platform"),
    pytest.mark.usefixtures("own_fork_server"),
]

SOURCE = """
import os
import gymnasium as gym

class Edited(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def version(self):
        return 1

    def server(self):
        return os.getppid()
"""


def write(path, version: int) -> None:
    """Another length and another time: no bytecode of the version before stands in for it."""
    path.write_text(SOURCE.replace("return 1", f"return {version}"))
    os.utime(path, (version, version))


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """A module of the user's, and its file."""
    path = tmp_path / "edited_env.py"
    write(path, 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("edited_env"), path
    sys.modules.pop("edited_env", None)


@pytest.mark.parametrize("how", ["reload", "import anew"])
async def test_code_that_was_loaded_anew_is_the_workers_too(edited, how):
    module, path = edited
    async with aioenv.make_vec(module.Edited, 2, num_workers=2) as old:
        write(path, 222)
        if how == "reload":
            importlib.reload(module)
        else:
            del sys.modules["edited_env"]
            module = importlib.import_module("edited_env")
        async with aioenv.make_vec(module.Edited, 2, num_workers=2) as new:
            assert await new.call("version") == (222, 222)
            assert len(set(await new.call("server"))) == 1, "one server for both"
            assert set(await new.call("server")).isdisjoint(await old.call("server"))
        assert await old.call("version") == (1, 1)


async def test_a_file_that_was_edited_alone_changes_nothing(edited):
    """A training run makes a vector env to evaluate with, while the code of the next one is edited."""
    module, path = edited
    async with aioenv.make_vec(module.Edited, 1) as old:
        write(path, 222)
        async with aioenv.make_vec(module.Edited, 1) as new:
            assert await new.call("version") == (1,)
            assert await new.call("server") == await old.call("server")


async def test_modules_that_came_since_may_be_loaded_anew_too(edited):
    module, path = edited
    del sys.modules["edited_env"]
    async with aioenv.make_vec("CartPole-v1", 1):
        module = importlib.import_module("edited_env")
        async with aioenv.make_vec(module.Edited, 1):
            write(path, 222)
            importlib.reload(module)
            async with aioenv.make_vec(module.Edited, 1) as new:
                assert await new.call("version") == (222,)


async def test_what_ipythons_autoreload_has_patched(tmp_path):
    """It puts new code into functions as they are, in a notebook in which the old vector env still lives."""
    pytest.importorskip("IPython")
    write(tmp_path / "edited_env.py", 1)
    done = run_alone(
        """
        import os, sys
        from IPython.core.interactiveshell import InteractiveShell
        source, path = sys.argv[1:]
        sys.path.insert(0, os.path.dirname(path))
        shell = InteractiveShell.instance()
        def run(cell):
            assert shell.run_cell(cell).success
        run("%load_ext autoreload")
        run("%autoreload 2")
        run("from edited_env import Edited")
        run("from aioenv import sync")
        run("envs = sync.make_vec(Edited, 2, num_workers=2)")
        with open(path, "w") as file:
            file.write(source.replace("return 1", "return 222"))
        os.utime(path, (222, 222))
        run("envs = sync.make_vec(Edited, 2, num_workers=2)")
        run("print(Edited().version(), envs.call('version'))")
        run("envs.close()")
        """,
        SOURCE,
        str(tmp_path / "edited_env.py"),
    )
    assert done.stdout.split("\n")[-2] == "222 (222, 222)"
