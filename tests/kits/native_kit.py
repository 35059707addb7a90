"""Vector envs for the tests of NativeVectorEnv, and the places where they live."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from functools import partial

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

import aioenv

HERE = [{"run_in": "inline"}, {"run_in": "thread"}]
EVERYWHERE = [*HERE, {"num_workers": 1}]
here = pytest.mark.parametrize("where", HERE, ids=lambda where: where["run_in"])
everywhere = pytest.mark.parametrize("where", EVERYWHERE, ids=lambda where: where.get("run_in", "workers"))


class Batch(VectorEnv):
    """Counts its steps in one array that it gives away each time; action 1 of slot 0 makes it misbehave."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs, width=2, misbehave=None, render_mode=None, fresh=False):
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, 1e9, (width,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.single_action_space = spaces.Discrete(2)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.render_mode = render_mode
        self.misbehave = misbehave
        self.fresh = fresh
        self.obs = np.zeros((num_envs, width), np.float32)
        self.flags = np.zeros(num_envs, np.bool_)
        self.threads = {threading.get_ident()}
        self.level = 7
        self.closed_on = None

    def give(self):
        self.threads.add(threading.get_ident())
        return self.obs.copy() if self.fresh else self.obs

    def reset(self, *, seed=None, options=None):
        self.obs[:] = 0
        return self.give(), {}

    def step(self, actions):
        if actions[0] == 1:
            self.misbehave()
        self.obs += 1
        return self.give(), np.ones(self.num_envs, np.float32), self.flags, self.flags, {"buffer": self.obs}

    def render(self):
        self.threads.add(threading.get_ident())
        return tuple(np.full((4, 5, 3), int(row[0]), np.uint8) for row in self.obs)

    def close_extras(self, **kwargs):
        self.closed_on = threading.get_ident()


class RandomWalk(VectorEnv):
    """Each slot walks at random by a generator of its own, for 3 to 8 steps, in any autoreset mode; has states.

    What a slot gives does not depend on its number, nor on the others. Action 9 of any slot kills the process.
    """

    def __init__(self, num_envs, mode=AutoresetMode.NEXT_STEP):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": mode}
        self.mode = mode
        self.single_observation_space = spaces.Box(-1e9, 1e9, (2,), np.float64)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.single_action_space = spaces.Discrete(10)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.rngs = [np.random.default_rng() for _ in range(num_envs)]
        self.at = np.zeros((num_envs, 2))
        self.left = np.zeros(num_envs, np.int64)
        self.due = np.zeros(num_envs, np.bool_)

    def begin(self, slot):
        self.at[slot] = self.rngs[slot].normal(size=2)
        self.left[slot] = self.rngs[slot].integers(3, 9)
        self.due[slot] = False

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        seeds = [None] * self.num_envs if seed is None else seed
        if isinstance(seeds, int):
            seeds = [seed + slot for slot in range(self.num_envs)]
        for slot in np.flatnonzero(mask).tolist():
            if seeds[slot] is not None:
                self.rngs[slot] = np.random.default_rng(seeds[slot])
            self.begin(slot)
        return self.at.copy(), {"new": mask.copy(), "_new": mask.copy()}

    def step(self, actions):
        if (actions == 9).any():
            os.kill(os.getpid(), signal.SIGKILL)
        reset, reward = self.due.copy(), np.zeros(self.num_envs)
        info = {}
        for slot in range(self.num_envs):
            if reset[slot]:
                self.begin(slot)
                continue
            self.at[slot] += actions[slot] + self.rngs[slot].normal(size=2)
            self.left[slot] -= 1
            reward[slot] = self.at[slot].sum()
        over = ~reset & (self.left <= 0)
        if self.mode is AutoresetMode.SAME_STEP and over.any():
            final = np.full(self.num_envs, None, object)
            for slot in np.flatnonzero(over).tolist():
                final[slot] = self.at[slot].copy()
                self.begin(slot)
            info = {"final_obs": final, "_final_obs": over}
        if self.mode is AutoresetMode.NEXT_STEP:
            self.due = over.copy()
        return self.at.copy(), reward, over, np.zeros(self.num_envs, np.bool_), info

    def get_state(self, slots):
        return [
            {
                "at": self.at[slot].copy(),
                "left": int(self.left[slot]),
                "due": bool(self.due[slot]),
                "rng": self.rngs[slot].bit_generator.state,
            }
            for slot in slots
        ]

    def set_state(self, states, slots):
        for slot, state in zip(slots, states, strict=True):
            self.at[slot], self.left[slot], self.due[slot] = state["at"], state["left"], state["due"]
            self.rngs[slot] = np.random.default_rng()
            self.rngs[slot].bit_generator.state = state["rng"]


class Gate:
    """Something that a step waits for."""

    def __init__(self):
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.opened.wait(30)

    async def is_reached(self):
        assert await asyncio.to_thread(self.entered.wait, 30)


def fail():
    raise ValueError("as it was told")


def cartpole(num_envs):
    return gym.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


OK, BAD = np.zeros(3, np.int64), np.array([1, 0, 0])  # what a Batch of three is given


# ---------------------------------------------------------------- beside single envs

MODES = list(AutoresetMode)
HERE_AND_THERE = pytest.mark.parametrize("num_workers", [0, 1, 2])
LIMIT = 9


def equal(ours, theirs):
    """Whether two results are the same, to the bit, infos with all of their masks included."""
    assert type(ours) is type(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert data_equivalence(mine, other, exact=True), (mine, other)
    return True


def both(mode=AutoresetMode.NEXT_STEP, task="Hopper-v5", num_envs=5, **kwargs):
    """The same slots as single envs in workers, and as one vector env."""
    common = {"autoreset_mode": mode, "max_episode_steps": LIMIT}
    singles = aioenv.make_vec(task, num_envs, num_workers=2, **common)
    return singles, aioenv.make_vec(task, num_envs, backend="native", **common, **kwargs)


def policy(obs):
    return np.sin(obs[:, 5:8] * 25).astype(np.float32)


def outcomes(evaluation):
    return [(e.number, e.seed, e.total_reward, e.length, e.terminated, e.info) for e in evaluation.episodes]


TASK = "InvertedPendulum-v5"
STATE = mujoco.mjtState.mjSTATE_INTEGRATION


class Pendulums(SyncVectorEnv):
    """Gymnasium's, as one vector env that tells the states of its physics."""

    def __init__(self, num_envs):
        super().__init__([partial(gym.make, TASK)] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
        self.model = self.envs[0].unwrapped.model
        self.default_camera_config = self.envs[0].unwrapped.mujoco_renderer.default_cam_config

    def physics_states(self, slots=None, out=None):
        bases = [self.envs[slot].unwrapped for slot in (range(self.num_envs) if slots is None else slots)]
        states = np.empty((len(bases), mujoco.mj_stateSize(self.model, STATE)))
        for base, row in zip(bases, states, strict=True):
            mujoco.mj_getState(base.model, base.data, row, STATE)
        return states


class Hindered(Pendulums):
    def step(self, actions):
        if actions[0] > 1:
            raise ValueError("as it was told")
        return super().step(actions)


XML = """<mujoco><worldbody><body><joint name="j" axis="0 1 0"/><geom size=".1"/></body></worldbody>
<actuator><motor joint="j" ctrlrange="-1 1"/></actuator></mujoco>"""


class Good(aioenv.NativeMujocoEnv):
    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, XML, 2, max_episode_steps=2, **kwargs)
        self.set_observation_size(2)

    def draw_start(self, slots):
        return np.zeros((len(slots), 1)), self.uniform(slots, -1, 1, 1)

    def observe(self, slots):
        return np.concatenate((self.qpos[slots], self.qvel[slots]), axis=1)

    def outcome(self, actions, obs):
        return obs[:, 0].copy(), np.arange(self.num_envs) == 0, {"speed": obs[:, 1].copy()}
