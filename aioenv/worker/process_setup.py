"""What envs log, told to the parent with its level, unless they have handlers of their own for it."""

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
from aioenv.ipc.messages import WHERE, LogLine, Start, pack_log_line
from aioenv.worker.mujoco_gl import choose_backend_late

__all__ = ["adopt_parent_environment", "enable_fault_handler", "keep_script_from_children", "tell_records"]


class _Teller(logging.Handler):
    """Writes records to the descriptor of what the worker prints: an env may have closed `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Tell of a record; what is wrong with it is told as usual."""
        try:
            os.write(2, pack_log_line(LogLine(record.levelno, record.name, self.format(record))))
        except Exception:
            self.handleError(record)


def tell_records(level: int) -> None:
    """From now on, tell the parent of records that nobody here handles, from this level on.

    This takes the place of what logging does with such records, and adds no handler: `logging.basicConfig(…)` in an env
    works as ever. (Without arguments, as `logging.error` and its like call it, it would have them printed.)

    Args:
        level: below it the parent would drop them.
    """
    root = logging.getLogger()
    if root.level != level:  # it takes a page of memory for each logger that there is
        root.setLevel(level)
    if isinstance(logging.lastResort, _Teller):  # by the fork server that this was forked by
        return
    configure = logging.basicConfig

    def configure_if_asked(**kwargs: Any) -> None:
        if kwargs:
            configure(**kwargs)

    logging.basicConfig = configure_if_asked
    logging.lastResort = _Teller()


# ------------------------------------------------------------ child processes of envs


_MAIN = ("__main__", "__mp_main__")
_SPAWNED = ("spawn", "forkserver")
_INSTRUCTIONS = ("init_main_from_name", "init_main_from_path")
# What is pickled by name, and so must be found in the child.
_BY_NAME = (type, FunctionType, type(functools.lru_cache(int)))

_installed = False


def keep_script_from_children() -> None:
    """Let multiprocessing start children of this process without the script, from now on.

    `fork` is left alone: such a child has all that this process has. Nothing is imported before a child is started.
    """
    for name in ("SpawnProcess", "ForkServerProcess"):  # a platform may lack the second one
        kind = getattr(context, name, None)
        if kind is not None:
            kind._Popen = staticmethod(functools.partial(_start, kind._Popen))


def _start(popen: Callable[[Any], Any], child: Any) -> Any:
    """Start a child; before the first one, change how multiprocessing prepares children and pickles for them."""
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
    """What multiprocessing tells a child, without the script that the child would run."""
    return {key: value for key, value in prepare(name).items() if key not in _INSTRUCTIONS}


def _refuse_script(pickler: ForkingPickler, value: Any) -> Any:
    """Pickle as usual, but raise for a function or class of the script that a child would look up by its name.

    The sender must raise: a worker of a pool that can't unpickle its task ends without a word, and the pool waits.

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
    """The start method of the child that is being started, or of one that lives; None if there is no such child.

    Whom a pickle is for is known only while a child is being started. Later it may be for any that lives.
    """
    popen = context.get_spawning_popen()
    if popen is not None:
        return str(getattr(popen, "method", "spawn"))
    children: Any = vars(process)["_children"]
    methods = [getattr(child, "_start_method", None) for child in list(children)]
    return next((method for method in methods if method in _SPAWNED), None)


def adopt_parent_environment(start: Start, before: Mapping[str, str]) -> None:
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


def enable_fault_handler() -> None:
    """Let a crash print where it happened, and the parent ask where this process is, even in C code with the GIL held.

    To the descriptor: an env may have closed `sys.stderr`. Other threads are left out of what is asked for, since they
    run on meanwhile.
    """
    faulthandler.enable(2)
    if WHERE is not None:
        faulthandler.register(WHERE, 2, all_threads=False)
