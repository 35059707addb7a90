"""Calls of a vector env: its methods, attributes and states, for some of its rows. Wherever it lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gymnasium.vector import VectorEnv

from aioenv.state.snapshot import Misfit, RawState
from aioenv.worker.vector.attributes import call_vector_env, set_vector_attr
from aioenv.worker.vector.states import read_vector_states, write_vector_states

__all__ = ["VectorCalls"]


class VectorCalls:
    """What there is beside steps and resets; each method gives one result for each of `rows`.

    What the env raises is raised here, and an error of all of its rows.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self._env = env

    def call_envs(self, rows: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method, or read an attribute (see `call_vector_env`)."""
        return call_vector_env(self._env, rows, name, args, kwargs)

    def call_if_any(self, rows: Sequence[int], name: str) -> list[Any]:
        """Call a method without arguments; None for each row if there is no such method."""
        return self.call_envs(rows, name, (), {}) if hasattr(self._env, name) else [None] * len(rows)

    def apply(self, rows: Sequence[int], function: Callable[..., list[Any]], args: tuple[Any, ...]) -> list[Any]:
        """Call a function with the env, rows and some arguments; it gives one result for each of `rows`."""
        return function(self._env, rows, *args)

    def set_attr(self, rows: Sequence[int], name: str, values: Sequence[Any]) -> list[Any]:
        """Set an attribute (see `set_vector_attr`)."""
        set_vector_attr(self._env, name, values)
        return [None] * len(rows)

    def get_states(self, rows: Sequence[int]) -> list[RawState] | list[str]:
        """The state of each row, or, as a text, why it can't be had."""
        try:
            return read_vector_states(self._env, rows)
        except Misfit as exc:
            return [str(exc)] * len(rows)

    def set_states(self, rows: Sequence[int], states: Sequence[RawState]) -> Sequence[str | None]:
        """Bring each row into a state; None, or a text that says why nothing was done."""
        try:
            return write_vector_states(self._env, rows, states)
        except Misfit as exc:
            return [str(exc)] * len(rows)
