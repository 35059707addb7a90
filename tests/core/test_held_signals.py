"""Signals wait while a piece of work is done: all of them, in order, and only those that Python handles."""

from __future__ import annotations

import signal

import pytest

from aioenv.platform import HeldSignals
from tests.kits.blocking_kit import Rung, handled


def test_held_signals_come_in_order_and_all_of_them():
    came = []

    def first(number, frame):
        came.append(number)
        raise Rung

    with handled(signal.SIGALRM, first), handled(signal.SIGUSR1, lambda number, _: came.append(number)):
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


def test_only_handlers_in_python_are_held():
    with handled(signal.SIGUSR2, signal.SIG_IGN), HeldSignals():
        signal.raise_signal(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


def test_thousands_of_signals_are_held():
    came = []
    with handled(signal.SIGALRM, lambda number, _: came.append(number)), HeldSignals():
        for _ in range(3000):
            signal.raise_signal(signal.SIGALRM)
        assert came == []
    assert len(came) == 3000
