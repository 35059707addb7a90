"""States with `spare_envs=True`: a run that goes on from one equals the run that it was taken from, for both envs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import aioenv
from aioenv import sync
from tests.faults.align_kit import CancelAt
from tests.faults.spares_kit import until
from tests.kits.loop_kit import run_on
from tests.vector_env.spares_kit import MODES, PLAN, SPACES, Gated, Gates, N, Told, assert_equal_runs, level

modes = pytest.mark.parametrize("mode", MODES)
plans = pytest.mark.parametrize("plan", [None, PLAN], ids=["no plan", "plan"])


class Kept(Told):
    """A `Told` whose state can be read, with which of the slot's two envs it is."""

    def __init__(self, kind: str = "box") -> None:
        super().__init__(kind)
        self.spare = aioenv.is_spare_env()

    def get_state(self) -> dict[str, Any]:
        return {"t": self.t, "length": self.length, "level": self.level, "spare": self.spare, "mark": self.mark}

    def set_state(self, state: dict[str, Any]) -> None:
        assert state["spare"] == self.spare, "states of a slot's two envs may not change places"
        self.t, self.length, self.level, self.mark = state["t"], state["length"], state["level"], state["mark"]


class Last(Kept):
    """Has no further episode at level 3 of its slot, or raises at level 2 of slot 1."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options is not None and (options.get("level") or 0) % 100 == 3:
            raise aioenv.EpisodesDone
        return super().reset(seed=seed, options=options)


def make(kind: Any = Kept, n: int = N, **options: Any) -> aioenv.AsyncVectorEnv:
    return aioenv.AsyncVectorEnv([kind] * n, **{"spare_envs": True, **options})


def actions(t: int, n: int = N) -> list[int]:
    return [(3 * t + slot) % 5 for slot in range(n)]


async def steps(envs: aioenv.AsyncVectorEnv, start: int, stop: int) -> list[Any]:
    return [await envs.step(actions(t)) for t in range(start, stop)]


@modes
@plans
@pytest.mark.parametrize(("kind", "loop"), [*zip(SPACES, ["asyncio"] * 3, strict=True), ("graph", "uvloop")])
def test_a_run_goes_on_as_the_one_that_the_state_is_of(mode: Any, plan: Any, kind: str, loop: str) -> None:
    """States of each step, set in the same vector env and in a new one, whose envs were elsewhere."""

    async def main() -> None:
        options = {"autoreset_mode": mode, "seed_plan": plan, "autoreset_options": level}
        more, taken = 14, range(12)
        async with make(partial(Kept, kind), **options) as envs, make(partial(Kept, kind), **options) as fresh:
            await envs.reset(seed=3)
            await fresh.set_attr("mark", 7)
            found, states = [], []
            for t in range(taken[-1] + more):
                states.append(await envs.get_state())
                found.append(await envs.step(actions(t)))
            live = set()
            for t in taken:
                live.update(state.values["spares"]["live"] for state in states[t])
                await fresh.set_state(states[t])
                assert_equal_runs(await steps(fresh, t, t + more), found[t : t + more])
            assert live == {0, 1}
            for t in (5, 0, 8, 3):
                await envs.set_state(states[t])
                assert_equal_runs(await steps(envs, t, t + more), found[t : t + more])
            ends = sum(step.terminated + step.truncated for step in found)
            assert min(ends) > 3

    run_on(loop, main())


@modes
@plans
@pytest.mark.asyncio
async def test_states_of_some_slots_in_other_slots(mode: Any, plan: Any) -> None:
    """Other slots are not touched; the slots' own numbers choose their seeds from then on."""
    options = {"autoreset_mode": mode, "seed_plan": plan}
    async with make(**options) as envs, make(**options) as other:
        await envs.reset(seed=3)
        await other.reset(seed=50)
        await steps(envs, 0, 7)
        states = await envs.get_state([2, 0])
        found = [await envs.step([1] * N) for _ in range(4)]
        await steps(other, 0, 3)
        undisturbed = await other.get_state([2])
        await other.set_state(states, [0, 1])
        again = [await other.step([1] * N) for _ in range(4)]
        await other.set_state(undisturbed, [2])
        third = [await other.step([1] * N) for _ in range(4)]
        begun = [step.terminated | step.truncated for step in found]
        for slot, where in ((2, 0), (0, 1)):
            for t in range(4):
                assert again[t].obs[where].tolist() == found[t].obs[slot].tolist()
                assert again[t].reward[where] == found[t].reward[slot]
                if plan is not None and begun[t][slot] and mode == "SameStep":
                    break  # its next episode, but one, has another slot's seed
                if plan is not None and t and begun[t - 1][slot]:
                    break
        for t in range(4):
            assert again[t].obs[2].tolist() == third[t].obs[2].tolist()


@modes
@pytest.mark.asyncio
async def test_states_in_a_file(mode: Any, tmp_path: Path) -> None:
    """Numbers, arrays and texts need no pickle; the parts of other observations do."""
    for kind, pickled in (("box", False), ("graph", True)):
        path = tmp_path / kind
        async with make(partial(Kept, kind), seed_plan=PLAN, autoreset_mode=mode) as envs:
            await envs.reset()
            await steps(envs, 0, 5)
            states = await envs.get_state()
            assert [state.has_pickles for state in states] == [pickled] * N
            aioenv.save(path, states)
            found = await steps(envs, 5, 20)
        async with make(partial(Kept, kind), seed_plan=PLAN, autoreset_mode=mode) as envs:
            if pickled:
                with pytest.raises(ValueError, match="allow_pickle=True"):
                    aioenv.load(path)
            await envs.set_state(aioenv.load(path, allow_pickle=pickled))
            assert_equal_runs(await steps(envs, 5, 20), found)


@modes
@pytest.mark.asyncio
async def test_a_preparation_under_way_is_awaited(mode: Any, tmp_path: Path) -> None:
    gates = Gates(tmp_path)

    class Waiting(Gated):
        def get_state(self) -> dict[str, Any]:
            return {"episode": self.episode, "t": self.t}

        def set_state(self, state: dict[str, Any]) -> None:
            self.episode, self.t = state["episode"], state["t"]

    factories = [partial(Waiting, gates.folder, 0), partial(Waiting, gates.folder, 1, 5)]
    async with aioenv.AsyncVectorEnv(factories, spare_envs=True, autoreset_mode=mode) as envs:
        gates.close(0, 1)
        await envs.reset(seed=1)
        await envs.step([0, 0])
        taking = asyncio.ensure_future(envs.get_state())
        while envs.workers[3].state != "ready":
            await asyncio.sleep(0)
        assert not taking.done()
        assert envs.workers[2].state == "busy"
        await asyncio.to_thread(gates.open, 0, 1)
        states = await taking
        found = [await envs.step([0, 1]) for _ in range(12)]
        gates.close(0, 50)  # no reset of a spare env is needed for the next episode, only for the one after it
        await envs.set_state(states)
        assert_equal_runs([await envs.step([0, 1]) for _ in range(12)], found)


@modes
@pytest.mark.asyncio
async def test_slots_without_further_episodes(mode: Any) -> None:
    """The prepared reset of a state may have found none; the last observation is a part of a state."""
    options = {"autoreset_mode": mode, "autoreset_options": level, "seed_plan": PLAN}
    async with make(Last, **options) as envs, make(Last, **options) as fresh:
        await envs.reset()
        states, found = [], []
        for t in range(20):
            states.append(await envs.get_state())
            found.append(await envs.step(actions(t)))
            assert found[-1].obs.any(1).all() or "_active" in found[-1].info or t == 0
            if envs.exhausted:
                break
        assert envs.exhausted
        for t, state in enumerate(states):
            fresh.resume_all()
            await fresh.set_state(state)
            assert_equal_runs(await steps(fresh, t, len(found)), found[t:])
            assert fresh.exhausted == envs.exhausted


@modes
@pytest.mark.asyncio
async def test_after_a_reset_of_the_user_nothing_of_the_state_is_left(mode: Any) -> None:
    options = {"autoreset_mode": mode, "seed_plan": PLAN}
    async with make(**options) as envs, make(**options) as other:
        await envs.reset()
        await steps(envs, 0, 6)
        states = await envs.get_state()
        await other.set_state(states)
        mask = np.array([True, False, True])
        for number, given in enumerate(({"seed": 5}, {"options": {"reset_mask": mask}}, {"seed": [None, 2, None]})):
            runs = []
            for one in (envs, other):
                await one.set_state(states)
                if number == 1:
                    await one.step(actions(1))
                reset = await one.reset(**given)  # type: ignore[arg-type]
                runs.append([reset, *await steps(one, 0, 15)])
            assert_equal_runs(*runs)


# ------------------------------------------------------------ states that do not fit


@pytest.mark.asyncio
async def test_states_of_another_number_of_envs_are_refused() -> None:
    async with make() as two, make(spare_envs=False) as one, make(spare_envs=False, num_workers=0) as here:
        for envs in (two, one, here):
            await envs.reset(seed=0)
        states = {envs: await envs.get_state() for envs in (two, one, here)}
        for envs in (one, here):
            with pytest.raises(
                aioenv.ResumeError, match=r"set_state: .* slot 0 .* two envs \(spare_envs=True\); .* one"
            ):
                await envs.set_state(states[two])
            with pytest.raises(aioenv.ResumeError, match=r"slot 2 .* one env; .* two"):
                await two.set_state(states[envs], [2, 0, 1])
        with pytest.raises(aioenv.ResumeError, match="for slot 1"):
            await two.set_state([states[two][0], states[one][0]], [0, 1])
    async with aioenv.make_vec("InvertedPendulum-v5", N, backend="native") as native:
        await native.reset(seed=0)
        with pytest.raises(aioenv.ResumeError, match="two envs"):
            await native.set_state(states[two])


class Other(Kept):
    """Another kind of env, with the same spaces."""


@modes
@plans
@pytest.mark.asyncio
async def test_a_slot_keeps_its_state_if_another_is_refused(mode: Any, plan: Any) -> None:
    options = {"autoreset_mode": mode, "seed_plan": plan}
    async with make(**options) as envs, make(**options) as undisturbed, make(Other, **options) as others:
        for one in (envs, undisturbed, others):
            await one.reset(seed=3)
        strange = [await others.get_state()]
        for _ in range(5):
            await steps(others, 0, 1)
            strange.append(await others.get_state())
        for t in range(25):
            mine = await envs.get_state()
            with pytest.raises(aioenv.ResumeError, match="slot 0: the state of Other does not fit Kept"):
                await envs.set_state([strange[t % 6][0], mine[1], mine[2]])
            assert_equal_runs([await envs.step(actions(t))], [await undisturbed.step(actions(t))])


class Refuses(Kept):
    """Raises where it is told to, before it sets anything."""

    def set_state(self, state: dict[str, Any]) -> None:
        if state["mark"] in (8 + self.spare, 10):
            raise RuntimeError("this state can't be set")
        super().set_state(state)


@modes
@plans
@pytest.mark.parametrize("mark", [8, 9, 10], ids=["first", "second", "both"])
@pytest.mark.asyncio
async def test_an_env_that_raises_in_set_state_leaves_the_other_slots_alone(mode: Any, plan: Any, mark: int) -> None:
    """They have their states. The slot goes on as before if both of its envs raise."""
    options = {"autoreset_mode": mode, "seed_plan": plan}
    async with make(Refuses, **options) as envs, make(Refuses, **options) as old, make(Refuses, **options) as new:
        for one, seed in ((envs, 3), (old, 3), (new, 8)):
            await one.reset(seed=seed)
        await steps(new, 0, 3)
        for t in range(5):
            start, states = await old.get_state(), await new.get_state()
            await new.set_attr("mark", mark)
            bad = await new.get_state([0])
            await new.set_attr("mark", 0)
            await envs.set_state(start)
            with pytest.raises(aioenv.EnvError, match="this state can't be set") as raised:
                await envs.set_state([*bad, *states[1:]])
            assert raised.value.slots == (0,)
            for i in range(10):
                mine, kept, theirs = [await one.step(actions(i)) for one in (envs, old, new)]
                for found, as_before, as_new in zip(mine[:4], kept[:4], theirs[:4], strict=True):
                    np.testing.assert_array_equal(found[1:], as_new[1:])
                    if mark == 10:
                        np.testing.assert_array_equal(found[0], as_before[0])
            await old.set_state(start)
            await new.set_state(states)
            await steps(old, t, t + 1)
            await steps(new, t, t + 1)


@modes
@pytest.mark.asyncio
async def test_a_next_episode_that_can_not_begin_has_no_state(mode: Any) -> None:
    def options(slot: int, episode: int) -> dict[str, Any]:
        return {"level": ValueError("no such level") if episode == 1 and slot == 1 else None}

    async with make(autoreset_mode=mode, autoreset_options=options, seed_plan=PLAN) as envs:
        await envs.reset()
        with pytest.raises(aioenv.ResumeError, match=r"slot 1: its next episode can't begin.*no such level"):
            await envs.get_state()
        assert len(await envs.get_state([0, 2])) == 2
        with pytest.raises(aioenv.EnvError, match="no such level"):
            await steps(envs, 0, 6)


class Stateless(Told):
    """Has none."""


@pytest.mark.asyncio
async def test_other_errors() -> None:
    async with make(Stateless) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.ResumeError, match=r"slot 0: the state of Stateless can't be had.* 2 more slots"):
            await envs.get_state()
    async with make() as envs:
        await envs.reset(seed=0)
        states = await envs.get_state()
        with pytest.raises(ValueError, match="got 2 states for 3 slots"):
            await envs.set_state(states[:2])
        envs.send([0] * N)
        with pytest.raises(aioenv.PendingCallError):
            await envs.get_state()
        with pytest.raises(aioenv.PendingCallError):
            await envs.set_state(states)
        await envs.recv(N)


# ------------------------------------------------------------ cancellation, and the ends of workers


@modes
@pytest.mark.parametrize("fits", [True, False])
def test_cancelled_at_each_await_point(mode: Any, fits: bool) -> None:
    """The states are set all the same: what follows is that of the state."""

    async def main() -> None:
        options = {"autoreset_mode": mode, "seed_plan": PLAN}
        async with make(**options) as envs, make(Kept if fits else Other, **options) as source:
            await envs.reset(seed=3)
            await source.reset(seed=8)
            await steps(source, 0, 4)
            states = await source.get_state()
            found = await steps(source, 4, 20)
            hits, k = 0, 1
            while True:
                await steps(envs, 0, k % 5)
                before = await envs.get_state()
                after = await steps(envs, 4, 20)
                await envs.set_state(before)
                try:
                    cancel = await CancelAt(k).run(envs.set_state(states))
                except aioenv.ResumeError:
                    assert not fits
                    assert_equal_runs(await steps(envs, 4, 20), after)
                    break
                if fits:
                    assert_equal_runs(await steps(envs, 4, 20), found)
                else:  # its slots need a reset at the latest when an episode ends
                    with pytest.raises(aioenv.EnvError, match="does not fit"):
                        await steps(envs, 0, 8)
                    await envs.reset()
                if not cancel.hit:
                    break
                hits, k = hits + 1, k + 1
            assert hits >= 1

    asyncio.run(main())


async def kill(envs: aioenv.AsyncVectorEnv, worker: int) -> None:
    pid = envs.workers[worker].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while envs.workers[worker].pid == pid and envs.workers[worker].state != "dead":
        await asyncio.sleep(0)


class Slow(gymnasium.Env[Any, Any]):
    """Observes the step of its episode, which has five; the spare env takes a while for a state."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.array([0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.array([float(self.t)]), 1.0, self.t == 5, False, {}

    def get_state(self) -> int:
        return self.t

    def set_state(self, state: int) -> None:
        time.sleep(0.3 * aioenv.is_spare_env())
        self.t = state


@modes
@pytest.mark.asyncio
async def test_statistics_leave_out_an_episode_that_was_set_in_a_call_that_was_cancelled(mode: Any) -> None:
    async with make(Slow, 1, autoreset_mode=mode, episode_stats=True) as envs:
        await envs.reset()
        await envs.step([0])
        state = await envs.get_state()
        for _ in range(3):
            await envs.step([0])
        await until(lambda: envs.workers[1].state == "ready")
        task = asyncio.ensure_future(envs.set_state(state))
        await until(lambda: [worker.state for worker in envs.workers] == ["ready", "busy"])  # one has taken it
        task.cancel()
        for _ in range(4):
            step = await envs.step([0])
            assert "episode" not in step.info
            if step.terminated[0]:
                break
        else:
            raise AssertionError("it does not end")


@modes
@pytest.mark.parametrize("worker", [1, N + 1])
@pytest.mark.asyncio
async def test_a_worker_that_is_gone(mode: Any, worker: int) -> None:
    """Neither reads nor sets a state; the slot goes on in its other env after a reset."""
    async with make(autoreset_mode=mode, seed_plan=PLAN) as envs:
        await envs.reset()
        states = await envs.get_state()
        await kill(envs, worker)
        for ask in (envs.get_state, partial(envs.set_state, states)):
            with pytest.raises(aioenv.WorkerDied) as caught:
                await ask()
            assert caught.value.slots == (1,)
        await envs.get_state([0, 2])
        await envs.set_state([states[2], states[0]], [0, 2])
        await envs.reset()
        await steps(envs, 0, 20)


@modes
@pytest.mark.asyncio
async def test_a_worker_that_is_started_again(mode: Any) -> None:
    """States wait for it. An episode that was lost has none, until its end is handed out."""
    restart = aioenv.RestartPolicy()
    options = {"autoreset_mode": mode, "seed_plan": PLAN}
    async with make(**options, restart=restart) as envs, make(**options) as fresh:
        await envs.reset()
        states = await envs.get_state()
        found = await steps(envs, 0, 20)
        await envs.set_state(states)
        await kill(envs, N + 1)
        again = await envs.get_state()
        await fresh.set_state(again)
        assert_equal_runs(await steps(fresh, 0, 20), found)
        while (await envs.get_state([0]))[0].values["due"]:  # whether the next step begins an episode
            await envs.step(actions(0))
        await kill(envs, N * (await envs.get_attr("spare"))[0])
        with pytest.raises(aioenv.ResumeError, match="slot 0: its episode was lost with its worker"):
            await envs.get_state()
        await envs.set_state(states)
        assert_equal_runs(await steps(envs, 0, 20), found)


# ------------------------------------------------------------ MuJoCo, images, blocking code


class Colours(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Colours the model in each reset."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = self.env.reset(seed=seed, options=options)
        model, rng = self.unwrapped.model, self.unwrapped.np_random  # type: ignore[attr-defined]
        model.geom_rgba[:, :3] = rng.random((model.ngeom, 3))
        return result

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """There is nothing to set."""


@modes
@pytest.mark.parametrize(("plan", "draws"), [(None, False), (PLAN, True)], ids=["no plan", "plan, images"])
@pytest.mark.asyncio
async def test_mujoco_and_its_images(mode: Any, plan: Any, draws: bool) -> None:
    def make_env() -> Any:
        return Colours(gymnasium.make("InvertedPendulum-v5", max_episode_steps=4))

    options: dict[str, Any] = {"autoreset_mode": mode, "seed_plan": plan, "spare_envs": True}
    if draws:
        options["render"] = aioenv.RenderConfig(width=32, height=32)

    async def go_on(envs: aioenv.AsyncVectorEnv) -> list[Any]:
        found = []
        for t in range(14):
            found.append(await envs.step(np.full((2, 1), 0.3 - 0.1 * (t % 6), np.float32)))
            if draws:
                found.append([await envs.render()])
        return found

    async with (
        aioenv.AsyncVectorEnv([make_env] * 2, **options) as envs,
        aioenv.AsyncVectorEnv([make_env] * 2, **options) as fresh,
    ):
        await envs.reset(seed=1)
        await fresh.reset(seed=9)
        for _ in range(6):
            states = await envs.get_state()
            found = await go_on(envs)
            await fresh.set_state(states)
            assert_equal_runs(await go_on(fresh), found)
            await envs.set_state(states)
            await envs.step(np.zeros((2, 1), np.float32))


@modes
def test_blocking_code(mode: Any) -> None:
    with sync.make_vec(Kept, N, spare_envs=True, autoreset_mode=mode, seed_plan=PLAN, episode_stats=True) as envs:
        envs.reset()
        for t in range(5):
            envs.step(np.array(actions(t)))
        states = envs.get_state()
        found = [envs.step(np.array(actions(t))) for t in range(20)]
        envs.set_state(states)
        again = [envs.step(np.array(actions(t))) for t in range(20)]
        for mine, theirs in zip(again, found, strict=True):
            assert_equal_runs([mine[:4]], [theirs[:4]])
