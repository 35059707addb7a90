"""Exceptions in messages: with their causes, contexts and members, and without those of their attributes that can't go.

Each exception of a chain is pickled by itself, so that one that does not pickle takes no other with it.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from aioenv.errors import AioenvError
from aioenv.ipc.messages import dump, message_of, reason_of, tried

__all__ = ["dump_exception"]

_MOST = 64  # exceptions of one chain that are sent, not counting members of groups
_MAX_REPR = 1000  # characters in place of an argument


class _Link(NamedTuple):
    """One exception of a message; others by their numbers there."""

    data: bytes | None  # the exception; of a group its class, message and attributes; None: it can't be sent
    name: str  # its class and its message
    notes: list[str]  # what was left out; or why it can't be sent
    members: list[int] | None  # those of a group
    cause: int | None
    context: int | None
    suppress_context: bool


def dump_exception(exc: BaseException) -> bytes:
    """Pickle an exception with all that it is chained to, so that `pickle.loads` gives it again.

    An attribute that does not pickle is left out, and an argument that does not is replaced by its `repr`; a note says
    so. Another exception of the chain that can't be sent is replaced by an `AioenvError` with its class and message.
    Classes may be local or of `__main__`: they go by value, and come out in the process that sent them (in a factory,
    say) as the very same classes.

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
        if other is None or (len(found) >= _MOST and id(other) not in numbers):
            return None
        return number(other)

    links = []
    for each in found:  # which grows meanwhile
        group = isinstance(each, BaseExceptionGroup)
        sent, why = tried(_pickled_group if group else _pickled, each)
        if why is not None and each is exc:
            raise why
        data, notes = (None, [reason_of(why)]) if why is not None else sent
        members = [number(member) for member in each.exceptions] if isinstance(each, BaseExceptionGroup) else None
        cause, context = linked(each.__cause__), linked(each.__context__)
        if (cause is None and each.__cause__ is not None) or (context is None and each.__context__ is not None):
            notes.append(f"Further exceptions of this chain were left out: it has more than {_MOST}")
        name = reason_of(each)
        links.append(_Link(data, name, notes, members, cause, context, each.__suppress_context__))
    return pickle.dumps(_Chain(links), protocol=pickle.HIGHEST_PROTOCOL)


def _pickled(exc: BaseException) -> tuple[bytes, list[str]]:
    """An exception by itself, and notes of what was left out."""
    for value in (exc, _Uncalled(type(exc), exc.args, vars(exc))):  # a constructor may want other arguments
        data, _ = tried(_checked, value, exc, message_of(exc))
        if data is not None:
            return data, []
    notes: list[str] = []
    reduced, why = tried(exc.__reduce_ex__, pickle.HIGHEST_PROTOCOL)
    if why is None and isinstance(reduced, tuple) and len(reduced) >= 2 and reduced[0] is type(exc):
        state = reduced[2] if len(reduced) > 2 and isinstance(reduced[2], dict) else {}
        args, attributes = _sendable_args(reduced[1], notes), _sendable_attributes(state, notes)
        data, _ = tried(_checked, _Called(type(exc), args, attributes), exc, message_of(exc))
        if data is not None:
            return data, notes
    notes = []
    bare = _Uncalled(type(exc), _sendable_args(exc.args, notes), _sendable_attributes(vars(exc), notes))
    return _checked(bare, exc), notes


def _pickled_group(exc: BaseExceptionGroup[Any]) -> tuple[bytes, list[str]]:
    """The class, the message and the attributes of a group, and notes of those that were left out."""
    notes: list[str] = []
    data = dump((type(exc), exc.message, _sendable_attributes(vars(exc), notes)))
    pickle.loads(data)
    return data, notes


def _checked(value: Any, exc: BaseException, message: str | None = None) -> bytes:
    """The pickle of a value, if an exception of this class comes out of it, and with this message if there is one."""
    data = dump(value)
    copy = pickle.loads(data)
    if type(copy) is not type(exc) or (message is not None and message_of(copy) != message):
        raise pickle.PicklingError(f"it unpickles as {reason_of(copy)}")
    return data


def _sendable_args(args: tuple[Any, ...], notes: list[str]) -> tuple[Any, ...]:
    sendable = []
    for arg in args:
        _, why = tried(_round_trip, arg)
        if why is not None:
            text, _ = tried(repr, arg)
            notes.append(f"An argument was replaced by its repr, since it can't be sent: {reason_of(why)}")
            arg = str(text)[:_MAX_REPR]
        sendable.append(arg)
    return tuple(sendable)


def _sendable_attributes(attributes: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    sendable = {}
    for name, value in attributes.items():
        _, why = tried(_round_trip, value)
        if why is None:
            sendable[name] = value
        else:
            notes.append(f"The attribute {name!r} was left out, since it can't be sent: {reason_of(why)}")
    return sendable


def _round_trip(value: Any) -> None:
    pickle.loads(dump(value))


class _Called(NamedTuple):
    """Pickles as an exception whose class is called."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.kind, self.args, self.attributes


class _Uncalled(NamedTuple):
    """Pickles as an exception that is made without calling its constructor."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_uncalled, tuple(self)


def _make_uncalled(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    exc = kind.__new__(kind, *args)
    exc.args = args
    exc.__dict__.update(attributes)
    return exc


class _Chain(NamedTuple):
    """Pickles as the first of its exceptions, chained to the others."""

    links: list[_Link]

    def __reduce__(self) -> tuple[Any, ...]:
        return _joined, ([tuple(link) for link in self.links],)


def _joined(links: list[tuple[Any, ...]]) -> BaseException:
    made: dict[int, BaseException] = {}
    all_links = [_Link(*link) for link in links]

    def make(number: int) -> BaseException:
        if number not in made:
            link = all_links[number]
            members = None if link.members is None else [make(member) for member in link.members]
            made[number] = _made(link, members, needed=number == 0)
        return made[number]

    for number, link in enumerate(all_links):
        exc = make(number)
        exc.__cause__ = None if link.cause is None else make(link.cause)
        exc.__context__ = None if link.context is None else make(link.context)
        exc.__suppress_context__ = link.suppress_context
    return made[0]


def _made(link: _Link, members: list[BaseException] | None, *, needed: bool) -> BaseException:
    """The exception of a link; what stands for it, if it did not come, unless it is needed."""
    why: BaseException | None = None
    if link.data is not None:
        exc, why = tried(pickle.loads, link.data) if members is None else tried(_make_group, link.data, members)
        if why is None:
            for note in link.notes:
                tried(exc.add_note, note)
            return exc  # type: ignore[no-any-return]
        if needed:
            raise why
    reasons = link.notes if why is None else [reason_of(why)]
    exc = BaseExceptionGroup(link.name, members) if members else AioenvError(link.name)
    exc.add_note(f"It stands for an exception that can't be sent: {'; '.join(reasons)}")
    return exc


def _make_group(data: bytes, members: list[BaseException]) -> BaseException:
    kind, message, attributes = pickle.loads(data)
    # not the class's own `__new__`, which may want other arguments
    exc: BaseException = BaseExceptionGroup.__new__(kind, message, members)
    exc.__dict__.update(attributes)
    return exc
