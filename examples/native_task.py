"""
A native task of your own
=========================

Step one batch of a task of your own: a tray tilts, and a ball has to stay in its middle.

::

    python examples/native_task.py

The same task as a plain `gymnasium.envs.mujoco.MujocoEnv` gives the very
same numbers (`tests/examples/test_native_task.py`).
"""

import argparse
import time

import numpy as np

import aioenv

XML = """
<mujoco>
  <option timestep="0.005" integrator="implicitfast"/>
  <worldbody>
    <light pos="0 0 2"/>
    <body name="tray" pos="0 0 0.5">
      <joint name="roll" axis="1 0 0" range="-20 20" damping="0.5"/>
      <joint name="pitch" axis="0 1 0" range="-20 20" damping="0.5"/>
      <geom type="box" size="0.3 0.3 0.01" mass="1"/>
    </body>
    <body name="ball" pos="0 0 0.545">
      <freejoint/>
      <geom size="0.035" mass="0.1" rgba="0.8 0.2 0.1 1"/>
    </body>
  </worldbody>
  <actuator>
    <motor joint="roll" gear="3" ctrlrange="-1 1"/>
    <motor joint="pitch" gear="3" ctrlrange="-1 1"/>
  </actuator>
</mujoco>
"""


class Tray(aioenv.NativeMujocoEnv):
    """Observes angles, the ball's place and all speeds; rewards a ball near the middle; ends when it has fallen."""

    def __init__(self, num_envs, effort_cost=0.01, **kwargs):
        super().__init__(num_envs, XML, frame_skip=4, **{"max_episode_steps": 200, **kwargs})
        self.effort_cost = effort_cost
        self.ball = self.qpos[:, 2:5]  # a view: always where the balls are now
        self.ball_height = self.ball[:, 2]
        self.set_observation_size(5 + self.model.nv)

    def draw_start(self, slots):
        qpos = np.repeat(self.init_qpos[None], len(slots), axis=0)
        qpos[:, 2:4] += self.uniform(slots, -0.1, 0.1, 2)
        return qpos, np.zeros((len(slots), self.model.nv))

    def observe(self, slots):
        return np.concatenate((self.qpos[slots, :5], self.qvel[slots]), axis=1)

    def outcome(self, actions, obs):
        off = np.sqrt(np.square(obs[:, 2]) + np.square(obs[:, 3]))
        effort = self.effort_cost * np.square(actions).sum(axis=1)
        return 1 - off - effort, self.ball_height < 0.3, {"off": off, "effort": effort}

    def start_info(self, slots):
        return {"height": self.ball_height[slots].copy()}


async def main(steps):
    async with aioenv.make_vec(Tray, 64, backend="native", autoreset_mode="SameStep") as envs:
        await envs.reset(seed=0)
        masses = envs.model_field("body_mass")  # (64, nbody): from now on every slot has its own
        masses[:, 2] = np.random.default_rng(0).uniform(0.05, 0.2, 64)
        await envs.call("set_const")  # what MuJoCo derives from masses
        await envs.reset(seed=0)
        ended = 0
        began = time.perf_counter()
        for _ in range(steps):
            result = await envs.step(envs.action_space.sample())
            ended += np.count_nonzero(result.terminated | result.truncated)
        rate = 64 * steps / (time.perf_counter() - began)
    print(f"{rate:,.0f} env-steps/s, {ended} episodes, obs {result.obs.shape}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    aioenv.run(main(parser.parse_args().steps))
