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
    leave_out,
    merge_reset_infos,
    own,
    whole,
)
from aioenv.native.loading import Model, take_model
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
ALL = slice(None)
_NONE = np.zeros(0, np.int64)
_ONE = np.array(1)


class NativeMujocoEnv(VectorEnv[Any, Any, Any]):
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
        # of slots put into a state since they were stepped: the last observations, and the physics
        self._last: dict[int, tuple[Array, Array]] = {}
        self._generators: GeneratorReader | None = None
        self._seed_words: npt.NDArray[np.uint64]
        self._finals: tuple[Slots, Array] | None = None  # slots whose episodes the last step has ended, and how
        self._numbers = np.arange(self.num_envs)
        self._is_strange = not type(self).__module__.startswith("aioenv.native.")

    # ------------------------------------------------------------ what a task says

    def draw_start(self, slots: Slots) -> tuple[Array, Array]:
        """Where new episodes begin: positions `(k, nq)` and velocities `(k, nv)`, drawn with `uniform` or `normal`.

        The rest of MuJoCo's state begins as the model has it; `after_start` may write to it, and call
        `self.pool.forward(slots)` then.
        """
        raise _missing(self, "draw_start(slots)")

    def observe(self, slots: Any) -> Array:
        """Observations `(k, ...)` in a new array; `slots` indexes live arrays: all slots as a slice, or numbers."""
        raise _missing(self, "observe(slots)")

    def outcome(self, actions: Array, obs: Array) -> tuple[Array, Array | None, dict[str, Array]]:
        """What the step that was made means: rewards, terminations (None: none), and columns of infos.

        All rows must be there, in arrays of which copies are taken; those of slots that have just begun an episode are
        not used, and what is remembered of them here, or written to MuJoCo's state, is put back. `obs` is what will be
        returned.
        """
        raise _missing(self, "outcome(actions, obs)")

    def start_info(self, slots: Any) -> dict[str, Array]:
        """Columns of infos of resets, `(k, ...)` each, in new arrays."""
        return {}

    def controls(self, actions: Array) -> Array:
        """The controls `(num_envs, nu)` that actions stand for: the actions themselves, unless a task says otherwise.

        What else an action does (move a `mocap` body, say) may be done here, too.
        """
        return actions

    def before_step(self) -> None:
        """Note what `outcome` will compare with; `qpos`, `qvel` and the others are still those before the step.

        Of fields that are parts of MuJoCo's state, that is. What is derived (`xpos`, say) is not there if the slot has
        just been put into a state: `remember` it in `after_start` and `outcome`.
        """

    def after_start(self, slots: Any) -> None:
        """Note what is needed of slots that have begun an episode (in arrays from `remember`)."""

    # ------------------------------------------------------------ what a task uses

    def set_observation_size(self, size: int) -> None:
        """Observations are float64 vectors of this size, without bounds."""
        self.set_observation_space(Box(-np.inf, np.inf, (size,), np.float64))

    def set_observation_space(self, space: Box) -> None:
        """Observations of one slot are of this space.

        Raises:
            TypeError: if a batch of such observations is no array.
        """
        self.single_observation_space, self.observation_space = space, self._batched("set_observation_space", space)

    def set_action_space(self, space: Space[Any]) -> None:
        """Actions of one slot are of this space, and `controls` says what they stand for; by default they are controls.

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
        """The live array of a field of `MjData`, `(num_envs, ...)` (see `SimPool.bind`)."""
        return self.pool.bind(name)

    def remember(self, name: str, shape: int | tuple[int, ...] = (), dtype: Any = np.float64) -> Array:
        """An array `(num_envs, *shape)` of what a task knows of each slot from one step to the next.

        Its rows are part of the states of slots. Write into it; don't replace it.

        Raises:
            ValueError: if there is one of this name, in a class that this one is derived from, say.
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
        """`(k, size)` numbers for k slots, each row drawn as `np_random.uniform(low, high, size)` of its slot.

        Raises:
            ValueError: if `high` is less than `low`.
            OverflowError: if one is no finite number, or they are too far apart.
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
        """`(k, size)` numbers for k slots, each row drawn as `np_random.standard_normal(size)` of its slot."""
        numbers = range(self.num_envs)[slots] if isinstance(slots, slice) else slots.tolist()
        drawn = np.empty((len(numbers), size))
        rngs = self._rngs
        for slot, row in zip(numbers, drawn, strict=True):
            (rngs[slot] or self.rng(slot)).standard_normal(out=row)
        return drawn

    def model_field(self, name: str) -> Array:
        """A field of the model with values for each slot, `(num_envs, ...)`; see `SimPool.model_field`."""
        return self.pool.model_field(name)

    def set_const(self, slots: Any = None) -> None:
        """Derive constants anew from changed fields of the model; see `SimPool.set_const`."""
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
            ValueError, TypeError: if there is not one seed a slot, or the mask is none.
        """
        self._check_open()
        seeds = spread_seeds(seed, self._numbers, self.num_envs)
        mask = None if options is None else options.get("reset_mask")
        if mask is None:
            slots = self._numbers
        else:
            split_reset_options({"reset_mask": mask}, self.num_envs)  # raises if it is none
            slots = np.flatnonzero(mask)
        seeded = {slot: seeding.np_random(seeds[slot]) for slot in slots.tolist() if seeds[slot] is not None}
        for slot, (rng, number) in seeded.items():
            self._rngs[slot], self._seeds[slot] = rng, number
        qpos, qvel = self._draw(slots)
        self.pool.start(None if mask is None else slots, qpos, qvel)
        self._forget_last(slots)
        self._begun[slots] = True
        self._all_begun = mask is None or bool(self._begun.all())
        self._elapsed[slots] = 0
        self._over = _NONE if mask is None else self._over[~mask[self._over]]
        where = ALL if mask is None else slots
        self.after_start(where)
        info = self._tell(where, len(slots))
        return self._observe_all(), merge_reset_infos({}, info, slots, self.num_envs)

    def _observe_all(self) -> Array:
        obs = own(self._observe(ALL, self.num_envs))
        if not self._all_begun:
            obs[~self._begun] = 0
        if self._last:
            obs[list(self._last)] = [seen for seen, _ in self._last.values()]
        return obs

    def _keep_last(self, slots: Slots) -> None:
        kept = zip(self._observe_all()[slots], self.observed_physics_states(slots), strict=True)
        self._last.update(zip(slots.tolist(), kept, strict=True))

    def _forget_last(self, slots: Slots) -> None:
        """These slots are reset or stepped."""
        for slot in slots.tolist() if self._last else ():
            self._last.pop(slot, None)

    # hooks, whose results are looked at unless the task is one of ours

    def _draw(self, slots: Slots) -> tuple[Array, Array]:
        start = self.draw_start(slots)
        return check_start(self, start, len(slots)) if self._is_strange else start

    def _controls(self, actions: Array) -> Array:
        controls = self.controls(actions)
        return check_controls(self, controls, self._ctrl.shape) if self._is_strange else controls

    def _observe(self, slots: Any, count: int) -> Array:
        obs = self.observe(slots)
        return check_obs(self, obs, count) if self._is_strange else obs

    def _tell(self, slots: Any, count: int) -> dict[str, Array]:
        columns = self.start_info(slots)
        return check_columns(self, "start_info", columns, count) if self._is_strange else columns

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError.of(repr(self))

    def step(self, actions: Any) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step every slot; all that is returned is the caller's own.

        Args:
            actions: a batch of `action_space`, `(num_envs, nu)` unless a task says otherwise; rows of slots that begin
                an episode instead are not used.

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
            actions: a batch for all slots, as for `step`; rows of other slots are not used.
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
        # hooks treat all rows: what they write of other slots is put back
        kept = self._keep(rest.nonzero()[0])
        try:
            return self._step(actions, rest)
        finally:
            self._put_back(*kept)

    def _keep(self, slots: Slots) -> tuple[Slots, list[Array], Array | None]:
        """What hooks may have written of some slots: what is remembered, and of somebody else's task the physics."""
        physics = self.pool.get_states(slots) if self._is_strange and len(slots) else None
        return slots, [array[slots] for array in self._memory.values()], physics

    def _put_back(self, slots: Slots, memory: list[Array], physics: Array | None) -> None:
        for array, rows in zip(self._memory.values(), memory, strict=True):
            array[slots] = rows
        if physics is not None and not self.closed:
            self.pool.set_states(physics, slots)

    def _step(
        self, actions: Any, rest: npt.NDArray[np.bool_] | None
    ) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step all slots, but for those of a mask."""
        actions = np.asarray(actions, order="C")  # sums of rows depend on it
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions: expected shape {self.action_space.shape}, got {actions.shape}")
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
        self._forget_last(self._numbers if rest is None else (~rest).nonzero()[0])
        self.before_step()
        self._physics(self._controls(actions), starts, rest)
        obs = self._observe_all()
        # hooks treat all rows: what they write of slots that have just begun is put back
        fresh = self._keep(starts) if len(starts) else None
        outcome = self.outcome(actions, obs)
        if fresh is not None:
            self._put_back(*fresh)
        reward, terminated, columns = check_outcome(self, outcome) if self._is_strange else outcome
        if terminated is None:
            terminated = np.zeros(self.num_envs, np.bool_)
        elapsed = self._elapsed
        elapsed += _ONE if rest is None else ~rest
        if len(starts):
            elapsed[starts] = 0
        limit = self.max_episode_steps
        truncated = terminated & False if limit is None else elapsed >= limit
        reward = own(reward) if reward.dtype == np.float64 else reward.astype(np.float64)
        if rest is not None:
            reward[rest] = 0.0
            terminated[rest] = truncated[rest] = False
        first = 0 if rest is None else int(rest.argmin())  # of those that are stepped
        if len(starts):
            reward[starts] = 0.0
            terminated[starts] = False
            info = merge_reset_infos(columns, self._tell(starts, len(starts)), starts, self.num_envs, first)
        else:
            info = {}
        over = (terminated | truncated).nonzero()[0]
        self._over = over if rest is None else np.union1d(over, self._over[rest[self._over]])
        if len(over) and self.autoreset_mode is AutoresetMode.SAME_STEP:
            info = self._begin_anew(over, obs, columns, first)
        elif not len(starts):
            info = whole(columns, self._ones)
        if rest is not None:
            info = leave_out(info, rest)
        return obs, reward, terminated, truncated, info

    def _physics(self, controls: Array, starts: Slots, rest: npt.NDArray[np.bool_] | None) -> None:
        """Step the simulations, but for those that begin an episode, and those of a mask."""
        if rest is None and not len(starts):
            self._ctrl[...] = controls
            self.pool.advance(self.frame_skip)
            return
        live = self._ones.copy() if rest is None else ~rest
        live[starts] = False
        slots = live.nonzero()[0]
        if rest is None:
            self._ctrl[...] = controls  # a start has its controls set to zero
        else:
            self._ctrl[slots] = controls[slots]
        if len(starts):
            qpos, qvel = self._draw(starts)
            self.pool.start_and_step(starts, qpos, qvel, slots, self.frame_skip)
            self.after_start(starts)
        elif len(slots):
            self.pool.step(slots, nstep=self.frame_skip)

    def _begin_anew(self, over: Slots, obs: Array, columns: dict[str, Array], first: int) -> dict[str, Any]:
        """Begin the next episodes in the step that has ended the last ones."""
        info = final_info(obs, columns, over, self.num_envs)
        self._finals = over, self.pool.get_states(over)
        self.pool.start(over, *self._draw(over))
        self._elapsed[over] = 0
        self._over = _NONE
        self.after_start(over)
        obs[over] = self._observe(over, len(over))
        info.update(merge_reset_infos(columns, self._tell(over, len(over)), over, self.num_envs, first))
        return info

    # ------------------------------------------------------------ states of slots

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The generators of all slots."""
        return tuple(map(self.rng, range(self.num_envs)))

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """What each slot's generator was seeded with."""
        self.np_random  # noqa: B018 (seeds those that have none)
        return tuple(self._seeds)

    def rng(self, slot: int) -> np.random.Generator:
        """The random number generator of one slot; seeded by the system if no reset has had a seed for it."""
        rng = self._rngs[slot]
        if rng is None:
            rng, self._seeds[slot] = seeding.np_random()
            self._rngs[slot] = rng
        return rng

    def physics_states(self, slots: Iterable[int] | None = None, out: Array | None = None) -> Array:
        """The physics alone, to draw it, say: `mjSTATE_INTEGRATION`, float64 `(k, state_size)`.

        Args:
            slots: which; None: all of them.
            out: where to write them.
        """
        return self.pool.get_states(slots, out)

    def observed_physics_states(self, slots: Iterable[int] | None = None) -> Array:
        """Likewise, as the last observations show it: of slots that were put into a state since, as it was before."""
        states = self.pool.get_states(slots)
        for row, slot in enumerate(self.pool.numbers(slots).tolist() if self._last else ()):
            if slot in self._last:
                states[row] = self._last[slot][1]
        return states

    def final_physics_states(self, slots: Iterable[int]) -> Array:
        """Likewise, of slots whose episodes the last step that ended any has ended (SAME_STEP): as they were then.

        Raises:
            ValueError: if it has ended none in some of them.
        """
        numbers = self.pool.numbers(slots)
        ended, states = self._finals or (np.zeros(0, np.int64), np.zeros((0, self.pool.state_size)))
        if len(others := np.setdiff1d(numbers, ended)):
            raise ValueError(f"slots: no episode has ended in {others.tolist()}, only in {ended.tolist()}")
        final: Array = states[np.searchsorted(ended, numbers)]
        return final

    def get_state(self, slots: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """The whole states of slots: whoever sets them goes on exactly as from here.

        Args:
            slots: which; None: all of them.

        Returns:
            One dict for each: `physics` (float64 array), `memory` (what the task remembers), `elapsed` (steps of the
            episode), `over` (whether it has ended), `begun`, `seed`, and `rng` (the state of the bit generator, or
            None). It pickles.
        """
        numbers = self.pool.numbers(slots)
        physics = self.pool.get_states(numbers)
        over = set(self._over.tolist())
        states = []
        for row, slot in zip(physics, numbers.tolist(), strict=True):
            rng = self._rngs[slot]
            states.append(
                {
                    "physics": row.copy(),
                    "memory": {name: array[slot].copy() for name, array in self._memory.items()},
                    "elapsed": int(self._elapsed[slot]),
                    "over": slot in over,
                    "begun": bool(self._begun[slot]),
                    "seed": self._seeds[slot],
                    "rng": None if rng is None else rng.bit_generator.state,
                }
            )
        return states

    def set_state(self, states: Sequence[dict[str, Any]], slots: Iterable[int] | None = None) -> None:
        """Set the whole states of slots, as `get_state` gave them, of whichever slots.

        With AutoresetMode.DISABLED a slot whose episode was over goes on, as a single env does.

        Args:
            states: one for each slot.
            slots: which; None: all of them.

        Raises:
            ValueError: if there is another number of states, or they are of another task, or one awaits a reset that
                AutoresetMode.SAME_STEP would not make.
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
        self._keep_last(numbers)
        self.pool.set_states(
            np.array([state["physics"] for state in states]).reshape(-1, self.pool.state_size), numbers
        )
        over = set(self._over.tolist()) - set(numbers.tolist())
        for state, slot in zip(states, numbers.tolist(), strict=True):
            for name, array in self._memory.items():
                array[slot] = state["memory"][name]
            self._elapsed[slot], self._begun[slot] = state["elapsed"], state["begun"]
            self._seeds[slot], self._rngs[slot] = state["seed"], None
            if state["over"] and self.autoreset_mode is not AutoresetMode.DISABLED:
                over.add(slot)
            if state["rng"] is not None:
                rng, _ = seeding.np_random(0)
                rng.bit_generator.state = state["rng"]
                self._rngs[slot] = rng
        self._over = np.array(sorted(over), np.int64)
        self._all_begun = bool(self._begun.all())

    # ------------------------------------------------------------ all at once, as numbers

    @property
    def checkpoint_size(self) -> int:
        """How many float64 a slot's row of `get_checkpoints` has."""
        memory: int = sum(map(_words, self._memory.values()))
        return int(self.pool.state_size) + memory + 2 + RNG_WORDS + SEED_WORDS

    def get_checkpoints(self, out: Array) -> None:
        """Write what `get_state` tells of every slot into a row each, as 64-bit words: with every step, so it is fast.

        A task that overrides it knows more: that goes behind, and `checkpoint_size` must count it.

        Args:
            out: float64 `(num_envs, checkpoint_size)`.
        """
        at = self.pool.state_size
        self.pool.get_states(None, out[:, :at])
        words = out.view(np.uint64)
        for array in self._memory.values():
            rows = array.reshape(self.num_envs, -1).view(np.uint8)
            words[:, at : at + _words(array)].view(np.uint8)[:, : rows.shape[1]] = rows
            at += _words(array)
        words[:, at] = self._elapsed
        words[:, at + 1] = self._begun
        words[self._over, at + 1] |= 2
        at += 2
        if self._generators is None:
            self._generators = GeneratorReader()
        rngs = [rng or self.rng(slot) for slot, rng in enumerate(self._rngs)]
        if self._generators.read(rngs, words[:, at : at + RNG_WORDS]):
            self._seed_words = np.array([seed_words(seed) for seed in self._seeds], np.uint64)
        at += RNG_WORDS
        words[:, at : at + SEED_WORDS] = self._seed_words

    def set_checkpoints(self, rows: Array, newest: int) -> None:
        """Bring all slots into the states of rows that `get_checkpoints` wrote.

        Args:
            rows: float64 `(num_envs, checkpoint_size)`.
            newest: the row that was written last, as far as they were not written together.
        """
        at = self.pool.state_size
        self.pool.set_states(rows[:, :at])
        words = rows.view(np.uint64)
        for array in self._memory.values():
            mine = array.reshape(self.num_envs, -1).view(np.uint8)
            mine[...] = words[:, at : at + _words(array)].view(np.uint8)[:, : mine.shape[1]]
            at += _words(array)
        self._elapsed[...] = words[:, at]
        self._begun[...] = words[:, at + 1] & 1
        self._over = (words[:, at + 1] & 2).nonzero()[0]
        self._all_begun = bool(self._begun.all())
        at += 2
        for slot, row in enumerate(words[:, at:].tolist()):
            self._rngs[slot] = generator_from_words(row[:RNG_WORDS])
            self._seeds[slot] = seed_from_words(row[RNG_WORDS : RNG_WORDS + SEED_WORDS])

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


def _missing(task: NativeMujocoEnv, hook: str) -> NotImplementedError:
    """The error of a task that lacks a hook."""
    return NotImplementedError(f"{type(task).__name__} has no {hook}: a NativeMujocoEnv needs one of its own")


def _words(array: Array) -> int:
    """How many words a row of an array takes."""
    return (array.nbytes // len(array) + 7) // 8
