"""`RolloutCollector`: rollouts, modes, weights, seeds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from aioenv.collector import collector_pool
from tests.collector.collector_kit import Linear, RandomPolicy, assert_equal, joined, rounds, weights

COUNTS = (1, 2, 3)


class Episodes(gym.Env):
    """Shows its slot's seed and the step; episodes are as long as the seed says."""

    observation_space = spaces.Dict({"seed": spaces.Box(0, 1e6, (), np.int64), "step": spaces.Discrete(100)})
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.t = -1 if seed is None else seed, 0
        return self._obs(), {"options": dict(options or {})}

    def step(self, action):
        self.t += 1
        return self._obs(), 1.0, self.t > self.seed % 5, False, {"t": self.t}

    def _obs(self):
        return {"seed": np.array(self.seed, np.int64), "step": np.int64(self.t)}


def zeros(obs):
    return np.zeros(len(obs["step"]), np.int64)


@pytest.mark.asyncio
async def test_rollouts_are_those_of_a_vector_env():
    async with aioenv.make_vec("CartPole-v1", 5, num_workers=0) as envs:
        await envs.reset(seed=3)
        policy = Linear()
        expected = [await envs.rollout(policy, 40, 1) for _ in range(3)]
    async with aioenv.RolloutCollector(
        "CartPole-v1", 5, policy=Linear, steps=40, num_collectors=1, seed=3
    ) as collector:
        got = [await anext(collector) for _ in range(3)]
        assert collector.single_observation_space == envs.single_observation_space
        assert collector.single_action_space == envs.single_action_space
    for mine, theirs in zip(got, expected, strict=True):
        assert isinstance(mine, aioenv.CollectedRollout)
        for name in ("obs", "actions", "reward", "terminated", "truncated", "valid", "last_obs", "next_obs"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
        assert mine.extras.keys() == theirs.extras.keys()
        assert [*mine.infos] == [*theirs.infos]
        assert mine.obs.flags.writeable and mine.reward.flags.owndata is False
        assert (mine.collector, mine.weights_version, mine.restarted) == (0, 0, False)
        assert mine.slots.tolist() == [0, 1, 2, 3, 4]
    assert "collector=0 weights_version=0 steps=40" in repr(got[0])


@pytest.mark.asyncio
async def test_in_sync_mode_any_number_of_collectors_gives_the_same():
    found = []
    for count in COUNTS:
        async with aioenv.RolloutCollector(
            "CartPole-v1", 6, policy=Linear, steps=60, num_collectors=count, mode="sync", seed=7
        ) as collector:
            every = await rounds(collector, 4)
            assert [{r.weights_version for r in one} for one in every] == [{0}, {1}, {2}, {3}]
            found.append([joined(one) for one in every])
    for other in found[1:]:
        for got, expected in zip(other, found[0], strict=True):
            assert_equal(got, expected)
    assert (np.diff([one["score"].mean() for one in found[0]]) != 0).all(), "the weights count"


@pytest.mark.asyncio
async def test_generators_belong_to_slots():
    found = []
    for count in COUNTS:
        async with aioenv.RolloutCollector(
            "CartPole-v1", 6, policy=RandomPolicy, steps=30, num_collectors=count, mode="sync", seed=7
        ) as collector:
            found.append([joined(one) for one in await rounds(collector, 2, update=False)])
    assert_equal(found[1][0], found[0][0])
    assert_equal(found[2][1], found[0][1])
    actions = found[0][0]["actions"]
    assert all((actions[:, 0] != actions[:, slot]).any() for slot in range(1, 6))
    assert (actions != found[0][1]["actions"]).any()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.asyncio
async def test_a_seed_plan_is_by_slot_among_all(num_workers):
    plan = [*range(100, 116)]
    for count in COUNTS:
        async with aioenv.RolloutCollector(
            Episodes,
            6,
            policy=lambda: zeros,
            steps=20,
            num_collectors=count,
            num_workers=num_workers,
            mode="sync",
            seed_plan=plan,
            autoreset_options=lambda slot, episode: {"slot": slot, "episode": episode},
        ) as collector:
            (first, second) = await rounds(collector, 2, update=False)
        for rollout, later in zip(sorted(first, key=by_slots), sorted(second, key=by_slots), strict=True):
            seeds = np.concatenate([rollout.obs["seed"], later.obs["seed"]])
            steps = np.concatenate([rollout.obs["step"], later.obs["step"]])
            for column, slot in enumerate(rollout.slots.tolist()):
                begun = seeds[steps[:, column] == 0, column].tolist()
                assert begun == [plan[(slot + 6 * k) % 16] for k in range(len(begun))] and len(begun) > 4
                infos = [
                    info["options"] for r in (rollout, later) for info in r.infos if "slot" in info.get("options", ())
                ]
                told = [(info["slot"][column], info["episode"][column]) for info in infos if info["_slot"][column]]
                assert told == [(slot, k + 1) for k in range(len(told))] and told


def by_slots(rollout):
    return rollout.collector


@pytest.mark.parametrize("backend", ["workers", "native"])
@pytest.mark.parametrize("mode", ["SameStep", "Disabled", "NextStep"])
@pytest.mark.asyncio
async def test_backends_and_autoreset_modes(backend, mode):
    if (backend, mode) == ("native", "Disabled"):
        pytest.skip("Gymnasium's CartPole takes no such mode")
    how = {"backend": backend, "autoreset_mode": mode}
    async with aioenv.make_vec("CartPole-v1", 4, num_workers=0, **how) as envs:
        await envs.reset(seed=1)
        expected = await envs.rollout(Linear((0.0, 0.0, -1.0, 0.0)), 60, 1)
    async with aioenv.RolloutCollector(
        "CartPole-v1", 4, policy=lambda: Linear((0.0, 0.0, -1.0, 0.0)), steps=60, num_collectors=1, seed=1, **how
    ) as collector:
        got = await anext(collector)
    assert np.array_equal(got.obs, expected.obs) and np.array_equal(got.next_obs, expected.next_obs)
    assert expected.terminated.any()


class Texts(gym.Env):
    """Observations of all kinds of leaves."""

    observation_space = spaces.Dict(
        {"text": spaces.Text(5), "none": spaces.Dict({}), "two": spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.Text(3)])}
    )
    action_space = spaces.Tuple([spaces.Discrete(2), spaces.Text(4)])

    def reset(self, *, seed=None, options=None):
        return self._obs("r"), {}

    def step(self, action):
        return self._obs(action[1]), 0.0, False, False, {"kind": Kind(action[1])}

    def _obs(self, text):
        return {"text": text, "none": {}, "two": (np.ones(2, np.float32), text[:1])}


class Kind:
    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return type(other) is Kind and other.name == self.name


def texts(obs):
    n = len(obs["text"])
    return (np.zeros(n, np.int64), ("abcd",) * n), {"name": np.full(n, "x" * 7), "label": np.full(n, "y")}


@pytest.mark.asyncio
async def test_objects_travel_too():
    async with aioenv.RolloutCollector(Texts, 3, policy=lambda: texts, steps=3, num_collectors=1) as collector:
        first, second = await anext(collector), await anext(collector)
    assert first.obs["text"].tolist() == [["r"] * 3, ["abcd"] * 3, ["abcd"] * 3]
    assert second.last_obs["two"][1] == ("a", "a", "a") and second.obs["none"] == {}
    assert second.obs["two"][0].shape == (3, 3, 2) and second.actions[1][2, 2] == "abcd"
    assert second.infos[1]["kind"].tolist() == [Kind("abcd")] * 3
    assert second.extras["name"].tolist() == [["x" * 7] * 3] * 3


class Longer:
    """Its extras change their dtype from rollout to rollout."""

    def __init__(self):
        self.calls = 0

    def __call__(self, obs):
        self.calls += 1
        return np.zeros(len(obs), np.int64), {"text": np.full(len(obs), "x" * self.calls)}


@pytest.mark.asyncio
async def test_the_layout_may_change():
    async with aioenv.RolloutCollector("CartPole-v1", 2, policy=Longer, steps=2, num_collectors=1) as collector:
        found = [await anext(collector) for _ in range(3)]
    assert [rollout.extras["text"][-1, 0] for rollout in found] == ["xx", "xxxx", "xxxxxx"]


# ------------------------------------------------------------ weights and modes


@pytest.mark.asyncio
async def test_a_rollout_says_which_weights_made_it():
    async with aioenv.RolloutCollector("CartPole-v1", 4, policy=Linear, steps=8, num_collectors=2) as collector:
        mine = weights(1)
        assert await collector.update(mine) == 1 == collector.version
        mine["w"][:] = 0  # they were copied
        first = [await anext(collector) for _ in range(2)]
        assert await collector.update(weights(2)) == 2
        later = [await anext(collector) for _ in range(6)]
    assert {rollout.weights_version for rollout in first} == {1}
    for index in range(2):  # the first one may have begun before the update, whenever it comes
        versions = [rollout.weights_version for rollout in later if rollout.collector == index]
        assert versions[1:] == [2] * len(versions[1:]) and set(versions) <= {1, 2}
    assert sum(rollout.weights_version == 2 for rollout in later) >= 4
    for rollout in (*first, *later):
        expected = (rollout.obs * weights(rollout.weights_version)["w"]).sum(-1)
        assert np.array_equal(rollout.extras["score"], expected)
        assert np.array_equal(rollout.extras["slot"][0], rollout.slots)


@pytest.mark.asyncio
async def test_in_sync_mode_all_wait_for_an_update():
    async with aioenv.RolloutCollector(
        "CartPole-v1", 4, policy=Linear, steps=4, num_collectors=2, mode="sync"
    ) as collector:
        assert {(await anext(collector)).weights_version, (await anext(collector)).weights_version} == {0}
        waiting = asyncio.ensure_future(anext(collector))
        await asyncio.sleep(0)
        assert not any(one.worker.busy for one in collector._pool._collectors)
        await collector.update(weights(1))
        assert all(one.worker.busy for one in collector._pool._collectors), "both begin at once"
        assert (await waiting).weights_version == 1
        await collector.update(weights(2))  # before the round is over
        assert (await anext(collector)).weights_version == 1
        assert {(await anext(collector)).weights_version, (await anext(collector)).weights_version} == {2}


@pytest.mark.asyncio
async def test_an_iteration_that_waits_for_an_update_says_so(monkeypatch, caplog):
    monkeypatch.setattr(collector_pool, "_UPDATE_WARNING_S", 0.0)
    async with aioenv.RolloutCollector(
        "CartPole-v1", 4, policy=Linear, steps=3, num_collectors=2, mode="sync", seed=0
    ) as collector:
        await anext(collector)
        await anext(collector)
        assert not caplog.records, "rollouts of the same round need no update"
        waits = asyncio.ensure_future(anext(collector))
        while not caplog.records:
            await asyncio.sleep(0)
        assert "Call update(weights)" in caplog.records[0].getMessage()
        await collector.update()
        assert (await waits).weights_version == 1
    assert len(caplog.records) == 1


@pytest.mark.asyncio
async def test_a_collector_begins_when_its_last_rollout_is_taken():
    async with aioenv.RolloutCollector("CartPole-v1", 2, policy=Linear, steps=4, num_collectors=2) as collector:
        await anext(collector)
        while len(collector._pool._ready) < 2:  # the other one, and the next one of this
            await collector._pool._wait()
        assert not any(one.worker.busy for one in collector._pool._collectors), "nothing is begun ahead"
        assert {one.untaken for one in collector._pool._collectors} == {1}
        second = await anext(collector)
        assert sum(one.worker.busy for one in collector._pool._collectors) == 1
        assert collector._pool._collectors[second.collector].worker.busy


@pytest.mark.asyncio
async def test_prefetch_begins_more():
    async with aioenv.RolloutCollector(
        "CartPole-v1", 2, policy=Linear, steps=4, num_collectors=1, prefetch=2, seed=0
    ) as collector:
        ahead = [await anext(collector)]
        while len(collector._pool._ready) < 3:
            await collector._pool._wait()
        assert not collector._pool._collectors[0].worker.busy
        ahead += [await anext(collector) for _ in range(4)]
    async with aioenv.RolloutCollector("CartPole-v1", 2, policy=Linear, steps=4, num_collectors=1, seed=0) as collector:
        for rollout in ahead:
            assert np.array_equal((await anext(collector)).obs, rollout.obs)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.asyncio
async def test_no_rollout_is_older_than_max_weight_lag(lag):
    async with aioenv.RolloutCollector(
        "CartPole-v1", 6, policy=Linear, steps=4, num_collectors=3, max_weight_lag=lag
    ) as collector:
        lags = []
        for _ in range(30):
            rollout = await anext(collector)
            lags.append(collector.version - rollout.weights_version)
            await collector.update(weights(collector.version + 1))
        stats = collector.stats()
    assert max(lags) <= lag
    assert stats.rollouts == 30 and (stats.stale > 0 or lag == 3)


@pytest.mark.asyncio
async def test_stats_count_the_waits():
    async with aioenv.RolloutCollector("CartPole-v1", 4, policy=Linear, steps=16, num_collectors=2) as collector:
        assert collector.stats().wall_s == 0
        for _ in range(6):
            await anext(collector)
        while len(collector._pool._ready) < 2:
            await collector._pool._wait()
        time.sleep(0.05)  # noqa: ASYNC251 (the learner learns: both collectors wait)
        stats = collector.stats()
    assert stats.collector_wait_s > 0.05 and stats.learner_wait_s > 0 and stats.policy_s > 0
    assert (stats.rollouts, stats.env_steps, stats.restarts, stats.updates) == (6, 6 * 2 * 16, 0, 0)
    assert "6 rollouts of 2 collectors" in str(stats)


class Short(gym.Env):
    """Has three episodes, of two steps."""

    observation_space = spaces.Box(0, 9, (), np.float64)
    action_space = spaces.Discrete(2)
    left = 3

    def reset(self, *, seed=None, options=None):
        if not self.left:
            raise aioenv.EpisodesDone
        self.left, self.t = self.left - 1, 0
        return np.array(0.0), {}

    def step(self, action):
        self.t += 1
        return np.array(1.0), 1.0, self.t == 2, False, {}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.asyncio
async def test_the_iteration_ends_when_all_envs_are_done(prefetch):
    async with aioenv.RolloutCollector(
        Short, 2, policy=lambda: flat, steps=4, num_collectors=2, prefetch=prefetch
    ) as collector:
        reward = sum([rollout.reward[rollout.valid].sum() async for rollout in collector])
        assert reward == 2 * 3 * 2
        with pytest.raises(StopAsyncIteration):
            await anext(collector)


class Empty(Short):
    """Has as many episodes as its worker is told."""

    def __init__(self):
        self.left = int(os.environ["EPISODES"])


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("autoreset_mode", ["NextStep", "Disabled"])
@pytest.mark.asyncio
async def test_a_collector_whose_envs_have_no_episode_is_finished(mode, autoreset_mode):
    found = []
    async with aioenv.RolloutCollector(
        Empty,
        2,
        policy=lambda: flat,
        steps=4,
        num_collectors=2,
        mode=mode,
        autoreset_mode=autoreset_mode,
        timeout_s=60.0,
        worker_env=[{"EPISODES": "0"}, {"EPISODES": "3"}],
    ) as collector:
        async for rollout in collector:
            assert rollout.collector == 1
            found.append(rollout.reward[rollout.valid].sum())
            await collector.update()
        assert collector._pool._collectors[0]._timer is None, "nothing is waited for"
    assert sum(found) == 3 * 2 and len(found) > 1


@pytest.mark.asyncio
async def test_a_round_begins_once_it_is_known_that_a_collector_has_no_episode():
    """The update comes first."""
    async with aioenv.RolloutCollector(
        Empty,
        2,
        policy=lambda: flat,
        steps=4,
        num_collectors=2,
        mode="sync",
        worker_env=[{"EPISODES": "0"}, {"EPISODES": "3"}],
    ) as collector:
        os.kill(collector.pids[0], signal.SIGSTOP)
        await anext(collector)
        await collector.update()
        os.kill(collector.pids[0], signal.SIGCONT)
        assert (await anext(collector)).weights_version == 1


def flat(obs):
    return np.zeros(len(obs), np.int64)


# ------------------------------------------------------------ arguments


def last_of(table):
    return lambda obs: np.full(len(obs), table[-1])


@pytest.mark.asyncio
async def test_large_arrays_of_factories_are_there_whenever_a_collector_starts():
    table = np.ones(1 << 20, np.int64)
    async with aioenv.RolloutCollector(
        "CartPole-v1", 2, policy=partial(last_of, table), steps=4, num_collectors=1
    ) as collector:
        assert (await anext(collector)).actions.all()
        os.kill(collector.pids[0], signal.SIGKILL)
        rollout = await anext(collector)
        while not rollout.restarted:
            rollout = await anext(collector)
        assert rollout.actions.all()


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"policy": 3}, TypeError, "policy: expected a function"),
        ({"steps": 0}, ValueError, "steps: expected an int from 1"),
        ({"num_collectors": 0}, ValueError, "num_collectors: expected an int from 1"),
        ({"mode": "first"}, ValueError, "mode: expected one of 'sync', 'async'"),
        ({"mode": "sync", "prefetch": 1}, ValueError, "prefetch, max_weight_lag"),
        ({"mode": "sync", "max_weight_lag": 1}, ValueError, "prefetch, max_weight_lag"),
        ({"max_weight_lag": -1}, ValueError, "max_weight_lag: expected an int from 0"),
        ({"policy": zeros}, TypeError, "policy: expected a function without arguments .*lambda: policy"),
        ({"policy": Linear()}, TypeError, "policy: expected a function without arguments"),
        ({"seed": -1}, ValueError, "seed: expected ints from 0, got -1"),
        ({"seed": [1, -2]}, ValueError, r"seed: expected ints from 0, got \[1, -2\]"),
        ({"restart": 3}, TypeError, "restart: expected an aioenv.RestartPolicy or None, got 3"),
        ({"seed": [1]}, ValueError, "the length must match num_envs=2"),
        ({"seed_plan": [1]}, ValueError, "seed_plan: expected at least one seed"),
        ({"cluster": "auto"}, TypeError, "cluster: expected a RayCluster"),
        ({"autoreset_mod": "SameStep"}, aioenv.ArgumentError, "did you mean autoreset_mode"),
        ({"restart": aioenv.RestartPolicy(resume=True)}, ValueError, "resume=True"),
        ({"worker_env": [{}]}, ValueError, "worker_env: expected one mapping"),
        ({"episode_stats": aioenv.EpisodeStats()}, ValueError, "episode_stats: expected True or False"),
        ({"spare_envs": True}, ValueError, "num_workers: expected two for each slot .*, got None, which is 0 here"),
    ],
)
def test_wrong_arguments(how, error, text):
    with pytest.raises(error, match=text):
        aioenv.RolloutCollector("CartPole-v1", 2, **{"policy": Linear, "num_collectors": 2, **how})


@pytest.mark.asyncio
async def test_use_before_the_start_and_after_the_end():
    collector = aioenv.RolloutCollector("CartPole-v1", 2, policy=Linear, num_collectors=1, steps=4)
    with pytest.raises(RuntimeError, match="start it first"):
        await anext(collector)
    with pytest.raises(RuntimeError, match="start it first"):
        await collector.update({})
    with pytest.raises(RuntimeError, match="start it first"):
        _ = collector.single_action_space
    async with collector:
        assert "running" in repr(collector)
    with pytest.raises(aioenv.ClosedError, match="the collector was closed"):
        await anext(collector)
    await collector.close()
