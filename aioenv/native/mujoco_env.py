"""`NativeMujocoEnv`: the base of tasks that step all of their MuJoCo envs as one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from aioenv.errors import ClosedError, ResetNeededError
from aioenv.native.infos import final_info, leave_out, merge_infos, own, whole
from aioenv.native.sim_pool import SimPool, load_model
from aioenv.native.slot_states import SlotStates

__all__ = ["NativeMujocoEnv"]

Array = npt.NDArray[Any]
Slots = npt.NDArray[np.int64]

ALL = slice(None)
_NONE = np.zeros(0, np.int64)
_ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


class NativeMujocoEnv(SlotStates, VectorEnv[Any, Any, Any]):
    """Many MuJoCo envs of one task, as one `gymnasium.vector.VectorEnv`: one batch of physics, numpy for the rest.

    It does what `gymnasium.vector.SyncVectorEnv` does with as many envs under a `TimeLimit`, bit for bit: seeds, the
    three autoreset modes, infos with their masks, `options["reset_mask"]`. A task says in a few hooks what is seen,
    earned and told, for all slots at once:

        class Pole(NativeMujocoEnv):
            def __init__(self, num_envs, **kwargs):
                super().__init__(num_envs, "pole.xml", frame_skip=2, **kwargs)
                self.set_observation_size(self.model.nq + self.model.nv)

            def draw_start(self, slots):
                noise = self.uniform(slots, -0.01, 0.01, self.model.nq + self.model.nv)
                return self.init_qpos + noise[:, : self.model.nq], self.init_qvel + noise[:, self.model.nq :]

            def observe(self, slots):
                return np.concatenate((self.qpos[slots], self.qvel[slots]), axis=1)

            def outcome(self, actions, obs):
                fallen = np.abs(obs[:, 1]) > 0.2
                return 1.0 - fallen, fallen, {}

    A step: `before_step`, physics (for slots whose episode is over under NEXT_STEP: a new start instead), `after_start`
    if there was any, `observe`, `outcome`. Hooks get and give arrays with the slots as first axis; `qpos`, `qvel` and
    whatever `bind` gave are live: after the step they are those of the state that is observed.

    Args:
        num_envs: how many slots.
        model: an `MjModel`, XML, or a path; a bare name is one of the files that come with Gymnasium's own envs.
        frame_skip: physics steps a step.
        max_episode_steps: after so many steps an episode is truncated; None or -1: never.
        autoreset_mode: when an episode that is over is followed by the next.
        num_threads: how many threads compute the physics; None: as many as CPUs this process may use.
        render_mode: None.
        width, height: of images, in pixels.
        camera_id, camera_name, default_camera_config, max_geom, visual_options: as of Gymnasium's `MujocoEnv`.

    Attributes:
        model: the model of all slots.
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
        model: Any,
        frame_skip: int,
        *,
        max_episode_steps: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
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
            raise ValueError(f"render_mode: expected None, got {render_mode!r}; a native env does not draw itself")
        if max_episode_steps is not None and max_episode_steps != -1 and max_episode_steps <= 0:
            raise ValueError(f"max_episode_steps: expected a positive int, -1 or None, got {max_episode_steps!r}")
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        if isinstance(model, str) and "<" not in model and not model.startswith((".", "/", "~")):
            model = _ASSETS / model
        self.model = load_model(model)
        self.model.vis.global_.offwidth = max(self.model.vis.global_.offwidth, width)
        self.model.vis.global_.offheight = max(self.model.vis.global_.offheight, height)
        self.pool = SimPool(self.model, num_envs, num_threads=num_threads, post_constraint=self.post_constraint)
        self.num_envs = self.pool.num_sims
        self.frame_skip = frame_skip
        self.dt: float = self.model.opt.timestep * frame_skip
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
        self._limit = None if max_episode_steps in (None, -1) else max_episode_steps
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._begun = np.zeros(self.num_envs, np.bool_)
        self._all_begun = False
        self._over = _NONE  # the slots whose episode is over
        self._rngs: list[np.random.Generator | None] = [None] * self.num_envs
        self._seeds: list[int | None] = [None] * self.num_envs
        self._memory: dict[str, Array] = {}
        self._ones = np.ones(self.num_envs, np.bool_)
        self._numbers = np.arange(self.num_envs)

    # ------------------------------------------------------------ what a task says

    def draw_start(self, slots: Slots) -> tuple[Array, Array]:
        """Where new episodes begin: positions `(k, nq)` and velocities `(k, nv)`, drawn with `uniform` or `normal`."""
        raise NotImplementedError

    def observe(self, slots: Any) -> Array:
        """Observations `(k, ...)` in a new array; `slots` indexes live arrays: all slots as a slice, or numbers."""
        raise NotImplementedError

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """What the step that was made means: rewards, terminations (None: none), and columns of infos.

        All rows must be there and in new arrays; those of slots that have just begun an episode are not used.
        """
        raise NotImplementedError

    def start_info(self, slots: Any) -> dict[str, Array]:
        """Columns of infos of resets, `(k, ...)` each, in new arrays."""
        return {}

    def before_step(self) -> None:
        """Note what `outcome` will compare with; `qpos` and the others are still those before the step."""

    def after_start(self, slots: Any) -> None:
        """Note what is needed of slots that have begun an episode (in arrays from `remember`)."""

    # ------------------------------------------------------------ what a task uses

    def set_observation_size(self, size: int) -> None:
        """Observations are float64 vectors of this size, without bounds."""
        self.set_observation_space(Box(-np.inf, np.inf, (size,), np.float64))

    def set_observation_space(self, space: Box) -> None:
        """Observations of one slot are of this space."""
        self.single_observation_space = space
        self.observation_space = batch_space(space, self.num_envs)

    def bind(self, name: str) -> Array:
        """The live array of a field of `MjData`, `(num_envs, ...)` (see `SimPool.bind`)."""
        return self.pool.bind(name)

    def remember(self, name: str, shape: tuple[int, ...] = (), dtype: Any = np.float64) -> Array:
        """An array `(num_envs, *shape)` of what a task knows of each slot from one step to the next.

        Its rows are part of the states of slots. Write into it; don't replace it.
        """
        self._memory[name] = np.zeros((self.num_envs, *shape), dtype)
        return self._memory[name]

    def uniform(self, slots: Slots, low: float, high: float, size: int) -> Array:
        """`(len(slots), size)` numbers, each row drawn as `np_random.uniform(low, high, size)` of its slot."""
        drawn = np.empty((len(slots), size))
        rngs = self._rngs
        for slot, row in zip(slots.tolist(), drawn, strict=True):
            (rngs[slot] or self.rng(slot)).random(out=row)
        drawn *= high - low
        drawn += low
        return drawn

    def normal(self, slots: Slots, size: int) -> Array:
        """`(len(slots), size)` numbers, each row drawn as `np_random.standard_normal(size)` of its slot."""
        drawn = np.empty((len(slots), size))
        rngs = self._rngs
        for slot, row in zip(slots.tolist(), drawn, strict=True):
            (rngs[slot] or self.rng(slot)).standard_normal(out=row)
        return drawn

    def model_field(self, name: str) -> Array:
        """A field of the model with values for each slot, `(num_envs, ...)`; see `SimPool.model_field`."""
        return self.pool.model_field(name)

    def set_const(self, slots: Any = None) -> None:
        """Derive constants anew from changed fields of the model; see `SimPool.set_const`."""
        self.pool.set_const(slots)

    # ------------------------------------------------------------ the vector env

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The generators of all slots."""
        return tuple(map(self.rng, range(self.num_envs)))

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """What each slot's generator was seeded with."""
        self.np_random  # noqa: B018 (seeds those that have none)
        return tuple(self._seeds)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin an episode in every slot, or in those that the boolean array `options["reset_mask"]` names.

        Args:
            seed: None, an int (slot i gets `seed + i`), or one for each slot.
            options: may have a `reset_mask`.

        Returns:
            Observations of all slots (zeros of those that were never reset), and infos of those that were reset.

        Raises:
            ValueError, TypeError: if there is not one seed a slot, or the mask is none.
        """
        self._check_open()
        if seed is None:
            seed = [None] * self.num_envs
        elif isinstance(seed, (int, np.integer)):
            seed = [int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(
                "If seeds are passed as a list the length must match "
                f"num_envs={self.num_envs} but got length={len(seed)}."
            )
        mask = None if options is None else options.get("reset_mask")
        if mask is None:
            slots = self._numbers
        else:
            self._check_mask(mask)
            slots = np.flatnonzero(mask)
        for slot in slots.tolist():
            if seed[slot] is not None:
                self._rngs[slot], self._seeds[slot] = seeding.np_random(seed[slot])
        qpos, qvel = self.draw_start(slots)
        self.pool.start(None if mask is None else slots, qpos, qvel)
        self._begun[slots] = True
        self._all_begun = mask is None or bool(self._begun.all())
        self._elapsed[slots] = 0
        self._over = _NONE if mask is None else self._over[~mask[self._over]]
        where = ALL if mask is None else slots
        self.after_start(where)
        info = self.start_info(where)
        return self._observe_all(), merge_infos({}, info, slots, self.num_envs)

    def _observe_all(self) -> Array:
        obs = own(self.observe(ALL))
        if not self._all_begun:
            obs[~self._begun] = 0
        return obs

    def _check_mask(self, mask: Any) -> None:
        if not isinstance(mask, np.ndarray):
            raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"`options['reset_mask']` must have shape `({self.num_envs},)`, got {mask.shape}")
        if mask.dtype != np.bool_:
            raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
        if not mask.any():
            raise ValueError(
                f"`options['reset_mask']` must contain a boolean array with at least one True value, got {mask}"
            )

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self!r} is closed")

    def step(self, actions: Any) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step every slot; all that is returned is the caller's own.

        Args:
            actions: `(num_envs, nu)`; rows of slots that begin an episode instead are not used.

        Returns:
            Observations, rewards (float64), terminations and truncations (bool), infos.

        Raises:
            ResetNeededError: if it was never reset, or an episode is over and `autoreset_mode` is DISABLED.
            ValueError: if `actions` has another shape.
        """
        return self._step(actions, None)

    def step_some(self, actions: Any, slots: Slots) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step some of the slots; the others are as they were, and take no physics.

        Args:
            actions: `(num_envs, nu)`, as for `step`; rows of other slots are not used.
            slots: which, int64, ascending; may be none.

        Returns:
            As `step`: rows of other slots have their last observation (zeros, if they were never reset), reward 0,
            flags False, and nothing in infos.

        Raises:
            ResetNeededError: if one of them was never reset, or its episode is over and `autoreset_mode` is DISABLED.
            ValueError: if `actions` has another shape.
        """
        if len(slots) == self.num_envs:
            return self._step(actions, None)
        rest = self._ones.copy()
        rest[slots] = False
        # hooks treat all rows: what they remember of other slots is put back
        kept = [(array, array[rest]) for array in self._memory.values()]
        try:
            return self._step(actions, rest)
        finally:
            for array, rows in kept:
                array[rest] = rows

    def _step(
        self, actions: Any, rest: npt.NDArray[np.bool_] | None
    ) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step all slots, but for those of a mask."""
        actions = np.asarray(actions)
        if actions.shape != self._ctrl.shape:
            raise ValueError(f"actions: expected shape {self._ctrl.shape}, got {actions.shape}")
        if not self._all_begun and (rest is None or not (self._begun | rest).all() or self.closed):
            self._check_open()
            raise ResetNeededError("Cannot call env.step() before calling env.reset()")
        starts, due = _NONE, self._over
        if rest is not None:
            due = due[~rest[due]]
        if len(due):
            if self.autoreset_mode is AutoresetMode.NEXT_STEP:
                starts = due
            elif self.autoreset_mode is AutoresetMode.DISABLED:
                raise ResetNeededError(
                    f"the episodes of slots {due.tolist()} are over: reset them with "
                    "options['reset_mask'], or choose another autoreset_mode"
                )
        self.before_step()
        self._physics(actions, starts, rest)
        obs = self._observe_all()
        reward, terminated, columns = self.outcome(actions, obs)
        if terminated is None:
            terminated = np.zeros(self.num_envs, np.bool_)
        elapsed = self._elapsed
        elapsed += 1 if rest is None else ~rest
        if len(starts):
            elapsed[starts] = 0
        truncated = terminated & False if self._limit is None else elapsed >= self._limit
        reward = own(reward) if reward.dtype == np.float64 else reward.astype(np.float64)
        if rest is not None:
            reward[rest] = 0.0
            terminated[rest] = truncated[rest] = False
        if len(starts):
            reward[starts] = 0.0
            terminated[starts] = False
            first = 0 if rest is None else int(rest.argmin())
            info = merge_infos(columns, self.start_info(starts), starts, self.num_envs, first)
        else:
            info = {}
        over = (terminated | truncated).nonzero()[0]
        self._over = over if rest is None else np.union1d(over, self._over[rest[self._over]])
        if len(over) and self.autoreset_mode is AutoresetMode.SAME_STEP:
            info = self._begin_anew(over, obs, columns)
        elif not len(starts):
            info = whole(columns, self._ones)
        if rest is not None:
            info = leave_out(info, rest)
        return obs, reward, terminated, truncated, info

    def _physics(self, actions: Array, starts: Slots, rest: npt.NDArray[np.bool_] | None) -> None:
        """Step the simulations, but for those that begin an episode, and those of a mask."""
        if rest is None and not len(starts):
            self._ctrl[...] = actions
            self.pool.advance(self.frame_skip)
            return
        live = self._ones.copy() if rest is None else ~rest
        live[starts] = False
        slots = live.nonzero()[0]
        self._ctrl[slots] = actions[slots]
        if len(starts):
            qpos, qvel = self.draw_start(starts)
            self.pool.start_and_step(starts, qpos, qvel, slots, self.frame_skip)
            self.after_start(starts)
        elif len(slots):
            self.pool.step(slots, nstep=self.frame_skip)

    def _begin_anew(self, over: Slots, obs: Array, columns: dict[str, Array]) -> dict[str, Any]:
        """Begin the next episodes in the step that has ended the last ones."""
        info = final_info(obs, columns, over, self.num_envs)
        self._finals = over, self.pool.get_states(over)
        self.pool.start(over, *self.draw_start(over))
        self._elapsed[over] = 0
        self.after_start(over)
        obs[over] = self.observe(over)
        info.update(merge_infos(columns, self.start_info(over), over, self.num_envs))
        return info

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads. Arrays that were live keep their values."""
        self._memory = {name: array.copy() for name, array in self._memory.items()}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray) and value.base is not None:
                setattr(self, name, value.copy())
        self._all_begun = False
        self.pool.close()
