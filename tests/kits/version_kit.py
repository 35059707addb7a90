"""Which versions of the libraries a test needs: on older ones it is skipped, and says why."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import Any

import pytest

from aioenv.requirements import has_batch, require_batch


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


NO_BATCH = "MuJoCo has mujoco.batch from 3.17 on"
needs_mujoco_batch = pytest.mark.skipif(not has_batch(), reason=NO_BATCH)


def native_task(module: str, name: str) -> type:
    """A task of ours, to derive a class from; without batches, what fails to be made."""
    return getattr(importlib.import_module(f"aioenv.native.tasks.{module}"), name) if has_batch() else NoTask


class NoTask:
    """Stands in for a native task where MuJoCo has no batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_batch()


def lacks_batch(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """Whether a test, or a module, failed since there are no native MuJoCo tasks on this MuJoCo."""
    return report.failed and not has_batch() and "needs mujoco >= 3.17" in report.longreprtext
