"""Commands that a signal ends, and what they have started."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

import aioenv
from aioenv.cli import main, processes
from tests.kits.process_kit import environment

HELD = """
import os, threading
import gymnasium

class Held(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        os.write(os.open(os.environ["HELD_FIFO"], os.O_WRONLY), b".")
        threading.Event().wait(100)  # until it is killed

gymnasium.register("Held-v0", entry_point=Held)
"""

CODE = """
import signal, sys
for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # whatever the tests were started with
    signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
from aioenv.cli import main
sys.exit(main(sys.argv[1:]))
"""


def readable(fd) -> bool:
    return bool(select.select([fd], [], [], 50)[0])


@pytest.mark.parametrize(
    ("command", "signum", "status"),
    [
        ("bench --only aioenv --env ENV", signal.SIGTERM, 143),
        ("bench --only gymnasium-async --env ENV", signal.SIGHUP, 129),
        ("bench --only gymnasium-async --env ENV", signal.SIGINT, 130),
        ("tune ENV --only copy", signal.SIGTERM, 143),
    ],
)
def test_a_command_that_a_signal_ends_ends_what_it_has_started(command, signum, status, fifo, tmp_path):
    (tmp_path / "held_of_here.py").write_text(HELD)
    (temporary := tmp_path / "temporary").mkdir()
    env = {**environment(), "HELD_FIFO": fifo, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": ""}
    arguments = command.replace("ENV", "held_of_here:Held-v0 --num-envs 2").split()
    held = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, "-c", CODE, *arguments]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert readable(held) and os.read(held, 9)
            assert any(temporary.iterdir())
            assert select.select([process.stdout], [], [], 0)[0]  # what it measures is told before it is done
            assert b"CPUs" in process.stdout.readline()
            process.send_signal(signum)
            assert process.wait(50) == status
            while readable(held) and os.read(held, 9):  # until no worker has it open any more
                pass
        finally:
            process.kill()
            os.close(held)
    assert not any(temporary.iterdir())


@pytest.mark.parametrize("run", [asyncio.run, aioenv.run])
def test_an_event_loop_lets_the_end_through(run, monkeypatch, capfd):
    async def hang() -> None:
        async with aioenv.make_vec("CartPole-v1", 1):
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    monkeypatch.setattr("aioenv.cli.doctor.run", lambda args: run(hang()))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert main(["doctor"]) == 143
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capfd.readouterr().err == "\nended by SIGTERM\n"


def test_what_nohup_ignores_stays_ignored_and_one_signal_is_enough(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(processes.EndedBySignal, match="SIGTERM"), processes.signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                cleaned = True
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert cleaned
    monkeypatch.setattr(processes, "CLEANUP_S", 0.0)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with processes.signals_raise():  # one that got lost on its way is not the last that is heard
            for _ in range(2):
                with pytest.raises(processes.EndedBySignal):
                    os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
