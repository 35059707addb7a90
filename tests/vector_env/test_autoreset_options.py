"""`autoreset_options`: a dict, or a function of slot and episode, for the resets that no call of the user makes."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv import sync

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
PLAN = [11, 5, 900, 7, 3]


class Levels(gym.Env):
    """Notes seed and options of each reset, and takes the options apart. Action 1 kills its process."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=3, shared=None):
        self.length, self.shared, self.resets = length, shared, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets.append((seed, None if options is None else dict(options)))
        if options:
            options.clear()
        self.t = 0
        return np.zeros(1), {}

    def step(self, action):
        if action == 1:
            os._exit(7)
        self.t += 1
        return np.full(1, float(self.t)), 1.0, self.t == self.length, False, {}


def level(slot, episode):
    return {"slot": slot, "level": episode}


def make_envs(n=3, **options):
    """Envs whose episodes end at different times."""
    return aioenv.AsyncVectorEnv([partial(Levels, 2 + slot) for slot in range(n)], **options)


def options_of(resets):
    return [[options for _, options in each] for each in resets]


def expected(n, steps, mode):
    """The options of the resets of each slot after a reset of all: none, then those of the numbered episodes."""
    period = [2 + slot + (mode is AutoresetMode.NEXT_STEP) for slot in range(n)]
    return [[None, *(level(slot, 1 + k) for k in range(steps // period[slot]))] for slot in range(n)]


# ------------------------------------------------------------ automatic resets


@pytest.mark.parametrize(
    "how",
    [
        {"num_workers": 1},
        {"num_workers": 3},
        {"num_workers": 2, "debug": True},
        {"num_workers": 2, "worker_env": {"AIOENV_NO_SPEEDUPS": "1"}},
    ],
    ids=["one worker", "three", "threads", "without C"],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_function_is_asked_for_each(mode, how):
    async def main():
        async with make_envs(autoreset_mode=mode, autoreset_options=lambda slot, k: level(slot, k), **how) as envs:
            for again in range(1, 3):  # a reset of all slots begins with episode 0 again
                await envs.reset()
                for _ in range(12):
                    await envs.step([0] * 3)
                found = options_of(await envs.get_attr("resets"))
                assert found == [own * again for own in expected(3, 12, mode)]

    aioenv.run(main())


@pytest.mark.parametrize("mode", MODES)
def test_each_gets_a_copy_of_a_dict(mode):
    async def main():
        async with make_envs(2, autoreset_mode=mode, autoreset_options={"level": 2}, num_workers=1) as envs:
            await envs.reset(seed=4)
            for _ in range(8):
                await envs.step([0, 0])
            for slot, resets in enumerate(await envs.get_attr("resets")):
                assert resets[0] == (4 + slot, None) and len(resets) > 2
                assert resets[1:] == [(None, {"level": 2})] * (len(resets) - 1)

    aioenv.run(main())


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_with_a_seed_plan_each_has_seed_and_options(mode, num_workers):
    async def main():
        how = {"autoreset_mode": mode, "num_workers": num_workers, "seed_plan": PLAN, "autoreset_options": level}
        async with make_envs(2, **how) as envs:
            await envs.reset()
            for _ in range(12):
                await envs.step([0, 0])
            for slot, resets in enumerate(await envs.get_attr("resets")):
                assert len(resets) > 2
                for episode, (seed, options) in enumerate(resets):
                    assert seed == PLAN[(slot + 2 * episode) % len(PLAN)]
                    assert options == (level(slot, episode) if episode else None)

    aioenv.run(main())


def test_none_is_an_answer():
    async def main():
        async with make_envs(1, autoreset_options=lambda slot, k: {"level": k} if k % 2 else None) as envs:
            await envs.reset()
            for _ in range(9):
                await envs.step([0])
            assert options_of(await envs.get_attr("resets")) == [[None, {"level": 1}, None, {"level": 3}]]

    aioenv.run(main())


def test_the_users_resets_keep_their_options_and_count():
    async def main():
        async with make_envs(2, autoreset_options=level, num_workers=2) as envs:
            await envs.reset(options={"mine": 0})
            await envs.reset_at(0)  # episode 1 of slot 0
            await envs.reset_at(0, seed=3, options={"mine": 1})
            envs.send_reset([0], options={"mine": 2})
            await envs.recv()
            await envs.reset(options={"reset_mask": np.array([True, False]), "mine": 3})
            for _ in range(4):
                await envs.step([0, 0])
            found = options_of(await envs.get_attr("resets"))
            assert found[0] == [{"mine": 0}, None, {"mine": 1}, {"mine": 2}, {"mine": 3}, level(0, 5)]
            assert found[1] == [{"mine": 0}, level(1, 1)]
            envs.send_reset(options={"mine": 4})
            await envs.recv(2)
            for _ in range(4):
                await envs.step([0, 0])
            for slot, resets in enumerate(options_of(await envs.get_attr("resets"))):
                assert resets[-2:] == [{"mine": 4}, level(slot, 1)]
            await envs.reset(seed=[7, None])  # a slot without a seed in a list goes on
            for _ in range(4):
                await envs.step([0, 0])
            found = options_of(await envs.get_attr("resets"))
            assert [own[-2:] for own in found] == [[None, level(0, 1)], [None, level(1, 3)]]

    aioenv.run(main())


def test_a_slot_that_goes_ahead_changes_nothing_for_others():
    async def main():
        async with make_envs(2, autoreset_options=level, num_workers=1) as envs:
            envs.send_reset()
            await envs.recv(2)
            for slots in ([0], [0], [0], [1], [0, 1], [0, 1], [0, 1], [0], [1]):
                envs.send([0] * len(slots), slots)
                await envs.recv(len(slots))
            assert options_of(await envs.get_attr("resets")) == [
                [None, level(0, 1), level(0, 2)],
                [None, level(1, 1)],
            ]

    aioenv.run(main())


# ------------------------------------------------------------ resets on behalf of the user


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_rollouts(mode, num_workers):
    async def main():
        async with make_envs(autoreset_mode=mode, autoreset_options=level, num_workers=num_workers) as envs:
            await envs.reset()
            for _ in range(2):  # the second one goes on where the first one ended
                await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 6, groups=2)
            found = options_of(await envs.get_attr("resets"))
            wanted = expected(3, 12, mode)
            if mode is AutoresetMode.DISABLED:  # a reset is made when the slot is stepped again
                wanted = [own[: 1 + 11 // (2 + slot)] for slot, own in enumerate(wanted)]
            assert found == wanted

    aioenv.run(main())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_numbered_episodes(num_workers):
    async def main():
        async with make_envs(2, autoreset_options=level, num_workers=num_workers) as envs:
            async for _ in envs.episodes(lambda obs: np.zeros(len(obs), np.int64), 5, seed=[1, 2, 3, 4, 5]):
                pass
            resets = await envs.get_attr("resets")
            assert sorted(seed for own in resets for seed, _ in own) == [1, 2, 3, 4, 5]
            for slot, own in enumerate(options_of(resets)):
                assert own == [level(slot, episode) for episode in range(len(own))]

    aioenv.run(main())


def test_disabled_resets_nothing_by_itself():
    async def main():
        async with make_envs(1, autoreset_mode=AutoresetMode.DISABLED, autoreset_options=level) as envs:
            await envs.reset()
            for _ in range(2):
                await envs.step([0])
            with pytest.raises(aioenv.ResetNeededError):
                await envs.step([0])
            await envs.reset(options={"reset_mask": np.array([True])})
            assert options_of(await envs.get_attr("resets")) == [[None, {}]]

    aioenv.run(main())


# ------------------------------------------------------------ how a function travels


class Curriculum:
    """The level that an env has reached, for the function that chooses the next one."""

    reached = 0


class Climbs(Levels):
    def step(self, action):
        outcome = super().step(action)
        if outcome[2]:
            self.shared.reached += 10
        return outcome


def test_a_closure_shares_what_the_envs_have():
    """It arrives with the factories: an object of both is one object in the worker."""

    async def main():
        shared = Curriculum()
        make = partial(Climbs, 2, shared)
        async with aioenv.AsyncVectorEnv(
            [make], autoreset_options=lambda slot, k: {"level": k + shared.reached}
        ) as envs:
            await envs.reset()
            for _ in range(9):
                await envs.step([0])
            found = options_of(await envs.get_attr("resets"))
            assert found == [[None, {"level": 11}, {"level": 22}, {"level": 33}]]
            assert shared.reached == 0

    aioenv.run(main())


class Table:
    """Calls count in the object: a copy arrives in each worker."""

    def __init__(self):
        self.levels, self.calls = np.arange(20000), 0

    def __call__(self, slot, episode):
        self.calls += 1
        return {"level": int(self.levels[10 * slot + episode]), "calls": self.calls}


@pytest.mark.parametrize("debug", [False, True])
def test_any_callable(debug):
    table = Table()
    with sync.VectorEnv([partial(Levels, 2)] * 2, autoreset_options=table, debug=debug, num_workers=2) as envs:
        envs.reset()
        for _ in range(6):
            envs.step([0, 0])
        found = options_of(envs.get_attr("resets"))
        assert [[own["level"] for own in each[1:]] for each in found] == [[1, 2], [11, 12]]
        assert table.calls == (4 if debug else 0)


# ------------------------------------------------------------ errors


def fails_at_two(slot, episode):
    if episode == 2 and slot == 1:
        raise KeyError("no such level")
    return level(slot, episode)


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_is_one_of_its_slot_alone(mode):
    async def main():
        made = [partial(Levels, 2)] * 2
        async with aioenv.AsyncVectorEnv(made, autoreset_mode=mode, autoreset_options=fails_at_two) as envs:
            await envs.reset()
            with pytest.raises(aioenv.EnvError, match="no such level") as failed:
                for _ in range(6):
                    await envs.step([0, 0])
            error = failed.value
            assert error.slots == (1,) and isinstance(error.__cause__, KeyError)
            assert "raised by autoreset_options for slot 1, episode 2" in str(error)
            await envs.reset_at(1)
            for _ in range(3):
                await envs.step([0, 0])
            assert options_of(await envs.get_attr("resets"))[1][1:] == [level(1, 1), None, level(1, 4)]

    aioenv.run(main())


def test_what_is_no_dict_is_an_error():
    with sync.make_vec(Levels, 2, length=1, autoreset_options=lambda slot, k: [k] if slot else None) as envs:
        envs.reset()
        envs.step([0, 0])
        with pytest.raises(
            aioenv.EnvError, match=r"autoreset_options: expected a dict or None for slot 1, episode 1, got \[1\]"
        ) as error:
            envs.step([0, 0])
        assert error.value.slots == (1,)


def test_it_may_say_that_no_episode_is_left():
    def two_episodes(slot, episode):
        if episode == 2:
            raise aioenv.EpisodesDone
        return {}

    with sync.make_vec(Levels, 1, length=1, autoreset_options=two_episodes) as envs:
        envs.reset()
        active = [envs.step([0]).info.get("_active", [True])[0] for _ in range(4)]
        assert active == [True, True, True, False]
        assert options_of(envs.get_attr("resets")) == [[None, {}]]


async def awaits(slot, episode):
    return {}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"autoreset_options": 3}, TypeError, r"autoreset_options: expected a dict, a function f\(slot, .*, got 3"),
        ({"autoreset_options": [{}]}, TypeError, r"autoreset_options: expected a dict, .*, got \[{}\]"),
        ({"autoreset_options": dict}, TypeError, "autoreset_options: expected a dict, .*, got <class 'dict'>"),
        ({"autoreset_options": lambda slot: {}}, TypeError, "autoreset_options: .*which can't be called so: too many"),
        ({"autoreset_options": awaits}, TypeError, "autoreset_options: .*a coroutine function"),
        (
            {"autoreset_options": level, "restart": aioenv.RestartPolicy(resume=True)},
            ValueError,
            r"autoreset_options: not a function with RestartPolicy\(resume=True\)",
        ),
    ],
)
def test_refused_before_anything_is_started(given, error, message):
    with pytest.raises(error, match=message):
        aioenv.make_vec(Levels, 2, **given)


def test_what_does_not_pickle_is_refused():
    lock = threading.Lock()
    for options in (lambda slot, k: {"lock": lock}, {"lock": lock}):
        with pytest.raises(TypeError, match=r"autoreset_options can't be sent to a worker, .*lock"):
            aioenv.make_vec(Levels, 2, autoreset_options=options)
    with sync.make_vec(Levels, 1, length=1, autoreset_options={"lock": lock}, debug=True) as envs:
        envs.reset()
        for _ in range(2):
            envs.step([0])


class Lost(Table):
    def __setstate__(self, state):
        raise RuntimeError("not here")


def test_what_does_not_unpickle_fails_the_start():
    with pytest.raises(
        aioenv.WorkerStartError, match=r"autoreset_options could not be loaded in the worker: .*not here"
    ):
        sync.make_vec(Levels, 1, autoreset_options=Lost())


def test_a_native_vector_env_refuses_them():
    for options in ({}, level):
        with pytest.raises(ValueError, match="autoreset_options: not with backend"):
            aioenv.make_vec("CartPole-v1", 2, backend="native", autoreset_options=options)


# ------------------------------------------------------------ restarts


@pytest.mark.parametrize("seed_plan", [None, PLAN])
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_is_started_again_goes_on_counting(mode, seed_plan):
    with sync.make_vec(
        Levels,
        2,
        num_workers=2,
        length=2,
        autoreset_mode=mode,
        autoreset_options=lambda slot, k: level(slot, k),
        seed_plan=seed_plan,
        restart=aioenv.RestartPolicy(),
        timeout_s=30,
    ) as envs:
        envs.reset(seed=None if seed_plan else 1)
        before = []
        for _ in range(4):
            envs.step([0, 0])
        before = envs.get_attr("resets")
        assert envs.step([1, 0]).truncated.tolist()[0]
        for _ in range(8):
            envs.step([0, 0])
        resets = envs.get_attr("resets")
        begun = len(before[0])
        assert len(resets[0]) > 1
        assert options_of(resets)[0] == [level(0, begun + k) for k in range(len(resets[0]))]
        assert options_of(resets)[1][1:] == [level(1, 1 + k) for k in range(len(resets[1]) - 1)]
        if seed_plan:
            assert [seed for seed, _ in resets[0]] == [PLAN[2 * (begun + k) % len(PLAN)] for k in range(len(resets[0]))]
        else:  # the first episode in the new process has a seed, as without options
            assert resets[0][0][0] is not None and resets[0][1][0] is None


class Resumes(Levels):
    """Has a state; its observations tell the level."""

    def reset(self, *, seed=None, options=None):
        self.level = -1 if options is None else options["level"]
        obs, info = super().reset(seed=seed, options=options)
        return obs + 100 * self.level, info

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + 100 * self.level, *rest

    def get_state(self):
        return {"t": self.t if self.resets else -1, "level": self.level if self.resets else 0}

    def set_state(self, state):
        self.t, self.level = state["t"], state["level"]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_resumed_slot_gets_the_same_dict(mode):
    """Its last operation is repeated with the same options, also if it was the reset of a rollout."""

    def rollout(kill_before):
        steps = 0

        def policy(obs):
            nonlocal steps
            if steps == kill_before:
                os.kill(envs.workers[0].pid, signal.SIGKILL)
            steps += 1
            return np.zeros(len(obs), np.int64)

        with sync.make_vec(
            Resumes,
            1,
            length=2,
            autoreset_mode=mode,
            autoreset_options={"level": 5},
            restart=aioenv.RestartPolicy(resume=True),
            timeout_s=30,
        ) as envs:
            pid = envs.workers[0].pid
            envs.reset(seed=1)
            found = envs.rollout(policy, 7)
            assert (envs.workers[0].pid == pid) == (kill_before < 0)
            for seed, options in envs.get_attr("resets")[0]:  # in the new process
                assert options == (None if seed == 1 else {"level": 5})
            return found.obs.tolist(), found.reward.tolist(), found.truncated.tolist()

    expected = rollout(-1)
    assert [500.0] in [row for (row,) in expected[0]]
    for kill_before in range(1, 6):
        assert rollout(kill_before) == expected


# ------------------------------------------------------------ other interfaces


def test_stable_baselines3():
    sb3 = pytest.importorskip("aioenv.adapters.sb3", exc_type=ImportError)
    for envs in (
        sb3.make_vec(Levels, 2, length=2, autoreset_options=level, num_workers=2),
        sb3.VecEnv([partial(Levels, 2)] * 2, autoreset_options=level),
    ):
        try:
            for again in range(1, 3):  # `reset` begins with episode 0 again
                envs.reset()
                for _ in range(4):
                    envs.step([0, 0])
                own = [[None, level(slot, 1), level(slot, 2)] for slot in range(2)]
                assert options_of(envs.get_attr("resets")) == [each * again for each in own]
        finally:
            envs.close()
