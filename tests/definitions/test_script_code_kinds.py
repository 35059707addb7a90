"""Inputs that code of a script or a notebook has failed on, and others of their kinds.

The scripts in `scripts/` have the checks, several each. A script is run once for all of its checks.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from aioenv.process.launch import START_METHODS
from tests.definitions.script_kit import RUN_NOTEBOOK, SCRIPTS, names_of_checks, run_checks, write_notebook
from tests.kits.process_kit import environment

STARTS = [START_METHODS[-1], "debug"]  # `test_script_code.py` has both start methods
CHECKS = [
    pytest.param(path.name, name, id=f"{path.stem}-{name}")
    for path in sorted(SCRIPTS.glob("*.py"))
    for name in names_of_checks(path.name)
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What became of the checks of a script, which runs once."""
    known = {}

    def report(script, start):
        if (script, start) not in known:
            try:
                known[script, start] = run_checks(script, tmp_path_factory.mktemp("script"), start)
            except Exception as exc:
                known[script, start] = exc
        outcome = known[script, start]
        if isinstance(outcome, Exception):
            raise AssertionError(f"{script} did not end: {outcome}") from outcome
        return outcome

    return report


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("script", "name"), CHECKS)
def test_check(script, name, start, reports):
    outcome = reports(script, start)[name]
    if outcome.startswith("skip: "):
        pytest.skip(outcome)
    assert outcome == "ok", outcome


# ------------------------------------------------------------ pdb, with debug=True

DEBUGGED = """
import gymnasium
from aioenv import sync


class Env(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        reward = 41.0
        breakpoint()
        reward += 1
        return 0, reward, False, False, {}


with sync.VectorEnv([Env, lambda: Env()], debug=True, num_workers=1) as envs:
    envs.reset()
    print("reward", envs.step([0, 0])[1].tolist())
    print("file", Env.step.__code__.co_filename)
"""


def debugged(folder, commands):
    script = folder / "script.py"
    script.write_text(DEBUGGED)
    done = subprocess.run(
        [sys.executable, script], input=commands, capture_output=True, text=True, timeout=60, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert f"file {script}" in done.stdout, done.stdout
    return script, done.stdout


def test_pdb_shows_source_lines(tmp_path):
    _, shown = debugged(tmp_path, "l\nc\nc\n")
    line = "breakpoint()" if sys.version_info >= (3, 13) else "reward += 1"  # where it stops
    assert f"->\t        {line}" in shown and "[EOF]" not in shown, shown
    assert "reward [42.0, 42.0]" in shown


def test_pdb_stops_at_breakpoints_by_file_and_line(tmp_path):
    line = DEBUGGED.splitlines().index("        return 0, reward, False, False, {}") + 1
    script, shown = debugged(tmp_path, f"b {tmp_path / 'script.py'}:{line}\nc\np 'at', reward\ncl 1\nc\nc\n")
    assert f"Breakpoint 1 at {script}:{line}" in shown and f"> {script}({line})step()" in shown, shown
    assert "('at', 42.0)" in shown


# ------------------------------------------------------------ notebooks

NOTEBOOK = [
    """
import json, os, signal, warnings
import gymnasium as gym
import aioenv
from aioenv import sync
from tests.definitions.script_checks import Plain, raised

report = {}
OPTIONS = {"start": os.environ["SCRIPT_START"], "num_workers": 1}
class Data:
    kind = "first"
    def __init__(self, number):
        self.number = number
def reward():
    return 1.0
class Env(Plain):
    version = 1
    def step(self, action):
        if action == 8:
            raise ValueError("first")
        return 0, reward(), False, False, {}
    def take(self, value):
        return isinstance(value, Data), value.number, value.kind, Data.kind
    def versions(self):
        return Env.version, type(self).version
Old = Env
""",
    "old = sync.VectorEnv([Env, lambda: Env()], restart=aioenv.RestartPolicy(), **OPTIONS)\nold.reset()",
    "report['first'] = [old.step([0, 0])[1].tolist(), old.call('take', Data(3)), old.call('versions')]",
    # the same cells, edited and run again
    """
class Data:
    kind = "second"
    def __init__(self, number):
        self.number = number
def reward():
    return 2.0
class Env(Plain):
    version = 2
    def step(self, action):
        return 0, reward(), False, False, {}
    def take(self, value):
        return isinstance(value, Data), value.number, value.kind, Data.kind
    def versions(self):
        return Env.version, type(self).version
""",
    "new = sync.VectorEnv([Env, lambda: Env()], **OPTIONS)\nnew.reset()",
    "report['new'] = [new.step([0, 0])[1].tolist(), new.call('take', Data(3)), new.call('versions')]",
    "report['old'] = [old.step([0, 0])[1].tolist(), old.call('versions')]",
    """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    report["new class in the old worker"] = [old.call("take", Data(4)) for _ in range(2)]
report["warnings"] = len(caught)
""",
    "report['old after it'] = [old.step([0, 0])[1].tolist(), old.call('versions')]",
    "text = raised(lambda: old.step([8, 0]), aioenv.EnvError).traceback",
    """
report["traceback"] = 'raise ValueError("first")' in text and Old.step.__code__.co_filename in text or text
old.reset()
os.kill(old.workers[0].pid, signal.SIGKILL)
report["restarted"] = [old.step([0, 0])[3].tolist()]
old.step([0, 0])  # it begins an episode
report["restarted"] += [old.step([0, 0])[1].tolist(), old.call("versions")]
old.close()
new.close()
open(os.environ["SCRIPT_REPORT"], "w").write(json.dumps(report))
""",
]


@pytest.fixture(scope="module")
def redefined(tmp_path_factory):
    """What a notebook gave whose cells define the same names twice; it runs once."""
    folder = tmp_path_factory.mktemp("notebook")
    write_notebook(folder / "code.ipynb", NOTEBOOK)
    variables = {"SCRIPT_START": START_METHODS[-1], "SCRIPT_REPORT": str(folder / "report.json")}
    done = subprocess.run(
        [sys.executable, "-c", RUN_NOTEBOOK],
        cwd=folder,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (folder / "report.json").exists(), done.stderr[-6000:]
    return json.loads((folder / "report.json").read_text())


def test_a_notebook_as_it_was_run_first(redefined):
    taken = [True, 3, "first", "first"]
    assert redefined["first"] == [[1, 1], [taken] * 2, [[1, 1]] * 2]


def test_a_new_vector_env_has_what_was_redefined(redefined):
    taken = [True, 3, "second", "second"]
    assert redefined["new"] == [[2, 2], [taken] * 2, [[2, 2]] * 2]


def test_an_old_vector_env_keeps_what_it_was_made_with(redefined):
    assert redefined["old"] == [[1, 1], [[1, 1]] * 2]


def test_a_new_class_in_an_old_worker_is_a_class_of_its_own(redefined):
    assert redefined["new class in the old worker"] == [[[False, 4, "second", "first"]] * 2] * 2
    assert redefined["old after it"] == [[1, 1], [[1, 1]] * 2]


def test_a_new_class_in_an_old_worker_is_warned_of_once(redefined):
    assert redefined["warnings"] == 1


def test_a_traceback_of_an_old_worker_shows_the_cell_that_it_was_made_with(redefined):
    assert redefined["traceback"] is True


def test_a_restarted_worker_has_what_its_vector_env_was_made_with(redefined):
    assert redefined["restarted"] == [[True, True], [1, 1], [[1, 1]] * 2]


# ------------------------------------------------------------ packages, and ranks of a training

PACKAGE_MAIN = """
from . import settings
from .settings import LIMIT
from tests.definitions.script_checks import Plain, vector_env


class Env(Plain):
    made = 0

    def __init__(self):
        Env.made += 1
        self.number = Env.made

    def limits(self):
        from . import settings as again
        from .settings import LIMIT as late

        return again.LIMIT, settings.LIMIT, LIMIT, late, __package__, settings is again


with vector_env([Env, lambda: Env()], 1) as envs:
    print(envs.call("number"), set(envs.call("limits")))
"""


@pytest.mark.parametrize("start", STARTS)
def test_relative_imports_of_a_package(start, tmp_path):
    (tmp_path / "package").mkdir()
    for name, text in {"__init__": "", "settings": "LIMIT = 5\n", "__main__": PACKAGE_MAIN}.items():
        (tmp_path / "package" / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "package"],
        cwd=tmp_path,
        env={**environment(), "SCRIPT_START": start},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "(1, 2) {(5, 5, 5, 5, 'package', True)}\n", done.stderr


RANK = """
import multiprocessing
from tests.definitions.script_checks import Plain, same_again, vector_env

SIMS = {}


class Data:
    pass


class Sim(Plain):
    def __init__(self):
        self.key = len(SIMS)
        SIMS[self.key] = 0

    def step(self, action):
        SIMS[self.key] += 1
        return 0, float(SIMS[self.key]), False, False, {"data": Data()}

    def pickles(self):
        return type(same_again(Data())) is Data


def rank():
    with vector_env([Sim, lambda: Sim(), Sim, lambda: Sim()]) as envs:
        envs.reset()
        envs.step([0] * 4)
        result = envs.step([0] * 4)
        Data.limit = 3
        same = [type(data) is Data for data in envs.step([0] * 4)[4]["data"]]
        print(result[1].tolist(), same, Data.limit, envs.call("pickles"), flush=True)


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=rank)
    process.start()
    process.join()
    print(process.exitcode)
"""


@pytest.mark.parametrize("start", STARTS)
def test_a_rank_that_multiprocessing_has_spawned(start, tmp_path):
    (tmp_path / "script.py").write_text(RANK)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**environment(), "SCRIPT_START": start},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{[2.0] * 4} {[True] * 4} 3 {(True,) * 4}\n0\n", done.stderr
