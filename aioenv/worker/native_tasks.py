"""Which of Gymnasium's tasks are stepped as one batch, by what, and who asks for that."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

__all__ = ["TASKS", "is_native_task"]

# What is registered for single envs, and what steps many of them as one, with the very same results.
TASKS = {
    f"gymnasium.envs.mujoco.{module}_v5:{name}Env": f"aioenv.native.tasks.{ours}:{name}"
    for module, name, ours in (
        ("ant", "Ant", "locomotion_3d"),
        ("half_cheetah", "HalfCheetah", "locomotion_2d"),
        ("hopper", "Hopper", "locomotion_2d"),
        ("humanoid", "Humanoid", "locomotion_3d"),
        ("humanoidstandup", "HumanoidStandup", "locomotion_3d"),
        ("inverted_double_pendulum", "InvertedDoublePendulum", "arms_and_pendulums"),
        ("inverted_pendulum", "InvertedPendulum", "arms_and_pendulums"),
        ("pusher", "Pusher", "arms_and_pendulums"),
        ("reacher", "Reacher", "arms_and_pendulums"),
        ("swimmer", "Swimmer", "locomotion_2d"),
        ("walker2d", "Walker2d", "locomotion_2d"),
    )
}


def is_native_task(env: Any) -> bool:
    """Whether this makes a `NativeMujocoEnv`.

    Such are ids and specs of Gymnasium's own MuJoCo tasks, its class and no wrapper, and classes of that kind, with or
    without arguments (`functools.partial`).
    """
    while isinstance(env, partial):
        env = env.func
    if isinstance(env, type):
        home = sys.modules.get("aioenv.native.mujoco_env")  # not imported for that: it imports MuJoCo
        return home is not None and issubclass(env, home.NativeMujocoEnv)
    if not isinstance(env, EnvSpec):
        if not isinstance(env, str) or ":" in env:
            return False
        env = gymnasium.spec(env)
    return env.vector_entry_point is None and env.entry_point in TASKS and not env.additional_wrappers
