"""What multiprocessing does inside a worker: the processes that envs start don't run the user's script again.

A worker's `__main__` has what the user's script defines. Where the start method is spawn or forkserver, multiprocessing
tells each child to run the file of `__main__`, so that the child can unpickle what that file defines. In a child of
an env this would start the training once more.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from multiprocessing import context, process
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

from aioenv.errors import NestedProcessError

__all__ = ["keep_script_from_children"]

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
