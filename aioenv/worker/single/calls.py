"""Calls of the envs of a worker: their methods, attributes and whole states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Env

from aioenv.ipc.messages import Failure, dump
from aioenv.spaces.autoreset import Autoreset
from aioenv.state.checkpoint import Checkpoints, RowCheckpoint
from aioenv.state.env_renderable import EnvRenderable
from aioenv.state.snapshot import Misfit, RawState, read_snapshot, write_snapshot
from aioenv.stats.sharing import copies
from aioenv.worker import current_row
from aioenv.worker.loop import describe_failure
from aioenv.worker.native_states import AWAITS_RESET, as_single

__all__ = ["EnvCalls"]


class EnvCalls:
    """What `EnvService` has beside steps and resets."""

    _envs: list[Env[Any, Any]]
    _stepper: Autoreset
    _checkpoints: Checkpoints | None
    _row_checkpoints: list[RowCheckpoint]
    _editing: list[tuple[int, str, EnvRenderable]]

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
        return self._for_each(rows, [lambda _, row=row: self._stepper.due[row] == 1 for row in rows])  # type: ignore[misc]

    def get_states(self, rows: Sequence[int]) -> tuple[list[bytes], list[Failure]]:
        """The state of each env, or, as a text, why it can't be had."""
        due = self._stepper.due
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
        self._stepper.go_on(row, write_snapshot(self._envs[row], state))
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
                with current_row.row(row):
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


def _or_text(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Misfit as exc:
        return str(exc)
