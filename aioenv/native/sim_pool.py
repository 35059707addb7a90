"""`SimPool`: many MuJoCo simulations of one model, stepped together on threads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any, Self

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.errors import ClosedError
from aioenv.mujoco_versions import stop_clock
from aioenv.native.engines import STATE, BatchEngine, Engine, LoopEngine, batch, field_value
from aioenv.native.loading import Model, flush_warnings, load_model, log_warnings
from aioenv.platform import usable_cpus

__all__ = ["SimPool"]

Array = npt.NDArray[Any]


class SimPool:
    """Many simulations of one model, which are reset, stepped and read together, on threads::

        with SimPool("robot.xml", 64) as pool:
            ctrl, qpos = pool.bind("ctrl"), pool.bind("qpos")
            pool.reset()
            for _ in range(1000):
                ctrl[:] = policy(qpos)
                pool.step()

    Results are those of a loop over one `MjData` each, bit for bit, however many threads there are. All calls block,
    release the GIL while they compute, and must come from one thread at a time. In a process
    that has a pool, MuJoCo's profiler (`MjData.timer`) measures nothing until `mujoco.set_mjcb_time(None)` is called.

    Args:
        model: an `MjModel`, an `MjSpec`, the path of its XML or MJB file, or XML.
        num_sims: how many simulations.
        num_threads: how many threads compute, the caller's among them; None: as many as CPUs that this process may use,
            in a worker its share of them.
        post_constraint: whether a step ends with `mj_rnePostConstraint`, which computes `cfrc_ext`, `cfrc_int` and
            `cacc`. Then Python threads step the simulations; otherwise MuJoCo's own batch does, which is faster.

    Attributes:
        model: the model.
        num_sims, num_threads: likewise.
        state_size: how many float64 one state has.

    Raises:
        ValueError: if a number is not positive, or the model has features that are part of no state (sleeping bodies).
    """

    def __init__(
        self,
        model: Model,
        num_sims: int,
        *,
        num_threads: int | None = None,
        post_constraint: bool = False,
    ) -> None:
        for name, value in (("num_sims", num_sims), ("num_threads", num_threads)):
            if value is not None or name == "num_sims":
                _check_int(name, value, 1)
        self.model = load_model(model)
        if self.model.opt.enableflags & int(mujoco.mjtEnableBit.mjENBL_SLEEP):
            raise ValueError(
                "model: it lets bodies sleep, and sleep is not part of the state that simulations are kept in; "
                "switch that off: model.opt.enableflags &= ~int(mujoco.mjtEnableBit.mjENBL_SLEEP)"
            )
        self.num_sims = int(num_sims)
        self.num_threads = min(usable_cpus() if num_threads is None else int(num_threads), self.num_sims)
        self.state_size: int = mujoco.mj_stateSize(self.model, STATE)
        self._fields: dict[str, Array] = {}
        self._pid = os.getpid()
        stop_clock()
        _pools.add(self)
        self._engine_or_none: Engine | None = (
            LoopEngine(self.model, self.num_sims, self.num_threads, True)
            if post_constraint
            else BatchEngine(self.model, self.num_sims, self.num_threads)
        )
        self._end_log = log_warnings(self)

    @property
    def _engine(self) -> Engine:
        if self._engine_or_none is None:
            if self._pid != os.getpid():
                raise ClosedError(
                    f"the pool of simulations was made in process {self._pid}, where its threads have stayed: process "
                    f"{os.getpid()} is a forked copy. Make another one here"
                )
            raise ClosedError.of("the pool of simulations")
        return self._engine_or_none

    # ------------------------------------------------------------ computing

    def reset(self, slots: Iterable[int] | slice | None = None, *, n: int | None = None, keyframe: int = -1) -> None:
        """Reset to the model's defaults or a keyframe, and compute derived fields (`mj_forward`).

        Args:
            slots: which simulations, distinct numbers, a mask or a slice; None: all of them.
            n: instead of `slots`: the first n; may be 0.
            keyframe: number of a keyframe; -1 for the defaults.

        Raises:
            IndexError: if there is no such simulation, or keyframe.
            ValueError, TypeError: if a simulation is named twice, or these are no numbers.
        """
        _check_int("keyframe", keyframe, None)
        if not -1 <= keyframe < self.model.nkey:
            raise IndexError(f"keyframe: the model has {self.model.nkey}, got {keyframe}")
        self._engine.reset(self._pick(slots, n), keyframe, None, None)
        flush_warnings()

    def forward(self, slots: Iterable[int] | slice | None = None, *, n: int | None = None) -> None:
        """Compute all derived fields from the states (`mj_forward`); arguments and errors as for `reset`."""
        self._engine.forward(self._pick(slots, n))
        flush_warnings()

    def step(self, slots: Iterable[int] | slice | None = None, *, n: int | None = None, nstep: int = 1) -> None:
        """Step `nstep` times (`mj_step`). As there, derived fields are those before the last of these steps.

        Args:
            slots, n: as for `reset`.
            nstep: how many steps.

        Raises:
            ValueError: if `nstep` is not positive.
            IndexError, TypeError: as for `reset`.
        """
        _check_int("nstep", nstep, 1)
        self._engine.step(self._pick(slots, n), nstep)
        flush_warnings()

    def advance(self, nstep: int) -> None:
        """Step all simulations `nstep` times, as `step`, but without checks."""
        self._engine.step(None, nstep)
        flush_warnings()

    def start(self, slots: npt.NDArray[np.int64] | None, qpos: Array, qvel: Array) -> None:
        """Reset, and compute derived fields from the given positions and velocities; without checks.

        Args:
            slots: which simulations, k numbers in ascending order; None: all of them.
            qpos: positions, `(k, nq)`.
            qvel: velocities, `(k, nv)`.
        """
        self._engine.reset(slots, -1, qpos, qvel)
        flush_warnings()

    def start_and_step(
        self, starts: npt.NDArray[np.int64], qpos: Array, qvel: Array, slots: npt.NDArray[np.int64], nstep: int
    ) -> None:
        """`start` some and step others, together if possible; without checks.

        Args:
            starts, qpos, qvel: of those that start, as for `start`.
            slots: those that step, numbers in ascending order, none of `starts` among them.
            nstep: how many steps these make.
        """
        self._engine.reset_and_step(starts, qpos, qvel, slots, nstep)
        flush_warnings()

    # ------------------------------------------------------------ states and fields

    def bind(self, name: str) -> Array:
        """Return the live array of a field of `MjData`, `(num_sims, ...)`: `qpos`, `ctrl`, `xpos`, `cfrc_ext` …

        Values written to a field of the state are used by the next call; other fields are read-only. Derived fields are
        valid only if MuJoCo computes them in each call: without `post_constraint`, `cfrc_ext` is that of some other
        simulation. An array of MuJoCo's batch keeps the batch and its threads alive after `close`, until the last
        reference to it is gone.

        Raises:
            ValueError: if there is no such field, or its size can differ between simulations (contacts, say).
        """
        return self._engine.bind(name)

    def get_states(self, slots: Iterable[int] | slice | None = None, out: Array | None = None) -> Array:
        """Return the whole states (`mjSTATE_INTEGRATION`), float64 `(k, state_size)`.

        Args:
            slots: which simulations, as for `reset`; rows are in the order of these numbers.
            out: the array to write to and return.

        Raises:
            ValueError: if `out` has another shape or dtype.
            IndexError: if there is no such simulation.
        """
        picked = self.numbers(slots)
        if out is None:
            out = np.empty((len(picked), self.state_size))
        elif out.shape != (len(picked), self.state_size) or out.dtype != np.float64:
            raise ValueError(
                f"out: expected float64 of shape {(len(picked), self.state_size)}, got {out.dtype} {out.shape}"
            )
        self._engine.get_states(picked, out)
        return out

    def set_states(self, states: npt.ArrayLike, slots: Iterable[int] | slice | None = None) -> None:
        """Set whole states. The next `forward` or `step` computes derived fields from them.

        Args:
            states: float64 `(k, state_size)`, as for `get_states`.
            slots: which simulations, likewise.

        Raises:
            ValueError: if `states` has another shape.
            IndexError: if there is no such simulation.
        """
        picked = self.numbers(slots)
        rows = np.asarray(states, np.float64)
        if rows.shape != (len(picked), self.state_size):
            raise ValueError(f"states: expected shape {(len(picked), self.state_size)}, got {rows.shape}")
        self._engine.set_states(picked, rows)

    def model_field(self, name: str) -> Array:
        """Return a field of the model with values for each simulation, `(num_sims, ...)`; write to it to change them.

        After the first call for a field (`body_mass`, `geom_friction`, `dof_damping`, `opt.gravity`, and so on) its
        values are read from this array at every step. Fields from which MuJoCo derives constants need `set_const` after
        a change.

        Raises:
            ValueError: if there is no such field, or it can't differ between simulations.
        """
        if name not in self._fields:
            if not isinstance(name, str):
                raise ValueError(f"model_field: expected the name of a field of MjModel, got {name!r}")
            self._fields[name] = self._engine.field(name)
        return self._fields[name]

    def share_model_field(self, name: str, array: Array) -> None:
        """Make this the array of `model_field`, `(num_sims, ...)` of the field's dtype; its values are used then.

        Raises:
            ValueError: if there is no such field, the array does not fit, or `model_field` has returned another.
        """
        if name in self._fields:
            raise ValueError(f"model_field: {name!r} was taken by the env itself, which has another array of it")
        if name not in batch.MODEL_FIELDS:
            raise ValueError(f"model_field: {name!r} is no field of MjModel that can differ between simulations")
        value = field_value(self.model, name)
        if array.shape != (self.num_sims, *value.shape) or array.dtype != value.dtype:
            expected = f"{value.dtype} of shape {(self.num_sims, *value.shape)}"
            raise ValueError(f"model_field: {name!r} is {expected}, got {array.dtype} of shape {array.shape}")
        self._fields[name] = self._engine.field(name, array)

    def unchanged_fields(self) -> dict[str, Array]:
        """Return the model's values of all fields of `model_field`, except those that it has returned already."""
        return {name: field_value(self.model, name) for name in batch.MODEL_FIELDS if name not in self._fields}

    def changed_field(self, name: str) -> Array | None:
        """Return the array of `model_field`, if that was called for this field; else None."""
        return self._fields.get(name)

    def set_const(self, slots: Iterable[int] | slice | None = None) -> None:
        """Recompute the constants derived from changed fields of the model (`mj_setConst`); `slots` as for `reset`."""
        self._engine.set_const(self._pick(slots, None))

    # ------------------------------------------------------------ close

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        engine, self._engine_or_none = self._engine_or_none, None
        if engine is not None:
            engine.close()
            self._end_log()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self._engine_or_none is None else ""
        return f"<SimPool num_sims={self.num_sims} num_threads={self.num_threads}{state}>"

    # ------------------------------------------------------------ slots

    def _pick(self, slots: Iterable[int] | slice | None, n: int | None) -> npt.NDArray[np.int64] | None:
        if n is not None:
            if slots is not None:
                raise ValueError("give slots or n, not both")
            _check_int("n", n, None)
            if not 0 <= n <= self.num_sims:
                raise IndexError(f"n: there are {self.num_sims} simulations, got {n}")
            return None if n == self.num_sims else np.arange(n)
        return None if slots is None else np.sort(self.numbers(slots))

    def numbers(self, slots: Iterable[int] | slice | None) -> npt.NDArray[np.int64]:
        """Return distinct numbers of simulations from an iterable, a mask or a slice; None means all.

        Raises:
            IndexError: if there is no such simulation, or a mask has another shape than `(num_sims,)`.
            ValueError: if one is named twice.
            TypeError: if they are no whole numbers.
        """
        if slots is None:
            return np.arange(self.num_sims)
        if isinstance(slots, slice):
            return np.arange(self.num_sims)[slots]
        if not isinstance(slots, Iterable) or np.ndim(slots if isinstance(slots, np.ndarray) else ()) > 1:
            raise TypeError(f"slots: expected numbers of simulations, or a mask of all, got {slots!r}")
        array = np.asarray(slots if isinstance(slots, np.ndarray) else list(slots))
        if array.dtype == np.bool_:
            if array.shape != (self.num_sims,):
                raise IndexError(f"slots: expected a mask of shape ({self.num_sims},), got {array.shape}")
            return np.flatnonzero(array)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"slots: expected whole numbers, or a mask of bool, got {array.dtype} {array.tolist()}")
        numbers = array.astype(np.int64).reshape(-1)
        if len(numbers) and not (0 <= numbers.min() and numbers.max() < self.num_sims):
            raise IndexError(f"slots: expected numbers from 0 to {self.num_sims - 1}, got {numbers.tolist()}")
        if len(np.unique(numbers)) < len(numbers):
            raise ValueError(f"slots: each may be named once, got {numbers.tolist()}")
        return numbers


def _check_int(name: str, value: Any, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or (least is not None and value < least):
        kind = "an int" if least is None else "a positive int"
        raise ValueError(f"{name}: expected {kind}, got {value!r}")


_pools: weakref.WeakSet[SimPool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool._engine_or_none = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
