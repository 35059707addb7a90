"""The render pool draws what `mujoco.Renderer` draws, to the last bit: pixels, depth and segmentation."""

from __future__ import annotations

import inspect
import pickle

import mujoco
import numpy as np
import pytest

import aioenv
from tests.kits.mocap_kit import MOCAP
from tests.kits.process_kit import environment, run_alone
from tests.kits.render_pool_kit import ASSETS, differ

# In a process of its own, as the two OpenGL backends can't live in one: what mujoco.Renderer draws.
REFERENCE = """
import pickle, sys
import mujoco, numpy as np
model_bytes, spec, states, sizes, cameras, fast, least, shown = pickle.loads(sys.stdin.buffer.read())
option = mujoco.MjvOption()
for name, value in (shown or {}).items():
    setattr(option, name, value)
images = []
for width, height in sizes:
    model = mujoco.MjModel.from_binary_path("m.mjb", {"m.mjb": model_bytes})
    model.vis.global_.offwidth, model.vis.global_.offheight = max(width, least[0]), max(height, least[1])
    if fast:
        model.vis.quality.offsamples = 0
    data = mujoco.MjData(model)
    renderer = mujoco.Renderer(model, height, width)
    if fast:
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
    kinds = [[], [], []]
    for number, state in enumerate([states[0], *states]):  # the first image of a context may differ
        mujoco.mj_setState(model, data, state, spec)
        mujoco.mj_forward(model, data)
        for camera in cameras:
            renderer.update_scene(data, camera, option)
            rgb = renderer.render()
            renderer.enable_depth_rendering()
            depth = renderer.render()
            renderer.enable_segmentation_rendering()
            segmentation = renderer.render()
            renderer.disable_segmentation_rendering()
            if number:
                for kind, image in zip(kinds, (rgb, depth, segmentation)):
                    kind.append(image)
    renderer.close()
    images.append([np.stack(kind).reshape(len(states), len(cameras), *kind[0].shape) for kind in kinds])
sys.stdout.buffer.write(pickle.dumps(images))
"""


def reference(backend: str, *what) -> list[list[np.ndarray]]:
    env = {**environment(), "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend, "LP_NUM_THREADS": "0"}
    done = run_alone(REFERENCE, stdin=pickle.dumps(what), env=env, timeout_s=120)
    return pickle.loads(done.stdout)


# the attribute of a camera; before MuJoCo had cam_projection another one
PROJECTION = 'projection="orthographic"' if hasattr(mujoco.MjModel, "cam_projection") else 'orthographic="true"'
# older versions of mujoco.Renderer take all cameras for perspective ones
DEPTHS_OF_ALL = "orthographic" in inspect.getsource(mujoco.Renderer)
ORTHOGRAPHIC = """
<mujoco>
  <visual><global orthographic="true" fovy="4"/></visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".4 .6 .8" rgb2="0 0 0" width="64" height="64"/>
  </asset>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="top" pos="0 0 5" PROJECTION fovy="3"/>
    <geom type="plane" size="2 2 .1" rgba=".5 .7 .5 1"/>
    <body pos="0 0 .5"><freejoint/><geom type="ellipsoid" size=".4 .2 .1" rgba="1 1 0 1"/></body>
  </worldbody>
</mujoco>
""".replace("PROJECTION", PROJECTION)
FLEX = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="side" pos="0 -3 1" xyaxes="1 0 0 0 .3 1"/>
    <geom type="plane" size="2 2 .1" rgba=".3 .3 .5 1"/>
    <flexcomp name="cloth" type="grid" count="5 5 1" spacing=".2 .2 .1" pos="0 0 1" radius=".02" rgba="0 .7 .7 1">
      <edge equality="true"/>
    </flexcomp>
  </worldbody>
</mujoco>
"""
SKIN = """
<mujoco>
  <visual><quality shadowsize="256"/></visual>
  <asset>
    <texture name="grid" type="2d" builtin="checker" rgb1="1 0 0" rgb2="0 1 0" width="16" height="16"/>
    <material name="grid" texture="grid"/>
  </asset>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="side" pos="0 -3 1" xyaxes="1 0 0 0 .3 1"/>
    <geom type="plane" size="2 2 .1" rgba=".3 .3 .5 1"/>
    <body name="a" pos="-.5 0 1">
      <joint axis="0 1 0"/>
      <geom type="capsule" fromto="0 0 0 .5 0 0" size=".05"/>
      <body name="b" pos=".5 0 0"><joint axis="0 1 0"/><geom type="capsule" fromto="0 0 0 .5 0 0" size=".05"/></body>
    </body>
  </worldbody>
  <deformable>
    <skin material="grid" inflate=".02" face="0 2 1 1 2 3 2 4 3 3 4 5" texcoord="0 0 0 1 .5 0 .5 1 1 0 1 1"
        vertex="-.5 -.3 1.2 -.5 .3 1.2 0 -.3 1.3 0 .3 1.3 .5 -.3 1.2 .5 .3 1.2">
      <bone body="a" bindpos="-.5 0 1" bindquat="1 0 0 0" vertid="0 1 2 3" vertweight="1 1 .5 .5"/>
      <bone body="b" bindpos="0 0 1" bindquat="1 0 0 0" vertid="2 3 4 5" vertweight=".5 .5 1 1"/>
    </skin>
  </deformable>
</mujoco>
"""
# What follows, what has a lens, what measures, and ground that is not flat.
SENSORS = f"""
<mujoco>
  <visual><quality shadowsize="256"/></visual>
  <asset>
    <hfield name="hills" nrow="8" ncol="8" size="1 1 .3 .1" elevation="{" ".join(str(i * 7 % 11) for i in range(64))}"/>
  </asset>
  <worldbody>
    <light pos="1 0 3" mode="targetbodycom" target="ball" cutoff="30"/>
    <camera name="follows" pos="0 -3 1" mode="targetbody" target="ball"/>
    <camera name="lens" pos="0 -2 1.5" xyaxes="1 0 0 0 .5 1" focal=".01 .01" sensorsize=".012 .01"
        principal=".001 .002" resolution="101 103"/>
    <geom type="hfield" hfield="hills"/>
    <body name="ball" pos="0 0 1">
      <freejoint/>
      <geom type="ellipsoid" size=".2 .1 .15" rgba="1 .3 .2 .5" group="1"/>
      <site name="down" pos="0 0 -.2" zaxis="0 0 -1"/>
    </body>
  </worldbody>
  <sensor><rangefinder site="down"/></sensor>
</mujoco>
"""
MODELS = {
    # a smaller shadow map, which is nearly all of an exact image's time
    "small": (MOCAP.replace("<visual>", '<visual><quality shadowsize="256"/>'), ["side", -1]),
    "mocap": (MOCAP, ["side", -1, "above"]),
    "orthographic": (ORTHOGRAPHIC, ["top", None]),
    "flex": (FLEX, ["side"]),
    "skin": (SKIN, ["side", -1]),
    "sensors": (SENSORS, ["follows", "lens", -1]),
    "cheetah": (ASSETS / "half_cheetah.xml", ["track", None]),
    "humanoid": (ASSETS / "humanoid.xml", ["track"]),
}


# "fast" but for the patches of planes, which change the last bit of some pixels (see test_render_quality.py)
PLAIN = aioenv.RenderQuality(shadows=False, reflections=False, samples=0)


async def check_exact(name: str, backend: str, quality, sizes, least=(1, 1), shown=None) -> None:
    model, cameras = MODELS[name]
    how = {"camera": cameras, "depth": True, "segmentation": True}
    if shown:
        how["scene_option"] = mujoco.MjvOption()
        for attribute, value in shown.items():
            setattr(how["scene_option"], attribute, value)
    async with aioenv.RenderPool(model, quality=quality, backend=backend) as pool:
        data = mujoco.MjData(pool.model)
        states = []
        rng = np.random.default_rng(0)
        for _ in range(3):
            data.mocap_pos += rng.normal(0, 0.1, data.mocap_pos.shape)
            mujoco.mj_step(pool.model, data, 20)
            states.append(pool.get_state(data))
        drawn = [await pool.render(states, width=w, height=h, **how) for w, h in sizes]
        buffer = np.empty(mujoco.mj_sizeModel(pool.model), np.uint8)
        mujoco.mj_saveModel(pool.model, None, buffer)
        spec = pool.state_spec
    numbered = [-1 if camera is None else camera for camera in cameras]
    expected = reference(backend, buffer.tobytes(), spec, states, sizes, numbered, quality != "exact", least, shown)
    for ours, theirs in zip(drawn, expected, strict=True):
        for kind, other in zip(ours, theirs, strict=True):
            if name == "orthographic" and kind.dtype == np.float32 and not DEPTHS_OF_ALL:
                continue
            assert kind.dtype == other.dtype and np.array_equal(kind, other)
    assert len(np.unique(drawn[0][0])) > 20 and differ(drawn[0][0])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "backend", "quality", "sizes"),
    [
        ("small", "egl", "exact", [(31, 33), (40, 24)]),
        ("orthographic", "osmesa", "fast", [(21, 13)]),
        ("skin", "egl", "exact", [(31, 33)]),
    ],
)
async def test_pixels_depth_and_segmentation_are_those_of_mujocos_renderer(name, backend, quality, sizes):
    await check_exact(name, backend, quality, sizes)


@pytest.mark.asyncio
async def test_what_is_visible_can_be_chosen():
    """Labels, frames, joints, contacts and their forces, see-through bodies, and groups."""
    kinds = mujoco.mjtVisFlag
    flags = mujoco.MjvOption().flags.copy()
    for kind in (kinds.mjVIS_JOINT, kinds.mjVIS_CONTACTPOINT, kinds.mjVIS_CONTACTFORCE, kinds.mjVIS_TRANSPARENT):
        flags[int(kind)] = 1
    shown = {"flags": flags, "label": int(mujoco.mjtLabel.mjLABEL_BODY), "frame": int(mujoco.mjtFrame.mjFRAME_BODY)}
    await check_exact("humanoid", "egl", PLAIN, [(60, 50)], shown=shown)
    await check_exact("sensors", "egl", "exact", [(31, 33)], shown={"geomgroup": [1, 0, 0, 0, 0, 0]})


@pytest.mark.stress
@pytest.mark.asyncio
@pytest.mark.parametrize("quality", ["exact", PLAIN], ids=["exact", "plain"])
@pytest.mark.parametrize("backend", ["egl", "osmesa"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "small"])
async def test_pixels_of_every_model_and_size(name, backend, quality):
    await check_exact(name, backend, quality, [(101, 103), (84, 84), (1, 1), (240, 7), (101, 103)], (640, 480))
