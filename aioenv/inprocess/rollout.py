"""Groups of an env's slots in this process: what rollouts and numbered episodes step by turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.assign import spread
from aioenv.core.backend import InitialState, StepOutcome
from aioenv.core.results import StepResult
from aioenv.errors import EnvError
from aioenv.inprocess.arrays import gather_infos
from aioenv.inprocess.requests import InProcessRequest
from aioenv.spaces.infos import Columns, merge_infos
from aioenv.spaces.layout import Arrays
from aioenv.worker.vector_access import with_rows

if TYPE_CHECKING:
    from aioenv.inprocess.backend import InProcessBackend

__all__ = ["InProcessGroup", "InProcessRollout"]

Slots = npt.NDArray[np.int64]


class InProcessRollout:
    """The backend of a rollout in this process (see `RolloutBackend`).

    Args:
        backend: the backend of the env.
    """

    def __init__(self, backend: InProcessBackend) -> None:
        self._backend = backend

    def split(self, groups: int, *, whole_workers: bool) -> list[InProcessGroup]:
        """Split the slots that are not paused into so many groups, or as many as there are slots.

        There is one group if the env steps all slots at once, or if a slot's results depend on the slots that are
        stepped with it.
        """
        live = self._backend.table.active
        groups = min(groups, len(live)) if self._backend.splits else 1
        return [self._backend.group(live[start:stop]) for start, stop in spread(len(live), groups)]

    async def look(self, *, pending_reset: bool) -> InitialState:
        """Get the latest observations from the env (see `RolloutBackend.look`)."""
        backend = self._backend
        await backend.drain()
        value = await backend.result(backend.start_read_obs("rollout"))
        slots = np.arange(backend.num_envs)
        resets = backend.last_ended() if pending_reset else np.zeros(len(slots), np.bool_)
        return InitialState(slots, *backend.split_obs(value.obs), resets)

    def sent(self) -> None:
        """Do nothing (see `RolloutBackend.sent`)."""

    def ended(self, state: InitialState | None) -> None:
        """Do nothing (see `RolloutBackend.ended`): asking this env is as fast as finding out whether to ask."""

    def merge(self, infos: Sequence[Any]) -> dict[str, Any]:
        """Merge infos of groups (see `RolloutBackend.merge`); an info of all slots is given as it is."""
        n = self._backend.num_envs
        pieces = [piece for piece in infos if not isinstance(piece, Columns)]
        if len(pieces) == 1 and len(pieces[0][1]) == n:
            info = dict(pieces[0][0])
        else:
            info = gather_infos(pieces, n, [slots for _, slots in pieces], n)
        return {**info, **merge_infos([piece for piece in infos if isinstance(piece, Columns)], n)}


class InProcessGroup:
    """Some slots of an env in this process (see `SlotGroup`).

    Args:
        backend: the backend of the env.
        slots: ascending; all of them, if the env can't step some.
    """

    def __init__(self, backend: InProcessBackend, slots: Slots) -> None:
        self.slots = slots
        self.slots.flags.writeable = False
        self._backend = backend
        self._request: InProcessRequest | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a request was sent whose result was not received yet."""
        return self._request is not None

    def send(self, actions: Any) -> tuple[Arrays, Sequence[Sequence[Any]]]:
        """Step all slots (see `SlotGroup.send`); a step that runs inline is over when this returns."""
        arrays, objects = self._backend.actions.take_apart(actions, len(self.slots))
        self.send_arrays(arrays, objects, "rollout")
        return arrays, objects

    def send_arrays(self, arrays: Arrays, objects: Sequence[Sequence[Any]], name: str) -> None:
        """Step all slots, with actions that were taken apart (see `SlotGroup.send_arrays`)."""
        backend = self._backend
        # the env gets arrays of its own: it may write to them
        whole = with_rows(backend.actions, backend.num_envs, self.slots.tolist(), arrays, objects)
        self._request = backend.start_step(whole, self.slots, name)

    def send_reset(
        self,
        slots: Slots,
        seeds: Mapping[int, int | None] | None = None,
        options: dict[str, Any] | None = None,
        name: str = "rollout",
    ) -> None:
        """Reset some of the slots (see `SlotGroup.send_reset`)."""
        self._request = self._backend.start_reset(slots, self._backend.seeds_of(seeds or {}), options, name)

    async def recv(self) -> StepOutcome:
        """Wait for the result (see `SlotGroup.recv`); an exception of the env is an error of all slots asked."""
        request, self._request = self._request, None
        assert request is not None
        backend, slots = self._backend, request.slots
        n = len(slots)
        reward, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        try:
            value = await backend.result(request)
        except EnvError as error:
            layout = backend.observations
            valid = np.zeros(n, np.bool_)
            return StepOutcome(layout.zeros(n), layout.no_objects(n), reward, terminated, truncated, valid, [], error)
        if isinstance(value, StepResult):
            reward, terminated, truncated = value.reward[slots], value.terminated[slots], value.truncated[slots]
        obs, objects = backend.split_obs(value.obs)
        if n < backend.num_envs:
            obs = [array[slots] for array in obs]
            objects = [[column[slot] for slot in slots.tolist()] for column in objects]
        infos = [(value.info, slots)]
        return StepOutcome(obs, objects, reward, terminated, truncated, None, infos, None)

    def close(self) -> None:
        """Do nothing (see `SlotGroup.close`): a group keeps no memory."""

    def abandon(self) -> None:
        """Leave the request in flight, if any, to `recv` of the vector env (see `SlotGroup.abandon`)."""
        request, self._request = self._request, None
        if request is not None:
            self._backend.abandon_request(request)
