"""aioenv: step many reinforcement-learning environments at once, from asyncio.

    async with aioenv.make_vec("HalfCheetah-v5", num_envs=64) as envs:
        obs, info = await envs.reset(seed=0)
        obs, reward, terminated, truncated, info = await envs.step(actions)

`make_vec` and `AsyncVectorEnv` make vector envs of single envs, in worker processes; with `backend="native"`, or by
`NativeVectorEnv`, of envs that are written as one batch. `aioenv.sync` has the same without `await`, and a drop-in for
Gymnasium's `AsyncVectorEnv`. `run` is `asyncio.run` on the faster loop. `evaluate` runs numbered episodes, `record`
makes a video, `RenderPool` draws. All errors are an `AioenvError`.
"""

# Names are loaded on first use (PEP 562), so that a worker process, which needs only a few of the modules, does not
# import asyncio.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from aioenv import adapters as adapters
    from aioenv import envs as envs
    from aioenv import stats as stats
    from aioenv import sync as sync
    from aioenv import testing as testing
    from aioenv import wrappers as wrappers
    from aioenv.assign import construct_envs as construct_envs
    from aioenv.assign import plan_workers as plan_workers
    from aioenv.cluster.ray import RayCluster as RayCluster
    from aioenv.collector.collected import CollectedRollout as CollectedRollout
    from aioenv.collector.collected import CollectorStats as CollectorStats
    from aioenv.collector.rollout_collector import RolloutCollector as RolloutCollector
    from aioenv.core.results import Ready as Ready
    from aioenv.core.results import ResetResult as ResetResult
    from aioenv.core.results import SlotStep as SlotStep
    from aioenv.core.results import StepResult as StepResult
    from aioenv.core.waits import Stats as Stats
    from aioenv.creator import EnvCreator as EnvCreator
    from aioenv.display import show_output as show_output
    from aioenv.errors import ActionError as ActionError
    from aioenv.errors import AioenvError as AioenvError
    from aioenv.errors import ArgumentError as ArgumentError
    from aioenv.errors import ClosedError as ClosedError
    from aioenv.errors import EnvError as EnvError
    from aioenv.errors import EpisodesDone as EpisodesDone
    from aioenv.errors import LoopError as LoopError
    from aioenv.errors import NestedProcessError as NestedProcessError
    from aioenv.errors import NoAsyncCallError as NoAsyncCallError
    from aioenv.errors import NumericsError as NumericsError
    from aioenv.errors import OutOfStepError as OutOfStepError
    from aioenv.errors import PausedError as PausedError
    from aioenv.errors import PendingCallError as PendingCallError
    from aioenv.errors import PolicyError as PolicyError
    from aioenv.errors import RenderError as RenderError
    from aioenv.errors import RenderTimeout as RenderTimeout
    from aioenv.errors import ResetNeededError as ResetNeededError
    from aioenv.errors import ResumeError as ResumeError
    from aioenv.errors import SlotError as SlotError
    from aioenv.errors import SlotErrorGroup as SlotErrorGroup
    from aioenv.errors import SoftwareRenderWarning as SoftwareRenderWarning
    from aioenv.errors import SpaceMismatchError as SpaceMismatchError
    from aioenv.errors import StaleViewWarning as StaleViewWarning
    from aioenv.errors import StartTimeout as StartTimeout
    from aioenv.errors import StepTimeout as StepTimeout
    from aioenv.errors import UnsendableError as UnsendableError
    from aioenv.errors import VersionError as VersionError
    from aioenv.errors import WireError as WireError
    from aioenv.errors import WorkerDied as WorkerDied
    from aioenv.errors import WorkerStartError as WorkerStartError
    from aioenv.loops.evaluate import Evaluation as Evaluation
    from aioenv.loops.evaluate import evaluate as evaluate
    from aioenv.loops.record import Recording as Recording
    from aioenv.loops.record import record as record
    from aioenv.make import make_vec as make_vec
    from aioenv.make import run as run
    from aioenv.modders.base import Modder as Modder
    from aioenv.modders.lights_and_cameras import CameraModder as CameraModder
    from aioenv.modders.lights_and_cameras import LightModder as LightModder
    from aioenv.modders.surfaces import MaterialModder as MaterialModder
    from aioenv.modders.surfaces import TextureModder as TextureModder
    from aioenv.native.mujoco_env import NativeMujocoEnv as NativeMujocoEnv
    from aioenv.native.sim_pool import SimPool as SimPool
    from aioenv.native_vector_env import NativeVectorEnv as NativeVectorEnv
    from aioenv.process.restart_policy import RestartPolicy as RestartPolicy
    from aioenv.rendering.config import RenderConfig as RenderConfig
    from aioenv.rendering.config import RenderQuality as RenderQuality
    from aioenv.rendering.render_pool import RenderPool as RenderPool
    from aioenv.rollout.numbered_episodes import Episode as Episode
    from aioenv.rollout.recorder import Rollout as Rollout
    from aioenv.state.snapshot import EnvState as EnvState
    from aioenv.state.snapshot import load as load
    from aioenv.state.snapshot import save as save
    from aioenv.stats import EpisodeCounter as EpisodeCounter
    from aioenv.stats import EpisodeEvent as EpisodeEvent
    from aioenv.stats import EpisodeStats as EpisodeStats
    from aioenv.stats import SharedRunningStats as SharedRunningStats
    from aioenv.vector_env import AsyncVectorEnv as AsyncVectorEnv
    from aioenv.watching.viewer import Viewer as Viewer
    from aioenv.worker.worker_context import is_spare_env as is_spare_env

_ERRORS = (
    "ActionError", "AioenvError", "ArgumentError", "ClosedError", "EnvError", "EpisodesDone", "LoopError",
    "NestedProcessError", "NoAsyncCallError", "NumericsError", "OutOfStepError",
    "PausedError", "PendingCallError", "PolicyError", "RenderError", "RenderTimeout", "ResetNeededError", "ResumeError",
    "SlotError", "SlotErrorGroup", "SoftwareRenderWarning", "SpaceMismatchError", "StaleViewWarning", "StartTimeout",
    "StepTimeout", "UnsendableError", "VersionError", "WireError", "WorkerDied", "WorkerStartError",
)  # fmt: skip

_HOME = {
    **dict.fromkeys(_ERRORS, "aioenv.errors"),
    **dict.fromkeys(("Ready", "ResetResult", "SlotStep", "StepResult"), "aioenv.core.results"),
    **dict.fromkeys(("EnvState", "load", "save"), "aioenv.state.snapshot"),
    **dict.fromkeys(("construct_envs", "plan_workers"), "aioenv.assign"),
    **dict.fromkeys(("EpisodeCounter", "EpisodeEvent", "EpisodeStats", "SharedRunningStats"), "aioenv.stats"),
    "AsyncVectorEnv": "aioenv.vector_env",
    "RayCluster": "aioenv.cluster.ray",
    "EnvCreator": "aioenv.creator",
    "Episode": "aioenv.rollout.numbered_episodes",
    **dict.fromkeys(("Evaluation", "evaluate"), "aioenv.loops.evaluate"),
    "Rollout": "aioenv.rollout.recorder",
    "RolloutCollector": "aioenv.collector.rollout_collector",
    **dict.fromkeys(("CollectedRollout", "CollectorStats"), "aioenv.collector.collected"),
    "Stats": "aioenv.core.waits",
    "NativeMujocoEnv": "aioenv.native.mujoco_env",
    "NativeVectorEnv": "aioenv.native_vector_env",
    "CameraModder": "aioenv.modders.lights_and_cameras",
    "LightModder": "aioenv.modders.lights_and_cameras",
    "MaterialModder": "aioenv.modders.surfaces",
    "Modder": "aioenv.modders.base",
    "RenderConfig": "aioenv.rendering.config",
    "RenderPool": "aioenv.rendering.render_pool",
    "RenderQuality": "aioenv.rendering.config",
    "TextureModder": "aioenv.modders.surfaces",
    "Recording": "aioenv.loops.record",
    "record": "aioenv.loops.record",
    "RestartPolicy": "aioenv.process.restart_policy",
    "SimPool": "aioenv.native.sim_pool",
    "Viewer": "aioenv.watching.viewer",
    "is_spare_env": "aioenv.worker.worker_context",
    "make_vec": "aioenv.make",
    "run": "aioenv.make",
    "show_output": "aioenv.display",
}

_PACKAGES = ("adapters", "envs", "stats", "sync", "testing", "wrappers")

__all__ = ["__version__", "sync", *_HOME]


if not TYPE_CHECKING:  # else type checkers would take every name for one that is there

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"aioenv.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'aioenv' has no attribute {name!r}")
        if _HOME[name] != "aioenv.errors":
            importlib.import_module("aioenv.requirements").check_requirements()
        try:
            value = getattr(importlib.import_module(_HOME[name]), name)
        except RuntimeError:  # of MuJoCo's import, which says less
            importlib.import_module("aioenv.worker.mujoco_gl").check_mujoco_gl()
            raise
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})
