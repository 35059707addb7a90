"""The placeholder of a value that could not be sent to a worker: using it raises an error."""

from __future__ import annotations

from typing import Any, NoReturn

from aioenv.errors import UnsendableError

__all__ = ["Unsendable"]


class Unsendable:
    """Raises an `UnsendableError` when it is used.

    Args:
        message: the error's.
    """

    __slots__ = ("_aioenv_message",)

    def __init__(self, message: str) -> None:
        object.__setattr__(self, "_aioenv_message", message)

    def __reduce__(self) -> Any:
        return Unsendable, (object.__getattribute__(self, "_aioenv_message"),)

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_aioenv_message')}>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # `copy` and the like ask for these, and take no for an answer
            raise AttributeError(name)
        raise UnsendableError(object.__getattribute__(self, "_aioenv_message"))


def _raise(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsendableError(object.__getattribute__(self, "_aioenv_message"))


for _name in (
    "call enter exit aenter aexit iter next aiter anext await len getitem setitem delitem contains bool int float "
    "complex index add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor lshift rlshift rshift rrshift neg pos abs invert eq ne lt le gt ge hash str format "
    "setattr delattr iadd isub imul ior iand"
).split():
    setattr(Unsendable, f"__{_name}__", _raise)
