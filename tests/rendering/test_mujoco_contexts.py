"""MuJoCo's contexts with less than it asks for: shadow maps without a stencil, sides of fewer stacks."""

from __future__ import annotations

import json

import pytest

from tests.kits.process_kit import environment, run_alone

SHADOWS = """
<mujoco>
  <visual><quality shadowsize="512"/></visual>
  <worldbody>
    <light pos="1 0 3" dir="-.3 0 -1" cutoff="50"/>
    <light directional="true" pos="0 0 4" dir=".3 .5 -1" diffuse=".4 .4 .3"/>
    <geom type="plane" size="3 3 .1"/>
    <geom type="box" size=".5 .1 .4" pos="-.6 0 .4"/>
    <body pos="0 0 .8"><freejoint/><geom type="capsule" size=".15 .4" rgba=".9 .4 .2 1"/></body>
  </worldbody>
</mujoco>
"""

# Renderers, and their images of a tumbling body.
KIT = """
import json, sys
import mujoco, numpy as np
from OpenGL import GL
from aioenv.rendering import offscreen, contexts
from aioenv.rendering.config import FAST, RenderQuality

def renderer_of(xml, quality):
    return offscreen.OffscreenRenderer(mujoco.MjModel.from_xml_string(xml), quality)

def images(drawn, count=20, width=64, height=48):
    model = drawn.model
    data, camera, option = mujoco.MjData(model), mujoco.MjvCamera(), mujoco.MjvOption()
    mujoco.mjv_defaultFreeCamera(model, camera)
    drawn.make_current()
    out = np.empty((count, height, width, 3), np.uint8)
    for number, image in enumerate(out):
        data.qpos[:7] = 0.05 * number, 0, 0.8, 1, 0.1 * number, 0.3, 0
        mujoco.mj_forward(model, data)
        camera.azimuth = 18 * number
        drawn.update_scene(data, camera, option, width, height)
        drawn.draw(image)
    return out.astype(int)
"""

STENCIL = (
    KIT
    + """
xml = sys.stdin.read()

def bits(drawn):
    drawn.make_current()
    unit = GL.glGetInteger(GL.GL_ACTIVE_TEXTURE)
    GL.glActiveTexture(GL.GL_TEXTURE1)
    GL.glBindTexture(GL.GL_TEXTURE_2D, drawn._context.shadowTex)
    names = GL.GL_TEXTURE_DEPTH_SIZE, GL.GL_TEXTURE_STENCIL_SIZE, GL.GL_TEXTURE_WIDTH
    found = [int(GL.glGetTexLevelParameteriv(GL.GL_TEXTURE_2D, 0, name)) for name in names]
    GL.glActiveTexture(unit)
    return found

ours = renderer_of(xml, RenderQuality())
contexts._drop_stencil = lambda gl, context: None
theirs, shadowless = renderer_of(xml, RenderQuality()), renderer_of(xml, RenderQuality(shadows=False))
a, b, c = images(ours), images(theirs), images(shadowless)
print(json.dumps({
    "drawn_by": contexts.opengl_name(), "ours": bits(ours), "theirs": bits(theirs), "differ": int((a != b).sum()),
    "shadows": int((a != c).any(axis=(1, 2, 3)).sum()), "error": int(GL.glGetError()),
}))
for drawn in (ours, theirs, shadowless):
    drawn.close()
"""
)


@pytest.fixture(params=["egl", "osmesa"])
def env(request):
    return {**environment(), "MUJOCO_GL": request.param, "PYOPENGL_PLATFORM": request.param, "LP_NUM_THREADS": "0"}


def test_the_shadow_map_of_llvmpipe_has_no_stencil_and_the_same_depths(env):
    found = json.loads(run_alone(STENCIL, stdin=SHADOWS, env=env).stdout)
    assert found["theirs"] in ([24, 8, 512], [24, 0, 512])  # older versions of MuJoCo ask for no stencil
    assert found["ours"] == ([24, 0, 512] if found["drawn_by"].startswith("llvmpipe") else found["theirs"])
    assert (found["differ"], found["shadows"], found["error"]) == (0, 20, 0)


SUN = '<light directional="true" pos="0 0 4" dir=".3 .5 -1"/>'
LAMP = '<light pos="1 0 3" dir="-.3 0 -1" cutoff="50"/>'
SCENE = """
<mujoco>
  <visual><map fogstart="1" fogend="3"/></visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".4 .6 .8" rgb2="0 0 .1" width="64" height="64"/>
  </asset>
  <worldbody>
    {light}
    <geom type="plane" size="3 3 .1"/>
    <geom type="box" size=".5 .1 .4" pos="-.6 0 .4"/>
    <body pos="0 0 .8"><freejoint/>{geoms}</body>
  </worldbody>
</mujoco>
"""
ROUND = '<geom size=".3" rgba=".9 .4 .2 1"/><geom type="ellipsoid" size=".2 .1 .5" pos=".5 0 0"/>'
LONG = '<geom type="capsule" size=".15 .4" rgba=".9 .4 .2 1"/><geom type="cylinder" size=".2 .3" pos=".5 0 0"/>'

SIDES = (
    KIT
    + """
import dataclasses
plain = dataclasses.replace(FAST, side_stacks=None)
found = {}
for name, xml in json.load(sys.stdin).items():
    drawn = [renderer_of(xml, quality) for quality in (plain, FAST)]
    for each in drawn:
        each._scene.flags[mujoco.mjtRndFlag.mjRND_FOG] = True
    many, few = [images(each) for each in drawn]
    off = abs(many - few).max(axis=3)
    found[name] = [float((off >= least).mean()) for least in (1, 3)]
    for each in drawn:
        each.close()
        each.close()
print(json.dumps(found))
"""
)


def test_straight_sides_of_fewer_stacks_look_the_same(env):
    scenes = {"sky": (SUN, ROUND), "sides": (SUN, LONG), "lamp": (LAMP, LONG)}
    xmls = {name: SCENE.format(light=light, geoms=geoms) for name, (light, geoms) in scenes.items()}
    found = json.loads(run_alone(SIDES, stdin=json.dumps(xmls), env=env).stdout)
    assert found["sky"] == found["lamp"] == [0, 0]  # to the last bit
    some, more = found["sides"]
    assert 0 < some < 0.03 and more < 0.002


READS = (
    KIT
    + """
def all_of(drawn):
    out = np.zeros((48, 64, 6), np.uint8)
    depth, segmentation = np.zeros((48, 64), np.float32), np.zeros((48, 64, 2), np.int32)
    images(drawn, count=3)
    strided, row = out[..., ::2], np.zeros((48, 64, 3), np.uint8)
    drawn.draw(strided)
    drawn.draw(row)
    drawn.draw_depth(depth, segmentation)
    return [strided.tobytes(), row.tobytes(), depth.tobytes(), segmentation.tobytes()]

xml = sys.stdin.read()
straight = renderer_of(xml, FAST)
inverts = straight._top_first
offscreen.set_top_first = lambda: False
flipped = renderer_of(xml, FAST)
a, b = all_of(straight), all_of(flipped)
wrong = 0
for drawn in (straight, flipped):
    drawn.make_current()
    try:
        drawn.draw(np.zeros((10, 10, 3), np.uint8))
    except ValueError:
        wrong += 1
print(json.dumps({
    "inverts": inverts, "same": a == b, "written": a[0] == a[1], "kinds": len(set(a)), "refused": wrong,
    "drawn_by": contexts.opengl_name(),
}))
for drawn in (straight, flipped):
    drawn.close()
"""
)


def test_images_are_read_upright_however_opengl_has_them(env):
    found = json.loads(run_alone(READS, stdin=SCENE.format(light=SUN, geoms=LONG), env=env).stdout)
    assert found["inverts"] or not found["drawn_by"].startswith("llvmpipe")
    assert (found["same"], found["written"], found["kinds"], found["refused"]) == (True, True, 3, 2)


LACKING = (
    KIT
    + """
xml = sys.stdin.read()
usual = RenderQuality(shadows=False, reflections=False, samples=0, plane_patches=32)
renderers = [renderer_of(xml, quality) for quality in (usual, FAST)]
sys.modules["OpenGL.raw.GL.VERSION"] = None  # as where PyOpenGL has no library of OpenGL's
renderers.append(renderer_of(xml, FAST))
plain, *others = [images(each) for each in renderers]
same = [bool((other == plain).all()) for other in others]
print(json.dumps([same, [[len(each._contexts), each._top_first] for each in renderers[1:]]]))
for each in renderers:
    each.close()
"""
)


def test_without_what_pyopengl_needs_all_is_drawn_as_mujoco_does(env):
    found = json.loads(run_alone(LACKING, stdin=SCENE.format(light=SUN, geoms=LONG), env=env).stdout)
    same, ((contexts, _), lacking) = found
    assert (same, contexts, lacking) == ([False, True], 2, [1, False])


FAILING = (
    KIT
    + """
xml = sys.stdin.read()
other = renderer_of(xml, FAST)
before = images(other)
make, made = contexts._make, []
def broken(model):
    if made:
        raise RuntimeError("out of memory, say")
    made.append(make(model))
    return made[-1]
contexts._make = broken
try:
    renderer_of(xml, FAST)
except offscreen.RenderError as exc:
    told = str(exc)
other.make_current()
lists = made[0].baseBuiltin  # 0 once it is freed
made.clear()
print(json.dumps([told, lists, bool((images(other) == before).all())]))
other.close()
"""
)


def test_what_was_made_until_something_failed_is_freed_where_it_was_made(env):
    told, lists, same = json.loads(run_alone(FAILING, stdin=SCENE.format(light=SUN, geoms=LONG), env=env).stdout)
    assert told == "no OpenGL context: RuntimeError: out of memory, say"
    assert (lists, same) == (0, True)
