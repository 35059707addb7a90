"""Mistakes of the first hour: programs that were meant otherwise, and places that a program is run from."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import signal
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import sync
from aioenv.cli import main
from aioenv.process import child, forkserver
from tests.kits.loop_kit import LOOPS, run_on

PROGRAM = """
import aioenv, sys

async def main():
    async with aioenv.make_vec("CartPole-v1", 2, num_workers=1) as envs:
        await envs.reset(seed=0)
        print("up", flush=True)
        while {forever}:
            await envs.step([0, 1])

aioenv.run(main())
"""


def test_a_program_may_have_no_standard_streams():
    close_all = "import os, sys; os.closerange(0, 3); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    program = PROGRAM.format(forever=False).replace('print("up", flush=True)', "")
    done = subprocess.run([sys.executable, "-c", close_all, "-c", program], timeout=50)
    assert done.returncode == 0


def test_ctrl_c_ends_a_program_with_one_traceback():
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(forever=True)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None and program.stdout.readline() == "up\n"
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=30)
    assert program.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
    assert '"<string>", line 9, in main' in errors  # where it was


FORK = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads is forked
from aioenv import errors, sync

for envs in sync.make_vec("CartPole-v1", 2), sync.AsyncVectorEnv([lambda: __import__("gymnasium").make("CartPole-v1")]):
    envs.reset(seed=0)
    pid = os.fork()
    if pid == 0:
        try:
            envs.step([0] * envs.num_envs)
        except errors.LoopError as exc:
            assert "forked copy" in str(exc)
            envs.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert envs.step([0] * envs.num_envs)[1].all()
    envs.close()
"""


def test_a_forked_copy_says_that_it_is_one():
    assert subprocess.run([sys.executable, "-c", FORK], timeout=50).returncode == 0


@pytest.mark.parametrize(
    "call",
    [
        *(f'make_vec("CartPole-v1", 64, num_workers=64, {how})' for how in ("start='forkserver'", "start='spawn'")),
        'make_vec("CartPole-v1", 64, num_workers=64, debug=True)',
        "AsyncVectorEnv([lambda: None] * 64, num_workers=64)",
    ],
)
def test_too_few_descriptors_are_explained(call):
    program = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); from aioenv import sync; "
    program += f"sync.{call}"
    done = subprocess.run(
        [sys.executable, "-W", "default::ResourceWarning", "-c", program], timeout=50, capture_output=True, text=True
    )
    assert "ulimit -n), or take fewer workers" in done.stderr.splitlines()[-1]
    assert "ResourceWarning" not in done.stderr, "what was opened before is closed"


def test_what_was_forgotten_is_named_as_it_was():
    program = PROGRAM.format(forever=False).replace("async with ", "envs = await ").replace(" as envs:", "; True:", 1)
    program = program.replace("; True:", "\n    if True:")
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], timeout=50, capture_output=True, text=True)
    assert done.stdout == "up\n"
    assert "unclosed <AsyncVectorEnv CartPole-v1 num_envs=2 backend=workers num_workers=1 " in done.stderr
    assert " running>; its workers were killed" in done.stderr


def test_run_says_what_to_do_where_a_loop_runs():
    async def notebook() -> None:
        with pytest.raises(RuntimeError, match="await the coroutine instead"):
            aioenv.run(asyncio.sleep(0))

    asyncio.run(notebook())


def test_an_async_vector_env_says_that_it_is_one():
    with pytest.raises(TypeError, match=r"use `async with`; .* aioenv\.sync\.make_vec"):
        with aioenv.make_vec("CartPole-v1", 2):  # type: ignore[attr-defined]
            pass
    with sync.make_vec("CartPole-v1", 2) as envs, pytest.raises(TypeError, match=r"aioenv\.sync\.evaluate"):
        asyncio.run(aioenv.evaluate(envs, lambda obs: obs, 1))  # type: ignore[arg-type]
    not_started = aioenv.make_vec("CartPole-v1", 2)
    make_envs = [lambda: gym.make("CartPole-v1")]
    for envs in not_started, gym.vector.SyncVectorEnv(make_envs), sync.AsyncVectorEnv(make_envs):
        with pytest.raises(TypeError, match=r"evaluate: expected an aioenv\.sync\.VectorEnv.* aioenv\.evaluate"):
            sync.evaluate(envs, lambda obs: obs, 1)  # type: ignore[arg-type]
    envs.close()
    with pytest.raises(TypeError, match=r"record: expected .* aioenv\.record"):
        sync.record(not_started, "x.mp4", steps=1)  # type: ignore[arg-type]
    with sync.make_vec("CartPole-v1", 2, debug=True) as envs:
        with pytest.raises(TypeError, match=r"record: expected .* async API, .* aioenv\.sync\.record"):
            asyncio.run(aioenv.record(envs, "x.mp4", steps=1))  # type: ignore[arg-type]
        around = gym.wrappers.vector.RecordEpisodeStatistics(envs)
        with pytest.raises(TypeError, match=r"record: expected an aioenv\.sync\.VectorEnv itself.*RecordVideo"):
            sync.record(around, "x.mp4", steps=1)  # type: ignore[arg-type]


def test_evaluate_takes_a_vector_env_and_a_policy():
    for wrong in "CartPole-v1", print:
        for evaluate in aioenv.evaluate, sync.evaluate:
            with pytest.raises(TypeError, match=r"evaluate: expected an? .*, as aioenv\..* gives it, got ") as caught:
                asyncio.run(evaluate(wrong, wrong, 1))  # type: ignore[arg-type]
            assert "there is" not in str(caught.value), "the other evaluate would not take it either"


@pytest.mark.parametrize(
    ("env_fns", "hint"),
    [("CartPole-v1", r"make_vec\(id, num_envs\)"), (lambda: gym.make("CartPole-v1"), r"\[function\] \* num_envs")],
)
def test_factories_come_in_a_sequence(env_fns, hint):
    with pytest.raises(TypeError, match=f"expected a sequence of functions.*{hint}"):
        aioenv.AsyncVectorEnv(env_fns)


@pytest.mark.parametrize("backend", ["workers", "native"])
def test_an_id_without_a_version_is_that_of_the_latest(backend):
    """As in Gymnasium, which says so, too."""
    with pytest.warns(UserWarning, match="the latest versioned environment `CartPole-v1` instead of"):
        envs = sync.make_vec("CartPole", 2, backend=backend)
    with envs:
        assert envs.spec.id == "CartPole-v1"


def test_make_vec_takes_no_list():
    with pytest.raises(TypeError, match=r"a list of functions goes to aioenv\.AsyncVectorEnv"):
        aioenv.make_vec([lambda: gym.make("CartPole-v1")])  # type: ignore[arg-type]


def test_a_factory_that_forgets_to_return_is_named():
    def forgetful() -> None:
        gym.make("CartPole-v1")

    with pytest.raises(aioenv.WorkerStartError, match="slot 1: TypeError: the factory returned None, expected"):
        sync.VectorEnv([lambda: gym.make("CartPole-v1"), forgetful], num_workers=1)


def test_things_say_what_they_are():
    envs = aioenv.make_vec("CartPole-v1", 4, num_workers=2)
    assert repr(envs) == "<AsyncVectorEnv num_envs=4 backend=workers num_workers=2 autoreset_mode=NextStep not started>"
    native = aioenv.make_vec("CartPole-v1", 4, backend="native")
    assert repr(native) == "<NativeVectorEnv num_envs=4 backend=native not started>"
    with sync.make_vec("CartPole-v1", 2, num_workers=1, episode_stats=True) as blocking:
        told = "<aioenv.sync.VectorEnv CartPole-v1 num_envs=2 backend=workers num_workers=1 autoreset_mode=NextStep %s>"
        assert repr(blocking) == told % "running"
        blocking.reset(seed=0)
        rollout = blocking.rollout(lambda obs: np.zeros(len(obs), int), 3)
        assert repr(rollout) == "<Rollout steps=3 num_envs=2 valid=100%>"
        assert repr(blocking.episode_stats) == "<EpisodeStats 0 episodes, 6 steps>"
        evaluation = sync.evaluate(blocking, lambda obs: np.zeros(len(obs), int), 2, seed=0)
        assert repr(evaluation).startswith("<Evaluation of 2 episodes, return ")
    assert repr(blocking) == told % "closed"


def test_the_blocking_close_says_what_it_does():
    assert "grace_s" in inspect.signature(sync.VectorEnv.close).parameters
    assert "SIGTERM" in inspect.getdoc(sync.VectorEnv.close)
    envs = sync.make_vec("CartPole-v1", 2, num_workers=1)
    envs.close(grace_s=5)
    envs.close()
    assert envs.closed


def test_the_blocking_names_show_their_arguments():
    for ours, theirs in ((sync.make_vec, aioenv.make_vec), (sync.VectorEnv, aioenv.AsyncVectorEnv)):
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters


def test_an_epoch_may_have_one_reducer():
    assert aioenv.EpisodeEvent("x", epoch="mean").epoch == ("mean",)


def test_the_command_line_knows_ids(capsys, tmp_path):
    assert main(["record", "Nope-v0", "--out", os.fspath(tmp_path / "x.mp4")]) == 2
    assert "aioenv record: Nope-v0: Environment `Nope` doesn't exist" in capsys.readouterr().err


class Masked(gym.Env):
    """Allows action 0 or 2; an episode lasts two steps."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,), np.float32), gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.allowed, self.steps = 0, 0
        return np.zeros(1, np.float32), self.info()

    def info(self):
        return {"action_mask": (np.arange(3) == self.allowed).astype(np.int8)}

    def step(self, action):
        assert action == self.allowed
        self.allowed, self.steps = 2 - self.allowed, self.steps + 1
        return np.zeros(1, np.float32), 0.0, self.steps == 2, False, self.info()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_actions_that_some_states_do_not_allow(mode):
    async def main() -> None:
        async with aioenv.make_vec(Masked, 3, num_workers=1, autoreset_mode=mode) as envs:
            info = (await envs.reset()).info
            for _ in range(7):
                mask = info["action_mask"]
                assert mask.shape == (3, 3) and mask.dtype == np.int8 and info["_action_mask"].all()
                info = (await envs.step(envs.action_space.sample(mask=tuple(mask)))).info

    asyncio.run(main())


@pytest.mark.asyncio
async def test_a_platform_without_workers_says_so(monkeypatch):
    """Windows has no `os.readv`."""
    monkeypatch.delattr(os, "readv")
    with pytest.raises(aioenv.WorkerStartError, match=r'backend="native" and num_workers=0 need none'):
        await aioenv.make_vec("CartPole-v1", 2)
    for options in ({"backend": "native"}, {"num_workers": 0}, {"debug": True}):
        async with aioenv.make_vec("CartPole-v1", 2, **options) as envs:
            assert (await envs.reset(seed=0)).obs.shape == (2, 4)
            await envs.step(np.zeros(2, int))


def test_adapters_are_there_or_say_what_they_need():
    if importlib.util.find_spec("stable_baselines3") is None:
        with pytest.raises(ImportError, match="pip install stable-baselines3"):
            aioenv.adapters.sb3  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'sb4'"):
        aioenv.adapters.sb4  # noqa: B018


@pytest.mark.parametrize("loop", LOOPS)
def test_a_platform_without_pidfds_says_how_a_worker_ended(loop, monkeypatch):
    """MacOS, say."""
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(forkserver, "AVAILABLE", False)
    monkeypatch.setattr(child, "PIDFDS", False)

    async def main() -> None:
        async with aioenv.make_vec("CartPole-v1", 2, num_workers=2, start="spawn") as envs:
            await envs.reset(seed=0)
            os.kill(envs.workers[0].pid, signal.SIGKILL)
            with pytest.raises(aioenv.WorkerDied, match="was killed by SIGKILL"):
                await envs.step([0, 0])

    run_on(loop, main())


def test_a_platform_without_memory_to_share_says_so(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(RuntimeError, match="no memory without a name"):
        aioenv.EpisodeCounter(2)
