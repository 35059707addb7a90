"""Contenders of `aioenv bench` and of the suite, with envs that are out of the ordinary."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from aioenv.cli import contenders
from aioenv.cli.contenders import ContenderFailed, Workload
from benchmarks.metrics import REGISTRY


def run_contender(name, workload):
    return contenders.run_contender(name, workload, REGISTRY)


ODD = """
import gymnasium
from gymnasium import spaces

class Odd(gymnasium.Env):
    observation_space = spaces.Discrete(2)
    action_space = spaces.Dict(
        a=spaces.Discrete(3, start=1), b=spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Text(5, min_length=1)])
    )

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return 0, 0.0, False, False, {}

class Broken(Odd):
    def reset(self, *, seed=None, options=None):
        error = ValueError("no reset today\\nnor tomorrow")
        error.add_note("but next week")
        raise error

gymnasium.register("Odd-v0", entry_point=Odd)
gymnasium.register("Broken-v0", entry_point=Broken)
"""


@pytest.mark.parametrize("name", ["aioenv-groups", "bare", "uneven: aioenv-recv"])
def test_bench_steps_envs_whose_actions_are_dicts_and_tuples(name, tmp_path):
    (tmp_path / "odd_of_here.py").write_text(ODD)
    result = run_contender(name, Workload("odd_of_here:Odd-v0", 3, 0.01, warm_up_s=0.01))
    assert result.get("env_steps") or result["env-steps/s"]
    lockstep = run_contender("bare-lockstep", Workload("odd_of_here:Odd-v0", 3, 0.01, warm_up_s=0.01))
    assert lockstep["not_applicable"] == "takes actions that are arrays"


@pytest.mark.parametrize("name", ["aioenv-groups", "bare"])
def test_bench_says_what_a_contender_has_raised(name, tmp_path):
    (tmp_path / "odd_of_here.py").write_text(ODD)
    with pytest.raises(ContenderFailed) as told:
        run_contender(name, Workload("odd_of_here:Broken-v0", 2, 0.01))
    where = {"aioenv-groups": r"EnvError: slot 0 \(worker 0, pid \d+\): "}.get(name, "")
    assert re.fullmatch(f"failed with status 1: {where}ValueError: no reset today nor tomorrow", str(told.value))


def test_groups_of_slow_envs_look_at_the_clock_more_often(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1] / "kits")  # where `sleepy` is found, whose steps take 50 ms
    slow = Workload("sleepy:Sleepy-v0", 2, 0.12, warm_up_s=0.01, keywords={"num_workers": 1})
    result = run_contender("aioenv-groups", slow)
    assert 0 < result["steps"] <= 4 and result["env_steps"] == 2 * result["steps"]
    assert asyncio.run(contenders._steps_that_fit(lambda steps: asyncio.sleep(0), 9.0)) == contenders.ROLLOUT_STEPS
