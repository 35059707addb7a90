"""Kit of the tests of spare envs under faults: an env that shows who it is, and a model of what a slot hands out."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.core.spares import spare_seed
from tests.faults.align_kit import Ledger

N = 3
MODES = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)


class Twin(Ledger):
    """A `Ledger` that also shows its slot, which of the slot's two envs it is, and the steps of its episode.

    Its episodes have 2 to 5 steps, so that those of several slots end at different times; that of slot 1 first.

    Args:
        slot: its slot.
        slow_s, reset_s: how long a step and a reset take, in seconds.
        hold: where fifos may be (see `Hold`).
        spare: which env it is; None: as `is_spare_env` says.
    """

    observation_space = spaces.Box(-1e9, 1e9, (7,), np.float64)

    def __init__(
        self, slot: int, slow_s: float = 0.0, reset_s: float = 0.0, hold: str = "", spare: bool | None = None
    ) -> None:
        super().__init__(slow_s)
        self.slot, self.reset_s, self.hold = slot, reset_s, hold
        self.spare = aioenv.is_spare_env() if spare is None else spare
        self.t = self._level = 0

    def _observe(self):
        seen = self.slot, self.spare, self.resets, self.t, self.steps, self.digest, self.np_random.random()
        return np.array(seen, np.float64)

    def _wait_at(self, name):
        if self.hold and os.path.exists(f"{self.hold}/{name}"):
            with open(f"{self.hold}/{name}") as fifo:
                fifo.read()

    def who(self):
        return {"slot": self.slot, "spare": self.spare, "resets": self.resets}

    def reset(self, *, seed=None, options=None):
        self._wait_at(f"{self.slot}-{int(self.spare)}")
        if self.reset_s:
            time.sleep(self.reset_s)
        self.LENGTH = 2 + (3 * (self.resets + 1) + self.slot + self.spare) % 4
        obs, _ = super().reset(seed=seed)
        return obs, self.who()

    def step(self, action):
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == WAIT:
            self._wait_at("step")
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {**self.who(), "t": self.t, "steps": self.steps}

    @property
    def level(self):
        return self._level

    @level.setter
    def level(self, level):
        if self.spare and level < 0:
            raise ValueError("no such level")
        self._level = level


DIE, WAIT = 999, 998  # actions


class Hold:
    """Has envs wait: a reset of one env at the name `SLOT-SPARE`, a step with action WAIT at `step`.

    Args:
        folder: where its fifos are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def hold(self, *names: str) -> None:
        for name in names:
            os.mkfifo(f"{self.folder}/{name}")

    def release(self, *names: str) -> None:
        """Let one that waits, or soon will, go on; later ones do not wait."""
        for name in names:
            fd = os.open(f"{self.folder}/{name}", os.O_WRONLY)
            self.forget(name)
            os.close(fd)

    def forget(self, *names: str) -> None:
        for name in names:
            os.unlink(f"{self.folder}/{name}")


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never happens"
        await asyncio.sleep(0)


async def killed(envs: aioenv.AsyncVectorEnv, *indices: int) -> None:
    """Kill workers, one after the other, and wait until that is known."""
    for index in indices:
        os.kill(envs.workers[index].pid, signal.SIGKILL)
        await until(lambda index=index: envs.workers[index].state == "dead")


def waits(envs: aioenv.AsyncVectorEnv, slot: int) -> bool:
    """Whether a step waits for the spare env of a slot."""
    return envs._backend.dispatcher.spares._slots[slot].waiting is not None


class Row(NamedTuple):
    """What one slot hands out; an `obs` of None stands for any."""

    obs: np.ndarray | None
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    def fits(self, expected: Row) -> bool:
        alike = expected.obs is None or self.obs.tobytes() == expected.obs.tobytes()
        return alike and self[1:4] == expected[1:4] and _same(self.info, expected.info)


def _same(one: Any, other: Any) -> bool:
    if isinstance(other, dict):
        return isinstance(one, dict) and set(one) == set(other) and all(_same(one[key], other[key]) for key in other)
    return bool(np.array_equal(one, other))


def row_of(result: Any, row: int) -> Row:
    """One row of what `step`, `reset` or `recv` returned."""
    obs, info = result[-5:][0] if len(result) > 2 else result[0], result[-1]
    if len(result) == 2:
        return Row(obs[row], 0.0, False, False, _info_of(info, row))
    reward, terminated, truncated = (array[row].item() for array in result[-4:-1])
    return Row(obs[row], reward, terminated, truncated, _info_of(info, row))


def _info_of(info: dict[str, Any], row: int) -> dict[str, Any]:
    keys = [key for key in info if not key.startswith("_") and info[f"_{key}"][row]]
    return {key: _info_of(info[key], row) if isinstance(info[key], dict) else info[key][row] for key in keys}


Op = tuple[str, Any]  # a step and its action, a reset and its seed, or a look at the last observation


class State:
    """The model of one slot: two envs in this process, and which of them runs the episode.

    Attributes:
        live: the number of the env that runs the episode: 0 or 1.
        alive: which of the two live.
        ops: how many steps and resets it has done.
    """

    def __init__(self, slot: int, mode: AutoresetMode) -> None:
        self.same_step = mode is AutoresetMode.SAME_STEP
        self.envs = [Twin(slot, spare=False), Twin(slot, spare=True)]
        self.live = 0
        self.alive = [True, True]
        self.prepared: Any = None
        self.ended = False
        self.last: Any = None
        self.ops = 0

    def outcomes(self, op: Op, *, kills: bool) -> list[tuple[State, Row]]:
        """The states to which a request may lead, with what it hands out; several if an env may die unnoticed."""
        kind, value = op
        if kind == "look":
            state = copy.copy(self)
            state.ops += 1
            # the last observation of an env that has died is not known
            return [(state, Row(None if kills else self.last, 0.0, False, False, {}))]
        found = []
        for alone in (False, True) if kills and kind == "step" and all(self.alive) else (False,):
            state = copy.deepcopy(self)
            if alone:
                state.alive[1 - state.live] = False
            row = state._reset(value) if kind == "reset" else state._step(value)
            state.last, state.ops = row.obs, state.ops + 1
            found.append((state, row))
        return found

    def interrupted(self) -> State:
        """The state if the envs changed places and that was interrupted, so that no next episode was prepared."""
        state = copy.deepcopy(self)
        state.live = 1 - state.live
        return state

    def _reset(self, seed: int | None) -> Row:
        if not self.alive[self.live]:
            self.live = 1 - self.live
        self.ended = False
        obs, info = self.envs[self.live].reset(seed=seed)
        self._prepare(spare_seed(seed))
        return Row(obs, 0.0, False, False, info)

    def _prepare(self, seed: int | None = None) -> None:
        if self.alive[1 - self.live]:
            self.prepared = self.envs[1 - self.live].reset(seed=seed)

    def _take_over(self) -> tuple[Any, dict[str, Any]]:
        self.ended = False
        if not self.alive[1 - self.live]:
            return self.envs[self.live].reset()
        begun, self.live = self.prepared, 1 - self.live
        self._prepare()
        return begun

    def _step(self, action: int) -> Row:
        if self.ended:
            obs, info = self._take_over()
            return Row(obs, 0.0, False, False, info)
        obs, reward, terminated, truncated, info = self.envs[self.live].step(action)
        if terminated or truncated:
            if self.same_step:
                final = {"final_obs": obs, "final_info": info}
                obs, info = self._take_over()
                return Row(obs, reward, terminated, truncated, {**info, **final})
            self.ended = True
        return Row(obs, reward, terminated, truncated, info)


class Model:
    """What all slots of a vector env may hand out next.

    Args:
        mode: the autoreset mode.
        kills: whether workers may die at any moment.

    Attributes:
        states: the states that each slot may be in.
        pending: by slot, what a request may lead to whose result was not seen yet.
        failed: the slots that have to be reset.
    """

    def __init__(self, mode: AutoresetMode, *, kills: bool = False) -> None:
        self.kills = kills
        self.states = [[State(slot, mode)] for slot in range(N)]
        self.pending: dict[int, list[tuple[State, Row]]] = {}
        self.failed: set[int] = set()

    def begin(self, ops: dict[int, Op]) -> None:
        """Note requests that are being sent; results that are still pending are dropped by that."""
        for slot in list(self.pending):
            done = [state for state, _ in self.pending.pop(slot)]
            self.states[slot] = [*self.states[slot], *done] if self.kills else done
        for slot, op in ops.items():
            self.pending[slot] = [pair for state in self.states[slot] for pair in state.outcomes(op, kills=self.kills)]
            if op[0] == "reset":
                self.failed.discard(slot)

    def doubt(self) -> None:
        """Note that the last request may not have been sent, and that its results will not be seen."""
        for slot in list(self.pending):
            self.states[slot] += [state for state, _ in self.pending.pop(slot)]

    def settle(self, counts: set[int]) -> None:
        """Note that each slot has done one of these numbers of steps and resets."""
        for states in self.states:
            states[:] = [state for state in states if state.ops in counts]

    def forget(self) -> None:
        """Note that the last request was not sent."""
        self.pending = {}

    def check(self, slot: int, row: Row, *, take: bool = True) -> None:
        """Check a result, and take it."""
        fitting = [state for state, expected in self.pending[slot] if row.fits(expected)]
        assert fitting, f"slot {slot}: got {row}, not one of {[expected for _, expected in self.pending[slot]]}"
        if take:
            del self.pending[slot]
            self.states[slot] = fitting

    def take(self, slots: Iterable[int], result: Any, errors: Iterable[int] = ()) -> None:
        """Check results; those of `errors` were errors: how far the envs got is not known."""
        for row, slot in enumerate(slots):
            if slot in errors:
                before, done = self.states[slot], [state for state, _ in self.pending.pop(slot)]
                self.states[slot] = [*before, *done, *(state.interrupted() for state in before if state.ended)]
                self.failed.add(slot)
            else:
                self.check(slot, row_of(result, row))

    def note_dead(self, slot: int, twin: int) -> None:
        """Note that an env is dead."""
        for state in [*self.states[slot], *(state for state, _ in self.pending.get(slot, ()))]:
            state.alive[twin] = False


class Driver:
    """Steps a vector env with `spare_envs=True`, disturbs it at random, and checks every result against the model.

    Args:
        envs: started, and never reset.
        mode: its autoreset mode.
        seed: of the random choices.
        kills: whether workers are killed.
    """

    def __init__(self, envs: aioenv.AsyncVectorEnv, mode: AutoresetMode, seed: int, *, kills: bool = False) -> None:
        self.envs = envs
        self.model = Model(mode, kills=kills)
        self.rng = random.Random(seed)
        self.late = self.deaths = 0
        self.duration_s = 0.001
        self.twins = {worker.pid: (number % N, number // N) for number, worker in enumerate(envs.workers)}

    # ------------------------------------------------------------ requests

    def new_step(self) -> Callable[..., Coroutine[Any, Any, Any]]:
        actions = np.array([self.rng.randrange(900) for _ in range(N)])
        self.model.begin({slot: ("step", int(action)) for slot, action in enumerate(actions)})
        return partial(self.envs.step, actions)

    def new_reset(
        self, slots: Iterable[int] | None = None, *, first: bool = False
    ) -> Callable[..., Coroutine[Any, Any, Any]]:
        seed = self.rng.randrange(10**6) if first or self.rng.random() < 0.5 else None
        seeds = [None if seed is None else seed + slot for slot in range(N)]
        chosen = range(N) if slots is None else slots
        ops = {slot: ("reset", seeds[slot]) if slot in chosen else ("look", None) for slot in range(N)}
        self.model.begin(ops)
        options = None if slots is None else {"reset_mask": np.isin(np.arange(N), list(slots))}
        return partial(self.envs.reset, seed=seed, options=options)

    def new_request(self) -> Callable[..., Coroutine[Any, Any, Any]]:
        kind = self.rng.random()
        if kind < 0.8:
            return self.new_step()
        if kind < 0.88:
            return self.new_reset()
        return self.new_reset(self.rng.sample(range(N), self.rng.randrange(1, N)))

    def instant_s(self) -> float:
        """Up to twice as long as a step takes; each fifth time at once, which is too soon on any machine."""
        return self.rng.uniform(0, 2 * self.duration_s) if self.rng.random() < 0.8 else 0.0

    # ------------------------------------------------------------ what becomes of them

    async def check(self, request: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        """Make a request without any disturbance."""
        self.model.take(range(N), await request())

    async def begin(self) -> None:
        """The first reset, and how long a step takes: the median of a few."""
        await self.check(self.new_reset(first=True))
        times = []
        for _ in range(9):
            began = time.perf_counter()
            await self.check(self.new_step())
            times.append(time.perf_counter() - began)
        self.duration_s = statistics.median(times)

    async def disturbed(self, request: Callable[..., Coroutine[Any, Any, Any]], how: str) -> None:
        """Make a request that is cancelled or times out at a random instant, and take its result later, or never."""
        try:
            if how == "cancel":
                async with asyncio.timeout(self.instant_s()):
                    result = await request()
            else:
                result = await request(timeout_s=max(self.instant_s(), 1e-6))
        except aioenv.SlotError as error:
            self.note_error(error)
        except TimeoutError as error:
            self.late += 1
            if isinstance(error, aioenv.StepTimeout):
                self.check_partial(error)
            await self.take_late()
        else:
            self.model.take(range(N), result)

    def check_partial(self, error: aioenv.StepTimeout) -> None:
        assert set(error.slots) <= set(range(N))
        if error.partial is not None and not self.model.kills:
            for slot in set(range(N)).difference(error.slots):
                self.model.check(slot, row_of(error.partial, slot), take=False)

    async def take_late(self) -> None:
        what = self.rng.choice(["all", "some", "drop"])
        if what == "all":
            await self.recv(N)
        elif what == "some":
            await self.recv_all()

    async def recv(self, min_slots: int, max_slots: int | None = None) -> None:
        try:
            ready = await self.envs.recv(min_slots, max_slots)
        except aioenv.SlotError as error:
            ready = error.partial
            self.model.take(ready.slots.tolist(), ready, error.slots)
            self.deaths += 1
        else:
            self.model.take(ready.slots.tolist(), ready)

    async def recv_all(self) -> None:
        """Take what is owed in parts, some of the waits cancelled."""
        while self.envs.outstanding:
            if self.rng.random() < 0.3:
                try:
                    async with asyncio.timeout(self.instant_s()):
                        await self.recv(1)
                except TimeoutError:
                    self.late += 1
            else:
                await self.recv(self.rng.randrange(1, N + 1), self.rng.choice([None, 1, 2]))
        assert not self.model.pending

    async def piecemeal(self) -> None:
        """Some slots are stepped or reset by themselves."""
        slots = self.rng.sample(range(N), self.rng.randrange(1, N + 1))
        rest = [slot for slot in range(N) if slot not in slots]
        self.model.begin({slot: ("step", 7 * slot) for slot in slots} | dict.fromkeys(rest, ("reset", None)))
        self.envs.send([7 * slot for slot in slots], slots)
        if rest:
            self.envs.send_reset(rest)
        await self.recv_all()

    async def ask(self) -> None:
        """A call reaches the env that runs the episode."""
        whos = await self.envs.call("who")
        for who, states in zip(whos, self.model.states, strict=True):
            assert any(who == state.envs[state.live].who() for state in states)

    async def run(self, cases: int) -> None:
        """So many cancellations and timeouts, among other things, all of which are aligned."""
        while self.late < cases:
            chosen = self.rng.random()
            if chosen < 0.1:
                await self.piecemeal()
            elif chosen < 0.15:
                await self.ask()
            else:
                await self.disturbed(self.new_request(), self.rng.choice(["cancel", "timeout"]))
                if self.envs.outstanding:  # the next one, which drops it, must have been sent for certain
                    await self.check(self.new_step())
            assert not self.envs.outstanding
            counts = [{state.ops for state in states} for states in self.model.states]
            assert all(len(count) == 1 for count in counts)

    # ------------------------------------------------------------ blocking code

    def block(self, interrupt: Callable[[Callable[[], Any], float], Any], cases: int) -> None:
        """Interrupt blocking calls, each followed by one that is not.

        Args:
            interrupt: calls a function, which is interrupted so many seconds later; returns None then.
            cases: how many.
        """
        self.model.take(range(N), self.new_reset(first=True)())
        began = time.perf_counter()
        for _ in range(9):
            self.model.take(range(N), self.new_step()())
        self.duration_s = (time.perf_counter() - began) / 9
        for _ in range(cases):
            request = self.new_request()
            result = interrupt(request, max(self.instant_s(), 1e-6))
            if result is not None:
                self.model.take(range(N), result)
                continue
            self.model.doubt()
            self.model.take(range(N), self.new_step()())
            counts = [{state.ops for state in states} for states in self.model.states]
            assert set.intersection(*counts), "it was done in some slots only"
            self.model.settle(set.intersection(*counts))

    # ------------------------------------------------------------ killed workers

    def note_error(self, error: aioenv.SlotError) -> None:
        """Check the results of the others in an error of workers that have died."""
        assert isinstance(error, aioenv.WorkerDied), error
        self.deaths += 1
        if error.partial is None:
            self.model.forget()
            self.model.failed.update(error.slots)
        else:
            self.model.take(range(N), error.partial, error.slots)

    def note_deaths(self) -> bool:
        """Note which workers have died; return whether each slot has one left."""
        dead = [self.twins[worker.pid] for worker in self.envs.workers if worker.state == "dead"]
        for slot, twin in dead:
            self.model.note_dead(slot, twin)
        return len({slot for slot, _ in dead}) == len(dead)

    def kill_at_random(self) -> None:
        """Kill the worker of one of the envs at a random instant, or those of both."""
        living = [worker.pid for worker in self.envs.workers if worker.state != "dead"]
        pid = self.rng.choice(living)
        pids = [pid]
        if self.rng.random() < 0.1:
            pids = [other for other in living if self.twins[other][0] == self.twins[pid][0]]
        asyncio.get_running_loop().call_later(self.instant_s(), _kill_all, pids)

    async def survive(self, *, cases: int, on_timeout: bool) -> int:
        """Go on until a slot has lost both envs, or there were so many cases; return how many there were.

        Args:
            cases: at most.
            on_timeout: whether late workers are killed, instead of any.
        """
        done = 0
        while done < cases:
            if not self.note_deaths():
                return done
            if self.model.failed:
                await self.try_(self.new_reset(sorted(self.model.failed)))
                continue
            # what drops the result of the last one must have been sent for certain
            for _ in range(self.rng.randrange(1 if self.envs.outstanding else 0, 4)):
                await self.try_(self.new_step())
            if not self.note_deaths():
                return done
            if self.model.failed:
                continue
            done += 1
            if not on_timeout:
                self.kill_at_random()
                how = self.rng.choice(["cancel", "none", "none"])
            else:
                how = "timeout"
            request = self.new_request()
            await (self.try_(request) if how == "none" else self.disturbed(request, how))
        return done

    async def try_(self, request: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        try:
            result = await request()
        except aioenv.SlotError as error:
            self.note_error(error)
        else:
            self.model.take(range(N), result)


def _kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
