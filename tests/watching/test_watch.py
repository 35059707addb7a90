"""The page of a run without a browser: its address, its process, and what ends it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from functools import partial

import gymnasium
import numpy as np
import pytest

import aioenv
from aioenv.watching import viewer as watching
from tests.faults.test_close import wait_until_gone
from tests.kits.process_kit import environment, has_ended, run_alone

RENDER = aioenv.RenderConfig(workers=0)


def hoppers(n=2, **kwargs):
    return aioenv.make_vec("Hopper-v5", n, **{"num_workers": 1, "render": RENDER, **kwargs})


class Draws(gymnasium.Env):
    """Its render gives an image, or something else."""

    metadata = gymnasium.Env.metadata | {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(0, 1)
    action_space = gymnasium.spaces.Discrete(2)
    render_mode = "rgb_array"

    def __init__(self, image):
        self.image = image

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def render(self):
        if self.image is None:
            raise ValueError("no colours left")
        return self.image


def serves(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return b"<html" in answer.read().lower()
    except OSError:
        return False


async def watch_and_kill(envs):
    """Serve a page, kill its process, and wait until the run has noticed."""
    watch = await envs.watch(fps=60)
    os.killpg(watch._child.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while not watch.closed:
            await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_errors_say_which_argument_to_add(monkeypatch):
    async with aioenv.make_vec("Hopper-v5", 2, num_workers=1) as envs:
        monkeypatch.setattr(watching.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match="pip install viser"):
            await envs.watch()
        monkeypatch.setattr(watching.importlib.util, "find_spec", lambda name: object())
        with pytest.raises(aioenv.RenderError, match=r"render=aioenv.RenderConfig\(workers=0\)"):
            await envs.watch()
        for wrong in ({"slots": 0}, {"slots": "ab"}, {"slots": []}, {"slots": [True]}, {"port": -1}, {"fps": 0}):
            with pytest.raises(ValueError, match=f"watch: {next(iter(wrong))}"):
                await envs.watch(**wrong)
        with pytest.raises(IndexError, match=r"\[2, -1\]"):
            await envs.watch([0, 2, -1])
    with pytest.raises(aioenv.ClosedError):
        await envs.watch()


class TestWithViser:
    @pytest.fixture(autouse=True)
    def needs_viser(self):
        pytest.importorskip("viser")

    @pytest.mark.asyncio
    @pytest.mark.parametrize("end", ["watch", "envs", "with"])
    async def test_a_page_is_served_until_it_is_closed(self, end):
        async with hoppers() as envs:
            await envs.reset(seed=0)
            watch = await envs.watch(slots=[1])
            pid = watch._child.pid
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+", watch.url)
            assert (watch.slots, watch.closed) == ((1,), False)
            assert watch.url in repr(watch) and f'<a href="{watch.url}"' in watch._repr_html_()
            assert await asyncio.to_thread(serves, watch.url)
            with pytest.raises(RuntimeError, match=watch.url):
                await envs.watch()
            await envs.step(envs.action_space.sample())
            if end == "watch":
                await watch.close()
                await watch.close()
                await envs.step(envs.action_space.sample())
                async with await envs.watch() as again:  # another one
                    assert await asyncio.to_thread(serves, again.url)
                assert again.closed
            elif end == "with":
                async with watch:
                    pass
            else:
                await envs.close()
            assert watch.closed and "closed" in repr(watch)
            assert "closed" in watch._repr_html_() and "<a" not in watch._repr_html_()
            assert has_ended(pid)
            assert not serves(watch.url)

    @pytest.mark.asyncio
    async def test_a_port_that_is_taken_is_an_error(self):
        async with hoppers() as envs, await envs.watch() as watch:
            port = int(watch.url.rpartition(":")[2])
            async with hoppers() as others:
                with pytest.raises(OSError, match=f"port {port} is taken"):
                    await others.watch(port=port)
                async with await others.watch() as second:
                    assert second.url != watch.url

    def test_a_port_that_is_not_for_this_user_is_another_error(self, tmp_path):
        (tmp_path / "sitecustomize.py").write_text("""if True:
            import errno, os, socket

            class Refused(socket.socket):
                def bind(self, address):
                    if address == ("127.0.0.1", 80):
                        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                    super().bind(address)

            socket.socket = Refused
        """)
        env = environment()
        done = subprocess.run(
            [sys.executable, "-m", "aioenv", "watch", "Hopper-v5", "--num-envs", "1", "--port", "80"],
            capture_output=True,
            text=True,
            env={**env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"},
            timeout=90,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert "watch: port 80 can't be used: Permission denied; port=0 takes any that is free" in done.stderr

    @pytest.mark.asyncio
    async def test_the_run_goes_on_without_its_page(self, caplog):
        async with hoppers() as envs:
            await envs.reset(seed=0)
            watch = await envs.watch(fps=60)
            os.killpg(watch._child.pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                while not watch.closed:
                    await envs.step(envs.action_space.sample())
                    await asyncio.sleep(0)
            await envs.step(envs.action_space.sample())
        assert "the page has ended (was killed by SIGKILL)" in caplog.text

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("image", "why"),
        [
            (None, "ValueError: no colours left"),
            ([np.zeros((8, 8, 3), np.uint8)], "its render gives list, not an array"),
            (np.zeros((8, 8, 2), np.uint8), r"its render gives uint8 of shape \(8, 8, 2\)"),
            (np.zeros((8, 8, 3), bool), "its render gives bool"),
            (np.zeros(8, np.uint8), r"its render gives uint8 of shape \(8,\)"),
            (np.zeros((0, 8, 3), np.uint8), r"its render gives uint8 of shape \(0, 8, 3\)"),
        ],
    )
    async def test_what_is_no_image_is_said_once_and_the_page_goes_on(self, image, why, caplog):
        good = np.zeros((8, 8, 1), np.uint8)
        factories = [partial(Draws, image), partial(Draws, good), partial(Draws, image)]
        async with aioenv.AsyncVectorEnv(factories, num_workers=1, render=RENDER) as envs:
            watch = await envs.watch(fps=60)
            watch.visitors = 1  # or updates would be a second apart
            await envs.reset(seed=0)
            for _ in range(10):
                await envs.step(envs.action_space.sample())
                await asyncio.sleep(0.05)
            assert [*watch._sent_images] == [1]
            await asyncio.sleep(1.2)  # the page shows updates a second apart
            assert not watch.closed
        (record,) = (record for record in caplog.records if record.getMessage().startswith("watch:"))
        assert re.match(rf"watch: slot 0 is not shown: (.|\n)*{why}", record.getMessage())

    @pytest.mark.asyncio
    async def test_updates_are_dropped_while_the_page_stands_still(self):
        """Its process is stopped, so that the pipe fills; stepping goes on."""
        async with hoppers(64) as envs:
            await envs.reset(seed=0)
            watch = await envs.watch(slots=64, fps=60)
            os.kill(watch._child.pid, signal.SIGSTOP)
            watch.visitors = 1  # or updates would be a second apart
            async with asyncio.timeout(60):
                while watch.dropped < 5:
                    await envs.step(envs.action_space.sample())
            pid = watch._child.pid
            await watch.close()
            assert has_ended(pid)

    @pytest.mark.asyncio
    async def test_a_cancelled_start_leaves_nothing(self):
        async with hoppers() as envs:
            for turns in (0, 1, 20):
                starting = asyncio.ensure_future(envs.watch())
                for _ in range(turns):
                    await asyncio.sleep(0)
                starting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await starting
            async with await envs.watch() as watch:
                assert await asyncio.to_thread(serves, watch.url)

    @pytest.mark.asyncio
    async def test_a_vector_env_may_be_closed_while_its_page_starts(self):
        async with hoppers() as envs:
            starting = asyncio.ensure_future(envs.watch())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="already"):
                await envs.watch()
        with pytest.raises(aioenv.ClosedError):
            await starting

    @pytest.mark.asyncio
    async def test_a_page_that_has_died_is_replaced(self):
        async with hoppers() as envs:
            await watch_and_kill(envs)
            second = await envs.watch()
            assert await asyncio.to_thread(serves, second.url)

    @pytest.mark.asyncio
    async def test_a_page_that_has_died_is_replaced_once(self):
        """Two calls at the same time: no process is left of either."""
        async with hoppers() as envs:
            await watch_and_kill(envs)
            second, third = await asyncio.gather(envs.watch(), envs.watch(), return_exceptions=True)
            watch, refused = (second, third) if isinstance(third, Exception) else (third, second)
            assert isinstance(refused, RuntimeError) and "already" in str(refused)
            pid = watch._child.pid
        assert watch.closed and has_ended(pid)

    @pytest.mark.asyncio
    async def test_a_vector_env_may_be_closed_while_its_dead_page_is_replaced(self):
        async with hoppers() as envs:
            await watch_and_kill(envs)
            starting = asyncio.ensure_future(envs.watch())
            await asyncio.sleep(0)  # it waits for the end of the first
        (outcome,) = await asyncio.gather(starting, return_exceptions=True)
        assert isinstance(outcome, aioenv.ClosedError)

    @pytest.mark.parametrize("backend", ["workers", "native"])
    def test_blocking_code_watches_too(self, backend):
        with aioenv.sync.make_vec("Hopper-v5", 2, backend=backend, render=RENDER) as envs:
            envs.reset(seed=0)
            with envs.watch() as watch:
                for _ in range(10):
                    envs.step(envs.action_space.sample())
                assert serves(watch.url)
                assert (watch.slots, watch.dropped, watch.closed) == ((0, 1), 0, False)
            assert watch.closed
            last = envs.watch()
        assert last.closed
        last.close()
        assert not serves(last.url)

    def test_a_page_ends_with_the_process_of_its_run(self):
        killed = run_alone(
            """
            import aioenv, os, signal

            async def main():
                render = aioenv.RenderConfig(workers=0)
                async with aioenv.make_vec("Hopper-v5", 2, num_workers=1, render=render) as envs:
                    watch = await envs.watch()
                    print(watch._child.pid, watch.url, flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)

            aioenv.run(main())
            """,
            returncode=-signal.SIGKILL,
        )
        pid, url = killed.stdout.split()
        wait_until_gone([int(pid)])
        assert not serves(url)

    def test_no_visitor_can_make_the_page_public(self):
        told = run_alone(
            """
            import os
            from aioenv.watching.messages import Setup
            from aioenv.watching.viewer_process import _Page

            page = _Page(Setup("x", 0, (0,), (), ()), print)
            known = [kind.__name__ for kind in page._server._websock_server._incoming_handlers]
            print([name for name in known if "Share" in name], page._server.get_host(), flush=True)
            os._exit(0)
            """
        )
        assert told.stdout.splitlines()[-1] == "[] 127.0.0.1"

    def test_the_command_shows_a_policy(self, tmp_path):
        (tmp_path / "mine.py").write_text("import numpy as np\ndef act(obs):\n    return np.zeros((len(obs), 3))\n")
        command = [sys.executable, "-m", "aioenv", "watch", "Hopper-v5", "--policy", "mine:act", "--steps", "5"]
        run = subprocess.run(
            [*command, "--num-envs", "2"], capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=90
        )
        assert (run.returncode, run.stderr) == (0, "")
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+\n", run.stdout)
