"""The command line where something is in its way: Ctrl-C, closed pipes, poor terminals, files that can't be written."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from aioenv.cli import main


@pytest.mark.parametrize(
    "command",
    [
        "bench --json",
        "bench --plot",
        "bench --all --resume",
        "bench --all --markdown",
        "tune CartPole-v1 --json",
        "demo --out",
        "record CartPole-v1 --out",
        "trace x.json --png",
    ],
)
def test_a_file_that_can_not_be_written_is_told_before_anything_is_done(command, tmp_path, capfd):
    (there := tmp_path / "there").write_text("")
    for path, told in ((there / "x.json", "no directory"), (tmp_path, "is a directory")):
        with pytest.raises(SystemExit) as exit_:
            main([*command.split(), str(path)])
        assert exit_.value.code == 2 and told in capfd.readouterr().err


@pytest.mark.parametrize("env", ["no_such_module:X-v1", "HalfCheeta-v5"])
@pytest.mark.parametrize("command", ["tune", "record", "bench --env"])
def test_an_unknown_env_is_one_line(command, env, capfd):
    assert main([*command.split(), env]) == 2
    told = capfd.readouterr().err
    assert env in told and len(told.splitlines()) == 1 and ("no_such" in env or "Did you mean" in told)


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
    assert main(["doctor"]) == 130
    assert capfd.readouterr().err.strip() == "interrupted"


def test_nobody_reads_the_output_any_more():
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "aioenv", "bench", "--list"]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=50)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_that_lacks_letters(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["bench", "--list"]) == 0
    print("≥ 0.9 ≤", file=stream, flush=True)
    assert stream.buffer.getvalue().endswith(b"? 0.9 ?\n")
