"""Run code as people run it: as a script, in a notebook, as `python -c` and `python -m`, as tests of pytest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.kits.process_kit import environment

RUN_NOTEBOOK = """
import nbformat
from nbclient import NotebookClient
NotebookClient(nbformat.read("code.ipynb", as_version=4), timeout=100).execute()
"""


def _script(folder: Path, code: str) -> list[str]:
    (folder / "script.py").write_text(f"{code}\n\nmain()\n")
    return ["script.py"]


def _command(folder: Path, code: str) -> list[str]:
    return ["-c", f"{code}\n\nmain()\n"]


def _package(folder: Path, code: str) -> list[str]:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "__main__.py").write_text(f"{code}\n\nmain()\n")
    return ["-m", "pkg"]


def _notebook(folder: Path, code: str) -> list[str]:
    write_notebook(folder / "code.ipynb", [*re.split(r"^# %%.*$", code, flags=re.M), "main()"])
    return ["-c", RUN_NOTEBOOK]


def _module(folder: Path, code: str) -> list[str]:
    (folder / "imported.py").write_text(code)
    (folder / "script.py").write_text("import imported\n\nimported.main()\n")
    return ["script.py"]


def _pytest(folder: Path, code: str, mode: str) -> list[str]:
    (folder / "checks").mkdir()
    (folder / "checks" / "test_code.py").write_text(f"{code}\n\ndef test_all():\n    main()\n")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (
        folder / "bin"
    ).mkdir()  # the command `pytest` is such a script: its folder is on `sys.path`, the current one is not
    (folder / "bin" / "run.py").write_text("import sys, pytest\n\nsys.exit(pytest.main(sys.argv[1:]))\n")
    return ["bin/run.py", "-q", "-p", "no:cacheprovider", f"--import-mode={mode}", "checks/test_code.py"]


SURROUNDINGS = {
    "module": _module,
    "script": _script,
    "notebook": _notebook,
    "-c": _command,
    "-m": _package,
    "pytest-prepend": lambda folder, code: _pytest(folder, code, "prepend"),
    "pytest-importlib": lambda folder, code: _pytest(folder, code, "importlib"),
}


def write_notebook(path: Path, cells: list[str]) -> None:
    """Write a notebook with these cells of code."""
    sources = [
        {"cell_type": "code", "id": f"cell-{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": cell}
        for i, cell in enumerate(cells)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": sources, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook))


def run_in(surrounding: str, folder: Path, code: str, *, timeout_s: float = 100.0, **variables: str) -> dict[str, str]:
    """Run code, which has a function `main`, in a process of its own.

    Args:
        surrounding: a key of `SURROUNDINGS`.
        folder: an empty one, which the process runs in.
        code: `main` writes a JSON object to the file that the variable `SCRIPT_REPORT` names.
        timeout_s: for the process.
        **variables: of its environment.

    Returns:
        the object.
    """
    report = folder / "report.json"
    command = [sys.executable, *SURROUNDINGS[surrounding](folder, code)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment(), "SCRIPT_REPORT": str(report), **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert report.exists(), f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return json.loads(report.read_text())


SCRIPTS = Path(__file__).parent / "scripts"


def names_of_checks(script: str) -> list[str]:
    """The functions of a script in `scripts/` that are checks (see `script_checks.py`)."""
    return re.findall(r"^@check\n(?:async )?def (\w+)", (SCRIPTS / script).read_text(), re.M)


def run_checks(script: str, folder: Path, start: str, *, timeout_s: float = 100.0) -> dict[str, str]:
    """Run a script in `scripts/`: what became of each of its checks."""
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script)],
        cwd=folder,
        env={**environment(), "SCRIPT_REPORT": str(report), "SCRIPT_START": start},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert report.exists(), f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return json.loads(report.read_text())
