"""Check the env that a factory has made, time its step if asked, and describe it to the parent: spaces, spec, model."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Env, Space, Wrapper

from aioenv.ipc.messages import dump
from aioenv.spaces.layout import packed
from aioenv.state.checkpoint import RowCheckpoint
from aioenv.state.render_source import MujocoSource, dump_model, find_source
from aioenv.stats.sharing import counting_paused
from aioenv.worker import worker_context
from aioenv.worker.making import explain_no_env
from aioenv.worker.service import SlotService, StartFailed, describe_failure
from aioenv.worker.specs import own_attribute, spec_without_values

__all__ = [
    "EnvDescription",
    "EnvMetadata",
    "FirstCheckpoints",
    "ModelSignature",
    "OneEnvService",
    "check_env",
    "describe_envs",
    "describe_metadata",
    "dumped",
    "dumped_space",
    "measure_step",
    "picklable_items",
    "wrapper_layers",
]

# The first checkpoints of all rows of a worker, and (row, overflow) of those that did not fit.
FirstCheckpoints: TypeAlias = "tuple[npt.NDArray[np.float64], Sequence[tuple[int, bytes]]]"


class EnvDescription(NamedTuple):
    """The description of one env for the parent; a space is None where it equals that of the worker's first env.

    Data that most workers have in common is pickled: the parent sees that it is equal without loading each one.
    """

    observation_space: bytes | None
    action_space: bytes | None
    metadata: dict[str, Any]  # without items that don't pickle
    render_mode: str | None
    spec: bytes | None  # of the first env: an EnvSpec, or None; None if it does not pickle, and of all other envs
    source: MujocoSource | None
    checkpoint_size: int = 0  # float64s of a checkpoint; 0 if the env can't be resumed, or need not be
    checkpoint_obstacle: str | None = None  # why the env can't be resumed
    stepped_alone: bool = True  # whether its slot can be stepped without the others of its worker
    model_fields: bytes | None = None  # of a native vector env, with its first row (see `unchanged_fields`)
    drawn_by: str = ""  # the OpenGL that the env draws its observations with, if they are images
    layers: tuple[tuple[int, str], ...] = ()  # see `wrapper_layers`


def describe_envs(
    envs: Sequence[Env[Any, Any]],
    checkpoints: Sequence[RowCheckpoint],
    find_sources: bool,
    *,
    by_camera: bool,
    with_spec: bool,
) -> list[EnvDescription]:
    """Return one description for each env of a worker.

    Args:
        envs: the envs.
        checkpoints: the checkpoint of each; empty if the envs need not be resumed.
        find_sources: whether to look for MuJoCo models.
        by_camera: see `find_source`.
        with_spec: whether to read the spec of the first env.
    """
    first = envs[0]
    observations, actions = dumped_space(first, "observation_space"), dumped_space(first, "action_space")
    descriptions = []
    sources: dict[MujocoSource, MujocoSource] = {}  # equal ones travel once
    for row, env in enumerate(envs):
        known = env is not first
        checkpoint = checkpoints[row] if checkpoints else None
        source = find_source(env, by_camera=by_camera) if find_sources else None
        if source is not None:
            source = sources.setdefault(source, source)
        descriptions.append(
            EnvDescription(
                _unlike(env, first, "observation_space", observations) if known else observations,
                _unlike(env, first, "action_space", actions) if known else actions,
                picklable_items(env.metadata),
                env.render_mode,
                dumped(spec_without_values(env)) if with_spec and not known else None,
                source,
                checkpoint.size if checkpoint is not None else 0,
                checkpoint.obstacle if checkpoint is not None else None,
                drawn_by=str(getattr(env, "drawn_by", "")),
                layers=wrapper_layers(env),
            )
        )
    return descriptions


def _unlike(env: Any, first: Any, name: str, of_first: bytes) -> bytes | None:
    """Pickle one of the spaces of an env; None if it equals that of the first env, whose pickle is `of_first`."""
    space = getattr(env, name)
    if space is getattr(first, name) or dumped(packed(space)) == of_first or space == getattr(first, name):
        return None
    return dumped_space(env, name)


def wrapper_layers(env: Any) -> tuple[tuple[int, str], ...]:
    """Return the `id` and the class name of an env and of each env that it wraps, the outermost first.

    No other env of this process may share one of them: each would step the other's. `unwrapped` is not used, since a
    wrapper may define its own.
    """
    layers: dict[int, str] = {}
    while id(env) not in layers:
        layers[id(env)] = type(env).__name__
        try:
            below = env.env if isinstance(env, Wrapper) else own_attribute(env, "env")
        except Exception:  # raised by a property
            break
        if not isinstance(below, Env):
            break
        env = below
    return tuple(layers.items())


def check_env(env: Any) -> Env[Any, Any]:
    """Return the env that a factory made; raise a TypeError, which says how to mend it, if it made no env."""
    if problem := explain_no_env(env):
        raise TypeError(f"the factory returned {problem}")
    if missing := [name for name in ("reset", "step", "unwrapped") if not hasattr(env, name)]:
        raise TypeError(f"the factory returned {env!r}, expected a gymnasium.Env: it has no {', '.join(missing)}")
    for name in ("observation_space", "action_space"):
        try:
            space = getattr(env, name)
        except AttributeError as exc:
            raise TypeError(f"the env {env!r} has no {name}: expected a gymnasium.Space") from exc
        if not isinstance(space, Space):
            kind = type(space).__module__.partition(".")[0]
            got, hint = f"{space!r:.100}", ""
            if kind == "gym":
                got = f"gym's {got}"
                hint = "; shimmy adapts most envs of that (GymV21CompatibilityV0, GymV26CompatibilityV0)"
            elif hasattr(env, "possible_agents"):
                got = f"that of PettingZoo: a {type(space).__name__}"
                hint = "; aioenv.envs.PettingZooEnv makes a Gymnasium env of it"
            raise TypeError(f"the {name} of the env {env!r}: expected a gymnasium.Space, got {got}{hint}")
    return env  # type: ignore[no-any-return]


def dumped_space(env: Any, name: str) -> bytes:
    """Pickle one of the spaces of an env; raise a TypeError, which says what to do, if it doesn't pickle."""
    space: Space[Any] = getattr(env, name)
    try:
        return dump(packed(space))
    except Exception as exc:
        raise TypeError(
            f"the {name} of the env {env!r} does not pickle, so this process can't tell it to its parent: {exc}. "
            "Leave out of the space what does not (a lock, an open file, a generator), or give it a __reduce__"
        ) from exc


def picklable_items(values: Any) -> dict[str, Any]:
    """Return the items of a mapping that pickle, usually all; no items of None, as some adapters have it."""
    items = dict(values) if isinstance(values, Mapping) else {}
    if dumped(items) is None:
        items = {key: value for key, value in items.items() if dumped(value) is not None}
    return items


def dumped(value: Any) -> bytes | None:
    """Pickle a value; None if it doesn't pickle."""
    try:
        return dump(value)
    except Exception:
        return None


# ------------------------------------------------------------ metadata, without running the env


class ModelSignature(NamedTuple):
    """Identifies the MuJoCo model of an env; equal for equal models.

    Attributes:
        nq, nv, nu, na, nbody, ngeom: sizes of the model, under MuJoCo's names.
        digest: SHA-256 of the whole model, in hexadecimal.
    """

    nq: int
    nv: int
    nu: int
    na: int
    nbody: int
    ngeom: int
    digest: str


class EnvMetadata(NamedTuple):
    """The metadata of a creator's envs.

    Attributes:
        observation_space, action_space: of a single env.
        spec: its `EnvSpec`; None if it has none, or one that does not pickle. Large arguments as in
            `AsyncVectorEnv.spec`.
        reward_range: `(lowest, highest)` if the env has such an attribute, which Gymnasium removed in 1.0, else None.
        reward_threshold: the return from which on the task counts as solved, from the spec; None if there is none.
        metadata: the env's `metadata`.
        render_mode: the env's `render_mode`.
        render_modes: the render modes that the env supports.
        model: the model of a MuJoCo env; None for any other env.
    """

    observation_space: Space[Any]
    action_space: Space[Any]
    spec: Any
    reward_range: tuple[float, float] | None
    reward_threshold: float | None
    metadata: dict[str, Any]
    render_mode: str | None
    render_modes: tuple[str, ...]
    model: ModelSignature | None


class OneEnvService(SlotService):
    """A service that makes an env, examines it and closes it at once; it answers no other request than `ping`.

    Args:
        factories: one function that makes the env.
        examine: is called with the env, and returns the description.
    """

    def __init__(
        self, factories: Sequence[Callable[[], Env[Any, Any]]], examine: Callable[[Env[Any, Any]], Any]
    ) -> None:
        try:
            with worker_context.running_row(0):
                env = factories[0]()
                try:
                    self._description = examine(env)
                finally:
                    env.close()
        except Exception as exc:
            raise StartFailed(describe_failure(exc, 0)) from exc

    def describe(self) -> Any:
        """Return what was found out about the env."""
        return self._description

    def ping(self) -> None:
        """Do nothing: the caller measures how long that takes."""

    def after_reply(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the env is closed already."""


# For how long an env is stepped to measure its steps, in seconds.
_MEASURE_S = 20e-3


def measure_step(env: Env[Any, Any]) -> float:
    """Step an env with random actions for 20 ms; return the mean seconds of a step, with its share of resets.

    It is stepped as envs of the training process are: not on the thread that made it and, if that can matter since
    asyncio was imported, while a loop runs. Shared statistics ignore these steps.
    """
    from concurrent.futures import ThreadPoolExecutor  # few workers need it

    asyncio: Any = sys.modules.get("asyncio")

    async def on_loop() -> float:
        return _mean_step(env)

    with counting_paused(), ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: _mean_step(env) if asyncio is None else asyncio.run(on_loop())).result()


def _mean_step(env: Env[Any, Any]) -> float:
    env.action_space.seed(0)
    env.reset(seed=0)
    env.step(env.action_space.sample())  # the first step also checks and compiles
    actions = [env.action_space.sample() for _ in range(16)]
    steps: list[float] = []
    resets = [0.0]
    end_s = perf_counter() + _MEASURE_S
    while (start_s := perf_counter()) < end_s or not steps:
        _, _, terminated, truncated, _ = env.step(actions[len(steps) % len(actions)])
        steps.append(perf_counter() - start_s)
        if terminated or truncated:
            start_s = perf_counter()
            env.reset()
            resets.append(perf_counter() - start_s)
    return _usual(steps) + (len(resets) - 1) / len(steps) * _usual(resets)


def _usual(times: list[float]) -> float:
    """Return the mean without the longest fifth: other processes have interrupted those, or the code was cold."""
    kept = sorted(times)[: -(len(times) // 5) or None]
    return sum(kept) / len(kept)


def describe_metadata(env: Env[Any, Any]) -> EnvMetadata:
    """Return the metadata of an env."""
    spec = spec_without_values(env)
    reward_threshold = getattr(spec, "reward_threshold", None)
    reward_range = env.get_wrapper_attr("reward_range") if env.has_wrapper_attr("reward_range") else None
    try:
        dump(spec)
    except Exception:
        spec = None
    return EnvMetadata(
        observation_space=packed(env.observation_space),
        action_space=packed(env.action_space),
        spec=spec,
        reward_range=None if reward_range is None else (float(reward_range[0]), float(reward_range[1])),
        reward_threshold=reward_threshold,
        metadata=picklable_items(env.metadata),
        render_mode=env.render_mode,
        render_modes=tuple((env.metadata or {}).get("render_modes", ())),
        model=_sign_model(env),
    )


def _sign_model(env: Env[Any, Any]) -> ModelSignature | None:
    mujoco = sys.modules.get("mujoco")
    model = getattr(env.unwrapped, "model", None)
    if mujoco is None or not isinstance(model, mujoco.MjModel):
        return None
    sizes = [int(getattr(model, name)) for name in ModelSignature._fields[:-1]]
    return ModelSignature._make([*sizes, hashlib.sha256(dump_model(model)).hexdigest()])
