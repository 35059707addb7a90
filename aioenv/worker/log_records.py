"""What envs log, told to the parent with its level, unless they have handlers of their own for it."""

from __future__ import annotations

import logging
import os
from typing import Any

from aioenv.ipc.messages import LogLine, pack_log_line

__all__ = ["tell_records"]


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
