"""`aioenv.sync.RolloutCollector`: rollouts of collector processes for blocking code, by plain iteration."""

from __future__ import annotations

from typing import Any, Self

from gymnasium import Space

from aioenv.collector.collected import CollectedRollout, CollectorStats
from aioenv.collector.rollout_collector import RolloutCollector as AsyncRolloutCollector
from aioenv.core.session import CLOSE_GRACE_S
from aioenv.sync.blocking import BlockingResource, like_method

__all__ = ["RolloutCollector"]


class RolloutCollector(BlockingResource):
    """`aioenv.RolloutCollector` for blocking code: it runs on a loop thread of its own::

        with aioenv.sync.RolloutCollector("CartPole-v1", 64, policy=make_policy, num_collectors=8) as collector:
            for rollout in collector:
                collector.update(learn(rollout))

    The constructor starts the collectors. Rollouts arrive while the caller computes. A collector that the program drops
    is closed when it is collected, or at the end of the program.

    Arguments, attributes and errors are those of `aioenv.RolloutCollector`.

    Attributes:
        closed: whether `close` has been called.
    """

    @like_method(AsyncRolloutCollector.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._collector = collector = AsyncRolloutCollector(*args, **kwargs)
        self.num_envs: int = collector.num_envs
        self.num_collectors: int = collector.num_collectors
        self.steps: int = collector.steps
        self._interrupted: list[CollectedRollout] = []  # handed out to a caller that was interrupted just then
        self._start_on_thread(collector)

    @property
    def single_observation_space(self) -> Space[Any]:
        """The observation space of one slot."""
        return self._collector.single_observation_space

    @property
    def single_action_space(self) -> Space[Any]:
        """The action space of one slot."""
        return self._collector.single_action_space

    @property
    def version(self) -> int:
        """How often `update` was called."""
        return self._collector.version

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids of the collectors."""
        return self._collector.pids

    def stats(self) -> CollectorStats:
        """Return the waits and counts (see `aioenv.RolloutCollector.stats`)."""
        return self._collector.stats()

    def update(self, weights: Any = None) -> int:
        """Hand weights to all collectors (see `aioenv.RolloutCollector.update`)."""
        return self._portal.call(self._collector.update, weights)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> CollectedRollout:
        """Wait for the next rollout; if the wait is interrupted (Ctrl-C), none is lost."""
        if self._interrupted:
            return self._interrupted.pop()
        call = self._portal.prepare(self._collector._next_rollout)
        try:
            call.post()
            call.wait()
        except BaseException:
            call.cancel()
            if not (call.cancelled or call.failed) and (rollout := call.result()) is not None:
                self._interrupted.append(rollout)
            raise
        rollout = call.result()
        if rollout is None:
            raise StopIteration
        return rollout  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<aioenv.sync.RolloutCollector{repr(self._collector).removeprefix('<RolloutCollector')}"

    def close(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """End the collectors and the loop thread. Idempotent (see `aioenv.RolloutCollector.close`)."""
        if not self.closed:
            self._end(grace_s=grace_s)
            self.closed = True  # only now: a caller that was interrupted or refused may close it again
