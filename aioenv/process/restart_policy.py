"""The policy by which workers that died are restarted, and the remaining budget of a worker.

No asyncio is imported here: a factory may mention a policy, and then its worker imports this file.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

__all__ = ["RestartBudget", "RestartPolicy"]

_MAX_DELAY_S = 30.0


@dataclass(frozen=True)
class RestartPolicy:
    """Start a worker again whose process died, with the same factories.

    Without `resume`, its slots' episodes are over: the next result of each is `truncated=True` with reward 0,
    `info["restarted"]` and the last observation that is known. The next episode is seeded from the slot's last seed and
    the number of restarts of its worker. So a run with the same faults is the same.

    Attributes:
        max_restarts: the number of restarts in `within_s` seconds after which the next death is final (`WorkerDied`).
            Each worker has its own budget.
        within_s: in seconds.
        backoff_s: the first restart in `within_s` comes at once, the second after this many seconds, the third after
            twice as many, and so on.
        resume: whether slots continue where they were instead, as if nothing had happened. Only for envs that can: see
            the how-to page "How do I restart workers that die?".

    Raises:
        ValueError: if a number is out of range, or an argument has another type.
    """

    max_restarts: int = 3
    within_s: float = 60.0
    backoff_s: float = 0.1
    resume: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 1:
            raise ValueError(f"max_restarts: expected a positive int, got {self.max_restarts!r}")
        for name in ("within_s", "backoff_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"{name}: expected a number of seconds, got {value!r}")
        if not isinstance(self.resume, bool):
            raise ValueError(f"resume: expected True or False, got {self.resume!r}")
        if not self.within_s > 0:
            raise ValueError(f"within_s: expected a positive number of seconds, got {self.within_s!r}")
        if not self.backoff_s >= 0:
            raise ValueError(f"backoff_s: expected seconds, 0 or more, got {self.backoff_s!r}")


class RestartBudget:
    """The restarts that one worker has left.

    Args:
        policy: how many, and how fast.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._times: deque[float] = deque()

    def next_delay(self) -> float | None:
        """Use up one restart; return the delay before it, in seconds, or None if there is none left."""
        now, times, policy = self._clock(), self._times, self._policy
        while times and now - times[0] > policy.within_s:
            times.popleft()
        if len(times) >= policy.max_restarts:
            return None
        times.append(now)
        if len(times) == 1:
            return 0.0
        return min(policy.backoff_s * 2.0 ** (len(times) - 2), _MAX_DELAY_S)
