"""Envs that edit what OpenGL has a copy of, or make themselves other models; and `mujoco.Renderer`'s images of them."""

from __future__ import annotations

import pickle

import gymnasium as gym
import mujoco
import numpy as np

from tests.kits.process_kit import environment, run_alone

SIZE = {"width": 40, "height": 32}
XML = """
<mujoco>
  <visual>
    <quality shadowsize="128" offsamples="0"/><global offwidth="40" offheight="32"/>
    <map fogstart="1" fogend="9"/><rgba fog="1 .9 .2 1"/>
  </visual>
  <statistic extent="2" center="0 0 .3"/>
  <asset>
    <hfield name="hills" nrow="9" ncol="9" size="1 1 .5 .1"/>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".4 .6 .8" rgb2="0 0 0" width="16" height="16"/>
    <texture name="grid" type="2d" builtin="checker" rgb1="1 0 0" rgb2="0 1 0" width="16" height="16"/>
    <texture name="dice" type="cube" builtin="flat" rgb1=".2 .3 .9" width="8" height="8"/>
    <material name="grid" texture="grid" texrepeat="3 3"/>
    <material name="dice" texture="dice"/>
    <mesh name="tip" vertex="0 0 0  .5 0 0  0 .5 0  0 0 .5"/>
    <mesh name="top" vertex="0 0 0  .3 0 0  0 .3 0  0 0 .3"/>
    {more_assets}
  </asset>
  <worldbody>
    <light pos="0 0 4" dir=".1 .2 -1"/>
    <camera name="side" pos="0 -4 2" xyaxes="1 0 0 0 .5 1"/>
    <geom name="floor" type="plane" size="1.5 1.5 .2" pos="0 0 -.3" material="grid"/>
    <geom name="endless" type="plane" size="0 3 .5" pos="0 0 -1" material="grid"/>
    <geom type="hfield" hfield="hills" pos="-.5 0 0" rgba=".6 .5 .3 1"/>
    <geom type="mesh" mesh="tip" pos=".6 -.3 .1" rgba="1 1 0 1"/>
    <geom type="mesh" mesh="top" pos=".9 .4 .6" rgba="0 1 1 1"/>
    <body pos=".5 .5 1">
      <joint name="x" type="slide" axis="1 0 0"/><geom type="box" size=".2 .2 .2" material="dice"/>
    </body>
    {more}
  </worldbody>
  {rest}
</mujoco>
"""
SKIN = """
<deformable>
  <skin name="cloth" rgba=".9 .2 .9 1" vertex="-1 0 .5  0 0 .5  0 0 1.5  -1 0 1.5" face="0 1 2 0 2 3" inflate="0">
    <bone body="world" bindpos="0 0 0" bindquat="1 0 0 0" vertid="0 1 2 3" vertweight="1 1 1 1"/>
  </skin>
</deformable>
"""


def compiled(more="", rest=SKIN, more_assets=""):
    return mujoco.MjModel.from_xml_string(XML.format(more=more, rest=rest, more_assets=more_assets))


def hills(model, rng):
    model.hfield_data[:] = rng.uniform(0, 1, model.nhfielddata)
    model.hfield_size[0, 2] = rng.uniform(0.3, 1)


def picture(model, rng):
    model.tex_data[:] = rng.integers(0, 255, model.ntexdata)


def tip(model, rng):
    model.mesh_vert[: model.mesh_vertnum[0]] *= rng.uniform(0.5, 2, (1, 3))


def floor(model, rng):
    model.geom_size[0, :2] = rng.uniform(0.3, 2, 2)


def fog(model, rng):
    model.stat.extent = rng.uniform(1, 4)
    model.vis.rgba.fog[:3] = rng.uniform(0, 1, 3)
    model.vis.map.zfar = rng.uniform(3, 6)


def cloth(model, rng):
    model.skin_face[0] = model.skin_face[0][rng.permutation(3)]
    model.skin_vert[:] += rng.uniform(-0.3, 0.3, model.skin_vert.shape)


def nothing(model, rng):
    """As most envs do."""


EDITS = {each.__name__: each for each in (nothing, hills, picture, tip, floor, fog, cloth)}


def recompiled(rng):
    """Another model of the same sizes."""
    model = compiled()
    for edit in (hills, picture, tip, floor, cloth):
        edit(model, rng)
    return model


def more(rng):
    """A model of more bodies, with a longer state, each time."""
    count = int(rng.integers(1, 5))
    ball = '<body pos="{x} -.5 {z}"><freejoint/><geom size=".2" rgba="{x} 0 1 1"/></body>'
    balls = "".join(ball.format(x=rng.uniform(), z=rng.uniform(0.5, 1.5)) for _ in range(count))
    model = compiled(balls)
    hills(model, rng)
    return model


def less(rng):
    """A model of fewer assets and geoms, whose state is as long."""
    model = compiled(f'<geom size=".2" pos="{rng.uniform()} -1 1"/>', rest="")
    hills(model, rng)
    return model


def other_hills(rng):
    """A model with one more height field, and a texture of another size."""
    n = int(rng.integers(4, 9))
    assets = f"""<hfield name="more" nrow="{n}" ncol="5" size=".5 .5 .5 .1"/>
      <texture name="large" type="2d" builtin="checker" rgb1="0 0 1" rgb2="1 1 0" width="{4 * n}" height="32"/>"""
    model = compiled('<geom type="hfield" hfield="more" pos=".5 -.5 .2"/>', more_assets=assets)
    hills(model, rng)
    return model


def large():
    """A model whose height field is no part of a state."""
    asset = '<asset><hfield name="h" nrow="150" ncol="150" size="1 1 .5 .1"/></asset>'
    bodies = '<geom type="hfield" hfield="h"/><body><freejoint/><geom size=".1"/></body>'
    return mujoco.MjModel.from_xml_string(f"<mujoco>{asset}<worldbody>{bodies}</worldbody></mujoco>")


MODELS = {each.__name__: each for each in (recompiled, more, less, other_hills)}


class Edited(gym.Env):
    """Edits its model, or makes another one, when an episode begins; and in steps of `late`, if that is given.

    Args:
        how: one of `EDITS` or `MODELS`; "large", for hills that are no part of a state; "both", for a model
            that is made anew once, and whose hills are edited then.
        late: the steps that edit it, too.
        length: of an episode, in steps.
        tells: whether infos have what is to be seen. (After a call all edits are looked for.)
    """

    observation_space = gym.spaces.Box(-10, 10, (1,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float64)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self, how, late=(), length=0, tells=False):
        self._how, self._late, self._length, self._tells = how, late, length, tells
        self._steps = self._edits = 0
        self.model = compiled() if how != "large" else large()
        self.data = mujoco.MjData(self.model)

    def _edit(self):
        self._edits += 1
        if self._how in MODELS or (self._how == "both" and self._edits == 1):
            self.model = MODELS.get(self._how, recompiled)(self.np_random)
            self.data = mujoco.MjData(self.model)
        else:
            EDITS.get(self._how, hills)(self.model, self.np_random)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self._steps = 0
        if options is None or options.get("edit", True):
            self._edit()
        self.data.qpos[0] = self.np_random.uniform(-0.3, 0.3)
        return self.data.qpos[:1].copy(), self._info()

    def step(self, action):
        self._steps += 1
        if self._steps in self._late:
            self._edit()
        mujoco.mj_step(self.model, self.data, 5)
        return self.data.qpos[:1].copy(), 0.0, self._steps == self._length, False, self._info()

    def _info(self):
        return {"seen": self.export()} if self._tells else {}

    def edit(self):
        """Edit it by a call."""
        self._edit()

    def export(self):
        """The model as it is, and the state: what is to be seen."""
        return export(self.model, self.data)


def export(model, data):
    spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.empty(mujoco.mj_stateSize(model, spec))
    mujoco.mj_getState(model, data, state, spec)
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return buffer.tobytes(), state


# In a process of its own, as two OpenGL backends can't live in one. A context's first image may differ from later ones.
REFERENCE = """
import pickle, sys
import mujoco, numpy as np
exports, camera, width, height, max_geom = pickle.loads(sys.stdin.buffer.read())
images = [None] * len(exports)
by_model = {}
for number, (model_bytes, state) in enumerate(exports):
    by_model.setdefault(model_bytes, []).append((number, state))
for model_bytes, states in by_model.items():
    model = mujoco.MjModel.from_binary_path("m.mjb", {"m.mjb": model_bytes})
    with mujoco.Renderer(model, height, width, max_geom=max_geom) as renderer:
        for number, state in states[:1] + states:
            data = mujoco.MjData(model)
            mujoco.mj_setState(model, data, state, int(mujoco.mjtState.mjSTATE_INTEGRATION))
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera)
            images[number] = renderer.render().copy()
sys.stdout.buffer.write(pickle.dumps(np.stack(images)))
"""


def truth(exports, backend="egl", camera="side", width=40, height=32, max_geom=10_000):
    """What `mujoco.Renderer` draws of what `export` gave."""
    env = {**environment(), "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend, "LP_NUM_THREADS": "0"}
    done = run_alone(
        REFERENCE, stdin=pickle.dumps((list(exports), camera, width, height, max_geom)), env=env, timeout_s=120
    )
    return pickle.loads(done.stdout[done.stdout.index(b"\x80") :])  # after warnings, which MuJoCo 3.3 prints there


def wrong(images, right):
    """The part of the pixels of each image that differ."""
    return [float((a != b).any(axis=-1).mean()) for a, b in zip(images, right, strict=True)]
