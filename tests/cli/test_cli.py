"""The `aioenv` command: demo, doctor and bench, small."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import aioenv
from aioenv.cli import contenders, main, opengl
from aioenv.cli.bench import summarize
from aioenv.cli.contenders import CONTENDERS, ContenderFailed, NotApplicable, Outcome, Workload, run_contender
from aioenv.cli.doctor import judge_opengl
from aioenv.cli.opengl import ProbeResult, probe_opengl
from aioenv.cli.processes import EndedBySignal
from aioenv.loops.record import TiledVideo
from aioenv.process.launch import START_METHODS
from aioenv.rendering import backends
from aioenv.rendering.images import tile
from tests.kits.cli_kit import OPENGL, STARTS, needs_opengl, spy_on_starts


def seconds_of(output: str, label: str) -> float:
    found = re.search(rf"^{label} +([0-9.]+) ", output, re.MULTILINE)
    assert found, output
    return float(found[1])


@needs_opengl
def test_demo_measures_and_leaves_a_video(tmp_path, capfd):
    import imageio_ffmpeg

    out = tmp_path / "new" / "demo.mp4"
    began = time.perf_counter()
    assert main(["demo", "--steps", "70", "--num-envs", "3", "--size", "32x24", "--out", str(out)]) == 0
    took = time.perf_counter() - began
    output = capfd.readouterr().out
    seconds = [seconds_of(output, label) for label in ("physics alone", "images alone", "both overlapped")]
    assert all(0 < s < took for s in seconds) and sum(seconds) < took
    saved = (seconds[0] + seconds[1] - seconds[2]) / (seconds[0] + seconds[1])
    told = re.search(r"The overlap (saved|cost) (\d+)%", output)
    assert told, output
    # the table is rounded to 10 ms
    assert abs(saved - int(told[2]) / 100 * (1 if told[1] == "saved" else -1)) < 0.02 + 0.02 / sum(seconds[:2])
    assert f"Video: {out}" in output
    ffmpeg = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-v",
        "error",
        "-i",
        str(out),
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-",
    ]
    raw = subprocess.run(ffmpeg, capture_output=True, check=True, timeout=60).stdout
    pictures = np.frombuffer(raw, np.uint8).reshape(-1, 48, 64, 3)
    assert len(pictures) == 70
    assert pictures[0][26:, 34:].max() < 16  # the fourth cell is empty
    assert all(picture[:24].std() > 10 for picture in pictures)
    assert np.abs(pictures[0].astype(int) - pictures[-1]).max() > 30  # they move


def test_demo_without_images(capfd):
    assert main(["demo", "--steps", "5", "--num-envs", "2", "--no-images"]) == 0
    output = capfd.readouterr().out
    assert "physics alone" in output and "images alone" not in output and "No pictures" not in output


def test_demo_without_opengl_says_so_and_goes_on(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("MUJOCO_GL", "glfw")  # which takes a display
    monkeypatch.delenv("DISPLAY", raising=False)
    out = tmp_path / "demo.mp4"
    assert main(["demo", "--steps", "5", "--num-envs", "2", "--out", str(out)]) == 0
    output = capfd.readouterr().out
    assert "physics alone" in output and "No pictures this time" in output and "apt-get install" in output
    assert not out.exists()


def test_tiles_are_rows_of_a_square_grid():
    images = np.arange(5 * 2 * 3 * 3, dtype=np.uint8).reshape(5, 2, 3, 3)
    picture = tile(images)
    assert picture.shape == (4, 9, 3) and picture.flags.c_contiguous
    for slot in range(5):
        row, column = divmod(slot, 3)
        assert (picture[2 * row : 2 * row + 2, 3 * column : 3 * column + 3] == images[slot]).all()
    assert not picture[2:, 6:].any()


def test_a_video_that_cannot_be_written_raises(tmp_path):
    (tmp_path / "demo.mp4").mkdir()

    async def write() -> None:
        video = TiledVideo(tmp_path / "demo.mp4")
        try:
            for _ in range(200):
                await video.write([np.zeros((4, 64, 64, 3), np.uint8)])
        finally:
            await video.close()

    with pytest.raises(OSError, match=r"demo\.mp4"):
        asyncio.run(write())


def test_help_of_doctor_is_for_its_users(capfd):
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    told = capfd.readouterr().out
    assert "Report what works on this machine, and what to install for the rest.\n\noptions:" in told


def test_doctor_reports_what_is_here(capfd):
    assert main(["doctor"]) == 0
    output = capfd.readouterr().out
    assert re.search(r"^  mujoco +\d", output, re.MULTILINE) and "Event loop: uvloop" in output
    assert f"Workers: {START_METHODS[-1]}" in output
    assert ("No images can be drawn" in output) == (not OPENGL)
    for backend in ("egl", "osmesa", "glfw"):
        works, broken = (
            rf"{backend} .*(the CPU|a GPU) .* [\d,]+ +[\d,]+$",
            rf"{backend} does not work: .+\n +\S.*apt-get",
        )
        assert re.search(rf"^  ({works}|{broken})", output, re.MULTILINE), output
    ends = "There is nothing to do" if OPENGL else "apt-get"
    assert ends in output.splitlines()[-1] or "WARNING" in output, output


def test_doctor_goes_on_where_mujoco_could_not_be_imported(capfd, monkeypatch):
    monkeypatch.setattr("aioenv.cli.opengl.probe_all", lambda: [probe_opengl("osmesa")])
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    assert main(["doctor"]) == 1
    output = capfd.readouterr().out
    assert "got 'nonsense'" in output and "\n  osmesa " in output and "nonsense" not in output.partition("osmesa")[0]
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    assert main(["bench", "--list"]) == 1
    assert "'osmesa'" in capfd.readouterr().err


def test_a_gpu_that_does_not_draw_is_told_of(tmp_path, monkeypatch):
    assert backends.find_gpus(tmp_path) == []
    drivers = {"renderD128": "vgem", "renderD129": "amdgpu", "renderD130": "nvidia"}
    for node, driver in drivers.items():
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        device = tmp_path / "sys/class/drm" / node / "device"
        device.mkdir(parents=True)
        (device / "driver").symlink_to(tmp_path / "drivers" / driver)
    information = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t NVIDIA H200\nIRQ: 7\n")
    gpus = backends.find_gpus(tmp_path)
    assert gpus == ["NVIDIA H200", "a GPU of the driver amdgpu (renderD129)"]

    slow = ProbeResult("egl", "llvmpipe (LLVM 15.0.6, 256 bits)", "", devices=1, exact_per_s=30, fast_per_s=1500)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    told = judge_opengl([slow], gpus)["advice"][0]
    assert "WARNING: OpenGL draws on the CPU (llvmpipe" in told and "NVIDIA_DRIVER_CAPABILITIES" in told
    fast = ProbeResult("glfw", "NVIDIA H200/PCIe/SSE2", "")
    assert "backend='glfw' does use it" in judge_opengl([slow, fast], gpus)["advice"][0]
    assert judge_opengl([slow], [])["advice"] == [] and judge_opengl([slow], [])["images_by"] == "egl"
    none = judge_opengl([ProbeResult("egl", "", "ImportError: no EGL")], gpus)
    assert none["opengl"][0]["install"] == "apt-get install libegl1 libgl1-mesa-dri"
    assert "No images can be drawn" in none["advice"][0] and none["images_by"] is None
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    told = judge_opengl([slow, ProbeResult("glfw", "", "no display")], [])["advice"]
    assert told == ["No images are drawn while MUJOCO_GL=glfw: unset it, or say egl."]


def test_which_backends_are_tried(monkeypatch):
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert backends.candidate_backends(None) == backends.candidate_backends("auto") == ("egl", "osmesa")
    monkeypatch.setenv("DISPLAY", ":0")
    assert backends.candidate_backends("auto") == ("egl", "glfw", "osmesa")
    monkeypatch.setenv("MUJOCO_GL", "OSMesa")
    assert backends.candidate_backends(None) == ("osmesa",) and backends.candidate_backends("egl") == ("egl",)
    assert backends.candidate_backends("auto")[0] == "egl"
    assert backends.candidate_backends("auto", (0, 1)) == ("egl",) and backends.candidate_backends(None, (0,)) == (
        "osmesa",
    )
    monkeypatch.delenv("MUJOCO_GL")  # which has no OSMesa there
    monkeypatch.setattr(sys, "platform", "darwin")
    assert backends.candidate_backends("auto") == ("cgl", "glfw") and backends.candidate_backends("cgl", (0,)) == (
        "cgl",
    )
    assert "apt-get" not in str(backends.no_backend_error(["cgl: no"])) and not backends.install_hint("glfw")
    monkeypatch.setenv("MUJOCO_GL", "cgl")
    assert backends.candidate_backends(None) == ("cgl",)
    with pytest.raises(ValueError, match=r"expected one of \('cgl', 'glfw'\), which .* got 'egl'"):
        backends.candidate_backends("egl")
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setattr(sys, "platform", "win32")
    assert backends.candidate_backends("auto") == backends.platform_backends() == ("glfw",)
    with pytest.raises(ValueError, match="backend: expected one of"):
        backends.candidate_backends("vulkan")


@pytest.mark.skipif("pipe" not in OPENGL, reason="a GPU draws here, or nothing does")
def test_a_pool_that_draws_on_the_cpu_though_there_is_a_gpu_warns(monkeypatch):
    monkeypatch.setattr(backends, "find_gpus", lambda: ["NVIDIA H200"])
    model = "<mujoco><worldbody><geom size='1'/></worldbody></mujoco>"
    with pytest.warns(aioenv.SoftwareRenderWarning, match="draws on the CPU .*though there is NVIDIA H200"):
        aioenv.sync.RenderPool(model, backend="auto").close()
    if probe_opengl("osmesa").renderer:
        aioenv.sync.RenderPool(model, backend="osmesa").close()  # that was asked for
    for workers in (None, 1):  # the envs' own workers draw, or those of a pool
        config = aioenv.RenderConfig(8, 8, quality="fast", backend="auto", workers=workers)
        with pytest.warns(aioenv.SoftwareRenderWarning, match="draws on the CPU") as told:
            aioenv.sync.make_vec("HalfCheetah-v5", 2, pixels=config).close()
        assert len(told) == 1


def test_a_probe_says_why_a_backend_does_not_work(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    probe = probe_opengl("glfw")
    assert not probe.renderer and "OpenGL" in probe.problem
    assert "no image after" in probe_opengl("osmesa", timeout_s=0.001).problem


def test_a_probe_hears_drivers_that_print_what_they_like(monkeypatch):
    says = "import sys; sys.{}.buffer.write(b'caf\\xe9 Error\\n'); "
    works = 'print("MARK[\\"lamp\\", 3, 4, 2]"); print("bye")'.replace("MARK", opengl._MARK)
    monkeypatch.setattr(opengl, "_PROBE", says.format("stdout") + works)
    assert probe_opengl("osmesa") == ProbeResult("osmesa", "lamp", "", devices=2, exact_per_s=3, fast_per_s=4)
    monkeypatch.setattr(opengl, "_PROBE", says.format("stderr") + "sys.exit(1)")
    assert probe_opengl("osmesa").problem == "caf\ufffd Error"


def test_python_dash_m_and_wrong_arguments(capfd):
    def cli(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "aioenv", *args], capture_output=True, text=True, timeout=60)

    assert cli("--version").stdout.startswith("aioenv ")
    done = cli("bench", "--only", "absent")
    assert done.returncode == 2 and "absent" in done.stderr and "Traceback" not in done.stderr
    for wrong in (["demo", "--steps", "0"], ["demo", "--size", "12"], ["bench", "--seconds", "nan"], []):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
        assert "usage: aioenv" in capfd.readouterr().err
    for command in ("bench --env NoSuchEnv-v0", "tune NoSuchEnv-v0", "record NoSuchEnv-v0", "watch NoSuchEnv-v0"):
        assert main(command.split()) == 2
        told = capfd.readouterr().err
        assert "doesn't exist" in told and ".;" not in told and "my_module:NoSuchEnv-v0" in told


def test_bench_compares_in_turn_and_writes_json(tmp_path, capfd):
    file = tmp_path / "bench.json"
    names = ["aioenv", "gymnasium-async", "gymnasium-sync"]
    args = ["bench", "--num-envs", "2", "--rounds", "2", "--seconds", "0.05", "--only", *names]
    assert main([*args, "--env", "CartPole-v1", "--json", str(file)]) == 0
    output = capfd.readouterr().out
    content = json.loads(file.read_text())
    settings = {"num_envs": 2, "rounds": 2, "seconds": 0.05, "start": None, "channel": "auto"}
    assert content["settings"] == settings
    rows = {row["contender"]: row for row in content["results"]}
    assert "Other processes meanwhile used" in output
    assert list(rows) == names and not any(row["problem"] for row in rows.values()), rows
    for row in rows.values():
        assert len(row["rounds"]) == 2 and row["min"] <= row["env_steps_per_s"] <= row["max"]
        for result in row["rounds"]:
            assert result["env_steps"] == 2 * result["steps"] and result["seconds"] >= 0.05
            assert 0 <= result["others_cpus"] <= os.cpu_count()
        assert f"{row['env_steps_per_s']:,.0f}" in output
    assert rows["gymnasium-sync"]["ratios"]["gymnasium-sync"] == 1.0
    ratios = [
        a["env_steps"] / a["seconds"] / (b["env_steps"] / b["seconds"])
        for a, b in zip(rows["aioenv"]["rounds"], rows["gymnasium-async"]["rounds"], strict=True)
    ]
    assert rows["aioenv"]["ratios"]["gymnasium-async"] == pytest.approx(np.median(ratios))


@pytest.mark.parametrize("ended, status", [(KeyboardInterrupt(), 130), (EndedBySignal(signal.SIGTERM), 143)])
def test_what_bench_measured_before_it_was_ended_is_told_and_written(ended, status, tmp_path, monkeypatch, capfd):
    measured = []

    def one(name, workload, registry):
        if len(measured) == 3:
            raise ended
        measured.append(name)
        return {"env_steps": 100, "seconds": 1.0, "start_s": 0.1}

    monkeypatch.setattr("aioenv.cli.contenders.run_contender", one)
    file = tmp_path / "bench.json"
    command = ["bench", "--rounds", "2", "--only", "gymnasium-async", "gymnasium-sync", "--json", str(file)]
    assert main(command) == status
    rows = {row["contender"]: row for row in json.loads(file.read_text())["results"]}
    assert {name: len(row["rounds"]) for name, row in rows.items()} == {"gymnasium-async": 2, "gymnasium-sync": 1}
    assert "gymnasium AsyncVectorEnv" in capfd.readouterr().out


def test_bench_reports_what_fails_and_goes_on():
    with pytest.raises(ContenderFailed, match=r"status 1: .*NoSuchEnv"):
        run_contender("bare", Workload("NoSuchEnv-v0", 1, 0.01))
    rows = summarize("x", {"bare": Outcome([], "failed with status 1", True)})
    assert rows[0]["problem"] == "failed with status 1" and "env_steps_per_s" not in rows[0]


@pytest.mark.parametrize(("start", "channel"), STARTS)
def test_bench_starts_workers_and_picks_the_channel_as_asked(start, channel, monkeypatch):
    asked = spy_on_starts(monkeypatch)
    monkeypatch.setattr(
        contenders, "run_contender", lambda name, workload, registry: CONTENDERS[name].measure(workload)
    )
    small = ["bench", "--env", "noop", "--num-envs", "1", "--rounds", "1", "--seconds", "0.01", "--channel", channel]
    assert main([*small, "--only", "aioenv", "aioenv-sync", "--start", start]) == 0
    assert asked == [(start, channel)] * 2


def test_bench_tells_its_own_cpu_time_from_that_of_others():
    def cpu_of(pid: int) -> float:
        with open(f"/proc/{pid}/stat") as stat:
            return sum(map(int, stat.read().rsplit(")", 1)[1].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        began, busy_before, own_before = time.perf_counter(), cpu_of(busy.pid), sum(os.times()[:4])
        others = run_contender("bare", Workload("noop", 1, 1.0))["others_cpus"]
        wall = time.perf_counter() - began
        busy_cpus, own_cpus = (cpu_of(busy.pid) - busy_before) / wall, (sum(os.times()[:4]) - own_before) / wall
    finally:
        busy.kill()
        busy.wait()
    # in seconds: what share of a CPU each gets is up to what else runs
    assert own_cpus * wall > 0.1 and busy_cpus * wall > 0.1
    assert others >= busy_cpus - 0.05
    assert others + own_cpus <= os.cpu_count() + 0.05


def test_bench_native_takes_a_vectorized_env():
    workload = Workload("CartPole-v1", num_envs=4, seconds=0.05, warm_up_s=0.05)
    assert CONTENDERS["aioenv-native"].measure(workload)["env_steps"] >= 4
    for env in ("noop", "Ant-v4"):
        with pytest.raises(NotApplicable, match=env):
            CONTENDERS["aioenv-native"].measure(Workload(env, num_envs=4, seconds=0.05))
