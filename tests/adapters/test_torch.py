"""`aioenv.adapters.torch` against numpy's results of the same vector envs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import pickle

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import errors
from aioenv.testing import leak_check
from tests.kits.zoo import SPACES, Sampler

torch = pytest.importorskip("torch")

from aioenv.adapters import torch as adapter  # noqa: E402
from aioenv.adapters.torch import TorchVectorEnv, as_tensors  # noqa: E402

MODES = ("NextStep", "SameStep", "Disabled")
NUM_ENVS = 3


def samplers(space: str, **kwargs):
    return [functools.partial(Sampler, space, rich_infos=False)] * NUM_ENVS, {"num_workers": 0, **kwargs}


def same(tensors, arrays) -> None:
    """Equal, and tensors where there are arrays of numbers."""
    if isinstance(arrays, dict):
        assert tensors.keys() == arrays.keys()
        for key, part in arrays.items():
            same(tensors[key], part)
    elif isinstance(arrays, tuple) and isinstance(tensors, tuple):
        assert len(tensors) == len(arrays)
        for one, other in zip(tensors, arrays, strict=True):
            same(one, other)
    elif isinstance(arrays, np.ndarray) and arrays.dtype.kind in "biuf" and isinstance(tensors, torch.Tensor):
        assert tensors.numpy().dtype == arrays.dtype
        assert np.array_equal(tensors.numpy(), arrays, equal_nan=arrays.dtype.kind == "f")
    else:
        assert not isinstance(tensors, torch.Tensor)
        assert type(tensors) is type(arrays) and repr(tensors) == repr(arrays)


def is_tensors(space, batch) -> bool:
    if isinstance(space, gym.spaces.Dict):
        return all(is_tensors(part, batch[key]) for key, part in space.spaces.items())
    if isinstance(space, gym.spaces.Tuple):
        return all(is_tensors(part, batch[i]) for i, part in enumerate(space.spaces))
    number = isinstance(space, (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary))
    return isinstance(batch, torch.Tensor) is number


def row(batch, slot):
    if isinstance(batch, dict):
        return {key: row(part, slot) for key, part in batch.items()}
    if isinstance(batch, tuple) and len(batch) != NUM_ENVS:
        return tuple(row(part, slot) for part in batch)
    value = batch[slot]
    return value.numpy() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("space", SPACES)
def test_results_are_those_of_numpy(space, mode):
    factories, kwargs = samplers(space, autoreset_mode=mode)
    with (
        aioenv.sync.VectorEnv(factories, **kwargs) as numpys,
        TorchVectorEnv(aioenv.sync.VectorEnv(factories, **kwargs)) as envs,
    ):
        assert envs.num_envs == NUM_ENVS and envs.autoreset_mode == numpys.autoreset_mode
        assert envs.observation_space == numpys.observation_space
        same(envs.reset(seed=1)[0], numpys.reset(seed=1)[0])
        finals = 0
        for _ in range(12):
            actions = numpys.action_space.sample()
            ours, theirs = envs.step(torch.from_numpy(actions)), numpys.step(actions)
            assert is_tensors(SPACES[space], ours.obs)
            for name in ("obs", "reward", "terminated", "truncated"):
                same(getattr(ours, name), getattr(theirs, name))
            assert ours.info.keys() == theirs.info.keys()
            if "final_obs" in theirs.info:
                assert is_tensors(SPACES[space], ours.info["final_obs"])
                for slot in range(NUM_ENVS):
                    last = theirs.info["final_obs"][slot] if theirs.info["_final_obs"][slot] else row(theirs.obs, slot)
                    assert repr(_plain(row(ours.info["final_obs"], slot))) == repr(_plain(last))
                    finals += theirs.info["_final_obs"][slot]
            ended = theirs.terminated | theirs.truncated
            if mode == "Disabled" and ended.any():
                options = {"reset_mask": ended}
                same(envs.reset(options=options)[0], numpys.reset(options=options)[0])
        assert bool(finals) == (mode == "SameStep")


def _plain(value):
    """A numpy scalar as an array without axes."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if type(value) is tuple:
        return tuple(_plain(part) for part in value)
    return np.asarray(value) if isinstance(value, np.generic) else value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kwargs", [{"num_workers": 2}, {"num_workers": 0}, {"backend": "native"}], ids=str)
@pytest.mark.parametrize("task", ["CartPole-v1", "Hopper-v5"])
def test_backends_awaited_and_blocking(task, kwargs, mode):
    make = functools.partial(aioenv.make_vec, task, 4, autoreset_mode=mode, max_episode_steps=9, **kwargs)
    make_sync = functools.partial(aioenv.sync.make_vec, task, 4, autoreset_mode=mode, max_episode_steps=9, **kwargs)
    rng = np.random.default_rng(0)

    async def steps(envs, actions):
        results = [await envs.reset(seed=2)]
        for one in actions:
            results.append(await envs.step(one))
            ended = results[-1].terminated | results[-1].truncated
            if mode == "Disabled" and ended.any():
                results.append(await envs.reset(options={"reset_mask": np.asarray(ended)}))
        return results

    async def main():
        async with make() as envs:
            actions = [
                rng.uniform(-1, 1, envs.action_space.shape).astype(envs.action_space.dtype)
                if task == "Hopper-v5"
                else rng.integers(0, 2, 4)
                for _ in range(25)
            ]
            theirs = await steps(envs, actions)
        tensors = [torch.from_numpy(one) for one in actions]
        async with TorchVectorEnv(make()) as envs:
            return tensors, theirs, await steps(envs, tensors)

    tensors, theirs, ours = aioenv.run(main())
    with TorchVectorEnv(make_sync()) as envs:
        blocking = [envs.reset(seed=2)]
        for one in tensors:
            blocking.append(envs.step(one))
            ended = blocking[-1].terminated | blocking[-1].truncated
            if mode == "Disabled" and ended.any():
                blocking.append(envs.reset(options={"reset_mask": ended}))
    assert len(ours) == len(theirs) == len(blocking)
    for mine, other, third in zip(ours, theirs, blocking, strict=True):
        for one, two, three in list(zip(mine, other, third, strict=True))[:-1]:
            same(one, two)
            same(three, two)


def test_drop_ins_and_gymnasiums_own():
    actions = torch.tensor([0, 1, 1])
    makers = [lambda: gym.make("CartPole-v1")] * 3
    results = []
    for envs in (
        aioenv.sync.AsyncVectorEnv(makers),
        aioenv.sync.SyncVectorEnv(makers),
        gym.vector.SyncVectorEnv(makers),
        gym.wrappers.vector.RecordEpisodeStatistics(aioenv.sync.VectorEnv(makers, num_workers=0)),
    ):
        with contextlib.closing(TorchVectorEnv(envs)) as tensors:
            tensors.reset(seed=0)
            results.append(tensors.step(actions).obs)
    assert all(torch.equal(results[0], other) for other in results)


def test_around_a_wrapper_of_batches():
    from aioenv.wrappers import FrameStack, NormalizeObservation

    make = functools.partial(aioenv.make_vec, "CartPole-v1", 3, num_workers=0)

    async def main():
        async with NormalizeObservation(make()) as envs:
            await envs.reset(seed=0)
            theirs = await envs.step(np.ones(3, int))
        async with TorchVectorEnv(NormalizeObservation(make())) as envs:
            await envs.reset(seed=0)
            same((await envs.step(torch.ones(3))).obs, theirs.obs)
        async with TorchVectorEnv(FrameStack(make(), 4)) as envs:
            await envs.reset(seed=0)
            rollout = await envs.rollout(lambda obs: torch.zeros(len(obs)), 5)
            assert rollout.obs.shape == (5, 3, 4, 4)

    aioenv.run(main())


# ------------------------------------------------------------ memory


@pytest.mark.parametrize("num_workers", [0, 2])
def test_tensors_are_the_arrays_memory(num_workers, monkeypatch):
    factories, kwargs = samplers("image", num_workers=num_workers, transport="auto")
    with TorchVectorEnv(aioenv.sync.VectorEnv(factories, **kwargs)) as envs:
        seen = []
        step = envs.envs.step
        monkeypatch.setattr(envs.envs, "step", lambda *args, **kw: seen.append(step(*args, **kw)) or seen[-1])
        envs.reset(seed=0)
        result = envs.step(torch.zeros(NUM_ENVS, dtype=torch.int64))
        for tensor, array in list(zip(result, seen[0], strict=True))[:4]:
            assert tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("transport", ["frames", "shared"])
def test_by_default_tensors_are_the_callers(transport):
    factories, kwargs = samplers("image", num_workers=2, transport=transport)
    actions = torch.zeros(NUM_ENVS, dtype=torch.int64)
    with TorchVectorEnv(aioenv.sync.VectorEnv(factories, **kwargs)) as envs:
        envs.reset(seed=0)
        kept, copies, reused = [], [], set()
        for _ in range(12):
            obs = envs.step(actions).obs
            kept.append(obs[0])  # a view holds the memory, too
            copies.append(obs[0].clone())
        assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))
        del kept, obs
        for _ in range(12):
            reused.add(envs.step(actions).obs.data_ptr())
        assert len(reused) < 12  # released memory is used again


def test_without_copies_tensors_last_for_two_steps():
    factories, kwargs = samplers("image", num_workers=2, copy=False)
    actions = torch.zeros(NUM_ENVS, dtype=torch.int64)
    with TorchVectorEnv(aioenv.sync.VectorEnv(factories, **kwargs)) as envs:
        envs.reset(seed=0)
        first = envs.step(actions).obs
        before = first.clone()
        second = envs.step(actions).obs
        assert torch.equal(first, before)
        third = envs.step(actions).obs
        assert third.data_ptr() == first.data_ptr() != second.data_ptr()
        assert not torch.equal(first, before)
    factories, kwargs = samplers("scalar_box", num_workers=2, copy=False)
    with TorchVectorEnv(aioenv.sync.VectorEnv(factories, **kwargs), obs_dtype=torch.float32) as envs:
        envs.reset(seed=0)
        first = envs.step(actions).obs
        before = first.clone()
        for _ in range(4):
            envs.step(actions)
        assert torch.equal(first, before)  # converted: the caller's


def test_dtypes():
    spaces_of = {"box": torch.float32, "scalar_box": torch.float64, "image": torch.uint8, "discrete": torch.int64}
    for space, dtype in spaces_of.items():
        factories, kwargs = samplers(space)
        with TorchVectorEnv(aioenv.sync.VectorEnv(factories, **kwargs)) as envs:
            assert envs.reset(seed=0)[0].dtype == dtype
            assert envs.step(torch.zeros(NUM_ENVS)).reward.dtype == torch.float64
        with TorchVectorEnv(
            aioenv.sync.VectorEnv(factories, **kwargs), obs_dtype=torch.bfloat16, reward_dtype=torch.float32
        ) as envs:
            expected = torch.bfloat16 if dtype.is_floating_point else dtype
            assert envs.reset(seed=0)[0].dtype == expected
            result = envs.step(torch.zeros(NUM_ENVS))
            assert result.obs.dtype == expected and result.reward.dtype == torch.float32
            assert result.terminated.dtype == result.truncated.dtype == torch.bool
    with pytest.raises(TypeError, match=r"obs_dtype: expected a floating-point dtype of torch.*got torch.int64"):
        TorchVectorEnv(aioenv.make_vec("CartPole-v1"), obs_dtype=torch.int64)
    with pytest.raises(TypeError, match=r"reward_dtype: .*got 'float32'"):
        TorchVectorEnv(aioenv.make_vec("CartPole-v1"), reward_dtype="float32")
    with pytest.raises(TypeError, match="envs: expected a vector env, got str"):
        TorchVectorEnv("CartPole-v1")
    with pytest.raises(TypeError, match="envs: expected a vector env, got"):
        TorchVectorEnv(gym.make("CartPole-v1"))


class OddArrays(gym.vector.VectorEnv):
    """Arrays that torch can't share: read-only, of another byte order, reversed, or no arrays."""

    single_observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    single_action_space = gym.spaces.Discrete(2)
    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs = 3
    observation_space = gym.vector.utils.batch_space(single_observation_space, 3)
    action_space = gym.vector.utils.batch_space(single_action_space, 3)

    def reset(self, *, seed=None, options=None):
        return np.broadcast_to(np.float32(1), (3, 2)), {}

    def step(self, actions):
        obs = np.arange(6, dtype=">f4").reshape(3, 2)
        return obs, np.arange(3.0)[::-1], [True, False, True], np.zeros(3, bool), {}


def test_arrays_that_torch_cant_share_are_copied():
    envs = TorchVectorEnv(OddArrays())
    assert envs.reset()[0].tolist() == [[1, 1]] * 3
    obs, reward, terminated, _, _ = envs.step(torch.zeros(3))
    assert obs.tolist() == [[0, 1], [2, 3], [4, 5]] and obs.dtype == torch.float32
    assert reward.tolist() == [2, 1, 0]
    assert terminated.tolist() == [True, False, True] and terminated.dtype == torch.bool


# ------------------------------------------------------------ actions


class Echo(gym.Env):
    """Its infos have the action that it got."""

    observation_space = gym.spaces.Discrete(2)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {"got": repr(action)}


def echo(space, actions):
    with TorchVectorEnv(aioenv.sync.VectorEnv([lambda: Echo(space)] * 2, num_workers=0)) as envs:
        envs.reset()
        return list(envs.step(actions).info["got"])


def test_actions_of_any_kind():
    box = gym.spaces.Box(-9, 9, (2,), np.float32)
    weights = torch.tensor([[1.5, 2], [3, 4]], requires_grad=True)
    expected = [repr(np.array([1.5, 2], np.float32)), repr(np.array([3, 4], np.float32))]
    for actions in (
        weights,
        weights * 1,
        weights.to(torch.bfloat16),
        weights.double(),
        weights.half(),
        weights.detach().numpy(),
        torch.stack([weights[:, 0], weights[:, 1]]).t(),
        torch.stack([weights, weights], 2)[..., 0],
        weights.detach().to_sparse(),
        torch._neg_view(-weights.detach()),
        [weights[0], weights[1]],
        [[1.5, 2], [3, 4]],
    ):
        assert echo(box, actions) == expected
    discrete = gym.spaces.Discrete(5)
    for actions in (
        torch.tensor([3, 1]),
        torch.tensor([3, 1], dtype=torch.int32),
        torch.tensor([3, 1], dtype=torch.uint8),
        torch.tensor([3.0, 1.0]),
        torch.tensor([3.0, 1.0], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(3), torch.tensor(1)],
    ):
        assert echo(discrete, actions) == ["np.int64(3)", "np.int64(1)"]
    assert echo(gym.spaces.MultiBinary(2), torch.tensor([[True, False], [False, True]])) == [
        repr(np.array([1, 0], np.int8)),
        repr(np.array([0, 1], np.int8)),
    ]
    nested = gym.spaces.Dict(a=gym.spaces.Tuple((box, discrete)), b=gym.spaces.Text(3))
    got = echo(nested, {"a": (weights, torch.tensor([3.0, 1.0])), "b": ("x", "yy")})
    assert "[3., 4.]" in got[1] and "np.int64(1)" in got[1] and "'yy'" in got[1]


def test_actions_that_do_not_fit():
    discrete, box = gym.spaces.Discrete(5), gym.spaces.Box(-9, 9, (2,), np.float32)
    for actions, message in (
        (torch.tensor([3.0, 0.5]), r"expected int64, got 0.5 of torch.float32 in row 1, .*logits.argmax\(-1\)"),
        (torch.tensor([3.0, float("nan")]), r"got nan of torch.float32 in row 1"),
        (torch.tensor([1e30, 1]), r"got 1e\+30|got 1.0000000150474662e\+30"),
        (torch.zeros(2, 5), r"expected shape \(2,\), got \(2, 5\)"),
        (torch.tensor(3), r"expected shape \(2,\), got \(\)"),
        (torch.tensor([3, 7]), r"expected int64 from 0 to 4, got 7 in row 1"),
    ):
        with pytest.raises(errors.ActionError, match=message):
            echo(discrete, actions)
    with pytest.raises(errors.ActionError, match=r"actions\['b'\]: expected int64, got 0.5"):
        echo(gym.spaces.Dict(a=box, b=discrete), {"a": torch.zeros(2, 2), "b": torch.tensor([0.5, 1])})
    with pytest.raises(errors.ActionError, match=r"expected a dict of \['a'\], got \['c'\]"):
        echo(gym.spaces.Dict(a=box), {"c": torch.zeros(2, 2)})
    with pytest.raises(errors.ActionError, match="expected a tuple of 1"):
        echo(gym.spaces.Tuple((box,)), torch.zeros(2, 2))


def test_actions_are_the_callers_again():
    """`step` has copied them when it returns to the loop; writing to them changes nothing."""

    async def main():
        space = gym.spaces.Box(-9, 9, (2,), np.float32)
        async with TorchVectorEnv(aioenv.AsyncVectorEnv([lambda: Echo(space)] * 2, num_workers=2)) as envs:
            await envs.reset()
            actions = torch.ones(2, 2)
            envs.send(actions)
            actions.zero_()
            return (await envs.recv(2)).info["got"]

    assert "1., 1." in aioenv.run(main())[1]


# ------------------------------------------------------------ some slots, cancellation, errors


@pytest.mark.parametrize("blocking", [False, True])
def test_slots_as_they_finish(blocking):
    def answer(ready):
        assert type(ready.slots) is np.ndarray
        assert isinstance(ready.obs, torch.Tensor) and len(ready.obs) == len(ready.slots)
        assert isinstance(ready.terminated, torch.Tensor)
        taken.extend(ready.slots.tolist())
        return (ready.obs[:, 2] > 0).long()

    taken: list[int] = []

    async def main():
        async with TorchVectorEnv(aioenv.make_vec("CartPole-v1", 4, num_workers=2)) as envs:
            envs.send_reset(seed=0)
            async for ready in envs.ready(min_slots=1):
                actions = answer(ready)
                if len(taken) < 40:
                    envs.send(actions, ready.slots)

    if blocking:
        with TorchVectorEnv(aioenv.sync.make_vec("CartPole-v1", 4, num_workers=2)) as envs:
            envs.send_reset(seed=0)
            for ready in envs.ready(min_slots=1):
                actions = answer(ready)
                if len(taken) < 40:
                    envs.send(actions, ready.slots)
    else:
        aioenv.run(main())
    assert len(taken) >= 40 and set(taken) == {0, 1, 2, 3}


def test_a_cancelled_step_is_received_later():
    async def main():
        async with TorchVectorEnv(aioenv.make_vec("CartPole-v1", 4, num_workers=2)) as envs:
            await envs.reset(seed=0)
            step = asyncio.ensure_future(envs.step(torch.ones(4)))
            await asyncio.sleep(0)  # it was sent
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            ready = await envs.recv(4)
        async with TorchVectorEnv(aioenv.make_vec("CartPole-v1", 4, num_workers=2)) as envs:
            await envs.reset(seed=0)
            result = await envs.step(torch.ones(4))
        assert torch.equal(ready.obs, result.obs)

    with leak_check():
        aioenv.run(main())


class Fails(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if action:
            raise RuntimeError("on purpose")
        return np.ones(2, np.float32), 1.0, False, False, {}


def test_errors_are_the_vector_envs():
    async def main():
        async with TorchVectorEnv(aioenv.AsyncVectorEnv([Fails] * 2, num_workers=2)) as envs:
            await envs.reset()
            with pytest.raises(errors.EnvError, match="on purpose") as error:
                await envs.step(torch.tensor([0, 1]))
            assert error.value.slots == (1,)
            assert error.value.partial.obs[0].tolist() == [1, 1]
            await envs.reset(options={"reset_mask": np.array([False, True])})
            assert (await envs.step(torch.tensor([0, 0]))).obs.tolist() == [[1, 1], [1, 1]]
        with pytest.raises(errors.ClosedError):
            await envs.step(torch.tensor([0, 0]))

    with leak_check():
        aioenv.run(main())


def test_it_is_started_and_closed_as_the_vector_env():
    async def main():
        envs = await TorchVectorEnv(aioenv.make_vec("CartPole-v1", 2, num_workers=1))
        assert isinstance(envs, TorchVectorEnv) and envs.backend == "workers"
        assert "TorchVectorEnv of" in repr(envs) and "CartPole-v1" in repr(envs)
        await envs.close()
        assert envs.closed
        not_started = TorchVectorEnv(aioenv.make_vec("CartPole-v1", 2))
        with pytest.raises(RuntimeError, match="start it first"):
            await not_started.reset()
        with pytest.raises(AttributeError, match="no_such_thing"):
            not_started.no_such_thing  # noqa: B018

    with leak_check():
        aioenv.run(main())


def test_a_with_statement_closes_any_blocking_vector_env():
    envs = gym.wrappers.vector.ClipReward(aioenv.sync.make_vec("CartPole-v1", 2, num_workers=1), -1.0, 1.0)
    with leak_check():
        with TorchVectorEnv(envs) as tensors:
            tensors.reset(seed=0)
        assert envs.env.closed
    with pytest.raises(TypeError, match="async with"), TorchVectorEnv(aioenv.make_vec("CartPole-v1", 2)):
        pass


def test_attributes_are_set_where_they_are_read():
    normalized = gym.wrappers.vector.NormalizeObservation(aioenv.sync.make_vec("CartPole-v1", 2, num_workers=0))
    with TorchVectorEnv(normalized) as envs:
        envs.reset(seed=0)
        count = envs.obs_rms.count
        envs.update_running_mean = False
        envs.step(torch.ones(2))
        assert envs.obs_rms.count == count and not normalized.update_running_mean
        envs.note = 3  # which no vector env has
        assert envs.note == 3 and not hasattr(normalized, "note")
        assert TorchVectorEnv(envs, "meta").device.type == "meta" and envs.device.type == "cpu"


# ------------------------------------------------------------ rollouts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kwargs", [{"num_workers": 2}, {"num_workers": 0}, {"backend": "native"}], ids=str)
def test_rollouts_are_those_of_numpy(mode, kwargs):
    def numpy_policy(obs, slots):
        return (obs[:, 2] > 0).astype(int), {"value": obs[:, 0], "slot": slots}

    def policy(obs, slots):
        assert isinstance(obs, torch.Tensor) and type(slots) is np.ndarray
        return (obs[:, 2] > 0).float().requires_grad_(), {"value": obs[:, 0], "slot": torch.from_numpy(slots)}

    async def policy_async(obs, slots):
        await asyncio.sleep(0)
        return policy(obs, slots)

    make = functools.partial(aioenv.make_vec, "CartPole-v1", 4, autoreset_mode=mode, max_episode_steps=9, **kwargs)

    async def main():
        async with make() as envs:
            await envs.reset(seed=0)
            theirs = await envs.rollout(numpy_policy, 30)
        results = []
        for each in policy, policy_async:
            async with TorchVectorEnv(make()) as envs:
                await envs.reset(seed=0)
                results.append(await envs.rollout(each, 30))
        return theirs, results

    theirs, results = aioenv.run(main())
    with TorchVectorEnv(
        aioenv.sync.make_vec("CartPole-v1", 4, autoreset_mode=mode, max_episode_steps=9, **kwargs)
    ) as envs:
        envs.reset(seed=0)
        results.append(envs.rollout(policy, 30))
        with pytest.raises(TypeError, match="a coroutine function takes the async API"):
            envs.rollout(policy_async, 3)
    assert (theirs.terminated | theirs.truncated).any()
    for ours in results:
        assert "steps=30 num_envs=4" in repr(ours)
        for name in ("obs", "actions", "reward", "terminated", "truncated", "valid", "last_obs", "next_obs", "extras"):
            same(getattr(ours, name), getattr(theirs, name))
        assert len(ours.infos) == 30
        moved = ours.to("meta")
        assert moved.obs.device.type == moved.next_obs.device.type == moved.extras["value"].device.type == "meta"
        assert moved.infos is ours.infos
        assert ours.to("cpu").obs.data_ptr() == ours.obs.data_ptr()


@pytest.mark.parametrize("space", ["dict", "tuple", "nested", "text", "sequence", "graph", "image", "half"])
def test_rollouts_of_any_space(space):
    factories, kwargs = samplers(space, autoreset_mode="SameStep")

    def policy(obs):
        assert is_tensors(SPACES[space], obs)
        return torch.zeros(len(obs) if isinstance(obs, torch.Tensor) else NUM_ENVS)

    with TorchVectorEnv(aioenv.sync.VectorEnv(factories, **kwargs)) as envs:
        envs.reset(seed=0)
        ours = envs.rollout(policy, 10, groups=1)
    with aioenv.sync.VectorEnv(factories, **kwargs) as envs:
        envs.reset(seed=0)
        theirs = envs.rollout(lambda obs: np.zeros(NUM_ENVS, int), 10, groups=1)
    for name in ("obs", "last_obs", "next_obs"):
        same(getattr(ours, name), getattr(theirs, name))
    converted = as_tensors(theirs, obs_dtype=torch.float32, reward_dtype=torch.float32)
    assert converted.reward.dtype == torch.float32
    if space == "half":
        assert converted.obs.dtype == converted.next_obs.dtype == converted.last_obs.dtype == torch.float32
        assert as_tensors(theirs).obs.data_ptr() == theirs.obs.ctypes.data


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_pickle(mode):
    def policy(obs):
        return torch.ones(len(obs)), {"value": obs[:, 0]}

    envs = aioenv.sync.make_vec("CartPole-v1", NUM_ENVS, num_workers=0, autoreset_mode=mode, max_episode_steps=3)
    with TorchVectorEnv(envs) as tensors:
        tensors.reset(seed=0)
        rollout = tensors.rollout(policy, 8)
    for copied in (pickle.loads(pickle.dumps(rollout)), pickle.loads(pickle.dumps(rollout.to("cpu")))):
        assert copied.next_obs.equal(rollout.next_obs) and copied.to("cpu").next_obs.equal(rollout.next_obs)
        for name in ("obs", "actions", "reward", "terminated", "truncated", "valid", "last_obs"):
            assert getattr(copied, name).equal(getattr(rollout, name)), name
        assert copied.extras["value"].equal(rollout.extras["value"])
        assert repr(list(copied.infos)) == repr(list(rollout.infos))
        assert dataclasses.replace(copied, reward=-copied.reward).next_obs.equal(rollout.next_obs)


def test_a_partial_rollout_becomes_tensors():
    def policy(obs):
        return torch.full((2,), int(len(seen) == 5)) if not seen.append(1) else None

    seen: list[int] = []
    with TorchVectorEnv(aioenv.sync.VectorEnv([Fails] * 2, num_workers=0)) as envs:
        envs.reset()
        with pytest.raises(errors.EnvError, match="on purpose") as error:
            envs.rollout(policy, 9, groups=1)
    partial = as_tensors(error.value.partial)
    assert partial.obs.shape == (5, 2, 2) and partial.valid.sum() == 8


def test_a_policy_of_tensors_serves_evaluate():
    layer = torch.nn.Linear(4, 2)

    class Policy(torch.nn.Module):
        def forward(self, obs):
            return layer(obs).argmax(-1)

    async def main():
        with torch.no_grad():
            async with TorchVectorEnv(aioenv.make_vec("CartPole-v1", 3, num_workers=0)) as envs:
                ours = await aioenv.evaluate(envs.envs, envs.numpy_policy(Policy()), 6, seed=1)
                started = [
                    episode.length
                    async for episode in envs.episodes(
                        envs.numpy_policy(lambda obs, started: layer(obs).argmax(-1)), 6, seed=1
                    )
                ]
                theirs = await aioenv.evaluate(
                    envs.envs, lambda obs: layer(torch.from_numpy(obs)).argmax(-1).numpy(), 6, seed=1
                )
        assert list(ours.returns) == list(theirs.returns)
        assert len(started) == 6

    aioenv.run(main())


class Noting(torch.nn.Module):
    """Notes which slots it is called for."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def forward(self, obs, slots):
        self.noted += slots.tolist()
        return torch.zeros(len(obs), dtype=torch.int64)


class NotingEpisodes(Noting):
    def forward(self, obs, slots, episodes, started):
        assert len(episodes) == len(started) == len(obs)
        return super().forward(obs, slots)


def test_evaluate_refuses_blocking_ones():
    with TorchVectorEnv(aioenv.sync.make_vec("CartPole-v1", 1, num_workers=0)) as envs:
        with pytest.raises(TypeError, match=r"of the async API, .* got <TorchVectorEnv.* aioenv.sync.evaluate"):
            asyncio.run(aioenv.evaluate(envs, envs.numpy_policy(Noting()), 1))


def test_modules_get_the_parameters_that_they_have():
    with TorchVectorEnv(aioenv.sync.make_vec("CartPole-v1", NUM_ENVS, num_workers=0)) as envs:
        envs.reset(seed=0)
        envs.rollout(module := Noting(), 2)
        assert module.noted == [*range(NUM_ENVS)] * 2
        aioenv.sync.evaluate(envs.envs, envs.numpy_policy(module := NotingEpisodes()), 3)
        assert set(module.noted) == {*range(NUM_ENVS)}


def test_the_module_is_imported_when_it_is_asked_for():
    from tests.kits.process_kit import run_alone

    run_alone(
        """
        import sys
        import aioenv
        assert "torch" not in sys.modules
        aioenv.adapters.torch.TorchVectorEnv
        assert "torch" in sys.modules
        """
    )
    assert adapter.TorchVectorEnv is TorchVectorEnv
