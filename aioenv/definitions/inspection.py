"""Which definitions a worker can import by name, and which globals a piece of code names."""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import cloudpickle

__all__ = [
    "MAIN_NAMES",
    "LruCached",
    "attributes_in_code",
    "is_by_value",
    "is_definition",
    "is_importable",
    "is_importable_module",
    "main_module",
    "names_in_annotation",
    "names_in_code",
    "submodules",
]

LruCached: Any = functools._lru_cache_wrapper
# The second is the main module's name in a process that multiprocessing has spawned (a rank of a training, say).
MAIN_NAMES = ("__main__", "__mp_main__")

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not part of the interpreter
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: one that no class statement has made
_GLOBAL_OPS = frozenset(("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
_names: weakref.WeakKeyDictionary[types.CodeType, tuple[str, ...]] = weakref.WeakKeyDictionary()


def main_module() -> types.ModuleType:
    """The module that this program was started as."""
    return sys.modules["__main__"]


def is_by_value(module_name: str) -> bool:
    """Whether the definitions of a module travel by value: it is the main one, or registered with cloudpickle."""
    if module_name in MAIN_NAMES:
        return True
    registered = cloudpickle.list_registry_pickle_by_value()
    while registered and module_name:
        if module_name in registered:
            return True
        module_name = module_name.rpartition(".")[0]
    return False


def is_importable_module(module: types.ModuleType) -> bool:
    """Whether a worker can import a module by its name."""
    name = getattr(module, "__name__", None)
    return isinstance(name, str) and sys.modules.get(name) is module and not is_by_value(name)


def is_importable(value: Any) -> bool:
    """Whether a worker can import a class, function or decorated callable by its name."""
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
    """Whether a value is a class, function or decorated callable that a worker can't import."""
    kind = type(value)
    if kind is types.FunctionType or kind is LruCached:
        return not is_importable(value)
    made = issubclass(kind, type) and value.__flags__ & (_HEAP_TYPE | _IMMUTABLE) == _HEAP_TYPE
    return made and not is_importable(value)


def names_in_code(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals that a code object reads or writes, with those of functions and classes within it."""
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
    """The names in an annotation that is a string, as all are after `from __future__ import annotations`."""
    try:
        return compile(text, "<annotation>", "eval").co_names
    except (SyntaxError, ValueError):  # a text that is no expression names nothing
        return ()


def submodules(package: types.ModuleType) -> list[tuple[frozenset[str], types.ModuleType]]:
    """The imported submodules of a package, each with the attributes that code names to reach it."""
    prefix = f"{package.__name__}."
    return [
        (frozenset(name[len(prefix) :].split(".")), module)
        for name, module in list(sys.modules.items())
        if name.startswith(prefix) and isinstance(module, types.ModuleType) and is_importable_module(module)
    ]


def attributes_in_code(code: types.CodeType) -> set[str]:
    """All names in a code object but those of local variables."""
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= attributes_in_code(const)
    return names
