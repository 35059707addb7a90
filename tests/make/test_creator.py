"""`EnvCreator`. `test_ec_…`: the lines of what older systems' creators did, without the traps."""

from __future__ import annotations

import asyncio
import os
import pickle
from functools import partial

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import EnvCreator, EpisodeCounter, SharedRunningStats
from aioenv.core.worker_pool import needed_by
from aioenv.creator import bind_to_slots
from aioenv.process.launch import START_METHODS
from aioenv.stats import CountEpisodes, NormalizeObservation, NormalizeReward
from aioenv.stats.sharing import can_share
from tests.kits.process_kit import run_alone

pytestmark = pytest.mark.skipif(not can_share(), reason="no memory without a name here")


class Endless(gym.Env):
    """Observes random numbers of a given size; it never ends, unless told to, and knows where it lives."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space = gym.spaces.Discrete(3)

    def __init__(self, size=3, scale=1.0, length=0, config=None):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.pid, self.arguments = os.getpid(), (size, scale, length, config)
        self.scale, self.length = scale, length

    def _observe(self):
        return (self.scale * self.np_random.normal(5, 2, self.observation_space.shape)).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        obs = self._observe()
        return obs, float(obs[0]), False, self.t == self.length, {}


class Knowing(gym.Wrapper):
    """Tells what its process knows of shared statistics."""

    def __init__(self, env, *stats):
        super().__init__(env)
        self.stats = stats

    def know(self):
        return [pickle.dumps(stats.moments) for stats in self.stats]


def normalized(seen, returns, counter=None, **kwargs):
    env = NormalizeReward(NormalizeObservation(Endless(**kwargs), seen), returns)
    if counter is not None:
        env = CountEpisodes(env, counter)
    return Knowing(env, getattr(seen, "stats", seen), getattr(returns, "stats", returns))


def trajectory(creator, seed):
    env = creator()
    return [env.reset(seed=seed)[0].tolist(), *(env.step(0)[0].tolist() for _ in range(3))]


# ------------------------------------------------------------ EC: metadata


def test_ec_metadata_without_an_env_in_this_process():
    pids = []

    def make():
        pids.append(os.getpid())
        return Endless(size=7)

    async def main():
        creator = EnvCreator(make)
        first = await creator.metadata()
        assert first is await creator.metadata()  # asked once
        return first

    metadata = aioenv.run(main())
    assert pids == []
    assert metadata.observation_space == gym.spaces.Box(-np.inf, np.inf, (7,), np.float32)
    assert metadata.action_space == gym.spaces.Discrete(3)
    assert (metadata.render_mode, metadata.render_modes, metadata.model) == (None, ("rgb_array",), None)
    assert (metadata.spec, metadata.reward_range, metadata.reward_threshold) == (None, None, None)


def test_ec_metadata_of_registered_envs_and_their_models():
    async def main():
        cart, cheetah, again, ant = await asyncio.gather(
            EnvCreator("CartPole-v1", render_mode="rgb_array").metadata(),
            EnvCreator("HalfCheetah-v5").metadata(),
            EnvCreator(gym.spec("HalfCheetah-v5")).metadata(),
            EnvCreator("Ant-v5").metadata(),
        )
        assert (cart.spec.id, cart.render_mode, cart.reward_threshold) == ("CartPole-v1", "rgb_array", 475.0)
        assert cart.model is None
        assert (cheetah.model.nq, cheetah.model.nv, cheetah.model.nu) == (9, 9, 6)
        assert cheetah.model == again.model != ant.model
        assert cheetah.observation_space.shape == (17,)

    aioenv.run(main())


@pytest.mark.parametrize("start", START_METHODS)
def test_ec_metadata_in_blocking_code(start):
    creator = EnvCreator(lambda size: Endless(size), size=2)
    assert aioenv.sync.env_metadata(creator, start=start).observation_space.shape == (2,)


def test_metadata_of_what_can_not_be_made():
    def broken():
        raise ZeroDivisionError("no such env")

    with pytest.raises(aioenv.WorkerStartError, match="no such env") as caught:
        aioenv.sync.env_metadata(EnvCreator(broken))
    assert "in broken" in str(caught.value)
    with pytest.raises(ValueError, match="start_timeout_s"):
        aioenv.sync.env_metadata(EnvCreator(Endless), start_timeout_s=0)


def test_a_cancelled_question_leaves_no_process():
    async def main():
        creator = EnvCreator(Endless)
        task = asyncio.ensure_future(creator.metadata())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await creator.metadata()).observation_space.shape == (3,)

    aioenv.run(main())


# ------------------------------------------------------------ EC: arguments and variants


def test_ec_call_arguments_override_stored_ones():
    creator = EnvCreator(Endless, 2, scale=3.0, length=4)
    assert creator().arguments == (2, 3.0, 4, None)
    assert creator(length=9, config="x").arguments == (2, 3.0, 9, "x")
    assert creator().arguments == (2, 3.0, 4, None)
    assert (creator.args, creator.kwargs) == ((2,), {"scale": 3.0, "length": 4})
    creator.kwargs["scale"] = 7  # a copy
    assert creator().scale == 3.0
    assert repr(creator) == "EnvCreator(Endless, 2, scale=3.0, length=4)"


def test_ec_make_variant_does_not_touch_its_base_and_shares_state():
    with SharedRunningStats(3, 2) as seen, SharedRunningStats((), 2) as returns:
        base = EnvCreator(normalized, seen=seen, returns=returns)
        variant = base.make_variant(scale=2.0)
        other = variant.make_variant(length=3)
        assert base.kwargs == {"seen": seen, "returns": returns}
        assert variant.kwargs == {**base.kwargs, "scale": 2.0}
        assert other.kwargs == {**variant.kwargs, "length": 3}
        seen.update([1, 2, 3])
        for creator in (base, variant, other):
            assert creator.state_dict()["seen"]["count"] == 1
        other.register("also", EpisodeCounter(1))
        assert set(base.state_dict()) == {"seen", "returns"} < set(other.state_dict())
        other.state_dict()  # of an open counter
        other._registered["also"].close()


def test_ec_variants_have_metadata_in_common_where_it_can_be_the_same():
    with EpisodeCounter(2) as counter, EpisodeCounter() as another, SharedRunningStats(3, live=True) as seen:
        base = EnvCreator(Endless, size=3, config=counter)
        metadata = aioenv.sync.env_metadata(base)
        for variant in (
            base.make_variant(),
            base.make_variant(size=3),
            base.make_variant(config=another),
            base.at(1),
            EnvCreator(base),
            pickle.loads(pickle.dumps(base)),
        ):
            assert variant._cache.metadata == metadata
        for variant in (base.make_variant(size=4), base.make_variant(config=seen), EnvCreator(base, length=1)):
            assert variant._cache.metadata is None
        arrays = EnvCreator(Endless, config=np.ones(2))
        assert arrays.make_variant(config=np.ones(2))._cache is not arrays._cache


def test_creators_of_creators_are_flat():
    creator = EnvCreator(EnvCreator(Endless, 2, scale=3.0), length=5)
    assert creator.factory is Endless
    assert creator().arguments == (2, 3.0, 5, None)
    with pytest.raises(TypeError, match="not the env itself"):
        EnvCreator(Endless())


def test_a_creator_of_one_that_does_not_share_does_not_either():
    alone = EnvCreator(Endless, share=False)
    assert [EnvCreator(alone, size=2).share, EnvCreator(alone, share=True).share] == [False, True]
    assert [EnvCreator(Endless).share, EnvCreator(EnvCreator(Endless), share=False).share] == [True, False]


# ------------------------------------------------------------ EC: in other processes


@pytest.mark.parametrize("dump", [pickle.dumps, aioenv.ipc.messages.dump_code], ids=["pickle", "cloudpickle"])
def test_ec_lambdas_are_picklable(dump):
    bonus = 4
    creator = EnvCreator(lambda size, **kwargs: Endless(size + bonus, **kwargs), 1, scale=2.0)
    copied = pickle.loads(dump(creator))
    assert copied().arguments == (5, 2.0, 0, None)
    assert trajectory(copied, 3) == trajectory(creator, 3)


def test_ec_may_be_called_in_any_process():
    with SharedRunningStats(3, live=True) as seen:
        creator = EnvCreator(lambda **kwargs: NormalizeObservation(Endless(**kwargs), seen), size=3)
        creator.register("seen", seen)
        code = (
            "import pickle, sys; creator = pickle.load(sys.stdin.buffer); env = creator(scale=2.0)\n"
            "env.reset(seed=1); env.step(0); print(*env.unwrapped.arguments, creator.state_dict()['seen']['count'])"
        )
        done = run_alone(code, stdin=pickle.dumps(creator))
        assert done.stdout.decode() == "3 2.0 0 None 2.0\n", done.stderr.decode()
        creator().reset(seed=0)
        assert (creator.state_dict()["seen"]["count"], seen.count) == (3, 3)


def test_a_fork_server_is_told_what_creators_import():
    found = needed_by([EnvCreator(partial(gym.make, "CartPole-v1")), EnvCreator("Ant-v5")])
    assert {"aioenv.creator", "gymnasium.envs.mujoco.ant_v5:AntEnv"} <= {*found}
    assert "gymnasium.envs.classic_control.cartpole:CartPoleEnv" in found


def test_a_fork_server_imports_no_word_of_a_message():
    """The program itself may have that name, and would run once more."""

    def make():
        print("train: another env")
        return gym.make("own_tasks:Task-v0")

    found = needed_by([make])
    assert "own_tasks" in found and "train" not in found


# ------------------------------------------------------------ EC: shared state


@pytest.mark.parametrize("live", [False, True], ids=["slots", "live"])
def test_ec_counts_and_identical_statistics_in_every_process(live):
    """n·11 and n·10: the metadata's env is never reset, and there is no shadow env in the parent."""

    n = 3

    async def main():
        slots = None if live else n
        with SharedRunningStats(3, slots, live=live) as seen, SharedRunningStats((), slots, live=live) as returns:
            creator = EnvCreator(normalized, seen, returns=returns)
            assert (await creator.metadata()).observation_space.shape == (3,)
            async with aioenv.make_vec(creator, num_envs=n, num_workers=n) as envs:
                await envs.reset(seed=0)
                for _ in range(10):
                    await envs.step(np.zeros(n, np.int64))
                    seen.merge()
                    returns.merge()
                known = await envs.call("know")
                pids = await envs.get_attr("pid")
            assert len({*pids, os.getpid()}) == n + 1
            assert len({*map(tuple, known), tuple(map(pickle.dumps, (seen.moments, returns.moments)))}) == 1
            state = creator.state_dict()
            assert (state["args[0]"]["count"], state["returns"]["count"]) == (n * 11, n * 10)
            assert seen.mean.tolist() != [0, 0, 0] and (seen.var > 0).all()

    aioenv.run(main())


def test_ec_frozen_copy():
    async def main():
        with SharedRunningStats(3, 2) as seen, SharedRunningStats((), 2) as returns:
            creator = EnvCreator(normalized, seen, returns)
            seen.update(np.arange(30.0).reshape(10, 3))
            frozen = EnvCreator(lambda seen: NormalizeObservation(Endless(), seen), seen.frozen_copy())
            async with aioenv.AsyncVectorEnv([creator, frozen.make_variant()]) as envs:
                obs, _ = await envs.reset(seed=[3, 3])
            seen.merge()
            assert seen.count == 11  # the frozen one has not counted
            raw = Endless().reset(seed=3)[0]
            expected = (raw - np.arange(30.0).reshape(10, 3).mean(0)) / np.arange(30.0).reshape(10, 3).std(0)
            np.testing.assert_allclose(obs[1], expected, rtol=1e-6)
            assert frozen.state_dict() == {}

    aioenv.run(main())


def test_ec_state_dict_round_trip():
    with (
        SharedRunningStats(3, 2) as seen,
        SharedRunningStats((), live=True) as returns,
        EpisodeCounter() as counter,
        EpisodeCounter(2) as closed_over,
    ):
        creator = EnvCreator(normalized, seen, config={"returns": [returns], "n": 1}, counter=counter.at(3))
        creator.register("ids", closed_over)
        seen.update(np.eye(3))
        returns.update(4.0)
        assert [counter.next_id(), counter.next_id(), closed_over.at(1).next_id()] == [0, 1, 1]
        state = pickle.loads(pickle.dumps(creator.state_dict()))
        assert list(state) == ["args[0]", "config['returns'][0]", "counter", "ids"]
        seen.update(np.ones(3))
        returns.freeze()
        assert [counter.next_id(), closed_over.at(1).next_id()] == [2, 3]
        pickle.loads(pickle.dumps(creator)).load_state_dict(state)  # the same memory
        assert (seen.count, returns.count, returns.frozen) == (3, 1, False)
        assert [counter.next_id(), closed_over.at(1).next_id(), closed_over.at(0).next_id()] == [2, 3, 0]
        with pytest.raises(KeyError, match=r"expected states of .*ids.*, got .*seen"):
            creator.load_state_dict({"seen": state["args[0]"]})
        for bad in ({}, {"counts": [1, 2, 3]}, {"counts": [-1]}, None):
            with pytest.raises(ValueError, match="expected"):
                counter.load_state_dict(bad)
        with pytest.raises(ValueError, match="not taken"):
            creator.register("ids", counter)
        with pytest.raises(TypeError, match="state_dict"):
            creator.register("number", 3)


@pytest.mark.parametrize("slots", [None, 4], ids=["consecutive", "by slot"])
def test_ec_unique_trajectory_ids_of_two_variants(slots):
    async def main():
        with EpisodeCounter(slots) as counter:
            base = EnvCreator(
                lambda counter, length: CountEpisodes(Endless(length=length), counter), counter=counter, length=2
            )
            variants = [base, base, base.make_variant(length=5), base.make_variant(length=5)]
            seen = [set() for _ in variants]
            async with aioenv.AsyncVectorEnv(variants, num_workers=2) as envs:
                _, info = await envs.reset(seed=0)
                for _ in range(20):
                    for slot, number in enumerate(info["episode_id"]):
                        seen[slot].add(int(number))
                    info = (await envs.step(np.zeros(4, np.int64))).info
            assert len(seen[0]) > len(seen[2]) > 2
            assert sum(map(len, seen)) == len(set().union(*seen)) <= counter.count
            assert slots is None or all(number % 4 == slot for slot, ids in enumerate(seen) for number in ids)

    aioenv.run(main())


def test_without_share_each_env_has_its_own():
    with SharedRunningStats(3, 2) as seen, SharedRunningStats((), live=True) as returns, EpisodeCounter(2) as ids:
        returns.update(1.0)
        alone = EnvCreator(normalized, share=False, seen=seen.at(1), returns=[returns][0], counter=ids)
        envs = [pickle.loads(pickle.dumps(alone)).at(1)() for _ in range(2)]
        for env in envs:
            assert env.reset(seed=0)[1]["episode_id"] == 1  # each begins where the shared ones are
            env.step(0)
        assert [stats.count for stats in envs[0].stats] == [0, 2]
        assert envs[0].env.env.env._statistics.slot.moments.count == 2
        assert (seen.merge(), seen.count, returns.count, ids.count) == (0, 0, 1, 0)


# ------------------------------------------------------------ in vector envs


@pytest.mark.parametrize("num_workers", [1, 3])
def test_lists_mix_variants(num_workers):
    base = EnvCreator(Endless, scale=1.0)
    creators = [base, base.make_variant(scale=2.0), lambda: Endless(scale=3.0), base]

    async def main():
        async with aioenv.AsyncVectorEnv(creators, num_workers=num_workers) as envs:
            obs, _ = await envs.reset(seed=[5] * 4)
            rows = [obs.tolist()]
            rows += [(await envs.step([0] * 4)).obs.tolist() for _ in range(3)]
        for slot, creator in enumerate(creators):
            assert [row[slot] for row in rows] == trajectory(creator, 5)

    aioenv.run(main())


def test_spaces_of_variants_are_compared():
    base = EnvCreator(Endless, size=3)

    async def main():
        with pytest.raises(aioenv.SpaceMismatchError, match="Slot 1"):
            await aioenv.AsyncVectorEnv([base, base.make_variant(size=4)])

    aioenv.run(main())


def test_make_vec_takes_creators_with_wrappers_and_arguments():
    with SharedRunningStats(3, 2) as seen:
        creator = EnvCreator(lambda seen, **kwargs: NormalizeObservation(Endless(**kwargs), seen), seen=seen)
        wrappers = [partial(gym.wrappers.TimeLimit, max_episode_steps=2)]
        with aioenv.sync.make_vec(creator, num_envs=2, wrappers=wrappers, scale=2.0) as envs:
            envs.reset(seed=0)
            truncated = [envs.step([0, 0])[3].tolist() for _ in range(2)]
            assert envs.get_attr("scale") == (2.0, 2.0)
        assert truncated == [[False, False], [True, True]]
        seen.merge()
        assert seen.count == 6


def test_a_slot_that_shared_objects_do_not_have():
    with EpisodeCounter(2) as counter:
        creator = EnvCreator(Endless, config=counter)
        with pytest.raises(ValueError, match="slot: expected 0 … 1, got 2: num_slots is 2"):
            aioenv.AsyncVectorEnv([creator] * 3)
        plain = EnvCreator(Endless, config=[counter.at(1)])
        assert bind_to_slots([plain, Endless]) == [plain, Endless]
