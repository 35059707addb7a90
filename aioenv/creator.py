"""`EnvCreator`: a function that makes an env, with its arguments and with the objects that all of its envs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

import gymnasium
from gymnasium import Env
from gymnasium.envs.registration import EnvSpec

from aioenv.ipc.messages import dump_code, load_code
from aioenv.stats.counters import EpisodeCounter, SlotCounter
from aioenv.stats.running import SharedRunningStats, SlotStats

if TYPE_CHECKING:
    from aioenv.worker.description import EnvMetadata

__all__ = ["EnvCreator", "Stateful", "bind_to_slots"]


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and loaded, as that of `SharedRunningStats` and `EpisodeCounter`."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> None:
        """Load a state that `state_dict` returned."""


class _MetadataCache:
    """The metadata of a creator's envs, None until it is known; variants whose envs can't differ share one."""

    def __init__(self, metadata: EnvMetadata | None = None) -> None:
        self.metadata = metadata


class EnvCreator:
    """A function that makes an env, with arguments, as one object that pickles and may be called in any process.

    The metadata of the env (`metadata`) comes from a worker: this builds no env in this process unless it is called.

    `SharedRunningStats` and `EpisodeCounter` among the arguments, also within dicts, lists and tuples of them, are the
    same ones in every process. Where they have slots, `AsyncVectorEnv` and `make_vec` give each env those of its own
    slot: the function gets `stats.at(slot)`.

    Args:
        factory: a function that makes an env (a lambda or a closure will do), an id of Gymnasium's registry, an
            `EnvSpec`, or another creator. The arguments here are added to those of that creator, or replace them.
        *args: passed to it.
        share: whether statistics and counters are shared; None: as the other creator has it, if one is given, else
            True. With False each env gets statistics and counters of its own, in the state that the shared ones are in
            when it is made. Objects that a function closes over are shared all the same.
        **kwargs: passed to it.

    Attributes:
        factory: the function.
        args, kwargs: copies of the arguments that it is called with.
        share: as above.

    Raises:
        TypeError: if `factory` can't be called.
        ArgumentError: if the name of an argument is much like `share`, and the function has no such parameter.
    """

    def __init__(
        self,
        factory: Callable[..., Env[Any, Any]] | EnvSpec | str | EnvCreator,
        /,
        *args: Any,
        share: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self._cache = _MetadataCache()
        self._registered: dict[str, Stateful] = {}
        if kwargs:
            from aioenv.core.arguments import refuse_misspelled  # not in workers

            refuse_misspelled("aioenv.EnvCreator", ("share",), kwargs, factory)
        if isinstance(factory, EnvCreator):
            inner = factory
            if not args and _same_spaces(inner._kwargs, {**inner._kwargs, **kwargs}):
                self._cache = inner._cache
            self._registered = {**inner._registered}
            factory, args, kwargs = inner.factory, (*inner._args, *args), {**inner._kwargs, **kwargs}
            share = inner.share if share is None else share
        elif isinstance(factory, (str, EnvSpec)):
            factory, args = gymnasium.make, (factory, *args)
        elif not callable(factory):
            raise TypeError(
                f"factory: expected a function that makes an env, an id or an EnvSpec, got {type(factory).__name__}; "
                "pass `lambda: env_class(...)`, not the env itself, which would have to be built in this process"
            )
        self.factory: Callable[..., Env[Any, Any]] = factory
        self._args: tuple[Any, ...] = args
        self._kwargs: dict[str, Any] = kwargs
        self.share: bool = share is None or share

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments that the function is called with."""
        return self._args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments that the function is called with; a copy."""
        return {**self._kwargs}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "__wrapped__":  # not a property, which `inspect` would read from the class
                return partial(self.factory, *self._args, **self._kwargs)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, **kwargs: Any) -> Env[Any, Any]:
        """Make an env in this process.

        Args:
            **kwargs: replace stored ones of the same names. (In TorchRL the stored ones take precedence.)
        """
        args, named = self._args, {**self._kwargs, **kwargs}
        if not self.share:
            own: dict[int, Any] = {}
            args, named = _replace_shared((args, named), lambda value: _unshared(value, own))
        return self.factory(*args, **named)

    def __repr__(self) -> str:
        name = getattr(self.factory, "__qualname__", None) or repr(self.factory)
        parts = [name, *map(repr, self._args), *(f"{key}={value!r}" for key, value in self._kwargs.items())]
        return f"{type(self).__name__}({', '.join(parts)})"

    # ------------------------------------------------------------ variants

    def make_variant(self, **kwargs: Any) -> Self:
        """Return a creator with some arguments changed; this one stays as it is.

        The new one shares all statistics and counters that are not changed, and the registered objects. It shares the
        metadata, too, if only statistics and counters differ, and are of the same kind.
        """
        return self._copy(self._args, {**self._kwargs, **kwargs})

    def at(self, slot: int) -> Self:
        """Return the variant of one slot, which passes shared objects that have slots as `object.at(slot)`.

        Returns:
            This creator itself if no argument has slots.

        Raises:
            ValueError: if one of them has no such slot.
        """
        args, kwargs = _replace_shared((self._args, self._kwargs), lambda value: _of_slot(value, slot))
        if args is self._args and kwargs is self._kwargs:
            return self
        return self._copy(args, kwargs)

    def _copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        other = type(self).__new__(type(self))
        other._cache = self._cache if _same_spaces((self._args, self._kwargs), (args, kwargs)) else _MetadataCache()
        other._registered = {**self._registered}
        other.factory = self.factory
        other._args = args
        other._kwargs = kwargs
        other.share = self.share
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        # always by cloudpickle: plain pickle refuses lambdas
        return _restore, (type(self), dump_code(self._parts))

    def reduce_among_definitions(self) -> tuple[Any, ...]:
        """Reduce as `__reduce__` does, for a pickler that can pickle lambdas itself."""
        return _restore_parts, (type(self), self._parts)

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.factory, self._args, self._kwargs, self.share, self._registered, self._cache.metadata

    # ------------------------------------------------------------ metadata

    async def metadata(
        self,
        *,
        start: Literal["forkserver", "spawn"] | None = None,
        start_timeout_s: float = 60.0,
        preload: Iterable[str] = (),
        worker_env: Mapping[str, str] | None = None,
    ) -> EnvMetadata:
        """Return the spaces, spec and the like of its envs: a worker makes one env, closes it, and exits; cached.

        The env is never reset, so that no shared statistics count it. If this is cancelled, the worker is killed.
        `aioenv.sync.env_metadata` is the same for blocking code.

        Args:
            start: as for `AsyncVectorEnv`, like the other arguments.
            start_timeout_s: how long the worker may take, in seconds.
            preload: modules that it imports first.
            worker_env: its environment variables.

        Raises:
            WorkerStartError: if the env could not be made; it carries the worker's traceback.
            TypeError: if an object that the function refers to does not pickle.
        """
        if self._cache.metadata is None:
            from aioenv.core.worker_pool import describe_env  # it imports asyncio, which workers don't

            self._cache.metadata = await describe_env(
                self.at(0), start=start, start_timeout_s=start_timeout_s, preload=preload, worker_env=worker_env
            )
        return self._cache.metadata

    # ------------------------------------------------------------ shared objects

    def register(self, name: str, shared: Stateful) -> None:
        """Add an object that the function closes over to `state_dict`, here and in variants that are made later.

        Args:
            name: its key in `state_dict`.
            shared: an object with `state_dict` and `load_state_dict`, `SharedRunningStats` for example.

        Raises:
            TypeError: if it has neither `state_dict` nor `load_state_dict`.
            ValueError: if the name is in use.
        """
        if not isinstance(shared, Stateful):
            raise TypeError(f"{name}: expected something with state_dict and load_state_dict, got {shared!r}")
        if name in self._shared():
            raise ValueError(f"register: expected a name that is not taken, got {name!r}")
        self._registered[name] = shared

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each shared object, by the name of its argument (or "args[0]", "config['seen']" …)."""
        return {name: shared.state_dict() for name, shared in self._shared().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of a `state_dict` into the shared objects, in every process.

        Raises:
            KeyError: if it has the states of other objects. Nothing was changed.
            ValueError: if a state does not fit its object.
        """
        shared = self._shared()
        if set(state) != set(shared):
            raise KeyError(f"load_state_dict: expected states of {sorted(shared)}, got {sorted(state)}")
        for name, each in shared.items():
            each.load_state_dict(state[name])

    def _shared(self) -> dict[str, Stateful]:
        found: dict[str, Stateful] = {}
        seen: set[int] = set()
        named = [(f"args[{i}]", value) for i, value in enumerate(self._args)]
        for start, argument in [*named, *self._kwargs.items()]:
            for name, value in _iter_shared(start, argument):
                if id(value) not in seen:
                    seen.add(id(value))
                    found[name] = value
        return {**found, **self._registered}


def bind_to_slots(env_fns: Iterable[Any]) -> list[Any]:
    """Return factories, one a slot, with each creator replaced by its variant of that slot."""
    return [fn.at(slot) if isinstance(fn, EnvCreator) else fn for slot, fn in enumerate(env_fns)]


def _restore(kind: type[EnvCreator], data: bytes) -> EnvCreator:
    return _restore_parts(kind, load_code(data))


def _restore_parts(kind: type[EnvCreator], parts: tuple[Any, ...]) -> EnvCreator:
    creator = kind.__new__(kind)
    creator.factory, creator._args, creator._kwargs, creator.share, creator._registered, metadata = parts
    creator._cache = _MetadataCache(metadata)
    return creator


# ------------------------------------------------------------ shared objects among arguments


def _iter_shared(name: str, value: Any) -> Iterator[tuple[str, Stateful]]:
    """Yield the shared objects in an argument, each with its place there."""
    if isinstance(value, SlotStats):
        value = value.stats
    elif isinstance(value, SlotCounter):
        value = value.counter
    if isinstance(value, (SharedRunningStats, EpisodeCounter)):
        yield name, value
    elif type(value) is dict:
        for key, part in value.items():
            yield from _iter_shared(f"{name}[{key!r}]", part)
    elif type(value) in (list, tuple):
        for index, part in enumerate(value):
            yield from _iter_shared(f"{name}[{index}]", part)


def _replace_shared(value: Any, change: Callable[[Any], Any]) -> Any:
    """Replace shared objects in plain dicts, lists and tuples; a container without any is returned as it is."""
    new = value
    if isinstance(value, (SharedRunningStats, EpisodeCounter, SlotStats, SlotCounter)):
        return change(value)
    if type(value) is dict:
        new = {key: _replace_shared(part, change) for key, part in value.items()}
        changed = any(new[key] is not part for key, part in value.items())
    elif type(value) in (list, tuple):
        new = type(value)(_replace_shared(part, change) for part in value)
        changed = any(a is not b for a, b in zip(new, value, strict=True))
    else:
        return value
    return new if changed else value


def _of_slot(value: Any, slot: int) -> Any:
    return value.at(slot) if isinstance(value, (SharedRunningStats, EpisodeCounter)) and value.num_slots else value


def _unshared(value: Any, own: dict[int, Any]) -> Any:
    """Return a copy for one env; `own` has the copies made for it, so that an object is copied once."""
    if isinstance(value, SlotStats):
        return SlotStats(_unshared(value.stats, own), value.slot)
    if isinstance(value, SlotCounter):
        return SlotCounter(_unshared(value.counter, own), value.slot)
    if id(value) not in own:
        own[id(value)] = value.unshared()
    return own[id(value)]


def _same_spaces(a: Any, b: Any) -> bool:
    """Return whether envs made with these arguments have the same spaces, as far as can be seen."""
    if a is b or (_kind(a) is not None and _kind(a) == _kind(b)):
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_spaces(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same_spaces, a, b))
    try:
        return bool(a == b)
    except Exception:  # arrays, and other objects that don't compare
        return False


def _kind(value: Any) -> Any:
    """Return the properties of a shared object on which spaces may depend; None for any other object."""
    if isinstance(value, SlotStats):
        value = value.stats
    if isinstance(value, SharedRunningStats):
        return "stats", value.shape
    return "counter" if isinstance(value, (EpisodeCounter, SlotCounter)) else None
