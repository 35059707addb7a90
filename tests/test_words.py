"""Names and prose have the field's words: those that an earlier version had coined don't come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("aioenv", "benchmarks", "examples", "docs", "tests")
# in any name, and in any comment, docstring or page
WORDS = set(
    "beckon bury buries buried canvas crew easel fleet forsake forsaken harvest hurry lane lanes latepool patience "
    "salvage solo startable upstairs wardrobe".split()
)
# not in prose: code and processes are no persons
PERSONS = {"anybody", "nobody", "somebody", "whoever", "whomever"}
# in any name; in prose they may mean what they mean in English
NAMES = WORDS | {"bell", "express", "parking", "road", "sheet", "shot", "stranger", "strangers", "wires"}
# as the whole name of a class or a type
CLASSES = set(
    "Anew Begun Came Exchange Eye Flight Flights Held Here Link Live Member Moved Painter Part Pictures Plane Schedule "
    "Seen Sent Talk Walk Watch".split()
)


def parts(name: str) -> list[str]:
    """The words of a name, in lower case: of `LatePool`, `late_pool` and `LATE_POOL` "late" and "pool"."""
    return [part.lower() for part in re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).split("_") if part]


def wrong_name(name: str) -> bool:
    return name in CLASSES or "late_pool" in name or not NAMES.isdisjoint(parts(name))


def wrong_words(text: str) -> list[str]:
    return [word for word in re.findall(r"[A-Za-z]+", text) if word.lower() in WORDS | PERSONS or wrong_camel(word)]


def wrong_camel(word: str) -> bool:
    return len(parts(word)) > 1 and not NAMES.isdisjoint(parts(word))


def of_python(source: str) -> Iterator[str]:
    """The wrong names and words of a Python file: names, comments, and all strings (docstrings, messages)."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and wrong_name(token.string):
            yield token.string
        elif token.type == tokenize.COMMENT:
            yield from wrong_words(token.string)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from wrong_words(node.value)


def of_c(source: str) -> Iterator[str]:
    prose = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
    for match in prose.finditer(source):
        yield from wrong_words(match.group())
    yield from filter(wrong_name, re.findall(r"[A-Za-z_]\w*", prose.sub(" ", source)))


def files(*suffixes: str) -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    found = [path for path in found if path.name != "test_words.py"]  # which names the words
    return sorted(found + [ROOT / name for name in ("CONTRIBUTING.md", "README.md") if ".md" in suffixes])


@pytest.mark.parametrize(
    ("suffixes", "check"),
    [((".py", ".pyi"), of_python), ((".c", ".h"), of_c), ((".md", ".ipynb"), wrong_words)],
    ids=["python", "c", "pages"],
)
def test_names_and_prose_have_no_coined_words(suffixes, check):
    paths = files(*suffixes)
    assert paths
    found = {str(path.relative_to(ROOT)): list(check(path.read_text(encoding="utf-8"))) for path in paths}
    assert {name: words for name, words in found.items() if words} == {}


def test_files_have_no_coined_names():
    assert [str(path) for path in files(".py", ".pyi", ".c", ".h", ".md") if wrong_name(path.stem)] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Fleet: pass", ["Fleet"]),
        ("class SoloCalls: pass", ["SoloCalls"]),
        ("from a import Part, take_express", ["Part", "take_express"]),
        ("x = 1  # an express lane", ["lane"]),
        ("x = 1  # whoever is first", ["whoever"]),
        ("def f():\n    '''Ask the fleet.'''", ["fleet"]),
        ("part, parts, in_flight, snapshot, expression, planes = 1, 2, 3, 4, 5, 6  # a part, on the road", []),
    ],
)
def test_the_check_of_python_finds_what_it_should(source, found):
    assert list(of_python(source)) == found


def test_the_check_of_c_finds_what_it_should():
    assert list(of_c('/* the fleet */ int send_express; char *part = "patience";')) == [
        "fleet",
        "patience",
        "send_express",
    ]
