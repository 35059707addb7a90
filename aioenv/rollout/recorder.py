"""What a rollout collects: arrays that fill step by step, group by group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from aioenv.core.backend import InitialState, SlotGroup, StepOutcome
from aioenv.errors import ActionError
from aioenv.spaces.action_checks import as_array
from aioenv.spaces.layout import Arrays, Layout, _ObjectNode

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler

__all__ = ["Infos", "RecordedTurn", "Rollout", "RolloutRecorder"]

Slots = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Up to so many runs of slots are faster written one by one, as slices, than all at once by their numbers.
_MOST_RUNS = 8


class Infos(Sequence[dict[str, Any]]):
    """The info dict of each step, as `step` would have given it; merged when it is looked at."""

    def __init__(self, pieces: list[list[Any]], merge: Callable[[Sequence[Any]], dict[str, Any]]) -> None:
        self._pieces = pieces
        self._merge = merge
        self._merged: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, step: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, step: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, step: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(step, slice):
            return [self[i] for i in range(len(self))[step]]
        step = range(len(self))[step]
        if step not in self._merged:
            self._merged[step] = self._merge(self._pieces[step])
        return self._merged[step]

    def __repr__(self) -> str:
        return f"<infos of {len(self)} steps>"

    def __reduce__(self) -> tuple[Any, ...]:  # what merges them is the vector env's
        return _merged, ([*self],)


def _merged(infos: list[dict[str, Any]]) -> Infos:
    made = Infos([[] for _ in infos], lambda pieces: {})
    made._merged = dict(enumerate(infos))
    return made


class _RolloutArrays(NamedTuple):
    """The fields of a `Rollout`."""

    obs: Any
    actions: Any
    reward: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    valid: npt.NDArray[np.bool_]
    last_obs: Any
    infos: Infos
    extras: dict[str, npt.NDArray[Any]]


class Rollout(_RolloutArrays):
    """What `rollout` has collected: `[t, i]` is of the t-th step of slot i. The arrays are yours.

    Where a space is a Dict or Tuple, so are `obs` and `actions`, of arrays; leaves that are no arrays (Text, Graph,
    Sequence) are object arrays of shape `(steps, num_envs)`.

    Attributes:
        obs: `(steps, num_envs, *shape)`, what the policy saw.
        actions: `(steps, num_envs, *shape)`, what it did, in the action space's dtype.
        reward: float64, `(steps, num_envs)`.
        terminated: bool, `(steps, num_envs)`.
        truncated: bool, `(steps, num_envs)`.
        valid: bool, `(steps, num_envs)`: whether the env was stepped with that action. It was not where NEXT_STEP
            reset it instead (the step after the last one of an episode: reward 0), where a worker that was restarted
            told the end of an episode it had lost, and where, in an error's `partial`, there is no result. Learn from
            rows where it is True alone.
        last_obs: `(num_envs, *shape)`, after the last step.
        infos: a sequence of `steps` info dicts, as `step` gives them.
        extras: what the policy gave beside actions, by name, `(steps, num_envs, …)`, in a dtype that holds all of it.
    """

    _ends_in_infos = True  # whether the last observations of episodes are in `infos`
    _taken: Slots | None = None  # by slot, how many steps there are results of; None: of all

    @cached_property
    def next_obs(self) -> Any:
        """What each step led to, as `obs`, `(steps, num_envs, *shape)`: the last observation where it ended an episode.

        So it is in every autoreset mode: `obs[t + 1]`, but for steps after which the slot was reset. Rows that are not
        `valid` are no steps: in those where NEXT_STEP has reset the slot it is the new episode's first observation.

        It is made when it is asked for first, and kept: a copy of `obs`. Under SAME_STEP and DISABLED the infos of
        steps that have ended an episode are merged for it.
        """
        num_envs = self.reward.shape[1]
        taken = np.full(num_envs, len(self.reward)) if self._taken is None else self._taken
        ended = self.terminated | self.truncated if self._ends_in_infos else None
        return _next_observations(self.obs, self.last_obs, taken, ended, self.infos)

    def _replace(self, **kwargs: Any) -> Rollout:
        other = super()._replace(**kwargs)
        other.__dict__.update({name: value for name, value in self.__dict__.items() if name != "next_obs"})
        return other

    def __repr__(self) -> str:
        steps, num_envs = self.reward.shape
        extras = f" extras={list(self.extras)}" if self.extras else ""
        valid = f" valid={self.valid.mean():.0%}" if self.valid.size else ""  # an error's partial may have no step
        return f"<Rollout steps={steps} num_envs={num_envs}{valid}{extras}>"


class RecordedTurn:
    """A group, and where it is.

    Attributes:
        group: the group.
        slots: its k slots.
        span: them as a slice of all slots; None: they are no run.
        runs: them as slices of all slots, each with that of the rows that go there; None: they are too many.
        name: it, in errors.
        obs, objects: its observations as they are.
        due: bool `(k,)`, whose first step will be a reset instead.
        over: bool `(k,)`, whose episode is over and must be reset first; None: nobody's.
        acted, taken: how many steps it was sent, and how many came back.
    """

    def __init__(self, group: SlotGroup, name: str) -> None:
        self.group = group
        self.slots = group.slots
        self.runs = _runs(group.slots)
        self.span = self.runs[0][0] if self.runs is not None and len(self.runs) == 1 else None
        self.name = name
        self.obs: Arrays = []
        self.objects: list[list[Any]] = []
        self.due: Bools = np.zeros(len(group.slots), np.bool_)
        self.over: Bools | None = None
        self.acted = self.taken = 0


class RolloutRecorder:
    """The arrays of a rollout, as they fill.

    Args:
        schedule: knows the spaces.
        steps: how many there will be.
        merge: see `RolloutBackend`.
        resets_next_step: whether the step after the last one of an episode is a reset instead.

    Attributes:
        infos: by step, what `merge` makes an info dict of.
    """

    def __init__(
        self,
        schedule: RequestScheduler,
        steps: int,
        merge: Callable[[Sequence[Any]], dict[str, Any]],
        *,
        resets_next_step: bool,
    ) -> None:
        self._num_envs = n = schedule.num_envs
        self._steps = steps
        self._resets_next_step = resets_next_step
        self._observations = _Stacked(schedule.fleet.observations.space)
        self._action_layout = _Stacked(schedule.fleet.actions.space)
        # one step more: what the last one gave
        self._obs, self._obs_objects = self._observations.history(steps + 1, n)
        for array in self._obs:  # of whom nothing comes
            array[0] = array[-1] = 0
        self._actions, self._action_objects = self._action_layout.history(steps, n)
        self._reward = np.zeros((steps, n))
        self._terminated = np.zeros((steps, n), np.bool_)
        self._truncated = np.zeros((steps, n), np.bool_)
        self._invalid: list[tuple[int, Slots]] = []  # what came is not of these steps
        self._extras: dict[str, npt.NDArray[Any]] = {}
        self._asked = False  # whether the policy has answered yet
        self._merge = merge
        self.infos: list[list[Any]] = [[] for _ in range(steps)]

    def extras_of(self, turn: RecordedTurn, extras: dict[str, Any]) -> None:
        """What a policy gave beside actions; the same names and shapes every time."""
        step, slots = turn.acted, turn.slots
        if self._asked and extras.keys() != self._extras.keys():
            raise ActionError(f"extras: expected {sorted(self._extras)} as before, got {sorted(extras)}")
        self._asked = True
        for name, value in extras.items():
            array = as_array(value, f"extras[{name!r}]")
            known = self._extras.get(name)
            expected = (len(slots), *(known.shape[2:] if known is not None else array.shape[1:]))
            if array.shape != expected:
                raise ActionError(f"extras[{name!r}]: expected shape {expected}, one row a slot, got {array.shape}")
            if known is None:
                shape = (self._steps, self._num_envs, *expected[1:])
                known = self._extras[name] = np.zeros(shape, array.dtype)
            elif known.dtype != array.dtype:  # as np.stack has it: zeros at first may be ints, and texts grow
                known = self._extras[name] = known.astype(np.result_type(known.dtype, array.dtype), copy=False)
            known[step, slots] = array

    def rest(self, paused: Slots, seen: Slots, obs: Arrays, objects: list[list[Any]]) -> None:
        """Slots that are not stepped; those of which the observations are known, and these."""
        for array in (*self._obs, *self._actions):
            array[:, paused] = 0
        for array, mine in zip(self._obs, obs, strict=True):
            array[:, seen] = mine
        for array, items in zip(self._obs_objects, objects, strict=True):
            for slot, item in zip(seen.tolist(), items, strict=True):
                for step in range(self._steps + 1):
                    array[step, slot] = item

    def saw(self, turn: RecordedTurn) -> None:
        """What a group's policy is about to see; it may write to it, so this comes first."""
        _put(self._obs, self._obs_objects, turn, turn.obs, turn.objects)

    def did(self, turn: RecordedTurn, actions: Arrays, objects: Sequence[Sequence[Any]]) -> None:
        """What a group was sent."""
        _put(self._actions, self._action_objects, turn, actions, objects)

    def received(self, turn: RecordedTurn, came: StepOutcome) -> None:
        """What came of it, but for the observations, which the policy is about to see."""
        step, span = turn.taken, turn.span
        if span is not None:
            self._reward[step, span] = came.reward
            self._terminated[step, span] = came.terminated
            self._truncated[step, span] = came.truncated
        else:
            _put_rows(self._reward[step], turn, came.reward)
            _put_rows(self._terminated[step], turn, came.terminated)
            _put_rows(self._truncated[step], turn, came.truncated)
        self.infos[step] += came.infos

    def invalidate(self, turn: RecordedTurn, rows: Bools) -> None:
        """What came of the step of these rows is not of that step."""
        if rows.any():
            self._invalid.append((turn.taken, turn.slots[rows]))

    def seen(self, turns: Sequence[RecordedTurn]) -> InitialState | None:
        """How things stand after the last step, for the next rollout; None if that is not all known."""
        everyone = sum(len(turn.slots) for turn in turns) == self._num_envs
        if self._invalid or self._obs_objects or not everyone:  # objects would be the very ones that are given away
            return None
        due = np.zeros(self._num_envs, np.bool_)
        if self._resets_next_step:
            due = self._terminated[-1] | self._truncated[-1]
        return InitialState(np.arange(self._num_envs), *self._latest(turns), due)

    def _latest(self, turns: Sequence[RecordedTurn]) -> tuple[Arrays, list[list[Any]]]:
        """The last observations of all slots: arrays and objects of your own."""
        arrays = [array[-1].copy() for array in self._obs]
        objects = [array[-1].tolist() for array in self._obs_objects]
        for turn in turns:
            if turn.taken < self._steps:  # it ended before time
                for array, all_steps in zip(arrays, self._obs, strict=True):
                    array[turn.slots] = all_steps[turn.taken, turn.slots]
                for column, all_objects in zip(objects, self._obs_objects, strict=True):
                    for slot in turn.slots.tolist():
                        column[slot] = all_objects[turn.taken, slot]
        return arrays, objects

    def result(self, turns: Sequence[RecordedTurn]) -> Rollout:
        """All of it; or, if it ended before time, the steps of which some slots came back: zeros where none did."""
        steps = max(turn.taken for turn in turns)
        last, last_objects = self._latest(turns)
        for turn in turns:
            slots = turn.slots
            for array in (*self._obs, *self._actions):
                array[turn.taken : steps, slots] = 0
            for array in (*self._obs_objects, *self._action_objects):
                array[turn.taken : steps, slots] = None
        rollout = Rollout(
            self._observations.assemble(_cut(self._obs, steps), _cut(self._obs_objects, steps)),
            self._action_layout.assemble(_cut(self._actions, steps), _cut(self._action_objects, steps)),
            self._reward[:steps],
            self._terminated[:steps],
            self._truncated[:steps],
            self._valid(turns, steps),
            Layout(self._observations.space).assemble(last, last_objects),
            Infos(self.infos[:steps], self._merge),
            {name: array[:steps] for name, array in self._extras.items()},
        )
        rollout._ends_in_infos = not self._resets_next_step
        if any(turn.taken < steps for turn in turns):
            rollout._taken = np.full(self._num_envs, steps)
            for turn in turns:
                rollout._taken[turn.slots] = turn.taken
        return rollout

    def _valid(self, turns: Sequence[RecordedTurn], steps: int) -> Bools:
        valid = np.zeros((steps, self._num_envs), np.bool_)
        for turn in turns:
            valid[: turn.taken, turn.slots] = True
            if steps:
                valid[0, turn.slots] &= ~turn.due
        if self._resets_next_step and steps:
            valid[1:] &= ~(self._terminated[: steps - 1] | self._truncated[: steps - 1])
        for step, slots in self._invalid:
            valid[step, slots] = False
        return valid


class _Stacked(Layout):
    """A layout whose batches have the steps before the slots, and whose object leaves are arrays of objects."""

    def history(self, steps: int, n: int) -> tuple[Arrays, Arrays]:
        """New arrays for so many steps: of array leaves, not initialised, and of object leaves."""
        arrays = [np.empty((steps, n, *leaf.shape), leaf.dtype) for leaf in self.leaves]
        return arrays, [np.full((steps, n), None, object) for _ in range(self.num_objects)]

    def _assemble(self, node: Any, arrays: Any, objects: Any) -> Any:
        return objects[node.number] if isinstance(node, _ObjectNode) else super()._assemble(node, arrays, objects)


def _runs(slots: Slots) -> list[tuple[slice, slice]] | None:
    """Ascending slots as slices of all slots, each with that of the rows that go there; None if they are too many."""
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    if len(cuts) - 1 > _MOST_RUNS:
        return None
    rows = [slice(start, stop) for start, stop in pairwise(cuts)]
    return [(slice(int(slots[mine.start]), int(slots[mine.stop - 1]) + 1), mine) for mine in rows]


def _put(arrays: Arrays, object_arrays: Arrays, turn: RecordedTurn, rows: Arrays, objects: Any) -> None:
    """Put what a group has sent or seen into the rows of its slots, of the step that it is at."""
    step, span = turn.acted, turn.span
    for array, values in zip(arrays, rows, strict=True):
        if span is not None:
            array[step, span] = values
        else:
            _put_rows(array[step], turn, values)
    for array, items in zip(object_arrays, objects, strict=True):
        for slot, item in zip(turn.slots.tolist(), items, strict=True):
            array[step, slot] = item


def _put_rows(all_slots: npt.NDArray[Any], turn: RecordedTurn, rows: npt.NDArray[Any]) -> None:
    """Put one row a slot where these slots are."""
    if turn.runs is None:
        all_slots[turn.slots] = rows
    else:
        for there, mine in turn.runs:
            all_slots[there] = rows[mine]


def _cut(arrays: Arrays, steps: int) -> Any:
    return [array[:steps] for array in arrays]


# ------------------------------------------------------------ the observations that steps led to


def _next_observations(
    obs: Any,
    last_obs: Any,
    taken: npt.NDArray[np.int64],
    ended: Bools | None,
    infos: Sequence[Mapping[str, Any]],
) -> Any:
    """Make the observations after each step, in new arrays.

    Args:
        obs: before each step: arrays `(steps, num_envs, …)`, in dicts and tuples.
        last_obs: of each slot after its last step.
        taken: for each slot how many steps there are results of; rows after these are zeros, or None.
        ended: bool `(steps, num_envs)`, steps that have ended an episode whose last observation is in `infos`. None:
            last observations are in `obs`, since a reset takes a step of its own.
        infos: by step.
    """
    following = _shifted(obs, last_obs, taken)
    if ended is None:
        return following
    for step in np.flatnonzero(ended.any(axis=1)).tolist():
        last = infos[step].get("final_obs")
        if last is not None:
            told = infos[step].get("_final_obs", ended[step])
            for slot in np.flatnonzero(ended[step] & told).tolist():
                _put_item(following, (step, slot), _of_slot(last, slot))
    return following


def _shifted(obs: Any, last_obs: Any, taken: npt.NDArray[np.int64]) -> Any:
    if isinstance(obs, dict):
        return {key: _shifted(part, last_obs[key], taken) for key, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_shifted(part, last, taken) for part, last in zip(obs, last_obs, strict=True))
    following = np.empty_like(obs)
    if len(obs):
        following[:-1] = obs[1:]
        following[-1] = None if obs.dtype.hasobject else 0
    rows = np.flatnonzero(taken)
    if obs.dtype.hasobject:
        for slot in rows.tolist():
            following[taken[slot] - 1, slot] = last_obs[slot]
    else:
        following[taken[rows] - 1, rows] = last_obs[rows]
    return following


def _of_slot(last: Any, slot: int) -> Any:
    """The last observation of one slot: of an array of them, or of a batch in a dict, as some vector envs give it."""
    return {key: _of_slot(part, slot) for key, part in last.items()} if isinstance(last, dict) else last[slot]


def _put_item(tree: Any, where: tuple[int, int], value: Any) -> None:
    if isinstance(tree, dict):
        for key, part in tree.items():
            _put_item(part, where, value[key])
    elif isinstance(tree, tuple):
        for part, item in zip(tree, value, strict=True):
            _put_item(part, where, item)
    elif tree.dtype.hasobject:
        tree[where] = value
    else:  # as many numbers in another shape are cast, where observations are
        tree[where] = np.reshape(value, tree.shape[2:])
