"""The interface of a backend, which steps the envs: worker processes, or this process.

A vector env, its rollouts, numbered episodes, calls, states, images and timeline use no more of a backend than this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from aioenv.core.results import Ready, ResetResult, StepResult
from aioenv.core.slots import SlotTable
from aioenv.errors import SlotError
from aioenv.spaces.layout import Arrays, Layout

if TYPE_CHECKING:
    from aioenv.core.episode_tracker import EpisodeTracker, InProcessEpisodeTracker
    from aioenv.core.recovery import SlotHistory
    from aioenv.core.requests import BatchRequest, WorkerRequest
    from aioenv.core.spares import SpareEnvs
    from aioenv.process.supervisor import Worker
    from aioenv.rendering.step_images import StepImages
    from aioenv.rendering.step_pool import StepRenderPool
    from aioenv.tracing.timeline import Trace

__all__ = [
    "Backend",
    "EnvInfo",
    "InitialState",
    "ResultObserver",
    "RolloutBackend",
    "Session",
    "SlotGroup",
    "StepOutcome",
]

Slots = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Objects = list[list[Any]]


class StepOutcome(NamedTuple):
    """The results of a step or reset of k slots, in the order of the slots.

    Attributes:
        obs, objects: their observations, in arrays that nothing else uses; zeros of slots that failed.
        reward: float64 `(k,)`; terminated, truncated: bool `(k,)`.
        valid: bool `(k,)`, whether a row is a result of the step: False where an env failed, or was lost with its
            worker. None: all are.
        infos: the infos, for `RolloutBackend.merge`.
        error: the errors of some of them; the slot table has noted them already.
    """

    obs: Arrays
    objects: Objects
    reward: npt.NDArray[np.float64]
    terminated: Bools
    truncated: Bools
    valid: Bools | None
    infos: list[Any]
    error: SlotError | None


class InitialState(NamedTuple):
    """The state of the slots before a rollout.

    Attributes:
        slots: int64 `(k,)`, ascending: all slots that can be asked, paused ones too.
        obs, objects: their latest observations.
        pending_reset: bool `(k,)`, whether a slot's next step will be an automatic reset.
    """

    slots: Slots
    obs: Arrays
    objects: Objects
    pending_reset: Bools


class SlotGroup(Protocol):
    """Some slots that are stepped together, with one request in flight at a time."""

    @property
    def slots(self) -> Slots:
        """The slot numbers: int64 `(k,)`, ascending within each worker; read-only."""

    @property
    def in_flight(self) -> bool:
        """Whether a request was sent whose result was not received yet."""

    def send(self, actions: Any) -> tuple[Arrays, Sequence[Sequence[Any]]]:
        """Step all slots of the group.

        Returns:
            The actions as the layout takes them apart: arrays, and columns of objects.

        Raises:
            ActionError, PendingCallError, ResetNeededError, EnvError, WorkerDied: as `AsyncVectorEnv.send`.
        """

    def send_arrays(self, arrays: Arrays, objects: Sequence[Sequence[Any]], name: str) -> None:
        """Step all slots of the group, with actions that were taken apart; otherwise as `send`.

        Args:
            arrays, objects: the actions, one row a slot of the group.
            name: the user's call, for errors.
        """

    def send_reset(
        self,
        slots: Slots,
        seeds: Mapping[int, int | None] | None = None,
        options: dict[str, Any] | None = None,
        name: str = "rollout",
        *,
        automatic: bool = False,
    ) -> None:
        """Reset some slots of the group; the result has the rows of these slots alone.

        Args:
            slots: the slot numbers, ascending within each worker.
            seeds: a seed for each of them; None: no seeds.
            options: passed to each env's `reset`.
            name: the user's call, for errors.
            automatic: whether to pass the options of automatic resets instead.
        """

    async def recv(self) -> StepOutcome:
        """Wait for the result of the request in flight. If this is cancelled, or times out, the request is abandoned.

        Raises:
            StepTimeout: if `timeout_s` passed.
            ClosedError: if the vector env was closed.
        """

    def abandon(self) -> None:
        """Leave the request in flight, if any, to `recv` of the vector env; a later step or rollout drops it."""

    def close(self) -> None:
        """Release the memory of results; nothing more is sent."""


class RolloutBackend(Protocol):
    """Splits the slots of a backend into groups for one rollout, and knows how it found and left them."""

    def split(self, groups: int, *, whole_workers: bool) -> Sequence[SlotGroup]:
        """Split the slots that are not paused into at most so many groups.

        Args:
            groups: the number of groups.
            whole_workers: whether all slots of a worker are in the same group, where there are workers.
        """

    async def look(self, *, pending_reset: bool) -> InitialState:
        """Get the latest observations; drops the results of abandoned steps.

        Args:
            pending_reset: whether to find out which slots' next step will be an automatic reset.

        Raises:
            PendingCallError: if a slot has a request in flight, or a result that was not taken.
            SlotError: if a worker or env fails.
        """

    def sent(self) -> None:
        """Note that the rollout has sent its last request."""

    def ended(self, state: InitialState | None) -> None:
        """Note the state after the rollout, None if it is unknown: the next `look` may be spared."""

    def merge(self, infos: Sequence[Any], *, by_slot: bool = False) -> dict[str, Any]:
        """Make the info dict of a step from the infos of all groups; `Columns` among them have slots for rows.

        Args:
            infos: of all groups.
            by_slot: the info will be split by slot again, so it may be `RowDicts`: values keep their types.
        """


class ResultObserver(Protocol):
    """Is told of each result as soon as it has arrived, whether or not it is taken."""

    def note_reply(self, request: BatchRequest, part: WorkerRequest) -> None:
        """Note a worker's reply, with the states of its slots; all of its arrays are used again."""

    def note_result(
        self, slots: Slots, resets: Slots | None, value: Any, states: npt.NDArray[np.float64] | None
    ) -> None:
        """Note a result of a vector env in this process, which is a batch of all slots.

        Args:
            slots: the slots that were stepped or reset.
            resets: the slots of them that were reset; None: all were stepped.
            value: the result; or the error.
            states: the states of `slots` from which images are drawn; None if it failed.
        """

    def note_state(self, slot: int, *, awaits_reset: bool) -> None:
        """Note that a slot was put into a state, by `set_state`.

        Args:
            slot: its number.
            awaits_reset: whether its next step resets instead.
        """


class EnvInfo(Protocol):
    """The spaces and metadata of the envs, as in Gymnasium; they are known once the envs are made, and stay so.

    Attributes:
        single_observation_space, observation_space, single_action_space, action_space: of one slot, and of a batch.
        metadata, spec, render_mode: of the first env.
    """

    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]
    metadata: dict[str, Any]
    spec: Any
    render_mode: str | None


class Backend(Protocol):
    """Steps the envs of a started vector env.

    Attributes:
        num_envs: the number of slots.
        table: the states of the slots.
        images: the images of results; None if none are drawn.
        actions, observations: the layouts of the single spaces.
        single_action_space: as in Gymnasium.
    """

    num_envs: int
    table: SlotTable
    images: StepImages | None
    actions: Layout
    observations: Layout
    single_action_space: Space[Any]

    @property
    def history(self) -> SlotHistory | None:
        """The data from which slots are resumed in another process; None where workers are not restarted."""

    @property
    def episodes(self) -> EpisodeTracker | InProcessEpisodeTracker | None:
        """The counter of episodes; None if they are not counted."""

    @property
    def observer(self) -> ResultObserver | None:
        """The object that is told of each result; None if there is none."""

    @property
    def spares(self) -> SpareEnvs | None:
        """The second envs of the slots; None if there are none."""

    # ------------------------------------------------------------ whole batches

    async def step(self, actions: Any, *, timeout_s: float | None = None) -> StepResult:
        """Step all slots that are not paused (see `AsyncVectorEnv.step`)."""

    async def reset(
        self, seed: Any, mask: Bools | None, options: dict[str, Any] | None, timeout_s: float | None = None
    ) -> ResetResult:
        """Reset all slots that are not paused, or those of a mask (see `AsyncVectorEnv.reset`)."""

    async def drain(self, timeout_s: float | None = None) -> None:
        """Wait for the replies to abandoned requests, and drop the results that `recv` has not taken."""

    # ------------------------------------------------------------ some slots

    def send(self, actions: Any, slots: Iterable[int] | None) -> None:
        """Send actions to some slots (see `AsyncVectorEnv.send`)."""

    def send_reset(
        self, slots: Iterable[int] | None, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> None:
        """Begin episodes in some slots (see `AsyncVectorEnv.send_reset`)."""

    async def recv(self, min_slots: int, max_slots: int | None, deadline_s: float | None) -> Ready:
        """Take results as they come (see `AsyncVectorEnv.recv`)."""

    @property
    def outstanding(self) -> bool:
        """Whether anything is in flight or ready."""

    def check_steps_some(self, name: str, slots: Slots) -> None:
        """Raise if these slots can't be stepped without the others of their vector env.

        Args:
            name: the user's call, for errors.
            slots: the slots that would be stepped, or left out.

        Raises:
            ValueError: if some slots of a vector env without `step_some` are among them, but not all.
        """

    def group(self, slots: Slots) -> SlotGroup:
        """Make a group of some slots, ascending within each worker."""

    def rollout_backend(self) -> RolloutBackend:
        """Make the backend of one rollout."""

    # ------------------------------------------------------------ beside steps

    async def call_service(
        self,
        slots: Iterable[int] | None,
        what: str,
        method: str,
        arguments: Callable[[list[int]], tuple[Any, ...]],
        *,
        spares: bool | Literal["living"] = False,
        on_sent: Callable[[], None] | None = None,
        on_result: Callable[[int, Any], None] | None = None,
    ) -> tuple[Any, ...]:
        """Call a method of the services that hold the envs, for some slots (None: all).

        Args:
            slots: the slot numbers.
            what: the user's call, for errors.
            method: the name of the method.
            arguments: makes the method's arguments, after the rows, for the slots of one service.
            spares: call both envs of each slot; only where there are spare envs. `arguments` gets `num_envs + slot` for
                a slot's second env. "living": where there are spare envs, call those whose workers have not ended.
            on_sent: with `spares`: called as soon as all calls are sent, before anything else can be.
            on_result: called with each slot and its result as soon as that arrives, also if the call fails in other
                slots, or if the caller does not wait any more.

        Returns:
            One result a slot, in ascending order of slots; with `spares` a pair.
        """

    def model_field(self, name: str) -> npt.NDArray[Any]:
        """Return the live array of a field of the models of native slots (see `NativeVectorEnv.model_field`)."""

    async def wait_for_images(self, what: str, drawn: Callable[[], Awaitable[object]]) -> None:
        """Wait until images are drawn (see `ReplyTimeouts.wait_for_images`)."""

    def attach_observer(self, observer: ResultObserver | None) -> None:
        """Tell an object of each result from now on, None: no longer; only where `images` is not None."""

    def attach_trace(self, trace: Trace | None) -> None:
        """Record requests and images in a timeline from now on; None: no longer."""


class Session(Protocol):
    """A backend from before its start until it is closed, with the processes that it needs."""

    @property
    def backend(self) -> Backend | None:
        """The backend; None until the start is complete."""

    @property
    def env_info(self) -> EnvInfo:
        """The spaces and metadata of the envs."""

    @property
    def images(self) -> StepImages | None:
        """The images of results; None if none are drawn."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The worker processes that hold the envs."""

    @property
    def pools(self) -> Sequence[StepRenderPool]:
        """The pools that draw states, for `render` and for observations."""

    @property
    def render_workers(self) -> Sequence[Worker]:
        """The workers of these pools."""

    async def start(self) -> None:
        """Make the envs, and start all processes. If that fails, or is cancelled, none is left."""

    async def close(self, grace_s: float) -> None:
        """Close the envs, and end all processes.

        Args:
            grace_s: how long envs may take to close, in seconds.
        """

    def abandon(self) -> None:
        """End all processes without waiting for them."""

    def forget_code(self) -> None:
        """Release the snapshot of the factories: no worker is started from it any more."""
