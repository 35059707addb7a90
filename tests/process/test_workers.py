"""Worker processes: what envs do to their descriptors, what they print, what they leave behind."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from aioenv.core.results import WorkerInfo
from aioenv.errors import WireError
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import Encoder, Kind
from aioenv.process.launch import START_METHODS
from aioenv.worker.worker_end import WorkerEnd, _enlarge
from tests.kits.process_kit import environment
from tests.kits.version_kit import needs


class Rude(gym.Env):
    """Prints much, writes rubbish to fd 1, and closes fd 0."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        print("x" * 200_000)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        os.write(1, b"\xa1\x0e\x01\x08rubbish" * 100 + b"\n")
        os.write(2, b"and on stderr\n")
        try:
            os.close(0)
        except OSError:
            pass
        subprocess.run(["/bin/sh", "-c", "echo from a child"], check=True)
        return np.ones(1, np.float32), 1.0, False, False, {}


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_what_envs_print_disturbs_nothing_and_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="aioenv.workers")
    async with aioenv.make_vec(Rude, 2, num_workers=2, log_prefix="train") as envs:
        pids = {w.pid for w in envs.workers}
        await envs.reset()
        for _ in range(20):
            obs, reward, *_ = await envs.step([0, 0])
            assert obs.tolist() == [[1], [1]] and reward.tolist() == [1, 1]
    records = [r for r in caplog.records if r.name == "aioenv.workers"]
    assert {r.pid for r in records} == pids
    text = [r.getMessage() for r in records]
    assert sum(line.count("x") for line in text if "xxx" in line) >= 400_000
    assert sum("rubbish" in line for line in text) >= 2
    assert sum("and on stderr" in line for line in text) == 40
    assert sum("from a child" in line for line in text) == 40
    assert all(line.startswith("train: worker ") for line in text)


class Reconfigures(gym.Env):
    """As many modules do, so that they can print what they like."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            assert not stream.seekable()
            stream.reconfigure(encoding="latin-1")
            print("zwölf", file=stream)
            stream.reconfigure(encoding="utf-8")
            print("zwölf ✓", file=stream)
        return np.zeros(1, np.float32), {}


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_streams_of_workers_are_those_of_a_pipe(caplog):
    caplog.set_level(logging.INFO, logger="aioenv.workers")
    async with aioenv.AsyncVectorEnv([Reconfigures]) as envs:
        await envs.reset()
    text = [r.getMessage().partition(": ")[2] for r in caplog.records if r.name == "aioenv.workers"]
    assert text == ["zw\ufffdlf", "zwölf ✓"] * 4, "and line by line"


SCRIPT = """
import aioenv, gymnasium as gym, numpy as np, threading

class Mine(gym.Env):
    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}
    def step(self, action):
        return np.full(1, FIVE, np.float32), 0.0, False, False, {}

FIVE = 5
gym.register("Mine-v0", entry_point=Mine)

class Named(Mine):
    lock = threading.Lock()

class Wrapped(gym.Wrapper, gym.utils.RecordConstructorArgs):
    def __init__(self, env):
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)

gym.register("Named-v0", entry_point="__main__:Mine")
gym.register("Locked-v0", entry_point="__main__:Named")
spec = Wrapped(gym.make("Named-v0")).spec

async def main():
    env_fns = [Mine, lambda: Mine(), lambda: gym.make("Mine-v0"), lambda: gym.make("Named-v0"), lambda: gym.make(spec)]
    async with aioenv.AsyncVectorEnv(env_fns, start="START") as envs:
        await envs.reset()
        print((await envs.step([0] * 5)).obs[:, 0].tolist())
    async with aioenv.make_vec("Locked-v0", start="START") as envs:
        await envs.reset()
        try:
            await envs.call("lock")
        except aioenv.EnvError as exc:
            print("Named.lock, could not be sent to the worker: cannot pickle" in str(exc))

aioenv.run(main())
print("and on")
"""


HOWS = ["-c", "file", "standard input", "interactive"]


@pytest.mark.parametrize(
    ("start", "how"),
    [
        pytest.param(start, how, marks=[pytest.mark.stress] if start != "spawn" and number % 2 == 0 else [])
        for start in START_METHODS
        for number, how in enumerate(HOWS)
    ],
)
def test_no_main_guard_is_needed(start, how, tmp_path):
    code = SCRIPT.replace("START", start)
    path = tmp_path / "script.py"
    path.write_text(code)
    args = {"-c": ["-c", code], "file": [path], "standard input": ["-"], "interactive": ["-i"]}[how]
    stdin = code if how in ("standard input", "interactive") else None
    done = subprocess.run(
        [sys.executable, *args], input=stdin, capture_output=True, text=True, timeout=60, env=environment()
    )
    # once each: the script has not run again in a worker, nor has one read what was left of standard input
    assert (done.returncode, done.stdout) == (0, "[5.0, 5.0, 5.0, 5.0, 5.0]\nTrue\nand on\n"), done.stderr


def wait_gone(pid: int) -> None:
    """Wait until a process that is not ours has ended (its pidfd becomes readable)."""
    import select

    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = select.select([fd], [], [], 5)
        assert readable, f"process {pid} is still there"
    finally:
        os.close(fd)


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_a_child_of_an_env_that_holds_the_pipes_does_not_hold_close():
    def factory():
        env = gym.make("CartPole-v1")
        env.unwrapped.sleeper = subprocess.Popen(["sleep", "60"]).pid
        return env

    async with aioenv.AsyncVectorEnv([factory]) as envs:
        (sleeper,) = await envs.get_attr("sleeper")
        await envs.reset(seed=0)
        async with asyncio.timeout(5):
            await envs.close()
    wait_gone(sleeper)


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_close_is_bounded_when_an_env_hangs_in_c_and_ignores_sigterm():
    def factory():
        import ctypes
        import signal

        env = gym.make("CartPole-v1")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        env.unwrapped.hang = lambda: ctypes.PyDLL(None).sleep(600)  # with the GIL held
        return env

    async with aioenv.AsyncVectorEnv([factory]) as envs:
        call = asyncio.ensure_future(envs.call("hang"))
        await asyncio.sleep(0)
        async with asyncio.timeout(6):
            await envs.close()
        with pytest.raises(aioenv.ClosedError) as caught:
            await call
        assert "SIGKILL" in str(caught.value.__cause__)


# of what the model of HalfCheetah is written in, which older versions have nothing against
WARNS = needs("mujoco", "3.17")


@WARNS
@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_mujocos_warnings_are_log_records_and_no_file(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="aioenv.workers")
    async with aioenv.make_vec("HalfCheetah-v5", 2, num_workers=2, render=aioenv.RenderConfig(32, 32)) as envs:
        await envs.reset(seed=0)
        await envs.render()
    text = mujoco_records(caplog)
    assert {line.split(" (")[0] for line in text} >= {"worker 0", "worker 1"}
    assert all("settotalmass" in line for line in text)
    assert list(tmp_path.iterdir()) == []


def mujoco_records(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "MuJoCo: " in r.getMessage()]


def after(preparation: str) -> gym.Env:
    """A HalfCheetah, made after something was executed."""
    exec(preparation)
    return gym.make("HalfCheetah-v5")


@WARNS
@pytest.mark.asyncio
@pytest.mark.parametrize("start", START_METHODS)
@pytest.mark.parametrize(
    "preparation",
    [
        "import importlib.util; assert importlib.util.find_spec('mujoco')",
        "import sys; sys.stderr.close()",
        "import sys; sys.stderr = None",
        "import os, sys; sys.stdout.close(); os.dup2(os.open('/dev/null', 0), 2)",  # a write to it fails
    ],
)
async def test_mujocos_warnings_do_no_harm_whatever_came_before(start, preparation, caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="aioenv.workers")
    async with aioenv.AsyncVectorEnv([partial(after, preparation)], start=start) as envs:
        await envs.reset(seed=0)
        await envs.step(envs.action_space.sample())
    assert len(mujoco_records(caplog)) == ("dup2" not in preparation)
    assert list(tmp_path.iterdir()) == []


@WARNS
@pytest.mark.asyncio
@pytest.mark.usefixtures("own_fork_server")  # what it preloads would be there for later tests
@pytest.mark.parametrize("start", START_METHODS)
@pytest.mark.parametrize("where", ["the factory", "a preloaded module"])
async def test_a_handler_of_mujocos_warnings_is_kept(start, where, caplog, tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    code = "import mujoco\nseen = []\nmujoco.set_mju_user_warning(seen.append)"
    (tmp_path / "modules" / "own_handler.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    caplog.set_level(logging.INFO, logger="aioenv.workers")

    def factory():
        import own_handler

        env = gym.make("HalfCheetah-v5")
        env.unwrapped.seen = own_handler.seen
        return env

    preload = ["own_handler"] if where == "a preloaded module" else []
    async with aioenv.AsyncVectorEnv([factory], start=start, preload=preload) as envs:
        ((warning,),) = await envs.get_attr("seen")
    assert "settotalmass" in warning and not mujoco_records(caplog)
    assert not (tmp_path / "MUJOCO_LOG.TXT").exists()


@pytest.mark.asyncio
@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize("start", START_METHODS)
async def test_a_preloaded_module_may_load_a_model(start, tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    code = "import gymnasium\ngymnasium.make('HalfCheetah-v5').close()"
    (tmp_path / "modules" / "loads_a_model.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    async with aioenv.make_vec("CartPole-v1", 1, start=start, preload=["loads_a_model"]):
        pass
    assert not (tmp_path / "MUJOCO_LOG.TXT").exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("start", START_METHODS)
async def test_mujocos_errors_stay_exceptions(start, tmp_path):
    def factory():
        env = gym.make("HalfCheetah-v5")
        env.unwrapped.model.opt.integrator = 77
        return env

    async with aioenv.AsyncVectorEnv([factory], start=start) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.EnvError, match=r"FatalError: .*invalid integrator"):
            await envs.step(envs.action_space.sample())
    assert list(tmp_path.iterdir()) == []


HALF_CHEETAH = Path(gym.__file__).parent / "envs/mujoco/assets/half_cheetah.xml"


@WARNS
@pytest.mark.parametrize(
    "load",
    [
        lambda: aioenv.NativeMujocoEnv(1, "half_cheetah.xml", 5).close(),
        lambda: aioenv.SimPool(HALF_CHEETAH, 1).close(),
        lambda: aioenv.RenderPool(HALF_CHEETAH),
    ],
)
def test_of_models_that_this_process_loads_the_log_tells_too(load, caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="aioenv.mujoco")
    load()
    (record,) = [r for r in caplog.records if r.name == "aioenv.mujoco"]
    assert record.levelname == "INFO" and "settotalmass" in record.getMessage()
    assert mujoco.get_mju_user_warning() is None
    assert list(tmp_path.iterdir()) == []
    seen: list[str] = []
    mujoco.set_mju_user_warning(own := seen.append)
    try:
        load()
        assert "settotalmass" in seen[0] and mujoco.get_mju_user_warning() is own
    finally:
        mujoco.set_mju_user_warning(None)


@pytest.mark.asyncio
async def test_no_worker_imports_mujoco_that_does_not_need_it():
    def factory():
        env = gym.make("CartPole-v1")
        env.unwrapped.imported = lambda: "mujoco" in sys.modules
        return env

    async with aioenv.AsyncVectorEnv([factory], start="spawn") as envs:
        assert await envs.call("imported") == (False,)


@pytest.mark.asyncio
@pytest.mark.parametrize("start", START_METHODS)
async def test_workers_tell_how_much_memory_they_hold(start):
    def hungry():
        env = gym.make("CartPole-v1")
        env.unwrapped.food = np.ones(20 << 20, np.uint8)
        return env

    async with aioenv.AsyncVectorEnv([hungry, lambda: gym.make("CartPole-v1")], num_workers=2, start=start) as envs:
        await envs.reset()
        fed, plain = (worker.memory for worker in envs.workers)
        assert 19 << 20 < fed.private_dirty - plain.private_dirty < 22 << 20
        assert 0 < plain.private_dirty <= plain.uss <= plain.pss <= plain.rss
        workers = envs.workers
    assert [worker.memory for worker in workers] == [None, None]
    assert [worker.state for worker in envs.workers] == ["closed"] * 2
    assert [worker.memory for worker in envs.workers] == [None, None]


def test_memory_of_what_is_not_there(monkeypatch):
    own = WorkerInfo(os.getpid(), "running", ())
    assert own.memory is not None
    assert own._replace(state="dead").memory is None, "its number may have come to mean this process"
    assert own._replace(pid=None, state="new").memory is None
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert own.memory is None, "as on a platform without /proc"


@pytest.mark.asyncio
@pytest.mark.parametrize("start", START_METHODS)
async def test_streams_that_an_env_has_closed_do_not_keep_its_process(start):
    """Nor does a thread that it has left behind."""

    def factory():
        import threading

        sys.stdout.close()
        threading.Thread(target=threading.Event().wait).start()
        return gym.make("CartPole-v1")

    async with aioenv.AsyncVectorEnv([factory], start=start) as envs:
        await envs.reset()
        worker = envs._session.worker_pool.members[0].worker
    assert worker.returncode == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("how", [{"debug": True}, *({"start": start} for start in START_METHODS)], ids=str)
async def test_sockets_that_have_a_timeout_by_default(how, monkeypatch):
    """What a program says of its own sockets is not meant for ours."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5)
    try:
        factories = [partial(Large, slot) for slot in range(2)]
        async with aioenv.AsyncVectorEnv(factories, num_workers=2, channel="scatter", **how) as envs:
            await envs.reset()
            obs, *_ = await envs.step(np.zeros(2, np.int64))
            assert obs[:, -1].tolist() == [0, 1]
    finally:
        socket.setdefaulttimeout(before)


class Large(gym.Env):
    """Has observations that fill a socket, and infos that do."""

    observation_space = spaces.Box(0, 255, (1 << 22,), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, slot) -> None:
        self.slot = slot

    def reset(self, *, seed=None, options=None):
        return np.full(1 << 22, self.slot, np.uint8), {}

    def step(self, action):
        return np.full(1 << 22, self.slot, np.uint8), 0.0, False, False, {"large": bytes(1 << 22)}


@pytest.mark.asyncio
@pytest.mark.parametrize("start", START_METHODS)
async def test_finders_of_old_do_not_keep_mujoco_from_being_imported(start):
    """Those that only have what Python 3.12 has taken away are passed over, as by `import` itself."""

    def factory():
        class Old:
            def find_module(self, name, path=None):
                return None

        sys.meta_path.insert(1, Old())
        return gym.make("HalfCheetah-v5")

    async with aioenv.AsyncVectorEnv([factory], start=start) as envs:
        await envs.reset(seed=0)


@pytest.mark.asyncio
@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize("start", START_METHODS)
async def test_what_the_parent_has_registered_may_be_registered_once_more(start, caplog, tmp_path, monkeypatch):
    """By its own module, which a worker imports later. In the parent that was no news either."""
    (tmp_path / "registers_own.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('RegistersOwn-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("registers_own")

    def factory():
        importlib.import_module("registers_own")
        return gym.make("RegistersOwn-v0")

    try:
        async with aioenv.AsyncVectorEnv([factory], start=start) as envs:
            await envs.reset()
    finally:
        del sys.modules["registers_own"], gym.registry["RegistersOwn-v0"]
    assert not [record for record in caplog.records if "Overriding" in record.getMessage()]


def test_a_pipe_that_may_not_grow_costs_no_descriptor():
    fd = os.open(os.devnull, os.O_RDONLY)  # nor is this one a socket
    try:
        before = os.listdir("/proc/self/fd")
        _enlarge(fd)
        assert os.listdir("/proc/self/fd") == before
    finally:
        os.close(fd)


def test_a_frame_that_rubbish_follows_is_served_and_then_nothing_is_waited_for():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"".join([*Encoder().encode(Kind.STEP, 7, 0, (b"four",)), b"rubbish, longer than a header is"]))
        link = WorkerEnd(theirs.fileno(), theirs.fileno())
        frame = link.read()
        assert frame is not None
        assert (frame.kind, frame.request, b"".join(frame.fixed)) == (Kind.STEP, 7, b"four")
        for _ in range(2):  # the other end is open, and has no more to say
            with pytest.raises(WireError, match="to begin with"):
                link.read()


def test_a_reply_that_the_socket_takes_in_pieces_arrives_whole():
    ours, theirs = socket.socketpair()
    sent = [os.urandom(300_000), b"", os.urandom(70_000)]
    with ours, theirs:
        link = WorkerEnd(theirs.fileno(), theirs.fileno())
        with ThreadPoolExecutor() as pool:
            writing = pool.submit(link.write, Kind.RESULT, 1, 0, sent, b"tail")
            decoder = Decoder()
            while not decoder.frames:
                decoder.feed(ours.recv(1 << 16))
            writing.result(10)
    frame = decoder.next_frame()
    assert frame is not None
    assert (b"".join(frame.fixed), bytes(frame.payload)) == (b"".join(sent), b"tail")
