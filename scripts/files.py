"""Writes docs/files.md: every file of the house and what it is for, as its own docstring says it.

    python scripts/files.py

The rooms stand in the order of the table in docs/architecture.md. A test says so if the page is older than the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["page", "rooms"]

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "aioenv"
PAGE = ROOT / "docs" / "files.md"
_SUFFIXES = {".py", ".c", ".h"}

_INTRODUCTION = """# Files

What each file of `aioenv/` is for, room by room, top to bottom ([Architecture](architecture.md)).
`python scripts/files.py` writes this page from the files' own docstrings.
"""


def rooms() -> list[str]:
    """The rooms of the table in docs/architecture.md, top to bottom: `core/`, `errors.py`."""
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Rooms")[1].split("\n\n[Files]")[0]
    return re.findall(r"^\| `([\w/.]+)` \|", table, re.MULTILINE)


def page() -> str:
    """The page, in Markdown."""
    return _INTRODUCTION + "\n" + "".join(part for room in rooms() for part in _room(HOUSE / room)).rstrip() + "\n"


def _room(path: Path) -> Iterator[str]:
    name = path.relative_to(HOUSE).as_posix()
    if path.is_file():
        yield f"## {name}\n\n{_purpose(path)}\n\n"
        return
    yield f"{'##' if path.parent == HOUSE else '###'} {name}/\n\n{_purpose(path / '__init__.py')}\n\n"
    files = [file for file in sorted(path.iterdir()) if file.suffix in _SUFFIXES and file.name != "__init__.py"]
    yield "| file | what for |\n|---|---|\n"
    yield from (f"| `{file.name}` | {_purpose(file)} |\n" for file in files)
    yield "\n"
    for inner in sorted(inner.parent for inner in path.glob("*/__init__.py")):
        yield from _room(inner)


def _purpose(file: Path) -> str:
    """The first paragraph of a file's docstring, or of the comment that a C file begins with."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        words = ast.get_docstring(ast.parse(text)) or ""
    else:
        words = text.removeprefix("/* ").split(" */")[0].replace("\n * ", "\n").replace("\n *\n", "\n\n")
    return words.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
