"""What MuJoCo says about models that this process loads: log records, as what it says in workers is."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import mujoco

__all__ = ["warnings_logged"]

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
