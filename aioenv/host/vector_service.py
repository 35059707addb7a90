"""The service that holds one `gymnasium.vector.VectorEnv`: a worker's slots as one env, stepped at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from aioenv.batching.infos import MAX_SCHEMAS, Column, Group, Path, Schema
from aioenv.batching.layout import Layout, byte_view
from aioenv.batching.plane import Plane
from aioenv.errors import ActionError
from aioenv.host import running
from aioenv.host.env_service import EnvDescription
from aioenv.host.service import Reply, SlotService
from aioenv.host.vector_access import call_vector_env, make_vector_env, reset_vector_env, set_vector_attr
from aioenv.host.worker import StartFailed, describe_failure
from aioenv.wire.frames import Frame
from aioenv.wire.messages import Failure, ResetRequest, StepReply, dump, load, load_code

__all__ = ["InfoPacker", "VectorService"]


class VectorService(SlotService):
    """One vector env, which resets and seeds its slots in its own way; speaks the frames of `EnvService`.

    What it raises is an error of all of its slots.

    Args:
        factory: a pickled callable, which is called with `num_envs`.
        num_envs: how many slots it shall have.
    """

    def __init__(self, factory: bytes, num_envs: int) -> None:
        try:
            self._env = make_vector_env(load_code(factory), num_envs)
        except Exception as exc:
            raise StartFailed(describe_failure(exc)) from exc
        self._n = num_envs
        self._closed = False
        self._packer = InfoPacker(num_envs)

    def describe(self) -> list[EnvDescription]:
        """One description for each row; the first has the spaces."""
        env = self._env
        spec = env.spec
        try:
            dump(spec)
        except Exception:
            spec = None
        first = EnvDescription(
            env.single_observation_space, env.single_action_space, dict(env.metadata), env.render_mode, spec, None
        )
        return [first, *[first._replace(observation_space=None, action_space=None)] * (self._n - 1)]

    def configure(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        state_size: int,
        draws_late: bool,
        checkpoint_size: int = 0,
        plane: Plane | None = None,
        start: int = 0,
    ) -> None:
        """Lay out the arrays that both sides agree on (see `EnvService.configure`).

        Raises:
            ValueError: if something is asked for that a vector env does not have.
        """
        if state_size or draws_late or checkpoint_size or plane is not None:
            raise ValueError("a vector env has no physics states, late images, checkpoints or shared memory")
        self._observations = Layout(observation_space)
        self._actions = Layout(action_space)
        self._action_arrays = self._actions.zeros(self._n)
        self._action_views = [byte_view(array) for array in self._action_arrays]
        self._latest: Any = self._observations.zeros(self._n), self._observations.no_objects(self._n)
        if running.alone():
            gc.collect()
            gc.freeze()

    # ------------------------------------------------------------ steps and resets

    def _step(self, frame: Frame) -> Reply:
        rows, objects, _ = load(frame.tail) if len(frame.tail) else (None, None, None)
        if rows is not None and len(rows) < self._n:
            raise ValueError(f"a vector env steps all of its {self._n} slots at once, got rows {rows}")
        # a copy: the env may keep its actions, and the next ones are read into the same memory
        actions = self._actions.assemble([array.copy() for array in self._action_arrays], objects or ())
        obs, reward, terminated, truncated, info = self._env.step(actions)
        flags = [_column(reward, np.float64, self._n), _column(terminated, np.bool_, self._n)]
        return self._reply(obs, [*flags, _column(truncated, np.bool_, self._n)], info, range(self._n))

    def _reset(self, frame: Frame) -> Reply:
        request: ResetRequest = load(frame.tail)
        rows, every = request.rows, range(self._n)
        if not len(rows):  # no slot of this share is in the mask: the latest observations, as they are
            arrays, objects = self._latest
            tail = dump(StepReply([], [], [list(column) for column in objects], [])) if objects else b""
            return Reply([byte_view(array) for array in arrays], tail)
        mask = None
        if len(rows) < self._n:
            mask = np.zeros(self._n, np.bool_)
            mask[list(rows)] = True
        obs, info = reset_vector_env(self._env, _seed(rows, request.seeds, self._n), mask, request.options)
        return self._reply(obs, [], info, every if request.whole else rows)

    def _reply(self, obs: Any, flags: list[Any], info: dict[str, Any], rows: Sequence[int]) -> Reply:
        try:
            arrays, objects = self._observations.take_apart(obs, self._n)
        except ActionError as exc:
            raise ValueError(str(exc).replace("actions", "observations", 1)) from None
        self._latest = arrays, objects
        if len(rows) < self._n:
            index = list(rows)
            arrays = [array[index] for array in arrays]
            objects = [[column[row] for row in index] for column in objects]
        fixed = [byte_view(array) for array in (*arrays, *flags)]
        if not info and not objects:
            return Reply(fixed)
        groups = self._packer.pack(info, rows)
        return Reply(fixed, dump(StepReply(self._packer.take_news(), groups, [list(o) for o in objects], [])))

    def afterwards(self) -> Reply | None:
        """Nothing waits."""
        return None

    # ------------------------------------------------------------ calls

    def call_envs(
        self, rows: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[bytes], list[Failure]]:
        """Call a method, or read an attribute (see `call_vector_env`)."""
        return [dump(value) for value in call_vector_env(self._env, rows, name, args, kwargs)], []

    def set_attr(self, rows: Sequence[int], name: str, values: Sequence[Any]) -> tuple[list[bytes], list[Failure]]:
        """Set an attribute (see `set_vector_attr`)."""
        set_vector_attr(self._env, name, values)
        return [dump(None)] * len(rows), []

    def close(self) -> None:
        """Close the vector env; what it raises does not matter any more."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Exception):
                self._env.close()


def _column(values: Any, dtype: Any, n: int) -> npt.NDArray[Any]:
    array = np.ascontiguousarray(values, dtype)
    if array.shape != (n,):
        raise ValueError(f"reward and flags: expected shape {(n,)}, got {array.shape}")
    return array


def _seed(rows: Sequence[int], seeds: Sequence[int | None], num_envs: int) -> Any:
    """What a vector env's `reset` takes: one int if slot i has that plus i, else a list, or None."""
    if all(seed is None for seed in seeds):
        return None
    bases = {None if seed is None else seed - row for row, seed in zip(rows, seeds, strict=True)}
    if len(bases) == 1:
        return bases.pop()
    each: list[int | None] = [None] * num_envs
    for row, seed in zip(rows, seeds, strict=True):
        each[row] = seed
    return each


class InfoPacker:
    """Takes the merged infos of a vector env apart into columns, so that those of all workers can be merged.

    What has no element for each slot is every slot's.
    """

    def __init__(self, num_envs: int) -> None:
        self._n = num_envs
        self._ids: dict[Schema, int] = {}
        self._news: list[tuple[int, Schema]] = []

    def pack(self, info: Mapping[Any, Any], rows: Sequence[int]) -> list[Group]:
        """The groups of what an info dict says of some rows; keys whose masks are equal go together."""
        if len(self._ids) >= MAX_SCHEMAS:
            self._ids.clear()
        chosen = np.zeros(self._n, np.bool_)
        chosen[list(rows)] = True
        groups: list[Group] = []
        run: list[tuple[Column, Any]] = []
        mask: Any = None
        for column, values, has in self._columns(info, ()):
            if mask is not None and (has != mask).any():
                groups += self._group(run, mask & chosen)
                run = []
            if not run:  # the dicts that it is in must be in its group
                run = [(Column(column.path[:i], None, (), is_dict=True), None) for i in range(1, len(column.path))]
            mask = has
            run.append((column, values))
        return groups + self._group(run, mask & chosen) if run else groups

    def take_news(self) -> list[tuple[int, Schema]]:
        """The schemas that the parent has not been told of yet."""
        news, self._news = self._news, []
        return news

    def _columns(self, info: Mapping[Any, Any], path: Path) -> list[tuple[Column, Any, npt.NDArray[np.bool_]]]:
        columns: list[tuple[Column, Any, npt.NDArray[np.bool_]]] = []
        for key, value in info.items():
            if isinstance(key, str) and key.startswith("_") and key[1:] in info:
                continue  # the mask of another
            mask = info.get(f"_{key}")
            if not (isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (self._n,)):
                mask = np.ones(self._n, np.bool_)
            here = (*path, key)
            if isinstance(value, Mapping):
                columns.append((Column(here, None, (), is_dict=True), None, mask))
                columns += self._columns(value, here)
                continue
            if isinstance(value, (int, float, np.number)) and not isinstance(value, np.timedelta64):
                value = np.full(self._n, value)
            if not (isinstance(value, np.ndarray) and value.ndim and len(value) == self._n):
                each = value if isinstance(value, (list, tuple)) and len(value) == self._n else [value] * self._n
                columns.append((Column(here, None, ()), each, mask))
            elif value.dtype.hasobject:
                columns.append((Column(here, None, ()), list(value), mask))
            else:
                # as Gymnasium merges them, an array of bool was made of Python's own
                python = value.dtype == np.bool_ and value.ndim == 1
                columns.append((Column(here, value.dtype, value.shape[1:], is_python=python), value, mask))
        return columns

    def _group(self, run: list[tuple[Column, Any]], mask: npt.NDArray[np.bool_]) -> list[Group]:
        rows = np.flatnonzero(mask)
        if not len(rows):
            return []
        schema = Schema(tuple(column for column, _ in run), floats=False, by_row=False)
        number = self._ids.get(schema)
        if number is None:
            number = self._ids[schema] = len(self._ids)
            self._news.append((number, schema))
        data: list[bytes] = []
        objects: list[list[Any]] = []
        for column, values in run:
            if column.dtype is not None:
                data.append(np.ascontiguousarray(values[rows]).tobytes())
            elif not column.is_dict:
                objects.append([values[row] for row in rows.tolist()])
        return [Group(number, None if len(rows) == self._n else tuple(rows.tolist()), b"".join(data), objects)]
