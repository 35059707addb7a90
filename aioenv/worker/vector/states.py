"""States of the slots of a vector env, if it tells them: as the states of single envs travel and are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gymnasium.vector import VectorEnv, VectorWrapper

from aioenv.state.plain_values import Arrays, decode, encode, is_pickled
from aioenv.state.snapshot import Misfit, RawState, differences, fingerprint
from aioenv.worker.native_states import as_native, is_task

__all__ = ["StatefulVectorEnv", "find_layer", "has_states", "read_vector_states", "write_vector_states"]


class StatefulVectorEnv(Protocol):
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
_STATELESS = {"aioenv.worker.vector.numerics.CheckedNumerics", "aioenv.rendering.pixel_states.PixelStates"} | {
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
        values = {"vector": type(holder).__name__, "state": node, "pickled": is_pickled(node)}
        if is_task(holder):
            values["model"] = fingerprint(holder.model)  # type: ignore[attr-defined]
        raw.append((_id(env), values, arrays))
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
    texts: list[str | None] = []
    good: list[tuple[int, Any]] = []
    for row, state in zip(rows, states, strict=True):
        try:
            good.append((row, _fitting(env, holder, state)))
            texts.append(None)
        except Misfit as exc:
            texts.append(str(exc))
    if good:
        holder.set_state([state for _, state in good], [row for row, _ in good])
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


def _holder(env: VectorEnv[Any, Any, Any]) -> StatefulVectorEnv:
    holder: StatefulVectorEnv = find_layer(env, has_states)
    return holder


def _fitting(env: VectorEnv[Any, Any, Any], holder: Any, state: RawState) -> Any:
    """A state as the holder takes it.

    Raises:
        Misfit: if it is of another sort of env.
    """
    name, values, arrays = state
    if name != _id(env):
        raise Misfit(f"the state of {name} does not fit {_id(env)}")
    kind = type(holder).__name__
    if "vector" not in values:
        if is_task(holder):
            return as_native(holder, state)
        raise Misfit(f"the state of {name} is one of a single env; {kind} is a vector env, which keeps other things")
    if values["vector"] != kind:
        raise Misfit(f"the state of {name} is one of a slot of {values['vector']}; here {kind} has the states")
    if "model" in values and is_task(holder) and values["model"] != (here := fingerprint(holder.model)):
        raise Misfit(f"the state of {name} is of another MuJoCo model: {differences(values['model'], here)}")
    return decode(values["state"], arrays)


def _id(env: VectorEnv[Any, Any, Any]) -> str:
    spec = env.spec
    return spec.id if spec is not None else type(env.unwrapped).__name__
