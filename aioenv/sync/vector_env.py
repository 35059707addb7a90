"""`VectorEnv`: a `gymnasium.vector.VectorEnv` for blocking code, over an `AsyncVectorEnv` on its own thread.

In its rollouts and numbered episodes the envs run on the loop, the policy on the caller's thread.
"""

from __future__ import annotations

import inspect
import queue
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, overload

import gymnasium
import numpy as np
import numpy.typing as npt

from aioenv import make
from aioenv.core.results import Ready, ResetResult, SlotStep, StepResult
from aioenv.core.session import CLOSE_GRACE_S
from aioenv.display import describe
from aioenv.envs import ActorID
from aioenv.errors import ClosedError, NoAsyncCallError
from aioenv.native_vector_env import NativeVectorEnv
from aioenv.rendering.config import gives_arrays
from aioenv.rendering.images import side_by_side
from aioenv.rendering.step_images import ImageStream
from aioenv.rollout.numbered_episodes import Episode
from aioenv.rollout.recorder import Rollout
from aioenv.rollout.rollout import Policy, has_parameter
from aioenv.state.snapshot import EnvState
from aioenv.stats.episodes import EpisodeStats
from aioenv.sync.blocking import BlockingStep, BlockingVectorEnv, BlockingViewer, like_function, like_method
from aioenv.sync.portal import SIGNAL_CHECK_S, DeferredCall, Portal
from aioenv.vector_env import AsyncVectorEnv

__all__ = ["PolicyRelay", "VectorEnv", "blocking_episodes", "blocking_rollout", "make_vec"]


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


class VectorEnv(BlockingVectorEnv, gymnasium.vector.VectorEnv[Any, Any, Any]):  # named: skrl reads the names of bases
    """Many envs, stepped at once in worker processes, for code without `await`.

    It starts at once, and has the methods of `AsyncVectorEnv`, which block; Gymnasium's vector wrappers work on it. It
    may be used while an event loop runs on the caller's thread (Jupyter), which then waits. Close it, or use it as a
    context manager. One that the program drops is closed when it is collected, or at the end of the program.

    Arguments and attributes are those of `AsyncVectorEnv`.

    Raises:
        ValueError, TypeError: as `AsyncVectorEnv`.
        WorkerStartError, SpaceMismatchError, RenderError: as its start.
    """

    @like_method(AsyncVectorEnv.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._start(AsyncVectorEnv(*args, **kwargs))

    def _start(self, envs: AsyncVectorEnv) -> None:
        super()._start(envs)
        self.spec = envs.spec
        self._native = envs if isinstance(envs, NativeVectorEnv) and envs.runs != "workers" else None

    @classmethod
    def _over(cls, envs: AsyncVectorEnv) -> VectorEnv:
        self = cls.__new__(cls)
        self._start(envs)
        return self

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> ResetResult:
        """Begin an episode in every slot, or in those of `options["reset_mask"]` (see `AsyncVectorEnv.reset`)."""
        return self._portal.call(self._envs.reset, seed=seed, options=options, timeout_s=timeout_s)

    def step(self, actions: Any, *, timeout_s: float | None = None) -> StepResult:
        """Step every slot (see `AsyncVectorEnv.step`)."""
        if self._native is not None and timeout_s is None:
            done: list[StepResult] = []
            try:
                self._portal.run_while_idle(self._native._step_inline, actions, done)
            except BaseException:
                self._stepper.leave(done)
                raise
            if done:
                return done[0]
        return self._stepper.step(actions, timeout_s=timeout_s)

    def _begin_step(self, actions: Any) -> BlockingStep | DeferredCall:
        """Send a step whose result is waited for later; errors after the sending are raised then.

        Actions that don't fit raise now, and the caller may change the others when this returns. A native env in this
        process steps when it is waited for, on the waiting thread.
        """
        if self._native is None:
            return self._stepper.begin(actions)
        if self.closed:
            raise self._portal.closed_error()
        return DeferredCall(partial(self.step, self._native._checked_actions(actions)))

    @overload
    def render(self, mode: Literal["arrays"] | None = None) -> Any: ...
    @overload
    def render(self, mode: Literal["grid"]) -> npt.NDArray[np.uint8]: ...
    def render(self, mode: Literal["arrays", "grid"] | None = None) -> Any:
        """Return a tuple of one image a slot, of the states that were returned last (see `AsyncVectorEnv.render`).

        As Gymnasium's wrappers expect, they are colours alone, several cameras side by side. With "arrays" the result
        is that of the async API, with `depth` and `segmentation`; with "grid" it is one array.
        """
        images = self._portal.call(self._envs.render, mode)
        if mode is not None:
            return images
        config = self._envs._render_config
        if config is not None and gives_arrays(config):
            images = images[0]
        if config is not None and config.several and isinstance(images, np.ndarray):
            images = side_by_side(images)
        return tuple(images)

    def render_stream(self, buffer: int = 8) -> Iterator[tuple[int, Any]]:
        """Iterate over the images of all results from now on (see `AsyncVectorEnv.render_stream`).

        It waits for results, so use it on another thread than the one that steps.
        """
        stream = self._portal.run(lambda: self._envs.render_stream(buffer))
        return _ImageIterator(self._portal, stream)

    def rollout(
        self, policy: Policy, steps: int, groups: int = 2, *, split: Literal["slots", "workers"] = "slots"
    ) -> Rollout:
        """Collect `steps` steps of every slot (see `AsyncVectorEnv.rollout`).

        The policy, a plain function, runs on the caller's thread. If it raises, or Ctrl-C is pressed, the rollout is
        cancelled.
        """
        return blocking_rollout(self._portal, self._envs, policy, steps, groups, split)

    def episodes(
        self, policy: Policy, n: int, *, seed: int | Sequence[int | None] | None = None
    ) -> Generator[Episode, None, None]:
        """Run episodes 0 … n-1, each exactly once and to its end (see `AsyncVectorEnv.episodes`).

        The policy, a plain function, runs on the caller's thread, while the next episode is waited for.
        """
        return blocking_episodes(self, policy, n, seed)

    @property
    def episode_stats(self) -> EpisodeStats:
        """Returns, lengths, times and events of the episodes that have ended (see `AsyncVectorEnv.episode_stats`)."""
        return self._envs.episode_stats

    def send(self, actions: Any, slots: Iterable[int] | None = None) -> None:
        """Send actions to some slots, without waiting for results (see `AsyncVectorEnv.send`)."""
        self._stepper.send(actions, slots)

    def send_reset(
        self,
        slots: Iterable[int] | None = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin episodes in some slots, without waiting (see `AsyncVectorEnv.send_reset`)."""
        self._portal.run(lambda: self._envs.send_reset(slots, seed=seed, options=options))

    def recv(self, min_slots: int = 1, max_slots: int | None = None, *, deadline_s: float | None = None) -> Ready:
        """Take results as they arrive (see `AsyncVectorEnv.recv`)."""
        return self._stepper.recv(min_slots, max_slots, deadline_s)

    def ready(
        self, min_slots: int = 1, max_slots: int | None = None, *, deadline_s: float | None = None
    ) -> Iterator[Ready]:
        """Iterate over results as they arrive, until nothing is in flight (see `AsyncVectorEnv.ready`)."""
        while self.outstanding:
            try:
                ready = self.recv(min_slots, max_slots, deadline_s=deadline_s)
            except NoAsyncCallError:  # a question of a rollout that was interrupted has been answered since
                return
            yield ready

    @property
    def outstanding(self) -> bool:
        """Whether a request is in flight or a result is ready: whether `recv` would return something."""
        outstanding: bool = self._portal.run(lambda: self._envs.outstanding)
        return outstanding

    @property
    def draws_beside(self) -> bool:
        """Whether images are drawn beside the steps (`render=`)."""
        return self._envs.draws_beside

    def watch(self, slots: int | Iterable[int] = 16, port: int = 0, *, fps: float = 15.0) -> BlockingViewer:
        """Serve a page that shows slots as they step (see `AsyncVectorEnv.watch`)."""
        return BlockingViewer(self._portal, self._portal.call(self._envs.watch, slots, port, fps=fps))

    def call(self, name: str, *args: Any, spares: bool = False, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute (see `AsyncVectorEnv.call`)."""
        return self._portal.call(self._envs.call, name, *args, spares=spares, **kwargs)

    def get_attr(self, name: str, *, spares: bool = False) -> tuple[Any, ...]:
        """Read an attribute of every env (see `AsyncVectorEnv.get_attr`)."""
        return self._portal.call(self._envs.get_attr, name, spares=spares)

    @overload
    def call_at(self, slots: int, name: str, /, *args: Any, **kwargs: Any) -> Any: ...
    @overload
    def call_at(self, slots: Iterable[int], name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...
    def call_at(self, slots: int | Iterable[int], name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one slot's env, or of some slots' (see `AsyncVectorEnv.call_at`)."""
        return self._portal.call(self._envs.call_at, slots, name, *args, **kwargs)

    def pause(self, slots: int | Iterable[int]) -> None:
        """Leave slots out of whole batches (see `AsyncVectorEnv.pause`)."""
        self._portal.run(self._envs.pause, slots)

    def resume(self, slots: int | Iterable[int] | None = None) -> None:
        """Take slots into whole batches again (see `AsyncVectorEnv.resume`)."""
        self._portal.run(self._envs.resume, slots)

    def resume_all(self) -> None:
        """Take all slots into whole batches again."""
        self.resume()

    @property
    def active_slots(self) -> npt.NDArray[np.int64]:
        """The slots that are not paused, ascending."""
        slots: npt.NDArray[np.int64] = self._portal.run(lambda: self._envs.active_slots)
        return slots

    @property
    def exhausted(self) -> tuple[int, ...]:
        """The slots that were paused because their envs have no further episode (see `AsyncVectorEnv.exhausted`)."""
        slots: tuple[int, ...] = self._portal.run(lambda: self._envs.exhausted)
        return slots

    def step_at(self, slot: int, action: Any) -> SlotStep:
        """Step one slot (see `AsyncVectorEnv.step_at`)."""
        return self._portal.call(self._envs.step_at, slot, action)

    def reset_at(self, slot: int, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Begin an episode in one slot (see `AsyncVectorEnv.reset_at`)."""
        return self._portal.call(self._envs.reset_at, slot, seed=seed, options=options)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env (see `AsyncVectorEnv.set_attr`)."""
        self._portal.call(self._envs.set_attr, name, values)

    def model_field(self, name: str) -> npt.NDArray[Any]:
        """Return a live field of the models of native MuJoCo slots (see `NativeVectorEnv.model_field`)."""
        array: npt.NDArray[Any] = self._portal.run(self._envs.model_field, name)
        return array

    def get_state(self, slots: Iterable[int] | None = None) -> list[EnvState]:
        """Return the states of envs (see `AsyncVectorEnv.get_state`)."""
        return self._portal.call(self._envs.get_state, slots)

    def set_state(self, states: Iterable[EnvState], slots: Iterable[int] | None = None) -> None:
        """Set the states of envs (see `AsyncVectorEnv.set_state`)."""
        self._portal.call(self._envs.set_state, states, slots)

    def actor_rewards(self) -> npt.NDArray[np.float32] | None:
        """Return the reward of each actor in the last whole step (see `AsyncVectorEnv.actor_rewards`)."""
        return self._portal.call(self._envs.actor_rewards)

    def actor_ids(self, *, same_step: bool = True) -> tuple[ActorID, ...]:
        """Return the actor whose turn it is in each slot (see `AsyncVectorEnv.actor_ids`)."""
        return self._portal.call(self._envs.actor_ids, same_step=same_step)

    def is_actor_done(self) -> npt.NDArray[np.bool_]:
        """Return whether that actor has nothing more to do (see `AsyncVectorEnv.is_actor_done`)."""
        return self._portal.call(self._envs.is_actor_done)

    def __repr__(self) -> str:
        return describe("aioenv.sync.VectorEnv", self._envs._facts())

    def _repr_html_(self) -> str:
        return self._envs._repr_html_()

    def close(self, *, grace_s: float = CLOSE_GRACE_S, **kwargs: Any) -> None:  # Gymnasium's has other keywords
        """End the workers and the loop thread. It can be called again.

        Args:
            grace_s: how long each worker may take to close its envs, in seconds; then it gets SIGTERM, a second later
                SIGKILL.
            **kwargs: ignored, as Gymnasium does.
        """
        super().close(grace_s=grace_s, **kwargs)

    def close_extras(self, *, grace_s: float = CLOSE_GRACE_S, **kwargs: Any) -> None:
        """End the workers and the loop thread; called by `close`, with its arguments."""
        self._end(grace_s=grace_s)


class _ImageIterator(Iterator[tuple[int, Any]]):
    """Iterate over an image stream. (A generator would end with the first image that could not be drawn.)"""

    def __init__(self, portal: Portal, stream: ImageStream) -> None:
        self._portal = portal
        self._stream = stream

    def __next__(self) -> tuple[int, Any]:
        try:
            item = self._portal.call(self._stream.next)
        except ClosedError:  # closed between two items
            item = self._stream.next_drawn()
        if item is None:
            raise StopIteration
        return item


@like_function(make.make_vec)
def make_vec(*args: Any, **kwargs: Any) -> VectorEnv:
    """Make and start a vector env of copies of one env, for blocking code; arguments and errors as `aioenv.make_vec`.

    Raises:
        WorkerStartError, SpaceMismatchError, RenderError: as the start of `AsyncVectorEnv`.
    """
    return VectorEnv._over(make.make_vec(*args, **kwargs))
