"""`leak_check`: fail if a block of code leaves processes, descriptors, threads or shared memory behind."""

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
    """A block left resources behind; the message lists them."""


# Names in shared memory may stay this many times longer, since any process may add and remove some.
_SHARED_MEMORY_FACTOR = 8
# Loops whose spare descriptor has been seen.
_loops_with_spare: weakref.WeakSet[Any] = weakref.WeakSet()


class Resources(NamedTuple):
    """The resources of this process: number or name → description for messages."""

    children: dict[int, str]
    fds: dict[int, str]
    threads: dict[int, str]
    shared_memory: dict[str, str]

    @classmethod
    def now(cls) -> Resources:
        """List the resources now; on systems without /proc only threads."""
        threads = {t.ident or 0: f"thread {t.name!r}" for t in threading.enumerate()}
        return cls(_children(), _fds(), threads, _shared_memory())

    def since(self, before: Resources) -> list[str]:
        """Return descriptions of the resources that were not there before."""
        pairs: Any = zip(self, before, strict=True)
        # the text is compared, too: a descriptor's number may have been reused
        left = [(key, text) for now, then in pairs for key, text in now.items() if then.get(key) != text]
        others = _mapped_elsewhere() if any(key in self.shared_memory for key, _ in left) else set()
        return [text for key, text in left if key not in others]


def _children() -> dict[int, str]:
    """Return child processes, zombies included."""
    children: dict[int, str] = {}
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, task.read_text(encoding="utf-8").split()):
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    # (a name may be any bytes)
                    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
                    name = stat[stat.index("(") + 1 : stat.rindex(")")]
                    children[pid] = f"process {pid} ({name})"
    return children


def _fds() -> dict[int, str]:
    fds: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed again
                fds[int(name)] = f"fd {name} → {os.readlink(f'/proc/self/fd/{name}')}"
    return fds


def _shared_memory() -> dict[str, str]:
    with contextlib.suppress(OSError):
        return {name: f"shared memory {name!r}" for name in os.listdir("/dev/shm")}
    return {}


def _mapped_elsewhere() -> set[str]:
    """Return names in shared memory that other processes have mapped, and so own."""
    inodes: set[str] = set()  # the process that makes a semaphore maps it under another name
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name != str(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                inodes.update(re.findall(r"(\d+) +/dev/shm/", maps.read_text(encoding="utf-8", errors="replace")))
    names: set[str] = set()
    with contextlib.suppress(OSError), os.scandir("/dev/shm") as entries:
        names.update(entry.name for entry in entries if str(entry.inode()) in inodes)
    return names


@cache
def _open_permanent_pipe() -> None:
    """Make a first loop, with which uvloop opens a pipe for signals that stays open for the life of the process."""
    from aioenv.make import new_event_loop

    new_event_loop().close()


def _without_spare(left: list[str]) -> list[str]:
    """Leave out the descriptor of /dev/null that a running uvloop opens with its first stream and keeps."""
    loop = asyncio._get_running_loop()  # None if none runs
    spare = next((text for text in left if text.startswith("fd ") and text.endswith(f" → {os.devnull}")), None)
    if spare is None or not type(loop).__module__.startswith("uvloop") or loop in _loops_with_spare:
        return left
    _loops_with_spare.add(loop)
    return [text for text in left if text != spare]


@contextlib.contextmanager
def leak_check(timeout_s: float = 2.0) -> Iterator[None]:
    """Fail if the block leaves a child process, descriptor, thread or name in shared memory behind.

    Args:
        timeout_s: how long ending threads and processes may take, in seconds.

    Raises:
        LeakError: if resources are left, unless the block itself raised.
    """
    _open_permanent_pipe()
    before = Resources.now()
    yield
    start = time.monotonic()
    left = _without_spare(Resources.now().since(before))
    while left:
        # the resource trackers of other processes soon remove names whose owner has just ended
        limit_s = timeout_s * (_SHARED_MEMORY_FACTOR if all(text.startswith("shared memory") for text in left) else 1)
        if time.monotonic() - start > limit_s:
            raise LeakError("left behind: " + "; ".join(left))
        time.sleep(0.01)
        # resources that appear only now, such as names in shared memory, belong to others
        now = Resources.now().since(before)
        left = [text for text in left if text in now]
