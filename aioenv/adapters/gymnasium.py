"""aioenv in Gymnasium's registry: its import registers ids of which `gymnasium.make_vec` makes aioenv's vector envs.

    import gymnasium
    import aioenv.adapters.gymnasium

    envs = gymnasium.make_vec("aioenv/HalfCheetah-v5", num_envs=64)

Gymnasium reads no entry points of packages from its version 1.0 on, so the import is explicit. "module:id" does it,
too: `gymnasium.make_vec("aioenv.adapters.gymnasium:aioenv/HalfCheetah-v5", num_envs=64)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
from gymnasium import Env
from gymnasium.envs.registration import EnvSpec

from aioenv.worker.making import NAMESPACE, OUR_ENTRY_POINTS, is_our_entry_point

if TYPE_CHECKING:
    from aioenv.sync import VectorEnv

__all__ = ["make_vec", "register_ids", "set_vector_entry_points"]


def make_vec(
    env_id: str,
    num_envs: int = 1,
    *,
    backend: Literal["workers", "native", "auto"] = "auto",
    env_wrappers: Sequence[Callable[[Env[Any, Any]], Env[Any, Any]]] = (),
    **kwargs: Any,
) -> VectorEnv:
    """Make the blocking vector env of an id; `gymnasium.make_vec` calls it with its own keyword arguments.

    Args:
        env_id: an id of Gymnasium's registry, without "aioenv/".
        num_envs: the number of slots.
        backend: see `aioenv.make_vec`; here "auto" is the default.
        env_wrappers: the `wrappers` of `aioenv.make_vec`. (Gymnasium refuses its argument `wrappers` for vector envs
            that are registered.)
        **kwargs: other arguments of `aioenv.make_vec`, such as `num_workers` and `autoreset_mode`, and of the env.

    Raises:
        ValueError, TypeError, WorkerStartError: as `aioenv.sync.make_vec`.
    """
    from aioenv import sync  # it imports asyncio, which the registration does without

    return sync.make_vec(env_id, num_envs, backend=backend, wrappers=env_wrappers, **kwargs)


def register_ids(*ids: str) -> None:
    """Register "aioenv/ID" for ids of Gymnasium's registry. The import does so for all that are there by then.

    With `gymnasium.make` such an id makes the single env.

    Args:
        *ids: ids without a namespace; none: all.

    Raises:
        ValueError: if an id has a namespace, or is registered without a single env.
        gymnasium.error.Error: if it is not registered.
    """
    for spec in map(gymnasium.spec, ids):
        if not _can_be_registered(spec):
            raise ValueError(
                f"{spec.id}: expected an id without a namespace, of an env that has an entry_point; "
                f"set_vector_entry_points({spec.id!r}) takes others"
            )
        _register(spec)
    if not ids:
        for spec in [*gymnasium.registry.values()]:
            if _can_be_registered(spec):
                _register(spec)


def set_vector_entry_points(*ids: str) -> None:
    """Make aioenv the `vector_entry_point` of ids that have none::

        set_vector_entry_points("HalfCheetah-v5")
        envs = gymnasium.make_vec("HalfCheetah-v5", num_envs=64, vectorization_mode="vector_entry_point")

    From then on `gymnasium.make_vec` takes aioenv for these ids also where no `vectorization_mode` is given, in all
    code of this process, and then refuses `wrappers=` and `vector_kwargs=`. So the import does not do this.

    Args:
        *ids: ids, also with a namespace.

    Raises:
        ValueError: if an id has another vector env, or no single env.
        gymnasium.error.Error: if it is not registered.
    """
    specs = [gymnasium.spec(env_id) for env_id in ids]
    for spec in specs:
        if spec.entry_point is None or not (spec.vector_entry_point is None or is_our_entry_point(spec)):
            raise ValueError(
                f"{spec.id} has a vector_entry_point of its own, {spec.vector_entry_point!r}; "
                f'"{NAMESPACE}/{spec.id}" makes a vector env of aioenv'
            )
    for spec in specs:
        spec.vector_entry_point = OUR_ENTRY_POINTS + spec.id


def _can_be_registered(spec: EnvSpec) -> bool:
    point = spec.entry_point
    removed = callable(point) and getattr(point, "__module__", "").startswith("gymnasium.envs")  # it raises an error
    return spec.namespace is None and point is not None and not removed


def _register(spec: EnvSpec) -> None:
    env_id = f"{NAMESPACE}/{spec.id}"
    gymnasium.registry[env_id] = dataclasses.replace(spec, id=env_id, vector_entry_point=OUR_ENTRY_POINTS + spec.id)


def __getattr__(name: str) -> Any:
    """Return the function that makes vector envs of an id: entry points are `module:attribute`, and get no id."""
    if name in gymnasium.registry:
        return partial(make_vec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_ids()
