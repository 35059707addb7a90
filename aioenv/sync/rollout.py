"""Rollouts and numbered episodes for blocking code: envs step from the loop thread, the policy runs on the caller's."""

from __future__ import annotations

import inspect
import queue
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Literal

from aioenv.rollout.numbered_episodes import Episode
from aioenv.rollout.recorder import Rollout
from aioenv.rollout.rollout import Policy, takes
from aioenv.sync.facade import Facade
from aioenv.sync.portal import LOOK_S, Portal
from aioenv.vector_env import AsyncVectorEnv

__all__ = ["roll_out", "run_episodes"]


class _Question:
    """What the policy is asked, and the future on the loop that waits for its answer."""

    def __init__(self, future: Any, obs: Any, given: dict[str, Any]) -> None:
        self.future = future
        self.obs = obs
        self.given = given

    def answer(self, value: Any) -> None:
        """On the loop: the policy has answered, unless nobody waits any more."""
        if not self.future.done():
            self.future.set_result(value)


class Asked:
    """A policy that is asked on the loop thread, and answers on the caller's.

    Args:
        portal: to the loop thread.
        envs: what asks.
        policy: a plain function.
        name: the call that it was given to, for errors.
    """

    def __init__(self, portal: Portal, envs: AsyncVectorEnv, policy: Policy, name: str) -> None:
        self._portal = portal
        self._envs = envs
        self._policy = policy
        self._name = name
        self._wanted = [n for n in ("slots", "episodes", "started") if callable(policy) and takes(policy, n)]
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()

    async def ask(self, obs: Any, slots: Any = None, episodes: Any = None, started: Any = None) -> Any:
        """On the loop: the policy, for whoever asks it."""
        future = self._envs._loop.create_future()  # type: ignore[union-attr]
        given = {"slots": slots, "episodes": episodes, "started": started}
        self._questions.put(_Question(future, obs, {name: given[name] for name in self._wanted}))
        return await future

    def run(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine function on the loop thread to its end, and answer on this one meanwhile.

        If the policy raises, or the wait is interrupted (Ctrl-C), it is cancelled, and its end waited for.

        Raises:
            TypeError: if the policy is a coroutine function.
        """

        async def run() -> Any:
            try:
                return await function()
            finally:
                self._questions.put(None)

        call = self._portal.prepare(run)  # posted below, or an interrupt between the two would leave it to nobody
        try:
            call.post()
            call.wait_begun()
            while not call.failed and (question := _next(self._questions)) is not None:
                value = self._policy(question.obs, **question.given)
                if inspect.isawaitable(value):
                    _forget(value)
                    raise TypeError(
                        f"{self._name}: policy: expected a plain function; a coroutine function takes the async API"
                    )
                self._portal.post(question.answer, value)
            call.wait()
        except BaseException:
            call.cancel()
            self._questions = queue.SimpleQueue()
            raise
        return call.result()


def roll_out(
    portal: Portal, envs: AsyncVectorEnv, policy: Policy, steps: int, groups: int, split: Literal["slots", "workers"]
) -> Rollout:
    """Run `envs.rollout` on the loop thread, and the policy on this one, where its caller's `no_grad` holds."""
    asked = Asked(portal, envs, policy, "rollout")
    chosen = asked.ask if callable(policy) else policy
    result: Rollout = asked.run(lambda: envs.rollout(chosen, steps, groups, split=split))
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


def run_episodes(
    owner: Facade, policy: Policy, n: int, seed: int | Sequence[int | None] | None
) -> Generator[Episode, None, None]:
    """Iterate over `episodes` of a blocking vector env, whose steps run on the loop thread.

    The generator keeps the owner, which may have no other name: it would be closed as a forgotten one.
    """
    portal, envs = owner._portal, owner._envs
    asked = Asked(portal, envs, policy, "episodes")
    running = portal.run_soon(lambda: envs.episodes(asked.ask if callable(policy) else policy, n, seed=seed))

    async def following() -> Episode | None:
        return await anext(running, None)

    def iterate() -> Generator[Episode, None, None]:
        try:
            while (episode := asked.run(following)) is not None:
                yield episode
        finally:
            if not envs.closed:
                owner._portal.call(running.aclose)  # here it is kept

    return iterate()
