"""Modders: every set_, get_ and rand_, and back again; the names of lines are those of the reference (RP14)."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

import aioenv
from aioenv import CameraModder, LightModder, MaterialModder, Modder, TextureModder
from tests.kits.process_kit import environment, run_alone
from tests.kits.render_pool_kit import PLAIN
from tests.rendering.edits_kit import compiled

ROOM = """
<mujoco>
  <asset>
    <texture name="grid" type="2d" builtin="checker" rgb1="1 0 0" rgb2="0 1 0" width="33" height="36"/>
    <texture name="cube" type="cube" builtin="flat" rgb1=".5 .5 .5" width="7" height="42"/>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".4 .6 .8" rgb2="0 0 0" width="32" height="32"/>
    <material name="grid" texture="grid" texuniform="true"/>
    <material name="cube" texture="cube" rgba=".2 .2 1 1"/>
    <material name="red" texture="grid" rgba="1 0 0 .5"/>
    <material name="plain"/>
  </asset>
  <worldbody>
    <light name="lamp" pos="0 0 3" dir="0 0 -1"/>
    <geom name="floor" type="plane" size="2 2 .1" material="grid"/>
    <geom name="box" type="box" pos="0 0 .5" size=".3 .3 .3" material="cube"/>
    <geom name="ball" type="sphere" pos="1 0 .5" size=".3" material="red"/>
    <geom name="bare" pos="-1 0 .5" size=".2"/>
    <geom name="plain" pos="-1 1 .5" size=".2" material="plain"/>
    <camera name="still" pos="0 -3 1" xyaxes="1 0 0 0 .3 1"/>
    <body pos="0 0 1" euler="0 0 90">
      <freejoint/>
      <geom size=".1"/>
      <camera name="track" mode="trackcom" pos="0 -3 0" quat="1 1 0 0"/>
      <camera name="sensor" pos="0 -1 0" sensorsize=".01 .01" focal=".01 .01" resolution="10 10"/>
      <light name="follower" mode="track" pos="0 0 1" dir="0 .5 -1"/>
    </body>
  </worldbody>
</mujoco>
"""

FIELDS = [
    name
    for name in dir(mujoco.MjModel)
    if name.startswith(("mat_", "tex_", "light_", "cam_", "geom_")) and not name.startswith("geom_plugin")
]


def room() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(ROOM)


def snapshot(model) -> dict[str, np.ndarray]:
    return {name: np.array(getattr(model, name)) for name in FIELDS}


def changed(model, before) -> set[str]:
    return {name for name, value in before.items() if not np.array_equal(getattr(model, name), value)}


ALL = (TextureModder, LightModder, CameraModder, MaterialModder)


@pytest.mark.parametrize("kind", ALL)
def test_rp14_randomize_is_seeded_and_restore_takes_everything_back(kind):
    model = room()
    before = snapshot(model)
    modder = kind(model, seed=7)
    modder.randomize()
    first = snapshot(model)
    assert changed(model, before)
    modder.randomize()
    assert changed(model, first)
    modder.restore()
    assert changed(model, before) == set()
    modder.reseed(7)
    modder.randomize()
    assert changed(model, first) == set()
    modder.restore()
    modder.restore()
    assert changed(model, before) == set()


def test_rp14_light():
    model = room()
    before = snapshot(model)
    lights = LightModder(model, seed=0)
    assert lights.get_lightid("follower") == 1 == lights.get_lightid(1)
    for field, value in (
        ("pos", [1, 2, 3]),
        ("ambient", [0.1, 0.2, 0.3]),
        ("diffuse", [1, 0, 0]),
        ("specular", [0, 1, 0]),
    ):
        getattr(lights, f"set_{field}")("lamp", value)
        assert np.allclose(getattr(lights, f"get_{field}")("lamp"), value)
        assert np.allclose(getattr(model, f"light_{field}")[0], value)
        with pytest.raises(ValueError, match=f"{field}: expected"):
            getattr(lights, f"set_{field}")("lamp", [1, 2])
    lights.set_dir("lamp", [0, 3, 4])
    assert np.allclose(lights.get_dir("lamp"), [0, 0.6, 0.8])
    for value in (False, True):
        lights.set_active("lamp", value)
        lights.set_castshadow("lamp", value)
        assert lights.get_active("lamp") is value and lights.get_castshadow("lamp") is value
    for name in ("lamp", "follower"):
        for field in ("pos", "dir", "ambient", "diffuse", "specular"):
            old = getattr(lights, f"get_{field}")(name)
            new = getattr(lights, f"rand_{field}")(name)
            assert not np.array_equal(old, new) and np.array_equal(new, getattr(lights, f"get_{field}")(name))
    assert {lights.rand_castshadow("lamp") for _ in range(40)} == {True, False}
    old = lights.get_dir("lamp")
    assert old @ lights.rand_dir("lamp", 10.0) >= np.cos(np.radians(10.0)) - 1e-9
    for wrong in ("lantern", 2, -1, True, 1.5):
        with pytest.raises(ValueError, match=r"'lamp', 'follower'|number of 2"):
            lights.set_active(wrong, True)
    with pytest.raises(ValueError, match="zeros"):
        lights.set_dir("lamp", [0, 0, 0])
    with pytest.raises(ValueError, match="from 0 to 1"):
        lights.set_diffuse("lamp", [0, 0, 2])
    lights.restore()
    assert changed(model, before) == set()


def test_rp14_camera():
    model = room()
    before = snapshot(model)
    cameras = CameraModder(model, seed=0)
    assert cameras.get_camid("track") == 1
    cameras.set_fovy("still", 30.5)
    assert cameras.get_fovy("still") == 30.5 == model.cam_fovy[0]
    for wrong in (0, 180, -3, np.nan):
        with pytest.raises(ValueError, match="less than 180"):
            cameras.set_fovy("still", wrong)
    with pytest.raises(ValueError, match="has a sensor"):
        cameras.set_fovy("sensor", 50)
    cameras.set_pos("still", [1, 2, 3])
    assert np.array_equal(cameras.get_pos("still"), [1, 2, 3])
    cameras.set_quat("still", [0, 0, 2, 0])
    assert np.array_equal(cameras.get_quat("still"), [0, 0, 1, 0])
    with pytest.raises(ValueError, match="quat"):
        cameras.set_quat("still", [1, 0, 0])
    with pytest.raises(ValueError, match="'still', 'track', 'sensor'"):
        cameras.get_pos("nowhere")
    assert 27.4 <= cameras.rand_fovy("still") <= 33.6
    old = cameras.get_pos("still")
    assert 0 < np.abs(cameras.rand_pos("still", 0.5) - old).max() <= 0.5
    old = cameras.get_quat("still")
    assert np.cos(np.radians(5)) - 1e-9 <= 2 * (old @ cameras.rand_quat("still")) ** 2 - 1 < 1
    for name in ("still", "track", "sensor"):
        cameras.rand_all(name)
    cameras.restore()
    assert changed(model, before) == set()


@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    [
        (CameraModder, "still", {"cam_pos", "cam_pos0", "cam_poscom0", "cam_quat", "cam_mat0", "cam_fovy"}),
        (CameraModder, "sensor", {"cam_pos", "cam_pos0", "cam_poscom0", "cam_quat", "cam_mat0"}),
        (
            LightModder,
            "lamp",
            {f"light_{x}" for x in ("pos", "pos0", "poscom0", "dir", "dir0", "ambient", "diffuse", "specular")},
        ),
        (MaterialModder, "box", {"mat_specular", "mat_shininess", "mat_reflectance"}),
    ],
)
def test_rp14_rand_all_changes_all_that_it_says(kind, name, fields):
    model = room()
    before = snapshot(model)
    kind(model, seed=0).rand_all(name)
    assert changed(model, before) == fields


def test_rp14_what_follows_a_body_is_moved_too():
    """MuJoCo then draws from fields that it derived from the others when it made the model."""
    model = room()
    cameras, lights = CameraModder(model), LightModder(model)

    def seen():
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        return [np.array(a) for a in (data.cam_xpos[1], data.cam_xmat[1], data.light_xpos[1], data.light_xdir[1])]

    def as_made_anew():
        spec = mujoco.MjSpec.from_string(ROOM)
        spec.camera("track").pos, spec.camera("track").quat = cameras.get_pos("track"), cameras.get_quat("track")
        spec.light("follower").pos, spec.light("follower").dir = lights.get_pos("follower"), lights.get_dir("follower")
        anew = spec.compile()
        data = mujoco.MjData(anew)
        mujoco.mj_forward(anew, data)
        return [np.array(a) for a in (data.cam_xpos[1], data.cam_xmat[1], data.light_xpos[1], data.light_xdir[1])]

    before = seen()
    cameras.set_pos("track", [0.5, -2, 0.25])
    cameras.set_quat("track", [0.5, 0.5, 0.1, 0.2])
    lights.set_pos("follower", [0.3, 0.1, 2])
    lights.set_dir("follower", [1, 1, -1])
    for now, anew, once in zip(seen(), as_made_anew(), before, strict=True):
        assert np.allclose(now, anew, atol=1e-6) and not np.allclose(now, once)
    cameras.restore()
    lights.restore()
    assert all(np.array_equal(now, once) for now, once in zip(seen(), before, strict=True))


def test_rp14_material():
    model = room()
    before = snapshot(model)
    materials = MaterialModder(model, seed=0)
    assert materials.get_mat_id("box") == 1
    for field, low, high in (("specularity", 0.1, 0.3), ("shininess", 0.1, 0.6), ("reflectance", 0.1, 0.6)):
        getattr(materials, f"set_{field}")("ball", 0.75)
        assert getattr(materials, f"get_{field}")("ball") == 0.75
        drawn = [getattr(materials, f"rand_{field}")("ball") for _ in range(20)]
        assert low <= min(drawn) < max(drawn) <= high + 1e-6
        for wrong in (-0.1, 1.1, np.nan, [0.5, 0.5], "0.5"):
            with pytest.raises(ValueError, match=f"{field}: expected a number from 0 to 1"):
                getattr(materials, f"set_{field}")("ball", wrong)
    materials.set_texrepeat("floor", 2, 3)
    assert materials.get_texrepeat("floor") == (2.0, 3.0) and not model.mat_texuniform[0]
    assert {n for _ in range(60) for n in materials.rand_texrepeat("floor", 3)} == {1, 2, 3}
    with pytest.raises(ValueError, match="texrepeat"):
        materials.set_texrepeat("floor", 0, 1)
    assert changed(model, before) >= {"mat_specular", "mat_shininess", "mat_reflectance", "mat_texrepeat"}
    with pytest.raises(ValueError, match="geom 'bare' has no material"):
        materials.set_shininess("bare", 0.5)
    with pytest.raises(ValueError, match="no geom 'wall'"):
        materials.get_mat_id("wall")
    materials.restore()
    assert changed(model, before) == set()
    materials.randomize()
    # the last material is not the one of geoms that have none
    assert np.array_equal(model.mat_specular != before["mat_specular"], [True] * 4)


def test_rp14_texture_paints():
    model = room()
    told: list[int] = []
    textures = TextureModder(model, seed=0, renderer=told.append)
    floor = textures.get_texture("floor")
    assert floor[:5] == (0, "2d", 36, 33, 3) and floor.bitmap.shape == (36, 33, 3)
    assert textures.get_texture("box")[:5] == (1, "cube", 42, 7, 3)
    assert textures.get_texture("skybox").type == "skybox"
    red, blue = [255, 0, 0], [10, 20, 200]
    assert (textures.set_rgb("floor", red) == red).all() and (floor.bitmap == red).all()
    assert told == [0]
    bitmap = textures.set_checker("floor", red, blue)
    first, second = textures.get_checker_matrices("floor")
    assert (bitmap[first] == red).all() and (bitmap[second] == blue).all()
    assert first[0, 0] and second[0, 1] and second[1, 0] and first[1, 1] and (first ^ second).all()
    for vertical in (True, False):
        bitmap = textures.set_gradient("box", [0, 100, 255], [250, 100, 5], vertical)
        lines = bitmap if vertical else bitmap.transpose(1, 0, 2)
        assert (
            (lines == lines[:, :1]).all() and (lines[0] == [0, 100, 255]).all() and (lines[-1] == [250, 100, 5]).all()
        )
        assert (np.diff(lines[:, 0, 0].astype(int)) > 0).all() and (np.diff(lines[:, 0, 2].astype(int)) < 0).all()
    bitmap = textures.set_noise("skybox", red, blue, 0.25)
    share = (bitmap == blue).all(axis=-1)
    assert 0.2 < share.mean() < 0.3 and (bitmap[~share] == red).all()
    for wrong in ([0, 0], [0, 0, 256], [-1, 0, 0], [0.5, 0, 0.1]):
        with pytest.raises(ValueError, match="rgb: expected three numbers from 0 to 255"):
            textures.set_rgb("floor", wrong)
    with pytest.raises(ValueError, match="fraction"):
        textures.set_noise("floor", red, blue, 1.5)
    colour = textures.get_rand_rgb()
    assert colour.shape == (3,) and colour.dtype == np.uint8 and len(textures.get_rand_rgb(4)) == 4
    for painter in ("rgb", "checker", "gradient", "noise", "all"):
        before = floor.bitmap.copy()
        assert not np.array_equal(getattr(textures, f"rand_{painter}")("floor"), before)
    told.clear()
    textures.upload_texture("box")
    textures.restore()
    assert told[0] == 1 and set(told[1:]) == {0, 1, 2}
    assert np.array_equal(model.tex_data, room().tex_data)


def test_rp14_texture_sharing_and_refusals():
    model = room()
    textures = TextureModder(model, seed=0)
    assert textures.geoms_sharing("floor") == [0, 2] == textures.geoms_sharing("ball")
    assert textures.get_texture("ball").id == textures.get_texture("floor").id
    with pytest.raises(ValueError, match="geom 'bare' has no material"):
        textures.set_rgb("bare", [1, 2, 3])
    with pytest.raises(ValueError, match="'plain' has no texture"):
        textures.set_rgb("plain", [1, 2, 3])
    textures.whiten_materials(["ball"])
    assert (model.mat_rgba[2] == 1).all() and not (model.mat_rgba[1] == 1).all()
    with pytest.raises(ValueError, match="no material"):
        textures.whiten_materials(["bare"])
    textures.whiten_materials()
    assert (model.mat_rgba == 1).all()
    textures.restore()
    assert np.array_equal(model.mat_rgba, room().mat_rgba)
    textures.randomize()
    assert (model.mat_rgba[:3] == 1).all() and np.array_equal(model.mat_rgba[3], room().mat_rgba[3])
    textures.restore()
    one = TextureModder(model, names=["box"])
    before = snapshot(model)
    one.randomize()
    assert np.array_equal((model.mat_rgba != before["mat_rgba"]).any(axis=1), [False, True, False, False])
    assert (textures.get_texture("floor").bitmap.reshape(-1) == before["tex_data"][: 36 * 33 * 3]).all()
    with pytest.raises(ValueError, match="no geom 'wall'"):
        TextureModder(model, names=["wall"])
    bare = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
    for kind in ALL:
        kind(bare, seed=0).randomize()  # nothing to do
    with pytest.raises(ValueError, match="no skybox"):
        TextureModder(bare).set_rgb("skybox", [0, 0, 0])
    with pytest.raises(TypeError, match=r"renderer: expected a mujoco\.Renderer"):
        TextureModder(model, renderer=3)
    with pytest.raises(NotImplementedError, match="write randomize"):
        Modder(model).randomize()


def test_rp14_channels():
    """Opacity stays; textures that the renderer does not show, or that the model only refers to, are refused."""
    spec = mujoco.MjSpec()
    for channels in (1, 3, 4):
        texture = spec.add_texture(name=f"t{channels}", type=mujoco.mjtTexture.mjTEXTURE_2D, width=5, height=4)
        texture.nchannel = channels
        texture.data = bytes(range(20 * channels))
        roles = [""] * 10
        roles[mujoco.mjtTextureRole.mjTEXROLE_RGB] = texture.name
        spec.add_material(name=f"m{channels}").textures = roles
        spec.worldbody.add_geom(name=f"g{channels}", size=[1, 1, 1], material=f"m{channels}")
    roles = [""] * 10
    roles[mujoco.mjtTextureRole.mjTEXROLE_RGBA] = "t4"
    spec.add_material(name="rgba").textures = roles
    spec.worldbody.add_geom(name="rgba", size=[1, 1, 1], material="rgba")
    model = spec.compile()
    textures = TextureModder(model)
    with pytest.raises(ValueError, match="'rgba' has no texture in the role rgb"):  # which would not be seen
        textures.set_rgb("rgba", [1, 2, 3])
    bitmap = textures.set_rgb("g4", [1, 2, 3])
    assert (bitmap[..., :3] == [1, 2, 3]).all() and bitmap[..., 3].tolist() == np.arange(3, 80, 4).reshape(
        4, 5
    ).tolist()
    with pytest.raises(ValueError, match="'g1' can't be painted: it has nchannel=1"):
        textures.set_rgb("g1", [1, 2, 3])
    model.tex_adr[1] = -1
    with pytest.raises(ValueError, match="'g3' can't be painted: the model only refers to it"):
        textures.get_texture("g3")
    TextureModder(model, seed=1).randomize()


# In a process of its own: OpenGL starts threads, which no test may leave.
ALONE = """
import sys
import mujoco, numpy as np
import aioenv
model = mujoco.MjModel.from_xml_string(sys.stdin.read())
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 18, 24) as renderer:
    def draw():
        renderer.update_scene(data, "still")
        return renderer.render().copy()
    draw()
    images = [draw()]
    textures = aioenv.TextureModder(model, renderer=renderer)
    textures.set_rgb("floor", (0, 0, 255))
    images.append(draw())
    textures.restore()
    images.append(draw())
print(np.array_equal(images[0], images[2]), np.array_equal(images[0], images[1]), *images[1][-1, 12])
"""


def test_rp14_without_a_pool_a_renderer_sees_what_is_painted_and_taken_back():
    env = {**environment(), "MUJOCO_GL": "egl", "LP_NUM_THREADS": "0"}
    done = run_alone(ALONE, stdin=ROOM, env=env)
    restored, unchanged, red, green, blue = done.stdout.split()[-5:]
    assert (restored, unchanged) == ("True", "False") and int(blue) > 50 > max(int(red), int(green))


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"model: expected an MjModel, got 'robot.xml'"):
        aioenv.TextureModder("robot.xml")


def test_their_names_are_public():
    assert all(issubclass(kind, aioenv.Modder) for kind in ALL)


class Bare(Modder):
    """Takes the textures off."""

    def randomize(self):
        for material in range(self.model.nmat):
            self._edit("mat_texid", material, -1)


class Repeat(MaterialModder):
    """Repeats the floor's texture often."""

    def randomize(self):
        self.set_texrepeat("floor", 5, 5)


@pytest.mark.asyncio
@pytest.mark.parametrize("modder", [Bare, Repeat])
async def test_which_textures_materials_have_and_how_often_shows(modder):
    size = {"width": 48, "height": 36, "camera": "still"}
    async with aioenv.RenderPool(room(), quality="fast", modder=modder) as pool:
        own = await pool.render(slots=[0], **size)
        other = await pool.render(slots=[0], randomize=True, **size)
        assert not np.array_equal(own, other)
        fields = ("mat_texid", "mat_texuniform", "mat_texrepeat")
        edits = {name: getattr(pool.model, name)[None] for name in fields}
        assert np.array_equal(await pool.render(slots=[0], edits=edits, **size), own)
        assert np.array_equal(await pool.render(slots=[0], **size), other)  # edits are taken back
        edits["mat_texrepeat"] = edits["mat_texrepeat"] * 7
        edits["mat_texuniform"] = edits["mat_texuniform"] * False
        assert not np.array_equal(await pool.render(slots=[0], edits=edits, **size), own)
        assert np.array_equal(await pool.render(slots=[1], **size), own)


class Painted(TextureModder):
    """Paints the same each time."""

    def randomize(self):
        self.set_checker("floor", (255, 0, 0), (0, 0, 255))
        self.set_gradient("box", (0, 255, 0), (255, 0, 255), vertical=False)
        self.set_rgb("skybox", (200, 100, 0))


@pytest.mark.asyncio
async def test_what_is_painted_in_a_pool_is_what_a_model_painted_by_hand_shows():
    """2-D textures, cubes and the sky; after others were drawn in the same context."""
    size = {"width": 48, "height": 36, "camera": "still"}
    model = room()
    async with aioenv.RenderPool(model, quality="fast", modder=Painted) as pool:
        own = await pool.render(slots=[0, 1], **size)
        painted = await pool.render(slots=[1], randomize=True, **size)
        again = await pool.render(slots=[0, 1], **size)
    Painted(model).randomize()
    async with aioenv.RenderPool(model, quality="fast") as pool:
        by_hand = await pool.render(slots=[0], **size)
    assert np.array_equal(painted[0], by_hand[0]) and np.array_equal(again, [own[0], by_hand[0]])
    assert (painted != own[1]).any(axis=3).mean() > 0.5


class Terrain(Modder):
    """Makes other hills and a larger mesh; in some looks the mesh alone."""

    def randomize(self):
        if self.rng.random() < 0.5:
            self._edit("hfield_size", 0, (1, 1, 1.5, 0.1))
            for number in range(self.model.nhfielddata):
                self._edit("hfield_data", number, self.rng.random())
        for number in range(int(self.model.mesh_vertnum[0])):
            self._edit("mesh_vert", number, 1.5 * self.model.mesh_vert[number])


class SkyPainted(TextureModder):
    """Paints the sky and the floor."""

    def randomize(self):
        self.rand_rgb("skybox")
        self.rand_noise("floor")


@pytest.mark.asyncio
async def test_hills_and_meshes_that_a_modder_edits_show():
    size = {"width": 40, "height": 32, "camera": "side"}
    async with aioenv.RenderPool(compiled(), modder=[Terrain, SkyPainted], seed=0, workers_per_device=1) as pool:
        own = await pool.render(slots=range(4), **size)
        looks = await pool.render(slots=range(4), randomize=True, **size)
        mixed = await pool.render(slots=[4, 1, 5, 2], **size)
    assert np.array_equal(mixed, [own[0], looks[1], own[0], looks[2]])
    hills = set()
    for slot, look in enumerate(looks):
        model = compiled()
        for number, kind in enumerate((Terrain, SkyPainted)):
            modder = kind(model)
            modder.reseed((0, slot, 1, number))
            modder.randomize()
        hills.add(bool(model.hfield_data.any()))
        async with aioenv.RenderPool(model, workers_per_device=1) as pool:
            assert np.array_equal((await pool.render(slots=[0], **size))[0], look)
    assert hills == {False, True}


class Turn(Modder):
    """Turns the body that a light and a camera follow."""

    def randomize(self):
        for number in range(3, 7):
            self._edit("qpos0", number, self.rng.normal())


@pytest.mark.asyncio
async def test_a_look_does_not_depend_on_what_other_modders_did_first():
    async def looks(workers: int) -> np.ndarray:
        modders = [Turn, LightModder, CameraModder]
        async with aioenv.RenderPool(
            room(), quality="fast", modder=modders, seed=0, workers_per_device=workers
        ) as pool:
            return await pool.render(slots=range(4), randomize=True, width=24, height=18, camera="track")

    assert np.array_equal(await looks(1), await looks(4))


# MuJoCo has compiled the blue box where its body is, the red one where its body's inertia is, and both sites likewise.
FRAMED = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="still" pos="0 -3 1" xyaxes="1 0 0 0 .3 1"/>
    <body pos="-.6 0 .7"><freejoint/><geom type="box" size=".3 .2 .1" rgba="0 0 1 1"/><site size=".3"/></body>
    <body pos=".2 0 .7">
      <freejoint/>
      <geom type="box" size=".1 .2 .3" pos=".4 0 0" euler="0 30 0" rgba="1 0 0 1"/>
      <site size=".3 .1 .1" type="box" pos=".4 0 0" euler="0 30 0"/>
    </body>
  </worldbody>
</mujoco>
"""


def edits_of(field: str, row: int, value: list[float]) -> type[Modder]:
    """A modder that edits this."""
    return type("Editor", (Modder,), {"randomize": lambda self: self._edit(field, row, value)})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("field", "row", "value", "shows"),
    [
        ("geom_pos", 0, [0, 0, 0.4], True),
        ("geom_quat", 1, [0.6, 0, 0.8, 0], True),
        ("site_pos", 0, [0, 0, 0.4], True),
        ("site_quat", 1, [0.6, 0.8, 0, 0], True),
        ("body_ipos", 2, [-0.5, 0, 0.3], False),
        ("body_iquat", 2, [0.6, 0.8, 0, 0], False),
    ],
)
async def test_what_is_compiled_where_its_body_is_is_moved_and_stays_where_the_inertia_was(field, row, value, shows):
    """Edits for one call give what a model does that is compiled so, and a modder gives the same."""
    model = mujoco.MjModel.from_xml_string(FRAMED)
    size = {"width": 48, "height": 36, "camera": "still"}
    edited = np.array(getattr(model, field))
    edited[row] = value
    async with aioenv.RenderPool(model, quality="fast", modder=edits_of(field, row, value)) as pool:
        before = await pool.render(slots=[0], **size)
        by_edits = await pool.render(slots=[0], edits={field: edited[None]}, **size)
        by_modder = await pool.render(slots=[0], randomize=True, **size)
        assert np.array_equal(by_modder, by_edits)
        assert np.array_equal(before, by_edits) is not shows
        assert np.array_equal(await pool.render(slots=[1], **size), before)


def test_what_a_modder_loosened_is_restored():
    model = mujoco.MjModel.from_xml_string(FRAMED)
    names = ("geom_pos", "geom_sameframe", "site_sameframe", "body_ipos")
    before = {name: np.array(getattr(model, name)) for name in names}
    modder = Modder(model)
    modder._edit("geom_pos", 0, [0, 0, 1])
    assert changed(model, before) == {"geom_pos", "geom_sameframe"}
    modder._edit("body_ipos", 2, [0, 0, 1])
    assert changed(model, before) == {"geom_pos", "geom_sameframe", "site_sameframe", "body_ipos"}
    modder.restore()
    assert not changed(model, before)


class Edits(Modder):
    """A modder of one's own; does these edits."""

    def __init__(self, model, edits=()):
        super().__init__(model, seed=0)
        self.edits = edits

    def randomize(self):
        for edit in self.edits:
            self._edit(*edit)


@pytest.mark.parametrize(
    "edits",
    [
        [("tex_data", 0, 7)],
        [("tex_data", 5, 7), ("tex_data", -1, 9)],
        [("geom_rgba", 0, [1, 0, 0, 1]), ("geom_rgba", -1, [0, 1, 0, 1])],
        [("geom_rgba", -1, [1, 0, 0, 1]), ("geom_rgba", np.int64(0), [0, 1, 0, 1])],
    ],
)
def test_what_a_modder_of_ones_own_edits_is_restored(edits):
    model = mujoco.MjModel.from_xml_string(
        """<mujoco><asset><texture name='t' type='2d' builtin='checker' rgb1='1 0 0' rgb2='0 0 1' width='8' height='8'/>
        <texture name='u' type='2d' builtin='flat' rgb1='0 1 0' width='8' height='8'/><material name='m' texture='t'/>
        </asset><worldbody><geom type='box' size='1 1 1' material='m'/></worldbody></mujoco>"""
    )
    before = {name: np.array(getattr(model, name)) for name in ("tex_data", "geom_rgba")}
    modder = Edits(model, edits)
    modder.randomize()
    assert changed(model, before) == {edits[0][0]}
    for field, row, value in edits[-1:]:
        assert np.array_equal(getattr(model, field)[row], np.array(value, before[field].dtype))
    modder.restore()
    assert not changed(model, before)


def test_what_cannot_be_drawn_is_refused_as_edits_of_a_call_are():
    model = mujoco.MjModel.from_xml_string(PLAIN)
    before = {name: np.array(getattr(model, name)) for name in ("geom_size", "geom_matid", "mat_texid")}
    modder = Edits(model)
    for field, row, value, message in (
        ("geom_matid", -1, 1, "Edits: edit of geom_matid 1: expected numbers from -1 to 0, as the model has nmat=1"),
        ("mat_texid", 0, 7, "Edits: edit of mat_texid 0: expected numbers from -1 to 0, as the model has ntex=1"),
    ):
        with pytest.raises(ValueError, match=message):
            modder._edit(field, row, value)
    assert not changed(model, before)
    modder._edit("geom_size", 0, model.geom_size[0].copy())
    modder._edit("geom_size", 1, [0.1, 0, 0])
    modder._edit("geom_matid", 1, 0)
    assert changed(model, before) == {"geom_size", "geom_matid"}


def test_edits_of_what_there_is_not_are_refused():
    modder = Edits(mujoco.MjModel.from_xml_string(FRAMED))
    for field in ("geom_color", "vis.headlight.diffuse", "ngeom"):
        with pytest.raises(ValueError, match=f"Edits: edit: expected the name of an array of MjModel, got '{field}'"):
            modder._edit(field, 0, 1)
    with pytest.raises(IndexError):
        modder._edit("geom_rgba", 99, 1)
