"""Mistakes in a task of one's own: the error names the hook, what was expected and what was got."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from tests.kits.compare import assert_same
from tests.kits.native_kit import XML, Good


def whole(value):
    return lambda self, *args: value


MISTAKES = [
    ("draw_start", whole(None), r"draw_start: expected \(qpos, qvel\), got None"),
    ("draw_start", lambda self, slots: np.zeros((len(slots), 1)), r"expected \(qpos, qvel\), got float64 of shape"),
    ("draw_start", lambda self, s: (np.zeros((len(s), 1)), np.zeros(1)), r"qvel of shape \(3, 1\), got float64 of .*1"),
    (
        "draw_start",
        lambda self, slots: (np.zeros((3, 1)), np.zeros((3, 1))),
        r"qpos of shape \(1, 1\), got .* \(3, 1\)",
    ),
    ("draw_start", lambda self, slots: self.uniform(slots, 1, 0, 1), "expected low <= high, got 1 and 0"),
    ("observe", whole(None), r"observe: expected an array of shape \(3, 2\), got None"),
    ("observe", lambda self, slots: self.qpos[slots], r"observe: expected shape \(3, 2\) .* got \(3, 1\)"),
    ("observe", lambda self, slots: np.zeros((3, 2)), r"observe: expected shape \(1, 2\) .* got \(3, 2\)"),
    ("outcome", whole((np.zeros(3), None)), "outcome: expected .* got a tuple of 2"),
    ("outcome", whole((1.0, None, {})), "expected rewards as an array of 3 numbers, got 1.0"),
    ("outcome", whole((np.zeros((3, 1)), None, {})), r"expected rewards .* got float64 of shape \(3, 1\)"),
    ("outcome", whole((np.zeros(3), np.ones(3, int), {})), r"terminations as bool of shape \(3,\), or None, got int64"),
    ("outcome", whole((np.zeros(3), None, None)), "outcome: expected a dict of columns of infos, got None"),
    ("outcome", whole((np.zeros(3), None, {"a": np.zeros(2)})), "info 'a': expected an array with a row for each of 3"),
    (
        "start_info",
        whole({"b": 1.0}),
        "start_info: info 'b': expected .* a row for each of 3 slots, got 1.0",
    ),
    ("start_info", whole({"b": np.zeros(3)}), "start_info: info 'b': .* each of 1 slots, got float64 of shape"),
]


@pytest.mark.parametrize(
    ("hook", "mistake", "told"), MISTAKES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_mistake_is_told(hook, mistake, told):
    task = type("Task", (Good,), {hook: mistake})
    with closing(task(3, autoreset_mode=AutoresetMode.SAME_STEP)) as env:
        with pytest.raises((TypeError, ValueError), match=told):
            env.reset(seed=1)
            env.step(np.zeros((3, 1), np.float32))  # ends one episode
            env.reset(options={"reset_mask": np.array([True, False, False])})


def test_what_is_missing_is_told():
    class Lacking(aioenv.NativeMujocoEnv):
        def __init__(self, num_envs):
            super().__init__(num_envs, XML, 2)

    with closing(Lacking(2)) as env:
        with pytest.raises(NotImplementedError, match=r"Lacking has no draw_start\(slots\)"):
            env.reset()
        Lacking.draw_start, Lacking.observe = Good.draw_start, Good.observe
        with pytest.raises(ValueError, match="call set_observation_size"):
            env.reset()
        env.set_observation_size(2)
        env.reset()
        with pytest.raises(NotImplementedError, match=r"Lacking has no outcome\(actions, obs\)"):
            env.step(np.zeros((2, 1), np.float32))


def test_spaces_and_arrays_that_can_not_be_are_told():
    with closing(Good(2)) as env:
        with pytest.raises(TypeError, match=r"set_observation_space: expected .* are arrays, got Dict"):
            env.set_observation_space(gymnasium.spaces.Dict(a=env.single_observation_space))
        env.remember("made")
        with pytest.raises(ValueError, match="remember: 'made' is there already"):
            env.remember("made", (2,))
        with pytest.raises(TypeError, match="remember: 'last': expected numbers, got dtype object"):
            env.remember("last", (), object)
        assert env.remember("way", 2).shape == (2, 2)


def test_observations_are_of_the_spaces_dtype():
    task = type("Task", (Good,), {"observe": lambda self, slots: self.qpos[slots].astype(np.float32).repeat(2, axis=1)})
    with closing(task(2)) as env:
        assert env.reset()[0].dtype == env.step(np.zeros((2, 1), np.float32))[0].dtype == np.float64


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=str)
@pytest.mark.asyncio
async def test_columns_that_are_no_numbers_are_empty_where_there_are_none(mode):
    """In this process as over workers, whose replies are merged as single envs' infos are."""

    class Told(Good):
        def outcome(self, actions, obs):
            reward, terminated, _ = super().outcome(actions, obs)
            return reward, terminated, {"word": np.full(3, "up"), "thing": np.full(3, Ellipsis, object)}

    results = []
    for num_workers in (None, 1):
        async with aioenv.make_vec(Told, 3, backend="native", autoreset_mode=mode, num_workers=num_workers) as envs:
            await envs.reset(seed=1)
            results.append([tuple(await envs.step(np.zeros((3, 1), np.float32))) for _ in range(3)])
    assert_same(*results)


class Counting(Good):
    """Counts the steps of each episode, the obvious way."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.made = self.remember("made", (), np.int64)

    def after_start(self, slots):
        self.made[slots] = 0

    def outcome(self, actions, obs):
        self.made += 1
        return np.ones(self.num_envs), np.arange(self.num_envs) == 1, {}


@pytest.mark.parametrize(
    ("mode", "made"),
    [
        (AutoresetMode.NEXT_STEP, [[1, 1], [2, 0], [0, 1], [1, 0]]),
        (AutoresetMode.SAME_STEP, [[1, 0], [0, 0], [1, 0], [0, 0]]),
    ],
    ids=str,
)
def test_what_is_remembered_of_slots_that_begin_is_what_they_began_with(mode, made):
    """Slot 0 is truncated after two steps, slot 1 ends after each."""
    with closing(Counting(2, autoreset_mode=mode)) as env:
        env.reset(seed=1)
        for counts in made:
            env.step(np.zeros((2, 1), np.float32))
            assert env.made.tolist() == counts


class Gives(Good):
    """Gives what it remembers and was given, as it is or copied: counts and a sum that begin anew with each episode."""

    def __init__(self, num_envs, given, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.given = given
        self.total, self.made = self.remember("total"), self.remember("made", (), np.int64)
        self.tired = self.remember("tired", (), np.bool_)

    def after_start(self, slots):
        self.total[slots], self.made[slots], self.tired[slots] = 10, 5, False

    def outcome(self, actions, obs):
        self.total += 1
        self.made += 1
        self.tired[...] = self.made == 6 + np.arange(self.num_envs)
        return self.given(self.total), self.given(self.tired), {"made": self.given(self.made), "obs": self.given(obs)}


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=str)
@pytest.mark.parametrize("slots", [None, [0, 2]], ids=["all", "some"])
def test_what_is_remembered_may_be_given(mode, slots):
    """It is the task's: nothing is written into it, and what was given stays as it was then."""
    actions, results = np.zeros((3, 1), np.float32), []
    for given in (lambda array: array, np.copy):
        with closing(Gives(3, given, autoreset_mode=mode)) as env:
            told, over = [env.reset(seed=1)], np.zeros(3, np.bool_)
            for _ in range(5):
                if mode is AutoresetMode.DISABLED and over.any():
                    told.append(env.reset(options={"reset_mask": over}))
                told.append(env.step(actions) if slots is None else env.step_some(actions, np.array(slots)))
                over = told[-1][2] | told[-1][3]
                told.append([array.copy() for array in (env.total, env.made, env.tired)])
            results.append(told)
    assert_same(*results)


class Pushed(Good):
    """Pushes everybody from the second step of an episode on: writes to MuJoCo's own state, in all rows."""

    def __init__(self, num_envs, where="outcome", **kwargs):
        super().__init__(num_envs, **kwargs)
        self.where = where
        self.pushes = self.bind("qfrc_applied")

    def before_step(self):
        if self.where == "before_step":
            self.pushes[:] = 1

    def outcome(self, actions, obs):
        if self.where == "outcome":
            self.pushes[:] = 1
        return np.ones(self.num_envs), np.arange(self.num_envs) == 1, {}


def test_what_is_written_to_the_state_of_slots_that_begin_is_put_back():
    with closing(Pushed(2)) as env:
        env.reset(seed=1)
        assert env.pushes.tolist() == [[0], [0]]
        for pushes in [[1, 1], [1, 0], [0, 1], [1, 0]]:  # slot 1 begins anew in each second step, slot 0 in the third
            env.step(np.zeros((2, 1), np.float32))
            assert env.pushes[:, 0].tolist() == pushes


@pytest.mark.parametrize("where", ["before_step", "outcome"])
def test_what_is_written_to_the_state_of_slots_that_are_left_out_is_put_back(where):
    with closing(Pushed(3, where=where)) as env:
        env.reset(seed=1)
        before = env.get_state([0, 1])
        env.step_some(np.zeros((3, 1), np.float32), np.array([2]))
        assert env.pushes[:, 0].tolist() == [0, 0, 1]
        after = env.get_state([0, 1])
        assert [state["physics"].tolist() for state in after] == [state["physics"].tolist() for state in before]


class Placed(Good):
    """Begins with a push, which is no part of what `draw_start` gives."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.pushes, self.qacc = self.bind("qfrc_applied"), self.bind("qacc")

    def after_start(self, slots):
        self.pushes[slots] = 2
        self.pool.forward(slots)

    def start_info(self, slots):
        return {"pushed": self.qacc[slots, 0] > 1}


def test_the_pool_takes_the_slots_that_hooks_get():
    with closing(Placed(3, autoreset_mode=AutoresetMode.SAME_STEP)) as env:
        _, info = env.reset(seed=1)
        assert info["pushed"].all() and info["_pushed"].all()
        *_, info = env.step(np.zeros((3, 1), np.float32))  # ends the episode of slot 0
        assert info["pushed"][0] and info["_pushed"].tolist() == [True, False, False]
        assert env.pool.numbers(slice(1, None)).tolist() == [1, 2]


@pytest.mark.parametrize("num_workers", [None, 2])
@pytest.mark.asyncio
async def test_a_class_with_arguments_takes_a_mode_as_the_class_does(num_workers):
    make = partial(partial(Pushed), where="before_step")
    async with aioenv.make_vec(
        make, 3, backend="native", autoreset_mode="SameStep", num_workers=num_workers, num_threads=1
    ) as envs:
        assert envs.autoreset_mode is AutoresetMode.SAME_STEP


@pytest.mark.asyncio
async def test_a_task_that_is_registered_takes_a_mode_as_the_class_does():
    gymnasium.register("Pushed-v0", vector_entry_point=Pushed)
    try:
        async with aioenv.make_vec("Pushed-v0", 3, backend="native", autoreset_mode="SameStep") as envs:
            assert envs.autoreset_mode is AutoresetMode.SAME_STEP
    finally:
        del gymnasium.registry["Pushed-v0"]


def test_a_mode_that_there_is_not_is_told():
    told = "autoreset_mode: expected an AutoresetMode or one of 'NextStep', 'SameStep', 'Disabled', got 'next'"
    with pytest.raises(ValueError, match=told):
        Good(3, autoreset_mode="next")
    with pytest.raises(ValueError, match=told):
        aioenv.make_vec("Hopper-v5", 3, backend="native", autoreset_mode="next")


@pytest.mark.parametrize("num_envs", [0, 2.5, "3", True])
def test_a_number_of_envs_that_can_not_be_is_told(num_envs):
    with pytest.raises(ValueError, match=f"num_envs: expected a positive int, got {num_envs!r}"):
        Good(num_envs)
