"""Run the Python blocks of a page in order, as the cells of one notebook: `python -m tests.docs.run_page PAGE`.

A block may `await` at its top level. The blocks run in `__main__`, as those of a script or notebook.
"""

import ast
import asyncio
import inspect
import sys
from pathlib import Path

from tests.docs.pages import python_blocks

FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def run(path: Path) -> None:
    """Run the blocks of a page."""
    names = sys.modules["__main__"].__dict__
    with asyncio.Runner() as runner:
        for line, block in python_blocks(path.read_text(encoding="utf-8")):
            code = compile("\n" * line + block, str(path), "exec", FLAGS)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, names))
            else:
                exec(code, names)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
