"""Episodes of native vector envs: numbered, of lost workers, their statistics; all as single envs have them."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from tests.kits.native_kit import LIMIT, MODES, equal, outcomes, policy

pytestmark = pytest.mark.asyncio


async def test_episodes_are_those_of_single_envs_wherever_they_run():
    expected = None
    for backend, num_workers, num_envs, mode in [
        ("workers", 2, 3, MODES[0]),
        ("native", 0, 3, MODES[0]),
        ("native", 0, 7, MODES[1]),
        ("native", 1, 4, MODES[2]),
        ("native", 2, 5, MODES[0]),
    ]:
        kwargs = {"backend": backend, "num_workers": num_workers, "autoreset_mode": mode, "max_episode_steps": 60}
        async with aioenv.make_vec("Hopper-v5", num_envs, **kwargs) as envs:
            evaluation = await aioenv.evaluate(envs, policy, 9, seed=5)
            assert sorted(e.number for e in evaluation.episodes) == list(range(9))
            assert envs.active_slots.tolist() == list(range(num_envs))
            await envs.reset(seed=0)
            await envs.step(np.zeros((num_envs, 3), np.float32))
        if expected is None:
            expected = outcomes(evaluation)
            assert len({e.length for e in evaluation.episodes}) > 3
        assert data_equivalence(outcomes(evaluation), expected, exact=True)


async def test_a_lost_episode_is_run_again():
    expected = None
    for restart in (None, aioenv.RestartPolicy(), aioenv.RestartPolicy(resume=True)):
        killed = []
        kwargs = {"num_workers": 2, "restart": restart, "max_episode_steps": 40}
        async with aioenv.make_vec("Hopper-v5", 4, backend="native", **kwargs) as envs:

            def choose(obs, episodes, restart=restart, killed=killed):
                if restart is not None and not killed and (episodes >= 4).any():
                    killed.append(envs.workers[1].pid)
                    os.kill(killed[0], signal.SIGKILL)
                return policy(obs)

            evaluation = await aioenv.evaluate(envs, choose, 7, seed=6)
        if expected is None:
            expected = outcomes(evaluation)
        assert data_equivalence(outcomes(evaluation), expected, exact=True)
        if restart is not None:
            assert killed and any(e.attempts > 1 for e in evaluation.episodes) is not restart.resume


async def test_paused_slots_of_a_lost_worker():
    """Resumed they are where they were; begun anew they say so when they are resumed from their pause."""
    action = np.zeros((5, 3), np.float32)
    kwargs = {"backend": "native", "num_workers": 2, "max_episode_steps": LIMIT}
    for restart in (aioenv.RestartPolicy(resume=True), aioenv.RestartPolicy()):
        twin = aioenv.make_vec("Reacher-v5", 5, backend="native", max_episode_steps=LIMIT)
        async with aioenv.make_vec("Reacher-v5", 5, restart=restart, **kwargs) as envs, twin:
            for each in (envs, twin):
                await each.reset(seed=3)
                await each.step(action[:, :2])
                each.pause([1, 3])
                await each.step(action[:, :2])
            os.kill(envs.workers[0].pid, signal.SIGKILL)
            result = await envs.step(action[:, :2])
            if restart.resume:
                assert equal(result, await twin.step(action[:, :2]))
                assert equal(await envs.reset_at(0, seed=1), await twin.reset_at(0, seed=1))
                for each in (envs, twin):
                    each.resume()
                for _ in range(LIMIT):
                    assert equal(await envs.step(action[:, :2]), await twin.step(action[:, :2]))
                continue
            assert result.truncated.tolist() == [True, False, True, False, False]
            last = result.obs[1]
            envs.resume()
            result = await envs.step(action[:, :2])
            assert result.truncated.tolist() == [False, True, False, False, False]
            assert result.info["restarted"].tolist() == [False, True, False, False, False]
            assert (result.obs[1] == last).all() and not result.reward[:3].any()


def lean(obs):
    return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)


async def test_cartpole_episodes():
    expected = None
    for kwargs in ({"num_workers": 2}, {"backend": "native"}, {"backend": "native", "num_workers": 2}):
        async with aioenv.make_vec("CartPole-v1", 6, max_episode_steps=60, **kwargs) as envs:
            evaluation = await aioenv.evaluate(envs, lean, 17, seed=range(17))
        expected = expected or outcomes(evaluation)
        assert outcomes(evaluation) == expected


async def test_cartpole_slots():
    async with aioenv.make_vec("CartPole-v1", 3, backend="native") as envs:
        envs.pause(1)
        assert not (await envs.reset(seed=[1, 2, 3])).obs[1].any()
        envs.resume()
        single = SyncVectorEnv([lambda: __import__("gymnasium").make("CartPole-v1")] * 3)
        expected, _ = single.reset(seed=[1, 2, 3])
        obs, _ = await envs.reset_at(1, seed=2)
        assert obs.tolist() == expected[1].tolist()
        obs, *_ = await envs.step([0, 1, 1])
        assert np.allclose(obs, single.step(np.array([0, 1, 1]))[0])
        single.close()
        envs.pause([0, 2])
        for _ in range(30):  # through a reset
            result = await envs.step([1, 1, 1])
            assert (result.obs[[0, 2]] == obs[[0, 2]]).all() and not result.terminated[[0, 2]].any()
        envs.resume(0)
        assert (await envs.step_at(0, 1)).reward == 1.0
        with pytest.raises(ValueError, match="must match num_envs=3 but got length=2"):
            await envs.reset(seed=[1, 2])


@pytest.mark.parametrize(("mode", "num_workers"), [(MODES[0], 0), (MODES[1], 0), (MODES[2], 0), (MODES[1], 2)])
async def test_statistics_of_episodes_are_those_of_single_envs(mode, num_workers):
    def stats():
        events = [aioenv.EpisodeEvent("x_velocity", episode="max"), aioenv.EpisodeEvent("x_position", episode="last")]
        return aioenv.EpisodeStats([*events, aioenv.EpisodeEvent("nothing")], prefix="train")

    common = {"autoreset_mode": mode, "max_episode_steps": LIMIT}
    rng, told = np.random.default_rng(2), []
    async with (
        aioenv.make_vec("Hopper-v5", 4, num_workers=2, episode_stats=stats(), **common) as singles,
        aioenv.make_vec(
            "Hopper-v5", 4, backend="native", num_workers=num_workers, episode_stats=stats(), **common
        ) as native,
    ):
        for envs in (singles, native):
            await envs.reset(seed=1)
        for step in range(40):
            actions = rng.uniform(-1, 1, (4, 3)).astype(np.float32)
            if step == 11:
                for envs in (singles, native):
                    envs.pause([2])
            if step == 20:
                for envs in (singles, native):
                    envs.resume()
                    task = asyncio.ensure_future(envs.step(actions))  # its rewards count, however it is taken
                    while not envs.outstanding:
                        await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    ready = await envs.recv(4)
                    over = ready.terminated | ready.truncated
                    if mode is AutoresetMode.DISABLED and over.any():
                        await envs.reset(options={"reset_mask": over})
            results = [await envs.step(actions) for envs in (singles, native)]
            for result in results:
                if "episode" in result.info:
                    result.info["episode"].pop("t")
                    result.info["episode"].pop("_t")
            if "episode" in results[0].info:
                told.append(results[0].info["_episode"].sum())
            assert equal(*results)
            over = results[0].terminated | results[0].truncated
            if mode is AutoresetMode.DISABLED and over.any():
                for envs in (singles, native):
                    await envs.reset(options={"reset_mask": over})
            if step == 30:  # half episodes don't count
                for envs in (singles, native):
                    await envs.reset(options={"reset_mask": np.array([True, False, False, False])})
                    await envs.set_state(await envs.get_state([1]), [3])
        assert len(told) > 3
        ours, theirs = (envs.episode_stats.epoch() for envs in (native, singles))
        assert ours.pop("time/mean") > 0 and theirs.pop("time/mean") > 0
        # (episodes that end in one step are summed up in the order in which workers were done)
        assert ours == pytest.approx(dict(theirs), rel=1e-9)
        assert ours["x_velocity/max"] > 0 and ours["episode_count"] >= sum(told)


async def test_statistics_of_steps_on_the_loop():
    """As Gymnasium's own wrapper counts them."""
    from gymnasium.wrappers.vector import RecordEpisodeStatistics

    def wrapped(num_envs):
        import gymnasium as gym

        return RecordEpisodeStatistics(gym.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point"))

    ended = {}
    for name, make, kwargs in [
        ("gymnasium", wrapped, {}),
        ("ours", "CartPole-v1", {"episode_stats": True, "stats_prefix": "x"}),
    ]:
        async with aioenv.make_vec(make, 4, backend="native", **kwargs) as envs:
            envs._run_in = "inline"
            await envs.reset(seed=0)
            ended[name] = []
            for step in range(200):
                info = (await envs.step([(step + slot) % 3 == 0 for slot in range(4)])).info
                if "episode" in info:
                    mask = info["_episode"]
                    ended[name].append((step, mask.tolist(), *(info["episode"][k][mask].tolist() for k in "rl")))
            if kwargs:
                assert envs.episode_stats.prefix == "x"
                assert envs.episode_stats.total_episodes == sum(len(e[2]) for e in ended[name])
            else:
                with pytest.raises(RuntimeError, match="episode_stats=True"):
                    envs.episode_stats  # noqa: B018
    assert ended["ours"] == ended["gymnasium"] and len(ended["ours"]) > 10
