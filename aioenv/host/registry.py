"""Gymnasium's registry, carried from the parent to a worker.

Ids that a script or a notebook registers are unknown to a fresh process; with this, `gym.make("MyEnv-v0")` in a
factory works all the same. All entries are sent, each pickled by itself beside its `repr`: a worker unpickles only
those whose own entry reads differently, so that what comes with Gymnasium costs a comparison. (A fork server reads its
entries once for all workers.)
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import gymnasium
from gymnasium.envs.registration import EnvSpec

from aioenv.errors import WireError
from aioenv.wire.messages import dump_code, load

__all__ = ["capture_registry", "read_registry", "restore_registry"]

# How entries read, where that is known already.
_texts: dict[str, str] = {}


def capture_registry() -> dict[str, tuple[str, bytes]]:
    """This process's registry: id → how the spec reads, and the spec pickled."""
    entries: dict[str, tuple[str, bytes]] = {}
    for env_id, spec in gymnasium.registry.items():
        try:
            data = dump_code(spec)
        except Exception as exc:
            data = dump_code(_broken(env_id, str(exc)))
        entries[env_id] = (repr(spec), data)
    return entries


def read_registry() -> None:
    """In a fork server: see how all entries read, so that its workers need not."""
    _texts.update((env_id, repr(spec)) for env_id, spec in gymnasium.registry.items())


def restore_registry(entries: dict[str, tuple[str, bytes]]) -> None:
    """Register what differs here; an entry that does not unpickle fails only when it is used."""
    for env_id, (text, data) in entries.items():
        if (_texts.get(env_id) or repr(gymnasium.registry.get(env_id))) == text:
            continue
        try:
            gymnasium.registry[env_id] = load(data)
        except WireError as exc:
            gymnasium.registry[env_id] = _broken(env_id, str(exc))


def _broken(env_id: str, reason: str) -> EnvSpec:
    return EnvSpec(env_id, partial(_refuse, env_id, reason))


def _refuse(env_id: str, reason: str, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{env_id!r} is registered in the parent, but its registration could not be carried into the worker: {reason}"
    )
