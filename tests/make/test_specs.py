"""`envs.spec` of envs with large arguments: the caller's own arrays in the parent, no copies of them in workers."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

import aioenv
from aioenv import EnvCreator, sync
from aioenv.worker.specs import OmittedValue, spec_without_values

SIZE = 1 << 14  # 128 KiB of float64
GLOBAL = np.arange(SIZE, dtype=np.float64) + 0.5


class Tabled(gym.Env):
    """Has a table."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, table=None, more=None, change=False, render_mode=None):
        self.table, self.more, self.render_mode = table, more, render_mode
        if change:
            self.table[0] += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action):
        return np.zeros(1), 0.0, False, False, {}

    def own_spec(self):
        return self.spec.kwargs["table"] is self.table


class Noting(gym.Wrapper):
    """Says how much memory its process took since its last env was made, and how often its spec was read."""

    before = np.zeros(2)

    def __init__(self, env):
        super().__init__(env)
        self.reads = 0
        if Path("/proc/self/smaps_rollup").exists():
            Path("/proc/self/clear_refs").write_text("5")
            Noting.before = memory()

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs, {**info, "grown": memory() - Noting.before}

    @property
    def spec(self):
        self.reads += 1
        return super().spec

    def whole_spec(self):
        table = self.spec.kwargs["table"]
        return type(table).__name__, bool(np.array_equal(table, self.env.unwrapped.table))


def memory():
    """Pages of its own (the table is in memory that it shares), and the highest RSS, in bytes; zeros if unknown."""
    if not Path("/proc/self/smaps_rollup").exists():
        return np.zeros(2)
    own = re.search(r"^Anonymous: *(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    peak = re.search(r"^VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return np.array([int(own[1]), int(peak[1])]) * 1024


def table_of(start=0.0, size=SIZE):
    return np.arange(size, dtype=np.float64) + start


@pytest.fixture
def registered():
    """Ids with and without large arguments of their own."""
    gym.register("Tabled-v0", entry_point=Tabled, max_episode_steps=9)
    gym.register("OwnTable-v0", entry_point=Tabled, kwargs={"table": table_of(7)}, max_episode_steps=9)
    yield
    for name in ("Tabled-v0", "OwnTable-v0"):
        del gym.registry[name]


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_workers_describe_their_envs_without_copies_of_large_arguments(registered, start):
    table = table_of(size=50_000_000 // 8)
    wrappers = [gym.wrappers.RecordEpisodeStatistics, Noting]
    with sync.make_vec("Tabled-v0", 4, num_workers=2, start=start, wrappers=wrappers, table=table) as envs:
        _, info = envs.reset()
        assert (info["grown"] < table.nbytes * np.array([0.5, 1.5])).all(), info["grown"]
        assert envs.spec.kwargs["table"] is table
        assert [wrapper.name for wrapper in envs.spec.additional_wrappers] == ["RecordEpisodeStatistics", "Noting"]


@pytest.mark.parametrize("how", [{"start": "forkserver"}, {"start": "spawn"}, {"debug": True}])
def test_the_spec_has_the_callers_arrays_and_the_envs_keep_theirs(registered, how):
    table, other, small = table_of(), table_of(1), np.arange(3)
    more = {"deep": [(other, "x"), {"text": "é" * 70_000, "small": small}]}
    with sync.make_vec("Tabled-v0", 3, num_workers=2, wrappers=[Noting], table=table, more=more, **how) as envs:
        kwargs = envs.spec.kwargs
        assert kwargs["table"] is table and kwargs["more"]["deep"][0][0] is other
        assert kwargs["more"]["deep"][0][1] == "x" and kwargs["more"]["deep"][1]["text"] == "é" * 70_000
        assert np.array_equal(kwargs["more"]["deep"][1]["small"], small)
        assert envs.spec.max_episode_steps == 9 and envs.spec.order_enforce
        assert envs.call("whole_spec") == (("ndarray", True),) * 3
        assert envs.call("own_spec") == (True,) * 3


def test_only_the_first_env_is_asked_for_its_spec(registered):
    with sync.make_vec("Tabled-v0", 4, num_workers=2, wrappers=[Noting], table=table_of()) as envs:
        assert envs.get_attr("reads") == (1, 0, 0, 0)


def closing_over():
    table = table_of(2)
    return lambda: gym.make("Tabled-v0", table=table), table


def of_a_global():
    return (lambda: gym.make("Tabled-v0", table=GLOBAL)), GLOBAL


def of_a_partial():
    table = table_of(3)
    return partial(gym.make, "Tabled-v0", table=table), table


def of_an_object():
    class Config:
        def __init__(self):
            self.table = table_of(4)

        def make(self):
            return gym.make("Tabled-v0", table=self.table)

    config = Config()
    return config.make, config.table


def of_columns():
    table = np.asfortranarray(table_of(5).reshape(64, -1))
    return partial(gym.make, "Tabled-v0", table=table), table


def of_a_slice():
    table = table_of(5).reshape(-1, 2)[:, 0]
    return partial(gym.make, "Tabled-v0", table=table), table


def of_bytes():
    table = bytes(range(256)) * 1024
    return partial(gym.make, "Tabled-v0", table=table), table


def of_a_creator():
    table = table_of(6)
    return EnvCreator(gym.make, "Tabled-v0", table=table), table


def of_the_registry():
    return partial(gym.make, "OwnTable-v0"), gym.registry["OwnTable-v0"].kwargs["table"]


def of_a_spec():
    spec = EnvSpec("Free-v0", Tabled, kwargs={"table": table_of(8)})
    return spec.make, spec.kwargs["table"]


FACTORIES = [
    closing_over,
    of_a_global,
    of_a_partial,
    of_an_object,
    of_columns,
    of_a_slice,
    of_bytes,
    of_a_creator,
    of_the_registry,
    of_a_spec,
]


@pytest.mark.parametrize("made", FACTORIES)
def test_arrays_of_factories_are_found_wherever_they_come_from(registered, made):
    factory, table = made()
    with sync.VectorEnv([factory] * 2, num_workers=1) as envs:
        assert envs.spec.kwargs["table"] is table


def test_arrays_of_a_wrapper_are_found_too(registered):
    table = table_of(9)
    wrap = partial(gym.wrappers.TransformObservation, func=np.negative, observation_space=None)
    recorded = partial(Recorded, table=table)
    with sync.make_vec("Tabled-v0", 2, wrappers=[wrap, recorded], table=table) as envs:
        assert envs.spec.additional_wrappers[-1].kwargs["table"] is table
        assert gym.make(envs.spec).table[0] == 9


class Recorded(gym.Wrapper, gym.utils.RecordConstructorArgs):
    def __init__(self, env, table):
        gym.utils.RecordConstructorArgs.__init__(self, table=table)
        gym.Wrapper.__init__(self, env)
        self.table = table


def test_a_spec_with_large_arguments_makes_envs(registered):
    table = table_of(1)
    with sync.make_vec("Tabled-v0", 2, table=table) as envs:
        spec = envs.spec
    one = gym.make(spec)
    assert np.array_equal(one.unwrapped.table, table)
    for again in (gym.make_vec(spec, 2), sync.make_vec(spec, 2)):
        again.reset()
        assert np.array_equal(again.get_attr("table")[1], table)
        again.close()
    with sync.make_vec(spec, 2) as again:
        assert again.spec.kwargs["table"] is table


def test_the_spec_of_a_creator_has_its_arrays(registered):
    table = table_of(1)
    creator = EnvCreator(gym.make, "Tabled-v0", table=table)
    metadata = asyncio.run(creator.metadata())
    assert metadata.spec.kwargs["table"] is table and metadata.spec.max_episode_steps == 9
    again = pickle.loads(pickle.dumps(creator))
    assert np.array_equal(asyncio.run(again.metadata()).spec.kwargs["table"], table)


def test_the_spec_of_a_vector_env_has_its_arrays():
    gym.register("Many-v0", vector_entry_point=Many)
    try:
        table = table_of(1)
        with sync.make_vec("Many-v0", 2, backend="native", num_workers=1, table=table) as envs:
            assert envs.spec.kwargs["table"] is table
    finally:
        del gym.registry["Many-v0"]


class Many(gym.vector.VectorEnv):
    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs, table):
        self.num_envs, self.table = num_envs, table
        self.single_observation_space, self.single_action_space = Tabled.observation_space, Tabled.action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 1)), {}


UNUSUAL = {
    "text without axes": np.array("x" * 70_000),
    "texts": np.array(["abc"] * 20_000),
    "times": np.arange(SIZE).astype("M8[s]"),
    "fields": np.zeros(SIZE, [("a", "f8"), ("b", "i4")]),
    "backwards": table_of()[::-1],
    "repeated": np.broadcast_to(np.arange(3.0), (SIZE, 3)),
    "axes exchanged": table_of().reshape(16, 32, -1).transpose(1, 2, 0),
    "flags": np.zeros(100_000, np.bool_),
    "big-endian": table_of().astype(">f8"),
    "bytes that change": bytearray(70_000),
}


def test_large_values_of_unusual_types_are_found(registered):
    nothing, objects, numbers = np.zeros((0, 5)), np.array([None, "x"] * 9000), [0.5] * 20_000
    sent = {"nothing": nothing, "objects": objects, "numbers": numbers, "masked": np.ma.zeros(SIZE)}
    with sync.make_vec("Tabled-v0", 1, more={**UNUSUAL, **sent}) as envs:
        more = envs.spec.kwargs["more"]
        assert [name for name, value in UNUSUAL.items() if more[name] is not value] == []
        assert more["nothing"].shape == (0, 5) and more["objects"].tolist() == objects.tolist()
        assert more["numbers"] == numbers and more["masked"].shape == (SIZE,)


# ------------------------------------------------------------ values that the parent does not have


def changed_copy():
    table = table_of()

    def make():
        other = table.copy()
        other[-1] += 1
        return gym.make("Tabled-v0", table=other)

    return make


@pytest.mark.parametrize("made", [lambda: lambda: gym.make("Tabled-v0", table=table_of()), changed_copy])
def test_an_array_that_only_the_worker_has_is_left_out_by_name(registered, made):
    with sync.VectorEnv([made()] * 2) as envs:
        left_out = envs.spec.kwargs["table"]
        assert "ndarray" in repr(left_out) and "float64" in repr(left_out) and f"({SIZE},)" in repr(left_out)
        for use in (np.asarray, np.sum, lambda value: value.shape, lambda value: value[0]):
            with pytest.raises((AttributeError, TypeError), match=r"stayed in the worker|OmittedValue"):
                use(left_out)
        for again in (copy.deepcopy(envs.spec), pickle.loads(pickle.dumps(envs.spec))):
            assert repr(again.kwargs["table"]) == repr(left_out)
        table = table_of()
        assert gym.make(envs.spec, table=table).unwrapped.table is table
        assert envs.call("own_spec") == (True, True)


def test_an_array_that_the_env_has_changed_is_not_taken_for_the_callers(registered):
    table = table_of()
    with sync.make_vec("Tabled-v0", 2, num_workers=2, table=table, change=True) as envs:
        assert "ndarray" in repr(envs.spec.kwargs["table"]) and envs.spec.kwargs["table"] is not table
    assert table[0] == 0


# ------------------------------------------------------------ specs of other kinds


class Fixed(Tabled):
    """Its spec can't be set."""

    @property
    def spec(self):
        return EnvSpec("Fixed-v0", Tabled, kwargs={"table": self.table})


class Peeking(gym.Wrapper):
    """Makes its spec of the arguments in the one below."""

    @property
    def spec(self):
        spec = copy.copy(self.env.spec)
        spec.reward_threshold = float(spec.kwargs["table"].sum())
        return spec


class OfTheClass(Tabled):
    spec = EnvSpec("Class-v0", Tabled, kwargs={"table": GLOBAL})

    def has_own_spec(self):
        return "spec" in vars(self)


class OfAProperty(Tabled):
    """Has a property in place of Gymnasium's attribute."""

    _mine = None

    @property
    def spec(self):
        return self._mine

    @spec.setter
    def spec(self, spec):
        self._mine = spec


class InASlot(Tabled):
    __slots__ = ("spec",)


@pytest.mark.parametrize("kind", [Tabled, OfTheClass, OfAProperty, InASlot, Fixed])
def test_the_env_and_its_wrappers_have_their_attributes_back(registered, kind):
    table = table_of()
    env = kind(table)
    if kind not in (OfTheClass, Fixed):
        env.spec = EnvSpec("Mine-v0", kind, kwargs={"table": table})
    kept: list[Any] = [env.spec]
    for wrap in (gym.wrappers.OrderEnforcing, gym.wrappers.RecordEpisodeStatistics, Noting):
        env = wrap(env)
        kept.append(dict(vars(env)))
    spec = spec_without_values(env)
    assert isinstance(spec.kwargs["table"], OmittedValue) and len(spec.additional_wrappers) == 2
    ignored = {"reads": 0, "_cached_spec": None} if kind is Fixed else {"reads": 0}
    while isinstance(env, gym.Wrapper):
        assert {**vars(env), **ignored} == {**kept.pop(), **ignored}
        env = env.env
    assert repr(env.spec) == repr(kept.pop())


def test_specs_that_are_not_as_gymnasium_makes_them():
    table = table_of()
    with sync.VectorEnv([partial(Fixed, table)]) as envs:
        assert envs.spec.id == "Fixed-v0" and envs.spec.kwargs["table"] is table
    with sync.VectorEnv([lambda: Peeking(Fixed(table))]) as envs:
        assert envs.spec.reward_threshold == table.sum() and envs.spec.kwargs["table"] is table
    with sync.VectorEnv([OfTheClass]) as envs:
        assert envs.spec.id == "Class-v0" and envs.call("has_own_spec") == (False,)
    with sync.VectorEnv([Tabled]) as envs:
        assert envs.spec is None


def test_a_wrapper_that_computes_with_large_arguments_sees_them(registered):
    table = table_of()
    with sync.make_vec("Tabled-v0", 1, wrappers=[Peeking], table=table) as envs:
        assert envs.spec.reward_threshold == table.sum() and envs.spec.kwargs["table"] is table


def test_a_spec_that_does_not_pickle_is_none(registered):
    def make():
        return gym.make("Tabled-v0", table=table_of(), more=(i for i in ()))

    with sync.VectorEnv([make]) as envs:
        assert envs.spec is None


def test_the_async_api_has_the_same_spec(registered):
    async def main():
        table = table_of()
        async with aioenv.make_vec("Tabled-v0", 2, table=table) as envs:
            assert envs.spec.kwargs["table"] is table

    aioenv.run(main())
