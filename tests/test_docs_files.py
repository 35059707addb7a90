"""The page "Files", and what other pages say of where things are."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from test_house import ROOMS

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]


def script():
    spec = importlib.util.spec_from_file_location("files", ROOT / "scripts" / "files.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_files_say():
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    assert page == script().page(), "run: python scripts/files.py"


def test_every_file_is_on_it_with_its_purpose():
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    files = [file for file in (ROOT / "aioenv").glob("*/**/*.py") if file.name != "__init__.py"]
    assert len(re.findall(r"^\| `\w+\.py` \| .{12,} \|$", page, re.MULTILINE)) == len(files)


def test_the_plan_has_the_rooms_in_their_order():
    assert [room.strip("/").removesuffix(".py") for room in script().rooms()] == list(ROOMS)


def test_files_that_pages_speak_of_are_there():
    gone = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text(encoding="utf-8"))
        if not any((ROOT / base / name).exists() for base in ("", "aioenv"))
    ]
    assert gone == []
