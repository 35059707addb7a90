"""A Sphinx extension: the directive `{command} NAME` shows the help of a command of `aioenv`, as `--help` prints it."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

__all__ = ["setup"]


class Command(Directive):  # type: ignore[misc]
    """Show the help of a command; without an argument, that of `aioenv` itself."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        from aioenv.cli import main

        os.environ["COLUMNS"] = "80"
        os.environ["NO_COLOR"] = "1"
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*self.arguments, "--help"])
        return [nodes.literal_block(out.getvalue(), out.getvalue(), language="text")]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive; Sphinx calls this."""
    app.add_directive("command", Command)
    return {"parallel_read_safe": True}
