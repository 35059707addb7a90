"""The command line where something is in its way: Ctrl-C, closed pipes, poor terminals, files that can't be written."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import gymnasium
import pytest

from aioenv.cli import main
from tests.kits.cli_kit import needs_opengl


@pytest.mark.parametrize(
    "command",
    [
        "bench --json",
        "bench --plot",
        "tune CartPole-v1 --json",
        "demo --out",
        "record CartPole-v1 --out",
    ],
)
def test_a_file_that_can_not_be_written_is_told_before_anything_is_done(command, tmp_path, capfd):
    (there := tmp_path / "there").write_text("")
    for path, told in ((there / "x.json", "no directory"), (tmp_path, "is a directory")):
        with pytest.raises(SystemExit) as exit_:
            main([*command.split(), str(path)])
        assert exit_.value.code == 2 and told in capfd.readouterr().err


@pytest.mark.parametrize("command", ["bench --plot"])
def test_a_picture_of_no_known_format_is_told_before_anything_is_done(command, tmp_path, capfd):
    for name in ("x.xyz", "x"):
        with pytest.raises(SystemExit) as exit_:
            main([*command.split(), str(tmp_path / name)])
        assert exit_.value.code == 2 and "expected a file named *.png" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"), [("--out x.gif", "expected a file named *.mp4"), ("--size 40000x4", "width: expected an")]
)
def test_what_the_demo_can_not_draw_is_a_line(arguments, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *arguments.split()]) == 1
    said = capfd.readouterr()
    assert said.out == "" and message in said.err and len(said.err.splitlines()) == 1


@pytest.mark.parametrize("env", [":CartPole-v1", ".:CartPole-v1", "..no_such:CartPole-v1"])
@pytest.mark.parametrize("command", ["tune", "record", "bench --env"])
def test_a_module_has_a_full_name(command, env, capfd):
    assert main([*command.split(), env]) == 2
    assert "expected a module's full name, got '" in capfd.readouterr().err


@pytest.mark.parametrize("env", ["no_such_module:X-v1", "HalfCheeta-v5"])
@pytest.mark.parametrize("command", ["tune", "record", "bench --env"])
def test_an_unknown_env_is_one_line(command, env, capfd):
    assert main([*command.split(), env]) == 2
    told = capfd.readouterr().err
    assert env in told and len(told.splitlines()) == 1 and ("no_such" in env or "Did you mean" in told)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
        ("def f(:", "SyntaxError: "),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("command", ["tune", "record", "bench --env"])
def test_a_module_that_raises_when_it_is_imported_is_one_line(command, code, why, tmp_path, monkeypatch, capfd):
    (tmp_path / "faulty_of_here.py").write_text(code)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([*command.split(), "faulty_of_here:X-v0"]) == 2
    told = capfd.readouterr().err
    assert f"faulty_of_here:X-v0: importing faulty_of_here: {why}" in told and len(told.splitlines()) == 1


def test_an_error_of_the_system_is_one_line(monkeypatch, capfd):
    def full(args):
        raise OSError(28, "No space left on device", "x.mp4")

    monkeypatch.setattr("aioenv.cli.doctor.run", full)
    assert main(["doctor"]) == 1
    assert capfd.readouterr().err == "aioenv: [Errno 28] No space left on device: 'x.mp4'\n"


class _Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "aioenv.cli.tune":
            raise KeyboardInterrupt


def test_ctrl_c_while_modules_are_imported(monkeypatch, capfd):
    import aioenv.cli.tune

    monkeypatch.delattr(aioenv.cli, "tune")
    monkeypatch.delitem(sys.modules, "aioenv.cli.tune")
    monkeypatch.setattr(sys, "meta_path", [_Interrupted(), *sys.meta_path])
    assert main(["trace", "--help"]) == 130
    assert capfd.readouterr().err.strip() == "interrupted"


def test_the_output_is_no_longer_read():
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "aioenv", "bench", "--list"]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=50)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("closed", "command"), [(1, "bench --list"), (2, "bench --only bare --rounds 1 --seconds .01")]
)
def test_output_that_is_closed_goes_nowhere(closed, command):
    code = f"import os, sys; os.close({closed}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", code, "-m", "aioenv", *command.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done
    assert done.stderr == "" and ("bare" in done.stdout) == (closed == 2)


def test_a_terminal_that_lacks_letters(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["bench", "--list"]) == 0
    print("≥ 0.9 ≤", file=stream, flush=True)
    assert stream.buffer.getvalue().endswith(b"? 0.9 ?\n")


MINE = """
import gymnasium

class Mine(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        raise RuntimeError("it is out of order")

gymnasium.register("MineOfHere-v0", entry_point=Mine)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module in the working directory, which is on no path: as for the command `aioenv`."""
    (tmp_path / "mine_of_here.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.fspath(tmp_path))])
    yield "mine_of_here:MineOfHere-v0"
    sys.modules.pop("mine_of_here", None)
    gymnasium.registry.pop("MineOfHere-v0", None)


def test_a_module_of_the_working_directory_is_found(mine, monkeypatch, capfd):
    assert main(["tune", mine, "--list"]) == 0
    assert "num_workers" in capfd.readouterr().out
    monkeypatch.setattr("aioenv.cli.bench.play_rounds", lambda *_, **__: {})
    assert main(["bench", "--env", mine]) == 0


def test_a_video_of_another_day_is_not_told_of(mine, tmp_path, capfd):
    (out := tmp_path / "old.mp4").write_bytes(b"of another day")
    assert main(["record", mine, "--num-envs", "1", "--out", os.fspath(out)]) == 1
    told = capfd.readouterr().err
    assert "out of order" in told and "The video ends" not in told
    assert out.read_bytes() == b"of another day"


@pytest.mark.parametrize("what", ["ValueError('no weights')", "TypeError('no weights')", "KeyError('no weights')"])
def test_a_policy_that_can_not_be_imported_says_why(what, tmp_path, monkeypatch):
    (tmp_path / "policy_of_here.py").write_text(f"raise {what}")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(Exception, match=r"policy_of_here|no weights") as caught:  # with a traceback
        main(["record", "CartPole-v1", "--policy", "policy_of_here:act"])
    assert "no weights" in f"{caught.value} {caught.value.__cause__}"


def test_a_policy_whose_module_ends_the_program_is_told(tmp_path, monkeypatch, capfd):
    (tmp_path / "script_of_here.py").write_text("raise SystemExit(0)")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["record", "CartPole-v1", "--policy", "script_of_here:act"])
    assert exit_.value.code == 2 and "importing script_of_here: SystemExit: 0" in capfd.readouterr().err


@needs_opengl
def test_without_a_program_to_encode_the_demo_measures_and_record_says_so(tmp_path, monkeypatch, capfd):
    def none():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", none)
    assert main(["demo", "--steps", "2", "--num-envs", "1", "--size", "16x16"]) == 0
    told = capfd.readouterr().out
    assert "both overlapped" in told
    assert told.endswith("No video was made: videos take ffmpeg: No ffmpeg exe could be found.\n")
    assert main(["record", "HalfCheetah-v5", "--steps", "2"]) == 1
    assert capfd.readouterr().err == "aioenv record: videos take ffmpeg: No ffmpeg exe could be found.\n"
    assert not (tmp_path / "out").exists()


def test_doctor_misses_all_that_is_needed(monkeypatch, capfd):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = [re.match(r"[\w-]+", entry)[0] for entry in project["dependencies"]]
    monkeypatch.setattr("aioenv.cli.doctor.installed", lambda name: None)
    assert main(["doctor"]) == 1
    told = capfd.readouterr().out.strip().splitlines()[-1].strip()  # what to do comes last
    assert sorted(told.removeprefix("Missing: pip install ").split()) == sorted(["aioenv", *needed])
