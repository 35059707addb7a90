"""`call(..., spares=True)` and `get_attr(..., spares=True)`: both envs of each slot."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest

import aioenv
from aioenv import sync
from tests.vector_env.spares_kit import MODES, Gated, Gates, N, Told

modes = pytest.mark.parametrize("mode", MODES)
asyncio_test = pytest.mark.asyncio


class Both(Told):
    """Knows which of the two envs it is."""

    def __init__(self, slot: int = 0) -> None:
        super().__init__()
        self.who = (slot, aioenv.is_spare_env())
        self.calls = 0

    def count(self, by: int = 1, *, times: int = 1) -> int:
        self.calls += by * times
        return self.calls

    def refuse(self, who: list[bool]) -> tuple[int, bool]:
        if self.who[1] in who:
            raise KeyError("refused")
        return self.who


def factories() -> list[Any]:
    return [partial(Both, slot) for slot in range(N)]


PAIRS = tuple(((slot, False), (slot, True)) for slot in range(N))


@asyncio_test
@modes
async def test_a_pair_for_each_slot_the_first_env_before_the_second(mode: Any) -> None:
    """Whichever of the two runs the episode, and before the first reset, too."""
    async with aioenv.AsyncVectorEnv(factories(), spare_envs=True, autoreset_mode=mode) as envs:
        assert await envs.get_attr("who", spares=True) == PAIRS
        await envs.reset(seed=1)
        live = set()
        for number in range(1, 15):
            await envs.step([0] * N)
            assert await envs.get_attr("who", spares=True) == PAIRS
            assert await envs.call("count", number, times=2, spares=True) == ((number * (number + 1),) * 2,) * N
            live.update(await envs.get_attr("who"))
        assert live == {who for pair in PAIRS for who in pair}
        assert await envs.call("calls", spares=False) == (210,) * N


@asyncio_test
async def test_a_call_waits_for_the_reset_of_a_spare_env(tmp_path: Any) -> None:
    gates = Gates(tmp_path)
    gates.close(0, 1)
    async with aioenv.AsyncVectorEnv([partial(Gated, gates.folder, 0)], spare_envs=True, timeout_s=0.2) as envs:
        await envs.reset(seed=3)
        assert await envs.get_attr("seeds") == ([3],)
        with pytest.raises(aioenv.StepTimeout) as caught:
            await envs.get_attr("seeds", spares=True)
        assert caught.value.slots == (0,)
        gates.open(0, 1)
        ((first, second),) = await envs.get_attr("seeds", spares=True)
        assert (first, len(second)) == ([3], 1)
        await envs.step([0])


@asyncio_test
@pytest.mark.parametrize("who", [[False], [True], [False, True]])
async def test_an_env_that_raises_leaves_the_results_of_the_others(who: list[bool]) -> None:
    async with aioenv.AsyncVectorEnv(factories(), spare_envs=True) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.EnvError, match="refused") as caught:
            await envs.call("refuse", who, spares=True)
        assert caught.value.slots == tuple(range(N))
        assert caught.value.partial == tuple(tuple(None if one[1] in who else one for one in pair) for pair in PAIRS)
        await envs.step([0] * N)


@asyncio_test
@modes
async def test_a_spare_env_that_is_gone(mode: Any) -> None:
    """It is an error; its slot goes on all the same, and `set_attr` still does without it."""
    async with aioenv.AsyncVectorEnv(factories(), spare_envs=True, autoreset_mode=mode) as envs:
        await envs.reset(seed=0)
        pid = envs.workers[N + 1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(aioenv.WorkerDied) as caught:
            await envs.get_attr("who", spares=True)
        assert caught.value.slots == (1,)
        assert caught.value.partial == (PAIRS[0], (PAIRS[1][0], None), PAIRS[2])
        await envs.set_attr("mark", 4)
        assert await envs.get_attr("mark") == (4,) * N
        await envs.step([0] * N)


@asyncio_test
async def test_a_worker_that_is_started_again_is_waited_for() -> None:
    restart = aioenv.RestartPolicy()
    async with aioenv.AsyncVectorEnv(factories(), spare_envs=True, restart=restart) as envs:
        await envs.reset(seed=0)
        await envs.call("count", spares=True)
        pid = envs.workers[N].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(aioenv.WorkerDied):
            await envs.get_attr("calls", spares=True)
        assert await envs.get_attr("calls", spares=True) == ((1, 0), (1, 1), (1, 1))


@asyncio_test
async def test_it_is_refused_without_spare_envs() -> None:
    for options in ({"num_workers": 1}, {"num_workers": 0}):
        async with aioenv.AsyncVectorEnv(factories(), **options) as envs:  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="get_attr: spares=True: this vector env has no spare envs"):
                await envs.get_attr("who", spares=True)
            with pytest.raises(ValueError, match="call: spares=True: this vector env has no spare envs"):
                await envs.call("count", spares=True)
    async with aioenv.make_vec("CartPole-v1", 2, backend="native") as native:
        with pytest.raises(ValueError, match="no spare envs"):
            await native.get_attr("spec", spares=True)


def test_blocking_code() -> None:
    with sync.VectorEnv(factories(), spare_envs=True) as envs:
        envs.reset(seed=0)
        assert envs.get_attr("who", spares=True) == PAIRS
        assert envs.call("count", 5, spares=True) == ((5, 5),) * N
        assert envs.call("count", times=0) == envs.get_attr("calls") == (5,) * N
        envs.step(np.zeros(N, np.int64))
    with sync.AsyncVectorEnv(factories()) as drop_in, pytest.raises(TypeError, match="spares"):
        drop_in.get_attr("who", spares=True)  # type: ignore[call-arg]
