"""Code in a process of its own: it may fork or end as it likes, and what it leaves is not left by the tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import aioenv

# Arguments of vector envs that are about worker processes.
OF_PROCESSES = {
    "start": "spawn",
    "channel": "streams",
    "transport": "shared",
    "restart": aioenv.RestartPolicy(),
    "log_prefix": "env",
    "worker_env": {"A": "1"},
    "cpu_affinity": [0],
    "ignore_signals": True,
}


def environment() -> dict[str, str]:
    """For a script of its own: it finds the package as this process does."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}  # Ray sets it
    return {**inherited, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def run_alone(
    code: str,
    *args: str,
    stdin: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
    returncode: int = 0,
    timeout_s: float = 60.0,
) -> subprocess.CompletedProcess:
    """Run code, indented as it may be, as a script; it must end with this code. Bytes in, bytes out."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        input=stdin,
        capture_output=True,
        text=not isinstance(stdin, bytes),
        timeout=timeout_s,
        env=environment() if env is None else env,
    )
    assert done.returncode == returncode, done.stderr
    return done


def processes_with(mark: str) -> set[int]:
    """The processes that have this among their environment variables, zombies aside."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is none of our business
            if mark.encode() in environ.read_bytes():
                found.add(int(environ.parent.name))
    return found


def kill_all(mark: str) -> None:
    for pid in processes_with(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that was not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def sockets_on(ports: range) -> list[str]:
    """The sockets of this machine that listen on one of these TCP ports, or are connected to or from it.

    Those that no process has any more, and that wait for a minute, are left out: TIME_WAIT, and FIN_WAIT2 (the other
    end's reset was lost in a flood of packets). A process that still has the other end has it in CLOSE_WAIT.
    """
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, state, *_, inode = line.split()[1:10]
        waiting = state == "06" or (state == "05" and inode == "0")
        if not waiting and any(int(address.partition(":")[2], 16) in ports for address in (local, remote)):
            found.append(f"socket from {local} to {remote} in state {state}")
    return found
