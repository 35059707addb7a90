"""The house: a room imports only rooms below it, and what a worker imports is small."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import aioenv

HOUSE = Path(aioenv.__file__).parent
# top to bottom
ROOMS = (
    "cli testing adapters sync loops make native_vector_env vector_env creator engine rendering workers host native "
    "envs stats assign batching memory descriptors frame_io wire definitions trace nested machine "
    "mujoco_clock requirements speedups errors"
).split()
STRANGERS = {"workers", "host"}
# parts of a room that the rest of it does without, and who may use them all the same
UPSTAIRS = {
    "engine.runs": ("engine/runs/", "engine/solo/"),
    "host.single": ("host/single/",),
    "host.vector": ("host/vector/",),
}
# parts of a room that do without the rest of it, and what of it they may use all the same
DOWNSTAIRS = {
    "host/physics/": ("host.physics",),
    "host/states/": ("host.states", "host.physics"),
}
# modules that a room has no business with, in any function of it
FORBIDDEN = {
    "wire": {"asyncio", "os", "socket", "subprocess", "gymnasium", "mujoco"},
    "batching": {"asyncio", "os", "socket", "subprocess", "mujoco"},
    "host": {"asyncio"},
    "stats": {"asyncio"},
}
FILES = {str(path.relative_to(HOUSE)): path for path in sorted(HOUSE.rglob("*.py"))}


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that is imported anywhere in a module, also for the type checker alone.

    Args:
        tree: the module.
        package: the package that it is in, which relative imports start from.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = ".".join([*package.split(".")[: len(package.split(".")) - level + 1], *filter(None, [module])])
                name = base if level else module
                yield from ((node.lineno, f"{name}.{alias.name}") for alias in names)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield node.lineno, name


def home(name: str) -> str | None:
    """The room of a dotted name; None if it is nobody's (another package, or `aioenv` itself)."""
    parts = name.split(".")
    if parts[0] != "aioenv" or len(parts) == 1:
        return None
    public = aioenv._HOME.get(parts[1])  # `from aioenv import RenderConfig` is an import from a room all the same
    if public is not None and parts[1] not in ROOMS:
        return public.split(".")[1]
    return None if parts[1].startswith("__") else parts[1]


def complaints(file: str, source: str) -> list[str]:
    """What a file of the house imports and should not."""
    path = Path(file)
    room = path.parts[0].removesuffix(".py")
    if room == "__main__":  # `python -m aioenv` is the command line's other door
        room = "cli"
    package = ".".join(["aioenv", *path.parent.parts])
    if room not in ROOMS:
        return [f"{file}: a room that is not in the plan"]
    found = []
    for line, name in imported(ast.parse(source), package):
        other = home(name)
        where = f"{file}:{line}: {name}"
        for storey, users in UPSTAIRS.items():
            if name.startswith(f"aioenv.{storey}.") and other == room and not file.startswith(users):
                found.append(f"{where}: {storey} is above the rest of {room}")
        for storey, known in DOWNSTAIRS.items():
            below = name.startswith(tuple(f"aioenv.{part}." for part in known))
            if file.startswith(storey) and other == room and not below:
                found.append(f"{where}: {storey} is below the rest of {room}")
        if name.split(".")[0] in FORBIDDEN.get(room, ()):
            found.append(f"{where} is not for {room}")
        if other is None or other == room:
            continue
        if other not in ROOMS:
            found.append(f"{where} is no room")
        elif {room, other} == STRANGERS:
            found.append(f"{where}: {room} and {other} don't know each other")
        elif ROOMS.index(other) < ROOMS.index(room):
            found.append(f"{where} lies above {room}")
    return found


def test_a_room_imports_only_rooms_below_it():
    rooms = [file for file in FILES if file != "__init__.py"]
    assert [found for file in rooms for found in complaints(file, FILES[file].read_text(encoding="utf-8"))] == []


def neighbours(file: str, files: Mapping[str, str]) -> set[str]:
    """The files that a file imports, or takes a name from, be it for the type checker alone."""
    package = ".".join(["aioenv", *Path(file).parent.parts])
    found = set()
    for _, name in imported(ast.parse(files[file]), package):
        path = "/".join(name.split(".")[1:])
        for candidate in (f"{path}.py", f"{path.rpartition('/')[0]}.py"):
            if candidate in files:
                found.add(candidate)
                break
    return found


def circle(files: Mapping[str, str]) -> list[str]:
    """Files that need each other, in turn; empty if no files do."""
    above = {file: neighbours(file, files) for file in files}
    done: set[str] = set()

    def visit(file: str, way: list[str]) -> list[str]:
        if file in way:
            return way[way.index(file) :]
        if file not in done:
            for other in sorted(above[file]):
                if found := visit(other, [*way, file]):
                    return found
            done.add(file)
        return []

    return next((found for file in files if (found := visit(file, []))), [])


def test_no_two_files_need_each_other():
    """Nor does any circle of more: who reads one file has only others below it to read."""
    assert circle({file: path.read_text(encoding="utf-8") for file, path in FILES.items()}) == []


def test_circles_are_found():
    files = {
        "wire/a.py": "from aioenv.wire import b",
        "wire/b.py": "if TYPE_CHECKING:\n    from aioenv.wire.c import C",
        "wire/c.py": "def f():\n    from . import a",
        "wire/d.py": "from aioenv.wire.a import A",
    }
    assert circle(files) == ["wire/a.py", "wire/b.py", "wire/c.py"]
    assert circle({**files, "wire/c.py": "from aioenv import wire"}) == []


def test_files_stay_readable():
    """Files are as long as their topic, up to 800 lines."""
    assert [file for file, path in FILES.items() if len(path.read_text(encoding="utf-8").splitlines()) > 800] == []


def test_the_hall_opens_no_door_by_itself():
    """`import aioenv` imports no room: its names come on first use."""
    tree = ast.parse(FILES["__init__.py"].read_text(encoding="utf-8"))
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [name for node in at_once for _, name in imported(node, "aioenv") if home(name)] == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("wire/frames.py", "from aioenv.batching.layout import Layout", "lies above wire"),
        ("wire/frames.py", "def f():\n    import aioenv.engine.slots", "frames.py:2"),
        ("wire/frames.py", "import os.path", "os.path is not for wire"),
        ("batching/infos.py", "def f():\n    from asyncio import sleep", "asyncio.sleep is not for batching"),
        ("host/link.py", "import asyncio.subprocess as a", "is not for host"),
        ("host/link.py", "from aioenv.workers.launch import spawn", "don't know each other"),
        ("workers/launch.py", "from aioenv import host", "don't know each other"),
        ("engine/slots.py", "from aioenv import AsyncVectorEnv", "lies above engine"),
        ("engine/slots.py", "from .. import make", "aioenv.make lies above engine"),
        ("engine/slots.py", "from ..sync import portal", "aioenv.sync.portal lies above engine"),
        ("engine/slots.py", "import importlib; importlib.import_module('aioenv.cli')", "lies above engine"),
        ("engine/slots.py", "if TYPE_CHECKING:\n    from aioenv.make import run", "lies above engine"),
        ("engine/slots.py", "from aioenv import attic", "is no room"),
        ("engine/slots.py", "from aioenv.engine.runs.groups import Group", "is above the rest of engine"),
        ("host/worker.py", "from aioenv.host.vector.making import versioned", "is above the rest of host"),
        ("host/single/calls.py", "from aioenv.host.vector.making import versioned", "is above the rest of host"),
        ("host/states/stack.py", "from aioenv.host.running import row", "is below the rest of host"),
        ("host/physics/edits.py", "from aioenv.host.states.stack import examine", "is below the rest of host"),
        ("attic.py", "", "not in the plan"),
    ],
)
def test_the_check_finds_what_it_should(file, source, complaint):
    (found,) = complaints(file, source)
    assert complaint in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engine/slots.py", "from . import batch\nfrom ..wire.frames import Kind\nfrom aioenv import WireError"),
        ("engine/slots.py", "import os, asyncio\nfrom aioenv import __version__\nimport aioenv"),
        ("host/states/snapshot.py", "from aioenv.host.physics.edits import Edits\nfrom . import stack"),
        ("make.py", "from aioenv.vector_env import AsyncVectorEnv\nfrom .rendering import config"),
    ],
)
def test_the_check_finds_nothing_where_nothing_is(file, source):
    assert complaints(file, source) == []


@pytest.mark.parametrize(
    "module",
    [
        "aioenv",
        "aioenv.host.boot",
        "aioenv.host.worker",
        "aioenv.host.single.service",
        "aioenv.host.vector.service",
        "aioenv.stats",
        "aioenv.creator",
    ],
)
def test_a_worker_imports_no_asyncio(module):
    code = f"import sys, {module}; print(sorted({{'asyncio', 'uvloop', 'mujoco', '{module}'}} & {{*sys.modules}}))"
    env = {**os.environ, "PYTHONPATH": str(HOUSE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout == f"['{module}']\n", done.stdout + done.stderr


def _without_encoding(tree: ast.AST) -> Iterator[int]:
    """The lines of calls that take text from files or pipes in whatever encoding there is."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {keyword.arg for keyword in node.keywords}
        modes = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        opens = name == "open" and not (
            isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "os"
        )
        text = (
            name in ("read_text", "write_text", "fdopen", "TextIOWrapper")
            or opens
            or {"text", "universal_newlines"} & given
        )
        if text and "encoding" not in given and not any("b" in mode for mode in modes):
            yield node.lineno


OPENS_OTHERS = {"trace/ring.py", "host/single/service.py", "host/worker.py"}  # their `open` opens no file


def test_text_is_read_and_written_in_an_encoding_that_is_said():
    """Python can be told to make an error of it (`-X warn_default_encoding`), and another machine's differs."""
    wrong = [
        f"{name}:{line}"
        for name, path in FILES.items()
        for line in _without_encoding(ast.parse(path.read_bytes()))
        if name not in OPENS_OTHERS
    ]
    assert not wrong


def test_the_check_of_encodings_finds_what_it_should():
    source = "p.read_text()\nopen('a')\nopen('a', 'rb')\nrun(c, text=True)\nos.open('a', 0)\np.read_text(encoding='x')"
    assert list(_without_encoding(ast.parse(source))) == [1, 2, 4]
