"""The supervisor's state machine: replies, deaths, cancellations, restarts and closes in any order (hypothesis).

The process is a stand-in with a real socket, so that its death comes exactly when a rule says so, at any byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import socket

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioenv.errors import WorkerDied, WorkerStartError
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import Encoder, Frame, Kind
from aioenv.ipc.messages import dump
from aioenv.process import supervisor as supervisor_module
from aioenv.process.channel import ScatterChannel
from aioenv.process.process import Output
from aioenv.process.supervisor import ACCEPTS_REQUESTS, TRANSITIONS, Event, Worker, WorkerState


class StandIn:
    """A process that does nothing by itself (see `process.process.Process`)."""

    pids = itertools.count(2**30)  # no process has such a number

    def __init__(self) -> None:
        self.pid = next(self.pids)
        self.exited = asyncio.Event()
        self.output = Output(asyncio.StreamReader(), self.exited)
        self.current_row = None
        self.node = ""
        self.fault: str | None = None
        self.returncode: int | None = None
        self.mine, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.inbox: list[Frame] = []
        self.released = False

    def open_channel(self, requests):
        return ScatterChannel(self.mine, requests)

    def signal(self, sig: signal.Signals) -> None:
        self.end(-sig)

    async def reap(self) -> None:
        assert self.exited.is_set()

    async def release(self) -> None:
        self.released = True

    def abandon(self) -> None:
        self.end(-signal.SIGKILL)

    # ------------------------------------------------------------ what the worker would do

    def read(self) -> None:
        """Take what the parent has sent."""
        with contextlib.suppress(BlockingIOError):
            while data := self.theirs.recv(1 << 16):
                self.decoder.feed(data)
        while (frame := self.decoder.next_frame()) is not None:
            self.inbox.append(frame)

    def write(self, kind: Kind, request: int, generation: int, payload: bytes, cut: int | None = None) -> None:
        self.theirs.send(b"".join(self.encoder.encode(kind, request, generation, (), payload))[:cut])

    def end(self, returncode: int) -> None:
        if not self.exited.is_set():
            self.returncode = returncode
            self.theirs.close()
            self.output.reader.feed_eof()
            self.exited.set()


class Supervised(RuleBasedStateMachine):
    """One worker, its stand-in processes, and what is known of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.processes: list[StandIn] = []
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(supervisor_module, "launch", self.launch)
        self.deaths = 0
        self.outcomes: dict[int, list[object]] = {}  # of each request that was sent, by a number of ours
        self.asked: dict[tuple[int, int], int] = {}  # (generation, id) → that number
        self.starting: asyncio.Task[None] | None = None
        self.closing: list[asyncio.Task[None]] = []
        self.worker = self.run(self.make())

    async def make(self) -> Worker:
        worker = Worker(b"", index=0, slots=(0, 1))
        worker.on_death = lambda _: setattr(self, "deaths", self.deaths + 1)
        return worker

    async def launch(self, *args):
        process = StandIn()
        self.processes.append(process)
        return process

    def run(self, awaitable):
        async def briefly():
            return await asyncio.wait_for(awaitable, 5)

        return self.loop.run_until_complete(briefly())

    def settle(self) -> None:
        """Let everything happen that can happen now."""

        async def turns():
            for _ in range(20):
                await asyncio.sleep(0)

        self.run(turns())

    @property
    def process(self) -> StandIn:
        return self.processes[-1]

    @property
    def alive(self) -> bool:
        return bool(self.processes) and not self.process.exited.is_set()

    # ------------------------------------------------------------ start and restart

    @initialize()
    def start(self) -> None:
        self.starting = self.loop.create_task(self.worker.start())
        self.settle()

    @precondition(lambda self: self.worker.state is WorkerState.DEAD and self.starting is None)
    @rule()
    def restart(self) -> None:
        self.starting = self.loop.create_task(self.worker.restart())
        self.settle()

    @precondition(lambda self: self.starting is not None and self.alive)
    @rule(how=st.sampled_from(["ready"] * 8 + ["failure", "death", "cancel", "half a frame"]))
    def outcome_of_start(self, how: str) -> None:
        task, self.starting = self.starting, None
        process = self.process
        process.read()
        (frame,) = [f for f in process.inbox if f.kind is Kind.START]
        process.inbox.clear()
        if how == "ready":
            process.write(Kind.READY, frame.request, frame.generation, dump("here I am"))
        elif how == "failure":
            process.write(Kind.FAILURE, frame.request, frame.generation, b"no pickle")
        elif how == "cancel":
            task.cancel()
        else:
            if how == "half a frame":
                process.write(Kind.READY, frame.request, frame.generation, dump("here I"), cut=31)
            process.end(3)
        if how == "ready":
            self.run(task)
            assert self.worker.description == "here I am"
        else:
            with pytest.raises((WorkerStartError, asyncio.CancelledError, Exception)):
                self.run(task)
        self.settle()
        if self.worker.state not in (WorkerState.CLOSING, WorkerState.CLOSED):
            assert self.worker.state is (WorkerState.READY if how == "ready" else WorkerState.DEAD)

    # ------------------------------------------------------------ requests

    @precondition(lambda self: self.starting is None)
    @rule(times=st.integers(1, 3))
    def send(self, times: int) -> None:
        for _ in range(times):
            number = len(self.outcomes)
            living = self.worker.state in ACCEPTS_REQUESTS
            outcomes: list[object] = []
            try:
                request = self.worker.submit(Kind.STEP, (), b"%d" % number, on_reply=outcomes.append)
            except WorkerDied:
                assert not living
            else:
                assert living
                self.outcomes[number] = outcomes
                self.asked[self.worker.generation, request] = number

    @precondition(lambda self: self.alive)
    @rule(count=st.integers(1, 3), cut=st.sampled_from([None] * 6 + [0, 1, 20, 31, 32, 33]))
    def reply(self, count: int, cut: int | None) -> None:
        """The worker answers its oldest requests; or dies, at some byte of an answer."""
        process = self.process
        process.read()
        for frame in [f for f in process.inbox if f.kind is Kind.STEP][:count]:
            process.inbox.remove(frame)
            process.write(Kind.RESULT, frame.request, frame.generation, bytes(frame.payload), cut=cut)
            if cut is not None:
                process.end(-11)
                break
        self.settle()

    @precondition(lambda self: self.alive and self.asked)
    @rule(data=st.data(), off=st.sampled_from([0, 1]))
    def stray_reply(self, data: st.DataObject, off: int) -> None:
        """A second reply to a request, or one from another life: it is dropped."""
        waiting = [key for key, number in self.asked.items() if not self.outcomes[number]]
        answered = [key for key, number in self.asked.items() if self.outcomes[number]]
        keys = waiting if off else answered
        if keys:
            generation, request = data.draw(st.sampled_from(keys))
            self.process.write(Kind.RESULT, request, generation + off, b"stray")
            self.settle()

    @precondition(lambda self: self.alive and self.starting is None and len(self.outcomes) % 3 == 2)
    @rule()
    def die(self) -> None:
        self.process.end(-9)
        self.settle()

    @precondition(lambda self: self.alive and self.worker.state in ACCEPTS_REQUESTS and len(self.outcomes) % 5 == 4)
    @rule()
    def babble(self) -> None:
        """What comes is no frame: such a worker is killed."""
        self.process.theirs.send(b"no frame at all, but more than a header of bytes")
        self.settle()
        assert self.process.exited.is_set()

    @rule()
    def cancel(self) -> None:
        """The waiter is gone: a timeout, a cancelled task."""
        busy = self.worker.state is WorkerState.BUSY
        self.worker.abandon_requests()
        assert not busy or self.worker.state is WorkerState.DRAINING

    @precondition(lambda self: len(self.outcomes) % 4 == 3)
    @rule()
    def strike(self) -> None:
        self.worker.kill("too slow")
        self.settle()

    # ------------------------------------------------------------ the end

    @precondition(lambda self: self.starting is None and len(self.outcomes) > 12)
    @rule(obeys=st.booleans(), how=st.sampled_from(["close", "kill"]))
    def close(self, obeys: bool, how: str) -> None:
        ending = self.worker.close(0.001) if how == "close" else self.worker.close_now()
        self.closing.append(self.loop.create_task(ending))
        self.settle()
        if obeys and self.alive:
            self.process.end(0)
        self.run(asyncio.gather(*self.closing))
        assert self.worker.state is WorkerState.CLOSED

    @invariant()
    def requests_are_answered_once_and_by_their_own_reply(self) -> None:
        for number, outcomes in self.outcomes.items():
            assert len(outcomes) <= 1
            for outcome in outcomes:
                assert isinstance(outcome, WorkerDied) or bytes(outcome.payload) == b"%d" % number

    @invariant()
    def states_say_what_is_so(self) -> None:
        unanswered = [n for n, outcomes in self.outcomes.items() if not outcomes]
        state = self.worker.state
        if state in (WorkerState.READY, WorkerState.DEAD, WorkerState.CLOSED, WorkerState.STARTING):
            assert not unanswered, "no request may wait for ever"
        if state in (WorkerState.BUSY, WorkerState.DRAINING):
            assert unanswered

    def teardown(self) -> None:
        if self.starting is not None:
            self.starting.cancel()
            self.run(asyncio.wait([self.starting]))
        self.run(self.worker.close_now())
        self.settle()
        assert all(p.released for p in self.processes), "nothing of a process is left"
        assert all(outcomes for outcomes in self.outcomes.values())
        for process in self.processes:
            process.mine.close()
            process.theirs.close()
        self.loop.close()
        self.patch.undo()
        gc.collect()


def runs(count: int) -> type:
    """So many runs of the machine, each of some thirty events, as a test case."""

    class Runs(Supervised):
        pass

    Runs.TestCase.settings = settings(
        max_examples=count, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return Runs.TestCase


test_any_order_of_events = runs(40)
test_any_order_of_many_events = pytest.mark.stress(pytest.mark.timeout(600)(runs(400)))


def test_every_state_is_reached_and_left():
    reached = {state for nexts in TRANSITIONS.values() for state in nexts.values()}
    owing = {WorkerState.BUSY, WorkerState.DRAINING}  # are READY, with requests
    assert reached == set(WorkerState) - owing - {WorkerState.NEW}
    assert set(TRANSITIONS) == set(WorkerState) - owing
    for state, nexts in TRANSITIONS.items():
        assert Event.CLOSE in nexts, f"{state} can't be closed"
