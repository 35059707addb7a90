"""Pickle exceptions with their causes, contexts and group members, leaving out attributes that can't be pickled.

Each exception of a chain is pickled by itself, so one that does not pickle does not affect the others.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from aioenv.errors import AioenvError
from aioenv.ipc.messages import dump, message_of, reason_of, try_call

__all__ = ["dump_exception"]

_MAX_CHAIN = 64  # the most exceptions of one chain that are sent, group members not counted
_MAX_REPR = 1000  # the most characters of a repr that replaces an argument


class _Link(NamedTuple):
    """One exception of a message; it refers to others by their numbers."""

    data: bytes | None  # the exception, or of a group its class, message and attributes; None if it can't be sent
    name: str  # its class and message
    notes: list[str]  # the parts left out, or the reason why it can't be sent
    members: list[int] | None  # of a group
    cause: int | None
    context: int | None
    suppress_context: bool


def dump_exception(exc: BaseException) -> bytes:
    """Pickle an exception with everything it is chained to; `pickle.loads` restores it.

    An attribute that does not pickle is left out, and an argument that does not is replaced by its `repr`; a note says
    so. Another exception of the chain that can't be sent is replaced by an `AioenvError` with its class and message.
    Classes may be local or defined in `__main__`: they are pickled by value. In the process that sent them (in a
    factory, say) they become the same class objects again.

    Raises:
        BaseException: if `exc` itself can't be sent; it says why.
    """
    found = [exc]
    numbers = {id(exc): 0}

    def number(other: BaseException) -> int:
        if id(other) not in numbers:
            numbers[id(other)] = len(found)
            found.append(other)
        return numbers[id(other)]

    def linked(other: BaseException | None) -> int | None:
        if other is None or (len(found) >= _MAX_CHAIN and id(other) not in numbers):
            return None
        return number(other)

    links = []
    for each in found:  # the list grows during the loop
        group = isinstance(each, BaseExceptionGroup)
        sent, why = try_call(_pickled_group if group else _pickled, each)
        if why is not None and each is exc:
            raise why
        data, notes = (None, [reason_of(why)]) if why is not None else sent
        members = [number(member) for member in each.exceptions] if isinstance(each, BaseExceptionGroup) else None
        cause, context = linked(each.__cause__), linked(each.__context__)
        if (cause is None and each.__cause__ is not None) or (context is None and each.__context__ is not None):
            notes.append(f"Further exceptions of this chain were left out: it has more than {_MAX_CHAIN}")
        name = reason_of(each)
        links.append(_Link(data, name, notes, members, cause, context, each.__suppress_context__))
    return pickle.dumps(_Chain(links), protocol=pickle.HIGHEST_PROTOCOL)


def _pickled(exc: BaseException) -> tuple[bytes, list[str]]:
    """Pickle one exception without its chain; return the pickle and notes about parts that were left out."""
    for value in (exc, _WithoutConstructor(type(exc), exc.args, vars(exc))):  # a constructor may take other arguments
        data, _ = try_call(_checked, value, exc, message_of(exc))
        if data is not None:
            return data, []
    notes: list[str] = []
    reduced, why = try_call(exc.__reduce_ex__, pickle.HIGHEST_PROTOCOL)
    if why is None and isinstance(reduced, tuple) and len(reduced) >= 2 and reduced[0] is type(exc):
        state = reduced[2] if len(reduced) > 2 and isinstance(reduced[2], dict) else {}
        args, attributes = _sendable_args(reduced[1], notes), _sendable_attributes(state, notes)
        data, _ = try_call(_checked, _ByConstructor(type(exc), args, attributes), exc, message_of(exc))
        if data is not None:
            return data, notes
    notes = []
    bare = _WithoutConstructor(type(exc), _sendable_args(exc.args, notes), _sendable_attributes(vars(exc), notes))
    return _checked(bare, exc), notes


def _pickled_group(exc: BaseExceptionGroup[Any]) -> tuple[bytes, list[str]]:
    """Pickle class, message and attributes of a group; return the pickle and notes about parts that were left out."""
    notes: list[str] = []
    data = dump((type(exc), exc.message, _sendable_attributes(vars(exc), notes)))
    pickle.loads(data)
    return data, notes


def _checked(value: Any, exc: BaseException, message: str | None = None) -> bytes:
    """Pickle a value, and check that it unpickles as an exception of this class, and with this message if given."""
    data = dump(value)
    copy = pickle.loads(data)
    if type(copy) is not type(exc) or (message is not None and message_of(copy) != message):
        raise pickle.PicklingError(f"it unpickles as {reason_of(copy)}")
    return data


def _sendable_args(args: tuple[Any, ...], notes: list[str]) -> tuple[Any, ...]:
    sendable = []
    for arg in args:
        _, why = try_call(_round_trip, arg)
        if why is not None:
            text, _ = try_call(repr, arg)
            notes.append(f"An argument was replaced by its repr, since it can't be sent: {reason_of(why)}")
            arg = str(text)[:_MAX_REPR]
        sendable.append(arg)
    return tuple(sendable)


def _sendable_attributes(attributes: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    sendable = {}
    for name, value in attributes.items():
        _, why = try_call(_round_trip, value)
        if why is None:
            sendable[name] = value
        else:
            notes.append(f"The attribute {name!r} was left out, since it can't be sent: {reason_of(why)}")
    return sendable


def _round_trip(value: Any) -> None:
    pickle.loads(dump(value))


class _ByConstructor(NamedTuple):
    """Pickles as an exception that is made by calling its class."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.kind, self.args, self.attributes


class _WithoutConstructor(NamedTuple):
    """Pickles as an exception that is made without calling its constructor."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_without_constructor, tuple(self)


def _make_without_constructor(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    exc = kind.__new__(kind, *args)
    exc.args = args
    exc.__dict__.update(attributes)
    return exc


class _Chain(NamedTuple):
    """Pickles as the first of its exceptions, chained to the others."""

    links: list[_Link]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_chain, ([tuple(link) for link in self.links],)


def _restore_chain(links: list[tuple[Any, ...]]) -> BaseException:
    made: dict[int, BaseException] = {}
    all_links = [_Link(*link) for link in links]

    def make(number: int) -> BaseException:
        if number not in made:
            link = all_links[number]
            members = None if link.members is None else [make(member) for member in link.members]
            made[number] = _restore(link, members, needed=number == 0)
        return made[number]

    for number, link in enumerate(all_links):
        exc = make(number)
        exc.__cause__ = None if link.cause is None else make(link.cause)
        exc.__context__ = None if link.context is None else make(link.context)
        exc.__suppress_context__ = link.suppress_context
    return made[0]


def _restore(link: _Link, members: list[BaseException] | None, *, needed: bool) -> BaseException:
    """Unpickle the exception of a link; if that fails, return a stand-in, or raise if the exception is needed."""
    why: BaseException | None = None
    if link.data is not None:
        exc, why = try_call(pickle.loads, link.data) if members is None else try_call(_make_group, link.data, members)
        if why is None:
            for note in link.notes:
                try_call(exc.add_note, note)
            return exc  # type: ignore[no-any-return]
        if needed:
            raise why
    reasons = link.notes if why is None else [reason_of(why)]
    exc = BaseExceptionGroup(link.name, members) if members else AioenvError(link.name)
    exc.add_note(f"It stands for an exception that can't be sent: {'; '.join(reasons)}")
    return exc


def _make_group(data: bytes, members: list[BaseException]) -> BaseException:
    kind, message, attributes = pickle.loads(data)
    # not the class's own `__new__`, which may take other arguments
    exc: BaseException = BaseExceptionGroup.__new__(kind, message, members)
    exc.__dict__.update(attributes)
    return exc
