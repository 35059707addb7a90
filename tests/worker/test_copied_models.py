"""Models that a fork server has compiled, which its workers copy: they are what would have been loaded."""

from __future__ import annotations

import os
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest

import aioenv
from tests.kits.process_kit import run_alone

HOPPER = f"{gym.__path__[0]}/envs/mujoco/assets/hopper.xml"
TEXT = Path(HOPPER).read_text(encoding="utf-8")
# what is there of a model, saved; and what MuJoCo has kept of its XML
SAVED = """
import os, mujoco, numpy as np

def saved(model):
    data = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, data)
    return data.tobytes()

def last_xml(model, path):
    mujoco.mj_saveLastXML(path, model)
    with open(path) as file:
        return file.read()
"""


PNG = (  # of one pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c636064620600000e0007d76fe4780000000049454e44ae"
    "426082"
)


class Asked(gym.Wrapper):
    """Tells of its model, and how it came to be."""

    def model_of(self, folder):
        names = {}
        exec(SAVED, names)
        model = self.unwrapped.model
        xml = names["last_xml"](model, f"{folder}/{os.getpid()}-{id(self)}.xml")  # ids of forked workers may be alike
        return names["saved"](model), xml, hasattr(mujoco.MjModel.from_xml_path, "__wrapped__"), model._address

    def copies(self, path):
        """Whether this file would be copied: then nothing is loaded."""
        models = __import__("sys").modules["aioenv.worker.forkserver_warmup"]._compiled
        before = models._model
        model = mujoco.MjModel.from_xml_path(path)
        return models._model is before is not None, model.nq


def asked(task, n=4, **options):
    return aioenv.make_vec(task, n, wrappers=[Asked], num_workers=2, **options)


@pytest.mark.asyncio
@pytest.mark.parametrize("task", ["HalfCheetah", "Humanoid", "Pusher"])
async def test_a_copy_is_what_would_have_been_loaded(task, tmp_path):
    async with asked(f"{task}-v5") as envs, asked(f"{task}-v5", start="spawn") as others:
        models, loaded = await envs.call("model_of", str(tmp_path)), await others.call("model_of", str(tmp_path))
    assert [known for _, _, known, _ in models] == [True] * 4 and not loaded[0][2]
    assert {(saved, xml) for saved, xml, _, _ in models} == {(saved, xml) for saved, xml, _, _ in loaded}
    assert models[0][3] != models[1][3]  # each has its own


@pytest.mark.asyncio
async def test_only_the_very_file_is_copied(tmp_path):
    own = tmp_path / "own.xml"
    own.write_text(TEXT, encoding="utf-8")
    async with asked("Hopper-v5") as envs:
        assert await envs.call("copies", HOPPER) == ((True, 6),) * 4
        assert await envs.call("copies", str(own)) == ((True, 6),) * 4
        own.write_text(TEXT.replace("</worldbody>", '<body><freejoint/><geom size="1"/></body></worldbody>'))
        assert await envs.call_at([0], "copies", str(own)) == ((False, 13),)
        # from now on that is MuJoCo's last: the other one has to be loaded there
        assert await envs.call_at([0], "copies", HOPPER) == ((False, 6),)
        assert await envs.call_at([3], "copies", HOPPER) == ((True, 6),)
    async with asked("Hopper-v5", xml_file=str(own), reset_noise_scale=0.0) as envs:
        assert (await envs.reset()).obs.shape == (4, 24)


@pytest.mark.asyncio
async def test_several_tasks_of_one_server(tmp_path):
    tasks = ("Ant-v5", "Swimmer-v5", "Ant-v5")
    async with asked(tasks[0]) as ants, asked(tasks[1]) as swimmers, asked(tasks[2]) as more:
        for task, envs in zip(tasks, (ants, swimmers, more), strict=True):
            expected = gym.make(task).unwrapped.model
            for saved, _, _, _ in await envs.call("model_of", str(tmp_path)):
                data = np.empty(mujoco.mj_sizeModel(expected), np.uint8)
                mujoco.mj_saveModel(expected, None, data)
                assert saved == data.tobytes()


def test_what_a_model_is_made_of_besides_its_file_is_not_looked_for():
    code = f"""
    import tempfile
    {SAVED.replace(chr(10), chr(10) + "    ")}
    import gymnasium.envs.mujoco.mujoco_env as mujoco_env
    from aioenv.worker import forkserver_warmup as models

    plain = "<mujoco><!-- file= --><worldbody><geom size='1'/></worldbody></mujoco>"
    parts = (
        "<mujoco><include file='plain.xml'/></mujoco>",
        "<mujoco><asset><texture name='t' type='2d' file='one.png'/></asset></mujoco>",
        "<mujoco><asset><texture name='t' type='cube' fileright='one.png'/></asset></mujoco>",
        "<mujoco><extension><plugin plugin='mujoco.pid'/></extension></mujoco>",
        "<mujoco",
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with open("one.png", "wb") as file:
            file.write(bytes.fromhex({PNG!r}))
        names = []
        for number, text in enumerate((plain, *parts)):
            names.append("plain.xml" if text is plain else f"{{number}}.xml")
            with open(names[-1], "w") as file:
                file.write(text)

        def env(path):
            class Env(mujoco_env.MujocoEnv):
                def __init__(self, xml_file=os.path.abspath(path)):
                    pass

            return Env

        here = __import__("sys").modules["__main__"]
        for name in names[1:]:
            if name < "4":  # these can be compiled
                mujoco.MjModel.from_xml_path(name)
            here.Env = env(name)
            models.compile_models(["__main__:Env", "__main__:saved", "__main__:nothing", "no.such.module:Env"])
            assert models._compiled._text is None, name
        here.Env = env("plain.xml")
        models.compile_models(["__main__:Env"])
        load = mujoco.MjModel.from_xml_path
        assert models._compiled._text == plain.encode()
        kept = models._compiled._model
        copy = load("plain.xml")
        copy.geom_size[0, 0] = 7
        assert kept.geom_size[0, 0] == 1 and saved(load("plain.xml")) == saved(kept)
        # what can't be read is told by MuJoCo, and what has assets is loaded
        for arguments in (("none.xml",), (3,), ("plain.xml", {{"a": 3}})):
            try:
                load(*arguments)
            except Exception as exc:
                print(type(exc).__name__)
        assert load(filename="plain.xml", assets={{}}).ngeom == 1
        assert models._compiled._text is None and load("plain.xml").ngeom == 1
        models.compile_models(["__main__:Env"])
        mujoco.MjModel.from_xml_string("<mujoco/>")
        assert models._compiled._text is None
        # what MuJoCo warns of is told each time
        with open("warns.xml", "w") as file:
            file.write(plain.replace("<worldbody>", "<compiler settotalmass='2'/><worldbody>"))
        here.Env = env("warns.xml")
        seen, more = [], []
        mujoco.set_mju_user_warning(seen.append)
        models.compile_models(["__main__:Env"])
        assert not seen and models._compiled._text is not None
        load("warns.xml")
        mujoco.set_mju_user_warning(more.append)
        load("warns.xml")
        assert seen == more and models._compiled._text is not None
        mujoco.set_mju_user_warning(None)
        if seen:  # older versions have nothing against it
            load("warns.xml")
            assert seen == more and "settotalmass" in seen[0] and models._compiled._text is None
            with open("MUJOCO_LOG.TXT") as file:
                assert file.read().count("settotalmass") == 1
    """
    assert run_alone(code).stdout == "ValueError\nTypeError\nTypeError\n"


def test_who_has_put_something_else_in_the_place_of_loading_keeps_it():
    code = """
    import mujoco, gymnasium.envs.mujoco.hopper_v5
    from aioenv.worker.forkserver_warmup import compile_models

    def mine(filename, assets=None): ...

    mujoco.MjModel.from_xml_path = staticmethod(mine)
    compile_models(["gymnasium.envs.mujoco.hopper_v5:HopperEnv"])
    assert mujoco.MjModel.from_xml_path is mine
    """
    run_alone(code)
