"""What a creator's envs are, for blocking code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioenv.creator import EnvCreator
from aioenv.sync.portal import Portal

if TYPE_CHECKING:
    from aioenv.host.metadata import EnvMetadata

__all__ = ["env_metadata"]


def env_metadata(creator: EnvCreator, **kwargs: Any) -> EnvMetadata:
    """Spaces, spec and the like of a creator's envs, from a worker (see `EnvCreator.metadata`).

    Ctrl-C kills that worker. It may be called while an event loop runs on this thread, which then waits.

    Args:
        creator: whose envs.
        **kwargs: those of `EnvCreator.metadata`.
    """
    portal = Portal()
    try:
        return portal.call(creator.metadata, **kwargs)
    finally:
        portal.close()
