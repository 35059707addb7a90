"""The service that holds single envs: it steps the envs of a worker's slots, row by row, and replies in columns.

A *row* is a slot's place within its worker: the parent knows slots, the worker rows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Env, Space
from gymnasium.vector import AutoresetMode

from aioenv.ipc.frames import MAX_FIXED_BYTES, Frame, new_tuple
from aioenv.ipc.messages import Failure, LostRow, ResetRequest, StepReply, dump, dump_columns, load, load_step
from aioenv.spaces.autoreset import LOST, Autoreset, Stepped, copy_containers
from aioenv.spaces.infos import Gatherer
from aioenv.spaces.layout import Layout, SharedBatch, SharedLayout
from aioenv.state.assets import Looks
from aioenv.state.checkpoint import Checkpoints, RowCheckpoint
from aioenv.state.render_source import EnvRenderable, MujocoSource, find_pixel_renderable
from aioenv.state.snapshot import (
    EPISODE_LOST,
    REMEDY,
    Misfit,
    RawState,
    decode,
    encode,
    is_pickled,
    read_snapshot,
    write_snapshot,
)
from aioenv.stats.counters import ResetPlan
from aioenv.stats.sharing import counting_paused, unshared_stats
from aioenv.worker import worker_context
from aioenv.worker.description import EnvDescription, FirstCheckpoints, check_env, describe_envs
from aioenv.worker.row_buffers import ActionRows, ResultRows
from aioenv.worker.service import FastPath, PartialStep, Reply, SlotService, StartFailed, close_envs, describe_failure
from aioenv.worker.vector_states import AWAITS_RESET, as_single
from aioenv.worker.worker_context import map_memory

__all__ = ["EnvService", "Overflow"]

# The bytes of a row that did not fit into its checkpoints before and after an operation; None if all did.
Overflow: TypeAlias = "tuple[bytes | None, bytes | None]"


class EnvService(SlotService):
    """Envs that are stepped one after the other.

    Args:
        factories: functions, one an env, which are called in the order of their rows.
        mode: the autoreset mode.
        find_sources: whether to look for MuJoCo models, so that images can be drawn elsewhere.
        checkpoints: whether to find out how to resume the envs elsewhere.
        cast: see `ResultRows`.
        by_camera: see `find_source`.
        looks: when to look for edits of models (see `RenderConfig.edits`).
        with_spec: whether to describe the spec of the first env.
        lenient, numerics, has_spares: see `Autoreset`.
        spare: whether the envs are the second ones of their slots.
    """

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        mode: AutoresetMode,
        find_sources: bool,
        checkpoints: bool = False,
        cast: bool = False,
        by_camera: bool = False,
        looks: Looks = "each reset",
        with_spec: bool = False,
        lenient: bool = False,
        numerics: bool = False,
        has_spares: bool = False,
        spare: bool = False,
    ) -> None:
        worker_context.set_spare(spare)
        self._envs: list[Env[Any, Any]] = []
        self._cast = cast
        self._find_sources, self._by_camera, self._with_spec = find_sources, by_camera, with_spec
        self._looks = looks
        for row in range(len(factories)):
            try:
                with worker_context.running_row(row):
                    self._envs.append(check_env(factories[row]()))
            except SystemExit:
                raise
            except BaseException as exc:
                self.close()
                raise StartFailed(describe_failure(exc, row)) from exc
        self._stepper = Autoreset(
            self._envs, mode, worker_context.current_row(), lenient=lenient, numerics=numerics, has_spares=has_spares
        )
        self._row_checkpoints = [RowCheckpoint(env) for env in self._envs] if checkpoints else []
        self._checkpoints: Checkpoints | None = None
        self._all_rows = range(len(self._envs))
        self._gatherer = Gatherer()
        self._draws_late = False
        self._has_fast_path = False
        self._write_extras: Callable[[int, int], bool] | None = None  # states and checkpoints, for the fast path
        self._rows_to_draw: list[int] | None = None
        self._sources: list[MujocoSource | None] = [None] * len(self._envs)
        self._renderables: list[EnvRenderable] = []  # of all rows, if replies carry physics states
        # (row, "render" or "pixels", …) of envs whose models may change
        self._editable: list[tuple[int, str, EnvRenderable]] = []

    def describe(self) -> list[EnvDescription]:
        """Return one description for each row."""
        descriptions = describe_envs(
            self._envs,
            self._row_checkpoints,
            self._find_sources,
            by_camera=self._by_camera,
            with_spec=self._with_spec,
        )
        self._sources = [description.source for description in descriptions]
        return descriptions

    def configure(
        self,
        observation_space: Space[Any] | None,
        action_space: Space[Any] | None,
        state_size: int,
        draws_late: bool,
        checkpoint_size: int = 0,
        shared_layout: SharedLayout | None = None,
        start: int = 0,
        reset_plan: ResetPlan | None = None,
    ) -> FirstCheckpoints | None:
        """Lay out the arrays that both sides agree on.

        Args:
            observation_space: the single space that the batch is made of; None: that of the first row.
            action_space: likewise.
            state_size: how many float64 of physics state each row of a reply carries; 0 for none.
            draws_late: whether to render each row after the reply to a step or reset was sent.
            checkpoint_size: how many float64 of checkpoint each row of a reply carries, after the physics state: at
                least the largest of `describe`; 0 for none.
            shared_layout: which arrays lie in shared memory; None: none.
            start: the slot of the first row.
            reset_plan: gives the seeds of episodes that are reset without one, and the options of automatic resets.

        Returns:
            The first checkpoints, float64 of shape `(rows, checkpoint_size)`, from which a first reset starts if it
            comes without a seed; and rows with the bytes that did not fit into theirs. None without checkpoints.

        Raises:
            ValueError: if a row can't be resumed, or needs a larger checkpoint.
        """
        n = len(self._envs)
        layout = Layout(self._envs[0].action_space if action_space is None else action_space)
        observations = Layout(self._envs[0].observation_space if observation_space is None else observation_space)
        self._checkpoints = self._lay_out_checkpoints(checkpoint_size) if checkpoint_size else None
        self._state = np.zeros((n, state_size), np.float64)
        self._find_renderables(state_size)
        self._draws_late = draws_late
        extras = [self._state] if state_size else []
        if self._checkpoints is not None:
            extras.append(self._checkpoints.array)
        batches = [SharedBatch({}, {})]
        if shared_layout is not None:
            memory = map_memory(shared_layout.size(observations, layout))
            batches = shared_layout.batches(memory, observations, layout)
        mine = slice(start, start + n)
        shared = [{i: array[mine] for i, array in batch.observations.items()} for batch in batches]
        self._rows = ResultRows(observations, n, shared, extras, self._cast)
        actions = [{i: array[mine] for i, array in batch.actions.items()} for batch in batches]
        self._actions = ActionRows(layout, n, actions, named=shared_layout is not None)
        self._action_views = self._actions.views
        simple = layout.is_single_array and observations.is_numeric and not (shared_layout and shared_layout.actions)
        small = sum(map(len, self._rows.step_buffers(0, n))) <= MAX_FIXED_BYTES  # else Python raises the error
        self._has_fast_path = simple and small and not draws_late
        self._write_extras = self._write_extras_of if extras or self._editable else None
        if reset_plan is not None:
            self._stepper.use_plan(reset_plan, start)
        for row, use, renderable in self._editable:
            if use == "render":
                self._stepper.wrap_reset(row, renderable.note_episode_end, renderable.expect_edit)
        if worker_context.owns_process():  # all objects that live now stay: spare full collections the look at them
            gc.collect()
            gc.freeze()
        return (self._checkpoints.array.copy(), self._checkpoints.overflow) if self._checkpoints is not None else None

    def _lay_out_checkpoints(self, size: int) -> Checkpoints:
        for row in range(len(self._envs)):
            needed = self._row_checkpoints[row].least if self._row_checkpoints else 0
            if not 0 < needed <= size:
                why = f"it needs {needed}" if needed else "it can't be resumed"
                raise ValueError(f"row {row} has no checkpoint of {size} words: {why}")
        checkpoints = Checkpoints(self._row_checkpoints, size, self._stepper.pending_reset)
        checkpoints.capture(self._all_rows)
        return checkpoints

    def _find_renderables(self, state_size: int) -> None:
        """Find what images are drawn from, and which of these models may change while the env runs."""
        if state_size:
            each = zip(self._envs, self._sources, strict=True)
            how: Any = {"by_camera": self._by_camera, "looks": self._looks}
            self._renderables = [EnvRenderable(env, source, **how) for env, source in each if source is not None]
        self._editable = [(row, "render", renderable) for row, renderable in enumerate(self._renderables)]
        for row, env in enumerate(self._envs):
            if (renderable := find_pixel_renderable(env)) is not None:
                self._editable.append((row, "pixels", renderable))
        self._editable = [each for each in self._editable if each[2].source.numbered]

    # ------------------------------------------------------------ steps

    def _step(self, frame: Frame) -> Reply:
        rows: Sequence[int] = self._all_rows
        chosen, action_objects, given = load_step(frame.payload)
        batch, data = self._actions.unpack(frame)
        if given is not None:
            actions = given
        elif chosen is None:
            actions = self._actions.of_all(batch, action_objects or ())
        else:
            rows = chosen
            actions = self._actions.of_some(batch, rows, data, action_objects or ())
        out = self._stepper.step(rows, actions, self._rows.direct_into(batch) if isinstance(rows, range) else None)
        if out.rows:
            self._rows.store(batch, out)
        return self._reply_to_step(rows, out)

    def _finish_step(self, partial: PartialStep) -> Reply:
        if partial.row < 0:
            raise partial.outcome
        rows = self._all_rows if partial.rows == self._all_rows else partial.rows
        stopped = partial.row, partial.outcome, partial.nonstandard, partial.last_step
        out = self._stepper.step(rows, partial.actions, self._rows.direct_into(partial.batch), (partial.infos, stopped))
        if out.rows:
            self._rows.store(partial.batch, out)
        return self._reply_to_step(rows, out)

    def _reply_to_step(self, rows: Sequence[int], out: Stepped) -> Reply:
        failures = [describe_failure(exc, row) for row, exc in out.failures] if out.failures else []
        return self._reply(rows, True, out.infos, failures, rows, out.exhausted, out.lost, ended=out.ended)

    def fast_path(self) -> FastPath | None:
        """Return what C needs for steps of envs whose observations and actions are arrays."""
        direct = self._rows.direct if self._has_fast_path else None
        if direct is None or (self._checkpoints is not None and self._checkpoints.overflow):
            return None  # a state that overflows may do so in the next step, too: don't write it twice
        buffers, schemas = self._rows.step_buffers, self._gatherer.c_schemas
        fixed, extras = buffers(0, len(self._envs)), self._write_extras
        return FastPath(
            self._action_views,
            self._actions.array,
            *self._stepper.c_arguments,
            direct,
            buffers,
            schemas,
            fixed,
            extras,
        )

    def _write_extras_of(self, first: int, count: int) -> bool:
        """Write states and checkpoints of successive rows that C has stepped; return False if Python must reply."""
        rows = range(first, first + count)
        if self._state.shape[1]:
            try:
                self._read_states(rows)
            except Exception:  # `_reply` finds out which row it is
                return False
        if self._checkpoints is not None:
            self._checkpoints.capture(rows)
        if any(renderable.updates for _, _, renderable in self._editable):
            return False
        return self._checkpoints is None or not self._checkpoints.overflow

    def _read_states(self, rows: Iterable[int]) -> None:
        for row in rows:
            renderable = self._renderables[row]
            if renderable.updates:  # of a row that was read before and not sent
                renderable.updates = [update for update in renderable.updates if update.key]
            renderable.read(self._state[row])

    def _take_render_updates(self) -> list[tuple[int, Any]]:
        return [(row, (use, update)) for row, use, model in self._editable for update in model.take_updates()]

    # ------------------------------------------------------------ resets and replies

    def _reset(self, frame: Frame) -> Reply:
        request: ResetRequest = load(frame.payload)
        batch, _ = self._actions.unpack(frame)
        infos: list[tuple[int, dict[str, Any]]] = []
        failures: list[Failure] = []
        exhausted: list[int] = []
        episodes = request.episodes or [None] * len(request.rows)
        for row, seed, episode in zip(request.rows, request.seeds, episodes, strict=True):
            try:
                # None in a list of seeds: this slot goes on with its plan
                starts_over = request.every_slot and not (request.listed_seeds and seed is None)
                obs, info = self._stepper.reset(
                    row,
                    seed,
                    request.options,
                    automatic=request.automatic,
                    starts_over=starts_over,
                    episode=episode,
                    restored=request.restored,
                )
                self._rows.write_observation(batch, row, obs)
                if info:
                    infos.append((row, copy_containers(info)))  # the next env may write into the same arrays and dicts
            except SystemExit:
                raise
            except BaseException as exc:
                if self._stepper.note_exhausted(row, exc):
                    exhausted.append(row)
                else:
                    failures.append(describe_failure(exc, row))
        rows: Sequence[int] = self._all_rows if request.reply_all_rows else request.rows
        if request.reply_rows is not None:
            rows = request.reply_rows
        reset = set(request.rows).difference(exhausted, (failure.row for failure in failures))
        self._rows.rewrite_last(batch, [row for row in rows if row not in reset])
        return self._reply(rows, False, infos, failures, request.rows, exhausted)

    def _reply(
        self,
        rows: Sequence[int],
        stepped: bool,
        infos: list[tuple[int, dict[str, Any]]],
        failures: list[Failure],
        touched: Sequence[int],
        exhausted: Sequence[int] = (),
        lost: Sequence[int] = (),
        *,
        ended: bool = False,
    ) -> Reply:
        """Make the reply about some rows after a step or reset.

        Args:
            rows: the rows that the reply shows.
            stepped: whether it has rewards and flags.
            infos: (row, info).
            failures: of rows.
            touched: the rows that were stepped or reset; the others are unchanged.
            exhausted: the rows whose envs have no further episode.
            lost: those of `touched` whose new envs have not begun an episode, so that their state is not shown.
            ended: see `Stepped`. The reply has a payload then: the parent looks at the flags of such replies.
        """
        shown = [row for row in touched if row not in lost] if lost else touched
        if self._state.shape[1]:
            try:
                self._read_states(shown)
            except Exception:  # it concerns one row alone
                failures = [*failures, *self._unreadable(shown, {failure.row for failure in failures})]
        overflow: Sequence[tuple[int, bytes]] = ()
        if self._checkpoints is not None:
            self._checkpoints.capture(touched)
            overflow = self._checkpoints.overflow
        if self._draws_late:
            self._rows_to_draw = list(shown)
        updates = self._take_render_updates() if self._editable else ()
        fixed = self._rows.buffers(rows, stepped=stepped)
        objects = self._rows.objects
        if len(rows) < len(self._envs):
            objects = [[column[row] for row in rows] for column in objects]
        if not (infos or failures or objects or exhausted or overflow or updates or ended):
            return new_tuple(Reply, (fixed, b""))
        try:
            groups = self._gatherer.gather(infos, rows) if infos else []
            news = self._gatherer.take_new_schemas()
            more = news or failures or objects or exhausted or overflow or updates or ended
            if not (more or any(group.objects for group in groups)):
                return Reply(fixed, dump_columns(groups))
            payload = dump(StepReply(news, groups, objects, failures, exhausted, overflow, updates))
        except Exception:
            payload = self._without_unpicklable(rows, infos, objects, failures, exhausted, overflow, updates)
        return Reply(fixed, payload)

    def _unreadable(self, rows: Sequence[int], failed: Container[int | None]) -> list[Failure]:
        """Read the states that can be read; return a failure for each other row that has not failed anyway."""
        failures = []
        for row in rows:
            try:
                self._read_states([row])
            except Exception as exc:
                if row not in failed:
                    failures.append(describe_failure(exc, row))
        return failures

    def _without_unpicklable(
        self,
        rows: Sequence[int],
        infos: list[tuple[int, dict[str, Any]]],
        objects: list[list[Any]],
        failures: list[Failure],
        exhausted: Sequence[int],
        overflow: Sequence[tuple[int, bytes]],
        updates: Sequence[tuple[int, Any]],
    ) -> bytes:
        """Find the rows whose infos or observations don't pickle, and report those rows alone as failed."""
        good: list[tuple[int, dict[str, Any]]] = []
        for row, info in infos:
            try:
                if not isinstance(info, Mapping):
                    raise TypeError(f"info: expected a dict, got {type(info).__name__}")
                dump(Gatherer().gather([(row, info)], rows))
                good.append((row, info))
            except Exception as exc:
                if isinstance(info, Mapping):
                    exc.add_note(f"the info dict of this env can't be pickled: {list(info)}")
                failures.append(describe_failure(exc, row))
        objects = [list(column) for column in objects]
        for index, row in enumerate(rows):
            try:
                dump([column[index] for column in objects])
            except Exception as exc:
                exc.add_note("the observation of this env can't be pickled")
                failures.append(describe_failure(exc, row))
                for column in objects:
                    column[index] = None
        self._gatherer = Gatherer()  # the old one believes that its news were sent
        groups = self._gatherer.gather(good, rows)
        return dump(
            StepReply(self._gatherer.take_new_schemas(), groups, objects, failures, exhausted, overflow, updates)
        )

    def after_reply(self) -> Reply | None:
        """Render the rows that were just stepped, if the parent wants images that only the envs can draw."""
        rows, self._rows_to_draw = self._rows_to_draw, None
        if rows is None:
            return None
        images: list[Any] = []
        failures: list[Failure] = []
        for row in rows:
            try:
                with worker_context.running_row(row):
                    images.append(self._envs[row].render())
            except SystemExit:
                raise
            except BaseException as exc:
                images.append(None)
                failures.append(describe_failure(exc, row))
        try:
            return Reply((), dump((rows, images, failures)))
        except Exception:
            for i, row in enumerate(rows):  # find the image that does not pickle
                try:
                    dump(images[i])
                except Exception as exc:
                    exc.add_note(f"its image, a {type(images[i]).__name__}, can't be pickled")
                    images[i] = None
                    failures.append(describe_failure(exc, row))
            return Reply((), dump((rows, images, failures)))

    def close(self) -> None:
        """Close every env; an exception of one is logged and does not keep the others open."""
        envs, self._envs = self._envs, []
        close_envs(envs, "an env")

    # ------------------------------------------------------------ calls and states

    def call_envs(
        self, rows: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[bytes], list[Failure]]:
        """Call a method of envs, or read an attribute, in whichever wrapper it is found first."""

        def call(env: Env[Any, Any]) -> Any:
            value = env.get_wrapper_attr(name)
            return value(*args, **kwargs) if callable(value) else value

        return self._for_each(rows, [call] * len(rows))

    def call_if_any(self, rows: Sequence[int], name: str) -> tuple[list[bytes], list[Failure]]:
        """Call a method of envs without arguments; None for those that have no such method."""

        def call(env: Env[Any, Any]) -> Any:
            return env.get_wrapper_attr(name)() if env.has_wrapper_attr(name) else None

        return self._for_each(rows, [call] * len(rows))

    def apply(
        self, rows: Sequence[int], function: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[list[bytes], list[Failure]]:
        """Call a function with each env and some arguments: for questions that no method of the env answers."""
        return self._for_each(rows, [lambda env: function(env, *args)] * len(rows))

    def set_attr(self, rows: Sequence[int], name: str, values: Sequence[Any]) -> tuple[list[bytes], list[Failure]]:
        """Set an attribute of envs on the wrapper that has it, else on the env itself."""
        return self._for_each(rows, [lambda env, v=v: env.set_wrapper_attr(name, v) for v in values])  # type: ignore[misc]

    def pending_resets(self, rows: Sequence[int]) -> tuple[list[bytes], list[Failure]]:
        """Return for each row whether its next step will be a reset instead."""
        return self._for_each(rows, [lambda _, row=row: self._stepper.pending_reset[row] == 1 for row in rows])  # type: ignore[misc]

    def get_states(self, rows: Sequence[int], prepared: Sequence[bool] = ()) -> tuple[list[bytes], list[Failure]]:
        """Return the state of each env or, as a string, why there is none.

        Args:
            rows: the rows.
            prepared: for each of them whether its state has the first observation and info of its episode, too; empty:
                no.
        """
        each = zip(rows, prepared or [False] * len(rows), strict=True)
        return self._for_each(rows, [lambda env, r=r, p=p: _or_text(self._read_state, env, r, p) for r, p in each])  # type: ignore[misc]

    def _read_state(self, env: Env[Any, Any], row: int, prepared: bool) -> RawState:
        pending = self._stepper.pending_reset[row]
        if pending == LOST:  # the new env was never reset
            raise Misfit(EPISODE_LOST)
        state = read_snapshot(env, pending == 1)
        if prepared:
            _, values, arrays = state
            values["first"] = encode(self._stepper.firsts[row], "first", arrays)
            values["pickled"] |= is_pickled(values["first"])
        return state

    def set_states(self, rows: Sequence[int], states: Sequence[RawState]) -> tuple[list[bytes], list[Failure]]:
        """Bring each env into a state; return its checkpoint and the overflow, or why nothing was done."""
        each = zip(rows, states, strict=True)
        return self._for_each(rows, [lambda _, r=r, s=s: _or_text(self._set_state, r, s) for r, s in each])  # type: ignore[misc]

    def take_stats(self) -> dict[bytes, dict[int, Any]]:
        """Take the new samples of statistics that are copies in this process, by key and slot."""
        return {key: taken for key, stats in list(unshared_stats.items()) if (taken := stats.take())}

    def load_stats(self, states: dict[bytes, dict[str, Any]]) -> None:
        """Bring those copies up to date with the parent's statistics."""
        for key, state in states.items():
            stats = unshared_stats.get(key)
            if stats is not None:
                stats.load_state_dict(state)

    def _set_state(self, row: int, state: RawState) -> tuple[npt.NDArray[np.float64], bytes | None] | None:
        self._stepper.restored.pop(row, None)
        first = decode(state[1]["first"], state[2]) if "first" in state[1] else ()
        if "vector" in state[1]:
            state = as_single(self._envs[row], state, self._stepper.mode)
        if state[1].get("due") and not self._stepper.resets_next_step:
            raise Misfit(AWAITS_RESET)
        self._stepper.continue_from(row, write_snapshot(self._envs[row], state))
        self._stepper.restored[row] = first
        if self._checkpoints is None:
            return None
        self._checkpoints.capture([row])
        return self._checkpoints.array[row], self._row_checkpoints[row].overflow

    def _for_each(
        self, rows: Sequence[int], functions: Sequence[Callable[[Env[Any, Any]], Any]]
    ) -> tuple[list[bytes], list[Failure]]:
        """Call one function a row, and pickle each result alone: one that doesn't pickle is a failure of its row."""
        results: list[bytes] = []
        failures: list[Failure] = []
        for row, function in zip(rows, functions, strict=True):
            try:
                with worker_context.running_row(row):
                    results.append(dump(function(self._envs[row])))
            except SystemExit:
                raise
            except BaseException as exc:
                results.append(b"")
                failures.append(describe_failure(exc, row))
            for other, _, renderable in self._editable:
                if other == row:
                    renderable.expect_edit()
        return results, failures

    # ------------------------------------------------------------ recovery: envs in place of those of a dead worker

    def resume(
        self,
        rows: Sequence[int],
        before: npt.NDArray[np.float64],
        operations: Sequence[tuple[Any, ...] | None],
        after: npt.NDArray[np.float64],
        overflow: Sequence[Overflow] = (),
        states: npt.NDArray[np.float64] | None = None,
    ) -> list[str | None]:
        """Bring new envs to where others were: restore the state before their last operation, and replay it.

        Args:
            rows: the rows of the new envs.
            before: checkpoints before the operations, float64 of shape `(len(rows), checkpoint_size)`. Zeros before
                a reset mean that there was none.
            operations: `("step", action)`, an action as its env takes it, `("reset", seed, options, automatic)`, or
                `("set_state", state)`; None if there was no operation yet: then `after` is restored.
            after: checkpoints after the operations.
            overflow: for each row what did not fit into these two; empty if all did.
            states: what images of the rows were drawn from last, float64 `(len(rows), state_size)`.

        Returns:
            For each row None if it is where the other was, else what differs; such an env must be reset.
        """
        if self._checkpoints is None:
            raise ValueError("configure this service with a checkpoint_size first")
        outcomes: list[str | None] = []
        if states is not None:
            self._state[list(rows)] = states
        overflow = overflow or [(None, None)] * len(rows)
        for row, start, operation, end, rest in zip(rows, before, operations, after, overflow, strict=True):
            try:
                with counting_paused():  # statistics have counted these steps already
                    outcomes.append(self._resume(row, start, operation, end, rest))
            except Exception as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
        return outcomes

    def _resume(
        self,
        row: int,
        before: npt.NDArray[np.float64],
        operation: Any,
        after: npt.NDArray[np.float64],
        overflow: Overflow,
    ) -> str | None:
        assert self._checkpoints is not None
        checkpoint = self._row_checkpoints[row]
        due = self._stepper.pending_reset
        match operation:
            case None:
                due[row] = checkpoint.restore(after, overflow[1])
            case ("set_state", state):
                self._set_state(row, state)
            case ("reset", seed, options, automatic):
                if np.array(before).view(np.uint64).any():  # as bits: small integers are subnormal floats
                    due[row] = checkpoint.restore(before, overflow[0])
                obs, _ = self._stepper.reset(row, seed, options, automatic=automatic)
                self._rows.write_observation(0, row, obs)
            case ("step", action):
                due[row] = checkpoint.restore(before, overflow[0])
                out = self._stepper.step([row], [action])
                self._rows.store(0, out)
                if out.failures:
                    exc = out.failures[0][1]
                    raised = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
                    return f"{raised}, when its last step was made again; if it remembers more than MuJoCo, {REMEDY}"
            case _:
                raise ValueError(f"row {row}: not an operation: {operation!r}")
        if checkpoint.replays:
            checkpoint.restore_wrappers(after, overflow[1])
        else:
            due[row] = checkpoint.restore(after, overflow[1])
        self._checkpoints.capture([row])
        return checkpoint.difference(self._checkpoints.array[row], after)

    def reset_lost_rows(self, rows: Sequence[LostRow]) -> None:
        """End the episodes of a dead worker in the next step of these rows, and reset them as the mode requires."""
        for row, seed, obs, over, state, exhausted in rows:
            if obs is not None:
                self._rows.write_observation(0, row, obs)  # a reset of other rows shows it once more
            if state is not None:
                self._state[row] = state  # the state that images of that observation are drawn from
            self._stepper.replace_lost_env(row, seed, obs, over=over, exhausted=exhausted)

    def keep_observations(self, rows: Sequence[tuple[int, Any]]) -> None:
        """Keep the last observations of rows: a step or reset of other rows shows them once more."""
        for row, obs in rows:
            self._rows.write_observation(0, row, obs)


def _or_text(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Misfit as exc:
        return str(exc)
