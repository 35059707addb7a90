"""Check that each public name has a page in the built reference, with its methods: `python -m tests.docs.built`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator

from tests.docs.pages import ROOT, installed, reference_names

GENERATED = ROOT / "build" / "docs" / "reference" / "generated"


def anchors(module: str, name: str) -> Iterator[str]:
    """The anchors that the page of a public name must have: its own, and a class's of its methods and properties.

    Those of errors are internal: their pages come from another template.
    """
    yield f"{module}.{name}"
    value = getattr(importlib.import_module(module), name)
    if not inspect.isclass(value) or issubclass(value, BaseException):
        return
    for member, found in inspect.getmembers_static(value):
        of = getattr(found, "fget", None) or inspect.unwrap(getattr(found, "__func__", found))
        if inspect.isfunction(of) and not member.startswith("_") and of.__module__.startswith("aioenv"):
            yield f"{module}.{name}.{member}"


def missing() -> list[str]:
    """The anchors that the built pages lack."""
    found = []
    for module, names in reference_names().items():
        if not installed(module):
            continue
        for name in names:
            page = GENERATED / f"{module}.{name}.html"
            text = page.read_text(encoding="utf-8") if page.exists() else ""
            found += [anchor for anchor in anchors(module, name) if f'id="{anchor}"' not in text]
    return found


if __name__ == "__main__":
    lacking = missing()
    print(*(f"the reference has no {anchor}" for anchor in lacking), sep="\n", end="\n" if lacking else "")
    sys.exit(bool(lacking))
