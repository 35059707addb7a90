"""Every example runs; the notebook too, in a kernel of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aioenv.process.launch import START_METHODS
from tests.kits.process_kit import environment, run_alone

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "args", "said"),
    [
        ("async_loop.py", ["--steps", "50"], "env-steps/s"),
        ("blocking_loop.py", ["--steps", "200"], "episodes"),
        ("evaluate.py", ["--episodes", "21", "--kill"], "begun more than once: ["),
        ("multi_agent.py", ["--steps", "60"], "by hunters"),
        ("event_driven.py", ["--seconds", "0.5"], "times as many"),
        ("native_task.py", ["--steps", "150"], "episodes, obs (64, 13)"),
        ("ppo.py", ["--updates", "2", "--steps", "50"], "evaluation: mean return "),
        ("pixels.py", ["--rollouts", "2", "--steps", "4"], "observations (4, 16, 84, 84, 3) uint8"),
        ("rendering.py", ["--steps", "10"], "images (16, 84, 84, 3) uint8"),
        ("episode_stats.py", ["--epochs", "1", "--steps", "50"], "total_episode_count"),
        ("spare_envs.py", ["--steps", "20"], "with spare envs: "),
        ("timeline.py", ["--steps", "5"], "run.json"),
        ("rollout_collector.py", ["--rounds", "5", "--collectors", "3"], "round 5: "),
        ("rollout.py", ["--steps", "40"], "obs (40, 16, 17), 624 of 640 rows to learn from"),
    ],
)
def test_script(script, args, said, tmp_path):
    command = [sys.executable, str(EXAMPLES / script), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_ppo_learns(tmp_path):
    """Its draws are seeded, and the same for any number of workers: a return of 22 becomes one of more than 100."""
    command = [sys.executable, str(EXAMPLES / "ppo.py"), "--updates", "15"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), cwd=tmp_path)
    returns = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert returns[0] < 40 and returns[-1] > 100, done.stdout + done.stderr


def test_every_script_is_tested():
    (mark,) = test_script.pytestmark
    assert {path.name for path in EXAMPLES.glob("*.py")} == {case[0] for case in mark.args[1]}


@pytest.mark.parametrize("start", START_METHODS)
def test_notebook(start):
    """In a process of its own: Jupyter's client keeps sockets and threads."""
    choose = f"import functools, aioenv; aioenv.make_vec = functools.partial(aioenv.make_vec, start={start!r})"
    code = f"""
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read({str(EXAMPLES / "notebook.ipynb")!r}, as_version=4)
notebook.cells.insert(0, nbformat.v4.new_code_cell({choose!r}))
NotebookClient(notebook, timeout=60).execute()
last = [cell.outputs[-1]["data"]["text/plain"] for cell in notebook.cells if cell.get("outputs")]
print(*last, sep="\\n")
"""
    done = run_alone(code, timeout_s=100)
    lines = done.stdout.strip().split("\n")
    assert "running" in lines[0] and lines[-2] == "(4, 8, 21, 3)" and "closed" in lines[-1]
