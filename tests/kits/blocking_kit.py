"""Kit for tests of blocking code: a loop that pauses, signals, steps in two parts, forked copies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import aioenv


def paused(envs):
    """Wait until the loop of a blocking vector env pauses."""
    portal = envs._portal
    while not portal._handoff._paused or portal._handoff._turn_requested:
        portal.run(int)
    return envs


def step_in_two(envs, actions):
    """As adapters step."""
    step = envs._begin_step(actions)
    try:
        step.wait()
    except BaseException:
        step.cancel()
        raise
    return step.result()


def check_forked_copy(envs, actions):
    """A step of a forked copy says what is wrong, instead of waiting for ever."""
    pid = os.fork()
    if not pid:
        try:
            envs.step(actions)
        except aioenv.LoopError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@contextlib.contextmanager
def handled(number, handler):
    """A signal's handler, for a while."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def ctrl_c_at(gate):
    """Press Ctrl-C when an env has come to the gate, a FIFO; it goes on when the body is left."""
    main, left = threading.main_thread(), threading.Event()

    def press() -> None:
        with open(gate, "w"):  # waits for the env
            signal.pthread_kill(main.ident, signal.SIGINT)
            left.wait()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        left.set()
        os.close(os.open(gate, os.O_RDONLY | os.O_NONBLOCK))  # if no env has come
        thread.join()


class Rung(Exception):
    """What a handler raises."""
