"""`spare_envs=True`: results that can't be sent, and what is refused, beside what `test_spare_envs.py` has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Space

import aioenv
from aioenv import sync
from aioenv.envs import PettingZooEnv
from tests.kits.compare import assert_same
from tests.vector_env.multi_kit import Spread
from tests.vector_env.spares_kit import MODES, PLAN, N, Told, plain

modes = pytest.mark.parametrize("mode", MODES)


class Anything(Space[Any]):
    """Any object."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return None

    def contains(self, x: Any) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything)

    def __hash__(self) -> int:
        return 0


class Unsendable(gymnasium.Env[Any, Any]):
    """Episodes of one step; the first reset of a spare env, or the last step of the first episode, has a generator."""

    action_space = Discrete(2)

    def __init__(self, where: str, spare: bool) -> None:
        self.observation_space: Space[Any] = Anything() if where == "obs" else Box(0, 100, (1,), np.float64)
        self.where = where if spare == aioenv.is_spare_env() else ""
        self.resets = 0

    def obs(self, bad: bool) -> Any:
        if isinstance(self.observation_space, Box):
            return np.array([float(self.resets)])
        return (_ for _ in ()) if bad else self.resets

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.resets += 1
        bad = self.where in ("obs", "info") and self.resets == 1
        return self.obs(bad), {"bad": (_ for _ in ())} if bad and self.where == "info" else {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        bad = self.where == "step" and self.resets == 1
        return self.obs(False), 1.0, True, False, {"bad": (_ for _ in ())} if bad else {"good": 1}


@modes
@pytest.mark.parametrize(("where", "spare"), [("obs", True), ("info", True), ("step", False), ("step", True)])
@pytest.mark.asyncio
async def test_results_that_do_not_pickle(mode: Any, where: str, spare: bool) -> None:
    """They are errors of the step that they are of; others are not concerned, and a reset mends the slot."""
    factories = [partial(Unsendable, "obs" if where == "obs" else "", spare=False), partial(Unsendable, where, spare)]
    if where == "obs":
        factories[0] = partial(Good, where)
    async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode) as envs:
        await envs.reset(seed=0)
        next_step = mode == "NextStep"
        before = (1 + next_step) * spare if where == "step" else int(next_step)
        for _ in range(before):
            await envs.step([0, 0])
        with pytest.raises(aioenv.EnvError, match="pickle") as caught:
            await envs.step([0, 0])
        assert caught.value.slots == (1,)
        assert caught.value.partial.reward[0] == (0 if next_step and where != "step" else 1)
        with pytest.raises(aioenv.EnvError, match="must be reset"):
            await envs.step([0, 0])
        await envs.reset(options={"reset_mask": np.array([False, True])})
        ends = 0
        for _ in range(8):
            ends += int((await envs.step([0, 0])).terminated[1])
        assert ends == (4 if next_step else 8)


class Good(Unsendable):
    """Has no such result, with the same spaces."""

    def __init__(self, where: str) -> None:
        super().__init__(where, spare=False)
        self.where = ""


class Ports(Told):
    """Its factory asks which of the two envs it makes; later it is not told any more than any other code."""

    def __init__(self, slot: int) -> None:
        super().__init__()
        self.port = 5000 + 2 * slot + aioenv.is_spare_env()


@pytest.mark.asyncio
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
async def test_factories_know_which_env_they_make(start: Any) -> None:
    assert not aioenv.is_spare_env()
    factories = [partial(Ports, slot) for slot in range(N)]
    async with aioenv.AsyncVectorEnv(factories, spare_envs=True, start=start) as envs:
        assert not aioenv.is_spare_env()
        await envs.reset(seed=1)
        ports = set()
        for _ in range(20):
            await envs.step([0] * N)
            ports.update(await envs.get_attr("port"))
        assert ports == set(range(5000, 5000 + 2 * N))
    async with aioenv.AsyncVectorEnv(factories, num_workers=2) as envs:
        assert await envs.get_attr("port") == (5000, 5002, 5004)


@pytest.mark.asyncio
async def test_both_workers_of_a_slot_have_what_is_given_for_each_worker() -> None:
    worker_env = [{"WHO": str(number)} for number in range(2 * N)]
    async with aioenv.AsyncVectorEnv([Variable] * N, spare_envs=True, worker_env=worker_env, num_workers=2 * N) as envs:
        await envs.reset(seed=1)
        seen = set()
        for _ in range(20):
            await envs.step([0] * N)
            seen.update(enumerate(await envs.get_attr("who")))
        assert seen == {(slot, str(slot + N * spare)) for slot in range(N) for spare in range(2)}
    with pytest.raises(ValueError, match="worker_env"):
        aioenv.AsyncVectorEnv([Variable] * N, spare_envs=True, worker_env=worker_env[:N])


class Variable(Told):
    """Shows an environment variable."""

    def __init__(self) -> None:
        super().__init__()
        self.who = os.environ["WHO"]


def make_drawing() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1", render_mode="rgb_array")


@pytest.mark.asyncio
async def test_envs_that_draw_themselves_are_refused() -> None:
    with pytest.raises(aioenv.RenderError, match="not with spare_envs=True"):
        async with aioenv.AsyncVectorEnv([make_drawing] * 2, spare_envs=True, render=aioenv.RenderConfig(32, 32)):
            pass


@pytest.mark.asyncio
@modes
async def test_rewards_of_actors_are_refused(mode: Any) -> None:
    """They would be those of an older episode where an episode begins."""
    factories = [lambda: PettingZooEnv(Spread())] * 2
    async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode) as envs:
        await envs.reset(seed=0)
        with pytest.raises(ValueError, match="actor_rewards: not with spare_envs=True"):
            await envs.actor_rewards()
        assert len(await envs.actor_ids()) == 2
        assert not (await envs.is_actor_done()).any()


@pytest.mark.parametrize("cls", [sync.AsyncVectorEnv, sync.SyncVectorEnv])
def test_the_drop_ins_have_gymnasiums_arguments_alone(cls: Any) -> None:
    with pytest.raises(TypeError, match="spare_envs"):
        cls([Told] * 2, spare_envs=True)


@pytest.mark.parametrize("given", [2, 0, "yes", None])
def test_slots_have_one_spare_env_or_none(given: Any) -> None:
    with pytest.raises(TypeError, match=r"spare_envs: expected True \(one for each slot\) or False, got "):
        aioenv.make_vec(Told, N, spare_envs=given)


@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
async def test_smaller_numbers_of_workers_are_refused(num_workers: int) -> None:
    with pytest.raises(ValueError, match="num_workers: expected 6 or None"):
        aioenv.AsyncVectorEnv([Told] * N, spare_envs=True, num_workers=num_workers)
    with pytest.raises(ValueError, match="num_workers: expected 6 or None"):
        sync.VectorEnv([Told] * N, spare_envs=True, num_workers=num_workers)
    with pytest.raises(ValueError, match="num_workers"):
        aioenv.make_vec(Told, N, spare_envs=True, backend="auto", num_workers=num_workers)


@pytest.mark.asyncio
async def test_any_source_of_envs_has_spare_ones() -> None:
    """A registered id, with wrappers; a native task, which is asked for with backend="auto"."""
    async with aioenv.make_vec(
        "InvertedPendulum-v5", 2, backend="auto", spare_envs=True, seed_plan=PLAN, max_episode_steps=3
    ) as envs:
        assert envs.backend == "workers"
        await envs.reset()
        steps = [await envs.step(np.zeros((2, 1), np.float32)) for _ in range(8)]
        assert sum(step.truncated.all() for step in steps) == 2


@pytest.mark.asyncio
async def test_a_worker_that_dies_after_its_episode_takes_nothing_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """The next episode is prepared in the other env: the slot needs no reset."""
    settings = {"autoreset_mode": "NextStep", "seed_plan": PLAN}
    runs = []
    for kills in (False, True):
        async with aioenv.AsyncVectorEnv([Told] * N, spare_envs=True, **settings) as envs:
            await envs.reset()
            steps = [await envs.step([1] * N)]
            while not (steps[-1].terminated[0] or steps[-1].truncated[0]):
                steps.append(await envs.step([1] * N))
            if kills:
                await kill(envs, 0)
            steps += [await envs.step([1] * N) for _ in range(12)]
            runs.append(steps)
            if kills:
                assert "the spare env of slot 0 is gone" in caplog.text
    for got, expected in zip(*runs, strict=True):
        assert_same(plain(got._asdict()), plain(expected._asdict()))


async def kill(envs: aioenv.AsyncVectorEnv, worker: int) -> None:
    """Kill a worker, and wait until its parent knows."""
    pid = envs.workers[worker].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while envs.workers[worker].state != "dead":
        await asyncio.sleep(0)


class NoScene(gymnasium.Env[Any, Any]):
    """Episodes of three steps, observed as (episode, step). The reset of slot 0's episode 2 raises an error."""

    observation_space = Box(0, 9, (2,), np.float64)
    action_space = Discrete(2)

    def __init__(self, error: type[Exception] = ValueError) -> None:
        self.error = error

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        slot, self.episode = (options or {}).get("at", (0, 0))
        if (slot, self.episode) == (0, 2):
            raise self.error("no scene")
        self.t = 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.array([float(self.episode), self.t]), 0.0, self.t == 3, False, {}


@modes
def test_a_slot_whose_reset_raised_keeps_its_last_observation(mode: str) -> None:
    def options(slot: int, episode: int) -> dict[str, Any]:
        return {"at": (slot, episode)}

    with sync.VectorEnv([NoScene] * 2, spare_envs=True, autoreset_mode=mode, autoreset_options=options) as envs:
        envs.reset()
        with pytest.raises(aioenv.EnvError, match="no scene"):
            for _ in range(20):
                envs.step(np.zeros(2, int))
        obs, _ = envs.reset(options={"reset_mask": np.array([False, True])})
        assert obs[0].tolist() == [1, 3]
        assert obs[1, 1] == 0
        obs, _ = envs.reset(options={"reset_mask": np.array([True, False])})
        assert obs[0, 1] == 0
        assert envs.step(np.zeros(2, int))[0][:, 1].tolist() == [1, 1]


@modes
@pytest.mark.parametrize("error", [ValueError, aioenv.EpisodesDone])
def test_it_keeps_it_if_a_reset_of_ones_own_raises_again(mode: str, error: type[Exception]) -> None:
    def options(slot: int, episode: int) -> dict[str, Any]:
        return {"at": (slot, episode)}

    make = partial(NoScene, error)
    with sync.VectorEnv([make] * 2, spare_envs=True, autoreset_mode=mode, autoreset_options=options) as envs:
        envs.reset()
        with contextlib.suppress(aioenv.EnvError):
            while not envs.exhausted:
                envs.step(np.zeros(2, int))
        for _ in range(2):
            envs.resume()
            try:
                obs, _ = envs.reset(options={"reset_mask": np.array([True, False]), "at": (0, 2)})
            except aioenv.EnvError as raised:
                obs = raised.partial.obs
            assert obs[0].tolist() == [1, 3]
        envs.resume()
        obs, _ = envs.reset(options={"reset_mask": np.array([True, False])})
        assert obs[0].tolist() == [0, 0]
