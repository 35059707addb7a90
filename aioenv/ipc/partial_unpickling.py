"""What can be read of a message of which a part can't: a second try, after `messages.load` has failed.

A value may pickle where it is made and still not unpickle here: its `__setstate__` raises, or its module can't be
imported. One such value must not cost the rest of the message. So the pickle is read again by Python's own unpickler,
which is slow but can be asked to go on: whatever raises leaves an `Unreadable` in its place, and so does whatever
would have been made of one.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

from aioenv.errors import WireError
from aioenv.ipc.frames import Buffer
from aioenv.ipc.messages import reason_of, tried

__all__ = ["Unreadable", "find_unreadable", "salvage"]

_CONTAINERS = (list, tuple, dict, set, frozenset)


class Unreadable:
    """Stands for a value that does not unpickle.

    Attributes:
        exc: what it raised.
        target: what would have been changed by the call that raised, if it was one that changes its argument.
    """

    def __init__(self, exc: BaseException, target: Any = None) -> None:
        self.exc = exc
        self.target = target


def find_unreadable(value: Any) -> Unreadable | None:
    """The first one that a value is, or that stands in its lists, tuples, dicts and sets; None if there is none."""
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


def salvage(data: Buffer, frame: Iterable[type]) -> Any:
    """Unpickle what can be unpickled.

    Args:
        data: a pickle.
        frame: classes, beside lists, tuples, dicts and sets, that stay what they are though a part of them
            is unreadable. Objects of any other class are unreadable as a whole then.

    Raises:
        WireError: if nothing can be made of it.
    """
    value, exc = tried(_Salvager(io.BytesIO(data), frozenset(frame)).load)
    if exc is not None:
        raise WireError(f"a message does not unpickle: {reason_of(exc)}") from exc
    return value


_Python: Any = pickle._Unpickler


class _Salvager(_Python):  # type: ignore[misc]
    """Goes on where an unpickler would raise."""

    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]

    def __init__(self, file: io.BytesIO, frame: frozenset[type]) -> None:
        super().__init__(file)
        self._frame = frame

    def find_class(self, module: str, name: str) -> Any:
        value, exc = tried(super().find_class, module, name)
        return value if exc is None else _unreadable(exc)

    def _make(self, opcode: Callable[[Any], None], operands: int) -> None:
        """An opcode that takes operands from the stack and puts what it makes of them there."""
        base = len(self.stack) - operands
        maker, *_, last = taken = self.stack[base:]
        found = None if isinstance(maker, type) and maker in self._frame else find_unreadable(taken)
        if found is None:
            _, exc = tried(opcode, self)
            if exc is None:
                return
            found = _unreadable(exc, last[0] if type(last) is tuple and last else None)
        self.stack[base:] = [found]

    def _change(self, opcode: Callable[[Any], None], operands: int | None) -> None:
        """An opcode that puts operands into the object below them: so many, or (None) those after the mark."""
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
            _, exc = tried(opcode, self)
            if exc is None:
                return
            found = _unreadable(exc)
        if self.stack is not below:
            self.pop_mark()
        del below[base:]
        self._spoil(changed, found)

    def _spoil(self, value: Any, found: Unreadable) -> None:
        """An object is half made: whatever refers to it from now on finds that it is unreadable."""
        for items in (self.stack, *self.metastack):
            items[:] = [found if item is value else item for item in items]
        for key, item in self.memo.items():
            if item is value:
                self.memo[key] = found

    def _pop(self, opcode: Callable[[Any], None]) -> None:
        """What a call returned is not wanted: it was made for what it does to its first argument."""
        top = self.stack[-1] if self.stack else None
        opcode(self)
        if type(top) is Unreadable and top.target is not None:
            self._spoil(top.target, top)


def _unreadable(exc: BaseException, target: Any = None) -> Unreadable:
    if exc.__traceback__ is not None:
        exc.__traceback__ = exc.__traceback__.tb_next  # our own frame would keep the whole message
    return Unreadable(exc, target)


def _going_on() -> dict[int, Callable[[Any], None]]:
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


_Salvager.dispatch = _going_on()
