"""For tests of code that uses aioenv: an env with faults, and a check that nothing is left behind."""

from __future__ import annotations

from aioenv.testing.faulty_env import FAULTS, MOMENTS, FaultyEnv, faulty_envs
from aioenv.testing.leak_check import LeakError, leak_check

__all__ = ["FAULTS", "MOMENTS", "FaultyEnv", "LeakError", "faulty_envs", "leak_check"]
