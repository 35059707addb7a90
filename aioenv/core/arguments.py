"""Check the constructor's arguments; each error says what was expected and given, and how to mend it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec, load_env_creator

from aioenv.core.timeouts import ON_TIMEOUT
from aioenv.errors import ArgumentError
from aioenv.ipc.memory import check_transport
from aioenv.platform import usable_cpus
from aioenv.process.remote import Cluster
from aioenv.process.restart_policy import RestartPolicy
from aioenv.rendering.config import RenderConfig
from aioenv.worker.making import TASKS, vector_entry_point

__all__ = [
    "check_autoreset_options",
    "check_clusters",
    "check_cpu_affinity",
    "check_factories",
    "check_grace",
    "check_num_envs",
    "check_num_workers",
    "check_observation_mode",
    "check_on_timeout",
    "check_preload",
    "check_recv",
    "check_render",
    "check_restart",
    "check_seconds",
    "check_seed_plan",
    "check_timeout",
    "check_transport",
    "check_worker_env",
    "is_seconds",
    "listed_factories",
    "refuse_misspelled",
    "refuse_on_cluster",
]

# From which similarity on a name is taken for a misspelled one; for envs that take any argument it must be higher.
_SIMILAR, _VERY_SIMILAR = 0.75, 0.9


def check_factories(functions: Sequence[Any]) -> None:
    """Raise unless these are functions that make envs.

    Raises:
        ValueError: if there is none.
        TypeError: if one is not callable.
    """
    if not functions:
        raise ValueError("env_fns: expected at least one factory, got none")
    for index, function in enumerate(functions):
        if not callable(function):
            raise TypeError(
                f"env_fns[{index}]: expected a function that makes an env, got {type(function).__name__}; pass "
                "`lambda: gym.make(...)`, not the env itself, which would have to be built in this process"
            )


def listed_factories(env_fns: Any) -> list[Any]:
    """Return the elements of `env_fns`; raise a TypeError if it is not a sequence, but a single function, say."""
    if callable(env_fns) or isinstance(env_fns, str) or not isinstance(env_fns, Iterable):
        got = f"one function, {env_fns!r}; pass `[function] * num_envs`" if callable(env_fns) else repr(env_fns)
        if isinstance(env_fns, str):
            got += "; copies of one id are made by make_vec(id, num_envs)"
        raise TypeError(f"env_fns: expected a sequence of functions that make an env, one a slot, got {got}")
    return list(env_fns)


def check_preload(preload: Any) -> tuple[str, ...]:
    """Return the names of modules; raise a TypeError if they are anything else."""
    names = (preload,) if isinstance(preload, str) else tuple(preload) if isinstance(preload, Iterable) else (preload,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"preload: expected names of modules, got {preload!r}")
    return names


def check_num_envs(num_envs: Any) -> int:
    """Return the number of slots; raise a ValueError if it is no positive int."""
    if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
        raise ValueError(f"num_envs: expected a positive int, got {num_envs!r}")
    return int(num_envs)


def check_num_workers(num_workers: int | None, num_envs: int) -> int:
    """Return the number of workers: by default one for each usable CPU, and at most one for each slot."""
    if num_workers is None:
        return min(num_envs, usable_cpus())
    if isinstance(num_workers, bool) or not isinstance(num_workers, (int, np.integer)) or num_workers < 1:
        expected = "a positive int, 0 (the envs live in this process) or None"
        raise ValueError(f"num_workers: expected {expected}, got {num_workers!r}")
    return min(int(num_workers), num_envs)


def check_clusters(
    cluster: Cluster | Sequence[Cluster | None] | None,
    num_workers: int | Sequence[int] | None,
    num_envs: int,
    name: str = "num_workers",
) -> tuple[int | None, tuple[Cluster | None, ...]]:
    """Return the number of workers, and the cluster of each, None for this machine; () if all are here.

    Args:
        cluster: one for all workers, or one (or None) for each of `num_workers`.
        num_workers: how many workers, or a list of how many there are on each of `cluster`.
        num_envs: the number of slots.
        name: of the second argument, for errors.

    Raises:
        ValueError: if both are lists of different lengths, or there are more workers than slots.
        TypeError: if something is no cluster.
    """
    if not isinstance(cluster, (list, tuple)):
        if isinstance(num_workers, (list, tuple)):
            raise ValueError(f"{name}: a list goes with a list of clusters, got {num_workers!r} and {cluster!r}")
        clusters: Sequence[Any] = [cluster]
        numbers: Sequence[Any] = [num_workers]
    else:
        clusters = cluster
        if not isinstance(num_workers, (list, tuple)) or len(num_workers) != len(cluster):
            raise ValueError(
                f"{name}: expected a list with a number for each of {len(cluster)} clusters, got {num_workers!r}"
            )
        numbers = num_workers
    for one in clusters:
        if one is not None and not hasattr(one, "session"):
            raise TypeError(f"cluster: expected a RayCluster, or a list of them and None, got {one!r}")
    if cluster is None:
        return numbers[0], ()
    if None in numbers or 0 in numbers:
        raise ValueError(f"{name}: expected how many there are on the cluster, got {num_workers!r}")
    counts = [check_num_workers(number, num_envs) for number in numbers]
    if sum(counts) > num_envs:
        raise ValueError(f"{name}: {sum(counts)} for {num_envs} slots: each needs one")
    return sum(counts), tuple(one for one, count in zip(clusters, counts, strict=True) for _ in range(count))


def refuse_on_cluster(**given: bool) -> None:
    """Raise a ValueError if arguments were given that don't go together with `cluster=`."""
    reasons = {
        "debug": "debug=True, whose envs share this process",
        "spare_envs": "spare_envs=True, so far",
        "transport": 'transport="shared": machines share no memory',
        "cpu_affinity": "cpu_affinity=, which names CPUs of this machine",
        "stats": "statistics in memory of this machine: SharedRunningStats(shared=False) is merged over the network",
    }
    _refuse("cluster", reasons, given)


def refuse_without_workers(**given: bool) -> None:
    """Raise a ValueError if arguments were given that are about worker processes, of which there are none."""
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise ValueError(
            f"{', '.join(wrong)}: not with num_workers=0, which steps the envs in this process; use num_workers=1 or "
            "more for envs in processes of their own, which can be killed, restarted, pinned and given variables"
        )


def refuse_with_spares(num_envs: int, num_workers: int | None, **given: bool) -> None:
    """Raise a ValueError if arguments were given that don't go together with `spare_envs=True`."""
    if num_workers is not None and num_workers != 0:
        check_num_workers(num_workers, num_envs)
    if num_workers is not None and num_workers < 2 * num_envs:
        raise ValueError(
            f"num_workers: expected {2 * num_envs} or None with spare_envs=True, got {num_workers}: each slot has two "
            "envs, and each env a worker of its own, or a reset would delay the steps of other slots"
        )
    reasons = {
        "autoreset_mode": "AutoresetMode.DISABLED, under which you say when an episode begins",
        "debug": "debug=True, whose envs share this process",
        "resume": "RestartPolicy(resume=True): a slot goes on in its other env when a worker has died",
        "transport": 'transport="shared", whose memory has room for one env a slot',
    }
    _refuse("spare_envs", reasons, given)


def _refuse(what: str, reasons: Mapping[str, str], given: Mapping[str, bool]) -> None:
    """Raise a ValueError with the reasons why arguments that were given don't go together with another one."""
    if wrong := [reasons[name] for name, is_given in given.items() if is_given]:
        raise ValueError(f"{what}: not with {'; nor with '.join(wrong)}")


def check_worker_env(worker_env: Any, num_workers: int) -> list[dict[str, str] | None]:
    """Return the environment variables of each worker; a single mapping is for all."""
    if worker_env is None or isinstance(worker_env, Mapping):
        worker_env = [worker_env] * num_workers
    elif not isinstance(worker_env, Sequence) or isinstance(worker_env, (str, bytes)):
        raise ValueError(f"worker_env: expected a mapping, or a list of one a worker, got {worker_env!r}")
    elif len(worker_env) != num_workers:
        raise ValueError(
            f"worker_env: expected one mapping for each of {num_workers} workers, got {len(worker_env)}; "
            "pass num_workers= too"
        )
    for variables in worker_env:
        for name, value in _items(variables):
            if not isinstance(name, str) or not isinstance(value, str):
                raise ValueError(f"worker_env: expected names and values as str, got {name!r}: {value!r}")
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise ValueError(f"worker_env: no environment can have such a variable: {name!r}: {value!r}")
    return [dict(variables) if variables else None for variables in worker_env]


def _items(variables: Any) -> Iterable[tuple[Any, Any]]:
    if variables is None:
        return ()
    if not isinstance(variables, Mapping):
        raise ValueError(f"worker_env: expected a mapping for each worker, got {variables!r}")
    return variables.items()


def check_cpu_affinity(affinity: str | Sequence[int | Iterable[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    """Return the CPUs of the first workers, which the others use in turn; None if workers are not pinned.

    Raises:
        ValueError: if it has a wrong type or value, names a CPU that this process may not use, or the platform can't do
            it.
    """
    if affinity is None:
        return None
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError(f"cpu_affinity: this platform can't pin processes to CPUs; leave it out (got {affinity!r})")
    usable = sorted(os.sched_getaffinity(0))
    if isinstance(affinity, str):
        if affinity != "spread":
            raise ValueError(f'cpu_affinity: expected "spread", CPUs, sets of CPUs or None, got {affinity!r}')
        return tuple((cpu,) for cpu in usable)
    try:
        each = [(cpus,) if isinstance(cpus, (int, np.integer)) else tuple(cpus) for cpus in affinity]
        numbers = [cpu for cpus in each for cpu in cpus]
        plain = all(isinstance(cpu, (int, np.integer)) and not isinstance(cpu, bool) for cpu in numbers)
    except TypeError:
        plain = False
    if not plain or not each or not all(each):
        raise ValueError(f"cpu_affinity: expected one or more CPUs, or sets of CPUs, one a worker; got {affinity!r}")
    if strange := sorted({int(cpu) for cpu in numbers}.difference(usable)):
        raise ValueError(f"cpu_affinity: this process may use CPUs {usable}, got {strange}")
    return tuple(tuple(sorted({int(cpu) for cpu in cpus})) for cpus in each)


def check_observation_mode(mode: Any) -> None:
    """Raise if `mode` is none of Gymnasium's, with Gymnasium's message."""
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
            )
    elif mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {mode}"
        )


def check_restart(restart: Any) -> None:
    """Raise a TypeError unless `restart` is a policy or None."""
    if restart is not None and not isinstance(restart, RestartPolicy):
        raise TypeError(f"restart: expected an aioenv.RestartPolicy or None, got {restart!r}")


def check_on_timeout(on_timeout: str, restart: RestartPolicy | None) -> str:
    """Return what to do when replies take too long; raise a ValueError if it is unknown, or not possible.

    Raises:
        TypeError: if `restart` is no policy.
    """
    check_restart(restart)
    if on_timeout not in ON_TIMEOUT:
        known = ", ".join(map(repr, ON_TIMEOUT))
        raise ValueError(f"on_timeout: expected one of {known}, got {on_timeout!r}")
    if on_timeout == "restart" and restart is None:
        raise ValueError('on_timeout="restart" takes a policy: pass restart=aioenv.RestartPolicy() too')
    return on_timeout


def check_render(render: Any, pixels: Any) -> None:
    """Raise a TypeError unless both are a `RenderConfig` or None."""
    for name, config in (("render", render), ("pixels", pixels)):
        if config is not None and not isinstance(config, RenderConfig):
            raise TypeError(f"{name}: expected an aioenv.RenderConfig or None, got {config!r}")


def check_seed_plan(
    seeds: Sequence[int] | None, num_envs: int, restart: RestartPolicy | None
) -> npt.NDArray[np.int64] | None:
    """Return the seeds of a plan; raise a ValueError if they are no seeds, or fewer than slots."""
    if seeds is None:
        return None
    try:
        items = np.asarray(seeds)
    except ValueError:  # of unequal lengths
        items = np.asarray(None)
    if items.ndim != 1 or items.dtype.kind not in "iu" or (items < 0).any() or (items > 2**63 - 1).any():
        raise ValueError(f"seed_plan: expected a sequence of ints from 0 to 2**63 - 1, got {seeds!r}")
    if len(items) < num_envs:
        raise ValueError(f"seed_plan: expected at least one seed for each of {num_envs} slots, got {len(items)}")
    if restart is not None and restart.resume:
        raise ValueError("seed_plan: not with RestartPolicy(resume=True), whose replayed resets would take other seeds")
    return items.astype(np.int64)


def check_autoreset_options(options: Any, restart: RestartPolicy | None) -> Any:
    """Return the options of automatic resets.

    Raises:
        TypeError: if they are neither a dict nor a function that can be called with a slot and an episode number.
        ValueError: if they are a function, and slots are resumed after the end of a worker.
    """
    if options is None or isinstance(options, Mapping):
        return options
    expected = "autoreset_options: expected a dict, a function f(slot, episode) that returns one, or None"
    if not callable(options) or isinstance(options, type):
        raise TypeError(f"{expected}, got {options!r}")
    if inspect.iscoroutinefunction(options):
        raise TypeError(f"{expected}, got a coroutine function, {options!r}; workers can't await it")
    try:
        inspect.signature(options).bind(0, 0)
    except TypeError as exc:
        raise TypeError(f"{expected}, got {options!r}, which can't be called so: {exc}") from None
    except ValueError:  # a function of C without a signature
        pass
    if restart is not None and restart.resume:
        raise ValueError(
            "autoreset_options: not a function with RestartPolicy(resume=True), whose replayed resets would count as "
            "further episodes; a dict is possible"
        )
    return options


def check_timeout(timeout_s: float | None) -> float | None:
    """Return a duration that may be None."""
    return None if timeout_s is None else check_seconds("timeout_s", timeout_s)


def check_grace(name: str, value: float) -> float:
    """Return how long envs may take to close, 0 or less for no time.

    Raises:
        ValueError: if it is no number. Nothing has been closed then.
    """
    if not is_seconds(value):
        raise ValueError(f"{name}: expected a number of seconds, got {value!r}")
    return value


def is_seconds(value: Any) -> bool:
    """Return whether a value is a number, and not NaN."""
    return isinstance(value, Real) and value == value


def check_recv(min_slots: int, max_slots: int | None, deadline_s: float | None) -> None:
    """Raise a ValueError unless these are numbers that `recv` can wait for."""
    for name, number, what in (
        ("min_slots", min_slots, "how many slots to wait for, an int of at least 1"),
        ("max_slots", 1 if max_slots is None else max_slots, "how many slots to take, an int of at least 1 or None"),
    ):
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 1:
            raise ValueError(f"recv: {name}: expected {what}, got {number!r}")
    wrong = isinstance(deadline_s, bool) or not isinstance(deadline_s, Real) or deadline_s != deadline_s
    if deadline_s is not None and wrong:
        raise ValueError(f"recv: deadline_s: expected a number of seconds or None, got {deadline_s!r}")


def check_seconds(name: str, value: float) -> float:
    """Return a duration as a float; raise a ValueError if it is not a positive number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not value > 0:
        raise ValueError(f"{name}: expected a positive number of seconds, got {value!r}")
    return float(value)


def refuse_misspelled(
    caller: str, ours: Iterable[str], given: Mapping[str, Any], env: Any, *, native: bool = False
) -> None:
    """Raise if an argument for an env looks like a misspelled one of ours, and the env has no argument of that name.

    Where the arguments of the env are not known here, as for an id whose module is not imported, nothing is raised.

    Args:
        caller: the function that ours are arguments of, for the message.
        ours: their names.
        given: the arguments that the env is to get.
        env: an id, an EnvSpec, or a function that makes an env.
        native: whether it makes a vector env.

    Raises:
        ArgumentError: if so; the message says which argument was meant.
    """
    names = list(ours)
    near = {name: get_close_matches(name, names, 1, _SIMILAR) for name in given if name not in names}
    if not any(near.values()):
        return
    parameters = _parameters(env, native)
    if parameters is None:
        return
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, meant in near.items():
        if meant and name not in parameters and (not is_open or get_close_matches(name, meant, 1, _VERY_SIMILAR)):
            raise ArgumentError(
                f"{name}: {caller} has no such argument, and the env names none: did you mean {meant[0]}? (If the env "
                f"does take it: `functools.partial(make_env, {name}=…)` in its place)"
            )


def _parameters(env: Any, native: bool) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of what makes an env, and of `gymnasium.make`, by name; None if they are not known."""
    try:
        if isinstance(env, str):
            if ":" in env:
                return None
            env = gymnasium.spec(env)
        known: dict[str, inspect.Parameter] = {}
        if isinstance(env, EnvSpec):
            known = {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in env.kwargs}
            makes = inspect.signature(gymnasium.make).parameters.values()
            known |= {each.name: each for each in makes if each.kind is not each.VAR_KEYWORD}
            entry_point: Any = env.entry_point
            if native:
                entry_point = vector_entry_point(env) or TASKS.get(str(entry_point))
            env = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        return {**inspect.signature(env).parameters, **known}
    except Exception:  # making the env will raise it again
        return None
