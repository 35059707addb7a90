"""The states and returns that a page is shown, against those that the envs and the statistics have."""

import os
import signal

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.watching.observer import SlotObserver
from tests.kits.version_kit import needs_mujoco_batch

N = 6
SLOTS = np.array([0, 2, 3])


def hoppers(mode, **kwargs):
    render = aioenv.RenderConfig(workers=0)
    return aioenv.make_vec("Hopper-v5", N, autoreset_mode=mode, render=render, episode_stats=True, **kwargs)


def attach(envs):
    observer = SlotObserver(SLOTS, N, envs._backend.images.pool.sources[0].state_size, envs.autoreset_mode)
    envs._backend.attach_observer(observer)
    return observer


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(
    ("backend", "num_workers"),
    [
        ("workers", 2),
        ("workers", 0),
        pytest.param("native", 0, marks=needs_mujoco_batch),
        pytest.param("native", 2, marks=needs_mujoco_batch),
    ],
)
async def test_returns_are_those_of_the_episode_statistics(backend, num_workers, mode):
    async with hoppers(mode, backend=backend, num_workers=num_workers) as envs:
        observer = attach(envs)
        assert not envs.draws_beside
        await envs.reset(seed=3)
        last, ended = np.full(N, np.nan), 0
        for _ in range(120):
            result = await envs.step(envs.action_space.sample())
            over = result.terminated | result.truncated
            if "episode" in result.info:
                last[over] = result.info["episode"]["r"][over]
            ended += int(over[SLOTS].sum())
            np.testing.assert_allclose(observer.last_returns, last[SLOTS])
            # a state begins with the time; then qpos, of which Hopper's observations leave out the first
            start = 1 + int(envs._backend.images.pool.sources[0].numbered)
            if mode is not AutoresetMode.SAME_STEP or not over.any():
                np.testing.assert_array_equal(observer.states[:, start + 1 : start + 6], result.obs[SLOTS, :5])
            if mode is AutoresetMode.DISABLED and over.any():
                await envs.reset(options={"reset_mask": over})
                assert not observer.lengths[over[SLOTS]].any()
        assert observer.episodes == ended > 3
        running = envs.episode_stats._returns[SLOTS]
        began = ~observer._pending_reset
        np.testing.assert_allclose(observer.returns[began], running[began])
        np.testing.assert_array_equal(observer.lengths[began], envs.episode_stats._lengths[SLOTS][began])


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
async def test_returns_with_spare_envs(mode):
    async with hoppers(mode, spare_envs=True) as envs:
        observer = attach(envs)
        await envs.reset(seed=3)
        last = np.full(N, np.nan)
        for _ in range(80):
            result = await envs.step(envs.action_space.sample())
            over = result.terminated | result.truncated
            if "episode" in result.info:
                last[over] = result.info["episode"]["r"][over]
            np.testing.assert_allclose(observer.last_returns, last[SLOTS])
            if mode is AutoresetMode.NEXT_STEP:
                np.testing.assert_array_equal(observer.states[:, 2:7], result.obs[SLOTS, :5])
        assert observer.episodes > 3


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(
    ("backend", "num_workers"),
    [("workers", 2), ("workers", 0), pytest.param("native", 0, marks=needs_mujoco_batch)],
)
async def test_an_episode_that_began_before_the_page_does_not_count(backend, num_workers, mode):
    """Its first steps were not seen."""
    async with hoppers(mode, backend=backend, num_workers=num_workers) as envs:
        envs.action_space.seed(0)
        await envs.reset(seed=3)
        observer, last, ended = None, np.full(N, np.nan), np.zeros(N, int)
        for number in range(120):
            if number == 3:  # before any has ended
                observer = attach(envs)
            result = await envs.step(envs.action_space.sample())
            over = result.terminated | result.truncated
            if over.any():
                assert observer is not None
                counts = over & (ended > 0)
                last[counts] = result.info["episode"]["r"][counts]
                ended[over] += 1
            if observer is not None:
                np.testing.assert_allclose(observer.last_returns, last[SLOTS])
                assert observer.whole[ended[SLOTS] == 0].sum() == 0
            if mode is AutoresetMode.DISABLED and over.any():
                await envs.reset(options={"reset_mask": over})
        assert observer.episodes == (ended[SLOTS] - 1).sum() > 0 and len(observer.recent) == observer.episodes


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", AutoresetMode)
async def test_an_episode_that_was_lost_with_its_worker_does_not_count(mode):
    async with hoppers(mode, num_workers=2, restart=aioenv.RestartPolicy()) as envs:
        envs.action_space.seed(0)
        source = envs._backend.images.pool.sources[0]
        observer = SlotObserver(SLOTS, N, source.state_size, mode, whole=True, restarts=True)
        envs._backend.attach_observer(observer)
        await envs.reset(seed=3)
        returns, counted, lost = [], 0, 0
        for number in range(100):
            if number in (5, 40):
                os.kill(envs.workers[0].pid, signal.SIGKILL)
            result = await envs.step(envs.action_space.sample())
            over = result.terminated | result.truncated
            lost += int(result.info.get("restarted", np.zeros(N, bool))[SLOTS].sum())
            ends = result.info.get("_episode", np.zeros(N, bool))
            returns += [result.info["episode"]["r"][slot] for slot in SLOTS[ends[SLOTS]]]
            counted += int(ends[SLOTS].sum())
            assert observer.episodes == counted
            if mode is AutoresetMode.DISABLED and over.any():
                await envs.reset(options={"reset_mask": over})
        assert lost >= 3 and counted > 3
        np.testing.assert_allclose(sorted(observer.recent), sorted(returns))
        running = ~observer._pending_reset
        np.testing.assert_allclose(observer.returns[running], envs.episode_stats._returns[SLOTS][running])
        np.testing.assert_array_equal(observer.lengths[running], envs.episode_stats._lengths[SLOTS][running])


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize(
    ("backend", "num_workers"),
    [("workers", 2), ("workers", 0), pytest.param("native", 0, marks=needs_mujoco_batch)],
)
async def test_an_episode_whose_state_was_set_does_not_count(backend, num_workers, mode):
    """Its end, and the reset after it, are seen as before."""
    async with hoppers(mode, backend=backend, num_workers=num_workers) as envs:
        envs.action_space.seed(0)
        observer = attach(envs)
        await envs.reset(seed=3)
        states, returns = [], []
        for number in range(120):
            result = await envs.step(envs.action_space.sample())
            ends = result.info.get("_episode", np.zeros(N, bool))
            returns += [result.info["episode"]["r"][slot] for slot in SLOTS[ends[SLOTS]]]
            if number == 4 or (ends.any() and len(states) < 3):
                states.append(await envs.get_state())
            if number in (30, 50, 70):  # in the midst of episodes, and where some have just ended
                await envs.set_state(states[(number - 30) // 20])
            running = envs.episode_stats._is_whole[SLOTS] & ~envs.episode_stats._pending_reset[SLOTS]
            np.testing.assert_array_equal(observer._pending_reset, envs.episode_stats._pending_reset[SLOTS])
            np.testing.assert_array_equal(observer.whole[running], running[running])
            np.testing.assert_allclose(observer.returns[running], envs.episode_stats._returns[SLOTS][running])
        assert len(states) == 3
        np.testing.assert_allclose(sorted(observer.recent), sorted(returns))


@pytest.mark.asyncio
async def test_without_render_workers_no_image_is_drawn_and_the_errors_say_so():
    render = aioenv.RenderConfig(workers=0)
    async with aioenv.make_vec("Hopper-v5", 2, num_workers=1, render=render) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.RenderError, match=r"workers=0"):
            await envs.render()
        with pytest.raises(aioenv.RenderError, match="render_stream"):
            envs.render_stream()
        assert envs._session.pools[0].pids == ()
        await envs.step(envs.action_space.sample())
    with pytest.raises(ValueError, match="workers=0"):
        aioenv.make_vec("Hopper-v5", 2, pixels=render)
    with pytest.raises(ValueError, match="workers"):
        aioenv.RenderConfig(workers=-1)
    with pytest.raises(ValueError, match="workers"):
        aioenv.RenderConfig(workers=False)


@pytest.mark.asyncio
async def test_send_and_recv_are_observed_too():
    async with aioenv.make_vec("Hopper-v5", N, num_workers=2, render=aioenv.RenderConfig(workers=0)) as envs:
        observer = attach(envs)
        envs.send_reset(seed=0)
        rewards = np.zeros(N)
        for _ in range(10):
            ready = await envs.recv(N)
            rewards[ready.slots] += ready.reward
            envs.send(np.zeros((len(ready.slots), 3)), ready.slots)  # with these no Hopper falls so early
        ready = await envs.recv(N)
        rewards[ready.slots] += ready.reward
        assert observer.known.all()
        assert (observer.lengths == 10).all()
        np.testing.assert_allclose(observer.returns, rewards[SLOTS])
