"""A rollout for blocking code: the envs are stepped from the loop thread, the policy runs on the caller's."""

from __future__ import annotations

import inspect
import queue
from typing import Any

from aioenv.engine.record import Rollout
from aioenv.engine.rollout import Policy
from aioenv.sync.portal import LOOK_S, Portal
from aioenv.vector_env import AsyncVectorEnv

__all__ = ["roll_out"]


class _Question:
    """What the policy is asked, and the future on the loop that waits for its answer."""

    def __init__(self, future: Any, obs: Any, slots: Any) -> None:
        self.future = future
        self.obs = obs
        self.slots = slots

    def answer(self, value: Any) -> None:
        """On the loop: the policy has answered, unless nobody waits any more."""
        if not self.future.done():
            self.future.set_result(value)


def roll_out(
    portal: Portal, envs: AsyncVectorEnv, policy: Policy, steps: int, groups: int, wants_slots: bool
) -> Rollout:
    """Run `envs.rollout` on the loop thread, and the policy on this one, where its caller's `no_grad` holds.

    If the policy raises, or the wait is interrupted (Ctrl-C), the rollout is cancelled, and its end waited for.
    """
    questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()

    async def ask(obs: Any, slots: Any) -> Any:
        future = envs._loop.create_future()  # type: ignore[union-attr]
        questions.put(_Question(future, obs, slots))
        return await future

    async def run() -> Rollout:
        try:
            return await envs.rollout(ask if callable(policy) else policy, steps, groups)
        finally:
            questions.put(None)

    call = portal.begin(run)
    try:
        while (question := _next(questions)) is not None:
            value = policy(question.obs, slots=question.slots) if wants_slots else policy(question.obs)
            if inspect.isawaitable(value):
                _forget(value)
                raise TypeError("rollout: policy: expected a plain function; a coroutine function takes the async API")
            portal.post(question.answer, value)
        call.wait()
    except BaseException:
        call.cancel()
        raise
    result: Rollout = call.result()
    return result


def _next(questions: queue.SimpleQueue[_Question | None]) -> _Question | None:
    while True:
        try:
            return questions.get(timeout=LOOK_S)
        except queue.Empty:  # a signal that came just before the wait has now been seen
            continue


def _forget(value: Any) -> None:
    """Close a coroutine, so that nobody complains that it was never awaited."""
    if inspect.iscoroutine(value):
        value.close()
