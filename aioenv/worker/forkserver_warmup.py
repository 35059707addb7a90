"""Warm up a fork server for its workers: compile the models that they would all load, and fill the holes of the heap.

Compiling a HalfCheetah takes a sixth of the CPU time that a worker needs to start, and 0.6 MiB of its memory. A copy of
a compiled model has the same bytes.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import inspect
import os
import re
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType
from typing import Any

from aioenv.worker.boot import libc

__all__ = ["compile_models", "fill_holes"]

_COMMENT = re.compile(rb"<!--.*?-->", re.DOTALL)
# Parts of an XML file that refer to other files or to plugins.
_ELSEWHERE = re.compile(rb"\bfile\w*\s*=|<\s*(include|plugin|extension)\b")


class _CompiledModel:
    """Replaces `MjModel.from_xml_path` in a fork server, and so in its workers.

    A model is copied as long as no other was loaded after it. MuJoCo keeps the XML that was loaded last, for
    `mj_saveLastXML`, so that it is the same as if the model had been loaded again. Warnings of the compilation are
    repeated for each copy.
    """

    def __init__(self, mujoco: Any) -> None:
        self._mujoco = mujoco
        self._text: bytes | None = None  # of the file that was loaded last, if its model can be copied
        self._model: Any = None
        self._warnings: list[str] = []
        self._from_path, self._from_string = mujoco.MjModel.from_xml_path, mujoco.MjModel.from_xml_string

        @functools.wraps(self._from_path)
        def from_xml_path(filename: str, *args: Any, **kwargs: Any) -> Any:
            return self._load(filename, *args, **kwargs)

        @functools.wraps(self._from_string)
        def from_xml_string(*args: Any, **kwargs: Any) -> Any:
            self._text = self._model = None
            return self._from_string(*args, **kwargs)

        mujoco.MjModel.from_xml_path = staticmethod(from_xml_path)
        mujoco.MjModel.from_xml_string = staticmethod(from_xml_string)

    def compile(self, path: str) -> None:
        """Compile the model of a file, so that it can be copied, if it refers to no other file."""
        text = _read(path)
        if text is not None and not _ELSEWHERE.search(_COMMENT.sub(b"", text)):
            self._text, self._warnings = None, []
            handler = self._mujoco.get_mju_user_warning()
            self._mujoco.set_mju_user_warning(self._warnings.append)
            try:
                self._model = self._from_path(path)
            finally:
                self._mujoco.set_mju_user_warning(handler)
            self._text = text if _read(path) == text else None

    def _load(self, filename: str, *args: Any, **kwargs: Any) -> Any:
        text, model = self._text, self._model
        if text is not None and not args and not kwargs and _read(filename) == text:
            tell = self._mujoco.get_mju_user_warning()
            if tell is not None or not self._warnings:  # else let MuJoCo log them itself
                for warning in self._warnings:
                    tell(warning)
                return copy.copy(model)
        self._text = self._model = None
        return self._from_path(filename, *args, **kwargs)


_compiled: _CompiledModel | None = None


def compile_models(entry_points: Iterable[str]) -> None:
    """Compile, in a fork server, the models that envs of these classes load by default.

    Args:
        entry_points: "module:Class" of imported modules. Only subclasses of Gymnasium's MujocoEnv with a default for
            `xml_file` in their signature count; models that can't be compiled are skipped.
    """
    global _compiled
    mujoco, base = sys.modules.get("mujoco"), sys.modules.get("gymnasium.envs.mujoco.mujoco_env")
    if mujoco is None or base is None:
        return
    for entry_point in entry_points:
        module, _, name = entry_point.partition(":")
        env = getattr(sys.modules.get(module), name, None)
        if isinstance(env, type) and issubclass(env, base.MujocoEnv):
            with contextlib.suppress(Exception):  # a worker that needs it raises the error
                path = base.expand_model_path(inspect.signature(env).parameters["xml_file"].default)
                if _compiled is None:
                    loaders = mujoco.MjModel.from_xml_path, mujoco.MjModel.from_xml_string
                    if not all(isinstance(loader, BuiltinFunctionType) for loader in loaders):
                        return  # another package has replaced them
                    _compiled = _CompiledModel(mujoco)
                _compiled.compile(path)


def _read(path: Any) -> bytes | None:
    try:
        with open(os.fspath(path), "rb") as file:
            return file.read()
    except (OSError, TypeError, ValueError):
        return None


# ------------------------------------------------------------ the C heap


# From large to small: a hole takes the largest block that fits, and smaller ones in the rest. Larger ones are mapped.
_SIZES = (*(int(1e5 * 0.75**i) for i in range(16)), *range(1016, 23, -16))
# Bytes beyond what the heap reports as free, since each thread caches some blocks (glibc's "tcache").
_CACHED = 1 << 20


class _Info(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "top")
    )


def fill_holes() -> int:
    """Allocate all free blocks of the C heap below its top, and never free them.

    Imports leave thousands of holes. A forked process would allocate there, and each page with a hole that it uses
    would be copied for it. Once they are filled, its blocks lie together in pages of its own. Then a worker with a
    HalfCheetah takes 0.5 MiB less, and on a virtual machine starts 1 to 2 ms faster (of 13 ms).

    Returns:
        The number of bytes that were filled: 0 without glibc 2.33 or later, or with another `malloc`.
    """
    c = libc()
    try:
        info = c.mallinfo2
    except AttributeError:
        return 0
    info.restype = _Info
    c.malloc.restype = c.sbrk.restype = ctypes.c_void_p
    c.malloc.argtypes, c.free.argtypes, c.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_void_p], [ctypes.c_ssize_t]
    heap: Any = info()
    top = c.sbrk(0) - heap.top
    filled, most = 0, heap.free - heap.top + _CACHED
    for size in _SIZES:
        while filled < most:
            block = c.malloc(size)
            if block is None or block >= top:
                c.free(block)
                break
            filled += size
    return filled
