"""Edge cases of the renderers: invalid arguments, models that differ, impossible sizes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium import Env, spaces

import aioenv
from aioenv.rendering.cameras import find_camera
from aioenv.rendering.render_pool import parse_out, parse_states
from aioenv.requirements import has_batch
from tests.kits.process_kit import environment, run_alone
from tests.kits.render_pool_kit import PLAIN, SMALL, pool_of, some_states
from tests.rendering.edits_kit import export, truth


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout_s": "3"}, "timeout_s: expected a positive number of seconds or None, got '3'"),
        ({"start_timeout_s": [1]}, "start_timeout_s: expected a positive number"),
        ({"state_spec": -1}, "state_spec: expected parts of mujoco.mjtState, got -1"),
        ({"state_spec": 1 << 30}, "state_spec: expected parts of"),
        ({"state_spec": 2.5}, "state_spec: expected parts of"),
        ({"retry": 3}, "retry: expected True or False, got 3"),
        ({"restart": True}, "restart: expected an aioenv.RestartPolicy or None, got True"),
        ({"log_prefix": 3}, "log_prefix: expected a str or None, got 3"),
    ],
)
def test_arguments_of_a_pool_are_checked_when_it_is_made(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pool_of(**arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": 2, "fixedcamid": -1}, "fixedcamid: expected 0 to 0"),
        ({"type": 2, "fixedcamid": 1}, "fixedcamid: expected 0 to 0"),
        ({"type": 1, "trackbodyid": -1}, "trackbodyid: expected 0 to 1"),
        ({"type": 1, "trackbodyid": 2}, "trackbodyid: expected 0 to 1"),
        ({"type": 3}, "a free, a tracking or a fixed one"),
        ({"type": 9}, "a free, a tracking or a fixed one"),
        ({"type": 0, "distance": np.nan}, "distance: expected finite numbers"),
        ({"type": 0, "lookat": (0, np.inf, 0)}, "lookat: expected finite numbers"),
    ],
)
def test_a_camera_that_would_end_the_worker_is_refused(settings, message):
    """MuJoCo ends the process that draws from one."""
    model = mujoco.MjModel.from_xml_string(PLAIN)
    camera = mujoco.MjvCamera()
    for name, value in settings.items():
        if name == "lookat":
            camera.lookat[:] = value
        else:
            setattr(camera, name, value)
    with pytest.raises(ValueError, match=message):
        find_camera(model, camera)


@pytest.mark.asyncio
async def test_what_a_pool_is_asked_is_checked_and_numbers_may_be_numpys():
    async with pool_of() as pool:
        states = some_states(pool, 3)
        plain = await pool.render(states, **SMALL)
        count, model = len(states), pool.model
        wrong = [
            ({"states": "abc"}, "states: expected an array of shape"),
            ({"states": states + 1j}, "states: expected an array of shape"),
            ({"states": {}}, "states: expected an array of shape"),
            ({"states": (row for row in states)}, "states: expected an array of shape"),
            ({"states": [[1], [1, 2]]}, "states: expected an array of shape"),
            ({"randomize": "no"}, "randomize: expected True or False, got 'no'"),
            ({"depth": None}, "depth: expected True or False, got None"),
            ({"out": 3}, "out: expected an array for rgb, or a tuple of them, got 3"),
            ({"edits": [1]}, "edits: expected a dict of fields"),
            ({"edits": {"geom_rgba": np.full((count, model.ngeom, 4), 1j)}}, r"edits\['geom_rgba'\]: expected numbers"),
            ({"edits": {"geom_rgba": np.full((count, model.ngeom, 4), None)}}, r"edits\['geom_rgba'\]: expected num"),
            # MuJoCo would read beyond its arrays
            ({"edits": {"geom_matid": np.full((count, model.ngeom), model.nmat)}}, "expected numbers from -1 to 0"),
            ({"edits": {"geom_matid": np.full((count, model.ngeom), -2)}}, "expected numbers from -1 to 0"),
            ({"edits": {"mat_texid": np.full((count, *model.mat_texid.shape), 9)}}, "expected numbers from -1 to 0"),
        ]
        for arguments, message in wrong:
            with pytest.raises(ValueError, match=message):
                pool.submit(**{"states": states, **SMALL, **arguments})
        sizes = {name: np.int64(size) for name, size in SMALL.items()}
        assert np.array_equal(await pool.render(states, **sizes), plain)
        assert aioenv.RenderConfig(camera=[np.int64(0)]).cameras == (0,)
        edits = {"geom_matid": np.full((count, model.ngeom), -1)}
        assert not np.array_equal(await pool.render(states, edits=edits, **SMALL), plain)


def test_data_of_another_model_are_refused_though_their_state_is_as_long():
    """MuJoCo would read as many positions as this model has, beyond those that there are."""
    joints = '<mujoco><worldbody>{}<geom size="1"/></worldbody></mujoco>'
    free = '<body><freejoint/><geom size=".1"/></body>'
    mocap = '<body mocap="true"><geom size=".1"/></body>'
    pool = aioenv.RenderPool(joints.format(free + "<body>" + '<joint type="slide"/><geom size=".1"/></body>'))
    user = f'<mujoco><size nuserdata="8"/><worldbody>{mocap}<geom size="1"/></worldbody></mujoco>'
    other = mujoco.MjModel.from_xml_string(user)
    assert mujoco.mj_stateSize(other, pool.state_spec) == pool.state_size
    for take in (pool.get_state, lambda data: parse_states(pool.model, pool.state_spec, [data])):
        with pytest.raises(ValueError, match="expected an MjData of the pool's model"):
            take(mujoco.MjData(other))
    twin = mujoco.MjModel.from_xml_string(joints.format(free + '<body><joint type="slide"/><geom size=".3"/></body>'))
    assert len(pool.get_state(mujoco.MjData(twin))) == pool.state_size


ENDLESS = """
<mujoco>
  <visual><map zfar="8"/></visual>
  <statistic extent="1"/>
  <worldbody>
    <light pos="0 0 3"/>
    <geom type="plane" size="0 0 .1" rgba="0 1 0 1"/>
    <body mocap="true">
      <geom pos="0 0 .3" size=".2"/>
      <camera name="eye" mode="track" pos="0 -2 1" xyaxes="1 0 0 0 .5 1"/>
    </body>
  </worldbody>
</mujoco>
"""


@pytest.mark.asyncio
async def test_an_endless_floor_is_there_wherever_the_picture_before_was_taken():
    """MuJoCo lays it around the camera of the scene before."""
    async with pool_of(ENDLESS, workers_per_device=1) as pool:
        data = mujoco.MjData(pool.model)
        states = []
        for x in (1000.0, 0.0):
            data.mocap_pos[0, 0] = x
            states.append(pool.get_state(data))
        images, seen = await pool.render(states, camera="eye", segmentation=True, **SMALL)
        assert (seen[:, -1, :, 0] == 0).all()
        assert np.array_equal(await pool.render(states[::-1], camera="eye", **SMALL), images[::-1])


@pytest.mark.asyncio
async def test_sizes_of_planes_may_be_edited_for_a_call():
    """Of an endless one, too: its grid depends on its material and on what can be seen."""
    xml = PLAIN.replace("<body mocap", '<geom type="plane" size="0 3 .5" pos="0 0 -.5" material="grid"/><body mocap')
    model = mujoco.MjModel.from_xml_string(xml)
    sizes = np.stack([model.geom_size] * 4)
    sizes[1, 0] = 0.5, 1.5, 0.3
    sizes[2, :2] = (0, 1, 0.1), (1, 0, 0.2)
    for quality in ("exact", "fast"):
        async with pool_of(xml, workers_per_device=1, quality=quality) as pool:
            data = [mujoco.MjData(model)] * 4
            images = await pool.render(data, edits={"geom_size": sizes}, camera="side", **SMALL)
            again = await pool.render(data[:1], camera="side", **SMALL)
        assert np.array_equal(images[0], again[0]) and np.array_equal(images[3], again[0])
        for image, own in zip(images, sizes, strict=True):
            model.geom_size[:] = own
            async with pool_of(model, workers_per_device=1, quality=quality) as alone:
                assert np.array_equal(image, (await alone.render(data[:1], camera="side", **SMALL))[0])
        model.geom_size[:] = sizes[0]


@pytest.mark.asyncio
@pytest.mark.parametrize("light", ['cutoff="120"', 'exponent="200"', 'attenuation="-1 0 0"'])
async def test_lights_that_opengl_refuses_are_drawn_as_mujoco_draws_them(light):
    """OpenGL keeps the last value then, and notes an error, which says nothing of the image."""
    model = mujoco.MjModel.from_xml_string(PLAIN.replace("<light", f"<light {light}"))
    model.vis.quality.shadowsize = 256
    data = mujoco.MjData(model)
    exported = [export(model, data)]
    async with aioenv.RenderPool(model) as pool:
        image = (await pool.render([data], camera="side", **SMALL))[0]
    assert np.array_equal(image, truth(exported, camera="side", **SMALL)[0])


@pytest.mark.asyncio
async def test_a_model_of_more_geoms_than_gymnasium_draws():
    """Gymnasium's scenes end at 1,000 geoms, in silence, unless the env says more; `mujoco.Renderer`'s at 10,000."""
    balls = "".join(f'<geom size=".02" pos="{x / 20 - 1} {y / 20 - 1} .1"/>' for x in range(40) for y in range(40))
    model = mujoco.MjModel.from_xml_string(PLAIN.replace("<body mocap", balls + "<body mocap"))
    model.vis.quality.shadowsize = 256
    data = mujoco.MjData(model)
    exported = [export(model, data)]
    async with aioenv.RenderPool(model) as pool:
        image = (await pool.render([data], camera="side", **SMALL))[0]
    assert np.array_equal(image, truth(exported, camera="side", **SMALL)[0])
    assert np.array_equal(image, truth(exported, camera="side", **SMALL, max_geom=model.ngeom)[0])
    assert not np.array_equal(image, truth(exported, camera="side", **SMALL, max_geom=1000)[0])


@pytest.mark.asyncio
@pytest.mark.parametrize("asked", [[5], [0, 7], [98]], ids=str)
async def test_a_device_that_does_not_exist_is_told_with_those_that_do(asked):
    with pytest.raises(
        aioenv.RenderError, match=rf"no device {asked[-1]} here: EGL has (one device|devices 0 to)"
    ) as e:
        await pool_of(devices=asked, workers_per_device=1)
    assert "apt-get" not in str(e.value)


@pytest.mark.asyncio
async def test_a_model_of_more_geoms_than_mujocos_renderer_has_room_for_is_drawn_whole():
    spec = mujoco.MjSpec()
    for _ in range(10_500):
        geom = spec.worldbody.add_geom(size=[0.001, 0, 0], contype=0, conaffinity=0)
    geom.size[0] = 1  # the last one
    async with pool_of(spec, workers_per_device=1) as pool:
        _, seen = await pool.render(slots=[0], segmentation=True, **SMALL)
    assert 10_499 in seen[..., 0]


@pytest.mark.stress
@pytest.mark.asyncio
async def test_an_image_too_large_for_opengl_is_an_error_and_not_black():
    """Its memory is had only when it is drawn on, with four samples a pixel."""
    quality = aioenv.RenderQuality(shadows=False)
    async with pool_of(max_image_size=1 << 28, quality=quality, workers_per_device=1, timeout_s=None) as pool:
        before = await pool.render(some_states(pool, 1), **SMALL)
        for _ in range(2):
            with pytest.raises(aioenv.RenderError, match="OpenGL can't draw an image of 16384 x 8192"):
                await pool.render(some_states(pool, 1), width=16384, height=8192)
        assert np.array_equal(await pool.render(some_states(pool, 1), **SMALL), before)


class Balls(Env):
    """So many balls fall."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, count: int) -> None:
        ball = '<body pos="{x} 0 1"><freejoint/><geom size=".2" rgba="1 {x} 0 1"/></body>'
        balls = "".join(ball.format(x=number / count) for number in range(count))
        self.model = mujoco.MjModel.from_xml_string(
            f'<mujoco><worldbody><light pos="0 0 3"/><geom type="plane" size="2 2 .1"/>{balls}</worldbody></mujoco>'
        )
        self.data = mujoco.MjData(self.model)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        mujoco.mj_step(self.model, self.data, 20)
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.asyncio
async def test_envs_whose_models_have_states_of_other_sizes():
    """The state of each is as long as its own model says, in one worker or in several."""
    config = aioenv.RenderConfig(24, 18, quality="fast")
    factories = [lambda count=count: Balls(count) for count in (1, 3, 2)]
    async with aioenv.AsyncVectorEnv(factories, render=config, pixels=config, num_workers=2) as envs:
        await envs.reset(seed=0)
        for _ in range(3):
            obs, *_ = await envs.step(np.zeros((3, 1), np.float32))
        images = await envs.render()
        assert np.array_equal(obs, images) and len({image.tobytes() for image in images}) == 3
    config = aioenv.RenderConfig(24, 18, quality="fast", workers=1)
    with pytest.raises(aioenv.SpaceMismatchError, match=r"such envs take RenderConfig\(workers=None\)"):
        await aioenv.AsyncVectorEnv(factories[:2], pixels=config)


def test_a_mujoco_gl_that_is_none_is_told_with_those_that_are():
    told = run_alone(
        """
        import asyncio
        import aioenv
        from aioenv.requirements import has_batch

        async def native():
            await aioenv.make_vec("Hopper-v5", 1, backend="native")

        for ask in (
            lambda: aioenv.RenderConfig(),
            lambda: aioenv.RenderPool,
            lambda: aioenv.sync.RenderPool,
            *[lambda: aioenv.SimPool, lambda: asyncio.run(native())] * has_batch(),
        ):
            try:
                ask()
            except aioenv.AioenvError as exc:
                print(str(exc).splitlines()[0])
        """,
        env={**environment(), "MUJOCO_GL": "nonsense"},
    ).stdout.splitlines()
    assert len(told) == 3 + 2 * has_batch()
    assert all("'osmesa'" in line and "got 'nonsense'" in line for line in told)


def test_arrays_to_fill_may_be_larger_than_memory():
    """In a file, say: to look at them takes none."""
    shape = (1 << 20, 1 << 10, 1 << 10)
    out = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (*shape, 3), (0, 0, 0, 0))
    assert parse_out(out, shape, depth=False, segmentation=False).rgb is out


class Looks(Env):
    """Its actuators show, coloured by what controls them."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Box(-1, 1, (1,), np.float64)
    render_mode = "rgb_array"

    def __init__(self):
        self.model = mujoco.MjModel.from_xml_string(MOTOR)
        self.data = mujoco.MjData(self.model)
        self.mujoco_renderer = SimpleNamespace(_vopt=SHOWN)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.data.ctrl[:] = action
        mujoco.mj_forward(self.model, self.data)
        return np.zeros(1, np.float32), 0.0, False, False, {}


SHOWN = {int(mujoco.mjtVisFlag.mjVIS_ACTUATOR): True}
MOTOR = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="side" pos="0 -2 0" xyaxes="1 0 0 0 0 1"/>
    <body><joint name="hinge" axis="0 1 0"/><geom type="capsule" size=".1 .3" rgba=".5 .5 .5 .3"/></body>
  </worldbody>
  <actuator><motor joint="hinge" ctrlrange="-1 1" ctrllimited="true"/></actuator>
</mujoco>
"""


@pytest.mark.asyncio
@pytest.mark.parametrize("how", [{"render": {}}, {"pixels": {}}, {"pixels": {"workers": 1}}])
async def test_what_visual_options_show_is_drawn_from_what_they_show(how):
    ((way, more),) = how.items()
    config = aioenv.RenderConfig(64, 48, quality="fast", camera="side", **more)
    async with aioenv.make_vec(Looks, 3, num_workers=1, **{way: config}) as envs:
        await envs.reset(seed=0)
        obs = (await envs.step(np.array([[-1.0], [0.0], [1.0]])))[0]
        images = obs if way == "pixels" else await envs.render()
    assert len({image.tobytes() for image in images}) == 3


@pytest.mark.asyncio
async def test_a_kind_of_camera_in_an_envs_settings_counts_as_little_as_with_gymnasium():
    settings = {"type": mujoco.mjtCamera.mjCAMERA_TRACKING, "trackbodyid": 1, "distance": 3.0, "lookat": np.ones(3) / 2}
    size = {"width": 40, "height": 30}
    make = partial(gym.make, "HalfCheetah-v5", render_mode="rgb_array", default_camera_config=settings, **size)
    async with aioenv.AsyncVectorEnv([make], render=aioenv.RenderConfig(**size)) as envs:
        await envs.reset(seed=1)
        await envs.call("render")  # the first image of a context can differ
        assert np.array_equal(await envs.render(), await envs.call("render"))
