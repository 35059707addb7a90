"""Steps over a network: the rows of the suite, the model, and the figures of its page."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from aioenv.cli.contenders import NotApplicable, Workload, run_contender
from aioenv.platform import usable_cpus
from benchmarks import cluster, goals, tables
from benchmarks.delayed_rollouts import DELAYED_KEYS
from benchmarks.metrics import METRICS, REGISTRY
from benchmarks.network import (
    DELAYS_MS,
    MANY,
    NETWORK_ENVS,
    NETWORK_KEYS,
    NUM_ENVS,
    PREDICTED,
    PREDICTED_WORKERS,
    ROUND_TRIPS_MS,
    STEP_S,
    WORKERS,
    Model,
    measured_of,
    step_bytes,
)

DOCS = Path(__file__).parents[2] / "docs"
MODEL = Model(30e-6, 10e-6, 2e9, {"noop": 100e-6, "pixels": 900e-6})


def a_measurement(relay_ms: float = 0.5) -> dict:
    """What would be measured if the model were right."""
    found = {}
    for env in NETWORK_ENVS:
        for workers in (*WORKERS, MANY):
            own_ms = 1e3 * MODEL.own_s(workers, step_bytes(env))
            step_ms = own_ms + 1e3 * (STEP_S + MODEL.wake_s[env])
            step_ms += 2.0 * (workers == MANY)  # they share CPUs
            found[env, workers] = {"step ms": step_ms, "own ms": own_ms}
            for delay in (0, *DELAYS_MS):
                found[env, workers] |= {
                    f"step ms, {delay:g}": step_ms + relay_ms + 2.1 * delay,
                    f"trip ms, {delay:g}": 0.1 + 2.1 * delay,
                }
    return found


def test_the_model_is_fitted_and_compared():
    measured = a_measurement()
    model = Model.fit(measured)
    for name in ("fixed_s", "a_worker_s", "bytes_per_s"):
        assert getattr(model, name) == pytest.approx(getattr(MODEL, name), rel=1e-6)
    assert model.wake_s == pytest.approx(MODEL.wake_s)
    compared = model.of_measured(measured)
    assert set(compared) == {(env, n, delay) for env in NETWORK_ENVS for n in WORKERS for delay in DELAYS_MS}
    assert list(compared.values()) == pytest.approx([1.0] * len(compared))


def test_a_link_limits_large_messages_alone():
    free, limited = (MODEL.step_s(10, 1e7, 5e-3, 1e-3, link_bytes_per_s=link) for link in (0, 1e9))
    assert free == pytest.approx(30e-6 + 100e-6 + 5e-3 + 5e-3 + 1e-3)
    assert limited - free == pytest.approx(5e-3)
    rate, share = MODEL.predict("few bytes", 10, 1.0)
    assert rate == pytest.approx(160 * share / 5e-3) and 0.7 < share < 0.85


def test_goals_judge_the_model():
    measured = a_measurement()
    measured["noop", 3]["step ms, 1"] *= 1.3
    rows = {
        f"network-{env}": {
            "results": [
                {"contender": f"aioenv-{n}", "rounds": [{}], "others_cpus": None, **measured[env, n]}
                for n in (*WORKERS, MANY)
            ],
        }
        for env in NETWORK_ENVS
    }
    judged = {each["goal"]: each for each in goals.judge({"machine": {"usable_cpus": 2}, "rows": rows})}
    found = {delay: judged[f"steps with {delay:g} ms each way, % off the model"] for delay in DELAYS_MS}
    assert found[1.0]["found"] == pytest.approx(30) and found[1.0]["verdict"] == "MISSED"
    assert found[10.0]["verdict"] == "target"
    del rows["network-pixels"]
    assert goals.judge({"machine": {"usable_cpus": 2}, "rows": rows}) == []


def test_steps_are_delayed():
    result = run_contender("network: aioenv-2", Workload("noop", 4, 0.02, warm_up_s=0.01), REGISTRY)
    assert set(NETWORK_KEYS) <= set(result)
    for delay in DELAYS_MS:
        assert result[f"step ms, {delay:g}"] > 2 * delay + 1e3 * STEP_S
        assert result[f"trip ms, {delay:g}"] > 2 * delay
    for wrong in (Workload("CartPole-v1", 4, 0.02), Workload("noop", 3, 0.02)):
        with pytest.raises(NotApplicable, match="takes noop or pixels, and a number of envs that 2 divides"):
            METRICS["network"].measures["aioenv-2"](wrong)


def test_rollouts_of_collectors_are_delayed():
    found = {}
    for name in ("aioenv", "aioenv-prefetch"):
        found[name] = run_contender(f"network-rollouts: {name}", Workload("CartPole-v1", 4, 0.02), REGISTRY)
        assert set(DELAYED_KEYS) <= set(found[name])
    # two collectors have two slots each; no more rollouts than these fit into a round trip of 20 ms
    assert found["aioenv"][DELAYED_KEYS[2]] < 1.05 * 2 * 2 * 128 / 20e-3
    assert found["aioenv-prefetch"][DELAYED_KEYS[2]] < 2.1 * 2 * 2 * 128 / 20e-3
    with pytest.raises(NotApplicable, match="takes one of noop, CartPole-v1"):
        METRICS["network-rollouts"].measures["aioenv"](Workload("pixels", 2, 0.02))


def test_bare_sockets_carry_as_many_bytes():
    workload = Workload("pixels", 4, 0.01)
    with closing(cluster.Sockets(workload)) as sockets:
        for actions in workload.actions()[:3]:
            assert sockets.step(actions).shape == (4, 84 * 84 * 4 + 10)
        assert len(sockets._processes) == min(usable_cpus(), 4)
    with pytest.raises(NotApplicable, match="are a Box"):
        cluster.Sockets(Workload("Blackjack-v1", 2, 0.01))


@pytest.mark.parametrize("name", ["aioenv-ray", "ray-actors", "tianshou-ray"])
def test_without_ray_its_contenders_take_no_part(name, monkeypatch):
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NotApplicable, match="not installed"):
        METRICS["cluster"].measures[name](Workload("CartPole-v1", 2, 0.01))


def test_workers_over_tcp_are_measured():
    result = run_contender("cluster: aioenv-tcp", Workload("CartPole-v1", 4, 0.02, warm_up_s=0.01), REGISTRY)
    assert result["env-steps/s"] > 0


def newest() -> Model:
    measured = measured_of(tables.newest(tables.read(DOCS / "data" / "network.csv")))
    assert set(measured) == {(env, workers) for env in NETWORK_ENVS for workers in (*WORKERS, MANY)}
    return Model.fit(measured)


def test_the_page_has_what_the_model_predicts():
    model, page = newest(), (DOCS / "explanation" / "cluster.md").read_text(encoding="utf-8")
    for task in PREDICTED:
        for workers in PREDICTED_WORKERS:
            cells = [
                f"{rate / 1e3:.3g} k, {100 * share:.0f} %"
                for rate, share in (model.predict(task, workers, trip) for trip in ROUND_TRIPS_MS)
            ]
            assert f"| {workers:,}, {task} | {' | '.join(cells)} |" in page
    own_us = [1e6 * model.fixed_s, 1e6 * model.a_worker_s]
    assert "FIXED = {:.0f} µs, A_WORKER = {:.0f} µs".format(*own_us) in re.sub(r"\s+", " ", page)


def test_measured_steps_are_within_15_percent_of_the_model():
    rows = tables.newest(tables.read(DOCS / "data" / "network.csv"))
    assert {row["num_envs"] for row in rows} == {str(NUM_ENVS)}
    compared = newest().of_measured(measured_of(rows))
    assert {key: ratio for key, ratio in compared.items() if abs(ratio - 1) > 0.15} == {}
