"""Envs of one worker that draw themselves, each with an OpenGL context of its own: none draws in another's."""

from __future__ import annotations

import gc
from functools import partial

import gymnasium as gym
import numpy as np
import pytest

import aioenv
import aioenv.sync
from tests.kits.process_kit import environment, run_alone

SIZE = (24, 32)  # height and width


def model_of(number, seed=0):
    """One of those whose pictures depend on what OpenGL has a copy of: heights, a texture, a mesh and a plane."""
    import mujoco

    draw = np.random.default_rng((seed, number))
    heights = " ".join(map(str, draw.uniform(size=36).round(2)))
    vertices = " ".join(map(str, draw.uniform(-1, 1, size=24).round(2)))
    colours = [" ".join(map(str, draw.uniform(size=3).round(2))) for _ in range(2)]
    return mujoco.MjModel.from_xml_string(f"""
        <mujoco>
          <visual><quality shadowsize="0" offsamples="0"/><global offwidth="32" offheight="24"/></visual>
          <asset>
            <hfield name="h" nrow="6" ncol="6" size="2 2 1 .1" elevation="{heights}"/>
            <texture name="t" type="2d" builtin="checker" rgb1="{colours[0]}" rgb2="{colours[1]}"
             width="32" height="32"/>
            <material name="m" texture="t" texrepeat="4 4"/>
            <mesh name="v" vertex="{vertices}"/>
          </asset>
          <worldbody>
            <light pos="0 0 4"/><camera name="c" pos="0 -6 4" xyaxes="1 0 0 0 .6 .8"/>
            <geom type="hfield" hfield="h" material="m" pos="1.5 0 0"/>
            <geom type="plane" size="{1 + number} {1 + number} {0.1 + 0.2 * number}" material="m" pos="0 0 -1"/>
            <geom type="mesh" mesh="v" pos="-2 0 0.5"/>
          </worldbody>
        </mujoco>""")


class ByGymnasium:
    """What Gymnasium's MuJoCo envs draw with."""

    def __init__(self, model, data):
        from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

        self.renderer = MujocoRenderer(model, data, width=SIZE[1], height=SIZE[0], camera_name="c")
        self.close = self.renderer.close

    def draw(self):
        return self.renderer.render("rgb_array")


class ByMuJoCo:
    """MuJoCo's own: it makes its context current each time."""

    def __init__(self, model, data):
        import mujoco

        self.renderer, self.data = mujoco.Renderer(model, *SIZE), data
        self.close = self.renderer.close

    def draw(self):
        self.renderer.update_scene(self.data, "c")
        return self.renderer.render()


class ByHand:
    """As in many tutorials: the context is made current once, when it is made."""

    def __init__(self, model, data):
        import mujoco

        self.mujoco, self.model, self.data = mujoco, model, data
        self.gl = mujoco.GLContext(*SIZE[::-1])
        self.gl.make_current()
        self.scene, self.camera = mujoco.MjvScene(model, 20), mujoco.MjvCamera()
        self.camera.type, self.camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
        self.con = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.con)

    def draw(self):
        mujoco, rect = self.mujoco, self.mujoco.MjrRect(0, 0, *SIZE[::-1])
        mujoco.mjv_updateScene(self.model, self.data, mujoco.MjvOption(), None, self.camera, 7, self.scene)
        image = np.zeros((*SIZE, 3), np.uint8)
        mujoco.mjr_render(rect, self.scene, self.con)
        mujoco.mjr_readPixels(image, None, rect, self.con)
        return image[::-1]

    def close(self):
        self.gl.free()  # and `con` sometime later


WAYS_TO_DRAW = {kind.__name__: kind for kind in (ByGymnasium, ByMuJoCo, ByHand)}


class Drawn(gym.Env):
    """Draws itself, in observations too.

    Args:
        number: its model.
        way: how it draws.
        anew: whether it makes another model and renderer at each reset.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = gym.spaces.Box(0, 255, (*SIZE, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)
    render_mode = "rgb_array"

    def __init__(self, number, way="ByGymnasium", anew=False):
        self.number, self.way, self.anew, self.episodes, self.drawer = number, WAYS_TO_DRAW[way], anew, 0, None
        self.begin()

    def begin(self):
        import mujoco

        self.model = model_of(self.number, self.episodes)
        self.data = mujoco.MjData(self.model)
        mujoco.mj_forward(self.model, self.data)
        self.drawer = self.way(self.model, self.data)

    def render(self):
        self.drawer.draw()  # the first picture of a context may differ
        return self.drawer.draw().copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        if self.anew and self.episodes % 2 == self.number % 2:  # now of one slot, now of another
            self.drawer.close()
            if self.number == 1:
                self.drawer = None
            self.begin()
        return self.render(), {}

    def step(self, action):
        return self.render(), 0.0, False, False, {}

    def tidy(self):
        gc.collect()

    def close(self):
        self.drawer.close()


def factories(n=3, **kwargs):
    return [partial(Drawn, number, **kwargs) for number in range(n)]


def run(envs, resets=2):
    """All pictures of a few short episodes."""
    pictures = []
    for _ in range(resets):
        pictures.append(envs.reset(seed=0)[0])
        pictures.append(envs.step(np.zeros(envs.num_envs, int))[0])
        pictures.append(np.stack(envs.render()))
        envs.call("tidy")
        pictures.append(np.stack(envs.call("render")))
    return np.stack(pictures)


def differing(one, other):
    return [round(float((one[:, slot] != other[:, slot]).any(axis=-1).mean()), 3) for slot in range(one.shape[1])]


CASES = [
    ("egl", "ByGymnasium", False),
    ("egl", "ByHand", True),
    ("osmesa", "ByGymnasium", True),
    *(
        pytest.param(*case, marks=pytest.mark.stress)
        for case in [("egl", "ByHand", False), ("egl", "ByMuJoCo", True), ("osmesa", "ByHand", True)]
    ),
]


@pytest.mark.parametrize(("backend", "way", "anew"), CASES)
def test_each_draws_in_its_own(monkeypatch, backend, way, anew):
    """Equal to what a process each draws."""
    monkeypatch.setenv("MUJOCO_GL", backend)
    of = factories(way=way, anew=anew)
    with aioenv.sync.AsyncVectorEnv(of, num_workers=3) as envs:
        alone = run(envs)
    assert all(differing(alone, np.roll(alone, shift, axis=1))[0] > 0.05 for shift in (1, 2))
    with aioenv.sync.AsyncVectorEnv(of, num_workers=1) as envs:
        assert differing(alone, run(envs)) == [0, 0, 0]


@pytest.mark.asyncio
async def test_in_the_async_api(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    pictures = []
    for kwargs in ({"num_workers": 3}, {"num_workers": 1}, {"num_workers": 1, "render": aioenv.RenderConfig()}):
        async with aioenv.AsyncVectorEnv(factories(), **kwargs) as envs:
            obs = [(await envs.reset(seed=0)).obs, (await envs.step([0, 0, 0])).obs]
            images = await envs.render() if "render" in kwargs else np.stack(await envs.call("render"))
            pictures.append(np.stack([*obs, images]))
    assert np.array_equal(pictures[0], pictures[1]) and np.array_equal(pictures[0], pictures[2])


def test_one_that_is_closed_takes_nothing_of_the_others(monkeypatch):
    """What OpenGL made for it has the same numbers in each context."""
    monkeypatch.setenv("MUJOCO_GL", "egl")

    def forget(env):
        env.drawer.close()
        env.drawer = None

    class Forgetful(Drawn):
        def tidy(self):
            if self.number == 0:
                forget(self)
                self.begin()
            gc.collect()

    pictures = []
    for workers in (3, 1):
        of = [partial(Forgetful, number, way="ByHand") for number in range(3)]
        with aioenv.sync.AsyncVectorEnv(of, num_workers=workers) as envs:
            pictures.append(run(envs))
    assert differing(*pictures) == [0, 0, 0]


def test_for_debugging():
    """Slots of one thread."""
    code = """
    import numpy as np
    from tests.rendering.test_opengl_contexts import factories, run
    from aioenv.sync import VectorEnv
    runs = []
    for kwargs in ({"num_workers": 3}, {"num_workers": 1, "debug": True}, {"num_workers": 2, "debug": True}):
        with VectorEnv(factories(way="ByHand", anew=True), **kwargs) as envs:
            runs.append(run(envs))
    assert np.array_equal(runs[0], runs[1]) and np.array_equal(runs[0], runs[2])
    """
    run_alone(code, env={**environment(), "MUJOCO_GL": "egl"})


def test_renderers_that_are_never_closed_say_nothing_at_the_end():
    """Those of a program that had an env in its own process, of before and after that."""
    code = """
    import mujoco
    from aioenv import sync

    model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
    data = mujoco.MjData(model)
    first = mujoco.Renderer(model, 16, 16)
    envs = sync.make_vec("CartPole-v1", 1, debug=True)
    envs.reset(seed=0)
    envs.close()
    second = mujoco.Renderer(model, 16, 16)
    for renderer in (first, second, first):
        renderer.update_scene(data)
        renderer.render()
    """
    assert run_alone(code, env={**environment(), "MUJOCO_GL": "egl"}).stderr == ""
