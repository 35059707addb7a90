"""The suite's contenders besides those of `aioenv bench`: bare loops at once, physics alone, vector envs with a policy.

Bare loops and physics alone are upper bounds for a vector env on this machine.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import socket
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from aioenv.cli.arguments import SYNTHETIC
from aioenv.cli.bench import BASELINES as BENCH_BASELINES
from aioenv.cli.contenders import CONTENDERS as PEERS
from aioenv.cli.contenders import (
    Contender,
    NotApplicable,
    Throughput,
    Workload,
    measure_blocking,
    natively,
    step_aioenv,
    step_bare,
)
from aioenv.platform import usable_cpus

__all__ = ["BASELINES", "CONTENDERS", "LocksteppedLoops", "Policy", "TwoLayers", "loops_at_once"]

BARRIER_S = 60.0  # within which all loops must be ready
DONE = b"."


# ---------------------------------------------------------------- bare loops on all CPUs


def bare_loops(workload: Workload) -> Throughput:
    """Measure a bare loop on each usable CPU, all at once: CPUs may share a core, or a clock."""
    return loops_at_once([workload] * usable_cpus())


def loops_at_once(workloads: Sequence[Workload]) -> Throughput:
    """Measure bare loops, each in a process of its own, all at once."""
    barrier = multiprocessing.Barrier(len(workloads))
    running = []
    for workload in workloads:
        reading, writing = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=_send_bare, args=(workload, barrier, writing))
        process.start()
        writing.close()  # so that the end of the process ends the wait for its result
        running.append((process, reading))
    results: list[Throughput] = []
    for process, pipe in running:
        results.append(pipe.recv())
        process.join()
    seconds = max(result.seconds for result in results)
    rate = sum(result.env_steps / result.seconds for result in results)
    return Throughput(
        steps=sum(result.steps for result in results),
        seconds=seconds,
        env_steps=round(rate * seconds),
        start_s=max(result.start_s for result in results),
    )


def _send_bare(workload: Workload, barrier: Any, pipe: Any) -> None:
    pipe.send(step_bare(workload, ready=lambda: barrier.wait(BARRIER_S)))


class LocksteppedLoops:
    """A process for each usable CPU, which steps its share of the envs on request, and reports when it is done.

    Processes send back no observations, rewards or infos: lock-step can't be faster, even if a vector env took no time.
    """

    def __init__(self, workload: Workload) -> None:
        count = min(usable_cpus(), workload.num_envs)
        bounds = [workload.num_envs * i // count for i in range(count + 1)]
        self._shares = [slice(*pair) for pair in pairwise(bounds)]
        self._socks: list[socket.socket] = []
        self._processes: list[multiprocessing.Process] = []
        for share in self._shares:
            mine, theirs = socket.socketpair()
            with theirs:
                process = multiprocessing.Process(
                    target=_step_on_request, args=(workload, share, theirs, [*self._socks, mine])
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
            if sock.recv(1) != DONE:
                raise RuntimeError("a process of the lock-step has ended; its error is printed above")

    def close(self) -> None:
        """End the processes."""
        for sock in self._socks:
            sock.close()
        for process in self._processes:
            process.join()


def _step_on_request(workload: Workload, share: slice, sock: socket.socket, others: Sequence[socket.socket]) -> None:
    for other in others:  # copies of the parent's ends, which would keep the streams open
        other.close()
    first = workload.actions()[0][share]
    dtype, shape = first.dtype, first.shape
    with contextlib.ExitStack() as stack:
        envs = [stack.enter_context(contextlib.closing(workload.make_env())) for _ in range(shape[0])]
        ended = [False] * len(envs)
        for row, env in enumerate(envs):
            env.reset(seed=share.start + row)
        sock.sendall(DONE)
        while data := sock.recv(first.nbytes, socket.MSG_WAITALL):
            for row, action in enumerate(np.frombuffer(data, dtype).reshape(shape)):
                if ended[row]:
                    envs[row].reset()
                    ended[row] = False
                else:
                    _, _, terminated, truncated, _ = envs[row].step(action)
                    ended[row] = terminated or truncated
            sock.sendall(DONE)


def bare_lockstep(workload: Workload) -> Throughput:
    """Measure bare loops over all envs, a process a CPU, which wait for each other after each step.

    Raises:
        NotApplicable: if a batch of actions is no array.
    """
    if not isinstance(workload.actions()[0], np.ndarray):
        raise NotApplicable("takes actions that are arrays")

    def begin(loops: LocksteppedLoops) -> Callable[[Any], Any]:
        loops.reset()
        return loops.step

    return measure_blocking(workload, lambda: LocksteppedLoops(workload), begin)


# ---------------------------------------------------------------- the physics of MuJoCo tasks alone

# States of a run with natural ends of episodes: how many, and how many steps apart.
_SNAPSHOTS, _APART = 16, 8


def physics_alone(workload: Workload, *, post_constraint: bool, clock_stopped: bool = False) -> Throughput:
    """Measure simulations without observations, from states of a real run, which are loaded again every few steps.

    Args:
        workload: what to step.
        post_constraint: whether to loop over `MjData` on threads, with `mj_rnePostConstraint` after each step, as
            Gymnasium's envs call it; else `mujoco.batch` steps, without what some tasks need after a step.
        clock_stopped: whether MuJoCo's clock is stopped, as native tasks have it.

    Raises:
        NotApplicable: if it is none of Gymnasium's MuJoCo tasks.
    """
    import mujoco

    from aioenv.mujoco_versions import stop_clock
    from aioenv.requirements import has_batch
    from aioenv.worker.making import is_native_task, make_registered

    if workload.env in SYNTHETIC or not is_native_task(workload.env):
        raise NotApplicable(f"{workload.env} is no MuJoCo task")
    if not has_batch():
        raise NotApplicable("it needs mujoco >= 3.17 (mujoco.batch)")
    from aioenv.native.sim_pool import SimPool

    env: Any = make_registered(workload.env, {}, num_envs=workload.num_envs)

    def begin(pool: SimPool) -> Callable[[Any], Any]:
        env.reset(seed=0)
        actions = workload.actions()
        snapshots = []
        for i in range(_SNAPSHOTS * _APART):
            if i % _APART == 0:
                snapshots.append(env.physics_states())
            env.step(actions[i % len(actions)])
        ctrl, nstep = pool.bind("ctrl"), env.frame_skip
        slots = np.arange(workload.num_envs)
        count = itertools.count()
        if not clock_stopped:  # the pool has stopped it
            mujoco.set_mjcb_time(None)
        elif not stop_clock():
            raise NotApplicable("MuJoCo's clock can't be stopped here")

        def step(batch: Any) -> None:
            number = next(count)
            if number % _APART == 0:
                pool.set_states(snapshots[number // _APART % _SNAPSHOTS], slots)
            ctrl[...] = batch
            pool.advance(nstep)

        return step

    with contextlib.closing(env):
        make = partial(SimPool, env.model, workload.num_envs, post_constraint=post_constraint)
        return measure_blocking(workload, make, begin)


# ---------------------------------------------------------------- a policy that takes time

HIDDEN = 512


class TwoLayers:
    """A policy of numpy with two hidden layers of 512, in float32, computed on the CPUs that step the envs.

    Args:
        observations: the space of one.
        actions: likewise.

    Raises:
        NotApplicable: if observations are no Box, or actions no bounded one.
    """

    def __init__(self, observations: Any, actions: Any) -> None:
        if not (isinstance(observations, Box) and isinstance(actions, Box) and actions.is_bounded()):
            raise NotApplicable("takes observations that are a Box, and actions that are a bounded one")
        rng = np.random.default_rng(0)
        sizes = (int(np.prod(observations.shape)), HIDDEN, HIDDEN, int(np.prod(actions.shape)))
        self._weights = [(rng.standard_normal(size) / np.sqrt(size[0])).astype(np.float32) for size in pairwise(sizes)]
        self._shape = actions.shape
        self._middle = ((actions.high + actions.low) / 2).ravel()
        self._half = ((actions.high - actions.low) / 2).ravel()

    def __call__(self, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Choose actions `(k, ...)` for k observations."""
        values = obs.reshape(len(obs), -1).astype(np.float32)
        for weights in self._weights:
            values = np.tanh(values @ weights)
        return (values * self._half + self._middle).reshape(len(obs), *self._shape)


class Policy:
    """A vector env whose actions `TwoLayers` chooses, in place of those that it is given."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self._policy = TwoLayers(envs.single_observation_space, envs.single_action_space)
        self._obs: Any = None

    async def reset(self, seed: int) -> None:
        """Reset all envs."""
        self._obs, _ = await self._envs.reset(seed=seed)

    async def step(self, _: Any) -> None:
        """Choose actions for the observations, and step."""
        self._obs, *_ = await self._envs.step(self._policy(self._obs))

    async def rollout(self, _: Any, steps: int, **options: Any) -> None:
        """Roll out the policy."""
        await self._envs.rollout(lambda obs, slots: self._policy(obs), steps, **options)


def _with_policy(label: str, **changes: Any) -> Contender:
    return Contender(label, "aioenv", partial(step_aioenv, wrap=Policy, **changes))


def _physics(label: str, **how: Any) -> Contender:
    return Contender(label, "mujoco", partial(physics_alone, **how))


# In the order of the tables in docs/data.
class _TensorSteps:
    """Steps a `TorchVectorEnv` with tensors of the arrays that a workload has."""

    def __init__(self, envs: Any) -> None:
        import torch  # only where it is measured

        from aioenv.adapters.torch import TorchVectorEnv

        self._envs, self._from_numpy = TorchVectorEnv(envs), torch.from_numpy
        self.reset = self._envs.reset

    def step(self, actions: npt.NDArray[Any]) -> Any:
        return self._envs.step(self._from_numpy(actions))


CONTENDERS: dict[str, Contender] = {
    **{name: contender for name, contender in PEERS.items() if name != "bare"},
    "aioenv-policy": _with_policy("aioenv with a policy"),
    "aioenv-policy-groups": _with_policy("aioenv with a policy (groups=2)", groups=2),
    "aioenv-policy-workers": _with_policy("aioenv with a policy (split=workers)", groups=2, split="workers"),
    "aioenv-torch": Contender("aioenv.adapters.torch", "torch", partial(step_aioenv, wrap=_TensorSteps)),
    "aioenv-torch-native": Contender(
        "aioenv.adapters.torch (backend=native)", "torch", lambda load: step_aioenv(natively(load), wrap=_TensorSteps)
    ),
    "raw-batch": _physics("mujoco.batch, physics alone", post_constraint=False),
    "raw-loop": _physics("MjData loop, physics alone", post_constraint=True),
    "raw-batch-still": _physics("mujoco.batch, its clock stopped", post_constraint=False, clock_stopped=True),
    "raw-loop-still": _physics("MjData loop, its clock stopped", post_constraint=True, clock_stopped=True),
    "bare": PEERS["bare"],
    "bare-all": Contender("bare loops, one a CPU", "gymnasium", bare_loops),
    "bare-lockstep": Contender("bare loops in lock-step", "gymnasium", bare_lockstep),
}

# As those of `aioenv bench`; with bare loops on all CPUs at once, and in lock-step.
BASELINES = {**BENCH_BASELINES, "of all": ("bare-all", 1), "of lock-step": ("bare-lockstep", 1)}
