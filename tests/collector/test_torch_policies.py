"""Policies and weights of torch; and weights of other kinds, which need no torch."""

from __future__ import annotations

import numpy as np
import pytest

import aioenv
from aioenv.collector.weights import dump_weights, load_weights
from aioenv.definitions.table import DefinitionTable
from aioenv.process.remote import Placements
from tests.collector.collector_kit import joined, rounds
from tests.kits.process_kit import run_alone

TABLE = DefinitionTable(b"weights")
HERE = Placements((), 1.0)


def there_and_back(value):
    dumped = dump_weights(1, value, TABLE, HERE)
    received = [memoryview(bytearray(b"".join(dumped.buffers)))] if dumped.buffers else []
    return load_weights(dumped.data, dumped.spans, received)


@pytest.mark.parametrize("size", [0, 1, 200, 5000])
def test_arrays_travel_beside_the_pickle(size):
    mine = {"a": np.arange(float(size)), "b": [np.ones((size, 3), np.int8)], "t": np.ones((7, size)).T, "n": 3}
    got = there_and_back(mine)
    mine["a"] += 1  # they were copied
    assert np.array_equal(got["a"], np.arange(float(size))) and got["n"] == 3
    for name in ("a", "t"):
        assert got[name].dtype == mine[name].dtype and got[name].shape == mine[name].shape
        assert got[name].flags.writeable and got[name].flags.aligned
    if size == 5000:
        assert len(dump_weights(1, mine, TABLE, HERE).data) < 1000


class Own:
    def __init__(self, number):
        self.number = number


def test_other_objects_are_pickled():
    assert there_and_back(Own(np.arange(9999))).number[-1] == 9998
    assert there_and_back("text") == "text"
    assert there_and_back(lambda: 3)() == 3


def test_tensors_travel_as_arrays():
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(100, 100)
    state = module.state_dict()
    dumped = dump_weights(1, state, TABLE, HERE)
    assert b"weights" in dumped.data and len(dumped.data) < 1500 and sum(size for _, size in dumped.spans) == 40_000
    got = there_and_back(state)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        module.weight += 1
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    many = {
        "parameter": module.weight,
        "half": torch.ones(700, dtype=torch.bfloat16),
        "turned": torch.ones(40, 50).T,
        "sparse": torch.eye(50).to_sparse(),
        "scalar": torch.tensor(3),
    }
    got = there_and_back(many)
    assert torch.equal(got["parameter"], module.weight) and got["half"].dtype == torch.bfloat16
    assert torch.equal(got["turned"], many["turned"]) and got["sparse"].is_sparse
    assert got["scalar"].item() == 3 and got["scalar"].shape == ()


def test_tensors_of_dtypes_that_numpy_lacks_travel_as_bytes():
    torch = pytest.importorskip("torch")
    mine = {"half": torch.randn(70, 50).to(torch.bfloat16), "turned": torch.randn(40, 90).to(torch.bfloat16).T}
    mine |= {"eighth": torch.randn(3, 5000).to(torch.float8_e4m3fn), "scalar": torch.tensor(1.5, dtype=torch.bfloat16)}
    dumped = dump_weights(1, mine, TABLE, HERE)
    assert [size for _, size in dumped.spans] == [7000, 7200, 15_000] and len(dumped.data) < 2000
    got = there_and_back(mine)
    for name, tensor in mine.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert torch.equal(got[name].float(), tensor.float())


@pytest.mark.parametrize("size", [2, 40])
def test_modules_travel_whole(size):
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.BatchNorm1d(size)).eval()
    module[0].bias.requires_grad = False
    got = there_and_back({"net": module})["net"]
    assert [p.requires_grad for p in got.parameters()] == [p.requires_grad for p in module.parameters()]
    assert got.state_dict().keys() == module.state_dict().keys()
    obs = torch.randn(5, size)
    assert torch.equal(got(obs), module(obs))
    half = there_and_back(torch.nn.Parameter(torch.ones(700, dtype=torch.bfloat16)))
    assert isinstance(half, torch.nn.Parameter) and half.dtype == torch.bfloat16 and half.requires_grad


def make_module():
    import torch

    class ActorCritic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))

        def forward(self, obs, slots):
            out = self.body(obs)
            assert not torch.is_grad_enabled() and len(slots) == len(obs)
            return out[:, :2].argmax(1), {"value": out[:, 2]}

    torch.manual_seed(0)
    return ActorCritic()


@pytest.mark.asyncio
async def test_a_module_is_a_policy():
    torch = pytest.importorskip("torch")
    module = make_module()
    found = []
    for count in (1, 3):
        with torch.no_grad():
            module.body[0].weight[:] = 1.0
        async with aioenv.RolloutCollector(
            "CartPole-v1", 6, policy=make_module, steps=20, num_collectors=count, mode="sync", seed=0
        ) as collector:
            await collector.update(module.state_dict())
            (one,) = await rounds(collector, 1)
            found.append(joined(one))
            with torch.no_grad():
                module.body[0].weight += 0.1
            await collector.update(module.state_dict())
            (second,) = await rounds(collector, 1)
        for rollout in second:
            value = module.body(torch.as_tensor(rollout.obs))[..., 2].detach().numpy()
            assert rollout.weights_version == 2 and np.allclose(rollout.extras["value"], value, atol=1e-5)
    assert np.allclose(found[0]["value"], found[1]["value"], atol=1e-5)
    assert found[0]["value"].dtype == np.float32


def make_counting_module():
    import torch

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, obs):
            self.seen = self.seen + len(obs)  # a new tensor, made in the call
            return torch.zeros(len(obs), dtype=torch.int64), {"seen": self.seen.expand(len(obs))}

    return Counting()


@pytest.mark.asyncio
async def test_a_module_that_assigns_buffers_takes_weights():
    pytest.importorskip("torch")
    async with aioenv.RolloutCollector(
        "CartPole-v1", 2, policy=make_counting_module, steps=3, num_collectors=1, mode="sync", groups=1
    ) as collector:
        for version in range(3):
            rollout = await anext(collector)
            assert rollout.weights_version == version and rollout.extras["seen"][:, 0].tolist() == [2, 4, 6]
            await collector.update(make_counting_module().state_dict())


def test_torch_is_not_imported_for_other_policies():
    code = """
        import sys
        import numpy as np
        import aioenv

        class Policy:
            def update(self, weights):
                self.weights = weights
            def __call__(self, obs):
                return np.zeros(len(obs), int), {"torch": np.full(len(obs), "torch" in sys.modules)}

        with aioenv.sync.RolloutCollector("CartPole-v1", 2, policy=Policy, steps=2, num_collectors=1) as collector:
            collector.update({"w": np.ones(1000)})
            print(next(collector).extras["torch"].any(), "torch" in sys.modules)
    """
    assert run_alone(code).stdout == "False False\n"
