"""A small MuJoCo env that has a bit of everything that is drawn, and says what `mujoco.Renderer` is to draw."""

from __future__ import annotations

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv

MOCAP = """
<mujoco>
  <visual><global offwidth="64" offheight="64"/></visual>
  <asset>
    <texture name="grid" type="2d" builtin="checker" rgb1=".1 .2 .3" rgb2=".9 .8 .7" width="64" height="64"/>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".4 .6 .8" rgb2="0 0 0" width="64" height="64"/>
    <material name="grid" texture="grid" texrepeat="4 4" reflectance=".3"/>
  </asset>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="above" pos="0 0 4"/>
    <camera name="side" pos="0 -4 1" xyaxes="1 0 0 0 0 1"/>
    <geom type="plane" size="2 2 .1" material="grid"/>
    <body name="target" mocap="true" pos="0 0 1"><geom type="sphere" size=".2" rgba="1 0 0 1"/></body>
    <body name="ball" pos=".5 0 .5"><freejoint/><geom type="box" size=".15 .1 .2" rgba="0 1 0 1"/>
      <site name="end" pos="0 0 .2"/></body>
    <body name="post" pos="-.5 0 1"><geom type="capsule" size=".05 .3"/><site name="start"/></body>
  </worldbody>
  <tendon><spatial width=".02"><site site="start"/><site site="end"/></spatial></tendon>
</mujoco>
"""


class MocapEnv(gym.Env):
    """A red ball that no physics moves, a box that falls, and a tendon between posts."""

    observation_space = gym.spaces.Box(-10, 10, (3,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (3,), np.float64)
    render_mode = "rgb_array"

    def __init__(self):
        self.model = mujoco.MjModel.from_xml_string(MOCAP)
        self.data = mujoco.MjData(self.model)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        return self.data.mocap_pos[0].copy(), {}

    def step(self, action):
        self.data.mocap_pos[0] = action
        mujoco.mj_step(self.model, self.data, 5)
        return self.data.mocap_pos[0].copy(), 0.0, False, False, {}


def full_state(env):
    """Everything of an env's simulation, for drawing it again elsewhere."""
    base = env.unwrapped
    spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.empty(mujoco.mj_stateSize(base.model, spec))
    mujoco.mj_getState(base.model, base.data, state, spec)
    return state


class Tell(gym.Wrapper):
    """Lets the test ask for the state that `mujoco.Renderer` is to draw, and for the model and the env's view."""

    def whole_state(self):
        return full_state(self.env)

    def model_and_view(self):
        base = self.env.unwrapped
        buffer = np.empty(mujoco.mj_sizeModel(base.model), np.uint8)
        mujoco.mj_saveModel(base.model, None, buffer)
        config = base.mujoco_renderer.default_cam_config if isinstance(base, MujocoEnv) else {}
        return buffer.tobytes(), config


def make(name: str):
    env = MocapEnv() if name == "mocap" else gym.make(name, render_mode="rgb_array")
    return Tell(env)


STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
