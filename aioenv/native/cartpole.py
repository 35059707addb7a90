"""CartPole as one vector env: Gymnasium's, bit for bit, in about half of its time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.envs.classic_control import cartpole, utils
from gymnasium.utils import seeding

from aioenv.batching.generators import RNG_WORDS, SEED_WORDS, Generators, generator_of, seed_of, seed_words
from aioenv.errors import ResetNeededError

__all__ = ["CartPoleVectorEnv"]

_INT64 = np.dtype(np.int64)
_NOT_RESET = "Cannot call env.step() before calling env.reset()"  # as Gymnasium words it
# of a checkpoint: four numbers of the state, the steps, flags, the two bounds of starts, the generator, its seed
_STEPS, _FLAGS, _BOUNDS, _RNG, _SEED = 4, 5, 6, 8, 8 + RNG_WORDS


class CartPoleVectorEnv(cartpole.CartPoleVectorEnv):
    """Gymnasium's `CartPoleVectorEnv` with another `step`: the same operations on the same numbers, in cheaper calls.

    A batch of 64 is so small that a call costs more than its arithmetic, and one with a Python number twice as much. So
    intermediate results and parameters stand in arrays that are there already, all four components of the state are
    integrated at once, and actions are checked by one reduction.

    Beyond Gymnasium's it can step and reset some of its slots (`step_some`, `options["reset_mask"]`), and takes a list
    of seeds: a slot with one of its own begins where a single `CartPole-v1` with that seed does.
    """

    one_generator = True
    any_thread = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        n = self.num_envs
        self._slope = np.empty((4, n))  # of x, its speed, the angle, and its speed
        self._scratch = tuple(np.empty(n) for _ in range(5))
        self._distances = np.empty((2, n))
        self._ones = np.ones(n, np.float32)
        self._beyond = np.empty((2, n), np.bool_)
        self._parameters: tuple[float, ...] = ()
        self._generators = Generators()
        self._adopt(self._read_parameters())

    def _read_parameters(self) -> tuple[float, ...]:
        """What `set_attr` may change, in the order of `_adopt`."""
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

    def _adopt(self, parameters: tuple[float, ...]) -> None:
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
        """As Gymnasium's: observations float32 `(n, 4)`, rewards float32, flags bool, no infos."""
        fits = type(action) is np.ndarray and action.dtype == _INT64 and action.shape == (self.num_envs,)
        if not fits or not 0 <= int(np.bitwise_or.reduce(action)) <= 1:  # of zeros and ones alone it is 0 or 1
            return super().step(action)
        if self.kinematics_integrator != "euler" or self._sutton_barto_reward:
            return super().step(action)
        state = self.state
        if state is None:
            raise ResetNeededError(_NOT_RESET)
        parameters = self._read_parameters()
        if parameters != self._parameters:
            self._adopt(parameters)
        state = self._integrate(state, action)
        self.state: Any = state
        distances, beyond = self._distances, self._beyond
        np.abs(state[::2], distances)
        np.greater(distances, self._limits, beyond)
        terminated = np.logical_or(beyond[0], beyond[1])
        steps, over = self.steps, self.prev_done
        steps += 1
        truncated = steps >= self.max_episode_steps
        if count := np.count_nonzero(over):
            goes_on = np.logical_not(over)
            reward = goes_on.astype(np.float32)
            # drawn in the very order of Gymnasium's
            state[:, over] = self.np_random.uniform(self.low, self.high, (4, count))
            steps *= goes_on
            terminated &= goes_on
            truncated &= goes_on
        else:
            reward = self._ones.copy()
        self.prev_done = np.logical_or(terminated, truncated)
        return state.T.astype(np.float32), reward, terminated, truncated, {}

    def step_some(self, actions: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> Any:
        """Step some of the slots (int64, ascending): as `step`, with the others as they were.

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
        self.prev_done = self.prev_done & ~rest  # they draw no start
        _, reward, terminated, truncated, info = self.step(actions)
        self.state[:, rest], self.steps[rest], self.prev_done[rest] = kept
        for column in (reward, terminated, truncated):
            column[rest] = 0
        return self.state.T.astype(np.float32), reward, terminated, truncated, info

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every slot, or in those of `options["reset_mask"]`.

        Args:
            seed: as Gymnasium's, one for all slots together; or a list, one for each slot (None: from the generator
                that they share).
            options: may have a "reset_mask", and the bounds "low" and "high".
        """
        mask = None if options is None else options.get("reset_mask")
        each = seed is not None and not isinstance(seed, (int, np.integer))
        if mask is None and not each:
            return super().reset(seed=seed, options=options)
        if each and len(seed) != self.num_envs:
            raise ValueError(f"seed: expected an int, None, or one for each of {self.num_envs} slots, got {len(seed)}")
        if not each and seed is not None:
            self._np_random, self._np_random_seed = seeding.np_random(seed)
        self.low, self.high = utils.maybe_parse_reset_bounds(options, -0.05, 0.05)
        if self.state is None:
            self.state = np.zeros((4, self.num_envs))
            self.steps = np.zeros(self.num_envs, np.int32)
            self.prev_done = np.zeros(self.num_envs, np.bool_)
        slots = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        alone = [slot for slot in slots.tolist() if each and seed[slot] is not None]
        others = np.setdiff1d(slots, alone)
        state = self.state.copy()
        state[:, others] = self.np_random.uniform(self.low, self.high, (4, len(others)))
        for slot in alone:
            rng, _ = seeding.np_random(seed[slot])
            state[:, slot] = rng.uniform(self.low, self.high, 4)
        self.state = state
        self.steps[slots] = 0
        self.prev_done[slots] = False
        return self.state.T.astype(np.float32), {}

    def _integrate(self, state: npt.NDArray[np.float64], action: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """One Euler step of all poles."""
        multiply, divide, subtract = np.multiply, np.divide, np.subtract
        slope = self._slope
        angle, spin = state[2:]
        cos, sin, pull, force, rest = self._scratch
        total_mass, leverage = self._total_mass, self._leverage
        np.cos(angle, cos)
        np.sin(angle, sin)
        self._forces.take(action, out=force, mode="clip")
        # what pulls at the cart: (force + leverage * spin² * sin) / total_mass
        np.square(spin, pull)
        multiply(leverage, pull, pull)
        multiply(pull, sin, pull)
        np.add(force, pull, pull)
        divide(pull, total_mass, pull)
        # how the angle accelerates: (g * sin - cos * pull) / (length * (4/3 - masspole * cos² / total_mass))
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
        # and the cart: pull - leverage * turning * cos / total_mass
        multiply(leverage, turning, rest)
        multiply(rest, cos, rest)
        divide(rest, total_mass, rest)
        subtract(pull, rest, slope[1])
        slope[::2] = state[1::2]
        multiply(self._tau, slope, slope)
        return np.add(state, slope)

    checkpoint_size = _SEED + SEED_WORDS

    def get_checkpoints(self, out: npt.NDArray[np.float64]) -> None:
        """Write the states of all slots into rows of words, `(num_envs, checkpoint_size)`; so it can be resumed."""
        words = out.view(np.uint64)
        if self.state is not None:
            out[:, :_STEPS] = self.state.T
        words[:, _STEPS] = self.steps
        words[:, _FLAGS] = self.prev_done
        words[:, _FLAGS] += 2 * (self.state is not None)
        out[:, _BOUNDS:_RNG] = self.low, self.high
        # all slots have one generator
        if self._generators.read([self.np_random], words[:1, _RNG:_SEED]):
            self._seed_words = seed_words(self._np_random_seed)
        words[1:, _RNG:_SEED] = words[0, _RNG:_SEED]
        words[:, _SEED:] = self._seed_words

    def set_checkpoints(self, rows: npt.NDArray[np.float64], newest: int) -> None:
        """Bring all slots into the states of rows that `get_checkpoints` wrote, `newest` the last of them."""
        words = rows.view(np.uint64)
        self.state = rows[:, :_STEPS].T.copy() if words[newest, _FLAGS] & 2 else None
        self.steps = words[:, _STEPS].astype(np.int32)
        self.prev_done = (words[:, _FLAGS] & 1).astype(np.bool_)
        self.low, self.high = rows[newest, _BOUNDS:_RNG].tolist()
        self._np_random = generator_of(words[newest, _RNG:_SEED].tolist())
        self._np_random_seed = seed_of(words[newest, _SEED:].tolist())
