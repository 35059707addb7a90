"""Random calls of a `RenderPool`, cancelled and hit by kills at random, against a twin to which nothing happens."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import numpy as np

import aioenv
from aioenv.errors import ClosedError, RenderError
from tests.fuzz.fuzz_requests import LIMIT_S
from tests.kits.render_pool_kit import PLAIN, some_states

STATES, SLOTS = 12, 6


class Pools:
    """One run.

    Args:
        seed: of everything random.

    Attributes:
        log: what was done, in words.
        seen: how many results were compared.
    """

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.modders = rng.choice([None, [aioenv.TextureModder, aioenv.LightModder]])
        self.restart = rng.random() < 0.6
        self.kwargs: dict[str, Any] = {
            "workers_per_device": rng.choice([1, 2, 3]),
            "transport": rng.choice(["auto", "frames"]),
            "channel": rng.choice(["scatter", "streams"]),
        }
        if self.restart:
            self.kwargs |= {"restart": aioenv.RestartPolicy(1000, backoff_s=1e-6), "retry": rng.random() < 0.6}
        self.log = [f"seed={seed} modders={self.modders is not None} {self.kwargs}"]
        self.open: list[tuple[str, asyncio.Future[Any], Any, Any]] = []  # name, future, what it must give, `out`
        self.kills = 0
        self.before: dict[str, int] = {}  # how many there were when a call was made
        self.seen = 0

    async def run(self, operations: int) -> None:
        common: dict[str, Any] = {"quality": "fast", "modder": self.modders, "seed": 7}
        try:
            async with (
                aioenv.RenderPool(PLAIN, **common, **self.kwargs) as self.pool,
                aioenv.RenderPool(PLAIN, **common, workers_per_device=1, transport="frames") as self.twin,
            ):
                self.states = some_states(self.pool, STATES)
                for pool in (self.pool, self.twin):  # or they would have as many slots as workers
                    await pool.render(self.states[:SLOTS], width=8, height=8)
                for _ in range(operations):
                    name = self.rng.choice(["submit"] * 5 + ["take"] * 4 + ["cancel", "kill"])
                    self.log.append(name)
                    await getattr(self, f"do_{name}")()
                if self.rng.random() < 0.5:
                    self.log.append("close midway")
                    await self.pool.close()
                    for name, future, due, out in self.open:
                        await self.check(name, future, due, out, closing=True)
                else:
                    while self.open:
                        await self.do_take()
        except BaseException as exc:
            exc.add_note("\n".join(self.log))
            raise

    # ------------------------------------------------------------ operations

    async def do_submit(self) -> None:
        rng = self.rng
        slots = rng.choice([None, sorted(rng.sample(range(SLOTS), rng.randint(1, 4)))])
        if slots is not None:
            rng.shuffle(slots)
        how: dict[str, Any] = {"slots": slots, "width": rng.choice([24, 20]), "height": rng.choice([18, 7])}
        how["camera"] = rng.choice([None, "side", ["side", -1]])
        how["depth"], how["segmentation"] = rng.random() < 0.3, rng.random() < 0.3
        how["randomize"] = rng.random() < 0.3
        n = len(slots) if slots is not None else rng.randint(1, SLOTS)
        states = None
        if rng.random() < 0.8:
            states = self.states[[rng.randrange(STATES) for _ in range(n)]]
            if rng.random() < 0.2:
                how["edits"] = {"geom_rgba": np.random.default_rng(rng.randrange(9)).random((n, 2, 4))}
        self.log[-1] += f" {'' if states is None else len(states)} {how}"[:150]
        due: Any = None
        refused: Exception | None = None
        try:
            due = _copied(await self.twin.render(states, **how))
        except ValueError as exc:
            refused = exc
        out = None
        if due is not None and rng.random() < 0.3:
            out = tuple(np.zeros_like(array) for array in due) if isinstance(due, tuple) else np.zeros_like(due)
        try:
            future = self.pool.submit(states, **how, out=out)
        except ValueError as exc:
            assert refused is not None, repr(exc)
            self.log[-1] += f" -> {exc!r}"
            return
        assert refused is None, f"the twin refuses: {refused!r}"
        name = f"call {len(self.log) - 1}"
        self.before[name] = self.kills
        self.open.append((name, future, due, out))

    async def do_take(self) -> None:
        if not self.open:
            return
        name, future, due, out = self.open.pop(self.rng.randrange(len(self.open)))
        self.log[-1] += f" {name}"
        await self.check(name, future, due, out)

    async def do_cancel(self) -> None:
        if not self.open:
            return
        name, future, _, _ = self.open.pop(self.rng.randrange(len(self.open)))
        self.log[-1] += f" {name}"
        for _ in range(self.rng.randint(0, 5)):
            await asyncio.sleep(0)
        future.cancel()

    async def do_kill(self) -> None:
        if not self.restart:
            return
        self.kills += 1
        try:
            os.kill(self.rng.choice([pid for pid in self.pool.pids if pid] or [2**22 + 1]), signal.SIGKILL)
        except ProcessLookupError:
            pass

    async def check(self, name: str, future: asyncio.Future[Any], due: Any, out: Any, closing: bool = False) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                got = await future
        except TimeoutError:
            raise AssertionError(f"{name} hangs") from None
        except ClosedError:
            assert closing, f"{name}: it was not closed"
            return
        except RenderError as exc:
            # the end of a worker that was killed before may not have been known; and it is drawn again only once
            hits = self.kills - max(0, self.before[name] - 1)
            assert hits > bool(self.kwargs.get("retry")), f"{name}: {exc!r}"
            return
        if out is not None:
            assert got is out or all(a is b for a, b in zip(got, out, strict=True)), f"{name}: not what it was given"
        pairs = zip(got, due, strict=True) if isinstance(due, tuple) else [(got, due)]
        for mine, theirs in pairs:
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs), f"{name}: not the images of its states"
        self.seen += 1


def _copied(images: Any) -> Any:
    return tuple(array.copy() for array in images) if isinstance(images, tuple) else images.copy()
