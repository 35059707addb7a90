"""What notebooks show of vector envs and results: small tables of HTML, and the output of envs below the cell."""

from __future__ import annotations

import asyncio
import base64
import contextvars
import html
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

__all__ = ["MOST_ROWS", "describe", "prepare_notebook", "show_output", "slot_ranges", "table", "video"]

# The most rows of a table.
MOST_ROWS = 16
# A larger video is not put into the notebook's own file; the notebook shows the path.
MAX_VIDEO_BYTES = 16 << 20
_STYLE = "text-align: left; vertical-align: top"


def describe(name: str, facts: Mapping[str, object]) -> str:
    """Return a repr: "<name env num_envs=4 running>"; the values of "env" and "state" stand without their names."""
    words = (str(value) if key in ("env", "state") else f"{key}={value}" for key, value in facts.items())
    return f"<{' '.join([name, *words])}>"


def slot_ranges(slots: Sequence[int]) -> str:
    """Return slot numbers as text: "3", "0 to 7", or "0, 4, 8"."""
    if len(slots) > 2 and tuple(slots) == tuple(range(slots[0], slots[-1] + 1)):
        return f"{slots[0]} to {slots[-1]}"
    return ", ".join(map(str, slots))


def table(title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return a table as HTML; all texts are escaped.

    Args:
        title: the caption.
        rows: the texts of each row. Without a header, the first text of a row is its name.
        header: the names of the columns.
    """
    lines = ["<table>", f'<caption style="{_STYLE}">{html.escape(title)}</caption>']
    if header:
        cells = "".join(f'<th style="{_STYLE}">{html.escape(name)}</th>' for name in header)
        lines.append(f"<thead><tr>{cells}</tr></thead>")
    lines.append("<tbody>")
    for row in rows:
        tags = ["td" if header else "th", *["td"] * (len(row) - 1)]
        texts = (
            f'<{tag} style="{_STYLE}">{html.escape(str(cell))}</{tag}>' for tag, cell in zip(tags, row, strict=True)
        )
        lines.append(f"<tr>{''.join(texts)}</tr>")
    lines += ["</tbody>", "</table>"]
    return "\n".join(lines)


def video(path: Path, caption: str) -> str:
    """Return HTML that plays a video; its bytes are in the HTML, so that a saved notebook plays it too.

    Args:
        path: an mp4 file. One of more than 16 MiB, or one that is not there, is named only.
        caption: the text below it.
    """
    text = html.escape(f"{path}: {caption}")
    try:
        if path.stat().st_size > MAX_VIDEO_BYTES:
            return f"<p>{text}</p>"
        data = base64.b64encode(path.read_bytes()).decode("ascii")
    except OSError:
        return f"<p>{text}</p>"
    source = f"data:video/mp4;base64,{data}"
    return f'<video controls loop muted style="max-width: 100%" src="{source}"></video>\n<p>{text}</p>'


# ---------------------------------------------------------------- output of envs


class _OutputHandler(logging.Handler):
    """Writes the lines of envs to a stream, each with its slots."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; a line of several slots' worker names all of these slots."""
        try:
            # ipykernel sends output to the cell in whose context it is written; the output of envs is read in the
            # context of the cell that made them, so it is written in an empty one: below the cell that runs now
            contextvars.Context().run(self._write, f"{_source(record)}: {_text(record)}\n")
        except Exception:
            self.handleError(record)

    def _write(self, line: str) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        stream.write(line)
        stream.flush()


def _source(record: logging.LogRecord) -> str:
    slots: tuple[int, ...] = getattr(record, "slots", ())
    if not slots:
        return str(getattr(record, "worker", "env"))
    return f"slot{'s' * (len(slots) > 1)} {slot_ranges(slots)}"


def _text(record: logging.LogRecord) -> str:
    # the arguments of a worker's record are its label, its pid, and the line
    args = record.args
    return str(args[2]) if isinstance(args, tuple) and len(args) == 3 else record.getMessage()


_shown: _OutputHandler | None = None
_set_level = False  # whether `show_output` has set the logger's level


def show_output(show: bool = True, *, stream: TextIO | None = None) -> None:
    """Write each line that envs print or log to stdout, with the slots of its worker: "slot 3: …".

    Call it before the vector env is made: workers send records from the level on that holds then. In a notebook it is
    called with the first vector env, unless logging is configured. It adds one handler to the logger
    "aioenv.workers", and sets its level to INFO if it has none. Handlers of other loggers get the same records.

    Args:
        show: False removes the handler and the level again.
        stream: the destination; None: the `sys.stdout` of that moment, which in a notebook is the cell that runs.
    """
    global _shown, _set_level
    logger = logging.getLogger("aioenv.workers")
    if _shown is not None:
        logger.removeHandler(_shown)
        if _set_level and logger.level == logging.INFO:  # else it is the user's
            logger.setLevel(logging.NOTSET)
        _shown, _set_level = None, False
    if show:
        _shown = _OutputHandler(stream)
        logger.addHandler(_shown)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
            _set_level = True


# ---------------------------------------------------------------- notebooks


def prepare_notebook() -> None:
    """Show prints of envs and short interruptions if this is the kernel of a notebook; called by each vector env.

    What the user has set remains: a configuration of logging, and a handler of IPython's `set_custom_exc`.
    """
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return
    logger = logging.getLogger("aioenv.workers")
    if _shown is None and not (logger.hasHandlers() or logger.level):
        show_output()
    if not shell.custom_exceptions:
        # the stop button cancels a cell that awaits, and raises KeyboardInterrupt in one that does not
        shell.set_custom_exc((KeyboardInterrupt, asyncio.CancelledError), _show_interruption)


def _show_interruption(
    shell: Any, kind: type[BaseException], exc: BaseException, tb: TracebackType, tb_offset: int | None = None
) -> None:
    """Show one line where a call of aioenv was interrupted, IPython's traceback elsewhere."""
    package = f"{Path(__file__).parent}{os.sep}"
    called_at: int | None = None
    for frame, line in traceback.walk_tb(tb):
        if frame.f_code.co_filename.startswith(package):
            where = f" in line {called_at}" if called_at is not None else ""
            text = f"{kind.__name__}: the cell was interrupted{where}."
            shell._showtraceback(kind, exc, [f"{text} Envs that are open can be stepped on in the next cell."])
            return
        if frame.f_globals.get("__name__") == "__main__":
            called_at = line
    shell.showtraceback((kind, exc, tb), tb_offset=tb_offset)
