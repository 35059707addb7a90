"""Guessing what factories will import and load, so that a fork server can do it once for all workers.

A wrong guess costs a little time, a missing one a little more: each worker then imports for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import ENV_ID_RE, EnvSpec

__all__ = ["needed_by"]


def needed_by(factories: Iterable[Callable[[], Any]]) -> tuple[str, ...]:
    """Modules that hold the factories, and classes of envs whose ids or specs can be seen in them.

    Args:
        factories: functions, partials, lambdas with an id among their constants, defaults or closed-over values.

    Returns:
        Module names and entry points ("module:Class"), each once; those of the main script are not among them.
    """
    distinct = {id(factory): factory for factory in factories}.values()
    # factories made in a loop share their code; what they close over may differ, but seldom for long
    names = dict.fromkeys(name for factory in list(distinct)[:64] for name in _modules(factory))
    return tuple(name for name in names if name.partition(":")[0] not in ("__main__", "__mp_main__"))


def _modules(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        prefix, _, name = value.rpartition(":")
        if prefix.replace(".", "_").isidentifier() and ENV_ID_RE.fullmatch(name):  # not what "train: …" says
            yield prefix
        elif name in gymnasium.registry:
            yield from _modules(gymnasium.registry[name])
    elif isinstance(value, EnvSpec):
        if isinstance(value.entry_point, str):
            yield value.entry_point
        elif value.entry_point is not None:
            yield from _modules(value.entry_point)
    elif isinstance(value, partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _modules(part)
    elif callable(value):
        module = getattr(value, "__module__", None)
        if isinstance(module, str):
            yield module
        code = getattr(value, "__code__", None)
        cells = [_contents(cell) for cell in getattr(value, "__closure__", None) or ()]
        inner = getattr(value, "__wrapped__", None)  # of a decorated function, or of a creator
        if inner is not None and inner is not value:
            yield from _modules(inner)
        for seen in (*getattr(code, "co_consts", ()), *(getattr(value, "__defaults__", None) or ()), *cells):
            if isinstance(seen, (str, EnvSpec)):
                yield from _modules(seen)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None
