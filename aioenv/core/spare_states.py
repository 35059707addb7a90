"""States of slots with spare envs: an `EnvState` with the states of both envs, of which one runs the episode.

It is the state of that env, to which the other one's is added: in `values["spares"]`, and in arrays under "spare/".
"""

from __future__ import annotations

from typing import Any

from aioenv.core.spares import SpareState
from aioenv.errors import ResumeError
from aioenv.state.snapshot import EPISODE_LOST, EnvState, RawState, decode, encode, is_pickled

__all__ = ["check_kind", "join_states", "split_state"]

_PREFIX = "spare/"


def join_states(raw: tuple[RawState | str, RawState | str], state: SpareState) -> RawState | str:
    """Return the state of a slot as `EnvState` takes it; or, as a string, why there is none.

    Args:
        raw: the states of its first and second env.
        state: which of them runs the episode, and so on.
    """
    if state.lost:
        return EPISODE_LOST
    if state.prepared is not None and state.prepared.parts[0].errors:
        return f"its next episode can't begin: {state.prepared.parts[0].errors[0]}"
    live, other = raw[state.live], raw[1 - state.live]
    if isinstance(live, str) or isinstance(other, str):
        return live if isinstance(live, str) else other
    arrays = {**live[2], **{_PREFIX + name: array for name, array in other[2].items()}}
    values = live[1] | {
        "due": state.ended,
        "spares": {
            "live": state.live,
            "number": state.number,
            "prepared": state.prepared is not None,
            "last": None if state.last is None else encode(state.last, f"{_PREFIX}last", arrays),
            "other": [other[0], other[1] | {"due": False}],
        },
    }
    values["pickled"] |= other[1]["pickled"] or is_pickled(values["spares"]["last"])
    return live[0], values, arrays


def split_state(state: EnvState) -> tuple[list[RawState], SpareState, bool]:
    """Return the states of the first and second env, what the slot depends on beside them, and what is prepared."""
    more: dict[str, Any] = state.values["spares"]
    values = {name: value for name, value in state.values.items() if name != "spares"}
    values["due"] = False  # the slot goes on in its other env
    live = state.env_id, values, {name: a for name, a in state.arrays.items() if not name.startswith(_PREFIX)}
    arrays = {name.removeprefix(_PREFIX): a for name, a in state.arrays.items() if name.startswith(_PREFIX)}
    both: list[RawState] = [live, (more["other"][0], more["other"][1], arrays)]
    last = decode(more["last"], state.arrays)
    found = SpareState(more["live"], more["number"], None, bool(state.values["due"]), last)
    return both[::-1] if found.live else both, found, more["prepared"]


def check_kind(states: dict[int, EnvState], *, spares: bool) -> None:
    """Raise a ResumeError if states, by slot, do not have as many envs as a slot here."""
    for slot, state in states.items():
        if ("spares" in state.values) != spares:
            has, here = (
                ("one env", "has two (spare_envs=True)") if spares else ("two envs (spare_envs=True)", "has one")
            )
            raise ResumeError(
                f"set_state: the state for slot {slot} is of a slot with {has}; a slot of this vector env {here}"
            )
