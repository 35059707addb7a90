"""`spare_envs=True`: each slot's next episode begins in another env, which was reset meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text

import aioenv
from aioenv import sync
from aioenv.core.spares import spare_seed

MODES = ["NextStep", "SameStep"]
PLAN = [11, 5, 900, 7, 3, 28, 61]
N = 3

asyncio_test = pytest.mark.asyncio


class Seeded(gymnasium.Env[Any, Any]):
    """Its episodes depend on seed, options and actions."""

    observation_space = Dict({"numbers": Box(-1e9, 1e9, (3,), np.float64), "name": Text(20)})
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.spare = aioenv.is_spare_env()
        self.seeds: list[int | None] = []
        self.t = self.length = 0
        self.level: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.level = None if options is None else options.get("level")
        self.t, self.length = 0, int(self.np_random.integers(2, 6))
        return self.obs(0), {"length": self.length, "level": self.level, "seeds": len(str(seed))}

    def obs(self, action: int) -> Any:
        return {"numbers": np.array([self.t, self.length, action], np.float64), "name": f"s{self.length}"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        ends = self.t == self.length
        info = {"half": self.t / 2, "array": np.full(2, self.t), "text": "t" * self.t}
        return self.obs(int(action)), float(self.np_random.random()), ends, False, info


def level(slot: int, episode: int) -> dict[str, Any]:
    return {"level": 100 * slot + episode}


async def record(spare_envs: bool, mode: str, **options: Any) -> list[Any]:
    """Return the results of steps, of masked resets and of whole ones."""
    found: list[Any] = []
    rng = np.random.default_rng(0)
    async with aioenv.AsyncVectorEnv(
        [Seeded] * N, spare_envs=spare_envs, autoreset_mode=mode, num_workers=None if spare_envs else N, **options
    ) as envs:
        found.append(await envs.reset())
        for t in range(60):
            found.append(await envs.step(rng.integers(0, 2, N)))
            if t % 11 == 7:
                found.append(await envs.reset(options={"reset_mask": rng.random(N) < 0.6, "level": "own"}))
            if t == 35:
                found.append(await envs.reset(seed=[None, 4, None]))
    return found


@asyncio_test
@pytest.mark.parametrize("mode", MODES)
async def test_with_a_seed_plan_results_are_those_of_a_run_without_spare_envs(mode: str) -> None:
    options = {"seed_plan": PLAN, "autoreset_options": level, "episode_stats": True}
    with_spares, without = [await record(spares, mode, **options) for spares in (True, False)]
    for mine, theirs in zip(with_spares, without, strict=True):
        for result in (mine, theirs):
            for each in (result.info, result.info.get("final_info", {})):
                if isinstance(each.get("episode"), dict):
                    each["episode"].pop("t", None)  # times differ
        assert repr(mine) == repr(theirs)


@asyncio_test
@pytest.mark.parametrize("mode", MODES)
async def test_without_a_plan_results_are_the_same_from_run_to_run(mode: str) -> None:
    runs = []
    for _ in range(2):
        async with aioenv.AsyncVectorEnv([Seeded] * N, spare_envs=True, autoreset_mode=mode) as envs:
            await envs.reset(seed=3)
            runs.append([repr(await envs.step([0] * N)) for _ in range(40)])
            live = await envs.get_attr("seeds")
    assert runs[0] == runs[1]
    firsts = {seeds[0] for seeds in live}
    assert firsts <= {3, 4, 5, *map(spare_seed, (3, 4, 5))}


@asyncio_test
async def test_attributes_are_set_in_both_envs_and_read_in_the_one_that_runs() -> None:
    async with aioenv.AsyncVectorEnv([Seeded] * 2, spare_envs=True) as envs:
        await envs.reset(seed=0)
        await envs.set_attr("mark", [5, 6])
        seen = set()
        for _ in range(30):
            await envs.step([0, 0])
            assert await envs.get_attr("mark") == (5, 6)
            seen.add(await envs.call_at(0, "spare"))
        assert seen == {False, True}
        assert len(envs.workers) == 4


class Gated(gymnasium.Env[Any, Any]):
    """Slot 0 has episodes of two steps, and its envs' resets, except the first ones, read a byte of a named pipe."""

    observation_space = Box(0, 100, (2,), np.float64)
    action_space = Discrete(2)

    def __init__(self, path: str, slot: int) -> None:
        self.path, self.slot, self.resets, self.t = path, slot, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.resets and self.slot == 0:
            with open(self.path, "rb", buffering=0) as pipe:
                pipe.read(1)
        self.resets, self.t = self.resets + 1, 0
        return np.array([self.resets, 0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.array([self.resets, self.t], np.float64), 1.0, self.t == (2 if self.slot == 0 else 100), False, {}


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    yield path


@asyncio_test
@pytest.mark.parametrize("mode", MODES)
async def test_a_step_waits_for_a_spare_env_that_is_not_ready(mode: str, gate: str) -> None:
    factories = [partial(Gated, gate, slot) for slot in range(2)]
    async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode) as envs:
        await envs.reset(seed=0)
        for _ in range(5 if mode == "NextStep" else 3):  # into the second episode; the first env waits at the gate
            await envs.step([0, 0])
        assert envs.stats().spare_waits == 0
        with pytest.raises(aioenv.StepTimeout) as caught:
            await envs.step([0, 0], timeout_s=0.3)
        assert caught.value.slots == (0,)
        await asyncio.to_thread(let_through, gate)
        ready = await envs.recv(min_slots=2)
        assert ready.slots.tolist() == [0, 1]
        assert ready.obs[0].tolist() == [2, 0]
        stats = envs.stats()
        assert stats.spare_waits == 1
        assert stats.spare_wait_s > 0.2


def let_through(gate: str) -> None:
    """Let one reset go on."""
    with open(gate, "wb", buffering=0) as pipe:
        pipe.write(b"1")


@asyncio_test
@pytest.mark.parametrize("mode", MODES)
async def test_send_and_recv_and_rollouts_and_pauses(mode: str) -> None:
    """Slots go on one by one; a slot's results are those of a plan."""
    runs = []
    for spares in (False, True):
        rows: dict[int, list[Any]] = {slot: [] for slot in range(N)}
        async with aioenv.AsyncVectorEnv(
            [Seeded] * N, spare_envs=spares, autoreset_mode=mode, seed_plan=PLAN, num_workers=None if spares else N
        ) as envs:
            await envs.reset()
            envs.send([1] * N)
            while min(map(len, rows.values())) < 30:
                ready = await envs.recv(min_slots=1)
                for index, slot in enumerate(ready.slots.tolist()):
                    rows[slot].append((ready.obs["numbers"][index].tolist(), float(ready.reward[index])))
                going = [slot for slot in ready.slots.tolist() if len(rows[slot]) < 30]
                if going:
                    envs.send([1] * len(going), slots=going)
            await envs.reset()
            rollout = await envs.rollout(lambda obs: np.zeros(len(obs["name"]), np.int64), 20)
            envs.pause([1])
            paused = [repr(await envs.step([0] * N)) for _ in range(12)]
            envs.resume([1])
            resumed = [repr(await envs.step([0] * N)) for _ in range(12)]
        runs.append((rows, rollout.reward.tolist(), rollout.obs["numbers"].tolist(), paused, resumed))
    assert runs[0] == runs[1]


class Unlucky(gymnasium.Env[Any, Any]):
    """Episodes of one step; the first reset of a spare env raises `error`."""

    observation_space = Box(0, 100, (1,), np.float64)
    action_space = Discrete(2)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error if aioenv.is_spare_env() else None
        self.resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.resets += 1
        if self.error is not None and self.resets == 1:
            raise self.error
        return np.array([float(self.resets)]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array([50.0]), 1.0, True, False, {}


@asyncio_test
@pytest.mark.parametrize("mode", MODES)
async def test_an_error_of_a_reset_comes_with_the_step_that_begins_the_episode(mode: str) -> None:
    factories = [partial(Unlucky, None), partial(Unlucky, KeyError("no scene"))]
    async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode) as envs:
        await envs.reset(seed=0)
        if mode == "NextStep":
            assert (await envs.step([0, 0])).terminated.all()
        with pytest.raises(aioenv.EnvError, match="no scene") as caught:
            await envs.step([0, 0])
        assert caught.value.slots == (1,)
        with pytest.raises(aioenv.EnvError, match="must be reset"):
            await envs.step([0, 0])
        reset = await envs.reset(options={"reset_mask": np.array([False, True])})
        assert reset.obs[1] == 2
        for _ in range(6):
            await envs.step([0, 0])


@asyncio_test
@pytest.mark.parametrize("mode", MODES)
async def test_a_spare_env_without_further_episodes_pauses_its_slot(mode: str) -> None:
    factories = [partial(Unlucky, None), partial(Unlucky, aioenv.EpisodesDone())]
    async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode) as envs:
        await envs.reset(seed=0)
        step = await envs.step([0, 0])
        assert step.terminated.all()
        if mode == "NextStep":
            step = await envs.step([0, 0])
        assert step.obs[1] == 50  # the last one stays
        step = await envs.step([0, 0])
        assert step.info["_active"].tolist() == [True, False]


class OtherSpaces(Unlucky):
    """The second env of a slot has another observation space than the first."""

    def __init__(self) -> None:
        super().__init__(None)
        if aioenv.is_spare_env():
            self.observation_space = Box(0, 100, (2,), np.float64)


@asyncio_test
async def test_both_envs_of_a_slot_have_the_same_spaces() -> None:
    with pytest.raises(aioenv.SpaceMismatchError, match="both envs of slot 0"):
        async with aioenv.AsyncVectorEnv([OtherSpaces], spare_envs=True):
            pass


def test_blocking_code_and_numbers_of_workers() -> None:
    with sync.make_vec("CartPole-v1", 2, spare_envs=True, num_workers=4) as envs:
        envs.reset(seed=0)
        for _ in range(100):
            envs.step(np.array([0, 1]))
        assert len(envs.workers) == 4


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"num_workers": 3}, "num_workers: expected 4 or None"),
        ({"num_workers": 0}, "num_workers: expected 4 or None"),
        ({"autoreset_mode": "Disabled"}, "DISABLED"),
        ({"debug": True}, "debug=True"),
        ({"restart": aioenv.RestartPolicy(resume=True)}, "resume=True"),
        ({"transport": "shared"}, 'transport="shared"'),
        ({"backend": "native"}, "spare_envs: not with backend"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        aioenv.make_vec("CartPole-v1", 2, spare_envs=True, **options)


@asyncio_test
async def test_auto_takes_workers() -> None:
    async with aioenv.make_vec("CartPole-v1", 1, spare_envs=True, backend="auto") as envs:
        assert envs.backend == "workers"
        await envs.reset(seed=0)


def test_shared_statistics_are_refused() -> None:
    stats = aioenv.SharedRunningStats((4,), num_slots=1)

    def make(at: Any) -> Any:
        return gymnasium.make("CartPole-v1") if at is not None else None

    with contextlib.closing(stats), pytest.raises(ValueError, match="SharedRunningStats"):
        aioenv.AsyncVectorEnv([partial(make, stats.at(0))], spare_envs=True)
