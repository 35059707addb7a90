"""Partial unpickling: load the readable part of a message after `messages.load` has failed.

A value may pickle in the worker and still not unpickle here: its `__setstate__` raises, or its module can't be
imported. One such value must not cost the rest of the message. So the message is loaded again by the pure-Python
unpickler, which is slow but can be extended to go on after an error. Each value that raises is replaced by an
`Unreadable`, and so is each object that would have been built from one.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

from aioenv.errors import WireError
from aioenv.ipc.frames import Buffer
from aioenv.ipc.messages import reason_of, try_call

__all__ = ["Unreadable", "find_unreadable", "load_partially"]

_CONTAINERS = (list, tuple, dict, set, frozenset)


class Unreadable:
    """Stands for a value that does not unpickle.

    Attributes:
        exc: the exception that was raised.
        target: the first argument of the call that raised, which the call would have modified; None if there is none.
    """

    def __init__(self, exc: BaseException, target: Any = None) -> None:
        self.exc = exc
        self.target = target


def find_unreadable(value: Any) -> Unreadable | None:
    """Return the first `Unreadable` in a value and its nested lists, tuples, dicts and sets; None if there is none."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if type(item) is Unreadable:
            return item
        if type(item) in _CONTAINERS and id(item) not in seen:
            seen.add(id(item))
            todo.extend(reversed([*item.keys(), *item.values()] if type(item) is dict else list(item)))
    return None


def load_partially(data: Buffer, containers: Iterable[type]) -> Any:
    """Unpickle the readable parts of a message.

    Args:
        data: a pickle.
        containers: classes, besides lists, tuples, dicts and sets, whose objects are kept although a part of them is
            unreadable. An object of any other class is then unreadable as a whole.

    Raises:
        WireError: if the message as a whole can't be unpickled.
    """
    value, exc = try_call(_PartialUnpickler(io.BytesIO(data), frozenset(containers)).load)
    if exc is not None:
        raise WireError(f"a message does not unpickle: {reason_of(exc)}") from exc
    return value


_Python: Any = pickle._Unpickler


class _PartialUnpickler(_Python):  # type: ignore[misc]
    """An unpickler that goes on after an error."""

    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]

    def __init__(self, file: io.BytesIO, containers: frozenset[type]) -> None:
        super().__init__(file)
        self._containers = containers

    def find_class(self, module: str, name: str) -> Any:
        value, exc = try_call(super().find_class, module, name)
        return value if exc is None else _unreadable(exc)

    def _make(self, opcode: Callable[[Any], None], operands: int) -> None:
        """Run an opcode that replaces operands on the stack by an object made of them."""
        base = len(self.stack) - operands
        maker, *_, last = taken = self.stack[base:]
        found = None if isinstance(maker, type) and maker in self._containers else find_unreadable(taken)
        if found is None:
            _, exc = try_call(opcode, self)
            if exc is None:
                return
            found = _unreadable(exc, last[0] if type(last) is tuple and last else None)
        self.stack[base:] = [found]

    def _change(self, opcode: Callable[[Any], None], operands: int | None) -> None:
        """Run an opcode that puts operands into the object below them: that many, or (None) those after the mark."""
        if operands is None:
            below, given = self.metastack[-1], list(self.stack)
        else:
            below, given = self.stack, self.stack[-operands:]
        base = len(below) - (operands or 0)
        changed = below[base - 1]
        found = changed if type(changed) is Unreadable else None
        if found is None and type(changed) not in _CONTAINERS:
            found = find_unreadable(given)
        if found is None:
            _, exc = try_call(opcode, self)
            if exc is None:
                return
            found = _unreadable(exc)
        if self.stack is not below:
            self.pop_mark()
        del below[base:]
        self._mark_unreadable(changed, found)

    def _mark_unreadable(self, value: Any, found: Unreadable) -> None:
        """Replace a half-made object, wherever it is referred to, by its `Unreadable`."""
        for items in (self.stack, *self.metastack):
            items[:] = [found if item is value else item for item in items]
        for key, item in self.memo.items():
            if item is value:
                self.memo[key] = found

    def _pop(self, opcode: Callable[[Any], None]) -> None:
        """Run POP: if a call for its side effect failed, the argument that it should have modified is unreadable."""
        top = self.stack[-1] if self.stack else None
        opcode(self)
        if type(top) is Unreadable and top.target is not None:
            self._mark_unreadable(top.target, top)


def _unreadable(exc: BaseException, target: Any = None) -> Unreadable:
    if exc.__traceback__ is not None:
        exc.__traceback__ = exc.__traceback__.tb_next  # this module's frame would keep the whole message alive
    return Unreadable(exc, target)


def _extended_opcodes() -> dict[int, Callable[[Any], None]]:
    table: dict[int, Callable[[Any], None]] = dict(_Python.dispatch)

    def made(code: bytes, operands: int) -> None:
        opcode = table[code[0]]
        table[code[0]] = lambda self: self._make(opcode, operands)

    def changed(code: bytes, operands: int | None) -> None:
        opcode = table[code[0]]
        table[code[0]] = lambda self: self._change(opcode, operands)

    for code, operands in ((pickle.REDUCE, 2), (pickle.NEWOBJ, 2), (pickle.NEWOBJ_EX, 3)):
        made(code, operands)
    for code in (pickle.BUILD, pickle.APPEND):
        changed(code, 1)
    changed(pickle.SETITEM, 2)
    for code in (pickle.APPENDS, pickle.SETITEMS, pickle.ADDITEMS):
        changed(code, None)
    pop = table[pickle.POP[0]]
    table[pickle.POP[0]] = lambda self: self._pop(pop)
    return table


_PartialUnpickler.dispatch = _extended_opcodes()
