"""Run tests/ecosystem in a virtual environment for each set of versions; write the tables of the page on versions.

    python -m tests.ecosystem.run [NAME …] [--write]

`--write` puts the results of this run into the page; it takes all environments.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import venv
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from tests.ecosystem.environments import ENVIRONMENTS

ROOT = Path(__file__).parents[2]
VENVS = ROOT / ".venv-ecosystem"
PAGE = ROOT / "docs" / "explanation" / "versions.md"
BEGIN, END = "<!-- ecosystem: begin -->", "<!-- ecosystem: end -->"
TOOLS = ["pytest>=8.4", "pytest-asyncio>=1.4", "pytest-timeout>=2.3.1"]


def set_up(name: str) -> Path:
    """Make the virtual environment, unless its requirements are installed; return its interpreter."""
    home = VENVS / name
    python = home / "bin" / "python"
    wanted = "\n".join([*TOOLS, *ENVIRONMENTS[name].requirements])
    stamp = home / "requirements.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--editable", str(ROOT), *TOOLS, *ENVIRONMENTS[name].requirements], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return python


def run(name: str, python: Path) -> tuple[int, dict[str, Counter[str]]]:
    """Run the tests; return pytest's exit status, and for each task how many tests passed, failed and were skipped."""
    report = VENVS / f"{name}.xml"
    environment = os.environ | {"AIOENV_ECOSYSTEM": name, "PYTHONWARNINGS": "ignore"}
    environment.setdefault("MUJOCO_GL", "egl")
    environment["PYTHONHASHSEED"] = "0"  # as in workers: some envs list the members of sets
    command = [str(python), "-m", "pytest", "tests/ecosystem", "-q", f"--junitxml={report}"]
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    outcomes: dict[str, Counter[str]] = {task.label: Counter() for task in ENVIRONMENTS[name].tasks}
    for case in ElementTree.parse(report).iter("testcase"):
        for label in outcomes:
            if label in case.get("name", ""):
                outcomes[label][_outcome(case)] += 1
    return status, outcomes


def _outcome(case: ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"


def versions(name: str, python: Path) -> str:
    """The installed versions of the environment's packages."""
    code = "import sys, importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in sys.argv[1:]), sep=', ')"
    command = [str(python), "-c", code, *ENVIRONMENTS[name].packages]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout.strip()


def write(sections: list[str]) -> None:
    """Replace the tables in the docs."""
    page = PAGE.read_text(encoding="utf-8")
    text = "\n\n".join([BEGIN, *sections, END])
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: text, page, flags=re.DOTALL), encoding="utf-8")


def main() -> int:
    """Run what was asked for; return 1 if a test failed or a task met no test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(ENVIRONMENTS)}; default: all")
    parser.add_argument("--write", action="store_true", help="put the results into docs/explanation/versions.md")
    asked = parser.parse_args()
    names = asked.names or list(ENVIRONMENTS)
    if unknown := set(names) - set(ENVIRONMENTS):
        parser.error(f"no such environment: {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    if asked.write and set(names) != set(ENVIRONMENTS):
        parser.error("--write takes all environments")
    sections, failed = [], False
    for name in names:
        print(f"== {name}", flush=True)
        python = set_up(name)
        status, outcomes = run(name, python)
        failed |= status != 0
        lines = [f"### `{name}`", "", versions(name, python), "", "| env | tests |", "|---|---|"]
        for label, counts in outcomes.items():
            failed |= not counts["passed"]
            tests = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed") if counts[kind])
            lines.append(f"| {label} | {tests or 'none ran'} |")
        sections.append("\n".join(lines))
    print("\n\n".join(sections))
    if asked.write:
        write(sections)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
