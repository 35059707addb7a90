"""What images of one env are drawn from while it runs: its states, and each other model that it makes of its own.

A row begins with the number of its model: 0 for that of the start, others as they come. A model goes to the
parent once, beside the row that shows it first. So do whole rows that are longer than the parent has room for, which
have a negative number in their place.
"""

from __future__ import annotations

import dataclasses
import os
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import Wrapper

from aioenv.ipc.messages import dump
from aioenv.state.assets import AssetWatch, Looks
from aioenv.state.source import MujocoSource, dump_model, find_source, read_state

__all__ = ["EnvRenderable", "RenderUpdate", "subject_of"]


class RenderUpdate(NamedTuple):
    """What goes beside the rows.

    Attributes:
        number: as rows name it; negative for one that is a row itself.
        key: equal for equal models; empty for a row.
        data: the source, pickled; or the row.
        late: whether images before may have missed it.
    """

    number: int
    key: bytes
    data: bytes
    late: bool = False


class EnvRenderable:
    """An env that may edit its model, or make itself another one.

    Args:
        env: the env, with its wrappers.
        source: its own, as it is now.
        by_camera: see `find_source`.
        looks: when to look for edits.

    Attributes:
        source: what its images are to be drawn from.
        parcels: what is to go to the parent beside the next rows; whoever sends them clears it.
    """

    def __init__(self, env: Any, source: MujocoSource, *, by_camera: bool, looks: Looks) -> None:
        self.source = self._start = self._unedited = source
        self.parcels: list[RenderUpdate] = []
        self._env = env
        self._base: Any = env.unwrapped
        self._by_camera = by_camera
        self._model = self._base.model
        self._watch = AssetWatch(self._model, looks) if source.fields else None
        self._number = 0
        # so high that the numbers of a worker and of the one that takes its place differ; float64 holds them exactly
        self._count = int.from_bytes(os.urandom(4)) << 20

    def look(self) -> bool:
        """Whether `source` is another one from now on, as the model is.

        Raises:
            ValueError: if the model is none that could be drawn.
        """
        model, watch = self._base.model, self._watch
        if model is not self._model:
            source = find_source(self._env, by_camera=self._by_camera)
            if source is None:
                raise ValueError("images: expected a MuJoCo model and data, as the env had at the start")
            self.source = self._unedited = source
            self._model = model
            if watch is not None:
                watch.take(model)
            return True
        if watch is None or not watch.look():
            return False
        if (edited := watch.edited()) is None:
            self.source = dataclasses.replace(self._unedited, model=dump_model(model))  # the view stays
        else:
            patches = tuple((name, array.tobytes()) for name, array in edited.items())
            self.source = dataclasses.replace(self._unedited, patches=patches)
        return True

    def _lean(self) -> MujocoSource:
        """The source as it travels: with patches alone, if the parent knows what they are patches of."""
        if not self.source.patches:
            return self.source
        if self._unedited is self._start:
            return dataclasses.replace(self.source, model=b"")
        return dataclasses.replace(self.source, model=dump_model(self._model), patches=())

    @property
    def late(self) -> bool:
        """Whether an edit has been found that images may have missed, and nobody has told of it yet."""
        return self._watch is not None and self._watch.late

    def end(self) -> None:
        """An episode is over."""
        if self._watch is not None and self._base.model is self._model:
            self._watch.end()

    def begin(self) -> None:
        """An episode has begun, or the env was called, or brought into a state: it may have edited its model."""
        if self._watch is not None:
            self._watch.begin()

    def told(self) -> None:
        """Somebody has told of what was late."""
        if self._watch is not None:
            self._watch.late = False

    def read(self, row: npt.NDArray[np.float64]) -> None:
        """Write what an image of the env as it is now is drawn from into a row, and what it needs besides to `parcels`.

        Raises:
            ValueError: as `look`; or if it does not fit, and nothing can go beside it.
        """
        base = self._base
        if not self.source.numbered:
            read_state(base.model, base.data, row[: self.source.state_size], self.source.state_spec)
            return
        if self.look():
            self._count += 1
            self._number = self._count
            data = dump(self._lean())
            key = blake2b(data, digest_size=16).digest()
            self.parcels.append(RenderUpdate(self._number, key, data, self.late))
            self.told()
        source = self.source
        size = source.state_size
        whole = row[:size] if size <= len(row) else np.empty(size)
        whole[0] = self._number
        read_state(base.model, base.data, whole[1:], source.state_spec, source.fields)
        if size > len(row):
            self._count += 1
            self.parcels.append(RenderUpdate(-self._count, b"", whole.tobytes()))
            row[:] = 0
            row[0] = -self._count

    def take_parcels(self) -> list[RenderUpdate]:
        """What is to go beside the rows that were read; they are forgotten here."""
        parcels, self.parcels = self.parcels, []
        return parcels


def subject_of(env: Any) -> EnvRenderable | None:
    """Find the subject of the wrapper that makes images the observations, if there is one."""
    while isinstance(env, Wrapper):
        try:  # not `vars(env)`: CPython makes a dict of it for good, and each step of the env is slower by 3 %
            if isinstance(subject := getattr(env, "_subject", None), EnvRenderable):
                return subject
            env = env.env
        except Exception:  # of a property that a wrapper has in the place of the attribute
            return None
    return None
