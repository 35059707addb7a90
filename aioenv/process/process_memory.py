"""How much memory a worker process holds (Linux)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["ProcessMemory", "process_memory"]

_FIELDS = {"Rss": "rss", "Pss": "pss", "Private_Dirty": "private_dirty", "Private_Clean": "private_clean"}


class ProcessMemory(NamedTuple):
    """The memory of one process, in bytes.

    Attributes:
        rss: all that is mapped and in memory.
        pss: the same, with pages that n processes share counted as 1/n.
        private_dirty: what it alone has and has written to: what one more process like it costs.
        private_clean: what it alone has mapped of files.
    """

    rss: int
    pss: int
    private_dirty: int
    private_clean: int

    @property
    def uss(self) -> int:
        """All that it alone has. A file that a lone process has mapped counts, and no longer once others have too."""
        return self.private_dirty + self.private_clean


def process_memory(pid: int) -> ProcessMemory | None:
    """The memory of a process, as the kernel sums it up in /proc; None if it is gone, or there is no /proc.

    The kernel walks all its pages for that: 2 to 10 ms for one with MuJoCo.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return None
    sizes = dict.fromkeys(_FIELDS.values(), 0)
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in _FIELDS:
            sizes[_FIELDS[name]] = int(rest.split()[0]) * 1024
    return ProcessMemory(**sizes)
