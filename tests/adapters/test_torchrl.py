"""`aioenv.adapters.torchrl`: TorchRL's own checks, its rollouts and collectors, and `GymEnv`'s results."""

from __future__ import annotations

import functools
import os
import warnings

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import errors
from aioenv.testing import leak_check
from tests.kits.blocking_kit import ctrl_c_at
from tests.kits.counter_kit import Counter, finite
from tests.kits.zoo import Sampler

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from tensordict import TensorDict
    from torchrl.envs import GymWrapper, SerialEnv
    from torchrl.envs.utils import check_env_specs

    from aioenv.adapters.torchrl import AioEnv

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRL's own

BACKENDS = [{"num_workers": 2}, {"num_workers": 0}, {"backend": "native"}]


def make(task="CartPole-v1", num_envs=3, **kwargs):
    return aioenv.sync.make_vec(task, num_envs, **{"autoreset_mode": "Disabled", **kwargs})


@pytest.mark.parametrize("task", ["CartPole-v1", "Hopper-v5"])
@pytest.mark.parametrize("kwargs", BACKENDS, ids=str)
def test_torchrls_own_check(task, kwargs):
    with leak_check():
        env = AioEnv(make(task, **kwargs))
        check_env_specs(env, seed=0, break_when_any_done="both")
        env.close()


@pytest.mark.parametrize("space", ["box", "scalar_box", "image", "half", "discrete", "multi_discrete", "dict"])
@pytest.mark.parametrize("categorical", [False, True])
def test_torchrls_check_of_spaces(space, categorical):
    factories = [functools.partial(Sampler, space, rich_infos=False)] * 3
    for dtype in (torch.float32, None):
        env = AioEnv(
            aioenv.sync.VectorEnv(factories, num_workers=0, autoreset_mode="Disabled"),
            obs_dtype=dtype,
            categorical_action_encoding=categorical,
        )
        check_env_specs(env, seed=0)
        assert env.action_spec.shape == ((3,) if categorical else (3, 7))
        env.close()


@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "box", "scalar_box"])
@pytest.mark.parametrize("categorical", [False, True])
def test_actions_are_those_of_the_space(action, categorical):
    factories = [functools.partial(Sampler, "box", action)] * 3
    envs = aioenv.sync.VectorEnv(factories, num_workers=0, autoreset_mode="Disabled")
    seen = []
    step = envs.step
    envs.step = lambda actions: seen.append(actions) or step(actions)
    env = AioEnv(envs, categorical_action_encoding=categorical)
    env.rollout(4)
    assert all(envs.action_space.contains(np.asarray(one, envs.action_space.dtype)) for one in seen) and seen
    env.close()


@pytest.mark.parametrize("kwargs", BACKENDS, ids=str)
def test_a_rollout_is_that_of_numpy(kwargs):
    """With partial resets: what an action led to is never the first observation of the next episode."""
    env = AioEnv(make(max_episode_steps=9, **kwargs), categorical_action_encoding=True)
    env.set_seed(4)
    actions = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (30, 3)))
    chosen = iter(actions)
    data = env.rollout(30, lambda td: td.set("action", next(chosen)), break_when_any_done=False)
    env.close()
    envs = make(max_episode_steps=9, **kwargs)
    obs, _ = envs.reset(seed=4)
    ends = 0
    for t in range(30):
        assert np.array_equal(data["observation"][:, t].numpy(), obs)
        following, reward, terminated, truncated, _ = envs.step(actions[t].numpy())
        step = data["next"][:, t]
        assert np.array_equal(step["observation"].numpy(), following)
        assert np.array_equal(step["reward"][:, 0].numpy(), reward)
        assert np.array_equal(step["terminated"][:, 0].numpy(), terminated)
        assert np.array_equal(step["truncated"][:, 0].numpy(), truncated)
        ended = terminated | truncated
        assert np.array_equal(step["done"][:, 0].numpy(), ended)
        obs = envs.reset(options={"reset_mask": ended})[0] if ended.any() else following
        ends += ended.sum()
    envs.close()
    assert ends > 3


@pytest.mark.parametrize("kwargs", BACKENDS, ids=str)
def test_masked_steps_leave_ended_slots_alone(kwargs):
    env = AioEnv(make(max_episode_steps=40, **kwargs))
    env.set_seed(1)
    data = env.rollout(60, break_when_any_done=False, break_when_all_done=True)
    env.close()
    done = data["next", "done"][..., 0]
    assert done[:, -1].all() and len({int(row.int().argmax()) for row in done}) > 1
    for slot, row in enumerate(done):
        first = int(row.int().argmax())
        assert row[first:].all()
        assert (data["next", "observation"][slot, first:] == data["next", "observation"][slot, first]).all()


def counters(n, **kwargs):
    envs = aioenv.sync.VectorEnv([Counter] * n, autoreset_mode="Disabled", **kwargs)
    return AioEnv(envs, categorical_action_encoding=True, obs_dtype=None)


def some(*mask):
    return torch.tensor(mask)


def history_of(env):
    """What masked steps and resets of three slots return, also if the caller writes to earlier results."""
    env.set_seed(3)
    root = env.reset().set("action", torch.zeros(3, dtype=torch.long))
    step = env.step(root.clone())
    root = env.step_mdp(step).clone().set("action", torch.zeros(3, dtype=torch.long))
    for value in step["next"].values(True, True):
        value.fill_(1)
    found = [env.step(root.clone().set("_step", some(True, False, False))), env.step(root.clone())]
    bare = TensorDict({"action": root["action"], "_step": some(False, True, False)}, batch_size=[3])
    found.append(env.step(bare))
    nothing = torch.zeros(3, 1, dtype=torch.bool)
    found.append(env.reset(root.clone().set("_reset", nothing)))
    found.append(env.reset(root.clone().set("_reset", some(True, False, True).unsqueeze(-1))))
    return [each.exclude("_step", "_reset").to_dict() for each in found]


def numbers(found):
    """Not the observations' first numbers, which are drawn by seeds."""
    if isinstance(found, dict):
        return {key: numbers(value) for key, value in sorted(found.items())}
    return (found[..., 1:] if found.dtype == torch.float64 else found).tolist()


@pytest.mark.parametrize("kwargs", BACKENDS[:2], ids=str)
def test_masks_are_those_of_torchrls_serial_env(kwargs):
    ours = counters(3, **kwargs)

    def make_one():
        return GymWrapper(Counter(), categorical_action_encoding=True)

    theirs = SerialEnv(3, make_one, use_buffers=False)  # buffers outlive it
    mine, other = (list(map(numbers, history_of(env))) for env in (ours, theirs))
    ours.close()
    theirs.close()
    assert mine == other


def test_a_reset_of_some_slots_takes_a_seed():
    env = counters(3, num_workers=0)
    first = env.reset(seed=9)
    again = env.reset(first.clone().set("_reset", some(True, False, True).unsqueeze(-1)), seed=9)
    assert torch.equal(again["observation"], first["observation"])
    env.close()


class FailsToReset(Counter):
    """Raises in the resets whose options say so."""

    def reset(self, *, seed=None, options=None):
        if (options or {}).get("length") == self.length:
            raise KeyError("as asked")
        return super().reset(seed=seed)


@pytest.mark.parametrize("some_slots", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_flags_after_a_reset_that_failed_are_those_of_it(num_workers, some_slots):
    """The slots that were reset begin episodes."""
    factories = [functools.partial(FailsToReset, length) for length in (0, 1, 2)]  # one step ends the first two
    envs = aioenv.sync.VectorEnv(factories, num_workers=num_workers, autoreset_mode="Disabled")
    env = AioEnv(envs, categorical_action_encoding=True)
    try:
        root = env.reset()
        assert env.step(root.set("action", torch.zeros(3, dtype=torch.long)))["next", "done"].sum() == 2
        mask = TensorDict({"_reset": some(True, True, False).unsqueeze(-1)}, [3]) if some_slots else None
        with pytest.raises(errors.EnvError):
            env.reset(mask, options={"length": 0})
        again = env.reset(TensorDict({"_reset": some(True, False, False).unsqueeze(-1)}, [3]))
        assert again["done"].flatten().tolist() == [False] * 3
    finally:
        env.close()


def step_interrupted(env, root, how, gate):
    """Interrupt a step of an env that waits at a gate, and open the gate."""
    if how == "ctrl-c":
        with pytest.raises(KeyboardInterrupt), ctrl_c_at(gate):
            env.step(root)
    else:
        with pytest.raises(errors.StepTimeout):
            env.step(root)
        with open(gate, "w"):
            pass


@pytest.mark.parametrize("how", ["ctrl-c", "timeout"])
def test_after_an_interrupted_step_flags_are_not_known(how, tmp_path):
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    envs = aioenv.sync.VectorEnv(
        [functools.partial(Counter, 1, gate)] * 2,
        num_workers=2,
        autoreset_mode="Disabled",
        timeout_s=2.0 if how == "timeout" else None,
    )
    env = AioEnv(envs, categorical_action_encoding=True)
    try:
        step_interrupted(env, env.reset().set("action", torch.tensor([Counter.OK, Counter.WAIT])), how, gate)
        with pytest.raises(RuntimeError, match="an interrupted step, reset all envs first"):
            env.reset(TensorDict({"_reset": some(False, True).unsqueeze(-1)}, [2]))
        assert env.reset()["observation"][:, 1].tolist() == [0, 0]
    finally:
        env.close()


@pytest.mark.parametrize("how", ["ctrl-c", "timeout"])
def test_after_an_interrupted_masked_step_it_goes_on(how, tmp_path):
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    timeout_s = 2.0 if how == "timeout" else None
    with leak_check():
        envs = aioenv.sync.VectorEnv(
            [functools.partial(Counter, gate=gate)] * 3, num_workers=3, autoreset_mode="Disabled", timeout_s=timeout_s
        )
        env = AioEnv(envs, categorical_action_encoding=True)
        for following in ("step", "reset"):
            root = env.reset().set("action", torch.tensor([Counter.OK, Counter.WAIT, Counter.OK]))
            root["_step"] = some(True, True, False)
            step_interrupted(env, root, how, gate)
            if following == "step":
                root["action"] = torch.zeros(3, dtype=torch.long)
                assert env.step(root)["next", "observation"][:, 1].tolist() == [2, 2, 0]
                root["_reset"] = some(True, False, False).unsqueeze(-1)
                with pytest.raises(RuntimeError, match="an interrupted step, reset all envs first"):
                    env.reset(root)
        assert env.reset()["observation"][:, 1].tolist() == [0, 0, 0]
        env.close()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_flags_after_an_error_are_those_of_the_failed_step(num_workers, masked):
    """A reset of the slot that failed tells which other episodes have ended in that step."""
    factories = [functools.partial(Counter, length) for length in (1, 9, 9)]
    envs = aioenv.sync.VectorEnv(factories, num_workers=num_workers, autoreset_mode="Disabled")
    env = AioEnv(envs, categorical_action_encoding=True)
    try:
        root = env.reset()
        root["action"] = torch.tensor([Counter.OK, Counter.RAISE, Counter.OK])
        if masked:
            root["_step"] = torch.tensor([True, True, False])
        with pytest.raises(errors.EnvError):
            env.step(root)
        again = env.reset(TensorDict({"_reset": torch.tensor([[False], [True], [False]])}, [3]))
        for key in ("done", "terminated"):
            assert again[key].flatten().tolist() == [True, False, False]
    finally:
        env.close()


def test_collectors():
    from torchrl.collectors import Collector

    with leak_check():
        env = AioEnv(make(num_envs=4, num_workers=2))
        collector = Collector(env, None, frames_per_batch=64, total_frames=256)
        batches = list(collector)
        collector.shutdown()
        assert [batch.numel() for batch in batches] == [64] * 4
        for batch in batches:
            done = batch["next", "done"][:, :-1, 0]
            same = (batch["next", "observation"][:, :-1] == batch["observation"][:, 1:]).all(-1)
            assert torch.equal(same, ~done)
        assert sum(int(batch["next", "done"].sum()) for batch in batches)


def test_transforms_go_around_it():
    from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv

    env = TransformedEnv(AioEnv(make("Hopper-v5", backend="native")), Compose(StepCounter(20), RewardSum()))
    check_env_specs(env, seed=0)
    data = env.rollout(50, break_when_any_done=False)
    assert data["next", "step_count"].max() <= 20
    env.close()


def test_a_device_none_and_seeds():
    env = AioEnv(make(num_workers=0))
    env.set_seed(7)
    first = env.reset()["observation"]
    env.set_seed(7)
    assert torch.equal(env.reset()["observation"], first)
    assert not torch.equal(env.reset()["observation"], first)
    assert env.device == torch.device("cpu") and env.batch_size == (3,)
    env.close()
    env.envs.close()


@pytest.mark.parametrize("categorical", [False, True])
def test_numbers_that_do_not_start_at_0(categorical):
    """In specs they do."""

    class Shifted(gym.Env):
        observation_space = gym.spaces.Dict(
            many=gym.spaces.MultiDiscrete([3, 4], start=[5, -2]), one=gym.spaces.Discrete(3, start=-1)
        )
        action_space = gym.spaces.MultiDiscrete([3, 4], start=[-1, 7])

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"many": np.array([7, -2]), "one": np.int64(1)}, {}

        def step(self, action):
            assert self.action_space.contains(action)
            return {"many": action - [-1, 7] + [5, -2], "one": np.int64(-1)}, 0.0, False, False, {}

    env = AioEnv(
        aioenv.sync.VectorEnv([Shifted] * 2, num_workers=0, autoreset_mode="Disabled"),
        categorical_action_encoding=categorical,
    )
    check_env_specs(env)
    root = env.reset()
    assert root["many"].tolist() == [[2, 0]] * 2 and root["one"].tolist() == [2, 2]
    root["action"] = env.action_spec.rand()
    sent = env.action_spec.to_numpy(root["action"]).reshape(2, 2)
    step = env.step(root)["next"]
    assert step["many"].tolist() == sent.tolist() and step["one"].tolist() == [0, 0]
    env.close()


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (gym.spaces.MultiBinary((2, 3)), r"TorchRL takes a MultiBinary of one axis, got MultiBinary\(\(2, 3\)\)"),
        (gym.spaces.MultiDiscrete([[3, 4], [5, 6]]), "TorchRL takes a MultiDiscrete of one axis"),
        (gym.spaces.Box(0, 60000, (2,), np.uint16), "TorchRL takes no uint16"),
    ],
    ids=["binary", "discrete", "uint16"],
)
def test_spaces_without_a_spec_are_refused(space, message):
    class Env(gym.Env):
        def __init__(self, obs, action):
            self.observation_space, self.action_space = obs, action

    box, nested = gym.spaces.Box(-1, 1), gym.spaces.Dict(a=space)
    where = {"single_action_space": (box, space), r"single_observation_space\['a'\]": (nested, box)}
    for name, (obs, action) in where.items():
        factory = functools.partial(Env, obs, action)
        envs = aioenv.sync.VectorEnv([factory], num_workers=0, autoreset_mode="Disabled")
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            AioEnv(envs)
        envs.close()


@pytest.mark.parametrize("kwargs", BACKENDS, ids=str)
def test_arrays_that_are_used_again_are_refused(kwargs):
    envs = make(copy=False, **kwargs)
    for each in (envs, gym.wrappers.vector.ClipReward(envs, 0, 1)):
        with pytest.raises(ValueError, match=r"copy: TorchRL keeps the arrays .* which has copy=False"):
            AioEnv(each)
    envs.close()
    mode = gym.vector.AutoresetMode.DISABLED
    theirs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")], copy=False, autoreset_mode=mode)
    with pytest.raises(ValueError, match="which has copy=False"):
        AioEnv(theirs)
    theirs.close()


def gymnasiums():
    mode = gym.vector.AutoresetMode.DISABLED
    return gym.vector.SyncVectorEnv([functools.partial(gym.make, "CartPole-v1")] * 3, autoreset_mode=mode)


def wrapped():
    return gym.wrappers.vector.ClipReward(make(num_workers=0), 0, 1)


@pytest.mark.parametrize("make_envs", [gymnasiums, wrapped])
def test_other_vector_envs_step_all_slots(make_envs):
    env = AioEnv(make_envs())
    check_env_specs(env)
    root = env.reset().set("action", env.action_spec.rand())
    message = r"needs a vector env of `aioenv.sync` for it, .*; got (SyncVectorEnv|ClipReward)\. .* \(wrappers=\)"
    with pytest.raises(TypeError, match=rf'^a step of some envs \("_step"\): .*{message}'):
        env.step(root.clone().set("_step", some(True, False, True)))
    with pytest.raises(TypeError, match=f"^async_reset_send: .*{message}"):
        env.async_reset_send()
    env.step(root)
    env.close()


def test_slots_without_a_further_episode_give_no_steps():
    envs = finite("Disabled", num_workers=0)
    env = AioEnv(envs)
    with pytest.raises(errors.PausedError, match=r"slots \[0\] are paused, .* and TorchRL would take"):
        env.rollout(8, break_when_any_done=False)
    assert envs.exhausted == (0,)
    root = TensorDict({"action": env.action_spec.zero()}, batch_size=[2])
    some_step = env.step(root.clone().set("_step", some(False, True)))
    assert some_step["next", "observation"][1].tolist() == [0, 1]
    with pytest.raises(errors.PausedError, match=r"slots \[0\] are paused"):
        env.step(root.clone().set("_step", some(True, False)))
    env.close()


@pytest.mark.parametrize(("width", "wrong"), [(2, 1), (2, 3), (3, 4)])
def test_actions_of_another_shape_are_refused(width, wrong):
    """Also one-hot ones of another length, which have an index of their own."""
    env = AioEnv(make("CartPole-v1" if width == 2 else "Hopper-v5", num_workers=0))
    try:
        root = env.reset()
        message = rf"actions: expected shape \(3, {width}\), got \(3, {wrong}\)"
        with pytest.raises(errors.ActionError, match=message):
            env.step(root.set("action", torch.zeros(3, wrong)))
        with pytest.raises(errors.ActionError, match=message):
            env.async_step_send(root, env_index=[0, 1, 2])
        env.step(root.set("action", torch.zeros(3, width)))
    finally:
        env.close()


def test_misuse_is_said():
    with pytest.raises(TypeError, match=r"TorchRL takes a blocking vector env, .*; aioenv.sync.make_vec makes one"):
        AioEnv(aioenv.make_vec("CartPole-v1"))
    envs = make(num_workers=0, autoreset_mode="NextStep")
    with pytest.raises(ValueError, match='TorchRL takes autoreset_mode="Disabled", the vector env has'):
        AioEnv(envs)
    envs.close()
    for space, action, message in (("tuple", "discrete", "got Tuple"), ("box", "dict", "expected an array, got Dict")):
        envs = aioenv.sync.VectorEnv(
            [lambda s=space, a=action: Sampler(s, a)], num_workers=0, autoreset_mode="Disabled"
        )
        with pytest.raises(ValueError, match=message):
            AioEnv(envs)
        envs.close()
    with pytest.raises(TypeError, match="got TimeLimit"):
        AioEnv(gym.make("CartPole-v1"))


def test_a_negative_seed_is_refused_and_spoils_no_reset():
    env = AioEnv(make(num_workers=0))
    with pytest.raises(ValueError, match=r"seed: expected an int from 0, or None, got -1"):
        env.set_seed(-1)
    assert env.reset().batch_size == (3,)
    env.close()
