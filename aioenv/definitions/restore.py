"""Step 3 of a snapshot: `restore` makes its definitions in a worker, under their own names in `__main__`."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import linecache
import mmap
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from aioenv.definitions.rebuild import run_hook
from aioenv.definitions.table import DefinitionTable, LiveTable, find_table, set_current_table
from aioenv.errors import UnsendableError

__all__ = [
    "Code",
    "CodeMemory",
    "CodePart",
    "CommonReference",
    "FactoryReference",
    "MainModule",
    "ModuleLocation",
    "explain",
    "load_late_definition",
    "local_common",
    "local_factories",
    "make_transient",
    "namespace_module",
    "namespace_values",
    "restore",
    "worker_global",
]


class MainModule(NamedTuple):
    """The attributes of the parent's main module."""

    name: str  # "__mp_main__" in a process that multiprocessing has spawned
    file: str | None
    package: str | None
    spec: tuple[str, str | None] | None  # name and origin, of `python -m`


class ModuleLocation(NamedTuple):
    """The place of a module that the worker may not find by itself."""

    file: str | None
    package: tuple[str, ...] | None  # the search path of a package; None: the module is no package


class CodeMemory(NamedTuple):
    """Memory of the parent with the pickles and buffers that are too large for a message."""

    path: str
    size: int


class CodePart(NamedTuple):
    """A series of pickles and their buffers: bytes, or offset and size in the memory, and whether it is read-only."""

    pickles: bytes | tuple[int, int]
    buffers: Sequence[tuple[int, int, bool] | bytes]


class Code(NamedTuple):
    """Everything that a worker needs to make its envs: a snapshot of definitions, and its own factories."""

    token: bytes
    live: slice | None = None  # the factories of a worker that is a thread of its parent: it needs no snapshot
    main: MainModule | None = None
    modules: tuple[str, ...] = ()  # modules beside the main one whose definitions travel by value
    located: Sequence[tuple[str, ModuleLocation]] = ()
    lines: Sequence[tuple[str, list[str]]] = ()  # source code that is in no file, by file name
    place: CodeMemory | None = None
    entries: Sequence[tuple[str, str, str]] = ()  # kind, name and user of each entry, for errors
    definitions: CodePart = CodePart(b"", ())
    factories: CodePart = CodePart(b"", ())
    pattern: tuple[int, ...] = ()  # the number of each row's factory
    common: str | None = None  # the name of the object that all workers have, number 0 of the factories
    specs: Sequence[tuple[str, CodePart]] = ()  # registered specs that refer to definitions, by id


TOKEN_BYTES = 16  # the memory begins with the token of the table


def explain(kind: str, name: str, user: str) -> str:
    """Name a value that a definition needs, and its user, for errors."""
    if kind == "global":
        return f"global {name}, used by {user}"
    if kind == "cell":
        return f"closure variable {name} of {user}"
    return f"module {name}, used by {user}" if kind == "submodule" else f"{user}.{name}"


class FactoryReference(Sequence[Any]):
    """Refers to the factories of a worker, or to one of them; in the worker it unpickles as those."""

    def __init__(self, number: int | None = None) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return local_factories, (self._number,)

    def __len__(self) -> int:
        raise TypeError("these factories are in a worker")

    def __getitem__(self, row: Any) -> Any:
        raise TypeError("these factories are in a worker")


class CommonReference:
    """Refers to the object that all workers of a snapshot have; in a worker it unpickles as that object."""

    def __reduce__(self) -> Any:
        return local_common, ()


class _State(threading.local):
    """The state of one worker, which may be a thread."""

    factories: Any = ()
    common: Any = None
    namespaces: dict[int, dict[str, Any]] | None = None  # while definitions are loaded
    modules: dict[str, types.ModuleType] | None = None
    private_main: dict[str, Any] | None = None


_state = _State()


def local_factories(number: int | None = None) -> Any:
    """Return the factories of this worker, or one of them."""
    return _state.factories if number is None else _state.factories[number]


def local_common() -> Any:
    """Return the object that all workers of this one's vector env have."""
    return _state.common


class LazyFactories:
    """The factories of a worker's rows, each unpickled on first use.

    Args:
        load: unpickles the next one.
        pattern: for each row the number of its factory; a new number is the next one.
    """

    def __init__(self, load: Callable[[], Any], pattern: Sequence[int]) -> None:
        self._load = load
        self._pattern = pattern
        self._loaded: list[Any] = []

    def __len__(self) -> int:
        return len(self._pattern)

    def __getitem__(self, row: int) -> Any:
        return self.numbered(self._pattern[row])

    def numbered(self, number: int) -> Any:
        """Return the factory of this number."""
        while number >= len(self._loaded):
            self._loaded.append(self._load())
        return self._loaded[number]

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))


def restore(code: Code) -> dict[str, Any]:
    """Make the definitions of a snapshot, and the factories that `local_factories` returns.

    Returns:
        Registered specs that refer to definitions, by id; a spec that could not be sent is replaced by the reason.

    Raises:
        UnsendableError: if a value that a definition needs does not unpickle; the message names it.
        Exception: any other exception of unpickling.
    """
    if code.live is not None:
        live = find_table(code.token)
        assert isinstance(live, LiveTable)
        set_current_table(live)
        _state.factories = live.factories[code.live]
        _state.common = live.common
        return {}
    table = DefinitionTable(code.token, code.modules)
    _set_up_main_module(code.main)
    if code.located:
        sys.meta_path.append(_NamespaceFinder(dict(code.located)))
    for name, lines in code.lines:
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    memory = None if code.place is None else _map(code.place, code.token)
    readers = [_open(part, memory) for part in (code.definitions, code.factories)]
    buffers = [buffer for _, each in readers for buffer in each]
    unpickler = pickle.Unpickler(_Reader([data for data, _ in readers]), buffers=buffers)
    _state.modules = {}
    _load_definitions(unpickler.load, code.entries, table)
    set_current_table(table)
    specs = {env_id: _load_with_memo(unpickler, part, memory) for env_id, part in code.specs}
    _state.factories = factories = LazyFactories(unpickler.load, code.pattern)
    if code.common is not None:
        try:
            _state.common = factories.numbered(0)
        except Exception as exc:
            raise UnsendableError(f"{code.common} {_not_loaded(exc)}") from exc
    return specs


def _not_loaded(exc: Exception) -> str:
    return f"could not be loaded in the worker: {type(exc).__name__}: {exc}"


def _set_up_main_module(main: MainModule | None) -> None:
    """Give this process's main module the attributes of the parent's."""
    module = sys.modules["__main__"]
    sys.modules["__mp_main__"] = module
    values = vars(module)
    for name in ("sys", "main"):  # names of the command that started this process
        values.pop(name, None)
    if main is None:
        return
    values["__name__"] = main.name
    if main.file is not None:
        values["__file__"] = main.file
    values["__package__"] = main.package
    if main.spec is not None:
        name, origin = main.spec
        spec = values["__spec__"] = importlib.machinery.ModuleSpec(name, None, origin=origin)
        spec.has_location = origin is not None


class _NamespaceFinder:
    """Finds modules where the parent found them, if no other finder does."""

    def __init__(self, located: dict[str, ModuleLocation]) -> None:
        self._located = located

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        found = self._located.get(name)
        if found is None:
            return None
        if found.file is None:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = list(found.package or ())
            return spec
        where = None if found.package is None else list(found.package)
        return importlib.util.spec_from_file_location(name, found.file, submodule_search_locations=where)


# ------------------------------------------------------------ reading


def _map(place: CodeMemory, token: bytes) -> memoryview:
    """Map the parent's memory privately (copy-on-write)."""
    try:
        fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise UnsendableError(f"the parent's memory with the factories can't be opened: {exc}") from exc
    try:
        memory = memoryview(mmap.mmap(fd, place.size, access=mmap.ACCESS_COPY))
    finally:
        os.close(fd)
    if memory[:TOKEN_BYTES] != token:
        raise UnsendableError("the parent's memory with the factories is gone")
    return memory


def _open(part: CodePart, memory: memoryview | None) -> tuple[Any, list[Any]]:
    """Return the pickles of a part, and its buffers."""

    def view(offset: int, size: int, readonly: bool) -> Any:
        assert memory is not None
        found = memory[offset : offset + size]
        return found.toreadonly() if readonly else found

    pickles = part.pickles if isinstance(part.pickles, bytes) else view(*part.pickles, True)
    return pickles, [bytearray(each) if isinstance(each, bytes) else view(*each) for each in part.buffers]


class _Reader:
    """Reads several buffers as one file."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._files = [io.BytesIO(part) if isinstance(part, bytes) else _ViewFile(part) for part in parts]

    def _next(self, method: str, argument: tuple[Any, ...]) -> bytes:
        while self._files:
            data: bytes = getattr(self._files[0], method)(*argument)
            if data or argument == (0,):
                return data
            self._files.pop(0)
        return b""

    def read(self, size: int) -> bytes:
        return self._next("read", (size,))

    def readline(self) -> bytes:
        return self._next("readline", ())


class _ViewFile:
    """Reads a buffer as a file, zero-copy."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def read(self, size: int) -> Any:
        data = self._view[self._at : self._at + size]
        self._at += len(data)
        return bytes(data)

    def readline(self) -> bytes:
        end = self._at
        while end < len(self._view) and self._view[end] != 10:
            end += 1
        return bytes(self.read(end + 1 - self._at))


def _load_definitions(
    load: Callable[[], Any], entries: Sequence[tuple[str, str, str]], table: DefinitionTable, *, keeps: bool = False
) -> list[Any]:
    """Load definitions into the table and their namespaces; with `keeps`, existing globals stay."""
    before, _state.namespaces = _state.namespaces, {}
    try:
        definitions: list[Any] = load()  # without their entries
        for entry in entries:
            try:
                kind, target, name, value = load()
            except Exception as exc:
                raise UnsendableError(f"{explain(*entry)}, {_not_loaded(exc)}") from exc
            if not (keeps and kind == "global" and name in target):
                _apply(kind, target, name, value)
        listed, registries, hooked = load()
    finally:
        _state.namespaces = before
    for number, value in listed:
        if number >= 0:
            table.add(number, value)
    for cls, registered in registries:
        for subclass in registered:
            cls.register(subclass)
    for cls in hooked:
        run_hook(cls)
    return definitions


def _apply(kind: str, target: Any, name: str, value: Any) -> None:
    if kind == "global":
        target[name] = value
    elif kind == "class":
        type.__setattr__(target, name, value)
    elif kind == "cell":
        target.cell_contents = value
    elif kind == "function":
        if name == "__dict__":
            vars(target).update(value)
        else:
            setattr(target, name, value)


def _load_with_memo(unpickler: pickle.Unpickler, part: CodePart, memory: memoryview | None) -> Any:
    """Load a value that refers to objects loaded before; if it does not unpickle, return the reason."""
    pickles, buffers = _open(part, memory)
    # the C unpickler can't start with another's memo
    reader: Any = pickle._Unpickler(io.BytesIO(pickles), buffers=buffers)
    reader.memo = dict(unpickler.memo.copy())
    try:
        return reader.load()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


# ------------------------------------------------------------ functions that pickles call


def namespace_values(kind: str, name: str, number: int) -> dict[str, Any]:
    """Return the globals of functions."""
    if kind == "main":
        return vars(sys.modules["__main__"])
    if kind == "import":
        __import__(name)
        return vars(sys.modules[name])
    if kind == "module":
        return vars(namespace_module(kind, name))
    assert _state.namespaces is not None
    return _state.namespaces.setdefault(number, {"__name__": name, "__builtins__": builtins})


def namespace_module(kind: str, name: str) -> types.ModuleType:
    """Return a module that this process can't import, or must not."""
    if kind == "main":
        return sys.modules["__main__"]
    if _state.modules is None:
        _state.modules = {}
    if name not in _state.modules:
        _state.modules[name] = types.ModuleType(name)
    return _state.modules[name]


def load_late_definition(token: bytes, number: int, code: tuple[Any, ...]) -> Any:
    """Return a definition that was made, or first mentioned, after the snapshot was taken.

    Args:
        token: of the table.
        number: of the definition.
        code: pickles that make it if this process does not have it, and a description of their entries.
    """
    table = find_table(token)
    if not table.has(number):
        pickles, entries = code
        _load_definitions(pickle.Unpickler(io.BytesIO(pickles)).load, entries, table, keeps=True)
    return table.get(number)


def make_transient(token: bytes, index: int, code: tuple[Any, ...]) -> Any:
    """Make a function that came after the snapshot, for one message; no table keeps it.

    Args:
        token: of the table.
        index: its index among the definitions that the pickles make.
        code: pickles that make it, and a description of their entries.
    """
    pickles, entries = code
    load = pickle.Unpickler(io.BytesIO(pickles)).load
    return _load_definitions(load, entries, find_table(token), keeps=True)[index]


def worker_global(name: str, *value: Any) -> Any:
    """Return a global of this process's main module; if it does not exist, set it to `value`."""
    values = vars(sys.modules["__main__"])
    return values.setdefault(name, *value) if value else values[name]
