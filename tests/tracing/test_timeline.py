"""The timeline: what is in the file, in every circumstance, and what the command makes of it."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

import aioenv
from aioenv import sync
from aioenv.cli import main
from aioenv.cli.trace_view import Span, beside_policy, overlap, read
from aioenv.testing import leak_check
from aioenv.tracing import timeline as timelines
from aioenv.tracing import track as rings
from aioenv.tracing import track as tracks
from aioenv.tracing.timeline import atomic_write

BALL = "<mujoco><worldbody><light pos='0 0 3'/><body><freejoint/><geom size='1'/></body></worldbody></mujoco>"


class Fragile(gym.Env):
    """Raises at action 1, kills its process at action 2; tells its environment."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if action == 1:
            raise ValueError("as it was told")
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def variable(self, name):
        return os.environ.get(name)


def fragile(num_envs=2, num_workers=2, **options):
    return aioenv.AsyncVectorEnv([Fragile] * num_envs, num_workers=num_workers, **options)


def lines_of(spans):
    lines = {}
    for span in spans:
        lines.setdefault(span.line, []).append(span)
    return lines


def steps_of(spans, name="step"):
    return [span.step for span in spans if span.name == name]


def check_each_line(spans):
    """Times run forward, and a line does one thing at a time, but for the loop, which also works in a policy's time."""
    for line, mine in lines_of(spans).items():
        assert all(span.begin_s <= span.end_s for span in mine)
        alone = [s for s in mine if line != "loop" or s.name == "policy"]
        assert all(a.end_s <= b.begin_s + 2e-9 for a, b in pairwise(alone)), line


def test_images_of_a_step_are_drawn_while_the_next_one_is_made(tmp_path):
    """Real MuJoCo, real OpenGL. No step ends before the images of the last are there, none of which is begun sooner."""
    path, gate = tmp_path / "run.json", tmp_path / "gate"
    os.mkfifo(gate)

    class Gated(HalfCheetahEnv):
        def step(self, action):
            if action[0]:
                gate.read_bytes()
            return super().step(action)

    async def at_gate():
        while True:
            try:
                return os.open(gate, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # no env waits there yet
                await asyncio.sleep(0.001)

    async def run():
        render = aioenv.RenderConfig(width=16, height=16, quality="fast", workers=1)
        async with aioenv.AsyncVectorEnv([Gated, HalfCheetahEnv], num_workers=1, render=render) as envs:
            await envs.reset(seed=0)
            await envs.render()
            (painter,) = envs._session._pool.pids
            with envs.trace(path):
                os.kill(painter, signal.SIGSTOP)
                await envs.step(np.zeros((2, 6), np.float32))
                for _ in range(3):
                    step = asyncio.ensure_future(envs.step(np.ones((2, 6), np.float32)))
                    writer = await at_gate()
                    os.kill(painter, signal.SIGCONT)
                    await envs.render()
                    os.kill(painter, signal.SIGSTOP)
                    os.close(writer)
                    await step
                os.kill(painter, signal.SIGCONT)
                await envs.render()

    aioenv.run(run())
    spans = read(path)
    check_each_line(spans)
    lines = lines_of(spans)
    assert list(lines) == ["loop", "wait for envs", "wait for images", "worker 0: slots 0-1", "render worker 0"]
    assert steps_of(lines["worker 0: slots 0-1"]) == [1, 2, 3, 4]
    assert steps_of(lines["render worker 0"], "render") == [1, 2, 3, 4]
    # from the file's own numbers
    events = json.loads(path.read_text())["traceEvents"]
    step, render = ({e["args"]["step"]: e for e in events if e["name"] == n} for n in ("step", "render"))
    for number in (1, 2, 3):
        span, after = render[number], step[number + 1]
        assert after["ts"] < span["ts"] and span["ts"] + span["dur"] < after["ts"] + after["dur"]
    total = sum(span["dur"] for span in render.values())
    assert overlap(spans) == pytest.approx(((total - render[4]["dur"]) / 1e6, total / 1e6))


def test_images_that_are_observations_are_in_it(tmp_path):
    async def run():
        pixels = aioenv.RenderConfig(width=16, height=16, quality="fast", workers=1)
        async with aioenv.make_vec("InvertedPendulum-v5", num_envs=2, num_workers=1, pixels=pixels) as envs:
            with envs.trace(tmp_path / "run.json"):
                await envs.reset(seed=0)
                for _ in range(3):
                    await envs.step(np.zeros((2, 1), np.float32))

    aioenv.run(run())
    lines = lines_of(read(tmp_path / "run.json"))
    assert steps_of(lines["render worker 0"], "render") == [0, 1, 2, 3]


def test_clocks_of_all_processes_agree(tmp_path):
    """A worker steps after it was sent the step, and before its reply is handled."""

    async def run():
        async with aioenv.make_vec("CartPole-v1", num_envs=4, num_workers=2) as envs:
            await envs.reset(seed=0)
            with envs.trace(tmp_path / "run.json") as trace:
                for _ in range(10):
                    await envs.step(np.zeros(4, np.int64))
            assert trace.stopped
            await envs.step(np.zeros(4, np.int64))  # it is not recorded

    aioenv.run(run())
    spans = read(tmp_path / "run.json")
    check_each_line(spans)
    lines = lines_of(spans)
    waits = lines["wait for envs"]
    assert [wait.step for wait in waits] == list(range(1, 11))
    for line in ("worker 0: slots 0-1", "worker 1: slots 2-3"):
        steps = [span for span in lines[line] if span.name == "step"]
        assert [span.step for span in steps] == list(range(1, 11))
        for step, wait in zip(steps, waits, strict=True):
            assert wait.begin_s < step.begin_s < step.end_s < wait.end_s
    assert len([span for span in lines["loop"] if span.name == "policy"]) == 9


def test_resets_rollouts_calls_and_envs_that_draw_themselves(tmp_path):
    async def run():
        render = aioenv.RenderConfig(width=8, height=8)
        async with aioenv.make_vec("CartPole-v1", num_envs=4, num_workers=2, render=render) as envs:
            with envs.trace(tmp_path / "run.json"):
                await envs.reset(seed=0)
                await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 3, groups=2)
                await envs.call("get_wrapper_attr", "spec")
                await envs.render()
                envs.send([0, 0], [0, 1])
                await envs.recv()

    aioenv.run(run())
    spans = read(tmp_path / "run.json")
    check_each_line(spans)
    worker = lines_of(spans)["worker 0: slots 0-1"]
    assert steps_of(worker) == [1, 1, 2, 2, 3, 3, 4]  # a group each, and what was sent
    assert 0 in steps_of(worker, "reset") and steps_of(worker, "call") and steps_of(worker, "draw")[:4] == [0, 0, 1, 1]


@pytest.mark.parametrize("action", [1, 2])
def test_after_a_fault_the_file_is_there(tmp_path, action):
    async def run():
        async with fragile() as envs:
            await envs.reset(seed=0)
            with envs.trace(tmp_path / "run.json"):
                await envs.step([0, 0])
                await envs.step([0, action])

    with pytest.raises((aioenv.EnvError, aioenv.WorkerDied)):
        aioenv.run(run())
    lines = lines_of(read(tmp_path / "run.json"))
    assert steps_of(lines["worker 0: slot 0"]) == [1, 2]
    assert steps_of(lines["worker 1: slot 1"]) == ([1, 2] if action == 1 else [1])


def test_a_worker_that_is_started_again_goes_on_in_its_line(tmp_path):
    async def run():
        async with fragile(restart=aioenv.RestartPolicy()) as envs:
            await envs.reset(seed=0)
            with envs.trace(tmp_path / "run.json"):
                for action in (0, 2, 0, 0):
                    await envs.step([0, action])

    aioenv.run(run())
    spans = read(tmp_path / "run.json")
    check_each_line(spans)
    lines = lines_of(spans)
    assert steps_of(lines["worker 0: slot 0"]) == [1, 2, 3, 4]
    assert steps_of(lines["worker 1: slot 1"]) == [1, 2, 3, 4]  # what it died over is sent again, by its number


def test_what_hangs_is_in_it(tmp_path):
    async def run():
        async with fragile() as envs:
            await envs.reset(seed=0)
            with envs.trace(tmp_path / "run.json"):
                await envs.step([0, 0])
                os.kill(envs.workers[1].pid, signal.SIGSTOP)
                with pytest.raises(aioenv.StepTimeout):
                    await envs.step([0, 0], timeout_s=0.05)
            os.kill(envs.workers[1].pid, signal.SIGCONT)

    aioenv.run(run())
    spans = read(tmp_path / "run.json")
    check_each_line(spans)
    lines = lines_of(spans)
    assert steps_of(lines["worker 0: slot 0"]) == [1, 2] and lines["worker 0: slot 0"][-1].name != "no reply yet"
    last = lines["worker 1: slot 1"][-1]
    assert (last.name, last.step) == ("no reply yet", 2) and last.end_s - last.begin_s > 0.04
    assert steps_of(lines["worker 1: slot 1"]) == [1]


def test_waits_that_began_before_it(tmp_path):
    async def run():
        async with fragile() as envs:
            await envs.reset(seed=0)
            os.kill(envs.workers[0].pid, signal.SIGSTOP)
            step = asyncio.create_task(envs.step([0, 0]))
            await asyncio.sleep(0)
            with envs.trace(tmp_path / "run.json"):
                os.kill(envs.workers[0].pid, signal.SIGCONT)
                await step

    aioenv.run(run())
    assert all(span.begin_s >= 0 for span in read(tmp_path / "run.json"))


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="takes Linux")
def test_what_goes_through_the_block_goes_on_though_the_file_is_not_written(blocking, caplog):
    class Mine(Exception):
        pass

    async def run():
        async with fragile() as envs:
            with pytest.raises(Mine), envs.trace("/dev/full"):
                raise Mine
            with pytest.raises(OSError, match="No space"), envs.trace("/dev/full"):
                pass

    if blocking:
        with sync.AsyncVectorEnv([Fragile] * 2) as envs:
            with pytest.raises(Mine), envs.trace("/dev/full"):
                raise Mine
            with pytest.raises(OSError, match="No space"), envs.trace("/dev/full"):
                pass
    else:
        aioenv.run(run())
    assert caplog.text.count("the timeline could not be written") == 1


def test_two_timelines_take_two_files(tmp_path):
    async def run():
        async with fragile() as one, fragile() as two:
            with one.trace(tmp_path / "run.json"):
                (tmp_path / "link.json").symlink_to("run.json")
                for name in ("run.json", "link.json"):
                    with pytest.raises(RuntimeError, match=r"another timeline is written to .* its own file"):
                        two.trace(tmp_path / name)
                with two.trace(tmp_path / "two.json"):
                    pass
            with one.trace(os.devnull), two.trace(os.devnull):  # which keeps nothing anyway
                pass

    async def in_turn():
        async with fragile() as one, fragile() as two:
            for envs in (one, two, one):
                with envs.trace(tmp_path / "run.json"):
                    await envs.reset()

    aioenv.run(run())
    aioenv.run(in_turn())
    assert len(steps_of(read(tmp_path / "run.json"), "reset")) == 2


def test_closing_ends_it(tmp_path):
    async def run():
        async with fragile() as envs:
            envs.trace(tmp_path / "run.json")
            await envs.reset(seed=0)

    aioenv.run(run())
    assert len(steps_of(read(tmp_path / "run.json"), "reset")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_misuse(tmp_path):
    envs = fragile()
    with pytest.raises(RuntimeError, match="start it first"):
        asyncio.run(asyncio.wait_for(_trace(envs, tmp_path), 10))

    async def run():
        async with fragile() as envs:
            with pytest.raises(FileNotFoundError, match=r"nowhere/run\.json'$"):  # what was asked for, not a draft
                envs.trace(tmp_path / "nowhere" / "run.json")
            with pytest.raises(IsADirectoryError, match=rf"{tmp_path}'$"):
                envs.trace(tmp_path)
            trace = envs.trace(tmp_path / "run.json")
            assert json.loads((tmp_path / "run.json").read_text())["traceEvents"] == []
            with pytest.raises(RuntimeError, match=r"is being collected; stop\(\) it first"):
                envs.trace(tmp_path / "other.json")
            trace.stop()
            trace.stop()
            with envs.trace(tmp_path / "other.json"):
                await envs.reset()
        with pytest.raises(aioenv.ClosedError):
            envs.trace(tmp_path / "run.json")

    aioenv.run(run())
    assert len(steps_of(read(tmp_path / "other.json"), "reset")) == 2


async def _trace(envs, path):
    envs.trace(path / "run.json")


def test_the_variable_traces_all_that_is_started(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    monkeypatch.setenv(timelines.VARIABLE, str(path))
    monkeypatch.setattr(timelines, "_used", {})

    async def run():
        async with fragile() as envs:
            await envs.reset(seed=0)
            assert set(await envs.call("variable", timelines.VARIABLE)) == {None}
        native = aioenv.make_vec("CartPole-v1", num_envs=2, backend="native")
        async with native as envs:
            await envs.reset(seed=0)
            await envs.step(np.zeros(2, np.int64))

    aioenv.run(run())
    assert {span.line for span in read(path)} == {"loop", "wait for envs", "worker 0: slot 0", "worker 1: slot 1"}
    assert len([s for s in read(tmp_path / "run-2.json") if s.name == "wait for envs"]) == 2


def test_spare_envs_have_lines_of_their_own(tmp_path):
    path = tmp_path / "run.json"

    async def run():
        async with aioenv.make_vec("CartPole-v1", num_envs=2, max_episode_steps=2, spare_envs=True) as envs:
            with envs.trace(path):
                await envs.reset(seed=0)
                for _ in range(4):  # two steps, the begin of the next episode in the spare env, and its first step
                    await envs.step(np.zeros(2, np.int64))

    aioenv.run(run())
    lines = lines_of(read(path))
    for slot in (0, 1):
        assert [len(steps_of(lines[f"{role} {slot}: slot {slot}"])) for role in ("worker", "spare worker")] == [2, 1]


@pytest.mark.parametrize("kind", ["workers", "native", "pool"])
def test_where_the_variables_timeline_can_not_be_written_nothing_is_left(kind, tmp_path, monkeypatch):
    monkeypatch.setenv(timelines.VARIABLE, str(tmp_path / "nowhere" / "run.json"))

    async def run():
        made = aioenv.RenderPool(BALL) if kind == "pool" else aioenv.make_vec("CartPole-v1", backend=kind)
        with leak_check(timeout_s=10):
            with pytest.raises(FileNotFoundError) as caught:
                async with made:
                    pass
            assert "AIOENV_TRACE=" in caught.value.__notes__[0]
            with pytest.raises(aioenv.ClosedError):
                await made
        await made.close()

    aioenv.run(run())


def test_render_pools_and_blocking_code(tmp_path):
    states = np.zeros((6, mujoco.mj_stateSize(mujoco.MjModel.from_xml_string(BALL), mujoco.mjtState.mjSTATE_PHYSICS)))
    with sync.RenderPool(BALL, workers_per_device=2, state_spec=mujoco.mjtState.mjSTATE_PHYSICS) as pool:
        with pool.trace(tmp_path / "pool.json") as trace:
            for _ in range(3):
                pool.render(states, width=8, height=8)
        assert trace.stopped and trace.path == tmp_path / "pool.json"
    lines = lines_of(read(tmp_path / "pool.json"))
    assert list(lines) == ["loop", "render worker 0", "render worker 1"]
    assert list(dict.fromkeys(steps_of(lines["render worker 1"], "render"))) == [1, 2, 3]  # in pieces
    with sync.make_vec("CartPole-v1", num_envs=2, num_workers=1) as envs:
        trace = envs.trace(tmp_path / "envs.json")
        envs.reset(seed=0)
        envs.step(np.zeros(2, np.int64))
    trace.stop()  # closing did it
    assert steps_of(read(tmp_path / "envs.json")) == [1]


def test_a_ring_keeps_the_newest_rows(monkeypatch):
    monkeypatch.setattr(rings, "CAPACITY", 4)
    with mmap.mmap(-1, rings.RING_BYTES) as memory:
        ring = rings.Ring(memory)
        for i in range(3):
            ring.append("step", 0, i, i, i + 0.5)
        assert [row[2:] for row in ring.read_new()] == [(0, 0, 0.5), (1, 1, 1.5), (2, 2, 2.5)]
        for i in range(3, 10):
            ring.append("step", 0, i, i, i + 0.5)
        assert [row[2] for row in ring.read_new()] == [6, 7, 8, 9]
        assert list(ring.read_new()) == []
        ring.close()


def test_an_unstopped_trace_ends_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(timelines, "MAX_SPANS", 500)
    monkeypatch.setattr(tracks, "COLLECT_EVERY", 50)

    async def run():
        async with fragile() as envs:
            trace = envs.trace(tmp_path / "run.json")
            await envs.reset(seed=0)
            while not trace.stopped:
                await envs.step([0, 0])
            await envs.step([0, 0])

    aioenv.run(run())
    assert 500 < len(read(tmp_path / "run.json")) < 2000


def test_a_trace_of_a_vector_env_in_this_process_ends_by_itself_too(tmp_path, monkeypatch):
    monkeypatch.setattr(timelines, "MAX_SPANS", 100)
    monkeypatch.setattr(timelines, "COLLECT_EVERY", 20)
    with sync.make_vec("CartPole-v1", num_envs=2, backend="native") as envs:
        trace = envs.trace(tmp_path / "run.json")
        envs.reset(seed=0)
        for _ in range(200):
            envs.step(np.zeros(2, np.int64))
        assert trace.stopped
    assert 100 < len([s for s in read(tmp_path / "run.json") if s.name == "wait for envs"]) <= 120


# ------------------------------------------------------------ its file


def test_it_is_written_where_it_was_begun(tmp_path, monkeypatch):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trace = timelines.Trace("run.json", [], lambda: None)
    trace.add_loop_span("policy", 1.0, 2.0)
    monkeypatch.chdir(elsewhere)
    trace.stop()
    assert len(read(tmp_path / "run.json")) == 1 and not list(elsewhere.iterdir())


def test_a_link_stays_one(tmp_path):
    (file := tmp_path / "run-3.json").write_text("old")
    (link := tmp_path / "latest.json").symlink_to("run-3.json")
    with atomic_write(link) as new:
        new.write("new")
        assert file.read_text() == "old"
    assert link.is_symlink() and file.read_text() == "new"
    with pytest.raises(ValueError, match="mine"), atomic_write(link) as new:
        new.write("half")
        raise ValueError("mine")
    assert file.read_text() == "new" and len(list(tmp_path.iterdir())) == 2


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"), atomic_write(pipe):  # it has no reader
        pass
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        trace = timelines.Trace(pipe, [], lambda: None)
        trace.add_loop_span("policy", 1.0, 2.0)
        trace.stop()
        assert len(json.loads(os.read(reader, 1 << 16))["traceEvents"]) == 4
    finally:
        os.close(reader)
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


# ------------------------------------------------------------ the command


@pytest.fixture
def timeline(tmp_path):
    """A timeline of two workers, 20 steps, in which images of step t are drawn in the first half of step t + 1."""
    path = tmp_path / "run.json"
    trace = timelines.Trace(path, [], lambda: None)
    trace.tracks = [tracks.Track(trace, name, None, None) for name in ("worker 0: slot 0", "render worker 0")]
    for track, name, offset, length in ((trace.tracks[0], "step", 0, 10), (trace.tracks[1], "render", 10, 5)):
        spans = track.spans[name] = tracks.Spans()
        for step in range(20):
            begin = trace._began + 1 + (10 * step + offset) / 1e3
            spans.add(begin, begin + length / 1e3, step)
    trace.stop()
    return path


def test_the_command_tells_what_overlapped(timeline, capsys):
    assert overlap(read(timeline)) == pytest.approx((0.095, 0.1))
    assert main(["trace", str(timeline)]) == 0
    out = capsys.readouterr().out
    assert "render: 0.0950 s of 0.1000 s (95.0%) while the next step was made" in out
    assert "worker 0: slot 0  step" in out


def test_steps_beside_the_policy():
    """Of two workers' steps, those parts count in which the loop does not wait."""
    spans = [
        Span("loop", "policy", 0.0, 1.0, 0),
        Span("wait for envs", "wait for envs", 1.0, 1.5, 0),
        Span("loop", "policy", 1.5, 2.0, 1),
        Span("worker 0: slot 0", "step", 0.25, 0.75, 0),
        Span("worker 1: slot 1", "step", 0.5, 1.75, 0),
        Span("worker 0: slot 0", "step", 1.25, 1.5, 1),
        Span("worker 1: slot 1", "step", 2.0, 3.0, 1),
    ]
    assert beside_policy(spans) == pytest.approx((0.5 + 0.75, 3.0))
    assert beside_policy([]) == (0.0, 0.0)


class Announced(Fragile):
    """Says in a file that a step is nearly done."""

    def step(self, action):
        time.sleep(0.02)
        Path(os.environ["ANNOUNCED"]).touch()
        return super().step(0)


def test_steps_that_run_while_the_loop_learns_are_beside_the_policy(tmp_path, capsys):
    done = tmp_path / "done"

    async def run():
        async with aioenv.AsyncVectorEnv([Announced], worker_env={"ANNOUNCED": str(done)}) as envs:
            await envs.reset(seed=0)
            with envs.trace(tmp_path / "run.json"):
                for _ in range(5):
                    envs.send(np.zeros(1, np.int64))
                    while not done.exists():  # learning
                        pass
                    await envs.recv()
                    done.unlink()

    aioenv.run(run())
    within, total = beside_policy(read(tmp_path / "run.json"))
    assert total > 0.1 and within > 0.5 * total
    assert main(["trace", str(tmp_path / "run.json")]) == 0
    assert f"step: {within:.4f} s of {total:.4f} s" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"a": 1}')
    assert main(["trace", str(tmp_path / "other.json")]) == 1
    assert "expected a timeline as envs.trace() writes it" in capsys.readouterr().err
    for text in ('{"traceEvents": [{"ph": "X", "tid": 0, "name": "a", "ts": 0, "dur": 0, "args": null}]}', "[[]]", "{"):
        (tmp_path / "other.json").write_text(text)
        assert main(["trace", str(tmp_path / "other.json")]) == 1
        assert "expected a timeline" in capsys.readouterr().err
    (tmp_path / "other.json").write_bytes(b"\xff" * 1000)
    assert main(["trace", str(tmp_path / "other.json")]) == 1
    assert len(capsys.readouterr().err) < 300
    assert main(["trace", str(tmp_path / "none.json")]) == 1
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    assert main(["trace", str(tmp_path / "empty.json")]) == 0
    assert "an empty timeline" in capsys.readouterr().out
    line = '{"ph": "M", "tid": 0, "name": "thread_name", "args": {"name": "loop"}}'
    (tmp_path / "short.json").write_text(
        f'{{"traceEvents": [{line}, {{"ph": "X", "tid": 0, "name": "send", "ts": 5, "dur": 0}}]}}'
    )
    assert main(["trace", str(tmp_path / "short.json")]) == 0
    assert "send" in capsys.readouterr().out
