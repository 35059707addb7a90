"""Recording: the video has one image a step, of the right envs, and plays after any error."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mujoco
import numpy as np
import pytest

import aioenv
from aioenv.cli import main
from aioenv.loops.record import TiledVideo, draw_labels, fps_of
from aioenv.rendering.cameras import source_view
from aioenv.rendering.config import refused_by_envs
from aioenv.rendering.images import parse_grid, tile
from aioenv.requirements import has_batch
from aioenv.state.render_source import CameraView
from tests.kits.mocap_kit import MocapEnv
from tests.kits.process_kit import environment
from tests.kits.video_kit import pictures

SMALL = aioenv.RenderConfig(32, 24, quality="fast")


def test_the_command(tmp_path, capfd, monkeypatch):
    (tmp_path / "my_policy.py").write_text("import numpy as np\ndef still(obs): return np.zeros((len(obs), 6))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    command = "record HalfCheetah-v5 --steps 6 --grid 1x2 --size 32x24 --camera track --policy my_policy:still".split()
    videos = []
    for backend in ([], *[["--backend", "native"]] * has_batch()):
        out = tmp_path / f"new{len(videos)}" / "x.mp4"
        assert main([*command, *backend, "--out", str(out)]) == 0
        output = capfd.readouterr().out
        assert "7 pictures" in output and str(out) in output
        videos.append(pictures(out, 24, 64))
        assert len(videos[-1]) == 7 and all(picture.std() > 10 for picture in videos[-1])
    assert all(np.array_equal(video, videos[0]) for video in videos)
    assert main(["record", "MountainCar-v0", "--backend", "native", "--out", str(tmp_path / "none.mp4")]) == 1
    assert "MountainCar-v0 has no vector_entry_point" in capfd.readouterr().err
    assert not (tmp_path / "none.mp4").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "gpu"], "invalid choice: 'gpu'"),
        (["--grid", "4"], "expected ROWSxCOLUMNS"),
        (["--policy", "nothing"], "expected MODULE:FUNCTION"),
        (["--policy", "math:nothing"], "there is no 'math:nothing'"),
        (["--policy", "math:pi"], "expected a function"),
        (["--seed", "-1"], "expected a whole number of at least 0"),
    ],
)
def test_wrong_arguments_of_the_command(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["record", "CartPole-v1", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fps", "1e9"], "fps: expected a positive number"),
        (["--size", "40000x4"], "width: expected an int from 1 to 16384"),
        (["--out", "x.gif"], "expected a file named *.mp4"),
    ],
)
def test_what_the_command_can_not_do_is_said_in_a_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["record", "CartPole-v1", *arguments]) == 1
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


class Frail(MocapEnv):
    """Its state is not finite from its third step on; in its fifth it raises."""

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.steps += 1
        if self.steps == 5:
            raise ValueError("broken")
        result = super().step(action)
        if self.steps >= 3:
            self.data.qpos[:] = np.nan
        return result


@pytest.mark.asyncio
async def test_states_that_are_not_finite_and_a_fault_leave_a_video_that_plays(tmp_path):
    with pytest.raises(aioenv.EnvError, match="broken"):
        await aioenv.record(Frail, tmp_path / "x.mp4", steps=20, num_envs=2, render=SMALL, num_workers=1)
    shown = pictures(tmp_path / "x.mp4", 24, 64)
    assert len(shown) == 5 and all(picture.std() > 5 for picture in shown)


@pytest.mark.asyncio
async def test_a_vector_env_of_ones_own(tmp_path):
    """Without `render=` the envs are asked for images between the steps; without autoreset, what is over is reset."""

    async def right(obs):
        assert obs.shape == (3, 4)
        return np.ones(3, int)

    kwargs = {"render_mode": "rgb_array", "autoreset_mode": "Disabled", "max_episode_steps": 3, "num_workers": 1}
    async with aioenv.make_vec("CartPole-v1", 3, **kwargs) as envs:
        done = await aioenv.record(envs, str(tmp_path / "x.mp4"), steps=6, policy=right, grid=(1, 2), fps=5)
        assert done == (tmp_path / "x.mp4", 7, 6)
        assert len(pictures(done.path, 400, 1200)) == 7
        assert (await envs.step(np.ones(3, int))).reward.all()  # it is still open
        with pytest.raises(TypeError, match="record: render, polcy: for envs that are made here"):
            await aioenv.record(envs, tmp_path / "y.mp4", steps=6, render=SMALL, polcy=right)


@pytest.mark.asyncio
async def test_a_policy_of_rollouts_is_one_of_recordings(tmp_path):
    def policy(obs, slots):
        assert slots.tolist() == [0, 1]
        return np.ones(2, int), {"value": obs[:, 0]}

    async with aioenv.make_vec("CartPole-v1", 2, render_mode="rgb_array", debug=True) as envs:
        await envs.reset(seed=0)
        await envs.rollout(policy, 2, groups=1)
        assert (await aioenv.record(envs, tmp_path / "x.mp4", steps=2, policy=policy)).pictures == 3


@pytest.mark.stress
def test_the_blocking_twin(tmp_path):
    done = aioenv.sync.record("HalfCheetah-v5", tmp_path / "x.mp4", steps=2, num_envs=1, render=SMALL)
    assert done.pictures == 3 and len(pictures(done.path, 24, 32)) == 3


@pytest.mark.asyncio
async def test_numbers_are_checked(tmp_path):
    wrong = [{"steps": 0}, {"num_envs": 0}, {"grid": (0, 2)}, {"fps": 0}, {"fps": "9"}, {"fps": np.inf}]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"record: .*expected a positive"):
            await aioenv.record("CartPole-v1", tmp_path / "x.mp4", **{"steps": 1, **arguments})
    for grid in (4, (2,), (1, 1, 1), "22"):
        with pytest.raises(ValueError, match="grid: expected how many rows and columns"):
            await aioenv.record("CartPole-v1", tmp_path / "x.mp4", steps=1, grid=grid)
    with pytest.raises(ValueError, match=r"out: expected a file named \*\.mp4"):
        await aioenv.record("CartPole-v1", tmp_path / "x.gif", steps=1)
    with pytest.raises(TypeError, match="policy: expected a function"):
        await aioenv.record("CartPole-v1", tmp_path / "x.mp4", steps=1, policy=3)
    with pytest.raises(ValueError, match="seed: expected an int from 0"):
        await aioenv.record("CartPole-v1", tmp_path / "x.mp4", steps=1, seed=-1)
    with pytest.raises(TypeError, match="seed: expected an int or None"):
        await aioenv.record("CartPole-v1", tmp_path / "x.mp4", steps=1, seed=[1, 2])
    with pytest.raises(TypeError, match="progress: expected a bool or a plain function"):
        await aioenv.record("CartPole-v1", tmp_path / "x.mp4", steps=1, progress=asyncio.sleep)
    done = await aioenv.record("CartPole-v1", tmp_path / "x.mp4", steps=1, num_envs=1, seed=np.int64(3))
    assert done.pictures == 2


@pytest.mark.asyncio
async def test_names_of_files_that_ffmpeg_takes_for_something_else(tmp_path, monkeypatch):
    """A protocol, an option, no format at all; and what is said when it is killed."""
    monkeypatch.chdir(tmp_path)
    picture = np.zeros((1, 4, 4, 3), np.uint8)
    for name in ("run: 1.mp4", "-x.mp4", "plain"):
        video = TiledVideo(Path(name))
        await video.write([picture])
        await video.close()
        assert len(pictures(tmp_path / name, 4, 4)) == 1
    video = TiledVideo(tmp_path / "killed.mp4")
    await video.write([picture])
    assert video._process is not None
    video._process.kill()
    with pytest.raises(OSError, match=r"killed\.mp4 could not be written: ffmpeg was killed by SIGKILL"):
        await video.close()


def test_how_fast_an_env_is_to_be_played():
    assert fps_of({"render_fps": 50}) == 50.0 and fps_of({"render_fps": np.float32(2.5)}) == 2.5
    assert [fps_of(metadata) for metadata in ({}, {"render_fps": None}, {"render_fps": 0}, {"render_fps": "x"})] == [
        20
    ] * 4


@pytest.mark.asyncio
async def test_what_is_missing_is_said(tmp_path, monkeypatch):
    async with aioenv.make_vec("CartPole-v1", 1) as envs:
        with pytest.raises(
            aioenv.RenderError, match='these envs give no images: make them with render_mode="rgb_array"'
        ):
            await aioenv.record(envs, tmp_path / "x.mp4", steps=1)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ImportError, match=r"pip install 'imageio\[ffmpeg\]'"):
        await aioenv.record("CartPole-v1", tmp_path / "x.mp4", steps=1)


@pytest.mark.stress
def test_what_is_killed_leaves_a_video_that_plays(tmp_path):
    out = tmp_path / "x.mp4"
    command = [sys.executable, "-m", "aioenv", "record", "HalfCheetah-v5", "--steps", "100000", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment())
    while not out.is_file() or out.stat().st_size < 10_000:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 30
    while True:  # ffmpeg ends when it sees the end of its input
        try:
            assert len(pictures(out, 240, 320)) > 10
            return
        except subprocess.CalledProcessError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_grids():
    assert parse_grid("4x12") == (4, 12)
    for text in ("4", "x4", "0x1", "-1x2", "ax2"):
        with pytest.raises(ValueError, match="ROWSxCOLUMNS"):
            parse_grid(text)
    images = np.arange(5 * 2 * 2 * 3, dtype=np.uint8).reshape(5, 2, 2, 3)
    assert np.array_equal(tile(images, (1, 2)), np.concatenate(images[:2], axis=1))
    assert tile(images, (3, 2)).shape == (6, 4, 3) and not tile(images, (3, 2))[4:, 2:].any()
    several = images[:4].reshape(2, 2, 2, 2, 3)
    assert np.array_equal(tile(several)[:, :4], np.concatenate(several[0], axis=1))


@pytest.mark.asyncio
async def test_cancelled_at_its_first_picture_the_video_is_finished(tmp_path, monkeypatch):
    loop, begun, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    opens = TiledVideo._open

    def slow(self, picture):
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(30)
        return opens(self, picture)

    monkeypatch.setattr(TiledVideo, "_open", slow)
    recording = asyncio.ensure_future(
        aioenv.record("HalfCheetah-v5", tmp_path / "x.mp4", steps=9, num_envs=1, render=SMALL, num_workers=1)
    )
    await begun.wait()
    recording.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await recording
    assert len(pictures(tmp_path / "x.mp4", 24, 32)) == 1


@pytest.mark.asyncio
async def test_cancelled_while_the_video_is_being_finished_it_is_finished_first(tmp_path, monkeypatch):
    loop, begun, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    finish = TiledVideo._close

    def slow(self):
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(30)
        finish(self)

    monkeypatch.setattr(TiledVideo, "_close", slow)
    async with aioenv.make_vec("HalfCheetah-v5", num_envs=1, render=SMALL, num_workers=1) as envs:
        recording = asyncio.ensure_future(aioenv.record(envs, tmp_path / "x.mp4", steps=2))
        await begun.wait()
        recording.cancel()
        loop.call_later(0.1, go.set)
        with pytest.raises(asyncio.CancelledError):
            await recording
        assert len(pictures(tmp_path / "x.mp4", 24, 32)) == 3


@pytest.mark.asyncio
async def test_a_step_that_fails_beside_the_video_is_not_complained_of_once_more(tmp_path, monkeypatch):
    complaints, failed = [], asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))

    async def step(actions):
        failed.set()
        raise RuntimeError("no step")

    async def write(self, batches, labels=()):
        await failed.wait()
        raise OSError("no room")

    monkeypatch.setattr(TiledVideo, "write", write)
    async with aioenv.make_vec("HalfCheetah-v5", 1, render=SMALL) as envs:
        monkeypatch.setattr(envs, "step", step)
        with pytest.raises(OSError, match="no room"):
            await aioenv.record(envs, tmp_path / "x.mp4", steps=3)
        gc.collect()
    assert complaints == []


@pytest.mark.asyncio
async def test_pictures_that_are_no_colours_or_change_their_size_are_refused(tmp_path):
    """They would be taken for others."""
    pictures_of = {"with 4": (4, np.uint8), "with 1": (1, np.uint8), "float32": (3, np.float32)}
    for got, (channels, dtype) in pictures_of.items():
        video = TiledVideo(tmp_path / "x.mp4")
        with pytest.raises(aioenv.RenderError, match=f"uint8 with three channels.*got .*{got}"):
            await video.write([np.zeros((1, 4, 4, channels), dtype)])
        await video.close()
    video = TiledVideo(tmp_path / "x.mp4")
    await video.write([np.zeros((1, 4, 4, 3), np.uint8)])
    with pytest.raises(aioenv.RenderError, match=r"of one size: expected \(4, 4, 3\), got \(4, 8, 3\)"):
        await video.write([np.zeros((1, 4, 8, 3), np.uint8)])
    await video.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
async def test_labels_are_the_slot_and_the_return_of_the_episode_that_is_shown(mode, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("aioenv.loops.record.draw_labels", lambda images, texts: told.append(texts) or images)
    kwargs = {"render_mode": "rgb_array", "autoreset_mode": mode, "max_episode_steps": 2, "num_workers": 1}
    counted = []
    async with aioenv.make_vec("CartPole-v1", 2, **kwargs) as envs:
        done = await aioenv.record(envs, tmp_path / "x.mp4", steps=4, labels=True, progress=counted.append)
    returns = {"NextStep": [0, 1, 2, 0, 1], "SameStep": [0, 1, 0, 1, 0], "Disabled": [0, 1, 0, 1, 0]}[mode]
    assert told == [[f"slot {slot}  return {total:.1f}" for slot in range(2)] for total in returns]
    assert done.pictures == 5 and counted == [1, 2, 3, 4]


def test_labels_are_drawn_at_the_top_of_each_image():
    images = np.full((2, 90, 160, 3), 128, np.uint8)
    drawn = draw_labels(images, ["slot 0  return 1.0", "slot 1  return 1.0"])
    assert drawn.shape == images.shape and drawn.dtype == np.uint8 and (images == 128).all()
    for image in drawn:
        assert image.max() > 240 and image.min() < 16 and (image[24:] == 128).all()
    assert (drawn[0] != drawn[1]).any()
    assert draw_labels(np.zeros((1, 2, 30, 40, 3), np.uint8), ["x"]).shape == (1, 30, 80, 3)


FIXED = '<camera name="still" pos="0 -3 1" xyaxes="1 0 0 0 0 1"/>'
FOLLOWS = '<camera name="behind" mode="trackcom" pos="0 -3 1" xyaxes="1 0 0 0 0 1"/>'


@pytest.mark.parametrize(("cameras", "expected"), [(FIXED, -1), (FOLLOWS, 0), (FIXED + FOLLOWS, 1)])
def test_the_camera_that_moves_with_a_body_is_found(cameras, expected):
    model = mujoco.MjModel.from_xml_string(
        f"<mujoco><worldbody><body><freejoint/><geom size='1'/>{cameras}</body></worldbody></mujoco>"
    )
    view = dict(source_view(model, CameraView(-1, (("distance", 3.0),)), "tracking"))
    assert view["fixedcamid"] == expected
    config = aioenv.RenderConfig(camera="tracking")
    assert not config.by_camera and not refused_by_envs(config)  # the env's own view is as good


def test_the_command_makes_720p_with_labels_and_a_camera_that_follows(tmp_path, capfd, monkeypatch):
    asked = {}

    async def spy(env, out, **kwargs):
        asked.update(kwargs)
        return aioenv.loops.record.Recording(out, 1, 0)

    monkeypatch.setattr("aioenv.cli.record.record", spy)
    for options, size, camera, labels in (
        ([], (640, 360), "tracking", True),
        (["--grid", "3x3"], (426, 240), "tracking", True),
        (["--grid", "1x1", "--camera", "-1", "--no-labels"], (1280, 720), -1, False),
        (["--size", "32x24", "--camera", "track"], (32, 24), "track", True),
    ):
        assert main(["record", "HalfCheetah-v5", "--out", str(tmp_path / "x.mp4"), *options]) == 0
        render = asked["render"]
        assert ((render.width, render.height), render.camera, asked["labels"]) == (size, camera, labels)
