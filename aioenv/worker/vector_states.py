"""States of the slots of a vector env, in the form of single envs' states; a native task's fit Gymnasium's own envs.

A native task keeps `mjSTATE_INTEGRATION`, of which the next step computes the rest. It also remembers a few derived
quantities, which a single env reads from its `MjData` before the next step. So these are copied into that `MjData`, or
from it.
"""

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
    inspect_stack,
    is_pickled,
    name_counters,
    read_data,
    write_data,
)
from aioenv.worker.making import TASKS

__all__ = [
    "AWAITS_RESET",
    "StatefulVectorEnv",
    "as_native",
    "as_single",
    "awaits_reset",
    "find_layer",
    "has_states",
    "is_native",
    "read_vector_states",
    "write_vector_states",
]


class StatefulVectorEnv(Protocol):
    """A vector env, or a wrapper of one, whose slots' states can be read and set.

    A state holds everything that the next steps and automatic resets of its slot depend on. Numbers, strings, arrays,
    and dicts, lists and tuples of these are kept as such, anything else as a pickle. A state must not depend on the
    number of its slot, nor on how many slots there are.
    """

    def get_state(self, slots: Sequence[int]) -> Sequence[Any]:
        """Return one state for each of `slots`; the env must not change it afterwards."""

    def set_state(self, states: Sequence[Any], slots: Sequence[int]) -> None:
        """Bring each of `slots` into a state that `get_state` returned for any slot of an env that was made alike."""


# Stateless wrappers by full name; a subclass is another wrapper.
_STATELESS = {"aioenv.worker.vector_access.CheckedNumerics", "aioenv.rendering.pixels.PixelStates"} | {
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
    """Return the states of some rows of a vector env.

    Raises:
        Misfit: if they can't be read; the message names the obstacle.
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
        if is_native(holder):
            values["model"] = fingerprint(holder.model)  # type: ignore[attr-defined]
        raw.append((_id(env), values, arrays))
    return raw


def write_vector_states(
    env: VectorEnv[Any, Any, Any], rows: Sequence[int], states: Sequence[RawState]
) -> list[str | None]:
    """Bring some rows into states.

    Returns:
        For each row None, or why its state belongs to another kind of env: such a row is unchanged.

    Raises:
        Misfit: if states can't be set; the message names the obstacle.
    """
    holder = _holder(env)
    problems: list[str | None] = []
    fitting: list[tuple[int, Any]] = []
    for row, state in zip(rows, states, strict=True):
        try:
            fitting.append((row, _converted(env, holder, state)))
            problems.append(None)
        except Misfit as exc:
            problems.append(str(exc))
    if fitting:
        holder.set_state([state for _, state in fitting], [row for row, _ in fitting])
    return problems


def has_states(layer: Any) -> bool:
    """Return whether a layer of wrappers can read and set the states of slots."""
    return callable(getattr(layer, "get_state", None)) and callable(getattr(layer, "set_state", None))


def find_layer(env: VectorEnv[Any, Any, Any], fits: Callable[[Any], bool]) -> Any:
    """Return the outermost layer of wrappers that fits, if the wrappers around it are stateless.

    Raises:
        Misfit: if there is none, or a wrapper around it may have a state.
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


def _converted(env: VectorEnv[Any, Any, Any], holder: Any, state: RawState) -> Any:
    """Return a state in the form of the holder's `set_state`.

    Raises:
        Misfit: if it belongs to another kind of env.
    """
    name, values, arrays = state
    if name != _id(env):
        raise Misfit(f"the state of {name} does not fit {_id(env)}")
    kind = type(holder).__name__
    if "vector" not in values:
        if is_native(holder):
            return as_native(holder, state)
        raise Misfit(f"the state of {name} is one of a single env; {kind} is a vector env, which keeps other things")
    if values["vector"] != kind:
        raise Misfit(f"the state of {name} is one of a slot of {values['vector']}; here {kind} has the states")
    if "model" in values and is_native(holder) and values["model"] != (here := fingerprint(holder.model)):
        raise Misfit(f"the state of {name} is of another MuJoCo model: {differences(values['model'], here)}")
    if awaits_reset(state) and getattr(holder, "autoreset_mode", None) is AutoresetMode.SAME_STEP:
        raise Misfit(AWAITS_RESET)
    return decode(values["state"], arrays)


def _id(env: VectorEnv[Any, Any, Any]) -> str:
    spec = env.spec
    return spec.id if spec is not None else type(env.unwrapped).__name__


# ------------------------------------------------------------ states of native tasks


AWAITS_RESET = "this state awaits a reset, which only AutoresetMode.NEXT_STEP does: it was taken under it"

_ELAPSED, _BEGUN = "TimeLimit._elapsed_steps", "OrderEnforcing._has_reset"


def is_native(vector_env: Any) -> bool:
    """Return whether a vector env is a native task, whose states fit single envs."""
    return f"{type(vector_env).__module__}:{type(vector_env).__qualname__}" in TASKS.values()


def awaits_reset(state: RawState) -> bool:
    """Return whether a state belongs to an episode that has ended; unknown states of other vector envs: False."""
    _, values, arrays = state
    if "vector" not in values:
        return bool(values["due"])
    node = values["state"]
    told = node["value"] if isinstance(node, dict) and node["kind"] == "dict" else {}
    return {"physics", "elapsed", "over"} <= told.keys() and bool(decode(told["over"], arrays))


def as_single(env: Env[Any, Any], state: RawState, mode: AutoresetMode) -> RawState:
    """Convert the state of a slot of a native task to one of a single env; return any other state as it is.

    Args:
        env: the single env that the state is for, with its wrappers.
        state: the state of the slot.
        mode: the autoreset mode of that env.

    Raises:
        Misfit: if the env has wrappers with counters that a native task lacks.
    """
    name, values, arrays = state
    stack = inspect_stack(env)
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
    """Convert the state of a single env to the form of `NativeMujocoEnv.set_state`.

    Args:
        task: the vector env that the state is for; `is_native` is true for it.
        state: the state of a single env with the same id.

    Raises:
        Misfit: if it belongs to another model, has other counters, or awaits a reset that would not come.
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
    """Return the wrapper and attribute of a counter, without the position in the stack."""
    return counter.partition(": ")[2]


def _restored(base: Any, physics: npt.NDArray[np.float64], memory: dict[str, npt.NDArray[Any]]) -> Any:
    """Return an `MjData` from which a single env continues as the native task would."""
    import mujoco

    data, part = mujoco.MjData(base.model), mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(base.model, data, physics, part)
    mujoco.mj_forward(base.model, data)  # for readers of derived quantities
    mujoco.mj_setState(base.model, data, physics, part)  # with the warm start that it had
    for key, view in _remembered(base, data).items():
        view[...] = memory[key]
    return data


def _remembered(env: Any, data: Any) -> dict[str, npt.NDArray[Any]]:
    """Return the views of a single env's data that a native task remembers; `env` is either of them."""
    match type(env).__name__.removesuffix("Env"):
        case "Ant":
            return {"xy": data.xpos[data.model.body(env._main_body).id, :2]}
        case "Humanoid":
            return {"xipos": data.xipos}
    return {}
