"""`aioenv.adapters.tianshou` against Tianshou's own `DummyVectorEnv`, and under its collector."""

from __future__ import annotations

import functools
import os
import signal

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import errors
from aioenv.core.slots import SlotState
from aioenv.testing import leak_check
from tests.kits.blocking_kit import ctrl_c_at
from tests.kits.counter_kit import Counter, finite
from tests.kits.zoo import Sampler

pytest.importorskip("torch")
pytest.importorskip("tianshou")

from aioenv.adapters.tianshou import TianshouVectorEnv

pytestmark = pytest.mark.filterwarnings("ignore")  # Tianshou's own


def make(limit=12):
    return gym.make("CartPole-v1", max_episode_steps=limit)


def same(ours, theirs) -> None:
    assert ours.shape == theirs.shape and ours.dtype.kind == theirs.dtype.kind
    if ours.dtype != object:
        assert np.array_equal(ours, theirs)
    else:
        assert [repr(plain(one)) for one in ours] == [repr(plain(one)) for one in theirs]


def plain(value):
    """Infos of several envs are merged, and split again: numbers may be Python's or numpy's."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in sorted(value.items())}
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("space", ["cartpole", "box", "image", "discrete", "dict", "nested"])
def test_it_steps_as_theirs(space, num_workers):
    from tianshou.env import DummyVectorEnv

    factory = make if space == "cartpole" else functools.partial(Sampler, space, rich_infos=False)
    theirs, ours = DummyVectorEnv([factory] * 4), TianshouVectorEnv([factory] * 4, num_workers=num_workers)
    rng = np.random.default_rng(0)
    try:
        assert len(ours) == len(theirs) == ours.env_num and not ours.is_async
        assert ours.action_space == theirs.action_space
        assert ours.observation_space == theirs.observation_space
        assert ours.seed(3) == theirs.seed(3)
        for mine, other in zip(ours.reset(), theirs.reset(), strict=True):
            same(mine, other)
        for _ in range(40):
            ids = rng.permutation(4)[: rng.integers(1, 5)]
            actions = np.array([ours.action_space[0].sample() for _ in ids])
            mine, other = ours.step(actions, ids), theirs.step(actions, ids)
            for one, two in zip(mine, other, strict=True):
                same(one, two)
            assert [info["env_id"] for info in mine[4]] == ids.tolist()
            if len(ended := ids[np.flatnonzero(mine[2] | mine[3])]):
                for one, two in zip(ours.reset(ended), theirs.reset(ended), strict=True):
                    same(one, two)
        for one, two in zip(ours.reset(2, seed=9), theirs.reset(2, seed=9), strict=True):
            same(one, two)
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("kwargs", [{}, {"wait_num": 1}], ids=str)
@pytest.mark.parametrize("space", ["dict", "tuple", "nested"])
def test_an_action_of_each_slot(space, kwargs):
    """As theirs takes them: a list, a tuple or an array of objects."""
    factory = functools.partial(Sampler, "box", action=space)
    envs = TianshouVectorEnv([factory] * 2, num_workers=0, **kwargs)
    try:
        single = envs.action_space[0]
        single.seed(0)
        actions = [single.sample() for _ in range(2)]
        for form in (actions, tuple(actions), as_objects(actions)):
            envs.reset()
            taken = {info["env_id"]: info["action"] for info in envs.step(form, [1, 0])[4]}
            while envs.waiting_id:
                taken |= {info["env_id"]: info["action"] for info in envs.step(None)[4]}
            assert [repr(plain(taken[slot])) for slot in (1, 0)] == [repr(plain(one)) for one in actions]
        envs.reset()
        for wrong in ([actions[0], 3], [actions[0], {}]):
            with pytest.raises(errors.ActionError, match=r"actions: expected a (dict|tuple) of .* for each slot, got"):
                envs.step(wrong)
        with pytest.raises(errors.ActionError, match="2"):
            envs.step(actions[:1])
    finally:
        envs.close()


class Told(gym.Env):
    """Tells a value in its infos."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, value):
        self.value = value

    def reset(self, *, seed=None, options=None):
        return 0, {"told": self.value}

    def step(self, action):
        return 0, 0.0, False, False, {"told": self.value, "deep": {"told": self.value}}


@pytest.mark.parametrize("kwargs", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "wait_num": 2}], ids=str)
def test_infos_of_several_types(kwargs):
    """Each slot has its env's own info: not that of the first one's type."""
    values = [1, 1.5, True, 2.5]
    envs = TianshouVectorEnv([functools.partial(Told, value) for value in values], **kwargs)
    try:
        assert [info["told"] for info in envs.reset()[1]] == values
        taken = list(envs.step(np.zeros(4, int))[4])
        if envs.waiting_id:
            free = sorted(envs.ready_id)
            assert [info["told"] for info in envs.reset(free)[1]] == [values[slot] for slot in free]
        while envs.waiting_id:
            taken += list(envs.step(None)[4])
        for info in taken:
            told, value = info["told"], values[info["env_id"]]
            assert told == info["deep"]["told"] == value and isinstance(told, type(value))
    finally:
        envs.close()


def as_objects(items):
    array = np.empty(len(items), object)
    array[:] = items
    return array


def test_waiting_for_some():
    """As their asynchronous ones: `waiting_id`, `ready_id`, and results of those that are ready."""
    envs = TianshouVectorEnv([make] * 4, wait_num=2, num_workers=4)
    try:
        assert envs.is_async
        envs.reset()
        result = envs.step(np.zeros(4, int))
        ids = [info["env_id"] for info in result[4]]
        assert len(ids) >= 2 and set(envs.ready_id) == set(ids)
        assert set(envs.waiting_id) == {0, 1, 2, 3} - set(ids)
        if envs.waiting_id:
            with pytest.raises(AssertionError, match="which is stepping now"):
                envs.reset(envs.waiting_id)
        taken = len(ids)
        while envs.waiting_id:
            taken += len(envs.step(None)[0])
        assert taken == 4
        with pytest.raises(ValueError, match=r"slots: one is named twice in \[0, 0\]"):
            envs.step(np.zeros(2, int), [0, 0])
        assert sorted(envs.ready_id) == [0, 1, 2, 3]
        envs.reset(envs.ready_id)
    finally:
        envs.close()
    envs = TianshouVectorEnv([make] * 2, timeout=30.0, num_workers=1)
    envs.reset()
    assert len(envs.step(np.zeros(2, int))[0]) == 2
    envs.close()


@pytest.fixture
def gate(tmp_path):
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    return path


class SlowReset(Counter):
    """A `Counter` whose reset waits for the gate, if the options say so."""

    def reset(self, *, seed=None, options=None):
        if options:
            with open(self.gate) as gate:
                gate.read()
        return super().reset(seed=seed, options=options)


def counters(n, gate, **kwargs):
    return TianshouVectorEnv([functools.partial(SlowReset, gate=gate)] * n, num_workers=n, **kwargs)


def wait_for_result(envs, slot) -> None:
    inner = envs._envs._envs
    while envs._envs._portal.run(inner._backend.table.state, slot) is not SlotState.READY:
        pass


@pytest.mark.parametrize("last", [Counter.OK, Counter.RAISE])
def test_a_reset_takes_no_results_of_slots_that_step(gate, last):
    """Whatever is ready: a result of another slot, or its error, comes with a later step."""
    with leak_check():
        envs = counters(3, gate, wait_num=1)
        envs.reset(seed=1)
        obs, *_, infos = envs.step([Counter.OK, Counter.WAIT], [0, 1])
        assert [info["env_id"] for info in infos] == [0] and envs.waiting_id == [1]
        envs.waiting_id.append(2)  # as `step` does, but without waiting
        envs.ready_id.remove(2)
        envs._envs.send([last], [2])
        wait_for_result(envs, 2)
        obs, infos = envs.reset([0], seed=5)
        assert obs[0, 1] == 0 and infos[0]["seed"] == 5
        assert envs.waiting_id == [1, 2] and envs.ready_id == [0]
        if last == Counter.RAISE:
            with pytest.raises(errors.EnvError) as error:
                envs.step(None)
            assert error.value.slots == (2,)
        else:
            assert [info["env_id"] for info in envs.step(None)[4]] == [2]
        assert envs.waiting_id == [1] and sorted(envs.ready_id) == [0, 2]
        with open(gate, "w"):
            pass
        assert envs.step(None)[0][0, 1] == 1
        with pytest.raises(ValueError, match="no env is stepping"):
            envs.step(None)
        envs.close()


def test_a_reset_beside_steps_says_what_is_wrong(gate):
    envs = counters(2, gate, wait_num=1)
    try:
        envs.reset()
        envs.step([Counter.OK, Counter.WAIT])
        with pytest.raises(ValueError, match="seed: expected one for each of 1 envs, got 2"):
            envs.reset([0], seed=[1, 2])
        with pytest.raises(TypeError, match="options: expected a dict"):
            envs.reset([0], options=3)
        envs.reset([0])
        assert envs.waiting_id == [1]
        with open(gate, "w"):
            pass
        assert len(envs.step(None)[0]) == 1
    finally:
        envs.close()


def test_an_error_leaves_no_slot_waiting(gate):
    with leak_check():
        envs = counters(3, gate, wait_num=2)
        envs.reset()
        with pytest.raises(errors.EnvError) as error:
            envs.step([Counter.RAISE, Counter.OK, Counter.WAIT])
        assert error.value.partial.slots.tolist() == [0, 1]
        assert envs.waiting_id == [2] and sorted(envs.ready_id) == [0, 1]
        envs.reset([0])
        assert sorted(info["env_id"] for info in envs.step([Counter.OK] * 2, [0, 1])[4]) == [0, 1]
        with pytest.raises(errors.ActionError):
            envs.step([99.5] * 2, [0, 1])
        assert envs.waiting_id == [2] and sorted(envs.ready_id) == [0, 1]
        with open(gate, "w"):
            pass
        envs.step(None)
        assert envs.reset()[0][:, 1].tolist() == [0, 0, 0]
        envs.close()


@pytest.mark.parametrize("how", ["ctrl-c", "timeout"])
def test_after_an_interrupted_step_it_goes_on(gate, how):
    """The late results are dropped, and no slot is lost."""
    with leak_check():
        envs = counters(3, gate, timeout_s=2.0 if how == "timeout" else None)
        envs.reset()
        interrupted(how, gate, lambda: envs.step([Counter.OK, Counter.WAIT], [0, 1]))
        assert envs.step([Counter.OK] * 3)[0][:, 1].tolist() == [2, 2, 1]
        interrupted(how, gate, lambda: envs.reset([2], options={"wait": True}))
        assert envs.reset()[0][:, 1].tolist() == [0, 0, 0]
        envs.close()


@pytest.mark.parametrize("how", ["ctrl-c", "timeout"])
def test_after_an_interrupted_reset_beside_steps_it_goes_on(gate, how, tmp_path):
    other = str(tmp_path / "other")
    os.mkfifo(other)
    with leak_check():
        factories = [functools.partial(SlowReset, gate=path) for path in (gate, other)]
        timeout_s = 2.0 if how == "timeout" else None
        envs = TianshouVectorEnv(factories, num_workers=2, wait_num=1, timeout_s=timeout_s)
        envs.reset()
        envs.step([Counter.OK, Counter.WAIT])
        assert envs.waiting_id == [1]
        interrupted(how, gate, lambda: envs.reset([0], options={"wait": True}))
        assert envs.waiting_id == [1] and envs.ready_id == [0]
        assert envs.step([Counter.OK], [0])[0][0, 1] == 1
        with open(other, "w"):
            pass
        assert envs.step(None)[0][0, 1] == 1
        envs.close()


def interrupted(how, gate, function) -> None:
    """Call a function whose env waits at the gate; then open the gate."""
    if how == "ctrl-c":
        with pytest.raises(KeyboardInterrupt), ctrl_c_at(gate):
            function()
        return
    with pytest.raises(errors.StepTimeout):
        function()
    with open(gate, "w"):
        pass


def test_attributes_and_misuse():
    with leak_check():
        envs = TianshouVectorEnv([make] * 2, num_workers=1)
        assert envs.get_env_attr("gravity", 1) == [9.8]
        envs.set_env_attr("gravity", 3.0, [0])
        assert envs.get_env_attr("gravity") == [3.0, 9.8]
        assert [spec.id for spec in envs.spec] == ["CartPole-v1"] * 2
        assert envs.metadata[0]["render_fps"] == 50
        assert [callable(one) for one in envs.get_env_attr("reset")] == [True, True]  # it is not called
        with pytest.raises(ValueError, match="action: expected actions"):
            envs.step(None)
        envs.close()
        envs.close()
        with pytest.raises(errors.ClosedError):
            envs.reset()
        given = aioenv.sync.VectorEnv([make], num_workers=0)
        with pytest.raises(ValueError, match=r"AutoresetMode.DISABLED, the vector env has .*NEXT_STEP"):
            TianshouVectorEnv(given)
        with pytest.raises(TypeError, match="num_workers: for the vector env that is given"):
            TianshouVectorEnv(given, num_workers=1)
        given.close()
        with pytest.raises(ValueError, match="wait_num: expected 1 to 2, got 3"):
            TianshouVectorEnv([make] * 2, 3, num_workers=0)
        with pytest.raises(TypeError, match="Tianshou does not take a Tuple"):
            TianshouVectorEnv([functools.partial(Sampler, "tuple")], num_workers=0)


def test_its_wrapper_goes_around():
    from tianshou.env import DummyVectorEnv, VectorEnvNormObs

    theirs, ours = DummyVectorEnv([make] * 3), TianshouVectorEnv([make] * 3, num_workers=2)
    normal = [VectorEnvNormObs(envs) for envs in (theirs, ours)]
    try:
        for envs in normal:
            envs.seed(2)
        one, two = [envs.reset()[0] for envs in normal]
        for step in range(30):
            assert np.array_equal(one, two)
            results = [envs.step(np.full(3, step % 3 != 0, int)) for envs in normal]
            one, two = [result[0] for result in results]
            if len(ended := np.flatnonzero(results[0][2] | results[0][3])):
                for envs in normal:
                    envs.reset(ended)
        assert np.array_equal(normal[0].get_obs_rms().mean, normal[1].get_obs_rms().mean)
        for envs in normal:
            envs.set_env_attr("mark", 5, [1, 2])
            assert envs.get_env_attr("mark", [1, 2]) == [5, 5]
    finally:
        theirs.close()
        ours.close()


def test_a_worker_that_dies_is_named():
    envs = TianshouVectorEnv([make] * 2, num_workers=2)
    try:
        envs.reset()
        os.kill(envs._envs.workers[1].pid, signal.SIGKILL)
        with pytest.raises(errors.WorkerDied) as error:
            envs.step(np.zeros(2, int))
        assert error.value.slots == (1,)
    finally:
        envs.close()


@pytest.mark.parametrize("kwargs", [{"num_workers": 2}, {"num_workers": 0}], ids=str)
def test_its_collectors(kwargs):
    """The buffer has whole episodes, whose next observations are not those of other episodes.

    Not `AsyncCollector`: in Tianshou 2.0.1 it raises an IndexError over its own vector envs, too.
    """
    import torch
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.utils.net.common import Net

    with leak_check():
        envs = TianshouVectorEnv([make] * 4, **kwargs)
        space, actions = envs.observation_space[0], envs.action_space[0]
        torch.manual_seed(0)
        policy = DiscreteQLearningPolicy(
            model=Net(state_shape=space.shape, action_shape=2, hidden_sizes=[16]),
            action_space=actions,
            observation_space=space,
            eps_training=1.0,
        )
        buffer = VectorReplayBuffer(4000, 4)
        collector = Collector(policy, envs, buffer)
        collector.reset()
        stats = collector.collect(n_step=400)
        assert stats.n_collected_steps >= 400 and stats.n_collected_episodes > 10
        for index in buffer.sample_indices(0):
            following = buffer.next(index)
            if not (buffer.done[index] or following == index):
                assert np.array_equal(buffer.obs_next[index], buffer.obs[following])
        assert (np.asarray(stats.lens) <= 12).all()
        envs.close()


def test_slots_without_a_further_episode_give_no_steps():
    envs = TianshouVectorEnv(finite("Disabled", num_workers=0))
    envs.reset()
    for _ in range(3):
        ended = envs.step(np.zeros((2, 1), np.float32))[2]
    assert ended.all()
    envs.reset()
    with pytest.raises(errors.PausedError, match=r"slots \[0\] are paused"):
        envs.step(np.zeros((2, 1), np.float32))
    assert envs.step(np.zeros((1, 1), np.float32), [1])[1].tolist() == [1]
    envs.close()
