"""In a worker: the definitions of a snapshot, under their names in this process's `__main__`."""

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
from aioenv.definitions.table import DefinitionTable, LiveTable, find, use
from aioenv.errors import UnsendableError

__all__ = [
    "Code",
    "CodePart",
    "Located",
    "MainModule",
    "Place",
    "Shipped",
    "explain",
    "late",
    "make_transient",
    "namespace_module",
    "namespace_values",
    "restore",
    "shipped",
    "worker_global",
]


class MainModule(NamedTuple):
    """The attributes of the parent's main module."""

    name: str  # "__mp_main__" in a process that multiprocessing has spawned
    file: str | None
    package: str | None
    spec: tuple[str, str | None] | None  # name and origin, of `python -m`


class Located(NamedTuple):
    """Where a module is that the worker may not find by itself."""

    file: str | None
    package: tuple[str, ...] | None  # where the modules of a package are; None: it is none


class Place(NamedTuple):
    """Memory of the parent with pickles and buffers that are too large for a message."""

    path: str
    size: int


class CodePart(NamedTuple):
    """A series of pickles, and their buffers: bytes, or where they are in the place, and whether they are read-only."""

    pickles: bytes | tuple[int, int]
    buffers: Sequence[tuple[int, int, bool] | bytes]


class Code(NamedTuple):
    """All that a worker needs to make its envs: a snapshot of definitions, and its own factories."""

    token: bytes
    live: slice | None = None  # of the factories of a worker that is a thread of its parent, which has no snapshot
    main: MainModule | None = None
    modules: tuple[str, ...] = ()  # whose definitions travel by value, beside the main one
    located: Sequence[tuple[str, Located]] = ()
    lines: Sequence[tuple[str, list[str]]] = ()  # source that is in no file
    place: Place | None = None
    entries: Sequence[tuple[str, str, str]] = ()  # of what the definitions need: kind, name, user
    definitions: CodePart = CodePart(b"", ())
    factories: CodePart = CodePart(b"", ())
    pattern: tuple[int, ...] = ()  # for each row the number of its factory
    specs: Sequence[tuple[str, CodePart]] = ()  # registered ones that refer to definitions, by id


HEAD = 16  # a place begins with its table's token


def explain(kind: str, name: str, user: str) -> str:
    """Name a value that a definition needs, and its user, for errors."""
    if kind == "global":
        return f"global {name}, used by {user}"
    if kind == "cell":
        return f"closure variable {name} of {user}"
    return f"module {name}, used by {user}" if kind == "submodule" else f"{user}.{name}"


class Shipped(Sequence[Any]):
    """Stands for the factories of a worker, or one of them, in what its parent sends beside them."""

    def __init__(self, number: int | None = None) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return shipped, (self._number,)

    def __len__(self) -> int:
        raise TypeError("these factories are in a worker")

    def __getitem__(self, row: Any) -> Any:
        raise TypeError("these factories are in a worker")


class _State(threading.local):
    """Of one worker, which may be a thread."""

    factories: Any = ()
    namespaces: dict[int, dict[str, Any]] | None = None  # while definitions are loaded
    modules: dict[str, types.ModuleType] | None = None
    private_main: dict[str, Any] | None = None


_state = _State()


def shipped(number: int | None = None) -> Any:
    """The factories of this worker, or one of them."""
    return _state.factories if number is None else _state.factories[number]


class Factories:
    """The factories of a worker's rows, each unpickled when it is first asked for.

    Args:
        load: gives one after the other.
        pattern: for each row the number of its factory; a new number is the next one.
    """

    def __init__(self, load: Callable[[], Any], pattern: Sequence[int]) -> None:
        self._load = load
        self._pattern = pattern
        self._loaded: list[Any] = []

    def __len__(self) -> int:
        return len(self._pattern)

    def __getitem__(self, row: int) -> Any:
        number = self._pattern[row]
        while number >= len(self._loaded):
            self._loaded.append(self._load())
        return self._loaded[number]

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))


def restore(code: Code) -> dict[str, Any]:
    """Make the definitions of a snapshot, and have `shipped` give this worker's factories.

    Returns:
        Registered specs that refer to definitions, by id; in place of one that could not be sent the reason, a text.

    Raises:
        UnsendableError: if something that a definition needs does not unpickle; it says what.
        Exception: whatever else unpickling raises.
    """
    if code.live is not None:
        live = find(code.token)
        assert isinstance(live, LiveTable)
        use(live)
        _state.factories = live.factories[code.live]
        return {}
    table = DefinitionTable(code.token, code.modules)
    _become(code.main)
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
    use(table)
    specs = {env_id: _load_after(unpickler, part, memory) for env_id, part in code.specs}
    _state.factories = Factories(unpickler.load, code.pattern)
    return specs


def _become(main: MainModule | None) -> None:
    """Have this process's main module look like its parent's."""
    module = sys.modules["__main__"]
    sys.modules["__mp_main__"] = module
    values = vars(module)
    for name in ("sys", "main"):  # of the command that has started this process
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
    """Finds modules where the parent has found them, if nobody else does."""

    def __init__(self, located: dict[str, Located]) -> None:
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


def _map(place: Place, token: bytes) -> memoryview:
    """A private mapping of the parent's memory: a page is copied when it is first written to."""
    try:
        fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise UnsendableError(f"the parent's memory with the factories can't be opened: {exc}") from exc
    try:
        memory = memoryview(mmap.mmap(fd, place.size, access=mmap.ACCESS_COPY))
    finally:
        os.close(fd)
    if memory[:HEAD] != token:
        raise UnsendableError("the parent's memory with the factories is gone")
    return memory


def _open(part: CodePart, memory: memoryview | None) -> tuple[Any, list[Any]]:
    """The pickles of a part, and its buffers."""

    def view(offset: int, size: int, readonly: bool) -> Any:
        assert memory is not None
        found = memory[offset : offset + size]
        return found.toreadonly() if readonly else found

    pickles = part.pickles if isinstance(part.pickles, bytes) else view(*part.pickles, True)
    return pickles, [bytearray(each) if isinstance(each, bytes) else view(*each) for each in part.buffers]


class _Reader:
    """Several buffers as one file."""

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
    """A buffer as a file, without a copy of it."""

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
    """Load definitions into the table and their namespaces; with `keeps` globals that are there already stay."""
    before, _state.namespaces = _state.namespaces, {}
    try:
        definitions: list[Any] = load()  # empty
        for entry in entries:
            try:
                kind, target, name, value = load()
            except Exception as exc:
                raise UnsendableError(
                    f"{explain(*entry)}, could not be loaded in the worker: {type(exc).__name__}: {exc}"
                ) from exc
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


def _load_after(unpickler: pickle.Unpickler, part: CodePart, memory: memoryview | None) -> Any:
    """A value that refers to what was loaded, and to which nothing later refers; if it does not unpickle, why."""
    pickles, buffers = _open(part, memory)
    # the C unpickler can't go on from another's memo
    reader: Any = pickle._Unpickler(io.BytesIO(pickles), buffers=buffers)
    reader.memo = dict(unpickler.memo.copy())
    try:
        return reader.load()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


# ------------------------------------------------------------ called by pickles


def namespace_values(kind: str, name: str, number: int) -> dict[str, Any]:
    """The globals of functions."""
    if kind == "main":
        return vars(sys.modules["__main__"])
    if kind == "import":
        __import__(name)
        return vars(sys.modules[name])
    if kind == "module":
        return vars(namespace_module(kind, name, number))
    assert _state.namespaces is not None
    return _state.namespaces.setdefault(number, {"__name__": name, "__builtins__": builtins})


def namespace_module(kind: str, name: str, number: int) -> types.ModuleType:
    """A module that this process can't import, or is not to."""
    if kind == "main":
        return sys.modules["__main__"]
    if _state.modules is None:
        _state.modules = {}
    if name not in _state.modules:
        _state.modules[name] = types.ModuleType(name)
    return _state.modules[name]


def late(token: bytes, number: int, code: tuple[Any, ...]) -> Any:
    """A definition that was made, or is first mentioned, after the snapshot was taken.

    Args:
        token: of the table.
        number: of the definition.
        code: how to make it, if this process does not have it: pickles, and their entries.
    """
    table = find(token)
    if not table.has(number):
        pickles, entries = code
        _load_definitions(pickle.Unpickler(io.BytesIO(pickles)).load, entries, table, keeps=True)
    return table.definition(number)


def make_transient(token: bytes, index: int, code: tuple[Any, ...]) -> Any:
    """Make a function that came after the snapshot, for one message; no table keeps it.

    Args:
        token: of the table.
        index: its place among the definitions that come with it.
        code: pickles, and their entries.
    """
    pickles, entries = code
    load = pickle.Unpickler(io.BytesIO(pickles)).load
    return _load_definitions(load, entries, find(token), keeps=True)[index]


def worker_global(name: str, *value: Any) -> Any:
    """The value of a name in this process's main module; if it has none, the one that is given."""
    values = vars(sys.modules["__main__"])
    return values.setdefault(name, *value) if value else values[name]
