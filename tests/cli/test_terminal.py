"""Commands on a terminal, in a pipe, and without rich: widths, colours, progress; JSON, completion, mistyped words."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from aioenv.cli import contenders, main, terminal
from aioenv.cli.contenders import CONTENDERS
from tests.kits.cli_kit import needs_opengl
from tests.kits.process_kit import environment

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(code: str, columns: int, **variables: str) -> str:
    """What a program prints on a terminal of so many columns."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {name: value for name, value in environment().items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color", **variables}
    with subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                said += (new := os.read(mine, 65536))
            except OSError:  # all have closed it
                break
            if not new:
                break
        os.close(mine)
    assert process.returncode == 0, said
    return said.decode().replace("\r\n", "\n")


ROWS = """
from aioenv.cli.bench import BASELINES, print_table
from aioenv.cli.contenders import CONTENDERS
rate = {"problem": "", "rounds": [], "env_steps_per_s": 1_234_567, "min": 1_134_567, "max": 1_334_567}
others = {"others_cpus": 1.0, "start_s": 12.34, "ratios": {name: 12.34 * n for name, n in BASELINES.values()}}
rows = [{"env": "X", "contender": name, **rate, **others} for name in CONTENDERS]
rows.append({"env": "X", "contender": "envpool", "problem": "has no X " + "that is long " * 12, "rounds": []})
print_table("X-v1", rows)
"""


@pytest.mark.parametrize("columns", [80, 140])
def test_columns_never_collide(columns):
    shown = CONTROL.sub("", on_terminal(ROWS, columns))
    assert all(len(line) <= columns for line in shown.splitlines())
    # a label may take two lines, and the numbers stand in columns of their own
    row = r"^(\S.*\S) +1,234,567\* +1\.13M-1\.33M +12\.34 +12\.34 +12\.34 +12\.34 *$"
    labels = re.findall(row, shown, re.MULTILINE)
    assert len(labels) == len(CONTENDERS)
    for label, contender in zip(labels, CONTENDERS.values(), strict=True):
        assert contender.label == label if columns == 140 else contender.label.startswith(label)
    assert "…" not in shown and "has no X that is long" in shown


@pytest.mark.parametrize("columns", [20, 40, 50])
def test_what_does_not_fit_is_printed_as_in_a_pipe(columns):
    shown = CONTROL.sub("", on_terminal(ROWS, columns))
    numbers = r" +1,234,567\* +1\.13M-1\.33M +12\.34 +12\.34 +12\.34 +12\.34$"
    assert re.findall(f"^(.*?){numbers}", shown, re.MULTILINE) == [each.label for each in CONTENDERS.values()]


def test_a_width_of_0_is_not_known():
    code = "from aioenv.cli.terminal import say, show_table; say('x'); show_table(('y',), [('z',)])"
    assert CONTROL.sub("", on_terminal(code, 80, COLUMNS="0")).split() == ["x", "y", "z"]


def test_colours_are_for_terminals_without_no_color(capfd):
    code = "from aioenv.cli.terminal import say, show_table; say('x', 'green'); show_table(('',), [('better',)])"
    assert "\x1b[32m" in on_terminal(code, 80)
    assert "\x1b[3" not in on_terminal(code, 80, NO_COLOR="1")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=50)
    assert done.stdout.split() == ["x", "better"]


PROGRESS = """
from aioenv.cli.terminal import progress
with progress(4) as show:
    for number in range(4):
        show(f"part {number} [bold]")
print("done")
"""


def test_progress_is_for_terminals():
    shown = on_terminal(PROGRESS, 80)
    assert "part 0 [bold]" in shown and "75%" in shown and shown.endswith("done\n")
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]", CONTROL.sub("", shown)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRESS], capture_output=True, text=True, env=environment(), timeout=50
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_lines_of_a_pipe_and_code_to_copy_are_whole(capfd):
    long = "word " * 100
    terminal.say(long)
    assert capfd.readouterr().out == f"{long}\n"
    code = f"from aioenv.cli.terminal import say; say('{long}'); say('x' * 200, wrap=False, indent=2)"
    shown = CONTROL.sub("", on_terminal(code, 80)).splitlines()
    assert len(shown) == 8 and shown[-1] == "  " + "x" * 200


def test_short_numbers():
    numbers = [0, 9.876, 12, 999.6, 1234, 55_540, 999_499, 999_960, 1_234_567, 2.5e9]
    expected = ["0", "9.88", "12", "1k", "1.23k", "55.5k", "999k", "1M", "1.23M", "2.5G"]
    assert [terminal.short_number(number) for number in numbers] == expected


@pytest.mark.parametrize(
    ("arguments", "told", "usage"),
    [
        ("bnech --rounds 2", "there is no command 'bnech'; did you mean bench?", "usage: aioenv bench "),
        ("frobnicate", "there is no command 'frobnicate'\n", "usage: aioenv [-h]"),
        ("record CartPole-v1 --stesp 3", "did you mean --steps?", "usage: aioenv record "),
        ("bench --roundz=3", "did you mean --rounds?", "usage: aioenv bench "),
        ("doctor --jsno", "did you mean --json?", "usage: aioenv doctor "),
        ("tune --json noop", "'noop' is an env: name it before --json", "usage: aioenv tune "),
        ("tune noop --frobnicate", "unrecognized arguments: --frobnicate\n", "usage: aioenv tune "),
    ],
)
def test_a_mistyped_word_names_the_close_one_and_shows_its_usage(arguments, told, usage, capfd):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    said = capfd.readouterr()
    assert said.out == "" and told in said.err and said.err.startswith(usage)


def test_mistyped_names_of_contenders_and_settings(capfd):
    assert main(["bench", "--only", "gymnasium-asinc"]) == 2
    assert capfd.readouterr().err.endswith("; did you mean gymnasium-async?\n")
    assert main(["tune", "noop", "--only", "num_worker"]) == 2
    assert capfd.readouterr().err.endswith("; did you mean num_workers?\n")


# ---------------------------------------------------------------- JSON


def test_json_is_all_that_doctor_prints(capfd):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["works"] and report["to_do"] == []) or "WARNING" in report["to_do"][0]
    assert report["packages"]["numpy"]["version"] and report["event_loop"] == "uvloop"


def test_json_is_all_that_bench_and_tune_print(monkeypatch, capfd):
    def play_rounds(entries, rounds, progress, *, outcomes=None, **_):
        outcomes = {} if outcomes is None else outcomes
        for label in entries:
            progress(label)
            os.system("echo a child prints")
            print("something is printed")
            rounds_ = [{"env_steps": 100, "seconds": 1.0, "start_s": 0.1}] * rounds
            outcomes[label] = contenders.Outcome(rounds_)
        return outcomes

    monkeypatch.setattr(contenders, "play_rounds", play_rounds)
    monkeypatch.setattr("aioenv.cli.bench.play_rounds", play_rounds)
    monkeypatch.setattr("aioenv.cli.tune.foreign_load", lambda seconds: 0.0)
    for command in ("bench --only aioenv --json", "tune noop --only copy --json", "tune noop --only copy --json -"):
        assert main(command.split()) == 0
        said = capfd.readouterr()
        content = json.loads(said.out)
        assert content.get("results") or content["stages"]
        assert "something is printed" in said.err and "env-steps/s" in said.err  # for people
    os.system("echo back")
    assert capfd.readouterr().out == "back\n"


@needs_opengl
def test_json_is_all_that_record_prints(tmp_path, capfd):
    out = tmp_path / "x.mp4"
    command = ["record", "HalfCheetah-v5", "--steps", "1", "--grid", "1x1", "--size", "64x48", "--json"]
    assert main([*command, "--out", str(out)]) == 0
    assert json.loads(capfd.readouterr().out) == {"path": str(out), "pictures": 2, "episodes": 0}


# ---------------------------------------------------------------- without rich, and broken parts


def test_doctor_without_rich_prints_plain_text(tmp_path):
    (tmp_path / "rich.py").write_text("raise RuntimeError('it is broken')")
    env = {**environment(), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "aioenv", "doctor"], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=100
    )
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(r"^  numpy +\d", done.stdout, re.MULTILINE) and "Event loop: uvloop" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("  rich: it can't be imported: RuntimeError: it is broken")


def test_doctor_reports_a_part_that_raises_and_goes_on(monkeypatch, capfd):
    def ends():
        raise SystemExit("enough")

    monkeypatch.setattr("aioenv.cli.opengl.probe_all", ends)
    monkeypatch.setattr("aioenv.cli.doctor.start_text_process", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a fault of ours is no report
        main(["doctor"])
    capfd.readouterr()

    def refused(*args, **options):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("aioenv.cli.doctor.start_text_process", refused)
    monkeypatch.setattr("aioenv.cli.doctor._NEEDED_HERE", set())
    assert main(["doctor"]) == 1
    told = capfd.readouterr().out
    assert "numpy: its import can't be tried: [Errno 11]" in told and "aioenv does not work here. What to do:" in told


def test_rich_is_imported_by_commands_alone():
    code = "import sys, aioenv, aioenv.cli, aioenv.cli.contenders; assert not [m for m in sys.modules if m == 'rich']"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=50)


# ---------------------------------------------------------------- completion


def completed(script: str, *words: str) -> list[str]:
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _aioenv; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.split()


def test_bash_completes_commands_options_and_values(capfd):
    assert main(["completion", "bash"]) == 0
    script = capfd.readouterr().out
    assert completed(script, "aioenv", "be") == ["bench"]
    assert completed(script, "aioenv", "record", "X", "--no") == ["--no-labels"]
    assert completed(script, "aioenv", "record", "--backend", "") == ["workers", "native", "auto"]
    assert completed(script, "aioenv", "record", "--out", "") == []  # bash's own completion of files
    assert completed(script, "aioenv", "completion", "z") == ["zsh"]
    assert main(["completion", "zsh"]) == 0
    assert capfd.readouterr().out == f"autoload -U +X bashcompinit && bashcompinit\n{script}"


def test_fish_completes_commands_options_and_values(capfd):
    assert main(["completion", "fish"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert all(line.startswith("complete -c aioenv ") for line in lines)
    assert any("-l backend -x -a 'workers native auto'" in line for line in lines)
    assert any("-n __fish_use_subcommand -a doctor" in line for line in lines)
