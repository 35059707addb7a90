"""Plain steps whose observations lie in shared memory take the C path in the worker, in the parent, and in between."""

from __future__ import annotations

import struct
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.messages import StepRequest, dump_step
from aioenv.spaces.layout import SHARED_BYTES, Layout, SharedLayout
from aioenv.worker import env_service
from aioenv.worker.service import PartialStep
from tests.kits.compare import assert_same
from tests.kits.worker_kit import GENERATION, Desk, all_in_python, compiled, plain
from tests.speedups.parent_kit import outcomes

ROWS, BATCHES = 4, 3
WIDE = spaces.Box(-1e6, 1e6, (SHARED_BYTES // 4 // 2,), np.float32)  # two of them are enough to be shared


class Wide(gym.Env[Any, Any]):
    """Says who it is, how many steps it has been, and who calls it; now and then something odd.

    Args:
        who: itself.
        odd: raises in every such step, and observes a list in the one after; 0: never.
    """

    observation_space, action_space = WIDE, spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, who: int = 0, odd: int = 0) -> None:
        self.who, self.odd, self.t = who, odd, 0

    def _observation(self) -> Any:
        return np.full(WIDE.shape, 100 * self.who + self.t, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.odd and self.t % self.odd == 0:
            raise LookupError("odd")
        obs = self._observation()
        if self.odd and self.t % self.odd == 1 and self.t > 1:
            obs = obs.tolist()
        caller = sys._getframe(1).f_code.co_name
        return obs, float(action.sum()), (self.t + self.who) % 7 == 0, False, {"t": self.t, "by_c": caller == "_serve"}


def make(n: int, odd: int = 0, **options: Any) -> aioenv.AsyncVectorEnv:
    return aioenv.AsyncVectorEnv([lambda i=i: Wide(i, odd) for i in range(n)], num_workers=n // 2, **options)


# ------------------------------------------------------------ the worker


def worker_with_batches(monkeypatch: pytest.MonkeyPatch, odd: int = 0) -> tuple[Desk, list[Any]]:
    """A worker whose slots are the middle ones of some, and the observations in each batch."""
    shared_layout = SharedLayout(ROWS + 3, BATCHES, (0,), ())
    layouts = Layout(WIDE), Layout(Wide.action_space)
    memory = bytearray(shared_layout.size(*layouts))
    monkeypatch.setattr(env_service, "map_memory", lambda size: memory)
    desk = Desk(lambda row: Wide(row, odd), ROWS)
    desk.service.configure(None, None, 0, False, shared_layout=shared_layout, start=2)
    desk.service.handle(Frame(Kind.RESET, 0, GENERATION, (b"\0",), memoryview(desk.reset())))
    return desk, [batch.observations[0] for batch in shared_layout.batches(memory, *layouts)]


def fixed(batch: int, count: int = ROWS) -> list[bytes]:
    return [bytes([batch]), np.full((count, 2), 0.5, np.float32).tobytes()]


@compiled
def test_c_writes_observations_into_the_named_shared_batch(monkeypatch):
    desk, batches = worker_with_batches(monkeypatch)
    expected = [array.copy() for array in batches]
    with desk:
        for n in range(1, 20):
            batch = n * n % BATCHES
            desk.mine.sendall(desk.encode(fixed=fixed(batch)))
            if n < 3:  # infos and ends are new
                got = desk.serve()
                reply = desk.take() if got == -1 else desk.service.handle(PartialStep.from_tuple(got))
            else:
                assert desk.serve() == -1
                reply = desk.take()
            assert sum(len(bytes(part)) for part in reply.fixed) == ROWS * 10, "rewards and flags alone travel"
            for row in range(ROWS):
                expected[batch][2 + row] = desk.service._rows._last[row]
            assert all((array == wanted).all() for array, wanted in zip(batches, expected, strict=True))


@compiled
def test_some_rows_are_stepped_in_a_shared_batch_as_in_python(monkeypatch):
    runs = [(0, 4), (1, 2), (3, 1), (0, 2), (2, 2), (0, 3), (1, 3), (0, 4)] * 3
    seen: list[Any] = []
    for way in (None, all_in_python):
        with monkeypatch.context() as patch:
            if way is not None:
                way(patch)
            desk, batches = worker_with_batches(patch)
            said: list[Any] = []
            with desk:
                for n, (first, count) in enumerate(runs):
                    payload = b"" if count == ROWS else dump_step(StepRequest(range(first, first + count), None))
                    data = desk.encode(fixed=fixed(n % BATCHES, count), payload=payload)
                    if way is None:
                        desk.mine.sendall(data)
                        got = desk.serve()
                        assert n < 10 or got == -1
                        reply = desk.take() if got == -1 else desk.service.handle(PartialStep.from_tuple(got))
                    else:
                        desk.its_decoder.feed(data)
                        reply = desk.service.handle(desk.its_decoder.next_frame())  # type: ignore[arg-type]
                    body = plain(Frame(Kind.RESULT, 0, 0, reply.fixed, memoryview(bytes(reply.payload))))
                    said.append((body, [array.copy() for array in batches]))
            seen.append(said)
    np.testing.assert_equal(*[[(body[2], arrays) for body, arrays in said] for said in seen])


@compiled
def test_a_request_that_names_no_shared_batch_or_is_too_short_is_left_to_python(monkeypatch):
    desk, batches = worker_with_batches(monkeypatch)
    before = [array.copy() for array in batches]
    with desk:
        run = struct.pack("<cII", b"R", 1, 2)
        for given, payload in (
            (fixed(BATCHES), b""),
            (fixed(255), b""),
            (fixed(BATCHES, 2), run),
            ([], run),
            ([b"\1"], run),
            (fixed(1, 1), run),
            (fixed(1, 3), run),
            ([b"\1", bytes(15)], run),
            (fixed(1)[1:], b""),
        ):
            data = desk.encode(fixed=given, payload=payload)
            desk.mine.sendall(data)
            assert desk.serve() == len(data)
            desk.encoder, desk.its_encoder = type(desk.encoder)(), type(desk.encoder)()  # Python would go on
            desk.its_decoder = type(desk.its_decoder)(desk.service.request_buffers, desk.service.expected_buffers)
    assert all((array == was).all() for array, was in zip(batches, before, strict=True))


@compiled
def test_a_step_that_c_hands_over_goes_on_in_its_shared_batch(monkeypatch):
    desk, batches = worker_with_batches(monkeypatch, odd=5)
    with desk:
        for n in range(1, 25):
            batch = n % BATCHES
            desk.mine.sendall(desk.encode(fixed=fixed(batch)))
            if desk.service.fast_path() is None:  # a list is probably one each time
                assert n > 5
                desk.its_decoder.feed(desk.theirs.recv(1 << 16))
                desk.service.handle(desk.its_decoder.next_frame())  # type: ignore[arg-type]
            elif isinstance(got := desk.serve(), tuple):
                assert PartialStep.from_tuple(got).batch == batch
                desk.service.handle(PartialStep.from_tuple(got))
            else:
                desk.take()
            latest = np.array(desk.service._rows._last, np.float32)
            assert (batches[batch][2 : 2 + ROWS] == latest).all()


# ------------------------------------------------------------ both sides


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "views"])
@pytest.mark.parametrize("kept", [1, 7])
async def test_wide_observations_go_all_their_way_in_c(monkeypatch, mode, copy, kept):
    taken = outcomes(monkeypatch, "take_replies")
    reference = SyncVectorEnv([lambda i=i: Wide(i) for i in range(4)], autoreset_mode=mode)
    held: list[Any] = []
    by_c = 0
    async with make(4, autoreset_mode=mode, copy=copy) as envs:
        reference.reset(seed=0)
        await envs.reset(seed=0)
        for n in range(40):
            action = np.full((4, 2), n / 40, np.float32)
            mine, theirs = await envs.step(action), reference.step(action)
            info, other = mine.info, theirs[4]
            by_c += int(info["by_c"].sum())
            for each in (info, other):
                for key in ("by_c", "final_info"):
                    each.pop(key, None)
            assert_same(tuple(mine), (*theirs[:4], other), f"step {n}")
            held.append((mine.obs, mine.obs.copy()))
            if mode is AutoresetMode.DISABLED and mine.terminated.any():
                mask = mine.terminated.copy()
                first = await envs.reset(options={"reset_mask": mask})
                assert_same(tuple(first), reference.reset(options={"reset_mask": mask}), "reset")
                held.append((first.obs, first.obs.copy()))
            held = held[-kept:]  # more than there are batches: then it is copied out of the first one
            assert all((obs == was).all() for obs, was in (held if copy else held[-2:])), "they stay unchanged"
    assert by_c > 100, "the workers step in C"
    if kept == 1:
        assert taken.count(-1) > 60, "and the parent takes in what they say"
    reference.close()


@compiled
@pytest.mark.asyncio
async def test_groups_of_a_rollout_are_copied_out_of_the_first_shared_batch(monkeypatch):
    taken = outcomes(monkeypatch, "take_replies")
    results = []
    for transport in ("frames", "auto"):
        async with make(8, transport=transport) as envs:
            await envs.reset(seed=0)
            for _ in range(2):  # infos and ends are new to it at first
                del taken[:]
                rollout = await envs.rollout(lambda obs: np.full((len(obs), 2), 0.25, np.float32), 20, groups=2)
            assert transport == "frames" or taken.count(-1) > 5, "unless several come in one read"
            results.append(rollout)
    frames, batches = results
    for name in ("obs", "reward", "terminated", "truncated", "last_obs"):
        np.testing.assert_array_equal(getattr(frames, name), getattr(batches, name))


@pytest.mark.asyncio
async def test_an_error_in_a_shared_batch_is_told_and_the_other_rows_are_there():
    async with make(4, odd=3) as envs:
        await envs.reset(seed=0)
        for n in range(1, 7):
            action = np.zeros((4, 2), np.float32)
            try:
                result = await envs.step(action)
            except aioenv.EnvError as error:
                assert n % 3 == 0 and set(error.slots) >= {0, 1} and "odd" in str(error)
                result = error.partial
                await envs.reset(options={"reset_mask": np.ones(4, np.bool_)})
            else:
                assert n % 3
                assert (result.obs[:2] == [[n], [100 + n]]).all(), "the others begin episodes"
