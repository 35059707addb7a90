"""The states of a worker's life, as a table. Nothing here does anything: `supervisor.py` acts, and says what happened.

NEW ──start──▶ STARTING ──ready──▶ READY
                  └──exit──▶ DEAD ◀──exit── READY, RESTARTING
                              └──restart──▶ RESTARTING ──ready──▶ READY
                  close, from everywhere ──▶ CLOSING ──exit──▶ CLOSED

One that is READY and owes replies is called BUSY, or DRAINING once nobody waits for them any more.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["LIVING", "NEXT", "Event", "WorkerState"]


class WorkerState(Enum):
    """Where a worker is in its life."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"  # ready, and owes replies
    DRAINING = "draining"  # ready, and owes replies that nobody waits for any more
    RESTARTING = "restarting"  # its process died, and a new one comes up
    DEAD = "dead"  # its process died
    CLOSING = "closing"
    CLOSED = "closed"


class Event(Enum):
    """What can happen to a worker."""

    START = "start"  # its process is being started
    READY = "ready"  # its service is up
    EXIT = "exit"  # its process has ended, and all that it wrote has been read
    RESTART = "restart"  # a new process is being started
    CLOSE = "close"  # it is told to end


def _table() -> dict[WorkerState, dict[Event, WorkerState]]:
    S, E = WorkerState, Event
    ends = {E.EXIT: S.DEAD, E.CLOSE: S.CLOSING}
    return {
        S.NEW: {E.START: S.STARTING, E.CLOSE: S.CLOSED, E.EXIT: S.DEAD},
        S.STARTING: {E.READY: S.READY, **ends},
        S.READY: {**ends},
        S.RESTARTING: {E.READY: S.READY, **ends},
        S.DEAD: {E.RESTART: S.RESTARTING, E.CLOSE: S.CLOSED, E.EXIT: S.DEAD},
        S.CLOSING: {E.CLOSE: S.CLOSING, E.EXIT: S.CLOSED},
        S.CLOSED: {E.CLOSE: S.CLOSED, E.EXIT: S.CLOSED},
    }


# What comes next; what is not in it can't happen.
NEXT = _table()
# States in which a request may be sent.
LIVING = frozenset({WorkerState.READY, WorkerState.BUSY, WorkerState.DRAINING})
