"""Load MuJoCo models in this process, and turn MuJoCo's warnings into log records."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import mujoco

from aioenv.ipc.messages import is_new_warning

__all__ = ["Model", "flush_warnings", "load_model", "log_warnings"]

# A model, its spec, a path, or a string of XML.
Model: TypeAlias = "mujoco.MjModel | mujoco.MjSpec | str | os.PathLike[str]"

_LOG = logging.getLogger("aioenv.mujoco")


_pending_warnings: list[str] = []
_on_warning = (
    _pending_warnings.append
)  # called from C++, where no exception may be raised: `append` runs no Python code that a signal could interrupt
_lock = threading.RLock()  # reentrant: the garbage collector may run a finalizer at any moment
_num_users = 0
_logged: set[str] = set()


def log_warnings(owner: object) -> Callable[[], object]:
    """Log MuJoCo's warnings as long as an object lives, or until the returned function is called.

    MuJoCo would print them, and write them to MUJOCO_LOG.TXT in the working directory. `flush_warnings` logs those that
    have come. A handler that the program has set (`mujoco.set_mju_user_warning`), before or after, is kept.
    """
    _add_user()
    return weakref.finalize(owner, _remove_user)


def _add_user() -> None:
    global _num_users
    with _lock:
        if mujoco.get_mju_user_warning() is None:
            mujoco.set_mju_user_warning(_on_warning)
        _num_users += 1
        _logged.clear()  # each vector env logs its first ones as warnings


def _remove_user() -> None:
    global _num_users
    with _lock:
        _num_users -= 1
        if not _num_users and mujoco.get_mju_user_warning() is _on_warning:
            mujoco.set_mju_user_warning(None)


def flush_warnings() -> None:
    """Log the warnings that have come; of those that differ only in numbers, the first as a warning, others as info."""
    while _pending_warnings:
        with contextlib.suppress(IndexError):  # another thread took it
            text = _pending_warnings.pop(0)
            # a user that only runs a model can't change its deprecated syntax
            is_news = "deprecated" not in text and is_new_warning(text, _logged)
            _LOG.log(logging.WARNING if is_news else logging.INFO, "MuJoCo: %s", text)


@contextlib.contextmanager
def _warnings_logged() -> Iterator[None]:
    """Log MuJoCo's warnings within a block; see `log_warnings`."""
    _add_user()
    try:
        yield
    finally:
        _remove_user()
        flush_warnings()


@_warnings_logged()
def load_model(model: Model) -> mujoco.MjModel:
    """Return an `MjModel`: the given one, or that of an `MjSpec`, a path or XML.

    Raises:
        TypeError: if it is none of these.
        ValueError, FileNotFoundError: if MuJoCo can't make a model of it.
    """
    if isinstance(model, mujoco.MjModel):
        return model
    if isinstance(model, mujoco.MjSpec):
        return model.compile()
    if isinstance(model, str) and "<" in model:
        return mujoco.MjModel.from_xml_string(model)
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model: expected an MjModel, an MjSpec, a path or a string of XML, got {type(model).__name__}")
    path = Path(model).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"model: there is no file {str(path)!r}")
    load = mujoco.MjModel.from_binary_path if path.suffix == ".mjb" else mujoco.MjModel.from_xml_path
    return load(str(path))
