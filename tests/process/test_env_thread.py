"""The thread of a vector env in this process: its jobs, their results, its wake-ups, and its end."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import deque
from functools import partial

import pytest

from aioenv.errors import ClosedError
from aioenv.ipc.frames import Frame, Kind
from aioenv.process import env_thread
from aioenv.process.connection import OutstandingRequests
from aioenv.process.env_thread import EnvThread
from aioenv.process.thread_process import ThreadChannel

pytestmark = pytest.mark.asyncio

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="takes two CPUs, and Linux"
)


class Interrupted(BaseException):
    """What a signal handler raises."""


async def ended(thread: EnvThread) -> None:
    """Have it end, and see that it does."""
    thread.finish(lambda: None)
    assert await thread.join(10)


async def test_jobs_are_done_in_turn_on_one_thread():
    thread = EnvThread()
    found = await asyncio.gather(*(thread.run(partial(lambda i: (i, threading.get_ident()), i)) for i in range(50)))
    assert [i for i, _ in found] == list(range(50))
    assert len({ident for _, ident in found}) == 1 and found[0][1] != threading.get_ident()
    assert thread.jobs == 0
    await ended(thread)


async def test_more_wake_ups_than_are_read_at_once():
    thread, gate, done = EnvThread(), threading.Event(), []
    waiting = [thread.run(gate.wait)]
    waiting += [thread.run(partial(done.append, i)) for i in range(70_000)]
    assert thread.jobs == 70_001
    gate.set()
    await asyncio.gather(*waiting)
    assert done == list(range(70_000)) and thread.jobs == 0
    await ended(thread)


async def test_a_loop_that_does_not_listen_does_not_stop_the_thread():
    thread, done = EnvThread(), threading.Event()
    told = [thread.run(partial(int, i)) for i in range(70_000)]
    thread.submit(done.set, lambda value, error: None)
    assert done.wait(60), "it waits for the loop to take what it tells"
    assert await asyncio.gather(*told) == list(range(70_000))
    await ended(thread)


async def test_what_a_callback_raises_is_its_own():
    thread, heard = EnvThread(), asyncio.get_running_loop().create_future()
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["exception"]))

    def fail(value, error):
        raise ZeroDivisionError

    gate = threading.Event()
    thread.submit(gate.wait, fail)
    thread.submit(lambda: 7, lambda value, error: heard.set_result(value))
    gate.set()
    assert await asyncio.wait_for(heard, 10) == 7
    assert [type(exc) for exc in complaints] == [ZeroDivisionError]
    await ended(thread)


async def test_what_a_job_raises_is_told():
    thread = EnvThread()
    for raised, told in ((ValueError, ValueError), (SystemExit, RuntimeError), (StopIteration, RuntimeError)):

        def fail(raised=raised):
            raise raised("so it is")

        with pytest.raises(told, match="so it is"):
            await thread.run(fail)
    await ended(thread)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="takes Linux")
@pytest.mark.parametrize("failing", ["the second pipe", "the thread"])
async def test_one_that_can_not_be_started_leaves_nothing(monkeypatch, failing):
    pipes = [os.pipe]

    def pipe():
        return pipes.pop()() if pipes else refuse()

    def refuse(*args):
        raise OSError(24, "Too many open files")

    before, loop = os.listdir("/proc/self/fd"), asyncio.get_running_loop()
    with monkeypatch.context() as patched:
        if failing == "the second pipe":
            patched.setattr(os, "pipe", pipe)
        else:
            patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="Too many"):
            EnvThread()
    assert os.listdir("/proc/self/fd") == before
    reads, writes = os.pipe()  # numbers that it had: nothing of it listens there
    os.write(writes, b"\0")
    await asyncio.sleep(0)
    assert not loop.remove_reader(reads) and os.read(reads, 2) == b"\0"
    os.close(reads), os.close(writes)


async def test_interrupted_as_it_has_just_begun(monkeypatch):
    begun, start = [], threading.Thread.start

    def interrupted(thread):
        begun.append(thread)
        start(thread)
        raise Interrupted

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(threading.Thread, "start", interrupted)
        EnvThread()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # some have the numbers that its pipes had
    await asyncio.to_thread(begun[0].join, 10)
    assert not begun[0].is_alive()
    for file in files:
        os.close(file)


async def test_interrupted_before_it_has_claimed_its_pipes(monkeypatch):
    unclaimed = []

    def interrupted(thread):
        unclaimed.append(thread._args[2])
        raise Interrupted

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(threading.Thread, "start", interrupted)
        EnvThread()
    assert unclaimed == [[]]
    env_thread._run_jobs(deque(), deque(), unclaimed[0], lambda: None)  # one that comes late leaves what is not its own


async def test_what_is_asked_after_its_last_job_is_refused():
    thread, told = EnvThread(), asyncio.get_running_loop().create_future()
    gate = threading.Event()
    last = thread.run(gate.wait)
    thread.finish(lambda: None)
    with pytest.raises(ClosedError):
        await asyncio.wait_for(thread.run(int), 10)
    thread.submit(int, lambda value, error: told.set_result((value, type(error))))
    assert await told == (None, ClosedError) and not last.done()
    gate.set()
    assert await last and await thread.join(10)


async def test_a_signal_handler_that_raises_as_it_listens(monkeypatch):
    thread, read = EnvThread(), os.read
    interrupted, heard = [], asyncio.get_running_loop().create_future()

    def interrupt(descriptor, size):
        answer = read(descriptor, size)
        if descriptor == thread._result_reader and not interrupted:
            interrupted.append(answer)
            raise ZeroDivisionError
        return answer

    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["exception"]))
    monkeypatch.setattr(os, "read", interrupt)
    thread.submit(lambda: 7, lambda value, error: heard.set_result(value))
    assert await asyncio.wait_for(heard, 10) == 7 and interrupted
    assert [type(exc) for exc in complaints] == [ZeroDivisionError]
    await ended(thread)


async def test_nothing_is_written_where_its_pipe_was():
    thread = EnvThread()
    await ended(thread)
    ends = os.pipe(), os.pipe()
    for _, writes in ends:
        os.set_blocking(writes, False)
    thread.submit(int, lambda value, error: None)
    thread.finish(lambda: None)
    thread.detach()
    for reads, writes in ends:
        os.set_blocking(reads, False)
        with pytest.raises(BlockingIOError):
            os.read(reads, 1)
        os.close(reads), os.close(writes)


@needs_affinity
async def test_jobs_have_all_cpus_wherever_the_thread_was_woken(monkeypatch):
    woken_on = []
    real = env_thread._current_cpu
    monkeypatch.setattr(env_thread, "_current_cpu", lambda: woken_on.append(real()) or woken_on[-1])
    thread, everywhere = EnvThread(), os.sched_getaffinity(0)
    for _ in range(5):
        assert await thread.run(partial(os.sched_getaffinity, 0)) == everywhere
    assert len(woken_on) == 5
    # what it is told while it is at something else does not move it
    begun, gate = threading.Event(), threading.Event()
    first = thread.run(lambda: begun.set() or gate.wait())
    await asyncio.to_thread(begun.wait)
    second = thread.run(partial(os.sched_getaffinity, 0))
    assert len(woken_on) == 6
    gate.set()
    assert await first and await second == everywhere
    await ended(thread)


@needs_affinity
async def test_an_env_that_chooses_its_cpus_keeps_them():
    thread, one = EnvThread(), {min(os.sched_getaffinity(0))}
    await thread.run(partial(os.sched_setaffinity, 0, one))
    for _ in range(3):
        assert await thread.run(partial(os.sched_getaffinity, 0)) == one
    await ended(thread)


@needs_affinity
async def test_who_may_not_choose_cpus_has_the_job_done(monkeypatch):
    def refuse(*args):
        raise PermissionError

    thread = EnvThread()
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert await thread.run(lambda: 7) == 7
    await ended(thread)


@needs_affinity
async def test_cpus_that_are_gone_when_the_job_begins(monkeypatch):
    thread, real = EnvThread(), os.sched_setaffinity

    def without_some(pid, cpus):
        if not pid:  # the thread itself wants all again
            raise OSError(22, "Invalid argument")
        real(pid, cpus)

    monkeypatch.setattr(os, "sched_setaffinity", without_some)
    assert await thread.run(lambda: 7) == 7
    await ended(thread)


async def test_a_loop_that_can_not_watch_pipes(monkeypatch):
    def refuse(*args):
        raise NotImplementedError

    loop = asyncio.get_running_loop()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "add_reader", refuse)
        patched.setattr(loop, "remove_reader", refuse)
        thread, forgotten = EnvThread(), EnvThread()
        assert await asyncio.gather(*(thread.run(partial(int, i)) for i in range(20))) == list(range(20))
        await ended(thread)
        assert await forgotten.run(int) == 0
        known = forgotten._thread
        del forgotten
        gc.collect()
        await asyncio.to_thread(known.join, 10)
        assert not known.is_alive()


async def test_left_by_another_thread():
    thread, done = EnvThread(), threading.Event()
    thread.finish(done.set)
    await asyncio.to_thread(thread.detach)
    await asyncio.to_thread(thread._thread.join, 10)  # it may be left before it has begun
    assert await thread.join(10) and done.is_set()


async def test_hung_and_left_it_ends_when_it_can():
    thread, gate = EnvThread(), threading.Event()
    lost = thread.run(gate.wait)
    thread.finish(lambda: None)
    assert not await thread.join(0.05)
    gate.set()
    await asyncio.to_thread(thread._thread.join, 10)
    assert thread.ended and not thread._thread.is_alive()
    with pytest.raises(ClosedError):
        await lost


def of_another_loop() -> EnvThread:
    """One whose loop is closed."""

    async def begin():
        return EnvThread()

    with asyncio.Runner() as runner:
        return runner.run(begin())


async def test_of_a_closed_loop_it_ends():
    thread, closed = await asyncio.to_thread(of_another_loop), threading.Event()
    thread.finish(closed.set)
    thread.detach()
    await asyncio.to_thread(thread._thread.join, 10)
    assert closed.is_set() and not thread._thread.is_alive()


async def test_forgotten_with_its_loop_it_ends():
    thread = (await asyncio.to_thread(of_another_loop))._thread
    gc.collect()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


async def test_a_reply_that_came_before_the_end_is_delivered_after_it():
    """A worker that fails at its start may have ended before the task that takes its replies runs."""
    channel = ThreadChannel(None, OutstandingRequests(0), lambda code: None)
    frame = Frame(Kind.FAILURE, 0, 0, (), memoryview(b"why"))
    channel._deliver(frame)
    channel.close()
    got = []
    await channel.receive(got.append)
    assert got == [frame]
