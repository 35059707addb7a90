"""Interfaces of other libraries over a vector env. Each needs its library, and is imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aioenv.requirements import check_requirements

if TYPE_CHECKING:
    from aioenv.adapters import gymnasium as gymnasium
    from aioenv.adapters import rsl_rl as rsl_rl
    from aioenv.adapters import sb3 as sb3
    from aioenv.adapters import tianshou as tianshou
    from aioenv.adapters import torch as torch
    from aioenv.adapters import torchrl as torchrl

__all__ = ["gymnasium", "rsl_rl", "sb3", "tianshou", "torch", "torchrl"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            check_requirements()
            return importlib.import_module(f"aioenv.adapters.{name}")
        raise AttributeError(f"module 'aioenv.adapters' has no attribute {name!r}")
