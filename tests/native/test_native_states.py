"""NativeVectorEnv: states of slots, and workers that are started again."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorWrapper
from gymnasium.wrappers.vector import ClipReward, RecordEpisodeStatistics

import aioenv
from aioenv import sync
from aioenv.ipc.messages import LostRow
from aioenv.worker.vector_recovery import LostEnvReset
from tests.kits.compare import assert_same
from tests.kits.native_kit import Batch, RandomWalk, everywhere

pytestmark = pytest.mark.asyncio

MODES = [pytest.param(mode, id=mode.name) for mode in AutoresetMode]
PLACES = [{"run_in": "inline"}, {"run_in": "thread"}, {"num_workers": 2}]
ENDS = pytest.mark.parametrize("where", [{"run_in": "inline"}, {"num_workers": 1}], ids=str)


def actions(n, steps, seed=0):
    return np.random.default_rng(seed).integers(0, 9, (steps, n))


# ---------------------------------------------------------------- states


@pytest.mark.parametrize("there", PLACES[1:], ids=str)
@pytest.mark.parametrize("here", [PLACES[0], PLACES[-1]], ids=str)
async def test_slots_go_on_elsewhere(here, there, tmp_path):
    async with (
        aioenv.NativeVectorEnv(RandomWalk, 4, **here) as first,
        aioenv.NativeVectorEnv(RandomWalk, 3, **there) as second,
    ):
        await first.reset(seed=1)
        for action in actions(4, 5):
            await first.step(action)
        states = await first.get_state([3, 1, 0])
        assert not any(state.has_pickles for state in states) and states[0].env_id == "RandomWalk"
        aioenv.save(tmp_path / "states", states)
        await second.reset(seed=9)
        await second.set_state(aioenv.load(tmp_path / "states"))
        ends = 0
        for action in actions(4, 20, seed=1):
            expected, result = await first.step(action), await second.step(action[[3, 1, 0]])
            for mine, theirs in zip(result[:4], expected[:4], strict=True):
                assert mine.tobytes() == theirs[[3, 1, 0]].tobytes()
            ends += result.terminated.sum()
        assert ends > 3


@ENDS
async def test_states_that_can_not_be_had_or_set(where):
    class Other(RandomWalk):
        pass

    async with aioenv.NativeVectorEnv(Batch, 3, **where) as envs:
        with pytest.raises(aioenv.ResumeError, match=r'Batch does not tell the states.*backend="workers"'):
            await envs.get_state()
    async with aioenv.NativeVectorEnv(
        lambda num_envs: RecordEpisodeStatistics(RandomWalk(num_envs)), 3, **where
    ) as envs:
        with pytest.raises(aioenv.ResumeError, match="the wrapper RecordEpisodeStatistics may remember"):
            await envs.get_state([1])
    async with aioenv.NativeVectorEnv(Other, 3, **where) as envs:
        await envs.reset(seed=2)
        (odd,) = await envs.get_state([0])
    async with aioenv.NativeVectorEnv(lambda num_envs: ClipReward(RandomWalk(num_envs), -1, 1), 3, **where) as envs:
        await envs.reset(seed=1)
        before = await envs.get_state()
        assert (await envs.step([1, 2, 3])).reward.max() <= 1
        with pytest.raises(aioenv.ResumeError, match=r"slot 1: the state of Other does not fit RandomWalk$"):
            await envs.set_state([before[0], odd], [0, 1])
        after = await envs.get_state()
        assert_same(after[0].arrays, before[0].arrays)
        assert not np.array_equal(after[1].arrays["state/0"], before[1].arrays["state/0"])
        with pytest.raises(ValueError, match="2 states for 3 slots"):
            await envs.set_state(before[:2])


async def test_states_of_single_envs_are_others():
    async with aioenv.make_vec("Hopper-v5", 1) as single, aioenv.NativeVectorEnv(RandomWalk, 1) as envs:
        await single.reset(seed=1)
        await envs.reset(seed=1)
        (theirs,), (ours,) = await single.get_state(), await envs.get_state()
        with pytest.raises(aioenv.ResumeError, match="Hopper-v5 does not fit RandomWalk"):
            await envs.set_state([theirs])
        with pytest.raises(aioenv.ResumeError, match="one of a slot of RandomWalk, a vector env; this is a single env"):
            await single.set_state([aioenv.EnvState("Hopper-v5", ours.values, ours.arrays)])
        with pytest.raises(aioenv.ResumeError, match="is one of a single env; RandomWalk is a vector env"):
            await envs.set_state([aioenv.EnvState("RandomWalk", theirs.values, theirs.arrays)])


class Miscounting(RandomWalk):
    def get_state(self, slots):
        return super().get_state(slots)[1:]

    def set_state(self, states, slots):
        raise ValueError("as it was told")


@ENDS
async def test_states_of_an_env_that_fails(where):
    async with aioenv.NativeVectorEnv(Miscounting, 3, **where) as envs:
        await envs.reset(seed=1)
        with pytest.raises(aioenv.EnvError, match="gave 2 states for 3 slots"):
            await envs.get_state()
        async with aioenv.NativeVectorEnv(RandomWalk, 1) as other:
            await other.reset(seed=1)
            (state,) = await other.get_state()
        alike = aioenv.EnvState("Miscounting", {**state.values, "vector": "Miscounting"}, state.arrays)
        with pytest.raises(aioenv.EnvError, match="as it was told"):
            await envs.set_state([alike], [0])


@everywhere
async def test_a_state_mends_slots_that_have_failed(where):
    async with aioenv.NativeVectorEnv(partial(Failing, fails_at=4), 2, **where) as envs:
        await envs.reset(seed=1)
        await envs.step([0, 0])
        states = await envs.get_state()
        with pytest.raises(aioenv.EnvError, match="as it was told"):
            await envs.step([4, 0])
        with pytest.raises(aioenv.EnvError, match="must be reset"):
            await envs.step([0, 0])
        await envs.set_state(states)
        await envs.step([0, 0])


class Failing(RandomWalk):
    def __init__(self, num_envs, fails_at):
        super().__init__(num_envs)
        self.fails_at = fails_at

    def step(self, actions):
        if (actions == self.fails_at).any():
            raise ValueError("as it was told")
        return super().step(actions)


async def test_a_wrapper_of_ones_own_may_have_the_states():
    class Counting(VectorWrapper):
        def __init__(self, env):
            super().__init__(env)
            self.steps = 0

        def step(self, actions):
            self.steps += 1
            return super().step(actions)

        def get_state(self, slots):
            return [(self.steps, state) for state in self.env.get_state(slots)]

        def set_state(self, states, slots):
            self.steps = states[0][0]
            self.env.set_state([state for _, state in states], slots)

    async with aioenv.NativeVectorEnv(lambda num_envs: Counting(RandomWalk(num_envs)), 2) as envs:
        await envs.reset(seed=1)
        states = await envs.get_state()
        await envs.step([1, 1])
        await envs.set_state(states)
        assert await envs.get_attr("steps") == (0, 0)


async def test_blocking_states():
    with sync.make_vec(RandomWalk, 4, backend="native", num_workers=2) as envs:
        envs.reset(seed=1)
        states = envs.get_state()
        first = envs.step(np.ones(4, np.int64))
        envs.set_state(states[::-1])
        assert_same(envs.step(np.ones(4, np.int64)).obs, first.obs[::-1])


# ---------------------------------------------------------------- workers that are started again


@pytest.mark.parametrize("mode", MODES)
async def test_a_worker_that_died_is_started_again(mode):
    make = partial(RandomWalk, mode=mode)
    restart = aioenv.RestartPolicy()
    async with (
        aioenv.NativeVectorEnv(make, 4, num_workers=2, restart=restart) as envs,
        aioenv.NativeVectorEnv(make, 2, run_in="inline") as rest,
    ):
        assert envs.autoreset_mode is mode
        last, _ = await envs.reset(seed=3)
        await rest.reset(seed=5)
        # no episode has less than three steps
        last, *_ = await envs.step([1, 2, 3, 4])
        await rest.step([3, 4])
        lost = await envs.step([9, 0, 1, 1])
        going_on = await rest.step([1, 1])
        assert lost.truncated.tolist() == [True, True, False, False] and not lost.terminated.any()
        assert lost.info["restarted"].tolist() == [True, True, False, False] == lost.info["_restarted"].tolist()
        assert lost.reward[:2].tolist() == [0, 0] and lost.reward[2:].tolist() == going_on.reward.tolist()
        assert lost.obs[2:].tobytes() == going_on.obs.tobytes()
        if mode is AutoresetMode.SAME_STEP:
            assert [obs.tolist() for obs in lost.info["final_obs"][:2]] == last[:2].tolist()
            assert lost.info["final_info"]["restarted"].tolist() == [True, True, False, False]
            fresh = lost.obs[:2]
        else:
            assert lost.obs[:2].tobytes() == last[:2].tobytes()
            if mode is AutoresetMode.NEXT_STEP:
                begun = await envs.step([1, 1, 1, 1])
                assert begun.reward[:2].tolist() == [0, 0] and begun.reward[2:].all()
                assert not (begun.terminated | begun.truncated)[:2].any() and "restarted" not in begun.info
                fresh = begun.obs[:2]
            else:
                fresh = (await envs.reset(options={"reset_mask": lost.truncated})).obs[:2]
        seed = np.random.SeedSequence([3, 1]).generate_state(1)[0] >> 2
        assert fresh.tobytes() == RandomWalk(2).reset(seed=int(seed))[0].tobytes(), (
            "a run with the same faults is the same"
        )
        after = await envs.step([1, 1, 1, 1])
        assert after.reward.all() and [worker.state for worker in envs.workers] == ["ready"] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("told", [False, True])
async def test_some_of_the_lost_are_reset_by_themselves(mode, told):
    env, twin = RandomWalk(3, mode), RandomWalk(3, mode)
    anew = LostEnvReset(env, [LostRow(row, 7 + row, np.full(2, row, float), row == 2) for row in range(3)])
    assert_same(anew.last_obs, np.array([[0.0, 0], [1, 1], [2, 2]]))
    if told and mode is AutoresetMode.NEXT_STEP:
        obs, _, _, truncated, infos = anew.step(np.ones(3, np.int64))
        assert_same([obs, truncated], [anew_obs(), np.ones(3, np.bool_)])
        assert infos[0][0]["restarted"].all() and not anew.done
    mask = np.array([False, True, False])
    obs, _ = anew.reset([None, 4, None], mask, None)
    twin.reset(seed=7)
    expected, _ = twin.reset(seed=[None, 4, None], options={"reset_mask": mask})
    assert obs[1].tobytes() == expected[1].tobytes() and not anew.done
    walked = twin.step(np.ones(3, np.int64))
    obs, reward, _, truncated, infos = anew.step(np.ones(3, np.int64))
    assert obs[1].tobytes() == walked[0][1].tobytes() and reward[1] == walked[1][1] and not truncated[1]
    if told and mode is AutoresetMode.NEXT_STEP:
        assert not truncated.any() and reward[[0, 2]].tolist() == [0, 0] and anew.done
    else:
        assert truncated.tolist() == [True, False, True]
        ((info, rows),) = [(info, rows) for info, rows in infos if "restarted" in info]
        assert rows == [0, 2]
        assert ("final_obs" in info) is (mode is AutoresetMode.SAME_STEP)
        if mode is not AutoresetMode.SAME_STEP:
            assert_same(obs[[0, 2]], np.array([[0.0, 0], [2, 2]]))
        assert anew.done is (mode is AutoresetMode.SAME_STEP)
    if mode is AutoresetMode.DISABLED:
        assert anew.started.tolist() == [False, True, False]
        anew.reset(None, ~mask, None)
        assert anew.done
    if mode is AutoresetMode.NEXT_STEP and not told:
        obs, reward, _, truncated, _ = anew.step(np.ones(3, np.int64))
        assert anew.done and reward[[0, 2]].tolist() == [0, 0] and reward[1] and not truncated.any()


def anew_obs():
    return np.array([[0.0, 0], [1, 1], [2, 2]])


async def test_a_budget_that_is_spent():
    restart = aioenv.RestartPolicy(max_restarts=1)
    async with aioenv.NativeVectorEnv(RandomWalk, 2, num_workers=1, restart=restart) as envs:
        await envs.reset(seed=1)
        assert (await envs.step([9, 0])).truncated.all()
        await envs.step([0, 0])
        with pytest.raises(aioenv.WorkerDied, match="SIGKILL"):
            await envs.step([9, 0])


async def test_one_that_hangs_is_started_again():
    restart = aioenv.RestartPolicy()

    def make(num_envs):
        return Hanging(num_envs)

    async with aioenv.NativeVectorEnv(
        make, 2, num_workers=1, restart=restart, on_timeout="restart", timeout_s=1.0
    ) as envs:
        await envs.reset(seed=1)
        assert (await envs.step([8, 0])).truncated.all()
        await envs.step([0, 0])


class Hanging(RandomWalk):
    def step(self, actions):
        while (actions == 8).any():
            pass
        return super().step(actions)


async def test_a_state_ends_what_was_lost():
    async with aioenv.NativeVectorEnv(RandomWalk, 2, num_workers=1, restart=aioenv.RestartPolicy()) as envs:
        await envs.reset(seed=1)
        states = await envs.get_state()
        envs.send([9, 0])
        assert (await envs.recv(2)).truncated.all()
        await envs.set_state(states)
        assert (await envs.step([1, 1])).reward.all()


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
async def test_a_state_of_one_slot_leaves_the_others_the_seed_of_the_restart(mode, refused):
    restart, derived = aioenv.RestartPolicy(), int(np.random.SeedSequence([3, 1]).generate_state(1)[0]) >> 2
    twin, second = RandomWalk(2, mode), np.array([False, True])
    async with (
        aioenv.NativeVectorEnv(partial(RandomWalk, mode=mode), 2, num_workers=1, restart=restart) as envs,
        aioenv.NativeVectorEnv(Odd, 1, run_in="inline") as others,
    ):
        await envs.reset(seed=3)
        await others.reset(seed=3)
        state, *_ = await (others if refused else envs).get_state([0])
        assert (await envs.step([9, 0])).truncated.all()
        expected = twin.reset(seed=derived)[0]
        if refused:
            with pytest.raises(aioenv.ResumeError, match="does not fit"):
                await envs.set_state([state], [0])
        else:
            await envs.set_state([state], [0])
            if mode is AutoresetMode.NEXT_STEP:  # the other slot is stepped along before it is reset
                twin.step(np.ones(2, np.int64))
            expected = twin.reset(options={"reset_mask": second})[0]
        if mode is AutoresetMode.NEXT_STEP:
            obs = (await envs.step([1, 1])).obs
        else:
            obs = (await envs.reset(options={"reset_mask": second | refused})).obs
        assert obs[1].tolist() == expected[1].tolist(), "a run with the same faults is the same"


class Odd(RandomWalk):
    pass


async def test_what_can_not_be_started_again():
    restart = aioenv.RestartPolicy()
    with pytest.raises(ValueError, match=r"restart: .*num_workers=1"):
        aioenv.NativeVectorEnv(RandomWalk, 2, restart=restart)


@pytest.mark.parametrize("where", [{}, {"num_workers": 2}, {"backend": "workers"}], ids=str)
async def test_a_slot_that_is_not_stepped_shows_its_last_observation_whatever_state_it_was_put_into(where):
    async with aioenv.make_vec("Hopper-v5", 3, **{"backend": "native", **where}) as envs:
        await envs.reset(seed=0)
        states = await envs.get_state([0])
        nothing = np.zeros((3, 3), np.float32)
        last = (await envs.step(nothing)).obs[1]
        envs.pause([1])
        for _ in range(2):
            await envs.set_state(states, [1])
            assert_same((await envs.step(nothing)).obs[1], last)
        envs.resume([1])
        mask = np.array([True, False, False])
        assert_same((await envs.reset(seed=1, options={"reset_mask": mask})).obs[1], last)
        assert (await envs.step(nothing)).obs[1].tolist() != last.tolist()
