"""`make demo-cluster`, and the example that learns on Ray."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.process_kit import environment

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "cluster" / "demo.py"
PPO = EXAMPLES / "training" / "ray_ppo.py"


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


@pytest.mark.timeout(240)
def test_ppo_on_ray_learns_as_on_this_machine():
    """With the same seed, in sync mode: weights, rollouts and draws are the same there."""
    pytest.importorskip("ray")
    pytest.importorskip("torch")
    settings = ("--env", "CartPole-v1", "--num-envs", "8", "--steps", "1500", "--mode", "sync", "--seed", "2")

    def returns(*more: str) -> list[tuple[str, str]]:
        command = [sys.executable, str(PPO), *settings, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment())
        assert done.returncode == 0, done.stderr
        return re.findall(
            r"^(\d+ steps).*, weights (0\.0) updates old: (mean return [\d.]+)$", done.stdout, re.MULTILINE
        )

    there = returns("--address", "local")
    assert len(there) >= 3 and there == returns("--local")
