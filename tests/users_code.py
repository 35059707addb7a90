"""What type checkers make of code that uses aioenv. Nothing here is run: `make types` checks it.

`assert_type` pins what they infer. A `type: ignore` pins what they find wrong: one that is not needed is an error.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, assert_type

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv import sync
from aioenv.envs import SubStepEnv
from aioenv.worker.description import EnvMetadata

Images = npt.NDArray[np.uint8]
Rewards = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def make_env() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def policy(obs: Any) -> npt.NDArray[np.int64]:
    return np.zeros(len(obs), np.int64)


async def steps() -> int:
    async with aioenv.make_vec("CartPole-v1", 8) as envs:
        assert_type(envs, aioenv.AsyncVectorEnv)
        assert_type(await envs.reset(seed=0), aioenv.ResetResult)
        result = await envs.step(envs.action_space.sample())
        assert_type(result, aioenv.StepResult)
        assert_type(result.reward, Rewards)
        _, _, terminated, _, info = result
        assert_type(terminated, Flags)
        assert_type(info, dict[str, Any])
        async for ready in envs.ready(min_slots=2):
            assert_type(ready, aioenv.Ready)
            envs.send(policy(ready.obs), ready.slots)
        one = await envs.step_at(0, 1)
        assert_type(one, aioenv.SlotStep)
        assert_type(one.reward, float)
        assert_type(one.truncated, bool)
        assert_type(await envs.call_at([0, 1], "length"), tuple[Any, ...])
        assert_type(await envs.render("grid"), Images)
        assert_type(envs.spec, EnvSpec | None)
        assert_type(await envs.rollout(policy, 16), aioenv.Rollout)
        assert_type(await aioenv.evaluate(envs, policy, seed=0), aioenv.Evaluation)
        async for episode in envs.episodes(policy, 3):
            assert_type(episode, aioenv.Episode)
        states = await envs.get_state()
        assert_type(states, list[aioenv.EnvState])
        await envs.set_state(states[:1], [0])
    assert_type(await aioenv.AsyncVectorEnv([make_env] * 2, autoreset_mode="SameStep"), aioenv.AsyncVectorEnv)
    wrapped = aioenv.make_vec(make_env, 2, wrappers=[lambda env: gym.wrappers.TimeLimit(env, 9)], cpu_affinity="spread")
    assert_type(await wrapped, aioenv.AsyncVectorEnv)
    native = await aioenv.make_vec("Ant-v5", 2, backend="native", autoreset_mode=AutoresetMode.SAME_STEP)
    native.model_field("body_mass")[0] *= 2
    assert_type(await aioenv.EnvCreator("CartPole-v1").metadata(), EnvMetadata)
    return 0


assert_type(aioenv.run(steps()), int)


async def images() -> None:
    async with aioenv.RenderPool("robot.xml", devices=[0], quality="fast") as pool:
        assert_type(await pool.render(None, width=84, height=84, camera=["top", -1]), Images)
        assert_type(pool.submit(None, width=84, height=84), asyncio.Future[Images])
        picture, depth = await pool.render(None, width=84, height=84, depth=True)
        assert picture.shape[:-1] == depth.shape


def blocking() -> None:
    with sync.make_vec("CartPole-v1", 8, num_workers=2, max_episode_steps=9) as envs:
        assert_type(envs, sync.VectorEnv)
        assert_type(envs.step(envs.action_space.sample()), aioenv.StepResult)
        assert_type(envs.step_at(0, 1).reward, float)
        assert_type(sync.evaluate(envs, policy), aioenv.Evaluation)
        assert_type(sync.record(envs, "run.mp4", steps=9), aioenv.Recording)
    with sync.RenderPool("robot.xml", workers_per_device=2) as pool:
        assert_type(pool.render(None, width=84, height=84), Images)
        assert_type(pool.submit(None, width=84, height=84), Future[Images])
        assert_type(pool.num_workers, int)


class Pole(aioenv.NativeMujocoEnv):
    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__(num_envs, "inverted_pendulum.xml", frame_skip=2, **kwargs)
        self.set_observation_size(4)

    def draw_start(self, slots: npt.NDArray[np.int64]) -> tuple[Rewards, Rewards]:
        return self.init_qpos + self.uniform(slots, -0.01, 0.01, 2), self.init_qvel + self.normal(slots, 2)

    def observe(self, slots: Any) -> Rewards:
        return np.concatenate((self.qpos[slots], self.qvel[slots]), axis=1)

    def outcome(self, actions: Any, obs: Rewards) -> tuple[npt.NDArray[Any], Flags, dict[str, npt.NDArray[Any]]]:
        fallen = np.abs(obs[:, 1]) > 0.2
        return 1.0 - fallen, fallen, {"x": obs[:, 0].copy()}


class Lunch:
    """Two actors, one after the other."""

    def __init__(self) -> None:
        self.observation_spaces = {"cook": gym.spaces.Box(0, 1), "guest": gym.spaces.Box(0, 1, (2,))}
        self.action_spaces = {"cook": gym.spaces.Discrete(2), "guest": gym.spaces.Discrete(3)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def actor_id(self) -> tuple[str, int]:
        return "cook", 0

    def is_actor_done(self) -> bool:
        return False

    def actor_rewards(self) -> None:
        return None

    def close(self) -> None: ...


aioenv.AsyncVectorEnv([lambda: SubStepEnv(Lunch())])


class Tint(aioenv.Modder):
    def randomize(self) -> None:
        self.model.geom_rgba[:, :3] = self.rng.random((self.model.ngeom, 3))


async def wrong(envs: aioenv.AsyncVectorEnv) -> None:
    aioenv.make_vecs  # type: ignore[attr-defined]
    sync.make_vecs  # type: ignore[attr-defined]
    aioenv.make_vec("CartPole-v1", num_workers="2")  # type: ignore[arg-type]
    aioenv.make_vec("CartPole-v1", backend="nativ")  # type: ignore[arg-type]
    aioenv.AsyncVectorEnv([make_env], autoreset_mode="same_step")  # type: ignore[arg-type]
    aioenv.AsyncVectorEnv([make_env], on_timeout="restarts")  # type: ignore[arg-type]
    aioenv.AsyncVectorEnv([make_env], workers=2)  # type: ignore[call-arg]
    aioenv.RenderConfig(quality="quick")  # type: ignore[arg-type]
    envs.step(policy).obs  # type: ignore[attr-defined]
    await envs.render("gird")  # type: ignore[call-overload]
    sync.VectorEnv([make_env], workers=2)  # type: ignore[call-arg]
    sync.make_vec("CartPole-v1", num_workers="2")  # type: ignore[arg-type]
    pool = sync.RenderPool("robot.xml", workers=2)  # type: ignore[call-arg]
    pool.render(None, width=84)  # type: ignore[call-overload]
    pool.images  # type: ignore[attr-defined]
    sync.evaluate(envs, policy)  # type: ignore[arg-type]
    sync.record("CartPole-v1", "run.mp4")  # type: ignore[call-arg]
