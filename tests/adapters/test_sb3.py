"""`aioenv.adapters.sb3` against Stable-Baselines3's own `DummyVecEnv`."""

from __future__ import annotations

import functools
import importlib.util

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from aioenv import errors, sync
from aioenv.testing import leak_check
from tests.kits.counter_kit import Counter, counters, finite

INSTALLED = importlib.util.find_spec("stable_baselines3") is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="Stable-Baselines3 is not installed")


def make() -> gym.Env:
    return gym.wrappers.TimeLimit(gym.make("CartPole-v1"), 20)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_steps_as_theirs_do(num_workers):
    from stable_baselines3.common.vec_env import DummyVecEnv

    from aioenv.adapters import sb3

    theirs, ours = DummyVecEnv([make] * 3), sb3.VecEnv([make] * 3, num_workers=num_workers)
    rng = np.random.default_rng(0)
    cut = 0
    try:
        for envs in theirs, ours:
            envs.seed(5)
        assert np.array_equal(theirs.reset(), ours.reset())
        for _ in range(100):
            actions = rng.integers(0, 2, 3)
            expected, got = theirs.step(actions), ours.step(actions)
            for wanted, result in zip(expected[:3], got[:3], strict=True):
                assert np.array_equal(wanted, result)
            for wanted, result in zip(expected[3], got[3], strict=True):
                assert wanted.keys() == result.keys()
                assert all(np.array_equal(wanted[key], result[key]) for key in wanted)
                cut += result["TimeLimit.truncated"]
        assert cut
        assert ours.reset_infos == theirs.reset_infos
    finally:
        theirs.close()
        ours.close()


@pytest.mark.parametrize("given", [{}, {"num_workers": 0}, {"backend": "native"}], ids=str)
def test_envs_are_asked_and_told_through_it(given):
    from stable_baselines3.common.monitor import Monitor

    from aioenv.adapters import sb3

    single = "backend" not in given
    envs = sb3.make_vec("Hopper-v5", 3, seed=1, **given)
    try:
        assert "VecEnv" in repr(envs)
        assert envs.get_attr("frame_skip") == [4, 4, 4]
        assert envs.has_attr("frame_skip") and not envs.has_attr("no_such_thing")
        with pytest.raises(AttributeError, match="no_such_thing"):
            envs.get_attr("no_such_thing")
        assert envs.env_is_wrapped(Monitor, [0, 2]) == [True] * 2  # episodes are counted
        assert envs.env_is_wrapped(gym.wrappers.TimeLimit) == [single] * 3
        envs.reset()
        infos = []
        while not any("terminal_observation" in info for info in infos):
            infos = envs.step(np.ones((3, 3), np.float32))[3]
        (last, *_) = [info for info in infos if "terminal_observation" in info]
        assert last["terminal_observation"].shape == (11,)
        assert last["episode"]["l"] > 0
        if single:
            envs.set_attr("marker", 7, indices=[1])
            assert envs.env_method("get_wrapper_attr", "marker", indices=1) == [7]
            assert not envs.env_method("has_wrapper_attr", "marker", indices=[0])[0]
    finally:
        envs.close()
        envs.close()


def test_its_wrappers_go_around_it():
    from stable_baselines3.common.vec_env import DummyVecEnv, VecCheckNan, VecFrameStack, VecMonitor, VecNormalize

    from aioenv.adapters import sb3

    pair = DummyVecEnv([make] * 3), sb3.VecEnv([make] * 3, num_workers=2)
    wrapped = [VecFrameStack(VecNormalize(VecMonitor(VecCheckNan(envs, raise_exception=True))), 3) for envs in pair]
    rng = np.random.default_rng(0)
    try:
        for envs in wrapped:
            envs.seed(1)
        one, two = [envs.reset() for envs in wrapped]
        episodes = 0
        for _ in range(60):
            np.testing.assert_allclose(one, two, rtol=1e-6)
            actions = rng.integers(0, 2, 3)
            (one, *rest), (two, *others) = [envs.step(actions) for envs in wrapped]
            np.testing.assert_allclose(rest[0], others[0], rtol=1e-5)  # theirs rounds rewards to float32
            for info, other in zip(rest[2], others[2], strict=True):
                assert info.keys() == other.keys()
                if "episode" in info:
                    episodes += 1
                    assert info["episode"]["r"] == other["episode"]["r"]
                    np.testing.assert_allclose(info["terminal_observation"], other["terminal_observation"], rtol=1e-6)
        assert episodes > 3
    finally:
        for envs in wrapped:
            envs.close()


class Ending(gym.vector.VectorEnv):
    """A user's vector env, which resets as Stable-Baselines3 wants it."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_observation_space = gym.spaces.Box(-9, 9, (1,), np.float64)
    single_action_space = gym.spaces.Discrete(2)

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 1)), {}

    def step(self, actions):
        ends = np.ones(self.num_envs, bool)
        last = np.empty(self.num_envs, object)
        last[:] = [np.ones(1)] * self.num_envs
        info = {"final_obs": last, "_final_obs": ends}
        return np.zeros((self.num_envs, 1)), np.ones(self.num_envs), ends, ~ends, info


def test_vector_envs_of_other_peoples_keep_their_mode():
    from aioenv.adapters import sb3

    envs = sb3.make_vec(Ending, 2, backend="native")
    try:
        envs.reset()
        dones, infos = envs.step(np.zeros(2, int))[2:]
        assert dones.all() and all(info["terminal_observation"] == [1.0] for info in infos)
    finally:
        envs.close()
    with pytest.raises(ValueError, match=r'takes .*SAME_STEP, .* has .*NEXT_STEP: .*backend="workers" takes any'):
        sb3.make_vec(CartPoleVectorEnv, 2, backend="native")


def test_misuse_is_said():
    from aioenv.adapters import sb3

    with pytest.raises(ValueError, match=r'autoreset_mode: .*SAME_STEP.*: make it with "SameStep"'):
        sb3.VecEnv([make], autoreset_mode="NextStep")
    with pytest.raises(TypeError, match="num_workers: for the vector env"):
        sb3.VecEnv(given := sync.make_vec("CartPole-v1", autoreset_mode="SameStep"), num_workers=1)
    given.close()
    with pytest.raises(TypeError, match=r"wrapper_class: .*; here it is wrappers=\[Wrapper\]"):
        sb3.make_vec("CartPole-v1", 2, wrapper_class=gym.wrappers.NormalizeReward)
    with pytest.raises(TypeError, match="n_envs: Stable-Baselines3 has that; here it is num_envs"):
        sb3.make_vec("CartPole-v1", n_envs=4)
    with pytest.raises(TypeError, match=r"env_id: .*; here it is env, the first argument\nn_envs: .*"):
        sb3.make_vec(env_id="CartPole-v1", n_envs=4)
    with pytest.raises(TypeError, match="env: expected an id, an EnvSpec or a function"):
        sb3.make_vec()
    with pytest.raises(TypeError, match=r'start_method: .*; here it is start="forkserver"'):
        sb3.VecEnv([make], start_method="fork")
    envs = sb3.VecEnv([make] * 2)
    try:
        envs.reset()
        with pytest.raises(errors.NoAsyncCallError):
            envs.step_wait()
        envs.step_async(np.zeros(2, int))
        with pytest.raises(errors.PendingCallError):
            envs.step_async(np.zeros(2, int))
        assert envs.step_wait()[0].shape == (2, 4)
        envs.step_async(np.zeros(2, int))  # this one is not awaited
        assert envs.reset().shape == (2, 4)
        with pytest.raises(errors.ActionError):
            envs.step(np.zeros(3, int))
    finally:
        envs.close()


def test_what_comes_before_step_wait_is_told_to_call_it(gate):
    from aioenv.adapters import sb3

    path, open_gate = gate
    envs = sb3.VecEnv(counters(2, gate=path), num_workers=2)
    try:
        envs.reset()
        envs.step_async(np.array([Counter.OK, Counter.WAIT]))
        for name, args in (("get_attr", ("t",)), ("env_method", ("double", 1)), ("get_images", ())):
            with pytest.raises(errors.PendingCallError, match=f"{name}.*: a step is under way, call step_wait first"):
                getattr(envs, name)(*args)
        open_gate()
        assert envs.step_wait()[1].tolist() == [1, 1]
        assert envs.get_attr("t") == [1, 1]
    finally:
        envs.close()


class Structured(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (1,), np.float64)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action):
        return np.zeros(1), 0.0, False, False, {"action": repr(action)}


SPACES = {"a": gym.spaces.Discrete(5), "b": gym.spaces.Box(-1, 1, (2,), np.float32)}


@pytest.mark.parametrize("num_workers", [None, 0])
@pytest.mark.parametrize("space", [gym.spaces.Dict(SPACES), gym.spaces.Tuple(SPACES.values())])
def test_actions_of_several_parts_come_one_a_slot(space, num_workers):
    from aioenv.adapters import sb3

    envs = sb3.VecEnv([lambda: Structured(space)] * 2, num_workers=num_workers)  # as many as parts
    try:
        envs.reset()
        actions = [space.sample() for _ in range(2)]
        infos = envs.step(actions)[3]
        assert [info["action"] for info in infos] == [repr(action) for action in actions]
        with pytest.raises(errors.ActionError, match="one for each of 2 envs, got 1"):
            envs.step(actions[:1])
    finally:
        envs.close()


def test_indices_are_those_of_a_list():
    from aioenv.adapters import sb3

    envs = sb3.VecEnv([make] * 3)
    try:
        envs.set_attr("marker", 7, indices=-1)
        assert envs.get_attr("marker", [2]) == envs.get_attr("marker", [-1]) == [7]
        assert envs.env_is_wrapped(gym.wrappers.TimeLimit, (0, -1)) == [True, True]
        with pytest.raises(IndexError):
            envs.get_attr("marker", 3)
        envs.set_attr("marker", 8, indices=[])
        assert envs.get_attr("marker", []) == envs.env_method("close", indices=[]) == []
        assert envs.env_is_wrapped(gym.wrappers.TimeLimit, []) == []
    finally:
        envs.close()


@pytest.mark.parametrize(("seed", "error"), [("x", TypeError), (-1, gym.error.Error)])
def test_a_seed_that_is_none_leaves_nothing(seed, error):
    from aioenv.adapters import sb3

    with leak_check(timeout_s=10), pytest.raises(error, match=r"^seed: expected an int|^Seed must be") as caught:
        sb3.make_vec("CartPole-v1", 2, seed=seed)
    assert caught.tb  # which would keep it


def test_a_seed_is_that_of_actions_too():
    from stable_baselines3.common.env_util import make_vec_env

    from aioenv.adapters import sb3

    theirs, ours = make_vec_env("Hopper-v5", 2, seed=3), sb3.make_vec("Hopper-v5", 2, seed=3, num_workers=1)
    try:
        assert np.array_equal(theirs.reset(), ours.reset())
        assert np.array_equal(theirs.action_space.sample(), ours.action_space.sample())
    finally:
        theirs.close()
        ours.close()


class Optional(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([(options or {}).get("at", -1), self.np_random.random()]), {"options": repr(options)}

    def step(self, action):
        return np.zeros(2), 0.0, False, False, {"count": 3, "good": True}


@pytest.mark.parametrize("given", [{"debug": True}, {"num_workers": 0}], ids=str)
def test_options_of_each_slot(given):
    from stable_baselines3.common.vec_env import DummyVecEnv

    from aioenv.adapters import sb3

    theirs, ours = DummyVecEnv([Optional] * 3), sb3.VecEnv([Optional] * 3, **given)
    try:
        for options in ([{"at": 1}, {}, {"at": 2}], {"at": 3}, [{}, {}, {"at": 4}], None):
            for envs in theirs, ours:
                envs.seed(4)
                if options is not None:
                    envs.set_options(options)
            ours.step_async(np.zeros(3, int))  # this one is not awaited
            assert np.array_equal(theirs.reset(), ours.reset())
            assert ours.reset_infos == theirs.reset_infos
        infos = ours.step(np.zeros(3, int))[3]
        assert [type(value) for value in infos[0].values()] == [int, bool, bool]
    finally:
        theirs.close()
        ours.close()
    with pytest.raises(TypeError, match=r"env_fns: .* pass `\[function\] \* num_envs`"):
        sb3.VecEnv(make)
    with pytest.raises(TypeError, match="copies of one id are made by make_vec"):
        sb3.VecEnv("CartPole-v1")


class MixedInfos(gym.Env):
    """Its infos have values of one sort in one env, of another in the next."""

    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)

    def __init__(self, only_numbers: bool, slot: int):
        self.only_numbers, self.slot = only_numbers, slot
        self.t = 0

    def info(self) -> dict:
        info = {"cost": [1, 0.5, True][self.slot]}
        if self.only_numbers:
            return info
        values = [(False, {"of": 1}, [1]), (2.5, {"of": 1.5}, {}), ("text", 3, np.arange(self.t))][self.slot]
        info |= dict(zip(["flag", "nested", "kind"], values, strict=True))
        return {**info, "_cost": self.slot, **({"extra": self.t} if self.slot else {})}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, self.info()

    def step(self, action):
        self.t += 1
        return 0, 1.0, self.t % 2 == 0, False, self.info()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("each_its_own", [False, True])
@pytest.mark.parametrize("only_numbers", [False, True])
def test_infos_are_each_envs_own_whatever_the_others_say(only_numbers, each_its_own, num_workers, caplog):
    from stable_baselines3.common.vec_env import DummyVecEnv

    from aioenv.adapters import sb3

    fns = [functools.partial(MixedInfos, only_numbers, slot) for slot in range(3)]
    theirs, ours = DummyVecEnv(fns), sb3.VecEnv(fns, num_workers=num_workers)
    try:
        for envs in theirs, ours:
            if each_its_own:
                envs.set_options([{"x": 1}, {}, {"x": 2}])
            envs.reset()
        np.testing.assert_equal(ours.reset_infos, theirs.reset_infos)
        for _ in range(40):
            expected, got = theirs.step(np.zeros(3, np.int64))[3], ours.step(np.zeros(3, np.int64))[3]
            np.testing.assert_equal(got, expected)
            np.testing.assert_equal(ours.reset_infos, theirs.reset_infos)
            assert [type(info["cost"]) for info in got] == [int, float, bool]
        if not only_numbers:
            got[2]["kind"][...] = 7  # an array of one's own
        assert not caplog.records
    finally:
        theirs.close()
        ours.close()


WAYS = [{}, {"num_workers": 0}, {"backend": "native"}, {"backend": "native", "num_workers": 2}]


@pytest.mark.parametrize("given", WAYS, ids=str)
def test_actions_are_sent_as_they_are_at_step_async(given):
    from aioenv.adapters import sb3

    envs = sb3.make_vec("Hopper-v5", 2, **given)
    rewards = []
    try:
        for changes in False, True:
            envs.seed(0)
            envs.reset()
            actions = np.ones((2, 3), np.float32)
            envs.step_async(actions)
            if changes:
                actions[:] = -1
            rewards.append(envs.step_wait()[1])
        assert np.array_equal(*rewards)
        with pytest.raises(errors.ActionError, match="shape"):
            envs.step_async(np.ones(7, np.float32))
        with pytest.raises(errors.NoAsyncCallError):
            envs.step_wait()
        assert envs.step(actions)[0].shape == (2, 11)
        envs.step_async(actions)  # this one is not awaited
        assert envs.reset().shape == (2, 11)
    finally:
        envs.close()
    with pytest.raises(errors.ClosedError):
        envs.step_async(actions)


def test_a_step_calls_what_a_subclass_has_of_its_own():
    from aioenv.adapters import sb3

    class Doubled(sb3.VecEnv):
        def step_wait(self):
            obs, rewards, dones, infos = super().step_wait()
            return obs, 2 * rewards, dones, infos

    class Pushed(sb3.VecEnv):
        def step_async(self, actions):
            super().step_async(np.ones_like(actions))

    envs = Doubled([make] * 2, num_workers=0)
    envs.reset()
    assert envs.step(np.zeros(2, int))[1].tolist() == [2, 2]
    envs.close()
    envs = Pushed([make] * 2, num_workers=0)
    envs.reset()
    assert (envs.step(np.zeros(2, int))[0][:, 1] > 0).all()  # to the right
    envs.close()


class Failing(gym.Env):
    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        if action:
            raise KeyError("as asked")
        return 0, 1.0, False, False, {}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_an_env_comes_with_the_result(num_workers):
    from aioenv.adapters import sb3

    envs = sb3.VecEnv([Failing] * 2, num_workers=num_workers)
    try:
        envs.reset()
        for _ in range(50):
            envs.step(np.zeros(2, int))
        envs.step_async(np.array([0, 1]))
        with pytest.raises(errors.EnvError, match=r"slot 1.*as asked"):
            envs.step_wait()
        with pytest.raises(errors.EnvError, match=r"slots \[1\] have failed"):  # nothing was sent
            envs.step_async(np.zeros(2, int))
        envs.reset()
        assert envs.step(np.zeros(2, int))[1].tolist() == [1, 1]
    finally:
        envs.close()


def test_a_policy_learns_the_same_as_over_theirs():
    """PPO with the seeds of theirs: the returns of its episodes are theirs, to the bit."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    from aioenv.adapters import sb3

    returns = []
    for envs in make_vec_env("CartPole-v1", 4, seed=2), sb3.make_vec("CartPole-v1", 4, seed=2, num_workers=0):
        try:
            model = PPO("MlpPolicy", envs, n_steps=64, batch_size=64, n_epochs=2, seed=2, device="cpu")
            model.learn(1024)
            returns.append([(episode["r"], episode["l"]) for episode in model.ep_info_buffer])
        finally:
            envs.close()
    assert returns[0] == returns[1] and len(returns[0]) > 10


def test_slots_without_a_further_episode_give_no_steps():
    from aioenv.adapters import sb3

    envs = sb3.VecEnv(finite("SameStep", num_workers=0))
    envs.reset()
    for _ in range(3):
        _, rewards, dones, infos = envs.step(np.zeros((2, 1), np.float32))
    assert dones.all() and rewards.tolist() == [1, 1] and "terminal_observation" in infos[0]
    with pytest.raises(errors.PausedError, match=r"slots \[0\] are paused, .* and Stable-Baselines3 would take"):
        envs.step(np.zeros((2, 1), np.float32))
    envs.close()
