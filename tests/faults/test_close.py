"""`close()` is idempotent and bounded, from wherever it is called; and what is never closed leaves nothing either."""

from __future__ import annotations

import asyncio
import gc
import os
import textwrap
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from aioenv.process.launch import START_METHODS
from tests.kits.loop_kit import LOOPS, run_on
from tests.kits.process_kit import run_alone


class Sleeper(gym.Env):
    """Hangs in a step with action 1, and in its close."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action:
            time.sleep(1000)
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def close(self):
        time.sleep(1000)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if alive(pid)]}"
        os.sched_yield()


pytestmark = pytest.mark.usefixtures("own_fork_server")
# both start methods, both loops; the other two pairs are stress runs
PAIRS = pytest.mark.parametrize(
    ("start", "loop"),
    [
        pytest.param(start, loop, marks=[pytest.mark.stress] if (place + number) % 2 else [])
        for place, start in enumerate(START_METHODS[::-1])
        for number, loop in enumerate(LOOPS)
    ],
)


@PAIRS
def test_twice_at_once_and_again(loop, start):
    async def main():
        envs = await aioenv.make_vec("CartPole-v1", 2, num_workers=2, start=start)
        await envs.reset()
        await asyncio.gather(envs.close(), envs.close())
        await envs.close()
        with pytest.raises(aioenv.ClosedError):
            await envs.step([0, 0])

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_bounded_whatever_the_envs_do(loop):
    async def main():
        envs = await aioenv.AsyncVectorEnv([Sleeper] * 2, num_workers=2)
        await envs.reset()
        task = asyncio.ensure_future(envs.step([0, 1]))
        await asyncio.sleep(0)
        began = time.monotonic()
        await envs.close(grace_s=0.1)
        assert time.monotonic() - began < 5
        with pytest.raises(aioenv.ClosedError):
            await task

    run_on(loop, main())


def test_in_a_finally_of_a_cancelled_task():
    async def main():
        pids = []

        async def train():
            envs = await aioenv.AsyncVectorEnv([Sleeper] * 2, num_workers=2)
            try:
                pids.extend(worker.pid for worker in envs.workers)
                await envs.reset()
                await envs.step([0, 1])
            finally:
                await envs.close(grace_s=0.1)

        task = asyncio.ensure_future(train())
        while len(pids) < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        wait_until_gone(pids)

    asyncio.run(main())


def test_cancelled_close_kills_at_once():
    async def main():
        envs = await aioenv.AsyncVectorEnv([Sleeper] * 2, num_workers=2)
        pids = [worker.pid for worker in envs.workers]
        task = asyncio.ensure_future(envs.close(grace_s=1000))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        wait_until_gone(pids)
        await envs.close()

    asyncio.run(main())


def test_from_another_loop_it_is_refused_and_nothing_changes():
    refused = []

    def elsewhere(envs):
        with pytest.raises(aioenv.LoopError, match="belongs to the event loop on which it was started") as caught:
            asyncio.run(envs.close())
        refused.append(caught.value)
        with pytest.raises(aioenv.LoopError, match="none runs here"):
            envs.send([0, 0])

    async def main():
        async with aioenv.make_vec("CartPole-v1", 2, num_workers=2) as envs:
            await envs.reset()
            await asyncio.to_thread(elsewhere, envs)
            assert not envs.closed and len(refused) == 1
            await envs.step([0, 0])

    asyncio.run(main())


@pytest.mark.parametrize("start", START_METHODS)
def test_forgotten_while_the_loop_runs(start):
    async def main():
        envs = await aioenv.make_vec("CartPole-v1", 2, num_workers=2, start=start)
        pids = [worker.pid for worker in envs.workers]
        with pytest.warns(ResourceWarning, match="its workers were killed"):
            envs.__del__()
        wait_until_gone(pids)
        with pytest.raises(aioenv.ClosedError):
            await envs.reset()
        envs.closed = False
        await envs.close()

    asyncio.run(main())


SCRIPT = """
import asyncio, os, sys, aioenv

async def main():
    global envs
    envs = await aioenv.make_vec("CartPole-v1", 2, num_workers=2, start={start!r})
    await envs.reset()
    print(*[worker.pid for worker in envs.workers], flush=True)
    {body}

{run}
"""


def run_script(start: str, body: str = "", run: str = "asyncio.run(main())", returncode: int = 0):
    """What it prints, which are pids, and its stderr."""
    done = run_alone(SCRIPT.format(start=start, body=body, run=run), returncode=returncode)
    return [int(pid) for pid in done.stdout.split()], done.stderr


@PAIRS
def test_the_loop_is_closed_before_it(start, loop):
    run = "asyncio.run(main())" if loop == "asyncio" else "aioenv.run(main())"
    pids, _ = run_script(start, run=f"{run}\ndel envs")
    assert len(pids) == 2
    wait_until_gone(pids, 1.0)


@PAIRS
@pytest.mark.parametrize("end", ["close", "forget"])
def test_no_descriptor_is_left_of_one_whose_loop_was_closed(end, start, loop):
    code = """
        import asyncio, gc, os, sys, aioenv

        async def main():
            envs = await aioenv.make_vec("CartPole-v1", 2, num_workers=2, start=sys.argv[1])
            await envs.reset()
            return envs

        counts = []
        for _ in range(3):  # the first round opens what a loop shares with the next
            envs = {"asyncio": asyncio, "uvloop": aioenv}[sys.argv[2]].run(main())
            if sys.argv[3] == "close":
                asyncio.run(envs.close())
            del envs
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[1] == counts[0] and counts[2] == counts[0], counts
    """
    run_alone(code, start, loop, end)


@pytest.mark.parametrize("start", START_METHODS)
def test_never_closed_at_the_end_of_the_program(start):
    pids, stderr = run_script(start)
    # asyncio itself has something to say about transports that its closed loop has left open
    assert "aioenv" not in stderr
    wait_until_gone(pids, 1.0)


@pytest.mark.parametrize("how", ["sys.exit(3)", "os._exit(3)", "raise SystemExit(3)"])
def test_the_program_ends_in_the_middle(how):
    pids, _ = run_script("forkserver", how, returncode=3)
    wait_until_gone(pids, 1.0)


def test_a_forked_child_leaves_the_workers_alone():
    body = """
    for way in (envs.close, envs.__aexit__, envs.__del__):
        child = os.fork()
        if child == 0:
            ending = way()
            if ending is not None:
                asyncio.run(ending)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        await envs.step([0, 1])
    await envs.close()
    print(0)
    """
    pids, stderr = run_script("forkserver", textwrap.indent(textwrap.dedent(body), "    ").strip())
    assert pids[-1] == 0, stderr


def test_a_forked_child_of_blocking_code_may_end_as_it_likes():
    code = """
    import os, sys, aioenv
    envs = aioenv.sync.make_vec("CartPole-v1", 2, num_workers=2)
    envs.reset()
    child = os.fork()
    if child == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    envs.step([0, 1])
    envs.close()
    """
    run_alone(code, timeout_s=40)


@pytest.mark.parametrize("kind", ["VectorEnv", "AsyncVectorEnv"])
def test_blocking_calls_in_a_forked_child_fail_at_once(kind):
    code = f"""
    import os, sys, aioenv, gymnasium as gym
    envs = aioenv.sync.{kind}([lambda: gym.make("CartPole-v1")] * 2)
    envs.reset()
    child = os.fork()
    if child == 0:
        for call in (envs.reset, lambda: envs.step([0, 1]), lambda: envs.call("gravity")):
            try:
                call()
            except aioenv.LoopError as exc:
                assert "forked copy" in str(exc)
            else:
                os._exit(1)
        envs.close()
        envs.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    envs.step([0, 1])
    envs.close()
    """
    run_alone(code, timeout_s=40)


def test_a_coroutine_that_forks_gets_an_error_that_says_so():
    code = """
    import asyncio, os, aioenv
    async def main():
        async with aioenv.make_vec("CartPole-v1", 2) as envs:
            await envs.reset()
            child = os.fork()
            if child == 0:
                try:
                    await envs.step([0, 1])
                except aioenv.LoopError as exc:
                    os._exit("forked copy" not in str(exc))
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            await envs.step([0, 1])
    asyncio.run(main())
    """
    run_alone(code, timeout_s=40)


def test_the_facade_from_another_thread_and_twice():
    envs = aioenv.sync.make_vec("CartPole-v1", 2, num_workers=2)
    envs.reset()

    async def close():
        await asyncio.to_thread(envs.close)
        envs.close()

    asyncio.run(close())
    with pytest.raises(aioenv.ClosedError):
        envs.step([0, 0])
    gc.collect()


class Emigrant(Sleeper):
    """Moves its process into another group, that of the fork server, and hangs."""

    def step(self, action):
        os.setpgid(0, os.getpgid(os.getppid()))
        return super().step(action)


@pytest.mark.parametrize("way", ["close", "kill", "forget"])
def test_a_worker_that_has_left_its_process_group(way):
    async def main():
        on_timeout = "kill" if way == "kill" else "raise"
        envs = await aioenv.AsyncVectorEnv([Emigrant], num_workers=1, on_timeout=on_timeout)
        pid = envs.workers[0].pid
        await envs.reset()
        with pytest.raises(aioenv.WorkerDied if way == "kill" else aioenv.StepTimeout):
            await envs.step([1], timeout_s=0.5)
        if way == "forget":
            worker = envs._backend.worker_pool.members[0].worker
            with pytest.warns(ResourceWarning, match="its workers were killed"):
                del envs
                gc.collect()
            await worker._connection.cleaned_up()
        else:
            began = time.monotonic()
            await envs.close()
            assert time.monotonic() - began < 10
        assert not alive(pid)

    asyncio.run(main())
