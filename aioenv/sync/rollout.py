"""Rollouts and numbered episodes of blocking code: the envs run on the loop, the policy on the caller's thread."""

from __future__ import annotations

import inspect
import queue
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Literal

from aioenv.rollout.numbered_episodes import Episode
from aioenv.rollout.recorder import Rollout
from aioenv.rollout.rollout import Policy, has_parameter
from aioenv.sync.blocking import BlockingVectorEnv
from aioenv.sync.portal import SIGNAL_CHECK_S, Portal
from aioenv.vector_env import AsyncVectorEnv

__all__ = ["PolicyRelay", "blocking_episodes", "blocking_rollout"]


class PolicyRequest:
    """Arguments of one policy call, and the future on the loop that waits for its result."""

    def __init__(self, future: Any, obs: Any, kwargs: dict[str, Any]) -> None:
        self.future = future
        self.obs = obs
        self.kwargs = kwargs

    def resolve(self, value: Any) -> None:
        """Give the result to the waiting coroutine, on the loop; does nothing if it was cancelled."""
        if not self.future.done():
            self.future.set_result(value)


class PolicyRelay:
    """Call a policy on the caller's thread for a coroutine that runs on the loop thread.

    Args:
        portal: the portal of the loop.
        envs: the vector env.
        policy: a plain function.
        name: the user's call, for errors.
    """

    def __init__(self, portal: Portal, envs: AsyncVectorEnv, policy: Policy, name: str) -> None:
        self._portal = portal
        self._envs = envs
        self._policy = policy
        self._name = name
        self._wanted = [n for n in ("slots", "episodes", "started") if callable(policy) and has_parameter(policy, n)]
        self._requests: queue.SimpleQueue[PolicyRequest | None] = queue.SimpleQueue()

    async def ask(self, obs: Any, slots: Any = None, episodes: Any = None, started: Any = None) -> Any:
        """Call the policy from the loop: the policy that the vector env gets."""
        future = self._envs._loop.create_future()  # type: ignore[union-attr]
        given = {"slots": slots, "episodes": episodes, "started": started}
        self._requests.put(PolicyRequest(future, obs, {name: given[name] for name in self._wanted}))
        return await future

    def run(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine function on the loop thread to its end, and the policy on this thread meanwhile.

        If the policy raises, or the wait is interrupted (Ctrl-C), the coroutine is cancelled, and its end is waited
        for.

        Raises:
            TypeError: if the policy is a coroutine function.
        """

        async def run() -> Any:
            try:
                return await function()
            finally:
                self._requests.put(None)

        call = self._portal.prepare(run)  # posted inside `try`, so that an interrupt can't leave it running
        try:
            call.post()
            call.wait_started()
            while not call.failed and (request := self._next_request()) is not None:
                value = self._policy(request.obs, **request.kwargs)
                if inspect.isawaitable(value):
                    if inspect.iscoroutine(value):
                        value.close()  # or Python warns that it was never awaited
                    raise TypeError(
                        f"{self._name}: policy: expected a plain function; a coroutine function takes the async API"
                    )
                self._portal.post(request.resolve, value)
            call.wait()
        except BaseException:
            call.cancel()
            self._requests = queue.SimpleQueue()
            raise
        return call.result()

    def _next_request(self) -> PolicyRequest | None:
        """Wait for the next call of the policy; None at the end."""
        while True:
            try:
                return self._requests.get(timeout=SIGNAL_CHECK_S)
            except queue.Empty:  # gives Python a chance to handle a signal that arrived just before the wait
                continue


def blocking_rollout(
    portal: Portal, envs: AsyncVectorEnv, policy: Policy, steps: int, groups: int, split: Literal["slots", "workers"]
) -> Rollout:
    """Run `envs.rollout` on the loop thread, and the policy on this one, so that its caller's `no_grad` holds."""
    relay = PolicyRelay(portal, envs, policy, "rollout")
    chosen = relay.ask if callable(policy) else policy
    result: Rollout = relay.run(lambda: envs.rollout(chosen, steps, groups, split=split))
    return result


def blocking_episodes(
    owner: BlockingVectorEnv, policy: Policy, n: int, seed: int | Sequence[int | None] | None
) -> Generator[Episode, None, None]:
    """Iterate over `episodes` of a blocking vector env, whose steps run on the loop thread.

    The generator keeps a reference to the owner: without another one, the owner would be closed as a dropped object.
    """
    portal, envs = owner._portal, owner._envs
    relay = PolicyRelay(portal, envs, policy, "episodes")
    running = portal.run(lambda: envs.episodes(relay.ask if callable(policy) else policy, n, seed=seed))

    async def next_episode() -> Episode | None:
        return await anext(running, None)

    def iterate() -> Generator[Episode, None, None]:
        try:
            while (episode := relay.run(next_episode)) is not None:
                yield episode
        finally:
            if not envs.closed:
                owner._portal.call(running.aclose)  # (the reference to the owner)

    return iterate()
