"""`aioenv.adapters.torchrl` in asynchronous mode, against TorchRL's own `AsyncEnvPool` of the same envs."""

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

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from tensordict import NonTensorStack, TensorDict
    from torchrl.envs import AsyncEnvPool, GymWrapper
    from torchrl.envs.utils import check_env_specs

    from aioenv.adapters.torchrl import AioEnv

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRL's own

NUM_ENVS = 4


class Counter(gym.Env):
    """Counts the steps and episodes of its slot. An action of 1 waits for a writer of the FIFO, 2 raises."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, slot: int, fifo: str = "") -> None:
        self.slot, self.fifo = slot, fifo
        self.episode = self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        if action == 1:
            with open(self.fifo) as fifo:
                fifo.read()
        if action == 2:
            raise KeyError("as asked")
        self.steps += 1
        over = self.steps == 2 + self.slot
        return self._obs(), float(self.steps), over, self.steps == 3, {}

    def _obs(self):
        return np.array([self.slot, self.episode, self.steps], np.float32)


def ours(num_workers=2, fifo=""):
    factories = [functools.partial(Counter, slot, fifo) for slot in range(NUM_ENVS)]
    envs = aioenv.sync.VectorEnv(factories, num_workers=num_workers, autoreset_mode="Disabled")
    return AioEnv(envs, categorical_action_encoding=True)


def cartpoles():
    return AioEnv(aioenv.sync.make_vec("CartPole-v1", 3, num_workers=0, autoreset_mode="Disabled"))


def theirs():
    def make(slot):
        return GymWrapper(Counter(slot), categorical_action_encoding=True)

    return AsyncEnvPool([functools.partial(make, slot) for slot in range(NUM_ENVS)], backend="threading")


@pytest.fixture(params=[2, 0])
def pools(request):
    pair = ours(request.param), theirs()
    yield pair
    for pool in pair:
        pool.close()


def indices(tensordict) -> list[int]:
    """Theirs has them as a list or a number, which are no tensors."""
    return np.asarray(tensordict["env_index"]).reshape(-1).tolist()


def assert_same(mine, other) -> None:
    assert indices(mine) == indices(other)
    mine, other = mine.exclude("env_index"), other.exclude("env_index")
    assert mine.batch_size == other.batch_size
    assert set(mine.keys(True, True)) == set(other.keys(True, True))
    for key in mine.keys(True, True):
        assert mine[key].dtype == other[key].dtype and torch.equal(mine[key], other[key]), key


def act(tensordict, action=0):
    return tensordict.set("action", torch.full(tensordict.batch_size, action))


def both(pools, call):
    mine, other = map(call, pools)
    for one, two in zip(mine, other, strict=True) if isinstance(mine, tuple) else [(mine, other)]:
        assert_same(one, two)
    return mine, other


def test_results_of_whole_batches_are_those_of_the_async_pool(pools):
    def begin(pool):
        pool.async_reset_send(env_index=[0, 1, 2, 3])
        return pool.async_reset_recv(min_get=NUM_ENVS)

    roots = both(pools, begin)
    for _ in range(3):
        for pool, root in zip(pools, roots, strict=True):
            pool.async_step_and_maybe_reset_send(act(root))
        _, roots = zip(*both(pools, lambda pool: pool.async_step_and_maybe_reset_recv(min_get=NUM_ENVS)), strict=True)
    for pool, root in zip(pools, roots, strict=True):
        pool.async_step_send(act(root))
    steps = both(pools, lambda pool: pool.async_step_recv(min_get=NUM_ENVS))
    for pool, step in zip(pools, steps, strict=True):
        pool.async_reset_send(pool.step_mdp(step)[[0, 2]])
    both(pools, lambda pool: pool.async_reset_recv(min_get=2))


def test_slots_that_the_tensordict_names_in_any_form_and_order(pools):
    def begin(pool):
        pool.async_reset_send(TensorDict({"env_index": NonTensorStack(0, 1, 2, 3)}, batch_size=[4]))
        return pool.async_reset_recv(min_get=4)

    roots = both(pools, begin)
    for index in NonTensorStack(3, 1), torch.tensor([3, 1]):
        for pool, root in zip(pools, roots, strict=True):
            some = act(root[[3, 1]]).set("mark", torch.tensor([30, 10]))
            pool.async_step_send(some.set("env_index", index))
        steps = both(pools, lambda pool: pool.async_step_recv(min_get=2))
        assert indices(steps[0]) == [1, 3] and steps[0]["mark"].tolist() == [10, 30]
        assert steps[0]["next", "observation"][:, 0].tolist() == [1, 3]


def test_one_slot_by_an_int_has_no_batch_size(pools):
    def begin(pool):
        pool.async_reset_send(env_index=2)
        return pool.async_reset_recv(env_index=2)

    roots = both(pools, begin)
    assert roots[0].batch_size == ()
    for pool, root in zip(pools, roots, strict=True):
        pool.async_step_send(act(root), env_index=2)
    steps = both(pools, lambda pool: pool.async_step_recv(env_index=2))
    for pool, step in zip(pools, steps, strict=True):
        pool.async_step_and_maybe_reset_send(act(pool.step_mdp(step)), env_index=2)
    both(pools, lambda pool: pool.async_step_and_maybe_reset_recv(env_index=2))


def test_each_slot_has_the_history_of_the_async_pool(pools):
    """With a few slots at a time, the order of the slots is free; what each returns is not."""
    histories = []
    for pool in pools:
        history: list[list[list[float]]] = [[] for _ in range(NUM_ENVS)]
        pool.async_reset_send(env_index=list(range(NUM_ENVS)))
        root = pool.async_reset_recv(min_get=NUM_ENVS)
        while min(map(len, history)) < 12:
            pool.async_step_and_maybe_reset_send(act(root))
            step, root = pool.async_step_and_maybe_reset_recv(min_get=1)
            for slot, row, after in zip(indices(step), step, root, strict=True):
                values = [row["observation"], row["next", "observation"], row["next", "reward"], after["observation"]]
                flags = [row["next", name].float() for name in ("done", "terminated", "truncated")]
                history[slot].append(torch.cat([*values, *flags]).tolist())
        histories.append([slot[:12] for slot in history])
    assert histories[0] == histories[1]


def test_results_that_come_late_are_waited_for_as_told(tmp_path):
    """One slot waits for the test: `min_get`, `max_get` and `timeout` are those of TorchRL."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    with leak_check():
        env = ours(num_workers=NUM_ENVS, fifo=fifo)
        env.async_reset_send()
        root = env.async_reset_recv(min_get=NUM_ENVS)
        root["action"] = torch.tensor([0, 0, 1, 0])
        env.async_step_send(root)
        with pytest.raises(TimeoutError, match=r"async_step_recv: 3 of 4 results after 0\.5 s"):
            env.async_step_recv(min_get=4, timeout=0.5)
        two = env.async_step_recv(min_get=1, max_get=2)
        assert indices(two) == [0, 1]
        assert indices(env.async_step_recv()) == [3]
        with pytest.raises(TimeoutError, match="0 of 1 results"):
            env.async_step_recv(timeout=0)
        env.async_reset_send(two.select("env_index"))  # other requests may be sent and received meanwhile
        assert env.async_reset_recv(min_get=2)["observation"][:, 1].tolist() == [2, 2]
        with open(fifo, "w"):
            pass
        assert indices(env.async_step_recv(timeout=60)) == [2]
        env.close()


def test_misuse_is_said(pools):
    env, pool = pools
    for each in pools:
        each.async_reset_send(env_index=[0, 1])
        with pytest.raises(RuntimeError, match="busy"):
            each.async_reset_send(env_index=[1, 2])
        with pytest.raises(ValueError, match="max_get"):
            each.async_reset_recv(min_get=2, max_get=1)
        with pytest.raises(RuntimeError, match="3"):
            each.async_reset_recv(min_get=3)
    with pytest.raises(RuntimeError, match=r"async_step_recv: min_get is 1, but 0 envs"):
        env.async_step_recv()
    with pytest.raises(RuntimeError, match="env 3 has no request that was sent with env_index=3"):
        env.async_reset_recv(env_index=3)
    with pytest.raises(RuntimeError, match="reset: there are results of asynchronous calls"):
        env.reset()
    root = env.async_reset_recv(min_get=2)
    pool.async_reset_recv(min_get=2)
    with pytest.raises(KeyError, match="action"):
        env.async_step_send(root)
    with pytest.raises(ValueError, match=r"async_step_send: expected a batch size of \(1,\), got \(2,\)"):
        env.async_step_send(act(root), env_index=[0])
    with pytest.raises(ValueError, match="env_index: expected slots"):
        env.async_step_send(act(root).exclude("env_index"))
    with pytest.raises(IndexError, match="9"):
        env.async_step_send(act(root), env_index=[2, 9])
    env.async_step_send(act(root))  # nothing of all that was sent
    assert indices(env.async_step_recv(min_get=2)) == [0, 1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_env_that_fails_loses_no_results_of_others(num_workers):
    with leak_check():
        env = ours(num_workers)
        env.async_reset_send()
        root = env.async_reset_recv(min_get=NUM_ENVS)
        root["action"] = torch.tensor([0, 2, 0, 0])
        env.async_step_send(root)
        received = []
        for _ in range(4):
            try:
                received += indices(env.async_step_recv(min_get=3 - len(received)))
            except errors.EnvError as error:
                assert error.slots == (1,) and "as asked" in str(error)
            if len(received) == 3:
                break
        assert sorted(received) == [0, 2, 3]
        env.async_reset_send(env_index=[1])
        assert env.async_reset_recv()["observation"].tolist() == [[1, 2, 0]]
        env.close()


def test_blocking_calls_go_on_after_a_reset_of_all():
    env = cartpoles()
    data = env.rollout(5, break_when_any_done=False)
    env.async_reset_send(env_index=[2])
    env.async_reset_recv()
    some = torch.tensor([[True], [False], [False]])
    with pytest.raises(RuntimeError, match=r"a reset of some envs: after asynchronous calls, .* reset all envs first"):
        env.reset(TensorDict({"_reset": some}, batch_size=[3]))
    check_env_specs(env)
    assert env.rollout(5, break_when_any_done=False).shape == data.shape
    env.close()


def test_seeds_are_those_of_the_next_reset_of_each_slot():
    env = cartpoles()
    env.set_seed(5)
    first = env.reset()["observation"]
    env.set_seed(5)
    env.async_reset_send(env_index=[2, 0])
    some = env.async_reset_recv(min_get=2)
    assert torch.equal(some["observation"], first[[0, 2]])
    env.async_reset_send()
    again = env.async_reset_recv(min_get=3)["observation"]
    assert torch.equal(again[1], first[1]) and not torch.equal(again[0], first[0])
    env.close()
