"""A value that pickles in a worker and does not unpickle in the parent is lost alone."""

from __future__ import annotations

import asyncio
import pickle
import sys
import types
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.errors import WireError
from aioenv.ipc.messages import dump, find_unreadable, load_partially


class Refuses:
    """Does not unpickle anywhere."""

    def __getstate__(self):
        return {"a": 1}

    def __setstate__(self, state):
        raise RuntimeError("not here")


class Exits(Refuses):
    def __setstate__(self, state):
        sys.exit("not here")


class Cancels(Refuses):
    def __setstate__(self, state):
        raise asyncio.CancelledError("not here")


class Stamp(Refuses):
    """As a key of an info dict."""

    def __hash__(self):
        return 1


def foreign() -> Any:
    """Something of a module that only this process has."""
    module = sys.modules.get("only_in_a_worker")
    if module is None:
        module = sys.modules["only_in_a_worker"] = types.ModuleType("only_in_a_worker")
        exec("class Thing: pass\nclass Problem(Exception): pass", module.__dict__)
    return module


def things() -> dict[str, Any]:
    return {"refuses": Refuses(), "exits": Exits(), "cancels": Cancels(), "foreign": foreign().Thing()}


class Secretive(gym.Env):
    """Counts its steps; at step 2 of slot 1 it gives what the parent can't read."""

    observation_space: Any = spaces.Box(0, 99, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, number: int, given: Any = None, observed: bool = False) -> None:
        self.number = number
        self.given = given
        self.count = 0
        if observed:
            self.observation_space = spaces.Sequence(spaces.Discrete(9))

    def observe(self, odd=None):
        if isinstance(self.observation_space, spaces.Box):
            return np.full(1, self.count, np.float64)
        return (1, 2) if odd is None else (1, odd)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        info = {"number": self.number, **((options or {}).get("info", dict)() if self.number == 1 else {})}
        return self.observe(), info

    def step(self, action):
        self.count += 1
        info: dict[Any, Any] = {"count": self.count, "name": f"env {self.number}"}
        now = self.given is not None and self.count == 2
        odd = None
        if now and not isinstance(self.observation_space, spaces.Box):
            odd = things()[self.given]
        elif now and self.given == "error":
            raise foreign().Problem("far away")
        elif now:
            info |= self.given()
        return self.observe(odd), float(self.count), self.count == 4, False, info

    def thing(self, name):
        return self.number if self.number != 1 else things()[name]


def factories(given: Any = None, n: int = 4, observed: bool = False) -> list[Any]:
    return [lambda i=i: Secretive(i, given if i == 1 else None, observed) for i in range(n)]


ACTIONS = np.zeros(4, np.int64)
INFOS: dict[str, tuple[Any, str]] = {
    "plain": (lambda: {"thing": things()["refuses"]}, "info['thing']"),
    "exits": (lambda: {"thing": things()["exits"]}, "info['thing']"),
    "cancels": (lambda: {"thing": things()["cancels"]}, "info['thing']"),
    "foreign": (lambda: {"thing": things()["foreign"]}, "info['thing']"),
    "deep": (lambda: {"more": {"fine": 1.0, "list": [1, {"a": (things()["foreign"], 2)}]}}, "info['more']['list']"),
    "array": (lambda: {"thing": np.array([1, things()["refuses"]], object)}, "info['thing']"),
    "inside": (lambda: {"thing": types.SimpleNamespace(a=[things()["foreign"]])}, "info['thing']"),
    "key": (lambda: {Stamp(): 1.0}, "a key of its info"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in ("cancels", "deep", "array", "key") else pytest.mark.stress) for c in INFOS],
)
@pytest.mark.asyncio
async def test_an_info_is_lost_alone(case):
    given, name = INFOS[case]
    async with aioenv.AsyncVectorEnv(factories(given), num_workers=2) as envs:
        pids = [worker.pid for worker in envs.workers]
        await envs.reset()
        await envs.step(ACTIONS)
        with pytest.raises(aioenv.EnvError) as caught:
            await envs.step(ACTIONS)
        error = caught.value
        assert error.slots == (1,)
        assert "slot 1 " in str(error) and name in str(error) and "does not unpickle" in str(error)
        assert isinstance(error.__cause__, (RuntimeError, SystemExit, ImportError, asyncio.CancelledError))
        partial = error.partial
        assert partial.obs.tolist() == [[2]] * 4 and partial.reward.tolist() == [2] * 4
        rest = [0, 2, 3] if case == "key" else [0, 1, 2, 3]
        assert np.flatnonzero(partial.info["_count"]).tolist() == rest
        assert [partial.info["name"][slot] for slot in rest] == [f"env {slot}" for slot in rest]
        assert not partial.info.get("_thing", np.zeros(1)).any()
        if case == "deep":
            assert partial.info["more"]["fine"][1] == 1 and not partial.info["more"].get("_list", np.zeros(4)).any()
        with pytest.raises(aioenv.EnvError):
            await envs.step(ACTIONS)
        mask = np.arange(4) == 1
        await envs.reset(options={"reset_mask": mask})
        result = await envs.step(ACTIONS)
        assert result.reward.tolist() == [3, 1, 3, 3]
        assert result.info["count"].tolist() == [3, 1, 3, 3]
        assert pids == [worker.pid for worker in envs.workers]


@pytest.mark.asyncio
async def test_many_at_once_are_an_error_each():
    given = INFOS["foreign"][0]
    makers = [lambda i=i: Secretive(i, given if i % 2 else None) for i in range(4)]
    async with aioenv.AsyncVectorEnv(makers, num_workers=2) as envs:
        await envs.reset()
        await envs.step(ACTIONS)
        with pytest.raises(aioenv.EnvError) as caught:
            await envs.step(ACTIONS)
        assert [error.slot for error in caught.value.errors] == [1, 3]
        assert caught.value.partial.info["count"].tolist() == [2] * 4


@pytest.mark.asyncio
async def test_of_a_reset_and_of_some_slots():
    async with aioenv.AsyncVectorEnv(factories(), num_workers=2) as envs:
        with pytest.raises(aioenv.EnvError, match=r"slot 1 .*info\['thing'\]") as caught:
            await envs.reset(options={"info": INFOS["foreign"][0]})
        assert caught.value.partial.info["number"].tolist() == [0, 1, 2, 3]
        envs.send_reset([0, 1], options={"info": INFOS["plain"][0]})
        with pytest.raises(aioenv.EnvError, match=r"slot 1 ") as caught:
            await envs.recv(2)
        assert caught.value.partial.slots.tolist() == [0, 1]
        await envs.reset()
        assert (await envs.step(ACTIONS)).reward.tolist() == [1] * 4


@pytest.mark.parametrize(("kind", "mode"), [("refuses", AutoresetMode.SAME_STEP), ("foreign", AutoresetMode.NEXT_STEP)])
@pytest.mark.asyncio
async def test_an_observation_is_lost_alone(kind, mode):
    makers = factories(kind, observed=True)
    async with aioenv.AsyncVectorEnv(makers, num_workers=2, autoreset_mode=mode) as envs:
        await envs.reset()
        await envs.step(ACTIONS)
        with pytest.raises(aioenv.EnvError, match=r"slot 1 .*its observation") as caught:
            await envs.step(ACTIONS)
        partial = caught.value.partial
        assert partial.obs == ((1, 2), None, (1, 2), (1, 2))
        assert partial.reward.tolist() == [2] * 4 and partial.info["count"].tolist() == [2] * 4
        await envs.reset(options={"reset_mask": np.arange(4) == 1})
        assert (await envs.step(ACTIONS)).reward.tolist() == [3, 1, 3, 3]


@pytest.mark.asyncio
async def test_an_exception_is_told_in_words():
    async with aioenv.AsyncVectorEnv(factories("error"), num_workers=2) as envs:
        await envs.reset()
        await envs.step(ACTIONS)
        with pytest.raises(aioenv.EnvError, match=r"slot 1 .*Problem: far away") as caught:
            await envs.step(ACTIONS)
        assert caught.value.__cause__ is None
        assert "Problem itself does not unpickle" in caught.value.__notes__[0]
        assert "only_in_a_worker" in caught.value.__notes__[0]
        assert caught.value.partial.reward.tolist() == [2, 0, 2, 2]
        with pytest.raises(aioenv.EnvError, match=r"slots \[1\] have failed") as again:
            await envs.step(ACTIONS)
        assert again.value.__notes__ == caught.value.__notes__


@pytest.mark.parametrize("kind", ["exits", "cancels", "foreign"])
@pytest.mark.asyncio
async def test_a_result_of_a_call_is_lost_alone(kind):
    async with aioenv.AsyncVectorEnv(factories(), num_workers=2) as envs:
        with pytest.raises(aioenv.EnvError, match=r"slot 1 .*call\('thing'\).*does not unpickle") as caught:
            await envs.call("thing", kind)
        assert caught.value.slots == (1,) and caught.value.partial == (0, None, 2, 3)
        await envs.set_attr("secret", "text")
        assert await envs.get_attr("secret") == ("text",) * 4
        await envs.reset()
        assert (await envs.step(ACTIONS)).reward.tolist() == [1] * 4


@pytest.mark.asyncio
async def test_in_a_rollout_the_others_go_on():
    async with aioenv.AsyncVectorEnv(factories(INFOS["foreign"][0]), num_workers=2) as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError, match=r"slot 1 .*info\['thing'\]"):
            await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 5)
        await envs.reset()
        assert (await envs.step(ACTIONS)).reward.tolist() == [1] * 4


# ------------------------------------------------------------ the second try by itself


class Rest(dict):
    """A dict of one's own, whose items are put in one by one."""


def some_values() -> list[Any]:
    shared = [1, 2]
    return [
        1, "two", 3.0, None, b"4", [5], (6,), {7: 8}, {9}, frozenset([10]), np.arange(3), np.float32(2), shared, shared,
        Rest(a=1), types.SimpleNamespace(a=1), np.array([1, "a"], object), ValueError("no"), (lambda x: x)(3), range(4),
    ]  # fmt: skip


def test_what_is_readable_comes_out_as_it_is():
    values = some_values()
    out = load_partially(dump(values), ())
    assert find_unreadable(out) is None
    assert pickle.dumps(out[:10]) == pickle.dumps(pickle.loads(dump(values))[:10])
    assert out[12] is out[13] and out[14] == {"a": 1} and type(out[14]) is Rest and out[15].a == 1


def test_whatever_holds_it_is_unreadable_and_nothing_else():
    local = type("Local", (), {"__reduce__": lambda self: (len, (1,))})
    values = [
        Refuses(), Rest(a=Refuses()), types.SimpleNamespace(a={1: [Refuses()]}), np.array([Refuses()], object),
        {Stamp(): 1}, {"a": (1, [Refuses()])}, ValueError(Refuses()), local(),
    ]  # fmt: skip
    data = cloudpickle.dumps([item for value in values for item in (value, "good")])
    out = load_partially(data, ())
    assert all(find_unreadable(out[i]) for i in range(0, len(out), 2))
    assert out[1::2] == ["good"] * len(values)


def test_garbage_is_a_wire_error():
    for data in (b"", b"garbage", dump([1, 2])[:-3], b"\x80\x05\x8c"):
        with pytest.raises(WireError):
            load_partially(data, ())
