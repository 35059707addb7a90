"""Gymnasium's registry, carried from the parent to a worker.

Ids that a script or a notebook registers are unknown to a fresh process; with this, `gym.make("MyEnv-v0")` in a
factory works all the same. All entries are sent, each pickled by itself, and before them a digest: a worker whose own
registry pickles to the same, as it mostly does, unpickles nothing, and else only entries that differ. (A fork server
pickles its entries once for all workers.)
"""

from __future__ import annotations

import hashlib
import re
import sys
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

import gymnasium
from gymnasium.envs.registration import EnvSpec

from aioenv.errors import WireError
from aioenv.wire.messages import dump, dump_code, load

__all__ = ["capture_registry", "read_registry", "restore_registry"]

# A fork server's entries, and their digest.
_known: dict[str, bytes] = {}
_digests: list[bytes] = []


# In a pickled spec: what it names in the main module, whose name is another where multiprocessing spawned the process.
_OF_MAIN = re.compile(rb"__(?:mp_)?main__:([A-Za-z_]\w*)")


def capture_registry(factories: Iterable[bytes] = ()) -> tuple[bytes, bytes, dict[str, bytes]]:
    """This process's registry, for workers.

    Args:
        factories: pickled; they may have specs.

    Returns:
        A digest of its entries; id → pickled spec, pickled; and name → pickled value of what specs name in the main
        module.
    """
    entries = _entries()
    return _digest(entries), dump(entries), _named_in_main([*entries.values(), *factories])


def _named_in_main(pickles: Iterable[bytes]) -> dict[str, bytes]:
    main = sys.modules["__main__"]
    names = {name.decode() for data in pickles if b"main__:" in data for name in _OF_MAIN.findall(data)}
    named: dict[str, bytes] = {}
    for name in sorted(names):
        if hasattr(main, name):  # else it only looks like it
            try:
                named[name] = dump_code(getattr(main, name))
            except Exception as exc:
                named[name] = dump_code(partial(_refuse, f"__main__:{name}", str(exc)))
    return named


def read_registry() -> None:
    """In a fork server: see how all entries pickle, so that its workers need not."""
    _known.update(_entries())
    _digests[:] = [_digest(_known)]


def restore_registry(digest: bytes, pickled: bytes, of_main: dict[str, bytes]) -> None:
    """Register what differs here; an entry that does not unpickle fails only when it is used."""
    for name, data in of_main.items():
        try:
            value = load(data)
        except WireError as exc:
            value = partial(_refuse, f"__main__:{name}", str(exc))
        main = sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
        setattr(main, name, value)
    if digest in _digests:
        return
    # by their own modules, when those are imported here
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


def _entries() -> dict[str, bytes]:
    entries: dict[str, bytes] = {}
    for env_id, spec in gymnasium.registry.items():
        try:
            entries[env_id] = dump_code(spec)
        except Exception as exc:
            entries[env_id] = dump_code(_broken(env_id, str(exc)))
    return entries


def _digest(entries: dict[str, bytes]) -> bytes:
    return hashlib.sha256(repr(sorted(entries.items())).encode()).digest()


def _broken(env_id: str, reason: str) -> EnvSpec:
    return EnvSpec(env_id, partial(_refuse, env_id, reason))


def _refuse(name: str, reason: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{name!r} is registered in the parent, but its registration could not be carried into the worker: {reason}"
    )
