"""Snapshots: read and write the whole state of one env, as arrays and JSON values, so that nothing needs a replay.

A snapshot has every array of MuJoCo's data, derived ones too, since rewards depend on values of the last step. The
arena (contacts, constraints) is left out: each step computes it anew.

`EnvState` is the state of an env as the caller holds it; `save` and `load` write and read files of such states.
`inspect_stack` looks at a stack of wrappers: its memory between steps, the known wrappers, and those that
prevent a state.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import sys
import types
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Env, Wrapper

from aioenv.ipc.messages import dump_state
from aioenv.mujoco_versions import array_names, signature_of
from aioenv.state.assets import shape_sum
from aioenv.state.model_edits import editable_fields, may_edit

__all__ = [
    "EPISODE_LOST",
    "KINDS",
    "REMEDY",
    "Arrays",
    "EnvState",
    "Misfit",
    "RawState",
    "Stack",
    "check_data",
    "decode",
    "differences",
    "encode",
    "fingerprint",
    "inspect_stack",
    "is_pickled",
    "load",
    "mark_in_progress",
    "name_counters",
    "python_values",
    "read_data",
    "read_snapshot",
    "save",
    "write_data",
    "write_snapshot",
]


# Known wrappers by full name, with the attributes that they count in; a subclass is another wrapper.
_COMMON = "gymnasium.wrappers.common."
_KNOWN: dict[str, tuple[str, ...]] = {
    _COMMON + "TimeLimit": ("_elapsed_steps",),
    _COMMON + "OrderEnforcing": ("_has_reset",),
    _COMMON + "PassiveEnvChecker": (),  # see `mark_in_progress`
    _COMMON + "Autoreset": ("autoreset",),
    # not its queues of past episodes, on which no result depends, nor the time of day
    _COMMON + "RecordEpisodeStatistics": ("episode_count", "episode_returns", "episode_lengths"),
    "gymnasium.wrappers.stateful_observation.TimeAwareObservation": ("timesteps",),
    "gymnasium.wrappers.stateful_action.RepeatAction": (),
    **{f"gymnasium.wrappers.transform_action.{name}Action": () for name in ("Clip", "Rescale", "Discretize")},
    **{
        f"gymnasium.wrappers.transform_observation.{name}Observation": ()
        for name in "Filter Flatten Grayscale Resize Reshape Rescale Dtype Discretize".split()
    },
    "gymnasium.wrappers.transform_reward.ClipReward": (),
    "aioenv.rendering.pixels.PixelObservation": (),
    "aioenv.adapters.sb3_worker.CountInnerEpisodes": ("counted_return", "counted_length"),  # nor its time of day
}
# wrappers that are stateless if their function is
_BY_FUNCTION = {
    "gymnasium.wrappers.transform_action.TransformAction",
    "gymnasium.wrappers.transform_observation.TransformObservation",
    "gymnasium.wrappers.transform_reward.TransformReward",
}
# The types of counters and simple attributes. The exact type matters: `0.0 + np.float32(1)` is a float32, and so is the
# info that it ends in.
KINDS: tuple[type, ...] = (type(None), bool, int, float, np.float64, np.float32, np.int64, np.int32, np.bool_)

REMEDY = "give it get_state() and set_state(state)"


class Stack(NamedTuple):
    """One env and its wrappers.

    Attributes:
        base: the unwrapped env.
        counters: wrappers and their attributes that count, from the outside in.
        own: the wrappers, and maybe the base, that have `get_state` and `set_state`.
        physics: whether the base's state is that of its MuJoCo `model` and `data`.
        obstacle: why the state of the whole can't be read; None if it can.
    """

    base: Any
    counters: list[tuple[Any, str]]
    own: list[Any]
    physics: bool
    obstacle: str | None


def inspect_stack(env: Env[Any, Any]) -> Stack:
    """Find everything in an env and its wrappers that the next step depends on."""
    counters: list[tuple[Any, str]] = []
    own: list[Any] = []
    obstacle: str | None = None
    while isinstance(env, Wrapper):
        name = _name(type(env))
        if _has_own_state(type(env)):
            own.append(env)
        elif name in _KNOWN:
            counters += [(env, attribute) for attribute in _KNOWN[name]]
        elif name in _BY_FUNCTION and _is_plain(env.func):  # type: ignore[attr-defined]
            pass
        elif name in _BY_FUNCTION:
            obstacle = obstacle or f"the wrapper {type(env).__name__}: its function may remember something; {REMEDY}"
        else:
            obstacle = obstacle or f"the wrapper {type(env).__name__} may remember something; {REMEDY}"
        env = env.env
    physics = not _has_own_state(type(env)) and _has_physics(env)
    if _has_own_state(type(env)):
        own.append(env)
    elif not physics:
        obstacle = obstacle or f"the env {type(env).__name__} is no MuJoCo env; {REMEDY}"
    return Stack(env, counters, own, physics, obstacle)


def mark_in_progress(env: Env[Any, Any]) -> None:
    """Put wrappers that have no counter into the state of an env whose episode is in progress."""
    for wrapper in _wrappers(env):
        name = _name(type(wrapper))
        if name == _COMMON + "PassiveEnvChecker":
            # its checks only warn, and the data to compare with is gone
            wrapper.checked_reset = wrapper.checked_step = wrapper.checked_data_reuse = True
            wrapper._previous_data = None
        elif name == _COMMON + "RecordEpisodeStatistics":
            wrapper.episode_start_time = sys.modules[type(wrapper).__module__].time.perf_counter()


def python_values(base: Any) -> dict[str, Any]:
    """Return the attributes of an env that are numbers, strings or arrays, without the seed."""
    return {
        name: value
        for name, value in vars(base).items()
        if name != "_np_random_seed"
        and (
            type(value) in KINDS or type(value) is str or (type(value) is np.ndarray and value.dtype.kind in "biufcSU")
        )
    }


def _wrappers(env: Any) -> Iterator[Any]:
    while isinstance(env, Wrapper):
        yield env
        env = env.env


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _has_physics(base: Any) -> bool:
    mujoco = sys.modules.get("mujoco")
    if hasattr(type(base), "__getattr__") and "model" not in vars(base):
        return False  # the model may belong to another env, whose state is more than model and data
    return (
        mujoco is not None
        and isinstance(getattr(base, "model", None), mujoco.MjModel)
        and isinstance(getattr(base, "data", None), mujoco.MjData)
    )


def _has_own_state(kind: type) -> bool:
    """Return whether a class has `get_state()` and `set_state(state)`, unlike Gymnasium's `set_state(qpos, qvel)`."""
    get, put = getattr(kind, "get_state", None), getattr(kind, "set_state", None)
    if not callable(get) or not callable(put):
        return False
    try:
        inspect.signature(get).bind(None)
        inspect.signature(put).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _is_plain(function: Any) -> bool:
    """Return whether a function has no closure; it could still use globals, as any env could."""
    if isinstance(function, np.ufunc | types.BuiltinFunctionType | type):
        return True
    return isinstance(function, types.FunctionType) and function.__closure__ is None


_FORMAT = "aioenv states 1"


@dataclass(frozen=True, eq=False, repr=False)
class EnvState:
    """The state of one env, from `get_state`: an env that it is set on goes on as that one would have.

    Attributes:
        env_id: the id of the env, or the name of its class if it has no id.
        values: counters, the state of its random generator, and other plain values.
        arrays: arrays by name: for MuJoCo all of its data's, derived quantities too ("mujoco/qpos").
    """

    env_id: str
    values: dict[str, Any]
    arrays: dict[str, np.ndarray[Any, Any]]

    @property
    def has_pickles(self) -> bool:
        """Whether the env's own `get_state()` gave objects that had to be pickled."""
        return bool(self.values["pickled"])

    def __repr__(self) -> str:
        size = sum(array.nbytes for array in self.arrays.values())
        return f"<EnvState of {self.env_id}, {size / 1024:.1f} KiB>"


def save(path: str | os.PathLike[str], states: Iterable[EnvState]) -> None:
    """Write states to a file: a numpy container (.npz) under any name.

    A file that is there already is replaced at once, when the new one is complete.

    Args:
        path: of the file.
        states: what `get_state` gave.

    Raises:
        TypeError: if they are anything else.
        OSError: if the file can't be written.
    """
    states = list(states) if isinstance(states, Iterable) else [states]
    if strange := [state for state in states if not isinstance(state, EnvState)]:
        raise TypeError(f"save: states: expected a list of EnvState, as get_state gives it, got {strange[0]!r}")
    heads = [{"env_id": state.env_id, "values": state.values} for state in states]
    arrays: dict[str, Any] = {
        f"{i}/{name}": array for i, state in enumerate(states) for name, array in state.arrays.items()
    }
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, format=_FORMAT, states=json.dumps(heads), **arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> list[EnvState]:
    """Read the states that `save` wrote.

    Args:
        path: of the file.
        allow_pickle: whether to take states that hold pickles, which can run any code when they are set. Only states of
            envs with a `get_state()` of their own may hold them, if it gives other things than numbers, strings,
            arrays, and dicts, lists and tuples of these. MuJoCo's never do.

    Raises:
        ValueError: if the file is not one of states, or holds pickles and they were not allowed.
        OSError: if it can't be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile) or str(file["format"]) != _FORMAT:
                raise ValueError("it says so nowhere")
            heads = json.loads(str(file["states"]))
            states = [EnvState(head["env_id"], head["values"], {}) for head in heads]
            for name in file.files:
                number, slash, rest = name.partition("/")
                if slash:
                    states[int(number)].arrays[rest] = file[name]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, zipfile.BadZipFile) as exc:
        raise ValueError(f"{os.fspath(path)!r} holds no states of envs: {exc}") from exc
    if not allow_pickle and any(_has_pickles(state.values) for state in states):
        raise ValueError(
            f"{os.fspath(path)!r} holds pickled objects, which can run any code when they are set; if you trust the "
            "file, load it with allow_pickle=True"
        )
    return states


def _has_pickles(node: Any) -> bool:
    """Return whether there is a pickle anywhere, regardless of the file's own flag."""
    if isinstance(node, dict):
        return node.get("kind") == "pickle" or any(map(_has_pickles, node.values()))
    return isinstance(node, list) and any(map(_has_pickles, node))


# the env's id, JSON values, arrays by name
RawState: TypeAlias = "tuple[str, dict[str, Any], Arrays]"


# Why a slot has no state for now.
EPISODE_LOST = "its episode was lost with its worker; step or reset the slot first"


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
    if base._np_random is None:
        base.np_random  # noqa: B018 (makes one, which this env and all that go on from its state then draw from)
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
