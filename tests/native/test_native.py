"""NativeVectorEnv: what it gives, of which slots, and the ways to it."""

from __future__ import annotations

import gc
import logging
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

import aioenv
from aioenv import sync
from aioenv.ipc.messages import dump, load
from aioenv.native import cartpole as cartpole_module
from aioenv.spaces.infos import SchemaTable, merge_infos
from aioenv.worker.vector_service import InfoPacker
from tests.kits.compare import assert_same
from tests.kits.native_kit import HERE, OK, Batch, cartpole, everywhere, here
from tests.kits.version_kit import needs_gymnasium
from tests.kits.zoo import SPACES, Sampler

pytestmark = pytest.mark.asyncio

# ---------------------------------------------------------------- results


@pytest.mark.parametrize("where", [{}, *HERE, {"num_workers": 2}], ids=str)
async def test_the_same_as_the_vector_env_itself(where):
    shares = 2 if where.get("num_workers") == 2 else 1
    direct = [cartpole(6 // shares) for _ in range(shares)]
    async with aioenv.NativeVectorEnv(cartpole, 6, **where) as envs:
        assert envs.autoreset_mode is AutoresetMode.NEXT_STEP and envs.single_action_space == spaces.Discrete(2)
        obs, info = await envs.reset(seed=3)
        expected = [env.reset(seed=3 + i * 6 // shares)[0] for i, env in enumerate(direct)]
        assert info == {} and obs.dtype == np.float32 and obs.tobytes() == np.concatenate(expected).tobytes()
        envs.action_space.seed(3)
        ends = 0
        for _ in range(80):
            actions = envs.action_space.sample()
            result = await envs.step(actions)
            parts = [env.step(a) for env, a in zip(direct, np.split(actions, shares), strict=True)]
            obs, reward, *flags = (np.concatenate(columns) for columns in list(zip(*parts, strict=True))[:4])
            assert result.obs.tobytes() == obs.tobytes() and result.info == {}
            assert result.reward.dtype == np.float64 and result.reward.tolist() == reward.tolist()
            assert_same(list(result[2:4]), flags)
            ends += int(result.terminated.sum())
        assert ends


class Steady(Sampler):
    """Keeps the types of its infos: where they change, each share's first value decides, as it does in Gymnasium."""

    def _info(self, action):
        info = super()._info(action)
        del info["int_or_float"]
        return info


@pytest.mark.parametrize(
    ("space", "where"),
    [
        ("box", HERE[1]),
        ("nested", HERE[1]),
        ("graph", HERE[1]),
        # with text, whose letters depend on the hash seed of a process before
        pytest.param("nested", {"num_workers": 2}, marks=needs_gymnasium("1.4")),
    ],
    ids=str,
)
async def test_every_sort_of_space_and_info(space, where):
    assert space in SPACES
    make = partial(Steady, space, space)
    direct = SyncVectorEnv([make] * 4, autoreset_mode=AutoresetMode.SAME_STEP)

    def synced(num_envs):
        return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    async with aioenv.NativeVectorEnv(synced, 4, **where) as envs:
        assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        direct.action_space.seed(5)
        assert_same(tuple(await envs.reset(seed=5)), direct.reset(seed=5))
        for _ in range(12):
            actions = direct.action_space.sample()
            assert_same(tuple(await envs.step(actions)), direct.step(actions))
    direct.close()


async def test_infos_come_apart_and_together_again():
    n = 4
    some, all_ = np.array([True, False, True, False]), np.ones(n, np.bool_)
    infos = [
        {"x": np.arange(4.0), "_x": some, "deep": {"y": np.arange(8).reshape(4, 2), "_y": some}, "_deep": some},
        {
            "final_obs": np.array([None, np.ones(2), None, "z"], object),
            "_final_obs": some,
            "n": np.arange(4),
            "_n": all_,
        },
        {"n": np.arange(4), "_n": ~some, "m": np.arange(4).astype("M8[s]"), "_m": all_},
    ]
    packer, table = InfoPacker(n), SchemaTable({})
    for info in [*infos, *infos]:
        for value in (info, *filter(lambda v: isinstance(v, dict), info.values())):
            for key in [k for k in value if not k.startswith("_") and isinstance(value[k], np.ndarray)]:
                value[key][~value[f"_{key}"]] = None if value[key].dtype == object else 0
        groups = load(dump(packer.pack(info, range(n))))
        table.update(packer.take_new_schemas())
        counts = [n if group.rows is None else len(group.rows) for group in groups]
        columns = [
            table.unpack(g, slice(0, n) if g.rows is None else np.array(g.rows), count)
            for g, count in zip(groups, counts, strict=True)
        ]
        assert_same(merge_infos(columns, n), info)
    assert packer.take_new_schemas() == []
    (group,) = packer.pack({"speed": 2.5, "who": "all"}, [1])
    assert group.rows == (1,) and np.frombuffer(group.data) == 2.5 and group.objects == [["all"]]
    # shares that disagree about a type are merged by Gymnasium's own code
    halves = [InfoPacker(2), InfoPacker(2)]
    columns = []
    for half, info in enumerate(({"x": np.array([1, 2])}, {"x": np.array([1.5, 2.5])})):
        (group,) = halves[half].pack({**info, "flag": np.array([True, False])}, range(2))
        table = SchemaTable({})
        table.update(halves[half].take_new_schemas())
        columns.append(table.unpack(group, slice(2 * half, 2 * half + 2), 2))
    merged = merge_infos(columns, 4)
    assert merged["x"].tolist() == [1, 2, 1, 2] and merged["flag"].dtype == np.bool_


@here
async def test_results_are_yours(where):
    for width in (2, 40_000):
        async with aioenv.NativeVectorEnv(partial(Batch, width=width), 3, **where) as envs:
            first = await envs.reset()
            second = await envs.step(OK)
            env = envs._inprocess._env.env
            for array in (first.obs, second.obs, second.info["buffer"], second.terminated):
                assert not np.shares_memory(array, env.obs) and not np.shares_memory(array, env.flags)
            await envs.step(OK)
            assert first.obs.max() == 0 and second.obs.min() == second.obs.max() == 1


async def test_what_an_env_has_let_go_of_is_not_copied():
    given = []

    class Fresh(Batch):
        def give(self):
            array = self.obs.copy()
            given.append(array.ctypes.data)
            return array[:] if self.level == 8 else array  # a view is never its holder's alone

    async with aioenv.NativeVectorEnv(partial(Fresh, width=40_000), 3, run_in="inline") as envs:
        await envs.reset()
        assert (await envs.step(OK)).obs.ctypes.data == given[-1]
        await envs.set_attr("level", 8)
        assert (await envs.step(OK)).obs.ctypes.data != given[-1]


async def test_without_copies_results_are_the_envs():
    async with aioenv.NativeVectorEnv(Batch, 3, run_in="inline", copy=False) as envs:
        await envs.reset()
        assert (await envs.step(OK)).obs is envs._inprocess._env.env.obs
        envs.send(OK)
        own = (await envs.recv()).obs
        assert not np.shares_memory(own, envs._inprocess._env.env.obs), "recv always gives what is yours"


@pytest.mark.parametrize("kwargs", [{}, {"sutton_barto_reward": True}, {"max_episode_steps": 7}], ids=str)
async def test_our_cartpole_is_gymnasiums(kwargs):
    ours, theirs = (kind(9, **kwargs) for kind in (cartpole_module.CartPoleVectorEnv, CartPoleVectorEnv))
    ours.action_space.seed(1)
    for env in (ours, theirs):
        env.reset(seed=1)
    for step in range(400):
        if step == 200:
            for env in (ours, theirs):
                env.gravity, env.x_threshold, env.tau = 20.0, 0.3, 0.01
        if step == 300:
            for env in (ours, theirs):
                env.kinematics_integrator = "semi-implicit"
        actions = ours.action_space.sample()
        assert_same(ours.step(actions), theirs.step(actions))
        assert_same([ours.state, ours.steps, ours.prev_done], [theirs.state, theirs.steps, theirs.prev_done])
    for wrong in (np.full(9, 2), np.full(9, -1), np.zeros(8, int), np.zeros(9)):
        if wrong.dtype.kind == "f" and theirs.action_space.contains(wrong):
            continue  # in older versions
        with pytest.raises(AssertionError):
            ours.step(wrong)
    async with aioenv.make_vec("CartPole-v1", 9, backend="native", **kwargs) as envs:
        assert type(envs._inprocess._env.env) is cartpole_module.CartPoleVectorEnv and envs.spec.id == "CartPole-v1"


# ---------------------------------------------------------------- some slots, calls


def synced(num_envs):
    return SyncVectorEnv([partial(gym.make, "CartPole-v1")] * num_envs, autoreset_mode=AutoresetMode.DISABLED)


@pytest.mark.parametrize("where", [*HERE, {"num_workers": 2}], ids=str)
async def test_masks(where):
    direct = synced(4)
    async with aioenv.NativeVectorEnv(synced, 4, **where) as envs:
        for seed in (1, [5, 3, None, 4]):
            if seed == 1:
                assert_same(tuple(await envs.reset(seed=seed)), direct.reset(seed=seed))
            mask = np.array([True, False, False, False])
            options = {"reset_mask": mask}
            mine = await envs.reset(seed=seed, options=options)
            assert_same(mine.obs, direct.reset(seed=seed, options={"reset_mask": mask})[0])
            assert options == {"reset_mask": mask}, "the caller's dict stays as it is"
        envs.send_reset([3, 1], seed=[8, 9])
        ready = await envs.recv(2)
        expected, _ = direct.reset(seed=[None, 9, None, 8], options={"reset_mask": np.array([0, 1, 0, 1], bool)})
        assert ready.slots.tolist() == [1, 3] and ready.obs.tobytes() == expected[[1, 3]].tobytes()
        envs.send_reset([2], seed=1)
        envs.send_reset([0], seed=1)
        both = await envs.recv(2)
        expected, _ = direct.reset(seed=1, options={"reset_mask": np.array([1, 0, 1, 0], bool)})
        assert both.slots.tolist() == [0, 2] and both.obs.tobytes() == expected[[0, 2]].tobytes()
    direct.close()
    async with aioenv.NativeVectorEnv(cartpole, 4, **where) as envs:
        await envs.reset(seed=1)
        with pytest.raises(aioenv.EnvError, match="did not look at options"):
            await envs.reset(options={"reset_mask": np.array([True, False, False, False])})
        await envs.reset()


@pytest.mark.parametrize("where", [*HERE, {"num_workers": 1}], ids=str)
async def test_whole_batches_alone_are_sent(where):
    async with aioenv.NativeVectorEnv(Batch, 4, **where) as envs:
        envs.send_reset()
        assert (await envs.recv(4)).reward.tolist() == [0] * 4
        with pytest.raises(ValueError, match="at once"):
            envs.send([0], [1])
        with pytest.raises(aioenv.ActionError):
            envs.send([0, 0, 0, 0.5])
        with pytest.raises(aioenv.NoAsyncCallError):
            await envs.recv()
        envs.send([0, 0, 0, 0], [3, 1, 2, 0])
        with pytest.raises(aioenv.PendingCallError):
            envs.send([0, 0, 0, 0])
        first = await envs.recv(max_slots=3)
        assert first.slots.tolist() == [0, 1, 2] and first.obs.shape == (3, 2) and first.info["buffer"].shape == (3, 2)
        assert first.reward.tolist() == [1, 1, 1]
        with pytest.raises(aioenv.PendingCallError, match="were not taken"):
            await envs.step([0] * 4)
        assert [ready.slots.tolist() async for ready in envs.ready()] == [[3]]
        assert (await envs.step([0] * 4)).obs.max() == 2
        stats = envs.stats()
        assert stats.env_steps == 8 and stats.env_s > 0


@everywhere
async def test_calls_and_attributes(where):
    async with aioenv.NativeVectorEnv(cartpole, 3, **where) as envs:
        await envs.reset(seed=1)
        assert await envs.get_attr("gravity") == (9.8,) * 3
        await envs.set_attr("gravity", 5.0)
        assert await envs.call_at(1, "gravity") == 5.0
        steps = await envs.get_attr("steps")
        assert len(steps) == 3 and steps[2] == 0, "an array of num_envs has one result a slot"
        with pytest.raises(aioenv.EnvError, match="pass one value"):
            await envs.set_attr("gravity", [1.0, 2.0, 3.0])
        with pytest.raises(ValueError, match="length equal"):
            await envs.set_attr("gravity", [1.0])
        with pytest.raises(aioenv.EnvError, match="alone"):
            await envs.call_at(0, "reset")
        with pytest.raises(aioenv.EnvError, match="no_such_thing"):
            await envs.call("no_such_thing")
        with pytest.raises(aioenv.ResumeError):
            await envs.get_state()
    async with aioenv.NativeVectorEnv(synced, 3, **where) as envs:
        await envs.set_attr("gravity", [1.0, 2.0, 3.0])
        assert await envs.get_attr("gravity") == (1.0, 2.0, 3.0) and await envs.call_at(2, "gravity") == 3.0
        assert (await envs.call_at(1, "reset", seed=4))[0].shape == (4,)


@everywhere
@pytest.mark.parametrize("make", [cartpole, synced])
async def test_the_spaces_of_a_slot_are_those_of_single_envs(where, make):
    async with aioenv.NativeVectorEnv(make, 3, **where) as envs:
        assert await envs.get_attr("action_space") == (envs.single_action_space,) * 3
        assert await envs.call_at(1, "observation_space") == envs.single_observation_space
        assert await envs.call("get_wrapper_attr", "action_space") == (envs.single_action_space,) * 3


@everywhere
async def test_it_is_asked_about_its_stack_as_single_envs_are(where):
    async with aioenv.NativeVectorEnv(cartpole, 3, **where) as envs:
        assert await envs.call("get_wrapper_attr", "gravity") == (9.8,) * 3
        assert await envs.call_at([2], "get_wrapper_attr", "gravity") == (9.8,)
        assert await envs.call("has_wrapper_attr", "close") == (True,) * 3
        assert await envs.call_at(1, "has_wrapper_attr", "no_such_thing") is False
        assert await envs.call("set_wrapper_attr", "gravity", 1.5) == (True,) * 3
        assert await envs.call("set_wrapper_attr", "no_such_thing", 1, force=False) == (False,) * 3
        assert await envs.get_attr("gravity") == (1.5,) * 3
        with pytest.raises(aioenv.EnvError, match="AttributeError"):
            await envs.call("get_wrapper_attr", "no_such_thing")


@pytest.mark.parametrize("num_workers", [None, 2])
async def test_some_slots_of_cartpole(num_workers):
    mask = np.array([True, False, True, False])
    async with aioenv.make_vec("CartPole-v1", 4, backend="native", num_workers=num_workers) as envs:
        with pytest.raises((aioenv.ResetNeededError, aioenv.EnvError), match=r"before calling env\.reset"):
            await envs.step(np.zeros(4, np.int64))
        first, _ = await envs.reset(seed=[3, 4, 5, 6])
        again, _ = await envs.reset(seed=[7, None, 3, None], options={"reset_mask": mask})
        assert (again[[1, 3]] == first[[1, 3]]).all() and (again[2] == first[0]).all() and (again[0] != first[0]).any()
        with pytest.raises(ValueError, match="length must match num_envs=4 but got length=2"):
            await envs.reset(seed=[7, 8], options={"reset_mask": mask})
        envs.send(np.zeros(2, np.int64), [1, 3])
        some = await envs.recv(min_slots=2)
        envs.send(np.zeros(4, np.int64), [0, 1, 2, 3])
        every = await envs.recv(min_slots=4)
        assert some.slots.tolist() == [1, 3] and every.slots.tolist() == [0, 1, 2, 3]
        alone = {slot: CartPoleVectorEnv(1) for slot in range(4)}
        for slot, seed, steps in ((0, 7, 1), (1, 4, 2), (2, 3, 1), (3, 6, 2)):
            alone[slot].reset(seed=seed)
            for _ in range(steps):
                obs, *_ = alone[slot].step(np.zeros(1, np.int64))
            assert (every.obs[slot] == obs[0]).all()


# ---------------------------------------------------------------- the ways to it


async def test_arguments_that_make_no_sense():
    make = partial(aioenv.make_vec, env="CartPole-v1", num_envs=2, backend="native")
    for wrong in (
        {"wrappers": [lambda env: env]},
        {"autoreset_mode": AutoresetMode.DISABLED, "env": CartPoleVectorEnv},
        {"restart": aioenv.RestartPolicy()},
        {"restart": aioenv.RestartPolicy(resume=True)},
        {"cpu_affinity": "spread"},
        {"on_timeout": "kill"},
        {"backend": "threads"},
        {"num_workers": -1},
        {"num_workers": False},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            make(**wrong)
    with pytest.raises(ValueError, match=r'no vector_entry_point.*backend="workers"'):
        aioenv.make_vec("Ant-v4", 2, backend="native")
    with pytest.raises(ValueError, match="run_in"):
        aioenv.NativeVectorEnv(Batch, 2, run_in="somewhere")
    with pytest.raises(ValueError, match="run_in"):
        aioenv.NativeVectorEnv(Batch, 2, run_in="thread", num_workers=1)
    with pytest.raises(ValueError, match="timeout_s"):
        aioenv.NativeVectorEnv(Batch, 2, run_in="inline", timeout_s=1)
    with pytest.raises(ValueError, match="num_envs"):
        aioenv.NativeVectorEnv(Batch, 0)
    with pytest.raises(TypeError, match="not the env itself"):
        aioenv.NativeVectorEnv(Batch(2), 2)


async def test_a_timeout_takes_a_thread():
    async with aioenv.NativeVectorEnv(Batch, 3, run_in="inline") as envs:
        await envs.reset()
        with pytest.raises(ValueError, match='run_in="thread"'):
            await envs.step(OK, timeout_s=1)
        await envs.step(OK)


@pytest.mark.parametrize("num_workers", [None, 2])
async def test_make_vec(num_workers):
    async with aioenv.make_vec(
        "CartPole-v1", 4, backend="native", num_workers=num_workers, sutton_barto_reward=True
    ) as e:
        await e.reset(seed=1)
        assert (await e.step([0, 1, 0, 1])).reward.tolist() == [0.0] * 4 and e.spec.id == "CartPole-v1"
        assert e.runs == ("workers" if num_workers else "thread") and len(e.workers) == (num_workers or 0)
        assert await e.get_attr("max_episode_steps") == (500,) * 4
    async with aioenv.make_vec(Batch, 4, backend="native", width=3) as e:
        assert e.single_observation_space.shape == (3,)


@pytest.mark.parametrize("num_workers", [None, 2])
async def test_blocking(num_workers):
    with sync.make_vec("CartPole-v1", 4, backend="native", num_workers=num_workers) as envs:
        direct = CartPoleVectorEnv(4) if num_workers is None else None
        assert isinstance(envs, VectorEnv) and envs.metadata["autoreset_mode"] is envs.autoreset_mode
        obs, _ = envs.reset(seed=2)
        assert obs.shape == (4, 4)
        if direct is not None:
            assert obs.tobytes() == direct.reset(seed=2)[0].tobytes()
        for _ in range(30):
            result = envs.step([0, 1, 0, 1])
            if direct is not None:
                assert result.obs.tobytes() == direct.step(np.array([0, 1, 0, 1]))[0].tobytes()
        envs.send(np.zeros(4, np.int64))
        assert [ready.slots.tolist() for ready in envs.ready(4)] == [[0, 1, 2, 3]]
        assert envs.get_attr("gravity") == (9.8,) * 4


async def test_a_forgotten_blocking_one_is_closed(caplog):
    with caplog.at_level(logging.WARNING):
        envs = sync.make_vec(Batch, 2, backend="native")
        envs.reset()
        del envs
        gc.collect()
    assert caplog.records == []
