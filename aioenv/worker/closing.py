"""Closing envs, whatever they raise: nobody waits for them any more, but what could not be saved is to be known."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from aioenv.worker import current_row

__all__ = ["close_envs"]


def close_envs(envs: Iterable[Any], what: str) -> None:
    """Close envs. An exception of one is a warning in the log "aioenv.workers", and does not keep the others open.

    Args:
        envs: row by row; they have a `close`.
        what: each is, for the log.
    """
    said = set()
    for row, env in enumerate(envs):
        with current_row.row(row):
            try:
                env.close()
            except Exception as exc:
                if (text := repr(exc)) in said:  # of many envs that have one bug the first
                    continue
                said.add(text)
                # in a process of its own the root's records come out as that log's
                log = logging.getLogger(None if current_row.alone() else "aioenv.workers")
                log.warning("%s raised when it was closed", what, exc_info=True)
            except BaseException:  # it ends its program, as some do there: that is just what happens
                pass
