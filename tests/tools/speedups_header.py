"""Write aioenv/speedups/shared.h: `python tests/tools/speedups_header.py`.

C and Python share constants of the wire, the order of fields in some tuples, and attributes of some classes. All of
them are defined in Python. This script copies them into the header, and `test_speedups.py` checks that it was run.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from aioenv.ipc import frames, messages
from aioenv.process.connection import FastReply, PendingReply
from aioenv.spaces import infos
from aioenv.speedups import ATTRIBUTES, OTHERS
from aioenv.worker.service import FastPath

HEADER = Path(frames.__file__).parents[1] / "speedups" / "shared.h"
_TUPLES: dict[str, Any] = {
    "FAST_PATH": FastPath,
    "PENDING": PendingReply,
    "FAST_REPLY": FastReply,
    "COLUMNS": infos.Columns,
    "SCHEMA": infos.Schema,
    "COLUMN": infos.Column,
    "KNOWN": infos.NumericSchema,
    "NAME": infos.ColumnName,
}


def _offset(count: int) -> int:
    """The offset of the header's field after the first `count` ones."""
    codes = frames._WHOLE.format.removeprefix("<")
    return struct.calcsize("<" + codes[: count + 1])  # "2s" is one field and two characters


def _constants() -> dict[str, int]:
    return {
        "HEADER_BYTES": frames.HEADER_BYTES,
        "AT_VERSION": _offset(1),
        "AT_KIND": _offset(2),
        "AT_REQUEST": _offset(3),
        "AT_GENERATION": _offset(4),
        "AT_FIXED": _offset(5),
        "AT_PAYLOAD": _offset(6),
        "AT_BODY_CRC": _offset(7),
        "AT_CRC": _offset(8),
        "VERSION": frames.VERSION,
        "KIND_STEP": frames.Kind.STEP,
        "KIND_RESULT": frames.Kind.RESULT,
        "RUN_TAG": messages._RUN_TAG[0],
        "RUN_BYTES": messages._RUN.size,
        "COLUMNS_TAG": messages._COLUMNS_TAG[0],
        "COLUMNS_HEAD": messages._COLUMNS.size,
        "GROUP_HEAD": messages._GROUP.size,
    }


def text() -> str:
    """The header's text."""
    magic = ", ".join(f"{byte:#04x}" for byte in frames.MAGIC)
    names = sorted({name for names in (*ATTRIBUTES.values(), OTHERS) for name in names})
    lines = [
        "/* Constants, fields of tuples and attributes that C shares with Python.",
        " * Written by tests/tools/speedups_header.py; don't edit. */",
        "",
        "#pragma once",
        "",
        f"#define MAGIC_BYTES {magic}",
        "enum {",
        *(f"    {name} = {int(value)}," for name, value in _constants().items()),
        "};",
        f"#define MAX_FIXED ((Py_ssize_t){frames.MAX_FIXED_BYTES})",
        f"#define MAX_PAYLOAD ((Py_ssize_t){frames.MAX_PAYLOAD_BYTES})",
        "",
        "/* Fields of named tuples. */",
    ]
    for prefix, kind in _TUPLES.items():
        fields = ", ".join(f"{prefix}_{field.upper()}" for field in kind._fields)
        lines.append(f"enum {{ {fields}, {prefix}_FIELDS }}; /* {kind.__module__}.{kind.__name__} */")
    lines += ["", "/* Attributes (see speedups/__init__.py). */", "#define NAMES(name) \\"]
    lines += [f"    name({name}) \\" for name in names[:-1]] + [f"    name({names[-1]})"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    HEADER.write_text(text(), encoding="utf-8")
