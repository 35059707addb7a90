"""States of envs as the caller holds them (`EnvState`), and the file format that `save` and `load` use."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["EnvState", "load", "save"]

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
    """Write states to a file: a numpy container (.npz), whatever its name.

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
