"""The fork server: one for all who can share it, without threads, gone with the last of them."""

from __future__ import annotations

import asyncio
import importlib
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.process import forkserver
from aioenv.process.forkserver import AVAILABLE, ForkServer
from aioenv.worker import specs
from tests.kits.process_kit import environment, run_alone

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not AVAILABLE, reason="no fork server on this platform"),
    pytest.mark.usefixtures("own_fork_server"),
]


class Teller(gym.Env):
    """Tells what its process is like."""

    observation_space = gym.spaces.Box(0, 9, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1), {}

    def step(self, action):
        return np.zeros(1), 0.0, False, False, {}

    def ask(self, expression: str):
        import threading

        return eval(expression, {"os": os, "sys": sys, "np": np, "threading": threading, "Path": Path})


def tellers(n: int, **kwargs):
    return aioenv.AsyncVectorEnv([Teller] * n, num_workers=n, start="forkserver", **kwargs)


OPEN_FDS = "[fd for fd in range(256) if os.path.islink(f'/proc/self/fd/{fd}')]"


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def servers(envs) -> set[int]:
    return set(await envs.call("ask", "os.getppid()"))


async def test_vector_envs_share_a_server_that_goes_with_the_last():
    async with tellers(2) as first:
        (pid,) = await servers(first)
        async with tellers(2) as second:
            assert await servers(second) == {pid}
        await first.reset()
        assert alive(pid)
    assert not alive(pid)
    async with tellers(1) as third:
        assert pid not in await servers(third)


async def test_other_variables_that_matter_at_import_take_another_server():
    async with tellers(1) as plain, tellers(1, worker_env={"CUDA_VISIBLE_DEVICES": "3"}) as other:
        assert await servers(plain) != await servers(other)
        assert await other.call("ask", "os.environ['CUDA_VISIBLE_DEVICES']") == ("3",)


async def test_workers_are_as_the_parent_is_now(tmp_path, monkeypatch):
    async with tellers(1) as first:
        (pid,) = await servers(first)
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        monkeypatch.setenv("NEW_VARIABLE", "1")
        monkeypatch.delenv("HOME")
        monkeypatch.syspath_prepend(str(tmp_path))
        async with tellers(1, worker_env={"OTHER": "2"}) as second:
            assert await servers(second) == {pid}
            question = (
                "os.getcwd(), os.environ['NEW_VARIABLE'], os.environ.get('HOME'), os.environ['OTHER'], sys.path[0]"
            )
            assert await second.call("ask", question) == ((str(tmp_path / "here"), "1", None, "2", str(tmp_path)),)


async def test_a_worker_is_alone_with_what_is_its_own():
    async with tellers(3) as envs:
        draws = await envs.call("ask", "float(np.random.random())")
        assert len(set(draws)) == 3, "numpy's global generator"
        assert await envs.call("ask", "os.getpgid(0) == os.getpid()") == (True,) * 3
        assert await envs.call("ask", "threading.active_count()") == (1,) * 3
        sockets = "sum('socket:' in os.readlink(f'/proc/self/fd/{fd}') for fd in OPEN)".replace("OPEN", OPEN_FDS)
        assert await envs.call("ask", sockets) == (1,) * 3, "its channel, none of a sibling's or the server's"


async def test_the_server_has_one_thread_and_what_was_preloaded():
    async with tellers(1) as envs:
        (pid,) = await servers(envs)
        assert len(os.listdir(f"/proc/{pid}/task")) == 1
        assert "libmujoco" in maps(pid)


async def test_gymnasiums_own_entries_pickle_to_the_same_in_the_server():
    """So workers need not unpickle them. (The `repr` of some has an address in it, another one in each process.)"""
    ours = specs._entries()
    async with tellers(1) as envs:
        (known,) = await envs.call("ask", "sys.modules['aioenv.worker.specs']._known")
        (digests,) = await envs.call("ask", "sys.modules['aioenv.worker.specs']._digests")
    assert len(known) > 50 and digests == [specs._digest_of_entries(known)]
    assert {env_id: ours[env_id] for env_id in known} == known


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that workers can import; its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


async def test_a_module_that_starts_a_thread_is_left_to_the_workers(module):
    name = module(
        "threads_at_import",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    )
    async with tellers(2, preload=[name]) as envs:
        assert await envs.call("ask", "threading.active_count()") == (2, 2)
        (pid,) = await servers(envs)
        assert len(os.listdir(f"/proc/{pid}/task")) == 1


async def test_a_module_that_connects_is_left_to_the_workers(module):
    """As pyglet does, and pygame's display, to an X server: copies of a process would talk over one connection."""
    name = module(
        "connects_at_import", "import os, socket\nA, B = socket.socketpair()\nNODE = os.fstat(A.fileno()).st_ino"
    )
    async with tellers(2, preload=[name]) as envs:
        first, second = await envs.call("ask", f"sys.modules[{name!r}].NODE")
        assert first != second
        (pid,) = await servers(envs)
        assert len(os.listdir(f"/proc/{pid}/task")) == 1


async def test_a_module_is_imported_once_for_all(module):
    name = module("imported_once", "import os\nPID = os.getpid()")
    async with tellers(2, preload=[name]) as envs:
        (pid,) = await servers(envs)
        assert await envs.call("ask", f"sys.modules[{name!r}].PID") == (pid, pid)


async def test_what_a_module_does_to_variables_stays_done(module, monkeypatch):
    for variable in ("SET_BY_MODULE", "UNSET_BY_MODULE", "SET_SINCE"):
        monkeypatch.setenv(variable, "parent")
    name = module(
        "sets_variables",
        "import os\n"
        "os.environ.update(SET_BY_MODULE='module', NEW_BY_MODULE='module', SET_SINCE='module')\n"
        "del os.environ['UNSET_BY_MODULE']",
    )
    question = "[os.environ.get(f'{name}_BY_MODULE') for name in ('SET', 'NEW', 'UNSET')], os.environ['SET_SINCE']"
    async with tellers(1, preload=[name]) as envs:
        assert await envs.call("ask", question) == ((["module", "module", None], "module"),)
        monkeypatch.setenv("SET_SINCE", "since")
        async with tellers(1) as others:
            assert await servers(others) == await servers(envs)
            assert await others.call("ask", question) == ((["module", "module", None], "since"),)


@pytest.mark.parametrize("how", ["closed", "killed"])
async def test_what_a_module_has_started_ends_with_the_server(module, how, monkeypatch):
    name = module("starts_at_import", "import subprocess\nPID = subprocess.Popen(['sleep', '600']).pid")
    envs = await tellers(1, preload=[name])
    (started,) = await envs.call("ask", f"sys.modules[{name!r}].PID")
    if how == "killed":
        (pid,) = await servers(envs)
        monkeypatch.setattr(forkserver.ForkServer, "wake", lambda self: None)
        os.kill(pid, signal.SIGSTOP)  # it does not end by itself
    pidfd = os.pidfd_open(started)
    try:
        await envs.close()
        assert select.select([pidfd], [], [], 10)[0]
    finally:
        os.close(pidfd)


async def test_a_preload_that_fails_is_told_with_its_cause(module):
    name = module("fails_at_import", "raise RuntimeError('not today')")
    with pytest.raises(aioenv.WorkerStartError, match="not today"):
        await tellers(1, preload=[name])


@pytest.mark.parametrize("error", ["SystemExit(3)", "KeyboardInterrupt"])
async def test_a_module_that_calls_sys_exit_does_not_end_the_server(error, module):
    name = module(f"exits_at_import_{error[0]}", f"raise {error}")
    async with tellers(1) as others:
        (pid,) = await servers(others)
        with pytest.raises(aioenv.WorkerStartError):
            await tellers(1, preload=[name])
        async with tellers(1) as more:
            assert await servers(more) == {pid}


async def test_a_server_that_is_stuck_in_an_import_ends_with_its_parent(module, tmp_path):
    told = tmp_path / "told"
    os.mkfifo(told)
    name = module("never_ends", f"import os, time\nopen({str(told)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    code = (
        "import sys, aioenv, gymnasium as gym; sys.path.insert(0, sys.argv[1])\n"
        f"aioenv.sync.make_vec('CartPole-v1', 1, preload=[{name!r}], start='forkserver')"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(tmp_path), env=environment())
    pid = int(await asyncio.to_thread(told.read_text))
    server = os.pidfd_open(pid)
    try:
        parent.kill()
        await parent.wait()
        assert select.select([server], [], [], 30)[0], "it goes on"
    finally:
        os.close(server)


async def test_the_end_of_the_server_is_the_end_of_its_workers_alone():
    async with tellers(2) as envs, aioenv.AsyncVectorEnv([Teller], start="spawn") as spawned:
        await envs.reset()
        (pid,) = await servers(envs)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            with pytest.raises(aioenv.WorkerDied):
                while True:
                    await envs.step([0, 0])
        await spawned.reset()
        async with tellers(1) as again:
            assert await servers(again) != {pid}
            await again.reset()


async def test_the_exit_code_of_a_worker_that_is_no_child_of_this_process():
    async with tellers(1) as envs:
        await envs.reset()
        with pytest.raises(aioenv.WorkerDied, match="exited with code 7") as caught:
            await envs.call("ask", "os._exit(7)")
        assert caught.value.returncode == 7


@pytest.mark.parametrize("backend", ["egl", "osmesa"])
async def test_mujoco_draws_with_the_backend_of_the_worker(backend):
    def draw():
        env = gym.make("HalfCheetah-v5", render_mode="rgb_array", width=32, height=32)

        def shoot():
            import mujoco

            base = env.unwrapped
            with mujoco.Renderer(base.model, 32, 32) as renderer:
                renderer.update_scene(base.data)
                return {kind.__module__ for kind in type(renderer._gl_context).__mro__}, renderer.render().mean()

        env.unwrapped.shoot = shoot
        return env

    async with aioenv.AsyncVectorEnv([draw], start="forkserver", worker_env={"MUJOCO_GL": backend}) as envs:
        await envs.reset(seed=0)
        ((modules, mean),) = await envs.call("shoot")
        assert any(backend in module for module in modules) and mean > 0


async def test_nothing_is_left_of_a_start_that_is_cancelled():
    for turns in (0, 1, 2, 5, 10, 30):
        start = asyncio.ensure_future(tellers(2)._ensure_started())
        for _ in range(turns):
            await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not ForkServer._servers


async def test_a_server_that_ends_at_once_is_told_with_what_it_said(module, monkeypatch):
    name = module("ends_the_server", "import os, sys\nprint('no more', file=sys.stderr, flush=True)\nos._exit(3)")
    said = r'has ended while it imported ends_the_server; start="spawn" does without(.|\n)*no more'
    with pytest.raises(aioenv.WorkerStartError, match=said):
        await tellers(1, preload=[name])
    assert not ForkServer._servers


async def test_a_server_that_is_stuck_in_an_import_is_told_with_its_module(module):
    name = module("imports_for_ever", "import time\ntime.sleep(600)")
    said = r"was not ready within start_timeout_s=3\.0; the fork server \(pid \d+\) was importing imports_for_ever$"
    async with tellers(1) as envs:  # whose server has imported everything else
        with pytest.raises(aioenv.WorkerStartError, match=said):
            await tellers(2, preload=[name], start_timeout_s=3)
        assert await envs.call("ask", "3") == (3,)
    assert not ForkServer._servers


async def test_a_factory_that_hangs_is_told_with_its_slot():
    async with tellers(1):  # whose server has imported everything
        stuck = aioenv.AsyncVectorEnv(
            [Teller, Teller, lambda: time.sleep(600), Teller], num_workers=2, start="forkserver", start_timeout_s=3
        )
        with pytest.raises(aioenv.StartTimeout, match=r"start_timeout_s=3\.0; it was at slot 2\n"):
            await stuck
    assert not ForkServer._servers


async def test_threads_that_are_there_from_the_start_are_no_modules_fault(tmp_path):
    """Of a debugger, or of what a company starts in each interpreter: not every import takes another server then."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "if 'worker.forkserver' in sys.orig_argv[-1]:\n"
        "    with open(__file__ + '.servers', 'a') as file: file.write('x')\n"
    )
    environ = environment()
    environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environ['PYTHONPATH']}"
    run_alone(
        """
        import asyncio, aioenv

        async def main():
            async with aioenv.make_vec("CartPole-v1", 2, num_workers=2, start="forkserver") as envs:
                await envs.reset(seed=0)

        asyncio.run(main())
        """,
        env=environ,
    )
    assert (tmp_path / "sitecustomize.py.servers").read_text() == "x"


@pytest.mark.stress  # torch takes seconds to import
async def test_workers_do_not_draw_alike_from_torch():
    """In a program of its own, whose fork server is left with torch."""
    pytest.importorskip("torch")
    run_alone(
        """
        import asyncio, aioenv, gymnasium as gym, numpy as np

        class Draws(gym.Env):
            observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)
            def reset(self, *, seed=None, options=None):
                import torch
                return torch.rand(1).numpy(), {}

        async def main():
            async with aioenv.make_vec(Draws, 3, num_workers=3, start="forkserver", preload=["torch"]) as envs:
                obs, _ = await envs.reset()
                assert len(np.unique(obs)) == 3, obs

        asyncio.run(main())
        """
    )


async def test_a_module_may_put_something_else_in_the_place_of_stdout(module):
    name = module("hushes_stdout", "import sys\nclass Hush:\n    def write(self, text): pass\nsys.stdout = Hush()")
    async with tellers(1, preload=[name]) as envs:
        assert await envs.call("ask", "type(sys.stdout).__name__") == ("Hush",)


async def test_a_server_without_free_descriptors_keeps_its_workers():
    """Its limit is the one that the parent had when it started the server."""
    async with tellers(1) as envs:
        (pid,) = await servers(envs)
        limit = len(os.listdir(f"/proc/{pid}/fd")) + 3
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
        with pytest.raises(aioenv.WorkerStartError, match=r"Too many open files; raise the limit \(ulimit -n\)"):
            await tellers(1)
        await envs.reset()
        assert await servers(envs) == {pid}


async def test_what_workers_had_started_ends_with_the_server():
    async with tellers(1) as envs:
        (pid,) = await servers(envs)
        (child,) = await envs.call("ask", "__import__('subprocess').Popen(['sleep', '600']).pid")
        watched = os.pidfd_open(child)
        try:
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.to_thread(select.select, [watched], [], [], 30) != ([], [], [])
        finally:
            os.close(watched)


async def test_a_relative_path_is_that_of_the_parent_now(tmp_path, monkeypatch):
    """As in a notebook, whose directory was changed while a vector env lives."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of_this_directory.py").write_text(
            f"from tests.process import test_forkserver\nNAME = {name!r}\ndef make(): return test_forkserver.Teller()"
        )
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path / "old")
    async with tellers(1):
        monkeypatch.chdir(tmp_path / "new")
        of_this_directory = importlib.import_module("of_this_directory")
        try:
            async with aioenv.AsyncVectorEnv([of_this_directory.make], start="forkserver") as envs:
                assert await envs.call("ask", "sys.modules['of_this_directory'].NAME") == ("new",)
        finally:
            del sys.modules["of_this_directory"]


class OddText(str):
    """What a server could not unpickle, if this were in the main module."""


async def test_what_is_no_path_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setattr(OddText, "__module__", "__main__")
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, None, OddText(tmp_path)])
    async with tellers(1) as envs:
        assert await envs.call("ask", "sys.path[-1]") == (str(tmp_path),)


async def test_signals_that_the_parent_keeps_to_itself_are_none_of_the_servers():
    kept = {signal.SIGCHLD, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, kept)
    try:
        async with tellers(1) as envs:
            mask = "__import__('signal').pthread_sigmask(0, ())"
            assert kept <= (await envs.call("ask", mask))[0], "workers have the mask of their parent, as spawned ones"
            with pytest.raises(aioenv.WorkerDied, match="exited with code 7"):
                await envs.call("ask", "os._exit(7)")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def test_the_end_of_a_worker_is_heard_while_the_server_imports_a_module(module, tmp_path):
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    for fifo in (begun, go_on):
        os.mkfifo(fifo)
    name = module(
        "takes_its_time",
        f"import subprocess\nopen({str(begun)!r}, 'w').close()\nopen({str(go_on)!r}).close()\n"
        "assert subprocess.run(['false']).returncode == 1, 'it was reaped by other code'",
    )
    async with tellers(1) as envs:
        other = asyncio.ensure_future(tellers(1, preload=[name])._ensure_started())
        await asyncio.to_thread(begun.read_text)
        with pytest.raises(aioenv.WorkerDied, match="exited with code 7"):
            await envs.call("ask", "os._exit(7)")
        await asyncio.to_thread(go_on.write_text, "")
        async with await other as others:
            assert await others.call("ask", f"{name!r} in sys.modules") == (True,)


async def test_what_a_worker_allocates_does_not_go_into_the_servers_holes():
    fill = "__import__('aioenv.worker.forkserver_warmup', fromlist=['fill_holes']).fill_holes()"
    async with tellers(2) as envs:  # its own are a tenth of those that imports leave, some 1 MB
        assert max(await envs.call("ask", fill)) < 4e5


async def test_all_holes_are_filled():
    code = """
        import ctypes
        from aioenv.worker.boot import libc
        from aioenv.worker.forkserver_warmup import fill_holes

        c = libc()
        if not hasattr(c, "mallinfo2"):
            print("another malloc")
            raise SystemExit
        fill_holes()  # those that the imports have left
        c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
        sizes = [40, 200, 1000, 5000]
        blocks = [c.malloc(size) for _ in range(1000) for size in sizes]
        for block in blocks[::2]:  # those between keep them apart
            c.free(block)
        print(fill_holes() >= 0.9 * 1000 * (40 + 1000))
        print(all(c.malloc(size) > max(blocks) for size in sizes))
    """
    assert run_alone(code).stdout.splitlines() in (["True", "True"], ["another malloc"])
