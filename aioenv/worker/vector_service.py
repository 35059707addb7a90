"""The service that holds one `gymnasium.vector.VectorEnv`: a worker's slots as one env, stepped at once."""

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
from aioenv.spaces.layout import Layout, byte_view
from aioenv.spaces.shared_layout import SharedLayout
from aioenv.state.model_edits import SharedFields, unchanged_fields
from aioenv.state.render_source import PhysicsReader, find_physics
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
    """One vector env, which resets and seeds its slots in its own way; speaks the frames of `EnvService`.

    What it raises is an error of all of its slots.

    Args:
        factories: functions, the same one for each row, which is called with `num_envs`.
        num_envs: how many slots it shall have.
        find_source: whether to look for a MuJoCo model, so that images can be drawn elsewhere.
        checkpoints: whether to find out what it takes to resume it elsewhere.
        with_spec: whether to describe its spec.
        numerics_from: the slot of its first row, if NaN and infinite numbers are errors, which name slots; else None.
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
        self._over: npt.NDArray[np.bool_] = np.zeros(num_envs, np.bool_)  # whose episode ended in the last step
        self._resumed = False  # in the place of one that died, and not stepped since
        self._anew: LostEnvReset | None = (
            None  # in the place of one that died, until all of its rows have begun an episode
        )

    def describe(self) -> list[EnvDescription]:
        """One description for each row; the first has the spaces."""
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
        plane: SharedLayout | None = None,
        start: int = 0,
    ) -> FirstCheckpoints | None:
        """Lay out the arrays that both sides agree on (see `EnvService.configure`).

        Raises:
            ValueError: if something is asked for that a vector env does not have.
        """
        if draws_late or plane is not None:
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
        return (self._checkpoints.array.copy(), self._checkpoints.beyond) if self._checkpoints is not None else None

    # ------------------------------------------------------------ steps and resets

    def _step(self, frame: Frame) -> Reply:
        if self._fields.error is not None:
            raise self._fields.error
        rows, objects, _ = load_step(frame.tail)
        if rows is not None and len(rows) < self._n:
            return self._step_some(list(rows), b"".join(frame.fixed), objects or ())
        # a copy: the env may keep its actions, and the next ones are read into the same memory
        actions = self._actions.assemble([array.copy() for array in self._action_arrays], objects or ())
        infos: Infos
        if self._anew is None:
            obs, reward, terminated, truncated, info = step_result(self._env.step(actions))
            infos = [(info, range(self._n))]
        else:
            obs, reward, terminated, truncated, infos = self._anew.step(actions)
            if self._anew.is_over:
                self._anew = None
        flags = self._flags(reward, terminated, truncated)
        self._over = flags[1] | flags[2]
        self._resumed = False
        return self._reply(obs, flags, infos, range(self._n))

    def _step_some(self, rows: list[int], data: bytes, objects: Sequence[Sequence[Any]]) -> Reply:
        """Step some rows, if the env can."""
        if not steps_some(self._env):
            raise refuse_some("step", self._env)
        actions = with_rows(self._actions, self._n, rows, self._actions.split(data, len(rows)), objects)
        infos: Infos
        if self._anew is None:
            result = self._env.step_some(actions, np.array(rows))  # type: ignore[attr-defined]
            obs, reward, terminated, truncated, info = step_result(result)
            infos = [(info, rows)]
        else:
            obs, reward, terminated, truncated, infos = self._anew.step(actions, rows)
            if self._anew.is_over:
                self._anew = None
        flags = [column[rows] for column in self._flags(reward, terminated, truncated)]
        self._over[rows] = flags[1] | flags[2]
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
        request: ResetRequest = load(frame.tail)
        rows, every = request.rows, range(self._n)
        if not len(rows):  # no slot of this share is in the mask
            return self._replies.again(every if request.shown is None else request.shown)
        mask = None
        if len(rows) < self._n:
            mask = np.zeros(self._n, np.bool_)
            mask[list(rows)] = True
        anew = self._anew
        reset = anew.reset if anew is not None else partial(reset_vector_env, self._env)
        obs, info = reset(_seed(rows, request.seeds, self._n, request.each), mask, request.options)
        if anew is not None and anew.is_over:
            self._anew = None
        self._over[list(rows)] = False
        if request.shown is not None:
            return self._reply(obs, [], [(info, rows)], request.shown, mask)
        shown = every if request.whole else rows
        return self._reply(obs, [], [(info, shown)], shown, mask if self._resumed or anew is not None else None)

    def _reply(
        self,
        obs: Any,
        flags: Sequence[npt.NDArray[Any]],
        infos: Infos,
        rows: Sequence[int],
        seen: npt.NDArray[np.bool_] | None = None,
    ) -> Reply:
        """What the env has just given, as a reply about some rows; `seen` as of `VectorReplies.keep`."""
        self._replies.keep(obs, seen)
        if self._checkpoints is not None:
            self._checkpoints.capture(self._over, whole=self._anew is None)
        return self._replies.make(flags, infos, rows, None if self._anew is None else self._anew.begun)

    def afterwards(self) -> Reply | None:
        """Nothing waits."""
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

    def resets_due(self, rows: Sequence[int]) -> tuple[list[bytes], list[Failure]]:
        """For each row whether its next step will be a reset instead."""
        return _dumped([self._resets_next and bool(self._over[row]) for row in rows])

    def get_states(self, rows: Sequence[int]) -> tuple[list[bytes], list[Failure]]:
        """See `VectorCalls.get_states`."""
        return _dumped(self._calls.get_states(rows))

    def set_states(self, rows: Sequence[int], states: Sequence[Any]) -> tuple[list[bytes], list[Failure]]:
        """See `VectorCalls.set_states`."""
        outcomes = self._calls.set_states(rows, states)
        done = [row for row, outcome in zip(rows, outcomes, strict=True) if outcome is None]
        if self._anew is not None:
            self._anew.go_on(done)
            if self._anew.is_over:
                self._anew = None
        if (checkpoints := self._checkpoints) is None:
            return _dumped(outcomes)
        checkpoints.capture(self._over, whole=self._anew is None)
        each = zip(rows, outcomes, strict=True)
        return _dumped([checkpoints.row(row) if outcome is None else outcome for row, outcome in each])

    def resume(
        self,
        rows: Sequence[int],
        after: npt.NDArray[np.float64],
        beyond: Sequence[bytes | None],
        observations: Sequence[npt.NDArray[Any]],
        objects: Sequence[Sequence[Any]],
    ) -> list[str | None]:
        """Bring a new env to where another was.

        Args:
            rows: those that had begun an episode.
            after: the last checkpoints of all rows, float64 `(num_envs, checkpoint_size)`.
            beyond: for each of all rows what did not fit in, or None.
            observations: the latest of all rows.
            objects: those of their leaves that are no arrays.

        Returns:
            For each of `rows` None if it is where the other was, else why not; then all must be reset.
        """
        if self._checkpoints is None:
            raise ValueError("configure this service with a checkpoint_size first")
        if not rows:
            return []
        try:
            self._over = self._checkpoints.restore(after, beyond)
            self._replies.restore(observations, objects)
        except Exception as exc:
            return [f"{type(exc).__name__}: {exc}"] * len(rows)
        self._resumed = True
        return [None] * len(rows)

    def share_model_field(self, *args: Any) -> None:
        """See `SharedFields.share`."""
        self._fields.share(*args)

    def begin_anew(self, rows: Sequence[LostRow]) -> None:
        """Another process had these rows and died: say so in their next step, and reset them then."""
        self._anew = LostEnvReset(self._env, rows)
        if (obs := self._anew.last_obs) is not None:  # a reset of some rows tells the others' once more
            self._replies.keep(obs)
        self._replies.keep_states({lost.row: lost.state for lost in rows if lost.state is not None})

    def close(self) -> None:
        """Close the vector env; what it raises is told."""
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
    """What a vector env's `reset` takes: one int if slot i has that plus i, else (or if `each`) a list, or None."""
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


# ------------------------------------------------------------ infos


class InfoPacker:
    """Takes the merged infos of a vector env apart into columns, so that those of all workers can be merged.

    What has no element for each slot is every slot's.
    """

    def __init__(self, num_envs: int) -> None:
        self._n = num_envs
        self._ids: dict[Schema, int] = {}
        self._news: list[tuple[int, Schema]] = []

    def pack(self, info: Mapping[Any, Any], rows: Sequence[int]) -> list[ColumnGroup]:
        """The groups of what an info dict says of some rows; keys whose masks are equal go together."""
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
            if not run:  # the dicts that it is in must be in its group
                run = [(Column(column.path[:i], None, (), is_dict=True), None) for i in range(1, len(column.path))]
            mask = has
            run.append((column, values))
        return groups + self._group(run, mask & chosen) if run else groups

    def take_new_schemas(self) -> list[tuple[int, Schema]]:
        """The schemas that the parent has not been told of yet."""
        news, self._news = self._news, []
        return news

    def _columns(self, info: Mapping[Any, Any], path: Path) -> list[tuple[Column, Any, npt.NDArray[np.bool_]]]:
        columns: list[tuple[Column, Any, npt.NDArray[np.bool_]]] = []
        for key, value in info.items():
            if isinstance(key, str) and key.startswith("_") and key[1:] in info:
                continue  # the mask of another
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
                # as Gymnasium merges them, an array of bool was made of Python's own
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
