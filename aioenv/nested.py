"""Whether this process was started for envs: then no module that it imports may start others.

A module that starts envs when it is imported would be imported by their workers, each of which would start as many.
"""

from __future__ import annotations

import sys

from aioenv.errors import WorkerStartError

__all__ = ["check", "declare"]

_declared = False


def declare() -> None:
    """This process is a worker, or a fork server."""
    global _declared
    _declared = True


def check() -> None:
    """See that nothing is about to be started without end.

    Raises:
        WorkerStartError: if this is a worker or a fork server, in the middle of an import.
    """
    if not _declared:
        return
    # what `import` itself goes by to tell that a module is half done
    half_done = [name for name, module in list(sys.modules.items()) if _is_half_done(module)]
    if half_done:
        raise WorkerStartError(
            f"module {half_done[-1]} starts envs when it is imported, and their workers import it again, so that there "
            "would be no end of them. What only the main program shall do belongs under "
            "`if __name__ == '__main__':`"
        )


def _is_half_done(module: object) -> bool:
    try:
        spec = object.__getattribute__(module, "__spec__")  # a lazy module would load itself to answer `getattr`
    except AttributeError:
        return False
    return bool(getattr(spec, "_initializing", False))
