"""States of native tasks as states of Gymnasium's own envs, and back, so that either goes on where the other was.

Of physics a native task keeps `mjSTATE_INTEGRATION`, of which the next step computes all the rest. What it remembers
besides are derived quantities, which a single env reads from its `MjData` before the next step. So these are put there,
and taken from there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from aioenv.state.plain_values import Arrays, decode, encode
from aioenv.state.snapshot import (
    Misfit,
    RawState,
    check_data,
    differences,
    fingerprint,
    name_counters,
    read_data,
    write_data,
)
from aioenv.state.wrapper_stack import examine
from aioenv.worker.native_tasks import TASKS

__all__ = ["AWAITS_RESET", "as_native", "as_single", "awaits_reset", "is_task"]

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
