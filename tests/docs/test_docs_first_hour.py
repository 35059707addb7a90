"""The pages that one reads first: the snippets run, what they name exists, links lead somewhere."""

from __future__ import annotations

import re

import pytest

import aioenv
from tests.kits.docs_kit import ROOT, cell, check_names, page, snippets

DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
NAMES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS]
PAGES = {name: page(name) for name in NAMES}


@pytest.mark.stress  # torch and Stable-Baselines3 take seconds to import
@pytest.mark.parametrize("name", ["docs/first-hour.md", "docs/from-others.md"])
def test_snippets_for_learners(name):
    for package in ("torch", "stable_baselines3"):
        pytest.importorskip(package)
    names = {"__name__": "__main__"}
    for block in snippets(PAGES[name]):
        if "aioenv.run(" in block:
            exec(block, names)
        else:
            aioenv.run(cell(block, names))


def test_wrappers_of_the_first_hour(capsys):
    (block,) = (block for block in snippets(PAGES["docs/first-hour.md"]) if "wrappers=" in block)
    aioenv.run(cell(block, {}))
    assert capsys.readouterr().out == "(8, 4, 4)\n"


def test_tests_of_the_first_hour():
    (block,) = (block for block in snippets(PAGES["docs/first-hour.md"]) if "import pytest" in block)
    names = {}
    exec(block, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        aioenv.run(test())


def test_what_the_pages_name_exists():
    told = PAGES["docs/first-hour.md"] + PAGES["docs/from-others.md"] + PAGES["README.md"]
    assert check_names(told, but={"aioenv.workers"})  # a logger


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    folder = (ROOT / name).parent
    for target, mark in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", PAGES[name]):
        if target.endswith("examples/index.rst"):  # made when the documentation is built
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
