"""A user's own vector env with invalid results: one clear error, wherever it lives."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.rollout.subset import row_info, row_infos
from tests.kits.native_kit import OK, Batch, everywhere


class Odd(Batch):
    """Gives what `reset_odd` and `step_odd` make of a good result."""

    reset_odd = step_odd = None

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        return result if self.reset_odd is None else self.reset_odd(result)

    def step(self, actions):
        result = super().step(actions)
        return result if self.step_odd is None else self.step_odd(result)


RESETS = {
    "one value": (lambda result: result[0], "reset: expected 2 values (obs, info) from the vector env, got ndarray"),
    "three values": (lambda result: (*result, {}), "got 3"),
    "a list of infos": (lambda result: (result[0], [{}] * 3), "got list; `VectorEnv._add_info(infos, info, slot)`"),
}
STEPS = {
    "four values": (lambda result: (*result[:3], result[4]), "got 4; what was `done` is `terminated` and `truncated`"),
    "six values": (lambda result: (*result, None), "step: expected 5 values"),
    "nothing": (lambda result: None, "got NoneType"),
    "a list of infos": (lambda result: (*result[:4], [{}] * 3), "expected info from the vector env as a dict"),
    "no info": (lambda result: (*result[:4], None), "got NoneType"),
    "a scalar reward": (lambda result: (result[0], 1.0, *result[2:]), "reward: expected shape (3,), got ()"),
    "two flags": (lambda result: (*result[:3], [False] * 2, {}), "truncated: expected shape (3,), got (2,)"),
}


@pytest.mark.asyncio
@everywhere
async def test_what_is_no_result_is_an_error_that_says_so(where):
    async with aioenv.NativeVectorEnv(Odd, 3, episode_stats=True, **where) as envs:
        for name, odd in (("reset_odd", RESETS), ("step_odd", STEPS)):
            for change, told in odd.values():
                await envs.set_attr(name, change)
                with pytest.raises(aioenv.EnvError) as caught:
                    await envs.reset()
                    await envs.step(OK)
                assert told in str(caught.value) and caught.value.slots == (0, 1, 2)
            await envs.set_attr(name, None)
        await envs.reset()  # the slots have failed, and begin again
        await envs.step(OK)


class Finals(Batch):
    """In the mode that it is told; its last observations have no mask, as those of ale_py's AtariVectorEnv."""

    def __init__(self, num_envs, autoreset_mode=AutoresetMode.NEXT_STEP):
        super().__init__(num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode(autoreset_mode)}

    def step(self, actions):
        obs, reward, _, cut, _ = super().step(actions)
        return obs, reward, np.array([False, True, False]), cut, {"final_obs": obs + 100}


@pytest.mark.asyncio
@everywhere
async def test_last_observations_without_a_mask_are_those_of_slots_that_ended(where):
    async with aioenv.NativeVectorEnv(Finals, 3, **where) as envs:
        await envs.reset()
        *_, info = await envs.step(OK)
    assert info["_final_obs"].tolist() == [False, True, False] and (info["final_obs"][1] == 101).all()


@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [None, 1])
async def test_a_vector_env_that_takes_a_mode_is_told_it(num_workers):
    gym.register("Finals-v0", vector_entry_point=Finals)
    try:
        for env in ("Finals-v0", Finals, gym.spec("Finals-v0")):
            make = partial(aioenv.make_vec, env, 3, backend="native", num_workers=num_workers)
            async with make(autoreset_mode="SameStep") as envs:
                assert envs.autoreset_mode is AutoresetMode.SAME_STEP
            async with make() as envs:
                assert envs.autoreset_mode is AutoresetMode.NEXT_STEP
    finally:
        del gym.registry["Finals-v0"]


@pytest.mark.asyncio
@everywhere
async def test_a_scalar_for_one_slot_is_no_batch(where):
    async with aioenv.NativeVectorEnv(Odd, 1, **where) as envs:
        await envs.set_attr("step_odd", lambda result: (result[0], 1.0, *result[2:]))
        await envs.reset()
        with pytest.raises(aioenv.EnvError, match=r"reward: expected shape \(1,\), got \(\)"):
            await envs.step(OK[:1])


SEEDS = {
    TypeError: (1.5, "abc", [1.0, 2, 3], [[1], [2], [3]], {1, 2, 3}),
    ValueError: ([1, 2], np.arange(4)),
}


@pytest.mark.asyncio
@everywhere
async def test_seeds_are_checked_before_the_env_has_them(where):
    async with aioenv.NativeVectorEnv(Batch, 3, **where) as envs, aioenv.make_vec("CartPole-v1", 3) as others:
        for error, seeds in SEEDS.items():
            for seed in seeds:
                told = set()
                for each in (envs, others):
                    with pytest.raises(error) as caught:
                        await each.reset(seed=seed)
                    told.add(str(caught.value))
                    with pytest.raises(error) as caught:
                        each.send_reset(seed=seed)
                    told.add(str(caught.value))
                assert len(told) == 1 and "seed" in told.pop()
        for good in ([1, None, 3], np.arange(3), range(3), 5, np.int64(5), None):
            await envs.reset(seed=good)


@pytest.mark.asyncio
async def test_the_infos_of_all_rows_are_those_of_each():
    seen = set()
    async with aioenv.make_vec("CartPole-v1", 5, autoreset_mode="SameStep", episode_stats=True) as envs:
        envs.pause(4)
        await envs.reset(seed=0)
        for step in range(60):
            info = (await envs.step(np.full(5, step // 20 % 2))).info
            each = [row_info(info, row) for row in range(5)]
            assert repr(row_infos(info, 5)) == repr(each)
            seen.update(*each)
    assert seen >= {"_active", "final_obs", "final_info", "episode"}
