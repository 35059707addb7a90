"""Copies to and from a device, on a stand-in of its stream calls: copies run when they are waited for."""

from __future__ import annotations

import asyncio

import gymnasium as gym
import numpy as np
import pytest

import aioenv

torch = pytest.importorskip("torch")

from aioenv.adapters import torch as adapter  # noqa: E402
from aioenv.adapters import torch_transfer  # noqa: E402
from aioenv.adapters.torch_transfer import Streams, StreamTransfer  # noqa: E402


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU; numpy can't have it."""

    @property
    def device(self):
        return torch.device("cuda", 0)

    def numpy(self, **kwargs):
        raise TypeError("it was not downloaded")


class Event:
    def __init__(self, queue: list, number: int) -> None:
        self.queue, self.number = queue, number

    def query(self) -> bool:
        """Each question takes as long as one copy."""
        if self.queue and self.queue[0][0] <= self.number:
            self.queue.pop(0)[1]()
        return not (self.queue and self.queue[0][0] <= self.number)

    def synchronize(self) -> None:
        while not self.query():
            pass


class Delayed:
    """The calls of `Streams`; a copy is made when an event that follows it is waited for."""

    def __init__(self) -> None:
        self.queue: list = []
        self.number = 0
        self.num_pinned = 0

    def pinned(self, shape, dtype):
        self.num_pinned += 1
        return torch.full(shape, 99).to(dtype)

    def _begin(self, copy) -> Event:
        self.number += 1
        self.queue.append((self.number, copy))
        return Event(self.queue, self.number)

    def upload(self, pinned):
        copied = torch.full_like(pinned, 77)
        event = self._begin(lambda: copied.copy_(pinned))
        return copied.as_subclass(OnDevice), event

    def download(self, source):
        copied = self.pinned(tuple(source.shape), source.dtype)
        self._begin(lambda: copied.copy_(source.as_subclass(torch.Tensor)))
        return copied

    def record(self) -> Event:
        return Event(self.queue, self.number)

    def run(self) -> None:
        Event(self.queue, self.number).synchronize()


@pytest.fixture
def delayed(monkeypatch):
    calls = Delayed()
    monkeypatch.setattr(adapter, "transfer_to", lambda device: StreamTransfer(device, calls))
    return calls


def plain(tensor):
    return tensor.as_subclass(torch.Tensor)


def test_an_upload_keeps_its_numbers_while_the_next_ones_begin():
    calls = Delayed()
    transfer = StreamTransfer(torch.device("cuda"), calls)
    source = torch.zeros(4, 3)
    uploads = []
    for k in range(5):
        source.fill_(k)
        uploads.append(transfer.upload("obs", source, torch.float32))
        assert len(calls.queue) <= 2  # the third waits for the first
    calls.run()
    assert [plain(upload).unique().tolist() for upload in uploads] == [[0], [1], [2], [3], [4]]
    assert calls.num_pinned == 2


def test_buffers_are_by_name_and_grow_with_the_rows():
    calls = Delayed()
    transfer = StreamTransfer(torch.device("cuda"), calls)
    uploads = [
        transfer.upload(name, torch.full((rows, 2), 10.0 * rows + len(name)), torch.float32)
        for rows in (2, 5, 1, 5)
        for name in ("obs", "reward")
    ]
    calls.run()
    expected = [10.0 * rows + size for rows in (2, 5, 1, 5) for size in (3, 6)]
    assert [plain(upload).unique().tolist() for upload in uploads] == [[number] for number in expected]
    assert [len(upload) for upload in uploads] == [2, 2, 5, 5, 1, 1, 5, 5]
    assert calls.num_pinned == 4  # of 2 and of 5 rows, for each name


def test_numbers_are_converted_on_the_way():
    calls = Delayed()
    transfer = StreamTransfer(torch.device("cuda"), calls)
    upload = transfer.upload("obs", torch.tensor([1.5, 2.5], dtype=torch.float64), torch.bfloat16)
    calls.run()
    assert upload.dtype == torch.bfloat16 and plain(upload).tolist() == [1.5, 2.5]


@pytest.mark.parametrize("first", [True, False])
def test_buffers_serve_inference_mode_and_others(first):
    calls = Delayed()
    transfer = StreamTransfer(torch.device("cuda"), calls)
    for inference in (first, not first, first):
        with torch.inference_mode(inference):
            for number in range(3):
                upload = transfer.upload("obs", torch.full((4, 3), float(number)), torch.float32)
                calls.run()
                assert plain(upload).unique().tolist() == [number]
    assert calls.num_pinned == 2


def test_pinned_memory_is_on_the_cpu_whatever_the_default_device():
    streams = Streams(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.device("meta"):  # as by `torch.set_default_device`
        if torch.cuda.is_available():
            assert streams.pinned((2,), torch.float32).is_pinned()
        else:
            with pytest.raises(RuntimeError):  # without a GPU there is none
                streams.pinned((2,), torch.float32)


def test_tensors_of_the_cpu_are_not_downloaded():
    calls = Delayed()
    transfer = StreamTransfer(torch.device("cuda"), calls)
    here = torch.ones(2)
    copies, event = transfer.download([here])
    assert copies[0] is here and event is None
    copies, event = transfer.download([here, torch.ones(2).as_subclass(OnDevice)])
    assert copies[0] is here and copies[1].tolist() == [99, 99]
    event.synchronize()
    assert copies[1].tolist() == [1, 1]


def cartpoles(**kwargs):
    return [lambda: gym.make("CartPole-v1", max_episode_steps=7)] * 4, {"num_workers": 2, **kwargs}


def test_blocking_steps_are_those_of_numpy(delayed):
    factories, kwargs = cartpoles(autoreset_mode="SameStep")
    with (
        aioenv.sync.VectorEnv(factories, **kwargs) as numpys,
        adapter.TorchVectorEnv(aioenv.sync.VectorEnv(factories, **kwargs), "cuda") as envs,
    ):
        expected, (obs, _) = numpys.reset(seed=3)[0], envs.reset(seed=3)
        results = [(expected, obs)]
        for t in range(20):
            actions = np.full(4, t % 2)
            ours = envs.step(torch.from_numpy(actions).as_subclass(OnDevice))
            theirs = numpys.step(actions)
            results += list(zip(theirs[:4], ours[:4], strict=True))
            if "final_obs" in theirs.info:
                rows = theirs.info["_final_obs"]
                whole = theirs.obs.copy()
                whole[rows] = np.stack(theirs.info["final_obs"][rows])
                results.append((whole, ours.info["final_obs"]))
        delayed.run()
        for theirs, ours in results:
            assert isinstance(ours, OnDevice)
            assert np.array_equal(plain(ours).numpy(), theirs)
        assert len(results) > 81


def test_other_tasks_run_while_actions_are_on_their_way(delayed):
    factories, kwargs = cartpoles()

    async def main():
        async with adapter.TorchVectorEnv(aioenv.AsyncVectorEnv(factories, **kwargs), "cuda") as envs:
            await envs.reset(seed=0)
            delayed.run()
            for _ in range(9):  # copies before ours on the device
                delayed.download(torch.ones(1))
            actions = torch.zeros(4, dtype=torch.int64).as_subclass(OnDevice)
            step = asyncio.ensure_future(envs.step(actions))
            await asyncio.sleep(0)
            assert delayed.queue  # the loop goes on
            step.cancel()  # nothing was sent, so nothing is to be received
            await asyncio.wait([step])
            assert step.cancelled() and not envs.outstanding
            result = await envs.step(actions)
            delayed.run()
            return plain(result.obs)

    got = aioenv.run(main())
    with aioenv.sync.VectorEnv(factories, **kwargs) as numpys:
        numpys.reset(seed=0)
        assert np.array_equal(got.numpy(), numpys.step(np.zeros(4, int)).obs)


def test_a_policy_on_the_device_serves_numpys_loops(delayed):
    factories, kwargs = cartpoles()

    def policy(obs):
        delayed.run()  # as a kernel on the device waits for its upload
        assert isinstance(obs, OnDevice)
        actions = (plain(obs)[:, 2] > 0).long()
        return actions.as_subclass(OnDevice), {"value": plain(obs)[:, 0].as_subclass(OnDevice)}

    async def main():
        async with adapter.TorchVectorEnv(aioenv.AsyncVectorEnv(factories, **kwargs), "cuda") as envs:
            await envs.reset(seed=0)
            return await envs.envs.rollout(envs.numpy_policy(policy), 12)

    rollout = aioenv.run(main())
    assert np.array_equal(rollout.actions, rollout.obs[..., 2] > 0)
    assert np.array_equal(rollout.extras["value"], rollout.obs[..., 0])


def test_the_real_calls_run_on_torchs_own_stand_in(monkeypatch):
    """`torch.cpu` has streams and events that do nothing; pinned memory takes a GPU."""
    monkeypatch.setattr(torch_transfer.torch, "get_device_module", lambda device: torch.cpu)
    monkeypatch.setattr(Streams, "pinned", lambda self, shape, dtype: torch.empty(shape, dtype=dtype))
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(stream))
    transfer = StreamTransfer(torch.device("cpu"), Streams(torch.device("cpu")))
    upload = transfer.upload("obs", torch.arange(6.0).reshape(3, 2), torch.float32)
    assert upload.tolist() == [[0, 1], [2, 3], [4, 5]] and len(recorded) == 1
    copies, event = transfer.download([torch.ones(3).as_subclass(OnDevice)])
    event.synchronize()
    assert event.query() and copies[0].tolist() == [1, 1, 1]
