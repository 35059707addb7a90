"""Gymnasium's three autoreset modes: step envs row by row, and reset them when an episode has ended.

The rules are those of `gymnasium.vector.SyncVectorEnv` 1.4 (https://farama.org/Vector-Autoreset-Mode). The pending
reset of a row decides what its next step does:

    pending   the next step of the row                                pending after it
    STEP      steps its env                                           RESET if the episode ended under NEXT_STEP
    RESET     resets its env: reward 0, flags False                   STEP
    LOST      ends, as truncated, the episode of an env that was      RESET under NEXT_STEP, else STEP
              lost with its worker; resets under SAME_STEP
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from aioenv.errors import EpisodesDone
from aioenv.spaces.checks import BOOLS, NUMBERS, check_info, describe, flag_of, number_of, with_numerics_check
from aioenv.spaces.wrapped_steps import step_of
from aioenv.speedups import step_rows

if TYPE_CHECKING:
    from aioenv.stats.counters import ResetPlan

__all__ = ["LOST", "Autoreset", "ResultArrays", "Stepped", "copy_containers", "parse_mode"]


_STEP, _RESET, LOST = 0, 1, 2

# The arrays that C writes results to: observations (an array, or dicts and tuples of arrays), rewards, terminated,
# truncated, and a list of the last observations.
ResultArrays: TypeAlias = "tuple[Any, Any, Any, Any, list[Any]]"

# What `step_rows` returns: where it stopped.
_Stopped: TypeAlias = "tuple[int, Any, bool, Any]"
# A row for Python: its action, and what C has got of it. That is the outcome of its step or reset (NotImplemented:
# neither was called), or the outcome of an automatic reset and the result of the step before it (else None).
_Turn: TypeAlias = "tuple[int, Any, Any, Any]"

# In place of the options of a reset: it is an automatic one.
_AUTOMATIC: Any = object()

_OLD_API_HINT = ", as in the old gym API; Gymnasium's migration guide says what to change"


class Stepped:
    """Results of stepping some rows, in their order; a row that failed has reward 0 and flags False.

    Attributes:
        rows: the rows of these results: all rows that were to be stepped, except those whose results were written to
            their arrays already.
        observations, rewards, terminated, truncated: one value a row, as its env gave it; the observation of a row
            that failed is None.
        infos: rows with an info dict that is not empty; under SAME_STEP a row may stand here twice.
        failures: rows whose env raised, with the exception.
        exhausted: rows whose env has no further episode. Unless its last episode ended in this very step (SAME_STEP),
            such a row was not stepped: its observation is None, its reward 0.
        lost: rows whose observation is the last one of an env that was lost; their next episode has not begun.
        ended: whether an episode has ended whose slot goes on in another env (see `Autoreset`).
        nonstandard: whether a result had a type or dtype that C can't write to its array; later ones will have it, too.
    """

    __slots__ = (
        "ended",
        "exhausted",
        "failures",
        "infos",
        "lost",
        "nonstandard",
        "observations",
        "rewards",
        "rows",
        "terminated",
        "truncated",
    )

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows
        self.observations: list[Any] = []
        self.rewards: list[Any] = []
        self.terminated: list[Any] = []
        self.truncated: list[Any] = []
        self.infos: list[tuple[int, dict[str, Any]]] = []
        self.failures: list[tuple[int, BaseException]] = []
        self.exhausted: list[int] = []
        self.lost: list[int] = []
        self.ended = False
        self.nonstandard = False

    def mark_failed(self, index: int, row: int, exc: Exception) -> None:
        """Record that a row has failed, since its observation, at `index`, can't be used."""
        self.rewards[index], self.terminated[index], self.truncated[index] = 0.0, False, False
        self.infos = [(r, info) for r, info in self.infos if r != row]
        self.failures.append((row, exc))


class Autoreset:
    """Steps envs one after the other, and resets them according to the autoreset mode.

    NEXT_STEP: the step after the last one of an episode resets; its action is ignored and its reward 0.
    SAME_STEP: the last step of an episode resets at once; terminal observation and info go into the infos.
    DISABLED: nothing resets by itself.

    Args:
        envs: the envs, one a row.
        mode: the autoreset mode.
        current_row: `current_row[0]` becomes row + 1 before an env runs, and 0 after the last one.
        lenient: whether rewards and flags may be anything that numpy converts to numbers and bools, None and text say.
        numerics: whether NaN and infinite numbers are errors.
        has_spares: whether each row's slot has another env, in another worker, in which it goes on when an episode has
            ended. Nothing is reset here then, but under SAME_STEP the terminal observation and info go into the infos.

    Attributes:
        pending_reset: for each row what its next step does: STEP (0), RESET (1) or LOST (2); see the table above.
        mode: likewise.
        resets_next_step: whether the mode is NEXT_STEP.
        firsts: with spare envs, what each row's last reset gave: observation and info; None: there was no further
            episode; empty: it failed, or there was none.
        restored: by row, such an outcome that belongs to the state that was set last.
    """

    def __init__(
        self,
        envs: Sequence[Env[Any, Any]],
        mode: AutoresetMode,
        current_row: memoryview | list[int],
        *,
        lenient: bool = False,
        numerics: bool = False,
        has_spares: bool = False,
    ) -> None:
        self._current_row = current_row
        self._has_spares = has_spares
        self._lenient = lenient
        self._envs = envs
        both = [with_numerics_check(env) if numerics else (step_of(env), env.reset) for env in envs]
        self._steps = [step for step, _ in both]
        self._resets = [reset for _, reset in both]
        self.pending_reset = [_STEP] * len(envs)
        self._seeds: dict[int, int] = {}  # by row: the seed of its next reset
        self._lost: dict[int, Any] = {}  # by row: the last observation of an env that was lost, not yet returned
        self.firsts: list[Any] = [()] * len(envs)
        self.restored: dict[int, Any] = {}
        self._plan: ResetPlan | None = None
        self._first_slot = 0
        self.mode = mode
        self.resets_next_step = mode is AutoresetMode.NEXT_STEP
        self._same_step = mode is AutoresetMode.SAME_STEP

    def use_plan(self, plan: ResetPlan, first_slot: int) -> None:
        """Take the seeds of episodes that are given none, and the options of automatic resets, from a plan.

        Args:
            plan: the plan.
            first_slot: the slot of row 0.
        """
        self._resets = [
            partial(_reset_by_plan, reset, plan, first_slot + row) for row, reset in enumerate(self._resets)
        ]
        self._plan, self._first_slot = plan, first_slot

    def wrap_reset(self, row: int, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call two functions before and after each later reset of a row."""
        self._resets[row] = partial(_reset_between, self._resets[row], before, after)

    def reset(
        self,
        row: int,
        seed: int | None,
        options: dict[str, Any] | None,
        *,
        automatic: bool = False,
        starts_over: bool = False,
        episode: int | None = None,
        restored: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in one row; return observation and info.

        Args:
            row: the row.
            seed: its seed; None: that of the plan, if it has seeds.
            options: passed to the env.
            automatic: whether to pass the options of the plan instead.
            starts_over: whether the plan begins with its first episode again.
            episode: the number of the episode in the plan; None: the one after the last.
            restored: whether it has begun already, in the state that was set just before.

        Raises:
            RuntimeError: if that state was refused.
        """
        if restored:
            if row not in self.restored:
                raise RuntimeError("the state that was set does not fit this env, so its episode can't go on")
            first = self.firsts[row] = self.restored.pop(row)
            if first is None:
                raise EpisodesDone
            return first  # type: ignore[no-any-return]
        self._current_row[0] = row + 1
        self.firsts[row] = ()
        known = self._seeds.pop(row, None)
        if self._plan is not None:
            if starts_over or episode is not None:
                self._plan.start_at(self._first_slot + row, episode or 0)
            if automatic:
                options = _AUTOMATIC
        try:
            obs, info = _check_reset(self._resets[row](seed=known if seed is None else seed, options=options))
        except SystemExit:
            raise
        except BaseException as exc:
            self._current_row[0] = 0
            if isinstance(exc, TypeError) and re.search(r"unexpected keyword argument '(seed|options)'$", str(exc)):
                exc.add_note("Gymnasium's `reset` is `def reset(self, *, seed=None, options=None)`")
            raise
        self.pending_reset[row] = _STEP
        self._lost.pop(row, None)
        self._current_row[0] = 0
        if self._has_spares:
            self.firsts[row] = copy_containers(obs), copy_containers(info)
        return obs, info

    def note_exhausted(self, row: int, exc: BaseException) -> bool:
        """Return whether a reset raised this because no episode is left; if so, the row's next step resets again."""
        if isinstance(exc, StopIteration) and not _is_finite(self._envs[row]):
            exc.add_note("If that means no further episode: raise aioenv.EpisodesDone, or set finite_episodes = True")
            return False
        if not isinstance(exc, (EpisodesDone, StopIteration)):
            return False
        self.pending_reset[row] = _RESET
        self.firsts[row] = None
        self._lost.pop(row, None)
        return True

    def continue_from(self, row: int, pending_reset: int) -> None:
        """Go on from the state of another env, into which the row's env was put, with that one's pending reset."""
        self._seeds.pop(row, None)
        self._lost.pop(row, None)
        self.pending_reset[row] = pending_reset

    def replace_lost_env(self, row: int, seed: int | None, last_obs: Any, *, over: bool, exhausted: bool) -> None:
        """Go on with a new env in place of one that was lost with its worker.

        Args:
            row: the row.
            seed: for its next reset, unless that is given one.
            last_obs: the last observation: the next step returns it, as the truncated end of that episode.
                None if it is unknown.
            over: whether the episode had ended already.
            exhausted: whether the row waits for another reset because there was no further episode.
        """
        if seed is not None and not (self._plan is not None and self._plan.has_seeds):
            self._seeds[row] = seed
        if not over:
            self._lost[row] = last_obs
            self.pending_reset[row] = LOST
        elif self.resets_next_step or exhausted:
            self.pending_reset[row] = _RESET

    def _autoreset(self, row: int, outcome: Any = NotImplemented) -> tuple[Any, dict[str, Any]]:
        """Reset a row, unless C has done so, with this outcome."""
        if outcome is NotImplemented:
            seed = self._seeds.pop(row, None)
            outcome = self._resets[row]() if seed is None else self._resets[row](seed=seed)
        pair = _check_reset(outcome)
        self.pending_reset[row] = _STEP
        self._lost.pop(row, None)
        return pair

    def _do_pending(
        self, row: int, outcome: Any = NotImplemented
    ) -> tuple[Any, float, bool, bool, dict[str, Any], dict[str, Any] | None]:
        """Do a row's pending reset; return the results of its step, and the final info of a lost episode.

        With a final info (SAME_STEP) the reset is left to the caller.

        Args:
            row: the row.
            outcome: the outcome of its reset, if C has called that.
        """
        if self.pending_reset[row] == _RESET:
            obs, info = self._autoreset(row, outcome)
            return obs, 0.0, False, False, info, None
        obs, info = self._lost[row], {"restarted": True}
        if self._same_step:
            return obs, 0.0, False, True, info, {"final_obs": obs, "final_info": info, **info}
        del self._lost[row]
        self.pending_reset[row] = _RESET if self.resets_next_step else _STEP
        return obs, 0.0, False, True, info, None

    @property
    def c_arguments(self) -> tuple[list[Any], list[Any], list[int], dict[int, int], int, Any]:
        """The arguments of `step_rows` from `steps` to `current_row`."""
        at_end = -1 if self._has_spares else -2 if self._same_step else int(self.resets_next_step)
        return self._steps, self._resets, self.pending_reset, self._seeds, at_end, self._current_row

    def _step_in_c(
        self, first: int, actions: list[Any], arrays: ResultArrays, out: Stepped, started: _Stopped | None
    ) -> Iterator[_Turn]:
        """Step rows in C; yield those that C leaves to Python."""
        assert step_rows is not None
        left: list[int] = []
        out.rows = left
        row, stop = first, first + len(actions)
        while row < stop:
            outcome, last_step = NotImplemented, None
            if not out.nonstandard:
                if started is None:
                    started = step_rows(row, first, actions, *self.c_arguments, out.infos, arrays)
                (row, outcome, out.nonstandard, last_step), started = started, None
                if row == stop:
                    return
            left.append(row)
            yield row, actions[row - first], outcome, last_step
            row += 1

    def step(
        self,
        rows: Sequence[int],
        actions: Sequence[Any],
        arrays: ResultArrays | None = None,
        started: tuple[list[tuple[int, dict[str, Any]]], _Stopped] | None = None,
    ) -> Stepped:
        """Step rows with one action each.

        Args:
            rows, actions: as many of each.
            arrays: where C may write ordinary results, if the rows are successive; None: nowhere.
            started: if C has stepped some rows already: their infos, and the result of `step_rows`.
        """
        out = Stepped(rows)
        stopped = None
        if started is not None:
            out.infos, stopped = started
        if arrays is None:
            n = len(rows)
            turns: Iterable[_Turn] = zip(rows, actions, [NotImplemented] * n, [None] * n, strict=True)
        else:
            turns = self._step_in_c(rows[0] if rows else 0, list(actions), arrays, out, stopped)
        steps, pending_reset, current_row = self._steps, self.pending_reset, self._current_row
        rewards, terminated, truncated, infos = out.rewards, out.terminated, out.truncated, out.infos
        observations = out.observations
        for row, action, done, five in turns:
            reward: Any
            final = None
            current_row[0] = row + 1
            try:
                if five is None and isinstance(done, BaseException):
                    raise done
                if pending_reset[row]:
                    if pending_reset[row] == LOST and not self._same_step:
                        out.lost.append(row)
                    obs, reward, ends, cut, info, final = self._do_pending(row, done)
                    if final is not None:
                        obs, fresh = self._autoreset(row)
                        info = {**fresh, **info}
                else:
                    first: Any = NotImplemented  # what the reset has returned or raised, if C has made it
                    if five is not None:
                        first = done
                    else:
                        five = steps[row](action) if done is NotImplemented else done
                    obs, reward, ends, cut, info = five
                    if type(info) is not dict:
                        check_info("step", info)
                    if not ((type(reward) in NUMBERS and type(ends) in BOOLS and type(cut) in BOOLS) or self._lenient):
                        reward = number_of(reward)
                        ends, cut = flag_of("terminated", ends), flag_of("truncated", cut)
                    if ends or cut:
                        if self._has_spares:
                            out.ended = True
                            if self._same_step:
                                info = {"final_obs": copy_containers(obs), "final_info": copy_containers(info)}
                        elif self.resets_next_step:
                            pending_reset[row] = _RESET
                        elif self._same_step:
                            final = {"final_obs": copy_containers(obs), "final_info": copy_containers(info)}
                            if isinstance(first, BaseException):
                                raise first
                            obs, info = _check_reset(self._resets[row]() if first is NotImplemented else first)
                if final is not None:
                    if isinstance(info, dict) and not final.keys().isdisjoint(info):
                        info = _added(final, info)  # dicts of one row are merged in the order of their schema ids
                    else:
                        infos.append((row, final))
                if info:
                    infos.append((row, copy_containers(info)))  # the next env may write into the same arrays and dicts
            except SystemExit:
                raise
            # a panic of Rust code and asyncio's CancelledError are no Exception
            except BaseException as exc:
                if (final is not None or pending_reset[row] == _RESET) and self.note_exhausted(row, exc):
                    out.exhausted.append(row)
                    if final is None:
                        obs, reward, ends, cut = None, 0.0, False, False
                    else:
                        infos.append((row, final))
                else:
                    if exc.__traceback__ is not None and exc.__traceback__.tb_next is None:  # raised right here
                        exc = _not_five_values(exc, five)
                    out.failures.append((row, exc))
                    obs, reward, ends, cut = None, 0.0, False, False
            observations.append(obs)
            rewards.append(reward)
            terminated.append(ends)
            truncated.append(cut)
        current_row[0] = 0
        return out


def _check_reset(outcome: Any) -> tuple[Any, dict[str, Any]]:
    """Return the observation and info that a reset returned.

    Raises:
        TypeError, ValueError: if it returned something else; the type is that of Python's own error.
    """
    try:
        obs, info = outcome
    except (TypeError, ValueError) as exc:
        old = _OLD_API_HINT * (outcome is not None and not isinstance(outcome, tuple))
        raise type(exc)(f"reset: expected (observation, info), got {describe(outcome)}{old}") from None
    if type(info) is not dict:
        if not isinstance(outcome, (tuple, list)):  # an observation of two parts
            raise TypeError(f"reset: expected (observation, info), got {describe(outcome)}{_OLD_API_HINT}")
        check_info("reset", info)
    return obs, info


def _not_five_values(exc: BaseException, outcome: Any) -> BaseException:
    """Return a clear error in place of Python's if a step did not return five values; else the error itself."""
    if not isinstance(exc, (TypeError, ValueError)) or "unpack" not in str(exc):
        return exc
    old = _OLD_API_HINT * (isinstance(outcome, tuple) and len(outcome) == 4)
    return type(exc)(f"step: expected (observation, reward, terminated, truncated, info), got {describe(outcome)}{old}")


def _added(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Merge two infos of one env into one, as Gymnasium does when it adds them one after the other: key by key."""
    merged = {**first, **then}
    for key in first.keys() & then.keys():
        if key != "final_obs" and isinstance(first[key], dict) and isinstance(then[key], dict):
            merged[key] = _added(first[key], then[key])
    return merged


def copy_containers(value: Any) -> Any:
    """Copy the arrays and containers of an observation or info, into which an env may write later."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copy_containers, value))
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a graph is a named tuple of arrays
        return value._make(map(copy_containers, value))
    return value


def _is_finite(env: Any) -> bool:
    """Return whether an env says, by an attribute `finite_episodes`, that its reset may raise StopIteration."""
    try:
        return bool(env.get_wrapper_attr("finite_episodes"))
    except AttributeError:
        return False


def _reset_by_plan(
    reset: Callable[..., Any],
    plan: ResetPlan,
    slot: int,
    *,
    seed: int | None = None,
    options: dict[str, Any] | None = _AUTOMATIC,
) -> Any:
    """Reset an env with the seed and the options of a plan; an automatic reset is called without options."""
    episode = plan.begin(slot)
    if seed is None:
        seed = plan.seed(slot, episode)
    if options is _AUTOMATIC:
        options = plan.options(slot, episode)
    return reset(seed=seed, options=options)


def _reset_between(reset: Callable[..., Any], before: Callable[[], None], after: Callable[[], None], **how: Any) -> Any:
    before()
    try:
        return reset(**how)
    finally:
        after()


def parse_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """Return an autoreset mode, given as such or by value ("NextStep"), as Gymnasium takes it.

    Raises:
        ValueError: if it is neither; the message lists the modes.
    """
    try:
        return AutoresetMode(mode)
    except ValueError:
        known = ", ".join(repr(m.value) for m in AutoresetMode)
        raise ValueError(f"autoreset_mode: expected an AutoresetMode or one of {known}, got {mode!r}") from None
