"""The meshes of the page: they are where MuJoCo says, also of models that are edited or made anew."""

import pickle
from functools import partial
from time import perf_counter

import gymnasium
import mujoco
import numpy as np
import pytest

import aioenv
from aioenv.state.render_source import find_source, load_model
from aioenv.watching.messages import Setup
from aioenv.watching.viewer import Viewer
from tests.kits.mocap_kit import MocapEnv, Tell
from tests.rendering.edits_kit import MODELS, Edited, compiled

viser = pytest.importorskip("viser")

from aioenv.watching.scene import MujocoTiles, ShownModel, colours_of  # noqa: E402

N = 3
RENDER = aioenv.RenderConfig(workers=0, edits="each step")


@pytest.fixture
def server():
    page = viser.ViserServer("127.0.0.1", 0, verbose=False)
    yield page
    page.stop()


class Shown:
    """The scene of a vector env without its process: updates go from hand to hand."""

    def __init__(self, server, envs, slots=range(N)):
        slots = np.array(slots)
        backend = envs._backend
        self._watch = Viewer(backend, slots, num_envs=envs.num_envs, mode=envs.autoreset_mode, stats=envs.stats, fps=15)
        backend.attach_observer(self._watch._observer)
        pool = backend.images.pool
        numbers = tuple(pool.source_numbers(slots).tolist())
        self.tiles = MujocoTiles(server, Setup("", 0, tuple(slots.tolist()), tuple(pool.sources), numbers))

    def show(self):
        self.tiles.show(pickle.loads(pickle.dumps(self._watch._make_update(perf_counter()))))

    def of(self, row):
        """The model of a tile, and the position, orientation, colour and mesh of each geom."""
        for model, group in self.tiles._groups.items():
            if row not in group.rows:
                continue
            place, geoms = group.rows.index(row), {}
            for indices, _, handle in group._shapes:
                for number, geom in enumerate(model.geoms[indices].tolist()):
                    at = place * len(indices) + number
                    geoms[geom] = (
                        handle.batched_positions[at],
                        handle.batched_wxyzs[at],
                        handle.batched_colors[at],
                        handle,
                    )
            return model, geoms
        raise AssertionError(row)


def check(shown, row, model, state, spec):
    """A tile shows a model in a state, moved by the same way in all."""
    data = mujoco.MjData(model)
    mujoco.mj_setState(model, data, state, spec)
    mujoco.mj_kinematics(model, data)
    _, geoms = shown.of(row)
    solid = np.isin(model.geom_type, range(1, 8)) & (model.geom_group < 3)
    assert set(np.flatnonzero(solid).tolist()) <= set(geoms)
    ways = []
    for geom, (position, wxyz, colour, handle) in geoms.items():
        matrix = np.empty(9)
        mujoco.mju_quat2Mat(matrix, wxyz.astype(float))
        np.testing.assert_allclose(matrix, data.geom_xmat[geom], atol=1e-5)
        np.testing.assert_allclose(colour / 255, colours_of(model)[geom, :3].clip(0, 1), atol=1 / 200)
        ways.append(position - data.geom_xpos[geom])
        if model.geom_type[geom] == int(mujoco.mjtGeom.mjGEOM_HFIELD):
            number = model.geom_dataid[geom]
            start, count = model.hfield_adr[number], model.hfield_nrow[number] * model.hfield_ncol[number]
            heights = model.hfield_data[start : start + count] * model.hfield_size[number, 2]
            np.testing.assert_allclose(handle.vertices[:, 2], heights, atol=1e-5)
        if model.geom_type[geom] == int(mujoco.mjtGeom.mjGEOM_MESH):
            number = model.geom_dataid[geom]
            start, count = model.mesh_vertadr[number], model.mesh_vertnum[number]
            np.testing.assert_allclose(handle.vertices, model.mesh_vert[start : start + count], atol=1e-5)
    np.testing.assert_allclose(np.ptp(ways, 0), 0, atol=1e-4)
    place = shown.tiles._view.places[row]
    lines = (ways[0] - place) / shown.tiles._line
    np.testing.assert_allclose(lines, np.round(lines), atol=1e-3)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", [*MODELS, "nothing", "hills", "tip", "large"])
async def test_models_that_are_edited_or_made_anew(server, how):
    spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    factories = [partial(Edited, how, late=(2,), length=4, tells=True)] * N
    async with aioenv.AsyncVectorEnv(factories, num_workers=2, render=RENDER, autoreset_mode="Disabled") as envs:
        shown = Shown(server, envs)
        _, info = await envs.reset(seed=5)
        for _ in range(3):
            for row, (model, state) in enumerate(info["seen"]):
                shown.show()
                check(shown, row, load_model(model), state, spec)
            *_, info = await envs.step(envs.action_space.sample())


class Alternating(Edited):
    """Two models that are made anew in turn."""

    def _edit(self):
        self._edits += 1
        self.model = compiled('<geom size=".2" pos="0 -1 1"/>' if self._edits % 2 else "")
        self.data = mujoco.MjData(self.model)


@pytest.mark.asyncio
async def test_a_model_that_comes_back_is_shown_again(server):
    spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    factory = partial(Alternating, "less", tells=True)
    async with aioenv.AsyncVectorEnv([factory] * N, num_workers=1, render=RENDER) as envs:
        shown = Shown(server, envs)
        for _ in range(5):
            _, info = await envs.reset(seed=0)
            shown.show()
            for row, (model, state) in enumerate(info["seen"]):
                check(shown, row, load_model(model), state, spec)


@pytest.mark.asyncio
async def test_bodies_that_no_physics_moves(server):
    spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    async with aioenv.AsyncVectorEnv([lambda: Tell(MocapEnv())] * N, num_workers=1, render=RENDER) as envs:
        shown = Shown(server, envs, [0, 2])
        await envs.reset(seed=0)
        for _ in range(3):
            await envs.step(envs.action_space.sample())
        shown.show()
        states = await envs.call("whole_state")
        model = MocapEnv().model
        for row, slot in enumerate([0, 2]):
            check(shown, row, model, states[slot], spec)


@pytest.mark.asyncio
async def test_slots_of_different_models_are_in_one_scene(server):
    async def shows(envs):
        shown = Shown(server, envs)
        await envs.reset(seed=0)
        for _ in range(2):
            await envs.step(envs.action_space.sample())
            shown.show()
        return [shown.of(row)[0] for row in range(N)]

    def thick():
        env = gymnasium.make("Hopper-v5")
        env.unwrapped.model.geom_size[1:, 0] *= 2
        return env

    plain = partial(gymnasium.make, "Hopper-v5")
    async with aioenv.AsyncVectorEnv([plain, thick, plain], num_workers=1, render=RENDER) as envs:
        first, second, third = await shows(envs)
    assert first is third is not second
    np.testing.assert_allclose(second.model.geom_size[1:, 0], 2 * first.model.geom_size[1:, 0])


@pytest.mark.asyncio
async def test_labels_have_numbers_from_the_first_episode_on_that_is_seen_whole(server):
    async with aioenv.make_vec("Hopper-v5", N, num_workers=1, render=RENDER) as envs:
        await envs.reset(seed=0)
        await envs.step(np.zeros((N, 3)))
        shown = Shown(server, envs)
        labels = shown.tiles._labels
        await envs.step(np.zeros((N, 3)))
        shown.show()
        assert labels._texts == ["slot 0", "slot 1", "slot 2"]
        await envs.reset(seed=0)
        result = await envs.step(np.zeros((N, 3)))
        labels._written_s = 0.0
        shown.show()
        assert labels._texts == [f"slot {n}: {reward:,.1f} in 1 steps" for n, reward in enumerate(result.reward)]


@pytest.mark.parametrize("env", ["Ant-v5", "HalfCheetah-v5", "Humanoid-v5", "Pusher-v5", "Reacher-v5", "Swimmer-v5"])
def test_a_tile_is_as_large_as_what_moves_in_it(env):
    made = gymnasium.make(env)
    shown = ShownModel(find_source(made))
    made.close()
    assert 0.1 < shown.extent[0] < 4 and 0.1 < shown.extent[1] < 4
    assert 0.01 < shown.height < 3
    assert len(shown.geoms) >= 3
    assert np.isfinite(shown.poses()).all()


def test_nothing_moves_to_nowhere():
    made = gymnasium.make("Hopper-v5")
    source = find_source(made)
    made.close()
    shown = ShownModel(source)
    shown.read(np.full(source.state_size, np.nan), {})
    assert np.isfinite(shown.poses()).all()
