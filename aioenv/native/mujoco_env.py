"""`NativeMujocoEnv`: the base of tasks that step all of their MuJoCo envs as one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from aioenv.native.loading import Model, take_model
from aioenv.native.sim_pool import SimPool
from aioenv.native.stepping import Stepping
from aioenv.spaces.autoreset import parse_mode

__all__ = ["NativeMujocoEnv"]

_ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


class NativeMujocoEnv(Stepping):
    """Many MuJoCo envs of one task, as one `gymnasium.vector.VectorEnv`: one batch of physics, numpy for the rest.

    It does what `gymnasium.vector.SyncVectorEnv` does with as many envs under a `TimeLimit`, bit for bit: seeds, the
    three autoreset modes, infos with their masks, `options["reset_mask"]`. A task says in a few hooks what is seen,
    earned and told, for all slots at once:

        class Pole(NativeMujocoEnv):
            def __init__(self, num_envs, **kwargs):
                super().__init__(num_envs, "./pole.xml", frame_skip=2, **kwargs)
                self.set_observation_size(self.model.nq + self.model.nv)

            def draw_start(self, slots):
                noise = self.uniform(slots, -0.01, 0.01, self.model.nq + self.model.nv)
                return self.init_qpos + noise[:, : self.model.nq], self.init_qvel + noise[:, self.model.nq :]

            def observe(self, slots):
                return np.concatenate((self.qpos[slots], self.qvel[slots]), axis=1)

            def outcome(self, actions, obs):
                fallen = np.abs(obs[:, 1]) > 0.2
                return 1.0 - fallen, fallen, {}

    A step: `before_step`, `controls`, physics (for slots whose episode is over under NEXT_STEP: a new start instead),
    `after_start` if there was any, `observe`, `outcome`. Hooks get and give arrays with the slots as first axis;
    `qpos`, `qvel` and whatever `bind` gave are live: after the step they are those of the state that is observed.

    Args:
        num_envs: how many slots.
        model: an `MjModel`, an `MjSpec`, XML, or a path. One that does not begin with `.`, `/` or `~` is that of a
            file that comes with Gymnasium's own envs, as there.
        frame_skip: physics steps a step.
        max_episode_steps: after so many steps an episode is truncated; None or -1: never.
        autoreset_mode: when an episode that is over is followed by the next.
        num_threads: how many threads compute the physics; None: as many as CPUs this process may use, a worker its
            share of them.
        render_mode: None.
        width, height: of images, in pixels.
        camera_id, camera_name, default_camera_config, max_geom, visual_options: as of Gymnasium's `MujocoEnv`.

    Attributes:
        model: the model of all slots.
        max_episode_steps: after so many an episode is truncated; None: never.
        dt: seconds of simulated time a step.
        init_qpos, init_qvel: where the model begins.
        qpos, qvel: positions `(num_envs, nq)` and velocities `(num_envs, nv)`, float64, live.
        pool: the simulations.

    Raises:
        ValueError: if an argument is none of the values it may have.
        FileNotFoundError: if there is no such model.
    """

    #: whether steps end with `mj_rnePostConstraint`, without which `cfrc_ext` is that of an earlier step
    post_constraint: ClassVar[bool] = False
    #: whether any thread may step it, one at a time: blocking code does it on its own then
    any_thread: ClassVar[bool] = True

    def __init__(
        self,
        num_envs: int,
        model: Model,
        frame_skip: int,
        *,
        max_episode_steps: int | None = None,
        autoreset_mode: AutoresetMode | Literal["NextStep", "SameStep", "Disabled"] = AutoresetMode.NEXT_STEP,
        num_threads: int | None = None,
        render_mode: str | None = None,
        width: int = 480,
        height: int = 480,
        camera_id: int | None = None,
        camera_name: str | None = None,
        default_camera_config: dict[str, Any] | None = None,
        max_geom: int = 1000,
        visual_options: dict[int, bool] | None = None,
    ) -> None:
        if render_mode is not None:
            raise ValueError(
                f"render_mode: expected None, got {render_mode!r}; a native env does not draw itself: "
                'make_vec(..., backend="native", render=aioenv.RenderConfig()) draws beside the steps'
            )
        if max_episode_steps is not None and max_episode_steps != -1 and not _is_count(max_episode_steps):
            raise ValueError(f"max_episode_steps: expected a positive int, -1 or None, got {max_episode_steps!r}")
        if not _is_count(frame_skip):
            raise ValueError(f"frame_skip: expected a positive int, got {frame_skip!r}")
        if camera_id is not None and camera_name is not None:
            raise ValueError(f"expected a camera_id or a camera_name, got both: {camera_id!r} and {camera_name!r}")
        self.autoreset_mode = parse_mode(autoreset_mode)
        self.model = take_model(_found(model))
        self.model.vis.global_.offwidth = max(self.model.vis.global_.offwidth, width)
        self.model.vis.global_.offheight = max(self.model.vis.global_.offheight, height)
        self.pool = SimPool(self.model, num_envs, num_threads=num_threads, post_constraint=self.post_constraint)
        self.num_envs = self.pool.num_sims
        self.frame_skip = int(frame_skip)
        self.dt: float = self.model.opt.timestep * self.frame_skip
        self.render_mode = None
        self.width, self.height, self.max_geom = width, height, max_geom
        self.camera_id, self.camera_name = camera_id, camera_name
        self.default_camera_config, self.visual_options = default_camera_config, visual_options
        self.metadata = {
            "render_modes": ["human", "rgb_array", "depth_array", "rgbd_tuple"],
            "render_fps": int(np.round(1.0 / self.dt)),
            "autoreset_mode": self.autoreset_mode,
        }
        low, high = self.model.actuator_ctrlrange.astype(np.float32).T
        self.single_action_space = Box(low, high, dtype=np.float32)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.qpos, self.qvel, self._ctrl = map(self.pool.bind, ("qpos", "qvel", "ctrl"))
        self.init_qpos, self.init_qvel = self.qpos[0].copy(), self.qvel[0].copy()
        self.max_episode_steps = None if max_episode_steps in (None, -1) else max_episode_steps
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._begun = np.zeros(self.num_envs, np.bool_)
        self._all_begun = False
        self._over = np.zeros(0, np.int64)  # the slots whose episode is over
        self._rngs: list[np.random.Generator | None] = [None] * self.num_envs
        self._seeds: list[int | None] = [None] * self.num_envs
        self._memory: dict[str, npt.NDArray[Any]] = {}
        self._ones = np.ones(self.num_envs, np.bool_)
        self._last = {}
        self._numbers = np.arange(self.num_envs)
        self._is_strange = not type(self).__module__.startswith("aioenv.native.")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The generators of all slots."""
        return tuple(map(self.rng, range(self.num_envs)))

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """What each slot's generator was seeded with."""
        self.np_random  # noqa: B018 (seeds those that have none)
        return tuple(self._seeds)

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads. Arrays that were live keep their values."""
        self._memory = {name: array.copy() for name, array in self._memory.items()}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray) and value.base is not None:
                setattr(self, name, value.copy())
        self._all_begun = False
        self.pool.close()


def _found(model: Model) -> Model:
    """The model as it was given, or the path of one that comes with Gymnasium."""
    if not isinstance(model, str) or "<" in model or model.startswith((".", "/", "~")):
        return model
    path = _ASSETS / model
    if not path.is_file():
        raise FileNotFoundError(
            f"model: {model!r} is none of the files that come with Gymnasium's envs, in {_ASSETS}; the path of one of "
            f"your own begins with '.', '/' or '~': './{model}', say"
        )
    return path


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) > 0
