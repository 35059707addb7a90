"""Envs of several actors: whose turn it is, and what each was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.envs import ActorID
from aioenv.errors import OutOfStepError

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.waits import Clock

__all__ = ["Actors"]


class Actors:
    """The part of a vector env that asks what envs of several actors know (see `aioenv.envs`)."""

    _clock: Clock

    if TYPE_CHECKING:

        @property
        def _running(self) -> RequestScheduler: ...

    async def actor_rewards(self) -> npt.NDArray[np.float32] | None:
        """The reward of each actor in the last whole step, one actor a row.

        It outlives an autoreset: until its first whole step, a new episode has those of the one before. If this is
        cancelled, nothing is lost. Calls raise what `call` raises.

        Returns:
            float32 of shape `(n_actors, num_envs)`; None if an env has no such rewards.

        Raises:
            ValueError: if envs have different numbers of actors.
        """
        rewards = await self._ask("actor_rewards")
        if any(each is None for each in rewards):
            return None
        columns = [np.asarray(each, np.float32) for each in rewards]
        if len({column.shape for column in columns}) > 1:
            numbers = [len(column) for column in columns]
            raise ValueError(f"actor_rewards: expected the same number of actors in all envs, got {numbers}")
        return np.stack(columns, 1)

    async def actor_ids(self, *, same_step: bool = True) -> tuple[ActorID, ...]:
        """Whose turn it is in each slot.

        If this is cancelled, nothing is lost. Calls raise what `call` raises.

        Args:
            same_step: whether all envs must be in the same part of their step, so that one policy serves them all.

        Returns:
            `(step_key, agent_id)`, one a slot.

        Raises:
            OutOfStepError: if they are in different ones, and must not be.
            TypeError: if an env has no actors.
        """
        ids = await self._ask("actor_id")
        if None in ids:
            raise TypeError(
                f"the env of slot {ids.index(None)} has no actor_id(): expected one of several actors, such as "
                "aioenv.envs.SubStepEnv"
            )
        found = tuple(ActorID(*each) for each in ids)
        keys = list(dict.fromkeys(actor.step_key for actor in found))
        if same_step and len(keys) > 1:
            places = [[slot for slot, actor in enumerate(found) if actor.step_key == key] for key in keys]
            where = ", ".join(f"{key!r} in slots {slots}" for key, slots in zip(keys, places, strict=True))
            raise OutOfStepError(
                f"expected all envs in the same sub-step, got {where}; pass same_step=False, or see that they stay "
                "together: under AutoresetMode.SAME_STEP no env falls behind by a reset"
            )
        return found

    async def is_actor_done(self) -> npt.NDArray[np.bool_]:
        """Whether the actor whose turn it is has nothing more to do, bool of shape `(num_envs,)`.

        If this is cancelled, nothing is lost. Calls raise what `call` raises.

        Raises:
            TypeError: if an env has no actors.
        """
        done = await self._ask("is_actor_done")
        if None in done:
            raise TypeError(f"the env of slot {done.index(None)} has no is_actor_done(): it is not of several actors")
        return np.array(done, np.bool_)

    async def _ask(self, name: str) -> tuple[Any, ...]:
        schedule = self._running
        with self._clock.envs:
            return await schedule.call_service(None, f"{name}()", "call_if_any", lambda _: (name,))
