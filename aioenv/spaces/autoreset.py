"""Gymnasium's three autoreset modes: what a step does when an episode has ended.

The same rules as `gymnasium.vector.SyncVectorEnv` 1.4 (https://farama.org/Vector-Autoreset-Mode).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from aioenv.errors import EpisodesDone
from aioenv.spaces.outcomes import BOOLS, NUMBERS, briefly, check_info, checked, flag_of, number_of
from aioenv.speedups import step_rows

__all__ = ["Autoreset", "Into", "Seeds", "Stepped", "parse_mode"]


# Instead of a step of its env, a row's next step is: nothing else; a reset; the end of an episode that was lost.
_NOT, _RESET, _LOST = 0, 1, 2

# Where C puts results at once: observations (an array, or dicts and tuples of arrays), rewards, terminated, truncated,
# and a list of the last observations.
Into: TypeAlias = "tuple[Any, Any, Any, Any, list[Any]]"

_OLD = ", as in the old gym API; Gymnasium's migration guide says what to change"


class Seeds(Protocol):
    """Where the seeds of episodes come from that are given none: `SeedPlan`."""

    def next(self, slot: int) -> int:
        """The seed of a slot's next episode."""

    def begin(self, slot: int) -> None:
        """A slot has been given a seed, in place of its first one."""


class Stepped:
    """What came of stepping some rows, in their order; a row that failed has reward 0 and flags False.

    Attributes:
        rows: those rows: all that were to be stepped, but for those whose results went where they belong at once.
        observations, rewards, terminated, truncated: one value a row, as its env gave it; the observation of a row
            that failed is None.
        infos: rows with an info dict that is not empty; under SAME_STEP a row may stand here twice.
        failures: rows whose env raised, with the exception.
        over: rows whose env has no further episode. Unless its last episode ended in this very step (SAME_STEP), such
            a row was not stepped: its observation is None, its reward 0.
        lost: rows whose observation is the last one of an env that was lost: theirs has not begun yet.
        odd: whether a result was of a type or dtype that can't go where it belongs at once; the next ones will be, too.
    """

    __slots__ = (
        "failures", "infos", "lost", "observations", "odd", "over", "rewards", "rows", "terminated", "truncated"
    )  # fmt: skip

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows
        self.observations: list[Any] = []
        self.rewards: list[Any] = []
        self.terminated: list[Any] = []
        self.truncated: list[Any] = []
        self.infos: list[tuple[int, dict[str, Any]]] = []
        self.failures: list[tuple[int, BaseException]] = []
        self.over: list[int] = []
        self.lost: list[int] = []
        self.odd = False

    def spoil(self, index: int, row: int, exc: Exception) -> None:
        """The observation at `index` is of no use: that row has failed."""
        self.rewards[index], self.terminated[index], self.truncated[index] = 0.0, False, False
        self.infos = [(r, info) for r, info in self.infos if r != row]
        self.failures.append((row, exc))


class Autoreset:
    """Envs that are stepped one after the other, and reset as the mode wants it.

    NEXT_STEP: the step after the last one of an episode resets; its action is ignored and its reward 0.
    SAME_STEP: the last step of an episode resets at once; terminal observation and info go into the infos.
    DISABLED: nothing resets by itself.

    Args:
        envs: the envs, one a row.
        mode: the autoreset mode.
        mark: `mark[0]` becomes row + 1 before an env runs, and 0 after the last one.
        lenient: whether rewards and flags may be whatever numpy makes numbers and bools of, None and texts say.
        numerics: whether NaN and infinite numbers are errors.

    Attributes:
        due: for each row what its next step is instead of a step of its env: nothing else (0), a reset, or the end of
            an episode that was lost.
        mode: likewise.
        resets_next_step: whether the mode is NEXT_STEP.
    """

    def __init__(
        self,
        envs: Sequence[Env[Any, Any]],
        mode: AutoresetMode,
        mark: memoryview | list[int],
        *,
        lenient: bool = False,
        numerics: bool = False,
    ) -> None:
        self._mark = mark
        self._lenient = lenient
        self._envs = envs
        both = [checked(env) if numerics else (env.step, env.reset) for env in envs]
        self._steps = [step for step, _ in both]
        self._resets = [reset for _, reset in both]
        self.due = [_NOT] * len(envs)
        self._seeds: dict[int, int] = {}  # for the next reset of a row
        self._lost: dict[int, Any] = {}  # the last observation of a row whose end has yet to be told
        self._follows = False
        self.mode = mode
        self.resets_next_step = mode is AutoresetMode.NEXT_STEP
        self._same_step = mode is AutoresetMode.SAME_STEP

    def follow(self, seeds: Seeds, start: int) -> None:
        """From now on an episode that is given no seed takes one from there; the first row is slot `start`."""
        self._resets = [partial(_reset, reset, seeds, start + row) for row, reset in enumerate(self._resets)]
        self._follows = True

    def around_resets(self, row: int, before: Callable[[], None], after: Callable[[], None]) -> None:
        """From now on call these before and after each reset of a row."""
        self._resets[row] = partial(_around, self._resets[row], before, after)

    def reset(self, row: int, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in one row; observation and info."""
        self._mark[0] = row + 1
        known = self._seeds.pop(row, None)
        try:
            obs, info = _pair(self._resets[row](seed=known if seed is None else seed, options=options))
        except SystemExit:
            raise
        except BaseException as exc:
            self._mark[0] = 0
            if isinstance(exc, TypeError) and re.search(r"unexpected keyword argument '(seed|options)'$", str(exc)):
                exc.add_note("Gymnasium's `reset` is `def reset(self, *, seed=None, options=None)`")
            raise
        self.due[row] = _NOT
        self._lost.pop(row, None)
        self._mark[0] = 0
        return obs, info

    def is_end(self, row: int, exc: BaseException) -> bool:
        """Whether a reset has raised this because there is no further episode; if so, the next step will try again."""
        if isinstance(exc, StopIteration) and not _is_finite(self._envs[row]):
            exc.add_note("If that means no further episode: raise aioenv.EpisodesDone, or set finite_episodes = True")
            return False
        if not isinstance(exc, (EpisodesDone, StopIteration)):
            return False
        self.due[row] = _RESET
        self._lost.pop(row, None)
        return True

    def go_on(self, row: int, due: int) -> None:
        """The env of a row has been put into the state of another, whose next step was due to be this."""
        self._seeds.pop(row, None)
        self._lost.pop(row, None)
        self.due[row] = due

    def begin_anew(self, row: int, seed: int | None, lost: Any) -> None:
        """This row's env is a new one, in place of one that was lost.

        Args:
            row: the row.
            seed: for its next reset, unless that is given one.
            lost: the last observation; the next step tells of the end of that episode. None: it had ended.
        """
        if seed is not None and not self._follows:
            self._seeds[row] = seed
        if lost is not None:
            self._lost[row] = lost
            self.due[row] = _LOST
        elif self.resets_next_step:
            self.due[row] = _RESET

    def _reset_by_itself(self, row: int, outcome: Any = NotImplemented) -> tuple[Any, dict[str, Any]]:
        """Reset a row, unless this has been done, with this outcome."""
        if outcome is NotImplemented:
            seed = self._seeds.pop(row, None)
            outcome = self._resets[row]() if seed is None else self._resets[row](seed=seed)
        pair = _pair(outcome)
        self.due[row] = _NOT
        return pair

    def _instead(
        self, row: int, outcome: Any = NotImplemented
    ) -> tuple[Any, float, bool, bool, dict[str, Any], dict[str, Any] | None]:
        """What a step of a row gives that does not step its env; and what became of the episode before.

        Args:
            row: the row.
            outcome: of its reset, if that is due and has been done.
        """
        if self.due[row] == _RESET:
            obs, info = self._reset_by_itself(row, outcome)
            return obs, 0.0, False, False, info, None
        obs, info = self._lost.pop(row), {"restarted": True}
        if self._same_step:
            final = {"final_obs": obs, "final_info": info}
            obs, fresh = self._reset_by_itself(row)
            return obs, 0.0, False, True, {**fresh, **info}, final
        self.due[row] = _RESET if self.resets_next_step else _NOT
        return obs, 0.0, False, True, info, None

    @property
    def express(self) -> tuple[list[Any], list[Any], list[int], dict[int, int], int, Any]:
        """What `step_rows` takes, from `steps` to `mark`."""
        at_end = -1 if self._same_step else int(self.resets_next_step)
        return self._steps, self._resets, self.due, self._seeds, at_end, self._mark

    def _apart(
        self, first: int, actions: list[Any], into: Into, out: Stepped, begun: tuple[int, Any, bool] | None
    ) -> Iterator[tuple[int, Any, Any]]:
        """Step rows in C. Gives those that are not usual, their actions, and what `step_rows` says of them."""
        assert step_rows is not None
        apart: list[int] = []
        out.rows = apart
        row, stop = first, first + len(actions)
        while row < stop:
            outcome: Any = NotImplemented
            if not out.odd:
                if begun is None:
                    begun = step_rows(row, first, actions, *self.express, out.infos, into)
                (row, outcome, out.odd), begun = begun, None
                if row == stop:
                    return
            apart.append(row)
            yield row, actions[row - first], outcome
            row += 1

    def step(
        self,
        rows: Sequence[int],
        actions: Sequence[Any],
        into: Into | None = None,
        begun: tuple[list[tuple[int, dict[str, Any]]], int, Any, bool] | None = None,
    ) -> Stepped:
        """Step rows with one action each.

        Args:
            rows, actions: as many of each.
            into: where what is usual may go at once, if rows follow one another; None: nowhere.
            begun: C has begun with that: the infos until then, and what `step_rows` gave.
        """
        out = Stepped(rows)
        stopped = None
        if begun is not None:
            out.infos, stopped = begun[0], begun[1:]
        if into is None:
            turns: Iterable[tuple[int, Any, Any]] = zip(rows, actions, [NotImplemented] * len(rows), strict=True)
        else:
            turns = self._apart(rows[0] if rows else 0, list(actions), into, out, stopped)
        steps, due, mark = self._steps, self.due, self._mark
        rewards, terminated, truncated, infos = out.rewards, out.terminated, out.truncated, out.infos
        observations = out.observations
        five: Any = None
        for row, action, done in turns:
            reward: Any
            final = None
            mark[0] = row + 1
            try:
                if isinstance(done, BaseException):
                    five = None
                    raise done
                if due[row]:
                    if due[row] == _LOST and not self._same_step:
                        out.lost.append(row)
                    obs, reward, ends, cut, info, final = self._instead(row, done)
                else:
                    five = steps[row](action) if done is NotImplemented else done
                    obs, reward, ends, cut, info = five
                    if type(info) is not dict:
                        check_info("step", info)
                    if not ((type(reward) in NUMBERS and type(ends) in BOOLS and type(cut) in BOOLS) or self._lenient):
                        reward = number_of(reward)
                        ends, cut = flag_of("terminated", ends), flag_of("truncated", cut)
                    if ends or cut:
                        if self.resets_next_step:
                            due[row] = _RESET
                        elif self._same_step:
                            final = {"final_obs": _kept(obs), "final_info": _kept(info)}
                            obs, info = _pair(self._resets[row]())
                if final is not None:
                    if isinstance(info, dict) and not final.keys().isdisjoint(info):
                        info = _added(final, info)  # dicts of one row are merged in the order of their sorts
                    else:
                        infos.append((row, final))
                if info:  # a copy of it: the next env may write into the same dict
                    infos.append((row, info.copy() if type(info) is dict else info))
            except SystemExit:
                raise
            except BaseException as exc:  # a panic of Rust code, or asyncio's CancelledError, is none of Exception's
                if (final is not None or due[row] == _RESET) and self.is_end(row, exc):
                    out.over.append(row)
                    if final is None:
                        obs, reward, ends, cut = None, 0.0, False, False
                    else:
                        infos.append((row, final))
                else:
                    if exc.__traceback__ is not None and exc.__traceback__.tb_next is None:  # raised right here
                        exc = _not_five(exc, five)
                    out.failures.append((row, exc))
                    obs, reward, ends, cut = None, 0.0, False, False
            observations.append(obs)
            rewards.append(reward)
            terminated.append(ends)
            truncated.append(cut)
        mark[0] = 0
        return out


def _pair(outcome: Any) -> tuple[Any, dict[str, Any]]:
    """What a reset gave, if it is two things.

    Raises:
        TypeError, ValueError: if it is not; the type is that of Python's own error.
    """
    try:
        obs, info = outcome
    except (TypeError, ValueError) as exc:
        old = _OLD * (outcome is not None and not isinstance(outcome, tuple))
        raise type(exc)(f"reset: expected (observation, info), got {briefly(outcome)}{old}") from None
    if type(info) is not dict:
        check_info("reset", info)
    return obs, info


def _not_five(exc: BaseException, outcome: Any) -> BaseException:
    """The error of a step that gave something other than five values, in place of Python's; any other as it is."""
    if not isinstance(exc, (TypeError, ValueError)) or "unpack" not in str(exc):
        return exc
    old = _OLD * (isinstance(outcome, tuple) and len(outcome) == 4)
    return type(exc)(f"step: expected (observation, reward, terminated, truncated, info), got {briefly(outcome)}{old}")


def _added(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Two infos of one env as one: as Gymnasium adds them one after the other, dicts key by key."""
    merged = {**first, **then}
    for key in first.keys() & then.keys():
        if key != "final_obs" and isinstance(first[key], dict) and isinstance(then[key], dict):
            merged[key] = _added(first[key], then[key])
    return merged


def _kept(value: Any) -> Any:
    """What stays as it is when an env, in its reset, writes into the arrays and dicts that it has returned."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: _kept(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a graph is a named tuple of arrays
        return value._make(map(_kept, value))
    return value


def _is_finite(env: Any) -> bool:
    """Whether an env says, with an attribute `finite_episodes`, that a StopIteration of its reset is not a mistake."""
    try:
        return bool(env.get_wrapper_attr("finite_episodes"))
    except AttributeError:
        return False


def _reset(
    reset: Callable[..., Any],
    seeds: Seeds,
    slot: int,
    *,
    seed: int | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    if seed is None:
        seed = seeds.next(slot)
    else:
        seeds.begin(slot)
    return reset(seed=seed, options=options)


def _around(reset: Callable[..., Any], before: Callable[[], None], after: Callable[[], None], **how: Any) -> Any:
    before()
    try:
        return reset(**how)
    finally:
        after()


def parse_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """An autoreset mode, given as such or by value ("NextStep"), as Gymnasium takes it.

    Raises:
        ValueError: if it is neither; the message lists the modes.
    """
    try:
        return AutoresetMode(mode)
    except ValueError:
        known = ", ".join(repr(m.value) for m in AutoresetMode)
        raise ValueError(f"autoreset_mode: expected an AutoresetMode or one of {known}, got {mode!r}") from None
