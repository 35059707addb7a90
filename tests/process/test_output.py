"""Output of workers goes line by line into the log, and does not delay the loop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import warnings

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.ipc.messages import LogLine, pack_log_line, unpack_log_line
from aioenv.process.failures import LAST_LINES, MAX_LINE_CHARS, OutputLog
from aioenv.process.launch import START_METHODS
from aioenv.process.process import Output
from aioenv.testing import FaultyEnv
from tests.kits.loop_kit import run_on


class SlowLog(logging.Handler):
    """As slow as a terminal."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._delay_s = delay_s

    def emit(self, record):
        if self._delay_s:
            time.sleep(self._delay_s)
        self.lines.append(record.getMessage().partition(": ")[2])


@pytest.fixture
def listen(monkeypatch):
    """Attach a log to what workers print."""
    logger = logging.getLogger("aioenv.workers")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # of what is logged at all

    def attach(handler):
        logger.addHandler(handler)
        return handler

    yield attach
    logger.manager._clear_cache()


def pumped(*chunks: bytes, seen_warnings: set[str] | None = None) -> OutputLog:
    """An output log that has been given these bytes, one read after the other."""
    output = OutputLog("worker 0", 1, (0,), None, seen_warnings)

    async def pump():
        reader = asyncio.StreamReader()
        task = asyncio.create_task(output.pump(Output(reader, asyncio.Event())))
        for chunk in chunks:
            reader.feed_data(chunk)
            for _ in range(3):
                await asyncio.sleep(0)
        reader.feed_eof()
        await task

    asyncio.run(pump())
    return output


def test_lines_come_whole_however_they_are_read(listen):
    log = listen(SlowLog())
    text = "first\r\nzwölf ✓\n\nlast"
    data = text.encode()
    for size in (1, 2, 3, 5, len(data)):
        log.lines.clear()
        output = pumped(*(data[i : i + size] for i in range(0, len(data), size)))
        assert log.lines == ["first", "zwölf ✓", "", "last"]
        assert output.last_lines.split("\n") == log.lines
    log.lines.clear()
    pumped("cut ✓".encode()[:-1])
    assert log.lines == ["cut \N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("more", [-1, 0, 1, MAX_LINE_CHARS])
def test_a_long_line_is_cut_and_nothing_of_it_lost(listen, more):
    log = listen(SlowLog())
    line = "x" * (2 * MAX_LINE_CHARS + more)
    pumped(line.encode(), b"\nnext\n")
    assert "".join(log.lines[:-1]) == line
    assert len(log.lines[0]) == MAX_LINE_CHARS
    assert len(log.lines) == 1 + -(-len(line) // MAX_LINE_CHARS)
    assert log.lines[-1] == "next"


def test_others_have_their_turn_while_much_is_logged(listen):
    listen(SlowLog(0.001))
    output = OutputLog("worker 0", 1, (0,), None)
    turns = 0

    async def count_turns(until):
        nonlocal turns
        while not until.done():
            turns += 1
            await asyncio.sleep(0)

    async def main():
        reader = asyncio.StreamReader()
        reader.feed_data(b"a line\n" * 200)
        reader.feed_eof()
        pump = asyncio.create_task(output.pump(Output(reader, asyncio.Event())))
        await count_turns(pump)

    asyncio.run(main())
    assert turns > 100


def test_the_last_lines_are_known_before_they_are_logged(listen):
    """A worker that has died is not waited for long: what it said last must be in the error all the same."""
    log = listen(SlowLog(0.001))
    output = OutputLog("worker 0", 1, (0,), None)

    async def main():
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(b"line %d\n" % i for i in range(500)))
        pump = asyncio.create_task(output.pump(Output(reader, asyncio.Event())))
        while not log.lines:
            await asyncio.sleep(0)
        pump.cancel()
        await asyncio.wait([pump])

    asyncio.run(main())
    assert output.last_lines.split("\n") == [f"line {i}" for i in range(500 - LAST_LINES, 500)]
    assert len(log.lines) < 500


class LastWords(FaultyEnv):
    """Says much, then something, and is gone."""

    def step(self, action):
        super().step(action)
        os.write(2, b"my last words\n")
        os._exit(3)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_last_words_of_a_flood_are_in_the_error(way, loop, listen):
    log = listen(SlowLog(0.0002))

    async def main():
        async with aioenv.AsyncVectorEnv([lambda: LastWords("prints", "step")]) as envs:
            await envs.reset()
            with pytest.raises(aioenv.WorkerDied, match="exited with code 3") as caught:
                await envs.step(np.zeros(1, np.int64))
            assert caught.value.stderr.endswith("my last words")

    run_on(loop, main())
    assert log.lines[-1] == "my last words"
    assert len(log.lines) == 2_001


@pytest.mark.parametrize(
    "record",
    [
        LogLine(30, "my.env", "zwölf ✓"),
        LogLine(10, "root", "two\nlines, and one\n\nmore"),
        LogLine(40, "", ""),
        LogLine(40, "a logger\x1d", "a\x1ename"),
    ],
)
def test_a_record_comes_across_in_one_line(record):
    line = pack_log_line(record).decode()
    assert line.endswith("\n") and line.count("\n") == 1
    assert unpack_log_line(line[:-1]) == record


def test_a_long_record_is_one_record_and_what_is_none_is_a_line(listen):
    assert len(pack_log_line(LogLine(30, "my", "x" * 100_000))) < MAX_LINE_CHARS
    log = listen(SlowLog())
    broken = "\x1enot a level\x1emy\x1etext"
    pumped(pack_log_line(LogLine(30, "my", "one")), broken.encode() + b"\n")
    assert log.lines == ["one", broken]


class Logs(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        log = logging.getLogger("my.env")
        log.debug("not asked for")
        log.info("an aside")
        logging.error("of the root, %s", "no less")
        try:
            raise ValueError("oops")
        except ValueError:
            log.exception("it raised")
        print("printed", flush=True)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        logging.basicConfig(format="own %(message)s", level=logging.WARNING)
        logging.getLogger("my.env").warning("format")
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("start", START_METHODS)
def test_what_envs_log_keeps_its_level_and_its_name(start, caplog):
    async def main() -> None:
        async with aioenv.AsyncVectorEnv([Logs], start=start) as envs:
            await envs.reset()
            await envs.step([0])

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    told = [
        (record.levelname, record.name, record.getMessage().partition(": ")[2])
        for record in caplog.records
        if record.name.startswith("aioenv.workers")
    ]
    name = "aioenv.workers.my.env"
    raised = next(text for level, _, text in told if "it raised" in text)
    assert raised.startswith("it raised\nTraceback") and raised.endswith("ValueError: oops")
    assert told == [
        ("INFO", name, "an aside"),
        ("ERROR", "aioenv.workers", "of the root, no less"),
        ("ERROR", name, raised),
        ("INFO", "aioenv.workers", "printed"),
        ("INFO", "aioenv.workers", "own format"),  # it has a handler of its own now, which prints
    ]


@pytest.mark.parametrize("start", START_METHODS)
def test_what_modules_say_when_they_are_imported(start, caplog, tmp_path, monkeypatch):
    """Each worker says it, or, where a fork server imports them for all, the first."""
    text = "import logging, warnings\nprint('hello')\nwarnings.warn('old')\n"
    text += "logging.getLogger('mine').warning('two\\nlines')\nlogging.getLogger('mine').info('an aside')\n"
    (tmp_path / "talks_at_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def make():
        import talks_at_import  # noqa: F401

        return Logs()

    async def main() -> None:
        async with aioenv.AsyncVectorEnv([Logs], start=start):  # whose server knows of another level
            caplog.set_level(logging.INFO)
            async with aioenv.AsyncVectorEnv([make] * 2, num_workers=2, start=start, preload=("talks_at_import",)):
                pass

    asyncio.run(main())
    told = [(record.levelname, record.name, record.getMessage().partition(": ")[2]) for record in caplog.records]
    assert ("WARNING", "aioenv.workers.mine", "two\nlines") in told
    assert ("INFO", "aioenv.workers.mine", "an aside") in told
    assert next(level for level, _, text in told if "UserWarning: old" in text) == "WARNING"
    assert told.count(("INFO", "aioenv.workers", "hello")) == (1 if start == "forkserver" else 2)


@pytest.mark.skipif("forkserver" not in START_METHODS, reason="no fork server here")
def test_a_flood_of_output_at_an_import_delays_nothing(caplog, tmp_path, monkeypatch):
    (tmp_path / "floods_at_import.py").write_text("print(('x' * 99 + '\\n') * 20_000 + 'the end')\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def main() -> None:
        async with aioenv.AsyncVectorEnv([Logs], start="forkserver", preload=("floods_at_import",)):
            pass

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    told = [record.getMessage().partition(": ")[2] for record in caplog.records if record.name == "aioenv.workers"]
    assert told[0] == f"[{20_000 * 100 + 8 - (1 << 15)} bytes before this]" and told[-1] == "the end"


WARNED = (
    b"/a/b.py:12: UserWarning: \x1b[33mWARN: The reward is a NaN value.\x1b[0m\n  logger.warn(\n",
    b"MuJoCo: Nan, Inf or huge value in CTRL at ACTUATOR 0. The simulation is unstable. Time = %d.\n",
    b"MuJoCo: compiler attribute 'settotalmass' is deprecated\nWarning: it rains\n",
)


def test_warnings_are_seen_without_any_set_up(caplog):
    """Each once, however many workers of a vector env say it; and not what an env just prints."""
    said: set[str] = set()
    with caplog.at_level(logging.INFO, "aioenv.workers"):
        for pid in (1, 2):
            pumped(WARNED[0], WARNED[1] % pid, WARNED[2], seen_warnings=said)
    levels = ["WARNING", "INFO", "WARNING", "INFO", "INFO"]
    assert [record.levelname for record in caplog.records] == levels + ["INFO"] * 5
    caplog.clear()
    with caplog.at_level(logging.INFO, "aioenv.workers"):
        pumped(WARNED[0], WARNED[1] % 3, WARNED[2], seen_warnings=set())  # another vector env
    assert [record.levelname for record in caplog.records] == levels


class Warns(Logs):
    def step(self, action):
        warnings.warn(f"step {action}", stacklevel=1)
        return super().step(action)


def test_each_vector_env_shows_its_first_warnings(caplog):
    async def main() -> None:
        async with aioenv.AsyncVectorEnv([Warns] * 2, num_workers=2, restart=aioenv.RestartPolicy()) as envs:
            await envs.reset()
            for action in range(2):
                await envs.step([action] * 2)

    with caplog.at_level(logging.INFO, "aioenv.workers"):
        for _ in range(2):
            asyncio.run(main())
    warned = [record for record in caplog.records if "UserWarning: step" in record.getMessage()]
    assert [record.levelname for record in warned] == ["WARNING", "INFO", "INFO", "INFO"] * 2
