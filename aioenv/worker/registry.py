"""Carry Gymnasium's registry from the parent to a worker, so that `gym.make("MyEnv-v0")` works in a factory.

Ids that a script or a notebook registers are unknown to a new process. The parent sends all entries, each pickled by
itself, with a digest. A worker whose own registry has the same digest, as most do, unpickles nothing; another one
unpickles only the entries that differ. (A fork server pickles its entries once for all of its workers.)
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import re
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

import gymnasium
from gymnasium.envs.registration import EnvSpec

from aioenv.errors import WireError
from aioenv.ipc.messages import dump, load

__all__ = ["Registry", "capture_registry", "read_registry", "register_specs", "restore_registry"]

# A fork server's entries, and their digest.
_known: dict[str, bytes] = {}
_digests: list[bytes] = []

# In a pickled spec: names of definitions in the main module (`__mp_main__` in children of multiprocessing).
_OF_MAIN = re.compile(rb"__(?:mp_)?main__:([A-Za-z_]\w*)")


class Registry(NamedTuple):
    """The registry of a process, for its workers.

    Attributes:
        entries: a digest of the entries, and the pickle of a dict that maps ids to pickled specs.
        names: the definitions in the main module that specs name ("__main__:Env").
        specs: id and spec of those that refer to definitions of the script, which are sent with these.
    """

    entries: tuple[bytes, bytes]
    names: tuple[str, ...]
    specs: tuple[tuple[str, EnvSpec], ...]


def capture_registry() -> Registry:
    """Capture the registry of this process."""
    entries, specs, names = _entries(), [], set[str]()
    main = sys.modules["__main__"]
    for env_id, spec in gymnasium.registry.items():
        data = entries.get(env_id)
        if data is None or b"main__" in data:
            specs.append((env_id, spec))
            entries.pop(env_id, None)
        if data is not None:
            names |= {name.decode() for name in _OF_MAIN.findall(data) if hasattr(main, name.decode())}
    return Registry((_digest(entries), dump(entries)), tuple(sorted(names)), tuple(specs))


def read_registry() -> None:
    """Pickle all entries in a fork server, so that its workers need not."""
    _known.update(_entries())
    _digests[:] = [_digest(_known)]


def restore_registry(digest: bytes, pickled: bytes) -> None:
    """Register the entries that differ from this process's; one that does not unpickle fails only when it is used."""
    if digest in _digests:
        return
    # modules that are imported later register the same ids
    warnings.filterwarnings("ignore", r".*Overriding environment \S+ already in registry")
    known = _known or _entries()
    entries: dict[str, bytes] = load(pickled)
    for env_id, data in entries.items():
        if known.get(env_id) == data:
            continue
        try:
            gymnasium.registry[env_id] = load(data)
        except WireError as exc:
            gymnasium.registry[env_id] = _broken(env_id, str(exc))


def register_specs(specs: Mapping[str, EnvSpec | str]) -> None:
    """Register specs that refer to definitions of the script; a string says why a spec could not be sent."""
    for env_id, spec in specs.items():
        gymnasium.registry[env_id] = _broken(env_id, spec) if isinstance(spec, str) else spec


def _entries() -> dict[str, bytes]:
    """Return the entries that pickle, by id."""
    entries: dict[str, bytes] = {}
    for env_id, spec in gymnasium.registry.items():
        with contextlib.suppress(Exception):
            entries[env_id] = pickle.dumps(spec, protocol=pickle.HIGHEST_PROTOCOL)
    return entries


def _digest(entries: dict[str, bytes]) -> bytes:
    return hashlib.sha256(repr(sorted(entries.items())).encode()).digest()


def _broken(env_id: str, reason: str) -> EnvSpec:
    return EnvSpec(env_id, partial(_refuse, env_id, reason))


def _refuse(name: str, reason: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{name!r} is registered in the parent, but its registration could not be carried into the worker: {reason}"
    )
