"""The example's task equals the same task written for single envs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from tests.kits.compare import assert_same

SPEC = importlib.util.spec_from_file_location("native_task", Path(__file__).parents[2] / "examples" / "native_task.py")
native_task = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(native_task)


class PlainTray(MujocoEnv):
    metadata = {"render_modes": ["human", "rgb_array", "depth_array", "rgbd_tuple"], "render_fps": 50}  # noqa: RUF012

    def __init__(self, path):
        super().__init__(str(path), 4, Box(-np.inf, np.inf, (13,), np.float64))

    def reset_model(self):
        qpos = self.init_qpos.copy()
        qpos[2:4] += self.np_random.uniform(-0.1, 0.1, 2)
        self.set_state(qpos, np.zeros(self.model.nv))
        return self._observe()

    def _get_reset_info(self):
        return {"height": self.data.qpos[4]}

    def _observe(self):
        return np.concatenate((self.data.qpos[:5], self.data.qvel))

    def step(self, action):
        self.do_simulation(action, self.frame_skip)
        obs = self._observe()
        off = np.sqrt(np.square(obs[2]) + np.square(obs[3]))
        effort = 0.01 * np.square(action).sum()
        return obs, 1 - off - effort, bool(self.data.qpos[4] < 0.3), False, {"off": off, "effort": effort}


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=str)
def test_it_is_the_same_task(mode, tmp_path):
    path = tmp_path / "tray.xml"
    path.write_text(native_task.XML)
    theirs = SyncVectorEnv([lambda: TimeLimit(PlainTray(path), 60)] * 4, autoreset_mode=mode)
    ours = native_task.Tray(4, autoreset_mode=mode, max_episode_steps=60)
    assert ours.single_observation_space == theirs.single_observation_space and ours.metadata == theirs.metadata
    assert_same(ours.reset(seed=3), theirs.reset(seed=3))
    theirs.action_space.seed(2)
    terminated, truncated = 0, 0
    for step in range(150):
        # three of the trays are pushed over, the others hardly move
        actions = theirs.action_space.sample() * np.array([[1], [1], [1], [0.02]], np.float32)
        expected = theirs.step(actions)
        assert_same(ours.step(actions), expected, f"step {step}")
        terminated, truncated = terminated + expected[2].sum(), truncated + expected[3].sum()
        if mode is AutoresetMode.DISABLED and (over := expected[2] | expected[3]).any():
            results = [env.reset(options={"reset_mask": over.copy()}) for env in (ours, theirs)]
            assert_same(*results, f"reset after step {step}")
    assert terminated and truncated
    ours.close()
    theirs.close()
