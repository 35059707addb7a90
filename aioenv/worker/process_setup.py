"""Set up a worker process: its environment, log records, crash reports, and the child processes that envs start."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from multiprocessing import context, process
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

from aioenv.errors import NestedProcessError
from aioenv.ipc.messages import STACK_SIGNAL, LogLine, Start, pack_log_line
from aioenv.worker.mujoco_gl import choose_backend_late

__all__ = ["adopt_parent_environment", "enable_fault_handler", "keep_script_from_children", "send_log_records"]


def adopt_parent_environment(start: Start, before: Mapping[str, str]) -> None:
    """Set the parent's environment variables and working directory; a forked worker has those of its fork server.

    A variable that a module has changed when the fork server imported it stays changed, as in a process that imports
    the module itself. A variable that the parent has changed since gets the parent's value.

    Args:
        start: the parent's variables and directory.
        before: the fork server's variables before it imported anything.
    """
    if start.directory is not None:
        with contextlib.suppress(OSError):  # it was removed, or this user may not enter it
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


def enable_fault_handler() -> None:
    """Make a crash print its traceback, and let the parent ask for one, even while C code holds the GIL.

    Both go to descriptor 2, since an env may have closed `sys.stderr`. The parent gets the traceback of the main
    thread alone: other threads run on meanwhile.
    """
    faulthandler.enable(2)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, 2, all_threads=False)


# ------------------------------------------------------------ log records


class _RecordSender(logging.Handler):
    """Writes records to descriptor 2, which the parent reads; an env may have closed `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; an error is handled as by any handler."""
        try:
            os.write(2, pack_log_line(LogLine(record.levelno, record.name, self.format(record))))
        except Exception:
            self.handleError(record)


def send_log_records(level: int) -> None:
    """Send records that no handler of this process handles to the parent.

    This replaces `logging.lastResort` and adds no handler, so that `logging.basicConfig(…)` in an env works as usual.
    (`logging.error` and the like call it without arguments, which would print the records instead.)

    Args:
        level: the lowest level to send; the parent would drop records below it.
    """
    root = logging.getLogger()
    if root.level != level:  # setting it costs a page of memory for each logger
        root.setLevel(level)
    if isinstance(logging.lastResort, _RecordSender):  # set by the fork server before it forked this worker
        return
    configure = logging.basicConfig

    def configure_if_asked(**kwargs: Any) -> None:
        if kwargs:
            configure(**kwargs)

    logging.basicConfig = configure_if_asked
    logging.lastResort = _RecordSender()


# ------------------------------------------------------------ child processes of envs

# A worker's `__main__` holds the definitions of the user's script. With the start methods spawn and forkserver,
# multiprocessing tells each child to run the file of `__main__`, so that the child can unpickle these definitions. In a
# child of an env this would start the training a second time.

_MAIN = ("__main__", "__mp_main__")
_SPAWNED = ("spawn", "forkserver")
_INSTRUCTIONS = ("init_main_from_name", "init_main_from_path")
# Kinds of objects that are pickled by name, so that the child must find them.
_BY_NAME = (type, FunctionType, type(functools.lru_cache(int)))

_installed = False


def keep_script_from_children() -> None:
    """Make multiprocessing start children of this process without the user's script.

    `fork` is unchanged, since such a child has all definitions. Nothing is imported until a child is started.
    """
    for name in ("SpawnProcess", "ForkServerProcess"):  # a platform may lack the second one
        kind = getattr(context, name, None)
        if kind is not None:
            kind._Popen = staticmethod(functools.partial(_start, kind._Popen))


def _start(popen: Callable[[Any], Any], child: Any) -> Any:
    """Start a child; before the first one, patch how multiprocessing prepares children and pickles for them."""
    global _installed
    if not _installed:
        _installed = True
        # only now: the import takes a millisecond, and most envs start no process
        spawn: Any = importlib.import_module("multiprocessing.spawn")
        spawn.get_preparation_data = functools.partial(_without_script, spawn.get_preparation_data)
        pickler: Any = ForkingPickler
        pickler.reducer_override = _refuse_script
    return popen(child)


def _without_script(prepare: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the preparation data of a child without the script that it would run."""
    return {key: value for key, value in prepare(name).items() if key not in _INSTRUCTIONS}


def _refuse_script(pickler: ForkingPickler, value: Any) -> Any:
    """Pickle as usual, but refuse a function or class of the script, which the child would look up by its name.

    The sender must raise: a pool's worker that can't unpickle its task ends silently, and the pool waits forever.

    Raises:
        NestedProcessError: naming the function or class.
    """
    if isinstance(value, _BY_NAME) and getattr(value, "__module__", None) in _MAIN:
        method = _spawning()
        if method is not None:
            name = getattr(value, "__qualname__", repr(value))
            raise NestedProcessError(
                f"{name} is defined in the script (__main__), and can't be sent to a process that an env starts by "
                f"{method}: the script does not run a second time there. Start the process by "
                f'multiprocessing.get_context("fork"), or move {name} to a module that the script imports'
            )
    return NotImplemented


def _spawning() -> str | None:
    """Return the start method of the child that is being started, or of a live one; None if there is no such child.

    The receiver of a pickle is known only while a child is being started. Later it may be any live child.
    """
    popen = context.get_spawning_popen()
    if popen is not None:
        return str(getattr(popen, "method", "spawn"))
    children: Any = vars(process)["_children"]
    methods = [getattr(child, "_start_method", None) for child in list(children)]
    return next((method for method in methods if method in _SPAWNED), None)
