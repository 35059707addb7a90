"""The contract as a table: what each fault, at each moment, comes to for the awaiter.

Left out are cells in which a fault can't strike (`faulty_env.makes_sense`): a wrong observation takes a moment that
returns one, a huge info one that returns infos or a result.
"""

from __future__ import annotations

import itertools
from enum import Enum
from typing import NamedTuple

from aioenv.process.launch import START_METHODS
from aioenv.testing import FAULTS, MOMENTS
from aioenv.testing.faulty_env import makes_sense


class Outcome(Enum):
    """How a cell ends. NO_ERROR, SLOT and WORKER leave an env that can be used."""

    NO_ERROR = "no error; every slot's result is right"
    START = "WorkerStartError names the slot, and nothing is left"
    SLOT = "EnvError of that slot alone; the results of all others are intact, and a reset mends it"
    WORKER = "WorkerDied names the slot; the results of other workers' slots are intact, and these go on"
    TIMEOUT = "StepTimeout within timeout_s; other workers' results are to be had; close() ends it"


NO_ERROR, START, SLOT, WORKER, TIMEOUT = Outcome


class Row(NamedTuple):
    """What becomes of one fault.

    Attributes:
        start: at "import" and "factory".
        running: at "reset", "step", "render" and "call". (At "close" it is always NO_ERROR, in bounded time.)
        says: what the error's message has in it.
        cause: the type of the error's cause; None if the exception can't travel, or there is none.
    """

    start: Outcome
    running: Outcome
    says: str = ""
    cause: str | None = None


TABLE: dict[str, Row] = {
    "raises": Row(START, SLOT, "ValueError: the fault has struck", "ValueError"),
    "raises_two_args": Row(START, SLOT, "TwoArgumentError: the fault has struck (7)", "TwoArgumentError"),
    "raises_local": Row(START, SLOT, "LocalError: the fault has struck", "LocalError"),
    "raises_unpicklable": Row(START, SLOT, "RuntimeError: ('the fault has struck'", "RuntimeError"),
    "out_of_memory": Row(START, SLOT, "MemoryError", "MemoryError"),
    "wrong_shape": Row(START, SLOT, "expected shape (3,), got (4,)", "ValueError"),
    "wrong_dtype": Row(START, SLOT, "expected dtype float32, got complex128", "TypeError"),
    "sys_exit": Row(START, WORKER, "exited with code 7"),
    "os_exit": Row(START, WORKER, "exited with code 7"),
    "segfault": Row(START, WORKER, "was killed by SIGSEGV"),
    "sigkill": Row(START, WORKER, "was killed by SIGKILL"),
    "closes_fds": Row(START, WORKER, "exited with code 1"),  # its reply has nowhere to go
    "hangs": Row(START, TIMEOUT, "timeout_s="),
    "hangs_in_c": Row(START, TIMEOUT, "timeout_s="),
    "ignores_sigterm": Row(START, TIMEOUT, "timeout_s="),
    "slow": Row(NO_ERROR, NO_ERROR),
    "prints": Row(NO_ERROR, NO_ERROR),
    "floods_stderr": Row(NO_ERROR, NO_ERROR),
    "forks": Row(NO_ERROR, NO_ERROR),
    "nan": Row(NO_ERROR, NO_ERROR),
    "huge_info": Row(NO_ERROR, NO_ERROR),
}


class Cell(NamedTuple):
    """One run: a fault at a moment, and a point of every axis."""

    fault: str
    when: str
    start: str
    loop: str
    door: str

    @property
    def outcome(self) -> Outcome:
        """How it has to end."""
        row = TABLE[self.fault]
        if self.when == "close":
            return NO_ERROR
        return row.start if self.when in ("import", "factory") else row.running

    def __str__(self) -> str:
        return "-".join(self)


PAIRS = [(fault, when) for fault in FAULTS for when in MOMENTS if makes_sense(fault, when)]
AXES = {"start": START_METHODS, "loop": ("asyncio", "uvloop"), "door": ("async", "sync")}
_POINTS = list(itertools.product(*AXES.values()))

ALL = [Cell(*pair, *point) for pair in PAIRS for point in _POINTS]

# Every pair at one point. These go round so that each fault, and each moment, meets every value of every axis; a
# spawned worker, which takes longest, comes as every third.
_ROUND = [_POINTS[place % len(_POINTS)] for place in (3, 7, 0, 5, 2, 6, 1, 4, 7, 6, 5, 4)]
SAMPLE = [Cell(*pair, *_ROUND[number % len(_ROUND)]) for number, pair in enumerate(PAIRS)]

# with spare envs, whose faults are those of both envs of a slot; each env has a worker of its own
SPARES = [Cell(*cell[:4], "spares") for cell in SAMPLE]
