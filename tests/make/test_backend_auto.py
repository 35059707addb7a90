"""`backend="auto"`: what it chooses, that it says so, and that the results are those of single envs."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
import aioenv.sync
from aioenv.core import choice
from aioenv.stats import NormalizeObservation, SharedRunningStats
from tests.kits.compare import assert_same
from tests.kits.counter_kit import Counter
from tests.kits.loop_kit import run_on
from tests.kits.process_kit import OF_PROCESSES
from tests.kits.version_kit import needs_mujoco_batch


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(choice, "_known", {})


def costs(monkeypatch, step_s, exchange_s=30e-6):
    """Let every env take this long to step, as if it had been measured."""
    measured = []

    async def measure(factory, start_timeout_s):
        measured.append(factory)
        return choice._Costs(step_s, exchange_s)

    monkeypatch.setattr(choice, "_measure", measure)
    monkeypatch.setattr(choice, "usable_cpus", lambda: 2)
    return measured


async def started(*args, **kwargs):
    async with aioenv.make_vec(*args, backend="auto", **kwargs) as envs:
        return envs.backend


@pytest.mark.parametrize(
    ("num_envs", "step_us", "backend"), [(4, 5, "in_process"), (4, 100, "workers"), (1, 1e4, "in_process")]
)
def test_single_envs_live_here_if_workers_would_save_less_than_they_cost(num_envs, step_us, backend, monkeypatch):
    measured = costs(monkeypatch, step_us * 1e-6)

    async def main():
        envs = aioenv.make_vec("Pendulum-v1", num_envs, backend="auto")
        assert envs.backend == "auto"
        async with envs:
            assert envs.backend == backend
            assert len(envs.workers) == (1 if backend == "in_process" else 2)
        assert await started("Pendulum-v1", num_envs) == backend
        assert len(measured) == 1, "an id is measured once"

    run_on("uvloop", main())


def test_an_env_is_measured_in_a_process_of_its_own(caplog):
    caplog.set_level(logging.INFO, "aioenv")

    async def main():
        assert await started("FrozenLake-v1", 1) == "in_process"
        (costs,) = choice._known.values()
        assert 0 < costs.step_s < 0.1 and 0 < costs.exchange_s < 0.1

    run_on("asyncio", main())
    (record,) = [record for record in caplog.records if "backend" in record.message]
    assert record.message.startswith('backend="auto": 1 x FrozenLake-v1 step in this process: a step of one env takes')


MUJOCO = [pytest.param(env_id, marks=needs_mujoco_batch) for env_id in ("HalfCheetah-v5", "InvertedPendulum-v5")]


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("env_id", ["CartPole-v1", *MUJOCO])
def test_a_native_version_has_the_results_of_single_envs(env_id, mode, caplog):
    caplog.set_level(logging.INFO, "aioenv")

    async def main():
        reference = SyncVectorEnv([lambda: gym.make(env_id)] * 3, autoreset_mode=mode)
        async with aioenv.make_vec(env_id, 3, backend="auto", autoreset_mode=mode) as envs:
            assert envs.backend == "native"
            assert_same(tuple(await envs.reset(seed=7)), reference.reset(seed=7))
            reference.action_space.seed(0)
            over = np.zeros(3, bool)
            for _ in range(100):
                if mode is AutoresetMode.DISABLED and over.any():
                    options = {"reset_mask": over}
                    assert_same(tuple(await envs.reset(options=dict(options))), reference.reset(options=dict(options)))
                actions = reference.action_space.sample()
                expected = reference.step(actions)
                assert_same(tuple(await envs.step(actions))[:4], expected[:4])
                over = expected[2] | expected[3]
        reference.close()

    run_on("uvloop", main())
    assert f'backend="auto": 3 x {env_id} step natively' in caplog.text


CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPole"


class HalfReward(CartPoleEnv):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward / 2, *rest


@pytest.fixture(scope="module")
def own_ids():
    vector = f"{CARTPOLE}VectorEnv"
    gym.register("NoLimit-v0", entry_point=f"{CARTPOLE}Env", vector_entry_point=vector)
    gym.register("Half-v0", entry_point=HalfReward, vector_entry_point=vector, max_episode_steps=500)
    yield
    for env_id in ("NoLimit-v0", "Half-v0"):
        del gym.registry[env_id]


@needs_mujoco_batch
@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("HalfCheetah-v5", {"ctrl_cost_weight": 0.5}),
        ("Walker2d-v5", {"terminate_when_unhealthy": False, "width": 64}),
        ("Humanoid-v5", {"exclude_current_positions_from_observation": False}),
    ],
)
def test_arguments_of_base_classes_are_those_of_a_native_version_too(env_id, kwargs):
    assert run_on("uvloop", started(env_id, 2, **kwargs)) == "native"


@needs_mujoco_batch
@pytest.mark.parametrize("kwargs", [{"num_threads": 1}, {"model": "ant.xml"}], ids=str)
def test_arguments_that_single_envs_lack_are_refused_by_them(kwargs):
    with pytest.raises(aioenv.WorkerStartError, match=f"unexpected keyword argument '{next(iter(kwargs))}'"):
        run_on("uvloop", started("Ant-v5", 2, **kwargs))


async def first_end(env, backend, **kwargs):
    """Balance two poles; return the step in which an episode ends (None: not in 510), and the last rewards."""
    async with aioenv.make_vec(env, 2, backend=backend, **kwargs) as envs:
        obs, _ = await envs.reset(seed=0)
        for number in range(1, 511):
            push = obs @ [0.05, 0.1, 1, 0.5] > 0
            obs, reward, terminated, truncated, _ = await envs.step(push.astype(np.int64))
            if (terminated | truncated).any():
                return number, reward.tolist()
    return None, reward.tolist()


@pytest.mark.parametrize("backend", ["workers", "auto"])
@pytest.mark.parametrize(
    ("env", "kwargs", "end", "reward"),
    [
        ("CartPole-v1", {"max_episode_steps": -1}, None, 1),
        ("CartPole-v1", {"max_episode_steps": None}, 500, 1),
        ("CartPole-v1", {"max_episode_steps": 7}, 7, 1),
        (gym.make("CartPole-v1", max_episode_steps=-1).spec, {}, None, 1),
        (gym.make("CartPole-v1", max_episode_steps=7).spec, {}, 7, 1),
        ("NoLimit-v0", {}, None, 1),
        ("Half-v0", {}, 500, 0.5),
    ],
)
def test_the_limit_and_the_class_are_those_of_single_envs(env, kwargs, end, reward, backend, own_ids, monkeypatch):
    costs(monkeypatch, 1e-6)
    assert run_on("uvloop", first_end(env, backend, **kwargs)) == (end, [reward, reward])


@pytest.mark.parametrize("limit", [0, 5.0, np.int64(5)])
def test_limits_that_single_envs_refuse_are_refused(limit, monkeypatch):
    costs(monkeypatch, 1e-6)
    with pytest.raises(aioenv.WorkerStartError, match="max_episode_steps"):
        run_on("uvloop", first_end("CartPole-v1", "auto", max_episode_steps=limit))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_options_of_one_reset_are_not_those_of_automatic_ones(mode):
    async def starts(backend):
        async with aioenv.make_vec("CartPole-v1", 3, backend=backend, autoreset_mode=mode) as envs:
            await envs.reset(seed=1, options={"low": -0.2, "high": -0.19})
            return [(await envs.step(np.zeros(3, int))).obs for _ in range(60)]

    assert_same(run_on("uvloop", starts("auto")), run_on("uvloop", starts("workers")))


SINGLE = {
    "wrappers": [lambda env: gym.wrappers.ClipReward(env, 0.0, 1.0)],
    "observation_mode": "different",
    "seed_plan": [1, 2, 3],
    "autoreset_options": {},
    "render_mode": "rgb_array",
}


@needs_mujoco_batch
def test_a_spec_with_a_render_mode_is_not_native():
    spec = gym.make("Hopper-v5", render_mode="rgb_array").spec
    assert run_on("uvloop", started(spec, 2)) == "workers"


def test_images_of_an_env_that_draws_itself_are_not_native():
    config = aioenv.RenderConfig(width=600, height=400)
    assert not isinstance(aioenv.make_vec("CartPole-v1", 3, backend="auto", render=config), aioenv.NativeVectorEnv)
    assert not isinstance(aioenv.make_vec("CartPole-v1", 3, backend="auto", pixels=config), aioenv.NativeVectorEnv)


@pytest.mark.parametrize("name", SINGLE)
def test_what_only_single_envs_have_is_not_native(name, monkeypatch):
    costs(monkeypatch, 1e-6)
    envs = aioenv.make_vec("CartPole-v1", 3, backend="auto", **{name: SINGLE[name]})
    assert not isinstance(envs, aioenv.NativeVectorEnv)


PROCESSES = {"num_workers": 2, **OF_PROCESSES}


@pytest.mark.parametrize("name", PROCESSES)
def test_what_only_processes_give_takes_workers(name, monkeypatch):
    measured = costs(monkeypatch, 1e-6)

    async def main():
        assert await started("CartPole-v1", 2, **{name: PROCESSES[name]}) == "workers"

    run_on("asyncio", main())
    assert not measured


def test_an_explicit_zero_is_this_process():
    async def main():
        assert await started("CartPole-v1", 2, num_workers=0) == "in_process"

    run_on("asyncio", main())


def test_a_function_is_never_called_here():
    here = []

    def make():
        here.append(1)
        return Counter()

    async def main():
        assert await started(make, 2) == "workers"

    run_on("asyncio", main())
    assert not here


def test_an_env_that_cannot_be_made_says_so():
    async def main():
        with pytest.raises(aioenv.WorkerStartError, match="unexpected keyword argument 'nonsense'"):
            await aioenv.make_vec("Pendulum-v1", 2, backend="auto", nonsense=1)

    run_on("asyncio", main())


class Odd(Counter):
    """Fails where `measure_step` steps it: with random actions, in another thread, or while a loop runs."""

    def __init__(self, why):
        super().__init__(10)
        self.why, self.thread = why, threading.get_ident()

    def step(self, action):
        if self.why == "action" and action != self.OK:
            raise ValueError(f"illegal action {action}")
        if self.why == "exit" and action != self.OK:
            os._exit(3)
        if self.why == "thread" and threading.get_ident() != self.thread:
            raise RuntimeError("made in another thread")
        if self.why == "loop":
            asyncio.run(asyncio.sleep(0))
        return super().step(action)


@pytest.mark.parametrize("why", ["action", "exit", "thread", "loop"])
def test_an_env_that_can_not_be_measured_steps_over_workers(why, caplog):
    caplog.set_level(logging.INFO, "aioenv")
    gym.register("Odd-v0", entry_point=Odd)

    async def main():
        async with aioenv.make_vec("Odd-v0", 2, backend="auto", why=why) as envs:
            assert envs.backend == "workers"
            await envs.reset()
            for _ in range(30):
                await envs.step(np.full(2, Counter.OK))

    try:
        run_on("asyncio", main())
    finally:
        del gym.registry["Odd-v0"]
    assert 'backend="auto": 2 x Odd-v0 step over workers: no step was measured: ' in caplog.text
    assert list(choice._known.values()) == [None], "it is tried once"


def test_steps_that_are_measured_do_not_count_in_statistics():
    with SharedRunningStats(2, live=True) as seen:

        async def main():
            wrap = partial(NormalizeObservation, stats=seen)
            async with aioenv.make_vec("MountainCar-v0", 2, backend="auto", wrappers=[wrap]) as envs:
                await envs.reset(seed=0)

        run_on("asyncio", main())
        assert seen.count == 2


def test_blocking_code_takes_it_too(monkeypatch):
    costs(monkeypatch, 1e-6)
    with aioenv.sync.make_vec("Pendulum-v1", 2, backend="auto") as envs:
        assert envs.backend == "in_process"
        envs.reset(seed=0)
        for _ in range(50):
            envs.step(np.zeros((2, 1), np.float32))


def test_a_cheap_run_over_workers_gets_one_line_of_advice(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "aioenv")
    monkeypatch.setattr(choice, "_CHEAP_STEP_S", 1.0)

    async def main(steps, **options):
        caplog.clear()
        async with aioenv.AsyncVectorEnv([Counter] * 2, **options) as envs:
            await envs.reset(seed=0)
            for _ in range(steps):
                await envs.step(np.zeros(2, int))
        return [record.message for record in caplog.records if "num_workers=0" in record.message]

    (line,) = run_on("uvloop", main(1200))
    assert "a step of all 2 envs took" in line
    assert not run_on("uvloop", main(100))
    assert not run_on("uvloop", main(1200, restart=aioenv.RestartPolicy()))
    assert not run_on("uvloop", main(1200, num_workers=0))
