"""One worker, through all of its processes: its life, its restarts, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import Enum
from functools import partial
from multiprocessing.process import current_process
from typing import Any, TypeVar

from aioenv.definitions.restore import Code
from aioenv.definitions.table import DefinitionTable
from aioenv.errors import EnvError, SlotError, StartTimeout, WireError, WorkerDied, WorkerStartError, describe_exit
from aioenv.ipc.frames import Buffer, Frame, Kind
from aioenv.ipc.memory import Shared
from aioenv.ipc.messages import CallRequest, Failure, Start, dump, dump_code, load
from aioenv.process import failures
from aioenv.process.channel import ScatterChannel, check_channel
from aioenv.process.connection import Connection, OnReply
from aioenv.process.environment import worker_environment
from aioenv.process.launch import LaunchResources, check_start, launch, launch_here
from aioenv.process.output import LOG, OutputLog
from aioenv.process.thread_process import RunHere
from aioenv.speedups.attributes import read_by_c
from aioenv.tracing.ring import TRACE
from aioenv.tracing.track import Track

__all__ = ["LIVING", "NEXT", "Event", "Worker", "WorkerState", "into_future"]


class WorkerState(Enum):
    """Where a worker is in its life."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"  # ready, and owes replies
    DRAINING = "draining"  # ready, and owes replies that nobody waits for any more
    RESTARTING = "restarting"  # its process died, and a new one comes up
    DEAD = "dead"  # its process died
    CLOSING = "closing"
    CLOSED = "closed"


class Event(Enum):
    """What can happen to a worker."""

    START = "start"  # its process is being started
    READY = "ready"  # its service is up
    EXIT = "exit"  # its process has ended, and all that it wrote has been read
    RESTART = "restart"  # a new process is being started
    CLOSE = "close"  # it is told to end


def _table() -> dict[WorkerState, dict[Event, WorkerState]]:
    S, E = WorkerState, Event
    ends = {E.EXIT: S.DEAD, E.CLOSE: S.CLOSING}
    return {
        S.NEW: {E.START: S.STARTING, E.CLOSE: S.CLOSED, E.EXIT: S.DEAD},
        S.STARTING: {E.READY: S.READY, **ends},
        S.READY: {**ends},
        S.RESTARTING: {E.READY: S.READY, **ends},
        S.DEAD: {E.RESTART: S.RESTARTING, E.CLOSE: S.CLOSED, E.EXIT: S.DEAD},
        S.CLOSING: {E.CLOSE: S.CLOSING, E.EXIT: S.CLOSED},
        S.CLOSED: {E.CLOSE: S.CLOSED, E.EXIT: S.CLOSED},
    }


# What comes next; what is not in it can't happen.
NEXT = _table()
# States in which a request may be sent.
LIVING = frozenset({WorkerState.READY, WorkerState.BUSY, WorkerState.DRAINING})


_log = logging.getLogger("aioenv")

T = TypeVar("T")


@read_by_c
class Worker:
    """The parent's handle of one worker process.

    Args:
        service: a pickled callable that makes the service in the worker (`messages.dump_code`).
        code: what the service is made from besides (see `FactoryReference`).
        definitions: the table of those that messages refer to.
        index: its number among its like.
        slots: the slots that it holds, for errors and logs.
        role: what it is, in errors and logs.
        start: how it is started (see `launch.check_start`).
        channel: how frames reach it (see `channel.check_channel`).
        poll_s: how long it may poll for a request before it sleeps, in seconds.
        env: environment variables over those of this process.
        log_prefix: goes before each line that it prints.
        preload: modules that it imports first.
        needed: modules that its service will import, and classes of envs ("module:Class") whose models it will load,
            for a fork server to do it once for all.
        registry: Gymnasium's registry, as `host.registry.capture_registry` gives it.
        start_timeout_s: how long it may take to come up, in seconds.
        cpus: the CPUs that each of its processes is pinned to; None: as it comes.
        cpu_share: how many CPUs it counts on at most, since other workers use the others; None: all it may use.
        ignored: names of signals that it ignores.
        said: what workers have warned of (see `OutputLog`).
        here: runs it on a thread of this process instead, where `start`, `channel`, `env`, `cpus` and `cpu_share` say
            nothing.

    Attributes:
        express: its channel, while plain steps may be written to it without asking anybody here; None: not now.
        generation: how often it has been restarted; its frames carry it.
        description: what the service told about itself, once started.
        start_timeout_s: as given.
        memory: what its processes share with this one; to be set before the start.
        on_images: called with each IMAGES frame.
        on_death: called when a process of it has ended without having been asked to.
    """

    def __init__(
        self,
        service: bytes,
        *,
        index: int,
        slots: tuple[int, ...] = (),
        role: str = "worker",
        start: str | None = None,
        channel: str = "auto",
        poll_s: float = 0.0,
        env: Mapping[str, str] | None = None,
        log_prefix: str | None = None,
        preload: Sequence[str] = (),
        needed: Sequence[str] = (),
        registry: tuple[bytes, bytes] | None = None,
        code: Code | None = None,
        definitions: DefinitionTable | None = None,
        start_timeout_s: float = 60.0,
        cpus: tuple[int, ...] | None = None,
        cpu_share: int | None = None,
        here: RunHere | None = None,
        ignored: tuple[str, ...] = (),
        said: set[str] | None = None,
    ) -> None:
        self.index = index
        self.definitions = definitions
        self.slots = slots
        self.cpus = cpus
        self._state = WorkerState.NEW
        self.express: ScatterChannel | None = None
        self.generation = 0
        self.description: Any = None
        self.memory: Shared | None = None
        self.on_images: Callable[[Frame], None] | None = None
        self.on_death: Callable[[Worker], None] | None = None
        self._track: Track | None = None
        self._label = f"{role} {index}"
        self._start = check_start(start)
        self._channel_kind = check_channel(channel)
        self._environ = worker_environment(env)
        self._log_prefix = log_prefix
        self._said = set() if said is None else said
        self._imports = (*preload, *needed)
        forked = self._start == "forkserver"
        self._message = Start(
            list(sys.path),
            registry,
            tuple(preload),
            service,
            code,
            self._environ if forked else None,
            _directory() if forked else None,
            poll_s,
            cpus,
            ignored,
            LOG.getEffectiveLevel(),
            tuple(map(str, sys.argv)),
            cpu_share,
            bytes(current_process().authkey),
        )
        self.start_timeout_s = start_timeout_s
        self._here = here
        self._held: LaunchResources | None = None  # for its latest process, before there was one
        self._connection: Connection | None = None  # with its latest process
        self._why: str | None = None  # why it was killed, if we did it
        self._unborn: str | None = None  # why its latest process did not come up

    def __repr__(self) -> str:
        return f"<{self._label} {self.state.value} pid={self.pid}>"

    @property
    def state(self) -> WorkerState:
        """Where it is in its life."""
        if self._state is WorkerState.READY and self._connection is not None and self._connection.requests.pending:
            return WorkerState.DRAINING if self._connection.requests.abandoned else WorkerState.BUSY
        return self._state

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return self._connection.pid if self._connection else None

    @property
    def asked(self) -> tuple[int, int]:
        """Which of its processes lives, and how much that has been asked; another pair after any request or restart."""
        return self.generation, self._connection.requests.next if self._connection else -1

    @property
    def returncode(self) -> int | None:
        """How the process ended: its exit code, `-N` for signal N; None while it runs."""
        return self._connection.returncode if self._connection else None

    @property
    def stderr(self) -> str:
        """The last lines that the worker printed."""
        return self._connection.stderr if self._connection else ""

    @property
    def running_slot(self) -> int | None:
        """The slot whose env it runs just now, or ran when it died; None if none, or if the platform can't tell."""
        row = self._connection.row if self._connection else None
        return self.slots[row] if row is not None and row < len(self.slots) else None

    def _go(self, event: Event) -> None:
        self._state = NEXT[self._state][event]
        self._note_express()

    # ------------------------------------------------------------ start

    async def start(self) -> None:
        """Start the process and wait until its service is up.

        If this is cancelled, the process is killed.

        Raises:
            WorkerStartError: if the service could not be made, or the process ended.
            StartTimeout: if `start_timeout_s` passed.
        """
        self._go(Event.START)
        await self._bring_up()

    async def restart(self) -> None:
        """Start another process in place of the one that died; otherwise as `start`."""
        self._go(Event.RESTART)
        self.generation += 1
        self._why = None
        self._unborn = None
        try:
            await self._bring_up()
        except Exception as exc:
            self._unborn = (str(exc) or type(exc).__name__).partition("\n")[0]
            raise

    async def _bring_up(self) -> None:
        connection = self._connection = None
        try:
            async with asyncio.timeout(self.start_timeout_s):
                start = dump_code(self._message)  # first: a fork server may have yet to import for a while
                memory = self.memory.fd if self.memory is not None else None
                if self._here is not None:
                    process = launch_here(self._here, memory, self._label.replace(" ", "-"))
                else:
                    held = self._held = LaunchResources()
                    process = await launch(self._start, self._channel_kind, self._environ, self._imports, memory, held)
                output = OutputLog(self._label, process.pid, self.slots, self._log_prefix, self._said)
                connection = self._connection = Connection(
                    process,
                    output,
                    name=self._label,
                    generation=self.generation,
                    on_end=self._on_end,
                )
                connection.on_images = self._on_images
                ready: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
                connection.submit(Kind.START, (), start, None, into_future(ready))
                frame = await ready
                if frame.kind is Kind.FAILURE:
                    raise failures.start_failed(self._identity, load(frame.tail))
                self.description = load(frame.tail)
        except GeneratorExit:  # its loop was closed
            self.abandon()
            raise
        except BaseException as exc:
            if connection is None:
                self._go(Event.EXIT)
            else:
                try:
                    if isinstance(exc, TimeoutError):
                        await connection.where()  # it is in what it has printed then
                finally:
                    connection.kill()
                    await connection.gone()
            if isinstance(exc, TimeoutError):
                raise self._late(*getattr(exc.__cause__, "__notes__", ())) from None
            if isinstance(exc, WorkerDied):
                raise self._stillborn(exc) from None
            if isinstance(exc, WireError):
                message = f"{self._label} could not be understood: {exc}"
                raise failures.start_error(self._identity, message) from exc
            raise
        self._go(Event.READY)
        if self._track is not None:
            self._tell_of(self._track)

    async def settle(self, settling: Coroutine[Any, Any, T]) -> T:
        """Wait for what the worker, which is up, is to do before it is of use; if that fails, it has not started.

        Raises:
            WorkerStartError: if the process ended.
            StartTimeout: if `start_timeout_s` passed; the worker is as it was.
        """
        limit = asyncio.timeout(self.start_timeout_s)
        try:
            async with limit:
                return await settling
        except TimeoutError:
            if not limit.expired():
                raise
            await self.where()  # it is in what it has printed then
            raise self._late() from None
        except WorkerDied as exc:
            raise self._stillborn(exc) from None

    def _late(self, *notes: str) -> WorkerStartError:
        message = f"{self._label} was not ready within start_timeout_s={self.start_timeout_s}"
        if self.running_slot is not None:
            notes = (f"it was at slot {self.running_slot}", *notes)
        return failures.start_error(self._identity, "; ".join([message, *notes]), kind=StartTimeout)

    def _stillborn(self, error: WorkerDied) -> WorkerStartError:
        fault = self._connection.fault if self._connection is not None else None
        how = describe_exit(error.returncode) if fault is None else f"broke its stream ({fault})"
        where = "" if self.running_slot is None else f", at slot {self.running_slot}"
        return failures.start_error(self._identity, f"{self._label} (pid {self.pid}) {how} while starting{where}")

    def _on_images(self, frame: Frame) -> None:
        if self.on_images is not None:
            self.on_images(frame)

    # ------------------------------------------------------------ requests

    def submit(
        self,
        kind: Kind,
        fixed: Sequence[Buffer] = (),
        tail: Buffer = b"",
        *,
        into: Sequence[memoryview] | None = None,
        on_reply: OnReply,
    ) -> int:
        """Send a request; never blocks.

        Args:
            kind: what is asked.
            fixed: raw buffers; they must stay as they are until the reply.
            tail: what varies in length.
            into: where the fixed part of the reply shall be read into, if its length is the same.
            on_reply: called once, on the loop: with the RESULT or READY or FAILURE frame, or with a WorkerDied.

        Returns:
            The request's id.

        Raises:
            WorkerDied: if the worker is not there any more; `on_reply` is not called then.
            WireError: if the request is too large.
        """
        if self._state is not WorkerState.READY:
            raise self.death()
        assert self._connection is not None
        if self._track is not None:
            submit = self._connection.submit
            return self._track.follow(
                self.generation, kind.name.lower(), submit, kind, fixed, tail, into, on_reply=on_reply
            )
        return self._connection.submit(kind, fixed, tail, into, on_reply)

    def trace(self, track: Track | None) -> None:
        """Have all that its processes do written to this line, from now on; None: no longer. Never blocks."""
        self._track = track
        self._note_express()
        if self._state is WorkerState.READY:
            self._tell_of(track)

    def _tell_of(self, track: Track | None) -> None:
        call = CallRequest(TRACE, (track.handle if track is not None else None,), {})
        with contextlib.suppress(WorkerDied, WireError, RuntimeError):  # it ends, or its loop has
            self.submit(Kind.CALL, (), dump(call, self.definitions), on_reply=lambda _: None)

    def awaits(self, into: Sequence[memoryview]) -> bool:
        """Whether a request was sent whose reply is to be read into this very list of buffers, and has not come."""
        connection = self._connection
        return connection is not None and any(one.into is into for one in connection.requests.pending.values())

    def abandon_requests(self) -> None:
        """Nobody waits for the replies to what is in flight any more."""
        if self._connection is not None:
            self._connection.requests.abandoned = True

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the service.

        If this is cancelled, the worker still runs the method; the result is dropped.

        Raises:
            WorkerDied: if the worker ended before it answered.
            EnvError: if the method raised.
        """
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.submit(
            Kind.CALL, (), dump(CallRequest(method, args, kwargs), self.definitions), on_reply=into_future(reply)
        )
        frame = await reply
        if frame.kind is Kind.FAILURE:
            raise self.failure(load(frame.tail))
        return load(frame.tail)

    def poll(self) -> None:
        """Take replies that have come already, without waiting for the loop."""
        if self._connection is not None:
            self._connection.poll()

    @property
    def waitable(self) -> int | None:
        """A descriptor to wait on for replies; None if the loop has to do something first."""
        return self._connection.waitable if self._connection is not None else None

    @property
    def rests(self) -> bool:
        """Whether the loop does not look for replies, until `listen`: those of others are enough."""
        return self._connection is not None and self._connection.channel.rests

    def listen(self) -> None:
        """Have the loop look for replies, if it did not."""
        if self._connection is not None:
            self._connection.listen()

    async def where(self) -> str:
        """The Python frames that its process is in, the innermost first; "" if it does not say within a moment."""
        connection = self._connection
        return await connection.where() if self._state is WorkerState.READY and connection is not None else ""

    @property
    def busy(self) -> bool:
        """Whether any request has not been answered yet."""
        return self._connection is not None and bool(self._connection.requests.pending)

    def _note_express(self) -> None:
        self.express = None
        if self._state is WorkerState.READY and self._track is None and self._connection is not None:
            channel = self._connection.channel
            self.express = channel if isinstance(channel, ScatterChannel) else None

    # ------------------------------------------------------------ what went wrong

    def failure(self, failure: Failure) -> EnvError:
        """What the worker tells of an exception, as an exception."""
        return failures.env_error(self._identity, failure)

    def failure_here(self, message: str, slots: Sequence[int]) -> EnvError:
        """An error of some slots that was found on this side."""
        return failures.env_error_here(self._identity, message, slots)

    def death(self) -> WorkerDied:
        """How the worker ended, as an exception."""
        fault = self._connection.fault if self._connection else None
        return failures.worker_died(self._identity, self.returncode, fault, self.running_slot, self._why, self._unborn)

    @property
    def _identity(self) -> failures.WorkerIdentity:
        return failures.WorkerIdentity(self._label, self.pid, self.slots, self.stderr)

    # ------------------------------------------------------------ the end

    def _on_end(self, connection: Connection) -> None:
        unasked = self._state is WorkerState.READY
        self._go(Event.EXIT)
        pending, connection.requests.pending = connection.requests.pending, {}
        for request in pending.values():
            try:
                request.on_reply(self.death())
            except Exception:  # the others must hear of it all the same
                with contextlib.suppress(Exception):  # of a log handler
                    _log.exception("the end of %s could not be told to all who waited for it", self._label)
        if unasked and self.on_death is not None:
            self.on_death(self)

    async def close(self, grace_s: float = 1.0) -> None:
        """End the worker: ask it, after `grace_s` seconds SIGTERM, a second later SIGKILL. Idempotent.

        If this is cancelled, the worker is killed at once.
        """
        connection, asked = self._connection, self._state is WorkerState.READY
        self._go(Event.CLOSE)
        if connection is None:
            return
        if asked:
            with contextlib.suppress(WireError):
                connection.submit(Kind.CLOSE, (), b"", None, lambda _: None)
        await connection.end(grace_s, partial(self._say_late, grace_s))

    def _say_late(self, grace_s: float) -> None:
        if self._here is None and grace_s > 0:  # a thread says so itself; whoever gives no time has none to lose
            with contextlib.suppress(Exception):  # of a log handler
                _log.warning("%s", failures.late_to_close(self._identity, grace_s, self.running_slot))

    def forget_code(self) -> None:
        """Let go of what a process of it is made from: it will not be started again."""
        self._message = self._message._replace(code=None)

    async def kill(self) -> None:
        """End the worker at once, and wait until it is gone; a cancellation waits for that too."""
        self._go(Event.CLOSE)
        if self._connection is not None:
            self._connection.kill()
            await self._connection.gone()

    async def put_down(self, why: str) -> None:
        """As `strike`, and wait until nothing is left of the process."""
        connection = self._connection
        if self._state is WorkerState.READY and connection is not None:
            self.strike(why)
            await connection.gone()

    def strike(self, why: str) -> None:
        """Kill the process, as if it had died by itself, without waiting.

        Args:
            why: goes into the error.
        """
        if self._state is WorkerState.READY and self._connection is not None:
            self._why = why
            self._connection.kill()

    def abandon(self) -> None:
        """Kill the process without a loop to wait on: for `__del__` and the end of the interpreter."""
        it = self._connection or self._held
        if it is not None and self._state not in (WorkerState.DEAD, WorkerState.CLOSED):
            it.abandon()


def into_future(future: asyncio.Future[Frame]) -> OnReply:
    """Puts what comes of a request into a future, unless it is done already."""

    def on_reply(outcome: Frame | SlotError) -> None:
        if future.done():
            return
        if isinstance(outcome, Frame):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    return on_reply


def _directory() -> str | None:
    """The working directory; None if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
