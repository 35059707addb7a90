"""`make ecosystem` names the environment that the tests run in; elsewhere they are skipped."""

from __future__ import annotations

import os
from multiprocessing import resource_tracker

import pytest

from tests.ecosystem.environments import ENVIRONMENTS

HERE = os.environ.get("AIOENV_ECOSYSTEM", "")

if HERE:
    resource_tracker.ensure_running()  # Gymnasium's AsyncVectorEnv starts it, and it stays


def pytest_generate_tests(metafunc):
    """Give each test that asks for a `task` those of this environment."""
    if "task" in metafunc.fixturenames:
        tasks = ENVIRONMENTS[HERE].tasks if HERE else []
        metafunc.parametrize("task", [pytest.param(task, id=task.label) for task in tasks])


def pytest_collection_modifyitems(items):
    """Leave them to their own command."""
    for item in items:
        if item.path.is_relative_to(os.path.dirname(__file__)):
            item.add_marker(pytest.mark.ecosystem)
