"""The sync facade: a gymnasium.vector.VectorEnv that blocks."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
import threading
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import aioenv
from aioenv import sync
from aioenv.sync.portal import Portal
from aioenv.testing import FaultyEnv, leak_check
from tests.kits.counter_kit import Counter
from tests.kits.process_kit import run_alone


def test_the_same_results_as_gymnasium():
    factories = [lambda: gym.make("CartPole-v1")] * 3
    reference = SyncVectorEnv(factories)
    with sync.VectorEnv(factories, num_workers=2) as envs:
        assert isinstance(envs, gym.vector.VectorEnv)
        assert envs.observation_space == reference.observation_space
        obs, info = envs.reset(seed=1)
        expected, _ = reference.reset(seed=1)
        assert np.array_equal(obs, expected) and info == {}
        reference.action_space.seed(1)
        for _ in range(100):
            actions = reference.action_space.sample()
            for mine, theirs in zip(envs.step(actions)[:4], reference.step(actions)[:4], strict=True):
                assert np.array_equal(mine, theirs)
        assert envs.np_random_seed == reference.np_random_seed
        assert envs.get_attr("gravity") == (9.8,) * 3
        envs.set_attr("gravity", [1, 2, 3])
        assert envs.call("gravity") == (1, 2, 3)
        assert envs.call_at(1, "gravity") == 2
    assert envs.closed
    envs.close()
    with pytest.raises(aioenv.ClosedError):
        envs.reset()
    reference.close()


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (aioenv.AsyncVectorEnv, sync.VectorEnv),
        (aioenv.RenderPool, sync.RenderPool),
        (aioenv.make_vec, sync.make_vec),
        (aioenv.evaluate, sync.evaluate),
        (aioenv.record, sync.record),
        (aioenv.EnvCreator.metadata, sync.env_metadata),
    ],
)
def test_twins_have_the_same_methods_and_arguments(theirs, ours):
    def arguments(function):
        return {
            name: (p.kind, p.default)
            for name, p in inspect.signature(function).parameters.items()
            if name not in ("self", "creator")
        }

    assert arguments(ours) == arguments(theirs)
    if not inspect.isclass(theirs):
        return
    of_instances = {"observation_space", "action_space", "single_observation_space", "single_action_space"}
    of_instances |= {"model", "state_spec", "state_size", "num_workers", "devices"}
    assert public(theirs) - public(ours) <= of_instances
    for name in public(theirs) & public(ours) - {"close"}:  # which is Gymnasium's, with any keywords
        method = inspect.getattr_static(theirs, name)
        if inspect.isfunction(method):
            assert arguments(getattr(ours, name)) == arguments(method), name


@pytest.mark.skipif(not hasattr(gym.wrappers.vector, "RecordVideo"), reason="Gymnasium has it from 1.2.1 on")
def test_gymnasiums_vector_wrappers(tmp_path):
    envs = sync.make_vec("CartPole-v1", 2, render_mode="rgb_array", num_workers=1)
    video = gym.wrappers.vector.RecordVideo(
        envs, str(tmp_path / "videos"), video_length=5, step_trigger=lambda step: step == 0
    )
    wrapped = gym.wrappers.vector.RecordEpisodeStatistics(gym.wrappers.vector.NormalizeObservation(video))
    wrapped.reset(seed=0)
    seen = 0
    for _ in range(60):
        *_, info = wrapped.step(np.ones(2, int))
        seen += int(np.sum(info.get("_episode", 0)))
    assert seen >= 2
    wrapped.close()
    assert envs.closed and list(tmp_path.glob("videos/*.mp4"))


@pytest.mark.parametrize("num_workers", [None, 2])
def test_gymnasiums_record_video_takes_native_ones(tmp_path, num_workers):
    images = aioenv.RenderConfig(32, 24, quality="fast")
    envs = sync.make_vec("InvertedPendulum-v5", 2, backend="native", render=images, num_workers=num_workers)
    assert envs.render_mode == "rgb_array"
    folder = tmp_path / "videos"
    video = gym.wrappers.vector.RecordVideo(envs, str(folder), video_length=3, step_trigger=lambda step: step == 0)
    video.reset(seed=0)
    for _ in range(5):
        video.step(np.zeros((2, 1), np.float32))
    video.close()
    assert list(folder.glob("*.mp4"))


def test_event_driven():
    with sync.make_vec(Counter, 4, num_workers=2) as envs:
        envs.send_reset(seed=0)
        counts = np.zeros(4, int)
        for ready in envs.ready(min_slots=2):
            counts[ready.slots] += 1
            again = ready.slots[counts[ready.slots] < 4]
            if len(again):
                envs.send(np.zeros(len(again), int), again)
        assert counts.tolist() == [4] * 4
        with pytest.raises(aioenv.NoAsyncCallError):
            envs.recv()


def test_works_while_a_loop_runs_on_the_callers_thread():
    async def main():
        with sync.make_vec("CartPole-v1", 2) as envs:
            return envs.reset(seed=0)[0].shape

    assert asyncio.run(main()) == (2, 4)


def test_calling_from_its_own_loop_thread_raises():
    with sync.make_vec("CartPole-v1", 1) as envs:
        envs.reset(seed=0)

        def from_inside():
            with pytest.raises(aioenv.LoopError, match="wait for itself"):
                envs.step(np.zeros(1, int))
            return "raised"

        assert envs._portal.run(from_inside) == "raised"


def test_a_failed_start_leaves_nothing():
    def fails():
        raise RuntimeError("no")

    with pytest.raises(aioenv.WorkerStartError, match="RuntimeError: no"):
        sync.VectorEnv([fails])


def test_a_loop_thread_whose_start_is_interrupted_ends(monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        signal.raise_signal(signal.SIGINT)

    with leak_check():
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sync.VectorEnv([Counter])


def test_a_forgotten_one_is_closed_when_it_is_collected():
    envs = sync.make_vec("CartPole-v1", 1)
    envs.reset(seed=0)
    del envs
    gc.collect()


@pytest.mark.parametrize("backend", ["workers", "native"])
def test_one_that_is_forgotten_in_a_cycle_closes_its_envs(backend, tmp_path):
    class Closing(gym.Wrapper):
        def close(self):
            (tmp_path / "closed").touch()
            super().close()

    more = {"wrappers": [Closing]} if backend == "workers" else {}
    envs = sync.make_vec("CartPole-v1", 1, backend=backend, **more)
    envs.reset(seed=0)
    envs.itself = envs  # as a model has its envs, and a callback of the model's the model
    del envs
    gc.collect()  # without a warning that workers were killed
    assert (tmp_path / "closed").exists() is (backend == "workers")


@pytest.mark.parametrize("kind", [sync.VectorEnv, sync.AsyncVectorEnv])
def test_it_is_a_vector_env_by_name(kind):
    assert gym.vector.VectorEnv in kind.__bases__  # skrl looks no further


def test_gymnasiums_make_vec_makes_ours():
    gym.register("Ours-v0", vector_entry_point=partial(sync.make_vec, "CartPole-v1", autoreset_mode="SameStep"))
    try:
        envs = gym.make_vec("Ours-v0", 3, num_workers=2, max_episode_steps=5)
    finally:
        gym.registry.pop("Ours-v0")
    with envs:
        assert isinstance(envs, sync.VectorEnv) and len(envs.workers) == 2 and envs.spec.id == "Ours-v0"
        assert envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.SAME_STEP
        envs.reset(seed=0)
        assert [envs.step(np.arange(3) % 2).truncated.all() for _ in range(5)] == [False] * 4 + [True]


def test_a_forgotten_one_does_not_keep_the_program():
    code = """
from aioenv import sync
envs = sync.make_vec("CartPole-v1", 2)
envs.reset(seed=0)
print(*[w.pid for w in envs.workers])
"""
    done = run_alone(code)
    assert not done.stderr and len(done.stdout.split()) == 2


def test_forgotten_ones_do_not_keep_the_program_after_an_interrupt_at_its_end():
    code = """
import gc, os, signal, time
import gymnasium
from aioenv import sync

PROGRAM = os.getpid()

class Interrupts(gymnasium.Wrapper):
    def close(self):
        os.kill(PROGRAM, signal.SIGINT)
        time.sleep(0.5)

gc.disable()  # only the end of the program collects them
for _ in range(2):
    envs = sync.VectorEnv([lambda: Interrupts(gymnasium.make("CartPole-v1"))])
    envs.itself = envs
del envs
print("end")
"""
    done = run_alone(code)
    assert done.stdout == "end\n" and "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize("way", ["blocking", "awaited"])
def test_a_thread_that_outlives_the_main_one(way):
    code = """
import asyncio, sys, threading
import aioenv, aioenv.sync

def blocking():
    with aioenv.sync.make_vec("CartPole-v1", 2) as envs:
        envs.reset(seed=0)
        print(envs.step([0, 0]).reward)

async def awaited():
    async with aioenv.make_vec("CartPole-v1", 2) as envs:
        await envs.reset(seed=0)
        print((await envs.step([0, 0])).reward)

def main():
    threading.main_thread().join()
    blocking() if sys.argv[1] == "blocking" else aioenv.run(awaited())

threading.Thread(target=main).start()
"""
    done = run_alone(code, way)
    assert (done.stdout, done.stderr) == ("[1. 1.]\n", "")


def test_an_interrupted_wait_cancels_and_loses_nothing():
    portal = Portal()
    waiting, cancelled = threading.Event(), threading.Event()

    async def wait_for_ever():
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def interrupt():
        waiting.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # as Ctrl-C does

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        portal.call(wait_for_ever)
    assert cancelled.is_set()
    thread.join()
    portal.close()
    portal.close()
    with pytest.raises(aioenv.ClosedError):
        portal.call(wait_for_ever)


@pytest.mark.parametrize(("close", "returncode"), [({}, 0), ({"grace_s": 0}, -signal.SIGTERM)])
def test_close_gives_envs_the_time_that_it_is_told_to(close, returncode):
    envs = sync.VectorEnv([FaultyEnv.factory("slow", "close")])
    worker = envs._envs._env_info.members[0].worker
    envs.close(**close)
    assert worker.returncode == returncode


def rollouts(envs, policy):
    return envs.rollout(policy, 3)


def episodes(envs, policy):
    return [*envs.episodes(policy, 2)]


@pytest.mark.parametrize("run", [rollouts, episodes])
def test_a_policy_that_closes_ends_what_asked_it(run):
    envs = sync.VectorEnv([FaultyEnv] * 2)
    envs.reset()

    def policy(obs):
        envs.close()
        return np.zeros(len(obs), np.int64)

    with pytest.raises(aioenv.ClosedError):
        run(envs, policy)


@pytest.mark.parametrize("run", [rollouts, episodes])
def test_closed_by_another_thread_while_a_policy_thinks(run):
    envs = sync.VectorEnv([FaultyEnv] * 2)
    envs.reset()
    asked, closed, raised = threading.Event(), threading.Event(), []

    def policy(obs):
        asked.set()
        closed.wait()
        return np.zeros(len(obs), np.int64)

    def work():
        try:
            run(envs, policy)
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    asked.wait()
    envs.close()
    closed.set()
    thread.join()
    assert isinstance(raised[0], aioenv.ClosedError)


def test_what_a_portal_has_not_done_when_it_is_closed_is_refused():
    """Whether it had begun, or came too late to be heard."""
    portal = Portal()
    begun, raised = threading.Event(), []

    async def wait_for_ever():
        begun.set()
        await asyncio.Event().wait()

    def work():
        try:
            portal.call(wait_for_ever)
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    prepared, late = portal.prepare(wait_for_ever), portal.prepare(wait_for_ever)
    portal.register(late)  # as far as `post` gets before it sends
    portal.close()
    thread.join()
    late._send(late._start)
    prepared.post()
    for call in (prepared, late):
        assert call.wait(10)
        with pytest.raises(aioenv.ClosedError):
            call.result()
    assert isinstance(raised[0], aioenv.ClosedError)
    with pytest.raises(aioenv.ClosedError):
        portal.post(print)
