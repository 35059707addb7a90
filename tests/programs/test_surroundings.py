"""Where programs run: containers, unusual directories, options of the interpreter; and where workers hang or crash."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import platform
from aioenv.core import timeouts
from aioenv.process import failures
from aioenv.process.environment import bootstrap
from aioenv.process.failures import WorkerIdentity, worker_died
from aioenv.process.launch import START_METHODS
from aioenv.testing import faulty_envs
from tests.docs.pages import blocks
from tests.kits.docs_kit import page
from tests.kits.process_kit import environment, run_alone

RENDER = aioenv.RenderConfig(24, 16, quality="fast", workers=1)
KUBERNETES = {"cpu.max": "250000 100000\n", "memory.events": "oom 3\noom_kill 2\n"}
OLD = {
    "cpu/cpu.cfs_quota_us": "50000\n",
    "cpu/cpu.cfs_period_us": "100000\n",
    "memory/memory.oom_control": "oom_kill 4\n",
}


@pytest.mark.parametrize(
    ("groups", "files", "quota", "kills"),
    [
        ("0::/\n", KUBERNETES, 2.5, 2),  # a container sees its own group as the root
        ("0::/box/inner\n", {f"box/{name}": text for name, text in KUBERNETES.items()}, 2.5, 2),
        ("0::/box\n", {"box/cpu.max": "max 100000\n"}, None, None),
        ("0::/box\n", {"box/cpu.max": "900000 100000\n", "cpu.max": "100000 100000\n"}, 1.0, None),  # the least
        ("4:memory:/docker/1\n1:cpu:/docker/1\n0::/\n", OLD, 0.5, 4),  # what is mounted is the container's own
        ("1:cpu,cpuacct:/\n", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "1"}, None, None),
        ("1:cpu,cpuacct:/\n", {name: text for name, text in OLD.items() if "cpu" in name}, 0.5, None),
        ("0::/\n", {"cpu.max": "nonsense"}, None, None),
        (None, {}, None, None),
    ],
)
def test_what_control_groups_say(groups, files, quota, kills, tmp_path):
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    membership = tmp_path / "cgroup"
    if groups is not None:
        membership.write_text(groups)
    assert platform.cpu_quota(tmp_path / "mount", membership) == quota
    assert platform.oom_kills(tmp_path / "mount", membership) == kills


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (0.5, 1), (2.5, 3), (100.0, 8)])
def test_there_are_as_many_workers_as_the_container_has_cpus(quota, expected, monkeypatch):
    monkeypatch.setattr(os, "process_cpu_count", lambda: 8, raising=False)
    monkeypatch.setattr(platform, "cpu_quota", lambda: quota)
    assert platform.usable_cpus() == expected


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [(None, None, "see `dmesg`"), (1, 3, "memory ran out, and it has killed 2 of"), (1, 1, "memory did not run out")],
)
def test_who_has_killed_a_worker(before, now, said, monkeypatch):
    monkeypatch.setattr(failures, "oom_kills_at_start", lambda: before)
    monkeypatch.setattr(failures, "oom_kills", lambda: now)
    assert said in str(worker_died(WorkerIdentity("worker 0", 1, (0,), ""), -9, None, None, None))


TELLS = """
import asyncio, os, shutil, sys
import gymnasium as gym, numpy as np, aioenv

class Tells(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (1,), np.float32), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        import random
        told = {"bytes": sys.flags.bytes_warning, "random": random.__file__, "args": " ".join(sys.argv)}
        return np.zeros(1, np.float32), told

async def main(start):
    async with aioenv.make_vec(Tells, 1, start=start) as envs:
        infos = (await envs.reset()).info
        assert infos["bytes"][0] == sys.flags.bytes_warning == 1, infos
        assert os.path.dirname(infos["random"][0]) == os.path.dirname(os.__file__), infos
        assert infos["args"][0] == " ".join(sys.argv), infos  # an env may read the program's flags

for start in sys.argv[1:]:
    asyncio.run(main(start))
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
if sys.version_info[:3] != (3, 13, 0):  # in a directory that is gone, its `python -c "import socket"` fails
    asyncio.run(main(start))
"""


def test_workers_have_the_interpreters_options_and_import_what_their_parent_does(tmp_path):
    """Not what happens to lie in the working directory, which may even have been removed; from odd places, too."""
    place = tmp_path / "Ärger mit Öl"
    place.mkdir()
    (tmp_path / "tells.py").write_text(TELLS)
    for name in ("functools", "random", "socket", "numpy"):
        (place / f"{name}.py").write_text("raise ImportError('the wrong one')")
    path = os.pathsep.join(entry for entry in sys.path if os.path.isabs(entry))
    environ = {**environment(), "LC_ALL": "C", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-b", "../tells.py", *START_METHODS], cwd=place, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_frozen_program_is_told_so(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert bootstrap("boot", "")[0] == sys.executable
    monkeypatch.setattr(sys, "executable", "/opt/game/game")
    with pytest.raises(aioenv.WorkerStartError, match="this program is frozen: /opt/game/game is no Python"):
        bootstrap("boot", "")


class Asks(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action:
            input("really? ")
        breakpoint()


def test_a_debugger_in_a_worker_is_told_where_it_works():
    async def main() -> None:
        async with aioenv.AsyncVectorEnv([Asks], num_workers=1) as envs:
            for action in (0, 1):
                await envs.reset()
                with pytest.raises(aioenv.EnvError) as caught:
                    await envs.step([action])
                assert "work in envs with debug=True" in caught.value.__notes__[-1]

    asyncio.run(main())


@pytest.mark.parametrize("start", START_METHODS)
def test_a_crash_says_where_it_was(start):
    async def main() -> None:
        async with aioenv.AsyncVectorEnv(faulty_envs(1, "segfault", "step", at=1), start=start) as envs:
            await envs.reset()
            with pytest.raises(aioenv.WorkerDied, match="SIGSEGV") as caught:
                await envs.step(envs.action_space.sample())
        assert "faulty_env.py" in caught.value.stderr and "Segmentation fault" in caught.value.stderr

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="takes pidfds")
@pytest.mark.parametrize(("start", "fault"), [("spawn", "hangs"), (START_METHODS[-1], "hangs_in_c")])
def test_a_timeout_says_where_envs_are(start, fault, monkeypatch):
    monkeypatch.setattr(timeouts, "_ASK_FROM_S", 0.0)

    async def main() -> None:
        envs = faulty_envs(2, fault, "step", slot=1, at=1)
        async with aioenv.AsyncVectorEnv(envs, num_workers=2, start=start, timeout_s=0.5) as envs:
            await envs.reset(timeout_s=30)
            with pytest.raises(aioenv.StepTimeout) as caught:
                await envs.step(envs.action_space.sample())
        (note,) = caught.value.__notes__
        head, *frames = note.splitlines()
        assert head.startswith("Where slot 1 (pid ") and len(frames) >= 2
        assert all("faulty_env.py" in frame for frame in frames)  # none of ours

    asyncio.run(main())


class HangsInMujoco(gym.Env):
    """An env that hangs in one of MuJoCo's drawing functions, which a worker wraps."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        import mujoco

        class Forever:
            def __index__(self) -> int:
                while True:
                    pass

        mujoco.mjr_setBuffer(Forever(), None)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="takes pidfds")
def test_a_timeout_says_where_an_env_is_that_hangs_in_a_function_that_workers_wrap(monkeypatch):
    monkeypatch.setattr(timeouts, "_ASK_FROM_S", 0.0)

    async def main() -> None:
        async with aioenv.AsyncVectorEnv([HangsInMujoco], timeout_s=0.5) as envs:
            await envs.reset(timeout_s=30)
            with pytest.raises(aioenv.StepTimeout) as caught:
                await envs.step([0])
        (note,) = caught.value.__notes__
        assert " in __index__" in note and note.splitlines()[-1].endswith(" in step")

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="takes pidfds")
def test_frames_of_ours_are_left_out_wherever_the_package_is(tmp_path):
    place = tmp_path / "ä"
    place.mkdir()
    (place / "aioenv").symlink_to(Path(aioenv.__file__).parent)
    code = """
    import gymnasium as gym, numpy as np
    import aioenv
    from aioenv import sync
    from aioenv.core import timeouts

    class Hanging(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            while True:
                pass

    timeouts._ASK_FROM_S = 0.0
    with sync.make_vec(Hanging, 1, timeout_s=0.5) as envs:
        envs.reset(timeout_s=30)
        try:
            envs.step([0])
        except aioenv.StepTimeout as error:
            (note,) = error.__notes__
            print(aioenv.__file__, note, sep="\\n")
    """
    done = run_alone(code, env={**environment(), "PYTHONPATH": os.pathsep.join([str(place), *filter(None, sys.path)])})
    where, head, *frames = done.stdout.splitlines()
    assert where.startswith(str(place)) and head.startswith("Where slot 0 (pid ")
    assert len(frames) == 1 and " in step" in frames[0]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="takes signals")
def test_a_worker_that_does_not_say_where_it_is_delays_no_other(monkeypatch):
    monkeypatch.setattr(timeouts, "_ASK_FROM_S", 0.0)

    async def main() -> None:
        async with aioenv.AsyncVectorEnv(faulty_envs(1, None), timeout_s=0.2) as envs:
            await envs.reset(timeout_s=30)
            os.kill(envs.workers[0].pid, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(aioenv.StepTimeout) as caught:
                await envs.step(envs.action_space.sample())
            assert time.monotonic() - started < 2.2
            assert not hasattr(caught.value, "__notes__")
            os.kill(envs.workers[0].pid, signal.SIGCONT)
            assert (await envs.recv(1)).slots.tolist() == [0]
            await envs.step(envs.action_space.sample(), timeout_s=30)

    asyncio.run(main())


@pytest.mark.skipif("forkserver" not in START_METHODS, reason="takes a fork server")
def test_a_process_too_many_does_not_take_others_with_it(tmp_path):
    """A module that the fork server imports has the system refuse it; in a program of its own, for it stays so."""
    (tmp_path / "no_forks.py").write_text(
        "import os\ndef fork(): raise BlockingIOError(11, 'Resource temporarily unavailable')\nos.fork = fork\n"
    )
    run_alone(
        """
        import asyncio, sys, aioenv
        sys.path.insert(0, sys.argv[1])

        async def main():
            async with aioenv.make_vec("CartPole-v1", 1) as running:
                await running.reset(seed=0)
                try:
                    await aioenv.make_vec("CartPole-v1", 1, preload=["no_forks"])
                except aioenv.WorkerStartError as exc:
                    assert "so many processes are not allowed" in str(exc), exc
                else:
                    raise AssertionError("it was started")
                await running.step([0])

        asyncio.run(main())
        """,
        str(tmp_path),
    )


@pytest.mark.stress
def test_a_job_whose_time_is_up_saves_its_envs(tmp_path):
    """The page's script: SIGTERM goes to every process of the job."""
    text = page("docs/how-to/run-on-a-cluster.md")
    (block,) = [code for _, language, code in blocks(text) if language == "{code-block} python"]
    script = block.removeprefix(":class: fragment\n")
    code = script.replace(
        "        while not", "        print(*[w.pid for w in envs.workers], flush=True)\n        while not"
    )
    code = f"import asyncio, signal, aioenv\n{code}\nasyncio.run(main())"
    job = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    with job:
        pids = [int(pid) for pid in job.stdout.readline().split()]
        for pid in (*pids, job.pid):
            os.kill(pid, signal.SIGTERM)
    assert job.returncode == 0 and pids

    async def main() -> None:
        async with aioenv.make_vec("HalfCheetah-v5", 8, num_workers=2) as envs:
            await envs.reset(seed=0)
            states = aioenv.load(tmp_path / "states.npz")
            await envs.set_state(states)
            await envs.step(envs.action_space.sample())

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks that begin at once came with Python 3.12")
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 1, "render": RENDER}, {"backend": "native"}])
def test_tasks_that_begin_at_once_change_nothing(options):
    """asyncio's eager tasks: what is awaited nowhere yet runs already. (uvloop 0.23 has none.)"""

    async def play(eager):
        if eager:
            asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        async with aioenv.make_vec("InvertedPendulum-v5", 4, **options) as envs:
            seen = [(await envs.reset(seed=1)).obs]
            push = np.full((4, 1), 0.5, np.float32)
            seen += [(await envs.step(push)).obs for _ in range(10)]
            seen.append((await asyncio.create_task(envs.step(push))).obs)
            seen.append((await envs.rollout(lambda obs: push[: len(obs)], 20, groups=2)).obs)
            envs.send(push)
            ready = await envs.recv(min_slots=4)  # of both workers, in any order
            seen.append(ready.obs[np.argsort(ready.slots)])
            if "render" in options:
                seen.append(await envs.render())
            step = asyncio.create_task(envs.step(push))
            step.cancel()  # it has been sent, is over, or has not begun
            with contextlib.suppress(asyncio.CancelledError):
                await step
            await envs.reset(seed=2)
            async with asyncio.TaskGroup() as group:
                group.create_task(envs.step(push))
            seen.append((await envs.step(push)).obs)
        return [array for array in seen if array is not None]

    plain, eager = asyncio.run(play(False)), asyncio.run(play(True))
    assert len(plain) == len(eager) and all(map(np.array_equal, plain, eager))
