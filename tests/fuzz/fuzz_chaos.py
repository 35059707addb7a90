"""Several tasks that use one vector env at once, each at random: nothing hangs, nothing is given twice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import tempfile
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from aioenv.errors import (
    ClosedError,
    EnvError,
    NoAsyncCallError,
    PausedError,
    PendingCallError,
    ResetNeededError,
    StepTimeout,
    WorkerDied,
)
from tests.fuzz.fuzz_calls import policy
from tests.fuzz.fuzz_kit import Config
from tests.fuzz.fuzz_requests import LIMIT_S

DOCUMENTED = (EnvError, NoAsyncCallError, PausedError, PendingCallError, ResetNeededError, StepTimeout)


class Chaos:
    """One run.

    Args:
        seed: of everything random.
        kind: see `Config`.

    Attributes:
        log: what was done, in words, as it ended.
    """

    def __init__(self, seed: int, kind: str) -> None:
        self.rng = random.Random(seed)
        self.config = Config(self.rng, kind)
        self.n = self.config.num_envs
        if self.config.processes and self.rng.random() < 0.3:  # steps are late now and then
            late = ["raise", "restart"] if self.config.restart == "resume" else ["raise"]
            self.config.kwargs |= {"timeout_s": 0.05, "on_timeout": self.rng.choice(late)}
        # of calls that must succeed
        self._limit = {"timeout_s": LIMIT_S} if kind in ("workers", "here") else {}
        self.log = [f"seed={seed} {self.config}"]
        self.ops = 0
        # how many operations each env had done, in each result that was given of it
        self._seen: list[set[int]] = [set() for _ in range(self.n)]

    async def run(self, operations: int, tasks: int = 3, *, closes: bool = False) -> None:
        """Do so many, in each of so many tasks; or, if another `closes` all at some time, as many as there can be."""
        self.envs = await self.config.make()
        try:
            await self.envs.reset(seed=0, **self._limit)
            async with asyncio.timeout(3 * LIMIT_S):
                running = [asyncio.ensure_future(self._task(operations)) for _ in range(tasks)]
                if closes:
                    await asyncio.sleep(self.rng.random() * 0.3)
                    await self.envs.close()
                    ends = await asyncio.gather(*running, return_exceptions=True)
                    for end in ends:
                        if isinstance(end, BaseException) and not isinstance(end, ClosedError):
                            raise end
                else:
                    await asyncio.gather(*running)
                    await self._epilogue()
        except BaseException as exc:
            exc.add_note("\n".join(self.log))
            raise
        finally:
            async with asyncio.timeout(LIMIT_S):
                await self.envs.close()

    async def _task(self, operations: int) -> None:
        for _ in range(operations):
            await self._one()
            self.ops += 1

    async def _one(self) -> None:
        rng = self.rng
        names = ["step"] * 5 + ["step_at"] * 3 + ["reset", "reset_at"] + ["send"] * 2 + ["recv"] * 3
        names += ["rollout", "episodes", "trace"]
        name = rng.choice([rng.choice(names)] * 4 + ["call", "get_state", "pause", "resume", "kill"])
        task = asyncio.ensure_future(self._do(name, rng.randrange(self.n)))
        cancels = rng.random() < 0.3
        if cancels:
            for _ in range(rng.randint(0, 10)):
                await asyncio.sleep(0)
            task.cancel()
        try:
            await task
            how = "ok"
        except asyncio.CancelledError:
            assert cancels, f"{name}: it was not cancelled"
            how = "cancelled"
        except WorkerDied as exc:
            assert self.config.restart, f"no worker was killed: {exc!r}"
            how = repr(exc)[:80]
        except DOCUMENTED as exc:
            how = repr(exc)[:80]
            if isinstance(exc, (EnvError, ResetNeededError)) and rng.random() < 0.5:
                with contextlib.suppress(*DOCUMENTED):
                    await self.envs.reset()
        self.log.append(f"{name}: {how}")
        await asyncio.sleep(0)

    async def _do(self, name: str, slot: int) -> None:
        envs, rng, n = self.envs, self.rng, self.n
        actions = np.array([rng.randrange(12) if rng.random() < 0.9 else rng.choice([13, 15]) for _ in range(n)])
        match name:
            case "step":
                result = await envs.step(actions)
                self._note([i for i in range(n) if "_active" not in result.info or result.info["_active"][i]], result)
            case "reset":
                self._note([], await envs.reset())
            case "step_at" | "reset_at" if self.config.some:
                one = await (envs.step_at(slot, actions[slot]) if name == "step_at" else envs.reset_at(slot))
                self._count(slot, int(one.obs["count"][1]))
            case "send":
                envs.send(actions[: slot + 1], range(slot + 1)) if self.config.some else envs.send(actions)
            case "recv":
                try:
                    ready = await envs.recv(rng.randint(1, n), rng.choice([None, 1, 2]))
                except EnvError as error:
                    ready, failed = error.partial, error.slots
                else:
                    failed = ()
                for row, i in enumerate(ready.slots.tolist()):
                    if i not in failed:
                        self._count(i, int(ready.obs["count"][row][1]))
            case "call" if self.config.kind in ("workers", "here"):
                await envs.call_at(slot, "peek")
            case "get_state":
                await envs.get_state([slot])
            case "rollout":
                rollout = await envs.rollout(policy, rng.randint(1, 4), rng.randint(1, 3))
                seen = np.concatenate([rollout.obs["count"][:, :, 1], rollout.last_obs["count"][None, :, 1]])
                for i, counts in enumerate(seen.T.tolist()):
                    for before, after in itertools.pairwise(counts):
                        if before != after:  # else it is paused
                            self._count(i, after)
            case "episodes" if self.config.some:
                async with contextlib.aclosing(envs.episodes(policy, rng.randint(1, 4), seed=0)) as running:
                    async for _ in running:
                        if rng.random() < 0.3:
                            break
            case "trace" if self.config.kind in ("workers", "here"):
                with tempfile.TemporaryDirectory() as directory, contextlib.suppress(RuntimeError):  # there is one
                    with envs.trace(f"{directory}/run.json"):
                        for _ in range(rng.randint(0, 30)):
                            await asyncio.sleep(0)
            case "pause" if self.config.some:
                envs.pause(slot)
            case "resume":
                envs.resume()
            case "kill" if self.config.restart == "resume":
                worker = rng.choice(envs.workers)
                if worker.state in ("ready", "busy", "draining"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)

    def _note(self, slots: list[int], result: Any) -> None:
        for i in slots:
            self._count(i, int(result.obs["count"][i][1]))

    def _count(self, slot: int, ops: int) -> None:
        """A result of a slot whose env had done so many operations has been given."""
        self.log.append(f"  slot {slot}: {ops}")
        assert ops not in self._seen[slot], f"slot {slot}: the result after {ops} operations was given twice"
        self._seen[slot].add(ops)

    async def _epilogue(self) -> None:
        """All is in order afterwards."""
        self.envs.resume()
        while self.envs.outstanding:
            with contextlib.suppress(EnvError, StepTimeout):
                await self.envs.recv(self.n)
        before = (await self.envs.reset(seed=0, **self._limit)).obs["count"][:, 1]
        after = (await self.envs.step(np.zeros(self.n, int), **self._limit)).obs["count"][:, 1]
        twice = self.config.mode is AutoresetMode.SAME_STEP
        assert all(1 <= steps <= 1 + twice for steps in (after - before).tolist()), f"{before} {after}"
