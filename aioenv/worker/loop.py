"""The worker: a blocking loop around one service. Read a request, serve it, reply, do what could wait."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.process import current_process

from aioenv.definitions.restore import restore
from aioenv.errors import WireError
from aioenv.ipc.exceptions import dump_exception
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.messages import (
    WHERE,
    CallRequest,
    Failure,
    Start,
    dump,
    load,
    load_code,
    message_of,
    reason_of,
    traceback_of,
    tried,
)
from aioenv.platform import leave_cpus_to_others
from aioenv.tracing.ring import TRACE, Handle, Ring
from aioenv.worker import current_row, shared_memory
from aioenv.worker.log_records import tell_records
from aioenv.worker.mujoco_gl import choose_backend_late, note_missing_opengl
from aioenv.worker.mujoco_import import prepare_contexts, prepare_mujoco
from aioenv.worker.nested_processes import keep_script_from_children
from aioenv.worker.registry import register_specs, restore_registry
from aioenv.worker.service import PartialStep, Reply, Service
from aioenv.worker.tracing import TracedService
from aioenv.worker.worker_end import WorkerEnd

__all__ = ["describe_failure", "run", "run_here"]


# An exception may have a whole array in its message. It is told twice, in the traceback too, and logged perhaps.
_MAX_TEXT = 16 << 10


def describe_failure(exc: BaseException, row: int | None = None) -> Failure:
    """An exception in a form that always travels, with the exception itself if that can be sent."""
    note_missing_opengl(exc)
    message, text = _shortened(message_of(exc)), _shortened(traceback_of(exc))
    pickled, why = tried(dump_exception, exc)
    return Failure(row, type(exc).__qualname__, message, text, pickled, "" if why is None else reason_of(why))


def _shortened(text: str) -> str:
    """A text with its middle left out, if it is very long."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


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
                mark = current_row.cell()
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
        if current_row.alone():
            if start.cpus is not None:
                os.sched_setaffinity(0, start.cpus)
            leave_cpus_to_others(start.cpu_share)
            settle_in(start, self._variables_before)
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


def settle_in(start: Start, before: Mapping[str, str]) -> None:
    """Take on the parent's environment variables and directory: a forked worker has those of its fork server.

    What modules did to variables when they were imported there stays done, as in a process that imports them itself;
    but those that the parent has changed since are the parent's.

    Args:
        start: what the parent says of itself.
        before: the fork server's variables, before it imported anything.
    """
    if start.directory is not None:
        with contextlib.suppress(OSError):  # it has been removed, or is not for us
            os.chdir(start.directory)
    if start.environ is None:
        return
    here = dict(os.environ)
    for name in here.keys() | start.environ.keys():
        value = start.environ.get(name)
        if value == here.get(name) or value == before.get(name):
            continue
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    choose_backend_late()


class StartFailed(Exception):
    """A service could not be made, and knows more about it than the exception tells (which row, say)."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def run(
    read_fd: int, write_fd: int, marker_fd: int | None, memory_fd: int | None, variables_before: Mapping[str, str]
) -> None:
    """Serve until the parent says CLOSE or closes the stream, then exit."""
    current_row.share(marker_fd)
    shared_memory.keep(memory_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    _be_traceable()
    prepare_mujoco()
    keep_script_from_children()
    try:
        _Loop(read_fd, write_fd, variables_before).run()
    except BrokenPipeError:
        os._exit(1)  # the parent is gone: nobody is left to tell


def _be_traceable() -> None:
    """Let a crash print where it happened, and the parent ask where this process is, even in C code with the GIL held.

    To the descriptor: an env may have closed `sys.stderr`. Other threads are left out of what is asked for, since they
    run on meanwhile.
    """
    faulthandler.enable(2)
    if WHERE is not None:
        faulthandler.register(WHERE, 2, all_threads=False)


def run_here(fd: int, mark: memoryview, memory_fd: int | None) -> None:
    """The same on a thread of the parent's own, whose process stays as it is: for debugging.

    Args:
        fd: its end of the channel, a socket; it is not closed.
        mark: see `current_row.share_here`.
        memory_fd: see `shared_memory.keep`.
    """
    current_row.share_here(mark)
    shared_memory.keep(memory_fd)
    prepare_contexts()
    try:
        _Loop(fd, fd, {}).run()
    except ConnectionError:
        pass  # it was left to itself: nobody is there to tell
    finally:
        shared_memory.drop()
