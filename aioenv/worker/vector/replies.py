"""What stands in the rows of a vector env, as replies to its parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.ipc.messages import StepReply, dump, dump_columns
from aioenv.spaces.layout import Layout, byte_view
from aioenv.state.physics_batch import PhysicsReader
from aioenv.worker.service import Reply
from aioenv.worker.vector.access import take_observations
from aioenv.worker.vector.checkpoint import VectorCheckpoints
from aioenv.worker.vector.infos import InfoPacker
from aioenv.worker.vector.lost_env_reset import Infos

__all__ = ["VectorReplies"]


class VectorReplies:
    """Remembers what was seen of all rows last, and tells it of those that a request asks for.

    Args:
        observations: the layout of what is seen.
        num_envs: how many rows there are.
        state_size: how many float64 of physics state ride on each row; 0 for none.
        physics: where these are read.
        checkpoints: what rides behind them; None: nothing.
    """

    def __init__(
        self,
        observations: Layout,
        num_envs: int,
        state_size: int,
        physics: PhysicsReader | None,
        checkpoints: VectorCheckpoints | None,
    ) -> None:
        self._observations = observations
        self._n = num_envs
        self._state = np.zeros((num_envs, state_size), np.float64)
        self._physics = physics if state_size else None  # else only its source was asked for: images are observations
        self._checkpoints = checkpoints
        self._packer = InfoPacker(num_envs)
        self._latest: Any = observations.zeros(num_envs), observations.no_objects(num_envs)

    def keep(self, obs: Any, seen: npt.NDArray[np.bool_] | None = None) -> None:
        """A batch of observations is the latest.

        Args:
            obs: as the env gave it.
            seen: the rows of which it tells: the others' are what they were. None: all.
        """
        arrays, objects = take_observations(self._observations, obs, self._n)
        if seen is not None:  # an env that was put into a state need not know what was seen of it, before it steps
            last_arrays, last_objects = self._latest
            arrays = [np.where(_wide(seen, new), new, old) for new, old in zip(arrays, last_arrays, strict=True)]
            pairs = zip(objects, last_objects, strict=True)
            objects = [[n if s else o for s, n, o in zip(seen, new, old, strict=True)] for new, old in pairs]
        self._latest = arrays, objects

    def restore(self, observations: Sequence[npt.NDArray[Any]], objects: Sequence[Sequence[Any]]) -> None:
        """The env is where another was, of which this was seen last."""
        self._latest = [array.copy() for array in observations], [list(column) for column in objects]
        if self._physics is not None:
            self._physics.read(None, self._state)

    def keep_states(self, states: Mapping[int, npt.NDArray[np.float64]]) -> None:
        """What images of some rows are drawn from, until the env has begun in them."""
        for row, state in states.items():
            self._state[row] = state

    def again(self, rows: Sequence[int]) -> Reply:
        """What was seen of rows last, and their states as they were told then: nothing has happened."""
        arrays, objects = self._latest
        looked = list(rows)
        tail = dump(StepReply([], [], [[column[row] for row in looked] for column in objects], []))
        riding = [self._state] if self._state.shape[1] else []
        if self._checkpoints is not None:
            riding.append(self._checkpoints.array)
        return Reply([byte_view(array[looked]) for array in (*arrays, *riding)], tail if objects else b"")

    def make(
        self,
        flags: Sequence[npt.NDArray[Any]],
        infos: Infos,
        rows: Sequence[int],
        begun: npt.NDArray[np.bool_] | None = None,
    ) -> Reply:
        """What stands in some rows now.

        Args:
            flags: rewards, terminations and truncations of these rows; after a reset none.
            infos: what the env has told, and of which rows.
            rows: these.
            begun: the rows that the env shows as they are told; None: all.
        """
        arrays, objects = self._latest
        riding = []
        beyond: Sequence[tuple[int, bytes]] = ()
        if self._physics is not None:
            before = None if begun is None else self._state[~begun]
            self._physics.read(None, self._state)
            if begun is not None:
                self._state[~begun] = before
            riding.append(self._state)
        if self._checkpoints is not None:
            riding.append(self._checkpoints.array)
            beyond = self._checkpoints.beyond
        if len(rows) < self._n:
            index = list(rows)
            arrays = [array[index] for array in arrays]
            objects = [[column[row] for row in index] for column in objects]
            riding = [array[index] for array in riding]
            beyond = [(row, data) for row, data in beyond if row in rows]
        fixed = [byte_view(array) for array in (*arrays, *flags, *riding)]
        if not objects and not beyond and not any(info for info, _ in infos):
            return Reply(fixed)
        groups = [group for info, of in infos if info for group in self._packer.pack(info, of)]
        news = self._packer.take_new_schemas()
        if not (news or objects or beyond or any(group.objects for group in groups)):
            return Reply(fixed, dump_columns(groups))
        return Reply(fixed, dump(StepReply(news, groups, [list(o) for o in objects], [], (), beyond)))


def _wide(mask: npt.NDArray[np.bool_], array: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """A mask of rows that goes with an array of more axes."""
    return mask.reshape(-1, *[1] * (array.ndim - 1))
