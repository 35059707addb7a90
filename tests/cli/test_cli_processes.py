"""Processes that commands start: what lies in the working directory, and where that is, does not matter to them."""

from __future__ import annotations

import os
import sys

import gymnasium
import pytest

from aioenv.cli import arguments, contenders, processes
from aioenv.cli.contenders import Workload
from aioenv.cli.opengl import probe_opengl
from aioenv.process.launch import START_METHODS
from benchmarks.metrics import REGISTRY
from tests.kits.cli_kit import needs_opengl


def run_contender(name, workload):
    return contenders.run_contender(name, workload, REGISTRY)


MINE = """
import random, sys
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

assert random.random() < 1

gymnasium.register("SpareOfHere-v0", entry_point=CartPoleEnv)
"""


@pytest.fixture(params=["plain", "with:colon"])
def shadowed(request, tmp_path, monkeypatch):
    """A working directory with a module of one's own, and one that is named as one of the standard library."""
    (place := tmp_path / request.param).mkdir()
    (place / "spare_of_here.py").write_text(MINE)
    for name in ("random", "tempfile", "selectors"):
        (place / f"{name}.py").write_text("raise SystemExit('it is my own')")
    monkeypatch.chdir(place)
    yield
    sys.modules.pop("spare_of_here", None)
    gymnasium.registry.pop("SpareOfHere-v0", None)


CONTENDERS = ["aioenv", "gymnasium-async", "bare-lockstep", "startup: gymnasium-forkserver"]


@pytest.mark.parametrize("name", [*CONTENDERS, f"startup: aioenv-{START_METHODS[0]}"])
def test_contenders_find_modules_of_the_working_directory_and_the_standard_library(name, shadowed):
    result = run_contender(name, Workload("spare_of_here:SpareOfHere-v0", 2, 0.01, warm_up_s=0.01))
    assert result.get("env_steps") or result["ready s"] > 0


def test_a_working_directory_that_is_gone_is_none(tmp_path, monkeypatch):
    (place := tmp_path / "gone").mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    assert run_contender("bare", Workload("noop", 1, 0.01, warm_up_s=0.01))["env_steps"] > 0


@needs_opengl
def test_opengl_is_tried_without_what_lies_in_the_working_directory(shadowed):
    assert probe_opengl("egl").renderer or probe_opengl("osmesa").renderer


def test_a_module_that_is_named_for_a_command_leaves_the_standard_library_alone(shadowed, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())])
    monkeypatch.delitem(sys.modules, "random")
    arguments.import_here("spare_of_here")
    assert sys.path.index("") > sys.path.index(os.path.dirname(os.__file__))
    before = processes.standard_library_end(["/bin", "/usr/lib/python3.14", "/usr/lib/python3.14/lib-dynload", "/more"])
    assert before == 3 and processes.standard_library_end([]) == 0
