"""Wrappers where envs fail, hang or lose their process: other slots are counted once, and nothing is mixed up."""

from __future__ import annotations

import asyncio

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import DictInfoToList, TransformObservation

import aioenv
from aioenv import wrappers
from aioenv.wrappers import (
    ClipReward,
    FrameStack,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    VectorWrapper,
)
from tests.kits.compare import assert_same
from tests.kits.counter_kit import Counter, counters
from tests.kits.version_kit import needs_gymnasium

OK, RAISE, KILL, WAIT = (getattr(Counter, name) for name in ("OK", "RAISE", "KILL", "WAIT"))
MODES = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)


@pytest.mark.asyncio
@MODES
@pytest.mark.parametrize("number", [2, 0])
async def test_others_go_on_after_an_env_has_raised(mode, number):
    made = aioenv.AsyncVectorEnv(counters(3, length=9), num_workers=number, autoreset_mode=mode)
    async with RecordEpisodeStatistics(NormalizeReward(FrameStack(made, 3))) as envs:
        first = await envs.reset(seed=0)
        await envs.step([OK, OK, OK])
        with pytest.raises(aioenv.EnvError) as error:
            await envs.step([OK, RAISE, OK])
        partial = error.value.partial
        assert isinstance(partial, aioenv.StepResult)
        assert partial.obs[[0, 2], :, 1].tolist() == [[0, 1, 2]] * 2
        assert partial.reward[1] == 0 and (partial.reward[[0, 2]] > 0).all()
        obs, _ = await envs.reset(seed=5, options={"reset_mask": np.array([False, True, False])})
        assert obs[[0, 2], :, 1].tolist() == [[0, 1, 2]] * 2, "of the others, as they were"
        assert obs[1, :, 1].tolist() == [0, 0, 0] and obs[1, 0, 0] != first.obs[1, 0, 0]
        obs, *_ = await envs.step([OK, OK, OK])
        assert obs[:, :, 1].tolist() == [[1, 2, 3], [0, 0, 1], [1, 2, 3]]
        assert envs.episode_lengths.tolist() == [3, 1, 3]


@pytest.mark.asyncio
async def test_rows_of_failed_slots_are_not_normalized_with():
    async with (
        NormalizeObservation(aioenv.AsyncVectorEnv(counters(3), num_workers=1)) as envs,
        aioenv.AsyncVectorEnv(counters(3), num_workers=1) as plain,
    ):
        seen = [(await plain.reset(seed=0)).obs]
        await envs.reset(seed=0)
        with pytest.raises(aioenv.EnvError):
            await envs.step([OK, RAISE, OK])
        seen.append((await plain.step([OK, OK, OK])).obs[[0, 2]])
        every = np.concatenate(seen)
        assert envs.obs_rms.count == pytest.approx(5, abs=1e-3)
        assert envs.obs_rms.mean == pytest.approx(every.mean(axis=0), rel=1e-4)
        assert envs.update_running_mean
        await envs.reset(seed=0)
        assert envs.obs_rms.count == pytest.approx(8, abs=1e-3)


@pytest.mark.asyncio
async def test_a_worker_that_died():
    """Nothing was sent to the others once it is gone; a restarted slot is truncated, and its stack starts again."""
    restart = aioenv.RestartPolicy(max_restarts=3)
    made = aioenv.AsyncVectorEnv(counters(2, length=9), num_workers=2, restart=restart)
    async with FrameStack(made, 2) as envs:
        await envs.reset(seed=0)
        await envs.step([OK, OK])
        result = await envs.step([OK, KILL])
        assert result.truncated.tolist() == [False, True] and result.info["restarted"].tolist() == [False, True]
        assert result.obs[0, :, 1].tolist() == [1, 2]
        rollout = await envs.rollout(lambda obs: np.zeros(2, np.int64), 3)
        assert rollout.valid.tolist() == [[True, False], [True, True], [True, True]]
        assert rollout.obs[1:, 1, :, 1].tolist() == [[0, 0], [0, 1]]
        assert rollout.obs[:, 0, :, 1].tolist() == [[1, 2], [2, 3], [3, 4]]

    async with FrameStack(aioenv.AsyncVectorEnv(counters(2), num_workers=2), 2) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.WorkerDied) as error:
            await envs.step([OK, KILL])
        assert error.value.partial.obs[0, :, 1].tolist() == [0, 1]
        envs.pause(1)
        assert (await envs.step([OK, OK])).obs[0, :, 1].tolist() == [1, 2]


@pytest.mark.asyncio
async def test_a_rollout_in_which_a_worker_is_restarted():
    actions = iter([[OK, OK], [KILL, OK], [OK, OK], [OK, OK]])
    made = aioenv.AsyncVectorEnv(counters(2), num_workers=2, restart=aioenv.RestartPolicy(max_restarts=3))
    async with NormalizeReward(made) as envs:
        await envs.reset(seed=0)
        rollout = await envs.rollout(lambda obs: np.array(next(actions)), 4)
        assert rollout.valid[:, 0].tolist() == [True, False, False, True] and rollout.valid[:, 1].all()


@pytest.mark.asyncio
async def test_a_rollout_in_which_an_env_raises():
    actions = iter([[OK, OK], [OK, RAISE]])
    async with NormalizeReward(FrameStack(aioenv.AsyncVectorEnv(counters(2), num_workers=2), 2)) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.EnvError) as error:
            await envs.rollout(lambda obs: np.array(next(actions)), 4)
        partial = error.value.partial
        assert isinstance(partial, aioenv.Rollout) and partial.valid.tolist() == [[True, True], [True, False]]
        assert partial.last_obs[0, :, 1].tolist() == [1, 2]


@pytest.mark.asyncio
@pytest.mark.parametrize("then", ["recv", "step", "reset", "rollout"])
async def test_a_step_that_timed_out_is_counted_once(gate, then, caplog):
    path, let_go = gate
    made = aioenv.AsyncVectorEnv(counters(2, length=2, gate=path), num_workers=2)
    async with RecordEpisodeStatistics(FrameStack(NormalizeReward(made), 3)) as envs:
        await envs.reset(seed=0)
        await envs.step([OK, OK])
        count = envs.return_rms.count
        with pytest.raises(aioenv.StepTimeout):
            await envs.step([OK, WAIT], timeout_s=0.05)
        waiting = asyncio.ensure_future(envs.recv())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert envs.return_rms.count == count
        let_go()
        match then:
            case "recv":
                ready = await envs.recv()
                assert ready.obs[:, :, 1].tolist() == [[0, 1, 2]] * 2
                assert ready.terminated.all() and ready.info["episode"]["l"].tolist() == [2, 2]
                assert not caplog.records
            case "step":
                obs, *_ = await envs.step([OK, OK])
                assert obs[:, :, 1].tolist() == [[0, 0, 0]] * 2, "the step that resets"
                assert "ends of the episodes in slots [0, 1]" in caplog.text
            case "reset":
                obs, _ = await envs.reset(seed=1)
                assert obs[:, :, 1].tolist() == [[0, 0, 0]] * 2
            case "rollout":
                rollout = await envs.rollout(lambda obs: np.zeros(2, np.int64), 2)
                assert rollout.valid.tolist() == [[False] * 2, [True] * 2]
                assert rollout.obs[:, 0, :, 1].tolist() == [[0, 1, 2], [0, 0, 0]]
        assert envs.episode_count == 2
        assert_same(list(envs.length_queue), [np.int64(2)] * 2)


@pytest.mark.asyncio
@pytest.mark.parametrize("then", ["recv", "step"])
async def test_a_refused_call_keeps_the_result_of_a_cancelled_step(gate, then, caplog):
    """`recv` has it; a step that is sent drops it. The wrappers see it once."""
    path, let_go = gate
    made = aioenv.AsyncVectorEnv(counters(2, length=2, gate=path), num_workers=2)
    async with RecordEpisodeStatistics(FrameStack(made, 3)) as envs:
        await envs.reset(seed=0)
        await envs.step([OK, OK])
        with pytest.raises(aioenv.StepTimeout):
            await envs.step([OK, WAIT], timeout_s=0.05)
        let_go()
        for refused in (lambda: envs.step([OK, 99]), lambda: envs.step([OK]), lambda: envs.reset(seed=[1, 2, 3])):
            with pytest.raises((aioenv.ActionError, ValueError)):
                await refused()
            assert envs.episode_count == 2 and not caplog.records
        if then == "recv":
            ready = await envs.recv()
            assert ready.obs[:, :, 1].tolist() == [[0, 1, 2]] * 2 and ready.info["episode"]["l"].tolist() == [2, 2]
        else:
            obs, *_ = await envs.step([OK, OK])
            assert obs[:, :, 1].tolist() == [[0, 0, 0]] * 2, "the step that resets"
            assert "ends of the episodes in slots [0, 1]" in caplog.text
        with pytest.raises(aioenv.NoAsyncCallError):
            await envs.recv()


@pytest.mark.asyncio
async def test_a_cancelled_step_in_which_an_env_raised(gate):
    """`recv` raises its error, with the others' wrapped results; a step that drops them finds the slot failed."""
    path, let_go = gate
    for then in ("recv", "step"):
        made = aioenv.AsyncVectorEnv(counters(3, gate=path), num_workers=3)
        async with FrameStack(made, 2) as envs:
            await envs.reset(seed=0)
            with pytest.raises(aioenv.StepTimeout):
                await envs.step([RAISE, OK, WAIT], timeout_s=0.05)
            let_go()
            if then == "recv":
                with pytest.raises(aioenv.EnvError) as error:
                    await envs.recv()
                assert isinstance(error.value.partial, aioenv.Ready)
                partial = error.value.partial
                assert partial.obs[np.isin(partial.slots, [1, 2]), :, 1].tolist() == [[0, 1]] * 2
            else:
                with pytest.raises(aioenv.EnvError, match="slot 0"):
                    await envs.step([OK, OK, OK])
            await envs.reset(options={"reset_mask": np.array([True, False, False])})
            obs, *_ = await envs.step([OK, OK, OK])
            assert obs[:, :, 1].tolist() == [[0, 1], [1, 2], [1, 2]]


@pytest.mark.asyncio
async def test_paused_slots_and_a_cancelled_step(gate):
    path, let_go = gate
    made = aioenv.AsyncVectorEnv(counters(3, gate=path), num_workers=3)
    async with wrappers.RecordEpisodeStatistics(NormalizeObservation(made)) as envs:
        await envs.reset(seed=0)
        envs.pause(1)
        count = envs.obs_rms.count
        with pytest.raises(aioenv.StepTimeout):
            await envs.step([OK, OK, WAIT], timeout_s=0.05)
        let_go()
        ready = await envs.recv()
        assert ready.slots.tolist() == [0, 2] and ready.obs.shape == (2, 2) and ready.info["t"].tolist() == [1, 1]
        assert envs.obs_rms.count == count + 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "mode",
    [  # Gymnasium 1.3 leaves a step of each episode out under SAME_STEP
        pytest.param(mode, id=mode.name, marks=[needs_gymnasium("1.4")] if mode is AutoresetMode.SAME_STEP else [])
        for mode in AutoresetMode
    ],
)
async def test_steps_that_paused_slots_leave_out_are_not_counted(mode):
    """A slot is paused in the middle of an episode, and after its end. Episodes have 3 steps."""
    lengths, masks = [], []
    made = aioenv.AsyncVectorEnv(counters(2, length=3), num_workers=0, autoreset_mode=mode)
    async with RecordEpisodeStatistics(made) as envs:
        await envs.reset(seed=0)
        for number in range(20):
            if number in (2, 9):
                envs.pause(0)
            if number in (5, 12):
                envs.resume(0)
            result = await envs.step([OK, OK])
            if "episode" in result.info:
                lengths += result.info["episode"]["l"][result.info["_episode"]].tolist()
                masks.append((result.info["_episode"], result.terminated | result.truncated))
            ended = result.terminated | result.truncated
            if mode is AutoresetMode.DISABLED and ended.any():
                await envs.reset(options={"reset_mask": ended})
        assert set(lengths) == {3} and list(envs.length_queue) == lengths
    for told, ended in masks:
        assert_same(told, ended, "a reset leaves the infos of the last step alone")


@pytest.mark.asyncio
@pytest.mark.parametrize("options", [None, {"reset_mask": np.array([True, True])}], ids=["all", "mask"])
async def test_a_reset_that_leaves_a_paused_slot_out_does_not_begin_its_episode(options):
    made = aioenv.AsyncVectorEnv(counters(2, length=3), num_workers=0)
    async with RecordEpisodeStatistics(made) as envs:
        for steps in (2, 3):
            await envs.reset(seed=0)
            for _ in range(steps):
                await envs.step([OK, OK])
            envs.pause(0)
            await envs.reset(options=options)
            envs.resume(0)
            if steps == 2:
                result = await envs.step([OK, OK])
                assert result.info["_episode"].tolist() == [True, False]
                assert result.info["episode"]["l"][0] == 3 and result.info["episode"]["r"][0] == 6
            else:
                rollout = await envs.rollout(lambda obs: np.array([OK, OK]), 3)
                assert rollout.valid.T.tolist() == [[False, True, True], [True, True, True]]


def in_dict(envs):
    single = gym.spaces.Dict({"all": envs.env.single_observation_space, "same": envs.env.single_observation_space})
    return VectorWrapper(envs, TransformObservation, lambda obs: {"all": obs, "same": obs}, None, single)


@pytest.mark.asyncio
@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("wrap", [lambda envs: NormalizeReward(ClipReward(envs, -1.0)), in_dict])
async def test_a_rollout_begins_with_the_last_observation_of_a_slot_that_was_paused(wrap, taken, gate):
    """The step before was cancelled, and has no row of that slot."""
    path, let_go = gate
    made = await aioenv.AsyncVectorEnv(counters(3, length=9, gate=path), num_workers=3)
    async with wrap(ClipReward(made, -1.0)) as envs:
        await envs.reset(seed=0)
        await envs.step([OK, OK, OK])
        envs.pause(1)
        with pytest.raises(aioenv.StepTimeout):
            await envs.step([OK, OK, WAIT], timeout_s=0.05)
        let_go()
        if taken:
            assert (await envs.recv()).slots.tolist() == [0, 2]
        envs.resume(1)
        rollout = await envs.rollout(lambda obs: np.array([OK] * 3), 2)
        obs = rollout.obs["same"] if isinstance(rollout.obs, dict) else rollout.obs
        assert obs[:, :, 1].tolist() == [[2, 1, 2], [3, 2, 3]] and obs[0, 1].tolist() == [obs[1, 1, 0], 1]


@pytest.mark.asyncio
async def test_infos_in_lists_of_some_slots(gate):
    path, let_go = gate
    made = aioenv.AsyncVectorEnv(counters(3, gate=path), num_workers=3)
    async with VectorWrapper(made, DictInfoToList) as envs:
        await envs.reset(seed=0)
        envs.pause(1)
        with pytest.raises(aioenv.StepTimeout):
            await envs.step([OK, OK, WAIT], timeout_s=0.05)
        let_go()
        ready = await envs.recv()
        assert ready.slots.tolist() == [0, 2] and [info["t"] for info in ready.info] == [1, 1]


@pytest.mark.asyncio
async def test_a_vector_env_that_is_closed_while_a_step_waits(gate):
    made = aioenv.AsyncVectorEnv(counters(2, gate=gate[0]), num_workers=1)
    envs = await NormalizeReward(made)
    await envs.reset(seed=0)
    step = asyncio.ensure_future(envs.step([OK, WAIT]))
    await asyncio.sleep(0)
    await envs.close(grace_s=0.1)
    with pytest.raises(aioenv.ClosedError):
        await step
    with pytest.raises(aioenv.ClosedError):
        await envs.step([OK, OK])
