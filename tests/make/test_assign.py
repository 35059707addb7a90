"""Assignment of work to workers. `test_ce_…`: lines of what older systems' `construct_envs` did, without its traps."""

from __future__ import annotations

import copy
import os
from functools import partial

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.assign import Assignment, construct_envs, plan_workers
from aioenv.process.launch import START_METHODS


def shards(plan):
    return [slot.episodes for slot in plan.slots]


# ------------------------------------------------------------ the CE lines


def test_ce_round_robin_in_order():
    plan = plan_workers(3, mode="eval", episodes=range(8))
    assert shards(plan) == [(0, 3, 6), (1, 4, 7), (2, 5)]


def test_ce_empty_shards_dropped_and_fewer_episodes_than_envs_shrink():
    plan = plan_workers(5, mode="eval", episodes=["a", "b"], num_workers=4)
    assert (plan.num_envs, plan.num_workers, shards(plan)) == (2, 2, [("a",), ("b",)])


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 20])
@pytest.mark.parametrize("scene", [None, lambda episode: episode % 3, lambda episode: 0, lambda episode: episode])
def test_ce_no_episode_is_duplicated_or_lost(n, scene):
    plan = plan_workers(n, mode="eval", episodes=range(13), scene=scene)
    dealt = shards(plan)
    assert all(dealt)
    assert sorted(episode for shard in dealt for episode in shard) == list(range(13))
    assert plan.num_envs == min(n, 13)


def test_ce_config_not_mutated():
    config = {"seed": 1, "env": {"episodes": ["all"]}}
    before = copy.deepcopy(config)

    def configure(own, slot):
        own["env"]["episodes"].extend(slot.episodes)

    class Env:
        def __init__(self, config):
            config["seed"] += 1  # envs change theirs, too
            self.config = config

    plan = plan_workers(2, mode="eval", episodes=[10, 11, 12])
    factories = construct_envs(config, Env, plan, configure=configure)
    for _ in range(2):
        assert [make().config for make in factories] == [
            {"seed": 2, "env": {"episodes": ["all", 10, 12]}},
            {"seed": 2, "env": {"episodes": ["all", 11]}},
        ]
    assert config == before


@pytest.mark.parametrize("displays", [":0,1", "0,1", ":0,:1", [0, 1], ["0", ":1"], (":0", ":1")])
def test_ce_displays_tiled(displays):
    plan = plan_workers(5, displays=displays)
    assert [env["DISPLAY"] for env in plan.worker_env] == [":0", ":1", ":0", ":1", ":0"]


def test_ce_displays_with_hosts_and_screens_and_none():
    assert plan_workers(1, displays="host:0.1").worker_env == ({"DISPLAY": "host:0.1"},)
    assert plan_workers(2, displays=None).worker_env == ({}, {})


def test_ce_ranks_unique_and_derived():
    plan = plan_workers(1000, seed=7)
    ranks, seeds = [slot.rank for slot in plan.slots], plan.seeds
    assert len({*ranks, *seeds}) == 2000
    assert all(0 <= number < 2**31 for number in (*ranks, *seeds))
    np.random.seed(0)
    assert plan_workers(1000, seed=7) == plan  # whatever the global generator
    assert plan_workers(1000, seed=8).seeds != seeds
    assert plan_workers(10, seed=7).seeds == seeds[:10]


def test_ce_ranks_of_evaluation():
    plan = plan_workers(3, mode="eval", seed=7)
    assert [(slot.rank, slot.seed) for slot in plan.slots] == [(0, 0), (1, 1), (2, 2)]
    assert plan.entropy is None


def test_ce_fresh_ranks_can_be_drawn_again():
    plan = plan_workers(4)
    assert plan.seeds != plan_workers(4).seeds
    assert plan_workers(4, seed=plan.entropy) == plan


def test_ce_unknown_mode():
    with pytest.raises(ValueError, match="mode: expected one of 'train', 'eval', got 'test'"):
        plan_workers(2, mode="test")


# ------------------------------------------------------------ scenes, devices, workers


def test_scenes_with_enough_of_them_stay_whole():
    episodes = ["a1", "b1", "a2", "c1", "b2", "a3"]
    plan = plan_workers(2, mode="eval", episodes=episodes, scene=lambda episode: episode[0])
    assert shards(plan) == [("a1", "a2", "a3", "c1"), ("b1", "b2")]
    assert [slot.scenes for slot in plan.slots] == [("a", "c"), ("b",)]


def test_scenes_that_are_too_few_are_shared():
    episodes = ["a1", "b1", "a2", "a3", "a4"]
    plan = plan_workers(5, mode="eval", episodes=episodes, scene=lambda episode: episode[0])
    assert shards(plan) == [("a1", "a4"), ("b1",), ("a2",), ("a3",)]
    assert all(len(slot.scenes) == 1 for slot in plan.slots)


def test_scenes_without_episodes():
    assert [slot.scenes for slot in plan_workers(2, scenes="x y z".split()).slots] == [("x", "z"), ("y",)]
    assert [slot.scenes for slot in plan_workers(3, scenes=["x", "y"]).slots] == [("x",), ("y",), ("x",)]


@pytest.mark.parametrize("devices", [2, [0, 1], "0,1", ("0", 1)])
def test_devices_tiled(devices):
    plan = plan_workers(5, num_workers=3, devices=devices)
    assert [slot.worker for slot in plan.slots] == [0, 0, 1, 1, 2]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in plan.worker_env] == ["0", "1", "0"]
    assert [env["MUJOCO_EGL_DEVICE_ID"] for env in plan.worker_env] == ["0", "1", "0"]


def test_devices_to_draw_on():
    plan = plan_workers(2, egl_devices=[3])
    assert plan.worker_env == ({"MUJOCO_EGL_DEVICE_ID": "3"},) * 2
    plan = plan_workers(2, devices=[1, 2], egl_devices=[0])
    assert plan.worker_env[1] == {"CUDA_VISIBLE_DEVICES": "2", "MUJOCO_EGL_DEVICE_ID": "0"}
    assert plan_workers(1, devices=["GPU-8f2c-01"]).worker_env == ({"CUDA_VISIBLE_DEVICES": "GPU-8f2c-01"},)


def test_a_plan_prints_as_a_table():
    plan = plan_workers(3, mode="eval", episodes=range(7), num_workers=2, displays=":0,1", devices=[4])
    assert str(plan) == (
        "eval: 3 slots on 2 workers\n"
        "slot  worker  rank  seed  episodes  DISPLAY  CUDA_VISIBLE_DEVICES  MUJOCO_EGL_DEVICE_ID\n"
        "0     0       0     0     3         :0       4                     4\n"
        "1     0       1     1     2         :0       4                     4\n"
        "2     1       2     2     2         :1       4                     4"
    )
    assert str(plan_workers(1, seed=5)).startswith("train: 1 slot on 1 worker, drawn from seed=5\nslot  worker  rank")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs: expected a positive int, got 0"),
        ({"num_envs": True}, "num_envs"),
        ({"num_workers": 0}, "num_workers: expected a positive int"),
        ({"episodes": []}, "episodes: expected at least one, got none"),
        ({"episodes": "abc"}, "episodes: expected a sequence, got 'abc'"),
        ({"episodes": 3}, "episodes: expected a sequence"),
        ({"scenes": []}, "scenes: expected at least one"),
        ({"scenes": ["a"], "episodes": [1]}, "scenes: expected None beside episodes"),
        ({"scene": len}, "scene: expected episodes"),
        ({"displays": ""}, "displays: expected numbers or names"),
        ({"displays": ":0,,1"}, "displays"),
        ({"displays": []}, "displays: expected at least one"),
        ({"displays": ["left"]}, "displays"),
        ({"devices": 0}, "devices: expected a positive int"),
        ({"devices": True}, "devices"),
        ({"devices": [-1]}, "devices: expected how many, or ids or UUIDs"),
        ({"devices": [[0]]}, "devices"),
        ({"egl_devices": ["GPU-1"]}, "egl_devices: expected how many, or ids with"),
        ({"seed": -1}, "seed: expected an int from 0"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_workers(**{"num_envs": 2, **arguments})


def test_construct_envs_wants_someone_to_hand_out_episodes():
    with pytest.raises(ValueError, match="the plan has episodes that envs must be told"):
        construct_envs({}, dict, plan_workers(1, episodes=[1]))
    with pytest.raises(
        TypeError, match=r"config: expected one that copy.deepcopy can copy, got generator: cannot pickle"
    ):
        construct_envs((i for i in ()), dict, plan_workers(1))
    with pytest.raises(TypeError, match="plan: expected a WorkerPlan, as plan_workers gives it, got 4"):
        construct_envs({}, dict, 4)


def test_construct_envs_seeds_what_can_be_seeded_and_takes_another_config():
    class Env:
        def __init__(self, config):
            self.config = config

        def seed(self, rank):
            self.rank = rank

    plan = plan_workers(2, seed=1)
    envs = [make() for make in construct_envs({}, Env, plan, configure=lambda own, slot: ("new", slot.slot))]
    assert [(env.config, env.rank) for env in envs] == [(("new", i), plan.slots[i].rank) for i in range(2)]


# ------------------------------------------------------------ in workers


class Teller(gym.Env):
    """Observes nothing; tells the environment variables that its process began with, and its config."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config):
        self.config = config

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def tell(self):
        return os.getpid(), os.environ.get("DISPLAY"), os.environ.get("MUJOCO_EGL_DEVICE_ID"), self.config


def hand_out(config, slot: Assignment):
    return {**config, "episodes": slot.episodes}


async def _each_worker_has_its_own_variables(start):
    plan = plan_workers(3, mode="eval", episodes=range(5), num_workers=2, displays=":0,1", egl_devices=[0, 1])
    make = construct_envs({"task": "t"}, Teller, plan, configure=hand_out)
    async with aioenv.AsyncVectorEnv(
        make, num_workers=plan.num_workers, worker_env=plan.worker_env, start=start
    ) as envs:
        told = await envs.call("tell")
    assert [(display, egl) for _, display, egl, _ in told] == [(":0", "0"), (":0", "0"), (":1", "1")]
    assert [config["episodes"] for *_, config in told] == [(0, 3), (1, 4), (2,)]
    assert told[0][0] == told[1][0] != told[2][0]


@pytest.mark.parametrize("start", START_METHODS)
def test_ce_each_worker_has_its_variables_before_any_import(start):
    aioenv.run(_each_worker_has_its_own_variables(start))


def test_variables_are_there_when_modules_are_imported(tmp_path, monkeypatch):
    (tmp_path / "nosy.py").write_text("import os\nDISPLAY = os.environ.get('DISPLAY')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Nosy(Teller):
        def tell(self):
            import nosy

            return nosy.DISPLAY

    async def tell(start):
        plan = plan_workers(2, displays=":7,8")
        factories = [partial(Nosy, None)] * 2
        async with aioenv.AsyncVectorEnv(
            factories, num_workers=2, worker_env=plan.worker_env, preload=["nosy"], start=start
        ) as envs:
            return list(await envs.call("tell"))

    for start in START_METHODS:
        assert aioenv.run(tell(start)) == [":7", ":8"]


@pytest.mark.parametrize(
    ("worker_env", "message"),
    [
        ([{}], "expected one mapping for each of 2 workers, got 1; pass num_workers= too"),
        ("A=1", "expected a mapping, or a list of one a worker"),
        ([{}, "A=1"], "expected a mapping for each worker, got 'A=1'"),
        ({"A": 1}, "expected names and values as str, got 'A': 1"),
    ],
)
def test_worker_env_is_checked(worker_env, message):
    with pytest.raises(ValueError, match=message):
        aioenv.AsyncVectorEnv([partial(Teller, None)] * 2, num_workers=2, worker_env=worker_env)
