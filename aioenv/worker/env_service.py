"""The service that holds envs: it steps the envs of one worker's slots, row by row, and replies in columns.

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
from aioenv.spaces.autoreset import Autoreset, Stepped
from aioenv.spaces.infos import Gatherer
from aioenv.spaces.layout import Layout
from aioenv.spaces.shared_layout import SharedBatch, SharedLayout
from aioenv.state.assets import Looks
from aioenv.state.checkpoint import Checkpoints, RowCheckpoint
from aioenv.state.render_source import EnvRenderable, MujocoSource, subject_of
from aioenv.state.snapshot import Misfit, RawState, read_snapshot, write_snapshot
from aioenv.state.wrapper_stack import REMEDY
from aioenv.stats.counters import SeedPlan
from aioenv.stats.sharing import copies, uncounted
from aioenv.worker import worker_context
from aioenv.worker.description import EnvDescription, FirstCheckpoints, checked, describe_envs
from aioenv.worker.row_buffers import Actions, ResultRows
from aioenv.worker.service import FastPath, PartialStep, Reply, SlotService, StartFailed, close_envs, describe_failure
from aioenv.worker.vector_states import AWAITS_RESET, as_single
from aioenv.worker.worker_context import map_memory

__all__ = ["Beyond", "EnvService", "FirstCheckpoints"]

# Of a row, what did not fit into its checkpoint before an operation, and after it.
Beyond: TypeAlias = "tuple[bytes | None, bytes | None]"


class EnvService(SlotService):
    """Envs, stepped one after the other.

    Args:
        factories: functions, one an env; each is asked for when its row's turn has come.
        mode: the autoreset mode.
        find_sources: whether to look for MuJoCo models, so that images can be drawn elsewhere.
        checkpoints: whether to find out what it takes to resume the envs elsewhere.
        cast: see `ResultRows`.
        by_camera: see `find_source`.
        looks: when to look for edits of models (see `RenderConfig.edits`).
        with_spec: whether to describe the spec of the first env.
        lenient, numerics: see `Autoreset`.
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
    ) -> None:
        self._envs: list[Env[Any, Any]] = []
        self._cast = cast
        self._find_sources, self._by_camera, self._with_spec = find_sources, by_camera, with_spec
        self._looks = looks
        for row in range(len(factories)):
            try:
                with worker_context.running_row(row):
                    self._envs.append(checked(factories[row]()))
            except SystemExit:
                raise
            except BaseException as exc:
                self.close()
                raise StartFailed(describe_failure(exc, row)) from exc
        self._bases: list[Any] = [env.unwrapped for env in self._envs]
        self._stepper = Autoreset(self._envs, mode, worker_context.row_mark(), lenient=lenient, numerics=numerics)
        self._row_checkpoints = [RowCheckpoint(env) for env in self._envs] if checkpoints else []
        self._checkpoints: Checkpoints | None = None
        self._all_rows = range(len(self._envs))
        self._gatherer = Gatherer()
        self._draws_late = False
        self._tells_no_more = False
        self._rides: Callable[[int, int], bool] | None = None
        self._late: list[int] | None = None
        self._sources: list[MujocoSource | None] = [None] * len(self._envs)
        self._subjects: list[EnvRenderable] = []  # of all rows, if states ride
        self._editing: list[tuple[int, str, EnvRenderable]] = []  # those whose models may be others later, and for what

    def describe(self) -> list[EnvDescription]:
        """One description for each row."""
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
        plane: SharedLayout | None = None,
        start: int = 0,
        seed_plan: SeedPlan | None = None,
    ) -> FirstCheckpoints | None:
        """Lay out the arrays that both sides agree on.

        Args:
            observation_space: the single space that the batch is made of; None: as the first row has it.
            action_space: likewise.
            state_size: how many float64 of physics state ride on each reply and row; 0 for none.
            draws_late: whether to render each row after the reply to a step or reset has gone out.
            checkpoint_size: how many float64 of checkpoint ride on each reply and row, after the physics state: at
                least the largest of `describe`; 0 for none.
            plane: what lies in shared memory; None: nothing.
            start: the slot of the first row.
            seed_plan: where the seeds of episodes come from that are given none.

        Returns:
            The first checkpoints, float64 of shape `(rows, checkpoint_size)`: what a first reset starts from, which
            may come without a seed; and rows with what did not fit into theirs. None without checkpoints.

        Raises:
            ValueError: if a row can't be resumed, or needs a larger checkpoint.
        """
        n = len(self._envs)
        layout = Layout(self._envs[0].action_space if action_space is None else action_space)
        observations = Layout(self._envs[0].observation_space if observation_space is None else observation_space)
        self._checkpoints = self._lay_out_checkpoints(checkpoint_size) if checkpoint_size else None
        self._state = np.zeros((n, state_size), np.float64)
        if state_size:
            each = zip(self._envs, self._sources, strict=True)
            how: Any = {"by_camera": self._by_camera, "looks": self._looks}
            self._subjects = [EnvRenderable(env, source, **how) for env, source in each if source is not None]
        self._editing = [(row, "render", subject) for row, subject in enumerate(self._subjects)]
        for row, env in enumerate(self._envs):
            if (subject := subject_of(env)) is not None:
                self._editing.append((row, "pixels", subject))
        self._editing = [each for each in self._editing if each[2].source.numbered]
        self._draws_late = draws_late
        riding = [self._state] if state_size else []
        if self._checkpoints is not None:
            riding.append(self._checkpoints.array)
        lanes = [SharedBatch({}, {})]
        if plane is not None:
            lanes = plane.batches(map_memory(plane.size(observations, layout)), observations, layout)
        mine = slice(start, start + n)
        shared = [{i: a[mine] for i, a in lane.observations.items()} for lane in lanes]
        self._rows = ResultRows(observations, n, shared, riding, self._cast)
        actions = [{i: array[mine] for i, array in lane.actions.items()} for lane in lanes]
        self._actions = Actions(layout, n, actions, laned=plane is not None)
        self._action_views = self._actions.views
        simple = layout.is_single_array and observations.is_numeric and not (plane and plane.actions)
        small = sum(map(len, self._rows.stepped_run(0, n))) <= MAX_FIXED_BYTES  # else Python says that it is not
        self._tells_no_more = simple and small and not draws_late
        self._rides = self._let_ride if riding or self._editing else None
        if seed_plan is not None:
            self._stepper.use_seed_plan(seed_plan, start)
        for row, what, subject in self._editing:
            if what == "render":
                self._stepper.wrap_reset(row, subject.end, subject.begin)
        # what is here now stays: full collections need not look at it again
        if worker_context.owns_process():
            gc.collect()
            gc.freeze()
        return (self._checkpoints.array.copy(), self._checkpoints.beyond) if self._checkpoints is not None else None

    def _lay_out_checkpoints(self, size: int) -> Checkpoints:
        for row in range(len(self._envs)):
            needed = self._row_checkpoints[row].least if self._row_checkpoints else 0
            if not 0 < needed <= size:
                why = f"it needs {needed}" if needed else "it can't be resumed"
                raise ValueError(f"row {row} has no checkpoint of {size} words: {why}")
        checkpoints = Checkpoints(self._row_checkpoints, size, self._stepper.pending_reset)
        checkpoints.capture(self._all_rows)
        return checkpoints

    # ------------------------------------------------------------ steps and resets

    def _step(self, frame: Frame) -> Reply:
        rows: Sequence[int] = self._all_rows
        chosen, action_objects, given = load_step(frame.tail)
        lane, data = self._actions.open(frame)
        if given is not None:
            actions = given
        elif chosen is None:
            actions = self._actions.of_all(lane, action_objects or ())
        else:
            rows = chosen
            actions = self._actions.of_some(lane, rows, data, action_objects or ())
        out = self._stepper.step(rows, actions, self._rows.into(lane) if isinstance(rows, range) else None)
        return self._of_step(rows, lane, out)

    def express(self) -> FastPath | None:
        """A step of envs whose observations and actions are arrays."""
        into = self._rows.lanes if self._tells_no_more else None
        if into is None or (self._checkpoints is not None and self._checkpoints.beyond):
            return None  # a state that is too long now may be so in the next step, and need not be written twice then
        rows, sorts = self._rows.stepped_run, self._gatherer.c_schemas
        fixed = rows(0, len(self._envs))
        envs = self._stepper.c_arguments
        return FastPath(self._action_views, self._actions.array, *envs, into, rows, sorts, fixed, self._rides)

    def _let_ride(self, first: int, count: int) -> bool:
        """Write states and checkpoints of so many rows from one on, stepped in C; False: there is more to tell."""
        rows = range(first, first + count)
        if self._state.shape[1]:
            try:
                self._read_states(rows)
            except Exception:  # `_reply` finds out whose
                return False
        if self._checkpoints is not None:
            self._checkpoints.capture(rows)
        if any(subject.parcels for _, _, subject in self._editing):
            return False
        return self._checkpoints is None or not self._checkpoints.beyond

    def _read_states(self, rows: Iterable[int]) -> None:
        for row in rows:
            subject = self._subjects[row]
            if subject.parcels:  # of a row that was read before, and has not gone out
                subject.parcels = [parcel for parcel in subject.parcels if parcel.key]
            subject.read(self._state[row])

    def _take_parcels(self) -> list[tuple[int, Any]]:
        return [(row, (what, parcel)) for row, what, subject in self._editing for parcel in subject.take_parcels()]

    def _go_on(self, begun: PartialStep) -> Reply:
        if begun.row < 0:
            raise begun.outcome
        rows = self._all_rows if begun.rows == self._all_rows else begun.rows
        out = self._stepper.step(rows, begun.actions, self._rows.into(begun.lane), begun[6:])
        return self._of_step(rows, begun.lane, out)

    def _of_step(self, rows: Sequence[int], lane: int, out: Stepped) -> Reply:
        if out.rows:
            self._rows.store(lane, out)
        failures = [describe_failure(exc, row) for row, exc in out.failures] if out.failures else []
        return self._reply(rows, True, out.infos, failures, rows, out.exhausted, out.lost)

    def _reset(self, frame: Frame) -> Reply:
        request: ResetRequest = load(frame.tail)
        lane, _ = self._actions.open(frame)
        infos: list[tuple[int, dict[str, Any]]] = []
        failures: list[Failure] = []
        over: list[int] = []
        for row, seed in zip(request.rows, request.seeds, strict=True):
            try:
                obs, info = self._stepper.reset(row, seed, request.options)
                self._rows.keep(lane, row, obs)
                if info:
                    infos.append((row, info))
            except SystemExit:
                raise
            except BaseException as exc:
                if self._stepper.note_exhausted(row, exc):
                    over.append(row)
                else:
                    failures.append(describe_failure(exc, row))
        rows: Sequence[int] = self._all_rows if request.whole else request.rows
        if request.shown is not None:
            rows = request.shown
        reset = set(request.rows).difference(over, (failure.row for failure in failures))
        self._rows.show(lane, [row for row in rows if row not in reset])
        return self._reply(rows, False, infos, failures, request.rows, over)

    def _reply(
        self,
        rows: Sequence[int],
        stepped: bool,
        infos: list[tuple[int, dict[str, Any]]],
        failures: list[Failure],
        touched: Sequence[int],
        over: Sequence[int] = (),
        lost: Sequence[int] = (),
    ) -> Reply:
        """What has come to stand in the rows, as a reply: all of them, or just the ones asked for.

        Args:
            touched: those that were stepped or reset; the others are as they were.
            over: those whose envs have no further episode.
            lost: those of `touched` whose envs have not begun, and don't show what is told of them.
        """
        shown = [row for row in touched if row not in lost] if lost else touched
        if self._state.shape[1]:
            try:
                self._read_states(shown)
            except Exception:  # it is that row's alone
                failures = [*failures, *self._unreadable(shown, {failure.row for failure in failures})]
        beyond: Sequence[tuple[int, bytes]] = ()
        if self._checkpoints is not None:
            self._checkpoints.capture(touched)
            beyond = self._checkpoints.beyond
        if self._draws_late:
            self._late = list(shown)
        parcels = self._take_parcels() if self._editing else ()
        fixed = self._rows.buffers(rows, stepped=stepped)
        objects = self._rows.objects
        if len(rows) < len(self._envs):
            objects = [[column[row] for row in rows] for column in objects]
        if not infos and not failures and not objects and not over and not beyond and not parcels:
            return new_tuple(Reply, (fixed, b""))
        try:
            groups = self._gatherer.gather(infos, rows) if infos else []
            news = self._gatherer.take_new_schemas()
            more = news or failures or objects or over or beyond or parcels
            if not (more or any(group.objects for group in groups)):
                return Reply(fixed, dump_columns(groups))
            tail = dump(StepReply(news, groups, objects, failures, over, beyond, parcels))
        except Exception:
            tail = self._without_unpicklable(rows, infos, objects, failures, over, beyond, parcels)
        return Reply(fixed, tail)

    def _unreadable(self, rows: Sequence[int], failed: Container[int | None]) -> list[Failure]:
        """Read the states that can be, and report the rows whose can't, but for those that have failed anyway."""
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
        over: Sequence[int],
        beyond: Sequence[tuple[int, bytes]],
        parcels: Sequence[tuple[int, Any]],
    ) -> bytes:
        """Find the rows whose infos or observations can't travel, and report those rows alone as failed."""
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
        self._gatherer = Gatherer()  # what it believes to have sent, it has not
        groups = self._gatherer.gather(good, rows)
        return dump(StepReply(self._gatherer.take_new_schemas(), groups, objects, failures, over, beyond, parcels))

    def afterwards(self) -> Reply | None:
        """Render the rows that were just stepped, if the parent wants images and nobody else can draw them."""
        rows, self._late = self._late, None
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
            for i, row in enumerate(rows):  # whose is it?
                try:
                    dump(images[i])
                except Exception as exc:
                    exc.add_note(f"its image, a {type(images[i]).__name__}, can't be pickled")
                    images[i] = None
                    failures.append(describe_failure(exc, row))
            return Reply((), dump((rows, images, failures)))

    def close(self) -> None:
        """Close every env; what one of them raises is told, and does not keep the others open."""
        envs, self._envs = self._envs, []
        close_envs(envs, "an env")

    # ------------------------------------------------------------ calls and states

    def call_envs(
        self, rows: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[bytes], list[Failure]]:
        """Call a method of envs, or read an attribute, wherever in the stack of wrappers it is."""

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
        """Call a function with each env and some arguments: a question that no method of the env answers."""
        return self._for_each(rows, [lambda env: function(env, *args)] * len(rows))

    def set_attr(self, rows: Sequence[int], name: str, values: Sequence[Any]) -> tuple[list[bytes], list[Failure]]:
        """Set an attribute of envs, where it exists in the stack of wrappers, else on the env itself."""
        return self._for_each(rows, [lambda env, v=v: env.set_wrapper_attr(name, v) for v in values])  # type: ignore[misc]

    def resets_due(self, rows: Sequence[int]) -> tuple[list[bytes], list[Failure]]:
        """For each row whether its next step will be a reset instead."""
        return self._for_each(rows, [lambda _, row=row: self._stepper.pending_reset[row] == 1 for row in rows])  # type: ignore[misc]

    def get_states(self, rows: Sequence[int]) -> tuple[list[bytes], list[Failure]]:
        """The state of each env, or, as a text, why it can't be had."""
        due = self._stepper.pending_reset
        return self._for_each(rows, [lambda env, row=row: _or_text(read_snapshot, env, due[row] == 1) for row in rows])  # type: ignore[misc]

    def set_states(self, rows: Sequence[int], states: Sequence[RawState]) -> tuple[list[bytes], list[Failure]]:
        """Bring each env into a state; gives its checkpoint and what did not fit in, or why nothing was done."""
        each = zip(rows, states, strict=True)
        return self._for_each(rows, [lambda _, r=r, s=s: _or_text(self._set_state, r, s) for r, s in each])  # type: ignore[misc]

    def take_stats(self) -> dict[bytes, dict[int, Any]]:
        """Of statistics that are copies here: what slots have seen since the last time, by key and slot."""
        return {key: taken for key, stats in list(copies.items()) if (taken := stats.take())}

    def load_stats(self, states: dict[bytes, dict[str, Any]]) -> None:
        """Bring those copies to what their parent knows."""
        for key, state in states.items():
            stats = copies.get(key)
            if stats is not None:
                stats.load_state_dict(state)

    def _set_state(self, row: int, state: RawState) -> tuple[npt.NDArray[np.float64], bytes | None] | None:
        if "vector" in state[1]:
            state = as_single(self._envs[row], state, self._stepper.mode)
        if state[1].get("due") and not self._stepper.resets_next_step:
            raise Misfit(AWAITS_RESET)
        self._stepper.continue_from(row, write_snapshot(self._envs[row], state))
        if self._checkpoints is None:
            return None
        self._checkpoints.capture([row])
        return self._checkpoints.array[row], self._row_checkpoints[row].beyond

    def _for_each(
        self, rows: Sequence[int], functions: Sequence[Callable[[Env[Any, Any]], Any]]
    ) -> tuple[list[bytes], list[Failure]]:
        """Results, each pickled by itself, so that one that can't be is its own row's failure alone."""
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
            for other, _, subject in self._editing:
                if other == row:
                    subject.begin()
        return results, failures

    # ------------------------------------------------------------ in the place of a worker that died

    def resume(
        self,
        rows: Sequence[int],
        before: npt.NDArray[np.float64],
        operations: Sequence[tuple[Any, ...] | None],
        after: npt.NDArray[np.float64],
        beyond: Sequence[Beyond] = (),
        states: npt.NDArray[np.float64] | None = None,
    ) -> list[str | None]:
        """Bring new envs to where others were: go to the state before their last operation, and replay it.

        Args:
            rows: whose.
            before: checkpoints before the operations, float64 of shape `(len(rows), checkpoint_size)`. Zeros before
                a reset mean that there was nothing.
            operations: `("step", action)`, an action as its env takes it, `("reset", seed, options)`, or
                `("set_state", state)`; None if there was no operation yet: then `after` is restored.
            after: checkpoints after the operations.
            beyond: for each row what did not fit into these two; empty if all did.
            states: what images of the rows were drawn from last, float64 `(len(rows), state_size)`.

        Returns:
            For each row None if it is where the other was, else what differs; such an env must be reset.
        """
        if self._checkpoints is None:
            raise ValueError("configure this service with a checkpoint_size first")
        outcomes: list[str | None] = []
        if states is not None:
            self._state[list(rows)] = states
        beyond = beyond or [(None, None)] * len(rows)
        for row, start, operation, end, rest in zip(rows, before, operations, after, beyond, strict=True):
            try:
                with uncounted():  # what statistics have seen, they have seen
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
        beyond: Beyond,
    ) -> str | None:
        assert self._checkpoints is not None
        checkpoint = self._row_checkpoints[row]
        due = self._stepper.pending_reset
        match operation:
            case None:
                due[row] = checkpoint.restore(after, beyond[1])
            case ("set_state", state):
                self._set_state(row, state)
            case ("reset", seed, options):
                if np.array(before).view(np.uint64).any():  # as bits: small integers are subnormal floats
                    due[row] = checkpoint.restore(before, beyond[0])
                obs, _ = self._stepper.reset(row, seed, options)
                self._rows.keep(0, row, obs)
            case ("step", action):
                due[row] = checkpoint.restore(before, beyond[0])
                out = self._stepper.step([row], [action])
                self._rows.store(0, out)
                if out.failures:
                    exc = out.failures[0][1]
                    raised = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
                    return f"{raised}, when its last step was made again; if it remembers more than MuJoCo, {REMEDY}"
        if not checkpoint.replays:
            due[row] = checkpoint.restore(after, beyond[1])
        self._checkpoints.capture([row])
        return checkpoint.difference(self._checkpoints.array[row], after)

    def begin_anew(self, rows: Sequence[LostRow]) -> None:
        """Another process had these rows and died: say so in their next step, and reset them then as the mode wants."""
        for row, seed, obs, over, state in rows:
            if obs is not None:
                self._rows.keep(0, row, obs)  # a reset of other rows tells it once more
            if state is not None:
                self._state[row] = state  # and what images of it are drawn from
            self._stepper.replace_lost_env(row, seed, None if over else obs)

    def show_again(self, rows: Sequence[tuple[int, Any]]) -> None:
        """What rows of another process that must be reset observed last: a reset of other rows tells it once more."""
        for row, obs in rows:
            self._rows.keep(0, row, obs)


def _or_text(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Misfit as exc:
        return str(exc)
