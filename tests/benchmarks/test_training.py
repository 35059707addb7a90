"""Training from end to end, and few cheap envs: rows, contenders, tables and goals."""

from __future__ import annotations

import json
import logging
from contextlib import closing

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from aioenv.cli.contenders import NotApplicable, Outcome, Workload
from benchmarks import suite, tables, training
from benchmarks.__main__ import main
from benchmarks.contenders import CONTENDERS
from benchmarks.goals import judge
from benchmarks.metrics import METRICS, refuse_differing
from benchmarks.rows import CHEAP_ENVS, ROWS
from benchmarks.training import Batch, NumpyLearner


def test_cleanrls_ppo_sees_the_same_steps_with_each_vector_env(monkeypatch):
    monkeypatch.setattr(training, "UPDATES", 1)
    workload = Workload("CartPole-v1", 4, 0.01)
    told = {name: measure(workload) for name, measure in METRICS["training"].measures.items()}
    assert list(told) == ["gymnasium-sync", "aioenv-in-process-sync", "aioenv-sync", "aioenv-auto"]
    assert len({(each["trajectory"], each["mean return"]) for each in told.values()}) == 1
    assert all(each["fps"] > 10 and 5 < each["mean return"] < 100 for each in told.values())
    other = METRICS["training"].measures["gymnasium-sync"](Workload("CartPole-v1", 3, 0.01))
    assert other["trajectory"] != told["aioenv-sync"]["trajectory"]


def test_time_limits_are_no_ends(monkeypatch):
    """The learner is asked for the values of episodes that a time limit has cut, and not of others."""
    monkeypatch.setattr(training, "UPDATES", 1)
    asked = []

    class Learner(NumpyLearner):
        def value(self, obs):
            asked.append(len(obs))
            return super().value(obs)

    for kind in ("gymnasium", "in process"):
        asked.clear()
        with closing(training._make(kind, [cut_short] * 2, Workload("unused", 2, 0.01))) as envs:
            assert training._train(envs, Learner(4, 2))["mean return"] == 4
        cuts = 2 * training.STEPS * 2 // 4  # two updates of two slots
        assert sum(asked) == cuts + 2 * 2  # and the last observations of each update


def cut_short():
    return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1", max_episode_steps=4))


def test_advantages_begin_anew_with_each_episode():
    rewards, values = np.ones((4, 2), np.float32), np.full((4, 2), 0.5, np.float32)
    ended = np.zeros((4, 2), bool)
    ended[1, 0] = True
    found = training._advantages(rewards, values, ended, np.float32([2, 3]))
    gamma, decay = training.GAMMA, training.GAMMA * training.LAMBDA
    last = 1 + gamma * np.float32([2, 3]) - 0.5
    third = 1 + gamma * 0.5 - 0.5 + decay * last
    second = [0.5, 0.5 + gamma * 0.5 + decay * third[1]]
    first = 0.5 + gamma * 0.5 + decay * np.array(second)
    assert np.allclose(found, [first, second, third, last], atol=1e-5)


@pytest.mark.parametrize("make", ["torch", "numpy"])
def test_learners_prefer_what_is_better(make):
    if make == "torch":
        pytest.importorskip("torch")
    learner = training._torch_learner(4, Discrete(2)) if make == "torch" else NumpyLearner(4, 2)
    obs = np.random.default_rng(0).standard_normal((1024, 4)).astype(np.float32)
    for _ in range(20):
        actions, logp, values = learner.act(obs)
        assert actions.shape == logp.shape == values.shape == (1024,) and (logp < 0).all()
        better = (actions == 1).astype(np.float32)
        learner.learn(Batch(obs, actions, logp, values, better, better + values))
    assert (learner.act(obs)[0] == 1).mean() > 0.6 and learner.value(obs).mean() > values.mean() - 0.1


@pytest.mark.parametrize("metric", ["training-continuous", "training-sac"])
def test_actions_that_are_vectors_see_the_same_steps_with_each_vector_env(metric, monkeypatch):
    pytest.importorskip("torch")
    for name, value in {"UPDATES": 1, "SAC_RANDOM": 20, "SAC_STEPS": 30}.items():
        monkeypatch.setattr(training, name, value)
    told = [measure(Workload("Hopper-v5", 3, 0.01)) for measure in METRICS[metric].measures.values()]
    assert len(told) == 2 and told[0]["fps"] > 1
    assert len({(each["trajectory"], each["mean return"]) for each in told}) == 1 and told[0]["mean return"] > 5


def test_continuous_policies_prefer_what_is_better():
    torch = pytest.importorskip("torch")
    obs = np.random.default_rng(0).standard_normal((1024, 4)).astype(np.float32)
    space = Box(-1, 1, (2,))
    learner = training._torch_learner(4, space)
    for _ in range(20):
        actions, logp, values = learner.act(obs)
        assert actions.shape == (1024, 2) and logp.shape == values.shape == (1024,)
        better = actions[:, 0]
        learner.learn(Batch(obs, actions, logp, values, better, better + values))
    assert learner.act(obs)[0][:, 0].mean() > 0.1
    act, learn = training._sac_learner(4, space)
    zeros = np.zeros((256, 1), np.float32)
    for _ in range(300):
        actions = np.random.default_rng().uniform(-1, 1, (256, 2)).astype(np.float32)
        learn(obs[:256], actions, 5 * actions[:, :1], obs[:256], zeros + 1)
    assert act(obs)[:, 0].mean() > 0.3 and torch.get_num_threads() == 1


def test_training_takes_vectors():
    for metric in ("training", "training-sac"):
        with pytest.raises(NotApplicable, match=r"vectors|torch"):
            METRICS[metric].measures["gymnasium-sync"](Workload("FrozenLake-v1", 1, 0.01))


def test_sb3s_ppo_sees_the_same_steps_with_each_vector_env(monkeypatch):
    workload = Workload("CartPole-v1", 2, 0.01)
    measures = METRICS["training-sb3"].measures
    try:
        import stable_baselines3  # noqa: F401
    except ImportError:
        with pytest.raises(NotApplicable, match="stable-baselines3"):
            measures["sb3-dummy"](workload)
        return
    monkeypatch.setattr(training, "UPDATES", 1)
    told = [measure(workload) for measure in measures.values()]
    assert len({(each["trajectory"], each["mean return"]) for each in told}) == 1 and told[0]["fps"] > 10


def test_results_that_differ_are_refused():
    def outcomes(*trajectories: list[int]) -> dict[str, Outcome]:
        rounds = [[{"fps": 1.0, "trajectory": one} for one in each] for each in trajectories]
        return {name: Outcome(each) for name, each in zip("abcd", rounds, strict=False)}

    metric = METRICS["training"]
    refuse_differing(metric, same := outcomes([], [5, 5], [5]))
    assert not any(each.broken for each in same.values()) and len(same["b"].rounds) == 2
    refuse_differing(metric, differing := outcomes([5, 6], [5, 5], [6, 5], [5]))
    assert [(each.broken, len(each.rounds)) for each in differing.values()] == [
        (True, 0),
        (False, 2),
        (True, 0),
        (False, 1),
    ]
    assert differing["c"].problem == "its trajectory differs from that of the first round of a"
    refuse_differing(METRICS["latency"], unasked := {"a": Outcome([{"p50 µs": 1.0}])})
    assert unasked["a"].rounds


# ---------------------------------------------------------------- few cheap envs


def test_contenders_in_this_process_step_and_say_where(caplog):
    caplog.set_level(logging.INFO, "aioenv")
    workload = Workload("CartPole-v1", 2, 0.02, warm_up_s=0.01, start="forkserver", channel="streams")
    told = {}
    for name in ("aioenv", "aioenv-in-process", "aioenv-native", "aioenv-in-process-sync", "aioenv-auto"):
        if CONTENDERS[name].installed:
            told[name] = CONTENDERS[name].measure(workload)
            assert told[name]["env_steps"] == 2 * told[name]["steps"] > 0
    assert told["aioenv-in-process"]["backend"] == "in_process" and told["aioenv-native"]["backend"] == "native"
    assert told["aioenv-auto"]["backend"] == "native" and "step natively" in caplog.text
    assert told.get("aioenv", {"backend": "workers"})["backend"] == "workers"
    assert CONTENDERS["aioenv-auto"].measure(Workload("noop", 1, 0.02))["backend"] == "workers"


def test_cheap_envs_stand_in_tables_of_their_own_and_are_judged(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(suite, "IDLE_CHECK_S", 0.01)
    file, directory = tmp_path / "cheap.json", tmp_path / "data"
    small = ["--rounds", "1", "--seconds", "0.02", "--json", str(file), "--tables", str(directory)]
    only = ["aioenv-in-process", "aioenv-auto", "aioenv-in-process-sync", "gymnasium-sync"]
    assert main([*small, "--rows", "cheap-cartpole-1", "--only", *only]) == 0
    printed = capfd.readouterr().out
    (row,) = json.loads(file.read_text())["rows"].values()
    results = {result["contender"]: result for result in row["results"]}
    assert list(results) == [name for name in ROWS["cheap-cartpole-1"].contenders if name in only]
    (auto,) = tables.read(directory / "auto.csv")
    ratio = results["aioenv-auto"]["ratios"]["aioenv-in-process"]
    chosen, fastest = results["aioenv-auto"]["rounds"][0]["backend"], "aioenv (num_workers=0)"
    assert (auto["task"], auto["num_envs"], auto["chosen"], auto["fastest"]) == ("CartPole-v1", "1", chosen, fastest)
    assert float(auto["ratio"]) == pytest.approx(ratio, rel=1e-3) and auto["date"] == row["at"].split()[0]
    assert f'backend="auto" chose {chosen}: {ratio:.2f} x {fastest}' in printed
    cheap = {(one["contender"], one["unit"]): one["median"] for one in tables.read(directory / "cheap.csv")}
    sync = "x gymnasium SyncVectorEnv"
    labels = [CONTENDERS[name].label for name in only]
    assert set(cheap) == {*((label, "env-steps/s") for label in labels), *((label, sync) for label in labels[:3])}
    ours = results["aioenv-in-process"]["ratios"]["gymnasium-sync"]
    assert float(cheap[fastest, sync]) == pytest.approx(ours, rel=1e-3)
    found = {one["goal"]: one["found"] for one in tables.read(directory / "goals.csv")}
    assert found["CartPole-v1 x 1, num_workers=0, x Sync"] == f"{ours:.2f}"
    assert found["CartPole-v1 x 1, backend=auto, x the fastest backend"] == f"{ratio:.2f}" and len(found) == 3


def test_auto_is_compared_with_the_fastest_backend():
    def result(name: str, ratios: dict[str, float], *backends: str) -> dict:
        return {"contender": name, "rounds": [{"backend": one} for one in backends], "ratios": ratios}

    ratios = {"aioenv-auto": 1.0, "aioenv": 3.0, "aioenv-in-process": 0.8, "aioenv-native": 0.7, "bare": 0.1}
    auto = result("aioenv-auto", ratios, "in_process", "workers", "in_process")
    assert tables.choice_of_auto([result("aioenv", {}, "workers"), auto]) == (
        "in_process, workers",
        "aioenv-native",
        0.7,
    )
    assert tables.choice_of_auto([result("aioenv-auto", {"aioenv-auto": 1.0, "bare": 0.1}, "native")]) is None
    assert tables.choice_of_auto([result("aioenv-auto", {})]) is None
    names = {name: result(name, ratios if name == "aioenv-auto" else {}, "x") for name in ratios}
    told = judge({"machine": {"usable_cpus": 2}, "rows": {"cheap-halfcheetah-16": {"results": list(names.values())}}})
    assert [(one["goal"], one["found"], one["verdict"]) for one in told] == [
        ("HalfCheetah-v5 x 16, backend=auto, x the fastest backend", 0.7, "MISSED")
    ]


def test_each_cheap_env_has_a_row_for_each_number():
    rows = [row for row in ROWS.values() if row.metric == "cheap"]
    assert {(row.env, row.num_envs) for row in rows} == {
        (env, n) for env in ("CartPole-v1", "HalfCheetah-v5") for n in CHEAP_ENVS
    }
    assert all(row.timed and len(row.contenders) == 8 for row in rows)
