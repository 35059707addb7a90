"""`aioenv.adapters.rsl_rl`: the contract of RSL-RL's `VecEnv`, and its runner."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import errors
from aioenv.testing import leak_check
from tests.kits.counter_kit import finite

torch = pytest.importorskip("torch")
pytest.importorskip("rsl_rl")

from aioenv.adapters.rsl_rl import RslRlVecEnv  # noqa: E402

BACKENDS = [{"num_workers": 2}, {"num_workers": 0}, {"backend": "native"}]


def make(task="Hopper-v5", num_envs=3, **kwargs):
    return aioenv.sync.make_vec(task, num_envs, **{"autoreset_mode": "SameStep", **kwargs})


def config(**algorithm):
    model = {"class_name": "MLPModel", "hidden_dims": [32, 32], "activation": "tanh"}
    return {
        "num_steps_per_env": 32,
        "save_interval": 1000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": "PPO", **algorithm},
        "actor": {**model, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.6}},
        "critic": model,
    }


@pytest.mark.parametrize("kwargs", BACKENDS, ids=str)
def test_results_are_those_of_the_vector_env(kwargs):
    """Time-outs are what was truncated; observations of ended episodes are those of the next ones."""
    theirs = make(max_episode_steps=15, **kwargs)
    envs = RslRlVecEnv(make(max_episode_steps=15, **kwargs), seed=3)
    rng = np.random.default_rng(0)
    try:
        assert (envs.num_envs, envs.num_actions, envs.max_episode_length) == (3, 3, 15)
        assert envs.unwrapped.step_dt == pytest.approx(0.008)
        obs = envs.get_observations()
        assert obs.batch_size == (3,) and obs["policy"].dtype == torch.float32
        same(obs["policy"], theirs.reset(seed=3)[0])
        timed_out = terminated = 0
        for _ in range(40):
            actions = rng.uniform(-2, 2, (3, 3)).astype(np.float32)
            obs, reward, dones, extras = envs.step(torch.from_numpy(actions))
            expected = theirs.step(actions.clip(-1, 1))
            same(obs["policy"], expected.obs)
            same(envs.get_observations()["policy"], expected.obs)
            same(reward, expected.reward)
            assert np.array_equal(dones.numpy(), expected.terminated | expected.truncated)
            assert np.array_equal(extras["time_outs"].numpy(), expected.truncated & ~expected.terminated)
            assert ("final_obs" in extras) == ("final_obs" in expected.info)
            if "final_obs" in extras:
                for slot in np.flatnonzero(expected.info["_final_obs"]):
                    same(extras["final_obs"]["policy"][slot], expected.info["final_obs"][slot])
            assert (envs.episode_length_buf[dones] == 0).all() and (envs.episode_length_buf[~dones] > 0).all()
            timed_out += int(extras["time_outs"].sum())
            terminated += int(expected.terminated.sum())
        assert timed_out or terminated
    finally:
        theirs.close()
        envs.close()


def same(tensor, array) -> None:
    assert np.array_equal(tensor.numpy(), np.asarray(array, np.float32))


@pytest.mark.parametrize("kwargs", BACKENDS, ids=str)
def test_a_written_episode_length_ends_the_episode(kwargs):
    envs = RslRlVecEnv(make("HalfCheetah-v5", 3, **kwargs), seed=0)
    try:
        envs.get_observations()
        envs.episode_length_buf = torch.tensor([998, 0, 500])
        for step in range(2):
            obs, _, dones, extras = envs.step(torch.ones(3, 6))
            ended = step == 1
            assert dones.tolist() == extras["time_outs"].tolist() == [ended, False, False]
            assert envs.episode_length_buf.tolist() == [0 if ended else 999, step + 1, 501 + step]
        last = extras["final_obs"]["policy"]
        assert not torch.equal(last[0], obs["policy"][0]) and torch.equal(last[1:], obs["policy"][1:])
        assert obs["policy"][0].abs().max() < 1  # just reset
        envs.step(torch.ones(3, 6))
        assert envs.episode_length_buf.tolist() == [1, 3, 503]
    finally:
        envs.close()


class Groups(gym.Env):
    observation_space = gym.spaces.Dict(
        actor=gym.spaces.Box(-1, 1, (4,), np.float64),
        critic=gym.spaces.Discrete(3),
        image=gym.spaces.Box(0, 255, (2, 2, 1), np.uint8),
    )
    action_space = gym.spaces.Box(-np.inf, np.inf, (2, 2), np.float32)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action.sum()), False, False, {}


def test_a_dict_has_the_groups():
    with leak_check():
        envs = RslRlVecEnv(
            aioenv.sync.VectorEnv([Groups] * 2, num_workers=0, autoreset_mode="SameStep"), max_episode_length=3
        )
        assert envs.num_actions == 4
        for t in range(1, 5):
            obs, reward, dones, _ = envs.step(torch.full((2, 4), float(t)))
            assert {key: tuple(value.shape) for key, value in obs.items()} == {
                "actor": (2, 4),
                "critic": (2, 1),
                "image": (2, 2, 2, 1),
            }
            assert all(value.dtype == torch.float32 for value in obs.values())
            assert reward.tolist() == [4 * t] * 2  # unbounded actions are not clipped
            assert dones.tolist() == [t == 3] * 2
        envs.close()


@pytest.mark.parametrize("kwargs", BACKENDS[:2], ids=str)
def test_arrays_that_are_used_again_are_copied(kwargs):
    """RSL-RL stores observations after the step that followed them, in which slots may also be reset."""
    envs = RslRlVecEnv(make("Pendulum-v1", 2, copy=False, **kwargs), seed=0, max_episode_length=4)
    try:
        kept = [envs.get_observations()]
        for _ in range(9):
            copies = [one.clone() for one in kept]
            obs, _, _, extras = envs.step(torch.rand(2, 1))
            assert all((one == copy).all() for one, copy in zip(kept, copies, strict=True))
            kept = [obs, extras.get("final_obs", obs)]
    finally:
        envs.close()


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 4), ()], ids=str)
def test_actions_of_another_shape_are_refused(shape):
    envs = RslRlVecEnv(make("Hopper-v5", 2, num_workers=0), seed=0)
    try:
        with pytest.raises(errors.ActionError, match=r"actions: expected shape \(2, 3\), got \("):
            envs.step(torch.zeros(shape))
        envs.step(torch.zeros(2, 3))
    finally:
        envs.close()


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_of_no_steps_is_refused(limit):
    envs = make(num_workers=0)
    try:
        with pytest.raises(ValueError, match=f"max_episode_length: expected 1 or more steps, got {limit}"):
            RslRlVecEnv(envs, max_episode_length=limit)
    finally:
        envs.close()


@pytest.mark.parametrize("kwargs", BACKENDS[1:], ids=str)
def test_envs_without_a_limit_need_one(kwargs):
    envs = make(max_episode_steps=-1, **kwargs)
    try:
        with pytest.raises(ValueError, match="max_episode_length: the envs' spec has no time limit"):
            RslRlVecEnv(envs)
    finally:
        envs.close()


def test_a_box_of_integers_is_refused():
    """A policy's numbers would be cut to integers, and in a Box of uint8 negative ones would become the largest."""
    action = gym.spaces.Box(0, 255, (2,), np.uint8)
    envs = aioenv.sync.VectorEnv([lambda: Acts(action)], num_workers=0, autoreset_mode="SameStep")
    try:
        with pytest.raises(ValueError, match="single_action_space: RSL-RL's policies are for a Box of floating-point"):
            RslRlVecEnv(envs, max_episode_length=9)
    finally:
        envs.close()


class Acts(gym.Env):
    """Has an action space, and does nothing."""

    observation_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, action_space) -> None:
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action.sum()), False, False, {}


def test_misuse_is_said():
    with pytest.raises(TypeError, match=r"RSL-RL takes a blocking vector env, .*AsyncVectorEnv; aioenv.sync.make_vec"):
        RslRlVecEnv(aioenv.make_vec("Hopper-v5"))
    for task, kwargs, message in (
        ("Hopper-v5", {"autoreset_mode": "NextStep"}, 'RSL-RL takes autoreset_mode="SameStep"'),
        ("CartPole-v1", {}, "RSL-RL's policies are for a Box"),
    ):
        envs = make(task, 1, num_workers=0, **kwargs)
        with pytest.raises(ValueError, match=message):
            RslRlVecEnv(envs)
        envs.close()
    envs = aioenv.sync.VectorEnv([Groups], num_workers=0, autoreset_mode="SameStep")
    with pytest.raises(ValueError, match="max_episode_length: the envs' spec has no time limit"):
        RslRlVecEnv(envs)
    envs.close()
    rsl = RslRlVecEnv(make(num_workers=0))
    rsl.reset()
    with pytest.raises(errors.ActionError):
        rsl.step(torch.zeros(3, 5))
    rsl.close()


@pytest.mark.parametrize("kwargs", [{"num_workers": 2}, {"backend": "native"}], ids=str)
def test_its_runner_runs(kwargs, tmp_path):
    from rsl_rl.runners import OnPolicyRunner

    with leak_check():
        envs = RslRlVecEnv(make("HalfCheetah-v5", 8, **kwargs), seed=0)
        runner = OnPolicyRunner(envs, config(), log_dir=None)
        runner.learn(3, init_at_random_ep_len=True)
        assert len(set(envs.episode_length_buf.tolist())) > 1
        policy = runner.get_inference_policy()
        with torch.inference_mode():
            obs = envs.get_observations()
            for _ in range(3):
                obs, *_ = envs.step(policy(obs))
        assert torch.isfinite(obs["policy"]).all()
        runner.save(str(tmp_path / "model.pt"))
        envs.close()


def test_its_runner_learns():
    from rsl_rl.runners import OnPolicyRunner

    torch.manual_seed(0)
    vector_env = make("InvertedPendulum-v5", 32, backend="native", max_episode_steps=200, episode_stats=True)
    envs = RslRlVecEnv(vector_env, seed=0)
    try:
        runner = OnPolicyRunner(envs, config(learning_rate=3e-3, entropy_coef=0.0), log_dir=None)
        lengths = []
        while len(lengths) < 8 and (not lengths or lengths[-1] < 150):  # six seeds of six needed 2 to 4 rounds
            runner.learn(10)
            lengths.append(vector_env.episode_stats.epoch()["length/mean"])
            vector_env.episode_stats.clear()
        assert lengths[0] < 60 and lengths[-1] >= 150, lengths  # of 200
    finally:
        envs.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_slots_without_a_further_episode_give_no_steps(num_workers):
    inner = finite("SameStep", num_workers=num_workers)
    envs = RslRlVecEnv(inner, max_episode_length=100)
    try:
        for _ in range(3):
            obs, reward, dones, _ = envs.step(torch.zeros(2, 1))
        assert dones.all() and reward.tolist() == [1, 1] and inner.exhausted == (0,)
        for _ in range(2):
            with pytest.raises(errors.PausedError, match=r"slots \[0\] are paused, .* and RSL-RL would take"):
                envs.step(torch.zeros(2, 1))
        assert obs["policy"][1].tolist() == [0, 0] and envs.episode_length_buf.tolist() == [0, 0]
        inner.pause(1)
        inner.resume(0)
        with pytest.raises(errors.PausedError, match=r"slots \[1\] are paused"):
            envs.step(torch.zeros(2, 1))
    finally:
        envs.close()
