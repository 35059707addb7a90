"""Code that a script or a notebook defines is one thing in each process, wherever it runs and however workers start."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioenv.process.launch import START_METHODS
from tests.definitions.script_kit import SURROUNDINGS, run_in

TABLE = (Path(__file__).parent / "script_table.py").read_text()
COLUMNS = {
    "class state": 5,
    "globals": 8,
    "registries": 8,
    "infos": 11,
    "arguments": 14,
    "results": 12,
    "pickle": 10,
    "source": 14,
    "traceback": 6,
    "decorated": 14,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", [*START_METHODS, "debug"])
@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_script_code_is_one_thing_in_each_process(surrounding, start, tmp_path):
    report = run_in(surrounding, tmp_path, TABLE, SCRIPT_START=start)
    wrong = {name: what for name, what in report.items() if what != "ok"}
    assert not wrong, f"{len(wrong)} of {len(report)} are wrong:\n" + "\n".join(f"{k}: {v}" for k, v in wrong.items())
    expected = dict(COLUMNS)
    if surrounding in ("module", "pytest-prepend", "pytest-importlib"):  # no partials as arguments and results
        expected.update(arguments=13, results=11)
    assert {column: sum(name.startswith(f"{column}: ") for name in report) for column in COLUMNS} == expected
