"""A task that writes to MuJoCo's state by itself, and whose actions are not its controls, equals its single envs.

Two arms, whose tips feel what they touch, and a hand that actions carry (a mocap body). A puck that was touched hangs
on to the hand (an equality constraint that is switched on).
"""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

import aioenv
from tests.kits.compare import assert_same

ARM = """
<body pos="{x} 0 0.05" euler="0 0 {turn}">
  <joint name="{s}1" axis="0 0 1" damping="0.3"/><geom type="capsule" fromto="0 0 0 0.2 0 0" size="0.02" mass="0.4"/>
  <body pos="0.2 0 0">
    <joint name="{s}2" axis="0 0 1" damping="0.2"/><geom type="capsule" fromto="0 0 0 0.1 0 0" size="0.02" mass="0.2"/>
    <site name="{s}" pos="0.1 0 0" size="0.03"/>
  </body>
</body>"""
XML = f"""
<mujoco>
  <option timestep="0.004" integrator="implicitfast" cone="elliptic"/>
  <worldbody>
    <geom type="plane" size="2 2 0.1"/>
    <body name="hand" mocap="true"><geom size="0.02" contype="0" conaffinity="0"/></body>
    {ARM.format(x=-0.35, turn=0, s="l")} {ARM.format(x=0.35, turn=180, s="r")}
    <body name="puck" pos="0 0 0.05"><freejoint/><geom type="cylinder" size="0.04 0.05" mass="0.1"/></body>
  </worldbody>
  <equality>
    <weld body1="hand" body2="puck" active="false" solref="0.1 1"/>
    <joint joint1="r2" joint2="l2" polycoef="0 -1 0 0 0"/>
  </equality>
  <actuator>
    <general joint="l1" ctrlrange="-3 3" dyntype="filter" dynprm="0.02"/>
    <general joint="r1" ctrlrange="-3 3"/>
  </actuator>
  <sensor><touch site="l"/><touch site="r"/><framepos objtype="body" objname="hand"/></sensor>
</mujoco>"""
ACTIONS = Box(-1, 1, (4,), np.float32)  # two for the arms, two that move the hand
PUCK = slice(4, 7)
HAND = np.array([0, 0, 0.3])


class Carry(aioenv.NativeMujocoEnv):
    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, XML, frame_skip=5, **kwargs)
        self.hand = self.bind("mocap_pos")[:, 0]
        self.held = self.bind("eq_active")[:, 0]
        self.sensors = self.bind("sensordata")
        self.places = self.remember("place", (3,))
        self.noise = None
        self.set_action_space(ACTIONS)
        self.set_observation_size(self.model.nq + self.model.nv + self.model.nsensordata)

    def draw_start(self, slots):
        noise = self.uniform(slots, -0.1, 0.1, 7)
        self.noise = noise[:, :3]
        qpos = np.repeat(self.init_qpos[None], len(slots), axis=0)
        qpos[:, :4] += noise[:, 3:]
        return qpos, np.zeros((len(slots), self.model.nv))

    def after_start(self, slots):
        self.hand[slots] = HAND + self.noise
        self.pool.forward(slots)
        self.places[slots] = self.qpos[slots, PUCK]

    def controls(self, actions):
        self.hand[:, :2] += 0.01 * actions[:, 2:]
        return 3 * actions[:, :2]

    def observe(self, slots):
        return np.concatenate((self.qpos[slots], self.qvel[slots], self.sensors[slots]), axis=1)

    def outcome(self, actions, obs):
        touched = (self.sensors[:, :2] > 0).any(axis=1)
        self.held[touched] = True
        puck = self.qpos[:, PUCK]
        moved = puck[:, 0] - self.places[:, 0]
        self.places[:] = puck
        return moved, puck[:, 2] > 0.3, {"touched": touched}

    def start_info(self, slots):
        return {"hand": self.sensors[slots, 2:].copy()}


class PlainCarry(MujocoEnv):
    metadata = {"render_modes": ["human", "rgb_array", "depth_array", "rgbd_tuple"], "render_fps": 50}  # noqa: RUF012

    def __init__(self, path):
        super().__init__(str(path), 5, None)
        size = self.model.nq + self.model.nv + self.model.nsensordata
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float64)
        self.action_space = ACTIONS

    def reset_model(self):
        noise = self.np_random.uniform(-0.1, 0.1, 7)
        qpos = self.init_qpos.copy()
        qpos[:4] += noise[3:]
        self.data.mocap_pos[0] = HAND + noise[:3]
        self.set_state(qpos, np.zeros(self.model.nv))
        self.place = self.data.qpos[PUCK].copy()
        return self._observe()

    def _get_reset_info(self):
        return {"hand": self.data.sensordata[2:].copy()}

    def _observe(self):
        return np.concatenate((self.data.qpos, self.data.qvel, self.data.sensordata))

    def step(self, action):
        self.data.mocap_pos[0, :2] += 0.01 * action[2:]
        self.do_simulation(3 * action[:2], self.frame_skip)
        touched = bool((self.data.sensordata[:2] > 0).any())
        if touched:
            self.data.eq_active[0] = True
        puck = self.data.qpos[PUCK].copy()
        moved, self.place = puck[0] - self.place[0], puck
        return self._observe(), moved, bool(puck[2] > 0.3), False, {"touched": touched}


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=str)
def test_it_is_the_same_task(mode, tmp_path):
    path = tmp_path / "carry.xml"
    path.write_text(XML)
    theirs = SyncVectorEnv([lambda: TimeLimit(PlainCarry(path), 50)] * 4, autoreset_mode=mode)
    ours = Carry(4, autoreset_mode=mode, max_episode_steps=50)
    assert ours.single_action_space == theirs.single_action_space and ours.action_space == theirs.action_space
    assert_same(ours.reset(seed=3), theirs.reset(seed=3))
    theirs.action_space.seed(2)
    terminated, truncated, touched = 0, 0, 0
    for step in range(150):
        actions = theirs.action_space.sample() * np.array([[1], [1], [0.05], [0]], np.float32)
        expected = theirs.step(actions)
        assert_same(ours.step(actions), expected, f"step {step}")
        terminated, truncated = terminated + expected[2].sum(), truncated + expected[3].sum()
        touched += expected[4].get("touched", np.zeros(4)).sum()
        if mode is AutoresetMode.DISABLED and (over := expected[2] | expected[3]).any():
            results = [env.reset(options={"reset_mask": over.copy()}) for env in (ours, theirs)]
            assert_same(*results, f"reset after step {step}")
    assert terminated and truncated and touched, (terminated, truncated, touched)
    ours.close()
    theirs.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [None, 2])
async def test_groups_and_slots_by_themselves_leave_the_others_alone(num_workers):
    def policy(obs):
        return np.sin(9 * obs[:, :4]).astype(np.float32)

    collected, states = [], []
    for groups in (1, 2):
        async with aioenv.make_vec(Carry, 4, backend="native", num_workers=num_workers, max_episode_steps=50) as envs:
            await envs.reset(seed=3)
            run = await envs.rollout(policy, 80, groups=groups)
            collected.append((run.obs, run.reward, run.terminated, run.truncated))
            if groups == 2:
                before = await envs.get_state([0, 1, 2])
                await envs.step_at(3, np.zeros(4, np.float32))
                states = [before, await envs.get_state([0, 1, 2])]
    assert_same(collected[1], collected[0])
    for before, after in zip(*states, strict=True):
        assert_same(after.arrays, before.arrays)


@pytest.mark.parametrize(
    ("controls", "told"),
    [
        (None, r"Carry.controls: expected an array of shape \(2, 2\), got None"),
        (np.zeros((2, 4)), r"Carry.controls: expected shape \(2, 2\), got \(2, 4\)"),
    ],
)
def test_controls_that_fit_no_actuators_are_refused(controls, told):
    env = Carry(2)
    env.reset(seed=0)
    env.controls = lambda actions: controls
    with pytest.raises((TypeError, ValueError), match=told):
        env.step(np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"actions: expected shape \(2, 4\), got \(2, 2\)"):
        env.step(np.zeros((2, 2), np.float32))
    with pytest.raises(TypeError, match="set_action_space: expected a space whose batches are arrays, got Dict"):
        env.set_action_space(gymnasium.spaces.Dict(arms=ACTIONS))
    env.close()


class Drawing(Carry):
    """Draws where episodes have begun, too."""

    drawn: dict

    def after_start(self, slots):
        super().after_start(slots)
        numbers = np.arange(self.num_envs)[slots].tolist()
        self.drawn = {"slots": numbers, "uniform": self.uniform(slots, 0, 1, 2), "normal": self.normal(slots, 3)}


def test_numbers_are_drawn_for_a_slice_too():
    env = Drawing(3)
    env.reset(seed=7)
    everyone = env.drawn
    assert everyone["slots"] == [0, 1, 2] and everyone["uniform"].shape == (3, 2) and everyone["normal"].shape == (3, 3)
    env.reset(seed=7, options={"reset_mask": np.array([False, False, True])})
    assert env.drawn["slots"] == [2]
    for name in ("uniform", "normal"):
        assert np.array_equal(env.drawn[name][0], everyone[name][2]), "seed 7 + 2, as before"
    env.close()


def test_keys_of_infos_are_strings():
    env = Carry(2)
    env.reset(seed=0)
    env.outcome = lambda actions, obs: (np.zeros(2), None, {3: np.zeros(2)})
    with pytest.raises(TypeError, match=r"Carry.outcome: expected strings as keys of infos, got 3"):
        env.step(np.zeros((2, 4), np.float32))
    env.close()


def test_who_says_nothing_of_observations_is_told_how():
    class Blind(aioenv.NativeMujocoEnv):
        def __init__(self, num_envs, **kwargs):
            super().__init__(num_envs, "hopper.xml", frame_skip=4, **kwargs)

    with pytest.raises(aioenv.WorkerStartError, match="has no observation_space: call set_observation_size"):
        aioenv.sync.make_vec(Blind, 2, backend="native")
