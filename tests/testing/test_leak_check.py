"""The leak check catches each kind of leak."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from aioenv.testing import LeakError, leak_check
from aioenv.testing.leak_check import Resources
from tests.kits.process_kit import run_alone


def test_nothing_left():
    with leak_check():
        os.close(os.open(os.devnull, os.O_RDONLY))
        thread = threading.Thread(target=lambda: None)
        thread.start()


def test_child():
    with pytest.raises(LeakError, match="process"):
        with leak_check(timeout_s=0):
            child = subprocess.Popen(["sleep", "60"])
    child.kill()
    child.wait()


NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"caf\\xe9 ) here")
print("named", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def strange_child():
    """A process whose name is no UTF-8."""
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", NAMED], stdin=pipe, stdout=pipe)
    assert child.stdout is not None and child.stdout.readline() == b"named\n"
    yield child
    child.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="takes prctl")
def test_a_name_may_be_any_bytes(strange_child):
    with leak_check():
        pass
    assert Resources.now().children[strange_child.pid] == f"process {strange_child.pid} (caf\ufffd ) here)"


@pytest.mark.skipif(sys.platform != "linux", reason="takes /proc")
def test_a_child_that_ends_while_they_are_counted_hides_no_other(strange_child, monkeypatch):
    read = Path.read_text

    def read_text(path, *args, **kwargs):
        if path.name == "children":
            return f"{2**22 + 1} {read(path)}"  # no process has this number
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert strange_child.pid in Resources.now().children


def test_a_child_and_a_descriptor_of_the_same_number_are_two():
    nothing = Resources({}, {}, {}, {})
    assert Resources({9: "process 9 (sleep)"}, {9: "fd 9"}, {}, {}).since(nothing) == ["process 9 (sleep)", "fd 9"]


def test_zombie():
    with pytest.raises(LeakError, match="process"):
        with leak_check(timeout_s=0.05):
            child = subprocess.Popen(["true"])
    child.wait()


def test_fd():
    with pytest.raises(LeakError, match=r"fd \d+ → /dev/null"):
        with leak_check(timeout_s=0):
            fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)


def test_thread():
    go = threading.Event()
    with pytest.raises(LeakError, match="thread 'left'"):
        with leak_check(timeout_s=0):
            thread = threading.Thread(target=go.wait, name="left")
            thread.start()
    go.set()
    thread.join()


def test_shared_memory():
    with pytest.raises(LeakError, match="shared memory"):
        with leak_check(timeout_s=0):
            memory = shared_memory.SharedMemory(create=True, size=8)
    memory.close()
    memory.unlink()
    stop_resource_tracker()


def test_the_shared_memory_of_other_processes_is_not_ours():
    code = """
import sys
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=8)
print("made", flush=True)
sys.stdin.read()
memory.close()
memory.unlink()
"""
    other = None
    with pytest.raises(LeakError) as caught:
        with leak_check(timeout_s=0):
            pipe = subprocess.PIPE
            other = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
            assert other.stdout is not None and other.stdout.readline() == "made\n"
    assert "process" in str(caught.value) and "shared memory" not in str(caught.value)
    other.communicate()


def stop_resource_tracker() -> None:
    """multiprocessing starts a process for shared memory, and keeps it."""
    from multiprocessing import resource_tracker

    resource_tracker._resource_tracker._stop()


def test_what_a_loop_keeps_for_itself_is_no_leak():
    """From its first stream on uvloop holds /dev/null open, as a spare descriptor."""
    uvloop = pytest.importorskip("uvloop")

    async def test():
        with leak_check():
            ours, theirs = socket.socketpair()
            _, writer = await asyncio.open_connection(sock=ours)
            writer.close()
            await writer.wait_closed()
            theirs.close()
        with pytest.raises(LeakError, match=os.devnull):
            with leak_check(timeout_s=0):
                left = os.open(os.devnull, os.O_RDONLY)
        os.close(left)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


def test_the_blocks_own_error_comes_first():
    with pytest.raises(ValueError, match="mine"):
        with leak_check(timeout_s=0):
            raise ValueError("mine")


def test_what_the_first_loop_of_a_process_opens_for_good_is_no_leak():
    code = """
        from aioenv import sync
        from aioenv.testing import leak_check

        with leak_check(), sync.make_vec("CartPole-v1", 2) as envs:
            envs.reset()
    """
    run_alone(code)


def test_a_semaphore_that_another_process_holds_is_not_this_ones():
    script = """
import multiprocessing, sys
sys.stdin.readline()
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
sys.stdin.readline()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as other:
        with leak_check(timeout_s=0.1):
            other.stdin.write("make it\n")
            other.stdin.flush()
            name = other.stdout.readline().strip().lstrip("/")
            assert f"sem.{name}" in os.listdir("/dev/shm")
        other.communicate("end\n")
