"""Envs that edit their models while they run, or draw more than their states: what images and states make of it."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco.inverted_pendulum_v5 import InvertedPendulumEnv
from gymnasium.envs.mujoco.mujoco_env import MujocoEnv
from gymnasium.wrappers import AddWhiteNoise

import aioenv
from tests.kits.snapshot_kit import Bench, make, record

XML = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="above" pos="0 0 2"/>
    <geom type="plane" size="1 1 .1" rgba=".2 .3 .4 1"/>
    <site name="goal" pos="0 0 .1" size=".1" rgba="1 0 0 1"/>
    <body pos="0 0 .2">
      <joint name="x" type="slide" axis="1 0 0"/>
      <geom size=".1" rgba="0 1 0 1"/>
    </body>
  </worldbody>
  <actuator><motor joint="x"/></actuator>
</mujoco>
"""
SIZE = {"width": 40, "height": 30}


class Goal(MujocoEnv):
    """Moves its goal in `reset` and colours it in `step`: both are in its model alone."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, path, **kwargs):
        space = gym.spaces.Box(-np.inf, np.inf, (3,))
        super().__init__(path, 5, space, default_camera_config={"distance": 2.0}, **SIZE, **kwargs)

    def reset_model(self):
        self.model.site_pos[0, :2] = self.np_random.uniform(-0.5, 0.5, 2)
        self.set_state(self.init_qpos, self.init_qvel)
        return self._observe()

    def _observe(self):
        mujoco.mj_forward(self.model, self.data)
        return np.concatenate([self.data.qpos, self.data.site_xpos[0, :2]])

    def step(self, action):
        self.do_simulation(action, self.frame_skip)
        self.model.site_rgba[0, 1] = abs(action[0])
        obs = self._observe()
        return obs, -float(abs(obs[0] - obs[1])), False, False, {}


class Marked(Goal):
    """Puts the marker where the goal is when it draws, as the robots of gymnasium-robotics do."""

    def render(self):
        self.model.site_size[0] = 0.3
        return super().render()


@pytest.fixture
def goal(tmp_path):
    """What makes one of them."""
    path = tmp_path / "goal.xml"
    path.write_text(XML)
    return lambda kind=Goal, **kwargs: kind(str(path), **kwargs)


ACTIONS = np.array([[0.2], [0.9]], np.float32)


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_render_workers_show_what_an_env_has_edited(goal):
    """Where a worker draws its own env it does so with the env's own model, whose images test_pixels compares."""
    pooled = aioenv.RenderConfig(**SIZE, camera="above", workers=1)
    own = aioenv.RenderConfig(**SIZE, camera="above")
    async with (
        aioenv.AsyncVectorEnv([goal] * 2, num_workers=2, render=pooled, pixels=own) as envs,
        aioenv.AsyncVectorEnv([goal] * 2, pixels=pooled) as others,
    ):
        seen, _ = await envs.reset(seed=3)
        first = await envs.render()
        assert not np.array_equal(first[0], first[1])
        assert np.array_equal(first, seen)
        assert np.array_equal(first, (await others.reset(seed=3)).obs)
        for _ in range(2):
            seen, *_ = await envs.step(ACTIONS)
            images = await envs.render()
            assert not np.array_equal(images, first)
            assert np.array_equal(images, seen)
            assert np.array_equal(images, (await others.step(ACTIONS)).obs)


class Recolour(gym.Wrapper):
    """Domain randomisation, as a wrapper."""

    def reset(self, **kwargs):
        result = self.env.reset(**kwargs)
        self.unwrapped.model.geom_rgba[:, :3] = self.unwrapped.np_random.uniform(0, 1, 3)
        return result


@pytest.mark.asyncio
async def test_a_wrapper_that_edits_the_model_shows():
    config = aioenv.RenderConfig(**SIZE, quality="fast", workers=1)
    async with aioenv.make_vec("InvertedPendulum-v5", 2, wrappers=[Recolour], render=config) as envs:
        await envs.reset(seed=[7, 7])
        same = await envs.render()
        await envs.reset(seed=[7, 8])
        other = await envs.render()
    assert np.array_equal(same[0], same[1])
    assert np.abs(other[0].astype(int) - other[1]).max() > 50


@pytest.mark.asyncio
async def test_an_env_with_a_render_of_its_own_draws_itself_but_for_cameras_that_are_named(goal):
    marked = partial(goal, Marked, render_mode="rgb_array")
    async with aioenv.AsyncVectorEnv([marked] * 2, render=aioenv.RenderConfig()) as envs:
        await envs.reset(seed=3)
        await envs.step(ACTIONS)
        images = await envs.render()
        assert images.shape == (2, 30, 40, 3)
        assert np.array_equal(images, np.stack(await envs.call("render")))
    async with aioenv.AsyncVectorEnv([marked] * 2, pixels=aioenv.RenderConfig()) as envs:
        obs, _ = await envs.reset(seed=3)
        assert np.array_equal(obs, np.stack(await envs.call("render")))
    config = aioenv.RenderConfig(24, 20, camera=["above", -1], depth=True, quality="fast")
    async with aioenv.AsyncVectorEnv([partial(goal, Marked)] * 2, render=config) as envs:
        await envs.reset(seed=3)
        images, depth = await envs.render()
        assert images.shape == (2, 2, 20, 24, 3) and depth.shape == (2, 2, 20, 24)
    with pytest.raises(aioenv.RenderError, match=r"a render of their own.*got render_mode=None.*camera="):
        await aioenv.AsyncVectorEnv([partial(goal, Marked)] * 2, render=aioenv.RenderConfig())
    with pytest.raises(ValueError, match=r"a render of its own.*got render_mode=None"):
        await aioenv.AsyncVectorEnv([partial(goal, Marked)] * 2, pixels=aioenv.RenderConfig())


def test_an_env_is_not_resumed_with_another_model(goal):
    """The goal is in no part of MuJoCo's state, nor is it felt by physics: the step made again comes out as it was."""
    with Bench([goal]) as bench:
        history = record(bench, 6, (1,))
    with Bench([goal]) as fresh:
        operations, _, before, after = history[-1]
        (why,) = fresh.service.resume([0], before, operations, after)
    assert why == "fields of the model of Goal, which it edits, differ; give it get_state() and set_state(state)"


class Whole(Goal):
    """As it says itself how it goes on, it is resumed."""

    def get_state(self):
        return self.model.site_pos.copy(), self.model.site_rgba.copy(), self.data.qpos.copy(), self.data.qvel.copy()

    def set_state(self, *state):
        if len(state) == 2:  # Gymnasium's
            return super().set_state(*state)
        self.model.site_pos[:], self.model.site_rgba[:], qpos, qvel = state[0]
        return super().set_state(qpos, qvel)


def test_an_env_that_gives_and_takes_its_edits_is_resumed(goal):
    with Bench([partial(goal, Whole)]) as bench:
        history = record(bench, 6, (1,))
    with Bench([partial(goal, Whole)]) as fresh:
        operations, _, before, after = history[-1]
        assert fresh.service.resume([0], before, operations, after) == [None]


def test_gymnasiums_own_tasks_are_known_to_edit_nothing():
    with Bench([partial(make, "InvertedPendulum-v5")]) as bench:
        (known,) = bench.sizes
    with Bench([InvertedPendulumEnv]) as bench:
        assert bench.sizes[0] < known  # which counts steps


@pytest.mark.asyncio
async def test_a_state_has_the_edits_of_the_model(goal):
    async with aioenv.AsyncVectorEnv([goal] * 2) as envs:
        first, _ = await envs.reset(seed=3)
        states = await envs.get_state()
        expected = await envs.step(ACTIONS)
        other, _ = await envs.reset(seed=30)
        assert not np.array_equal(first, other)
        await envs.set_state(states)
        got = await envs.step(ACTIONS)
    assert got.obs.tobytes() == expected.obs.tobytes()
    assert got.reward.tobytes() == expected.reward.tobytes()


@pytest.mark.asyncio
@pytest.mark.parametrize("wants", [{"depth": True}, {"segmentation": True}, {"camera": [None, "above"]}], ids=str)
async def test_envs_that_draw_themselves_are_not_asked_for_what_they_do_not_draw(goal, wants):
    marked = partial(goal, Marked, render_mode="rgb_array")
    with pytest.raises(aioenv.RenderError, match=r"draw themselves, as they see fit: not with (depth|segm|camera)"):
        await aioenv.AsyncVectorEnv([marked] * 2, render=aioenv.RenderConfig(**wants))
    with pytest.raises(aioenv.RenderError, match=r"not with camera='above'"):
        await aioenv.make_vec("CartPole-v1", 2, render=aioenv.RenderConfig(camera="above"))
    with pytest.raises(ValueError, match=r"draws itself, as it sees fit: not with camera='above'"):
        await aioenv.make_vec("CartPole-v1", 2, pixels=aioenv.RenderConfig(camera="above"))
    above = {"camera": "above"}

    def noisy():
        return AddWhiteNoise(marked(), probability_of_noise_per_pixel=0.5)

    with pytest.raises(
        aioenv.RenderError, match=r"not with camera='above'\. .* unless a wrapper has a render of its own"
    ):
        await aioenv.AsyncVectorEnv([noisy], render=aioenv.RenderConfig(**above))
    with pytest.raises(ValueError, match=r"or a wrapper has a render of its own, .* not with camera='above'"):
        await aioenv.AsyncVectorEnv([noisy], pixels=aioenv.RenderConfig(**above))


class Rebuilt(Goal):
    """Compiles another model for each episode: of the same sizes, or with so many balls more."""

    def __init__(self, path, more=0):
        super().__init__(path)
        self._more = more

    def reset_model(self):
        spec = mujoco.MjSpec.from_string(XML)
        spec.worldbody.first_geom().rgba = [*self.np_random.uniform(0, 1, 3), 1]
        body = spec.worldbody.first_body()
        body.pos = [0, self.np_random.uniform(-0.5, 0.5), 0.3]
        body.first_geom().type = mujoco.mjtGeom.mjGEOM_BOX
        body.first_geom().size = [0.1, 0.3, 0.1]
        body.first_geom().pos = [0, 0.1, 0]
        for _ in range(self._more):
            spec.worldbody.add_geom(size=[0.1, 0, 0])
        self.model = spec.compile()
        self.data = mujoco.MjData(self.model)
        return self._observe()


@pytest.mark.asyncio
async def test_an_env_that_compiles_its_model_anew(goal):
    own, pooled = (aioenv.RenderConfig(**SIZE, camera="above", workers=workers) for workers in (None, 1))
    rebuilt = partial(goal, Rebuilt)
    async with aioenv.AsyncVectorEnv([rebuilt] * 2, render=pooled, pixels=own) as envs:
        seen, _ = await envs.reset(seed=3)
        assert np.array_equal(await envs.render(), seen)
        assert not np.array_equal(seen[0], seen[1])
    rebuilt = partial(goal, Rebuilt, more=2)
    async with aioenv.AsyncVectorEnv([rebuilt, goal], render=pooled, pixels=own, num_workers=1) as envs:
        seen, _ = await envs.reset(seed=3)
        assert np.array_equal(await envs.render(), seen)
        assert not np.array_equal(seen[0], seen[1])


SWAY = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="sensor" pos="0 -3 .5" xyaxes="1 0 0 0 0 1" focal=".01 .01" sensorsize=".02 .015" resolution="4 3"/>
    <geom type="plane" size="2 2 .1" rgba=".2 .3 .4 1"/>
    <site name="hook" pos="-.5 0 1.2"/>
    <body pos="0 0 .5">
      <camera name="centre" mode="trackcom" pos="0 -3 .5" xyaxes="1 0 0 0 0 1"/>
      <joint name="x" type="slide" axis="1 0 0"/>
      <geom size=".1"/>
      <site name="eye" pos="-.3 0 .3" zaxis="0 0 -1"/>
      <body pos=".5 0 0">
        <joint axis="0 1 0"/>
        <geom type="capsule" fromto="0 0 0 .4 0 0" size=".05" rgba="1 0 0 1"/>
        <site name="end" pos=".4 0 0"/>
      </body>
    </body>
  </worldbody>
  <tendon>
    <spatial limited="true" range="0 2.5" width=".02"><site site="hook"/><site site="end"/></spatial>
  </tendon>
  <actuator><motor joint="x"/></actuator>
  <sensor><rangefinder site="eye"/></sensor>
</mujoco>
"""
# What a picture shows although it is neither a colour nor a place; of the last no values can be given to a pool.
UNOBVIOUS = {
    "body_mass": lambda masses: masses * [1, 1, 20],
    "tendon_range": lambda ranges: ranges * 0.6,
    "opt.gravity": lambda gravity: gravity + np.array([5, 0, 0]),
    "vis.headlight.diffuse": lambda colour: colour + 0.5,
    "vis.headlight.active": lambda active: active * 0,
    "vis.map.znear": lambda near: near * 300,
    "vis.global_.fovy": lambda angle: angle / 2,
    "cam_sensorsize": lambda size: size / 2,
    "jnt_pos": lambda places: places + 0.1,
    "sensor_cutoff": lambda reach: reach + 0.3,
    "cam_mode": lambda mode: mode * 0,
}


class Swaying(MujocoEnv):
    """Edits one field of its model when an episode begins."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, path, field):
        space = gym.spaces.Box(-np.inf, np.inf, (2,))
        super().__init__(path, 5, space, default_camera_config={"distance": 3.0}, **SIZE)
        self._field = field

    def reset_model(self):
        edit(self.model, self._field)
        self.set_state(np.array([0.3, 0.6]), np.zeros(2))
        return self.data.qpos.copy()

    def step(self, action):
        self.do_simulation(action, 5)
        return self.data.qpos.copy(), 0.0, False, False, {}


def edit(model, name):
    """Edit a field, if any; gives its value."""
    if not name:
        return None
    owner = model
    *parents, last = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    value = UNOBVIOUS[name](np.array(getattr(owner, last)))
    if isinstance(getattr(owner, last), np.ndarray):
        getattr(owner, last)[:] = value
    else:
        setattr(owner, last, type(getattr(owner, last))(value))
    return value


CAMERAS = ["centre", "sensor", -1]


@pytest.mark.asyncio
async def test_what_is_neither_a_colour_nor_a_place_shows_too(tmp_path):
    """Where a worker draws its own env it does so with the env's own model, which is what all others are to show."""
    path = tmp_path / "sway.xml"
    path.write_text(SWAY)
    fields = ["", *UNOBVIOUS]
    envs_of = [partial(Swaying, str(path), field) for field in fields]
    own, pooled = (aioenv.RenderConfig(**SIZE, camera=CAMERAS, quality="fast", workers=w) for w in (None, 1))
    async with aioenv.AsyncVectorEnv(envs_of, num_workers=2, render=pooled, pixels=own) as envs:
        seen, _ = await envs.reset(seed=3)
        images = await envs.render()
    shown = [bool((image != seen[0]).any()) for image in seen]
    assert shown == [False] + [True] * len(UNOBVIOUS)
    assert [f for f, image, right in zip(fields, images, seen, strict=True) if (image != right).any()] == []
    # a pool is told of them
    model = mujoco.MjModel.from_xml_path(str(path))
    data = mujoco.MjData(model)
    data.qpos[:] = 0.3, 0.6
    async with aioenv.RenderPool(model, quality="fast") as pool:
        draw = partial(pool.render, [data], **SIZE, camera=CAMERAS[:2])
        plain = await draw()
        assert np.array_equal(plain[0], seen[0, :2])
        for field, right in zip(fields[1:-1], seen[1:], strict=False):
            value = edit(mujoco.MjModel.from_xml_path(str(path)), field)
            assert np.array_equal((await draw(edits={field: value[None]}))[0], right[:2]), field
        with pytest.raises(ValueError, match="cam_mode"):
            await draw(edits={"cam_mode": model.cam_mode[None]})
        with pytest.raises(ValueError, match=r"znear.*1e-06 or more"):  # the worker would die of it
            await draw(edits={"vis.map.znear": [0.0]})
        assert np.array_equal(await draw(), plain)
