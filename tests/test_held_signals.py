"""Signals wait while a piece of work is done: all of them, in order, and only those that Python handles."""

from __future__ import annotations

import signal

import pytest

from aioenv.engine.held_signals import HeldSignals


@pytest.fixture
def on_alarm():
    """Sets what SIGALRM does."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handler: signal.signal(signal.SIGALRM, handler)
    signal.signal(signal.SIGALRM, before)


class Rung(Exception):
    pass


def test_held_signals_come_in_order_and_all_of_them(on_alarm):
    came = []

    def first(number, frame):
        came.append(number)
        raise Rung

    on_alarm(first)
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with pytest.raises(Rung), HeldSignals() as waiting:
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGUSR1)
            assert [number for number, _ in waiting] == [signal.SIGALRM, signal.SIGUSR1]
            assert came == []
        assert came == [signal.SIGALRM, signal.SIGUSR1]
        assert signal.getsignal(signal.SIGALRM) is first
        with pytest.raises(Rung), HeldSignals(signal.SIGALRM, twice=False):
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGALRM)
            raise AssertionError("the second was held")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_only_handlers_in_python_are_held():
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with HeldSignals():
            signal.raise_signal(signal.SIGUSR2)
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_thousands_of_signals_are_held(on_alarm):
    came = []
    on_alarm(lambda number, _: came.append(number))
    with HeldSignals():
        for _ in range(3000):
            signal.raise_signal(signal.SIGALRM)
        assert came == []
    assert len(came) == 3000
