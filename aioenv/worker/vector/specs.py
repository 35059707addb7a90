"""Specs of vector envs: the spec of one env in them, and the arguments of the vector env."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gymnasium import Env
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from aioenv.worker.native_tasks import TASKS

__all__ = ["VectorSpec", "made_plain", "of_so_many", "refuse_wrappers", "take_apart"]

# Arguments of Gymnasium's vector envs that are ours too, and those that say how it does what is done here in workers.
_SETTINGS = ("copy", "observation_mode", "autoreset_mode")
_HOW = ("shared_memory", "context", "daemon", "max_concurrency")


class VectorSpec(NamedTuple):
    """What the spec of a vector env is made of.

    Attributes:
        spec: of one env.
        num_envs: how many there were; None if the spec is of a single env.
        wrappers: which each env was wrapped in.
        settings: arguments of the vector env: `copy`, `observation_mode`, `autoreset_mode`, those of them that it had.
    """

    spec: EnvSpec
    num_envs: int | None = None
    wrappers: tuple[Callable[[Env[Any, Any]], Env[Any, Any]], ...] = ()
    settings: dict[str, Any] = {}  # noqa: RUF012 (never written to)


def take_apart(spec: EnvSpec) -> VectorSpec:
    """Take the vector env's arguments, which `gymnasium.make_vec` notes among the env's own, out of a spec.

    Raises:
        ValueError: if the vector env had an argument that has no meaning here.
    """
    if "vectorization_mode" not in spec.kwargs:
        return VectorSpec(spec)
    kwargs = {name: value for name, value in spec.kwargs.items() if name != "vectorization_mode"}
    num_envs = kwargs.pop("num_envs", 1)
    wrappers = tuple(kwargs.pop("wrappers", ()))
    given = dict(kwargs.pop("vector_kwargs", {}))
    if others := sorted(given.keys() - {*_SETTINGS, *_HOW}):
        raise ValueError(
            f"env: the spec of {spec.id} is of a vector env that was made with {', '.join(others)}, which is "
            "Gymnasium's alone. Take it out of spec.kwargs['vector_kwargs']"
        )
    settings = {name: given[name] for name in _SETTINGS if name in given}
    if "autoreset_mode" in kwargs:
        settings["autoreset_mode"] = kwargs.pop("autoreset_mode")
    steps = kwargs.pop("max_episode_steps", None)
    ours = spec.vector_entry_point in TASKS.values()  # which is found again where it is asked for
    single = dataclasses.replace(
        spec,
        kwargs=kwargs,
        max_episode_steps=spec.max_episode_steps if steps is None else steps,
        vector_entry_point=None if ours else spec.vector_entry_point,
    )
    return VectorSpec(single, num_envs, wrappers, settings)


def made_plain(spec: EnvSpec) -> EnvSpec:
    """Give a spec that can be written as JSON, where modes were enums."""
    values = {key: value.value if isinstance(value, AutoresetMode) else value for key, value in spec.kwargs.items()}
    return dataclasses.replace(spec, kwargs=values)


def of_so_many(spec: EnvSpec | None, num_envs: int) -> EnvSpec | None:
    """Give the spec of a vector env that is split over workers, from that of one worker's share."""
    if spec is None or "vectorization_mode" not in spec.kwargs:
        return spec
    return dataclasses.replace(spec, kwargs={**spec.kwargs, "num_envs": num_envs})


def refuse_wrappers(spec: EnvSpec, others: Sequence[Any] = ()) -> None:
    """See that there are no wrappers of single envs, where one vector env is to be made.

    Args:
        spec: the spec.
        others: wrappers that a vector env's spec has named beside it.

    Raises:
        ValueError: if there are; the message names them, and says what to do.
    """
    names = [wrapper.name for wrapper in spec.additional_wrappers]
    names += [getattr(wrapper, "__name__", repr(wrapper)) for wrapper in others]
    if names:
        raise ValueError(
            f'backend="native": the spec of {spec.id} has wrappers of single envs ({", ".join(names)}), which can\'t '
            'be put around one vector env. Use backend="workers", or take them out of the spec (additional_wrappers, '
            "kwargs['wrappers']) and wrap the vector env in their namesakes of gymnasium.wrappers.vector"
        )
