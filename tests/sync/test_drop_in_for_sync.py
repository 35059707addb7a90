"""The drop-in for Gymnasium's SyncVectorEnv: what Gymnasium's own tests of it don't ask for (make gymnasium-suite)."""

from __future__ import annotations

import contextlib
import inspect
import re
import signal
import threading
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv import speedups
from aioenv.sync import AsyncVectorEnv, SyncVectorEnv
from tests.kits.compare import assert_same
from tests.kits.counter_kit import Counter, counters
from tests.kits.process_kit import run_alone
from tests.sync.test_drop_in import TRAINING, Faulty

ENV_THREAD = "aioenv-worker-0"


def step_inline(envs, action=0, steps=100):
    """Make steps until they run on the caller's thread, which takes C, and check that they do."""
    if not speedups.compiled:
        pytest.skip(f"not compiled: {speedups.why_not}")
    envs.reset(seed=0)
    for _ in range(steps):
        envs.step(np.full(envs.num_envs, action, envs.action_space.dtype))
    assert envs._stepper.scheduler.can_use_envs


# ---------------------------------------------------------------- the same as Gymnasium


def test_signatures_are_gymnasiums():
    def parameters(function):
        return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]

    for name in ("__init__", "reset", "step", "render", "call", "get_attr", "set_attr", "close_extras", "close"):
        assert parameters(getattr(SyncVectorEnv, name)) == parameters(getattr(gym.vector.SyncVectorEnv, name))


ENVS = {
    "arrays": partial(gym.make, "CartPole-v1"),
    "infos": partial(gym.make, "HalfCheetah-v5", max_episode_steps=20),
    "objects": partial(gym.make, "Blackjack-v1"),
}


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("name", ENVS)
def test_the_same_results(name, copy, mode):
    factories = [ENVS[name]] * 3
    theirs = gym.vector.SyncVectorEnv(factories, copy, autoreset_mode=mode)
    with SyncVectorEnv(factories, copy, autoreset_mode=mode.value) as mine:
        assert isinstance(mine, gym.vector.VectorEnv) and mine.spec is theirs.spec is None
        assert repr(mine) == "SyncVectorEnv(num_envs=3)"
        for attribute in ("env_fns", "copy", "observation_mode", "autoreset_mode", "metadata", "render_mode"):
            assert getattr(mine, attribute) == getattr(theirs, attribute)
        for attribute in ("single_observation_space", "observation_space", "single_action_space", "action_space"):
            assert getattr(mine, attribute) == getattr(theirs, attribute)
        results = [each.reset(seed=[3, 1, 2]) for each in (mine, theirs)]
        assert_same(tuple(results[0]), results[1])
        mine.action_space.seed(0), theirs.action_space.seed(0)
        for number in range(120):
            over = results[1][2] | results[1][3] if len(results[1]) == 5 else np.zeros(3, bool)
            if mode is AutoresetMode.DISABLED and over.any():
                results = [each.reset(seed=number, options={"reset_mask": over.copy()}) for each in (mine, theirs)]
            else:
                results = [each.step(each.action_space.sample()) for each in (mine, theirs)]
            assert_same(tuple(results[0]), results[1])
        assert mine.np_random_seed == theirs.np_random_seed
        for own, other in zip(mine.np_random, theirs.np_random, strict=True):
            assert own.bit_generator.state == other.bit_generator.state
    theirs.close()


def test_an_old_script_changes_one_import():
    before = run_alone(
        TRAINING.format(the_import="from gymnasium.vector import SyncVectorEnv as AsyncVectorEnv")
    ).stdout
    after = run_alone(TRAINING.format(the_import="from aioenv.sync import SyncVectorEnv as AsyncVectorEnv")).stdout
    assert after == before and "[1.0]" in before


@pytest.mark.parametrize("inline", [False, True])
def test_envs_and_what_they_have_are_the_very_objects(inline):
    made = []

    class Holder(Counter):
        def __init__(self):
            super().__init__(1000)
            self.lock = threading.Lock()  # does not pickle
            made.append(self)

        def itself(self, value, plus=None):
            return self, value, plus

    with SyncVectorEnv([Holder] * 3) as envs:
        if inline:
            step_inline(envs)
        assert len(envs.envs) == 3 and all(mine is env for mine, env in zip(envs.envs, made, strict=True))
        assert envs.get_attr("lock") == tuple(env.lock for env in made)
        value = object()
        assert envs.call("itself", value, plus=value) == tuple((env, value, value) for env in made)
        envs.set_attr("value", value)
        assert all(env.value is value for env in made)
        envs.set_attr("value", [1, value, (2,)])
        assert [env.value for env in made] == [1, value, (2,)]
        with pytest.raises(ValueError, match="Got `2` values for 3 environments"):
            envs.set_attr("value", (1, 2))
        envs.reset(seed=5)
        assert all(mine is env.np_random for mine, env in zip(envs.np_random, made, strict=True))
        envs.call("reset", seed=7)  # as Gymnasium's, which asks no questions
        assert envs.np_random_seed == (7, 7, 7)
    assert len(envs.envs) == 3  # also after the close: what envs have recorded may be read


@pytest.mark.parametrize("inline", [False, True])
def test_an_env_may_ask_its_vector_env_about_the_others(inline):
    class Meets(Counter):
        """Tells in each info how many steps all envs have made."""

        def step(self, action):
            *result, _ = super().step(action)
            ask = met[0].get_attr if self.t % 2 else met[0].call
            return *result, {"all": sum(ask("t"))}

    met = [None]
    results = []
    for kind in (gym.vector.SyncVectorEnv, SyncVectorEnv):
        with contextlib.closing(kind([partial(Meets, 1000)] * 3)) as envs:
            met[0] = envs
            if inline and kind is SyncVectorEnv:
                step_inline(envs)
            envs.reset(seed=0)
            results.append([tuple(envs.step(np.zeros(3, int))) for _ in range(4)])
    assert_same(*results)


@pytest.mark.parametrize("inline", [False, True])
def test_the_first_exception_of_a_call_is_raised_itself(inline):
    class Local(Exception):
        pass

    called = []

    class Raises(Counter):
        def method(self):
            called.append(self)
            if len(called) == 2:
                raise error

        def leave(self):
            raise SystemExit(3)

    error = Local(threading.Lock())  # does not pickle
    with SyncVectorEnv([partial(Raises, 1000)] * 3) as envs:
        envs.reset()
        if inline:
            step_inline(envs)
        with pytest.raises(Local) as caught:
            envs.call("method")
        assert caught.value is error and called == list(envs.envs[:2])
        with pytest.raises(AttributeError, match="missing"):
            envs.call("missing")
        with pytest.raises(SystemExit):
            envs.call("leave")
        envs.step([0, 0, 0])


def faulty(*faults, **kwargs):
    return SyncVectorEnv([partial(Faulty, fault) for fault in faults], **kwargs)


@pytest.mark.parametrize("inline", [False, True])
def test_envs_get_their_actions_as_they_were_given(inline):
    with faulty(*[lambda action: {"got": type(action).__name__, "value": float(action)}] * 2) as envs:
        if inline:
            step_inline(envs)
        for actions, name in (
            (np.array([0.1, 0.2], np.float32), "float32"),
            (np.array([0.1, 0.2]), "float64"),
            ([0.1, 0.2], "float"),
            ((np.float16(0.1), np.float16(0.2)), "float16"),
        ):
            info = envs.step(actions)[-1]
            assert info["got"].tolist() == [name] * 2
            assert info["value"].tolist() == [float(action) for action in actions]
        for wrong in ([1, 2, 3], np.ones(1, np.float32)):
            with pytest.raises(ValueError, match="expected one for each of 2 envs"):
                envs.step(wrong)
        with pytest.raises(TypeError, match="iterate"):
            envs.step(1)
        assert envs.step(np.zeros(2, np.float32))[1].tolist() == [1, 1]  # nothing was sent


@pytest.mark.parametrize("actions", [[0, 1, 1], np.array([0, 1, 1], np.float32)])
@pytest.mark.parametrize("inline", [False, True])
def test_the_exception_of_the_first_slot_is_raised_and_a_reset_mends_its_slot(inline, actions):
    class Local(Exception):
        pass

    def local(action):
        raise Local("100 % mine")

    def other(action):
        raise KeyError("other")

    with faulty(lambda action: None, local, other) as envs:
        if inline:
            step_inline(envs)
        with pytest.raises(Local, match="100 % mine") as caught:
            envs.step(actions)
        assert "in the env of slot 1:\n" in caught.value.__notes__[0] and "in local" in caught.value.__notes__[0]
        with pytest.raises(aioenv.EnvError, match=r"slots \[1, 2\] have failed and must be reset first"):
            envs.step([0, 0, 0])
        envs.reset(options={"reset_mask": np.array([False, True, True])})
        assert envs.step([0, 0, 0])[1].tolist() == [1, 1, 1]


class Unlike(Counter):
    """An env whose spaces differ from those of a Counter."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = spaces.Discrete(9)


SINGLE = spaces.Box(-1e9, 1e9, (2,), np.float64)
CUSTOM = gym.vector.utils.batch_space(SINGLE, 2), SINGLE


@pytest.mark.parametrize("mode", ["same", CUSTOM])
def test_spaces_that_differ_are_told_of_as_by_gymnasium(mode):
    """Observation spaces come first."""
    with pytest.raises((RuntimeError, AssertionError)) as wanted:  # Gymnasium 1.2 asserts, with other texts
        gym.vector.SyncVectorEnv([Counter, Unlike], observation_mode=mode)
    start = None if wanted.type is AssertionError else re.escape(re.split(r"\. |, single_", str(wanted.value))[0])
    with pytest.raises(RuntimeError, match=start):
        SyncVectorEnv([Counter, Unlike], observation_mode=mode)
    with pytest.raises(RuntimeError, match=r"AsyncVectorEnv\(.* sub-environment.* observation spaces"):
        AsyncVectorEnv([Counter, Unlike], observation_mode=mode, num_workers=1)


def test_what_is_refused():
    with pytest.raises(ValueError, match="not-a-mode"):
        SyncVectorEnv(counters(1), autoreset_mode="not-a-mode")
    with pytest.raises(ValueError, match="Invalid `observation_mode`"):
        SyncVectorEnv(counters(1), observation_mode="any")
    with pytest.raises(TypeError, match="Expected both elements of observation_mode to be Spaces"):
        SyncVectorEnv(counters(1), observation_mode=(1, 2))
    before = threading.active_count()
    with pytest.raises(gym.error.NameNotFound):
        SyncVectorEnv([*counters(1), lambda: gym.make("Missing-v0")])
    assert threading.active_count() == before
    with SyncVectorEnv(counters(1)) as envs, pytest.raises(AttributeError):
        envs.envs = []  # which would have no effect
    with SyncVectorEnv(counters(1, length=1), autoreset_mode=AutoresetMode.DISABLED) as envs:
        envs.reset(seed=0)
        assert envs.step([0])[2].tolist() == [True]
        with pytest.raises(gym.error.ResetNeeded):
            envs.step([0])


# ---------------------------------------------------------------- threads, interrupts, the end


class Draws(Counter):
    """An env that draws: it tells by which threads it was used."""

    def __init__(self):
        super().__init__(1000)
        self.render_mode = "rgb_array"
        self.threads = [threading.current_thread().name]

    def render(self):
        self.threads.append(threading.current_thread().name)
        return np.zeros((2, 2, 3), np.uint8)

    def step(self, action):
        self.threads.append(threading.current_thread().name)
        return super().step(action)

    def close(self):
        self.threads.append(threading.current_thread().name)


def test_envs_that_draw_stay_on_their_thread():
    with SyncVectorEnv([Draws] * 2) as envs:
        envs.reset(seed=0)
        for _ in range(100):
            envs.step([0, 0])
            images = envs.render()
            assert isinstance(images, tuple) and len(images) == 2
    for env in envs.envs:
        assert len(env.threads) == 202 and set(env.threads) == {ENV_THREAD}


@pytest.mark.parametrize("how", ["step", "call"])
def test_an_interrupt_leaves_the_steps_aligned(how):
    class Interrupts(Counter):
        def step(self, action):
            if action == self.WAIT:
                signal.raise_signal(signal.SIGINT)
                action = self.OK
            return super().step(action)

        def interrupted(self):
            signal.raise_signal(signal.SIGINT)

    with SyncVectorEnv([partial(Interrupts, 1000)] * 2) as envs:
        step_inline(envs)
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.array([0, Counter.WAIT])) if how == "step" else envs.call("interrupted")
        assert envs.get_attr("t") == ((101, 101) if how == "step" else (100, 100))
        first = 102 if how == "step" else 101
        assert envs.step(np.zeros(2, int)).obs[:, 1].tolist() == [first] * 2


def test_nothing_is_left_after_close():
    before = threading.active_count()
    envs = SyncVectorEnv(counters(2))
    envs.reset(seed=0)
    envs.close(any_argument=1)
    envs.close()
    assert threading.active_count() == before and envs.closed
    for use in (envs.reset, envs.render, partial(envs.step, [0, 0]), partial(envs.get_attr, "t")):
        with pytest.raises(
            gym.error.ClosedEnvironmentError, match="Trying to operate on `SyncVectorEnv`, after a call"
        ):
            use()
