"""`leak_check`: what a block of code left behind, of processes, descriptors, threads and shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["LeakError", "Resources", "leak_check"]


class LeakError(AssertionError):
    """Something was left behind; the message lists it."""


# How many times as long names in shared memory may stay: any process may put some there and take them away again.
_NAMES_TIMES = 8
# Loops whose spare descriptor has been seen.
_spared: weakref.WeakSet[Any] = weakref.WeakSet()


class Resources(NamedTuple):
    """What this process holds: number or name → how to call it in a message."""

    children: dict[int, str]
    fds: dict[int, str]
    threads: dict[int, str]
    shared_memory: dict[str, str]

    @classmethod
    def now(cls) -> Resources:
        """Take stock. On systems without /proc, of threads alone."""
        threads = {t.ident or 0: f"thread {t.name!r}" for t in threading.enumerate()}
        return cls(_children(), _fds(), threads, _shared_memory())

    def since(self, before: Resources) -> list[str]:
        """What is here and was not before."""
        pairs: Any = zip(self, before, strict=True)
        # compared by text too: a descriptor's number may have come to mean something else
        left = [(key, text) for now, then in pairs for key, text in now.items() if then.get(key) != text]
        others = _mapped_elsewhere() if any(key in self.shared_memory for key, _ in left) else set()
        return [text for key, text in left if key not in others]


def _children() -> dict[int, str]:
    """Child processes, zombies included."""
    children: dict[int, str] = {}
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, task.read_text(encoding="utf-8").split()):
                with contextlib.suppress(OSError):  # it is gone, and the others are not
                    stat = Path(f"/proc/{pid}/stat").read_text(
                        encoding="utf-8", errors="replace"
                    )  # a name may be any bytes
                    name = stat[stat.index("(") + 1 : stat.rindex(")")]
                    children[pid] = f"process {pid} ({name})"
    return children


def _fds() -> dict[int, str]:
    fds: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own is gone again
                fds[int(name)] = f"fd {name} → {os.readlink(f'/proc/self/fd/{name}')}"
    return fds


def _shared_memory() -> dict[str, str]:
    with contextlib.suppress(OSError):
        return {name: f"shared memory {name!r}" for name in os.listdir("/dev/shm")}
    return {}


def _mapped_elsewhere() -> set[str]:
    """Names in shared memory that processes other than this one have mapped: theirs, not ours."""
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name != str(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended, or is none of our business
                names.update(re.findall(r"/dev/shm/(\S+)", maps.read_text(encoding="utf-8", errors="replace")))
    return names


@cache
def _open_what_stays() -> None:
    """With its first loop uvloop opens a pipe for signals, once for the process: no block leaves that behind."""
    from aioenv.make import new_event_loop

    new_event_loop().close()


def _without_spare(left: list[str]) -> list[str]:
    """Leave out the one descriptor of /dev/null that a running uvloop keeps from its first stream on."""
    loop = asyncio._get_running_loop()  # None if none runs
    spare = next((text for text in left if text.startswith("fd ") and text.endswith(f" → {os.devnull}")), None)
    if spare is None or not type(loop).__module__.startswith("uvloop") or loop in _spared:
        return left
    _spared.add(loop)
    return [text for text in left if text != spare]


@contextlib.contextmanager
def leak_check(timeout_s: float = 2.0) -> Iterator[None]:
    """Fail if the block leaves a child process, descriptor, thread or name in shared memory behind.

    Args:
        timeout_s: how long threads and processes that are about to end may take, in seconds.

    Raises:
        LeakError: if something is left; it is raised only if the block itself did not raise.
    """
    _open_what_stays()
    before = Resources.now()
    yield
    began = time.monotonic()
    left = _without_spare(Resources.now().since(before))
    while left:
        # names whose owner has just ended are soon removed by others' resource trackers
        patience_s = timeout_s * (_NAMES_TIMES if all(text.startswith("shared memory") for text in left) else 1)
        if time.monotonic() - began > patience_s:
            raise LeakError("left behind: " + "; ".join(left))
        time.sleep(0.01)
        # what appears only now, in shared memory say, is somebody else's
        now = Resources.now().since(before)
        left = [text for text in left if text in now]
