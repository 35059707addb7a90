"""Random operations on vector envs that draw: every image is that of the observation that it belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.errors import (
    NoAsyncCallError,
    PausedError,
    PendingCallError,
    RenderError,
    ResetNeededError,
    SlotError,
    StepTimeout,
)
from aioenv.requirements import has_batch
from tests.fuzz.fuzz_requests import LIMIT_S, cancel_at_some_await
from tests.kits.balls import EXIT, RAISE, SIZE, Ball, Balls, Painted, Reference

REFUSED = SlotError, PausedError, PendingCallError, ResetNeededError
WAYS = ["render", "self", "pixels", "pixels of workers", *["native", "native pixels"] * has_batch()]


class ImageOperations:
    """One run.

    Args:
        seed: of everything random.
        way: one of `WAYS`.

    Attributes:
        log: what was done, in words.
        seen: how many pictures were compared.
    """

    def __init__(self, seed: int, way: str) -> None:
        rng = self.rng = random.Random(seed)
        self.way = way
        self.n = rng.randint(1, 4)
        self.pixels = "pixels" in way
        self.native = "native" in way
        drawers = rng.choice([1, 2])
        config = aioenv.RenderConfig(
            **SIZE,
            camera=None if way == "self" else "front",
            quality="fast",
            workers=None if way in ("self", "pixels") else drawers,
            max_in_flight=rng.choice([1, 2]),
            render_only=False,
        )
        self.restart = rng.choice([None, "lose", "resume"])
        mode = rng.choice(list(AutoresetMode))
        kwargs: dict[str, Any] = {("pixels" if self.pixels else "render"): config, "copy": rng.random() < 0.7}
        kwargs["num_workers"] = rng.choice([0, 0, 1, 2]) if self.native else rng.choice([1, 2])
        self.workers = kwargs["num_workers"]
        if self.restart and self.workers:
            kwargs["restart"] = aioenv.RestartPolicy(1000, backoff_s=1e-6, resume=self.restart == "resume")
        if self.native:
            self.make = lambda: aioenv.make_vec(Balls, self.n, backend="native", autoreset_mode=mode.value, **kwargs)
        else:
            kwargs |= {"channel": rng.choice(["streams", "scatter"]), "transport": rng.choice(["frames", "shared"])}
            env = Painted if way == "self" else Ball
            self.make = lambda: aioenv.AsyncVectorEnv([env] * self.n, autoreset_mode=mode, **kwargs)
        self.log = [f"seed={seed} {way} n={self.n} {mode} {kwargs}"]
        self.same_step = mode is AutoresetMode.SAME_STEP
        self.last: list[Any] = [None] * self.n  # what was observed last; None: nothing that is known
        self.results = 0  # how many were handed out
        self.kept: dict[int, list[Any]] = {}  # what all slots had observed last, by result
        self.stream: Any = None
        self.seen = 0

    async def run(self, operations: int) -> None:
        self.reference = Reference(self.way == "self")
        try:
            await self.reference.start()
            self.envs = await self.make()
            try:
                await self.do_reset(whole=True)
                for _ in range(operations):
                    names = ["step"] * 6 + ["reset", "reset_at", "step_at", "send_reset"] + ["send", "recv"] * 3
                    names += ["pause", "resume", "resume", "stream", "read", "both"]
                    names += ["render"] * 4 if not self.pixels else ["rollout"]
                    if self.restart and self.workers:
                        names += ["kill", "kill_drawer"]
                    name = self.rng.choice(names)
                    self.log.append(name)
                    await getattr(self, f"do_{name}")()
            finally:
                async with asyncio.timeout(LIMIT_S):
                    await self.envs.close()
        except BaseException as exc:
            exc.add_note("\n".join(self.log))
            raise
        finally:
            await self.reference.close()

    # ------------------------------------------------------------ results

    async def attempt(self, coroutine: Any, cancel: bool = True) -> tuple[str, Any]:
        """Await it, perhaps with a cancellation at some await: "ok", "error" or "cancelled", and what came."""
        task = asyncio.ensure_future(coroutine)
        if cancel and self.rng.random() < 0.2:
            await cancel_at_some_await(task, self.rng)
        return await self.end(task)

    async def end(self, task: asyncio.Future[Any]) -> tuple[str, Any]:
        try:
            async with asyncio.timeout(LIMIT_S):
                value = await task
        except asyncio.CancelledError:
            self.log[-1] += " -> cancelled"
            return "cancelled", None
        except StepTimeout:
            raise
        except TimeoutError:
            raise AssertionError("it hangs") from None
        except (SlotError, PausedError, PendingCallError, NoAsyncCallError, ResetNeededError, RenderError) as exc:
            self.log[-1] += f" -> {exc!r}"[:200]
            return "error", exc
        self.log[-1] += " -> ok"
        return "ok", value

    async def took(self, how: str, value: Any, one: int | None = None) -> None:
        """A result was handed out, of one slot maybe, or an error that has the others' results."""
        failed: tuple[int, ...] = ()
        if how == "error":
            if not isinstance(value, SlotError) or isinstance(value, (PendingCallError, ResetNeededError)):
                return
            failed, value = value.slots, value.partial
            if value is None:
                return
        elif how != "ok":
            return
        slots = [one] if one is not None else value.slots.tolist() if hasattr(value, "slots") else range(self.n)
        info = value.info
        for row, slot in enumerate(slots):
            if slot in failed:
                self.last[slot] = None
                continue
            obs = value.obs if one is not None else _row(value.obs, row)
            await self.observed(slot, obs, paused=one is None and "_active" in info and not info["_active"][row])
        if self.same_step and self.pixels and "final_obs" in info and one is None:
            for row, final in enumerate(info["final_obs"]):
                if info["_final_obs"][row]:
                    await self.compare("final_obs", final["pixels"], final["state"])
        if not len(slots):
            return  # nothing was ready
        self.kept[self.results] = list(self.last)
        self.results += 1

    async def observed(self, slot: int, obs: Any, *, paused: bool = False) -> None:
        """A slot has this observation; that of a paused one, if there is one, may be of a result that was not taken."""
        state = obs["state"] if self.pixels else obs
        begun = bool(np.any(state))  # else it was never reset
        if begun or not paused:
            self.last[slot] = np.array(state) if begun else None
        if self.pixels and begun:
            await self.compare(f"slot {slot}", obs["pixels"], state)

    async def compare(self, what: str, image: Any, state: Any) -> None:
        expected = await self.reference.of(np.asarray(state))
        if image.shape != expected.shape or not np.array_equal(image, expected):
            whose = [key for key, known in self.reference._known.items() if np.array_equal(known, image)]
            raise AssertionError(
                f"{what}: not the image of {state}, but of {[np.frombuffer(key) for key in whose] or 'nothing known'}"
            )
        self.seen += 1

    async def pictured(self, what: str, images: Any, last: list[Any]) -> None:
        """These are the images of what all slots have observed."""
        for slot, state in enumerate(last):
            if state is not None:
                await self.compare(f"{what}, slot {slot}", images[slot], state)

    # ------------------------------------------------------------ operations

    def actions(self, rows: int) -> np.ndarray:
        rng = self.rng
        actions = np.array([[rng.uniform(-1, 1), rng.uniform(-1, 1), 0] for _ in range(rows)], np.float32)
        if not self.native:
            for row in range(rows):
                if rng.random() < 0.03:
                    actions[row, 2] = RAISE
                elif self.restart == "lose" and rng.random() < 0.02:
                    actions[row, 2] = EXIT
        return actions

    def some(self) -> list[int]:
        return self.rng.sample(range(self.n), self.rng.randint(1, self.n))

    async def do_step(self) -> None:
        await self.took(*await self.attempt(self.envs.step(self.actions(self.n))))

    async def do_reset(self, whole: bool = False) -> None:
        mask = np.ones(self.n, bool)
        if not whole and self.rng.random() < 0.5:
            mask[self.rng.sample(range(self.n), self.rng.randrange(self.n))] = False
        options = None if mask.all() else {"reset_mask": mask}
        await self.took(*await self.attempt(self.envs.reset(seed=self.rng.randrange(99), options=options), not whole))

    async def do_step_at(self) -> None:
        slot = self.rng.randrange(self.n)
        await self.took(*await self.attempt(self.envs.step_at(slot, self.actions(1)[0])), slot)

    async def do_reset_at(self) -> None:
        slot = self.rng.randrange(self.n)
        await self.took(*await self.attempt(self.envs.reset_at(slot, seed=3)), slot)

    async def do_send(self) -> None:
        slots = self.some()
        self.log[-1] += f" {slots}"
        try:
            self.envs.send(self.actions(len(slots)), slots)
        except REFUSED as exc:
            self.log[-1] += f" -> {exc!r}"[:200]

    async def do_send_reset(self) -> None:
        slots = self.some()
        self.log[-1] += f" {slots}"
        try:
            self.envs.send_reset(slots, seed=5)
        except REFUSED as exc:
            self.log[-1] += f" -> {exc!r}"[:200]

    async def do_recv(self) -> None:
        least = self.rng.randint(1, self.n)
        most = self.rng.choice([None, 1, 2])
        deadline_s = self.rng.choice([None, None, 0.0])
        self.log[-1] += f" {least} {most} {deadline_s}"
        await self.took(*await self.attempt(self.envs.recv(least, most, deadline_s=deadline_s)))

    async def do_pause(self) -> None:
        slots = self.some()
        try:
            self.envs.pause(slots)
        except aioenv.AioenvError as exc:
            self.log[-1] += f" -> {exc!r}"[:200]

    async def do_resume(self) -> None:
        self.envs.resume()

    async def do_kill(self) -> None:
        worker = self.rng.choice(self.envs.workers)
        self.log[-1] += f" {worker.slots}"
        _kill(worker.pid)

    async def do_kill_drawer(self) -> None:
        for worker in getattr(self.envs._session, "render_workers", ()):
            if self.rng.random() < 0.5 and worker.pid:
                _kill(worker.pid)

    async def do_render(self) -> None:
        last = list(self.last)
        how, images = await self.attempt(self.envs.render())
        if how == "ok":
            await self.pictured("render", images, last)
        elif how == "error":
            self.excuse(images, last)

    def excuse(self, error: Any, last: list[Any]) -> None:
        """There is a reason for this error: a slot without a result, or an image that went with its worker."""
        assert isinstance(error, RenderError), repr(error)
        lost = self.way == "self" and "kill" in " ".join(self.log)
        assert lost or any(state is None for state in last), f"no image is missing: {error!r}"

    async def do_both(self) -> None:
        """The last result's images, while the next step is being made."""
        step = asyncio.ensure_future(self.envs.step(self.actions(self.n)))
        for _ in range(self.rng.randint(0, 8)):
            await asyncio.sleep(0)
        if not self.pixels and not step.done():
            last = list(self.last)
            try:
                async with asyncio.timeout(LIMIT_S):  # no task of its own, which would begin a turn of the loop later
                    images = await self.envs.render()
            except RenderError as exc:
                self.excuse(exc, last)
            else:
                await self.pictured("render", images, last)
        await self.took(*await self.end(step))

    async def do_rollout(self) -> None:
        steps = self.rng.randint(1, 3)

        def policy(obs: Any) -> np.ndarray:
            rows = len(obs["state"])
            return np.array([[self.rng.uniform(-1, 1), 0, 0] for _ in range(rows)], np.float32)

        how, rollout = await self.attempt(self.envs.rollout(policy, steps, self.rng.choice([1, min(2, self.n)])))
        if how == "ok":
            for t in range(steps):
                for slot in range(self.n):
                    await self.observed(slot, _row(_row(rollout.obs, t), slot))
            for slot in range(self.n):
                await self.observed(slot, _row(rollout.last_obs, slot))
        else:
            self.last = [None] * self.n

    async def do_stream(self) -> None:
        if self.pixels:
            return
        if self.stream is not None:
            await self.stream.aclose()
        self.stream = self.envs.render_stream(buffer=self.rng.choice([1, 3, 100]))
        self.begun = self.results

    async def do_read(self) -> None:
        if self.stream is None or not self.stream._items:
            return
        how, item = await self.attempt(self.stream.__anext__())
        if how == "ok":
            step, images = item
            assert step >= self.begun, f"{step} was before the stream, which began with {self.begun}"
            await self.pictured(f"stream, result {step}", images, self.kept[step])
        elif how == "error":
            self.excuse(item, [state for last in self.kept.values() for state in last])


def _row(obs: Any, row: int) -> Any:
    return {key: value[row] for key, value in obs.items()} if isinstance(obs, dict) else obs[row]


def _kill(pid: int | None) -> None:
    if pid is not None:  # else it is being started again
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
