"""Random steps and resets, of all slots, of some and of one, and what may come of each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from aioenv.errors import (
    AioenvError,
    EnvError,
    NoAsyncCallError,
    PausedError,
    SlotError,
    StepTimeout,
    WorkerDied,
)
from tests.fuzz.fuzz_model import Outcome, World

if TYPE_CHECKING:
    pass

LIMIT_S = 20.0  # for one operation


async def cancel_at_some_await(task: asyncio.Task[Any], rng: random.Random) -> None:
    """Cancel what has begun, after a few turns of the loop."""
    if rng.random() < 0.3:
        await asyncio.sleep(rng.random() * 0.003)
    for _ in range(rng.randint(0, 12)):
        await asyncio.sleep(0)
    task.cancel()


class Requests:
    """The part of a `Driver` that steps and resets."""

    # ------------------------------------------------------------ whole batches

    async def do_step(self) -> None:
        actions = self.actions()
        timeout_s = self.timeout()
        self.log[-1] += f" {actions.tolist()} {timeout_s or ''}"
        how, value = await self.attempt(self.envs.step(actions, timeout_s=timeout_s))
        self.filter("step", lambda w: self.whole(w, how, value, False, lambda v, slots: v.begin(slots, actions)))

    def timeout(self) -> float | None:
        if self.config.kwargs.get("run_in") == "inline" or self.rng.random() < 0.9:
            return None
        return self.rng.choice([0.001, 0.004, 5.0])

    async def do_reset(self, whole: bool = False) -> None:
        n, options = self.config.num_envs, {} if whole else self.options()
        seed = self.seed(n)
        mask = np.ones(n, bool)
        if not whole and self.rng.random() < 0.5:
            mask[self.rng.sample(range(n), self.rng.randrange(n))] = False
        sent = {**options, "reset_mask": mask} if not mask.all() else options
        self.log[-1] += f" {seed} {sent}"
        how, value = await self.attempt(self.envs.reset(seed=seed, options=sent or None, timeout_s=self.timeout()))
        seeds = spread(seed, range(n))

        def begin(world: World, slots: list[int]) -> None:
            resets = [i for i in slots if mask[i]]
            world.begin(resets, seeds=seeds, options=options or None)
            for i in slots:
                if not mask[i]:
                    fails = world.vector and options.get("raise") and set(world.worker_of(i)).intersection(resets)
                    show(world, i, bool(fails))

        self.filter("reset", lambda w: self.whole(w, how, value, True, begin))

    def whole(self, world: World, how: str, value: Any, reset: bool, begin: Any) -> list[World]:
        """Worlds after a whole batch was asked for."""
        dropped = world.clone()
        dropped.drop()
        live = dropped.live
        allowed = dropped.refusals(live, reset=reset) if live else {None}
        sent = dropped.clone()
        if None in allowed:
            begin(sent, live)
        if how == "interrupted" and None in allowed:
            taken = [sent.clone().lose_results(live)]
            sent.abandon(live)
            return [world.clone(), dropped, sent, *taken]
        if how in ("cancelled", "interrupted") or isinstance(value, StepTimeout):
            if None in allowed:
                sent.abandon(live)
            if isinstance(value, StepTimeout):
                self.check_late(sent, value)
            return [world.clone(), dropped, sent]
        if self.config.kind == "in-process" and isinstance(value, EnvError) and None in allowed:
            assert value.slots == tuple(live)
            return [sent.fail_together(live)]
        if isinstance(value, SlotError) and value.partial is not None:
            assert None in allowed, f"expected {allowed}"
            self.compare(sent, live, value.partial, value)
            return [sent]
        if how == "error":
            assert type_in(value, allowed), f"{value!r}, expected {allowed}"
            return [dropped, world.clone()]
        assert None in allowed, f"expected {allowed}"
        self.compare(sent, live, value, None)
        return [sent]

    def check_late(self, world: World, error: StepTimeout) -> None:
        assert set(error.running) <= set(range(world.n))

    def compare(self, world: World, slots: list[int], result: Any, error: Any) -> None:
        """A whole batch."""
        if len(result) == 2:
            n = world.n
            result = (result[0], np.zeros(n), np.zeros(n, bool), np.zeros(n, bool), result[1])
        world.check(slots, slots, world.n, result, errors_of(error))
        world.check_paused(result)

    # ------------------------------------------------------------ some slots

    async def do_send(self) -> None:
        slots = self.rng.choice([None, self.some_slots()])
        actions = self.actions()
        named = list(range(self.config.num_envs)) if slots is None else slots
        self.log[-1] += f" {slots} {actions.tolist()}"
        error = self.refused(lambda: self.envs.send(actions[named], slots))
        self.filter("send", lambda w: self.some(w, slots, error, False, lambda v, s: v.begin(s, actions)))

    async def do_send_reset(self) -> None:
        n, options = self.config.num_envs, self.options()
        slots = self.rng.choice([None, self.rng.sample(range(n), self.rng.randint(1, n))])
        named = list(range(n)) if slots is None else slots
        seed = self.seed(len(named))
        self.log[-1] += f" {slots} {seed} {options}"
        error = self.refused(lambda: self.envs.send_reset(slots, seed=seed, options=options or None))
        seeds = spread(seed, named)
        self.filter(
            "send_reset",
            lambda w: self.some(w, slots, error, True, lambda v, s: v.begin(s, seeds=seeds, options=options or None)),
        )

    def refused(self, work: Callable[[], Any]) -> Any:
        error = refused(work)
        if error is not None:
            self.log[-1] += f" -> {error!r}"[:300]
        return error

    def some(self, world: World, slots: Any, error: Any, reset: bool, begin: Any) -> list[World]:
        world = world.clone()
        if slots is not None and any(world.slots[i].paused for i in slots):
            assert isinstance(error, PausedError), repr(error)
            return [world]
        named = world.live if slots is None else slots
        allowed = world.refusals(named, reset=reset)
        if error is not None:
            assert type_in(error, allowed), f"{error!r}, expected {allowed}"
        else:
            assert None in allowed, f"it was sent, expected {allowed}"
            begin(world, named)
        return [world]

    async def do_recv(self) -> None:
        rng, n = self.rng, self.config.num_envs
        least, most = rng.randint(1, n), rng.choice([None, None, rng.randint(1, n)])
        deadline_s = rng.choice([None, None, None, 0.0005, 0.0])
        self.log[-1] += f" {least} {most} {deadline_s}"
        # which results were lost with an interrupted call is known of some calls only
        all_of_it = least == n and most is None and deadline_s is None
        cancel = all_of_it or not self.config.blocking
        how, value = await self.attempt(self.envs.recv(least, most, deadline_s=deadline_s), cancel=cancel)
        self.filter("recv", lambda w: self.received(w, how, value, least, most, deadline_s))

    def received(
        self, world: World, how: str, value: Any, least: int, most: int | None, deadline_s: Any
    ) -> list[World]:
        world = world.clone()
        if how in ("cancelled", "interrupted"):
            return [world] if how == "cancelled" else [world, world.clone().lose_results(world.pending)]
        if isinstance(value, NoAsyncCallError):
            assert not world.pending
            return [world]
        ready = value if how == "ok" else getattr(value, "partial", None)
        assert ready is not None, repr(value)
        slots = ready.slots.tolist()
        assert slots == sorted(set(slots))
        if self.config.kind == "in-process" and how == "error":
            for one in value.errors:
                world.fail_together(list(one.slots))
                least -= len(one.slots)
            if not slots:
                return [world]
            value, how = None, "ok"
        if deadline_s is None:
            assert len(slots) >= min(least, most or least, len(world.pending)), "fewer than asked for"
        assert len(slots) <= (most or world.n), "more than asked for"
        world.check(
            slots, list(range(len(slots))), len(slots), ready[1:], errors_of(value if how == "error" else None, slots)
        )
        return [world]

    async def do_ready(self) -> None:
        if self.config.blocking:
            return
        stop = self.rng.randint(1, 4)
        iterator = self.envs.ready()
        while stop:
            try:
                async with asyncio.timeout(LIMIT_S):
                    how, value = "ok", await anext(iterator)
            except StopAsyncIteration:
                break
            except SlotError as exc:
                how, value = "error", exc
            self.filter("ready", lambda w, how=how, value=value: self.received(w, how, value, 1, None, None))
            stop = stop - 1 if how == "ok" else 0
        await iterator.aclose()

    async def do_settle(self) -> None:
        """Take all that is there."""
        while self.envs.outstanding:
            how, value = await self.attempt(self.envs.recv(self.config.num_envs), cancel=False)
            self.filter("settle", lambda w, h=how, v=value: self.received(w, h, v, self.config.num_envs, None, None))

    # ------------------------------------------------------------ one slot

    async def do_step_at(self) -> None:
        slot, actions = self.rng.randrange(self.config.num_envs), self.actions()
        self.log[-1] += f" {slot} {actions[slot]}"
        how, value = await self.attempt(self.envs.step_at(slot, actions[slot]))
        self.filter("step_at", lambda w: self.single(w, slot, how, value, False, lambda v, s: v.begin(s, actions)))

    async def do_reset_at(self) -> None:
        slot, seed = self.rng.randrange(self.config.num_envs), self.rng.choice([None, self.rng.randrange(100)])
        self.log[-1] += f" {slot} {seed}"
        how, value = await self.attempt(self.envs.reset_at(slot, seed=seed))
        self.filter(
            "reset_at", lambda w: self.single(w, slot, how, value, True, lambda v, s: v.begin(s, seeds={slot: seed}))
        )

    def single(self, world: World, slot: int, how: str, value: Any, reset: bool, begin: Any) -> list[World]:
        if isinstance(value, PausedError):
            assert world.slots[slot].paused
            return [world.clone()]
        if type(value) is ValueError:
            assert not self.config.some
            return [world.clone()]
        if how == "ok":
            assert not world.slots[slot].paused
        dropped = world.clone()
        dropped.drop()
        allowed = dropped.refusals([slot], reset=reset)
        sent = dropped.clone()
        if None in allowed:
            begin(sent, [slot])
        if how == "interrupted" and None in allowed:
            taken = [sent.clone().lose_results([slot])]
            sent.abandon([slot])
            return [world.clone(), dropped, sent, *taken]
        if how in ("cancelled", "interrupted") or isinstance(value, StepTimeout):
            if None in allowed:
                sent.abandon([slot])
            return [world.clone(), dropped, sent]
        partial = getattr(value, "partial", None) if how == "error" else value
        if self.config.kind == "in-process" and isinstance(value, EnvError) and None in allowed:
            assert sent.take([slot])[0].error == "env" and value.slots == (slot,)
            return [sent]
        if partial is None:
            assert type_in(value, allowed), f"{value!r}, expected {allowed}"
            return [dropped, world.clone()]
        assert None in allowed, f"expected {allowed}"
        if len(partial) == 2:
            partial = (partial[0], 0.0, False, False, partial[1])
        obs, reward, terminated, truncated, info = partial
        outcome = sent.slots[slot].pending
        assert outcome is not None
        if not outcome.wild and how == "ok":
            infos = {key: item for one in outcome.infos for key, item in one.items()}
            assert str(normal(info)) == str(normal(infos)), f"{info} is not {infos}"
        outcome.infos = []  # which are no columns here
        batch = {key: np.asarray(item)[None] for key, item in obs.items()}
        columns = {"restarted": [info.get("restarted", False)]} if outcome.wild and how == "ok" else {}
        errors = errors_of(value if how == "error" else None)
        sent.check([slot], [0], 1, (batch, [reward], [terminated], [truncated], columns), errors)
        return [sent]


def refused(work: Callable[[], Any]) -> Any:
    try:
        work()
    except AioenvError as exc:
        return exc
    return None


def spread(seed: Any, slots: Any) -> dict[int, int | None]:
    """Seeds by slot."""
    if seed is None or isinstance(seed, list):
        return dict(zip(slots, [None] * 99 if seed is None else seed, strict=False))
    return {slot: seed + slot for slot in slots}


def type_in(error: Any, allowed: set[Any]) -> bool:
    return any(kind is not None and isinstance(error, kind) for kind in allowed)


def errors_of(error: Any, slots: Any = None) -> dict[int, str]:
    """Slots of an error, with "env" or "died"."""
    if error is None:
        return {}
    found = {}
    for one in error.errors:
        for slot in one.slots:
            if slots is None or slot in slots:
                found[slot] = "died" if isinstance(one, WorkerDied) else "env"
    return found


def show(world: World, slot: int, fails: bool) -> None:
    """A slot whose last observation comes with a whole reset."""
    mine = world.slots[slot]
    outcome = mine.pending = Outcome(False)
    outcome.obs = mine.last
    outcome.shown = True
    if fails:
        outcome.error, mine.last = "env", None
    if mine.dying:
        outcome.error = "died"
    if mine.wild:
        outcome.wild = True


def normal(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: normal(value[key]) for key in sorted(value)}
    return value.item() if isinstance(value, np.generic) else value
