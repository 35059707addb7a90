"""Random calls, states, pauses, deaths and rollouts, and what may come of each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from aioenv.errors import AioenvError, ClosedError, PendingCallError, ResumeError, StepTimeout, WorkerDied
from tests.fuzz.fuzz_envs import RAISE, Boom, Chain
from tests.fuzz.fuzz_model import World
from tests.fuzz.fuzz_requests import LIMIT_S, errors_of, refused
from tests.kits.compare import assert_same


class Others:
    """The part of a `Driver` that does all but steps and resets."""

    # ------------------------------------------------------------ calls

    async def do_call(self) -> None:
        await self.called(list(range(self.config.num_envs)), self.envs.call("peek"), Chain.peek)

    async def do_call_at(self) -> None:
        slots = self.rng.sample(range(self.config.num_envs), self.rng.randint(1, self.config.num_envs))
        self.log[-1] += f" {slots}"
        await self.called(slots, self.envs.call_at(slots, "peek"), Chain.peek)

    async def do_bump(self) -> None:
        by = self.rng.choice([1, 2, RAISE])
        self.log[-1] += f" {by}"
        await self.called(list(range(self.config.num_envs)), self.envs.call("bump", by), lambda env: env.bump(by))

    async def do_set_attr(self) -> None:
        values = [self.rng.randrange(100) for _ in range(self.config.num_envs)]
        self.log[-1] += f" {values}"
        slots = list(range(self.config.num_envs))
        each = iter(values * 1000)
        await self.called(
            slots, self.envs.set_attr("mark", values), lambda env: setattr(env, "mark", next(each)), False
        )

    async def called(self, slots: list[int], coroutine: Any, work: Any, gives: bool = True) -> None:
        if self.config.kind in ("in-process", "vectors"):
            coroutine.close()
            return
        how, value = await self.attempt(coroutine)

        def branch(world: World) -> list[World]:
            some = [world.slots[i] for i in slots]
            if isinstance(value, PendingCallError):
                assert any(s.pending is not None for s in some)
                return [world.clone()]
            if isinstance(value, WorkerDied):
                assert any(s.dying or world.restart for s in some), "no worker has died"
            elif how == "ok":
                assert all(not s.dying for s in some), "a worker was dead"
            done = world.clone()
            expected: list[Any] = []
            failed = set()
            for i in slots:
                slot = done.slots[i]
                before = slot.env.digest
                try:
                    expected.append(work(slot.env))
                except Boom:
                    failed.add(i)
                    expected.append(None)
                if slot.pending is not None:
                    slot.pending.bumped += slot.env.digest - before
            if how in ("cancelled", "interrupted") or isinstance(value, StepTimeout):
                return [world.clone(), done]
            results = value if how == "ok" else value.partial
            if how == "error":
                assert value.partial is not None or isinstance(value, WorkerDied), repr(value)
                if not isinstance(value, WorkerDied):
                    assert failed <= set(errors_of(value)), f"{value!r}, expected {failed}"
            else:
                assert not failed
            if how == "ok" and gives:
                for i, got, due in zip(slots, results, expected, strict=True):
                    if not done.slots[i].wild and not (done.slots[i].pending and done.slots[i].pending.wild):
                        assert got == due, f"slot {i}: {got} is not {due}"
            return [done] if how == "ok" or not isinstance(value, WorkerDied) else [done, world.clone()]

        self.filter("call", branch)

    async def do_get_state(self) -> None:
        how, value = await self.attempt(self.envs.get_state(), cancel=False)
        if isinstance(value, ResumeError):

            def has_lost(world: World) -> list[World]:
                found = re.match(r"slot (\d+): its episode was lost with its worker", str(value))
                assert found is not None, repr(value)
                slot = world.slots[int(found[1])]
                assert world.restart == "lose" and (slot.wild or (slot.pending and slot.pending.wild))
                return [world]

            self.filter("get_state", has_lost)
            return
        if how != "ok":
            assert isinstance(value, (PendingCallError, WorkerDied))
            return
        states = self.__dict__.setdefault("states", [])
        states.append(value)

        def branch(world: World) -> list[World]:
            world = world.clone()
            world.snapshots.append(
                [(s.env.clone(), s.due, s.wild or bool(s.pending and s.pending.wild)) for s in world.slots]
            )
            return [world]

        self.filter("get_state", branch)

    async def do_set_state(self) -> None:
        states = self.__dict__.get("states")
        if not states:
            return
        which = self.rng.randrange(len(states))
        targets = self.rng.sample(range(self.config.num_envs), self.rng.randint(1, self.config.num_envs))
        sources = [self.rng.randrange(self.config.num_envs) for _ in targets]
        if any(world.snapshots[which][j][2] for j in sources for world in self.worlds):
            return
        self.log[-1] += f" {which} {targets} {sources}"
        how, value = await self.attempt(self.envs.set_state([states[which][j] for j in sources], targets), cancel=False)

        def branch(world: World) -> list[World]:
            if how == "error":
                some = world.slots if self.config.kind == "in-process" else [world.slots[i] for i in targets]
                assert (isinstance(value, PendingCallError) and any(s.pending for s in some)) or (
                    isinstance(value, WorkerDied) and (world.restart or any(s.dying for s in some))
                ), repr(value)
            done = world.clone()
            lost = value.slots if isinstance(value, WorkerDied) else ()  # the other workers do as they were asked
            for i, j in zip(targets, sources, strict=True):
                if i in lost:
                    continue
                env, due, _ = done.snapshots[which][j]
                slot = done.slots[i]
                mark = slot.env.mark
                slot.env, slot.due = env.clone(), due
                slot.env.mark = mark
                slot.failed = slot.over = slot.wild = False
                slot.last = None
                if slot.pending is not None:
                    slot.pending.overtaken = True
            return [done] if how == "ok" else [world.clone(), done]

        self.filter("set_state", branch)

    # ------------------------------------------------------------ the rest

    async def do_pause(self) -> None:
        slots = self.rng.sample(range(self.config.num_envs), self.rng.randint(0, self.config.num_envs))
        self.log[-1] += f" {slots}"
        if not self.config.some:
            return
        self.envs.pause(slots)
        for world in self.worlds:
            for i in slots:
                world.slots[i].paused = True
        self.check_active()

    async def do_resume(self) -> None:
        slots = self.rng.choice([None, self.rng.sample(range(self.config.num_envs), 1)])
        self.log[-1] += f" {slots}"
        if not self.config.some:
            return
        self.envs.resume(slots)
        for world in self.worlds:
            for i in range(world.n) if slots is None else slots:
                world.slots[i].paused = False
        self.check_active()

    def check_active(self) -> None:
        assert self.envs.active_slots.tolist() == self.world.live

    async def do_kill(self) -> None:
        workers = [w for w in self.envs.workers if w.pid is not None and w.state in ("ready", "busy", "draining")]
        if not workers or self.config.kind == "vectors":
            return
        if any(slot.last is None and slot.env.ops == 0 for world in self.worlds for slot in world.slots):
            return  # never reset
        worker = self.rng.choice(workers)
        self.log[-1] += f" {worker}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        for world in self.worlds:
            world.lose(worker.slots)

    async def do_both(self) -> None:
        """Two calls from two tasks at once."""
        if self.config.blocking or any(w.pending for w in self.worlds):
            return
        one, two = self.actions(), self.actions()
        self.log[-1] += f" {one.tolist()} {two.tolist()}"
        first = asyncio.ensure_future(self.envs.step(one))
        second = asyncio.ensure_future(self.envs.step(two))
        results = []
        for task in (first, second):
            self.log.append("  step")
            results.append(await self.attempt(task, cancel=False))

        def branch(world: World) -> list[World]:
            after = []
            begin = lambda v, slots: v.begin(slots, one)  # noqa: E731
            again = lambda v, slots: v.begin(slots, two)  # noqa: E731
            for w in self.whole(world, *results[0], False, begin):
                if isinstance(results[1][1], PendingCallError):
                    after.append(w)
                else:
                    after += self.whole(w, *results[1], False, again)
            return after

        self.filter("both", branch)

    # ------------------------------------------------------------ runs

    def is_quiet(self) -> bool:
        """Whether all is known, and nothing is in the way of a run."""
        return len(self.worlds) == 1 and not any(
            s.pending or s.failed or s.dying or s.wild or s.paused or s.last is None for s in self.world.slots
        )

    async def do_rollout(self) -> None:
        steps, groups = self.rng.randint(1, 6), self.rng.randint(1, 3)
        if not self.is_quiet():
            return
        self.log[-1] += f" {steps} {groups}"
        how, rollout = await self.attempt(self.envs.rollout(policy, steps, groups), cancel=False)
        assert how == "ok", repr(rollout)
        world = self.world
        reset = self.config.mode is AutoresetMode.DISABLED
        for i, slot in enumerate(world.slots):
            for t in range(steps):
                over = reset and slot.over
                if over:
                    world.begin([i], seeds={i: None})
                    world.take([i])
                where, last = f"slot {i} step {t}", slot.last
                assert_same({k: v[t, i] for k, v in rollout.obs.items()}, columns(last), where)
                action, due = int(policy({k: np.asarray(v)[None] for k, v in last.items()})[0]), slot.due
                world.begin([i], actions={i: action})
                (outcome,) = world.take([i])
                got = rollout.reward[t, i], rollout.terminated[t, i], rollout.truncated[t, i], rollout.valid[t, i]
                assert got == (outcome.reward, outcome.terminated, outcome.truncated, not due), where
                assert rollout.actions[t, i] == action, where
            assert_same({k: v[i] for k, v in rollout.last_obs.items()}, columns(slot.last), f"slot {i} last")

    async def do_episodes(self) -> None:
        n = self.rng.randint(1, 7)
        if not self.is_quiet() or not self.config.some or self.config.blocking:
            return
        self.log[-1] += f" {n}"
        stop = self.rng.choice([n, n, self.rng.randint(0, n)])
        numbers = []
        iterator = self.envs.episodes(policy, n, seed=list(range(n)))
        async with asyncio.timeout(LIMIT_S):
            while len(numbers) < stop:
                episode = await anext(iterator)
                numbers.append(episode.number)
                env = Chain()
                obs, _ = env.reset(seed=episode.number)
                total, length, ends = 0.0, 0, False
                while not ends:
                    obs, reward, terminated, truncated, _ = env.step(policy({"count": obs["count"][None]})[0])
                    total, length, ends = total + reward, length + 1, terminated or truncated
                assert (episode.total_reward, episode.length, episode.terminated) == (total, length, terminated)
            await iterator.aclose()
        assert len(set(numbers)) == stop
        if stop == n:
            assert sorted(numbers) == list(range(n))
        for slot in self.world.slots:
            slot.wild = True
            slot.paused = False
        assert self.envs.active_slots.tolist() == self.world.live
        await self.do_settle()  # what was in flight when it was left
        self.log.append("reset after episodes")
        await self.do_reset(whole=True)

    async def do_check(self) -> None:
        """What can be asked at any time."""
        states = {w.state for w in self.envs.workers}
        assert states <= {"ready", "busy", "draining", "restarting", "dead"}, states
        if self.config.restart:
            assert "dead" not in states or True
        repr(self.envs)

    async def close_midway(self) -> None:
        if self.config.blocking:
            return
        self.log.append("close midway")
        tasks = [asyncio.ensure_future(self.envs.step(self.actions()))]
        tasks.append(asyncio.ensure_future(self.envs.recv(2)))
        for _ in range(self.rng.randint(0, 5)):
            await asyncio.sleep(0)
        async with asyncio.timeout(LIMIT_S):
            await self.envs.close()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            assert not isinstance(result, BaseException) or isinstance(result, AioenvError), repr(result)
        for call in (lambda: self.envs.send(self.actions()), lambda: self.envs.outstanding):
            assert isinstance(refused(call), ClosedError)
        try:
            await self.envs.step(self.actions())
        except ClosedError:
            return
        raise AssertionError("stepped after close")


def policy(obs: Any) -> Any:
    """Of each row by itself; never a fault."""
    return obs["count"][:, 2] % RAISE


def columns(obs: Any) -> Any:
    return {key: np.asarray(value)[()] for key, value in obs.items()}
