"""Numbered episodes: each exactly once, with the same results in any worker and slot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.loops.evaluate import counted
from aioenv.rollout.numbered_episodes import Episode
from aioenv.testing.faulty_env import FaultyEnv, faulty_envs
from tests.kits.loop_kit import run_on


class RandomWalk(gym.Env):
    """A random walk whose length, 1 to some hundred steps, depends on its seed; rewards depend on what is done."""

    observation_space = gym.spaces.Dict(x=gym.spaces.Box(-np.inf, np.inf, (2,)), name=gym.spaces.Text(8))
    action_space = gym.spaces.Box(-1, 1, (), np.float64)

    def __init__(self, die_at=None):
        self.die_at = die_at  # a file; the env that removes it dies
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.left = 0, int(self.np_random.geometric(0.05))
        self.x = self.np_random.normal(size=2)
        return self.observe(), {"begun": True}

    def observe(self):
        return {"x": self.x.astype(np.float32), "name": str(self.t % 7)}

    def step(self, action):
        self.steps += 1
        if self.die_at is not None and self.steps == 40:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.die_at)
                os.kill(os.getpid(), signal.SIGKILL)
        self.t += 1
        self.x = self.x + self.np_random.normal(size=2) + action
        over = self.t == self.left
        return self.observe(), float(self.x[0]), bool(over and self.left % 2), over and not self.left % 2, {"t": self.t}


def policy(obs):
    return np.tanh(obs["x"][:, 1].astype(np.float64)) * np.array([len(name) for name in obs["name"]])


def alone(seed):
    """An episode without a vector env: return, length, whether it terminated, info."""
    env, total, length = RandomWalk(), 0.0, 0
    obs, _ = env.reset(seed=seed)
    while True:
        action = policy({"x": obs["x"][None], "name": [obs["name"]]})[0]
        obs, reward, terminated, truncated, info = env.step(action)
        total, length = total + reward, length + 1
        if terminated or truncated:
            return total, length, terminated, info


def outcome(episode):
    return episode.total_reward, episode.length, episode.terminated, episode.info


def check(evaluation, n):
    assert [episode.number for episode in evaluation.episodes] == list(range(n))
    assert [outcome(e) for e in evaluation.episodes] == [alone(e.seed) for e in evaluation.episodes]
    assert len({episode.seed for episode in evaluation.episodes}) == n


async def _evaluate(workers, loop_policy=policy, n=101, num_envs=8, die_at=None, **options):
    envs = aioenv.AsyncVectorEnv([partial(RandomWalk, die_at)] * num_envs, num_workers=workers, **options)
    async with envs:
        evaluation = await aioenv.evaluate(envs, loop_policy, n, seed=3)
        assert envs.active_slots.tolist() == list(range(num_envs))
        await envs.reset(seed=0)
        await envs.step(np.zeros(num_envs))
        return evaluation


def test_101_episodes_of_very_different_lengths_on_8_slots_are_the_same_for_any_number_of_workers(tmp_path):
    async def main():
        first = await _evaluate(1)
        check(first, 101)
        assert first.seed == 3 and min(first.lengths) <= 2 and max(first.lengths) > 60
        assert all(episode.attempts == 1 and episode.time_s > 0 for episode in first.episodes)
        for workers in (3, 8):
            other = await _evaluate(workers)
            for mine, theirs in zip(first.episodes, other.episodes, strict=True):
                assert mine._replace(time_s=0) == theirs._replace(time_s=0)  # slots, too
        die_at = tmp_path / "once"
        die_at.touch()
        killed = await _evaluate(3, die_at=str(die_at), restart=aioenv.RestartPolicy())
        assert not die_at.exists()
        check(killed, 101)
        assert [e.seed for e in killed.episodes] == [e.seed for e in first.episodes]
        # all that its worker had begun is begun once more, and nothing else
        again = [e for e in killed.episodes if e.attempts > 1]
        assert 1 <= len(again) <= 3 and {e.attempts for e in again} == {2}
        assert {envs_of(e.slot) for e in again} in ({0}, {1}, {2})

    run_on("uvloop", main())


def envs_of(slot):
    """The worker of a slot, of 3 workers with 3, 3 and 2."""
    return slot // 3


def test_short_episodes_are_not_preferred():
    """What comes first in time is short; what is counted is chosen by number."""

    async def main():
        async with aioenv.AsyncVectorEnv([RandomWalk] * 8, num_workers=2) as envs:
            in_time = [episode async for episode in envs.episodes(policy, 40, seed=1)]
        first = [episode.length for episode in in_time[:12]]
        lengths = [episode.length for episode in in_time]
        assert np.mean(first) < 0.9 * np.mean(lengths)
        assert sorted(e.number for e in in_time) == list(range(40))
        assert [e.number for e in in_time] != list(range(40))
        assert {e.number: e.length for e in in_time} == {e.number: alone(e.seed)[1] for e in in_time}

    run_on("asyncio", main())


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_every_autoreset_mode(mode):
    async def main():
        check(await _evaluate(2, n=11, num_envs=3, autoreset_mode=mode, copy=False, transport="shared"), 11)

    run_on("uvloop", main())


def test_what_a_policy_is_told():
    async def main():
        seen = []

        async def watch(obs, slots, episodes, started):
            assert slots.tolist() == [0, 1, 2] and len(obs["name"]) == 3
            seen.append((episodes.tolist(), started.tolist()))
            await asyncio.sleep(0)
            return policy(obs), {"value": 1}

        async with aioenv.AsyncVectorEnv([RandomWalk] * 3, num_workers=2) as envs:
            evaluation = await aioenv.evaluate(envs, watch, 5, seed=[5, 6, 7, 8, 9])
            assert evaluation.seed is None and [e.seed for e in evaluation.episodes] == [5, 6, 7, 8, 9]
            for episode in evaluation.episodes:
                mine = [(e, s) for e, s in seen if episode.number in e]
                assert len(mine) == episode.length
                starts = [s[e.index(episode.number)] for e, s in mine]
                assert starts == [True] + [False] * (episode.length - 1)

    run_on("uvloop", main())


def test_slots_without_work_are_paused_until_the_end():
    async def main():
        async with aioenv.AsyncVectorEnv([RandomWalk] * 4, num_workers=2) as envs:
            envs.pause(1)
            live = set()
            async for episode in envs.episodes(policy, 3, seed=2):
                live.add(tuple(envs.active_slots.tolist()))
                assert episode.slot in (0, 2, 3)
                assert len(await envs.get_attr("steps")) == 4  # nothing is in flight
            assert {len(slots) for slots in live} >= {0, 1, 2}
            assert envs.active_slots.tolist() == [0, 2, 3]
            async for _ in envs.episodes(policy, 2, seed=2):
                assert len(envs.active_slots) < 3
                break  # left early: at once it is as it was, before the loop turns
            assert envs.active_slots.tolist() == [0, 2, 3]
            envs.pause(0)
            await envs.reset(seed=1)  # which ends the generator; what it had paused has changed meanwhile
            assert envs.active_slots.tolist() == [2, 3]
            envs.resume_all()
            await envs.reset(seed=1)
            await envs.step(np.zeros(4))
            envs.pause(range(4))
            with pytest.raises(aioenv.PausedError):
                await anext(envs.episodes(policy, 1))
            envs.resume()
            envs.send(np.zeros(1), [0])
            with pytest.raises(aioenv.PendingCallError):
                await aioenv.evaluate(envs, policy, 1)
            await envs.recv()

    run_on("asyncio", main())


def test_an_iteration_does_not_go_on_with_envs_that_another_has_taken():
    async def main():
        async with aioenv.AsyncVectorEnv([RandomWalk] * 4, num_workers=2) as envs:
            held = envs.episodes(policy, 4, seed=3)
            for _ in range(2):
                await anext(held)
            assert len(envs.active_slots) == 2
            check(await aioenv.evaluate(envs, policy, 11, seed=5), 11)
            assert len(envs.active_slots) == 4
            with pytest.raises(aioenv.PendingCallError, match="another iteration"):
                [episode async for episode in held]
            alive = asyncio.Event()

            async def slow(obs):
                alive.set()
                await other.wait()
                return policy(obs)

            other = asyncio.Event()
            task = asyncio.ensure_future(aioenv.evaluate(envs, slow, 5, seed=3))
            await alive.wait()
            check(await aioenv.evaluate(envs, policy, 11, seed=5), 11)
            other.set()
            with pytest.raises(aioenv.PendingCallError, match="another iteration"):
                await task
            assert len(envs.active_slots) == 4

    run_on("asyncio", main())


@pytest.mark.parametrize("backend", ["workers", "native"])
@pytest.mark.parametrize("other", ["step", "cancelled step", "send", "reset", "reset_at", "step_at", "set_state"])
def test_an_iteration_does_not_go_on_after_another_caller(backend, other):
    """Its episodes would be of two policies, or of half an env's."""

    def still(obs):
        return np.zeros((len(obs), 1))

    async def disturb(envs, state):
        if other == "step":
            await envs.step(np.zeros((3, 1)))
        elif other == "send":
            envs.send(np.zeros((3, 1)))
            await envs.recv(3)
        elif other == "cancelled step":
            step = asyncio.ensure_future(envs.step(np.zeros((3, 1))))
            await asyncio.sleep(0)  # it is sent, or made here
            if step.cancel():
                await envs.recv(3)
        elif other == "step_at":
            await envs.step_at(0, np.zeros(1))
        elif other == "reset_at":
            await envs.reset_at(1)
        elif other == "reset":
            await envs.reset()
        else:
            await envs.set_state(state)

    async def main():
        async with aioenv.make_vec("InvertedPendulum-v5", 3, backend=backend, max_episode_steps=5) as envs:
            await envs.reset(seed=1)
            state = await envs.get_state()
            with pytest.raises(aioenv.PendingCallError, match="other code has stepped"):
                async for _ in envs.episodes(still, 9, seed=3):
                    await disturb(envs, state)
            lengths = []
            async for episode in envs.episodes(still, 4, seed=3):
                lengths.append(episode.length)
                envs.stats(reset=True)  # looking on is no matter
            assert lengths == [5] * 4

    run_on("asyncio", main())


@pytest.mark.parametrize("backend", ["workers", "native"])
def test_steps_of_single_slots_are_steps(backend):
    async def main():
        async with aioenv.make_vec("InvertedPendulum-v5", 3, backend=backend) as envs:
            await envs.reset(seed=1)
            envs.stats(reset=True)
            await envs.reset_at(1)
            assert (before := envs.stats()).env_steps == 0 and before.env_s > 0
            await envs.step_at(1, np.zeros(1))
            assert (after := envs.stats()).env_steps == 1 and after.env_s > before.env_s

    run_on("asyncio", main())


def test_errors_have_what_was_done():
    async def main():
        envs = aioenv.AsyncVectorEnv(
            [*faulty_envs(1, "raises", "step", slot=0, at=9), partial(FaultyEnv, slot=1, length=3)], num_workers=2
        )
        async with envs:
            with pytest.raises(aioenv.EnvError) as caught:
                await aioenv.evaluate(envs, lambda obs: np.zeros(2, np.int64), 10, seed=0)
            assert [e.length for e in caught.value.partial.episodes] == [3, 3]
            with pytest.raises(ZeroDivisionError):
                await aioenv.evaluate(envs, lambda obs: 1 / 0, 2)
            with pytest.raises(aioenv.ActionError):
                await aioenv.evaluate(envs, lambda obs: np.zeros(3, np.int64), 2)
            task = asyncio.ensure_future(aioenv.evaluate(envs, lambda obs: np.zeros(2, np.int64), 2))
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await envs.reset(seed=1)).obs[:, 2].tolist() == [0, 0]
            assert (await envs.step(np.zeros(2, np.int64))).obs[:, 2].tolist() == [1, 1]
            os.kill(envs.workers[0].pid, signal.SIGKILL)
            with pytest.raises(aioenv.WorkerDied):
                await aioenv.evaluate(envs, lambda obs: np.zeros(2, np.int64), 10, seed=0)

    run_on("uvloop", main())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": 0}, ValueError, "episodes: expected a positive int, got 0"),
        ({"n": True}, ValueError, "episodes"),
        ({"seed": [1]}, ValueError, "one for each of 2 episodes, got 1"),
        ({"seed": -1}, ValueError, "seed: expected an int from 0"),
        ({"policy": None}, TypeError, "expected a function of observations, got None"),
    ],
)
def test_bad_arguments(arguments, error, message):
    async def main():
        async with aioenv.AsyncVectorEnv([RandomWalk]) as envs:
            with pytest.raises(error, match=message):
                envs.episodes(**{"policy": policy, "n": 2, **arguments})

    run_on("asyncio", main())


class Finite(RandomWalk):
    def reset(self, *, seed=None, options=None):
        self.begun = getattr(self, "begun", 0) + 1
        if self.begun > 2:
            raise aioenv.EpisodesDone
        return super().reset(seed=seed)


def test_envs_that_have_too_few_episodes():
    async def main():
        async with aioenv.AsyncVectorEnv([Finite, RandomWalk], num_workers=1) as envs:
            check(await aioenv.evaluate(envs, policy, 9, seed=4), 9)
            assert envs.exhausted == (0,)
        async with aioenv.AsyncVectorEnv([Finite] * 2, num_workers=1) as envs:
            with pytest.raises(aioenv.EpisodesDone, match=r"1 of 5 could not be run: .* slots \[0, 1\]") as caught:
                await aioenv.evaluate(envs, policy, 5, seed=4)  # else 3 is left, if both slots begin in one step
            assert sorted(episode.number for episode in caught.value.partial.episodes) == [0, 1, 2, 3]

    run_on("asyncio", main())


def test_it_prints_as_a_table_and_shows_a_bar(capsys):
    async def main():
        told = []
        async with aioenv.AsyncVectorEnv([RandomWalk] * 4, num_workers=2) as envs:
            few = await aioenv.evaluate(envs, policy, 3, seed=2, progress=told.append)
            many = await aioenv.evaluate(envs, policy, 31, progress=True)
        assert sorted(e.number for e in told) == [0, 1, 2]
        return few, many

    few, many = run_on("asyncio", main())
    lines = str(few).split("\n")
    assert lines[0] == "3 episodes, drawn from seed=2"
    assert lines[1].split() == "episode seed slot return length seconds end attempts".split()
    first = few.episodes[0]
    assert lines[2].split()[:5] == ["0", str(first.seed), "0", f"{first.total_reward:.6g}", str(first.length)]
    assert lines[-2].startswith(f"return: {few.returns.mean():.6g} +/- ") and lines[-1].startswith("length: ")
    assert len(str(many).split("\n")) == 1 + 1 + 20 + 1 + 2 and "\n...\n" in str(many)
    assert many.seed > 2**64
    assert re.search(r"31/31 episodes, \d\d:\d\d, return -?\d", capsys.readouterr().out)


def test_a_bar_shows_the_mean_of_all_episodes(capsys):
    with counted(True, 3) as count:
        for number in range(3):
            count(Episode(number, None, 0, float(number), 1, 0.0, True, 1, {}))
    assert "3/3 episodes" in (told := capsys.readouterr().out) and "return 1" in told


def test_a_bar_starts_no_process_where_processes_are_spawned():
    """TorchRL chooses that start method when it is imported, and tqdm's lock would take a process then."""
    lines = (
        "import multiprocessing; multiprocessing.set_start_method('spawn')",
        "from multiprocessing.resource_tracker import _resource_tracker as tracker",
        "from aioenv.loops.evaluate import progress_bar; progress_bar(3).close()",
        "assert tracker._pid is None",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=60)


def test_a_coroutine_function_is_no_progress():
    """It would be called, and never run."""

    async def tell(episode):
        """Never awaited."""

    async def main():
        async with aioenv.AsyncVectorEnv([RandomWalk]) as envs:
            await aioenv.evaluate(envs, policy, 3, progress=tell)

    with pytest.raises(TypeError, match="progress: expected a bool or a plain function"):
        run_on("asyncio", main())


def test_the_blocking_twins(tmp_path):
    with aioenv.sync.VectorEnv([RandomWalk] * 3, num_workers=2) as envs:
        check(aioenv.sync.evaluate(envs, policy, 7, seed=3), 7)
        first = None
        for episode in envs.episodes(lambda obs, started: policy(obs), 5, seed=3):
            first = episode
            break
        assert outcome(first) == alone(first.seed)
        assert envs.active_slots.tolist() == [0, 1, 2]
        envs.reset(seed=1)
        with pytest.raises(ZeroDivisionError):
            aioenv.sync.evaluate(envs, lambda obs: 1 / 0, 5)
        with pytest.raises(ValueError, match="positive int"):
            envs.episodes(policy, 0)

        async def wrong(obs):
            return 0

        with pytest.raises(TypeError, match="episodes: policy: expected a plain function"):
            aioenv.sync.evaluate(envs, wrong, 5)
        envs.reset(seed=1)
        check(aioenv.sync.evaluate(envs, policy, 7, seed=3), 7)


class Told(gym.Env):
    """Truncates its episodes, and says words in its infos that mean something elsewhere."""

    observation_space = gym.spaces.Discrete(9)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return 0, {}

    def step(self, action):
        self.t += 1
        return self.t, 1.0, False, self.t == 3, {"restarted": True, "count": self.t, "deep": {"late": self.t > 1}}


@pytest.mark.asyncio
async def test_an_envs_own_word_of_a_restart_is_not_taken_for_ours():
    async with aioenv.make_vec(Told, 2, debug=True, episode_stats=True) as envs:
        evaluation = await asyncio.wait_for(aioenv.evaluate(envs, lambda obs: np.zeros(2, int), 3, seed=0), 10)
        assert evaluation.lengths.tolist() == [3] * 3
        assert envs.episode_stats.total_episodes == 3
        info = evaluation.episodes[0].info
        assert info.pop("episode")["l"] == 3
        assert info == {"restarted": True, "count": 3, "deep": {"late": True}}
        assert type(info["count"]) is int and type(info["deep"]["late"]) is bool  # as they were, ready for JSON
        await envs.reset()
        result = await envs.step_at(0, 0)
        assert type(result.info["count"]) is int


class Scored(gym.Env):
    """Ends at once, with a score whose type depends on the seed."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)
    scores = (0, 0.75, True, np.float32(0.5), 300)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.score = self.scores[seed % len(self.scores)]
        return 0, {}

    def step(self, action):
        return 1, 0.0, True, False, {"score": self.score, "deep": {"score": self.score}}


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(
    "kwargs", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 3}, {"debug": True}], ids=str
)
def test_an_info_does_not_depend_on_episodes_beside_it(kwargs, mode):
    with aioenv.sync.VectorEnv([Scored] * 4, autoreset_mode=mode, **kwargs) as envs:
        evaluation = aioenv.sync.evaluate(envs, lambda obs: np.zeros(4, int), 8, seed=list(range(8)))
    for episode in evaluation.episodes:
        score = Scored.scores[episode.seed % len(Scored.scores)]
        for told in (episode.info["score"], episode.info["deep"]["score"]):
            assert told == score and isinstance(told, type(score))
