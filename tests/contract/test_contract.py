"""The public contract, run by our own engine in every way to start it and to talk to it, and on both loops."""

from __future__ import annotations

import pytest
from conftest import LOOPS

import aioenv
from aioenv.testing import VectorEnvContract


@pytest.mark.usefixtures("way")
class TestWorkers(VectorEnvContract):
    async def start(self, env_fns, **options):
        return await aioenv.AsyncVectorEnv(env_fns, num_workers=2, **options)


class TestOneWorkerOnUvloop(VectorEnvContract):
    new_event_loop = staticmethod(LOOPS["uvloop"])

    async def start(self, env_fns, **options):
        return await aioenv.AsyncVectorEnv(env_fns, num_workers=1, **options)


class TestResumable(VectorEnvContract):
    """With restarts asked for, all goes on as without."""

    async def start(self, env_fns, **options):
        return await aioenv.AsyncVectorEnv(env_fns, num_workers=2, restart=aioenv.RestartPolicy(), **options)


def test_the_contract_can_be_broken():
    class Swapped(VectorEnvContract):
        async def start(self, env_fns, **options):
            envs = await aioenv.AsyncVectorEnv(env_fns, num_workers=1, **options)
            step = envs.step
            envs.step = lambda actions: step(list(actions)[::-1])
            return envs

    contract = Swapped()
    for test in (
        contract.test_the_same_seeds_give_gymnasiums_trajectories,
        contract.test_wrong_actions_send_nothing,
        contract.test_a_cancelled_step_is_taken_or_dropped_never_mixed_up,
    ):
        with pytest.raises((AssertionError, TypeError)):
            test()
