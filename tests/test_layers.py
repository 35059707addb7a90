"""The layers of the package: a file imports only its own layer and those below, and a worker imports little."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import aioenv

PACKAGE = Path(aioenv.__file__).parent
# top to bottom
LAYERS = (
    "cli testing adapters sync collector loops wrappers make native_vector_env vector_env watching creator inprocess "
    "rollout core rendering modders cluster process worker state native envs stats assign spaces ipc definitions "
    "tracing platform display mujoco_versions requirements speedups errors"
).split()
INDEPENDENT = {"process", "worker"}
# modules that a layer has no business with, in any function of it
FORBIDDEN = {
    "ipc": {"asyncio", "gymnasium", "mujoco"},
    "spaces": {"asyncio", "os", "socket", "subprocess", "mujoco"},
    "worker": {"asyncio"},
    "stats": {"asyncio"},
}
# files of ipc/ that read or write descriptors; the others are sans-IO
DOES_IO = ("ipc/frame_io.py", "ipc/memory.py", "ipc/shared_data.py")
IO = {"os", "socket", "subprocess"}
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that is imported anywhere in a module, but for the type checker alone.

    Args:
        tree: the module.
        package: the package that it is in, which relative imports start from.
    """
    match tree:
        case ast.Import(names=names):
            yield from ((tree.lineno, alias.name) for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = ".".join([*package.split(".")[: len(package.split(".")) - level + 1], *filter(None, [module])])
            name = base if level else module
            yield from ((tree.lineno, f"{name}.{alias.name}") for alias in names)
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
            yield tree.lineno, name
    free = isinstance(tree, ast.If) and ast.unparse(tree.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    for node in tree.orelse if free else ast.iter_child_nodes(tree):
        yield from imported(node, package)


def home(name: str) -> str | None:
    """The layer of a dotted name; None if it has none (another package, or `aioenv` itself)."""
    parts = name.split(".")
    if parts[0] != "aioenv" or len(parts) == 1:
        return None
    public = aioenv._HOME.get(parts[1])  # `from aioenv import RenderConfig` is an import from a layer all the same
    if public is not None and parts[1] not in LAYERS:
        return public.split(".")[1]
    return None if parts[1].startswith("__") else parts[1]


def complaints(file: str, source: str) -> list[str]:
    """What a file of the house imports and should not."""
    path = Path(file)
    layer = path.parts[0].removesuffix(".py")
    if layer == "__main__":  # `python -m aioenv` is the command line's other door
        layer = "cli"
    package = ".".join(["aioenv", *path.parent.parts])
    if layer not in LAYERS:
        return [f"{file}: a layer that is not in the plan"]
    found = []
    for line, name in imported(ast.parse(source), package):
        other = home(name)
        where = f"{file}:{line}: {name}"
        forbidden = FORBIDDEN.get(layer, set()) | (IO if layer == "ipc" and file not in DOES_IO else set())
        if name.split(".")[0] in forbidden:
            found.append(f"{where} is not for {layer}")
        if other is None or other == layer:
            continue
        if other not in LAYERS:
            found.append(f"{where} is no layer")
        elif {layer, other} == INDEPENDENT:
            found.append(f"{where}: {layer} and {other} don't know each other")
        elif LAYERS.index(other) < LAYERS.index(layer):
            found.append(f"{where} lies above {layer}")
    return found


def test_a_layer_imports_only_layers_below_it():
    files = [file for file in FILES if file != "__init__.py"]
    assert [found for file in files for found in complaints(file, FILES[file].read_text(encoding="utf-8"))] == []


def test_the_architecture_page_shows_the_layers_in_their_order():
    """The diagram has all of them, and the table tells what the folders are for."""
    page = (Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    diagram, table = page[page.index("## Layers") : page.index("## One step")].split("| layer |")
    drawn = re.findall(r"(\w+)(?:/|\.py)(?= |$)", diagram.split("```")[1], re.MULTILINE)
    assert drawn == list(LAYERS)
    rows = re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)
    assert rows == [layer for layer in LAYERS if (PACKAGE / layer).is_dir()]


def neighbours(file: str, files: Mapping[str, str]) -> set[str]:
    """The files that a file imports, or imports names from; imports for the type checker alone do not count."""
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


def test_no_two_files_import_each_other():
    """Nor does any circle of more: who reads one file has only others below it to read."""
    assert circle({file: path.read_text(encoding="utf-8") for file, path in FILES.items()}) == []


def test_circles_are_found():
    files = {
        "ipc/a.py": "from aioenv.ipc import b",
        "ipc/b.py": "if TYPE_CHECKING:\n    from aioenv.ipc.d import D\nfrom aioenv.ipc.c import C",
        "ipc/c.py": "def f():\n    from . import a",
        "ipc/d.py": "from aioenv.ipc.a import A",
    }
    assert circle(files) == ["ipc/a.py", "ipc/b.py", "ipc/c.py"]
    assert circle({**files, "ipc/c.py": "from aioenv import ipc"}) == []


def test_importing_the_package_imports_no_layer():
    """`import aioenv` imports no layer: its names come on first use."""
    tree = ast.parse(FILES["__init__.py"].read_text(encoding="utf-8"))
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [name for node in at_once for _, name in imported(node, "aioenv") if home(name)] == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("ipc/frames.py", "from aioenv.spaces.layout import Layout", "lies above ipc"),
        ("ipc/frames.py", "def f():\n    import aioenv.core.slots", "frames.py:2"),
        ("ipc/frames.py", "import os.path", "os.path is not for ipc"),
        ("spaces/infos.py", "def f():\n    from asyncio import sleep", "asyncio.sleep is not for spaces"),
        ("worker/worker_end.py", "import asyncio.subprocess as a", "is not for worker"),
        ("worker/worker_end.py", "from aioenv.process.launch import spawn", "don't know each other"),
        ("process/launch.py", "from aioenv import worker", "don't know each other"),
        ("core/slots.py", "from aioenv import AsyncVectorEnv", "lies above core"),
        ("core/slots.py", "from .. import make", "aioenv.make lies above core"),
        ("core/slots.py", "from ..sync import portal", "aioenv.sync.portal lies above core"),
        ("core/slots.py", "import importlib; importlib.import_module('aioenv.cli')", "lies above core"),
        ("core/slots.py", "if TYPE_CHECKING:\n    import x\nelse:\n    from aioenv.make import run", "lies above core"),
        ("core/slots.py", "from aioenv import attic", "is no layer"),
        ("core/slots.py", "from aioenv.rollout.rollout import Rollouts", "lies above core"),
        ("state/snapshot.py", "from aioenv.worker.worker_context import row", "lies above state"),
        ("attic.py", "", "not in the plan"),
    ],
)
def test_the_check_finds_what_it_should(file, source, complaint):
    (found,) = complaints(file, source)
    assert complaint in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/slots.py", "from . import requests\nfrom ..ipc.frames import Kind\nfrom aioenv import WireError"),
        ("core/slots.py", "import os, asyncio\nfrom aioenv import __version__\nimport aioenv"),
        ("state/snapshot.py", "from aioenv.state.model_edits import Edits\nfrom . import wrapper_stack"),
        ("core/slots.py", "if TYPE_CHECKING:\n    from aioenv.make import run"),
        ("make.py", "from aioenv.vector_env import AsyncVectorEnv\nfrom .rendering import config"),
    ],
)
def test_the_check_finds_nothing_where_nothing_is(file, source):
    assert complaints(file, source) == []


@pytest.mark.parametrize(
    "module",
    [
        "aioenv",
        "aioenv.worker.boot",
        "aioenv.worker.loop",
        "aioenv.worker.env_service",
        "aioenv.worker.vector_service",
        "aioenv.stats",
        "aioenv.creator",
    ],
)
def test_a_worker_imports_no_asyncio(module):
    code = f"import sys, {module}; print(sorted({{'asyncio', 'uvloop', 'mujoco', '{module}'}} & {{*sys.modules}}))"
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout == f"['{module}']\n", done.stdout + done.stderr


@pytest.mark.parametrize("name", ["EnvCreator", "Modder", "RenderConfig", "RestartPolicy", "SharedRunningStats"])
def test_a_name_that_factories_may_mention_imports_no_asyncio(name):
    """A worker that unpickles an object of such a class pays for all that its module imports."""
    code = f"import sys, aioenv; aioenv.{name}; print('asyncio' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout == "False\n", done.stdout + done.stderr


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


OPENS_OTHERS = {"tracing/track.py", "worker/env_service.py", "worker/loop.py"}  # their `open` opens no file


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
