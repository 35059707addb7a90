"""Snapshots: read and write the whole state of one env, as arrays and JSON values, so that nothing needs a replay.

A snapshot has every array of MuJoCo's data, derived ones too, since rewards depend on values of the last step. The
arena (contacts, constraints) is left out: each step computes it anew.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Env

from aioenv.ipc.messages import dump_state
from aioenv.state.assets import shape_sum
from aioenv.state.model_edits import editable_fields, may_edit
from aioenv.state.mujoco_versions import array_names, signature_of
from aioenv.state.wrapper_stack import KINDS, REMEDY, Stack, inspect_stack, mark_in_progress, python_values

__all__ = [
    "Arrays",
    "Misfit",
    "RawState",
    "check_data",
    "decode",
    "differences",
    "encode",
    "fingerprint",
    "is_pickled",
    "name_counters",
    "read_data",
    "read_snapshot",
    "write_data",
    "write_snapshot",
]

# the env's id, JSON values, arrays by name
RawState: TypeAlias = "tuple[str, dict[str, Any], Arrays]"


class Misfit(ValueError):
    """The state of an env can't be read, or belongs to another kind of env."""


_ADDRESSES = {"plugin", "plugin_data"}
_SCALARS = (
    "time", "ntree_awake", "nbody_awake", "nparent_awake", "nv_awake", "flg_energypos", "flg_energyvel",
    "flg_subtreevel", "flg_rnepost",
)  # fmt: skip


def read_snapshot(env: Env[Any, Any], pending_reset: bool) -> RawState:
    """Return the state of an env.

    Args:
        env: the env, with its wrappers.
        pending_reset: whether its next step is an autoreset.

    Raises:
        Misfit: if its state can't be read; the message names the obstacle.
    """
    stack = inspect_stack(env)
    if stack.obstacle is not None:
        raise Misfit(f"the state of {_id(env)} can't be had: {stack.obstacle}")
    arrays: Arrays = {}
    values: dict[str, Any] = {
        "due": pending_reset,
        "counters": _counters(stack, arrays),
        "rng": _read_rng(stack.base, arrays),
        "model": fingerprint(stack.base.model) if stack.physics else None,
        "own": [type(holder).__name__ for holder in stack.own],
        "states": [encode(holder.get_state(), f"own/{i}", arrays) for i, holder in enumerate(stack.own)],
    }
    if stack.physics:
        values["mujoco"] = read_data(stack.base.data, arrays)
        values["python"] = {
            name: encode(value, f"python/{name}", arrays) for name, value in python_values(stack.base).items()
        }
        if may_edit(env):
            values["shapes"] = shape_sum(stack.base.model)
            arrays.update({f"model/{name}": field.copy() for name, field in editable_fields(stack.base.model).items()})
    values["pickled"] = any(is_pickled(state) for state in values["states"])
    return _id(env), values, arrays


def write_snapshot(env: Env[Any, Any], state: RawState) -> bool:
    """Bring an env into a state; return whether its next step is an autoreset.

    Raises:
        Misfit: if the state belongs to another kind of env; then the env is unchanged.
    """
    name, values, arrays = state
    stack = inspect_stack(env)
    if stack.obstacle is not None:
        raise Misfit(f"the state of {_id(env)} can't be set: {stack.obstacle}")
    _check(env, stack, name, values, arrays)
    base = stack.base
    if stack.physics:
        for field, array in editable_fields(base.model).items() if may_edit(env) else ():
            if (there := arrays.get(f"model/{field}")) is not None:
                array[...] = there
        write_data(base.data, arrays, values["mujoco"])
        for attribute, node in values["python"].items():
            _set_attribute(base, attribute, decode(node, arrays))
    for holder, node in zip(stack.own, values["states"], strict=True):
        holder.set_state(decode(node, arrays))
    _write_rng(base, values["rng"], arrays)
    mark_in_progress(env)
    for (wrapper, attribute), node in zip(stack.counters, values["counters"].values(), strict=True):
        setattr(wrapper, attribute, decode(node, arrays))
    return bool(values["due"])


def _check(env: Env[Any, Any], stack: Stack, name: str, values: dict[str, Any], arrays: Arrays) -> None:
    if name != _id(env):
        raise Misfit(f"the state of {name} does not fit {_id(env)}")
    if "vector" in values:
        raise Misfit(f"the state of {name} is one of a slot of {values['vector']}, a vector env; this is a single env")
    mine = name_counters(stack)
    if mine != list(values["counters"]):
        raise Misfit(f"the state of {name} has counters of wrappers {list(values['counters'])}, the env has {mine}")
    own = [type(holder).__name__ for holder in stack.own]
    if own != values["own"]:
        raise Misfit(f"the state of {name} is of an env in which {values['own']} have states; here {own} have")
    model = fingerprint(stack.base.model) if stack.physics else None
    if model != values["model"]:
        raise Misfit(f"the state of {name} is of another MuJoCo model: {differences(values['model'], model)}")
    if stack.physics:
        check_data(name, stack.base.data, arrays)
        _check_shapes(env, stack.base.model, name, values, arrays)


def _check_shapes(env: Env[Any, Any], model: Any, name: str, values: dict[str, Any], arrays: Arrays) -> None:
    """Raise a Misfit if the env's height fields or meshes differ from those of the state."""
    if "shapes" not in values or not may_edit(env):
        return
    there = arrays.get("model/hfield_data")
    if there is not None:  # it is a part of the state
        before, model.hfield_data[...] = model.hfield_data.copy(), there
        mine, model.hfield_data[...] = shape_sum(model), before
    else:
        mine = shape_sum(model)
    if mine != values["shapes"]:
        raise Misfit(
            f"the state of {name} is of an episode whose height fields or meshes are others than the env's now, and a "
            f"state has none so large; {REMEDY}"
        )


def _id(env: Env[Any, Any]) -> str:
    spec = env.unwrapped.spec  # a wrapper would copy it with all its arguments
    return spec.id if spec is not None else type(env.unwrapped).__name__


def _fields(data: Any) -> list[str]:
    return [name for name in array_names(data) if name not in _ADDRESSES]


def read_data(data: Any, arrays: Arrays) -> dict[str, Any]:
    """Add all arrays of an `MjData` to `arrays`; return its numbers."""
    for name in _fields(data):
        arrays[f"mujoco/{name}"] = getattr(data, name).copy()
    return {name: getattr(data, name) for name in _SCALARS if hasattr(data, name)}


def write_data(data: Any, arrays: Arrays, numbers: dict[str, Any]) -> None:
    """Set an `MjData` to what `read_data` returned."""
    for field in _fields(data):
        getattr(data, field)[...] = arrays[f"mujoco/{field}"]
    for field, number in numbers.items():
        setattr(data, field, number)


def check_data(name: str, data: Any, arrays: Arrays) -> None:
    """Check that the arrays of a state fit an `MjData`.

    Raises:
        Misfit: if one does not.
    """
    for field in _fields(data):
        there, here = arrays.get(f"mujoco/{field}"), getattr(data, field)
        if there is None or there.shape != here.shape or there.dtype != here.dtype:
            raise Misfit(f"the state of {name} has no fitting {field}: was it taken by another MuJoCo?")


def fingerprint(model: Any) -> dict[str, int]:
    """Return the numbers that tell models apart."""
    sizes = ("nq", "nv", "na", "nu", "nbody", "ngeom", "nmocap", "nsensordata", "nuserdata")
    return {"signature": signature_of(model), **{size: int(getattr(model, size)) for size in sizes}}


def differences(expected: dict[str, int] | None, got: dict[str, int] | None) -> str:
    """Say how two fingerprints differ."""
    if expected is None or got is None:
        return "only one of the two has one"
    return ", ".join(f"{key} {expected[key]} there, {got[key]} here" for key in got if expected.get(key) != got[key])


def name_counters(stack: Stack) -> list[str]:
    """Return the names of the counters of wrappers in states, from the outside in."""
    return [f"{i}: {type(wrapper).__name__}.{name}" for i, (wrapper, name) in enumerate(stack.counters)]


def _counters(stack: Stack, arrays: Arrays) -> dict[str, Any]:
    values = [
        encode(getattr(wrapper, name), f"counters/{i}", arrays) for i, (wrapper, name) in enumerate(stack.counters)
    ]
    return dict(zip(name_counters(stack), values, strict=True))


def _read_rng(base: Any, arrays: Arrays) -> dict[str, Any] | None:
    generator = base._np_random
    if generator is None:
        return None
    seed = getattr(base, "_np_random_seed", None)
    return {
        "seed": encode(seed if type(seed) in KINDS else None, "rng/seed", arrays),
        "state": encode(generator.bit_generator.state, "rng/state", arrays),
    }


def _write_rng(base: Any, rng: dict[str, Any] | None, arrays: Arrays) -> None:
    if rng is None:
        base._np_random = base._np_random_seed = None
        return
    state = decode(rng["state"], arrays)
    kind = getattr(np.random, state["bit_generator"])
    if not issubclass(kind, np.random.BitGenerator):
        raise ValueError(f"{state['bit_generator']} is no bit generator of numpy")
    bits = kind()
    bits.state = state
    base._np_random = np.random.Generator(bits)
    base._np_random_seed = decode(rng["seed"], arrays)


def _set_attribute(base: Any, name: str, value: Any) -> None:
    old = getattr(base, name, None)
    if isinstance(old, np.ndarray) and not old.flags.owndata:
        # a view, perhaps of MuJoCo's data: it must stay one
        if old.flags.writeable and old.shape == np.shape(value):
            old[...] = value
        return
    setattr(base, name, value)


# ------------------------------------------------------------ JSON values and arrays


Arrays: TypeAlias = "dict[str, np.ndarray[Any, Any]]"

_KIND_BY_NAME = {f"{kind.__module__}.{kind.__name__}": kind for kind in (*KINDS, str)}
_NAME_BY_KIND = {kind: name for name, kind in _KIND_BY_NAME.items()}


def encode(value: Any, path: str, arrays: Arrays) -> Any:
    """Return a value as JSON has it; add arrays to `arrays`, and any other object as a pickle."""
    kind = type(value)
    if kind in (type(None), bool, int, str):
        return value
    if kind in _NAME_BY_KIND:
        return {"kind": _NAME_BY_KIND[kind], "value": value if kind is float else value.item()}
    if isinstance(value, np.generic):
        value, kind = np.asarray(value), np.generic
    if (kind is np.ndarray or kind is np.generic) and not value.dtype.hasobject:
        arrays[path] = value.copy()
        return {"kind": "array" if kind is np.ndarray else "number", "value": path}
    if kind is dict and all(type(key) is str for key in value):
        items = {key: encode(item, f"{path}/{i}", arrays) for i, (key, item) in enumerate(value.items())}
        return {"kind": "dict", "value": items}
    if kind is list or kind is tuple:
        return {"kind": kind.__name__, "value": [encode(v, f"{path}/{i}", arrays) for i, v in enumerate(value)]}
    arrays[path] = np.frombuffer(dump_state(value), np.uint8)
    return {"kind": "pickle", "value": path}


def decode(node: Any, arrays: Arrays) -> Any:
    """Return the value that `encode` was given."""
    if not isinstance(node, dict):
        return node
    kind, value = node["kind"], node["value"]
    match kind:
        case "array":
            return arrays[value].copy()
        case "number":
            return arrays[value][()]
        case "dict":
            return {key: decode(item, arrays) for key, item in value.items()}
        case "list" | "tuple":
            items = [decode(item, arrays) for item in value]
            return items if kind == "list" else tuple(items)
        case "pickle":
            return pickle.loads(arrays[value].tobytes())
    return _KIND_BY_NAME[kind](value)


def is_pickled(node: Any) -> bool:
    """Return whether there is a pickle in what `encode` returned."""
    if not isinstance(node, dict):
        return False
    if node["kind"] in ("dict", "list", "tuple"):
        parts = node["value"].values() if node["kind"] == "dict" else node["value"]
        return any(is_pickled(part) for part in parts)
    return bool(node["kind"] == "pickle")
