"""One contender, one round: what a process of its own runs (see `rounds.py`).

Its name is one of `CONTENDERS`, or one of `FIGURES` and, after a colon, of its contenders; its task is a JSON object of
`Task`'s fields. The last line on stdout is `MARK` and the result as JSON, or `{"raised": …}`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from aioenv.cli.bench.common import NotApplicable
from aioenv.cli.bench.contenders import CONTENDERS
from aioenv.cli.bench.figures import FIGURES
from aioenv.cli.bench.loop_time import loop_time
from aioenv.cli.bench.tasks import Task

__all__ = ["LOOP_TIME", "MARK", "main"]

MARK = "aioenv-bench-result:"
MAX_LETTERS = 400  # of an error, which stands in a table
LOOP_TIME = "loop-time"  # not a contender, but measured as one


def main(name: str, task_json: str) -> None:
    """Measure, and print the result, or what was raised instead."""
    task = Task(**json.loads(task_json))
    try:
        figure, _, contender = name.partition(": ")
        if name == LOOP_TIME:
            result = dataclasses.asdict(loop_time(task))
        elif contender:
            result = FIGURES[figure].measures[contender](task)
        else:
            result = dataclasses.asdict(CONTENDERS[name].measure(task))
    except NotApplicable as exc:
        result = {"not_applicable": str(exc)}
    except (Exception, SystemExit) as exc:
        _print({"raised": _told(exc)})
        raise
    _print(result)


def _print(result: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(result)}", flush=True)


def _told(exc: BaseException) -> str:
    """What was raised, on one line: of a group the first, without the traceback that a worker has sent."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    message = " ".join(str(exc).partition("Traceback (most recent call last)")[0].split())
    if len(message) > MAX_LETTERS:
        message = f"{message[:MAX_LETTERS]}…"
    return f"{type(exc).__name__}: {message}" if message else type(exc).__name__
