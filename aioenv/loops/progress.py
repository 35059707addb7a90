"""A progress bar, where tqdm is there."""

from __future__ import annotations

import sys
from typing import Any, Protocol

__all__ = ["Bar", "no_bar", "progress_bar"]


class Bar(Protocol):
    """What is used of a tqdm."""

    def update(self, n: int) -> Any:
        """So many steps more are done."""

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        """What stands after the bar."""

    def close(self) -> None:
        """The bar is done."""


def progress_bar(total: int, unit: str = "steps") -> Bar:
    """A tqdm bar; without tqdm, one that shows nothing.

    Args:
        total: how many there are.
        unit: of what.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return no_bar()
    kind = type("Progress", (tqdm,), {"monitor_interval": 0})  # no thread, which would outlive the bar
    layout = "{percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt} {unit}, {elapsed}{postfix}"
    bar: Bar = kind(total=total, unit=unit, bar_format=layout, file=sys.stdout, mininterval=0.25)
    return bar


def no_bar() -> Bar:
    """One that shows nothing."""
    return _NoBar()


class _NoBar:
    def update(self, n: int) -> None:
        pass

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        pass

    def close(self) -> None:
        pass
