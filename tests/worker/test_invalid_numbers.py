"""Rewards, flags, infos and actions that are no numbers: an error names the slot, and nothing is converted."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

import aioenv
from aioenv import sync
from aioenv.spaces.checks import Range, check_range
from aioenv.speedups import within

MODES = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.value)
PATHS = pytest.mark.parametrize("compiled", [True, False], ids=["c", "python"])


class Gives(gym.Env):
    """Gives what it is told in its second step, or in a reset."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, number: int, told: dict[str, Any]) -> None:
        self.number, self.told = number, told if number == 1 else {}
        self.resets = 0

    def reset(self, *, seed=None, options=None):
        self.time, self.resets = 0, self.resets + 1
        info = self.told["first"] if "first" in self.told and self.resets > 1 else {}
        return np.zeros(1, np.float32), info

    def step(self, action):
        self.time += 1
        given = {"reward": 1.0, "terminated": False, "truncated": False, "info": {"number": self.number}}
        if self.time == 2:
            given |= {name: value for name, value in self.told.items() if name != "first"}
        return np.full(1, self.number, np.float32), *given.values()


def refused(told, said, monkeypatch, compiled, mode=AutoresetMode.NEXT_STEP):
    if not compiled:
        monkeypatch.setattr("aioenv.worker.row_buffers.compiled", False)
    makers = [lambda i=i: Gives(i, told) for i in range(3)]
    with sync.VectorEnv(makers, debug=True, autoreset_mode=mode) as envs:
        envs.reset()
        envs.step(np.zeros(3, np.int64))
        with pytest.raises(aioenv.EnvError, match=said) as caught:
            envs.step(np.zeros(3, np.int64))
        error = caught.value
        assert error.slots == (1,) and isinstance(error.__cause__, (TypeError, ValueError))
        assert error.partial.reward.tolist() == [1, 0, 1] and not error.partial.terminated.any()
        assert error.partial.info["number"].tolist() == [0, 0, 2]
        envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert envs.step(np.zeros(3, np.int64)).reward.tolist() == [1] * 3


@PATHS
@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"reward": None}, r"reward: expected a number, got None"),
        ({"reward": "1"}, r"reward: expected a number, got '1'"),
        ({"reward": b"1"}, r"reward: expected a number, got b'1'"),
        ({"reward": np.str_("1.5")}, r"reward: expected a number, got .*1\.5"),
        ({"reward": np.datetime64(3, "s")}, r"reward: expected a number, got .*datetime64"),
        ({"reward": 1j}, r"reward: expected a number, got 1j"),
        ({"reward": {}}, r"reward: expected a number, got \{\}"),
        (
            {"reward": np.array([1.5])},
            r"reward: expected a number, got array\(\[1\.5\]\), of shape \(1,\).*reward\.item",
        ),
        ({"reward": [1.5]}, r"reward: expected a number, got \[1\.5\], of shape \(1,\)"),
        ({"reward": np.array([[1.5]])}, r"of shape \(1, 1\)"),
        (
            {"reward": np.array([1.0, 2.0])},
            r"reward: expected a number, got .*; if there are several \(objectives, say\)",
        ),
        ({"terminated": None}, r"terminated: expected a bool, got None"),
        ({"terminated": "no"}, r"terminated: expected a bool, got 'no'"),
        ({"terminated": ""}, r"terminated: expected a bool, got ''"),
        ({"terminated": 2}, r"terminated: expected a bool, got 2"),
        ({"terminated": 0.5}, r"terminated: expected a bool, got 0\.5"),
        ({"terminated": float("nan")}, r"terminated: expected a bool, got nan"),
        ({"truncated": None}, r"truncated: expected a bool, got None"),
        ({"truncated": {"TimeLimit.truncated": False}}, r"truncated: expected a bool, got \{"),
        ({"truncated": []}, r"truncated: expected a bool, got \[\]"),
        ({"truncated": np.array([False, False])}, r"truncated: expected a bool, got array"),
        ({"info": None}, r"step: expected info as a dict, got None"),
        ({"info": []}, r"step: expected info as a dict, got a list of 0"),
        ({"info": ["a"]}, r"step: expected info as a dict, got a list of 1"),
        ({"info": ""}, r"step: expected info as a dict, got a str"),
        ({"info": False}, r"step: expected info as a dict, got a bool"),
    ],
    ids=str,
)
def test_of_a_step(told, said, compiled, monkeypatch):
    refused(told, said, monkeypatch, compiled)


@PATHS
@MODES
@pytest.mark.parametrize("name", ["reward", "terminated", "info"])
def test_in_every_mode(name, mode, compiled, monkeypatch):
    refused({name: None}, f"{name}.*got None|expected info as a dict, got None", monkeypatch, compiled, mode)


@PATHS
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_the_reward_of_a_last_step(mode, compiled, monkeypatch):
    """No episode may begin after it: the slot has failed."""
    if not compiled:
        monkeypatch.setattr("aioenv.worker.row_buffers.compiled", False)
    makers = [lambda i=i: Gives(i, {"reward": None, "terminated": True}) for i in range(2)]
    with sync.VectorEnv(makers, debug=True, autoreset_mode=mode) as envs:
        envs.reset()
        envs.step(np.zeros(2, np.int64))
        with pytest.raises(aioenv.EnvError, match="reward: expected a number, got None") as caught:
            envs.step(np.zeros(2, np.int64))
        assert caught.value.slots == (1,) and not caught.value.partial.terminated.any()
        envs.reset(options={"reset_mask": np.array([False, True])})
        envs.step(np.zeros(2, np.int64))


@PATHS
@pytest.mark.parametrize(("first", "said"), [(None, "None"), ([], "a list of 0"), ("x", "a str")])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", None])
def test_the_info_of_a_reset(first, said, mode, compiled, monkeypatch):
    """By itself, and when asked."""
    if not compiled:
        monkeypatch.setattr("aioenv.worker.row_buffers.compiled", False)
    makers = [lambda i=i: Gives(i, {"first": first, "terminated": True}) for i in range(2)]
    with sync.VectorEnv(makers, debug=True, autoreset_mode=mode or "Disabled") as envs:
        envs.reset()
        with pytest.raises(aioenv.EnvError, match=f"reset: expected info as a dict, got {said}") as caught:
            for _ in range(3 if mode else 0):
                envs.step(np.zeros(2, np.int64))
            envs.reset()
        assert caught.value.slots == (1,)


@PATHS
@pytest.mark.parametrize("given", [1, np.int64(1), np.float32(1), True, np.bool_(True), np.array(True), np.array(1.0)])
def test_what_counts_as_numbers_and_flags(given, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr("aioenv.worker.row_buffers.compiled", False)
    makers = [lambda i=i: Gives(i, {"reward": given, "truncated": given}) for i in range(2)]
    with sync.VectorEnv(makers, debug=True) as envs:
        envs.reset()
        envs.step(np.zeros(2, np.int64))
        result = envs.step(np.zeros(2, np.int64))
        assert result.reward.tolist() == [1, 1] and result.truncated.tolist() == [False, True]


@pytest.mark.parametrize("told", [{"reward": None}, {"reward": "1"}, {"terminated": None}, {"truncated": 2}], ids=str)
def test_the_drop_in_takes_what_gymnasium_takes(told):
    makers = [lambda i=i: Gives(i, told) for i in range(2)]
    theirs = SyncVectorEnv(makers)
    with sync.AsyncVectorEnv(makers) as ours:
        for envs in (ours, theirs):
            envs.reset()
            envs.step(np.zeros(2, np.int64))
        mine, other = (envs.step(np.zeros(2, np.int64)) for envs in (ours, theirs))
        for a, b in zip(mine[1:4], other[1:4], strict=True):
            assert a.tobytes() == b.tobytes()
    theirs.close()


class Whole(VectorEnv):
    """One vector env that gives what it is told."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    single_observation_space, single_action_space = Gives.observation_space, Gives.action_space

    def __init__(self, num_envs: int, told: dict[str, Any]) -> None:
        self.num_envs, self.told = num_envs, told
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions):
        flags = np.zeros(self.num_envs, np.bool_)
        given = {"reward": np.ones(self.num_envs), "terminated": flags, "truncated": flags} | self.told
        return np.zeros((self.num_envs, 1), np.float32), *given.values(), {}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"reward": [None, 1.0]}, r"reward: expected numbers, got .*None"),
        ({"reward": ["1", "2"]}, r"reward: expected numbers, got .*'1'"),
        ({"terminated": [None, False]}, r"terminated: expected bools, got .*None"),
        ({"truncated": ["no", "no"]}, r"truncated: expected bools, got .*'no'"),
    ],
    ids=str,
)
def test_of_a_vector_env(told, said, num_workers):
    with sync.make_vec(Whole, 2, backend="native", num_workers=num_workers or None, told=told) as envs:
        envs.reset()
        with pytest.raises(aioenv.EnvError, match=said):
            envs.step(np.zeros(2, np.int64))


# ---------------------------------------------------------------- actions


class Anything(gym.Env):
    """Takes whatever it is given, and tells it."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)

    def __init__(self, action_space: spaces.Space) -> None:
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {"action": action}


SPACES = [
    (spaces.Discrete(2), [0, 2, 1], r"actions: expected int64 from 0 to 1, got 2 in row 1"),
    (spaces.Discrete(2), [0, 1, -1], r"actions: expected int64 from 0 to 1, got -1 in row 2"),
    (spaces.Discrete(3, start=-1), [-1, 1, 2], r"from -1 to 1, got 2 in row 2"),
    (spaces.Discrete(3, start=5), [5, 4, 7], r"from 5 to 7, got 4 in row 1"),
    *(
        [(spaces.Discrete(90, start=-50, dtype=np.int8), [60, 0, 0], r"expected int8 from -50 to 39, got 60 in row 0")]
        if "dtype" in inspect.signature(spaces.Discrete).parameters  # which Gymnasium 1.2 lacks
        else []
    ),
    (spaces.MultiDiscrete([2, 3]), [[1, 2], [1, 3], [0, 0]], r"from 0 to 2, got 3 in row 1, \[1\]"),
    (spaces.MultiDiscrete([2, 3], start=[0, 10]), [[1, 12], [1, 10], [0, 0]], r"from 10 to 12, got 0 in row 2, \[1\]"),
    (spaces.MultiBinary(2), [[0, 1], [1, 2], [0, 0]], r"from 0 to 1, got 2 in row 1, \[1\]"),
    (
        spaces.Dict(a=spaces.Box(-1, 1, (1,)), b=spaces.Discrete(2)),
        {"a": np.zeros((3, 1), np.float32), "b": [0, 0, 9]},
        r"actions\['b'\]: expected int64 from 0 to 1, got 9 in row 2",
    ),
    (
        spaces.Tuple((spaces.Discrete(2), spaces.Discrete(4))),
        ([0, 1, 1], [3, 4, 0]),
        r"actions\[1\]: expected int64 from 0 to 3, got 4 in row 1",
    ),
]


@PATHS
@pytest.mark.parametrize(("space", "actions", "said"), SPACES, ids=[str(number) for number in range(len(SPACES))])
def test_actions_that_the_space_does_not_have(space, actions, said, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr("aioenv.spaces.checks.within", None, raising=False)
    with sync.VectorEnv([lambda: Anything(space)] * 3, debug=True) as envs:
        envs.reset()
        for act in (
            lambda: envs.step(actions),
            lambda: envs.send(actions),
            lambda: envs.rollout(lambda _: actions, 1, 1),
        ):
            with pytest.raises(aioenv.ActionError, match=said) as caught:
                act()
            assert isinstance(caught.value, ValueError)
        envs.action_space.seed(1)
        for _ in range(20):
            envs.step(envs.action_space.sample())
    with sync.AsyncVectorEnv([lambda: Anything(space)] * 3) as envs:  # which is Gymnasium's: its envs must say so
        envs.reset()
        batch = actions
        if not isinstance(actions, (dict, tuple)):
            batch = np.array(actions, space.dtype)
        envs.step(batch)


@pytest.mark.asyncio
async def test_of_one_slot_and_of_paused_ones():
    async with aioenv.AsyncVectorEnv([lambda: Anything(spaces.Discrete(2))] * 3, debug=True) as envs:
        await envs.reset()
        with pytest.raises(aioenv.ActionError, match="from 0 to 1, got 5"):
            await envs.step_at(1, 5)
        envs.pause(1)
        await envs.step([0, -1, 1])  # of a paused slot it is not used
        with pytest.raises(aioenv.ActionError, match="got -1 in row 2"):
            await envs.step([0, 0, -1])
        envs.resume()
        with pytest.raises(aioenv.ActionError, match="from 0 to 1, got 3"):
            async for _ in envs.episodes(lambda obs: np.full(len(obs), 3), 2):
                pass


@pytest.mark.parametrize("num_workers", [None, 2])
@pytest.mark.parametrize("env", ["CartPole-v1", lambda num_envs: Whole(num_envs, {})], ids=["cartpole", "whole"])
def test_of_vector_envs(env, num_workers):
    with sync.make_vec(env, 2, backend="native", num_workers=num_workers) as envs:
        envs.reset(seed=1)
        for wrong in ([0, 2], np.array([-1, 0])):
            with pytest.raises(aioenv.ActionError, match="from 0 to 1, got"):
                envs.step(wrong)
        envs.step([0, 1])


def test_ranges_in_c_and_python():
    """The same is refused by either, at every edge of 64 bits."""
    if within is None:
        pytest.skip("there was no C compiler")
    rng = np.random.default_rng(0)
    edges = [0, 1, -1, 2**63 - 1, -(2**63), 7]
    for _ in range(300):
        low, count = int(rng.choice([0, -3, 5, -(2**63)])), int(rng.choice([1, 2, 9, 2**62]))
        numbers = rng.choice(np.array([*edges, low, low + count - 1, low + count // 2], np.int64), 3)
        inside = all(low <= number < low + count for number in numbers.tolist())
        assert within(numbers, low, count) == inside
        try:
            check_range(numbers, Range(low, count), "")
            assert inside
        except aioenv.ActionError:
            assert not inside
    for wrong in (np.zeros(3, np.int32), np.zeros(3), [0, 1]):
        with pytest.raises((TypeError, ValueError)):
            within(wrong, 0, 2)
    with pytest.raises((ValueError, BufferError)):
        within(np.zeros(6, np.int64)[::2], 0, 2)
    assert within(np.zeros(0, np.int64), 0, 1)
