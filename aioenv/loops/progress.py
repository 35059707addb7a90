"""A progress bar, if tqdm is installed."""

from __future__ import annotations

import sys
from typing import Any, Protocol

__all__ = ["Bar", "no_bar", "progress_bar"]


class Bar(Protocol):
    """The methods of a tqdm bar that are used here."""

    def update(self, n: int) -> Any:
        """Add n to the count."""

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        """Set the text after the bar."""

    def close(self) -> None:
        """End the bar."""


def progress_bar(total: int, unit: str = "steps") -> Bar:
    """Make a tqdm bar; without tqdm, one that shows nothing.

    Args:
        total: the count at the end.
        unit: the noun after the count.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return no_bar()
    kind = type("Progress", (tqdm,), {"monitor_interval": 0})  # no monitor thread, which would outlive the bar
    layout = "{percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt} {unit}, {elapsed}{postfix}"
    bar: Bar = kind(total=total, unit=unit, bar_format=layout, file=sys.stdout, mininterval=0.25)
    return bar


def no_bar() -> Bar:
    """Make a bar that shows nothing."""
    return _NoBar()


class _NoBar:
    def update(self, n: int) -> None:
        pass

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        pass

    def close(self) -> None:
        pass
