"""The service that holds one `gymnasium.vector.VectorEnv`: a worker's slots as one env, stepped at once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from aioenv.ipc.frames import Frame
from aioenv.ipc.messages import Failure, LostRow, ResetRequest, dump, load, load_step
from aioenv.spaces.layout import Layout, byte_view
from aioenv.spaces.shared_layout import SharedLayout
from aioenv.state.physics_batch import find_physics
from aioenv.state.shared_fields import SharedFields, unchanged_fields
from aioenv.worker import current_row
from aioenv.worker.closing import close_envs
from aioenv.worker.description import EnvDescription, FirstCheckpoints, dumped, dumped_space, picklable_items
from aioenv.worker.loop import StartFailed, describe_failure
from aioenv.worker.service import Reply, SlotService
from aioenv.worker.specs import spec_without_values
from aioenv.worker.vector.access import refuse_some, reset_vector_env, steps_some, with_rows
from aioenv.worker.vector.calls import VectorCalls
from aioenv.worker.vector.checkpoint import VectorCheckpoints
from aioenv.worker.vector.lost_env_reset import Infos, LostEnvReset
from aioenv.worker.vector.making import make_vector_env
from aioenv.worker.vector.numerics import CheckedNumerics
from aioenv.worker.vector.replies import VectorReplies
from aioenv.worker.vector.results import check_numbers, step_result

__all__ = ["VectorService"]


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
        if current_row.alone():
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
