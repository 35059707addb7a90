"""Which versions of the libraries a test needs: on older ones it is skipped, and says why."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

from aioenv.requirements import has_batch


def version_of(name: str) -> tuple[int, int]:
    """The first two numbers of a library's version."""
    major, minor = re.match(r"(\d+)\.(\d+)", metadata.version(name)).groups()
    return int(major), int(minor)


def needs(name: str, least: str) -> pytest.MarkDecorator:
    """Mark tests of what older versions of a library don't have."""
    wanted = tuple(map(int, least.split(".")))
    return pytest.mark.skipif(version_of(name) < wanted, reason=f"{name} has it from {least} on")


def needs_gymnasium(least: str) -> pytest.MarkDecorator:
    """Mark tests of what older versions of Gymnasium don't have."""
    return needs("gymnasium", least)


_NO_BATCH = "MuJoCo has mujoco.batch from 3.17 on"
needs_mujoco_batch = pytest.mark.skipif(not has_batch(), reason=_NO_BATCH)


def skip_module_without_batch() -> None:
    """Skip a whole module of tests of native MuJoCo tasks, before it imports them."""
    if not has_batch():
        pytest.skip(_NO_BATCH, allow_module_level=True)
