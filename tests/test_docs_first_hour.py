"""README.md and the pages that one reads first: the snippets run, what they name exists, links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import aioenv

ROOT = Path(__file__).parent.parent
NAMES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}


class Enough(Exception):
    """A snippet's loop has gone on for long enough."""


def blocks(page):
    """The snippets of a page, with fewer slots and steps."""
    for block in re.findall(r"```python\n(.*?)```", PAGES[page], re.S):
        yield re.sub(r"\b64\b", "4", re.sub(r"\b(16|100|128|1000)\b", "3", block))


async def cell(block, names):
    """Run a snippet as a notebook runs a cell."""
    outcome = eval(compile(block, "a snippet", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.isawaitable(outcome):
        await outcome


def policy(obs, calls=[]):  # noqa: B006
    calls.append(None)
    if len(calls) > 60:
        raise Enough
    return np.zeros((len(obs), 6), np.float32)


async def test_readme_snippets_as_a_notebook(tmp_path, monkeypatch):
    names = {"aioenv": aioenv, "policy": policy, "actions": np.zeros((4, 6), np.float32), "make_it": None}
    for block in blocks("README.md"):
        if "aioenv.run(" in block:
            continue
        with contextlib.suppress(Enough):
            if "make_vec(" in block:
                await cell(block, names)
            else:
                async with aioenv.make_vec("HalfCheetah-v5", 4, debug=True) as envs:
                    await envs.reset(seed=0)
                    await cell(block, names | {"envs": envs})
        if (envs := names.pop("envs", None)) is not None and not envs.closed:
            closing = envs.close()
            if inspect.isawaitable(closing):
                await closing


test_readme_snippets_as_a_notebook = pytest.mark.asyncio(test_readme_snippets_as_a_notebook)


def test_the_first_snippet_of_the_readme():
    exec(next(blocks("README.md")), {"__name__": "__main__"})


@pytest.mark.stress  # torch and Stable-Baselines3 take seconds to import
@pytest.mark.parametrize("page", ["docs/first-hour.md", "docs/from-others.md"])
def test_snippets_for_learners(page):
    for name in ("torch", "stable_baselines3"):
        pytest.importorskip(name)
    names = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", PAGES[page], re.S):
        if "aioenv.run(" in block:
            exec(block, names)
        else:
            aioenv.run(cell(block, names))


def test_what_the_pages_name_exists():
    told = PAGES["docs/first-hour.md"] + PAGES["docs/from-others.md"] + PAGES["README.md"]
    for name in sorted(set(re.findall(r"\baioenv(?:\.[A-Za-z_]\w*)+", told)) - {"aioenv.workers"}):  # a logger
        parts = name.split(".")
        if "sb3" in parts:
            assert importlib.util.find_spec("aioenv.adapters.sb3") is not None
            continue
        with contextlib.suppress(ImportError):
            for end in range(2, len(parts) + 1):
                importlib.import_module(".".join(parts[:end]))
        value = aioenv
        for part in parts[1:]:
            value = getattr(value, part)
    for name in set(re.findall(r"(?<!-)\benvs\.(\w+)", told)):
        assert name == "num_envs" or hasattr(aioenv.AsyncVectorEnv, name) or hasattr(aioenv.envs, name), name


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", NAMES)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    for target, mark in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", PAGES[page]):
        path = (folder / target) if target else ROOT / page
        assert path.exists(), target
        if mark:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            assert mark in map(anchor, headings), f"{target}#{mark}"
