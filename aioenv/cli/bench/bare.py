"""Bare loops, without any vector env: what contenders are measured by, alone, at once, and in lock-step."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from aioenv.cli.bench.common import NotApplicable
from aioenv.cli.bench.tasks import Measured, Task, clock_blocking
from aioenv.platform import usable_cpus

__all__ = ["bare_lockstep", "bare_loop", "bare_loops"]

BARRIER_S = 60.0  # until all loops must be ready to begin
BELL = b"."


def bare_loop(task: Task) -> Measured:
    """One env, stepped without any vector env, reset when its episode is over."""
    return _bare(task, lambda: None)


def _bare(task: Task, ready: Callable[[], Any]) -> Measured:
    def begin(env: Any) -> Callable[[Any], Any]:
        env.reset(seed=0)
        space = batch_space(env.action_space, task.num_envs)
        ready()

        def step(actions: Any) -> None:
            for action in actions if isinstance(actions, np.ndarray) else iterate(space, actions):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

        return step

    return clock_blocking(task, task.make_env, begin)


def bare_loops(task: Task) -> Measured:
    """A bare loop for each usable CPU, all at once: what the machine gives when CPUs share a core, or a clock."""
    cpus = usable_cpus()
    barrier = multiprocessing.Barrier(cpus)
    running = []
    for _ in range(cpus):
        reading, writing = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=_one_of_the_loops, args=(task, barrier, writing))
        process.start()
        writing.close()  # so that the end of the process ends the wait for its result
        running.append((process, reading))
    results: list[Measured] = []
    for process, pipe in running:
        results.append(pipe.recv())
        process.join()
    seconds = max(result.seconds for result in results)
    rate = sum(result.env_steps / result.seconds for result in results)
    return Measured(
        steps=sum(result.steps for result in results),
        seconds=seconds,
        env_steps=round(rate * seconds),
        start_s=max(result.start_s for result in results),
    )


def _one_of_the_loops(task: Task, barrier: Any, pipe: Any) -> None:
    pipe.send(_bare(task, lambda: barrier.wait(BARRIER_S)))


class _Lockstep:
    """A process for each usable CPU, which steps its share of the envs when told to, and says when it is done.

    Nothing comes back but that: no observations, no rewards, no infos. So it is what processes in lock-step could
    reach at most, if a vector env took no time at all.
    """

    def __init__(self, task: Task) -> None:
        count = min(usable_cpus(), task.num_envs)
        bounds = [task.num_envs * i // count for i in range(count + 1)]
        self._shares = [slice(*pair) for pair in pairwise(bounds)]
        self._socks: list[socket.socket] = []
        self._processes: list[multiprocessing.Process] = []
        for share in self._shares:
            mine, theirs = socket.socketpair()
            with theirs:
                process = multiprocessing.Process(
                    target=_step_when_told, args=(task, share, theirs, [*self._socks, mine])
                )
                process.start()
            self._socks.append(mine)
            self._processes.append(process)

    def reset(self) -> None:
        """Wait until all envs are made and reset."""
        self._wait()

    def step(self, actions: Any) -> None:
        """Step all envs."""
        for sock, share in zip(self._socks, self._shares, strict=True):
            sock.sendall(actions[share].tobytes())
        self._wait()

    def _wait(self) -> None:
        for sock in self._socks:
            if sock.recv(1) != BELL:
                raise RuntimeError("a process of the lock-step has ended; what it printed is above")

    def close(self) -> None:
        """End the processes."""
        for sock in self._socks:
            sock.close()
        for process in self._processes:
            process.join()


def _step_when_told(task: Task, share: slice, sock: socket.socket, others: Sequence[socket.socket]) -> None:
    for other in others:  # copies of the parent's ends, which would keep the streams open
        other.close()
    first = task.actions()[0][share]
    dtype, shape = first.dtype, first.shape
    with contextlib.ExitStack() as stack:
        envs = [stack.enter_context(contextlib.closing(task.make_env())) for _ in range(shape[0])]
        over = [False] * len(envs)
        for row, env in enumerate(envs):
            env.reset(seed=share.start + row)
        sock.sendall(BELL)
        while data := sock.recv(first.nbytes, socket.MSG_WAITALL):
            for row, action in enumerate(np.frombuffer(data, dtype).reshape(shape)):
                if over[row]:
                    envs[row].reset()
                    over[row] = False
                else:
                    _, _, terminated, truncated, _ = envs[row].step(action)
                    over[row] = terminated or truncated
            sock.sendall(BELL)


def bare_lockstep(task: Task) -> Measured:
    """Bare loops over all envs, a process a CPU, which wait for each other after each step (see `_Lockstep`).

    Raises:
        NotApplicable: if a batch of actions is no array.
    """
    if not isinstance(task.actions()[0], np.ndarray):
        raise NotApplicable("takes actions that are arrays")

    def begin(envs: _Lockstep) -> Callable[[Any], Any]:
        envs.reset()
        return envs.step

    return clock_blocking(task, lambda: _Lockstep(task), begin)
