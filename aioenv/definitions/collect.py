"""Step 1 of a snapshot: `DefinitionCollector` finds the definitions that some objects reach, and what those need.

Every value is pickled once on trial, to nowhere: this finds the definitions within it, and the values that can't be
sent. The result is a graph: roots need definitions, definitions need entries (globals, attributes, closure variables),
and entries need definitions. `DefinitionCollector.select` picks the part that some roots need.
"""

from __future__ import annotations

import pickle
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from aioenv.definitions.pickling import (
    MAIN_NAMES,
    DefinitionPickler,
    LruCached,
    attributes_in_code,
    is_by_value,
    is_definition,
    is_importable,
    is_importable_module,
    main_module,
    names_in_annotation,
    names_in_code,
    submodules,
)
from aioenv.definitions.rebuild import Unsendable
from aioenv.definitions.restore import explain
from aioenv.definitions.table import DefinitionTable

__all__ = ["DefinitionCollector", "Entry", "Namespace", "Root", "Selection", "name_of"]


class Namespace(NamedTuple):
    """The globals of some functions.

    Attributes:
        kind: "main", "import" (of a module of the standard library), "copy" (of another module that workers can import,
            but import only if something else needs it), "module" (of one that they can't import), "private".
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
        value: the value.
        user: the qualified name of a definition that needs it.
        error: why it can't be sent; None if it can.
        simple: whether unpickling it runs no code of the script.
        callables: `functools.partial` objects within it.
        index: its place among all entries: after those that it needs itself, unless they need each other.
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
    """Return the qualified name of a definition."""
    return str(getattr(value, "__qualname__", type(value).__name__))


class Root:
    """An object that needs definitions and is not one itself, such as a factory."""


class Selection(NamedTuple):
    """A part of the collected definitions and entries.

    Attributes:
        definitions: classes, functions and decorated callables, in the order in which they were found.
        entries: the entries that they need, each after those that it needs itself, unless they need each other.
    """

    definitions: list[Any]
    entries: list[Entry]

    @property
    def callables(self) -> list[Any]:
        """The `functools.partial` objects within the entries, each once."""
        return [*{id(value): value for entry in self.entries for value in entry.callables}.values()]


_Step = tuple[str, Entry]


class DefinitionCollector:
    """Finds the definitions that some objects reach: step 1 of a snapshot.

    Args:
        known: the table of the definitions that the receiver has already; None: it has none.

    Attributes:
        namespaces: the namespaces of functions, by the id of their globals.
        imports: names of modules that the receiver will import.
    """

    def __init__(self, known: DefinitionTable | None = None) -> None:
        self.known = known
        self.namespaces: dict[int, Namespace] = {}
        self.imports: dict[str, None] = {}
        self._entries = 0
        self._seen: dict[int, Any] = {}  # definitions by id, in the order in which they were found
        self._needs: dict[
            int, list[Any]
        ] = {}  # by id of a definition, entry or root: the definitions and entries that it needs
        self._cells: dict[int, Entry] = {}
        self._globals: dict[tuple[int, str], Entry] = {}
        self._submodules: dict[str, list[tuple[frozenset[str], types.ModuleType]]] = {}

    # ------------------------------------------------------------ finding

    def reach(self, value: Any) -> Root:
        """Collect the definitions that a value reaches.

        Raises:
            Exception: if the value can't be pickled.
        """
        root = Root()
        found = self._trial_pickle(value, root)
        self._run(self._expand_all(found, root))
        return root

    def reach_global(self, name: str) -> Root:
        """Collect a global of the main module, and the definitions that it reaches."""
        root = Root()
        self._run(self._global(self.namespace(vars(main_module())), name, "a registered env", root))
        return root

    def select(self, roots: Iterable[Root]) -> Selection:
        """Select all definitions and entries that some roots need, directly or through others."""
        chosen: dict[int, Any] = {}
        todo: list[Any] = [*roots]
        while todo:
            node = todo.pop()
            if id(node) not in chosen:
                chosen[id(node)] = node
                todo += self._needs.get(id(node), ())
        entries = sorted((n for n in chosen.values() if type(n) is Entry), key=lambda entry: entry.index)
        found = [
            value for key, value in self._seen.items() if key in chosen and not isinstance(value, types.ModuleType)
        ]
        return Selection(found, entries)

    def kind_of(self, namespace: Namespace) -> str:
        """Return the kind of a namespace in the receiver: a module that nothing else imports there becomes a copy."""
        if namespace.kind != "copy":
            return namespace.kind
        return "import" if namespace.name in self.imports else "private"

    def direct_needs(self, root: Root) -> tuple[int, ...]:
        """Return the ids of the nodes that a root needs directly; roots with equal ids need the same definitions."""
        return tuple(sorted(id(node) for node in self._needs.get(id(root), ())))

    def entries_of(self, definition: Any) -> list[Entry]:
        """Return the entries that a definition needs directly."""
        return [node for node in self._needs.get(id(definition), ()) if isinstance(node, Entry)]

    def _need(self, owner: Any, node: Any) -> None:
        self._needs.setdefault(id(owner), []).append(node)

    def _run(self, steps: Iterator[_Step]) -> None:
        stack = [steps]
        while stack:
            step = next(stack[-1], None)
            if step is None:
                stack.pop()
                continue
            what, entry = step
            if what == "end":
                self._entries += 1
                entry.index = self._entries
                continue
            found: list[Any] = []
            if type(entry.value) not in _ATOMS:
                try:
                    found = self._trial_pickle(entry.value, entry)
                except Exception as exc:
                    if entry.kind == "function":  # a function's defaults must be a tuple, its attributes a dict
                        found = self._trial_pickle_each(entry)
                    else:
                        entry.error = f"{exc}" or type(exc).__name__
            stack.append(self._after(found, entry))

    def _after(self, found: list[Any], entry: Entry) -> Iterator[_Step]:
        yield from self._expand_all(found, entry)
        entry.simple = entry.error is None and _is_simple(entry.value)
        yield "end", entry

    def _trial_pickle(self, value: Any, owner: Any) -> list[Any]:
        """Pickle a value on trial; return the definitions that are new."""
        trial = _TrialPickler(self)
        try:
            trial.dump(value)
        except Exception:
            for item in trial.found:
                del self._seen[id(item)]
            raise
        self.imports.update(trial.imports)
        for item in trial.mentioned.values():
            self._need(owner, item)
        if isinstance(owner, Entry):
            owner.callables = [*trial.callables.values()]
            trial.found += [_ForwardReference(owner, name) for name in trial.forward]
        return [*trial.found, *map(_MainName, trial.named), *trial.by_name]

    def _trial_pickle_each(self, entry: Entry) -> list[Any]:
        """Replace each value of a function's attribute that can't be sent by an `Unsendable`."""
        found: list[Any] = []

        def sent(name: str, value: Any) -> Any:
            try:
                found.extend(self._trial_pickle(value, entry))
            except Exception as exc:
                return Unsendable(f"{entry.user}.{name}, could not be sent to the worker: {exc}")
            return value

        value = entry.value
        if isinstance(value, dict):
            entry.value = {key: sent(f"{entry.name}[{key!r}]", item) for key, item in value.items()}
        else:
            entry.value = tuple(sent(f"{entry.name}[{index}]", item) for index, item in enumerate(value))
        return found

    def add(self, obj: Any) -> bool:
        """Add a definition; return whether it is new."""
        if id(obj) in self._seen:
            return False
        self._seen[id(obj)] = obj
        return True

    def has(self, obj: Any) -> bool:
        """Return whether a definition was found."""
        return id(obj) in self._seen

    # ------------------------------------------------------------ what definitions need

    def _expand_all(self, found: Iterable[Any], owner: Any) -> Iterator[_Step]:
        for obj in found:
            if isinstance(obj, _ForwardReference):
                yield from self._names(self._annotation_namespace(obj.entry), [obj.name], obj.entry.user, owner)
            elif isinstance(obj, _MainName):
                yield from self._names(self.namespace(vars(main_module())), [obj.name], "a registered env", owner)
            elif isinstance(obj, _ByName):
                yield from self._own_name(obj.value, obj.name, owner)
            elif isinstance(obj, types.ModuleType):
                yield from self._expand_module(obj)
            else:
                yield from self._expand(obj)

    def _expand(self, obj: Any) -> Iterator[_Step]:
        if isinstance(obj, type):
            yield from self._expand_class(obj)
        elif type(obj) is LruCached:
            yield from self._expand_lru_cached(obj)
        else:
            yield from self._expand_function(obj)
        yield from self._own_name(obj, name_of(obj), obj)

    def _expand_class(self, cls: type) -> Iterator[_Step]:
        # a class can't be made without its bases: this raises if one can't be sent
        yield from self._expand_all(self._trial_pickle((type(cls), cls.__bases__), cls), cls)
        namespace = self._module_namespace(cls.__module__)
        for name, value in class_attributes(cls):
            yield self._entry("class", cls, name, value, cls)
            if name == "__annotations__" and namespace is not None and isinstance(value, dict):
                yield from self._annotations(namespace, value, cls)

    def _expand_function(self, function: types.FunctionType) -> Iterator[_Step]:
        code, user = function.__code__, function.__qualname__
        namespace = self.namespace(function.__globals__)
        values: list[Any] = []
        for cell, name in zip(function.__closure__ or (), code.co_freevars, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # the cell is empty
                continue
            values.append(value)
            if id(cell) in self._cells:
                self._need(function, self._cells[id(cell)])
            else:
                _, self._cells[id(cell)] = step = self._entry("cell", cell, name, value, function)
                yield step
        for name in ("__defaults__", "__kwdefaults__", "__annotations__", "__type_params__", "__dict__"):
            value = getattr(function, name, None)
            if value:
                yield self._entry("function", function, name, value, function)
        names = names_in_code(code)
        if namespace.kind != "import":
            yield from self._names(namespace, names, user, function)
            yield from self._annotations(namespace, function.__annotations__, function)
        values += [namespace.values[name] for name in names if name in namespace.values]
        for module in self._reached_submodules(code, values):
            yield self._entry("submodule", None, module.__name__, module, function)

    def _expand_lru_cached(self, function: Any) -> Iterator[_Step]:
        yield from self._expand_all(self._trial_pickle(function.__wrapped__, function), function)
        attributes = {k: v for k, v in vars(function).items() if k not in ("__wrapped__", "cache_parameters")}
        if attributes:
            yield self._entry("function", function, "__dict__", attributes, function)

    def _expand_module(self, module: types.ModuleType) -> Iterator[_Step]:
        namespace = self.namespace(vars(module))
        if namespace.kind != "main":  # of the main module only the names that code uses
            names = [name for name in list(vars(module)) if not (name.startswith("__") and name.endswith("__"))]
            yield from self._names(namespace, names, module.__name__, module)

    def _own_name(self, obj: Any, name: str, owner: Any) -> Iterator[_Step]:
        """Collect the global that has a definition's own name, so that the standard pickle finds it in the receiver."""
        namespace = self._module_namespace(getattr(obj, "__module__", None))
        if namespace is None:
            return
        top, *rest = name.split(".")
        found = namespace.values.get(top)
        for part in rest:
            found = getattr(found, part, None)
        if found is obj:
            yield from self._global(namespace, top, name, owner)

    def _annotations(self, namespace: Namespace, annotations: dict[str, Any], owner: Any) -> Iterator[_Step]:
        for value in annotations.values():
            if isinstance(value, str):
                yield from self._names(namespace, names_in_annotation(value), name_of(owner), owner)

    def _entry(self, kind: str, target: Any, name: str, value: Any, owner: Any) -> _Step:
        entry = Entry(kind, target, name, value, name_of(owner))
        self._need(owner, entry)
        return "try", entry

    def _names(self, namespace: Namespace, names: Iterable[str], user: str, owner: Any) -> Iterator[_Step]:
        for name in names:
            yield from self._global(namespace, name, user, owner)

    def _global(self, namespace: Namespace, name: str, user: str, owner: Any) -> Iterator[_Step]:
        if name not in namespace.values or name in _PREDEFINED:
            return
        entry = self._globals.get((namespace.number, name))
        if entry is not None:
            self._need(owner, entry)
            return
        entry = self._globals[namespace.number, name] = Entry("global", namespace, name, namespace.values[name], user)
        self._need(owner, entry)
        yield "try", entry

    def _reached_submodules(self, code: types.CodeType, values: list[Any]) -> Iterator[types.ModuleType]:
        attributes: set[str] | None = None
        for package in values:
            if not isinstance(package, types.ModuleType) or not getattr(package, "__path__", None):
                continue
            if package.__name__ not in self._submodules:
                self._submodules[package.__name__] = submodules(package)
            attributes = attributes_in_code(code) if attributes is None else attributes
            for needed, module in self._submodules[package.__name__]:
                if needed <= attributes:
                    yield module

    # ------------------------------------------------------------ namespaces

    def namespace(self, values: dict[str, Any]) -> Namespace:
        """Return the namespace of a dict of globals."""
        found = self.namespaces.get(id(values))
        if found is None:
            name = values.get("__name__")
            name = name if isinstance(name, str) else ""
            kind = "private"
            if values is vars(main_module()):
                kind = "main"
            elif (module := self._module_of(name, values)) is not None:
                standard = name.partition(".")[0] in sys.stdlib_module_names
                kind = "module" if not is_importable_module(module) else "import" if standard else "copy"
            found = self.namespaces[id(values)] = Namespace(kind, name, len(self.namespaces), values)
        return found

    def _module_of(self, name: str, values: dict[str, Any]) -> types.ModuleType | None:
        module = sys.modules.get(name)
        return module if isinstance(module, types.ModuleType) and vars(module) is values else None

    def module_namespace(self, module: types.ModuleType) -> Namespace:
        """Return the namespace of a module that can't be imported."""
        found = self.namespace(vars(module))
        if found.kind == "private":  # it is not in `sys.modules`
            found = self.namespaces[id(vars(module))] = found._replace(kind="module")
        return found

    def _module_namespace(self, name: Any) -> Namespace | None:
        """Return the namespace of a module by its name if its definitions travel by value, else None."""
        module = sys.modules.get(name) if isinstance(name, str) else None
        if isinstance(module, types.ModuleType) and is_by_value(module.__name__):
            return self.namespace(vars(module))
        return None

    def _annotation_namespace(self, entry: Entry) -> Namespace:
        """Return the namespace in which the strings in an annotation are looked up."""
        if isinstance(entry.target, Namespace):
            return entry.target
        if isinstance(entry.target, types.FunctionType):
            return self.namespace(entry.target.__globals__)
        found = self._module_namespace(getattr(entry.target, "__module__", None))
        return found if found is not None else self.namespace(vars(main_module()))


def _is_simple(value: Any, depth: int = 4) -> bool:
    """Return whether unpickling a value runs no code of the script."""
    kind = type(value)
    if kind in _ATOMS or kind in (types.FunctionType, types.ModuleType, types.BuiltinFunctionType, LruCached):
        return True
    if isinstance(value, type):
        return True
    if kind in (staticmethod, classmethod):
        return depth > 0 and _is_simple(value.__func__, depth - 1)
    if kind is property:
        return all(_is_simple(f, 1) for f in (value.fget, value.fset, value.fdel))
    if kind in (tuple, frozenset):
        return depth > 0 and len(value) < 1000 and all(_is_simple(item, depth - 1) for item in value)
    return False


class _ForwardReference(NamedTuple):
    """A name within a forward reference of an annotation."""

    entry: Entry
    name: str


class _ByName(NamedTuple):
    """An object that pickles as its name in a module."""

    value: Any
    name: str


class _MainName(NamedTuple):
    """A name in the main module that an `EnvSpec` refers to ("__main__:Env")."""

    name: str


# Names that every namespace of the receiver has anyway.
_PREDEFINED = frozenset(("__builtins__", "__name__", "__file__", "__loader__", "__spec__", "__package__"))
_ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None), type(...), type(NotImplemented)))


def class_attributes(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class that the receiver must set: those that making the class does not set."""
    # in 3.13 setting any of the others removes `__firstlineno__`
    items = sorted([*vars(cls).items()], key=lambda item: item[0] == "__firstlineno__")
    for name, value in items:
        if name in ("__module__", "__qualname__", "__slots__", "_abc_impl"):
            continue
        own = isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType))
        if not (own and value.__objclass__ is cls):
            yield name, value


def _missing(cls: Any) -> Any:
    """Return a base or a metaclass of a class that can't be sent to a worker; None if there is none."""
    for kind in (type(cls), *cls.__bases__):
        if not is_importable(kind):
            missing = _missing(kind) if is_definition(kind) else kind
            if missing is not None:
                return missing
    return None


class _NullFile:
    """Discards the bytes of a trial."""

    def write(self, data: Any) -> int:
        return len(data)


class _TrialPickler(DefinitionPickler):
    """Pickles to nowhere, to find the definitions in a value."""

    def __init__(self, collector: DefinitionCollector) -> None:
        super().__init__(_NullFile(), protocol=5, buffer_callback=lambda _: False)
        self._collector = collector
        self.found: list[Any] = []
        self.mentioned: dict[int, Any] = {}
        self.imports: dict[str, None] = {}
        self.callables: dict[int, Any] = {}
        self.forward: list[str] = []
        self.named: list[str] = []
        self.by_name: list[_ByName] = []

    def reduce_definition(self, obj: Any) -> Any:
        known = self._collector.known
        if known is not None and (reference := known.reduce_known(obj)) is not None:
            return reference
        missing = _missing(obj) if isinstance(obj, type) else None
        if missing is not None:
            raise pickle.PicklingError(f"{obj!r} is made from {missing!r}, which can't be imported by its name")
        return self._note(obj)

    def reduce_module(self, obj: types.ModuleType) -> Any:
        self._collector.module_namespace(obj)
        return self._note(obj)

    def _note(self, obj: Any) -> Any:
        self.mentioned[id(obj)] = obj
        if self._collector.add(obj):
            self.found.append(obj)
        return _nothing, ()

    def note_import(self, module_name: str) -> None:
        self.imports[module_name] = None

    def note_partial(self, obj: Any) -> None:
        self.callables[id(obj)] = obj

    def reduce_by_name(self, obj: Any, name: str) -> Any:
        self.by_name.append(_ByName(obj, name))

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is typing.ForwardRef:
            self.forward += names_in_annotation(obj.__forward_arg__)
        elif type(obj).__module__ == "gymnasium.envs.registration":
            entry_point = getattr(obj, "entry_point", None)
            if isinstance(entry_point, str) and entry_point.startswith(tuple(f"{name}:" for name in MAIN_NAMES)):
                self.named.append(entry_point.partition(":")[2].partition(".")[0])
        return super().reducer_override(obj)


def _nothing() -> None:
    """Stand for a definition in a trial."""
