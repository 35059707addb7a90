"""Clock the stages of one step: the table in docs/data/step-profile.csv.

    python -m benchmarks.step_profile CartPole-v1 64 [STEPS]

The parent's stages are clocked in a real run with two workers; a worker's in this process, over a socketpair, where no
process has to be woken. The rest of a step is waiting: for envs, for the kernel to wake processes, and, where there are
fewer CPUs than processes, for a CPU.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import numpy as np
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv import speedups
from aioenv.cli.contenders import ACTION_BATCHES, Workload
from aioenv.cli.terminal import show_table
from aioenv.core.dispatcher import Dispatcher
from aioenv.core.requests import BatchRequestPool
from aioenv.core.scheduler import RequestScheduler
from aioenv.ipc.frames import Encoder, Frame, Kind
from aioenv.ipc.messages import ResetRequest, dump, load
from aioenv.process.channel import ScatterChannel
from aioenv.spaces.layout import Layout, byte_view
from aioenv.worker.env_service import EnvService
from aioenv.worker.service import PartialStep
from aioenv.worker.worker_end import WorkerEnd

WORKERS = 2


class StageClock:
    """Seconds that were spent, by stage."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Clock a method."""
        inner: Callable[..., Any] = getattr(owner, name)
        spent = self.spent[stage]

        def clocked(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - began)

        setattr(owner, name, clocked)

    def a_step(self, stage: str, steps: int) -> float:
        """Return microseconds a step: the median call, times the calls a step."""
        times = self.spent[stage]
        return statistics.median(times) * len(times) / steps * 1e6 if times else 0.0


Rows = list[tuple[str, str]]  # stages, and microseconds a step


async def parent(workload: Workload) -> Rows:
    """Clock the parent's stages."""
    clock = StageClock()
    clock.wrap(Layout, "take_apart", "check and copy the actions")
    clock.wrap(Dispatcher, "submit_steps", "frame and send the requests (in the kernel: wake the workers)")
    clock.wrap(BatchRequestPool, "prepare", "pick the next batch (workers are busy)")
    clock.wrap(ScatterChannel, "poll", "take in the replies")
    clock.wrap(Dispatcher, "read_payload", "  of which infos")
    clock.wrap(RequestScheduler, "_hand_out", "hand out the result")
    clock.wrap(RequestScheduler, "_info_of", "  of which infos, merged")
    actions = workload.actions()
    envs = aioenv.AsyncVectorEnv(workload.factories, num_workers=WORKERS)
    async with envs:
        await envs.reset(seed=0)
        for number in range(300):
            await envs.step(actions[number % ACTION_BATCHES])
        for times in clock.spent.values():
            times.clear()
        whole = []
        for number in range(STEPS):
            began = time.perf_counter()
            await envs.step(actions[number % ACTION_BATCHES])
            whole.append(time.perf_counter() - began)
    stages = [(f"parent: {stage}", f"{clock.a_step(stage, STEPS):.0f}") for stage in clock.spent]
    return [("one step, start to end", f"{statistics.median(whole) * 1e6:.0f}"), *stages]


def worker(workload: Workload) -> Rows:
    """Clock a worker's stages, with its share of the envs, in this process."""
    rows = workload.num_envs // WORKERS
    service = EnvService([workload.make_env] * rows, AutoresetMode.NEXT_STEP, False)
    first = service.describe()[0]
    service.configure(None, None, 0, False)
    mine, theirs = socket.socketpair()
    for sock in (mine, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    link = WorkerEnd(theirs.fileno(), theirs.fileno())
    link.use(service)
    encoder = Encoder()
    whole, alone = [], []

    def answer() -> None:
        """Answer a request as `WorkerEnd.read` and the loop around it do."""
        plan = service.fast_path() if speedups.serve_steps is not None else None
        got: Any = None if plan is None else link._serve(plan, 0.0)
        if got is not None and not isinstance(got, int):
            got = PartialStep.from_tuple(got)
        elif got is None or got > 0:
            got = link.read()
        else:
            return  # C has
        reply = service.handle(got)
        link.write(Kind.RESULT, 0, 0, reply.fixed, reply.payload)

    def serve(kind: Kind, fixed: Any, tail: bytes) -> None:
        os.writev(mine.fileno(), encoder.encode(kind, 0, 0, fixed, tail))
        began = time.perf_counter()
        answer()
        whole.append(time.perf_counter() - began)
        mine.recv(1 << 24)

    reset = dump(ResetRequest(tuple(range(rows)), tuple(range(rows)), None, True))
    os.writev(mine.fileno(), encoder.encode(Kind.RESET, 0, 0, (), reset))
    frame = link.read()
    assert isinstance(frame, Frame)
    reply = service.handle(frame)
    link.write(Kind.RESULT, 0, 0, reply.fixed, reply.payload)
    mine.recv(1 << 24)
    assert first.action_space is not None
    layout = Layout(load(first.action_space))
    for actions in (workload.actions() * (STEPS // ACTION_BATCHES + 1))[:STEPS]:
        arrays, _ = layout.take_apart(np.asarray(actions)[:rows], rows)
        serve(Kind.STEP, [byte_view(array) for array in arrays], b"")
        began = time.perf_counter()
        for env, action in zip(service._envs, list(arrays[0]), strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        alone.append(time.perf_counter() - began)
    mine.close()
    theirs.close()
    service.close()
    return [
        (f"a worker's share of {rows} envs, alone", f"{statistics.median(whole) * 1e6:.0f}"),
        (f"a loop over {rows} envs, nothing else", f"{statistics.median(alone) * 1e6:.0f}"),
    ]


if __name__ == "__main__":
    ENV, NUM_ENVS = sys.argv[1], int(sys.argv[2])
    STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 3000
    workload = Workload(ENV, NUM_ENVS, 1.0)
    found = [*aioenv.run(parent(workload)), *worker(workload)]
    show_table((f"{ENV} x {NUM_ENVS}, {WORKERS} workers", "µs"), found)
