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
def test_every_row_is_measured_turn_by_turn(row: str) -> None:
    figures: list[float] = []
    versions.ROWS[row]([0.01] * 2, figures.append)
    assert len(figures) == 2 and min(figures) > 0


@pytest.mark.parametrize("row", ["no-op x 1", "memory of a worker"])
def test_the_order_alternates_and_ratios_are_new_to_old(row: str, monkeypatch, tmp_path: Path, capsys: Any) -> None:
    turns: list[tuple[str, float]] = []
    alive: list[object] = []

    class Measured:
        def __init__(self, python: str, row: str) -> None:
            self.python = python

        def turn(self, seconds: float) -> float:
            turns.append((self.python, seconds))
            return {"old": 4.0, "new": 3.0}[self.python]

        def __enter__(self) -> Measured:
            alive.append(self)
            return self

        def __exit__(self, *exception: object) -> None:
            alive.remove(self)

    monkeypatch.setattr(versions, "_Measured", Measured)
    kept = tmp_path / "kept.json"
    arguments = ["versions", "old", "new", "--rows", row, "--rounds", "2", "--turns", "3", "--json", str(kept)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert versions.main() == 1 and not alive
    first = ["old old new", "old new old", "old old new"]
    second = ["old new old", "new old old", "new old old"]
    rounds = [first[:1], first[1:2]] if row in versions.ALONE else [["old old new", *first], ["old old new", *second]]
    assert [python for python, _ in turns] == " ".join([*rounds[0], *rounds[1]]).split()
    assert json.loads(kept.read_text()) == {row: [[1.0, 1.0], [0.75, 0.75]]}
    assert "0.750 [0.750, 0.750]  below the bar" in capsys.readouterr().out
    turns.clear()
    monkeypatch.setattr(sys, "argv", [*arguments, "--bar", "0.7"])
    assert versions.main() == 0
    assert not turns, "what was kept is not measured again"


def test_a_measurement_runs_with_the_given_interpreter() -> None:
    with versions._Measured(sys.executable, "CartPole x 8") as measured:
        assert measured.turn(0.01) > 0 and measured.turn(0.01) > 0
    with versions._Measured(sys.executable, "nothing") as measured, pytest.raises(RuntimeError, match="KeyError"):
        measured.turn(0.01)


def test_a_turn_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "LIMIT_S", 0.0)
    with versions._Measured(sys.executable, "CartPole x 8") as measured, pytest.raises(RuntimeError, match="0 s"):
        measured.turn(100)
