"""Packages that are tested together, and their versions: `make ecosystem` has a virtual environment for each entry."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from typing import Any, Literal

Images = Literal["model", "own", None]


@dataclass(frozen=True)
class Task:
    """An env of a package, made as the package's users make it.

    `images` says where the images of `render=` come from: the env's MuJoCo model, or the env's own `render()`.
    """

    id: str
    module: str = ""  # registers the env
    kwargs: dict[str, Any] = field(default_factory=dict)
    images: Images = "model"
    camera: str = ""  # of the model, which images are compared with `mujoco.Renderer`'s; without one the env's own view
    frame_stack: int = 0
    unseeded_infos: tuple[str, ...] = ()  # that differ between two runs with the same seeds in Gymnasium, too
    seeded: bool = True  # whether the episodes after the first follow from the first one's seed, in Gymnasium, too
    name: str = ""

    @property
    def label(self) -> str:
        """The name in test ids and in the table."""
        return self.name or self.id


@dataclass(frozen=True)
class Environment:
    """A virtual environment: pip's requirements, and the tasks that are tested in it."""

    requirements: list[str]
    packages: list[str]  # whose versions the table shows
    tasks: list[Task]
    python: str = ""


def _meta_world(name: str) -> Task:
    return Task("Meta-World/MT1", "metaworld", {"env_name": name, "seed": 42}, name=f"Meta-World {name}")


_robotics = functools.partial(Task, module="gymnasium_robotics")
_dm_control = functools.partial(Task, module="shimmy", images="own")

ENVIRONMENTS = {
    "mujoco-3.3": Environment(
        ["mujoco==3.3.0", "metaworld==3.1.1", "gymnasium-robotics==1.4.2", "dm_control==1.0.28", "shimmy==2.0.1"],
        ["gymnasium", "mujoco", "metaworld", "gymnasium-robotics", "dm_control", "shimmy"],
        [
            _meta_world("reach-v3"),
            _meta_world("drawer-open-v3"),
            _robotics("FetchReach-v4", images="own", camera="external_camera_0"),
            _robotics("FetchPickAndPlace-v4", images="own", camera="gripper_camera_rgb"),
            _robotics("FrankaKitchen-v1", images="own", camera="left_cap"),
            _dm_control("dm_control/cartpole-swingup-v0"),
            _dm_control("dm_control/walker-walk-v0"),
            Task("HalfCheetah-v5"),
        ],
    ),
    "gymnasium-1.2": Environment(
        ["gymnasium[classic-control]==1.2.2"],
        ["gymnasium", "mujoco"],
        [
            Task("CartPole-v1", images="own"),
            Task("Pendulum-v1", images="own"),
            Task("Acrobot-v1", images="own"),
            Task("HalfCheetah-v5"),
            Task("Ant-v5"),
            Task("Humanoid-v5"),
        ],
    ),
    "mujoco-4.0": Environment(
        [
            "mujoco>=4.0",
            "gymnasium>=1.4",
            "minigrid==3.2.0",
            "ale-py==0.12.1",
            "opencv-python-headless",
            "highway-env==1.12.1",
            "gymnasium-robotics==1.4.2",
        ],
        ["gymnasium", "mujoco", "minigrid", "ale-py", "highway-env", "gymnasium-robotics"],
        [
            Task("MiniGrid-DoorKey-5x5-v0", "minigrid", images="own"),
            Task("ALE/Pong-v5", "ale_py", {"frameskip": 1}, images="own", frame_stack=4),
            Task("highway-fast-v0", "highway_env", images="own", unseeded_infos=("action",)),
            _robotics("AntMaze_UMaze-v5", images="own", camera="track"),
            _robotics("PointMaze_UMaze-v3", images="own"),
            _robotics("AdroitHandDoor-v1"),
            _robotics("AdroitHandHammer-v1"),
        ],
    ),
    "gym-aloha": Environment(
        ["gym-aloha==0.1.5"],
        ["gymnasium", "mujoco", "dm_control", "gym-aloha"],
        [Task("gym_aloha/AlohaTransferCube-v0", "gym_aloha", images="own", seeded=False)],
    ),
}


def make(task: Task, limit: int = 10, **kwargs: Any) -> Any:
    """Make an env of the task, truncated after `limit` steps if that is reproducible: a factory of vector envs."""
    import gymnasium as gym

    if task.module:
        gym.register_envs(importlib.import_module(task.module))
    env = gym.make(task.id, **task.kwargs, **kwargs)
    if task.frame_stack:
        env = gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(env), task.frame_stack)
    return gym.wrappers.TimeLimit(env, limit if task.seeded else 100)
