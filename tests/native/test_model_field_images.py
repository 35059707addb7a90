"""Images show the fields of models that slots have values of their own for, as each state was drawn with them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import mujoco
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv

pytestmark = pytest.mark.asyncio

XML = """
<mujoco>
  <asset>
    <texture name="grid" type="2d" builtin="checker" width="8" height="8" rgb1="1 1 0" rgb2="0 0 1"/>
    <texture name="plain" type="2d" builtin="flat" width="8" height="8" rgb1="0 1 1"/>
    <material name="floor" texture="grid" texrepeat="4 4"/>
  </asset>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="above" pos="0 0 2"/>
    <geom type="plane" size="1 1 .1" material="floor"/>
    <site pos=".3 .3 .1" size=".1" rgba="1 0 1 1"/>
    <body pos="0 0 .2">
      <joint name="x" type="slide" axis="1 0 0"/>
      <geom size=".2" rgba="0 1 0 1"/>
    </body>
  </worldbody>
  <actuator><motor joint="x"/></actuator>
</mujoco>
"""
NUM_ENVS = 4
SIZE = {"width": 32, "height": 24}
CONFIG = aioenv.RenderConfig(**SIZE, camera="above", quality="fast", workers=2, max_in_flight=1)
WHERE = [{}, {"num_workers": 2}]


class Puck(aioenv.NativeMujocoEnv):
    """Slides, and is seen from above; an episode takes three steps."""

    seen = 2  # numbers

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, XML, frame_skip=5, **{"max_episode_steps": 3, **kwargs})
        self.set_observation_size(self.seen)

    def draw_start(self, slots):
        return self.uniform(slots, -0.5, 0.5, 1), np.zeros((len(slots), 1))

    def observe(self, slots):
        return np.concatenate([self.qpos[slots], self.qvel[slots]], axis=1)

    def outcome(self, actions, obs):
        return obs[:, 0].copy(), None, {}


class Coloured(Puck):
    """Draws a colour and a size for each episode."""

    seen = 6

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.colours, self.sizes = self.model_field("geom_rgba"), self.model_field("site_size")

    def draw_start(self, slots):
        self.colours[slots, 1, :3] = self.uniform(slots, 0, 1, 3)
        self.sizes[slots, 0, 0] = self.uniform(slots, 0.05, 0.3, 1)[:, 0]
        return super().draw_start(slots)

    def observe(self, slots):
        shown = self.colours[slots, 1, :3], self.sizes[slots, 0, :1]
        return np.concatenate([super().observe(slots), *shown], axis=1)


async def drawn(positions, **edits) -> np.ndarray:
    """What a `RenderPool` draws of these positions, with these fields."""
    model = mujoco.MjModel.from_xml_string(XML)
    states = []
    for x in positions:
        states.append(mujoco.MjData(model))
        states[-1].qpos[0] = x
    async with aioenv.RenderPool(model, quality="fast", workers_per_device=1) as pool:
        return (await pool.render(states, **SIZE, camera="above", edits=edits)).copy()


ACTIONS = np.linspace(-1, 1, NUM_ENVS, dtype=np.float32)[:, None]


def edit(envs) -> dict[str, np.ndarray]:
    """Fields of each slot's own."""
    names = ("geom_rgba", "cam_pos", "mat_texid", "light_diffuse")
    fields = {name: envs.model_field(name) for name in names}
    fields["geom_rgba"][1, 1] = 1, 0, 0, 1
    fields["cam_pos"][2, 0, 2] = 1.5
    fields["mat_texid"][3, 0, int(mujoco.mjtTextureRole.mjTEXROLE_RGB)] = 1
    fields["light_diffuse"][0, 0] = 0.1
    envs.model_field("body_mass")[:] *= 2  # a picture shows where its centre is, and this moves none
    return fields


@pytest.mark.parametrize("where", WHERE, ids=str)
async def test_images_show_them_and_so_do_those_of_new_processes(where):
    restart = {"restart": aioenv.RestartPolicy(backoff_s=0.0)} if where else {}
    async with aioenv.make_vec(Puck, NUM_ENVS, backend="native", render=CONFIG, **where, **restart) as envs:
        await envs.reset(seed=1)
        plain = await envs.render()
        fields = edit(envs)
        assert (await envs.render()).tobytes() == plain.tobytes()  # of the result that was there before
        obs = (await envs.step(ACTIONS)).obs.copy()
        images = (await envs.render()).copy()
        expected = await drawn(obs[:, 0], **fields)
        assert images.tobytes() == expected.tobytes()
        assert all((mine != other).any() for mine, other in zip(images, await drawn(obs[:, 0]), strict=True))
        # a shot that waits keeps what was there when its state came
        for colour in (0.2, 0.4, 0.6, 0.8):
            fields["geom_rgba"][:, 1, 2] = colour
            before = {name: values.copy() for name, values in fields.items()}
            obs = (await envs.step(ACTIONS)).obs.copy()
        fields["geom_rgba"][:, 1, 2] = 1
        assert (await envs.render()).tobytes() == (await drawn(obs[:, 0], **before)).tobytes()
        if not where:
            return
        for worker in [envs.workers[0], envs._session.render_workers[0]]:
            os.kill(worker.pid, signal.SIGKILL)
        await envs.step(ACTIONS)  # what the process took with it
        obs = (await envs.step(ACTIONS)).obs.copy()
        assert (await envs.render()).tobytes() == (await drawn(obs[:, 0], **fields)).tobytes()


@pytest.mark.parametrize("where", WHERE, ids=str)
async def test_observations_show_them(where):
    pixels = replace(CONFIG, render_only=False)
    async with aioenv.make_vec(Puck, NUM_ENVS, backend="native", pixels=pixels, **where) as envs:
        await envs.reset(seed=1)
        fields = edit(envs)
        obs = (await envs.step(ACTIONS)).obs
        assert obs["pixels"].tobytes() == (await drawn(obs["state"][:, 0], **fields)).tobytes()


@pytest.mark.parametrize("where", WHERE, ids=str)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
async def test_images_show_what_the_env_draws_itself(where, mode):
    async with aioenv.make_vec(
        Coloured, NUM_ENVS, backend="native", render=CONFIG, autoreset_mode=mode, **where
    ) as envs:
        results = [await envs.reset(seed=1)]
        results += [await envs.step(ACTIONS) for _ in range(4)]
        looks = {obs[0, 2:].tobytes() for obs in (result.obs for result in results)}
        assert len(looks) == 2  # it was drawn anew with the second episode
        obs, images = results[-1].obs, await envs.render()
        colours = np.tile(mujoco.MjModel.from_xml_string(XML).geom_rgba, (NUM_ENVS, 1, 1))
        sizes = np.tile(mujoco.MjModel.from_xml_string(XML).site_size, (NUM_ENVS, 1, 1))
        colours[:, 1, :3], sizes[:, 0, 0] = obs[:, 2:5], obs[:, 5]
        expected = await drawn(obs[:, 0], geom_rgba=colours, site_size=sizes)
        assert images.tobytes() == expected.tobytes()


class Pendulum(Puck):
    """Two balls, seen by a camera that follows their centre of mass."""

    def __init__(self, num_envs, **kwargs):
        spec = mujoco.MjSpec.from_string(XML)
        body = spec.worldbody.first_body()
        body.add_geom(size=[0.1, 0, 0], pos=[0, 0.4, 0])
        body.add_body(pos=[0.5, 0, 0]).add_geom(size=[0.1, 0, 0])
        body.add_camera(name="centre", mode=mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM, pos=[0, 0, 2])
        aioenv.NativeMujocoEnv.__init__(self, num_envs, spec.compile(), frame_skip=5, **kwargs)
        self.set_observation_size(self.seen)


@pytest.mark.parametrize("where", WHERE, ids=str)
async def test_a_camera_that_follows_a_centre_of_mass_is_where_it_is(where):
    config = replace(CONFIG, camera="centre")
    async with aioenv.make_vec(Pendulum, NUM_ENVS, backend="native", render=config, **where) as envs:
        await envs.reset(seed=1)
        masses = envs.model_field("body_mass")
        masses[1, 2] *= 30
        masses[1, 1] -= masses[1, 2] - masses[0, 2]  # as much in all
        obs = (await envs.step(ACTIONS)).obs.copy()
        images = (await envs.render()).copy()
        model = Pendulum(1).model
        data = [mujoco.MjData(model) for _ in obs]
        for each, x in zip(data, obs[:, 0], strict=True):
            each.qpos[0] = x
        async with aioenv.RenderPool(model, quality="fast") as pool:
            plain = await pool.render(data, **SIZE, camera="centre")
            right = await pool.render(data, **SIZE, camera="centre", edits={"body_mass": masses})
        assert [bool((a != b).any()) for a, b in zip(plain, right, strict=True)] == [False, True, False, False]
        assert np.array_equal(images, right)
