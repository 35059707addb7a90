"""`Rollout`, the result of a rollout, and `RolloutRecorder`, which fills its arrays step by step, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from aioenv.core.backend import InitialState, SlotGroup, StepOutcome
from aioenv.display import table
from aioenv.errors import ActionError
from aioenv.spaces.checks import as_array
from aioenv.spaces.layout import Arrays, Layout

if TYPE_CHECKING:
    from aioenv.core.backend import Backend

__all__ = ["GroupProgress", "Infos", "Rollout", "RolloutRecorder", "of_slot"]

Slots = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Up to so many runs of consecutive slots are written faster one by one, as slices, than all at once by their numbers.
_MAX_RUNS = 8


class Infos(Sequence[dict[str, Any]]):
    """The info dict of each step, as `step` would have returned it; merged on first access."""

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

    def not_empty(self) -> dict[int, dict[str, Any]]:
        """Return the info dicts that are not empty, by step."""
        return {
            step: self[step]
            for step, pieces in enumerate(self._pieces)
            if (pieces or step in self._merged) and self[step]
        }

    def __repr__(self) -> str:
        return f"<infos of {len(self)} steps>"

    def __reduce__(self) -> tuple[Any, ...]:  # the function that merges them belongs to the vector env
        return _merged_infos, ([*self],)


def _merged_infos(infos: list[dict[str, Any]]) -> Infos:
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
    """The result of `rollout`: `[t, i]` is the t-th step of slot i. The arrays are yours.

    If a space is a Dict or Tuple, so are `obs` and `actions`, of arrays. Leaves that are not arrays (Text, Graph,
    Sequence) are object arrays of shape `(steps, num_envs)`.

    Attributes:
        obs: `(steps, num_envs, *shape)`, the observations that the policy got.
        actions: `(steps, num_envs, *shape)`, the actions that it chose, in the action space's dtype.
        reward: float64, `(steps, num_envs)`.
        terminated: bool, `(steps, num_envs)`.
        truncated: bool, `(steps, num_envs)`.
        valid: bool, `(steps, num_envs)`: whether the env was stepped with that action. It was not if NEXT_STEP reset it
            instead (the step after the last one of an episode, with reward 0). It was not, either, if a restarted
            worker reported the end of a lost episode, or if an error's `partial` has no result. Learn only from rows
            where it is True.
        last_obs: `(num_envs, *shape)`, the observations after the last step.
        infos: a sequence of `steps` info dicts, as `step` returns them.
        extras: the other arrays that the policy returned, by name, `(steps, num_envs, …)`, in a dtype that holds all
            values.
    """

    _has_final_obs = True  # whether the last observations of episodes are in `infos`
    _received: Slots | None = None  # by slot, the number of steps with a result; None: all steps

    @cached_property
    def next_obs(self) -> Any:
        """The observations after each step, `(steps, num_envs, *shape)`; an episode's last one if the step ended it.

        In every autoreset mode this is `obs[t + 1]`, except for steps after which the slot was reset. Rows that are not
        `valid` are not steps: if NEXT_STEP has reset the slot there, it is the new episode's first observation.

        It is made on first access, and kept: a copy of `obs`. Under SAME_STEP and DISABLED this merges the infos of
        steps that have ended an episode.
        """
        num_envs = self.reward.shape[1]
        received = np.full(num_envs, len(self.reward)) if self._received is None else self._received
        ended = self.terminated | self.truncated if self._has_final_obs else None
        return _next_observations(self.obs, self.last_obs, received, ended, self.infos)

    def _replace(self, **kwargs: Any) -> Rollout:
        other = super()._replace(**kwargs)
        other.__dict__.update({name: value for name, value in self.__dict__.items() if name != "next_obs"})
        return other

    def __repr__(self) -> str:
        steps, num_envs = self.reward.shape
        extras = f" extras={list(self.extras)}" if self.extras else ""
        valid = f" valid={self.valid.mean():.0%}" if self.valid.size else ""  # an error's partial may have no step
        return f"<Rollout steps={steps} num_envs={num_envs}{valid}{extras}>"

    def _repr_html_(self) -> str:
        ends = int((self.terminated | self.truncated).sum())
        title = f"{self!r}: {ends:,} episodes ended"
        fields = [(name, getattr(self, name), None) for name in ("obs", "actions", "reward")]
        fields.append(("last_obs", self.last_obs, self.obs))
        fields += [(f"extras[{name!r}]", array, None) for name, array in self.extras.items()]
        rows = [row for field in fields for row in _array_rows(*field)]
        return table(title, rows, ["field", "dtype", "shape", "mean", "from", "to"])


def _array_rows(name: str, value: Any, steps: Any = None) -> Iterator[list[str]]:
    """Yield name, dtype, shape and range of each array in a batch of a Dict or Tuple space, or of one array.

    Args:
        name: of the batch.
        value: the batch.
        steps: the batches of all steps, for the one after the last: which of its leaves are objects.
    """
    if isinstance(steps, np.ndarray) and steps.dtype.hasobject:
        yield [name, "object", f"({len(value)},)", "", "", ""]  # a batch of Text, Graph or Sequence
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _array_rows(f"{name}[{key!r}]", part, steps and steps[key])
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from _array_rows(f"{name}[{index}]", part, steps and steps[index])
    else:
        numbers = [""] * 3
        if value.size and value.dtype.kind in "biuf":
            numbers = [f"{number:.6g}" for number in (value.mean(), value.min(), value.max())]
        yield [name, str(value.dtype), str(value.shape), *numbers]


class GroupProgress:
    """The progress of one group in a rollout.

    Attributes:
        group: the group.
        slots: its k slots.
        span: these slots as a slice of all slots; None: they are not consecutive.
        runs: these slots as slices of all slots, each with the slice of its rows; None: there are too many runs.
        name: the name of the group in errors.
        obs, objects: its latest observations.
        pending_reset: bool `(k,)`, whether a slot's first step will be an automatic reset.
        ended: bool `(k,)`, whether a slot's episode is over and must be reset first; None: of no slot.
        steps_sent: the number of steps that were sent.
        steps_received: the number of steps whose results were received.
    """

    def __init__(self, group: SlotGroup, name: str) -> None:
        self.group = group
        self.slots = group.slots
        self.runs = _runs(group.slots)
        self.span = self.runs[0][0] if self.runs is not None and len(self.runs) == 1 else None
        self.name = name
        self.obs: Arrays = []
        self.objects: list[list[Any]] = []
        self.pending_reset: Bools = np.zeros(len(group.slots), np.bool_)
        self.ended: Bools | None = None
        self.steps_sent = self.steps_received = 0


class RolloutRecorder:
    """Fills the arrays of a rollout.

    Args:
        backend: knows the spaces.
        steps: the number of steps.
        merge: see `RolloutBackend`.
        resets_next_step: whether the step after an episode's last one is a reset (NEXT_STEP).

    Attributes:
        infos: by step, the arguments of `merge`.
    """

    def __init__(
        self,
        backend: Backend,
        steps: int,
        merge: Callable[[Sequence[Any]], dict[str, Any]],
        *,
        resets_next_step: bool,
    ) -> None:
        self._num_envs = n = backend.num_envs
        self._steps = steps
        self._resets_next_step = resets_next_step
        self._observations = Layout(backend.observations.space)
        self._action_layout = Layout(backend.actions.space)
        # one row more: the observations after the last step
        self._obs, self._obs_objects = self._observations.empty_steps(steps + 1, n)
        for array in self._obs:  # for slots without observations
            array[0] = array[-1] = 0
        self._actions, self._action_objects = self._action_layout.empty_steps(steps, n)
        self._reward = np.zeros((steps, n))
        self._terminated = np.zeros((steps, n), np.bool_)
        self._truncated = np.zeros((steps, n), np.bool_)
        self._invalid: list[tuple[int, Slots]] = []  # the results are not of these steps
        self._extras: dict[str, npt.NDArray[Any]] = {}
        self._has_extras = False  # whether the names of the extras are known
        self._merge = merge
        self.infos: list[list[Any]] = [[] for _ in range(steps)]

    def record_extras(self, progress: GroupProgress, extras: dict[str, Any]) -> None:
        """Record the extras that the policy returned; names and shapes must be the same every time."""
        step, slots = progress.steps_sent, progress.slots
        if self._has_extras and extras.keys() != self._extras.keys():
            raise ActionError(f"extras: expected {sorted(self._extras)} as before, got {sorted(extras)}")
        self._has_extras = True
        for name, value in extras.items():
            array = as_array(value, f"extras[{name!r}]")
            known = self._extras.get(name)
            expected = (len(slots), *(known.shape[2:] if known is not None else array.shape[1:]))
            if array.shape != expected:
                raise ActionError(f"extras[{name!r}]: expected shape {expected}, one row a slot, got {array.shape}")
            if known is None:
                shape = (self._steps, self._num_envs, *expected[1:])
                known = self._extras[name] = np.zeros(shape, array.dtype)
            elif (
                known.dtype != array.dtype
            ):  # as by np.stack: the first zeros may be ints, and later strings may be longer
                known = self._extras[name] = known.astype(np.result_type(known.dtype, array.dtype), copy=False)
            known[step, slots] = array

    def record_paused(self, paused: Slots, seen: Slots, obs: Arrays, objects: list[list[Any]]) -> None:
        """Record slots that are not stepped, and the observations of those in `seen`."""
        for array in (*self._obs, *self._actions):
            array[:, paused] = 0
        for array, mine in zip(self._obs, obs, strict=True):
            array[:, seen] = mine
        for array, items in zip(self._obs_objects, objects, strict=True):
            for slot, item in zip(seen.tolist(), items, strict=True):
                for step in range(self._steps + 1):
                    array[step, slot] = item

    def record_observations(self, progress: GroupProgress) -> None:
        """Record the observations that the policy gets next; call this before, as the policy may write to them."""
        _write(self._obs, self._obs_objects, progress, progress.obs, progress.objects)

    def record_actions(self, progress: GroupProgress, actions: Arrays, objects: Sequence[Sequence[Any]]) -> None:
        """Record the actions that a group was sent."""
        _write(self._actions, self._action_objects, progress, actions, objects)

    def record_outcome(self, progress: GroupProgress, outcome: StepOutcome) -> None:
        """Record the result of a step, without its observations."""
        step, span = progress.steps_received, progress.span
        if span is not None:
            self._reward[step, span] = outcome.reward
            self._terminated[step, span] = outcome.terminated
            self._truncated[step, span] = outcome.truncated
        else:
            _write_rows(self._reward[step], progress, outcome.reward)
            _write_rows(self._terminated[step], progress, outcome.terminated)
            _write_rows(self._truncated[step], progress, outcome.truncated)
        self.infos[step] += outcome.infos

    def mark_invalid(self, progress: GroupProgress, rows: Bools) -> None:
        """Mark rows whose results are not results of that step."""
        if rows.any():
            self._invalid.append((progress.steps_received, progress.slots[rows]))

    def final_state(self, groups: Sequence[GroupProgress]) -> InitialState | None:
        """Return the state after the last step, for the next rollout; None if it is not known of all slots."""
        all_slots = sum(len(progress.slots) for progress in groups) == self._num_envs
        if self._invalid or self._obs_objects or not all_slots:  # (objects belong to the user then)
            return None
        pending_reset = np.zeros(self._num_envs, np.bool_)
        if self._resets_next_step:
            pending_reset = self._terminated[-1] | self._truncated[-1]
        return InitialState(np.arange(self._num_envs), *self._latest_observations(groups), pending_reset)

    def _latest_observations(self, groups: Sequence[GroupProgress]) -> tuple[Arrays, list[list[Any]]]:
        """Return the last observations of all slots, in new arrays and lists."""
        arrays = [array[-1].copy() for array in self._obs]
        objects = [array[-1].tolist() for array in self._obs_objects]
        for progress in groups:
            if progress.steps_received < self._steps:  # the rollout ended early
                for array, all_steps in zip(arrays, self._obs, strict=True):
                    array[progress.slots] = all_steps[progress.steps_received, progress.slots]
                for column, all_objects in zip(objects, self._obs_objects, strict=True):
                    for slot in progress.slots.tolist():
                        column[slot] = all_objects[progress.steps_received, slot]
        return arrays, objects

    def rollout(self, groups: Sequence[GroupProgress]) -> Rollout:
        """Return the rollout; if it ended early, the steps with results of some slots, and zeros for others."""
        steps = max(progress.steps_received for progress in groups)
        last, last_objects = self._latest_observations(groups)
        for progress in groups:
            slots = progress.slots
            for array in (*self._obs, *self._actions):
                array[progress.steps_received : steps, slots] = 0
            for array in (*self._obs_objects, *self._action_objects):
                array[progress.steps_received : steps, slots] = None
        rollout = Rollout(
            self._observations.assemble(_first(self._obs, steps), _first(self._obs_objects, steps)),
            self._action_layout.assemble(_first(self._actions, steps), _first(self._action_objects, steps)),
            self._reward[:steps],
            self._terminated[:steps],
            self._truncated[:steps],
            self._valid(groups, steps),
            self._observations.assemble(last, last_objects),
            Infos(self.infos[:steps], self._merge),
            {name: array[:steps] for name, array in self._extras.items()},
        )
        rollout._has_final_obs = not self._resets_next_step
        if any(progress.steps_received < steps for progress in groups):
            rollout._received = np.full(self._num_envs, steps)
            for progress in groups:
                rollout._received[progress.slots] = progress.steps_received
        return rollout

    def _valid(self, groups: Sequence[GroupProgress], steps: int) -> Bools:
        valid = np.zeros((steps, self._num_envs), np.bool_)
        for progress in groups:
            valid[: progress.steps_received, progress.slots] = True
            if steps:
                valid[0, progress.slots] &= ~progress.pending_reset
        if self._resets_next_step and steps:
            valid[1:] &= ~(self._terminated[: steps - 1] | self._truncated[: steps - 1])
        for step, slots in self._invalid:
            valid[step, slots] = False
        return valid


def _runs(slots: Slots) -> list[tuple[slice, slice]] | None:
    """Return ascending slots as slices of all slots, each with the slice of its rows; None if there are too many."""
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    if len(cuts) - 1 > _MAX_RUNS:
        return None
    rows = [slice(start, stop) for start, stop in pairwise(cuts)]
    return [(slice(int(slots[mine.start]), int(slots[mine.stop - 1]) + 1), mine) for mine in rows]


def _write(arrays: Arrays, object_arrays: Arrays, progress: GroupProgress, rows: Arrays, objects: Any) -> None:
    """Write actions or observations of a group into the rows of its slots, at its current step."""
    step, span = progress.steps_sent, progress.span
    for array, values in zip(arrays, rows, strict=True):
        if span is not None:
            array[step, span] = values
        else:
            _write_rows(array[step], progress, values)
    for array, items in zip(object_arrays, objects, strict=True):
        for slot, item in zip(progress.slots.tolist(), items, strict=True):
            array[step, slot] = item


def _write_rows(all_slots: npt.NDArray[Any], progress: GroupProgress, rows: npt.NDArray[Any]) -> None:
    """Write one row a slot to the places of these slots."""
    if progress.runs is None:
        all_slots[progress.slots] = rows
    else:
        for there, mine in progress.runs:
            all_slots[there] = rows[mine]


def _first(arrays: Arrays, steps: int) -> Any:
    return [array[:steps] for array in arrays]


# ------------------------------------------------------------ the observations that steps led to


def _next_observations(
    obs: Any,
    last_obs: Any,
    received: npt.NDArray[np.int64],
    ended: Bools | None,
    infos: Sequence[Mapping[str, Any]],
) -> Any:
    """Return the observations after each step, in new arrays.

    Args:
        obs: before each step: arrays `(steps, num_envs, …)`, in dicts and tuples.
        last_obs: of each slot after its last step.
        received: by slot, the number of steps with a result; later rows are zeros, or None.
        ended: bool `(steps, num_envs)`, the steps that ended an episode whose last observation is in `infos`. None:
            last observations are in `obs`, since a reset takes a step of its own.
        infos: by step.
    """
    following = _shifted(obs, last_obs, received)
    if ended is None:
        return following
    for step in np.flatnonzero(ended.any(axis=1)).tolist():
        last = infos[step].get("final_obs")
        if last is not None:
            told = infos[step].get("_final_obs", ended[step])
            for slot in np.flatnonzero(ended[step] & told).tolist():
                _write_at(following, (step, slot), of_slot(last, slot))
    return following


def _shifted(obs: Any, last_obs: Any, received: npt.NDArray[np.int64]) -> Any:
    if isinstance(obs, dict):
        return {key: _shifted(part, last_obs[key], received) for key, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_shifted(part, last, received) for part, last in zip(obs, last_obs, strict=True))
    following = np.empty_like(obs)
    if len(obs):
        following[:-1] = obs[1:]
        following[-1] = None if obs.dtype.hasobject else 0
    rows = np.flatnonzero(received)
    if obs.dtype.hasobject:
        for slot in rows.tolist():
            following[received[slot] - 1, slot] = last_obs[slot]
    else:
        following[received[rows] - 1, rows] = last_obs[rows]
    return following


def of_slot(last: Any, slot: int) -> Any:
    """Return the last observation of one slot, from an array of them, or from a dict as some vector envs give it."""
    return {key: of_slot(part, slot) for key, part in last.items()} if isinstance(last, dict) else last[slot]


def _write_at(tree: Any, where: tuple[int, int], value: Any) -> None:
    if isinstance(tree, dict):
        for key, part in tree.items():
            _write_at(part, where, value[key])
    elif isinstance(tree, tuple):
        for part, item in zip(tree, value, strict=True):
            _write_at(part, where, item)
    elif tree.dtype.hasobject:
        tree[where] = value
    else:  # as many numbers in another shape are accepted, as for observations
        tree[where] = np.reshape(value, tree.shape[2:])
