"""The suite, `python -m benchmarks`: rows, resuming, tables and goals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import aioenv
from aioenv.cli import contenders
from aioenv.cli import main as aioenv_main
from aioenv.cli.arguments import SYNTHETIC
from aioenv.cli.contenders import NotApplicable, Workload
from aioenv.platform import usable_cpus
from benchmarks import plots, suite, tables
from benchmarks.__main__ import main
from benchmarks.contenders import CONTENDERS, TwoLayers
from benchmarks.goals import judge
from benchmarks.metrics import METRICS, REGISTRY
from benchmarks.rows import ROWS, estimate_s

SMALL = ["--rounds", "1", "--seconds", "0.05"]
DATA = Path(__file__).parents[2] / "docs" / "data"
PAGE_TASKS = {
    "CartPole": "CartPole-v1",
    "HalfCheetah": "HalfCheetah-v5",
    "Ant": "Ant-v5",
    "Humanoid": "Humanoid-v5",
    "(84, 84, 4)": "pixels",
    "no-op": "noop",
}


def run_contender(name, workload):
    return contenders.run_contender(name, workload, REGISTRY)


def test_all_measures_rows_fills_the_tables_and_resumes(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(suite, "IDLE_CHECK_S", 0.2)
    file, directory = tmp_path / "new" / "all.json", tmp_path / "data"
    only = ["--only", "aioenv", "gymnasium-sync", "bare", "pufferlib"]
    args = [*SMALL, *only, "--resume", str(file), "--tables", str(directory), "--rows"]
    assert main([*args, "noop-1"]) == 0
    output = capfd.readouterr().out
    assert "1 rows, 0 of them measured already" in output and "others use" in output.lower()
    content = json.loads(file.read_text())
    (key, row), *more = content["rows"].items()
    results = {result["contender"]: result for result in row["results"]}
    assert (key, more) == ("noop-1", []) and {"aioenv", "gymnasium-sync", "bare"} <= set(results)
    assert content["settings"]["rounds"] == 1 and len(content["idle"]) == 1
    if not CONTENDERS["pufferlib"].installed:
        assert results["pufferlib"]["problem"] == "not installed"
    ratio = results["aioenv"]["env_steps_per_s"] / results["gymnasium-sync"]["env_steps_per_s"]
    assert results["aioenv"]["ratios"]["gymnasium-sync"] == pytest.approx(ratio)
    assert main([*args, "noop-1", "cost-4"]) == 0
    assert "2 rows, 1 of them measured already" in capfd.readouterr().out
    resumed = json.loads(file.read_text())
    assert resumed["rows"]["noop-1"] == row and list(resumed["rows"]) == ["noop-1", "cost-4"]
    (noop,) = [row for row in tables.read(directory / "throughput.csv") if row["contender"] == "aioenv (uvloop)"]
    assert (noop["task"], noop["num_envs"], noop["unit"]) == ("noop", "1", "env-steps/s")
    assert float(noop["median"]) == pytest.approx(results["aioenv"]["env_steps_per_s"], rel=1e-3)
    assert noop["low"] == noop["median"] == noop["high"] and noop["date"] == row["at"].split()[0]
    found = tables.read(directory / "throughput-ratios.csv")
    (told,) = [row for row in found if row["unit"] == "x gymnasium SyncVectorEnv"]
    assert float(told["median"]) == pytest.approx(ratio, rel=1e-3)
    cost = next(r for r in resumed["rows"]["cost-4"]["results"] if r["contender"] == "aioenv")
    told = next(row for row in tables.read(directory / "cost.csv") if row["contender"] == "aioenv (uvloop)")
    assert float(told["median"]) == pytest.approx(1e6 / cost["env_steps_per_s"], rel=1e-3)
    (run,) = tables.read(directory / "runs.csv")
    assert run["rounds"] == "1" and "gymnasium" in run["packages"] and run["machine"] == noop["machine"]
    assert main([*SMALL[:-1], "0.06", *only, "--resume", str(file)]) == 2
    assert "seconds was 0.05 and is 0.06 now" in capfd.readouterr().err


def test_all_refuses_what_would_be_ignored_or_overwritten(tmp_path, capfd):
    (other_table := tmp_path / "cost.csv").write_text("nothing,of\nours,\n")
    (other := tmp_path / "other.json").write_text("{}")
    (list_ := tmp_path / "list.json").write_text('{"machine": {}, "settings": {}, "rows": [], "idle": []}')
    (like := tmp_path / "like.json").write_text('{"machine": 3, "settings": [], "rows": {"a": 1}, "idle": []}')
    for wrong, told in (
        ([*SMALL, "--tables", str(tmp_path)], "expected the columns task,"),
        ([*SMALL, "--resume", str(other)], "no file that"),
        ([*SMALL, "--resume", str(like)], "no file that"),
        ([*SMALL, "--resume", str(list_)], "no file that"),
        ([*SMALL, "--rows", "nosuch"], "nosuch"),
        ([*SMALL, "--only", "absent"], "absent"),
        ([*SMALL, "--env", "noop"], "--rows"),
        (["latency", "--quick"], "--quick goes with the suite"),
        (["latency", "--resume", "x.json"], "--resume goes with the suite"),
    ):
        assert main(wrong) == 2
        assert told in capfd.readouterr().err
    assert other_table.read_text() == "nothing,of\nours,\n" and other.read_text() == "{}"


@pytest.mark.parametrize("option", ["--json", "--resume", "--tables", "--plots"])
def test_a_file_that_can_not_be_written_is_told_before_anything_is_done(option, tmp_path, capfd):
    (there := tmp_path / "there").write_text("")
    wrong = [(there, "no directory")] if option in ("--tables", "--plots") else [(tmp_path, "is a directory")]
    for path, told in ((there / "x.svg", "no directory"), *wrong):
        with pytest.raises(SystemExit, match="2"):
            main([option, str(path)])
        assert told in capfd.readouterr().err


def test_all_writes_no_tables_of_nothing(monkeypatch, tmp_path, capfd):
    directory = tmp_path / "data"
    last = next(key for key, row in ROWS.items() if not row.quick)
    for nothing, told in (
        (["--rows", "cost-4", "--only", "aioenv-drop-in"], "['aioenv-drop-in'] take no part in the rows ['cost-4']"),
        (["--rows", last, "--quick"], f"['{last}'] are none that --quick measures"),
    ):
        assert main([*SMALL, *nothing, "--tables", str(directory)]) == 2
        assert told in capfd.readouterr().err
    monkeypatch.setattr(suite, "IDLE_CHECK_S", 0.01)
    monkeypatch.setattr(
        suite, "play_rounds", lambda *_, **__: {"bare": contenders.Outcome(problem="no memory", broken=True)}
    )
    assert main([*SMALL, "--rows", "noop-1", "--only", "bare", "--tables", str(directory)]) == 1
    assert f"Nothing could be measured: {directory} is left as it is." in capfd.readouterr().out
    assert not directory.exists()


def test_what_is_resumed_is_copied_if_it_is_whole(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(suite, "IDLE_CHECK_S", 0.01)
    file, copy, directory = (tmp_path / name for name in ("all.json", "copy.json", "data"))
    args = [*SMALL, "--rows", "noop-1", "--only", "bare", "--resume", str(file)]
    assert main(args) == 0
    assert main([*args, "--json", str(copy)]) == 0
    assert copy.read_text() == file.read_text()
    for break_it in (
        lambda row: row.pop("at"),
        lambda row: row.update(metric="nosuch"),
        lambda row: row.update(metric="latency"),
        lambda row: row["results"].append({}),
        lambda row: row["results"][0].pop("rounds"),
        lambda row: row["results"][0].pop("ratios"),
        lambda row: row["results"][0].update(env_steps_per_s=None),
        lambda row: row["results"][0].update(contender="absent"),
    ):
        content = json.loads(copy.read_text())
        break_it(content["rows"]["noop-1"])
        file.write_text(json.dumps(content))
        capfd.readouterr()
        assert main([*args, "--tables", str(directory)]) == 2
        assert f"--resume {file}: no whole file of" in capfd.readouterr().err and not directory.exists()


def test_rows_name_what_there_is(capfd):
    import gymnasium

    assert main(["--list"]) == 0
    assert capfd.readouterr().out.count("\n") == len(ROWS)
    v5 = {
        spec
        for spec in gymnasium.registry
        if re.fullmatch(r"\w+-v5", spec) and "mujoco" in str(gymnasium.spec(spec).entry_point)
    }
    assert len(v5) == 11 and v5 == {row.env for row in ROWS.values() if row.env.endswith("-v5") and row.timed}
    for row in ROWS.values():
        assert set(row.contenders) <= set(CONTENDERS if row.timed else METRICS[row.metric].measures)
        assert set(row.once) <= set(row.contenders) and estimate_s(row, 3, 0.6) > estimate_s(row, 1, 0.6) > 0
        if row.env not in SYNTHETIC:
            gymnasium.spec(row.env)


def content_of(rows: dict[str, dict]) -> dict:
    """A run of the suite with these rows."""
    machine = {"usable_cpus": 2, "system": "Linux", "python": "3.11", "packages": {"aioenv": "0"}}
    return {"machine": machine, "settings": {"rounds": 1, "seconds": 1.0}, "idle": [], "rows": rows}


def rows_of(row: str, ours: str, ratios: dict[str, float], **numbers: float) -> dict[str, dict]:
    rounds = [{"others_cpus": 0.0}]
    others = [{"contender": name, "rounds": rounds, "others_cpus": 0.5, "ratios": {}} for name in ratios]
    own = {"contender": ours, "rounds": rounds, "others_cpus": 0.0, "ratios": ratios, **numbers}
    return {row: {"results": [own, *others]}}


def test_goals_are_judged_by_floor_and_target():
    rows = rows_of("cartpole-64", "aioenv", {"gymnasium-async": 12.5, "gymnasium-sync": 1.55, "bare": 1.3})
    rows |= rows_of("latency", "aioenv", {"gymnasium-async": 0.5})
    told = judge({"machine": {"usable_cpus": 2}, "rows": rows})
    assert {row["goal"]: (row["found"], row["verdict"], row["mark"]) for row in told} == {
        "CartPole-v1 x 64, x Async": (12.5, "target", " *"),
        "CartPole-v1 x 64, x Sync": (1.55, "floor", " *"),
        "CartPole-v1 x 64, of 2 x the bare loop": (0.65, "MISSED", " *"),
        "round trip of one no-op, x Async": (0.5, "target", " *"),
    }


@pytest.mark.skipif(usable_cpus() < 2, reason="takes two CPUs")
def test_bare_loops_run_at_once(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1] / "kits")
    workload = Workload("sleepy:Sleepy-v0", 2, 0.3, warm_up_s=0.01)
    results = [run_contender(name, workload) for name in ("bare", "bare-all")]
    rates = [result["env_steps"] / result["seconds"] for result in results]
    assert rates[1] / rates[0] == pytest.approx(usable_cpus(), rel=0.4)


@pytest.mark.skipif(usable_cpus() < 2, reason="takes two CPUs")
def test_bare_loops_in_lock_step_wait_for_each_other(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1] / "kits")
    workload = Workload(
        "sleepy:Sleepy-v0", 4, 0.3, warm_up_s=0.01
    )  # a process steps 4 / CPUs of them, one after the other
    alone, together = (run_contender(name, workload) for name in ("bare", "bare-lockstep"))
    assert together["env_steps"] == 4 * together["steps"]
    rates = [result["env_steps"] / result["seconds"] for result in (alone, together)]
    assert rates[1] / rates[0] == pytest.approx(min(usable_cpus(), 4), rel=0.4)


@pytest.mark.skipif(usable_cpus() < 2, reason="takes two CPUs")
def test_a_step_profile_is_made():
    script = Path(__file__).parents[2] / "benchmarks/step_profile.py"
    told = subprocess.run(
        [sys.executable, script, "CartPole-v1", "4", "50"], capture_output=True, text=True, timeout=60, check=True
    )
    heads, *lines = told.stdout.splitlines()
    assert heads.split("  ")[0] == "CartPole-v1 x 4, 2 workers" and heads.endswith("µs")
    rows = dict(line.rsplit(maxsplit=1) for line in lines)
    assert next(iter(rows)) == "one step, start to end"
    assert all(float(micros) > 0 or "infos" in stage for stage, micros in rows.items()), rows
    assert len(rows) == 10


@pytest.mark.parametrize("name", ["torchrl-parallel", "pufferlib"])
def test_contenders_of_other_libraries_step(name):
    if not CONTENDERS[name].installed:
        pytest.skip(f"no {CONTENDERS[name].package} here")
    assert run_contender(name, Workload("CartPole-v1", 2, 0.05))["env_steps"] > 0
    assert "more than 64" in run_contender("torchrl-parallel", Workload("CartPole-v1", 65, 0.05))["not_applicable"]


@pytest.mark.skipif(usable_cpus() < 2, reason="takes two CPUs")
def test_contenders_with_a_policy_step_and_stand_in_a_table(monkeypatch):
    seen, choose = set(), TwoLayers.__call__
    monkeypatch.setattr(TwoLayers, "__call__", lambda self, obs: seen.add(len(obs)) or choose(self, obs))
    results = []
    for name, asked in (("aioenv-policy", 4), ("aioenv-policy-groups", 2), ("aioenv-policy-workers", 2)):
        seen.clear()
        measured = CONTENDERS[name].measure(Workload("InvertedPendulum-v5", 4, 0.05, warm_up_s=0.01))
        assert measured["env_steps"] == 4 * measured["steps"] > 0 and seen == {asked}
        ratios = {} if name == "aioenv-policy" else {"aioenv-policy": 1 + len(results) / 4}
        results.append({"contender": name, "rounds": [{}], "others_cpus": 0.0, "ratios": ratios, "env_steps_per_s": 7})
    row = {"env": "Ant-v5", "num_envs": 64, "metric": ROWS["ant-policy"].metric, "results": results, "at": "now"}
    told = tables.tables(content_of({"ant-policy": row}))["policy"]
    ratio = "x aioenv with a policy"
    assert [(one["median"], one["unit"]) for one in told if one["unit"] == ratio] == [("1.25", ratio), ("1.5", ratio)]
    assert [one["median"] for one in told if one["unit"] == "env-steps/s"] == ["7"] * 3
    failed = [results[0], {"contender": results[1]["contender"], "rounds": [], "problem": "failed"}]
    (one,) = tables.tables(content_of({"ant-policy": {**row, "results": failed}}))["policy"]
    assert (one["task"], one["num_envs"], one["contender"]) == ("Ant-v5", "64", "aioenv with a policy")
    (goal,) = judge({"machine": {"usable_cpus": 2}, "rows": {"ant-policy": row}})
    assert goal["goal"] == "Ant-v5 x 64 with a policy, two groups of whole workers, x lock-step"
    assert (goal["found"], goal["verdict"]) == (1.5, "target")


def test_bench_compares_no_contenders_that_do_more_than_others(monkeypatch, capfd):
    played = []

    def play_rounds(entries, *_, **__):
        played.append(list(entries))
        return {}

    monkeypatch.setattr("aioenv.cli.bench.play_rounds", play_rounds)
    assert aioenv_main(["bench"]) == 0 and aioenv_main(["bench", "--only", "aioenv-policy", "bare"]) == 2
    assert "bare" in played[0] and not any("policy" in name for name in played[0])
    monkeypatch.setattr(suite, "IDLE_CHECK_S", 0.01)
    monkeypatch.setattr(suite, "play_rounds", play_rounds)
    assert main(["--rows", "ant-policy", "--only", "aioenv-policy"]) == 0
    assert played[1:] == [["aioenv-policy"]]


def test_a_policy_stays_within_its_bounds():
    observations, actions = Box(-np.inf, np.inf, (3, 2)), Box(np.float32([-1, 0]), np.float32([3, 0.5]))
    policy, rng = TwoLayers(observations, actions), np.random.default_rng(0)
    obs = 10 * rng.standard_normal((500, 3, 2))
    chosen = policy(obs)
    assert chosen.shape == (500, 2) and chosen.dtype == np.float32
    assert (chosen >= actions.low).all() and (chosen <= actions.high).all() and (chosen.std(0) > 0.1).all()
    assert np.allclose(chosen[7:9], policy(obs[7:9]), atol=1e-5)
    for spaces in ((observations, Discrete(2)), (Discrete(2), actions), (observations, Box(-np.inf, np.inf, (2,)))):
        with pytest.raises(NotApplicable, match="Box"):
            TwoLayers(*spaces)


def test_native_contenders_step_and_stand_in_the_tables():
    native = CONTENDERS["aioenv-native-sync"].measure
    result = native(Workload("CartPole-v1", 2, 0.05))
    assert result["env_steps"] == 2 * result["steps"] > 100
    for measure in (native, METRICS["images"].measures["aioenv-native-exact"]):
        with pytest.raises(NotApplicable, match="there is no vectorised version of noop"):
            measure(Workload("noop", 2, 0.05))
    told = {"rounds": [{}], "ratios": {"bare": 3.0}, "env_steps_per_s": result["env_steps"] / result["seconds"]}
    rows = {}
    for key in ("cartpole-64", "ant-64", "images"):
        row = ROWS[key]
        names = [name for name in row.contenders if "native" in name]
        assert len(names) == (3 if key == "images" else 2)
        results = [{"contender": name, "env-steps/s": 4321.0, **told} for name in names]
        rows[key] = {"env": row.env, "num_envs": row.num_envs, "metric": row.metric, "results": results, "at": "now"}
    found = tables.tables(content_of(rows))
    label = "aioenv.sync (backend=native)"
    assert {row["task"] for row in found["throughput"] if row["contender"] == label} == {"CartPole-v1", "Ant-v5"}
    (image,) = [row for row in found["images"] if row["contender"] == "aioenv-native-fast"]
    assert (image["median"], image["unit"]) == ("4321", "env-steps/s")


def test_tables_keep_runs_and_replace_what_was_measured_again(tmp_path):
    def of(day: str, rate: float) -> dict:
        result = {"contender": "aioenv", "rounds": [{}], "ratios": {}, "env_steps_per_s": rate, "min": 1.5, "max": 1e6}
        row = {"env": "CartPole-v1", "num_envs": 8, "metric": "throughput", "results": [result], "at": f"{day} 12:00"}
        return content_of({"cartpole-8": row})

    for day, rate in (("2026-01-01", 1e5), ("2026-01-02", 2e5), ("2026-01-02", 3e5)):
        tables.update(tmp_path, of(day, rate))
    rows = tables.read(tmp_path / "throughput.csv")
    assert [(row["date"], row["median"]) for row in rows] == [("2026-01-01", "100000"), ("2026-01-02", "300000")]
    assert [(row["low"], row["high"]) for row in rows] == [("1.5", "1000000")] * 2
    assert tables.newest(rows[::-1]) == tables.newest(rows) == rows[1:]


def test_noise_is_marked():
    busy = {"contender": "bare", "rounds": [{}], "ratios": {}, "env_steps_per_s": 4e4, "others_cpus": 0.5}
    result = {"contender": "aioenv", "rounds": [{}], "ratios": {"bare": 3.0, "aioenv": 1.0}, "env_steps_per_s": 1e5}
    row = {"env": "noop", "num_envs": 1, "metric": "throughput", "results": [result, busy], "at": "2026-01-01 12:00"}
    found = tables.tables(content_of({"noop-1": row}))
    assert [one["noisy"] for one in found["throughput"]] == ["", "yes"]
    (ratio,) = found["throughput-ratios"]
    assert (ratio["median"], ratio["unit"], ratio["noisy"]) == ("1.5", "of 2 x bare loop", "yes")


def draw(directory: Path, drawn: dict) -> list[str]:
    """The names of the plots, drawn in a process of its own: matplotlib keeps the files of its fonts open."""
    code = "import json, sys\nfrom pathlib import Path\nfrom benchmarks import plots\n"
    code += "print(*(file.name for file in plots.draw(Path(sys.argv[1]), json.load(sys.stdin))))"
    env = {**os.environ, "PYTHONPATH": str(Path(aioenv.__file__).parents[1])}
    command = [sys.executable, "-c", code, str(directory)]
    done = subprocess.run(
        command, env=env, input=json.dumps(drawn), timeout=50, check=True, text=True, stdout=subprocess.PIPE
    )
    return done.stdout.split()


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    shown = plots.from_directory(DATA)
    names = draw(tmp_path / "plots", shown)
    assert names == ["bench-mujoco.svg", "bench-cost.svg", "bench-images.svg", "bench-network.svg"]
    assert all(b"<svg" in (tmp_path / "plots" / name).read_bytes() for name in names)
    assert draw(tmp_path, {}) == []
    assert draw(tmp_path, {"throughput": [row for row in shown["throughput"] if row["task"] == "Ant-v5"]}) == names[:1]


def test_each_contender_has_a_colour_of_its_own():
    assert len(set(plots.COLORS.values())) == len(plots.COLORS) == len(plots.CONTENDERS)
    assert {contender for _, contender, _ in plots.IMAGES} <= set(plots.COLORS) == set(plots.CONTENDERS)


def test_the_page_shows_what_the_tables_hold():
    """Each number of the table of six tasks is a newest median, in thousands, and no contender of aioenv is faster."""
    page = (DATA.parent / "explanation" / "performance.md").read_text(encoding="utf-8")
    page = page.partition("## Six tasks in one table\n")[2].partition("\n## ")[0]
    rows = tables.newest(tables.read(DATA / "throughput.csv"))
    medians = {(row["task"], row["num_envs"], row["contender"]): float(row["median"]) for row in rows}
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if line[:1] == "|"]
    shown = {cells[0]: cells[1:] for cells in lines[2:]}
    assert list(shown) == list(PAGE_TASKS)
    for name, task in PAGE_TASKS.items():
        of_task = {contender: rate for (env, n, contender), rate in medians.items() if (env, n) == (task, "64")}
        ours = max(rate for contender, rate in of_task.items() if contender.startswith("aioenv"))
        raw = [contender for contender in of_task if "clock stopped" in contender]
        limit = max(of_task[contender] for contender in raw or ["bare loops, one a CPU"])
        others = [of_task.get(f"gymnasium {kind}VectorEnv") for kind in ("Async", "Sync")]
        expected = [ours, *others, of_task.get("EnvPool"), limit]
        assert shown[name] == [in_thousands(rate) for rate in expected]


def test_the_page_shows_the_ratios_of_few_envs():
    page = (DATA.parent / "explanation" / "performance.md").read_text(encoding="utf-8")
    rows = tables.newest(tables.read(DATA / "cheap.csv"))
    ratios = {
        (row["task"].partition("-")[0], row["num_envs"], row["contender"]): float(row["median"])
        for row in rows
        if row["unit"] == "x gymnasium SyncVectorEnv"
    }
    columns = [
        "aioenv (backend=native)",
        "aioenv (num_workers=0)",
        "aioenv.sync (num_workers=0)",
        "aioenv (uvloop)",
    ]
    shown = re.findall(r"^\| (\d+) (CartPole|HalfCheetah)s? \| (.*) \|$", page, re.MULTILINE)
    assert len(shown) == 6
    for num_envs, task, cells in shown:
        found = [ratios[task, num_envs, contender] for contender in columns]
        assert cells.split(" | ") == [f"{ratio:.1f}" if ratio > 10 else f"{ratio:.2f}" for ratio in found]


def in_thousands(rate: float | None) -> str:
    if rate is None:
        return "–"  # noqa: RUF001
    return f"{rate / 1000:,.0f}" if rate >= 1e5 else f"{rate / 1000:.1f}"
