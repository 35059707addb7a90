"""README.md, CONTRIBUTING.md and CHANGELOG.md: the snippets run, what they name exists, links lead somewhere."""

from __future__ import annotations

import re

import pytest

from tests.kits.docs_kit import ROOT, check_names, page

DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
NAMES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS]
PAGES = {name: page(name) for name in NAMES}


def test_what_the_pages_name_exists():
    assert check_names(PAGES["README.md"])


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
