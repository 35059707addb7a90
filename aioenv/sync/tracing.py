"""A timeline for blocking code: what is traced runs on a loop thread of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from aioenv.sync.portal import Portal
from aioenv.tracing.timeline import Trace, logged_beside

__all__ = ["BlockingTrace"]


class BlockingTrace:
    """A timeline that is being collected until `stop`; a context manager that does that.

    Attributes:
        path: of its file.
    """

    def __init__(
        self, portal: Portal, begin: Callable[[str | os.PathLike[str]], Trace], path: str | os.PathLike[str]
    ) -> None:
        self._portal = portal
        self._trace: Trace = portal.run_soon(begin, path)
        self.path: Path = self._trace.path

    @property
    def stopped(self) -> bool:
        """Whether it has been stopped, by `stop` or by the end of what was traced."""
        return self._trace.stopped

    def stop(self) -> None:
        """Write the file, and collect no more. Idempotent.

        Raises:
            OSError: if it can't be written.
        """
        if not self.stopped:
            self._portal.run_soon(self._trace.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with logged_beside(error):
            self.stop()

    def __repr__(self) -> str:
        return repr(self._trace)
