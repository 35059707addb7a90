"""Checkpoints and snapshots: what goes on from them is what would have been, bit for bit."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.envs.mujoco.inverted_pendulum_v5 import InvertedPendulumEnv
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.ipc.messages import LostRow, load
from aioenv.state.snapshot import EnvState, save
from aioenv.state.snapshot import load as load_states
from tests.kits.compare import assert_same
from tests.kits.snapshot_kit import Bench, make, record, without_clock

TASKS = [
    f"{name}-v5"
    for name in (
        "Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum",
        "Pusher", "Reacher", "Swimmer", "Walker2d",
    )
]  # fmt: skip
MODES = list(AutoresetMode)


def check_resume(factories, mode, count, points, seeds=(5, 6), extra=0):
    with Bench(factories, mode) as bench:
        history = record(bench, count, seeds)
    for point in points:
        operations, _, before, after = history[point]
        # another width, as if the largest checkpoint were that of another worker
        before, after = (np.pad(a, ((0, 0), (0, extra))) for a in (before, after))
        with Bench(factories, mode, extra=extra) as fresh:
            assert fresh.service.resume(range(fresh.n), before, operations, after) == [None] * fresh.n
            for operations, out, _, after in history[point + 1 :]:
                assert_same(without_clock(fresh.do(operations)), without_clock(out))
                assert fresh.checkpoint[:, : after.shape[1]].tobytes() == after.tobytes()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("task", TASKS)
def test_what_is_resumed_goes_on_as_it_would_have(task, mode):
    rng = np.random.default_rng(TASKS.index(task))
    points = [0, *rng.choice(np.arange(1, 24), 2, replace=False).tolist()]
    check_resume([partial(make, task)] * 2, mode, 84, points)


class Counting(InvertedPendulumEnv):
    """Remembers something in Python, and does not say so."""

    def step(self, action):
        self.count = getattr(self, "count", 0) + 1
        return super().step(action)


class Stepper(gym.Env):
    """No MuJoCo: has a state of its own, and gives it."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self):
        self.x = [0.0, 0.0]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.normal(size=2).tolist()
        return np.array(self.x), {}

    def step(self, action):
        self.x = [self.x[0] + float(action[0]), self.np_random.normal()]
        return np.array(self.x), self.x[1], abs(self.x[0]) > 2, False, {}

    def get_state(self):
        return self.x

    def set_state(self, state):
        self.x = list(state)


class Remembering(gym.Wrapper):
    """A wrapper with a memory; `Telling` can be asked for it."""

    total = 0.0

    def step(self, action):
        obs, reward, *rest, info = self.env.step(action)
        self.total += float(reward)
        return obs, self.total, *rest, info


class Telling(Remembering):
    def get_state(self):
        return self.total

    def set_state(self, state):
        self.total = state


WRAPS = {
    "numbers": (wrappers.RecordEpisodeStatistics, wrappers.TimeAwareObservation, wrappers.ClipAction),
    "functions": (
        partial(wrappers.TransformReward, func=np.float32),
        wrappers.RecordEpisodeStatistics,
        partial(wrappers.RescaleAction, min_action=-1, max_action=1),
        partial(wrappers.ReshapeObservation, shape=(1, 11)),
    ),
    "own": (Telling, wrappers.FlattenObservation),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("wrap", WRAPS)
def test_wrappers_go_on_counting(wrap, mode):
    # a wider row than it needs, as if another worker's were larger
    check_resume([partial(make, "Hopper-v5", wrap=WRAPS[wrap])] * 2, mode, 50, [0, 7, 8, 9, 10], extra=3)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_an_env_with_a_state_of_its_own(mode):
    check_resume([Stepper, lambda: Telling(Stepper())], mode, 60, [0, 3, 11, 20])


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_first_reset_without_a_seed_can_be_resumed(mode):
    check_resume([partial(make, "Reacher-v5")] * 2, mode, 30, [0, 1, 12], seeds=(None, 2**127))


def test_nothing_has_happened_yet():
    factories = [partial(make, "Reacher-v5")]
    with Bench(factories) as bench:
        first = bench.checkpoint
        history = record(bench, 15, (None,))
    with Bench(factories) as fresh:
        assert fresh.service.resume([0], first, [None], first) == [None]
        for operations, out, _, _ in history:
            assert_same(fresh.do(operations), out)


def test_a_wrong_outcome_is_named():
    factories = [partial(make, "HalfCheetah-v5", wrap=[wrappers.RecordEpisodeStatistics])]
    with Bench(factories) as bench:
        operations, _, before, after = record(bench, 6, (1,))[-1]
        names = bench.service._row_checkpoints[0]._names
        assert len(names) == bench.size
    with Bench(factories) as fresh:
        for name, expected in [
            ("qpos[3]", r"qpos[3]: expected "),
            ("rng", "rng: expected "),
            ("TimeLimit._elapsed_steps", "TimeLimit._elapsed_steps: expected "),
            ("autoreset due", "autoreset due: expected 1, got 0 (1 words differ)"),
        ]:
            wrong = after.copy()
            wrong.view(np.uint64)[0, names.index(name)] ^= 1
            (why,) = fresh.service.resume([0], before, operations, wrong)
            assert why is not None and why.startswith(expected)
        assert fresh.service.resume([0], before, operations, after) == [None]
        (why,) = fresh.service.resume([0], before, [("step", np.zeros(2))], after)
        assert why is not None and why.startswith("ValueError: ")
        (why,) = fresh.service.resume([0], np.zeros_like(before), operations, after)
        assert why == "ValueError: there is no state"


def test_what_an_env_remembers_in_python_is_found_out():
    with Bench([Counting]) as bench:
        history = record(bench, 6, (1,))
    with Bench([Counting]) as fresh:
        operations, _, before, after = history[-1]
        (why,) = fresh.service.resume([0], before, operations, after)
    assert why == "Python attributes of Counting differ; give it get_state() and set_state(state)"


@pytest.mark.parametrize(
    ("factory", "obstacle"),
    [
        (partial(make, "CartPole-v1"), "the env CartPoleEnv is no MuJoCo env"),
        (partial(make, "Ant-v5", wrap=[Remembering]), "the wrapper Remembering may remember something"),
        (partial(make, "Ant-v5", wrap=[wrappers.NormalizeReward]), "the wrapper NormalizeReward may remember"),
        (
            partial(make, "Ant-v5", wrap=[lambda env, n=[]: wrappers.TransformReward(env, lambda r: r + len(n))]),
            "the wrapper TransformReward: its function may remember",
        ),
    ],
)
def test_what_is_in_the_way_is_named(factory, obstacle):
    with Bench([factory]) as bench:
        assert bench.sizes == [0]
        assert bench.obstacles[0].startswith(obstacle)
        assert bench.obstacles[0].endswith("; give it get_state() and set_state(state)")
        spaces = bench.space, bench.action_space
        with pytest.raises(ValueError, match=r"row 0 .* can't be resumed"):
            bench.service.configure(*spaces, 0, False, 50)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_restarted_env_begins_with_the_seed_it_was_given(mode):
    factories = [partial(make, "Reacher-v5")] * 2
    actions = np.zeros((2, 2), np.float32)
    with Bench(factories, mode) as bench, Bench(factories, mode) as fresh:
        expected, _ = bench.reset([7, 8])
        fresh.service.reset_lost_rows([LostRow(row, seed, None, True) for row, seed in enumerate((7, 8))])
        if mode is AutoresetMode.NEXT_STEP:
            obs, reward, terminated, truncated, _ = fresh.step(actions)
            assert not (reward.any() or terminated.any() or truncated.any())
        else:
            obs, _ = fresh.reset([None, None])
        assert_same(obs, expected)
        assert_same(fresh.step(actions), bench.step(actions))
        # once only
        assert_same(fresh.reset([None, None]), bench.reset([None, None]))
        fresh.service.reset_lost_rows([LostRow(row, 1, None, True) for row in range(2)])
        assert_same(fresh.reset([9, 9]), bench.reset([9, 9]))
        assert_same(fresh.reset([None, None]), bench.reset([None, None]))


@pytest.mark.parametrize(
    ("task", "mode"),
    [*((task, MODES[0]) for task in TASKS), *((task, mode) for task in ("Ant-v5", "Reacher-v5") for mode in MODES[1:])],
)
def test_a_state_goes_on_anywhere(task, mode, tmp_path):
    """Taken at three moments, through a file, set on another slot of another service that was elsewhere."""
    rng = np.random.default_rng(TASKS.index(task))
    factories = [partial(make, task)] * 2
    states = {}
    with Bench(factories, mode) as bench:
        moments = {1, *rng.choice(np.arange(2, 24), 2, replace=False).tolist()}
        history = record(bench, 84, watch=lambda count: states.update({count: take(bench)}) if count in moments else 0)
    with Bench(factories, mode) as other:
        record(other, 5, (100, 101))
        for moment, taken in states.items():
            save(tmp_path / "states", taken)
            put(other, load_states(tmp_path / "states")[::-1])
            for operations, (*out, info), _, _ in history[moment:]:
                *got, got_info = other.do(operations[::-1])
                assert_same(got, [array[::-1] for array in out])
                assert_same(got_info, flipped(info))


def flipped(info):
    if isinstance(info, dict):
        return {key: flipped(value) for key, value in info.items()}
    return info[::-1]


def take(bench):
    results, failures = bench.service.get_states(range(bench.n))
    assert not failures
    return [EnvState(*load(data)) for data in results]


def put(bench, states):
    results, failures = bench.service.set_states(range(bench.n), [(s.env_id, s.values, s.arrays) for s in states])
    assert not failures and not any(isinstance(load(data), str) for data in results)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_state_has_what_wrappers_count(wrap, mode):
    factories = [partial(make, "Hopper-v5", wrap=WRAPS[wrap])] * 2
    states = {}
    with Bench(factories, mode) as bench:
        history = record(bench, 40, watch=lambda count: states.update({count: take(bench)}) if count > 7 else 0)
    with Bench(factories, mode) as other:
        for moment in (8, 9, 10, 11, 15):
            put(other, states[moment])
            for operations, out, _, after in history[moment:]:
                assert_same(without_clock(other.do(operations)), without_clock(out))
                assert other.checkpoint.tobytes() == after.tobytes()


def test_resume_goes_on_from_a_state_that_was_set():
    factories = [partial(make, "Humanoid-v5")] * 2
    with Bench(factories) as bench:
        record(bench, 4)
        before, states = bench.checkpoint, take(bench)
        bench.service.set_states([0, 1], [(s.env_id, s.values, s.arrays) for s in states])
        after = bench.service._checkpoints.array.copy()
        operations = [("set_state", (s.env_id, s.values, s.arrays)) for s in states]
        actions = np.zeros((2, 17), np.float32)
        with Bench(factories) as fresh:
            assert fresh.service.resume([0, 1], before, operations, after) == [None, None]
            assert_same(fresh.step(actions), bench.step(actions))


@pytest.mark.asyncio
async def test_states_between_workers_and_through_files(tmp_path):
    actions = np.random.default_rng(1).uniform(-1, 1, (20, 3, 8)).astype(np.float32)
    async with aioenv.make_vec(partial(make, "Ant-v5"), 3, num_workers=2) as envs:
        await envs.reset(seed=3)
        for t in range(6):
            await envs.step(actions[t])
        aioenv.save(tmp_path / "ants.npz", await envs.get_state([2, 0]))
        expected = [await envs.step(a) for a in actions[6:]]
    states = aioenv.load(tmp_path / "ants.npz")
    async with aioenv.make_vec(partial(make, "Ant-v5"), 3, num_workers=3) as envs:
        await envs.reset(seed=9)
        with pytest.raises(ValueError, match="got 2 states for 3 slots"):
            await envs.set_state(states)
        await envs.set_state(states, [0, 1])
        for action, (obs, reward, terminated, truncated, info) in zip(actions[6:], expected, strict=True):
            got = await envs.step(action[[2, 0, 1]])
            for mine, theirs in zip(got[:4], (obs, reward, terminated, truncated), strict=True):
                assert_same(mine[:2], theirs[[2, 0]])
            assert_same(got.info["x_position"][:2], info["x_position"][[2, 0]])


@pytest.mark.asyncio
async def test_a_state_that_does_not_fit_is_refused():
    async with aioenv.make_vec(partial(make, "Hopper-v5"), 1, num_workers=1) as envs:
        await envs.reset(seed=0)
        (hopper,) = await envs.get_state()
    other_model = EnvState(
        hopper.env_id, {**hopper.values, "model": {**hopper.values["model"], "nq": 7}}, hopper.arrays
    )
    counters = EnvState(hopper.env_id, {**hopper.values, "counters": {}}, hopper.arrays)
    async with aioenv.make_vec(partial(make, "Hopper-v5"), 2, num_workers=1) as envs:
        await envs.reset(seed=1)
        untouched = (await envs.get_state([1]))[0]
        for state, why in [
            (other_model, "slot 0: the state of Hopper-v5 is of another MuJoCo model: nq 7 there, 6 here"),
            (counters, r"slot 0: the state of Hopper-v5 has counters of wrappers \[\], the env has"),
            (EnvState("Ant-v5", hopper.values, hopper.arrays), "slot 0: the state of Ant-v5 does not fit Hopper-v5"),
        ]:
            with pytest.raises(ValueError, match=why):
                await envs.set_state([state], [0])
        for none in (hopper.values, [hopper.values, hopper], 3):
            with pytest.raises(TypeError, match="set_state: expected EnvStates, as get_state gives them, got "):
                await envs.set_state(none)
        with pytest.raises(ValueError, match=r"slot 1: .* does not fit Hopper-v5$"):
            await envs.set_state([hopper, EnvState("Ant-v5", hopper.values, hopper.arrays)])
        first, second = await envs.get_state()
        assert first.values == hopper.values and second.values == untouched.values
        assert_same(first.arrays, hopper.arrays)
        assert_same(second.arrays, untouched.arrays)
    async with aioenv.make_vec("CartPole-v1", 2, num_workers=1) as envs:
        with pytest.raises(
            ValueError,
            match=r"slot 0: the state of CartPole-v1 can't be had: the env CartPoleEnv .* \(and so for 1 more",
        ):
            await envs.get_state()


class Drifting(gym.Env):
    """Draws nothing in its reset, so without a seed it has no generator before its first step."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action):
        return self.np_random.random(1), 0.0, False, False, {}

    def get_state(self):
        return self.np_random.bit_generator.state

    def set_state(self, state):
        self.np_random.bit_generator.state = state


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_of_an_env_without_a_seed_goes_on_anywhere(num_workers):
    with aioenv.sync.VectorEnv([Drifting] * 2, num_workers=num_workers) as envs:
        envs.reset()
        (state,) = envs.get_state([0])
        envs.set_state([state], [1])
        first, second = envs.step(np.zeros(2, int))[0]
        assert first == second


def test_files(tmp_path):
    with Bench([Stepper]) as bench:
        bench.reset([1])
        (state,) = take(bench)
    assert not state.has_pickles and "EnvState of Stepper" in repr(state)
    path = tmp_path / "file"
    save(path, [state])
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    (again,) = load_states(path)
    assert again.values == state.values and again.env_id == "Stepper"
    with Bench([Odd]) as bench:
        bench.reset([1])
        (state,) = take(bench)
        save(path, [state])
        with pytest.raises(ValueError, match="load it with allow_pickle=True"):
            load_states(path)
        (again,) = load_states(path, allow_pickle=True)
        assert again.has_pickles
        before = bench.step([np.ones(1)])
        put(bench, [again])
        assert_same(bench.step([np.ones(1)]), before)
    np.savez(tmp_path / "other.npz", a=1)
    (tmp_path / "text").write_text("no")
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name in ("other.npz", "text", "array.npy"):
        with pytest.raises(ValueError, match="holds no states of envs"):
            load_states(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load_states(tmp_path / "nowhere")


class Odd(Stepper):
    def get_state(self):
        return {"x": np.array(self.x), "odd": {1, 2}}

    def set_state(self, state):
        assert state["odd"] == {1, 2}
        self.x = state["x"].tolist()


def test_what_is_no_state_is_not_written(tmp_path):
    for states in ([3], aioenv.Ready, 3):
        with pytest.raises(TypeError, match="save: states: expected a list of EnvState, as get_state gives it, got"):
            aioenv.save(tmp_path / "states.npz", states)
    assert not [*tmp_path.iterdir()]


def test_blocking_code_has_them_too():
    with aioenv.sync.make_vec(partial(make, "Reacher-v5"), 2, num_workers=1) as envs:
        envs.reset(seed=4)
        states = envs.get_state()
        expected = envs.step(np.zeros((2, 2), np.float32))
        envs.set_state(states[::-1], [1, 0])
        assert_same(envs.step(np.zeros((2, 2), np.float32))[:4], expected[:4])


# ---------------------------------------------------------------- states that are set while something goes wrong


class Waiting(gym.Env):
    """Counts its steps; while it is told to, `set_state` waits for a file, or raises."""

    observation_space = gym.spaces.Box(0, 1000, (1,), np.int64)
    action_space = gym.spaces.Discrete(1)

    def __init__(self, length: int = 1000) -> None:
        self.length, self.count, self.gate, self.fails = length, 0, None, False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._obs(), {}

    def step(self, action):
        self.count += 1
        return self._obs(), 1.0, self.count == self.length, False, {}

    def _obs(self):
        return np.array([self.count])

    def get_state(self):
        return self.count

    def set_state(self, state):
        if self.fails:
            raise RuntimeError("on purpose")
        while self.gate is not None and not self.gate.exists():
            time.sleep(0.002)
        self.count = state


async def stepped(length: int, **arguments):
    """Return a vector env of two, after some steps, and its states before them."""
    envs = await aioenv.AsyncVectorEnv([partial(Waiting, length)] * 2, num_workers=2, **arguments)
    await envs.reset(seed=0)
    states = await envs.get_state()
    for _ in range(3):
        await envs.step([0, 0])
    return envs, states


async def kill(envs, index):
    """Kill a worker, and wait until its slots are resumed in another one."""
    pid = envs.workers[index].pid
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while envs.workers[index].pid == pid or envs.workers[index].state != "ready":
            await asyncio.sleep(0.002)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["cancelled", "its worker dies"])
async def test_a_slot_is_resumed_from_the_state_that_it_took_while_another_one_is_late(how, tmp_path):
    gate = tmp_path / "gate"
    envs, states = await stepped(1000, restart=aioenv.RestartPolicy(resume=True))
    async with envs:
        await envs.set_attr("gate", [None, gate])
        setting = asyncio.ensure_future(envs.set_state(states))
        await asyncio.sleep(0)
        while envs.workers[0].state == "busy":
            await asyncio.sleep(0.002)
        if how == "cancelled":
            setting.cancel()
        else:
            await kill(envs, 0)
        gate.touch()
        assert [type(each) for each in await asyncio.gather(setting, return_exceptions=True)] == [
            asyncio.CancelledError if how == "cancelled" else type(None)
        ]
        assert await envs.call("get_state") == (0, 0)
        for index in range(2):
            await kill(envs, index)
        assert (await envs.step([0, 0])).obs.tolist() == [[1], [1]]


@pytest.mark.asyncio
async def test_a_slot_is_resumed_from_the_state_that_it_took_although_another_ones_env_raised():
    envs, states = await stepped(1000, restart=aioenv.RestartPolicy(resume=True))
    async with envs:
        await envs.set_attr("fails", [False, True])
        with pytest.raises(aioenv.EnvError, match="on purpose") as caught:
            await envs.set_state(states)
        assert caught.value.slots == (1,)
        await kill(envs, 0)
        assert (await envs.step_at(0, 0)).obs.tolist() == [1]


@pytest.mark.asyncio
async def test_a_slot_that_took_a_state_needs_no_reset_although_another_ones_env_raised():
    envs, states = await stepped(3, autoreset_mode=AutoresetMode.DISABLED)
    async with envs:
        await envs.set_attr("fails", [False, True])
        with pytest.raises(aioenv.EnvError, match="on purpose"):
            await envs.set_state(states)
        assert (await envs.step_at(0, 0)).obs.tolist() == [1]
        with pytest.raises(aioenv.ResetNeededError, match=r"the episodes of slots \[1\] are over"):
            await envs.step_at(1, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("where", ["one env a slot", "native"])
async def test_an_episode_that_was_lost_has_no_state(where, mode):
    arguments = {"num_workers": 2, "autoreset_mode": mode, "restart": aioenv.RestartPolicy()}
    if where == "native":
        arguments["backend"] = "native"
    async with aioenv.make_vec("Hopper-v5", 2, **arguments) as envs:
        await envs.reset(seed=0)
        await envs.step(np.zeros((2, 3)))
        await kill(envs, 0)
        with pytest.raises(aioenv.ResumeError, match="slot 0: its episode was lost with its worker; step or reset"):
            await envs.get_state()
        await envs.get_state([1])
        result = await envs.step(np.zeros((2, 3)))
        assert result.truncated.tolist() == [True, False]
        await envs.get_state()
