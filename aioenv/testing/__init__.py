"""Tools for tests of code that uses aioenv: an env with faults, the contract of vector envs, and a leak check."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aioenv.testing.faulty_env import FAULTS, MOMENTS, FaultyEnv, faulty_envs
from aioenv.testing.leak_check import LeakError, leak_check

if TYPE_CHECKING:
    from aioenv.testing.contract import VectorEnvContract as VectorEnvContract

__all__ = ["FAULTS", "MOMENTS", "FaultyEnv", "LeakError", "VectorEnvContract", "faulty_envs", "leak_check"]


if not TYPE_CHECKING:  # type checkers would take any name for an existing one

    def __getattr__(name: str) -> Any:
        # imported on first use: a worker with a FaultyEnv imports this package, and must not import asyncio
        if name == "VectorEnvContract":
            return importlib.import_module("aioenv.testing.contract").VectorEnvContract
        raise AttributeError(f"module 'aioenv.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
