"""Images of envs that edit what OpenGL has a copy of, or make themselves other models: those of `mujoco.Renderer`."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial

import mujoco
import numpy as np
import pytest

import aioenv
from aioenv.rendering import contexts
from aioenv.state.render_source import read_state
from tests.kits.snapshot_kit import Bench, record
from tests.rendering.edits_kit import EDITS, MODELS, SIZE, Edited, compiled, hills, truth, wrong

STRESS = pytest.mark.stress
# both backends for each way would take long, and what draws is the same
WAYS = [("render", "egl"), ("pixels", "osmesa"), ("pooled", "egl")]
WAYS += [
    pytest.param(how, backend, marks=STRESS)
    for how, backend in (("render", "osmesa"), ("pixels", "egl"), ("pooled", "osmesa"))
]
EVERY_WAY = pytest.mark.parametrize(("how", "backend"), WAYS)
TWO_WAYS = pytest.mark.parametrize("how", ["render", "pixels", pytest.param("pooled", marks=STRESS)])
OTHER_TWO_WAYS = pytest.mark.parametrize("how", ["pooled", "pixels", pytest.param("render", marks=STRESS)])
EITHER_POOL = pytest.mark.parametrize("how", ["pooled", pytest.param("render", marks=STRESS)])
ZEROS = partial(np.zeros, dtype=np.float64)


class Recording:
    """A vector env, what it shows after each reset and step, and what `mujoco.Renderer` shows of the same states."""

    def __init__(self, factories, how, backend, **arguments):
        edits = {"edits": arguments.pop("edits")} if "edits" in arguments else {}
        workers = None if how == "pixels" else 1
        config = aioenv.RenderConfig(**SIZE, camera="side", backend=backend, workers=workers, **edits)
        self._backend = backend
        self._draws = how == "render"
        kind = {"render": config} if self._draws else {"pixels": config}
        self.envs = aioenv.AsyncVectorEnv(factories, num_workers=1, **kind, **arguments)
        self.images, self._exports = [], []

    async def look(self, result):
        images = await self.envs.render() if self._draws else result.obs
        self.images += list(images)
        self._exports.extend(result.info["seen"] if "seen" in result.info else await self.envs.call("export"))
        return result

    async def reset(self, **arguments):
        return await self.look(await self.envs.reset(**arguments))

    async def step(self):
        return await self.look(await self.envs.step(ZEROS((self.envs.num_envs, 1))))

    @property
    def wrong(self):
        """For each result the part of the pixels that are wrong, by slot."""
        parts = np.array(wrong(self.images, truth(self._exports, self._backend)))
        return parts.reshape(-1, self.envs.num_envs)


@pytest.mark.asyncio
@EVERY_WAY
async def test_what_is_edited_at_a_reset_shows(how, backend):
    """Each slot edits something else, and all are drawn by one worker in turn."""
    factories = [partial(Edited, name) for name in EDITS]
    recording = Recording(factories, how, backend)
    async with recording.envs:
        for seed in (3, 4):
            await recording.reset(seed=seed)
        await recording.step()
        # as it was before
        await recording.reset(seed=3, options={"edit": False})
    assert dict(zip(EDITS, recording.wrong.max(axis=0), strict=True)) == dict.fromkeys(EDITS, 0)
    assert len({image.tobytes() for image in recording.images}) > len(EDITS)


@pytest.mark.asyncio
@EVERY_WAY
async def test_models_that_are_made_anew_show(how, backend):
    """Of the same sizes and of others, beside an env that edits nothing."""
    names = [*MODELS, "both", "nothing"]
    factories = [partial(Edited, name) for name in names]
    recording = Recording(factories, how, backend)
    async with recording.envs:
        for seed in (3, 4):
            await recording.reset(seed=seed)
        await recording.step()
    assert dict(zip(names, recording.wrong.max(axis=0), strict=True)) == dict.fromkeys(names, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("gl", [True, False], ids=["lists", "without PyOpenGL"])
async def test_contents_that_do_not_fit_into_a_context_are_uploaded_again(gl, monkeypatch):
    monkeypatch.setattr(contexts, "_MAX_BYTES", 0)
    if not gl:
        monkeypatch.setattr(contexts, "gl_functions", lambda: None)
        monkeypatch.setattr(contexts, "gl_functions", lambda: None)
    names = ["hills", "hills", "picture", "tip", "tip", *(["floor", "floor"] * gl)]
    recording = Recording([partial(Edited, name) for name in names], "pixels", "egl", debug=True)
    async with recording.envs:
        await recording.reset(seed=3)
        await recording.step()
    assert not recording.wrong.any()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("render", "NextStep"),
        ("pooled", "SameStep"),
        pytest.param("pixels", "SameStep", marks=STRESS),
        pytest.param("render", "SameStep", marks=STRESS),
        pytest.param("pixels", "NextStep", marks=STRESS),
        pytest.param("pooled", "NextStep", marks=STRESS),
    ],
)
async def test_episodes_that_end(how, mode):
    """Also the last observation of an episode, which is of the model before."""
    names = ["hills", "recompiled", "more"]
    recording = Recording([partial(Edited, name, length=2) for name in names], how, "egl", autoreset_mode=mode)
    last = Recording([partial(Edited, name) for name in names], how, "egl")
    async with recording.envs, last.envs:
        await recording.reset(seed=3)
        await last.reset(seed=3)
        finals = []
        for _ in range(4):
            result = await recording.step()
            finals += [obs for obs in result.info.get("final_obs", ()) if obs is not None]
        await last.step()
        await last.step()
    assert not recording.wrong.any()
    if mode == "SameStep" and how != "render":
        assert len(finals) == 6
        assert [np.array_equal(a, b) for a, b in zip(finals[:3], last.images[-3:], strict=True)] == [True] * 3


@pytest.mark.asyncio
@TWO_WAYS
async def test_edits_in_steps_show_if_that_is_asked_for(how):
    factories = [partial(Edited, name, late=(2, 3)) for name in ("hills", "picture", "fog", "recompiled")]
    recording = Recording(factories, how, "egl", edits="each step")
    async with recording.envs:
        await recording.reset(seed=3)
        for _ in range(4):
            await recording.step()
    assert not recording.wrong.any()


@pytest.mark.asyncio
@OTHER_TWO_WAYS
async def test_edits_in_unexamined_steps_are_told_and_show_from_then_on(how, caplog):
    """By default they are looked for at resets, and now and then in between."""
    caplog.set_level(logging.WARNING)
    recording = Recording([partial(Edited, "hills", late=range(2, 50), tells=True)], how, "egl")
    async with recording.envs:
        await recording.reset(seed=3)
        for _ in range(6):
            await recording.step()
    assert not recording.wrong[-2:].any()
    assert len([record for record in caplog.records if 'edits="each step"' in record.getMessage()]) == 1


@pytest.mark.asyncio
@TWO_WAYS
async def test_an_edit_just_before_a_reset_is_told(how, caplog):
    caplog.set_level(logging.WARNING)
    recording = Recording([partial(Edited, "picture", late=(5,), tells=True)], how, "egl")
    async with recording.envs:
        await recording.reset(seed=3)
        for _ in range(5):
            await recording.step()
        assert 'edits="each step"' not in caplog.text
        await recording.reset(seed=3)
        for _ in range(5):
            await recording.step()
    assert 'edits="each step"' in caplog.text
    assert not recording.wrong[6:].any()


@pytest.mark.asyncio
@OTHER_TWO_WAYS
async def test_edits_of_calls_show_and_may_be_looked_for_never(how):
    recording = Recording([partial(Edited, "hills")], how, "egl")
    blind = Recording([partial(Edited, "hills")], how, "egl", edits="never")
    async with recording.envs, blind.envs:
        for each in (recording, blind):
            await each.reset(seed=3)
            await each.envs.call("edit")
            await each.step()
    assert not recording.wrong.any()
    assert blind.wrong.all()


@pytest.mark.asyncio
@EITHER_POOL
async def test_a_render_worker_that_is_started_again_has_the_models(how):
    policy = aioenv.RestartPolicy(backoff_s=0.01)
    names = ["hills", "recompiled", "more"]
    recording = Recording([partial(Edited, name) for name in names], how, "egl", restart=policy)
    async with recording.envs:
        await recording.reset(seed=3)
        await recording.step()
        session = recording.envs._session
        (worker,) = session.render_workers
        worker.kill("by a test")
        await recording.step()
        await recording.step()
    assert not recording.wrong.any()


@pytest.mark.asyncio
async def test_a_state_has_the_hills_that_it_is_of_or_is_refused():
    """A state has small height fields, and neither large ones nor meshes."""
    async with aioenv.AsyncVectorEnv([partial(Edited, "hills")], render=aioenv.RenderConfig(**SIZE)) as envs:
        await envs.reset(seed=3)
        states = await envs.get_state()
        first = await envs.step(ZEROS((1, 1)))
        shown = await envs.render()
        await envs.reset(seed=4)
        await envs.set_state(states)
        assert np.array_equal((await envs.step(ZEROS((1, 1)))).obs, first.obs)
        assert np.array_equal(await envs.render(), shown)
    for how in ("tip", "large"):
        async with aioenv.AsyncVectorEnv([partial(Edited, how)]) as envs:
            await envs.reset(seed=3)
            states = await envs.get_state()
            await envs.set_state(states)
            await envs.reset(seed=4)
            with pytest.raises(aioenv.AioenvError, match="height fields or meshes are others"):
                await envs.set_state(states)


class Mortal(Edited):
    def pid(self):
        return os.getpid()


@pytest.mark.asyncio
@pytest.mark.parametrize("resets", [1, 2])
@pytest.mark.parametrize("names", [("hills", "recompiled"), ("more", "hills")], ids="-".join)
async def test_the_last_observation_before_a_restart_is_of_the_old_model(names, resets):
    """The worker that takes over numbers its models by itself."""
    config = aioenv.RenderConfig(**SIZE, camera="side", backend="egl", workers=1)
    factories = [partial(Mortal, name) for name in names]
    options = {"autoreset_mode": "SameStep", "restart": aioenv.RestartPolicy()}
    async with aioenv.AsyncVectorEnv(factories, num_workers=1, pixels=config, **options) as envs:
        for seed in range(resets):
            await envs.reset(seed=seed)
        last = (await envs.step(ZEROS((2, 1)))).obs.copy()
        os.kill((await envs.call("pid"))[0], signal.SIGKILL)
        result = await envs.step(ZEROS((2, 1)))
    assert result.truncated.all()
    assert np.array_equal(np.stack(result.info["final_obs"]), last)


class Uncounted(Edited):
    """Remembers nothing but its model and what is simulated."""

    def _edit(self):
        hills(self.model, self.np_random)

    def step(self, action):
        mujoco.mj_step(self.model, self.data)
        return self.data.qpos[:1].copy(), 0.0, False, False, {}


def test_an_env_is_not_resumed_on_other_hills():
    with Bench([partial(Uncounted, "large")]) as bench:
        history = record(bench, 3, (1,))
    with Bench([partial(Uncounted, "large")]) as fresh:
        operations, _, before, after = history[-1]
        (why,) = fresh.service.resume([0], before, operations, after)
    assert why is not None and "fields of the model of Uncounted, which it edits, differ" in why


class Blinded(Edited):
    """Has no camera in every second episode."""

    episodes = 0

    def _edit(self):
        self.episodes += 1
        if self.episodes % 2:
            self.model = compiled()
        else:
            body = "<body><freejoint/><geom size='1'/></body>"
            self.model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>")
        self.data = mujoco.MjData(self.model)


@pytest.mark.asyncio
@EITHER_POOL
async def test_a_model_without_the_camera_is_told_and_the_next_one_drawn(how):
    recording = Recording([partial(Blinded, "nothing")], how, "egl")
    async with recording.envs:
        for _ in range(2):
            await recording.reset(seed=3)
            with pytest.raises(aioenv.AioenvError, match="no camera 'side'"):
                await recording.look(await recording.envs.reset(seed=3))
        await recording.reset(seed=3)
    assert not recording.wrong.any()


def test_a_state_of_another_size_is_told_without_numpys_error():
    model = compiled()
    with pytest.raises(ValueError, match=r"expected a state of 2 numbers, .* got one of \d+$") as caught:
        read_state(model, mujoco.MjData(model), np.empty(2), int(mujoco.mjtState.mjSTATE_FULLPHYSICS))
    assert caught.value.__suppress_context__


def test_what_is_not_one_of_the_words_is_refused():
    with pytest.raises(ValueError, match=r"edits: expected one of .*'each step'.*got 'always'"):
        aioenv.RenderConfig(edits="always")
