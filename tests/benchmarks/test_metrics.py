"""Metrics of `python -m benchmarks` besides throughput."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time

import pytest

from aioenv import speedups
from aioenv.cli import contenders
from aioenv.cli.contenders import NotApplicable, Workload
from aioenv.process.launch import START_METHODS
from benchmarks.__main__ import main
from benchmarks.contenders import CONTENDERS as TIMED
from benchmarks.loop_time import CallbackClock
from benchmarks.metrics import CONTENDERS, METRICS, REGISTRY
from benchmarks.resets import RATE, STEP_S
from tests.kits.cli_kit import STARTS, needs_opengl, spy_on_starts


def run_contender(name, workload):
    return contenders.run_contender(name, workload, REGISTRY)


@pytest.mark.parametrize("env", ["noop", "pixels"])
def test_loop_time_is_measured(env, tmp_path, capfd):
    file = tmp_path / "loop.json"
    args = ["loop-time", "--num-envs", "4", "--rounds", "1", "--seconds", "0.2"]
    assert main([*args, "--env", env, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["loop-time"]
    assert 0 < row["callbacks p50"] < row["thread p50"] <= row["step p50"]
    assert row["callbacks p50"] <= row["callbacks p99"] and row["rounds"][0]["steps"] > 10
    assert f"{row['callbacks p99']:,.2f}" in capfd.readouterr().out


OURS = ["aioenv-step", "aioenv-recv", "aioenv-spares", "aioenv-spares-recv", "aioenv-instant", "bare"]
LAUNCHERS = ["gymnasium-forkserver", "gymnasium-preload", *(f"aioenv-{start}" for start in START_METHODS)]


@needs_opengl
@pytest.mark.parametrize("name", ["pool-fast: bare", "pool-fast: aioenv", "render-workers: aioenv-2"])
def test_images_are_drawn(name):
    workload = Workload("InvertedPendulum-v5", 4, 0.02, warm_up_s=0.01)
    result = run_contender(name, workload)
    keys = METRICS[name.partition(": ")[0]].keys
    assert set(keys) < set(result) and all(0.1 < result[key] < 1e5 for key in keys)
    if name == "pool-fast: bare":
        noop = run_contender(name, dataclasses.replace(workload, env="noop"))
        assert noop == {"not_applicable": "noop has no MuJoCo model to draw"} | {"others_cpus": noop["others_cpus"]}


@pytest.mark.parametrize("name", ["processes", "aioenv"])
@pytest.mark.parametrize("env", ["CartPole-v1", "HalfCheetah-v5"])
def test_collectors_and_plain_processes(name, env):
    result = run_contender(f"collectors: {name}", Workload(env, 4, 0.1, warm_up_s=0.01))
    assert result["env-steps/s"] > 100 and 0.5 < result["CPU µs a step"] < 1e5
    with pytest.raises(NotApplicable, match="takes one of CartPole-v1"):
        METRICS["collectors"].measures[name](Workload("noop", 2, 0.01))


def test_rllib_is_measured_by_the_python_that_has_it(monkeypatch):
    measure = METRICS["collectors"].measures["rllib"]
    with pytest.raises(NotApplicable, match="takes one of CartPole-v1"):
        measure(Workload("noop", 2, 0.01))
    python = os.environ.get("RLLIB_PYTHON")
    monkeypatch.delenv("RLLIB_PYTHON", raising=False)
    with pytest.raises(NotApplicable, match="RLLIB_PYTHON names no Python with RLlib"):
        measure(Workload("CartPole-v1", 2, 0.01))
    if python is None:
        pytest.skip("RLLIB_PYTHON is not set")
    monkeypatch.setenv("RLLIB_PYTHON", python)
    result = measure(Workload("CartPole-v1", 4, 0.1))
    assert result["env-steps/s"] > 100 and 0.5 < result["CPU µs a step"] < 1e5


@pytest.mark.parametrize(
    ("metric", "env", "contenders", "baselines", "keys"),
    [
        (
            "latency",
            "noop",
            ["gymnasium-async", "aioenv", "aioenv-asyncio", "aioenv-sync", "aioenv-streams"],
            1,
            ["p50 µs", "p99 µs"],
        ),
        ("startup", "HalfCheetah-v5", LAUNCHERS, 2, ["ready s"]),
        pytest.param("memory", "noop", LAUNCHERS, 2, ["worker MiB"], marks=pytest.mark.stress),
        (
            "uneven",
            "noop",
            ["gymnasium-async", "aioenv-step", "aioenv-recv"],
            2,
            ["env-steps/s", "least share", "most share"],
        ),
    ],
)
def test_metrics_are_measured(metric, env, contenders, baselines, keys, tmp_path, capfd):
    file = tmp_path / "metric.json"
    args = [metric, "--num-envs", "2", "--rounds", "1", "--seconds", "0.05"]
    # MuJoCo's env is the one that start-up is measured with if nothing is said
    assert main([*args, *(["--env", env] if env == "noop" else []), "--json", str(file)]) == 0
    assert list(tmp_path.iterdir()) == [file], "MuJoCo has left no log"
    output = capfd.readouterr().out
    rows = json.loads(file.read_text())[metric]
    assert [row["contender"] for row in rows] == contenders
    for row in rows:
        assert row["env"] == env
        assert row["problem"] == "" and len(row["rounds"]) == 1 and all(row[key] > 0 for key in keys), row
        for baseline in contenders[:baselines]:
            other = next(r for r in rows if r["contender"] == baseline)
            assert row["ratios"][baseline] == pytest.approx(row[keys[0]] / other[keys[0]])
        assert row["contender"] in output and f"{row[keys[0]]:,.2f}" in output
    assert main([metric, "--list"]) == 0
    assert capfd.readouterr().out.split("\n")[:-1] == contenders


def test_spare_envs_hide_resets():
    """Resets take half as long as episodes. In processes of their own: a `multiprocessing.Barrier` keeps memory."""
    workload = Workload("HalfResets-v0", 2, seconds=0.1, warm_up_s=0.03)
    found = {name: run_contender(f"resets: {name}", workload)[RATE] for name in OURS}
    assert found["aioenv-spares"] > 1.2 * found["aioenv-step"]
    assert all(found[name] < 2 / STEP_S for name in OURS)
    with pytest.raises(NotApplicable, match="takes one of SleepingResets-v0, "):
        METRICS["resets"].measures["bare"](Workload("noop", 2, 0.01))


@pytest.mark.parametrize("name", ["gymnasium-async", "sb3-subproc", "torchrl-parallel"])
def test_other_libraries_wait_for_resets(name):
    result = run_contender(f"resets: {name}", Workload("HalfResets-v0", 2, seconds=0.05, warm_up_s=0.01))
    if "not_applicable" in result:
        pytest.skip(result["not_applicable"])
    assert 0 < result[RATE] < 2 / STEP_S


@needs_opengl
@pytest.mark.stress
@pytest.mark.timeout(600)  # eight processes in turn, which a busy machine takes minutes for
def test_images_are_measured(tmp_path, capfd):
    common = ["--rounds", "1", "--seconds", "0.05", "--json", str(tmp_path / "metric.json")]
    assert main(["images", "--num-envs", "2", *common]) == 0
    rows = json.loads((tmp_path / "metric.json").read_text())["images"]
    ours = [f"aioenv-{whose}{quality}" for whose in ("", "native-") for quality in ("exact", "fast", "coarse")]
    assert [row["contender"] for row in rows] == ["gymnasium-async", *ours]
    assert rows[2]["ratios"]["gymnasium-async"] > 4 < rows[5]["ratios"]["gymnasium-async"]
    assert main(["overlap", "--env", "HalfCheetah-v5", "--num-envs", "2", *common]) == 0
    (row,) = json.loads((tmp_path / "metric.json").read_text())["overlap"]
    assert 0.3 < row["of serial"] and row["physics ms"] > 0 and row["images ms"] > 0


SPY = """
import multiprocessing, sys
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Spy(CartPoleEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if multiprocessing.parent_process() is not None:
            assert not any(name.startswith("aioenv") for name in sys.modules), "it pays for imports of ours"

gymnasium.register("Spy-v0", entry_point=Spy)
"""


# a process that makes one has used 1.3 s of CPU time: each worker, and where Gymnasium makes one first the contender
BURN = """
import time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Burn(CartPoleEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        while time.process_time() < 1.3:
            pass

gymnasium.register("Burn-v0", entry_point=Burn)
"""


@pytest.mark.parametrize("contender", LAUNCHERS[:2])
def test_the_suite_burdens_no_other_contenders_workers(contender, tmp_path):
    (tmp_path / "spies.py").write_text(SPY)  # the working directory: it is found there
    assert run_contender(f"startup: {contender}", Workload("spies:Spy-v0", 1, 0.01))["ready s"] > 0


@pytest.mark.parametrize(
    "contender", [pytest.param("gymnasium-preload", marks=pytest.mark.stress), f"aioenv-{START_METHODS[-1]}"]
)
def test_the_cpu_time_of_a_contenders_workers_counts_as_its_own(contender, tmp_path):
    (tmp_path / "burns.py").write_text(BURN)
    before = sum(os.times()[2:4])
    run_contender(f"startup: {contender}", Workload("burns:Burn-v0", 2, 0.01))
    assert sum(os.times()[2:4]) - before > 2.5


@pytest.mark.parametrize(("start", "channel"), STARTS)
def test_metrics_start_workers_and_pick_the_channel_as_asked(start, channel, monkeypatch):
    asked = spy_on_starts(monkeypatch)
    monkeypatch.setattr(
        contenders, "run_contender", lambda name, workload, registry: CONTENDERS[name].measure(workload)
    )
    small = ["--env", "noop", "--num-envs", "1", "--rounds", "1", "--seconds", "0.01", "--channel", channel]
    for metric, more in (("loop-time", []), ("latency", ["--only", "aioenv"])):
        assert main([metric, *small, *more, "--start", start]) == 0
    assert main(["startup", *small, "--only", f"aioenv-{start}"]) == 0
    assert asked == [(start, channel)] * 3


def test_metrics_refuse_what_would_be_ignored(capfd):
    for args in (["startup", "--start", "spawn"], ["memory", "--only", "bare"], ["latency", "--plot", "x.png"]):
        assert main(args) == 2
        assert args[-1] in (said := capfd.readouterr().err) or args[-2] in said, said
    for wrong in (["latency", "startup"], ["nosuch"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_callback_clock_counts_callbacks_and_not_waiting():
    async def measured() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        with CallbackClock().running() as clock:
            await asyncio.sleep(0)
            before = clock.read()
            burn(0.01)  # this coroutine itself
            loop.call_soon(burn, 0.02)
            await asyncio.sleep(0.05)  # waiting costs nothing
            loop.call_later(0, burn, 0.03)
            await asyncio.sleep(0.01)
            busy = clock.read() - before
        original = clock.read()
        await asyncio.sleep(0)
        burn(0.01)
        return busy, clock.read() - original

    busy, later = asyncio.run(measured())
    assert 0.06 <= busy < 0.075
    assert later == 0  # nothing is measured any more


def test_the_physics_alone_is_measured():
    workload = Workload("Reacher-v5", num_envs=4, seconds=0.02, warm_up_s=0.01)
    for name in ("aioenv-native", "raw-batch", "raw-loop"):
        assert TIMED[name].measure(workload)["env_steps"] >= 4
    for name in ("raw-batch-still", "raw-loop-still"):
        if speedups.stopped_clock is None:
            with pytest.raises(NotApplicable, match="clock can't be stopped"):
                TIMED[name].measure(workload)
        else:
            assert TIMED[name].measure(workload)["env_steps"] >= 4
    with pytest.raises(NotApplicable, match="CartPole-v1 is no MuJoCo task"):
        TIMED["raw-loop"].measure(Workload("CartPole-v1", num_envs=4, seconds=0.05))
