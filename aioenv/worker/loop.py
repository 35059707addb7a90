"""Answer the requests to a worker: let the service answer each, reply, and do the work that could wait.

`run` is the main function of a worker process, which reads requests one after the other. `RequestServer` also serves a
worker that is a thread of its parent (`process/thread_process.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import current_process
from typing import Protocol

from aioenv.definitions.restore import restore
from aioenv.errors import WireError
from aioenv.ipc.frames import Buffer, Frame, Kind
from aioenv.ipc.messages import CallRequest, Start, dump, load, load_code
from aioenv.platform import limit_cpus
from aioenv.tracing.track import TRACE, Handle, Ring
from aioenv.worker import worker_context
from aioenv.worker.mujoco_setup import prepare_contexts, prepare_mujoco
from aioenv.worker.process_setup import (
    adopt_parent_environment,
    enable_fault_handler,
    keep_script_from_children,
    send_log_records,
)
from aioenv.worker.service import PartialStep, Reply, Service, StartFailed, TracedService, describe_failure
from aioenv.worker.specs import register_specs, restore_registry
from aioenv.worker.worker_end import WorkerEnd

__all__ = ["ReplyWriter", "RequestServer", "run", "serve_channel", "serve_on_thread"]


def run(
    read_fd: int,
    write_fd: int,
    current_row_fd: int | None,
    memory_fd: int | None,
    variables_before: Mapping[str, str],
    inbox_fd: int | None,
) -> None:
    """Serve requests until the parent sends CLOSE or closes the stream.

    The arguments are those of `boot.run_worker`.
    """
    worker_context.share_current_row(current_row_fd)
    worker_context.keep_memory(memory_fd)
    worker_context.keep_inbox(inbox_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    enable_fault_handler()
    prepare_mujoco()
    keep_script_from_children()
    try:
        serve_channel(WorkerEnd(read_fd, write_fd), variables_before)
    except BrokenPipeError:
        os._exit(1)  # the parent is gone


def serve_channel(channel: WorkerEnd, variables_before: Mapping[str, str]) -> None:
    """Serve the requests that come over a channel, until CLOSE or the end of the stream."""
    server = RequestServer(channel, variables_before)
    try:
        while (frame := channel.read()) is not None and server.serve(frame):
            pass
    finally:
        server.close()


def serve_on_thread(channel: ReplyWriter, current_row: memoryview, memory_fd: int | None) -> RequestServer:
    """Make the server of a worker that is a thread of its parent, whose process is left as it is.

    Args:
        channel: replies are written to it.
        current_row: see `worker_context.use_current_row_of_parent`.
        memory_fd: see `worker_context.keep_memory`.
    """
    worker_context.use_current_row_of_parent(current_row)
    worker_context.keep_memory(memory_fd)
    prepare_contexts()
    return RequestServer(channel, {})


class ReplyWriter(Protocol):
    """The worker's end of a channel, as far as a `RequestServer` needs it."""

    def use(self, service: Service) -> None:
        """Ask this service from now on where to read requests into."""

    def poll(self, poll_s: float) -> None:
        """Poll up to `poll_s` seconds for each next frame before the process sleeps."""

    def write(
        self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer] = (), payload: Buffer = b""
    ) -> None:
        """Write a frame.

        Raises:
            WireError: if it is too large.
        """


class RequestServer:
    """Answers requests with one service, which START makes.

    Args:
        channel: replies are written to it.
        variables_before: see `boot.run_worker`.
    """

    def __init__(self, channel: ReplyWriter, variables_before: Mapping[str, str]) -> None:
        self._variables_before = variables_before
        self._service: Service | None = None
        self._channel = channel

    def close(self) -> None:
        """Close the service, if it is still there, and release shared memory that was not mapped."""
        try:
            if self._service is not None:
                current_row = worker_context.current_row()
                ended_by = current_row[0]  # the row whose env called sys.exit; closing the others must not overwrite it
                service, self._service = self._service, None
                service.close()
                current_row[0] = ended_by
        finally:
            worker_context.release_memory()

    def serve(self, frame: Frame | PartialStep) -> bool:
        """Answer one request; return False after the last one.

        Raises:
            SystemExit: if an env ends its program.
            OSError: if the parent is gone.
        """
        kind, request, generation = frame.kind, frame.request, frame.generation
        channel = self._channel
        try:
            if isinstance(frame, PartialStep):
                assert self._service is not None  # its fast path has started the step
                reply = self._service.handle(frame)
            elif kind is Kind.START:
                channel.write(Kind.READY, request, generation, (), self._start(frame))
                return True
            elif kind is Kind.CLOSE:
                if self._service is not None:
                    service, self._service = self._service, None
                    service.close()
                channel.write(Kind.RESULT, request, generation)
                return False
            elif self._service is None:
                raise WireError(f"a {kind.name} came before START")
            else:
                reply = self._call(frame) if kind is Kind.CALL else self._service.handle(frame)
        except SystemExit:
            raise
        except BaseException as exc:  # raised by an env or a module: SIGINT is ignored here
            failure = exc.failure if isinstance(exc, StartFailed) else describe_failure(exc)
            channel.write(Kind.FAILURE, request, generation, (), dump(failure))
            return kind is not Kind.START
        try:
            channel.write(Kind.RESULT, request, generation, reply.fixed, reply.payload)
        except WireError as exc:  # too large, found before anything was written
            channel.write(Kind.FAILURE, request, generation, (), dump(describe_failure(exc)))
        late = self._service.after_reply()
        if late is not None:
            channel.write(Kind.IMAGES, request, generation, late.fixed, late.payload)
        return True

    def _start(self, frame: Frame) -> bytes:
        """Prepare the process and make the service; return its description, pickled."""
        start: Start = load(frame.payload)
        if worker_context.owns_process():
            self._prepare_process(start)
        for name in start.preload:
            importlib.import_module(name)
        if start.code is not None:
            register_specs(restore(start.code))
        service: Service = load_code(start.service)()
        self._service = service
        self._channel.use(service)
        return dump(service.describe())

    def _prepare_process(self, start: Start) -> None:
        """Bring this process into the state that the parent asks for."""
        if start.cpus is not None:
            os.sched_setaffinity(0, start.cpus)
        limit_cpus(start.cpu_share)
        adopt_parent_environment(start, self._variables_before)
        if start.authkey:  # set before anything is unpickled, since a manager's objects connect then
            current_process().authkey = start.authkey
        for name in start.ignored:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        self._channel.poll(start.poll_s)
        send_log_records(start.log_level)
        if start.elsewhere:  # directories of the parent's that are here too hold modules of the user's program
            sys.path += [entry for entry in start.sys_path if entry not in sys.path and os.path.exists(entry)]
        else:
            sys.path[:] = start.sys_path
        sys.argv[:] = start.argv
        if start.registry is not None:
            restore_registry(*start.registry)

    def _call(self, frame: Frame) -> Reply:
        """Call a public method of the service by its name."""
        call: CallRequest = load(frame.payload)
        if call.method == TRACE:
            self._trace(*call.args)
            return Reply((), dump(None))
        if call.method.startswith("_"):
            raise AttributeError(f"{call.method!r} is private to the service")
        return Reply((), dump(getattr(self._service, call.method)(*call.args, **call.kwargs)))

    def _trace(self, handle: Handle | None) -> None:
        """Record the work of the service from now on; stop with None."""
        if isinstance(self._service, TracedService):
            self._service.ring.close()
            self._service = self._service.service
        if self._service is None:
            return
        if handle is not None:
            with contextlib.suppress(OSError, ValueError):  # the parent has stopped the trace meanwhile
                self._service = TracedService(self._service, Ring.open(handle))
        self._channel.use(self._service)
