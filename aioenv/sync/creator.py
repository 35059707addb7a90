"""What a creator's envs are, for blocking code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from aioenv.creator import EnvCreator
from aioenv.sync.portal import Portal

if TYPE_CHECKING:
    from aioenv.worker.description import EnvMetadata

__all__ = ["env_metadata"]


def env_metadata(
    creator: EnvCreator,
    *,
    start: Literal["forkserver", "spawn"] | None = None,
    start_timeout_s: float = 60.0,
    preload: Iterable[str] = (),
    worker_env: Mapping[str, str] | None = None,
) -> EnvMetadata:
    """Spaces, spec and the like of a creator's envs, from a worker (see `EnvCreator.metadata`).

    Ctrl-C kills that worker. It may be called while an event loop runs on this thread, which then waits.

    Args:
        creator: whose envs.
        start, start_timeout_s, preload, worker_env: as for `EnvCreator.metadata`.
    """
    portal = Portal()
    try:
        how: dict[str, Any] = {"start": start, "preload": preload, "worker_env": worker_env}
        return portal.call(creator.metadata, start_timeout_s=start_timeout_s, **how)
    finally:
        portal.close()
