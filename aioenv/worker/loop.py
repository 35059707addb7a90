"""The worker: a blocking loop around one service. Read a request, serve it, reply, do what could wait."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.process import current_process

from aioenv.definitions.restore import restore
from aioenv.errors import WireError
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.messages import (
    CallRequest,
    Start,
    dump,
    load,
    load_code,
)
from aioenv.platform import leave_cpus_to_others
from aioenv.tracing.ring import TRACE, Handle, Ring
from aioenv.worker import worker_context
from aioenv.worker.mujoco_setup import prepare_contexts, prepare_mujoco
from aioenv.worker.process_setup import (
    adopt_parent_environment,
    enable_fault_handler,
    keep_script_from_children,
    tell_records,
)
from aioenv.worker.registry import register_specs, restore_registry
from aioenv.worker.service import PartialStep, Reply, Service, StartFailed, TracedService, describe_failure
from aioenv.worker.worker_end import WorkerEnd

__all__ = ["run", "run_here"]


class _Loop:
    """One service and its link to the parent."""

    def __init__(self, read_fd: int, write_fd: int, variables_before: Mapping[str, str]) -> None:
        self._variables_before = variables_before
        self._service: Service | None = None
        self._link = WorkerEnd(read_fd, write_fd)

    def run(self) -> None:
        try:
            while (frame := self._link.read()) is not None:
                if not self._serve(frame):
                    return
        finally:
            if self._service is not None:
                mark = worker_context.row_mark()
                ended_by = mark[0]  # an env that called sys.exit: closing the others must not wipe out which one it was
                self._service.close()
                mark[0] = ended_by

    def _serve(self, frame: Frame | PartialStep) -> bool:
        """Answer one request; False after the last one."""
        kind, request, generation = frame.kind, frame.request, frame.generation
        link = self._link
        try:
            if isinstance(frame, PartialStep):
                assert self._service is not None  # whose plan it was
                reply = self._service.handle(frame)
            elif kind is Kind.START:
                link.write(Kind.READY, request, generation, (), self._start(frame))
                return True
            elif kind is Kind.CLOSE:
                if self._service is not None:
                    service, self._service = self._service, None
                    service.close()
                link.write(Kind.RESULT, request, generation)
                return False
            elif self._service is None:
                raise WireError(f"a {kind.name} came before START")
            else:
                reply = self._call(frame) if kind is Kind.CALL else self._service.handle(frame)
        except SystemExit:
            raise
        except BaseException as exc:  # Ctrl-C does not come here: what else there is was raised by an env, or a module
            failure = exc.failure if isinstance(exc, StartFailed) else describe_failure(exc)
            link.write(Kind.FAILURE, request, generation, (), dump(failure))
            return kind is not Kind.START
        try:
            link.write(Kind.RESULT, request, generation, reply.fixed, reply.tail)
        except WireError as exc:  # too large, found before anything was written
            link.write(Kind.FAILURE, request, generation, (), dump(describe_failure(exc)))
        late = self._service.afterwards()
        if late is not None:
            link.write(Kind.IMAGES, request, generation, late.fixed, late.tail)
        return True

    def _start(self, frame: Frame) -> bytes:
        start: Start = load(frame.tail)
        if worker_context.owns_process():
            if start.cpus is not None:
                os.sched_setaffinity(0, start.cpus)
            leave_cpus_to_others(start.cpu_share)
            adopt_parent_environment(start, self._variables_before)
            if start.authkey:  # set before anything is unpickled, since a manager's objects connect then
                current_process().authkey = start.authkey
            for name in start.ignored:
                signal.signal(getattr(signal, name), signal.SIG_IGN)
            self._link.poll(start.poll_s)
            tell_records(start.log_level)
            sys.path[:] = start.sys_path
            sys.argv[:] = start.argv
            if start.registry is not None:
                restore_registry(*start.registry)
        for name in start.preload:
            importlib.import_module(name)
        if start.code is not None:
            register_specs(restore(start.code))
        service: Service = load_code(start.service)()
        self._service = service
        self._link.aim(service)
        return dump(service.describe())

    def _call(self, frame: Frame) -> Reply:
        call: CallRequest = load(frame.tail)
        if call.method == TRACE:
            self._trace(*call.args)
            return Reply((), dump(None))
        if call.method.startswith("_"):
            raise AttributeError(f"{call.method!r} is private to the service")
        return Reply((), dump(getattr(self._service, call.method)(*call.args, **call.kwargs)))

    def _trace(self, handle: Handle | None) -> None:
        """Write down what the service does, from now on, or no longer."""
        if isinstance(self._service, TracedService):
            self._service.ring.close()
            self._service = self._service.service
        if self._service is None:
            return
        if handle is not None:
            with contextlib.suppress(OSError, ValueError):  # the parent has thought better of it
                self._service = TracedService(self._service, Ring.open(handle))
        self._link.aim(self._service)


def run(
    read_fd: int, write_fd: int, marker_fd: int | None, memory_fd: int | None, variables_before: Mapping[str, str]
) -> None:
    """Serve until the parent says CLOSE or closes the stream, then exit."""
    worker_context.share_row_mark(marker_fd)
    worker_context.keep_memory(memory_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    enable_fault_handler()
    prepare_mujoco()
    keep_script_from_children()
    try:
        _Loop(read_fd, write_fd, variables_before).run()
    except BrokenPipeError:
        os._exit(1)  # the parent is gone: nobody is left to tell


def run_here(fd: int, mark: memoryview, memory_fd: int | None) -> None:
    """The same on a thread of the parent's own, whose process stays as it is: for debugging.

    Args:
        fd: its end of the channel, a socket; it is not closed.
        mark: see `worker_context.use_row_mark_of_parent`.
        memory_fd: see `worker_context.keep_memory`.
    """
    worker_context.use_row_mark_of_parent(mark)
    worker_context.keep_memory(memory_fd)
    prepare_contexts()
    try:
        _Loop(fd, fd, {}).run()
    except ConnectionError:
        pass  # it was left to itself: nobody is there to tell
    finally:
        worker_context.release_memory()
