"""README.md, CONTRIBUTING.md and CHANGELOG.md: the snippets run, what they name exists, links lead somewhere."""

from __future__ import annotations

import contextlib
import inspect
import re

import numpy as np
import pytest

import aioenv
from tests.kits.docs_kit import ROOT, cell, check_names, page, snippets

DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
NAMES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS]
PAGES = {name: page(name) for name in NAMES}


class Enough(Exception):
    """A snippet's loop has gone on for long enough."""


def blocks(name):
    """The snippets of a page, with fewer slots and steps."""
    for block in snippets(PAGES[name]):
        yield re.sub(r"\b64\b", "4", re.sub(r"\b(16|100|128|1000)\b", "3", block))


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


def test_what_the_pages_name_exists():
    assert check_names(PAGES["README.md"])


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    folder = (ROOT / name).parent
    for target, mark in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", PAGES[name]):
        if target == "reference.md":  # made when the documentation is built (docs/reference.py)
            continue
        path = (folder / target) if target else ROOT / name
        assert path.exists(), target
        if mark:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            assert mark in map(anchor, headings), f"{target}#{mark}"


@pytest.mark.parametrize("name", NAMES)
def test_files_that_pages_speak_of_are_there(name):
    files = re.findall(r"`((?:\w+/)+\w+\.py)`", PAGES[name])
    assert [file for file in files if not any((ROOT / base / file).exists() for base in ("", "aioenv"))] == []
