"""Models that all workers would compile from one file: compiled once, by their fork server, and copied in workers.

Of a HalfCheetah that is a sixth of the CPU time that a worker takes to start, and 0.6 MiB of its memory. A copy has the
very same bytes.
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
# What makes a model of more than its file's own text.
_ELSEWHERE = re.compile(rb"\bfile\w*\s*=|<\s*(include|plugin|extension)\b")


class _Models:
    """Stands in for `MjModel.from_xml_path` in a fork server, and so in its workers.

    A model is copied as long as no other was loaded after it. So MuJoCo, which keeps the XML that it has loaded last
    to save it (`mj_saveLastXML`), has the same there as if it had loaded that again. What MuJoCo warned of when it was
    compiled, whoever has it copied is told, too.
    """

    def __init__(self, mujoco: Any) -> None:
        self._mujoco = mujoco
        self._text: bytes | None = None  # of the file that was loaded last, if its model is here
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
        """Be ready to copy what is in this file, if that is all there is to the model."""
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
            if tell is not None or not self._warnings:  # else MuJoCo alone can tell
                for warning in self._warnings:
                    tell(warning)
                return copy.copy(model)
        self._text = self._model = None
        return self._from_path(filename, *args, **kwargs)


_models: _Models | None = None


def compile_models(entry_points: Iterable[str]) -> None:
    """Compile, in a fork server, the models that envs of these classes load by default.

    Args:
        entry_points: "module:Class", of modules that are imported; all but Gymnasium's MujocoEnvs that say in their
            signature what `xml_file` is are passed over, and models that can't be compiled.
    """
    global _models
    mujoco, base = sys.modules.get("mujoco"), sys.modules.get("gymnasium.envs.mujoco.mujoco_env")
    if mujoco is None or base is None:
        return
    for entry_point in entry_points:
        module, _, name = entry_point.partition(":")
        env = getattr(sys.modules.get(module), name, None)
        if isinstance(env, type) and issubclass(env, base.MujocoEnv):
            with contextlib.suppress(Exception):  # whoever needs it will be told
                path = base.expand_model_path(inspect.signature(env).parameters["xml_file"].default)
                if _models is None:
                    loaders = mujoco.MjModel.from_xml_path, mujoco.MjModel.from_xml_string
                    if not all(isinstance(loader, BuiltinFunctionType) for loader in loaders):
                        return  # somebody else stands in for them
                    _models = _Models(mujoco)
                _models.compile(path)


def _read(path: Any) -> bytes | None:
    try:
        with open(os.fspath(path), "rb") as file:
            return file.read()
    except (OSError, TypeError, ValueError):
        return None


# ------------------------------------------------------------ the C heap


# From large to small: a hole takes the largest that fits, and then others in what is left. Larger ones are mapped.
_SIZES = (*(int(1e5 * 0.75**i) for i in range(16)), *range(1016, 23, -16))
# So much more than there seems to be, since each thread keeps some to itself (glibc's "tcache").
_MORE = 1 << 20


class _Info(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "top")
    )


def fill_holes() -> int:
    """Allocate all the free blocks of the C heap below its top, for good.

    Imports leave thousands of holes. What a forked process allocates would go there, and each page with a hole that it
    uses would be copied for it. Filled, its blocks lie together, in pages of its own: a worker with a HalfCheetah takes
    0.5 MiB less, and on a virtual machine 1 to 2 ms of its 13 ms to start.

    Returns:
        How many bytes were filled: 0 without glibc 2.33 or later, or where another `malloc` is in its place.
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
    filled, most = 0, heap.free - heap.top + _MORE
    for size in _SIZES:
        while filled < most:
            block = c.malloc(size)
            if block is None or block >= top:
                c.free(block)
                break
            filled += size
    return filled
