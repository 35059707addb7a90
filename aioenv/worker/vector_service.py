"""The service that holds one `gymnasium.vector.VectorEnv`, whose slots are stepped at once, and makes its replies."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from aioenv.ipc.frames import Frame
from aioenv.ipc.messages import Failure, LostRow, ResetRequest, StepReply, dump, dump_columns, load, load_step
from aioenv.spaces.infos import MAX_SCHEMAS, Column, ColumnGroup, Path, Schema, column_of_objects
from aioenv.spaces.layout import Layout, SharedLayout, byte_view
from aioenv.state.model_edits import SharedFields, unchanged_fields
from aioenv.state.render_source import PhysicsReader, find_physics
from aioenv.state.snapshot import EPISODE_LOST
from aioenv.worker import worker_context
from aioenv.worker.description import EnvDescription, FirstCheckpoints, dumped, dumped_space, picklable_items
from aioenv.worker.making import make_vector_env
from aioenv.worker.service import Reply, SlotService, StartFailed, close_envs, describe_failure
from aioenv.worker.specs import spec_without_values
from aioenv.worker.vector_access import (
    CheckedNumerics,
    VectorCalls,
    check_numbers,
    refuse_some,
    reset_vector_env,
    step_result,
    steps_some,
    take_observations,
    with_rows,
)
from aioenv.worker.vector_recovery import Infos, LostEnvReset, VectorCheckpoints

__all__ = ["InfoPacker", "VectorReplies", "VectorService"]


class VectorService(SlotService):
    """One vector env, which resets and seeds its slots in its own way; it answers the requests of `EnvService`.

    An exception of the env is an error of all of its slots.

    Args:
        factories: one function for each row, all the same; it is called with `num_envs`.
        num_envs: the number of slots.
        find_source: whether to look for a MuJoCo model, so that images can be drawn elsewhere.
        checkpoints: whether to find out how to resume the env elsewhere.
        with_spec: whether to describe its spec.
        numerics_from: the slot of its first row, which errors about NaN and infinite numbers name; None: no checks.
    """

    def __init__(
        self,
        factories: Sequence[Callable[..., Any]],
        num_envs: int,
        find_source: bool = False,
        checkpoints: bool = False,
        with_spec: bool = False,
        numerics_from: int | None = None,
    ) -> None:
        try:
            self._env = make_vector_env(factories[0], num_envs)
            if numerics_from is not None:
                self._env = CheckedNumerics(self._env, numerics_from)
            self._physics = find_physics(self._env) if find_source else None
            self._checkpoints = VectorCheckpoints(self._env) if checkpoints else None
        except SystemExit:
            raise
        except BaseException as exc:
            raise StartFailed(describe_failure(exc)) from exc
        self._n = num_envs
        self._with_spec = with_spec
        self._closed = False
        self._calls = VectorCalls(self._env)
        self._resets_next = self._env.metadata.get("autoreset_mode") is AutoresetMode.NEXT_STEP
        self._ended: npt.NDArray[np.bool_] = np.zeros(num_envs, np.bool_)  # rows whose episode ended in the last step
        self._resumed = False  # it has replaced a dead worker's env, and was not stepped since
        self._lost: LostEnvReset | None = None  # it has replaced a dead worker's env; not all rows have started

    def describe(self) -> list[EnvDescription]:
        """Return one description for each row; the first one has the spaces."""
        env, checkpoints = self._env, self._checkpoints
        first = EnvDescription(
            dumped_space(env, "single_observation_space"),
            dumped_space(env, "single_action_space"),
            picklable_items(env.metadata),
            env.render_mode,
            dumped(spec_without_values(env)) if self._with_spec else None,
            None if self._physics is None else self._physics.source,
            checkpoints.size if checkpoints is not None else 0,
            checkpoints.obstacle if checkpoints is not None else None,
            stepped_alone=self._n == 1 or steps_some(env),
        )
        rest = [first._replace(observation_space=None, action_space=None, spec=None)] * (self._n - 1)
        return [first._replace(model_fields=unchanged_fields(env)), *rest]

    def configure(
        self,
        observation_space: Space[Any] | None,
        action_space: Space[Any] | None,
        state_size: int,
        draws_late: bool,
        checkpoint_size: int = 0,
        shared_layout: SharedLayout | None = None,
        start: int = 0,
    ) -> FirstCheckpoints | None:
        """Lay out the arrays that both sides agree on (see `EnvService.configure`).

        Raises:
            ValueError: if something is asked for that a vector env does not have.
        """
        if draws_late or shared_layout is not None:
            raise ValueError("a vector env has no late images or shared memory")
        if not checkpoint_size:
            self._checkpoints = None
        elif self._checkpoints is None:
            raise ValueError("make this service with checkpoints=True first")
        else:
            self._checkpoints.lay_out(checkpoint_size)
        env = self._env
        observations = Layout(env.single_observation_space if observation_space is None else observation_space)
        self._replies = VectorReplies(observations, self._n, state_size, self._physics, self._checkpoints)
        self._fields = SharedFields(env, self._n, start)
        self._actions = Layout(env.single_action_space if action_space is None else action_space)
        self._action_arrays = self._actions.zeros(self._n)
        self._action_views = [byte_view(array) for array in self._action_arrays]
        if worker_context.owns_process():
            gc.collect()
            gc.freeze()
        return (self._checkpoints.array.copy(), self._checkpoints.overflow) if self._checkpoints is not None else None

    # ------------------------------------------------------------ steps and resets

    def _step(self, frame: Frame) -> Reply:
        if self._fields.error is not None:
            raise self._fields.error
        rows, objects, _ = load_step(frame.payload)
        if rows is not None and len(rows) < self._n:
            return self._step_some(list(rows), b"".join(frame.fixed), objects or ())
        # a copy: the env may keep its actions, and the next ones are read into the same memory
        actions = self._actions.assemble([array.copy() for array in self._action_arrays], objects or ())
        infos: Infos
        if self._lost is None:
            obs, reward, terminated, truncated, info = step_result(self._env.step(actions))
            infos = [(info, range(self._n))]
        else:
            obs, reward, terminated, truncated, infos = self._lost.step(actions)
            self._end_recovery_if_done()
        flags = self._flags(reward, terminated, truncated)
        self._ended = flags[1] | flags[2]
        self._resumed = False
        return self._reply(obs, flags, infos, range(self._n))

    def _step_some(self, rows: list[int], data: bytes, objects: Sequence[Sequence[Any]]) -> Reply:
        """Step some rows, if the env can do that."""
        if not steps_some(self._env):
            raise refuse_some("step", self._env)
        actions = with_rows(self._actions, self._n, rows, self._actions.split(data, len(rows)), objects)
        infos: Infos
        if self._lost is None:
            result = self._env.step_some(actions, np.array(rows))  # type: ignore[attr-defined]
            obs, reward, terminated, truncated, info = step_result(result)
            infos = [(info, rows)]
        else:
            obs, reward, terminated, truncated, infos = self._lost.step(actions, rows)
            self._end_recovery_if_done()
        flags = [column[rows] for column in self._flags(reward, terminated, truncated)]
        self._ended[rows] = flags[1] | flags[2]
        seen = np.zeros(self._n, np.bool_)
        seen[rows] = True
        return self._reply(obs, flags, infos, rows, seen)

    def _flags(self, reward: Any, terminated: Any, truncated: Any) -> list[npt.NDArray[Any]]:
        n = self._n
        return [
            _column("reward", reward, np.float64, n),
            _column("terminated", terminated, np.bool_, n),
            _column("truncated", truncated, np.bool_, n),
        ]

    def _reset(self, frame: Frame) -> Reply:
        request: ResetRequest = load(frame.payload)
        rows, every = request.rows, range(self._n)
        if not len(rows):  # no slot of this share is in the mask
            return self._replies.repeat(every if request.reply_rows is None else request.reply_rows)
        mask = None
        if len(rows) < self._n:
            mask = np.zeros(self._n, np.bool_)
            mask[list(rows)] = True
        lost = self._lost
        reset = lost.reset if lost is not None else partial(reset_vector_env, self._env)
        obs, info = reset(_seed(rows, request.seeds, self._n, request.listed_seeds), mask, request.options)
        self._end_recovery_if_done()
        self._ended[list(rows)] = False
        if request.reply_all_rows and request.reply_rows is None:
            return self._reply(obs, [], [(info, every)], every, mask if self._resumed or lost is not None else None)
        shown = rows if request.reply_rows is None else request.reply_rows
        return self._reply(obs, [], [(info, rows)], shown, mask)

    def _end_recovery_if_done(self) -> None:
        if self._lost is not None and self._lost.done:
            self._lost = None

    def _reply(
        self,
        obs: Any,
        flags: Sequence[npt.NDArray[Any]],
        infos: Infos,
        rows: Sequence[int],
        seen: npt.NDArray[np.bool_] | None = None,
    ) -> Reply:
        """Make the reply about some rows of the env's results; for `seen` see `VectorReplies.keep`."""
        self._replies.keep(obs, seen)
        if self._checkpoints is not None:
            self._checkpoints.capture(self._ended, complete=self._lost is None)
        return self._replies.make(flags, infos, rows, None if self._lost is None else self._lost.started)

    def after_reply(self) -> Reply | None:
        """Do nothing."""
        return None

    # ------------------------------------------------------------ calls

    def call_envs(self, *args: Any) -> tuple[list[bytes], list[Failure]]:
        """See `VectorCalls.call_envs`."""
        return _dumped(self._calls.call_envs(*args))

    def call_if_any(self, *args: Any) -> tuple[list[bytes], list[Failure]]:
        """See `VectorCalls.call_if_any`."""
        return _dumped(self._calls.call_if_any(*args))

    def apply(self, *args: Any) -> tuple[list[bytes], list[Failure]]:
        """See `VectorCalls.apply`."""
        return _dumped(self._calls.apply(*args))

    def set_attr(self, *args: Any) -> tuple[list[bytes], list[Failure]]:
        """See `VectorCalls.set_attr`."""
        return _dumped(self._calls.set_attr(*args))

    def pending_resets(self, rows: Sequence[int]) -> tuple[list[bytes], list[Failure]]:
        """Return for each row whether its next step will be a reset instead."""
        return _dumped([self._resets_next and bool(self._ended[row]) for row in rows])

    def get_states(self, rows: Sequence[int]) -> tuple[list[bytes], list[Failure]]:
        """See `VectorCalls.get_states`."""
        lost = self._lost
        states = zip(rows, self._calls.get_states(rows), strict=True)
        return _dumped([EPISODE_LOST if lost is not None and lost.is_lost(row) else state for row, state in states])

    def set_states(self, rows: Sequence[int], states: Sequence[Any]) -> tuple[list[bytes], list[Failure]]:
        """See `VectorCalls.set_states`."""
        if self._lost is not None:
            self._lost.prepare_states()
        outcomes = self._calls.set_states(rows, states)
        done = [row for row, outcome in zip(rows, outcomes, strict=True) if outcome is None]
        if self._lost is not None:
            self._lost.mark_started(done)
            self._end_recovery_if_done()
        if (checkpoints := self._checkpoints) is None:
            return _dumped(outcomes)
        checkpoints.capture(self._ended, complete=self._lost is None)
        each = zip(rows, outcomes, strict=True)
        return _dumped([checkpoints.row(row) if outcome is None else outcome for row, outcome in each])

    def resume(
        self,
        rows: Sequence[int],
        after: npt.NDArray[np.float64],
        overflow: Sequence[bytes | None],
        observations: Sequence[npt.NDArray[Any]],
        objects: Sequence[Sequence[Any]],
    ) -> list[str | None]:
        """Bring a new env to where another was.

        Args:
            rows: the rows that had begun an episode.
            after: the last checkpoints of all rows, float64 `(num_envs, checkpoint_size)`.
            overflow: for each of all rows the pickle that did not fit into its checkpoint, or None.
            observations: the latest observations of all rows.
            objects: their object leaves.

        Returns:
            For each of `rows` None if it is where the other was, else why not; then all rows must be reset.
        """
        if self._checkpoints is None:
            raise ValueError("configure this service with a checkpoint_size first")
        if not rows:
            return []
        try:
            self._ended = self._checkpoints.restore(after, overflow)
            self._replies.restore(observations, objects)
        except Exception as exc:
            return [f"{type(exc).__name__}: {exc}"] * len(rows)
        self._resumed = True
        return [None] * len(rows)

    def share_model_field(self, *args: Any) -> None:
        """See `SharedFields.share`."""
        self._fields.share(*args)

    def reset_lost_rows(self, rows: Sequence[LostRow]) -> None:
        """End the episodes that a dead worker had in these rows in their next step, and reset them."""
        self._lost = LostEnvReset(self._env, rows)
        if (obs := self._lost.last_obs) is not None:  # a reset of some rows shows those of the others once more
            self._replies.keep(obs)
        self._replies.keep_states({lost.row: lost.state for lost in rows if lost.state is not None})

    def close(self) -> None:
        """Close the vector env; an exception is logged."""
        if not self._closed:
            self._closed = True
            close_envs([self._env], "the vector env")


def _dumped(values: Sequence[Any]) -> tuple[list[bytes], list[Failure]]:
    return [dump(value) for value in values], []


def _column(name: str, values: Any, dtype: Any, n: int) -> npt.NDArray[Any]:
    check_numbers(name, values)
    array = np.ascontiguousarray(values, dtype)
    if array.shape != (n,) or np.ndim(values) != 1:
        raise ValueError(f"{name}: expected shape {(n,)}, got {np.shape(values)}")
    return array


def _seed(rows: Sequence[int], seeds: Sequence[int | None], num_envs: int, each: bool) -> Any:
    """Return the `seed` for `reset`: None, an int if slot i has that plus i, else (or if `each`) a list."""
    if all(seed is None for seed in seeds):
        return None
    bases = {None if seed is None else seed - row for row, seed in zip(rows, seeds, strict=True)}
    if len(bases) == 1 and not each:
        return bases.pop()
    by_row: list[int | None] = [None] * num_envs
    for row, seed in zip(rows, seeds, strict=True):
        by_row[row] = seed
    return by_row


# ------------------------------------------------------------ replies


class VectorReplies:
    """Keeps the last observations of all rows, and makes replies about the rows that a request asks for.

    Args:
        observations: the layout of the observations.
        num_envs: how many rows there are.
        state_size: how many float64 of physics state each row of a reply carries; 0 for none.
        physics: reads these states.
        checkpoints: the checkpoints that follow them; None: none.
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
        self._physics = physics if state_size else None  # size 0: only its source is needed, as images are observations
        self._checkpoints = checkpoints
        self._packer = InfoPacker(num_envs)
        self._latest: Any = observations.zeros(num_envs), observations.no_objects(num_envs)

    def keep(self, obs: Any, seen: npt.NDArray[np.bool_] | None = None) -> None:
        """Keep a batch of observations as the latest.

        Args:
            obs: the batch that the env has returned.
            seen: the rows to take from it; the others keep their last observations. None: all.
        """
        arrays, objects = take_observations(self._observations, obs, self._n)
        if seen is not None:  # an env that was put into a state may not know its observations until it steps
            last_arrays, last_objects = self._latest
            arrays = [np.where(_wide(seen, new), new, old) for new, old in zip(arrays, last_arrays, strict=True)]
            pairs = zip(objects, last_objects, strict=True)
            objects = [[n if s else o for s, n, o in zip(seen, new, old, strict=True)] for new, old in pairs]
        self._latest = arrays, objects

    def restore(self, observations: Sequence[npt.NDArray[Any]], objects: Sequence[Sequence[Any]]) -> None:
        """Keep the last observations of the env that this one has replaced and resumed."""
        self._latest = [array.copy() for array in observations], [list(column) for column in objects]
        if self._physics is not None:
            self._physics.read(None, self._state)

    def keep_states(self, states: Mapping[int, npt.NDArray[np.float64]]) -> None:
        """Keep the states that images of some rows are drawn from until the env has started an episode in them."""
        for row, state in states.items():
            self._state[row] = state

    def repeat(self, rows: Sequence[int]) -> Reply:
        """Make a reply with the last observations and states of rows: nothing has happened since."""
        arrays, objects = self._latest
        index = list(rows)
        payload = dump(StepReply([], [], [[column[row] for row in index] for column in objects], []))
        extras = [self._state] if self._state.shape[1] else []
        if self._checkpoints is not None:
            extras.append(self._checkpoints.array)
        return Reply([byte_view(array[index]) for array in (*arrays, *extras)], payload if objects else b"")

    def make(
        self,
        flags: Sequence[npt.NDArray[Any]],
        infos: Infos,
        rows: Sequence[int],
        started: npt.NDArray[np.bool_] | None = None,
    ) -> Reply:
        """Make a reply about some rows.

        Args:
            flags: rewards, terminations and truncations of these rows; empty after a reset.
            infos: the infos that the env has returned, each with the rows that it is about.
            rows: the rows of the reply.
            started: the rows whose state in the env is the one of their observation (see `LostEnvReset`); None: all.
        """
        arrays, objects = self._latest
        extras = []
        overflow: Sequence[tuple[int, bytes]] = ()
        if self._physics is not None:
            before = None if started is None else self._state[~started]
            self._physics.read(None, self._state)
            if started is not None:
                self._state[~started] = before
            extras.append(self._state)
        if self._checkpoints is not None:
            extras.append(self._checkpoints.array)
            overflow = self._checkpoints.overflow
        if len(rows) < self._n:
            index = list(rows)
            arrays = [array[index] for array in arrays]
            objects = [[column[row] for row in index] for column in objects]
            extras = [array[index] for array in extras]
            overflow = [(row, data) for row, data in overflow if row in rows]
        fixed = [byte_view(array) for array in (*arrays, *flags, *extras)]
        if not objects and not overflow and not any(info for info, _ in infos):
            return Reply(fixed)
        groups = [group for info, of in infos if info for group in self._packer.pack(info, of)]
        news = self._packer.take_new_schemas()
        if not (news or objects or overflow or any(group.objects for group in groups)):
            return Reply(fixed, dump_columns(groups))
        return Reply(fixed, dump(StepReply(news, groups, [list(o) for o in objects], [], (), overflow)))


def _wide(mask: npt.NDArray[np.bool_], array: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Reshape a mask of rows so that it broadcasts over an array with more axes."""
    return mask.reshape(-1, *[1] * (array.ndim - 1))


# ------------------------------------------------------------ infos


class InfoPacker:
    """Splits the merged infos of a vector env into columns, so that those of all workers can be merged.

    A value without one element for each slot belongs to every slot.
    """

    def __init__(self, num_envs: int) -> None:
        self._n = num_envs
        self._ids: dict[Schema, int] = {}
        self._news: list[tuple[int, Schema]] = []

    def pack(self, info: Mapping[Any, Any], rows: Sequence[int]) -> list[ColumnGroup]:
        """Return the columns of an info dict for some rows; keys with equal masks are in one group."""
        if len(self._ids) >= MAX_SCHEMAS:
            self._ids.clear()
        chosen = np.zeros(self._n, np.bool_)
        chosen[list(rows)] = True
        groups: list[ColumnGroup] = []
        run: list[tuple[Column, Any]] = []
        mask: Any = None
        for column, values, has in self._columns(info, ()):
            if mask is not None and (has != mask).any():
                groups += self._group(run, mask & chosen)
                run = []
            if not run:  # its group must have the dicts that it is nested in
                run = [(Column(column.path[:i], None, (), is_dict=True), None) for i in range(1, len(column.path))]
            mask = has
            run.append((column, values))
        return groups + self._group(run, mask & chosen) if run else groups

    def take_new_schemas(self) -> list[tuple[int, Schema]]:
        """Return the schemas that were not sent to the parent yet."""
        news, self._news = self._news, []
        return news

    def _columns(self, info: Mapping[Any, Any], path: Path) -> list[tuple[Column, Any, npt.NDArray[np.bool_]]]:
        columns: list[tuple[Column, Any, npt.NDArray[np.bool_]]] = []
        for key, value in info.items():
            if isinstance(key, str) and key.startswith("_") and key[1:] in info:
                continue  # the mask of another key
            mask = info.get(f"_{key}")
            if not (isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (self._n,)):
                mask = np.ones(self._n, np.bool_)
            here = (*path, key)
            if isinstance(value, Mapping):
                columns.append((Column(here, None, (), is_dict=True), None, mask))
                columns += self._columns(value, here)
                continue
            if isinstance(value, (int, float, np.number)) and not isinstance(value, np.timedelta64):
                value = np.full(self._n, value)
            if not (isinstance(value, np.ndarray) and value.ndim and len(value) == self._n):
                each = value if isinstance(value, (list, tuple)) and len(value) == self._n else [value] * self._n
                columns.append((Column(here, None, ()), each, mask))
            elif value.dtype.hasobject:
                columns.append((column_of_objects(here, value[mask].tolist()), list(value), mask))
            else:
                # Gymnasium merges Python bools into such an array
                python = value.dtype == np.bool_ and value.ndim == 1
                columns.append((Column(here, value.dtype, value.shape[1:], is_python=python), value, mask))
        return columns

    def _group(self, run: list[tuple[Column, Any]], mask: npt.NDArray[np.bool_]) -> list[ColumnGroup]:
        rows = np.flatnonzero(mask)
        if not len(rows):
            return []
        columns = tuple(column for column, _ in run)
        floats = all(
            c.dtype == np.float64 and c.shape == () and len(c.path) == 1 for c in columns
        )  # dicts have no dtype
        schema = Schema(columns, floats, by_row=False)
        number = self._ids.get(schema)
        if number is None:
            number = self._ids[schema] = len(self._ids)
            self._news.append((number, schema))
        data: list[bytes] = []
        objects: list[list[Any]] = []
        for column, values in run:
            if column.as_objects:
                data += [values[row].tobytes() for row in rows.tolist()]
            elif column.dtype is not None:
                data.append(np.ascontiguousarray(values[rows]).tobytes())
            elif not column.is_dict:
                objects.append([values[row] for row in rows.tolist()])
        return [ColumnGroup(number, None if len(rows) == self._n else tuple(rows.tolist()), b"".join(data), objects)]
