"""For tests of code that uses aioenv: a check that nothing is left behind."""

from __future__ import annotations

from aioenv.testing.leak_check import LeakError, leak_check

__all__ = ["LeakError", "leak_check"]
