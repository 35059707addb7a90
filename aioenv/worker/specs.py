"""Send specs between processes: an env's spec to the parent, and Gymnasium's registry to a worker.

An env's spec goes to the parent without copies of large values: the parent puts in its own, which are equal.

With the registry `gym.make("MyEnv-v0")` works in a factory. Ids that a script or a notebook registers are unknown to a
new process. The parent sends all entries, each pickled by itself, with a digest. A worker whose own registry has the
same digest, as most do, unpickles nothing; another one unpickles only the entries that differ. (A fork server pickles
its entries once for all of its workers.)
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import inspect
import pickle
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, NoReturn

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import Wrapper
from gymnasium.envs.registration import EnvSpec

from aioenv.errors import WireError
from aioenv.ipc.messages import dump, load
from aioenv.worker.making import NAMESPACE, is_our_entry_point

__all__ = [
    "OmittedValue",
    "Registry",
    "capture_registry",
    "read_registry",
    "register_specs",
    "restore_registry",
    "restore_values",
    "spec_without_values",
]


LARGE = 1 << 16  # bytes from which on a value is not sent
_LONG = 1 << 13  # elements from which on a list is not searched
_MOST = 20_000  # objects that are searched for a value
_PIECE = 1 << 20  # bytes of an array that is not contiguous, copied at a time
_ABSENT = object()  # the value of an attribute that an object does not have

# values that deep copies share, or copy quickly
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType, np.generic, Enum)


class _Kind(NamedTuple):
    """The type and size of a large value; values of different kinds are not equal."""

    name: str
    layout: tuple[Any, ...]  # of an array: dtype, shape, and "by columns" if its columns are contiguous
    size: int  # in bytes


class OmittedValue:
    """Stands for a large value of a spec that stayed in the worker, since the parent has no equal value.

    Arrays, strings and bytes of 64 KiB or more among the arguments of a spec are not sent. The parent puts in those
    that the vector env was made with. This object is left where a factory made the value itself, or the env changed it.
    """

    def __init__(self, kind: _Kind, digest: bytes) -> None:
        self._kind = kind
        self._digest = digest

    def __repr__(self) -> str:
        name, layout, size = self._kind
        return f"<OmittedValue: {' '.join(map(str, (name, *layout)))}, {size} bytes, stayed in the worker>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols of copies and pickles
            raise AttributeError(name)
        raise AttributeError(f"{self!r} has no {name!r}: pass the value itself, as in gymnasium.make(spec, name=value)")

    def __array__(self, *args: Any, **kwargs: Any) -> npt.NDArray[Any]:
        raise TypeError(f"{self!r} is no array: pass the value itself, as in gymnasium.make(spec, name=value)")


# ------------------------------------------------------------ in the worker


def spec_without_values(env: Any) -> Any:
    """Return the spec of an env, with an `OmittedValue` in place of each large value of its arguments.

    Gymnasium copies the arguments once for each wrapper, and keeps the copies. So the env gets arguments that are not
    copied while its spec is built, and its own ones back afterwards.
    """
    try:
        with _uncopied(env):
            spec = env.spec
    except Exception:  # a spec that can't be set, or a wrapper that uses the values
        spec = env.spec
    return _with_arguments(spec, _omit)


class _Uncopied:
    """Wraps a value so that deep copies share it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> _Uncopied:
        return self


@contextmanager
def _uncopied(env: Any) -> Iterator[None]:
    """Keep the arguments of the env and its wrappers from being copied for the length of a block."""
    undo: list[Callable[[], None]] = []

    def replace(holder: Any, name: str, value: Any) -> None:
        before = getattr(holder, name, _ABSENT)
        inherited = before is inspect.getattr_static(type(holder), name, _ABSENT)
        setattr(holder, name, value)  # raises for a property that can't be set
        undo.append(partial(delattr, holder, name) if inherited else partial(setattr, holder, name, before))

    try:
        while isinstance(env, Wrapper):
            replace(env, "_cached_spec", None)
            if isinstance(recorded := own_attribute(env, "_saved_kwargs"), dict):  # by RecordConstructorArgs
                replace(env, "_saved_kwargs", _changed(recorded, _wrap))
            env = env.env
        if isinstance(env.spec, EnvSpec):
            replace(env, "spec", _with_arguments(env.spec, _wrap))
        yield
    finally:
        for back in reversed(undo):
            back()


def own_attribute(holder: Any, name: str) -> Any:
    """Return an attribute of the object itself and not of its class; None if it has none, or the class a property.

    `vars(holder)` would do that, too. But CPython then makes a dict of the attributes for good, and a step of CartPole
    takes a tenth longer.
    """
    inherited = inspect.getattr_static(type(holder), name, None)
    if hasattr(type(inherited), "__set__"):
        return None
    if hasattr(type(inherited), "__get__"):  # a cached property, say: the object's own attribute goes before it
        return getattr(holder, "__dict__", {}).get(name)
    try:
        value = object.__getattribute__(holder, name)
    except AttributeError:
        return None
    return None if value is inherited else value


def _wrap(value: Any) -> Any:
    small = isinstance(value, _PLAIN) or (type(value) is np.ndarray and value.nbytes < LARGE)
    return value if small else _Uncopied(value)


def _omit(value: Any) -> Any:
    if isinstance(value, _Uncopied):
        value = value.value
    kind = _kind(value)
    return value if kind is None else OmittedValue(kind, _digest(value))


# ------------------------------------------------------------ in the parent


def restore_values(spec: Any, factory: Any) -> Any:
    """Replace each `OmittedValue` of a spec by an equal value of this process, where there is one.

    The values are searched for in the factory's arguments, closure, attributes and globals, and in the registry's
    entry for the spec's id. Their contents are compared.
    """
    wanted: list[OmittedValue] = []
    _with_arguments(spec, lambda value: wanted.append(value) if isinstance(value, OmittedValue) else None)
    if not wanted:
        return spec
    missing = {(value._kind, value._digest) for value in wanted}
    kinds = {kind for kind, _ in missing}
    found: dict[tuple[_Kind, bytes], Any] = {}
    for value in _reachable([factory, gymnasium.registry.get(spec.id)]):
        kind = _kind(value)
        if kind is not None and kind in kinds and (key := (kind, _digest(value))) in missing:
            found[key] = value
            missing.remove(key)
            if not missing:
                break

    def restore(value: Any) -> Any:
        return found.get((value._kind, value._digest), value) if isinstance(value, OmittedValue) else value

    return _with_arguments(spec, restore)


def _reachable(roots: list[Any]) -> Iterator[Any]:
    """Yield the objects that others refer to, the nearest first, without running any of their code."""
    waiting, seen = deque(roots), set[int]()
    keep: list[Any] = []  # keeps seen objects alive, so that no id is reused
    while waiting and len(seen) < _MOST:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        keep.append(value)
        yield value
        waiting.extend(_parts(value))


def _parts(value: Any) -> Iterator[Any]:
    """Yield the objects that an object refers to; none for a module, since functions name the parts that they use."""
    kind = type(value)
    if kind in (str, bytes, bytearray, int, float, np.ndarray, ModuleType, CodeType):
        return
    if issubclass(kind, dict):
        yield from dict.values(value)
    elif kind in (list, tuple, set, frozenset) and len(value) <= _LONG:
        yield from value
    elif issubclass(kind, partial):
        yield from (value.func, value.args, value.keywords)
    elif kind is MethodType:
        yield from (value.__self__, value.__func__)
    elif kind is FunctionType:
        yield from _used(value)
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    yield from list(attributes.values())


def _used(function: FunctionType) -> Iterator[Any]:
    """Yield the closure of a function, its defaults, and the globals that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue
    yield from (function.__defaults__, function.__kwdefaults__)
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        part = function.__globals__[name]
        yield part
        if type(part) is ModuleType:
            yield from (vars(part)[attribute] for attribute in names & vars(part).keys())


def _names(code: CodeType) -> Iterator[str]:
    """Yield the globals and attributes that code names, nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# ------------------------------------------------------------ in both


def _with_arguments(spec: Any, change: Callable[[Any], Any]) -> Any:
    """Return a spec with changed arguments, those of its wrappers included; return any other object as it is."""
    if not isinstance(spec, EnvSpec):
        return spec
    new = copy.copy(spec)
    new.kwargs = _changed(spec.kwargs, change)
    new.additional_wrappers = tuple(_with_own_arguments(one, change) for one in spec.additional_wrappers)
    return new


def _with_own_arguments(wrapper: Any, change: Callable[[Any], Any]) -> Any:
    new = copy.copy(wrapper)
    object.__setattr__(new, "kwargs", _changed(wrapper.kwargs, change))  # it may be frozen
    return new


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change values within plain dicts, lists and tuples."""
    if type(value) is dict:
        return {key: _changed(part, change) for key, part in value.items()}
    if type(value) in (list, tuple) and len(value) <= _LONG:
        return type(value)([_changed(part, change) for part in value])
    return change(value)


def _kind(value: Any) -> _Kind | None:
    """Return the kind of a large value; None for any other value."""
    data = _data(value)
    if data is None:
        return None
    layout: tuple[Any, ...] = ()
    if isinstance(data, np.ndarray):
        layout, size = (str(data.dtype), data.shape, *("by columns",) * _by_columns(data)), data.nbytes
    else:
        size = len(data)
    return _Kind(type(value).__name__, layout, size) if size >= LARGE else None


def _data(value: Any) -> bytes | bytearray | npt.NDArray[Any] | None:
    """Return the data of a value; None if it is small, or can't be read."""
    kind = type(value)
    if kind in (bytes, bytearray):
        return value  # type: ignore[no-any-return]
    if kind is str:
        return value.encode("utf-8", "surrogatepass") if 4 * len(value) >= LARGE else None
    if kind in (np.ndarray, np.memmap):
        return None if value.dtype.hasobject else value
    torch = sys.modules.get("torch")
    if torch is not None and kind is getattr(torch, "Tensor", None):
        try:
            return value.detach().numpy()  # type: ignore[no-any-return]
        except (RuntimeError, TypeError):  # a tensor on a GPU, a sparse one, or of a dtype that numpy lacks
            return None
    return None


def _by_columns(array: npt.NDArray[Any]) -> bool:
    return array.flags.f_contiguous and not array.flags.c_contiguous


def _digest(value: Any) -> bytes:
    """Return the SHA-256 of the data of a large value."""
    data = _data(value)
    digest = hashlib.sha256()
    if isinstance(data, (bytes, bytearray)):
        digest.update(data)
    elif data is not None:
        data = np.atleast_1d(data.T if _by_columns(data) else data)
        rows = len(data) if data.flags.c_contiguous else max(1, _PIECE * len(data) // data.nbytes)
        for start in range(0, len(data), rows):
            digest.update(np.ascontiguousarray(data[start : start + rows]).reshape(-1).view(np.uint8).data)
    return digest.digest()


# A fork server's entries, and their digest.
_known: dict[str, bytes] = {}
_digests: list[bytes] = []

# In a pickled spec: names of definitions in the main module (`__mp_main__` in children of multiprocessing).
_OF_MAIN = re.compile(rb"__(?:mp_)?main__:([A-Za-z_]\w*)")


class Registry(NamedTuple):
    """The registry of a process, for its workers.

    Attributes:
        entries: a digest of the entries, and the pickle of a dict that maps ids to pickled specs.
        names: the definitions in the main module that specs name ("__main__:Env").
        specs: id and spec of those that refer to definitions of the script, which are sent with these.
    """

    entries: tuple[bytes, bytes]
    names: tuple[str, ...]
    specs: tuple[tuple[str, EnvSpec], ...]


def capture_registry() -> Registry:
    """Capture the registry of this process."""
    entries, specs, names = _entries(), [], set[str]()
    main = sys.modules["__main__"]
    for env_id, spec in _registered():
        data = entries.get(env_id)
        if data is None or b"main__" in data:
            specs.append((env_id, spec))
            entries.pop(env_id, None)
        if data is not None:
            names |= {name.decode() for name in _OF_MAIN.findall(data) if hasattr(main, name.decode())}
    return Registry((_digest_of_entries(entries), dump(entries)), tuple(sorted(names)), tuple(specs))


def read_registry() -> None:
    """Pickle all entries in a fork server, so that its workers need not."""
    _known.update(_entries())
    _digests[:] = [_digest_of_entries(_known)]


def restore_registry(digest: bytes, pickled: bytes) -> None:
    """Register the entries that differ from this process's; one that does not unpickle fails only when it is used."""
    if digest in _digests:
        return
    # modules that are imported later register the same ids
    warnings.filterwarnings("ignore", r".*Overriding environment \S+ already in registry")
    known = _known or _entries()
    entries: dict[str, bytes] = load(pickled)
    for env_id, data in entries.items():
        if known.get(env_id) == data:
            continue
        try:
            gymnasium.registry[env_id] = load(data)
        except WireError as exc:
            gymnasium.registry[env_id] = _broken(env_id, str(exc))


def register_specs(specs: Mapping[str, EnvSpec | str]) -> None:
    """Register specs that refer to definitions of the script; a string says why a spec could not be sent."""
    for env_id, spec in specs.items():
        gymnasium.registry[env_id] = _broken(env_id, spec) if isinstance(spec, str) else spec


def _registered() -> Iterator[tuple[str, EnvSpec]]:
    """Iterate over the registry without what `aioenv.adapters.gymnasium` adds: workers need only single envs."""
    for env_id, spec in gymnasium.registry.items():
        if not is_our_entry_point(spec):
            yield env_id, spec
        elif spec.namespace != NAMESPACE:
            yield env_id, dataclasses.replace(spec, vector_entry_point=None)


def _entries() -> dict[str, bytes]:
    """Return the entries that pickle, by id."""
    entries: dict[str, bytes] = {}
    for env_id, spec in _registered():
        with contextlib.suppress(Exception):
            entries[env_id] = pickle.dumps(spec, protocol=pickle.HIGHEST_PROTOCOL)
    return entries


def _digest_of_entries(entries: dict[str, bytes]) -> bytes:
    return hashlib.sha256(repr(sorted(entries.items())).encode()).digest()


def _broken(env_id: str, reason: str) -> EnvSpec:
    return EnvSpec(env_id, partial(_refuse, env_id, reason))


def _refuse(name: str, reason: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{name!r} is registered in the parent, but its registration could not be carried into the worker: {reason}"
    )
