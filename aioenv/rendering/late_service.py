"""The service of a `LatePool`'s workers, as the parent names it, which has no need of MuJoCo itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioenv.host.physics.source import MujocoSource
    from aioenv.rendering.batch_renderer import RenderService
    from aioenv.rendering.config import RenderConfig

__all__ = ["render_service"]


def render_service(sources: Sequence[MujocoSource], config: RenderConfig) -> RenderService:
    """Make the service, in a render worker."""
    # here, not above: importing MuJoCo would keep the parent's loop busy for 0.1 s
    from aioenv.rendering.batch_renderer import RenderService

    return RenderService(sources, config)
