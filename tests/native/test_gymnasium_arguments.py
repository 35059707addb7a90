"""Every argument of the constructors of Gymnasium's MuJoCo envs: there, with its default, and with its effect."""

from __future__ import annotations

import importlib
import inspect
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.worker.making import TASKS as OURS
from aioenv.worker.making import make_registered
from tests.kits.compare import assert_same
from tests.kits.mujoco_kit import OTHER_ARGUMENTS, TASKS, compare
from tests.kits.version_kit import needs_mujoco_batch

_ASSETS = Path(gym.__file__).parent / "envs" / "mujoco" / "assets"
# what is the classes' own affair, and what images look like
_INNER = {"self", "model_path", "observation_space"}
_DRAWING = set(inspect.signature(MujocoEnv.__init__).parameters) - _INNER - {"frame_skip"}


def parameters(entry_point):
    """The arguments of a class's constructor and of those that it passes the rest to."""
    module, _, name = str(entry_point).partition(":")
    found = {}
    for kind in getattr(importlib.import_module(module), name).__mro__:
        for parameter in inspect.signature(vars(kind).get("__init__", lambda: None)).parameters.values():
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                found.setdefault(parameter.name, parameter.default)
    return found


@pytest.mark.parametrize("name", TASKS)
def test_all_of_gymnasiums_are_there(name):
    entry_point = gym.spec(name).entry_point
    theirs, ours = parameters(entry_point), parameters(OURS[entry_point])
    wanted = {key: repr(value) for key, value in theirs.items() if key not in _INNER}
    assert {key: repr(ours.get(key, "missing")) for key in wanted} == wanted
    tried = set().union(*OTHER_ARGUMENTS[name])
    assert set(wanted) - _DRAWING - {"xml_file"} <= tried, "each has another value in `make parity`"


@needs_mujoco_batch
@pytest.mark.filterwarnings("ignore:compiler attribute")
@pytest.mark.parametrize("name", TASKS)
def test_a_model_of_ones_own(name, tmp_path, monkeypatch):
    """Given as a path, be it absolute, relative or in the home directory."""
    default = parameters(gym.spec(name).entry_point)["xml_file"]
    spec = mujoco.MjSpec.from_file(str(_ASSETS / default))
    spec.option.timestep *= 0.5
    spec.option.gravity[2] *= 0.7
    spec.option.density += 1
    (tmp_path / "mine.xml").write_text(spec.to_xml())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path, steps in ((str(tmp_path / "mine.xml"), 20), ("./mine.xml", 2), ("~/mine.xml", 2)):
        compare(name, AutoresetMode.NEXT_STEP, {"xml_file": path}, num_envs=2, steps=steps, mask_every=7)
    with closing(make_registered(name, {"xml_file": "./mine.xml"}, num_envs=1)) as mine:
        assert mine.model.opt.timestep == spec.option.timestep


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "arguments",
    [
        {"camera_name": "track"},
        {"camera_id": 0},
        {"default_camera_config": {"distance": 9.0, "elevation": -60.0}},
        {"visual_options": {int(mujoco.mjtVisFlag.mjVIS_JOINT): True}},
        {"width": 40, "height": 30, "max_geom": 2000},  # of what the env draws, not of these images
    ],
    ids=lambda arguments: next(iter(arguments)),
)
async def test_what_is_about_drawing_shows(arguments):
    images = []
    config = aioenv.RenderConfig(96, 72, quality="fast", workers=1)
    for backend, given in (("workers", arguments), ("native", arguments), ("native", {})):
        workers = {"num_workers": 1} if backend == "workers" else {}
        async with aioenv.make_vec("Ant-v5", 2, backend=backend, render=config, **workers, **given) as envs:
            await envs.reset(seed=1)
            await envs.step(np.full((2, 8), 0.3, np.float32))
            images.append(await envs.render())
    assert_same(images[1], images[0])
    assert np.array_equal(images[1], images[2]) is ("width" in arguments)


def test_two_cameras():
    with pytest.raises(ValueError, match="both: 0 and 'track'"):
        make_registered("Ant-v5", {"camera_id": 0, "camera_name": "track"}, num_envs=1)


@pytest.mark.parametrize("name", [name for name in TASKS if any("_range" in key for key in OTHER_ARGUMENTS[name][0])])
def test_ranges_are_two_numbers(name):
    ranges = [key for key in parameters(gym.spec(name).entry_point) if key.endswith("_range")]
    assert ranges
    for key in ranges:
        for wrong in (None, 0.5, (0.5,), (0.1, 0.2, 0.3), "ab"):
            with pytest.raises(ValueError, match=rf"{key}: expected two numbers, \(low, high\), got"):
                make_registered(name, {key: wrong}, num_envs=1)
        make_registered(name, {key: np.array([0.5, 1.0])}, num_envs=1).close()
