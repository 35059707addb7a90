"""The parent's handle of one worker, through all of its processes: states, start, requests, restarts, end.

The table of states is at the top. `Worker` launches a process (`launch.py`), talks to it (`connection.py`), and makes
its errors (`failures.py`). `restart.py` starts a worker that has died again, if `restart_policy.py` allows it.
"""

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
from typing import TYPE_CHECKING, Any, TypeVar

from aioenv.definitions.restore import Code
from aioenv.definitions.table import DefinitionTable
from aioenv.errors import EnvError, SlotError, StartTimeout, WireError, WorkerDied, WorkerStartError, describe_exit
from aioenv.ipc.frames import Buffer, Frame, Kind
from aioenv.ipc.memory import SharedMemory
from aioenv.ipc.messages import CallRequest, Failure, Start, dump, dump_code, load
from aioenv.process import failures
from aioenv.process.channel import ScatterChannel, check_channel
from aioenv.process.connection import Connection, OnReply
from aioenv.process.environment import worker_environment
from aioenv.process.failures import LOG, OutputLog
from aioenv.process.launch import LaunchResources, check_start, launch, launch_thread
from aioenv.process.process import Process
from aioenv.process.remote import Placement, RemoteProcess, SharedData, launch_remote
from aioenv.process.thread_process import MakeServer, ThreadChannel
from aioenv.speedups import read_by_c
from aioenv.tracing.track import TRACE, Track

if TYPE_CHECKING:
    from aioenv.worker.service import PartialStep

__all__ = ["ACCEPTS_REQUESTS", "TRANSITIONS", "Event", "Worker", "WorkerState", "into_future"]

_log = logging.getLogger("aioenv")

T = TypeVar("T")


class WorkerState(Enum):
    """The state of a worker.

    ::

        NEW ──start──▶ STARTING ──ready──▶ READY
        NEW, STARTING, READY, RESTARTING ──exit──▶ DEAD ──restart──▶ RESTARTING ──ready──▶ READY
        STARTING, READY, RESTARTING ──close──▶ CLOSING ──exit──▶ CLOSED ◀──close── NEW, DEAD

    BUSY and DRAINING are only reported: so is a READY worker that owes replies, and one whose replies no caller awaits.
    """

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"  # ready, and owes replies
    DRAINING = "draining"  # ready, and owes replies that no caller waits for
    RESTARTING = "restarting"  # its process died, and a new one is starting
    DEAD = "dead"  # its process died
    CLOSING = "closing"
    CLOSED = "closed"


class Event(Enum):
    """An event that changes the state of a worker."""

    START = "start"  # its process is being started
    READY = "ready"  # its service is up
    EXIT = "exit"  # its process has ended, and everything that it wrote has been read
    RESTART = "restart"  # a new process is being started
    CLOSE = "close"  # it was asked to end


def _transitions() -> dict[WorkerState, dict[Event, WorkerState]]:
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


# The next state; an event that is not in the table can't happen in that state.
TRANSITIONS = _transitions()
# States in which a request may be sent.
ACCEPTS_REQUESTS = frozenset({WorkerState.READY, WorkerState.BUSY, WorkerState.DRAINING})


@read_by_c
class Worker:
    """The parent's handle of one worker.

    Args:
        service: a pickled callable that makes the service in the worker (`messages.dump_code`).
        code: the definitions that the service is made from besides (see `FactoryReference`).
        definitions: the table of the definitions that messages refer to.
        index: its number among the workers of its role.
        slots: the slots that it holds, for errors and logs.
        role: its role, for errors and logs.
        start: the launch method (see `launch.check_start`).
        channel: the kind of channel (see `channel.check_channel`).
        poll_s: how long it may poll for a request before it sleeps, in seconds.
        env: environment variables that override those of this process.
        log_prefix: text before each line that it prints.
        preload: modules that it imports first.
        needed: modules that its service will import, and env classes ("module:Class") whose models it will load, for a
            fork server to do so once for all workers.
        registry: Gymnasium's registry, from `worker.specs.capture_registry`.
        start_timeout_s: how long it may take to start, in seconds.
        cpus: the CPUs that each of its processes is pinned to; None: any.
        cpu_share: the number of CPUs that it may count on, since other workers use the rest; None: all.
        ignored_signals: names of signals that it ignores.
        seen_warnings: warnings of workers so far (see `OutputLog`).
        thread_server: makes what answers requests on a thread of this process; `start`, `channel`, `env`, `cpus` and
            `cpu_share` are ignored then. None: it is a process.
        placement: places its processes on other machines; `start` and `channel` are ignored then. None: on this one.

    Attributes:
        label: its role and its index, for messages and timelines.
        fast_channel: its channel, while plain steps may be written to it without calling `submit`; None otherwise.
        thread_channel: likewise, if it is a thread of this process: plain steps may run on the caller's thread.
        generation: how often it has been restarted; its frames carry it.
        description: its service's description of itself, once started.
        start_timeout_s: as given.
        memory: the memory that its processes share with this one; to be set before the start. None: no such memory.
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
        thread_server: MakeServer | None = None,
        placement: Placement | None = None,
        ignored_signals: tuple[str, ...] = (),
        seen_warnings: set[str] | None = None,
    ) -> None:
        self.index = index
        self.definitions = definitions
        self.slots = slots
        self.cpus = cpus
        self._state = WorkerState.NEW
        self.fast_channel: ScatterChannel | None = None
        self.thread_channel: ThreadChannel | None = None
        self.generation = 0
        self.description: Any = None
        self.memory: SharedMemory | None = None
        self.on_images: Callable[[Frame], None] | None = None
        self.on_death: Callable[[Worker], None] | None = None
        self._track: Track | None = None
        self.label = f"{role} {index}"
        self._start_method = check_start(start)
        self._channel_kind = check_channel(channel)
        self._given_env = env or {}
        self._environ = worker_environment(env)
        self._log_prefix = log_prefix
        self._seen_warnings = set() if seen_warnings is None else seen_warnings
        self._imports = (*preload, *needed)
        forked = self._start_method == "forkserver" and placement is None
        self._message = Start(
            list(sys.path),
            registry,
            tuple(preload),
            service,
            code,
            self._environ if forked else None,
            _working_directory() if forked else None,
            poll_s,
            cpus,
            ignored_signals,
            LOG.getEffectiveLevel(),
            tuple(map(str, sys.argv)),
            cpu_share,
            b"" if placement is not None else bytes(current_process().authkey),
            elsewhere=placement is not None,
        )
        self.start_timeout_s = start_timeout_s
        self._thread_server = thread_server
        self._placement = placement
        self._resources: LaunchResources | None = None  # of the latest launch
        self._connection: Connection | None = None  # with the latest process
        self._remote: RemoteProcess | None = None  # the latest process, if it is on another machine
        self._kill_reason: str | None = None  # of `kill`
        self._restart_failure: str | None = None  # why the latest process did not start

    def __repr__(self) -> str:
        return f"<{self.label} {self.state.value} pid={self.pid}>"

    @property
    def state(self) -> WorkerState:
        """The state that it is in."""
        if self._state is WorkerState.READY and self._connection is not None and self._connection.requests.pending:
            return WorkerState.DRAINING if self._connection.requests.abandoned else WorkerState.BUSY
        return self._state

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return self._connection.pid if self._connection else None

    @property
    def node(self) -> str:
        """The name of its machine; empty: this one."""
        return self._connection.node if self._connection else ""

    @property
    def next_request(self) -> tuple[int, int]:
        """The generation and the id of the next request: it changes with each request and each restart."""
        return self.generation, self._connection.requests.next_id if self._connection else -1

    @property
    def returncode(self) -> int | None:
        """The exit code, or `-N` for signal N; None while it runs."""
        return self._connection.returncode if self._connection else None

    @property
    def stderr(self) -> str:
        """The last lines that the worker printed."""
        return self._connection.stderr if self._connection else ""

    @property
    def running_slot(self) -> int | None:
        """The slot whose env it runs, or ran when it died; None if none, or if the platform can't tell."""
        row = self._connection.row if self._connection else None
        return self.slots[row] if row is not None and row < len(self.slots) else None

    def _transition(self, event: Event) -> None:
        self._state = TRANSITIONS[self._state][event]
        self._update_fast_channel()

    def _update_fast_channel(self) -> None:
        self.fast_channel = self.thread_channel = None
        if self._state is WorkerState.READY and self._track is None and self._connection is not None:
            channel = self._connection.channel
            self.fast_channel = channel if isinstance(channel, ScatterChannel) else None
            self.thread_channel = channel if isinstance(channel, ThreadChannel) else None

    # ------------------------------------------------------------ start

    async def start(self) -> None:
        """Start the process and wait until its service is up.

        If this is cancelled, the process is killed.

        Raises:
            WorkerStartError: if the service could not be made, or the process ended.
            StartTimeout: if `start_timeout_s` passed.
        """
        self._transition(Event.START)
        await self._start_process()

    async def restart(self) -> None:
        """Start another process in place of the one that died; otherwise as `start`."""
        self._transition(Event.RESTART)
        self.generation += 1
        self._kill_reason = None
        self._restart_failure = None
        try:
            await self._start_process()
        except Exception as exc:
            self._restart_failure = (str(exc) or type(exc).__name__).partition("\n")[0]
            raise

    async def _start_process(self) -> None:
        connection = self._connection = None
        try:
            async with asyncio.timeout(self.start_timeout_s):
                start = dump_code(self._message)  # before the launch, which may wait for a fork server's imports
                memory = self.memory.fd if self.memory is not None else None
                process: Process
                if self._thread_server is not None:
                    process = launch_thread(self._thread_server, memory, self.label.replace(" ", "-"))
                elif self._placement is not None:
                    resources = self._resources = LaunchResources()
                    process = self._remote = await launch_remote(self._placement, self._given_env, resources)
                else:
                    resources = self._resources = LaunchResources()
                    process = await launch(
                        self._start_method, self._channel_kind, self._environ, self._imports, memory, resources
                    )
                output = OutputLog(self.label, process.pid, self.slots, self._log_prefix, self._seen_warnings)
                connection = self._connection = Connection(
                    process,
                    output,
                    name=self.label,
                    generation=self.generation,
                    on_end=self._on_end,
                )
                connection.on_images = self._on_images
                ready: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
                connection.submit(Kind.START, (), start, None, into_future(ready))
                frame = await ready
                if frame.kind is Kind.FAILURE:
                    raise failures.start_failed(self._identity, load(frame.payload))
                self.description = load(frame.payload)
        except GeneratorExit:  # the loop was closed
            self.abandon()
            raise
        except BaseException as exc:
            if connection is None:
                self._transition(Event.EXIT)
            else:
                try:
                    if isinstance(exc, TimeoutError):
                        await connection.current_stack()  # the error quotes the output, which has the stack then
                finally:
                    connection.kill()
                    await connection.cleaned_up()
            if isinstance(exc, TimeoutError):
                raise self._start_timeout(*getattr(exc.__cause__, "__notes__", ())) from None
            if isinstance(exc, WorkerDied):
                raise self._died_while_starting(exc) from None
            if isinstance(exc, WireError):
                message = f"{self.label} could not be understood: {exc}"
                raise failures.start_error(self._identity, message) from exc
            raise
        self._transition(Event.READY)
        if self._track is not None:
            self._send_track(self._track)

    async def finish_setup(self, setup: Coroutine[Any, Any, T]) -> T:
        """Await the setup of a worker that is up; its failure counts as a failure to start.

        Raises:
            WorkerStartError: if the process ended.
            StartTimeout: if `start_timeout_s` passed; the process goes on.
        """
        limit = asyncio.timeout(self.start_timeout_s)
        try:
            async with limit:
                return await setup
        except TimeoutError:
            if not limit.expired():
                raise
            await self.current_stack()  # the error quotes the output, which has the stack then
            raise self._start_timeout() from None
        except WorkerDied as exc:
            raise self._died_while_starting(exc) from None

    def _start_timeout(self, *notes: str) -> WorkerStartError:
        message = f"{self.label} was not ready within start_timeout_s={self.start_timeout_s}"
        if self.running_slot is not None:
            notes = (f"it was at slot {self.running_slot}", *notes)
        return failures.start_error(self._identity, "; ".join([message, *notes]), kind=StartTimeout)

    def _died_while_starting(self, error: WorkerDied) -> WorkerStartError:
        connection = self._connection
        fault = connection.fault if connection is not None else None
        how = describe_exit(error.returncode) if fault is None else f"broke its stream ({fault})"
        if connection is not None and connection.lost is not None:
            how = f"is lost ({connection.lost})"
        where = "" if self.running_slot is None else f", at slot {self.running_slot}"
        return failures.start_error(
            self._identity, f"{self.label} ({self._identity.where}) {how} while starting{where}"
        )

    def _on_images(self, frame: Frame) -> None:
        if self.on_images is not None:
            self.on_images(frame)

    # ------------------------------------------------------------ requests

    def submit(
        self,
        kind: Kind,
        fixed: Sequence[Buffer] = (),
        payload: Buffer = b"",
        *,
        into: Sequence[memoryview] | None = None,
        on_reply: OnReply,
    ) -> int:
        """Send a request; never blocks.

        Args:
            kind: the kind of request.
            fixed: raw buffers, which must not change before the reply.
            payload: the part of variable length.
            into: the buffers for the fixed part of the reply; their length must match.
            on_reply: called once, on the loop: with the RESULT, READY or FAILURE frame, or with a WorkerDied.

        Returns:
            The request's id.

        Raises:
            WorkerDied: if the worker is not up; `on_reply` is not called then.
            WireError: if the request is too large.
        """
        if self._state is not WorkerState.READY:
            raise self.death_error()
        assert self._connection is not None
        if self._track is not None:
            submit = self._connection.submit
            return self._track.submit(
                self.generation, kind.name.lower(), submit, kind, fixed, payload, into, on_reply=on_reply
            )
        return self._connection.submit(kind, fixed, payload, into, on_reply)

    def give(self, data: SharedData) -> None:
        """Let a worker on another machine take data of its cluster's session (see `Agent.give`)."""
        assert self._remote is not None
        self._remote.give(data)

    def finish_step(self, partial: PartialStep, into: Sequence[memoryview], on_reply: OnReply) -> None:
        """Finish a step that C has started on the caller's thread (see `Connection.finish_step`)."""
        assert self._connection is not None
        self._connection.finish_step(partial, into, on_reply)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the service.

        If this is cancelled, the worker still runs the method; the result is dropped.

        Raises:
            WorkerDied: if the worker ended before it answered.
            EnvError: if the method raised.
        """
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        request = dump(CallRequest(method, args, kwargs), self.definitions)
        self.submit(Kind.CALL, (), request, on_reply=into_future(reply))
        frame = await reply
        if frame.kind is Kind.FAILURE:
            raise self.env_error(load(frame.payload))
        return load(frame.payload)

    def receives_into(self, buffers: Sequence[memoryview]) -> bool:
        """Return whether an outstanding reply is to be read into this very list of buffers."""
        connection = self._connection
        return connection is not None and any(one.into is buffers for one in connection.requests.pending.values())

    def abandon_requests(self) -> None:
        """Note that no caller waits for the outstanding replies any more."""
        if self._connection is not None:
            self._connection.requests.abandoned = True

    @property
    def busy(self) -> bool:
        """Whether any request has not been answered yet."""
        return self._connection is not None and bool(self._connection.requests.pending)

    def poll(self) -> None:
        """Process replies that have arrived, without the loop and without waiting."""
        if self._connection is not None:
            self._connection.channel.poll()

    @property
    def poll_fd(self) -> int | None:
        """The descriptor that is readable when replies have arrived; None if the loop has to act first."""
        return self._connection.channel.poll_fd if self._connection is not None else None

    @property
    def reader_disabled(self) -> bool:
        """Whether the loop does not watch for replies until `enable_reader` is called."""
        return self._connection is not None and self._connection.channel.reader_disabled

    def enable_reader(self) -> None:
        """Let the loop watch for replies. Idempotent."""
        if self._connection is not None:
            self._connection.channel.enable_reader()

    async def current_stack(self) -> str:
        """Return the Python frames of its main thread, the innermost first; "" if it does not print them in time."""
        connection = self._connection
        return await connection.current_stack() if self._state is WorkerState.READY and connection is not None else ""

    def trace(self, track: Track | None) -> None:
        """Record everything that its processes do in this track from now on; None: stop. Never blocks."""
        self._track = track
        self._update_fast_channel()
        if self._state is WorkerState.READY:
            self._send_track(track)

    def _send_track(self, track: Track | None) -> None:
        call = CallRequest(TRACE, (track.handle if track is not None else None,), {})
        with contextlib.suppress(WorkerDied, WireError, RuntimeError):  # the worker is ending, or its loop has
            self.submit(Kind.CALL, (), dump(call, self.definitions), on_reply=lambda _: None)

    # ------------------------------------------------------------ errors

    def env_error(self, failure: Failure) -> EnvError:
        """Make the error for an exception in the worker."""
        return failures.env_error(self._identity, failure)

    def parent_env_error(self, message: str, slots: Sequence[int]) -> EnvError:
        """Make an error about some slots that this process has found."""
        return failures.parent_env_error(self._identity, message, slots)

    def death_error(self) -> WorkerDied:
        """Make the error for the end of the worker."""
        fault = self._connection.fault if self._connection else None
        return failures.worker_died(
            self._identity,
            self.returncode,
            fault,
            self.running_slot,
            self._kill_reason,
            self._restart_failure,
            self._connection.lost if self._connection else None,
        )

    @property
    def _identity(self) -> failures.WorkerIdentity:
        return failures.WorkerIdentity(self.label, self.pid, self.slots, self.stderr, self.node)

    # ------------------------------------------------------------ the end

    def _on_end(self, connection: Connection) -> None:
        unasked = self._state is WorkerState.READY
        self._transition(Event.EXIT)
        pending, connection.requests.pending = connection.requests.pending, {}
        for request in pending.values():
            try:
                request.on_reply(self.death_error())
            except Exception:  # the other requests must fail too
                with contextlib.suppress(Exception):  # of a log handler
                    _log.exception("a request that %s left unanswered could not be failed", self.label)
        if unasked and self.on_death is not None:
            self.on_death(self)

    async def close(self, grace_s: float = 1.0) -> None:
        """End the worker: ask it to; after `grace_s` seconds SIGTERM, a second later SIGKILL. Idempotent.

        If this is cancelled, the worker is killed at once.
        """
        connection, ready = self._connection, self._state is WorkerState.READY
        self._transition(Event.CLOSE)
        if connection is None:
            return
        if ready:
            with contextlib.suppress(WireError):
                connection.submit(Kind.CLOSE, (), b"", None, lambda _: None)
        await connection.end(grace_s, partial(self._warn_of_close_timeout, grace_s))

    def _warn_of_close_timeout(self, grace_s: float) -> None:
        if self._thread_server is None and grace_s > 0:  # a thread warns itself; without a grace period nothing is lost
            with contextlib.suppress(Exception):  # of a log handler
                _log.warning("%s", failures.close_timeout_warning(self._identity, grace_s, self.running_slot))

    def forget_code(self) -> None:
        """Free the definitions that its processes are made from: it will not be started again."""
        self._message = self._message._replace(code=None)

    async def close_now(self) -> None:
        """Kill the worker, and wait until it is gone, even if cancelled. Idempotent."""
        self._transition(Event.CLOSE)
        if self._connection is not None:
            self._connection.kill()
            await self._connection.cleaned_up()

    def kill(self, reason: str) -> None:
        """Kill the process without waiting; the worker is then dead, and may be restarted.

        Args:
            reason: appears in the error.
        """
        if self._state is WorkerState.READY and self._connection is not None:
            self._kill_reason = reason
            self._connection.kill()

    async def kill_and_wait(self, reason: str) -> None:
        """Kill the process as `kill` does, and wait until nothing is left of it."""
        connection = self._connection
        if self._state is WorkerState.READY and connection is not None:
            self.kill(reason)
            await connection.cleaned_up()

    def abandon(self) -> None:
        """Kill the process without a loop to wait on: for `__del__` and the end of the interpreter."""
        holder = self._connection or self._resources
        if holder is not None and self._state not in (WorkerState.DEAD, WorkerState.CLOSED):
            holder.abandon()


def into_future(future: asyncio.Future[Frame]) -> OnReply:
    """Return an `on_reply` that sets a future's result or exception, unless it is done."""

    def on_reply(outcome: Frame | SlotError) -> None:
        if future.done():
            return
        if isinstance(outcome, Frame):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    return on_reply


def _working_directory() -> str | None:
    """Return the working directory; None if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
