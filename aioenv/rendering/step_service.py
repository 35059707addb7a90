"""The service of a `StepRenderPool`'s workers, as the parent names it, which has no need of MuJoCo itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioenv.rendering.batch_renderer import RenderService
    from aioenv.rendering.config import RenderConfig
    from aioenv.state.render_source import MujocoSource

__all__ = ["render_service"]


def render_service(sources: Sequence[MujocoSource], config: RenderConfig) -> RenderService:
    """Make the service, in a render worker."""
    # here, not above: importing MuJoCo would keep the parent's loop busy for 0.1 s
    from aioenv.rendering.batch_renderer import RenderService

    return RenderService(sources, config)
