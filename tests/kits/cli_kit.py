"""OpenGL for tests of commands, and the ways to start workers that commands use."""

from __future__ import annotations

import pytest

import aioenv
from aioenv.cli.opengl import probe_opengl
from aioenv.process.channel import CHANNELS
from aioenv.process.launch import START_METHODS

OPENGL = probe_opengl("egl").renderer or probe_opengl("osmesa").renderer
needs_opengl = pytest.mark.skipif(not OPENGL, reason="no OpenGL here")


def spy_on_starts(monkeypatch) -> list[tuple[str | None, str | None]]:
    """Note the `start` and the `channel` of each vector env, from now on."""
    asked = []

    class Spied(aioenv.AsyncVectorEnv):
        def __init__(self, *args, **kwargs):
            asked.append((kwargs.get("start"), kwargs.get("channel")))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(aioenv, "AsyncVectorEnv", Spied)
    monkeypatch.setattr(aioenv.sync.vector_env, "AsyncVectorEnv", Spied)
    return asked


STARTS = [
    (START_METHODS[0], CHANNELS[0]),
    *(pytest.param(*pair, marks=pytest.mark.stress) for pair in zip(START_METHODS[1:], CHANNELS[1:], strict=False)),
]
