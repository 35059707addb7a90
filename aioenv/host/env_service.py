"""The service that holds envs: it steps the envs of one worker's slots, row by row, and replies in columns.

A *row* is a slot's place within its worker: the parent knows slots, the worker rows.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Env, Space
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv.batching.autoreset import Autoreset
from aioenv.batching.gather import Gatherer
from aioenv.batching.layout import Layout
from aioenv.batching.plane import Lane, Plane
from aioenv.host import running
from aioenv.host.actions import Actions
from aioenv.host.checkpoint import Checkpoints, RowCheckpoint
from aioenv.host.env_calls import EnvCalls
from aioenv.host.mujoco_source import MujocoSource, find_source, read_state
from aioenv.host.rows import Rows
from aioenv.host.service import Reply, SlotService
from aioenv.host.shared import mapped
from aioenv.host.worker import StartFailed, describe_failure
from aioenv.stats.here import uncounted
from aioenv.stats.seed_plan import SeedPlan
from aioenv.wire.frames import Frame
from aioenv.wire.messages import Failure, LostRow, ResetRequest, StepReply, dump, dump_usual, load, load_code

__all__ = ["Beyond", "EnvDescription", "EnvService", "FirstCheckpoints"]

# Of a row, what did not fit into its checkpoint before an operation, and after it.
Beyond: TypeAlias = "tuple[bytes | None, bytes | None]"
FirstCheckpoints: TypeAlias = "tuple[npt.NDArray[np.float64], Sequence[tuple[int, bytes]]]"


class EnvDescription(NamedTuple):
    """What the parent learns of one env; a space is None where it equals the one of the worker's first env."""

    observation_space: Space[Any] | None
    action_space: Space[Any] | None
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any  # an EnvSpec; None if the env has none, or if it does not pickle
    source: MujocoSource | None
    checkpoint_size: int = 0  # how many float64 it takes to resume it; 0 if it can't be, or nobody asked
    checkpoint_obstacle: str | None = None  # why it can't be
    stepped_alone: bool = True  # whether its slot can be stepped without the others of its worker
    model_fields: dict[str, npt.NDArray[Any]] | None = None  # of a native vector env, where its first row is described


class EnvService(EnvCalls, SlotService):
    """Envs, stepped one after the other.

    Args:
        factories: pickled callables, one an env; the same bytes may stand in several rows.
        mode: the autoreset mode.
        find_sources: whether to look for MuJoCo models, so that images can be drawn elsewhere.
        checkpoints: whether to find out what it takes to resume the envs elsewhere.
    """

    def __init__(
        self, factories: Sequence[bytes], mode: AutoresetMode, find_sources: bool, checkpoints: bool = False
    ) -> None:
        self._envs: list[Env[Any, Any]] = []
        self._find_sources = find_sources
        for row, data in enumerate(factories):
            try:
                with running.row(row):
                    self._envs.append(_checked(load_code(data)()))
            except SystemExit:
                raise
            except BaseException as exc:
                self.close()
                raise StartFailed(describe_failure(exc, row)) from exc
        self._bases: list[Any] = [env.unwrapped for env in self._envs]
        self._stepper = Autoreset(self._envs, mode, running.cell())
        self._row_checkpoints = [RowCheckpoint(env) for env in self._envs] if checkpoints else []
        self._checkpoints: Checkpoints | None = None
        self._all_rows = range(len(self._envs))
        self._gatherer = Gatherer()
        self._draws_late = False
        self._late: list[int] | None = None
        self._state_sizes = [0] * len(self._envs)  # of each row, whose model may be another than the next one's

    def describe(self) -> list[EnvDescription]:
        """One description for each row."""
        first = self._envs[0]
        descriptions = []
        sources: dict[MujocoSource, MujocoSource] = {}  # equal ones travel once
        for row, env in enumerate(self._envs):
            known = env is not first
            checkpoint = self._row_checkpoints[row] if self._row_checkpoints else None
            source = find_source(env) if self._find_sources else None
            if source is not None:
                source = sources.setdefault(source, source)
                self._state_sizes[row] = source.state_size
            descriptions.append(
                EnvDescription(
                    None if known and env.observation_space == first.observation_space else env.observation_space,
                    None if known and env.action_space == first.action_space else env.action_space,
                    dict(env.metadata),
                    env.render_mode,
                    _picklable(env.spec),
                    source,
                    checkpoint.size if checkpoint is not None else 0,
                    checkpoint.obstacle if checkpoint is not None else None,
                )
            )
        return descriptions

    def configure(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        state_size: int,
        draws_late: bool,
        checkpoint_size: int = 0,
        plane: Plane | None = None,
        start: int = 0,
        seed_plan: SeedPlan | None = None,
    ) -> FirstCheckpoints | None:
        """Lay out the arrays that both sides agree on.

        Args:
            observation_space: the single space that the batch is made of.
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
        layout = Layout(action_space)
        observations = Layout(observation_space)
        self._checkpoints = self._lay_out_checkpoints(checkpoint_size) if checkpoint_size else None
        self._state = np.zeros((n, state_size), np.float64)
        self._states = [row[:size] for row, size in zip(self._state, self._state_sizes, strict=True)]
        self._draws_late = draws_late
        riding = [self._state] if state_size else []
        if self._checkpoints is not None:
            riding.append(self._checkpoints.array)
        lanes = [Lane({}, {})]
        if plane is not None:
            lanes = plane.lanes(mapped(plane.size(observations, layout)), observations, layout)
        mine = slice(start, start + n)
        self._rows = Rows(
            observations, n, [{i: a[mine] for i, a in lane.observations.items()} for lane in lanes], riding
        )
        actions = [{i: array[mine] for i, array in lane.actions.items()} for lane in lanes]
        self._actions = Actions(layout, n, actions, laned=plane is not None)
        self._action_views = self._actions.views
        if seed_plan is not None:
            self._stepper.follow(seed_plan, start)
        # what is here now stays: full collections need not look at it again
        if running.alone():
            gc.collect()
            gc.freeze()
        return (self._checkpoints.array.copy(), self._checkpoints.beyond) if self._checkpoints is not None else None

    def _lay_out_checkpoints(self, size: int) -> Checkpoints:
        for row in range(len(self._envs)):
            needed = self._row_checkpoints[row].least if self._row_checkpoints else 0
            if not 0 < needed <= size:
                why = f"it needs {needed}" if needed else "it can't be resumed"
                raise ValueError(f"row {row} has no checkpoint of {size} words: {why}")
        checkpoints = Checkpoints(self._row_checkpoints, size, self._stepper.due)
        checkpoints.capture(self._all_rows)
        return checkpoints

    # ------------------------------------------------------------ steps and resets

    def _step(self, frame: Frame) -> Reply:
        rows: Sequence[int] = self._all_rows
        chosen, action_objects, given = load(frame.tail) if len(frame.tail) else (None, None, None)
        lane, data = self._actions.open(frame)
        if given is not None:
            actions = given
        elif chosen is None:
            actions = self._actions.of_all(lane, action_objects or ())
        else:
            rows = chosen
            actions = self._actions.of_some(lane, rows, data, action_objects or ())
        out = self._stepper.step(rows, actions)
        self._rows.store(lane, rows, out)
        failures = [describe_failure(exc, row) for row, exc in out.failures]
        return self._reply(rows, True, out.infos, failures, rows, out.over)

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
                if self._stepper.is_end(row, exc):
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
    ) -> Reply:
        """What has come to stand in the rows, as a reply: all of them, or just the ones asked for.

        Args:
            touched: those that were stepped or reset; the others are as they were.
            over: those whose envs have no further episode.
        """
        if self._state.shape[1]:
            for row in touched:
                base = self._bases[row]
                read_state(base.model, base.data, self._states[row])
        beyond: Sequence[tuple[int, bytes]] = ()
        if self._checkpoints is not None:
            self._checkpoints.capture(touched)
            beyond = self._checkpoints.beyond
        if self._draws_late:
            self._late = list(touched)
        fixed = self._rows.buffers(rows, stepped=stepped)
        objects = self._rows.objects
        if len(rows) < len(self._envs):
            objects = [[column[row] for row in rows] for column in objects]
        if not infos and not failures and not objects and not over and not beyond:
            return Reply(fixed)
        try:
            groups = self._gatherer.gather(infos, rows) if infos else []
            news = self._gatherer.take_news()
            if (
                len(groups) == 1
                and not (news or failures or objects or over or beyond)
                and (usual := groups[0]).is_usual
            ):
                return Reply(fixed, dump_usual(usual.schema, usual.data))
            tail = dump(StepReply(news, groups, objects, failures, over, beyond))
        except Exception:
            tail = self._without_unpicklable(rows, infos, objects, failures, over, beyond)
        return Reply(fixed, tail)

    def _without_unpicklable(
        self,
        rows: Sequence[int],
        infos: list[tuple[int, dict[str, Any]]],
        objects: list[list[Any]],
        failures: list[Failure],
        over: Sequence[int],
        beyond: Sequence[tuple[int, bytes]],
    ) -> bytes:
        """Find the rows whose infos can't travel, and report those rows alone as failed."""
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
        self._gatherer = Gatherer()  # what it believes to have sent, it has not
        groups = self._gatherer.gather(good, rows)
        return dump(StepReply(self._gatherer.take_news(), groups, objects, failures, over, beyond))

    def afterwards(self) -> Reply | None:
        """Render the rows that were just stepped, if the parent wants images and nobody else can draw them."""
        rows, self._late = self._late, None
        if rows is None:
            return None
        images: list[Any] = []
        failures: list[Failure] = []
        for row in rows:
            try:
                with running.row(row):
                    images.append(self._envs[row].render())
            except SystemExit:
                raise
            except BaseException as exc:
                images.append(None)
                failures.append(describe_failure(exc, row))
        return Reply((), dump((rows, images, failures)))

    # ------------------------------------------------------------ in the place of a worker that died

    def resume(
        self,
        rows: Sequence[int],
        before: npt.NDArray[np.float64],
        operations: Sequence[tuple[Any, ...] | None],
        after: npt.NDArray[np.float64],
        beyond: Sequence[Beyond] = (),
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

        Returns:
            For each row None if it is where the other was, else what differs; such an env must be reset.
        """
        if self._checkpoints is None:
            raise ValueError("configure this service with a checkpoint_size first")
        outcomes: list[str | None] = []
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
        due = self._stepper.due
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
                self._rows.store(0, [row], out)
                if out.failures:
                    raise out.failures[0][1]
        if not checkpoint.replays:
            due[row] = checkpoint.restore(after, beyond[1])
        self._checkpoints.capture([row])
        return checkpoint.difference(self._checkpoints.array[row], after)

    def begin_anew(self, rows: Sequence[LostRow]) -> None:
        """Another process had these rows and died: say so in their next step, and reset them then as the mode wants."""
        for row, seed, obs, over in rows:
            if obs is not None:
                self._rows.keep(0, row, obs)  # a reset of other rows tells it once more
            self._stepper.begin_anew(row, seed, None if over else obs)

    def close(self) -> None:
        """Close every env; what one of them raises does not keep the others open."""
        envs, self._envs = self._envs, []
        for row, env in enumerate(envs):
            with contextlib.suppress(Exception), running.row(row):
                env.close()


def _checked(env: Any) -> Env[Any, Any]:
    """What a factory made; a TypeError, which says what to do, if that is no env."""
    if env is None:
        raise TypeError("the factory returned None, expected a gymnasium.Env; does it lack a `return`?")
    if isinstance(env, VectorEnv):
        raise TypeError(
            f"the factory returned a vector env, {env!r}, expected a single gymnasium.Env; for vector envs there is "
            "aioenv.NativeVectorEnv"
        )
    if missing := [name for name in ("reset", "step", "unwrapped") if not hasattr(env, name)]:
        raise TypeError(f"the factory returned {env!r}, expected a gymnasium.Env: it has no {', '.join(missing)}")
    for name in ("observation_space", "action_space"):
        try:
            space = getattr(env, name)
        except AttributeError as exc:
            raise TypeError(f"the env {env!r} has no {name}: expected a gymnasium.Space") from exc
        if not isinstance(space, Space):
            raise TypeError(f"the {name} of the env {env!r}: expected a gymnasium.Space, got {space!r}")
    return env  # type: ignore[no-any-return]


def _picklable(value: Any) -> Any:
    try:
        dump(value)
    except Exception:
        return None
    return value
