"""Values as JSON has them, beside arrays by name: what states of envs are written as."""

from __future__ import annotations

import pickle
from typing import Any, TypeAlias

import numpy as np

from aioenv.ipc.messages import dump_state
from aioenv.state.wrapper_stack import KINDS

__all__ = ["Arrays", "decode", "encode", "is_pickled"]

Arrays: TypeAlias = "dict[str, np.ndarray[Any, Any]]"

_KIND_BY_NAME = {f"{kind.__module__}.{kind.__name__}": kind for kind in (*KINDS, str)}
_NAME_BY_KIND = {kind: name for name, kind in _KIND_BY_NAME.items()}


def encode(value: Any, path: str, arrays: Arrays) -> Any:
    """A value as JSON has it; arrays go into `arrays`, and what is neither goes there as a pickle."""
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
    """The value that `encode` was given."""
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
    """Whether there is a pickle in what `encode` gave."""
    if not isinstance(node, dict):
        return False
    if node["kind"] in ("dict", "list", "tuple"):
        parts = node["value"].values() if node["kind"] == "dict" else node["value"]
        return any(is_pickled(part) for part in parts)
    return bool(node["kind"] == "pickle")
