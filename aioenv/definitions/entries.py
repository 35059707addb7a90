"""The parts of a snapshot: definitions, the values that they need, and the namespaces of their functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aioenv.definitions.restore import explain

__all__ = ["Entry", "Namespace", "Root", "Selection", "name_of"]


class Namespace(NamedTuple):
    """The globals of some functions.

    Attributes:
        kind: "main", "import" (of a module of the standard library), "copy" (of another that workers can import, but
            do so only if they need it besides), "module" (of one that they can't import) or "private".
        name: of the module.
        number: its number in the snapshot.
        values: the globals.
    """

    kind: str
    name: str
    number: int
    values: dict[str, Any]


class Entry:
    """A value that a definition needs.

    Attributes:
        kind: "global", "class" (an attribute of one), "function" (an attribute of one), "cell", or "submodule".
        target: the `Namespace`, class, function or cell that it belongs to.
        name: of the global, attribute or closure variable.
        value: itself.
        user: the qualified name of a definition that needs it.
        error: why it can't be sent; None if it can.
        simple: whether nothing runs when it is unpickled.
        callables: `functools.partial` objects within it.
        index: its place among all entries: after those that it needs itself, as far as that goes.
    """

    __slots__ = ("callables", "error", "index", "kind", "name", "simple", "target", "user", "value")

    def __init__(self, kind: str, target: Any, name: str, value: Any, user: str) -> None:
        self.kind, self.target, self.name, self.value, self.user = kind, target, name, value, user
        self.error: str | None = None
        self.simple = False
        self.callables: Sequence[Any] = ()
        self.index = 0

    def describe(self) -> str:
        """Name the value and its user, for errors."""
        return explain(self.kind, self.name, self.user)


def name_of(value: Any) -> str:
    """The qualified name of a definition."""
    return str(getattr(value, "__qualname__", type(value).__name__))


class Root:
    """Something that needs definitions, and is none itself."""


class Selection(NamedTuple):
    """A part of what was collected.

    Attributes:
        definitions: classes, functions and decorated callables, in the order in which they were found.
        entries: what they need, each after what it needs itself, as far as that goes.
    """

    definitions: list[Any]
    entries: list[Entry]

    @property
    def callables(self) -> list[Any]:
        """The `functools.partial` objects within the entries, each once."""
        return [*{id(value): value for entry in self.entries for value in entry.callables}.values()]
