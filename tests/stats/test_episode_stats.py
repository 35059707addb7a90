"""Statistics of episodes: returns, lengths and events, for every way to take results, and nothing of half episodes."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics

import aioenv
from aioenv import sync
from aioenv.stats import EpisodeEvent, EpisodeStats
from aioenv.stats.episodes import _BUILT_IN, _REDUCERS
from tests.kits.version_kit import needs_gymnasium

LENGTHS = (2, 3, 5)


class Fixed(gym.Env):
    """Episodes of fixed lengths in turn, told apart by their rewards; tells things in its infos."""

    observation_space = gym.spaces.Box(-1, 99, (1,))
    action_space = gym.spaces.Discrete(3)

    def __init__(self, slot):
        self.slot, self.episode = slot, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        return np.zeros(1, np.float32), {"score": 1000.0, "deep": {"goal": 1000}}

    def step(self, action):
        if action == 1:
            raise ValueError("as it was told")
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.t += 1
        over = self.t == self.length
        info = {"score": float(self.t), "deep": {"goal": self.slot}}
        return np.full(1, self.t, np.float32), 10.0 * self.slot + 1, over, False, info

    @property
    def length(self):
        return LENGTHS[(self.slot + self.episode) % 3]

    def get_state(self):
        return {"t": self.t, "episode": self.episode}

    def set_state(self, state):
        self.t, self.episode = state["t"], state["episode"]


def fixed(n=3, num_workers=2, **options):
    return aioenv.AsyncVectorEnv(
        [lambda slot=slot: Fixed(slot) for slot in range(n)], num_workers=num_workers, **options
    )


def ends(infos):
    """Slots, returns and lengths of the episodes that ended, step by step."""
    found = []
    for info in infos:
        who = np.flatnonzero(info.get("_episode", np.zeros(0)))
        if len(who):
            episode = info["episode"]
            found.append([(int(i), float(episode["r"][i]), int(episode["l"][i])) for i in who])
        else:
            found.append([])
    return found


# before, Gymnasium's wrapper leaves out the first step of the next episode
@pytest.mark.parametrize("mode", ["NextStep", pytest.param("SameStep", marks=needs_gymnasium("1.4"))])
def test_infos_and_numbers_are_those_of_gymnasiums_wrapper(mode):
    def played(wrap, **options):
        make = [lambda slot=slot: Fixed(slot) for slot in range(3)]
        with sync.VectorEnv(make, num_workers=2, autoreset_mode=mode, **options) as plain:
            envs = wrap(plain)
            envs.reset(seed=0)
            infos = [envs.step(np.zeros(3, np.int64))[4] for _ in range(25)]
            return ends(infos), infos, plain.episode_stats.epoch() if options else None

    theirs, their_infos, _ = played(RecordEpisodeStatistics)
    ours, our_infos, epoch = played(lambda envs: envs, episode_stats=True)
    assert ours == theirs
    for mine, other in zip(our_infos, their_infos, strict=True):
        if "episode" in other:
            assert {"r", "l", "t"} <= set(mine["episode"])
            for key in "rl":
                np.testing.assert_array_equal(mine["episode"][key], other["episode"][key])
            np.testing.assert_array_equal(mine["_episode"], other["_episode"])
            assert (mine["episode"]["t"][mine["_episode"]] > 0).all()
        else:
            assert "episode" not in mine
    episodes = [episode for step in ours for episode in step]
    returns, lengths = np.array([e[1] for e in episodes]), np.array([e[2] for e in episodes])
    assert len(episodes) > 10
    assert epoch["return/mean"] == pytest.approx(returns.mean()) and epoch["return/std"] == pytest.approx(returns.std())
    assert (epoch["return/min"], epoch["return/max"]) == (returns.min(), returns.max())
    assert (epoch["length/mean"], epoch["length/median"]) == (lengths.mean(), np.median(lengths))
    assert (epoch["length/total"], epoch["episode_count"]) == (lengths.sum(), len(episodes))


@pytest.mark.parametrize("groups", [1, 2])
def test_rollouts_and_the_order_of_replies(groups):
    async def run():
        async with fixed(4, episode_stats=True) as envs:
            await envs.reset(seed=0)
            record = await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 20, groups=groups)
            in_rollout = ends(record.infos)
            rolled = envs.episode_stats.total_episodes
            assert rolled == sum(map(len, in_rollout)) == int((record.terminated & record.valid).sum())
            envs.send_reset(seed=0)
            async for ready in envs.ready():
                who = np.flatnonzero(ready.info.get("_episode", []))
                assert who.tolist() == np.flatnonzero(ready.terminated).tolist()
                assert all(ready.info["episode"]["l"][i] in LENGTHS for i in who)
                if envs.episode_stats.total_episodes >= rolled + 8:
                    break
                envs.send(np.zeros(len(ready.slots), np.int64), ready.slots)

    aioenv.run(run())


async def steps(envs, n, action=0):
    return [(await envs.step(np.full(envs.num_envs, action))).info for _ in range(n)]


def test_unfinished_episodes_do_not_leak():
    async def run():
        async with fixed(episode_stats=True) as envs:
            stats = envs.episode_stats
            await envs.reset(seed=0)
            await steps(envs, 1)
            await envs.reset(options={"reset_mask": np.array([True, False, False])})  # slot 0 begins one of 3
            assert ends(await steps(envs, 3)) == [[], [(1, 33.0, 3)], [(0, 3.0, 3)]]
            stats.clear()  # slot 2 is on the way, slot 1 was just reset
            assert stats.epoch()["episode_count"] == 0 and stats.total_episodes == 2
            # slot 2 ended at once, and was dropped
            after = ends(await steps(envs, 9))
            assert after[0] == [] and not any(e[0] == 2 for e in after[0])
            mine = [(0, 2.0, 2), (0, 5.0, 5), (1, 22.0, 2), (1, 55.0, 5), (2, 42.0, 2), (2, 63.0, 3)]
            assert sorted(e for step in after for e in step) == mine
            states = await envs.get_state([1])
            await steps(envs, 1)
            count = stats.total_episodes
            await envs.set_state(states, [1])  # half of another's
            assert all(e[0] != 1 for step in ends(await steps(envs, 1)) for e in step)
            assert stats.total_episodes >= count

    aioenv.run(run())


WAYS = [{"backend": "workers", "num_workers": 1}, {"backend": "native"}, {"backend": "native", "num_workers": 2}]


@pytest.mark.parametrize("second", WAYS, ids=str)
@pytest.mark.parametrize("first", WAYS[:2], ids=str)
def test_an_episode_that_begins_after_a_state_was_set_is_whole(first, second, tmp_path):
    async def run():
        nothing = np.zeros((2, 3), np.float32)
        options = {"max_episode_steps": 3, "episode_stats": True}
        async with aioenv.make_vec("Hopper-v5", 2, **first, **options) as envs:
            await envs.reset(seed=0)
            for _ in range(3):
                await envs.step(nothing)
            aioenv.save(tmp_path / "states", await envs.get_state())  # their episodes are over, as a run's end has it
            expected = ends([(await envs.step(nothing)).info for _ in range(4)])
        async with aioenv.make_vec("Hopper-v5", 2, **second, **options) as envs:
            await envs.set_state(aioenv.load(tmp_path / "states"))
            envs.episode_stats.clear()
            found = ends([(await envs.step(nothing)).info for _ in range(4)])
            assert found == expected and [e[2] for e in found[3]] == [3, 3]
            assert envs.episode_stats.total_steps == 6  # the first step of four was a reset

    aioenv.run(run())


def test_cancelled_steps_count_too():
    async def run():
        async with fixed(episode_stats=True) as envs:
            await envs.reset(seed=0)
            await steps(envs, 1)
            task = asyncio.ensure_future(envs.step(np.zeros(3, np.int64)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert ends(await steps(envs, 1)) == [[(1, 33.0, 3)]]
            assert envs.episode_stats.epoch()["return/min"] == 2.0  # slot 0's, whose end was in no result

    aioenv.run(run())


def test_faults_drop_what_they_hit():
    async def run():
        async with fixed(3, 3, episode_stats=True, restart=aioenv.RestartPolicy()) as envs:
            stats = envs.episode_stats
            await envs.reset(seed=0)
            with pytest.raises(aioenv.EnvError) as caught:
                await envs.step([0, 1, 0])
            assert caught.value.partial is not None
            await envs.reset(options={"reset_mask": np.array([False, True, False])})
            info = (await envs.step([0, 0, 2])).info
            assert ends([info]) == [[(0, 2.0, 2)]] and info["restarted"][2]
            assert stats.total_steps == 4  # two of slot 0's, one of each other's: one raised, one was lost
            seen = ends(await steps(envs, 5))
            assert [e for step in seen for e in step if e[0] == 1] == [(1, 55.0, 5)]  # begun by that reset
            assert stats.total_episodes == 1 + sum(map(len, seen))

    aioenv.run(run())


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_events_of_a_level_each(mode):
    events = [
        EpisodeEvent("score", epoch=("mean", "max")),
        EpisodeEvent("score", "last", ("median", ("spread", np.ptp)), name="final"),
        EpisodeEvent(("deep", "goal"), lambda values: values.max(), ("sum",)),
        EpisodeEvent("never", "count", ("sum",)),
        EpisodeEvent("nothing", "mean", ("mean", "count")),
    ]

    async def run():
        async with fixed(episode_stats=EpisodeStats(events), autoreset_mode=mode) as envs:
            await envs.reset(seed=0)
            lengths, goals = [], []
            for _ in range(12):
                result = await envs.step(np.zeros(3, np.int64))
                for slot, _, length in ends([result.info])[0]:
                    lengths.append(length)
                    goals.append(slot)
                if mode == "Disabled" and result.terminated.any():
                    await envs.reset(options={"reset_mask": result.terminated})
            return envs.episode_stats.epoch(), np.array(lengths), goals

    epoch, lengths, goals = aioenv.run(run())
    scores = lengths * (lengths + 1) / 2  # 1 + 2 + …, without what resets tell
    assert (epoch["score/mean"], epoch["score/max"]) == (scores.mean(), scores.max())
    assert (epoch["final/median"], epoch["final/spread"]) == (np.median(lengths), np.ptp(lengths))
    assert epoch["deep.goal/sum"] == sum(goals)
    assert epoch["never/sum"] == 0 and epoch["nothing/count"] == 0 and np.isnan(epoch["nothing/mean"])


def test_write_log_and_table(caplog):
    class Writer:
        def __init__(self):
            self.written = []

        def write(self, prefix, step, stats):
            self.written.append((prefix, step, dict(stats)))

    writer = Writer()
    stats = EpisodeStats(writers=[writer])

    async def run():
        async with fixed(episode_stats=stats, stats_prefix="train") as envs:
            await envs.reset(seed=0)
            await steps(envs, 4)
            with caplog.at_level(logging.INFO, "aioenv.stats"):
                first = stats.write()
            await steps(envs, 4)
            stats.write(77)
            return first, stats.write()

    first, nothing = aioenv.run(run())
    (prefix, step, written), (_, later, second), _ = writer.written
    # slots 0 and 1 have ended, and were reset in a step
    assert (prefix, step, later) == ("train", 4 * 3 - 2, 77)
    assert written == first and written["episode_count"] == 2
    assert second["total_episode_count"] == 2 + second["episode_count"]
    assert str(first).splitlines()[0] == "train:" and "return/mean" in str(first) and "17.5" in str(first)
    assert "step 10, train:" in caplog.text
    assert nothing["episode_count"] == 0 and np.isnan(nothing["return/mean"]) and nothing["length/total"] == 0
    assert "nan" in str(nothing)


def test_envs_that_count_themselves_are_left_to_it():
    async def run():
        make = gym.wrappers.RecordEpisodeStatistics
        async with aioenv.AsyncVectorEnv([lambda: make(Fixed(0))], episode_stats=True) as envs:
            await envs.reset(seed=0)
            *_, info = await steps(envs, 2)
            assert info["episode"]["l"][0] == 2 and envs.episode_stats.total_episodes == 1

    aioenv.run(run())


def test_misuse():
    with pytest.raises(TypeError, match="episode_stats: expected True, False or an"):
        fixed(episode_stats="yes")
    with pytest.raises(TypeError, match="stats_prefix: expected a string"):
        fixed(episode_stats=True, stats_prefix=1)
    with pytest.raises(ValueError, match="pass episode_stats=True, too"):
        fixed(stats_prefix="train")
    stats = EpisodeStats()
    fixed(episode_stats=stats)
    with pytest.raises(ValueError, match="another vector env's"):
        fixed(episode_stats=stats)
    for backend in "workers", "native":
        with pytest.raises(ValueError, match="start: expected"):
            aioenv.make_vec("CartPole-v1", backend=backend, episode_stats=(stats := EpisodeStats()), start="thread")
        aioenv.make_vec("CartPole-v1", backend=backend, episode_stats=stats)  # what was not made does not own them
    with pytest.raises(RuntimeError, match="make the vector env with episode_stats=True"):
        _ = fixed().episode_stats
    with pytest.raises(ValueError, match="score: episode: expected one of"):
        EpisodeEvent("score", "average")
    with pytest.raises(ValueError, match="score: epoch: expected one of"):
        EpisodeEvent("score", epoch=("mean", "average"))
    with pytest.raises(TypeError, match="key: expected a key of the info dict, or a tuple of nested ones, got 3"):
        EpisodeEvent(3)
    with pytest.raises(TypeError, match="events: expected instances of"):
        EpisodeStats(["score"])
    with pytest.raises(TypeError, match=r"events: expected a sequence of .*; one alone goes into a list, too"):
        EpisodeStats(EpisodeEvent("score"))
    with pytest.raises(TypeError, match="prefix: expected a string or None, got 3"):
        EpisodeStats(prefix=3)
    with pytest.raises(TypeError, match="writers: expected objects with write"):
        EpisodeStats(writers=["runs/1"])
    with pytest.raises(ValueError, match="names of their own"):
        EpisodeStats([EpisodeEvent("a"), EpisodeEvent("a", "max")])
    for pair in ("most", np.max), ("most", "max"), np.max, ["most"]:
        with pytest.raises(ValueError, match="or pairs of a name and a function"):
            EpisodeEvent("score", epoch=pair if isinstance(pair, tuple) else (pair,))
    for name in _BUILT_IN[:8]:  # an event must not stand in their place
        event, reducer = name.split("/")
        with pytest.raises(ValueError, match=f"there is a number '{name}' already"):
            EpisodeStats([EpisodeEvent(event, epoch=[(reducer, np.max)])])
    with pytest.raises(ValueError, match="there is a number 'a/mean' already"):
        EpisodeStats([EpisodeEvent("a", epoch=("mean", ["mean", np.max]))])
    assert EpisodeStats().epoch().keys() == set(_BUILT_IN)
    with pytest.raises(ValueError, match="another vector env's"):
        aioenv.make_vec("CartPole-v1", backend="native", episode_stats=stats)
    assert set(_REDUCERS) >= {"sum", "mean", "std", "min", "max", "median"}


def test_the_page_shows_every_statistic():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "episode-statistics.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"```text\n(train:.*?)```", page, re.S)
    assert [line.split()[0] for line in table.splitlines()[1:]] == list(EpisodeStats().epoch())


def test_an_event_that_leads_to_a_dict_has_no_values():
    class Nested(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), 1.0, True, False, {"more": {"x": 2.0}}

    async def run():
        stats = aioenv.EpisodeStats([aioenv.EpisodeEvent("more"), aioenv.EpisodeEvent(("more", "x"))])
        async with aioenv.AsyncVectorEnv([Nested], episode_stats=stats) as envs:
            await envs.reset()
            await envs.step([0])
        epoch = stats.epoch()
        assert epoch["more.x/mean"] == 2 and epoch["more/mean"] == 0

    aioenv.run(run())


@pytest.mark.parametrize("by_reset", [False, True])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_reset_that_is_tried_again_is_no_step_of_an_episode(mode, by_reset):
    """The second reset finds no episode; once the slot is resumed, its next step is another one."""

    class Dealt(gym.Env):
        observation_space = gym.spaces.Box(0, 9, (1,))
        action_space = gym.spaces.Discrete(2)
        resets = 0

        def reset(self, *, seed=None, options=None):
            self.resets += 1
            self.t = 0
            if self.resets == 2:
                raise aioenv.EpisodesDone
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.t += 1
            return np.full(1, self.t, np.float32), 1.0, self.t == 3, False, {}

    async def run():
        async with aioenv.AsyncVectorEnv([Dealt], autoreset_mode=mode, episode_stats=True) as envs:
            stats = envs.episode_stats
            await envs.reset()
            while not stats.total_episodes:
                await envs.step([0])
            if by_reset or mode == "Disabled":
                await envs.reset()
            elif mode == "NextStep":
                await envs.step([0])
            assert envs.exhausted == (0,)
            envs.resume()
            while stats.total_episodes < 2:
                result = await envs.step([0])
            assert result.info["episode"]["l"].tolist() == [3] and stats.total_steps == 6

    aioenv.run(run())


def test_a_function_that_does_not_hash_and_an_episode_without_values():
    @dataclass
    class Quantile:
        share: float

        def __call__(self, values):
            return np.quantile(values, self.share)

    stats = EpisodeStats([EpisodeEvent("x", Quantile(0.5), epoch="mean")])
    stats.bind(1, AutoresetMode.NEXT_STEP)
    only = np.array([0])
    for value in (3.0, None):
        stats.begin(only)
        values = [] if value is None else [(0, 0, value)]
        stats.step(only, np.ones(1), np.array([True]), values)
    assert (stats.epoch()["episode_count"], stats.epoch()["x/mean"]) == (2, 3)


class Diverges(Fixed):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, np.inf if self.t % 2 else -np.inf, *rest


@pytest.mark.parametrize("how", ["numpy raises", "Python raises"])
def test_rewards_that_add_up_to_nothing_are_no_fault_of_the_worker(how):
    """numpy raises, as users have it do to find the place where numbers go wrong; so do warnings."""

    async def main() -> None:
        async with aioenv.AsyncVectorEnv([lambda: Diverges(0)] * 2, num_workers=1, episode_stats=True) as envs:
            await envs.reset()
            for _ in range(LENGTHS[0]):
                _, reward, terminated, _, info = await envs.step([0, 0])
            assert terminated.all() and np.isinf(reward).all() and np.isnan(info["episode"]["r"]).all()

    with warnings.catch_warnings(), np.errstate(all="raise" if how == "numpy raises" else "warn"):
        warnings.simplefilter("error")
        asyncio.run(main())
