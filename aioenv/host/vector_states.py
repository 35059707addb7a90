"""States of the slots of a vector env, if it tells them: as the states of single envs travel and are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gymnasium.vector import VectorEnv, VectorWrapper

from aioenv.host.plain_values import Arrays, decode, encode, is_pickled
from aioenv.host.snapshot import Misfit, RawState

__all__ = ["Stateful", "find_layer", "has_states", "read_vector_states", "write_vector_states"]


class Stateful(Protocol):
    """What a vector env (or a wrapper of one, for all that is in it) has whose slots' states can be had and set.

    A state is all that the next steps of its slot, and the next automatic resets, depend on: numbers, strings, arrays,
    and dicts, lists and tuples of these travel and are kept as such, anything else as a pickle. It must not depend on
    the number of the slot, nor on how many there are.
    """

    def get_state(self, slots: Sequence[int]) -> Sequence[Any]:
        """One state for each of `slots`, which the env does not change afterwards."""

    def set_state(self, states: Sequence[Any], slots: Sequence[int]) -> None:
        """Bring each of `slots` into a state that `get_state` gave of any slot of an env that was made alike."""


# Wrappers that remember nothing; a subclass is another wrapper.
_STATELESS = {"aioenv.rendering.pixel_states.PixelStates"} | {
    f"gymnasium.wrappers.vector.{name}"
    for name in (
        "dict_info_to_list.DictInfoToList",
        "vectorize_action.ClipAction",
        "vectorize_action.RescaleAction",
        "vectorize_reward.ClipReward",
        *(
            f"vectorize_observation.{kind}Observation"
            for kind in "Filter Flatten Grayscale Resize Reshape Rescale Dtype".split()
        ),
    )
}


def read_vector_states(env: VectorEnv[Any, Any, Any], rows: Sequence[int]) -> list[RawState]:
    """The states of some rows of a vector env.

    Raises:
        Misfit: if they can't be had; the message names what is in the way.
    """
    holder = _holder(env)
    states = holder.get_state(list(rows))
    if len(states) != len(rows):
        raise ValueError(f"get_state of {type(holder).__name__} gave {len(states)} states for {len(rows)} slots")
    raw: list[RawState] = []
    for state in states:
        arrays: Arrays = {}
        node = encode(state, "state", arrays)
        raw.append((_id(env), {"vector": type(holder).__name__, "state": node, "pickled": is_pickled(node)}, arrays))
    return raw


def write_vector_states(
    env: VectorEnv[Any, Any, Any], rows: Sequence[int], states: Sequence[RawState]
) -> list[str | None]:
    """Bring some rows into states.

    Returns:
        For each row None, or why its state is of another sort of env: such a row is as it was.

    Raises:
        Misfit: if states can't be set; the message names what is in the way.
    """
    holder = _holder(env)
    texts = [_misfit(env, holder, name, values) for name, values, _ in states]
    good = [(row, s) for row, s, text in zip(rows, states, texts, strict=True) if text is None]
    if good:
        holder.set_state([decode(values["state"], arrays) for _, (_, values, arrays) in good], [row for row, _ in good])
    return texts


def has_states(layer: Any) -> bool:
    """Whether a layer of wrappers tells and sets the states of slots."""
    return callable(getattr(layer, "get_state", None)) and callable(getattr(layer, "set_state", None))


def find_layer(env: VectorEnv[Any, Any, Any], fits: Callable[[Any], bool]) -> Any:
    """The outermost layer of wrappers that fits, if those around it remember nothing.

    Raises:
        Misfit: if there is none, or one of those around it may remember something.
    """
    layer: Any = env
    while not fits(layer):
        kind = type(layer)
        what = f"the states of {_id(env)} can't be had or set"
        if not isinstance(layer, VectorWrapper):
            raise Misfit(
                f"{what}: the vector env {kind.__name__} does not tell the states of its slots; give it "
                'get_state(slots) and set_state(states, slots), or use backend="workers"'
            )
        if f"{kind.__module__}.{kind.__qualname__}" not in _STATELESS:
            raise Misfit(
                f"{what}: the wrapper {kind.__name__} may remember something; give it get_state(slots) and "
                "set_state(states, slots)"
            )
        layer = layer.env
    return layer


def _holder(env: VectorEnv[Any, Any, Any]) -> Stateful:
    holder: Stateful = find_layer(env, has_states)
    return holder


def _misfit(env: VectorEnv[Any, Any, Any], holder: Stateful, name: str, values: dict[str, Any]) -> str | None:
    if name != _id(env):
        return f"the state of {name} does not fit {_id(env)}"
    kind = type(holder).__name__
    if "vector" not in values:
        return f"the state of {name} is one of a single env; {kind} is a vector env, which keeps other things"
    if values["vector"] != kind:
        return f"the state of {name} is one of a slot of {values['vector']}; here {kind} has the states"
    return None


def _id(env: VectorEnv[Any, Any, Any]) -> str:
    spec = env.spec
    return spec.id if spec is not None else type(env.unwrapped).__name__
