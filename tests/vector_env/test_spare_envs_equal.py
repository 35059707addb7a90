"""With a seed plan the results of `spare_envs=True` are those of a run without, in whatever way envs are stepped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import aioenv
from aioenv import sync
from aioenv.rollout.subset import row_info
from tests.kits.loop_kit import LOOPS, run_on
from tests.vector_env.spares_kit import MODES, PLAN, SPACES, N, Told, assert_equal_runs, level

modes = pytest.mark.parametrize("mode", MODES)
Play = Callable[[aioenv.AsyncVectorEnv], Awaitable[list[Any]]]


def both(play: Play, mode: str, kind: str = "box", loop: str = "asyncio", **options: Any) -> list[list[Any]]:
    """Return what `play` found with spare envs, and without."""

    async def run(spare_envs: bool) -> list[Any]:
        given: dict[str, Any] = {"seed_plan": PLAN, **options}
        async with aioenv.AsyncVectorEnv(
            [partial(Told, kind)] * N,
            spare_envs=spare_envs,
            num_workers=None if spare_envs else N,
            autoreset_mode=mode,  # type: ignore[arg-type]
            **given,
        ) as envs:
            return await play(envs)

    return [run_on(loop, run(spares)) for spares in (True, False)]


def policy(obs: Any) -> Any:
    """An action a row, from its observation."""
    if isinstance(obs, dict):
        return obs["image"][:, 0, 0].astype(np.int64) % 5
    if isinstance(obs, tuple):
        return np.array([len(graph.nodes) % 5 for graph in obs])
    return obs.sum(1).astype(np.int64) % 5


async def batches(envs: aioenv.AsyncVectorEnv) -> list[Any]:
    """Steps, masked resets and whole ones, with and without seeds and options."""
    rng = np.random.default_rng(0)
    found: list[Any] = [await envs.reset(seed=[None, 5, None])]
    for t in range(60):
        found.append(await envs.step(rng.integers(0, 5, N)))
        if t % 7 == 5:
            options = {"reset_mask": rng.random(N) < 0.6, "level": "own"}
            found.append(await envs.reset(seed=None if t % 2 else t, options=options))
        if t in (20, 41):
            found.append(await envs.reset(seed=[None, 4, None] if t == 20 else None, options={"level": "whole"}))
    return found


@pytest.mark.sampled(2)
@modes
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", SPACES)
def test_batches(mode: str, loop: str, kind: str) -> None:
    runs = both(batches, mode, kind, loop, autoreset_options=level, episode_stats=True)
    assert sum(step.terminated.sum() + step.truncated.sum() for step in runs[0] if hasattr(step, "reward")) > 30
    assert_equal_runs(*runs)


@pytest.mark.sampled(1)
@modes
@pytest.mark.parametrize(
    "options",
    [{"copy": False}, {"autoreset_options": {"level": 7}}, {"start": "spawn", "channel": "streams"}],
    ids=["views", "dict", "streams"],
)
def test_other_arguments(mode: str, options: dict[str, Any]) -> None:
    async def play(envs: aioenv.AsyncVectorEnv) -> list[Any]:
        return [repr(await envs.reset()), *[repr(await envs.step([1] * N)) for _ in range(30)]]

    assert_equal_runs(*both(play, mode, **options))


async def one_by_one(envs: aioenv.AsyncVectorEnv) -> list[Any]:
    """The results of each slot in their order, of `send`, `send_reset` and the results that are ready first."""
    rows: list[list[Any]] = [[] for _ in range(N)]
    await envs.reset()
    envs.send([1] * N)
    async for ready in envs.ready(max_slots=1):
        slot = int(ready.slots[0])
        mine = rows[slot]
        mine.append(ready)
        if len(mine) < 30:
            if len(mine) % 9 == 8:
                envs.send_reset([slot], seed=5 if len(mine) > 9 else None, options={"level": "mine"})
            else:
                envs.send([len(mine) % 5], slots=[slot])
    return rows


async def singly(envs: aioenv.AsyncVectorEnv) -> list[Any]:
    """One slot at a time, while others are paused or wait."""
    found: list[Any] = []
    await envs.reset()
    for t in range(25):
        found.append(await envs.step_at(t % 2, t % 5))
        if t % 8 == 7:
            found.append(await envs.reset_at(1, seed=None if t < 9 else 3, options={"level": 1}))
    envs.pause([1])
    found += [await envs.step([2] * N) for _ in range(12)]
    found.append(await envs.reset())  # a paused slot takes no part in it
    found += [await envs.step([2] * N) for _ in range(7)]
    envs.resume([1])
    envs.pause([0, 2])
    found += [await envs.step([3] * N) for _ in range(12)]
    envs.resume_all()
    found += [await envs.step([4] * N) for _ in range(12)]
    return found


async def rollouts(envs: aioenv.AsyncVectorEnv) -> list[Any]:
    found: list[Any] = []
    await envs.reset()
    for options in ({"groups": 1}, {"groups": 3, "split": "workers"}, {"groups": 2, "split": "workers"}):
        rollout = await envs.rollout(policy, 17, **options)  # type: ignore[arg-type]
        found.append([*rollout[:7], rollout.next_obs, *rollout.infos])
        found.append(await envs.step([1] * N))
    envs.pause([2])
    rollout = await envs.rollout(policy, 9, groups=1)
    return [*found, list(rollout[:7]), rollout.next_obs]


@pytest.mark.sampled(2)
@modes
@pytest.mark.parametrize("play", [one_by_one, singly, rollouts])
@pytest.mark.parametrize("kind", ["box", "graph"])
def test_other_ways_to_step(mode: str, play: Play, kind: str) -> None:
    assert_equal_runs(*both(play, mode, kind, autoreset_options=level))


@pytest.mark.sampled(1)
@modes
@pytest.mark.parametrize("kind", ["box", "dict"])
def test_numbered_episodes_and_evaluations(mode: str, kind: str) -> None:
    """Which slot runs an episode depends on the number that is reserved; its result does not."""

    async def play(envs: aioenv.AsyncVectorEnv) -> list[Any]:
        found: list[Any] = [await envs.reset(), await envs.step([1] * N)]
        evaluation = await aioenv.evaluate(envs, policy, 13, seed=4)
        found += [evaluation.returns, evaluation.lengths, evaluation.seed]
        found += sorted(
            [each.number, each.seed, each.total_reward, each.length, each.terminated, repr(each.info)]
            for each in evaluation.episodes
        )
        async for _ in envs.episodes(policy, 9, seed=list(range(9))):
            break  # what was reserved is discarded
        found += [await envs.reset(), *[await envs.step([1] * N) for _ in range(12)]]
        return found

    assert_equal_runs(*both(play, mode, kind))


# ------------------------------------------------------------ errors that a plan repeats


class Picky(Told):
    """A reset with a level in `WRONG` raises, has no episode, or gives what does not pickle, or is not a number."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        wrong = WRONG.get(self.level)
        if wrong == "raises":
            raise ValueError(f"level {self.level}")
        if wrong == "pickle":
            info["more"] = (word for word in ())
        if wrong == "type":
            return obs, [1]  # type: ignore[return-value]
        if wrong == "nan":
            obs[1] = np.nan
        if wrong == "last":
            self.last = True
        return obs, info

    last = False

    def step(self, action: Any) -> Any:
        obs, reward, ends, cut, info = super().step(action)
        if self.last and self.t == 1:
            self.last = False
            raise KeyError(f"level {self.level}")
        return obs, reward, ends, cut, info


WRONG = {3: "raises", 5: "nan", 102: "pickle", 105: "type", 203: "raises", 204: "raises", 206: "last"}


@pytest.mark.sampled(1)
@modes
@pytest.mark.parametrize("loop", LOOPS)
def test_errors_come_with_the_same_steps(mode: str, loop: str) -> None:
    """A reset in a spare env that fails is told by the step that begins its episode; a reset of the user mends it."""

    async def run(spare_envs: bool) -> list[Any]:
        found: list[Any] = []
        async with aioenv.AsyncVectorEnv(
            [Picky] * N,
            spare_envs=spare_envs,
            num_workers=None if spare_envs else N,
            autoreset_mode=mode,  # type: ignore[arg-type]
            seed_plan=PLAN,
            autoreset_options=level,
            check_numerics=True,
            episode_stats=True,
        ) as envs:
            await envs.reset()
            errors = 0
            for t in range(60):
                try:
                    found.append(await envs.step([t % 5] * N))
                except aioenv.EnvError as error:
                    errors += 1
                    found.append([error.slots, [type(one.__cause__).__name__ for one in error.errors]])
                    partial = error.partial
                    others = [slot for slot in range(N) if slot not in error.slots]
                    found.append([*[each[others] for each in partial[:4]]])
                    found += [row_info(partial.info, slot) for slot in others]
                    with pytest.raises(aioenv.EnvError, match="must be reset"):
                        await envs.step([0] * N)
                    found.append(await envs.reset(options={"reset_mask": np.isin(range(N), error.slots)}))
            assert errors >= 5
        return found

    assert_equal_runs(*[run_on(loop, run(spares)) for spares in (True, False)])


def numbered(make: Any, mode: str, spare_envs: bool) -> aioenv.AsyncVectorEnv:
    """N envs whose episodes have seeds and options by their numbers, one worker an env."""
    return aioenv.AsyncVectorEnv(
        [make] * N,
        spare_envs=spare_envs,
        num_workers=None if spare_envs else N,
        autoreset_mode=mode,  # type: ignore[arg-type]
        seed_plan=PLAN,
        autoreset_options=level,
        episode_stats=True,
    )


class Finite(Told):
    """Has no further episode at level 4 of its slot (and those after it)."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options is not None and (options.get("level") or 0) % 100 >= 4:
            raise aioenv.EpisodesDone
        return super().reset(seed=seed, options=options)


@pytest.mark.sampled(1)
@modes
@pytest.mark.parametrize("kind", SPACES)
def test_slots_without_further_episodes(mode: str, kind: str) -> None:
    """They show their last observation for as long as they are paused; a resumed one tries the episode after."""

    async def run(spare_envs: bool) -> list[Any]:
        async with numbered(partial(Finite, kind), mode, spare_envs) as envs:
            found: list[Any] = [await envs.reset()]
            while len(envs.exhausted) < N:
                found += [await envs.step([1] * N), envs.exhausted]
                if len(envs.exhausted) == 1 and len(found) % 5 == 0:
                    envs.resume(envs.exhausted)
                    found += [await envs.step([1] * N), envs.exhausted]
            found += [await envs.step([1] * N), await envs.reset()]
            envs.resume_all()
            found += [list((await envs.rollout(policy, 2, groups=1))[:7]), envs.exhausted]
            envs.resume_all()
            found.append(await envs.reset(options={"reset_mask": np.array([True, False, False])}))
            return [*found, *[await envs.step([1] * N) for _ in range(4)], envs.exhausted]

    assert_equal_runs(*[run_on("asyncio", run(spares)) for spares in (True, False)])


class Asked(Told):
    """Has no further episode if the options of a reset say so."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options is not None and options.get("level") == "none":
            raise aioenv.EpisodesDone
        return super().reset(seed=seed, options=options)


@pytest.mark.sampled(1)
@modes
@pytest.mark.parametrize("kind", SPACES)
def test_a_reset_of_ones_own_that_finds_no_further_episode(mode: str, kind: str) -> None:
    """A resumed slot tries the episode after, and no episode comes twice."""

    async def run(spare_envs: bool) -> list[Any]:
        async with numbered(partial(Asked, kind), mode, spare_envs) as envs:
            found: list[Any] = [await envs.reset()]
            for t in range(4):
                found += [await envs.step([1] * N) for _ in range(6)]
                options = {"level": "none"} if t == 2 else {"level": "none", "reset_mask": np.arange(N) != t}
                found += [await envs.reset(options=options), envs.exhausted]
                found.append(await envs.step([1] * N))
                envs.resume_all()
                found += [await envs.step([1] * N) for _ in range(12)]
            return found

    assert_equal_runs(*[run_on("asyncio", run(spares)) for spares in (True, False)])


# ------------------------------------------------------------ blocking code, and other people's interfaces


@pytest.mark.sampled(1)
@modes
@pytest.mark.parametrize("kind", ["box", "dict"])
def test_blocking_code(mode: str, kind: str) -> None:
    runs = []
    for spares in (True, False):
        found: list[Any] = []
        with sync.make_vec(
            partial(Told, kind),
            N,
            spare_envs=spares,
            num_workers=None if spares else N,
            autoreset_mode=mode,
            seed_plan=PLAN,
            autoreset_options=level,
        ) as envs:
            found.append(envs.reset())
            for t in range(30):
                found.append(envs.step(np.full(N, t % 5)))
                if t % 11 == 8:
                    found.append(envs.reset(options={"reset_mask": np.array([True, False, True])}))
            rollout = envs.rollout(policy, 15, groups=1)
            found.append([*rollout[:7], *rollout.infos])
            evaluation = sync.evaluate(envs, policy, 7, seed=1)
            found.append([evaluation.returns, evaluation.lengths])
            found.append(envs.reset())
        runs.append(found)
    assert_equal_runs(*runs)


@pytest.mark.parametrize("kind", ["box", "dict"])
def test_stable_baselines(kind: str) -> None:
    pytest.importorskip("stable_baselines3")
    from aioenv.adapters import sb3

    if kind == "dict":
        make: Any = partial(gymnasium.make, "CartPole-v1", max_episode_steps=12)
    else:
        make = Told
    runs = []
    for spares in (True, False):
        envs = sb3.make_vec(make, N, seed=3, spare_envs=spares, num_workers=None if spares else N, seed_plan=PLAN)
        found: list[Any] = [envs.reset(), envs.reset_infos]
        for t in range(40):
            obs, rewards, dones, infos = envs.step(np.full(N, t % 2))
            found.append([obs, rewards, dones, infos])
        assert sum(result[2].sum() for result in found[2:]) >= 3
        envs.set_attr("mark", 7)
        assert envs.get_attr("mark") == [7] * N
        envs.close()
        runs.append(found)
    assert_equal_runs(*runs)
