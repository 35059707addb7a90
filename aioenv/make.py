"""`make_vec` makes a vector env of copies of one env; `run` runs a coroutine on the fastest event loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import gymnasium
from gymnasium import Env, Space
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv.core.arguments import check_num_envs, refuse_misspelled
from aioenv.core.choice import BackendChoice
from aioenv.creator import EnvCreator
from aioenv.errors import VersionError
from aioenv.native_vector_env import NativeVectorEnv, vector_env_factory
from aioenv.requirements import require_batch
from aioenv.spaces.autoreset import parse_mode
from aioenv.vector_env import AsyncVectorEnv
from aioenv.worker.making import (
    TASKS,
    is_native_task,
    is_our_entry_point,
    make_env,
    make_with_hints,
    refuse_wrappers,
    split_spec,
    vector_entry_point,
    versioned,
)

if TYPE_CHECKING:
    from aioenv.process.remote import Cluster
    from aioenv.process.restart_policy import RestartPolicy
    from aioenv.rendering.config import RenderConfig
    from aioenv.stats.episodes import EpisodeStats

__all__ = ["env_factory", "make_vec", "new_event_loop", "run", "takes_mode"]

T = TypeVar("T")

BACKENDS = ("workers", "native", "auto")

# The number of slots from which on a native version is faster than single envs in this process, where it is not 1.
_NATIVE_FROM = {"CartPole-v0": 2, "CartPole-v1": 2}
# Arguments of native vector envs that single envs do not have, or that make images.
_OF_NATIVE = {"num_envs", "model", "autoreset_mode", "num_threads", "render_mode"}
# Our faster version of Gymnasium's vector env.
_CARTPOLE = "aioenv.native.cartpole:CartPoleVectorEnv"
_SINGLE_CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
_log = logging.getLogger("aioenv")

_HINT = "; a list of functions goes to aioenv.AsyncVectorEnv"


def make_vec(
    env: str | EnvSpec | Callable[..., Env[Any, Any]] | Callable[..., VectorEnv[Any, Any, Any]],
    num_envs: int | None = None,
    *,
    backend: Literal["workers", "native", "auto"] = "workers",
    num_workers: int | Sequence[int] | None = None,
    cluster: Cluster | Sequence[Cluster | None] | None = None,
    start: Literal["forkserver", "spawn"] | None = None,
    channel: Literal["auto", "scatter", "streams"] = "auto",
    transport: Literal["auto", "frames", "shared"] = "auto",
    wrappers: Sequence[Callable[[Env[Any, Any]], Env[Any, Any]]] = (),
    preload: Iterable[str] = (),
    copy: bool = True,
    observation_mode: Literal["same", "different"] | tuple[Space[Any], Space[Any]] = "same",
    autoreset_mode: AutoresetMode | Literal["NextStep", "SameStep", "Disabled"] = AutoresetMode.NEXT_STEP,
    timeout_s: float | None = None,
    on_timeout: Literal["raise", "kill", "restart"] = "raise",
    restart: RestartPolicy | None = None,
    start_timeout_s: float = 60.0,
    log_prefix: str | None = None,
    worker_env: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None = None,
    render: RenderConfig | None = None,
    pixels: RenderConfig | None = None,
    cpu_affinity: Literal["spread"] | Sequence[int | Iterable[int]] | None = None,
    ignore_signals: bool = False,
    debug: bool = False,
    episode_stats: bool | EpisodeStats = False,
    stats_prefix: str | None = None,
    seed_plan: Sequence[int] | None = None,
    autoreset_options: Mapping[str, Any] | Callable[[int, int], Mapping[str, Any] | None] | None = None,
    check_numerics: bool = False,
    spare_envs: bool = False,
    **env_kwargs: Any,
) -> AsyncVectorEnv:
    """Make a vector env of copies of one env.

    Args:
        env: an id of Gymnasium's registry, an `EnvSpec` (also that of a vector env), a function that makes an env, or
            an `EnvCreator`. Each slot gets its own variant of a creator.
        num_envs: how many copies. None: as many as the vector env had if this is the spec of one, else one.
        backend: "workers" steps single envs in worker processes. "native" takes the env's own vectorized version. For
            Gymnasium's MuJoCo tasks (v5) that is ours, with the same results; for others it is the one that Gymnasium
            has registered as `vector_entry_point`. Here `env` may also be a function that is called with `num_envs` and
            makes a `gymnasium.vector.VectorEnv`. The vector env lives in this process, or is split over `num_workers`
            processes (see `NativeVectorEnv`). Unless it is a `NativeMujocoEnv`, it keeps its own seeding and, unless it
            takes an argument `autoreset_mode`, its own mode. "auto" takes what is fastest with the same results: our
            native version, if there is one and nothing that was asked for needs single envs; else single envs in this
            process (`num_workers=0`), if their steps take less than workers would save; else workers. For an id it
            steps one env with its wrappers for 20 ms, in a process of its own, once for each id and program, when the
            vector env is started. A function that makes envs is never called for that: they step in workers. The logger
            "aioenv" says what was chosen and why, at level INFO; `envs.backend` tells it.
        wrappers: applied to each env in the worker, the first one innermost.
        **env_kwargs: passed to `gymnasium.make`, or to the function. With `render` or `pixels` given, an id or a spec
            gets `render_mode="rgb_array"` unless this has another one.

    The other arguments are those of `AsyncVectorEnv`.

    Returns:
        A vector env that is not started yet: use `async with`, or await it.

    Raises:
        ValueError: if `num_envs` is not positive, or an argument is not one of its values. With backend="native" also
            if the env has no vectorized version, or an argument is for single envs.
        gymnasium.error.Error: if the id is malformed or not registered.
        TypeError: if `env` or `wrappers` has a wrong type, or an argument is one of `gymnasium.make_vec` alone.
        ArgumentError: if an argument looks like a misspelled one of these, and the env has no such parameter.
    """
    if wrong := [name for name in ("vectorization_mode", "vector_kwargs") if name in env_kwargs]:
        raise TypeError(
            f'{", ".join(wrong)}: gymnasium.make_vec has that. Here envs step in workers, or with backend="native" as '
            "one vector env; options of the vector env are arguments by themselves, autoreset_mode=… say"
        )
    if isinstance(env, str) and ":" not in env:  # "module:id" is imported in the worker
        env = versioned(env)
    if isinstance(env, EnvSpec):
        given = sorted({*env.kwargs} & {*_PARAMETERS, "env_wrappers"} - {"num_envs", "autoreset_mode"})
        if given and is_our_entry_point(env):
            raise ValueError(
                f"env: the spec of {env.id} is of a vector env that was made with {', '.join(given)}: "
                "gymnasium.make_vec(spec) makes it again. Here pass the id, and these as arguments"
            )
        theirs = split_spec(env)
        env = theirs.spec
        num_envs = theirs.num_envs if num_envs is None else num_envs
        if backend == "native":
            refuse_wrappers(env, theirs.wrappers)
        wrappers = (*theirs.wrappers, *wrappers) if theirs.wrappers else wrappers
        copy = copy and theirs.settings.get("copy", True)
        if observation_mode == "same":
            observation_mode = theirs.settings.get("observation_mode", "same")
        if autoreset_mode in (AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP.value):
            autoreset_mode = theirs.settings.get("autoreset_mode", autoreset_mode)
    num_envs = 1 if num_envs is None else num_envs
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    choosing = backend == "auto"
    images = render is not None or pixels is not None
    if backend == "auto":
        of_processes = (start, restart, log_prefix, worker_env, cpu_affinity, num_workers, cluster)
        needs_processes = (
            any(one is not None for one in of_processes)
            or (channel, on_timeout) != ("auto", "raise")
            or transport == "shared"
            or ignore_signals
            or spare_envs
        )
        draws = "render_mode" in (env.kwargs | env_kwargs if isinstance(env, EnvSpec) else env_kwargs)
        needs_single = (
            bool(wrappers)
            or observation_mode != "same"
            or seed_plan is not None
            or autoreset_options is not None
            or debug
            or draws
        )
        backend = "workers"
        if not (needs_processes or needs_single):
            more = _native_arguments(env, num_envs, env_kwargs, images=images)
            if more is not None:
                backend, env_kwargs = "native", {**env_kwargs, **more}
        choosing = backend == "workers" and not needs_processes and not debug
        choosing = choosing and timeout_s is None and not images and not draws
    if env_kwargs:
        refuse_misspelled("aioenv.make_vec", _PARAMETERS, env_kwargs, env, native=backend == "native")
    if backend == "native":
        ours = is_native_task(env)
        usual = autoreset_mode in (AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP.value)
        with_mode = ours or (not usual and takes_mode(env))
        _refuse_native(
            wrappers=bool(wrappers),
            observation_mode=observation_mode != "same",
            autoreset_mode=not usual and not with_mode,
            transport=transport == "shared",
            ignore_signals=ignore_signals,
            debug=debug,
            seed_plan=seed_plan is not None,
            autoreset_options=autoreset_options is not None,
            spare_envs=spare_envs,
            cluster=cluster is not None,
        )
        if with_mode:
            env_kwargs["autoreset_mode"] = parse_mode(autoreset_mode)
        factory = vector_env_factory(env, env_kwargs)
        if near := _misspelled(env_kwargs):
            factory = partial(make_with_hints, factory, near)
        return NativeVectorEnv(
            factory,
            num_envs,
            num_workers=0 if num_workers is None else cast(int, num_workers),
            copy=copy,
            timeout_s=timeout_s,
            on_timeout=on_timeout,
            start=start,
            channel=channel,
            preload=preload,
            restart=restart,
            start_timeout_s=start_timeout_s,
            log_prefix=log_prefix,
            worker_env=worker_env,
            render=render,
            pixels=pixels,
            cpu_affinity=cpu_affinity,
            episode_stats=episode_stats,
            stats_prefix=stats_prefix,
            check_numerics=check_numerics,
        )
    factories = [env_factory(env, num_envs, wrappers, images, env_kwargs)] * num_envs
    if isinstance(env, EnvCreator):
        placed = [env.at(slot) for slot in range(num_envs)]
        if any(one is not env for one in placed):
            factories = [env_factory(one, 1, wrappers, False, env_kwargs) for one in placed]
    envs = AsyncVectorEnv(
        factories,
        num_workers=num_workers,
        cluster=cluster,
        start=start,
        channel=channel,
        transport=transport,
        preload=preload,
        copy=copy,
        observation_mode=observation_mode,
        autoreset_mode=autoreset_mode,
        timeout_s=timeout_s,
        on_timeout=on_timeout,
        restart=restart,
        start_timeout_s=start_timeout_s,
        log_prefix=log_prefix,
        worker_env=worker_env,
        render=render,
        pixels=pixels,
        cpu_affinity=cpu_affinity,
        ignore_signals=ignore_signals,
        debug=debug,
        episode_stats=episode_stats,
        stats_prefix=stats_prefix,
        seed_plan=seed_plan,
        autoreset_options=autoreset_options,
        check_numerics=check_numerics,
        spare_envs=spare_envs,
    )
    if choosing and isinstance(env, (str, EnvSpec)):
        name = env if isinstance(env, str) else env.id
        key = name if isinstance(env, str) else repr(env)
        envs._choice = BackendChoice(name, (key, repr(env_kwargs), repr(wrappers)), factories, autoreset_options)
    return envs


def _native_arguments(env: Any, num_envs: int, env_kwargs: Mapping[str, Any], *, images: bool) -> dict[str, Any] | None:
    """Return the further arguments with which the native version of an env gives the results of single envs.

    None if there is no such version, if it does not take these arguments or draws no `images` that are asked for, or
    if single envs are faster.
    """
    if not isinstance(env, (str, EnvSpec)) or (isinstance(env, str) and ":" in env):
        return None
    spec = gymnasium.spec(env) if isinstance(env, str) else env
    if spec.additional_wrappers or num_envs < _NATIVE_FROM.get(spec.id, 1):
        return None
    maker: Any = TASKS.get(str(spec.entry_point)) if is_native_task(spec) else vector_entry_point(spec)
    is_cartpole = maker == _CARTPOLE and spec.entry_point == _SINGLE_CARTPOLE and not images
    if not is_cartpole and maker not in TASKS.values():
        return None
    limit = env_kwargs.get("max_episode_steps")
    limit = spec.max_episode_steps if limit is None else limit
    if is_cartpole and (type(limit) is not int or limit < 1):  # single envs take -1 (none), and refuse others
        return None
    try:
        if not is_cartpole:
            require_batch()
        known = _argument_names(load_env_creator(maker))
    except (VersionError, ImportError):
        return None
    if any(name not in known for name in {**spec.kwargs, **env_kwargs}):
        return None
    _log.info('backend="auto": %d x %s step natively, as one vector env with the same results', num_envs, spec.id)
    return {"one_generator": False, "max_episode_steps": limit} if is_cartpole else {}


def _argument_names(kind: Any) -> set[str]:
    """Return the arguments of a native vector env that single envs have, too, those of its base classes included."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    names = {name for each in constructors for name in inspect.signature(each).parameters}
    return names - _OF_NATIVE


def _refuse_native(**given: bool) -> None:
    """Raise a ValueError if arguments were given that are for single envs."""
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise ValueError(
            f'{", ".join(wrong)}: not with backend="native", whose env is one vector env with a mode and spaces of its '
            'own. backend="workers" takes that; or pass a function that makes the vector env as you want it, wrapped '
            "in gymnasium.wrappers.vector, say"
        )


def takes_mode(env: Any) -> bool:
    """Return whether a vector env, of an id or made by a function, takes its autoreset mode as an argument."""
    if isinstance(env, str) and ":" not in env:
        env = gymnasium.spec(env)
    maker: Any = vector_entry_point(env) if isinstance(env, EnvSpec) else env
    try:
        if isinstance(env, EnvSpec) and isinstance(maker, str):
            maker = load_env_creator(maker)
        if isinstance(env, EnvSpec) and callable(maker) and is_native_task(maker):
            return True
        return "autoreset_mode" in inspect.signature(maker).parameters
    except (ImportError, AttributeError, TypeError, ValueError):  # making it will raise an error that says more
        return False


def env_factory(
    env: str | EnvSpec | Callable[..., Any],
    num_envs: int,
    wrappers: Sequence[Callable[[Env[Any, Any]], Env[Any, Any]]],
    images: bool,
    env_kwargs: dict[str, Any],
) -> Callable[[], Env[Any, Any]]:
    """Check arguments of `make_vec`, and return the factory of one env."""
    check_num_envs(num_envs)
    if not isinstance(wrappers, Iterable) or not all(map(callable, wrappers)):
        one = "; one alone goes into a list, too" * callable(wrappers)
        raise TypeError(f"wrappers: expected a sequence of functions that wrap an env, got {wrappers!r}{one}")
    if isinstance(env, str):
        if ":" not in env:
            try:
                spec = gymnasium.spec(env)
            except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound) as exc:
                if "Did you mean" not in str(exc):
                    exc.add_note(
                        "An id that a package registers is known once the package has been imported, before make_vec; "
                        f'"package:{env}" imports it by itself'
                    )
                raise
            if spec.entry_point is None and spec.vector_entry_point is not None:
                raise ValueError(
                    f"env: {env} is registered as one vector env alone, with no entry_point for single envs: "
                    f'make_vec({env!r}, {num_envs}, backend="native") makes it'
                )
    elif not isinstance(env, EnvSpec) and not callable(env):
        raise TypeError(
            f"env: expected an id, an EnvSpec or a function that makes an env, got {env!r}"
            + _HINT * isinstance(env, (list, tuple))
        )
    if images and isinstance(env, (str, EnvSpec)):
        env_kwargs = {"render_mode": "rgb_array", **env_kwargs}
    return partial(make_env, env, tuple(wrappers), env_kwargs, _misspelled(env_kwargs))


_PARAMETERS = tuple(name for name in inspect.signature(make_vec).parameters if name not in ("env", "env_kwargs"))


def _misspelled(env_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return hints about the arguments of an env whose names are much like one of `make_vec`, or of `reset`."""
    found = {name: get_close_matches(name, _PARAMETERS, 1, 0.75) for name in env_kwargs if name not in _PARAMETERS}
    hints = {name: f"aioenv.make_vec has an argument {matches[0]}" for name, matches in found.items() if matches}
    return {**hints, **({"seed": "envs are seeded by reset(seed=…)"} if "seed" in env_kwargs else {})}


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop of the kind that steps fastest: uvloop's if it is installed, else asyncio's."""
    if (
        sys.platform != "win32" and _has_standard_streams()
    ):  # else uvloop's descriptors get these numbers, and it aborts
        try:
            import uvloop
        except (ImportError, RuntimeError):  # it can't be imported after the main thread has ended
            pass
        else:
            loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
            return loop
    return asyncio.new_event_loop()


def _has_standard_streams() -> bool:
    """Return whether descriptors 0 to 2 are open."""
    try:
        for descriptor in range(3):
            os.fstat(descriptor)
    except OSError:
        return False
    return True


def run(coro: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a coroutine on a new event loop, as `asyncio.run` does, but on uvloop's if it is installed.

    Ctrl-C cancels the coroutine, whose traceback is then that of the KeyboardInterrupt.

    Args:
        coro: the coroutine.
        debug: asyncio's debug mode; None: as `PYTHONASYNCIODEBUG` says.

    Returns:
        The result of the coroutine.

    Raises:
        RuntimeError: if a loop runs in this thread, as in a notebook.
        TypeError: if `coro` is not a coroutine.
    """
    if not asyncio.iscoroutine(coro):
        raise TypeError(f"aioenv.run: expected a coroutine, as `main()` gives if it is an `async def`, got {coro!r}")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        coro.close()
        raise RuntimeError("aioenv.run: an event loop is running here, as in a notebook: await the coroutine instead")
    try:
        with asyncio.Runner(debug=debug, loop_factory=new_event_loop) as runner:
            return runner.run(coro)
    except KeyboardInterrupt as exc:
        if isinstance(exc.__context__, asyncio.CancelledError):  # one traceback instead of two
            raise exc.with_traceback(exc.__context__.__traceback__) from None
        raise
