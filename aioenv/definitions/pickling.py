"""The base class of the picklers of definitions, and the rules that say which names a worker can import."""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import gc
import pickle
import struct
import sys
import types
import typing
import weakref
from collections import ChainMap
from collections.abc import Iterator
from typing import Any, ClassVar

import cloudpickle

from aioenv.definitions import rebuild

__all__ = [
    "MAIN_NAMES",
    "DefinitionPickler",
    "LruCached",
    "attributes_in_code",
    "is_by_value",
    "is_definition",
    "is_importable",
    "is_importable_module",
    "is_member",
    "main_module",
    "member_arguments",
    "names_in_annotation",
    "names_in_code",
    "submodules",
]

LruCached: Any = functools._lru_cache_wrapper
# The second is the name of the main module in a process that multiprocessing has spawned (a rank of a training, say).
MAIN_NAMES = ("__main__", "__mp_main__")

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class is not part of the interpreter
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: no class statement has made it
_GLOBAL_OPS = frozenset(("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
_names: weakref.WeakKeyDictionary[types.CodeType, tuple[str, ...]] = weakref.WeakKeyDictionary()


def main_module() -> types.ModuleType:
    """Return the module that this program was started as."""
    return sys.modules["__main__"]


def is_by_value(module_name: str) -> bool:
    """Return whether the definitions of a module travel by value: of the main one, or registered with cloudpickle."""
    if module_name in MAIN_NAMES:
        return True
    registered = cloudpickle.list_registry_pickle_by_value()
    while registered and module_name:
        if module_name in registered:
            return True
        module_name = module_name.rpartition(".")[0]
    return False


def is_importable_module(module: types.ModuleType) -> bool:
    """Return whether a worker can import a module by its name."""
    name = getattr(module, "__name__", None)
    return isinstance(name, str) and sys.modules.get(name) is module and not is_by_value(name)


def is_importable(value: Any) -> bool:
    """Return whether a worker can import a class, function or decorated callable by its name."""
    module_name = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(name, str) or module_name in MAIN_NAMES:
        return False
    found: Any = sys.modules.get(module_name)
    if found is None:
        return False
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return False
    return found is value and not is_by_value(module_name)


def is_definition(value: Any) -> bool:
    """Return whether a value is a class, function or decorated callable that a worker can't import."""
    kind = type(value)
    if kind is types.FunctionType or kind is LruCached:
        return not is_importable(value)
    made = issubclass(kind, type) and value.__flags__ & (_HEAP_TYPE | _IMMUTABLE) == _HEAP_TYPE
    return made and not is_importable(value)


def names_in_code(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals that a code object, and functions and classes within it, read or write."""
    found = _names.get(code)
    if found is None:
        names = dict.fromkeys(_own_names(code)) if code.co_names else {}
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                names.update(dict.fromkeys(names_in_code(const)))
        found = _names[code] = tuple(names)
    return found


def _own_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_OPS:
            yield instruction.argval


def names_in_annotation(text: str) -> tuple[str, ...]:
    """Return the names in an annotation that is a string, as all are after `from __future__ import annotations`."""
    try:
        return compile(text, "<annotation>", "eval").co_names
    except (SyntaxError, ValueError):  # no expression: it names nothing
        return ()


def submodules(package: types.ModuleType) -> list[tuple[frozenset[str], types.ModuleType]]:
    """Return the imported submodules of a package, each with the attributes by which code reaches it."""
    prefix = f"{package.__name__}."
    return [
        (frozenset(name[len(prefix) :].split(".")), module)
        for name, module in list(sys.modules.items())
        if name.startswith(prefix) and isinstance(module, types.ModuleType) and is_importable_module(module)
    ]


def attributes_in_code(code: types.CodeType) -> set[str]:
    """Return all names in a code object except those of local variables."""
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= attributes_in_code(const)
    return names


def _reduce_mapping_proxy(proxy: Any) -> Any:
    (mapping,) = gc.get_referents(proxy)  # the mapping itself, not a copy: the proxy is a live view
    return types.MappingProxyType, (mapping,)


def _reduce_cached_property(value: Any) -> Any:
    return rebuild.make_cached_property, (value.func, value.attrname)  # without its lock (Python 3.11)


def _reduce_weak_dictionary(value: Any) -> Any:
    return type(value), (dict(value),)


def _reduce_struct(value: Any) -> Any:
    return struct.Struct, (value.format,)


def _reduce_type_parameter(value: Any) -> Any:
    options = {name: getattr(value, f"__{name}__") for name in _TYPE_PARAMETERS if hasattr(value, f"__{name}__")}
    return rebuild.make_type_parameter, (type(value), value.__name__, value.__module__, options)


def _reduce_type_alias(value: Any) -> Any:
    parameters = value.__type_params__
    arguments = value.__name__, value.__module__
    if parameters:
        return rebuild.make_generic_alias, (*arguments, parameters, value.__value__)
    return rebuild.make_type_alias, arguments, value.__value__, None, None, rebuild.fill_type_alias


def _reduce_missing(_: Any) -> Any:
    return getattr, (dataclasses, "MISSING")


DISPATCH = {
    types.CodeType: rebuild.reduce_code,
    types.MappingProxyType: _reduce_mapping_proxy,
    functools.cached_property: _reduce_cached_property,
    weakref.WeakKeyDictionary: _reduce_weak_dictionary,
    weakref.WeakValueDictionary: _reduce_weak_dictionary,
    type(dataclasses.MISSING): _reduce_missing,
    struct.Struct: _reduce_struct,
}
_TYPE_PARAMETERS = ("bound", "covariant", "contravariant", "infer_variance", "default")


class DefinitionPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """The base of picklers that treat definitions in a way of their own; subclasses override `reduce_definition`."""

    dispatch_table: ClassVar[Any] = ChainMap(DISPATCH, cloudpickle.Pickler.dispatch_table)

    def reduce_definition(self, obj: Any) -> Any:
        """Reduce a class, function or decorated callable that can't be imported by name."""
        raise NotImplementedError

    def reduce_module(self, obj: types.ModuleType) -> Any:
        """Reduce a module that can't be imported by name."""
        raise NotImplementedError

    def note_import(self, module_name: str) -> None:
        """Note that the receiver will import a module."""

    def note_partial(self, obj: Any) -> None:
        """Note a `functools.partial`."""

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler`."""
        kind = type(obj)
        if kind is types.FunctionType or kind is LruCached or issubclass(kind, type):
            if is_importable(obj):
                self.note_import(obj.__module__)
                return NotImplemented
            return self.reduce_definition(obj) if is_definition(obj) else super().reducer_override(obj)
        if issubclass(kind, types.ModuleType):
            if not is_importable_module(obj):
                return self.reduce_module(obj)
            self.note_import(obj.__name__)
            return rebuild.import_module, (obj.__name__,)
        if issubclass(kind, enum.Enum) and is_definition(kind) and is_member(obj):
            return rebuild.make_member, (kind, *member_arguments(obj)), vars(obj)
        if kind is functools.partial:
            self.note_partial(obj)
            return NotImplemented
        if isinstance(obj, property) and kind is not property:
            return rebuild.make_descriptor, (kind, property, obj.fget, obj.fset, obj.fdel, obj.__doc__), _state_of(obj)
        for base in (classmethod, staticmethod):
            if isinstance(obj, base) and kind is not base:
                return rebuild.make_descriptor, (kind, base, obj.__func__), _state_of(obj)
        _refuse_shared_tensor(obj)
        plain = getattr(kind, "reduce_among_definitions", None)
        return self._reduce_named(obj) if plain is None else plain(obj)

    def reduce_by_name(self, obj: Any, name: str) -> Any:
        """Reduce an object that pickles as its name; None: reduce it like others."""

    def _reduce_named(self, obj: Any) -> Any:
        """Reduce an object that may pickle as its name in a module, which the receiver may not be able to import."""
        kind: Any = type(obj)
        if kind not in _NAMED_TYPES:
            own = kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__
            if not own or kind in self.dispatch_table or not is_definition(kind):
                return NotImplemented
        name = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        module = getattr(obj, "__module__", None)
        if not isinstance(name, str) or not isinstance(module, str) or not is_by_value(module):
            return name
        reference = self.reduce_by_name(obj, name)
        if reference is not None:
            return reference
        if kind in _TYPE_PARAMETER_TYPES:
            return _reduce_type_parameter(obj)
        if kind is _TypeAlias:
            return _reduce_type_alias(obj)
        arguments: tuple[Any, ...] = getattr(obj, "__getnewargs__", tuple)()
        return kind.__new__, (kind, *arguments), object.__getstate__(obj)


def _state_of(value: Any) -> Any:
    return getattr(value, "__dict__", None) or None


_TYPE_PARAMETER_TYPES = (typing.ParamSpec, typing.TypeVarTuple)
_TypeAlias: Any = getattr(typing, "TypeAliasType", None)  # Python 3.12 has it
_NAMED_TYPES = (typing.NewType, *_TYPE_PARAMETER_TYPES, _TypeAlias)


def is_member(value: enum.Enum) -> bool:
    """Return whether a value is one of its class's own members."""
    kind = type(value)
    if kind._member_map_.get(getattr(value, "_name_", None) or "") is value:
        return True
    return any(value is member for member in kind._value2member_map_.values())  # an alias, or flags taken together


def member_arguments(value: Any) -> tuple[Any, ...]:
    """Return the class whose `__new__` makes an Enum member, and its arguments: `int` and a number for an IntEnum."""
    kind = type(value)._member_type_
    if kind is object:
        return (object,)
    plain: Any
    for plain in (int, float, complex, tuple):
        if issubclass(kind, plain):
            return kind, plain(value)
    if issubclass(kind, str):
        return kind, str.__str__(value)  # the Enum overrides `__str__`
    if issubclass(kind, bytes):
        return kind, bytes.__getitem__(value, slice(None))
    arguments: tuple[Any, ...] = getattr(value, "__getnewargs__", tuple)()
    return kind, *arguments


def _refuse_shared_tensor(value: Any) -> None:
    kind: Any = getattr(sys.modules.get("torch"), "Tensor", None)
    if kind is None or not isinstance(value, kind):
        return
    if value.device.type == "cpu" and value.is_shared():
        raise pickle.PicklingError(
            f"a torch.Tensor of shape {tuple(value.shape)} in shared memory (share_memory_()) would become a copy of "
            "its own in each worker. Share it by other means (aioenv.SharedRunningStats, a file that each env maps), "
            "send a clone(), or use debug=True"
        )
