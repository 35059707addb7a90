"""Whether this process has loaded modules anew since a fork server began: what that one has imported is older then."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["LoadedModules"]

# IPython's extension puts new code into functions as they are: nothing but the file's time tells.
_PATCHER = "IPython.extensions.autoreload"


class LoadedModules:
    """The modules of this process as they are now, but for those of installed packages, and of main scripts."""

    def __init__(self) -> None:
        self._looked_at = {"__main__", "__mp_main__"}
        self._specs: dict[str, tuple[ModuleSpec, int | None]] = {}  # with the time of the file
        self._add_new()

    def outdated(self) -> bool:
        """Whether one of them has been loaded anew since: by `importlib.reload`, IPython's `%autoreload`, …"""
        patches = _PATCHER in sys.modules
        for name, (spec, changed) in self._specs.items():
            now = _spec(name)
            if now is None:  # it is gone; the next import says what it has become
                continue
            if now is not spec or (patches and _changed(spec) != changed):
                return True
        self._add_new()
        return False

    def _add_new(self) -> None:
        new = sys.modules.keys() - self._looked_at
        self._looked_at |= new
        for name in new:
            spec = _spec(name)
            if spec is not None and spec.has_location and spec.origin and not spec.origin.startswith(_INSTALLED):
                self._specs[name] = spec, _changed(spec)


def _spec(name: str) -> ModuleSpec | None:
    module = sys.modules.get(name)
    if not issubclass(type(module), ModuleType):  # what stands in for one may import it if it is asked
        return None
    with contextlib.suppress(AttributeError):
        spec = ModuleType.__getattribute__(module, "__spec__")  # which loads no lazy one
        return spec if isinstance(spec, ModuleSpec) else None
    return None


def _changed(spec: ModuleSpec) -> int | None:
    with contextlib.suppress(OSError, TypeError, ValueError):
        return os.stat(spec.origin or "").st_mtime_ns
    return None


_INSTALLED = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
