"""`seed_plan`: seeds for autoresets, the same for any number of workers and whatever the timing."""

from __future__ import annotations

import os
import signal

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.stats import counters
from aioenv.stats.counters import ResetPlan

PLAN = [11, 5, 900, 7, 2**40, 3, 12]
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]


class Seeded(gym.Env):
    """Observes its seed's random numbers; its episodes are of different lengths. Action 1 kills its process."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, lengths=True):
        self.lengths, self.seeds = lengths, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.t, self.length = 0, int(self.np_random.integers(1, 5)) if self.lengths else 3
        return self.np_random.random(2), {}

    def step(self, action):
        if action == 1:
            os._exit(7)
        self.t += 1
        return self.np_random.random(2), float(self.t), self.t == self.length, False, {}


def share(plan, slot, n):
    """The seeds of a slot's episodes, for ever."""
    k = 0
    while True:
        yield plan[(slot + k * n) % len(plan)]
        k += 1


def serial(plan, n, steps, mode):
    """The same in one process, as a plain loop: one list of rows a slot."""
    trajectories = []
    for slot in range(n):
        env, seeds, rows = Seeded(), share(plan, slot, n), []
        obs, _ = env.reset(seed=next(seeds))
        rows.append(obs.tolist())
        over = False
        for _ in range(steps):
            if over and mode is AutoresetMode.NEXT_STEP:
                obs, over = env.reset(seed=next(seeds))[0], False
            else:
                obs, _, over, _, _ = env.step(0)
                if over and mode is AutoresetMode.SAME_STEP:
                    obs = env.reset(seed=next(seeds))[0]
            rows.append(obs.tolist())
        trajectories.append(rows)
    return trajectories


@pytest.mark.parametrize(("num_workers", "debug"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_in_workers_and_in_a_serial_loop(mode, num_workers, debug):
    async def main():
        options = {"num_workers": num_workers, "autoreset_mode": mode, "seed_plan": PLAN, "debug": debug}
        async with aioenv.make_vec(Seeded, 4, **options) as envs:
            expected = serial(PLAN, 4, 30, mode)
            for _ in range(2):  # a reset of all goes back to the start
                rows = [(await envs.reset()).obs.tolist()]
                rows += [(await envs.step([0] * 4)).obs.tolist() for _ in range(30)]
                assert [list(column) for column in zip(*rows, strict=True)] == expected

    aioenv.run(main())


def test_whoever_is_first():
    """Slots that go ahead of others get the same seeds as those that don't."""

    async def main():
        async with aioenv.make_vec(Seeded, 3, num_workers=2, seed_plan=np.array(PLAN)) as envs:
            rows = [[], [], []]
            expected = serial(PLAN, 3, 24, AutoresetMode.NEXT_STEP)
            envs.send_reset()
            order = np.random.default_rng(0)
            for ready in [await envs.recv(min_slots=3)]:
                for slot, obs in zip(ready.slots, ready.obs, strict=True):
                    rows[slot].append(obs.tolist())
            while any(len(row) < 25 for row in rows):
                slots = [slot for slot in range(3) if len(rows[slot]) < 25 and order.random() < 0.6]
                if not slots:
                    continue
                envs.send([0] * len(slots), slots)
                ready = await envs.recv(min_slots=len(slots))
                for slot, obs in zip(ready.slots, ready.obs, strict=True):
                    rows[slot].append(obs.tolist())
            assert rows == expected

    aioenv.run(main())


def test_sv_seed_list_is_cyclic():
    """Where episodes are of one length it is the order of Maze: ascending slots, one seed each, again and again."""

    async def main():
        mode = AutoresetMode.SAME_STEP
        async with aioenv.make_vec(
            Seeded, 2, seed_plan=[4, 5, 6], lengths=False, autoreset_mode=mode, num_workers=2
        ) as envs:
            await envs.reset()
            for _ in range(12):
                await envs.step([0, 0])
            assert await envs.get_attr("seeds") == ([4, 6, 5, 4, 6], [5, 4, 6, 5, 4])

    aioenv.run(main())


def test_sv_reset_rewinds():
    async def main():
        async with aioenv.make_vec(Seeded, 3, seed_plan=PLAN, lengths=False, num_workers=2) as envs:
            await envs.reset()
            for _ in range(4):
                await envs.step([0] * 3)
            await envs.reset(options={"reset_mask": np.array([True, False, False])})  # the next one of that slot
            await envs.reset(seed=[1, 2, None])  # in place of the first ones; without a seed: the next one
            for _ in range(4):
                await envs.step([0] * 3)
            envs.send_reset([1])
            await envs.recv()
            envs.send_reset()
            await envs.recv(min_slots=3)
            assert await envs.get_attr("seeds") == (
                [11, 7, 12, 1, 7, 11],
                [5, 2**40, 2, 2**40, 11, 5],
                [900, 3, 5, 2**40, 900],
            )

    aioenv.run(main())


def test_sv_seed_list_length_is_checked():
    for bad in ([1, 2], [], 3, "12", [1.5] * 3, [-1, 2, 3], [2**64] * 3, [[1, 2, 3]], [True] * 3):
        with pytest.raises(ValueError, match="seed_plan: expected"):
            aioenv.make_vec(Seeded, 3, seed_plan=bad)
    with pytest.raises(ValueError, match="resume=True"):
        aioenv.make_vec(Seeded, 3, seed_plan=PLAN, restart=aioenv.RestartPolicy(resume=True))
    with pytest.raises(ValueError, match="seed_plan: not with backend"):
        aioenv.make_vec("CartPole-v1", 3, seed_plan=PLAN, backend="native")


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_is_started_again_goes_on(mode):
    with aioenv.sync.make_vec(
        Seeded,
        2,
        num_workers=2,
        seed_plan=PLAN,
        lengths=False,
        autoreset_mode=mode,
        restart=aioenv.RestartPolicy(),
        timeout_s=30,
    ) as envs:
        envs.reset()
        for _ in range(4):
            envs.step([0, 0])
        assert envs.step([1, 0]).truncated.tolist() == [True, False]
        for _ in range(8):
            envs.step([0, 0])
        seeds = envs.get_attr("seeds")
        assert seeds[0] == [2**40, 12, 5][: len(seeds[0])] and len(seeds[0]) > 1  # after 11 and 900
        assert seeds[1] == [5, 7, 3, 11, 900][: len(seeds[1])]


class DiesOnce(Seeded):
    """Kills its process in the reset with seed 7, once."""

    def __init__(self, path):
        super().__init__(lengths=False)
        self.path = path

    def reset(self, *, seed=None, options=None):
        if seed == 7 and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("num_steps", [3, 1], ids=["autoreset", "mask"])
@pytest.mark.parametrize("mode", MODES)
def test_a_reset_that_dies_with_its_worker_takes_its_seed_again(mode, num_steps, shared, tmp_path, monkeypatch):
    """And so does that of the slot before it, in the same worker, whose result was lost."""
    if not shared:
        monkeypatch.setattr(counters, "can_share", lambda: False)
    options = {"num_workers": 1, "seed_plan": PLAN, "autoreset_mode": mode, "restart": aioenv.RestartPolicy()}
    with aioenv.sync.make_vec(DiesOnce, 2, path=tmp_path / "died", timeout_s=30, **options) as envs:
        envs.reset()
        for _ in range(num_steps):
            envs.step([0, 0])
        if num_steps < 3:
            envs.reset(options={"reset_mask": np.array([True, True])})
        for _ in range(6):
            envs.step([0, 0])
        assert (tmp_path / "died").exists()
        seeds = envs.get_attr("seeds")  # of the new process, after 11 and 5
        assert min(map(len, seeds)) > 1
        for seen, expected in zip(seeds, ([900, 2**40, 12], [7, 3, 11]), strict=True):
            assert seen == expected[: len(seen)]


def test_a_seed_of_some_slots_stands_in_place_of_their_next_one():
    async def main():
        async with aioenv.make_vec(Seeded, 2, seed_plan=PLAN, lengths=False, num_workers=2) as envs:
            await envs.reset()
            await envs.reset_at(0, seed=1)
            envs.send_reset([0])
            await envs.recv()
            await envs.reset(seed=8, options={"reset_mask": np.array([False, True])})
            await envs.reset(options={"reset_mask": np.array([False, True])})
            assert await envs.get_attr("seeds") == ([11, 1, 2**40], [5, 9, 3])

    aioenv.run(main())


def test_a_plan_goes_back_to_where_the_last_replies_left_it():
    plan = ResetPlan(3, np.array([3, 1, 4]))
    plan.start_at(0, 5)  # as a collector does that goes on
    assert [plan.begin(0), plan.begin(1), plan.begin(1), plan.begin(2)] == [5, 0, 1, 0]
    plan.note_replies(np.array([1]))
    plan.begin(1)
    plan.rewind(range(2))
    assert [plan.begun(slot) for slot in range(3)] == [5, 2, 1]
    plan.close()


def test_without_memory_to_share_a_plan_still_travels(monkeypatch):
    import pickle

    monkeypatch.setattr(counters, "can_share", lambda: False)
    plan = ResetPlan(2, np.array([3, 1, 4]), {"level": 2})
    copied = pickle.loads(pickle.dumps(plan))
    assert [copied.begin(1), copied.begin(1), copied.begin(0)] == [0, 1, 0]
    assert [copied.seed(1, 0), copied.seed(1, 1), copied.seed(0, 0)] == [1, 3, 3]
    copied.start_at(1, 0)
    assert (copied.begin(1), plan.begin(1), plan.options(1, 0)) == (0, 0, {"level": 2})
    for each in (plan, copied):
        each.close()
        each.close()
