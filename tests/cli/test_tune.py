"""`aioenv tune`: what it tries, how it judges, what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import aioenv
from aioenv.cli import contenders, main, tune
from aioenv.platform import usable_cpus
from aioenv.requirements import has_batch


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.1, 1.2, 1.05], "better"),
        ([1.4, 0.99, 1.3], "noise"),  # the rounds don't agree
        ([1.01, 1.005, 1.01], "noise"),  # they do, but it is nothing
        ([0.9, 0.8, 0.95], "worse"),
        ([0.995, 0.99, 0.999], "noise"),
    ],
)
def test_a_difference_counts_if_all_rounds_agree(ratios, expected):
    assert tune.verdict(ratios) == expected


def test_lines_to_paste_have_what_differs_from_the_defaults():
    assert tune.paste("Ant-v5", 8, {}) == ["envs = aioenv.make_vec('Ant-v5', num_envs=8)"]
    lines = tune.paste("Ant-v5", 8, {"num_workers": 4, "copy": False, "groups": 2, "loop": "asyncio"})
    assert lines[0] == "envs = aioenv.make_vec('Ant-v5', num_envs=8, num_workers=4, copy=False)"
    assert "groups=2" in lines[1] and "asyncio.run(" in lines[2]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("env", "settings"),
    [("noop", {"num_workers": 1, "channel": "streams"}), ("CartPole-v1", {"backend": "native", "copy": False})],
)
async def test_lines_to_paste_run_as_they_are(env, settings):
    names = {"aioenv": aioenv}
    exec("\n".join(tune.paste(env, 2, settings)), names)
    async with names["envs"] as envs:
        await envs.reset(seed=0)
        assert (await envs.step(envs.action_space.sample())).obs.shape == (2, 4)


def test_dimensions_begin_with_the_default_and_repeat_nothing():
    found = {dimension.name: dimension.values for dimension in tune.dimensions("CartPole-v1", 64)}
    assert found["num_workers"][0] == min(usable_cpus(), 64) and 1 in found["num_workers"]
    assert {"num_workers", "channel", "copy"} <= set(found)
    assert all(len(values) == len(set(values)) > 1 for values in found.values())
    assert "num_workers" not in {dimension.name for dimension in tune.dimensions("CartPole-v1", 1)}


def test_what_is_tried_of_a_vectorised_version():
    def natively(env):
        return {dimension.name for dimension in tune.dimensions(env, 8) if dimension.natively}

    assert natively("Hopper-v5") - {"loop"} == ({"groups", "copy"} if has_batch() else {"copy"})
    assert natively("CartPole-v1") - {"loop"} == {"copy"}  # its slots draw from one generator, and step together


@pytest.mark.stress
def test_tune_goes_on_with_the_vectorised_version(tmp_path, capfd):
    file = tmp_path / "tune.json"
    args = ["tune", "CartPole-v1", "--rounds", "2", "--seconds", "0.3", "--only", "backend", "num_workers", "copy"]
    assert main([*args, "--json", str(file)]) == 0
    output, content = capfd.readouterr().out, json.loads(file.read_text())
    assert [stage["setting"] for stage in content["stages"]] == ["backend", "copy", "once more", "blocking code"]
    assert content["best"]["backend"] == "native"
    assert "Blocking code is " in output and "    envs = aioenv.sync.make_vec('CartPole-v1', num_envs=64" in output


def test_tune_finds_what_is_faster_and_confirms_it(monkeypatch, tmp_path, capfd):
    kits = Path(__file__).parents[1] / "kits"
    monkeypatch.chdir(kits)  # where `sleepy` is found: one worker each is the fastest by far
    monkeypatch.setattr(tune, "CONFIRM_ROUNDS", 2)
    monkeypatch.setattr(tune, "dimensions", lambda env, n: [tune.Dimension("num_workers", (min(usable_cpus(), n), n))])
    n, file = 2 * usable_cpus(), tmp_path / "tune.json"
    args = ["tune", "sleepy:Sleepy-v0", "--num-envs", str(n), "--rounds", "2", "--seconds", "0.3"]
    assert main([*args, "--json", str(file)]) == 0
    output = capfd.readouterr().out
    content = json.loads(file.read_text())
    assert content["best"] == {"num_workers": n}
    assert (
        f"envs = aioenv.make_vec('sleepy:Sleepy-v0', num_envs={n}, num_workers={n})" in output and "\nBest: " in output
    )
    search, confirmation = content["stages"]
    assert search["setting"] == "num_workers" and confirmation["candidates"][1]["settings"] == {"num_workers": n}
    for stage in content["stages"]:
        base = stage["candidates"][0]
        for candidate in stage["candidates"][1:]:
            assert len(candidate["rounds"]) == 2
            pairs = zip(candidate["rounds"], base["rounds"], strict=True)
            expected = [a["env_steps"] / a["seconds"] / (b["env_steps"] / b["seconds"]) for a, b in pairs]
            assert candidate["ratios"] == pytest.approx(expected)


def test_tune_refuses_early(capfd):
    for wrong, told in (
        (["NoSuchEnv-v0"], "NoSuchEnv"),
        (["noop", "--rounds", "1"], "at least 2"),
        (["noop", "--only", "colour"], "colour"),
        (["noop", "--num-envs", "1", "--only", "num_workers"], "num_workers"),
    ):
        assert main(["tune", *wrong]) == 2
        assert told in capfd.readouterr().err
    assert main(["tune", "noop", "--list"]) == 0
    assert "num_workers" in capfd.readouterr().out


BROKEN = """
import gymnasium

class Broken(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        raise RuntimeError("it is out of order")

gymnasium.register("Broken-v0", entry_point=Broken)
"""


def test_tune_says_if_the_env_can_not_be_stepped(tmp_path, monkeypatch, capfd):
    (tmp_path / "brokenenv.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["tune", "brokenenv:Broken-v0", "--num-envs", "2", "--only", "copy"]) == 1
    assert "out of order" in capfd.readouterr().err


def playing(monkeypatch, happens):
    """Have tune measure nothing: `happens(label, settings)` may raise, or return a problem; native envs are faster."""

    def play_rounds(entries, rounds_, progress, *, outcomes):
        for label, (_, workload) in entries.items():
            outcome = outcomes[label] = contenders.Outcome()
            rate = 900 if "backend" in workload.keywords else 100
            outcome.rounds = [{"env_steps": rate, "seconds": 1.0}] * rounds_
            if problem := happens(label, workload.keywords):
                outcome.problem, outcome.broken = problem, True

    monkeypatch.setattr(contenders, "play_rounds", play_rounds)
    monkeypatch.setattr(tune, "foreign_load", lambda seconds: 0.0)


def test_what_tune_found_is_told_and_written_though_blocking_code_can_not_be_compared(tmp_path, monkeypatch, capfd):
    playing(monkeypatch, lambda label, _: label == "await" and "failed: no licence")
    file = tmp_path / "tune.json"
    assert main(["tune", "CartPole-v1", "--only", "backend", "--json", str(file)]) == 0
    told = capfd.readouterr().out
    assert "Blocking code could not be compared: with backend=native, CartPole-v1 failed: no licence" in told
    assert "backend='native')" in told
    content = json.loads(file.read_text())
    assert content["best"] == {"backend": "native"}
    assert [stage["setting"] for stage in content["stages"]] == ["backend", "once more", "blocking code"]
    assert content["stages"][-1]["candidates"][0]["problem"] == "failed: no licence"


def test_tune_names_the_settings_that_failed_and_writes_the_rest(tmp_path, monkeypatch, capfd):
    file = tmp_path / "tune.json"
    args = ["tune", "CartPole-v1", "--only", "backend", "copy", "--json", str(file)]
    playing(monkeypatch, lambda label, _: label == "True" and "failed: no licence")  # copy's default, natively
    assert main(args) == 1
    told = capfd.readouterr().err
    assert told == "aioenv tune: with backend=native, CartPole-v1 failed: no licence\n"
    content = json.loads(file.read_text())
    assert content["best"] is None and [stage["setting"] for stage in content["stages"]] == ["backend", "copy"]


def test_what_tune_measured_before_ctrl_c_is_written(tmp_path, monkeypatch, capfd):
    def interrupted(label, keywords):
        if keywords.get("copy") is False:
            raise KeyboardInterrupt

    playing(monkeypatch, interrupted)
    assert main(["tune", "CartPole-v1", "--only", "backend", "copy", "--json", str(tmp_path / "tune.json")]) == 130
    content = json.loads((tmp_path / "tune.json").read_text())
    assert content["best"] is None
    assert [len(candidate["rounds"]) for candidate in content["stages"][1]["candidates"]] == [3, 3]
    assert len(content["stages"][0]["candidates"][1]["ratios"]) == 3


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * (1 if unit == "s" else 60)


@pytest.mark.parametrize("slowness", [0.9, 1.0, 4.0])
@pytest.mark.parametrize("env", ["noop", "CartPole-v1"])  # whose vectorised version is better
def test_tune_takes_as_long_as_it_says_before_it_starts(env, slowness, monkeypatch, capfd):
    """Measurements take 2 s and 0.05 s a worker; later all are slower by a factor, and then less is tried."""
    clock, calls = 0.0, 0

    def happens(label, keywords):
        nonlocal clock, calls
        calls += 1
        workers = keywords.get("num_workers", 2) if "backend" not in keywords else 0
        rounds = 1 if calls <= 2 else 3
        clock += rounds * (2 + 0.05 * workers) * (1 if calls <= 2 else slowness)

    playing(monkeypatch, happens)
    monkeypatch.setattr(tune, "time", SimpleNamespace(perf_counter=lambda: clock))
    monkeypatch.setattr(tune, "CONFIRM_ROUNDS", 3)
    assert main(["tune", env]) == 0
    told = capfd.readouterr().out
    least, longest = re.findall(r"([\d.]+ (?:s|minutes))", re.search(r"Takes (.*?):", told)[1].replace(" to ", ", "))
    assert 0.85 * seconds(least) <= clock <= 1.05 * seconds(longest) + 5
    assert slowness > 1 or "Not tried" not in told
    if env == "noop" and slowness > 1:
        assert "Not tried, since the time is up: " in told
