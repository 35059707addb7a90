"""What a rollout goes over: workers, or one vector env in this process. To it they are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aioenv.errors import SlotError
from aioenv.spaces.layout import Arrays

__all__ = ["InitialState", "RolloutBackend", "SlotGroup", "StepOutcome"]

Slots = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Objects = list[list[Any]]


class StepOutcome(NamedTuple):
    """What a step or reset of k slots gave, in the order of the slots.

    Attributes:
        obs, objects: their observations, which are nobody else's; zeros of those that failed.
        reward: float64 `(k,)`; terminated, truncated: bool `(k,)`.
        counts: bool `(k,)`, whether what came is of that step: not where an env failed, or was lost with its worker.
            None: all of it.
        infos: what was said beside, for `RolloutBackend.merge`.
        error: what went wrong in some of them; it is in the slot table already.
    """

    obs: Arrays
    objects: Objects
    reward: npt.NDArray[np.float64]
    terminated: Bools
    truncated: Bools
    counts: Bools | None
    infos: list[Any]
    error: SlotError | None


class InitialState(NamedTuple):
    """How things stand before a rollout.

    Attributes:
        slots: int64 `(k,)`, ascending: all that can be asked, paused ones too.
        obs, objects: their latest observations.
        due: bool `(k,)`, whose next step will be a reset instead.
    """

    slots: Slots
    obs: Arrays
    objects: Objects
    due: Bools


class SlotGroup(Protocol):
    """Some slots, one request in flight at a time."""

    @property
    def slots(self) -> Slots:
        """Which: int64 `(k,)`, ascending where they are of one worker, not to be written to."""

    @property
    def in_flight(self) -> bool:
        """Whether something was sent that nobody has waited for."""

    def send(self, actions: Any) -> tuple[Arrays, Sequence[Sequence[Any]]]:
        """Step all slots; gives the actions as the layout takes them apart.

        Raises:
            ActionError, PendingCallError, ResetNeededError, EnvError, WorkerDied: as `AsyncVectorEnv.send`.
        """

    def send_reset(self, slots: Slots) -> None:
        """Reset some of the slots, without a seed; what comes is of these alone."""

    async def recv(self) -> StepOutcome:
        """Wait for what was sent. If this is cancelled, or times out, it is abandoned.

        Raises:
            StepTimeout: if `timeout_s` passed.
            ClosedError: if the vector env was closed.
        """

    def abandon(self) -> None:
        """Nobody will wait for what is in flight, if anything is: the next step or rollout drops it."""

    def close(self) -> None:
        """Nothing more will be sent."""


class RolloutBackend(Protocol):
    """Splits slots into groups, and knows how they stand."""

    def split(self, groups: int, *, whole_workers: bool) -> Sequence[SlotGroup]:
        """Split the slots that are not paused into so many groups, or as many as there can be.

        Args:
            whole_workers: whether to leave together what one worker has, where there are workers.
        """

    async def look(self, *, due: bool) -> InitialState:
        """Find out how things stand; drops what nobody took of abandoned steps.

        Args:
            due: whether to find out whose next step will be a reset instead; else it is nobody's.

        Raises:
            PendingCallError: if a slot has a request in flight, or a result that nobody took.
            SlotError: if it can't be found out.
        """

    def sent(self) -> None:
        """A rollout has sent all that it will send."""

    def ended(self, seen: InitialState | None) -> None:
        """A rollout is over, and this is what came of all that it sent, if it knows: the next `look` may be spared."""

    def merge(self, infos: Sequence[Any]) -> dict[str, Any]:
        """The info dict of a step, of what came of all groups; `Columns` that are added to it have slots for rows."""
