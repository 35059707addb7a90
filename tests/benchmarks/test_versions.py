"""The comparison of two versions: every row runs, and ratios are those of new to old."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import versions
from tests.kits.cli_kit import needs_opengl

SB3 = pytest.mark.skipif(importlib.util.find_spec("stable_baselines3") is None, reason="it is not installed")
MARKS = {"CartPole x 64, sb3": SB3, "pixels fast x 16": needs_opengl}


@pytest.mark.parametrize("row", [pytest.param(row, marks=MARKS.get(row, ())) for row in versions.ROWS])
def test_every_row_is_measured(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "WARM_UP_S", 0.01)
    assert versions.ROWS[row](0.01) > 0


def test_the_order_alternates_and_ratios_are_new_to_old(monkeypatch, tmp_path: Path, capsys: Any) -> None:
    asked = []

    def measure(python: str, row: str, seconds: float) -> float:
        asked.append(python)
        return {"old": 4.0, "new": 3.0}[python]

    monkeypatch.setattr(versions, "_measure", measure)
    kept = tmp_path / "kept.json"
    arguments = ["versions", "old", "new", "--rows", "no-op x 1", "--rounds", "2", "--json", str(kept)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert versions.main() == 1
    assert asked == ["old"] * 4 + ["old", "new", "new", "old"]
    assert json.loads(kept.read_text()) == {"no-op x 1": [[1.0, 1.0], [0.75, 0.75]]}
    assert "0.750 [0.750, 0.750]  below the bar" in capsys.readouterr().out
    asked.clear()
    monkeypatch.setattr(sys, "argv", [*arguments, "--bar", "0.7"])
    assert versions.main() == 0
    assert not asked, "what was kept is not measured again"


def test_a_measurement_runs_with_the_given_interpreter() -> None:
    assert versions._measure(sys.executable, "CartPole x 8", 0.01) > 0
    with pytest.raises(RuntimeError, match="KeyError"):
        versions._measure(sys.executable, "nothing", 0.01)
