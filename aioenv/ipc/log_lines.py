"""Log records of a worker among what it prints: one line each, which the parent makes a record of again."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

__all__ = ["LogLine", "is_new", "pack", "readable", "unpack"]

# Of ASCII's separators, which nobody prints: one before a record and between its parts, one in place of line ends.
_PART, _LINE = "\x1e", "\x1d"

_MAX_SAID = 100  # who has something new to warn of in every step is not heard for ever
_MAX_CHARS = 8000  # as the parent cuts longer lines


class LogLine(NamedTuple):
    """A log record: what travels of it."""

    level: int
    logger: str
    text: str  # the message, and the traceback if there is one


def pack(record: LogLine) -> bytes:
    """A record as a line."""
    text = record.text.replace("\r", "").replace("\n", _LINE)
    half = _MAX_CHARS // 2
    if len(text) > _MAX_CHARS:
        text = f"{text[:half]} [...] {text[-half:]}"
    line = f"{_PART}{record.level}{_PART}{record.logger.replace(chr(10), ' ')}{_PART}{text}\n"
    return line.encode("utf-8", "replace")


def unpack(line: str) -> LogLine | None:
    """The record of a line, without its end; None if it is none."""
    if not line.startswith(_PART):
        return None
    try:
        _, level, logger, text = line.split(_PART, 3)
        return LogLine(int(level), logger, text.replace(_LINE, "\n"))
    except ValueError:
        return None


def readable(line: str) -> str:
    """A line as people read it."""
    match unpack(line):
        case LogLine(level, logger, text):
            return f"{logging.getLevelName(level)}:{logger}:{text}"
    return line


def is_new(line: str, said: set[str]) -> bool:
    """Whether this has not been said yet, numbers aside; from now on it has."""
    text = re.sub(r"\d+", "", line)
    if text in said or len(said) >= _MAX_SAID:
        return False
    said.add(text)
    return True
