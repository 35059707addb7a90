"""`CartPoleVectorEnv`: CartPole as one batch, in all autoreset modes, bit for bit as Gymnasium, in half of the time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.envs.classic_control import cartpole, utils
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode

from aioenv.errors import ResetNeededError
from aioenv.native.hook_results import final_info
from aioenv.spaces.seeding import (
    RNG_WORDS,
    SEED_WORDS,
    GeneratorReader,
    generator_from_words,
    seed_from_words,
    seed_words,
)
from aioenv.speedups import within

__all__ = ["CartPoleVectorEnv"]

_INT64 = np.dtype(np.int64)
_NOT_RESET = "Cannot call env.step() before calling env.reset()"  # as Gymnasium words it
_BOUNDS_OF_STARTS = -0.05, 0.05  # Gymnasium's
# A checkpoint has four numbers of the state, the steps, flags, the two bounds of starts, the generator that slots
# share, its seed, and the slot's own generator.
_STEPS, _FLAGS, _BOUNDS, _RNG, _SEED, _OWN = 4, 5, 6, 8, 8 + RNG_WORDS, 8 + RNG_WORDS + SEED_WORDS
_IS_OVER, _HAS_STATE, _HAS_OWN = 1, 2, 4


def _are_actions(action: npt.NDArray[np.int64]) -> bool:
    """Return whether all actions are 0 or 1."""
    return 0 <= int(np.bitwise_or.reduce(action)) <= 1  # of zeros and ones alone it is 0 or 1


class CartPoleVectorEnv(cartpole.CartPoleVectorEnv):
    """Gymnasium's `CartPoleVectorEnv` with another `step`: the same operations on the same numbers, in cheaper calls.

    For a batch of 64 a numpy call costs more than its arithmetic, and a Python number as argument doubles that. So
    intermediate results and parameters lie in preallocated arrays. All four components of the state are integrated at
    once, and actions are checked by one reduction.

    Unlike Gymnasium's class it has all autoreset modes, can step and reset some of its slots (`step_some`,
    `options["reset_mask"]`), and takes a list of seeds. A slot with a seed of its own has its own generator from then
    on, and gives the results of a single `CartPole-v1` with that seed. With NEXT_STEP and one seed for all, slots share
    one generator, as in Gymnasium's class, which has no other mode. In the other modes, or with `one_generator=False`,
    slots never share one, and an int seeds slot i with `seed + i`, as `SyncVectorEnv` does.

    Args:
        *args: as for Gymnasium's.
        autoreset_mode: when the next episode begins.
        one_generator: whether slots share a generator until they get seeds of their own; None: with NEXT_STEP alone.
        **kwargs: as for Gymnasium's.

    Attributes:
        one_generator: whether slots may share a generator.
    """

    any_thread = True

    def __init__(
        self,
        *args: Any,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        one_generator: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self._next_step = self.autoreset_mode is AutoresetMode.NEXT_STEP
        self.one_generator = self._next_step if one_generator is None else one_generator
        self._same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        self._own: dict[int, np.random.Generator] = {}  # by slot: its own generator, if it has one
        n = self.num_envs
        self._slope = np.empty((4, n))  # derivatives of x, its speed, the angle, and its speed
        self._scratch = tuple(np.empty(n) for _ in range(5))
        self._distances = np.empty((2, n))
        self._ones = np.ones(n, np.float32)
        self._outside = np.empty((2, n), np.bool_)
        self._parameters: tuple[float, ...] = ()
        self._generators, self._own_generators = GeneratorReader(), GeneratorReader()
        self._set_parameters(self._read_parameters())

    def _read_parameters(self) -> tuple[float, ...]:
        """Return the parameters, which `set_attr` may change, in the order of `_set_parameters`."""
        return (
            self.gravity,
            self.masspole,
            self.total_mass,
            self.length,
            self.polemass_length,
            self.force_mag,
            self.tau,
            self.x_threshold,
            self.theta_threshold_radians,
        )

    def _set_parameters(self, parameters: tuple[float, ...]) -> None:
        self._parameters = parameters
        n = self.num_envs
        gravity, masspole, total_mass, length, leverage, force, tau, x, angle = parameters
        self._gravity, self._masspole = np.full(n, gravity), np.full(n, masspole)
        self._total_mass, self._leverage = np.full(n, total_mass), np.full(n, leverage)
        self._length, self._four_thirds = np.full(n, length), np.full(n, 4.0 / 3.0)
        self._forces = np.array([-force, force], np.float64)
        self._tau = np.full((4, n), tau, np.float64)
        self._limits = np.stack((np.full(n, x, np.float64), np.full(n, angle, np.float64)))

    def step(self, action: npt.NDArray[Any]) -> Any:
        """Step all slots as Gymnasium's: observations float32 `(n, 4)`, rewards float32, flags bool, and infos."""
        return self._step(action, None)

    def _step(self, action: npt.NDArray[Any], rest: npt.NDArray[np.bool_] | None) -> Any:
        """Step all slots; results of those of the mask `rest` are not used, and they begin no episode."""
        over = self.prev_done
        if (ended := np.count_nonzero(over)) and not self._next_step:  # possible only under DISABLED
            raise ResetNeededError(
                f"the episodes of slots {np.flatnonzero(over).tolist()} are over: reset them with "
                "options['reset_mask'], or choose another autoreset_mode"
            )
        reward = self._advance(action)
        state, steps = self.state, self.steps
        distances, outside = self._distances, self._outside
        np.abs(state[::2], distances)
        np.greater(distances, self._limits, outside)
        terminated = np.logical_or(outside[0], outside[1])
        truncated = steps >= self.max_episode_steps
        if ended:
            goes_on = np.logical_not(over)
            reward = goes_on.astype(np.float32) if reward is None else np.where(over, np.float32(0), reward)
            if not self.one_generator:
                self._start(over.nonzero()[0], *_BOUNDS_OF_STARTS)
            elif self._own:
                self._start(over.nonzero()[0], self.low, self.high)
            else:  # drawn in the same order as Gymnasium's
                state[:, over] = self.np_random.uniform(self.low, self.high, (4, ended))
            steps *= goes_on
            terminated &= goes_on
            truncated &= goes_on
        elif reward is None:
            reward = self._ones.copy()
        over = np.logical_or(terminated, truncated)
        if not self._same_step:
            self.prev_done = over
            return state.T.astype(np.float32), reward, terminated, truncated, {}
        obs = state.T.astype(np.float32)
        if rest is not None:
            over &= ~rest
        if not np.count_nonzero(over):
            return obs, reward, terminated, truncated, {}
        slots = over.nonzero()[0]
        info = final_info(obs, {}, slots, self.num_envs)
        self._start(slots, *_BOUNDS_OF_STARTS)
        steps[slots] = 0
        obs[slots] = state[:, slots].T
        return obs, reward, terminated, truncated, info

    def _advance(self, action: npt.NDArray[Any]) -> npt.NDArray[np.float32] | None:
        """Step all poles, and begin no episode; return rewards, None if they are all 1."""
        fits = type(action) is np.ndarray and action.dtype == _INT64 and action.shape == (self.num_envs,)
        state, parameters = self.state, self._read_parameters()
        if parameters != self._parameters:
            self._set_parameters(parameters)
        if (
            not fits
            or not (within(action, 0, 2) if within is not None and action.flags.c_contiguous else _are_actions(action))
            or self.kinematics_integrator != "euler"
            or self._sutton_barto_reward
        ):
            over, self.prev_done = self.prev_done, np.zeros_like(self.prev_done)
            try:
                reward: npt.NDArray[np.float32] = super().step(action)[1]
            finally:
                self.prev_done = over
            if not self.one_generator:
                reward += 0.0  # single envs never return -0.0
            return reward
        if state is None:
            raise ResetNeededError(_NOT_RESET)
        self.state: Any = self._integrate(state, action)
        self.steps += 1
        return None

    def _start(self, slots: npt.NDArray[np.int64], low: float, high: float) -> None:
        """Draw the initial states of slots (ascending)."""
        state: Any = self.state
        if not self._own:
            state[:, slots] = self.np_random.uniform(low, high, (4, len(slots)))
            return
        alone = [slot for slot in slots.tolist() if slot in self._own]
        if len(alone) < len(slots):
            others = np.setdiff1d(slots, alone)
            state[:, others] = self.np_random.uniform(low, high, (4, len(others)))
        for slot in alone:
            state[:, slot] = self._own[slot].uniform(low, high, 4)

    def step_some(self, actions: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> Any:
        """Step some of the slots (int64, ascending), as `step`; the others stay as they are.

        Rows of other slots are not used in `actions`, and have their last observation, reward 0 and flags False.
        """
        if len(slots) == self.num_envs:
            return self.step(actions)
        rest = np.ones(self.num_envs, np.bool_)
        rest[slots] = False
        if self.state is None:
            if len(slots):
                raise ResetNeededError(_NOT_RESET)
            return np.zeros((self.num_envs, 4), np.float32), np.zeros(self.num_envs, np.float32), ~rest, ~rest, {}
        kept = self.state[:, rest], self.steps[rest], self.prev_done[rest]
        actions = np.where(rest, 0, actions)
        was_over, self.prev_done = self.prev_done, self.prev_done & ~rest  # they draw no initial state
        try:
            _, reward, terminated, truncated, info = self._step(actions, rest)
        except BaseException:
            self.prev_done = was_over
            raise
        self.state[:, rest], self.steps[rest], self.prev_done[rest] = kept
        for column in (reward, terminated, truncated):
            column[rest] = 0
        return self.state.T.astype(np.float32), reward, terminated, truncated, info

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every slot, or in those of `options["reset_mask"]`.

        Args:
            seed: an int: one for all slots together, as in Gymnasium; if they share no generator, slot i is seeded with
                `seed + i`. Or a list, one for each slot (None: it keeps its generator).
            options: may have a "reset_mask", and the bounds "low" and "high".
        """
        mask = None if options is None else options.get("reset_mask")
        each = seed is not None and not isinstance(seed, (int, np.integer))
        if each and len(seed) != self.num_envs:
            raise ValueError(f"seed: expected an int, None, or one for each of {self.num_envs} slots, got {len(seed)}")
        slots = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        self.low, self.high = utils.maybe_parse_reset_bounds(options, *_BOUNDS_OF_STARTS)
        if self.one_generator and not each and seed is not None:
            self._np_random, self._np_random_seed = seeding.np_random(seed)
            for slot in slots.tolist() if self._own else ():
                self._own.pop(slot, None)
        elif not self.one_generator or each:
            for slot in slots.tolist():
                own = seed[slot] if each else None if seed is None else int(seed) + slot
                if own is not None or not (self.one_generator or slot in self._own):
                    self._own[slot] = seeding.np_random(own)[0]
        n = self.num_envs
        if self.state is None or mask is None:
            self.state = np.zeros((4, n))
            self.steps = np.zeros(n, np.int32)
            self.prev_done = np.zeros(n, np.bool_)
        else:
            self.state = self.state.copy()
        self._start(slots, self.low, self.high)
        self.steps[slots] = 0
        self.prev_done[slots] = False
        return self.state.T.astype(np.float32), {}

    def _integrate(self, state: npt.NDArray[np.float64], action: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Integrate one Euler step of all poles."""
        multiply, divide, subtract = np.multiply, np.divide, np.subtract
        slope = self._slope
        angle, spin = state[2:]
        cos, sin, pull, force, rest = self._scratch
        total_mass, leverage = self._total_mass, self._leverage
        np.cos(angle, cos)
        np.sin(angle, sin)
        self._forces.take(action, out=force, mode="clip")
        # acceleration of the cart without the pole's: (force + leverage * spin² * sin) / total_mass
        np.square(spin, pull)
        multiply(leverage, pull, pull)
        multiply(pull, sin, pull)
        np.add(force, pull, pull)
        divide(pull, total_mass, pull)
        # angular acceleration: (g * sin - cos * pull) / (length * (4/3 - masspole * cos² / total_mass))
        turning = slope[3]
        multiply(self._gravity, sin, turning)
        multiply(cos, pull, rest)
        subtract(turning, rest, turning)
        np.square(cos, rest)
        multiply(self._masspole, rest, rest)
        divide(rest, total_mass, rest)
        subtract(self._four_thirds, rest, rest)
        multiply(self._length, rest, rest)
        divide(turning, rest, turning)
        # acceleration of the cart: pull - leverage * turning * cos / total_mass
        multiply(leverage, turning, rest)
        multiply(rest, cos, rest)
        divide(rest, total_mass, rest)
        subtract(pull, rest, slope[1])
        slope[::2] = state[1::2]
        multiply(self._tau, slope, slope)
        return np.add(state, slope)

    checkpoint_size = _OWN + RNG_WORDS

    def get_checkpoints(self, out: npt.NDArray[np.float64]) -> None:
        """Write the states of all slots into rows of words, `(num_envs, checkpoint_size)`, to resume from."""
        words = out.view(np.uint64)
        if self.state is not None:
            out[:, :_STEPS] = self.state.T
        words[:, _STEPS] = self.steps
        words[:, _FLAGS] = self.prev_done
        words[:, _FLAGS] += _HAS_STATE * (self.state is not None)
        out[:, _BOUNDS:_RNG] = self.low, self.high
        # slots without a generator of their own share one
        if self._generators.read([self.np_random], words[:1, _RNG:_SEED]):
            self._seed_words = seed_words(self._np_random_seed)
        words[1:, _RNG:_SEED] = words[0, _RNG:_SEED]
        words[:, _SEED:_OWN] = self._seed_words
        words[:, _OWN:] = 0
        if self._own:
            slots = list(self._own)
            own = np.empty((len(slots), RNG_WORDS), np.uint64)
            self._own_generators.read(list(self._own.values()), own)
            words[slots, _OWN:] = own
            words[slots, _FLAGS] += np.uint64(_HAS_OWN)

    def set_checkpoints(self, rows: npt.NDArray[np.float64], newest: int) -> None:
        """Set the states of all slots from rows that `get_checkpoints` wrote; `newest` is the last that was written."""
        words = rows.view(np.uint64)
        self.state = rows[:, :_STEPS].T.copy() if words[newest, _FLAGS] & _HAS_STATE else None
        self.steps = words[:, _STEPS].astype(np.int32)
        self.prev_done = (words[:, _FLAGS] & _IS_OVER).astype(np.bool_)
        self.low, self.high = rows[newest, _BOUNDS:_RNG].tolist()
        self._np_random = generator_from_words(words[newest, _RNG:_SEED].tolist())
        self._np_random_seed = seed_from_words(words[newest, _SEED:_OWN].tolist())
        own = np.flatnonzero(words[:, _FLAGS] & _HAS_OWN)
        self._own = {slot: generator_from_words(words[slot, _OWN:].tolist()) for slot in own.tolist()}
