"""`FaultyEnv`: a small env that works until its fault strikes, at a moment of your choice.

It imports nothing else of aioenv, so any vector env can be tested with it::

    envs = gymnasium.vector.AsyncVectorEnv(faulty_envs(4, "segfault", "step", slot=2, at=3))

Most faults are meant for a process that may be lost: they end it, hang it or take its descriptors away.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NoReturn, get_args

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

__all__ = ["FAULTS", "MOMENTS", "FaultFactory", "FaultyEnv", "TwoArgumentError", "faulty_envs", "makes_sense"]

Fault = Literal[
    "raises",  # a ValueError
    "raises_two_args",  # an exception whose constructor takes two arguments, which plain pickle can't restore
    "raises_local",  # an exception whose class is defined in a function
    "raises_unpicklable",  # an exception that holds a lock
    "sys_exit",  # sys.exit(7)
    "os_exit",  # os._exit(7)
    "segfault",
    "sigkill",
    "out_of_memory",  # allocates until the limit of the address space is reached, which raises MemoryError
    "hangs",  # sleeps for ever, in Python
    "hangs_in_c",  # sleeps for ever in C with the GIL held, so that no other thread runs
    "ignores_sigterm",  # ignores SIGTERM, and hangs
    "slow",  # takes SLOW_S longer, then goes on
    "prints",  # 200 kB to descriptor 1, then goes on
    "floods_stderr",  # 4 MB to descriptor 2, then goes on
    "closes_fds",  # all of the process's descriptors, then goes on
    "forks",  # a grandchild that ignores SIGTERM and never ends; then goes on
    "wrong_shape",  # an observation of shape (4,)
    "wrong_dtype",  # an observation of complex128
    "nan",  # an observation, and a reward, of NaN
    "huge_info",  # 50 MB under info["huge"]; from `answer`, 50 MB
]
Moment = Literal["import", "factory", "reset", "step", "render", "call", "close"]

FAULTS: tuple[Fault, ...] = get_args(Fault)
MOMENTS: tuple[Moment, ...] = get_args(Moment)

# Faults of a returned value can strike only where such a value is returned.
_ONLY_AT: dict[str, tuple[str, ...]] = {
    "wrong_shape": ("reset", "step"),
    "wrong_dtype": ("reset", "step"),
    "nan": ("reset", "step"),
    "huge_info": ("reset", "step", "call"),
}

SLOW_S = 0.2
EXIT_CODE = 7
PRINTED_BYTES = 200_000
FLOOD_BYTES = 4_000_000
HUGE_BYTES = 50_000_000
_MAX_COUNT = 2**24  # the largest count that float32 holds exactly
_HEADROOM_BYTES = 64 << 20  # may still be allocated once the address space is limited
_CHUNK_BYTES = 1 << 20


def makes_sense(fault: str, when: str) -> bool:
    """Return whether a fault can strike at a moment: a wrong observation needs a moment that returns one."""
    return when in _ONLY_AT.get(fault, MOMENTS)


class FaultyEnv(gymnasium.Env[npt.NDArray[np.float32], np.int64]):
    """An env that counts its steps until its fault strikes.

    Observations are float32 of shape (3,): slot, episode (from 1), step of the episode (from 0). The reward of a step
    is its number within the episode. Actions (two, discrete) change nothing. An image is uint8 of shape (4, 4, 3),
    filled with the step's number. `answer` returns 1000 · slot + the step's number. The fault strikes once; an env
    whose process survives it behaves from then on.

    Args:
        fault: one of `FAULTS`; None for none.
        when: one of `MOMENTS`: while the factory is imported (see `factory`), in the constructor, or in `reset`,
            `step`, `render`, `close` or `answer` (which is not a method of Gymnasium).
        slot: shown in each observation.
        at: the number of the reset, step, … that strikes, counted from 1 over the env's life.
        length: the number of steps after which an episode is truncated; None for never.
        render_mode: as in Gymnasium.

    Raises:
        ValueError: if the fault or the moment is not known, the fault can't strike then, or `at` is less than 1.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  # Gymnasium's own convention

    def __init__(
        self,
        fault: Fault | None = None,
        when: Moment = "step",
        slot: int = 0,
        at: int = 1,
        *,
        length: int | None = None,
        render_mode: str | None = "rgb_array",
    ) -> None:
        _check(fault, when, at)
        self.observation_space = spaces.Box(0, _MAX_COUNT, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.render_mode = render_mode
        self.slot = slot
        self.episode = 0
        self.t = 0
        self._fault = fault
        self._when = when
        self._at = at
        self._length = length
        self._counts: dict[str, int] = {}
        self._strikes("factory")

    @classmethod
    def factory(
        cls, fault: Fault | None = None, when: Moment = "step", slot: int = 0, at: int = 1, **kwargs: Any
    ) -> FaultFactory:
        """Return a picklable factory; arguments as for the constructor. With when="import", unpickling it strikes."""
        return FaultFactory(fault, when, slot, at, **kwargs)

    def _strikes(self, moment: Moment) -> str | None:
        """Count a moment, and let the fault strike if it is due; return its name if the process survives."""
        count = self._counts[moment] = self._counts.get(moment, 0) + 1
        if moment != self._when or count != self._at or self._fault is None:
            return None
        strike(self._fault)
        return self._fault

    def _observe(self, fault: str | None) -> tuple[Any, dict[str, Any]]:
        obs: Any = np.array([self.slot, self.episode, self.t], np.float32)
        if fault == "wrong_shape":
            obs = np.zeros(4, np.float32)
        elif fault == "wrong_dtype":
            obs = obs.astype(np.complex128)
        elif fault == "nan":
            obs = np.full(3, np.nan, np.float32)
        return obs, {"huge": _huge()} if fault == "huge_info" else {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        super().reset(seed=seed)
        fault = self._strikes("reset")
        self.episode += 1
        self.t = 0
        return self._observe(fault)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Count one step."""
        fault = self._strikes("step")
        self.t += 1
        obs, info = self._observe(fault)
        reward = float("nan") if fault == "nan" else float(self.t)
        return obs, reward, False, self.t == self._length, info

    def render(self) -> Any:
        """Return an image filled with the step's number."""
        self._strikes("render")
        return np.full((4, 4, 3), self.t % 256, np.uint8)

    def answer(self) -> Any:
        """Return 1000 · slot + the step's number."""
        return _huge() if self._strikes("call") == "huge_info" else 1000 * self.slot + self.t

    def close(self) -> None:
        """Close the env; the fault strikes if this is its moment."""
        self._strikes("close")


class FaultFactory:
    """A picklable factory of a `FaultyEnv`. With when="import" the fault strikes when the factory is unpickled.

    If it is called without having been pickled (in the same process, or in a forked one), the fault strikes then.
    """

    def __init__(
        self, fault: Fault | None = None, when: Moment = "step", slot: int = 0, at: int = 1, **kwargs: Any
    ) -> None:
        _check(fault, when, at)
        self._args = fault, when, slot, at
        self._kwargs = kwargs
        self._imports = when == "import" and fault is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._args, self._kwargs)

    def __call__(self) -> FaultyEnv:
        """Make the env."""
        self._import()
        return FaultyEnv(*self._args, **self._kwargs)

    def _import(self) -> None:
        fault = self._args[0]
        if self._imports and fault is not None:
            self._imports = False
            strike(fault)


def _unpickle(args: Any, kwargs: dict[str, Any]) -> FaultFactory:
    factory = FaultFactory(*args, **kwargs)
    factory._import()
    return factory


def faulty_envs(
    num_envs: int, fault: Fault | None, when: Moment = "step", *, slot: int = 0, at: int = 1, **kwargs: Any
) -> list[FaultFactory]:
    """Return factories for a vector env in which one slot has a fault.

    Args:
        num_envs: the number of factories.
        fault: the fault of `slot`; None for none.
        when: the moment at which it strikes.
        slot: the slot that has the fault; each env shows its own slot in its observations.
        at: as for `FaultyEnv`.
        **kwargs: more arguments for every `FaultyEnv`.

    Raises:
        ValueError: if `FaultyEnv` refuses the arguments, or `slot` is out of range.
    """
    if not 0 <= slot < num_envs:
        raise ValueError(f"slot: expected a number from 0 to {num_envs - 1}, got {slot}")
    return [FaultFactory(fault if i == slot else None, when, i, at, **kwargs) for i in range(num_envs)]


def _check(fault: str | None, when: str, at: int) -> None:
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"fault: expected one of {', '.join(FAULTS)}, got {fault!r}")
    if when not in MOMENTS:
        raise ValueError(f"when: expected one of {', '.join(MOMENTS)}, got {when!r}")
    if fault is not None and not makes_sense(fault, when):
        raise ValueError(f"a fault {fault!r} can't strike at {when!r}, but at {', '.join(_ONLY_AT[fault])}")
    if at < 1:
        raise ValueError(f"at: expected a number from 1, got {at}")


# ---------------------------------------------------------------- the faults


class TwoArgumentError(Exception):
    """An exception whose constructor takes two arguments but keeps one, so that unpickling it raises a TypeError."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code


def strike(fault: Fault) -> None:
    """Let a fault strike; returns if the process can go on."""
    act = _ACTS.get(fault)
    if act is not None:  # the others change returned values
        act()


def _raise() -> NoReturn:
    raise ValueError("the fault has struck")


def _raise_two_args() -> NoReturn:
    raise TwoArgumentError(EXIT_CODE, "the fault has struck")


def _raise_local() -> NoReturn:
    class LocalError(Exception):
        pass

    raise LocalError("the fault has struck")


def _raise_unpicklable() -> NoReturn:
    raise RuntimeError("the fault has struck", threading.Lock())


def _sys_exit() -> NoReturn:
    sys.exit(EXIT_CODE)


def _os_exit() -> NoReturn:
    os._exit(EXIT_CODE)


def _segfault() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # no core file
    ctypes.string_at(0)


def _sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run_out_of_memory() -> None:
    """Raise a MemoryError; the limit is restored by then."""
    import resource

    with open("/proc/self/statm", encoding="utf-8") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _HEADROOM_BYTES, limits[1]))
    try:
        # malloc may have reserved 64 MiB for each thread, which the limit counts as used
        hoard = [bytearray(_CHUNK_BYTES) for _ in range(64 * _HEADROOM_BYTES // _CHUNK_BYTES)]
        raise RuntimeError(f"{len(hoard)} MiB were to be had beyond a limit of {_HEADROOM_BYTES >> 20}")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)


def _hang_in_c() -> NoReturn:
    libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the GIL
    while True:
        libc.sleep(3600)


def _ignore_sigterm() -> NoReturn:
    # the signal module works only on the main thread; this works on any
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(int(signal.SIG_IGN)))
    _hang()


def _be_slow() -> None:
    time.sleep(SLOW_S)


def _print_much() -> None:
    _write(1, PRINTED_BYTES)


def _flood_stderr() -> None:
    _write(2, FLOOD_BYTES)


def _write(fd: int, count: int) -> None:
    line = b"the fault prints this line of one hundred bytes over and over, until it has printed enough" + b"." * 9
    data = memoryview((line + b"\n") * (count // 100))
    while data:
        data = data[os.write(fd, data) :]


def _close_fds() -> None:
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))


def _fork() -> None:
    if os.fork() == 0:
        _ignore_sigterm()


def _huge() -> npt.NDArray[np.uint8]:
    return np.full(HUGE_BYTES, 7, np.uint8)


_ACTS: dict[str, Callable[[], object]] = {
    "raises": _raise,
    "raises_two_args": _raise_two_args,
    "raises_local": _raise_local,
    "raises_unpicklable": _raise_unpicklable,
    "sys_exit": _sys_exit,
    "os_exit": _os_exit,
    "segfault": _segfault,
    "sigkill": _sigkill,
    "out_of_memory": _run_out_of_memory,
    "hangs": _hang,
    "hangs_in_c": _hang_in_c,
    "ignores_sigterm": _ignore_sigterm,
    "slow": _be_slow,
    "prints": _print_much,
    "floods_stderr": _flood_stderr,
    "closes_fds": _close_fds,
    "forks": _fork,
}
