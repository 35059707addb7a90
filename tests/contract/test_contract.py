"""The public contract, run by our own engine in every way to start it and to talk to it, and on both loops."""

from __future__ import annotations

from typing import ClassVar

import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from aioenv.testing import VectorEnvContract
from tests.kits.loop_kit import LOOPS


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


def synced(env_fns, *, autoreset_mode=AutoresetMode.NEXT_STEP):
    """A factory of Gymnasium's SyncVectorEnv, as the vector env of a user's: the first of these envs, or all."""
    return lambda num_envs: SyncVectorEnv(env_fns[:num_envs], autoreset_mode=autoreset_mode)


class Native(VectorEnvContract):
    """What makes no sense for slots that are one env is skipped; see `tests/native/test_native.py`."""

    kwargs: ClassVar[dict] = {}

    async def start(self, env_fns, *, autoreset_mode=AutoresetMode.NEXT_STEP, **options):
        make = synced(env_fns, autoreset_mode=autoreset_mode)
        return await aioenv.NativeVectorEnv(make, len(env_fns), **options, **self.kwargs)

    @pytest.mark.skip(reason="an exception is the vector env's, and so that of all of its slots")
    def test_an_exception_touches_its_slot_alone(self):
        """It can't."""

    @pytest.mark.skip(reason="this vector env has no step_some: send() refuses some of its slots")
    def test_send_and_recv(self):
        """Of some slots."""


class TestNativeInline(Native):
    kwargs: ClassVar[dict] = {"run_in": "inline"}


class TestNativeOnAThread(Native):
    kwargs: ClassVar[dict] = {"run_in": "thread"}


class TestNative(Native):
    new_event_loop = staticmethod(LOOPS["uvloop"])


class TestNativeOverWorkers(Native):
    """With a worker a slot they can be stepped by themselves."""

    async def start(self, env_fns, **options):
        self.kwargs = {"num_workers": len(env_fns)}
        return await super().start(env_fns, **options)

    test_send_and_recv = VectorEnvContract.test_send_and_recv


class NativeTask(VectorEnvContract):
    """A task that is stepped as one batch, in the place of as many of Gymnasium's envs."""

    env_id = "Hopper-v5"
    env_kwargs: ClassVar[dict] = {"max_episode_steps": 20}
    where: ClassVar[dict] = {}

    async def start(self, env_fns, **options):
        kwargs = {**self.where, **options, **self.env_kwargs}
        return await aioenv.make_vec(self.env_id, len(env_fns), backend="native", **kwargs)

    test_an_exception_touches_its_slot_alone = Native.test_an_exception_touches_its_slot_alone

    @pytest.mark.skip(reason="attributes are the vector env's: one value for all of its slots")
    def test_calls_and_attributes(self):
        """Of single slots."""


class TestNativeTask(NativeTask):
    new_event_loop = staticmethod(LOOPS["uvloop"])


class TestNativeTaskWithForces(NativeTask):
    """One whose physics has another engine."""

    env_id = "Ant-v5"


class TestNativeTaskOverWorkers(NativeTask):
    """With a worker a slot."""

    async def start(self, env_fns, **options):
        self.where = {"num_workers": len(env_fns)}
        return await super().start(env_fns, **options)
