"""Files that are replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

__all__ = ["is_device", "replacing"]


def is_device(path: Path) -> bool:
    """Whether this is there, and nothing that could be replaced: `/dev/null`, `/dev/stdout`, a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` at the end of the block: whoever reads it meanwhile finds the old one.

    A link stays one, to what is new; a device is written to as it is.

    Raises:
        OSError: if it can't be written; what was there is there, then.
    """
    if is_device(path):
        # without waiting for somebody who reads, should it be a pipe
        fd = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
        os.set_blocking(fd, True)
        with open(fd, "w", encoding="utf-8") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_native_id()}")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            yield file
        os.replace(draft, target)
    except BaseException as exc:
        if isinstance(exc, OSError) and str(exc.filename) == str(draft):  # nobody asked for a draft
            exc.filename = os.fspath(path)
            if exc.filename2 is not None:
                del exc.filename2
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
