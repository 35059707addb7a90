"""Envs are stepped below the wrappers of `gymnasium.make` with the same results."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit, TransformReward

from aioenv import speedups
from aioenv.spaces.wrapped_steps import step_of
from tests.speedups.growth_kit import check_nothing_grows

compiled = pytest.mark.skipif(not speedups.compiled, reason=f"not compiled: {speedups.why_not}")


class Counter(gym.Env[Any, Any]):
    """Its observation is the number of its steps."""

    observation_space = spaces.Box(0, 1000, (1,), np.float32)
    action_space = spaces.Discrete(2)
    outcome: Any = ()

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome != ():
            return self.outcome
        return np.full(1, self.steps, np.float32), float(action), self.steps == 99, False, {"steps": self.steps}


def made(limit: int = 3) -> Any:
    """As `gymnasium.make` wraps it."""
    env: Any = Counter()
    env.spec = gym.envs.registration.EnvSpec("Counter-v0", entry_point=Counter)
    return TimeLimit(OrderEnforcing(PassiveEnvChecker(env)), limit)


def attributes(env: Any) -> list[dict[str, Any]]:
    """The attributes of the wrappers that may change, and the number of steps of the env."""
    found = []
    while isinstance(env, gym.Wrapper):
        names = ("_elapsed_steps", "_has_reset", "checked_step", "checked_data_reuse")
        found.append({name: vars(env)[name] for name in names if name in vars(env)})
        env = env.env
    return [*found, {"steps": env.steps}]


def outcome_of(step: Any, action: Any) -> Any:
    """What a step returns or raises, and warns."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            result = step(action)
        except Exception as exc:
            result = (type(exc), str(exc))
    return result, [str(each.message) for each in told]


def check_same(env: Any, other: Any, steps: int = 8) -> None:
    """The step of one env does what `step_of` does for another, also to the attributes of wrappers."""
    step = step_of(other)
    for number in range(steps):
        if number in (1, 6):
            assert repr(env.reset()) == repr(other.reset())
        assert repr(outcome_of(env.step, number % 2)) == repr(outcome_of(step, number % 2))
        assert attributes(env) == attributes(other)


@compiled
def test_the_wrappers_of_make_are_taken_over():
    for env in (TimeLimit(Counter(), 3), OrderEnforcing(Counter()), PassiveEnvChecker(Counter())):
        assert step_of(env) != env.step
    for other in (Counter(), TransformReward(made(), lambda reward: 2 * reward)):
        assert step_of(other) == other.step


def test_steps_are_those_of_the_wrappers():
    check_same(made(), made())
    check_same(OrderEnforcing(Counter()), OrderEnforcing(Counter()))
    check_same(PassiveEnvChecker(made(2)), PassiveEnvChecker(made(2)))
    check_same(TimeLimit(made(4), 2), TimeLimit(made(4), 2))
    check_same(TimeLimit(TransformReward(made(4), abs), 2), TimeLimit(TransformReward(made(4), abs), 2))


@pytest.mark.parametrize(
    "outcome", [None, (1, 2), [np.zeros(1), 1.0, False, False, {}], "abcde", ValueError("broken"), range(6)]
)
def test_outcomes_that_are_no_tuple_of_five(outcome):
    env, other = made(), made()
    for each in (env, other):
        each.reset()
        each.step(0)
        each.step(0)
        each.unwrapped.outcome = outcome
    step = step_of(other)
    for _ in range(2):
        assert repr(outcome_of(env.step, 0)) == repr(outcome_of(step, 0))
        assert attributes(env) == attributes(other)


def test_before_the_first_reset():
    with pytest.raises(ResetNeeded):
        step_of(made())(0)


def test_attributes_may_change():
    env = made()
    step = step_of(env)
    env.reset()
    for _ in range(2):
        assert not step(0)[3]
    env._max_episode_steps = 5
    for _ in range(2):
        assert not step(0)[3]
    env._elapsed_steps = 0
    assert [step(0)[3] for _ in range(5)] == [False] * 4 + [True]
    env.unwrapped.step = lambda action: (np.ones(1, np.float32), 7.0, False, False, {})
    assert step(0)[1] == 7.0


def test_wrappers_may_change():
    env = made(99)
    step = step_of(env)
    env.reset()
    for _ in range(3):
        step(0)
    assert step(1)[1] == 1.0
    env.env.env.env = TransformReward(env.unwrapped, lambda reward: 10 * reward)
    assert step(1)[1] == 10.0
    env.env.env.env = env.unwrapped
    assert step(1)[1] == 1.0
    env.env = TransformReward(env.env, lambda reward: 20 * reward)
    assert step(1)[1] == 20.0
    assert env._elapsed_steps == 7


def test_subclasses_and_patched_instances_keep_their_own_step():
    class Own(TimeLimit):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], {"own": True})

    env: Any = Own(Counter(), 5)
    env.reset()
    assert step_of(env)(0)[4] == {"own": True}
    env = made()
    env.reset()
    env.step = lambda action: "patched"
    assert step_of(env)(0) == "patched"


def test_a_step_of_another_gymnasium_is_called(monkeypatch):
    def step(self: Any, action: Any) -> Any:
        return (*self.env.step(action)[:4], {"another": True})

    monkeypatch.setattr(TimeLimit, "step", step)
    env = made()
    env.reset()
    assert step_of(env)(0)[4] == {"another": True}


@compiled
def test_nothing_is_left():
    env = made(10**9)
    env.reset()
    step = step_of(env)
    step(0)
    step(0)
    check_nothing_grows(lambda: step(0), env, env.env, env.unwrapped)
    check_nothing_grows(lambda: step_of(env), env, env.env, env.unwrapped)
    env.unwrapped.outcome = None
    check_nothing_grows(lambda: outcome_of(step, 0), env, env.env, env.unwrapped, times=1000)
    env.unwrapped.own_step = step  # a cycle
    gone = weakref.ref(env.unwrapped)
    env = step = None
    gc.collect()
    assert gone() is None


@compiled
def test_invalid_arguments():
    for arguments in [(), (1, 2, 3, 4, 5), (print, (Counter(),), [], None, print), (print, (1, 2), (), None, print)]:
        with pytest.raises(TypeError, match="expected 5 arguments"):
            speedups.step_below(*arguments)
    env = made()
    chain = (env, env.env)
    with pytest.raises(TypeError):
        speedups.step_below(env.step, chain, [1], None, print)(0)
    with pytest.raises(AttributeError):
        speedups.step_below(env.step, (1, 2), [], None, print)(0)
    env.reset()
    env.unwrapped.outcome = None
    with pytest.raises(TypeError, match="tuple of 5"):
        speedups.step_below(env.step, (env.env.env, env.unwrapped), [], env, print)(0)
