"""With `RestartPolicy(resume=True)` a run with killed workers is, bit for bit, the run without."""

from __future__ import annotations

import asyncio
import os
import signal

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from tests.faults.resume_kit import LENGTH, NUM_ENVS, POLICY, compare, kill, step_and_kill

pytestmark = pytest.mark.asyncio

TASKS = (
    "Ant HalfCheetah Hopper Humanoid HumanoidStandup InvertedDoublePendulum InvertedPendulum Pusher Reacher Swimmer "
    "Walker2d"
).split()


def kills(steps: int, seed: int = 0) -> dict[int, tuple[int, bool]]:
    rng = np.random.default_rng(seed)
    return {t: (int(rng.integers(2)), bool(rng.integers(2))) for t in range(steps) if rng.random() < 0.4}


@pytest.mark.parametrize("task", TASKS)
async def test_every_task(task):
    await compare(lambda: gym.make(f"{task}-v5", max_episode_steps=LENGTH), AutoresetMode.NEXT_STEP, 12, kills(12))


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP], ids=lambda mode: mode.value)
async def test_every_autoreset_mode(mode, way):
    await compare(lambda: gym.make("Ant-v5", max_episode_steps=4), mode, 9, {3: (0, False), 4: (1, True), 7: (0, True)})


async def test_without_autoreset():
    def make():
        return gym.make("HalfCheetah-v5", max_episode_steps=30)

    await compare(make, AutoresetMode.DISABLED, 12, kills(12, 2))


async def test_in_wrappers_that_are_known():
    def make():
        env = gym.make("HalfCheetah-v5", max_episode_steps=LENGTH)
        env = gym.wrappers.RescaleAction(env, np.float32(-0.5), np.float32(0.5))
        return gym.wrappers.ClipReward(gym.wrappers.FlattenObservation(env), -1, 1)

    await compare(make, AutoresetMode.NEXT_STEP, 12, kills(12, 3))


async def test_slots_that_are_stepped_by_themselves():
    def make():
        return gym.make("Hopper-v5", max_episode_steps=LENGTH)

    single = [make() for _ in range(NUM_ENVS)]
    rng = np.random.default_rng(4)
    async with aioenv.AsyncVectorEnv(
        [make] * NUM_ENVS, num_workers=2, autoreset_mode=AutoresetMode.DISABLED, restart=POLICY
    ) as envs:
        envs.send_reset(seed=5)
        await envs.recv(NUM_ENVS)
        for slot, env in enumerate(single):
            env.reset(seed=5 + slot)
        over = np.zeros(NUM_ENVS, bool)
        for t in range(25):
            slots = np.flatnonzero(rng.random(NUM_ENVS) < 0.5)
            if not len(slots):
                continue
            if t % 3 == 0:
                kill(envs.workers[t % 2].pid)
            resets, steps = slots[over[slots]], slots[~over[slots]]
            actions = rng.uniform(-1, 1, (len(steps), 3)).astype(np.float32)
            if len(resets):
                envs.send_reset(resets)
            if len(steps):
                envs.send(actions, steps)
            ready = await envs.recv(len(slots))
            assert ready.slots.tolist() == slots.tolist()
            by_slot = dict(zip(steps.tolist(), actions, strict=True))
            for i, slot in enumerate(slots.tolist()):
                if over[slot]:
                    obs, _ = single[slot].reset()
                    over[slot] = False
                else:
                    obs, reward, terminated, truncated, _ = single[slot].step(by_slot[slot])
                    assert ready.reward[i] == reward and ready.truncated[i] == truncated
                    over[slot] = terminated or truncated
                assert ready.obs[i].tobytes() == obs.tobytes(), f"slot {slot} at {t}"
    for env in single:
        env.close()


async def test_what_can_not_be_resumed_is_refused_at_the_start():
    with pytest.raises(aioenv.ResumeError, match=r"slot 0 can't be resumed: the env CartPoleEnv is no MuJoCo env"):
        await aioenv.make_vec("CartPole-v1", 2, restart=POLICY)

    def make():
        return gym.wrappers.NormalizeObservation(gym.make("Hopper-v5"))

    with pytest.raises(aioenv.ResumeError, match="NormalizeObservation"):
        await aioenv.AsyncVectorEnv([make] * 2, restart=POLICY)


async def test_what_comes_out_different_is_truncated(caplog):
    """An env that knows more than its model and data can't be told from one that does not, but its steps can."""

    def make():
        from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

        class Moody(HopperEnv):
            count = 0

            def step(self, action):
                self.count += 1
                return super().step(np.asarray(action) * (1 if self.count < 3 else 0.5))

        return Moody()

    async with aioenv.AsyncVectorEnv([make] * 2, num_workers=2, restart=POLICY) as envs:
        await envs.reset(seed=1)
        actions = np.full((2, 3), 0.7, np.float32)
        for _ in range(4):
            last = await envs.step(actions)
        result = await step_and_kill(envs, actions, 0, True)
        assert result.truncated.tolist() == [True, False]
        assert result.info["restarted"].tolist() == [True, False]
        assert result.obs[0].tobytes() == last.obs[0].tobytes()
    assert "slot 0 could not be resumed: " in caplog.text


class TellsOnce(gym.Env):
    """Tells its state once, when it is asked what that takes; and then hangs, or dies."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, how: str) -> None:
        self.how, self.told = how, False

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def get_state(self):
        if self.told and self.how == "hang":
            signal.pause()
        elif self.told:
            os._exit(3)
        self.told = True

    def set_state(self, state):
        pass


@pytest.mark.parametrize("how", ["hang", "die"])
async def test_an_env_that_hangs_or_dies_when_its_worker_is_up_already_has_not_started(how):
    kind = aioenv.StartTimeout if how == "hang" else aioenv.WorkerStartError
    message = r"was not ready within start_timeout_s=2\.0" if how == "hang" else "exited with code 3 while starting"
    factories = [lambda: TellsOnce(how)] * 2
    async with asyncio.timeout(20):
        with pytest.raises(kind, match=message):
            await aioenv.AsyncVectorEnv(factories, num_workers=2, restart=POLICY, start_timeout_s=2.0)
