"""`BackendChoice`: in this process or over workers, for backend="auto" where `make.py` finds no native version.

One env of the same id is stepped for a moment, in a worker that ends afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from aioenv.core.waits import Stats
from aioenv.core.worker_pool import one_env_worker
from aioenv.errors import WorkerStartError
from aioenv.platform import usable_cpus
from aioenv.worker.description import measure_step

__all__ = ["BackendChoice", "cheap_run"]

_log = logging.getLogger("aioenv")

# How many times a worker is called to find out what an exchange with it costs.
_CALLS = 20
# The cost of a step's exchange with all workers, in round trips of such calls.
_ROUND_TRIPS = 0.5
# Steps over workers that take less than this would be faster in this process, in seconds: most of that time is the
# exchange. And the number of steps that a run must have for advice.
_CHEAP_STEP_S = 60e-6
_MANY_STEPS = 1000


class _Costs(NamedTuple):
    """The measured costs, in seconds.

    Attributes:
        step_s: of one step of one env, resets included.
        exchange_s: of one step's exchange with workers.
    """

    step_s: float
    exchange_s: float


_known: dict[Hashable, _Costs | None] = {}  # by what is made; None: it can't be measured


class BackendChoice:
    """Chooses between this process and workers.

    Args:
        what: the env, for the log.
        key: equal for equal envs, which are measured once a process.
        factories: a factory for each slot; the first is called in a worker.
        autoreset_options: see `AsyncVectorEnv`.
    """

    def __init__(
        self, what: str, key: Hashable, factories: Sequence[Callable[[], Any]], autoreset_options: Any = None
    ) -> None:
        self.factories = factories
        self.autoreset_options = autoreset_options
        self._what = what
        self._key = key

    async def prefers_this_process(self, start_timeout_s: float) -> bool:
        """Measure, unless that was done before; return whether all slots step faster in this process.

        If the env can't be made, or stepped with random actions, the answer is no. If this is cancelled, the worker is
        killed.

        Args:
            start_timeout_s: the limit for making and measuring one env, in seconds.
        """
        n, why = len(self.factories), "an earlier attempt has failed"
        if self._key not in _known:
            try:
                _known[self._key] = await _measure(self.factories[0], start_timeout_s)
            except WorkerStartError as exc:
                _known[self._key], why = None, str(exc).partition("\n")[0]
        costs = _known[self._key]
        if costs is None:
            _log.info('backend="auto": %d x %s step over workers: no step was measured: %s', n, self._what, why)
            return False
        workers = min(n, usable_cpus())
        saved_s = n * costs.step_s * (1 - 1 / workers)  # what workers save, since they step side by side
        here = saved_s < costs.exchange_s
        _log.info(
            'backend="auto": %d x %s step %s: a step of one env takes %.0f us, so %d workers save %.0f us a step, and '
            "cost %.0f us for the exchange",
            n,
            self._what,
            "in this process" if here else "over workers",
            costs.step_s * 1e6,
            workers,
            saved_s * 1e6,
            costs.exchange_s * 1e6,
        )
        return here


def cheap_run(stats: Stats) -> str:
    """Return advice if a run over workers would have been faster in this process; else ""."""
    steps = stats.steps
    if steps < _MANY_STEPS or stats.env_s / steps > _CHEAP_STEP_S:
        return ""
    return (
        f"a step of all {stats.num_envs} envs took {stats.env_s / steps * 1e6:.0f} us, most of it for the exchange "
        'with the workers; num_workers=0 (the envs live in this process) is faster, or backend="auto" in make_vec'
    )


async def _measure(factory: Callable[[], Any], start_timeout_s: float) -> _Costs:
    async with one_env_worker(factory, measure_step, start_timeout_s=start_timeout_s) as worker:
        times = []
        for _ in range(_CALLS):
            start_s = perf_counter()
            await worker.call("ping")
            times.append(perf_counter() - start_s)
    return _Costs(worker.description, _ROUND_TRIPS * min(times))
