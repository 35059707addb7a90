"""Print text, tables, progress and JSON.

A terminal gets colours (unless NO_COLOR is set), tables that fit its width, and progress bars, by rich, which is
imported only to print there. A pipe or a file gets the same as plain text in long lines, and so does a terminal without
rich, which `aioenv doctor` reports, and one that is too narrow for a table.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

__all__ = [
    "STDOUT",
    "closest",
    "did_you_mean",
    "progress",
    "say",
    "short_number",
    "show_table",
    "stdout_to_stderr",
    "write_json",
]

STDOUT = "-"  # the value of --json without a file

_REFRESH_S = 0.1
# In a narrower column names are hard to read, and rich leaves them out in the end.
_LEAST_TEXT = 6
# The styles of table cells that begin with these words.
_STYLES = {
    "better": "green",
    "worse": "red",
    "noise": "dim",
    "MISSING": "bold red",
    "not installed": "dim",
    "does not work": "yellow",
    "a GPU": "green",
}


def _console(stream: TextIO) -> Any:
    """Return rich's console of a terminal; None for any other stream, and without rich."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except Exception:  # a broken installation may raise anything
        return None
    console = Console(file=stream, markup=False, highlight=False, emoji=False)
    if not console.width:  # COLUMNS=0, with which it would print nothing
        console.width = shutil.get_terminal_size().columns
    return console


def say(text: str = "", style: str = "", *, indent: int = 0, wrap: bool = True) -> None:
    """Print text, in lines that end between words.

    Args:
        text: one or more lines.
        style: as rich names it: "bold", "green", …
        indent: how many spaces stand before each line.
        wrap: whether to break lines that are longer than the terminal is wide; False for code to copy.
    """
    console = _console(sys.stdout)
    if console is None:
        for line in text.split("\n"):
            print(f"{'':<{indent}}{line}")
        return
    from rich.padding import Padding
    from rich.text import Text

    if wrap and indent:
        console.print(Padding.indent(Text(text, style), indent))
    else:
        text = "\n".join(f"{'':<{indent}}{line}" for line in text.split("\n"))
        console.print(Text(text, style), soft_wrap=not wrap)


def show_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", texts: int = 1, indent: int = 0
) -> None:
    """Print a table.

    Args:
        heads: the head of each column.
        rows: the cells of each row.
        title: printed above, in bold.
        texts: how many of the first columns are text, which is wrapped to fit; the others are numbers, on the right.
        indent: how many spaces stand before each line.
    """
    rows = list(rows)
    if title:
        say(title, "bold")
    console = _console(sys.stdout)
    if console is None or indent + _least_width(heads, rows, texts) > console.width:
        heads = [head.replace("\n", " ") for head in heads]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        for row in ([heads] if any(heads) else []) + rows:
            cells = [
                f"{cell:<{width}}" if i < texts else f"{cell:>{width}}"
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print(f"{'':<{indent}}{'  '.join(cells)}".rstrip())
        return
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(heads))
    for number, head in enumerate(heads):
        if number < texts:
            table.add_column(Text(head), overflow="fold")
        else:
            table.add_column(Text(head), justify="right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(cell, _style(cell)) for cell in row))
    console.print(Padding.indent(table, indent))


def _least_width(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> int:
    """Return how wide a table with whole numbers and readable texts is at least."""
    columns = list(zip(heads, *rows, strict=True))[texts:]
    numbers = sum(max(len(part) for cell in column for part in cell.split("\n")) for column in columns)
    return _LEAST_TEXT * texts + numbers + 2 * (len(heads) - 1)


def _style(cell: str) -> str:
    return next((style for word, style in _STYLES.items() if cell.startswith(word)), "")


def short_number(value: float) -> str:
    """Return a number of at least 0 in at most five letters: 12, 1.23k, 12.3M."""
    for suffix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[..., None]]:
    """Show a progress bar while the block runs, if stderr is a terminal.

    Args:
        total: the size of all parts together.

    Yields:
        A function `show(text, size=1)`, to be called when a part of this size begins; those before are done then.
    """
    console = _console(sys.stderr)
    if console is None:
        yield lambda text, size=1: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        BarColumn(20),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
    )
    # no refresh thread; stdout stays what it is
    options: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
    with Progress(*columns, console=console, transient=True, expand=True, **options) as bar:
        task = bar.add_task("", total=total)
        begun, shown = 0, float("-inf")

        def show(text: str, size: int = 1) -> None:
            nonlocal begun, shown
            bar.update(task, description=text, completed=min(begun, total))
            begun += size
            if (now := time.monotonic()) - shown >= _REFRESH_S:
                bar.refresh()
                shown = now

        yield show


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[TextIO]:
    """Send to stderr all that is printed in this block, by other processes too; yields the real stdout."""
    real = sys.stdout
    real.flush()
    with contextlib.ExitStack() as stack:
        stream = real
        with contextlib.suppress(OSError, ValueError):  # no files, as in a notebook
            errors, kept = sys.stderr.fileno(), os.dup(1)
            stack.callback(os.close, kept)
            stream = stack.enter_context(open(os.dup(real.fileno()), "w", encoding="utf-8"))
            stack.callback(os.dup2, kept, 1)
            os.dup2(errors, 1)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield stream


def write_json(target: Path | TextIO, content: Any) -> None:
    """Write JSON to a file, whose directory is made, or to a stream."""
    text = json.dumps(content, indent=1) + "\n"
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    else:
        target.write(text)


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is closest to this one; empty if none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), "")


def did_you_mean(close: str) -> str:
    """Return the end of a message that names a close word; empty without one."""
    return f"; did you mean {close}?" if close else ""
