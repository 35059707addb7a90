"""`CodeSnapshot`: the code of one vector env, taken in the parent for its workers."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Self

import cloudpickle
import numpy as np

from aioenv.definitions.collect import DefinitionCollector, Root
from aioenv.definitions.emit import DefinitionEmitter, source_lines
from aioenv.definitions.parent_table import ParentTable
from aioenv.definitions.pickling import main_module
from aioenv.definitions.restore import TOKEN_BYTES, Code, CodeMemory, CodePart, MainModule, ModuleLocation
from aioenv.definitions.table import DefinitionTable, LiveTable

__all__ = ["CAN_SHARE", "CodeSnapshot", "SnapshotMemory"]

CAN_SHARE = hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")
_ALIGN = 4096


class SnapshotMemory:
    """Memory for pickles and buffers that are too large for messages: written once, and mapped by every worker.

    Each buffer is in it once. The mappings of workers outlive it.

    Args:
        token: the memory begins with it.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._pieces: list[tuple[int, Any]] = []  # offset and bytes, until they are written
        self._known: dict[tuple[int, int], tuple[int, int, bool]] = {}
        self._size = TOKEN_BYTES

    def add(self, view: memoryview) -> tuple[int, int, bool]:
        """Add a buffer; return its offset, its size, and whether it is read-only."""
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        key = address, view.nbytes
        if key not in self._known:
            self._known[key] = (*self.append(view), view.readonly)
        offset, size, _ = self._known[key]
        return offset, size, view.readonly

    def append(self, data: Any) -> tuple[int, int]:
        """Add bytes; return their offset and their size."""
        offset = -(-self._size // _ALIGN) * _ALIGN
        self._pieces.append((offset, data))
        self._size = offset + len(data)
        return offset, len(data)

    def finish(self) -> CodeMemory | None:
        """Write everything; return where it is, or None if there is nothing.

        Raises:
            OSError: if there is not enough memory.
        """
        if not self._pieces:
            return None
        fd = os.memfd_create("aioenv-code", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, self._size)
        for offset, data in ((0, self._token), *self._pieces):
            _write(fd, data, offset)
        self._pieces, self._known = [], {}
        return CodeMemory(f"/proc/{os.getpid()}/fd/{fd}", self._size)


def _write(fd: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(fd, view[: 1 << 30], offset)
        view, offset = view[written:], offset + written


# Buffers and pickles of at least this many bytes lie in memory that workers map.
_LARGE_BUFFER = 1 << 16
_LARGE_PICKLE = 1 << 20


class CodeSnapshot:
    """A snapshot of the factories of a vector env, and of all definitions that they reach.

    The constructor takes it; later changes in the script do not affect it. It holds memory until the last reference to
    it is gone. Copies share that memory; unpickling takes a new snapshot.

    Args:
        factories: functions, one for each row of any worker; or other objects for workers (see `FactoryReference`).
        spans: the first row of each worker, and the one after its last.
        names: globals of the main module that workers need, too: registered specs name them.
        specs: registered specs that refer to definitions of the script, by id.
        live: whether workers are threads of this process, which get the objects themselves.

    Attributes:
        table: the definitions that messages refer to.
        factories: as given.

    Raises:
        TypeError: if a factory can't be sent; the message has its number.
    """

    def __init__(
        self,
        factories: Sequence[Any],
        spans: Sequence[tuple[int, int]],
        *,
        names: Iterable[str] = (),
        specs: Sequence[tuple[str, Any]] = (),
        live: bool = False,
    ) -> None:
        self.factories = list(factories)
        self._spans, self._names, self._specs = spans, tuple(names), tuple(specs)
        token = secrets.token_bytes(TOKEN_BYTES)
        if live:
            self.table: DefinitionTable = LiveTable(token, factories)
            _trial_pickle_live(factories)
            return
        self.table = table = ParentTable(token)
        self._memory = SnapshotMemory(token)
        self._codes = _SnapshotWriter(table, self._memory, self._names, self._specs).write(factories, spans)

    def code(self, worker: int) -> Code:
        """Return the code of a worker; it is valid as long as this snapshot exists."""
        if isinstance(self.table, LiveTable):
            return Code(self.table.token, slice(*self._spans[worker]))
        return self._codes[worker]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        made_from = self.factories, self._spans, self._names, self._specs, isinstance(self.table, LiveTable)
        return _retake, (_dump_by_value(made_from),)


def _trial_pickle_live(factories: Sequence[Any]) -> None:
    """Pickle live factories on trial, so that shared statistics among their arguments are recorded."""
    collector = DefinitionCollector()
    for factory in {id(f): f for f in factories}.values():
        with contextlib.suppress(Exception):
            collector.reach(factory)


class _SnapshotWriter:
    """Takes one snapshot.

    Args:
        table: gets the definitions.
        memory: for large pickles and buffers.
        names, specs: see `CodeSnapshot`.
    """

    def __init__(
        self, table: ParentTable, memory: SnapshotMemory, names: Sequence[str], specs: Sequence[tuple[str, Any]]
    ) -> None:
        self._table, self._memory = table, memory
        self._main = _main()
        self._collector = DefinitionCollector()
        self._collected: dict[tuple[int, ...], _CollectedDefinitions] = {}
        self._factory_parts: dict[tuple[int, ...], CodePart] = {}
        self._registered, self._specs = self._reach_registered(names, specs)

    def write(self, factories: Sequence[Any], spans: Sequence[tuple[int, int]]) -> list[Code]:
        """Return the code of each worker."""
        roots = self._reach(factories)
        codes = [self._code(factories, roots, start, stop) for start, stop in spans]
        place, located = self._memory.finish(), _module_locations(self._collector.imports)
        return [code._replace(place=place, located=located) for code in codes]

    def _reach_registered(
        self, names: Sequence[str], specs: Sequence[tuple[str, Any]]
    ) -> tuple[list[Root], list[tuple[str, Any]]]:
        """Collect the definitions that registered specs reach; a spec that can't be sent is replaced by the reason."""
        roots = [self._collector.reach_global(name) for name in names]
        sent = []
        for env_id, spec in specs:
            try:
                roots.append(self._collector.reach(spec))
                sent.append((env_id, spec))
            except Exception as exc:
                sent.append((env_id, f"{exc}"))
        return roots, sent

    def _reach(self, factories: Sequence[Any]) -> dict[int, Root]:
        """Collect the definitions that factories reach; return their roots by id."""
        roots: dict[int, Root] = {}
        for index, factory in enumerate(factories):
            if id(factory) in roots:
                continue
            try:
                roots[id(factory)] = self._collector.reach(factory)
            except Exception as exc:
                raise _unsendable(index, f"{exc}") from exc
            if isinstance(factory, types.FunctionType):
                self._check_own_values(factory, index)
        return roots

    def _check_own_values(self, factory: types.FunctionType, index: int) -> None:
        """Raise a TypeError if a factory's own closure can't be sent: it would fail as soon as it is called."""
        cells = factory.__closure__ or ()
        for entry in self._collector.entries_of(factory):
            if entry.error is not None and any(entry.target is cell for cell in cells):
                raise _unsendable(index, f"{entry.describe()}: {entry.error}")

    def _code(self, factories: Sequence[Any], roots: dict[int, Root], start: int, stop: int) -> Code:
        mine = factories[start:stop]
        distinct = {id(factory): factory for factory in mine}
        collected = self._collect([roots[key] for key in distinct])
        number = {key: index for index, key in enumerate(distinct)}
        part = self._factory_parts.get(tuple(distinct))
        if part is None:
            emitter, large = self._emitter(after=collected.emitter)
            for key, factory in distinct.items():
                try:
                    emitter.dump(factory)
                except Exception as exc:
                    raise _unsendable([id(f) for f in factories].index(key), f"{exc}") from exc
            part = self._factory_parts[tuple(distinct)] = self._memory_part(emitter, large)
        return collected.code._replace(factories=part, pattern=tuple(number[id(factory)] for factory in mine))

    def _collect(self, roots: Sequence[Root]) -> _CollectedDefinitions:
        """Return the definitions that some factories need: written once for all workers with the same needs."""
        collector = self._collector
        key = tuple(sorted({*chain(*map(collector.direct_needs, roots))}))
        if key in self._collected:
            return self._collected[key]
        selection = collector.select([*roots, *self._registered])
        emitter, large = self._emitter()
        entries = emitter.emit_definitions(selection, self._table.ensure_number)
        part = self._memory_part(emitter, large)
        self._table.record(selection, collector.imports)
        code = Code(
            self._table.token,
            None,
            self._main,
            tuple(n.name for n in collector.namespaces.values() if n.kind == "module"),
            lines=[*source_lines(selection.definitions).items()],
            entries=entries,
            definitions=part,
            specs=[(env_id, self._spec_part(emitter, spec)) for env_id, spec in self._specs],
        )
        found = self._collected[key] = _CollectedDefinitions(emitter, code)
        return found

    def _spec_part(self, after: DefinitionEmitter, spec: Any) -> CodePart:
        emitter, large = self._emitter(after=after)
        emitter.dump(spec)
        return self._memory_part(emitter, large)

    def _emitter(self, after: DefinitionEmitter | None = None) -> tuple[DefinitionEmitter, list[pickle.PickleBuffer]]:
        large: list[pickle.PickleBuffer] = []

        def on_buffer(buffer: pickle.PickleBuffer) -> bool:
            if not CAN_SHARE or buffer.raw().nbytes < _LARGE_BUFFER:
                return True  # it stays in the pickle
            large.append(buffer)
            return False

        return DefinitionEmitter(self._collector, on_buffer, after), large

    def _memory_part(self, emitter: DefinitionEmitter, large: list[pickle.PickleBuffer]) -> CodePart:
        memory = self._memory
        data = emitter.file.getvalue()
        buffers = [memory.add(buffer.raw()) for buffer in large]
        return CodePart(memory.append(data) if CAN_SHARE and len(data) >= _LARGE_PICKLE else data, buffers)


def _dump_by_value(value: Any) -> bytes:
    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def _retake(data: bytes) -> CodeSnapshot:
    factories, spans, names, specs, live = pickle.loads(data)
    return CodeSnapshot(factories, spans, names=names, specs=specs, live=live)


class _CollectedDefinitions:
    """Definitions that some workers share."""

    def __init__(self, emitter: DefinitionEmitter, code: Code) -> None:
        self.emitter, self.code = emitter, code


def _unsendable(index: int, reason: str) -> TypeError:
    return TypeError(
        f"env_fns[{index}] can't be sent to a worker, something that it refers to does not pickle: {reason}"
    )


def _main() -> MainModule:
    module = main_module()
    spec = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None)
    return MainModule(
        str(getattr(module, "__name__", "__main__")),
        file if isinstance(file, str) else None,
        getattr(module, "__package__", None),
        None if spec is None else (spec.name, spec.origin),
    )


def _module_locations(names: Iterable[str]) -> list[tuple[str, ModuleLocation]]:
    """Return the places of modules that are not found below `sys.path`, and of the packages above them."""
    found: dict[str, ModuleLocation] = {}
    for name in names:
        module = sys.modules.get(name)
        file = getattr(getattr(module, "__spec__", None), "origin", None)
        if not isinstance(file, str) or not file.endswith(".py") or _is_below_path(name, file):
            continue
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            prefix = ".".join(parts[:end])
            above = sys.modules.get(prefix)
            origin = getattr(getattr(above, "__spec__", None), "origin", None)
            inside = getattr(above, "__path__", None)
            package = tuple(map(str, inside)) if inside is not None else (() if end < len(parts) else None)
            found[prefix] = ModuleLocation(
                origin if isinstance(origin, str) and origin.endswith(".py") else None, package
            )
    return [*found.items()]


def _is_below_path(name: str, file: str) -> bool:
    relative = name.replace(".", os.sep)
    where = os.path.abspath(file)
    for entry in sys.path:
        if isinstance(entry, str):
            base = os.path.join(os.path.abspath(entry or "."), relative)
            if where in (f"{base}.py", os.path.join(base, "__init__.py")):
                return True
    return False
