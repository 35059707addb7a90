"""The timeline of a vector env: whom it is collected from, and from when to when."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from aioenv.core.waits import Clock
from aioenv.tracing.timeline import Trace, Traced

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.session import Session
    from aioenv.process.supervisor import Worker

__all__ = ["Traces"]


class Traces(Traced):
    """The part of a vector env that collects a timeline."""

    _clock: Clock
    _session: Session | None

    if TYPE_CHECKING:

        @property
        def _running(self) -> RequestScheduler: ...

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Collect a timeline, from now until the end of a `with` block over it, its `stop()`, or `close`::

            with envs.trace("run.json"):
                ...

        It shows, for each worker and render worker, when it stepped, reset, drew and waited, and what the loop did:
        waiting for envs or images, sending, handling replies, and in between the policy. Spans have the number of the
        step that they are of: step n leads to state n, of which the images n are. Open it at https://ui.perfetto.dev,
        or draw it with `aioenv trace run.json --png out.png`. It is written when it ends, also after an error;
        after a million spans it ends by itself.

        With the variable `AIOENV_TRACE=run.json` every vector env and render pool of the process is traced from its
        start to its close, the second one to run-2.json, and so on.

        Args:
            path: of the JSON file; one that is there is overwritten.

        Raises:
            RuntimeError: if a timeline is being collected already, or the vector env is not started.
            ClosedError: if it is closed.
            OSError: if the file can't be written.
        """
        return self._trace_all(self._running, path)

    def _trace_all(self, schedule: RequestScheduler, path: str | os.PathLike[str]) -> Trace:
        """Trace whoever takes part: the schedule, its workers, and those that draw."""
        assert self._session is not None
        workers: list[Worker] = [member.worker for member in self._session.worker_pool.members]
        drawing: list[Worker] = list(getattr(self._session, "render_workers", ()))
        names = [f"worker {w.index}: {_slots(w.slots)}" for w in workers]
        names += [f"render worker {w.index}" for w in drawing]
        dispatch: Any = getattr(schedule, "dispatch", None)  # a vector env in this process has none

        def attach(trace: Trace | None) -> None:
            self._clock.trace(trace)
            if dispatch is not None:
                dispatch.trace = trace
            if schedule.images is not None:
                schedule.images.trace = trace
            for index, worker in enumerate((*workers, *drawing)):
                worker.trace(trace.tracks[index] if trace is not None else None)

        return self._begin_trace(path, names, attach)


def _slots(slots: tuple[int, ...]) -> str:
    return f"slot {slots[0]}" if len(slots) == 1 else f"slots {slots[0]}-{slots[-1]}"
