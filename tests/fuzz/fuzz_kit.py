"""Random operations on a vector env, each compared with every `World` that is still possible."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

import aioenv
import aioenv.sync
from aioenv.errors import (
    AioenvError,
    StepTimeout,
)
from tests.fuzz.fuzz_calls import Others
from tests.fuzz.fuzz_envs import EXIT, RAISE, SLOW, Chain, Chains, PatientChains
from tests.fuzz.fuzz_model import World
from tests.fuzz.fuzz_requests import LIMIT_S, Requests, cancel_at_some_await


class Config:
    """What is driven: drawn at random.

    Args:
        rng: draws it.
        kind: "workers", "in-process" (a vector env), "vectors" (vector envs over workers), "here" (single envs in this
            process), or "sync" and "sync here", where blocking code drives them.

    Attributes:
        kind: as given.
        blocking: whether blocking code drives them.
        processes: whether workers are processes that hold single envs.
    """

    def __init__(self, rng: random.Random, kind: str, start: str = "forkserver") -> None:
        self.kind = kind
        self.blocking = kind.startswith("sync")
        self.processes = kind in ("workers", "sync")
        self.num_envs = rng.randint(1, 5)
        self.num_workers = rng.randint(1, min(3, self.num_envs))
        self.mode = rng.choice(list(AutoresetMode))
        self.copy = rng.random() < 0.7
        self.restart = rng.choice([None, None, "lose", "resume"]) if self.processes else None
        self.some = True
        kwargs: dict[str, Any] = {"copy": self.copy, "num_workers": self.num_workers}
        if self.restart:
            kwargs["restart"] = aioenv.RestartPolicy(1000, backoff_s=1e-6, resume=self.restart == "resume")
        if self.processes:
            # blocking code steps in a way of its own over the second
            channels = ["streams", "scatter"] if kind == "workers" else ["streams", *["scatter"] * 3]
            kwargs |= {"start": start, "channel": rng.choice(channels)}
            kwargs["transport"] = rng.choice(["frames", "shared"])
        if kind.endswith("here"):
            kwargs["num_workers"] = 0
            self.num_workers = 1
        if self.processes or kind.endswith("here"):
            kwargs["autoreset_mode"] = self.mode
            kwargs["observation_mode"] = rng.choice(["same", "different"])
            if rng.random() < 0.2:
                kwargs["timeout_s"] = 10.0
            cls = aioenv.sync.VectorEnv if self.blocking else aioenv.AsyncVectorEnv
            self.make: Callable[[], Any] = lambda: cls([Chain] * self.num_envs, **kwargs)
        else:
            if kind == "in-process":
                kwargs["num_workers"] = 0
                self.num_workers = 1
                kwargs["run_in"] = rng.choice(["auto", "thread", "inline"])
            self.some = rng.random() < 0.7
            vector_env, mode = (PatientChains if self.some else Chains), self.mode.value
            self.make = lambda: aioenv.NativeVectorEnv(
                lambda num_envs: vector_env(num_envs, mode), self.num_envs, **kwargs
            )
        self.kwargs = kwargs

    def __repr__(self) -> str:
        return f"{self.kind} n={self.num_envs} {self.mode} some={self.some} {self.kwargs}"


class Interrupted(Exception):
    """What the handler of a signal raises."""


class Awaited:
    """The blocking vector env behind the async interface, for one driver of both.

    Attributes:
        after_s: when to interrupt the next call by a signal whose handler raises, in seconds; None: not.
    """

    def __init__(self, envs: Any) -> None:
        self.envs = envs
        self.after_s: float | None = None
        self._armed = False
        self.plain = {"send", "send_reset", "pause", "resume", "workers", "active_slots"}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.envs, name)
        if name in self.plain:
            return attribute

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.after_s is None:
                return attribute(*args, **kwargs)
            after_s, self.after_s = self.after_s, None
            before = signal.signal(signal.SIGALRM, self._ring)
            tell = sys.unraisablehook

            def tell_others(unraisable: Any) -> None:
                if not isinstance(unraisable.exc_value, Interrupted):  # raised in a weakref's callback: lost
                    tell(unraisable)

            sys.unraisablehook = tell_others
            try:
                self._armed = True
                signal.setitimer(signal.ITIMER_REAL, after_s)
                return attribute(*args, **kwargs)
            finally:
                self._armed = False
                sys.unraisablehook = tell
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)

        return call

    def _ring(self, *_: Any) -> None:
        if self._armed:
            self._armed = False
            raise Interrupted

    @property
    def outstanding(self) -> bool:
        return self.envs._portal.run(lambda: self.envs._envs.outstanding)


class Driver(Requests, Others):
    """One sequence.

    Args:
        seed: of everything random.
        kind, start: see `Config`.

    Attributes:
        log: what was done, in words.
    """

    def __init__(self, seed: int, kind: str, start: str = "forkserver") -> None:
        self.rng = random.Random(seed)
        self.config = Config(self.rng, kind, start)
        self.log: list[str] = [f"seed={seed} {self.config}"]
        self.ops = 0
        self.kept: list[tuple[Any, str]] = []

    async def run(self, steps: int) -> None:
        envs = self.config.make()
        if self.config.blocking:
            self.envs = Awaited(envs)
        else:
            self.envs = await envs
        try:
            slots = [w.slots for w in envs.workers] or [tuple(range(self.config.num_envs))]
            vector = self.config.kind in ("in-process", "vectors")
            self.worlds = [World(slots, self.config.mode, vector=vector, restart=self.config.restart)]
            # an env that was never reset would be stepped, and end its process, for ever
            while self.config.restart and not self.log[-1].endswith("-> ok"):
                await self.do_reset(whole=True)
            for _ in range(steps):
                await self.one()
                self.ops += 1
                for kept, was in self.kept:
                    assert repr(kept) == was, "a result has changed"
            if self.rng.random() < 0.3:
                await self.close_midway()
        except BaseException as exc:
            exc.add_note("\n".join(self.log))
            raise
        finally:
            async with asyncio.timeout(LIMIT_S):
                closed = envs.close()
                if closed is not None:
                    await closed
        assert all(w.state in ("closed", "dead") for w in envs.workers)

    # ------------------------------------------------------------ worlds

    def filter(self, what: str, branch: Callable[[World], list[World]]) -> None:
        """Go on with the worlds in which this can have happened."""
        left: dict[str, World] = {}
        why = []
        for world in self.worlds:
            try:
                for after in branch(world):
                    left.setdefault(after.signature(), after)
            except AssertionError as exc:
                why.append(exc)
        if not left:
            raise AssertionError(f"{what}: possible in none of {len(self.worlds)} worlds: {why}")
        self.worlds = list(left.values())
        assert len(left) < 200, "too many worlds"

    @property
    def world(self) -> World:
        return self.worlds[0]

    # ------------------------------------------------------------ doing

    async def attempt(self, coroutine: Any, cancel: bool = True) -> tuple[str, Any]:
        """Await it, perhaps with a cancellation at some await: "ok", "error" or "cancelled", and what came.

        Blocking code is interrupted instead, at any instant: maybe after it has taken a result ("interrupted").
        """
        rng = self.rng
        cancel = cancel and rng.random() < 0.25
        if cancel and self.config.blocking:
            self.envs.after_s = rng.choice([1e-5, 1e-4, 1e-3]) * (0.1 + 2 * rng.random())
            cancel = False
        task = asyncio.ensure_future(coroutine)
        if cancel:
            await cancel_at_some_await(task, rng)
        try:
            async with asyncio.timeout(LIMIT_S):
                value = await task
        except asyncio.CancelledError:
            self.log[-1] += " -> cancelled"
            return "cancelled", None
        except Interrupted:
            self.log[-1] += " -> interrupted"
            return "interrupted", None
        except StepTimeout as exc:
            self.log[-1] += f" -> {exc!r}"
            return "error", exc
        except TimeoutError:
            raise AssertionError("it hangs") from None
        except (AioenvError, ValueError) as exc:
            self.log[-1] += f" -> {exc!r}"[:300]
            return "error", exc
        self.log[-1] += " -> ok"
        if self.config.copy and rng.random() < 0.2:
            self.kept.append((value, repr(value)))
        return "ok", value

    def actions(self) -> np.ndarray:
        rng, mean = self.rng, [RAISE, EXIT, SLOW]
        weights = [0.05, 0.015 if self.config.processes else 0, 0.05]
        if self.config.restart == "resume":
            weights[1] = 0
        each = []
        for _ in range(self.config.num_envs):
            x, action = rng.random() * 2, rng.randrange(RAISE)
            for bad, weight in zip(mean, weights, strict=True):
                if 0 <= x < weight:
                    action = bad
                x -= weight
            each.append(action)
        return np.array(each)

    def some_slots(self) -> list[int]:
        n = self.config.num_envs
        if not self.config.some:
            return list(range(n))
        return self.rng.sample(range(n), self.rng.randint(1, n))

    def seed(self, n: int) -> Any:
        return self.rng.choice([None, self.rng.randrange(1000), [self.rng.choice([None, 7, i]) for i in range(n)]])

    def options(self) -> Any:
        return self.rng.choice([{}, {}, {"x": 1}, {"raise": 1}])

    async def one(self) -> None:
        """One operation."""
        rng = self.rng
        names = ["step"] * 6 + ["reset"] * 2 + ["send"] * 4 + ["send_reset"] * 2 + ["recv"] * 5
        names += [
            "step_at",
            "reset_at",
            "call",
            "call_at",
            "bump",
            "set_attr",
            "get_state",
            "set_state",
            "pause",
            "resume",
            "resume",
        ]
        if self.config.restart:  # which takes back what calls have changed
            names = [name for name in names if name not in ("bump", "set_attr")]
        names += ["ready", "rollout", "rollout", "episodes", "settle", "settle", "both", "check"]
        if (self.config.processes or self.config.kind == "vectors") and rng.random() < 0.3:
            names += ["kill"]
        name = rng.choice(names)
        self.log.append(name)
        await getattr(self, f"do_{name}")()
        outstanding = self.envs.outstanding
        self.filter("outstanding", lambda w: [w] if outstanding == bool(w.pending) else [])
