"""`NativeMujocoEnv`: the base class of tasks that step all of their MuJoCo envs as one batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.spaces import Box
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from aioenv.errors import ClosedError, ResetNeededError
from aioenv.native.hook_results import (
    check_columns,
    check_controls,
    check_obs,
    check_outcome,
    check_start,
    final_info,
    full_infos,
    merge_reset_infos,
    owned,
    remove_rows,
)
from aioenv.native.loading import Model, load_model
from aioenv.native.sim_pool import SimPool
from aioenv.spaces.autoreset import parse_mode
from aioenv.spaces.seeding import (
    RNG_WORDS,
    SEED_WORDS,
    GeneratorReader,
    generator_from_words,
    seed_from_words,
    seed_words,
    split_reset_options,
    spread_seeds,
)

__all__ = ["NativeMujocoEnv"]

Array = npt.NDArray[Any]
Slots = npt.NDArray[np.int64]

_ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
_ALL = slice(None)
_NONE = np.zeros(0, np.int64)
_ONE = np.array(1)


class NativeMujocoEnv(VectorEnv[Any, Any, Any]):
    """Many MuJoCo envs of one task, as one `gymnasium.vector.VectorEnv`: one batch of physics, numpy for the rest.

    It gives the results of `gymnasium.vector.SyncVectorEnv` with as many envs under a `TimeLimit`, bit for bit: seeds,
    the three autoreset modes, infos with their masks, `options["reset_mask"]`. A task defines observations, rewards and
    infos in a few hooks, for all slots at once::

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

    A step calls `before_step` and `controls`, steps the physics, and calls `after_start` if any slot started, `observe`
    and `outcome`. (Under NEXT_STEP, slots whose episode has ended start a new one instead of a step.) Hooks get and
    return arrays with the slots as first axis. `qpos`, `qvel` and the arrays of `bind` are live: after the step they
    are those of the state that is observed.

    Args:
        num_envs: how many slots.
        model: an `MjModel`, an `MjSpec`, XML, or a path. A path that does not begin with `.`, `/` or `~` names a file
            that comes with Gymnasium's own envs, as there.
        frame_skip: physics steps per step.
        max_episode_steps: after so many steps an episode is truncated; None or -1: never.
        autoreset_mode: when an episode that has ended is followed by the next.
        num_threads: how many threads compute the physics; None: as many as CPUs this process may use, a worker its
            share of them.
        render_mode: None.
        width, height: of images, in pixels.
        camera_id, camera_name, default_camera_config, max_geom, visual_options: as of Gymnasium's `MujocoEnv`.

    Attributes:
        model: the model of all slots.
        max_episode_steps: after so many an episode is truncated; None: never.
        init_qpos, init_qvel: the initial state of the model.
        qpos, qvel: positions `(num_envs, nq)` and velocities `(num_envs, nv)`, float64, live.
        pool: the simulations.

    Raises:
        ValueError: if an argument is none of the values it may have.
        FileNotFoundError: if there is no such model.
    """

    #: whether steps end with `mj_rnePostConstraint`, without which `cfrc_ext` is that of an earlier step
    post_constraint: ClassVar[bool] = False
    #: whether any thread may step it, one at a time: then blocking code steps it on its own thread
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
        if not _is_count(num_envs):
            raise ValueError(f"num_envs: expected a positive int, got {num_envs!r}")
        if not _is_count(frame_skip):
            raise ValueError(f"frame_skip: expected a positive int, got {frame_skip!r}")
        if camera_id is not None and camera_name is not None:
            raise ValueError(f"expected a camera_id or a camera_name, got both: {camera_id!r} and {camera_name!r}")
        self.autoreset_mode = parse_mode(autoreset_mode)
        self.model = load_model(_gymnasium_asset(model))
        self.model.vis.global_.offwidth = max(self.model.vis.global_.offwidth, width)
        self.model.vis.global_.offheight = max(self.model.vis.global_.offheight, height)
        self.pool = SimPool(self.model, num_envs, num_threads=num_threads, post_constraint=self.post_constraint)
        self.num_envs = self.pool.num_sims
        self.frame_skip = int(frame_skip)
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
        self._started = np.zeros(self.num_envs, np.bool_)
        self._all_started = False
        self._ended_slots = np.zeros(0, np.int64)  # slots whose episode has ended
        self._rngs: list[np.random.Generator | None] = [None] * self.num_envs
        self._seeds: list[int | None] = [None] * self.num_envs
        self._memory: dict[str, npt.NDArray[Any]] = {}
        self._ones = np.ones(self.num_envs, np.bool_)
        # by slot that was put into a state since its last step: the last observation, and the physics of that
        self._observed: dict[int, tuple[Array, Array]] = {}
        self._generators: GeneratorReader | None = None
        self._seed_words: npt.NDArray[np.uint64]
        # slots whose episodes the last step ended, with their states
        self._final_states: tuple[Slots, Array] | None = None
        self._all_slots = np.arange(self.num_envs)
        self._is_user_task = not type(self).__module__.startswith("aioenv.native.")

    @property
    def dt(self) -> float:
        """Seconds of simulated time per step, of the model that all slots share."""
        return float(self.model.opt.timestep) * self.frame_skip

    # ------------------------------------------------------------ hooks that a task overrides

    def draw_start(self, slots: Slots) -> tuple[Array, Array]:
        """Draw the starts of new episodes: positions `(k, nq)` and velocities `(k, nv)`, with `uniform` or `normal`.

        The rest of MuJoCo's state starts as the model defines it; `after_start` may write to it and then call
        `self.pool.forward(slots)`.
        """
        raise _missing(self, "draw_start(slots)")

    def observe(self, slots: Any) -> Array:
        """Return observations `(k, ...)` in a new array; `slots` indexes live arrays: a slice of all, or numbers."""
        raise _missing(self, "observe(slots)")

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """Return rewards, terminations (None: none), and columns of infos of the step that was made.

        Each array has a row for every slot, and is copied. Rows of slots that have just begun an episode are not used.
        Changes that this hook makes to their remembered arrays and to their MuJoCo state are undone. `obs` has the
        observations that the step will return.
        """
        raise _missing(self, "outcome(actions, obs)")

    def start_info(self, slots: Any) -> dict[str, Array]:
        """Return the columns of infos of resets, `(k, ...)` each, in new arrays."""
        return {}

    def controls(self, actions: Array) -> Array:
        """Return the controls `(num_envs, nu)` of actions: the actions themselves, unless a task overrides this.

        Other effects of an action, such as moving a `mocap` body, belong here, too.
        """
        return actions

    def before_step(self) -> None:
        """Note values that `outcome` will need; `qpos`, `qvel` and other live arrays still have those before the step.

        This is true of fields that are part of MuJoCo's state. A derived field (`xpos`, say) is not valid if the slot
        has just been put into a state: `remember` it in `after_start` and `outcome`.
        """

    def after_start(self, slots: Any) -> None:
        """Note values of slots that have begun an episode, in arrays from `remember`."""

    # ------------------------------------------------------------ methods that a task calls

    def set_observation_size(self, size: int) -> None:
        """Declare that observations are float64 vectors of this size, without bounds."""
        self.set_observation_space(Box(-np.inf, np.inf, (size,), np.float64))

    def set_observation_space(self, space: Box) -> None:
        """Set the observation space of one slot.

        Raises:
            TypeError: if a batch of such observations is no array.
        """
        self.single_observation_space, self.observation_space = space, self._batched("set_observation_space", space)

    def set_action_space(self, space: Space[Any]) -> None:
        """Set the action space of one slot; `controls` converts actions to controls, by default they are controls.

        Raises:
            TypeError: if a batch of such actions is no array.
        """
        self.single_action_space, self.action_space = space, self._batched("set_action_space", space)

    def _batched(self, setter: str, space: Space[Any]) -> Space[Any]:
        batched = batch_space(space, self.num_envs)
        if batched.shape is None:
            raise TypeError(f"{setter}: expected a space whose batches are arrays, got {space!r}")
        return batched

    def bind(self, name: str) -> Array:
        """Return the live array of a field of `MjData`, `(num_envs, ...)` (see `SimPool.bind`)."""
        return self.pool.bind(name)

    def remember(self, name: str, shape: int | tuple[int, ...] = (), dtype: Any = np.float64) -> Array:
        """Make an array `(num_envs, *shape)` that a task keeps from one step to the next, zero at first.

        Its rows are part of the states of slots. Write into it; don't replace it.

        Raises:
            ValueError: if there is one of this name, in a base class, say.
            TypeError: if it could have Python objects in it.
        """
        if name in self._memory:
            raise ValueError(f"remember: {name!r} is there already; give each array a name of its own")
        if (kind := np.dtype(dtype)).hasobject:
            raise TypeError(f"remember: {name!r}: expected numbers, got dtype {kind}")
        shape = shape if isinstance(shape, (tuple, list)) else (shape,)
        self._memory[name] = array = np.zeros((self.num_envs, *shape), kind)
        return array

    def uniform(self, slots: Slots | slice, low: float, high: float, size: int) -> Array:
        """Draw `(k, size)` numbers for k slots, each row as `np_random.uniform(low, high, size)` of its slot.

        Raises:
            ValueError: if `high` is less than `low`.
            OverflowError: if one is not finite, or they are too far apart.
        """
        if high < low:
            raise ValueError(f"uniform: expected low <= high, got {low} and {high}")
        if not math.isfinite(high - low):
            raise OverflowError(f"uniform: expected finite numbers whose difference is one, got {low} and {high}")
        numbers = range(self.num_envs)[slots] if isinstance(slots, slice) else slots.tolist()
        drawn = np.empty((len(numbers), size))
        rngs = self._rngs
        for slot, row in zip(numbers, drawn, strict=True):
            (rngs[slot] or self.rng(slot)).random(out=row)
        drawn *= high - low
        drawn += low
        return drawn

    def normal(self, slots: Slots | slice, size: int) -> Array:
        """Draw `(k, size)` numbers for k slots, each row as `np_random.standard_normal(size)` of its slot."""
        numbers = range(self.num_envs)[slots] if isinstance(slots, slice) else slots.tolist()
        drawn = np.empty((len(numbers), size))
        rngs = self._rngs
        for slot, row in zip(numbers, drawn, strict=True):
            (rngs[slot] or self.rng(slot)).standard_normal(out=row)
        return drawn

    def model_field(self, name: str) -> Array:
        """Return a field of the model with values for each slot, `(num_envs, ...)`; see `SimPool.model_field`."""
        return self.pool.model_field(name)

    def set_const(self, slots: Any = None) -> None:
        """Recompute the constants derived from changed fields of the model; see `SimPool.set_const`."""
        self.pool.set_const(slots)

    # ------------------------------------------------------------ reset and step

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin an episode in every slot, or in those that the boolean array `options["reset_mask"]` names.

        Args:
            seed: None, an int (slot i gets `seed + i`), or one for each slot.
            options: may have a `reset_mask`.

        Returns:
            Observations of all slots (zeros of those that were never reset), and infos of those that were reset.

        Raises:
            ValueError, TypeError: if there is not one seed for each slot, or the mask is invalid.
        """
        self._check_open()
        seeds = spread_seeds(seed, self._all_slots, self.num_envs)
        mask = None if options is None else options.get("reset_mask")
        if mask is None:
            slots = self._all_slots
        else:
            split_reset_options({"reset_mask": mask}, self.num_envs)  # raises if it is invalid
            slots = np.flatnonzero(mask)
        seeded = {slot: seeding.np_random(seeds[slot]) for slot in slots.tolist() if seeds[slot] is not None}
        for slot, (rng, number) in seeded.items():
            self._rngs[slot], self._seeds[slot] = rng, number
        qpos, qvel = self._checked_start(slots)
        self.pool.start(None if mask is None else slots, qpos, qvel)
        self._forget_observed(slots)
        self._started[slots] = True
        self._all_started = mask is None or bool(self._started.all())
        self._elapsed[slots] = 0
        self._ended_slots = _NONE if mask is None else self._ended_slots[~mask[self._ended_slots]]
        where = _ALL if mask is None else slots
        self.after_start(where)
        info = self._checked_start_info(where, len(slots))
        return self._observe_all(), merge_reset_infos({}, info, slots, self.num_envs)

    def _observe_all(self) -> Array:
        obs = owned(self._checked_obs(_ALL, self.num_envs))
        if not self._all_started:
            obs[~self._started] = 0
        if self._observed:
            obs[list(self._observed)] = [seen for seen, _ in self._observed.values()]
        return obs

    def _keep_observed(self, slots: Slots) -> None:
        """Keep the last observations of slots whose state is about to change: steps of other slots return these."""
        kept = zip(self._observe_all()[slots], self.observed_physics_states(slots), strict=True)
        self._observed.update(zip(slots.tolist(), kept, strict=True))

    def _forget_observed(self, slots: Slots) -> None:
        """Forget the last observations of slots that are reset or stepped."""
        for slot in slots.tolist() if self._observed else ():
            self._observed.pop(slot, None)

    # Calls of hooks. The results of users' tasks are checked, those of our own tasks are not.

    def _checked_start(self, slots: Slots) -> tuple[Array, Array]:
        start = self.draw_start(slots)
        return check_start(self, start, len(slots)) if self._is_user_task else start

    def _checked_controls(self, actions: Array) -> Array:
        controls = self.controls(actions)
        return check_controls(self, controls, self._ctrl.shape) if self._is_user_task else controls

    def _checked_obs(self, slots: Any, count: int) -> Array:
        obs = self.observe(slots)
        return check_obs(self, obs, count) if self._is_user_task else obs

    def _checked_start_info(self, slots: Any, count: int) -> dict[str, Array]:
        columns = self.start_info(slots)
        return check_columns(self, "start_info", columns, count) if self._is_user_task else columns

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError.of(repr(self))

    def step(self, actions: Any) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step every slot; the returned arrays are the caller's own.

        Args:
            actions: a batch of `action_space`, by default `(num_envs, nu)`; rows of slots that begin an episode instead
                are not used.

        Returns:
            Observations, rewards (float64), terminations and truncations (bool), infos.

        Raises:
            ResetNeededError: if it was never reset, or an episode has ended and `autoreset_mode` is DISABLED.
            ValueError: if `actions` has another shape.
        """
        return self._step(actions, None)

    def step_some(self, actions: Any, slots: Slots) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step some of the slots; the others stay as they are, without physics.

        Args:
            actions: a batch for all slots, as for `step`; rows of other slots are not used.
            slots: which, int64, ascending; may be empty.

        Returns:
            As `step`: rows of other slots have their last observation (zeros, if they were never reset), reward 0,
            flags False, and nothing in infos.

        Raises:
            ResetNeededError: if one of them was never reset, or its episode has ended and `autoreset_mode` is DISABLED.
            ValueError: if `actions` has another shape.
        """
        if len(slots) == self.num_envs:
            return self._step(actions, None)
        skipped = self._ones.copy()
        skipped[slots] = False
        # hooks write all rows: undo their changes to other slots
        kept = self._save_rows(skipped.nonzero()[0])
        try:
            return self._step(actions, skipped)
        finally:
            self._restore_rows(*kept)

    def _save_rows(self, slots: Slots) -> tuple[Slots, list[Array], Array | None]:
        """Save the rows of some slots that hooks may write: remembered arrays, and for users' tasks the physics."""
        physics = self.pool.get_states(slots) if self._is_user_task and len(slots) else None
        return slots, [array[slots] for array in self._memory.values()], physics

    def _restore_rows(self, slots: Slots, memory: list[Array], physics: Array | None) -> None:
        for array, rows in zip(self._memory.values(), memory, strict=True):
            array[slots] = rows
        if physics is not None and not self.closed:
            self.pool.set_states(physics, slots)

    def _step(
        self, actions: Any, skipped: npt.NDArray[np.bool_] | None
    ) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step all slots except those of the mask `skipped`."""
        actions = np.asarray(actions, order="C")  # sums of rows depend on it
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions: expected shape {self.action_space.shape}, got {actions.shape}")
        if not self._all_started and (skipped is None or not (self._started | skipped).all() or self.closed):
            self._check_open()
            raise ResetNeededError("Cannot call env.step() before calling env.reset()")
        starts, pending = _NONE, self._ended_slots
        if skipped is not None:
            pending = pending[~skipped[pending]]
        if len(pending):
            if self.autoreset_mode is AutoresetMode.NEXT_STEP:
                starts = pending
            elif self.autoreset_mode is AutoresetMode.DISABLED:
                raise ResetNeededError(
                    f"the episodes of slots {pending.tolist()} are over: reset them with "
                    "options['reset_mask'], or choose another autoreset_mode"
                )
        self._forget_observed(self._all_slots if skipped is None else (~skipped).nonzero()[0])
        self.before_step()
        self._step_physics(self._checked_controls(actions), starts, skipped)
        obs = self._observe_all()
        # hooks write all rows: undo their changes to slots that have just begun
        fresh = self._save_rows(starts) if len(starts) else None
        outcome = self.outcome(actions, obs)
        if fresh is not None:
            self._restore_rows(*fresh)
        reward, terminated, columns = check_outcome(self, outcome) if self._is_user_task else outcome
        if terminated is None:
            terminated = np.zeros(self.num_envs, np.bool_)
        elapsed = self._elapsed
        elapsed += _ONE if skipped is None else ~skipped
        if len(starts):
            elapsed[starts] = 0
        limit = self.max_episode_steps
        truncated = terminated & False if limit is None else elapsed >= limit
        reward = owned(reward) if reward.dtype == np.float64 else reward.astype(np.float64)
        if skipped is not None:
            reward[skipped] = 0.0
            terminated[skipped] = truncated[skipped] = False
        first = 0 if skipped is None else int(skipped.argmin())  # the first slot that is stepped
        if len(starts):
            reward[starts] = 0.0
            terminated[starts] = False
            info = merge_reset_infos(
                columns, self._checked_start_info(starts, len(starts)), starts, self.num_envs, first
            )
        else:
            info = {}
        ended = (terminated | truncated).nonzero()[0]
        self._ended_slots = (
            ended if skipped is None else np.union1d(ended, self._ended_slots[skipped[self._ended_slots]])
        )
        if len(ended) and self.autoreset_mode is AutoresetMode.SAME_STEP:
            info = self._autoreset_same_step(ended, obs, columns, first)
        elif not len(starts):
            info = full_infos(columns, self._ones)
        if skipped is not None:
            info = remove_rows(info, skipped)
        return obs, reward, terminated, truncated, info

    def _step_physics(self, controls: Array, starts: Slots, skipped: npt.NDArray[np.bool_] | None) -> None:
        """Step the simulations, except those that begin an episode and those of the mask `skipped`."""
        if skipped is None and not len(starts):
            self._ctrl[...] = controls
            self.pool.advance(self.frame_skip)
            return
        live = self._ones.copy() if skipped is None else ~skipped
        live[starts] = False
        slots = live.nonzero()[0]
        if skipped is None:
            self._ctrl[...] = controls  # a start has its controls set to zero
        else:
            self._ctrl[slots] = controls[slots]
        if len(starts):
            qpos, qvel = self._checked_start(starts)
            self.pool.start_and_step(starts, qpos, qvel, slots, self.frame_skip)
            self.after_start(starts)
        elif len(slots):
            self.pool.step(slots, nstep=self.frame_skip)

    def _autoreset_same_step(self, ended: Slots, obs: Array, columns: dict[str, Array], first: int) -> dict[str, Any]:
        """Begin the next episodes in the step that ended the last ones (SAME_STEP)."""
        info = final_info(obs, columns, ended, self.num_envs)
        self._final_states = ended, self.pool.get_states(ended)
        self.pool.start(ended, *self._checked_start(ended))
        self._elapsed[ended] = 0
        self._ended_slots = _NONE
        self.after_start(ended)
        obs[ended] = self._checked_obs(ended, len(ended))
        info.update(
            merge_reset_infos(columns, self._checked_start_info(ended, len(ended)), ended, self.num_envs, first)
        )
        return info

    # ------------------------------------------------------------ states of slots

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The random generators of all slots."""
        return tuple(map(self.rng, range(self.num_envs)))

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The seed of each slot's generator."""
        self.np_random  # noqa: B018 (makes the generators that are missing)
        return tuple(self._seeds)

    def rng(self, slot: int) -> np.random.Generator:
        """Return the random generator of one slot; seeded by the system if no reset had a seed for it."""
        rng = self._rngs[slot]
        if rng is None:
            rng, self._seeds[slot] = seeding.np_random()
            self._rngs[slot] = rng
        return rng

    def physics_states(self, slots: Iterable[int] | None = None, out: Array | None = None) -> Array:
        """Return the physics alone, for rendering, say: `mjSTATE_INTEGRATION`, float64 `(k, state_size)`.

        Args:
            slots: which; None: all of them.
            out: where to write them.
        """
        return self.pool.get_states(slots, out)

    def observed_physics_states(self, slots: Iterable[int] | None = None) -> Array:
        """Return the physics that the last observations show, even of slots that were put into another state since."""
        states = self.pool.get_states(slots)
        for row, slot in enumerate(self.pool.numbers(slots).tolist() if self._observed else ()):
            if slot in self._observed:
                states[row] = self._observed[slot][1]
        return states

    def final_physics_states(self, slots: Iterable[int]) -> Array:
        """Return the physics at the end of the episodes that ended last, under SAME_STEP.

        Raises:
            ValueError: if the step that last ended any episodes ended none in one of these slots.
        """
        numbers = self.pool.numbers(slots)
        ended, states = self._final_states or (np.zeros(0, np.int64), np.zeros((0, self.pool.state_size)))
        if len(others := np.setdiff1d(numbers, ended)):
            raise ValueError(f"slots: no episode has ended in {others.tolist()}, only in {ended.tolist()}")
        final: Array = states[np.searchsorted(ended, numbers)]
        return final

    def get_state(self, slots: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Return the whole states of slots; an env in which they are set goes on exactly as from here.

        Args:
            slots: which; None: all of them.

        Returns:
            One dict for each: `physics` (float64 array), `memory` (the arrays of `remember`), `elapsed` (steps of the
            episode), `over` (whether it has ended), `begun`, `seed`, and `rng` (the state of the bit generator, or
            None). It pickles.
        """
        numbers = self.pool.numbers(slots)
        physics = self.pool.get_states(numbers)
        over = set(self._ended_slots.tolist())
        states = []
        for row, slot in zip(physics, numbers.tolist(), strict=True):
            rng = self._rngs[slot]
            states.append(
                {
                    "physics": row.copy(),
                    "memory": {name: array[slot].copy() for name, array in self._memory.items()},
                    "elapsed": int(self._elapsed[slot]),
                    "over": slot in over,
                    "begun": bool(self._started[slot]),
                    "seed": self._seeds[slot],
                    "rng": None if rng is None else rng.bit_generator.state,
                }
            )
        return states

    def set_state(self, states: Sequence[dict[str, Any]], slots: Iterable[int] | None = None) -> None:
        """Set the whole states of slots, as `get_state` gave them, of whichever slots.

        With AutoresetMode.DISABLED a slot whose episode had ended goes on, as a single env does.

        Args:
            states: one for each slot.
            slots: which; None: all of them.

        Raises:
            ValueError: if there is not one state for each slot, they are of another task, or one awaits a reset
                that AutoresetMode.SAME_STEP would not make.
        """
        numbers = self.pool.numbers(slots)
        if len(states) != len(numbers):
            raise ValueError(f"states: expected {len(numbers)}, one a slot, got {len(states)}")
        sizes = {len(state["physics"]) for state in states}
        memories = {frozenset(state["memory"]) for state in states}
        if sizes - {self.pool.state_size} or memories - {frozenset(self._memory)}:
            raise ValueError("states: they are of another task or model than this one's")
        if self.autoreset_mode is AutoresetMode.SAME_STEP and any(state["over"] for state in states):
            raise ValueError("states: one is of an episode that is over, which under SAME_STEP would never be reset")
        self._keep_observed(numbers)
        self.pool.set_states(
            np.array([state["physics"] for state in states]).reshape(-1, self.pool.state_size), numbers
        )
        over = set(self._ended_slots.tolist()) - set(numbers.tolist())
        for state, slot in zip(states, numbers.tolist(), strict=True):
            for name, array in self._memory.items():
                array[slot] = state["memory"][name]
            self._elapsed[slot], self._started[slot] = state["elapsed"], state["begun"]
            self._seeds[slot], self._rngs[slot] = state["seed"], None
            if state["over"] and self.autoreset_mode is not AutoresetMode.DISABLED:
                over.add(slot)
            if state["rng"] is not None:
                rng, _ = seeding.np_random(0)
                rng.bit_generator.state = state["rng"]
                self._rngs[slot] = rng
        self._ended_slots = np.array(sorted(over), np.int64)
        self._all_started = bool(self._started.all())

    # ------------------------------------------------------------ all at once, as numbers

    @property
    def checkpoint_size(self) -> int:
        """The number of float64 in a slot's row of `get_checkpoints`."""
        memory: int = sum(map(_row_words, self._memory.values()))
        return int(self.pool.state_size) + memory + 2 + RNG_WORDS + SEED_WORDS

    def get_checkpoints(self, out: Array) -> None:
        """Write the state of every slot, that of `get_state`, into a row of 64-bit words; fast enough for every step.

        A task that overrides it appends its own words, and `checkpoint_size` must count them.

        Args:
            out: float64 `(num_envs, checkpoint_size)`.
        """
        at = self.pool.state_size
        self.pool.get_states(None, out[:, :at])
        words = out.view(np.uint64)
        for array in self._memory.values():
            rows = array.reshape(self.num_envs, -1).view(np.uint8)
            words[:, at : at + _row_words(array)].view(np.uint8)[:, : rows.shape[1]] = rows
            at += _row_words(array)
        words[:, at] = self._elapsed
        words[:, at + 1] = self._started
        words[self._ended_slots, at + 1] |= 2
        at += 2
        if self._generators is None:
            self._generators = GeneratorReader()
        rngs = [rng or self.rng(slot) for slot, rng in enumerate(self._rngs)]
        if self._generators.read(rngs, words[:, at : at + RNG_WORDS]):
            self._seed_words = np.array([seed_words(seed) for seed in self._seeds], np.uint64)
        at += RNG_WORDS
        words[:, at : at + SEED_WORDS] = self._seed_words

    def set_checkpoints(self, rows: Array, newest: int) -> None:
        """Set the states of all slots from rows that `get_checkpoints` wrote.

        Args:
            rows: float64 `(num_envs, checkpoint_size)`.
            newest: the row that was written last, if they were not written together.
        """
        at = self.pool.state_size
        self.pool.set_states(rows[:, :at])
        words = rows.view(np.uint64)
        for array in self._memory.values():
            mine = array.reshape(self.num_envs, -1).view(np.uint8)
            mine[...] = words[:, at : at + _row_words(array)].view(np.uint8)[:, : mine.shape[1]]
            at += _row_words(array)
        self._elapsed[...] = words[:, at]
        self._started[...] = words[:, at + 1] & 1
        self._ended_slots = (words[:, at + 1] & 2).nonzero()[0]
        self._all_started = bool(self._started.all())
        at += 2
        for slot, row in enumerate(words[:, at:].tolist()):
            self._rngs[slot] = generator_from_words(row[:RNG_WORDS])
            self._seeds[slot] = seed_from_words(row[RNG_WORDS : RNG_WORDS + SEED_WORDS])

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the threads. Live arrays keep their values."""
        self._memory = {name: array.copy() for name, array in self._memory.items()}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray) and value.base is not None:
                setattr(self, name, value.copy())
        self._all_started = False
        self.pool.close()


def _gymnasium_asset(model: Model) -> Model:
    """Return the model as given, or the path of a file that comes with Gymnasium."""
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


def _missing(task: NativeMujocoEnv, hook: str) -> NotImplementedError:
    """Return the error of a task that lacks a hook."""
    return NotImplementedError(f"{type(task).__name__} has no {hook}: a NativeMujocoEnv needs one of its own")


def _row_words(array: Array) -> int:
    """Return how many words a row of an array takes."""
    return (array.nbytes // len(array) + 7) // 8
