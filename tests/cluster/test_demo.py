"""`make demo-cluster`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.process_kit import environment

DEMO = Path(__file__).parents[2] / "examples" / "cluster" / "demo.py"


@pytest.mark.timeout(240)
def test_a_node_is_replaced_while_steps_go_on(tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, str(DEMO), "--num-envs", "4", "--seconds", "3", "--out", str(tmp_path / "last.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment())
    assert done.returncode == 0, done.stderr
    for said in ("is killed, with workers", "has joined", "all workers are up again", "have gone on meanwhile"):
        assert said in done.stdout
    assert done.stdout.count("steps of each") == 2 and "Raylet" not in done.stdout
    assert (tmp_path / "last.png").stat().st_size > 1000
