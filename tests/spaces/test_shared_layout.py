"""Arrays in shared memory: which lie there, how long they stay unchanged, and when they are used again."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import resource
import signal
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import aioenv
from aioenv.ipc.memory import SharedMemory, map_shared
from aioenv.process.launch import START_METHODS
from aioenv.spaces.layout import SHARED_BYTES, Layout, choose_shared_layout
from tests.kits.compare import assert_same
from tests.kits.process_kit import run_alone

IMAGE = spaces.Box(0, 255, (40, 30, 3), np.uint8)
ACTIONS = spaces.Dict(picture=spaces.Box(-1, 1, (50, 7), np.float32), button=spaces.Discrete(5))


class Camera(gym.Env):
    """Observes an image that says how many steps it has been, and what the action was."""

    observation_space = spaces.Dict(image=IMAGE, note=spaces.Text(20), small=spaces.Box(-1e9, 1e9, (3,), np.float64))
    action_space = ACTIONS

    def __init__(self, length=5):
        self._length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        self._base = int(self.np_random.integers(200))
        return self._obs(0.0, 0), {"base": self._base}

    def _obs(self, mean, button):
        image = np.full((40, 30, 3), self._base + self._t, np.uint8)
        return {"image": image, "note": f"t{self._t}", "small": np.array([mean, button, self._t], np.float64)}

    def step(self, action):
        self._t += 1
        if action["button"] == 4:
            raise ArithmeticError("four")
        obs = self._obs(float(action["picture"].sum()), int(action["button"]))
        return obs, float(self._t), self._t >= self._length, False, {"t": self._t}


def make(n, **options):
    return aioenv.AsyncVectorEnv([Camera] * n, transport="shared", **options)


def mapped():
    return "memfd:aioenv" in Path("/proc/self/maps").read_text()


def batches(n, count, seed=0):
    space = gym.vector.utils.batch_space(ACTIONS, n)
    space.seed(seed)
    actions = [space.sample() for _ in range(count)]
    for action in actions:
        action["button"] %= 4
    return actions


def test_what_is_large_is_shared():
    observations, actions = Layout(Camera.observation_space), Layout(ACTIONS)
    per_env = 40 * 30 * 3
    enough = -(-SHARED_BYTES // per_env)
    layout = choose_shared_layout("auto", observations, actions, 2 * enough, 2, 5)
    assert [observations.leaves[i].path for i in layout.observations] == ["['image']"]
    assert choose_shared_layout("auto", observations, actions, 2 * (enough - 1), 2, 5) is None, "less for each worker"
    assert choose_shared_layout("frames", observations, actions, 999, 1, 5) is None
    everything = choose_shared_layout("shared", observations, actions, 1, 1, 5)
    assert len(everything.observations) == 2 and len(everything.actions) == 2


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.asyncio
async def test_everything_as_in_gymnasium(mode, copy):
    reference = SyncVectorEnv([Camera] * 5, autoreset_mode=mode)
    async with make(5, num_workers=2, autoreset_mode=mode, copy=copy) as envs:
        assert_same(tuple(await envs.reset(seed=1)), reference.reset(seed=1), "reset")
        for number, actions in enumerate(batches(5, 12)):
            if mode == "Disabled" and number and number % 5 == 0:
                mask = np.ones(5, np.bool_)
                assert_same(
                    tuple(await envs.reset(options={"reset_mask": mask})),
                    reference.reset(options={"reset_mask": mask}),
                    "mask",
                )
            assert_same(tuple(await envs.step(actions)), reference.step(actions), f"step {number}")
    reference.close()


@pytest.mark.asyncio
async def test_a_masked_reset_shows_the_others_as_they_were():
    async with make(4, num_workers=2) as envs:
        await envs.reset(seed=0)
        actions = batches(4, 3)
        kept = [await envs.step(a) for a in actions]
        mask = np.array([True, False, False, True])
        obs, _ = await envs.reset(options={"reset_mask": mask}, seed=7)
        assert obs["note"] == ("t0", "t3", "t3", "t0")
        assert (obs["image"][1:3] == kept[-1].obs["image"][1:3]).all()
        assert (obs["small"][:, 2] == [0, 3, 3, 0]).all()


@pytest.mark.asyncio
async def test_kept_results_stay_unchanged():
    """More batches than there are shared batches; and of some just a view."""
    async with make(3, num_workers=2) as envs:
        await envs.reset(seed=0)
        kept, copies = [], []
        for number, actions in enumerate(batches(3, 12)):
            obs, reward, *_ = await envs.step(actions)
            view = obs["image"][1, 5:, ::2] if number % 2 else obs["image"]
            kept.append((view, obs["small"], reward))
            copies.append((view.copy(), obs["small"].copy(), reward.copy()))
            del obs, view, reward
        for mine, theirs in zip(kept, copies, strict=True):
            assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))


@pytest.mark.asyncio
async def test_memory_is_used_again_once_it_is_released():
    async with make(3) as envs:
        await envs.reset(seed=0)
        addresses = set()
        for actions in batches(3, 20):
            obs, *_ = await envs.step(actions)
            addresses.add(obs["image"].ctypes.data)
        assert len(addresses) <= 4


@pytest.mark.asyncio
async def test_an_array_outlives_the_envs():
    async with make(3) as envs:
        await envs.reset(seed=0)
        obs, *_ = await envs.step(batches(3, 1)[0])
        image = obs["image"]
        expected = image.copy()
        del obs
    gc.collect()
    assert (image == expected).all()
    image[:] = 0  # it is ours to write
    del image, envs
    gc.collect()
    assert not mapped()


@pytest.mark.asyncio
async def test_send_and_recv_of_some_slots_share_too():
    reference = [Camera() for _ in range(5)]
    for slot, env in enumerate(reference):
        env.reset(seed=slot)
    actions = batches(5, 3)
    async with make(5, num_workers=2) as envs:
        await envs.reset(seed=0)
        for batch, slots in zip(actions, ([4, 0], [1, 2, 3], [3, 1, 0]), strict=True):
            given = {key: value[: len(slots)] for key, value in batch.items()}
            envs.send(given, slots)
            ready = await envs.recv(len(slots))
            assert ready.slots.tolist() == sorted(slots)
            for index, slot in enumerate(ready.slots.tolist()):
                at = slots.index(slot)
                obs, reward, *_ = reference[slot].step({key: value[at] for key, value in given.items()})
                assert (ready.obs["image"][index] == obs["image"]).all()
                assert (ready.obs["small"][index] == obs["small"]).all()
                assert ready.reward[index] == reward


@pytest.mark.asyncio
async def test_a_cancelled_step_is_not_overwritten():
    async with make(2, num_workers=2) as envs:
        await envs.reset(seed=0)
        step = asyncio.ensure_future(envs.step(batches(2, 1)[0]))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        late = await envs.recv(2)
        assert (late.obs["small"][:, 2] == 1).all()
        obs, *_ = await envs.step(batches(2, 1)[0])
        assert (obs["small"][:, 2] == 2).all() and (late.obs["small"][:, 2] == 1).all()


@pytest.mark.asyncio
async def test_a_failed_row_spoils_no_other():
    async with make(3, num_workers=2) as envs:
        await envs.reset(seed=0)
        good, bad = batches(3, 2)
        first = await envs.step(good)
        bad["button"] = np.array([0, 4, 0])
        with pytest.raises(aioenv.EnvError, match="four") as caught:
            await envs.step(bad)
        assert caught.value.slots == (1,)
        partial = caught.value.partial
        assert partial.obs["small"][:, 2].tolist() == [2, 1, 2]
        assert (partial.obs["image"][0] == first.obs["image"][0] + 1).all()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.asyncio
async def test_a_worker_that_is_started_again_shares_again(resume):
    make_env = functools.partial(gym.make, "InvertedPendulum-v5")
    policy = aioenv.RestartPolicy(resume=resume)
    async with aioenv.AsyncVectorEnv([make_env] * 4, num_workers=2, transport="shared", restart=policy) as envs:
        async with aioenv.AsyncVectorEnv([make_env] * 4, num_workers=2, transport="frames") as twin:
            await envs.reset(seed=0)
            await twin.reset(seed=0)
            rng = np.random.default_rng(0)
            for number in range(30):
                actions = rng.uniform(-0.1, 0.1, (4, 1)).astype(np.float32)
                if number == 10:
                    os.kill(envs.workers[1].pid, signal.SIGKILL)
                mine, theirs = await envs.step(actions), await twin.step(actions)
                slots = slice(0, 4) if resume else slice(0, 2)
                assert (mine.obs[slots] == theirs.obs[slots]).all()
                assert (mine.reward[slots] == theirs.reward[slots]).all()


@pytest.mark.asyncio
async def test_debug_mode_finds_results_that_are_kept_too_long():
    asyncio.get_running_loop().set_debug(True)
    try:
        async with make(2, copy=False) as envs:
            await envs.reset(seed=0)
            actions = batches(2, 1)[0]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for _ in range(4):
                    obs, *_ = await envs.step(actions)  # the usual loop: the last result alone is held
            kept = [obs["image"][0]]
            await envs.step(actions)
            with pytest.warns(aioenv.StaleViewWarning, match="copy=False") as told:
                await envs.step(actions)
            assert told[0].filename == __file__  # or it would be shown once only, and filters could not tell who it is
            del kept
    finally:
        asyncio.get_running_loop().set_debug(False)


@pytest.mark.asyncio
async def test_no_memory_is_left_if_the_start_fails():
    def broken():
        raise RuntimeError("no such luck")

    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(aioenv.WorkerStartError):
        await aioenv.AsyncVectorEnv([Camera, broken], transport="shared")
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.asyncio
@pytest.mark.parametrize("start", START_METHODS)
@pytest.mark.parametrize("size", [0, 1 << 16])
async def test_where_files_may_not_be_large_frames_carry_what_is(size, start):
    """Memory without a name is a file to the kernel (`ulimit -f`)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        async with aioenv.AsyncVectorEnv([Camera] * 12, num_workers=1, start=start) as envs:
            obs, _ = await envs.reset(seed=0)
            assert obs["image"].shape == (12, 40, 30, 3)
        with pytest.raises(aioenv.WorkerStartError, match=r'transport="shared": .*File too large'):
            await make(12, num_workers=1, start=start)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("start", START_METHODS)
def test_a_sandbox_that_denies_memory_without_a_name(start):
    code = """
        import os, sys
        from aioenv import sync

        def deny(*args):
            raise PermissionError("not in here")

        os.memfd_create = deny
        with sync.make_vec("CartPole-v1", 2, start=sys.argv[1]) as envs:
            envs.reset(seed=0)
    """
    run_alone(code, start)


def test_an_unknown_transport():
    with pytest.raises(ValueError, match="transport: expected 'auto', 'frames' or 'shared', got 'pigeon'"):
        aioenv.AsyncVectorEnv([Camera], transport="pigeon")


def test_memory_that_grows_goes_back_part_by_part_and_not_with_a_fork_of_its_owner():
    size = 1 << 16
    shared = SharedMemory.create()
    assert shared is not None
    (_, first), (offset, second) = (shared.extend(size) for _ in range(2))
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in (first, second)]
    del first, second
    for number, array in enumerate(arrays):
        array[:] = number + 1
    del array
    there = np.frombuffer(map_shared(shared.fd, size, offset), np.uint8)
    pid = os.fork()
    if pid == 0:
        arrays.clear()  # a copy of the owner has nothing to give back
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (arrays[0] == 1).all() and (there == 2).all()
    assert os.fstat(shared.fd).st_blocks * 512 == 2 * size
    del arrays[1]
    assert os.fstat(shared.fd).st_blocks * 512 == size and not there.any()
    with pytest.raises(PermissionError):
        os.ftruncate(shared.fd, size)
    shared.close()
    assert (arrays[0] == 1).all()
