"""Vector envs over workers with `RestartPolicy(resume=True)`: with killed workers the run is the one without."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, VectorEnv

import aioenv
from aioenv.native.tasks.locomotion_2d import HalfCheetah
from tests.faults.resume_kit import POLICY, kill, same, step_and_kill
from tests.kits.native_kit import RandomWalk

pytestmark = pytest.mark.asyncio

NUM_ENVS = 4
KILLS = {3: (0, True), 4: (1, False), 7: (0, False)}
MODES = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.value)


def make(env, mode=None, *, num_workers=2, **kwargs):
    mode = {} if mode is None else {"autoreset_mode": mode}
    return aioenv.make_vec(env, NUM_ENVS, backend="native", num_workers=num_workers or None, **mode, **kwargs)


async def die(envs, victim: int) -> None:
    """Kill a worker while no request waits for it; return when that is known."""
    pid = envs.workers[victim].pid
    kill(pid)
    while envs.workers[victim].state == "ready" and envs.workers[victim].pid == pid:
        await asyncio.sleep(0)


async def run(envs, kills, length=12) -> list:
    """All results of a run; under DISABLED with resets of those slots whose episodes are over."""
    rng = np.random.default_rng(2)
    space = envs.single_action_space
    results = [await envs.reset(seed=7)]
    over = np.zeros(NUM_ENVS, np.bool_)
    for t in range(length):
        if isinstance(space, spaces.Discrete):
            actions = rng.integers(min(space.n, 9), size=NUM_ENVS)  # 9 kills a RandomWalk
        else:
            actions = rng.uniform(space.low, space.high, (NUM_ENVS, *space.shape)).astype(np.float32)
        victim, idle = kills.get(t, (None, False))
        if envs.autoreset_mode is AutoresetMode.DISABLED and over.any():
            if victim is not None:
                await die(envs, victim)
            results.append(await envs.reset(options={"reset_mask": over}))
            over[:] = False
        else:
            results.append(await step_and_kill(envs, actions, victim, idle))
            over = results[-1].terminated | results[-1].truncated
    return results


async def compare(make, kills=KILLS, length=9, undisturbed=0) -> None:
    """Two runs, one of which loses workers; the other has so many."""
    async with make(num_workers=undisturbed) as envs:
        expected = await run(envs, {}, length)
    async with make(num_workers=2, restart=POLICY) as envs:
        pids = {worker.pid for worker in envs.workers}
        got = await run(envs, kills, length)
        assert not pids & {worker.pid for worker in envs.workers}
    for t, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for name, a, b in zip(mine._fields, mine, theirs, strict=True):
            assert same(a, b), f"result {t}: {name}"


@MODES
@pytest.mark.parametrize("task", ["Ant-v5", pytest.param("HalfCheetah-v5", marks=pytest.mark.stress)])
async def test_native_tasks(task, mode):
    await compare(lambda **kwargs: make(task, mode, max_episode_steps=3, **kwargs))


async def test_a_task_on_the_other_design():
    await compare(lambda **kwargs: make("HalfCheetah-v5", AutoresetMode.DISABLED, max_episode_steps=4, **kwargs))


async def test_cartpole_whose_slots_have_one_generator():
    kills = {8: (0, False), 9: (1, True), 10: (1, False), 21: (0, True)}
    await compare(lambda **kwargs: make("CartPole-v1", max_episode_steps=9, **kwargs), kills, 40, undisturbed=2)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.value)
async def test_cartpole_whose_slots_have_generators_of_their_own(mode):
    kills = {8: (0, False), 9: (1, True), 21: (0, True)}
    await compare(lambda **kwargs: make("CartPole-v1", mode, max_episode_steps=9, **kwargs), kills, 40)


@pytest.mark.stress
@MODES
async def test_an_env_that_only_has_states(mode):
    """They are pickled with each step."""
    await compare(lambda **kwargs: aioenv.NativeVectorEnv(partial(RandomWalk, mode=mode), 4, **kwargs))


class Diary(VectorEnv):
    """Remembers all actions of each slot."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (), np.float64)
        self.observation_space = spaces.Box(-np.inf, np.inf, (num_envs,), np.float64)
        self.single_action_space = spaces.Discrete(10)
        self.action_space = spaces.MultiDiscrete([10] * num_envs)
        self.actions = [[] for _ in range(num_envs)]

    def see(self):
        return np.array([float(np.sum(actions)) + len(actions) / 100 for actions in self.actions])

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        for slot in np.flatnonzero(mask).tolist():
            self.actions[slot].append(np.full(60, 0.5))
        return self.see(), {}

    def step(self, actions):
        for slot, action in enumerate(actions.tolist()):
            self.actions[slot].append(np.full(60, action))
        over = np.zeros(self.num_envs, np.bool_)
        return self.see(), np.ones(self.num_envs), over, over.copy(), {}

    def get_state(self, slots):
        return [list(self.actions[slot]) for slot in slots]

    def set_state(self, states, slots):
        for slot, state in zip(slots, states, strict=True):
            self.actions[slot] = list(state)


async def test_states_that_grow():
    await compare(lambda **kwargs: aioenv.NativeVectorEnv(Diary, 4, **kwargs))


class Tired(HalfCheetah):
    """Knows more than its class."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, max_episode_steps=5, **kwargs)
        self.work = np.zeros(num_envs)

    def outcome(self, actions, obs):
        self.work += np.abs(actions).sum(1)
        reward, terminated, info = super().outcome(actions, obs)
        return reward - self.work, terminated, {**info, "work": self.work.copy()}


class States(Tired):
    def get_state(self, slots=None):
        numbers = self.pool.numbers(slots).tolist()
        return [
            {**state, "work": self.work[slot]} for slot, state in zip(numbers, super().get_state(numbers), strict=True)
        ]

    def set_state(self, states, slots=None):
        super().set_state(states, slots)
        self.work[self.pool.numbers(slots)] = [state["work"] for state in states]


class Rows(Tired):
    @property
    def checkpoint_size(self):
        return super().checkpoint_size + 1

    def get_checkpoints(self, out):
        super().get_checkpoints(out[:, :-1])
        out[:, -1] = self.work

    def set_checkpoints(self, rows, newest):
        super().set_checkpoints(rows[:, :-1], newest)
        self.work[:] = rows[:, -1]


@pytest.mark.parametrize("env", [pytest.param(States, marks=pytest.mark.stress), Rows])
async def test_what_a_subclass_knows_of_its_states_is_asked(env):
    await compare(lambda **kwargs: make(env, **kwargs))


async def test_slots_that_are_reset_by_themselves_and_states():
    """Where replies tell of some rows only."""

    async def drive(envs, victims):
        out = [await envs.reset(seed=3)]
        actions = np.full((NUM_ENVS, 8), 0.4, np.float32)
        out.append(await envs.step(actions))
        for slots in ([1], [0, 2]):
            envs.send_reset(slots)
            ready = await envs.recv(len(slots))
            out.append((ready.obs, ready.info))
            for victim in victims:
                await die(envs, victim)
            out.append(await envs.step(actions))
        states = await envs.get_state([3])
        out.append(await envs.step(actions))
        await envs.set_state(states, [1])
        for victim in victims:
            await die(envs, victim)
        return [*out, await envs.step(actions), await envs.step(-actions)]

    async with make("Ant-v5") as envs:
        expected = await drive(envs, [])
    async with make("Ant-v5", restart=POLICY) as envs:
        got = await drive(envs, [0, 1])
    for t, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True)), t


@pytest.mark.parametrize("task", ["Ant-v5", "CartPole-v1"])
async def test_slots_that_are_stepped_by_themselves(task):
    """Ant's others have observations that a new process can't compute; CartPole's slots share a generator."""

    async def drive(envs, victims):
        out = [await envs.reset(seed=3)]
        actions = envs.action_space.sample() * 0
        for t, slots in enumerate(([0, 2, 3], [1], [0], [2, 3], [1, 2])):
            envs.send(actions[slots], slots)
            if victims and t == 3:
                kill(envs.workers[1].pid)
            ready = await envs.recv(len(slots))
            out.append(tuple(ready)[1:])
            if victims and t == 1:
                await die(envs, 0)
            if t % 2:
                out.append(await envs.reset_at(t - 1))
        envs.pause(3)
        out.append(await envs.step(actions))
        if victims:
            await die(envs, 1)
        return [*out, await envs.step(actions), await envs.step(actions)]

    async with make(task, max_episode_steps=3) as envs:
        expected = await drive(envs, False)
    async with make(task, max_episode_steps=3, restart=POLICY) as envs:
        got = await drive(envs, True)
    for t, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True)), t


async def test_what_can_not_be_resumed_is_refused_at_the_start():
    match = r"slot 0 can't be resumed: .*CartPoleVectorEnv does not tell the states of its slots; give it get_state"
    with pytest.raises(aioenv.ResumeError, match=match):
        await aioenv.NativeVectorEnv(CartPoleVectorEnv, 2, num_workers=1, restart=POLICY)


class Liar(RandomWalk):
    """Sets other states than it was given."""

    checkpoint_size = 2

    def get_checkpoints(self, out):
        out[...] = self.at

    def set_checkpoints(self, rows, newest):
        self.at = rows + 1


async def test_what_comes_out_different_is_truncated(caplog):
    async with aioenv.NativeVectorEnv(Liar, 4, num_workers=2, restart=POLICY) as envs:
        await envs.reset(seed=1)
        last = await envs.step([0] * 4)
        result = await step_and_kill(envs, [0] * 4, 0, True)
        assert result.truncated.tolist() == [True, True, False, False]
        assert result.info["restarted"].tolist() == [True, True, False, False]
        assert result.obs[:2].tobytes() == last.obs[:2].tobytes()
        await die(envs, 0)  # now there is nothing to go on from, before all have begun again
        assert (await envs.step([0] * 4)).truncated[:2].all()
        assert not (await envs.step([0] * 4)).truncated[:2].any()
    assert "slot 0 could not be resumed: ValueError: get_checkpoints of Liar" in caplog.text
    assert "not all of its slots had begun an episode" in caplog.text
