"""States of the slots of a vector env, if it tells them: as the states of single envs travel and are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium import Env
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from aioenv.state.snapshot import (
    Arrays,
    Misfit,
    RawState,
    check_data,
    decode,
    differences,
    encode,
    fingerprint,
    is_pickled,
    name_counters,
    read_data,
    write_data,
)
from aioenv.state.wrapper_stack import examine
from aioenv.worker.making import TASKS

__all__ = [
    "AWAITS_RESET",
    "StatefulVectorEnv",
    "as_native",
    "as_single",
    "awaits_reset",
    "find_layer",
    "has_states",
    "is_task",
    "read_vector_states",
    "write_vector_states",
]


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
_STATELESS = {"aioenv.worker.vector_access.CheckedNumerics", "aioenv.rendering.pixel_states.PixelStates"} | {
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


# ------------------------------------------------------------ states of native tasks


AWAITS_RESET = "this state awaits a reset, which only AutoresetMode.NEXT_STEP does: it was taken under it"

_ELAPSED, _BEGUN = "TimeLimit._elapsed_steps", "OrderEnforcing._has_reset"


def is_task(vector_env: Any) -> bool:
    """Whether a vector env is one of our own tasks, whose states fit single envs."""
    return f"{type(vector_env).__module__}:{type(vector_env).__qualname__}" in TASKS.values()


def awaits_reset(state: RawState) -> bool:
    """Whether a state is of an episode that is over, as single envs and native tasks tell it (others may not)."""
    _, values, arrays = state
    if "vector" not in values:
        return bool(values["due"])
    node = values["state"]
    told = node["value"] if isinstance(node, dict) and node["kind"] == "dict" else {}
    return {"physics", "elapsed", "over"} <= told.keys() and bool(decode(told["over"], arrays))


def as_single(env: Env[Any, Any], state: RawState, mode: AutoresetMode) -> RawState:
    """The state of a slot of a native task as one of a single env; any other as it is.

    Args:
        env: the single env that shall have it, with its wrappers.
        state: what the task gave.
        mode: how that env is reset.

    Raises:
        Misfit: if the env has wrappers that count what a native task does not.
    """
    name, values, arrays = state
    stack = examine(env)
    base = stack.base
    task = TASKS.get(f"{type(base).__module__}:{type(base).__qualname__}", "").rpartition(":")[2]
    if values.get("vector") != task or stack.obstacle is not None:
        return state
    given = decode(values["state"], arrays)
    known = {_ELAPSED: given["elapsed"], _BEGUN: given["begun"]}
    keys = name_counters(stack)
    if unknown := [key for key in [*map(_short, keys), *(type(own).__name__ for own in stack.own)] if key not in known]:
        raise Misfit(f"the state of {name} is one of a native task, which has no {', '.join(unknown)}")
    model = fingerprint(base.model)
    if values.get("model") != model:
        raise Misfit(f"the state of {name} is of another MuJoCo model: {differences(values.get('model'), model)}")
    mine: Arrays = {}
    rng = None if given["rng"] is None else {"seed": given["seed"], "state": encode(given["rng"], "rng", mine)}
    single: dict[str, Any] = {
        "due": given["over"] and mode is not AutoresetMode.DISABLED,
        "counters": {key: known[_short(key)] for key in keys},
        "rng": rng,
        "model": model,
        "own": [],
        "states": [],
        "mujoco": read_data(_restored(base, given["physics"], given["memory"]), mine),
        "python": {},
        "pickled": False,
    }
    return name, single, mine


def as_native(task: Any, state: RawState) -> dict[str, Any]:
    """The state of a single env as `NativeMujocoEnv.set_state` takes it.

    Args:
        task: the vector env that shall have it, for which `is_task` is true.
        state: what a single env gave, of the same id.

    Raises:
        Misfit: if it is of another model, counts something else, or awaits a reset that would not come.
    """
    name, values, arrays = state
    here = fingerprint(task.model)
    if values["model"] != here:
        raise Misfit(f"the state of {name} is of another MuJoCo model: {differences(values['model'], here)}")
    counters = {_short(key): decode(node, arrays) for key, node in values["counters"].items()}
    if unknown := [*(key for key in counters if key not in (_ELAPSED, _BEGUN)), *values["own"]]:
        raise Misfit(f"the state of {name} has {', '.join(unknown)}, which a native task has not")
    if task.max_episode_steps is not None and _ELAPSED not in counters:
        raise Misfit(
            f"the state of {name} is of an env without a TimeLimit, and does not tell the steps of its episode"
        )
    if values["due"] and task.autoreset_mode is not AutoresetMode.NEXT_STEP:
        raise Misfit(AWAITS_RESET)
    import mujoco

    data = mujoco.MjData(task.model)
    check_data(name, data, arrays)
    write_data(data, arrays, values["mujoco"])
    physics = np.empty(task.pool.state_size)
    mujoco.mj_getState(task.model, data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
    rng = values["rng"]
    return {
        "physics": physics,
        "memory": {key: view.copy() for key, view in _remembered(task, data).items()},
        "elapsed": counters.get(_ELAPSED) or 0,
        "over": values["due"],
        "begun": counters.get(_BEGUN, True),
        "seed": None if rng is None else decode(rng["seed"], arrays),
        "rng": None if rng is None else decode(rng["state"], arrays),
    }


def _short(counter: str) -> str:
    """Wrapper and attribute, wherever in the stack they are."""
    return counter.partition(": ")[2]


def _restored(base: Any, physics: npt.NDArray[np.float64], memory: dict[str, npt.NDArray[Any]]) -> Any:
    """An `MjData` from which a single env goes on as a native task does from a state."""
    import mujoco

    data, part = mujoco.MjData(base.model), mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(base.model, data, physics, part)
    mujoco.mj_forward(base.model, data)  # for those who look at it
    mujoco.mj_setState(base.model, data, physics, part)  # with the warm start that it had
    for key, view in _remembered(base, data).items():
        view[...] = memory[key]
    return data


def _remembered(env: Any, data: Any) -> dict[str, npt.NDArray[Any]]:
    """Where the data of a single env has what a native task remembers; `env` is either of them."""
    match type(env).__name__.removesuffix("Env"):
        case "Ant":
            return {"xy": data.xpos[data.model.body(env._main_body).id, :2]}
        case "Humanoid":
            return {"xipos": data.xipos}
    return {}
