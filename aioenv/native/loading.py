"""Models that this process loads; what MuJoCo says about them becomes log records, as what it says in workers does."""

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

__all__ = ["Model", "log_warnings", "take_model", "tell_warnings"]

# What describes a model: itself, what it is compiled from, or a path or a string of XML.
Model: TypeAlias = "mujoco.MjModel | mujoco.MjSpec | str | os.PathLike[str]"

_LOG = logging.getLogger("aioenv.mujoco")


_heard: list[str] = []
_hear = _heard.append  # MuJoCo calls it from C++, where nothing may be raised: no Python code can be interrupted in it
_lock = threading.RLock()  # objects may be collected at any moment
_users = 0
_said: set[str] = set()


def log_warnings(owner: object) -> Callable[[], object]:
    """Log MuJoCo's warnings for as long as an object lives, or until the function is called that this returns.

    MuJoCo would print them, and write them to MUJOCO_LOG.TXT in the working directory. `tell_warnings` makes records of
    those that have come. A handler that the program has set (`mujoco.set_mju_user_warning`), before or after, is kept.
    """
    _begin()
    return weakref.finalize(owner, _let_go)


def _begin() -> None:
    global _users
    with _lock:
        if mujoco.get_mju_user_warning() is None:
            mujoco.set_mju_user_warning(_hear)
        _users += 1
        _said.clear()  # each vector env shows its first ones


def _let_go() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users and mujoco.get_mju_user_warning() is _hear:
            mujoco.set_mju_user_warning(None)


def tell_warnings() -> None:
    """Log the warnings that have come: of those that differ in numbers alone the first as a warning."""
    while _heard:
        with contextlib.suppress(IndexError):  # another thread was faster
            text = _heard.pop(0)
            # that a model is written in an old way is no news to who runs it
            news = "deprecated" not in text and is_new_warning(text, _said)
            _LOG.log(logging.WARNING if news else logging.INFO, "MuJoCo: %s", text)


@contextlib.contextmanager
def _warnings_logged() -> Iterator[None]:
    """Log MuJoCo's warnings meanwhile; see `log_warnings`."""
    _begin()
    try:
        yield
    finally:
        _let_go()
        tell_warnings()


@_warnings_logged()
def take_model(model: Model) -> mujoco.MjModel:
    """An `MjModel`: the given one, or what an `MjSpec`, a path or XML says.

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
