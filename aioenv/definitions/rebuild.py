"""Make classes and functions of a script again in a worker: what a snapshot's pickles call. `Unsendable` stands in.

Classes are made empty and filled later, without the hooks that ran when their class statements did
(`__init_subclass__`, `__set_name__`, metaclasses of the script). The effects of those hooks are part of the snapshot.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import marshal
import sys
import types
import typing
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import cloudpickle

from aioenv.errors import UnsendableError

__all__ = [
    "Unsendable",
    "fill_type_alias",
    "import_module",
    "make_cached_property",
    "make_cell",
    "make_class",
    "make_descriptor",
    "make_function",
    "make_generic_alias",
    "make_lru_cached",
    "make_member",
    "make_type_alias",
    "make_type_parameter",
    "member_of",
    "reduce_code",
    "run_hook",
]

_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_T = typing.TypeVar("_T")
_alias_values: dict[int, list[Any]] = {}


def reduce_code(code: types.CodeType) -> Any:
    """Pickle a code object with its file name, which cloudpickle leaves out."""
    try:
        return marshal.loads, (marshal.dumps(code),)
    except ValueError:  # a constant that no compiler makes
        return cloudpickle.Pickler.dispatch_table[types.CodeType](code)


def import_module(name: str) -> types.ModuleType:
    """Import a module and return it, not its package."""
    importlib.import_module(name)
    return sys.modules[name]


def make_cell() -> types.CellType:
    """Make an empty closure cell."""
    return types.CellType()


def make_function(
    code: types.CodeType,
    namespace: dict[str, Any],
    name: str,
    cells: tuple[types.CellType, ...] | None,
    qualname: str,
    module: str | None,
    doc: str | None,
) -> types.FunctionType:
    """Make a function without defaults, annotations and attributes."""
    namespace.setdefault("__builtins__", builtins)
    function = types.FunctionType(code, namespace, name, None, cells)
    function.__qualname__ = qualname
    function.__module__ = module  # type: ignore[assignment]
    function.__doc__ = doc
    return function


def make_lru_cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    """Make a cached function with an empty cache."""
    return functools.lru_cache(maxsize, typed)(function)


def make_cached_property(function: Any, name: str | None) -> Any:
    """Make a `functools.cached_property` that knows its name."""
    value: Any = functools.cached_property(function)
    value.attrname = name
    return value


def make_member(enum: type, kind: Any, *args: Any) -> Any:
    """Make a member of an Enum, without its attributes."""
    return kind.__new__(enum, *args)


def make_descriptor(kind: Any, base: Any, *args: Any) -> Any:
    """Make an instance of a subclass of `property`, `classmethod` or `staticmethod`."""
    made = kind.__new__(kind, *args)
    base.__init__(made, *args)
    return made


def make_type_parameter(kind: Any, name: str, module: str, options: dict[str, Any]) -> Any:
    """Make a `typing.ParamSpec` or a `typing.TypeVarTuple`."""
    made = kind(name, **options)
    made.__module__ = module
    return made


def make_type_alias(name: str, module: str) -> Any:
    """Make the alias of a statement `type name = ...`; its value, which may refer to it, is set later."""
    value: list[Any] = []
    values: dict[str, Any] = {"__name__": module, "value": lambda: value[0]}
    exec(f"type {name} = value()", values)
    _alias_values[id(values[name])] = value
    return values[name]


def fill_type_alias(alias: Any, value: Any) -> None:
    """Give a type alias its value."""
    _alias_values.pop(id(alias)).append(value)


def make_generic_alias(name: str, module: str, parameters: Any, value: Any) -> Any:
    """Make the alias of a statement `type name[parameters] = value`."""
    kind: Any = typing.TypeAliasType  # type: ignore[attr-defined]
    # the module of an alias is that of the code that makes it
    return eval("make()", {"__name__": module, "make": partial(kind, name, value, type_params=parameters)})


def member_of(enum: Any, name: str) -> Any:
    """Return the member of an Enum by name."""
    return enum._member_map_[name]


def make_class(
    meta: type, creator: Any, name: str, bases: tuple[type, ...], attributes: dict[str, Any], generic: bool
) -> type:
    """Make an empty class.

    Args:
        meta: its metaclass.
        creator: the first class in `meta.__mro__` that can be imported, whose `__new__` makes it; `type` for an Enum.
        name: its name.
        bases: its bases.
        attributes: those that must be set from the start: `__module__`, `__qualname__`, `__slots__`.
        generic: whether it has `__orig_bases__`, which `typing.Generic` reads when a class is made.
    """
    if generic:
        attributes["__orig_bases__"] = (typing.Generic[_T],)  # type: ignore[index]  # until its own are set
    with _without_hook(bases):
        made: Any = None
        if creator is not type:
            # a TypedDict has other bases at run time, and a metaclass may ask for attributes that come later
            with contextlib.suppress(Exception):
                made = creator.__new__(meta, name, bases, dict(attributes))
        if made is None:
            return type.__new__(meta, name, bases, dict(attributes))
        if isinstance(made, type):
            creator.__init__(made, name, bases, dict(attributes))
    return made  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_hook(bases: tuple[type, ...]) -> Iterator[None]:
    """Keep `__init_subclass__` of a base from running while the new class is still empty."""
    owner = hook_owner(bases)
    if owner is None:
        yield
        return
    hook = owner.__dict__["__init_subclass__"]
    type.__setattr__(owner, "__init_subclass__", classmethod(lambda cls, **kwargs: None))
    try:
        yield
    finally:
        type.__setattr__(owner, "__init_subclass__", hook)


def hook_owner(bases: tuple[type, ...]) -> Any:
    """Return the class whose `__init_subclass__` runs for a new class with these bases; None if it may run."""
    for base in bases:
        for kind in base.__mro__:
            if "__init_subclass__" in kind.__dict__:
                ours = kind is not object and kind.__module__ != "typing" and not kind.__flags__ & _IMMUTABLE
                return kind if ours else None
    return None


def run_hook(made: Any) -> None:
    """Run `__init_subclass__` of an importable base for a class that is complete now, as its import would have."""
    with contextlib.suppress(Exception):  # it may need arguments of the class statement, which are lost
        super(made, made).__init_subclass__()


class Unsendable:
    """A placeholder for a value that could not be sent to a worker: using it raises an `UnsendableError`.

    Args:
        message: the message of the error.
    """

    __slots__ = ("_aioenv_message",)

    def __init__(self, message: str) -> None:
        object.__setattr__(self, "_aioenv_message", message)

    def __reduce__(self) -> Any:
        return Unsendable, (object.__getattribute__(self, "_aioenv_message"),)

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_aioenv_message')}>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # `copy` and others ask for these, and handle AttributeError
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
