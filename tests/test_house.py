"""The house: a room imports only rooms below it, and workers import no asyncio."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aioenv

ROOT = Path(aioenv.__file__).parent
# top to bottom
ROOMS = (
    "__main__", "cli", "testing", "adapters", "sync", "loops", "make", "vector_env", "engine", "rendering", "workers",
    "host", "native", "envs", "stats", "creator", "assign", "batching", "memory", "wire", "trace", "errors",
)  # fmt: skip
STRANGERS = {frozenset(("workers", "host"))}
PURE = {
    "wire": {"asyncio", "os", "socket", "subprocess", "gymnasium", "mujoco"},
    "batching": {"asyncio", "os", "socket", "subprocess", "mujoco"},
}


def imports(path: Path):
    """(line, dotted name) of every import, in functions too; those for the type checker alone don't count."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            yield node.lineno, node.module
            if node.module == "aioenv":
                for alias in node.names:
                    yield node.lineno, f"aioenv.{alias.name}"


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(ROOT)) for p in FILES])
def test_a_room_imports_only_rooms_below_it(path):
    room = room_of(path)
    for line, name in imports(path):
        parts = name.split(".")
        assert parts[0] not in PURE.get(room, ()), f"{path}:{line}: {room} imports {parts[0]}"
        if parts[0] != "aioenv" or len(parts) == 1 or parts[1] not in ROOMS:
            continue
        other = parts[1]
        assert ROOMS.index(other) >= ROOMS.index(room), f"{path}:{line}: imports up the house, {room} -> {other}"
        assert frozenset((room, other)) not in STRANGERS, f"{path}:{line}: {room} and {other} don't know each other"


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(ROOT)) for p in FILES])
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 480, f"{path}: files stay near 300 lines"


@pytest.mark.parametrize("module", ["aioenv.host.worker", "aioenv.host.env_service"])
def test_a_worker_imports_no_asyncio(module):
    code = f"import sys, {module}; print('asyncio' in sys.modules)"
    env = {"PYTHONPATH": str(ROOT.parent), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout == "False\n", done.stderr
