"""Models that this process loads; what MuJoCo says about them becomes log records, as what it says in workers does."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import mujoco

__all__ = ["Model", "take_model", "warnings_logged"]

# What describes a model: itself, what it is compiled from, or a path or a string of XML.
Model: TypeAlias = "mujoco.MjModel | mujoco.MjSpec | str | os.PathLike[str]"

_LOG = logging.getLogger("aioenv.mujoco")


@contextlib.contextmanager
def warnings_logged() -> Iterator[None]:
    """Log MuJoCo's warnings meanwhile; it would print them, and write them to MUJOCO_LOG.TXT in the working directory.

    Whoever has a handler of his own (`mujoco.set_mju_user_warning`) keeps it.
    """
    if mujoco.get_mju_user_warning() is not None:
        yield
        return
    said: list[str] = []
    handler = said.append
    mujoco.set_mju_user_warning(handler)
    try:
        yield
    finally:
        if mujoco.get_mju_user_warning() is handler:
            mujoco.set_mju_user_warning(None)
        for text in said:  # not in the handler: MuJoCo calls that from C++, where nothing may be raised
            # that a model is written in an old way is no news to who runs it
            _LOG.log(logging.INFO if "deprecated" in text else logging.WARNING, "MuJoCo: %s", text)


@warnings_logged()
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
