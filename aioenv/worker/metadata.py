"""What is known of an env without using it: its spaces, its spec, its MuJoCo model."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gymnasium import Env, Space

from aioenv.ipc.messages import dump
from aioenv.spaces.large_boxes import packed
from aioenv.state.source import dump_model
from aioenv.worker import current_row
from aioenv.worker.description import picklable_items
from aioenv.worker.loop import StartFailed, describe_failure
from aioenv.worker.service import SlotService
from aioenv.worker.specs import spec_without_values

__all__ = ["Describer", "EnvMetadata", "ModelSignature"]


class ModelSignature(NamedTuple):
    """Which MuJoCo model an env has; equal for equal models.

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
    """What a creator's envs are.

    Attributes:
        observation_space, action_space: of a single env.
        spec: its `EnvSpec`; None if it has none, or one that does not pickle. Large arguments as in
            `AsyncVectorEnv.spec`.
        reward_range: `(lowest, highest)` if the env has such an attribute, which Gymnasium gave up in 1.0, else None.
        reward_threshold: the spec's, from which on the task counts as solved; None if there is none.
        metadata: the env's own.
        render_mode: the env's.
        render_modes: those that it could have.
        model: of a MuJoCo env; None for any other.
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


class Describer(SlotService):
    """A service that makes an env, describes it and closes it; nothing else can be asked of it.

    Args:
        factories: one function that makes it.
    """

    def __init__(self, factories: Sequence[Callable[[], Env[Any, Any]]]) -> None:
        try:
            with current_row.row(0):
                env = factories[0]()
                try:
                    self._metadata = _describe(env)
                finally:
                    env.close()
        except Exception as exc:
            raise StartFailed(describe_failure(exc, 0)) from exc

    def describe(self) -> EnvMetadata:
        """What the env is."""
        return self._metadata

    def afterwards(self) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        """The env is closed already."""


def _describe(env: Env[Any, Any]) -> EnvMetadata:
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
