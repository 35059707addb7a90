"""Kit for tests of pages: a page, its snippets, and whether the names on it exist."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import aioenv

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """The text of a page, by its path from the root of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def snippets(text: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", text, re.S)


async def cell(code: str, names: dict) -> None:
    """Run a snippet as a notebook runs a cell."""
    outcome = eval(compile(code, "a snippet", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.isawaitable(outcome):
        await outcome


def check_names(text: str, *, but: frozenset[str] | set[str] = frozenset()) -> set[str]:
    """Fail if a text names something of `aioenv`, or of `envs`, that is not there; the names of `aioenv` in it."""
    named = set(re.findall(r"\baioenv(?:\.[A-Za-z_]\w*)+", text)) - but
    adapters = ""  # the source of those that it names
    for name in sorted(named):
        parts = name.split(".")
        if parts[1] == "adapters" and len(parts) > 2:  # its library may be missing, and takes seconds to import
            spec = importlib.util.find_spec(".".join(parts[:3]))
            assert spec is not None and spec.origin is not None
            adapters += Path(spec.origin).read_text(encoding="utf-8")
            continue
        with contextlib.suppress(ImportError):
            for end in range(2, len(parts) + 1):
                importlib.import_module(".".join(parts[:end]))
        value = aioenv
        for part in parts[1:]:
            value = getattr(value, part)
    for name in set(re.findall(r"(?<!-)\benvs\.(\w+)", text)) - {"num_envs"}:
        known = hasattr(aioenv.AsyncVectorEnv, name) or hasattr(aioenv.envs, name)
        assert known or re.search(rf"\b(?:def |self\.){name}\b", adapters), name
    return named
