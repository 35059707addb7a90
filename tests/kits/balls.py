"""Envs whose images show what they observe: drawn from MuJoCo states, by themselves, or as one batch."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium import spaces

import aioenv
from aioenv.requirements import has_batch
from tests.kits.version_kit import NoTask

RAISE, EXIT = 1.0, -1.0  # in an action's last place
XML = """
<mujoco>
  <option gravity="0 0 0" timestep="0.01"/>
  <visual><headlight ambient=".5 .5 .5"/></visual>
  <worldbody>
    <camera name="front" pos="0 -3 0" xyaxes="1 0 0 0 0 1"/>
    <body>
      <joint name="x" type="slide" axis="1 0 0" range="-1 1" limited="true" damping="1"/>
      <joint name="z" type="slide" axis="0 0 1" range="-1 1" limited="true" damping="1"/>
      <geom type="box" size=".3 .3 .3" mass="1" rgba="1 0 0 1"/>
      <body>
        <joint name="spin" axis="0 1 0" damping="1"/>
        <geom type="box" size=".05 .4 .6" mass="1" rgba="0 1 1 1"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="x" gear="50" ctrlrange="-1 1"/>
    <motor joint="z" gear="50" ctrlrange="-1 1"/>
    <motor joint="spin" gear=".01" ctrlrange="-1 1"/>
  </actuator>
</mujoco>
"""
SIZE = {"width": 20, "height": 16}


def over(count: float) -> bool:
    """Whether an episode ends with this step."""
    return int(count) % 5 == 4


class Ball(gym.Env):
    """A body that its actions push about; it observes what a picture of it shows, and how many steps it has done."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Box(-1, 1, (3,), np.float32)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self) -> None:
        self.model = mujoco.MjModel.from_xml_string(XML)
        self.data = mujoco.MjData(self.model)
        self.count = 0

    def observe(self) -> np.ndarray:
        return np.append(self.data.qpos, self.count)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = self.np_random.uniform(-1, 1, 3)
        self.count = int(self.np_random.integers(3))
        return self.observe(), {}

    def step(self, action):
        if action[2] == RAISE:
            raise ValueError("step")
        if action[2] == EXIT:
            os._exit(3)
        self.data.ctrl[:] = action
        mujoco.mj_step(self.model, self.data, 5)
        self.count += 1
        return self.observe(), 0.0, over(self.count), False, {}


def paint(obs: np.ndarray) -> np.ndarray:
    """The picture of an env that draws itself."""
    bytes_ = np.frombuffer(np.ascontiguousarray(obs, np.float64).tobytes(), np.uint8)
    return np.resize(bytes_, (4, 5, 3))


class Painted(Ball):
    """The same, drawn by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._model, self._data = self.model, self.data
        del self.model, self.data

    def observe(self) -> np.ndarray:
        return np.append(self._data.qpos, self.count)

    def reset(self, *, seed=None, options=None):
        self.model, self.data = self._model, self._data
        try:
            return super().reset(seed=seed, options=options)
        finally:
            del self.model, self.data

    def step(self, action):
        self.model, self.data = self._model, self._data
        try:
            return super().step(action)
        finally:
            del self.model, self.data

    def render(self):
        return paint(self.observe())

    def get_state(self):
        return np.append(self._data.qpos, [*self._data.qvel, self.count])

    def set_state(self, state):
        self._data.qpos[:], self._data.qvel[:], self.count = state[:3], state[3:6], int(state[6])


class Balls(aioenv.NativeMujocoEnv if has_batch() else NoTask):
    """Many of them as one batch."""

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__(num_envs, XML, frame_skip=5, **kwargs)
        self.counts = self.remember("counts", ())
        self.set_observation_size(4)

    def draw_start(self, slots):
        return self.uniform(slots, -1, 1, 3), np.zeros((len(slots), 3))

    def after_start(self, slots):
        self.counts[slots] = -1

    def observe(self, slots):
        return np.concatenate((self.qpos[slots], self.counts[slots].reshape(-1, 1)), axis=1)

    def before_step(self):
        self.counts += 1

    def outcome(self, actions, obs):
        return np.zeros(self.num_envs), obs[:, 3] % 5 == 4, {}


class Reference:
    """Draws what a picture must be, by a pool of its own."""

    def __init__(self, own: bool) -> None:
        self._own = own
        self._known: dict[bytes, np.ndarray] = {}
        self._pool = None if own else aioenv.RenderPool(XML, quality="fast", workers_per_device=1)
        self._data = None if own else mujoco.MjData(self._pool.model)

    async def start(self) -> None:
        if self._pool is not None:
            await self._pool

    async def of(self, obs: np.ndarray) -> np.ndarray:
        key = obs.tobytes()
        if key not in self._known:
            if self._own:
                self._known[key] = paint(obs)
            else:
                self._data.qpos[:] = obs[:3]
                states = self._pool.get_state(self._data)[None]
                self._known[key] = (await self._pool.render(states, camera="front", **SIZE))[0].copy()
        return self._known[key]

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
