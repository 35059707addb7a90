"""Two engines that step many simulations of one model: `BatchEngine` (MuJoCo's own batch) and `LoopEngine` (threads).

Both have the same methods, the same arrays, and one MjData per thread. The batch is faster. The loop also calls
`mj_rnePostConstraint` after each step, which the batch can't and contact forces (`cfrc_ext`) need. The threads of a
`ThreadPool` share the items of a job with the caller's own thread.
"""

# ruff: noqa: D102 (`Engine` says what the methods do)

from __future__ import annotations

import atexit
import copy
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.requirements import require_batch

require_batch()

from mujoco import batch  # noqa: E402

__all__ = ["CALLS_IN_PROGRESS", "BatchEngine", "Engine", "LoopEngine", "ThreadPool", "batch", "field_value"]


EXIT_TIMEOUT_S = 10.0  # how long the exit of the program waits for calls in progress


class _CallsInProgress:
    """A context for MuJoCo calls that release the GIL: a thread that returns from one while Python exits would crash.

    Attributes:
        is_exiting: whether the program is exiting, so that no further call may begin.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self.is_exiting = False
        atexit.register(self._end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._threads.clear)

    def __enter__(self) -> None:
        self._threads.add(threading.get_ident())
        if self.is_exiting:
            self._threads.discard(threading.get_ident())
            self.raise_ending()

    def __exit__(self, *exc: object) -> None:
        self._threads.discard(threading.get_ident())

    def raise_ending(self) -> NoReturn:
        """Raise the RuntimeError of a call that may not begin."""
        raise RuntimeError("the program is ending: no simulation is stepped any more")

    def _end(self) -> None:
        self.is_exiting = True
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while self._threads - {threading.get_ident()} and time.monotonic() < deadline:
            time.sleep(0.001)


CALLS_IN_PROGRESS = _CallsInProgress()


class _Job:
    """Items of work that threads share.

    Attributes:
        begun, ended: an element for each helper thread that has begun, and for each that has ended.
        errors: the exceptions that items raised.
        is_awaited: whether helpers that end wake the caller.
    """

    __slots__ = ("_pending", "_work", "begun", "ended", "errors", "is_awaited")

    def __init__(self, work: Callable[[int], Any], items: Sequence[int]) -> None:
        self._work = work
        self._pending = iter(items)
        self.begun: list[None] = []  # lists, since `append` is atomic
        self.ended: list[None] = []
        self.errors: list[BaseException] = []
        self.is_awaited = False

    def do(self) -> None:
        """Work on the items that are left."""
        try:
            with CALLS_IN_PROGRESS:
                self._do_all()
        except RuntimeError as exc:  # the program is exiting
            self.errors.append(exc)

    def _do_all(self) -> None:
        while True:
            try:
                for item in self._pending:
                    if CALLS_IN_PROGRESS.is_exiting:
                        CALLS_IN_PROGRESS.raise_ending()
                    self._work(item)
                return
            except BaseException as exc:
                self.errors.append(exc)
                if not isinstance(exc, Exception):
                    return

    def stop(self) -> None:
        """Drop the items that are left."""
        for _ in self._pending:
            pass


class ThreadPool:
    """Threads that pull items from one iterator, so that none is idle while there are more.

    It pays only for work that releases the GIL. Its threads end with `close`, or with the last reference to it.

    Args:
        num_threads: how many threads work at once, the caller's among them.
    """

    def __init__(self, num_threads: int) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_serve, args=(self._jobs, self._woken), name=f"aioenv-sim-{i}", daemon=True)
            for i in range(num_threads - 1)
        ]
        for thread in self._threads:
            thread.start()
        self._stop = weakref.finalize(self, _stop, self._jobs, len(self._threads))

    def run(self, work: Callable[[int], Any], items: Sequence[int]) -> None:
        """Call `work(item)` for all items, in no particular order; return when every thread has finished.

        Raises:
            BaseException: the first that an item raised, after all items are done. An interrupt of the caller (Ctrl-C)
                is raised after each thread has finished its current item; further items are not begun.
        """
        job = _Job(work, items)
        try:
            for _ in range(min(len(self._threads), len(items) - 1)):
                self._jobs.put(job)
            job.do()
        finally:
            self._await(job)
        if job.errors:
            raise job.errors[0]

    def _await(self, job: _Job) -> None:
        """Wait until no thread works on a job; a helper that wakes up later finds no items."""
        interrupt: BaseException | None = None
        while True:
            try:
                job.stop()
                job.is_awaited = True
                while len(job.begun) > len(job.ended):
                    self._woken.get()
                job.is_awaited = False
                break
            except BaseException as exc:  # Ctrl-C: returning now would leave threads at work
                interrupt = exc
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """Stop the threads, and wait until they have ended."""
        self._stop()
        for thread in self._threads:
            thread.join()
        self._threads = []


def _stop(jobs: SimpleQueue[_Job | None], count: int) -> None:
    for _ in range(count):
        jobs.put(None)


def _serve(jobs: SimpleQueue[_Job | None], woken: SimpleQueue[None]) -> None:
    while (job := jobs.get()) is not None:
        job.begun.append(None)
        job.do()
        job.ended.append(None)
        if job.is_awaited:
            woken.put(None)
        job = None


Array = npt.NDArray[Any]
Slots = npt.NDArray[np.int64]

STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
# fields of MjData that are parts of the state: values written to their arrays are used; MuJoCo 3 lacks some of them
_STATE_NAMES = {
    "time": "mjSTATE_TIME",
    "qpos": "mjSTATE_QPOS",
    "qvel": "mjSTATE_QVEL",
    "act": "mjSTATE_ACT",
    "history": "mjSTATE_HISTORY",
    "qacc_warmstart": "mjSTATE_WARMSTART",
    "ctrl": "mjSTATE_CTRL",
    "qfrc_applied": "mjSTATE_QFRC_APPLIED",
    "xfrc_applied": "mjSTATE_XFRC_APPLIED",
    "eq_active": "mjSTATE_EQ_ACTIVE",
    "mocap_pos": "mjSTATE_MOCAP_POS",
    "mocap_quat": "mjSTATE_MOCAP_QUAT",
    "userdata": "mjSTATE_USERDATA",
    "plugin_state": "mjSTATE_PLUGIN",
    "plastic": "mjSTATE_PLASTIC",
}
_STATE_PARTS = {
    name: mujoco.mjtState.__members__[part]
    for name, part in _STATE_NAMES.items()
    if part in mujoco.mjtState.__members__
}
# fields that only `mj_rnePostConstraint` computes; `mj_forward` calls it where a sensor needs it
POST_CONSTRAINT = frozenset(("cacc", "cfrc_int", "cfrc_ext"))


class Engine(Protocol):
    """The interface that `SimPool` uses; `slots` are distinct numbers, None means all."""

    models: list[Any]

    def bind(self, name: str) -> Array:
        """Return the live array of a field of MjData, `(num_sims, ...)`."""

    def field(self, name: str, array: Array | None = None) -> Array:
        """Return the live array of a field of MjModel, `(num_sims, ...)`: each simulation now has its own value.

        Args:
            array: the array to use if the field was not live yet; its values are used as they are.
        """

    def step(self, slots: Slots | None, nstep: int) -> None:
        """Call `mj_step` `nstep` times."""

    def forward(self, slots: Slots | None) -> None:
        """Call `mj_forward`."""

    def reset(self, slots: Slots | None, keyframe: int, qpos: Array | None, qvel: Array | None) -> None:
        """Call `mj_resetData`, set positions and velocities if given, and call `mj_forward`."""

    def reset_and_step(self, resets: Slots, qpos: Array, qvel: Array, slots: Slots, nstep: int) -> None:
        """Reset some and step others."""

    def get_states(self, slots: Slots, out: Array) -> None:
        """Write the states (`mjSTATE_INTEGRATION`) into the rows of `out`."""

    def set_states(self, slots: Slots, states: Array) -> None:
        """Set the states from rows; nothing is computed from them."""

    def set_const(self, slots: Slots | None) -> None:
        """Call `mj_setConst`."""

    def close(self) -> None:
        """Stop the threads; the arrays keep their values."""


def field_value(model: Any, name: str) -> Array:
    """Return a model's value of a field that can differ between simulations, in MuJoCo's own dtype."""
    value = getattr(model.opt, name[4:]) if name.startswith("opt.") else getattr(model, name)
    return np.array(value, np.int32) if isinstance(value, int) else np.array(value)


class BatchEngine:
    """`mujoco.batch.Batch` behind the interface of `Engine`."""

    def __init__(self, model: Any, num_sims: int, num_threads: int) -> None:
        self._batch: Any = batch.Batch(model, num_sims, num_threads)
        self.models = [model] * num_sims
        _batches.add(self._batch.state.base)
        self._batch.reset()
        self._qpos, self._qvel = self._batch.bind("qpos"), self._batch.bind("qvel")
        self._state = self._batch.state
        data = mujoco.MjData(model)
        self._fresh = np.empty(self._batch.nstate)
        mujoco.mj_getState(model, data, self._fresh, STATE)
        # our own arrays, copied in before each call: the batch's would keep its threads alive after `close`
        self._fields: dict[str, Array] = {}

    def bind(self, name: str) -> Array:
        array: Array = self._batch.bind(name)
        return array

    def field(self, name: str, array: Array | None = None) -> Array:
        if name not in self._fields:
            own = self._batch.expand(name)
            self._fields[name] = own.copy() if array is None else array
        return self._fields[name]

    def _push_fields(self) -> None:
        for name, array in self._fields.items():
            self._batch.expand(name)[...] = array

    def step(self, slots: Slots | None, nstep: int) -> None:
        if self._fields:
            self._push_fields()
        with CALLS_IN_PROGRESS:
            self._batch.step(slots, nstep)

    def forward(self, slots: Slots | None) -> None:
        if self._fields:
            self._push_fields()
        with CALLS_IN_PROGRESS:
            self._batch.forward(slots)

    def reset(self, slots: Slots | None, keyframe: int, qpos: Array | None, qvel: Array | None) -> None:
        if self._fields:
            self._push_fields()
        if self._fields or keyframe >= 0:
            self._batch.reset(slots, keyframe, mujoco.mjtStage.mjSTAGE_NONE)
        else:
            self._state[... if slots is None else slots] = self._fresh
        if qpos is not None:
            self._qpos[... if slots is None else slots] = qpos
        if qvel is not None:
            self._qvel[... if slots is None else slots] = qvel
        with CALLS_IN_PROGRESS:
            self._batch.forward(slots)

    def reset_and_step(self, resets: Slots, qpos: Array, qvel: Array, slots: Slots, nstep: int) -> None:
        self.reset(resets, -1, qpos, qvel)
        if len(slots):
            with CALLS_IN_PROGRESS:
                self._batch.step(slots, nstep)

    def get_states(self, slots: Slots, out: Array) -> None:
        self._state.take(slots, 0, out)

    def set_states(self, slots: Slots, states: Array) -> None:
        self._state[slots] = states

    def set_const(self, slots: Slots | None) -> None:
        self._push_fields()
        with CALLS_IN_PROGRESS:
            self._batch.set_const(slots)
        for name, array in self._fields.items():
            array[...] = self._batch.expand(name)

    def close(self) -> None:
        # its threads end with the last reference, and bound arrays refer to it
        del self._batch, self._qpos, self._qvel, self._state


class _Sim:
    """An MjData, and the fields that are copied out of it.

    Attributes:
        fields: pairs of (array of all simulations, array of this MjData).
        after_forward: those of the fields that `mj_forward` computes.
        numbers: pairs of (array of all simulations, name) of fields that are one number.
    """

    def __init__(self, model: Any, fields: dict[str, Array]) -> None:
        self.data = mujoco.MjData(model)
        arrays = {name: array for name, array in fields.items() if array.ndim > 1}
        self.fields = [(batched, getattr(self.data, name)) for name, batched in arrays.items()]
        self.after_forward = [
            (batched, getattr(self.data, name)) for name, batched in arrays.items() if name not in POST_CONSTRAINT
        ]
        self.numbers = [(batched, name) for name, batched in fields.items() if name not in arrays]

    def copy_out(self, fields: list[tuple[Array, Array]], slot: int) -> None:
        """Copy fields into the rows of a slot."""
        for batched, source in fields:
            batched[slot] = source
        for batched, name in self.numbers:
            batched[slot] = getattr(self.data, name)


class LoopEngine:
    """Simulations as rows of state, stepped on threads, each of which takes the next one; `mj_step` releases the GIL.

    A thread copies a row into an MjData of its own, computes, and copies it back. The few MjData stay in the CPU's
    caches, as those of MuJoCo's batch do.

    Args:
        post_constraint: whether each step ends with `mj_rnePostConstraint`.

    Raises:
        ValueError: if the model has features that are part of no state (sleeping bodies, say), as MuJoCo's batch.
    """

    def __init__(self, model: Any, num_sims: int, num_threads: int, post_constraint: bool) -> None:
        batch.Batch(model, 1, 1)  # raises if the model has features that are part of no state
        self._num_sims = num_sims
        self._post_constraint = post_constraint
        self.models = [model] * num_sims
        self._base_model = model  # each MjData is made for this model
        self._free_sims: list[_Sim] = []
        self._state = np.empty((num_sims, mujoco.mj_stateSize(model, STATE)))
        self._fresh = mujoco.MjData(model)
        mujoco.mj_getState(model, self._fresh, self._state[0], STATE)
        self._state[1:] = self._state[0]
        self._rows = list(self._state)
        self._inputs = _state_views(model, self._fresh, self._state)
        self._copied: dict[str, Array] = {}  # computed fields
        self._outputs: dict[str, Array] = {}  # read-only views of them
        # by slot: (target, source) of fields that are copied into its model
        self._before: list[list[tuple[Array, Array]]] = [[] for _ in range(num_sims)]
        self._fields: dict[str, Array] = {}
        self._scalars: dict[str, Array] = {}
        self._threads = ThreadPool(num_threads)
        self._all = list(range(num_sims))

    def bind(self, name: str) -> Array:
        known = self._inputs.get(name, self._outputs.get(name))
        if known is not None:
            return known
        source: Any = getattr(self._fresh, name, None)
        if name not in batch.DATA_FIELDS or not isinstance(source, (np.ndarray, int)):
            raise ValueError(f"bind: {name!r} is no field of MjData that has the same size in every simulation")
        source = np.array(source, np.int32) if isinstance(source, int) else source
        self._copied[name] = np.stack([source] * self._num_sims)
        self._outputs[name] = self._copied[name].view()
        self._outputs[name].flags.writeable = False  # MuJoCo would not read it
        self._free_sims.clear()  # they copy only the fields known when they were made
        return self._outputs[name]

    def field(self, name: str, array: Array | None = None) -> Array:
        known = self._fields.get(name, self._scalars.get(name))
        if known is not None:
            return known
        if name not in batch.MODEL_FIELDS:
            raise ValueError(f"model_field: {name!r} is no field of MjModel that can differ between simulations")
        if not (self._fields or self._scalars):
            self.models = [copy.copy(self.models[0]) for _ in self._all]
        if name.startswith("opt.") and not isinstance(getattr(self.models[0].opt, name[4:]), np.ndarray):
            own = np.array([field_value(model, name) for model in self.models])
            self._scalars[name] = own if array is None else array
            return self._scalars[name]
        targets = [self._get(model, name) for model in self.models]
        self._fields[name] = field = np.stack(targets) if array is None else array
        for i, target in enumerate(targets):
            self._before[i].append((target, field[i]))
        return field

    @staticmethod
    def _get(model: Any, name: str) -> Array:
        array: Array = getattr(model.opt, name[4:]) if name.startswith("opt.") else getattr(model, name)
        return array

    def _model(self, slot: int) -> Any:
        model = self.models[slot]
        for target, source in self._before[slot]:
            target[...] = source
        for name, values in self._scalars.items():
            setattr(model.opt, name[4:], values[slot].item())
        return model

    def _acquire_sim(self) -> _Sim:
        """Take an MjData that no other thread uses; the caller gives it back, unless it raised."""
        try:
            return self._free_sims.pop()
        except IndexError:
            return _Sim(self._base_model, self._copied)

    def _step(self, nstep: int, slot: int) -> None:
        model, row, sim = self._model(slot), self._rows[slot], self._acquire_sim()
        data = sim.data
        mujoco.mj_setState(model, data, row, STATE)
        mujoco.mj_step(model, data, nstep)
        if self._post_constraint:
            mujoco.mj_rnePostConstraint(model, data)
        mujoco.mj_getState(model, data, row, STATE)
        sim.copy_out(sim.fields, slot)
        self._free_sims.append(sim)

    def _forward(self, slot: int) -> None:
        model, row, sim = self._model(slot), self._rows[slot], self._acquire_sim()
        data = sim.data
        mujoco.mj_setState(model, data, row, STATE)
        mujoco.mj_forward(model, data)
        mujoco.mj_getState(model, data, row, STATE)
        sim.copy_out(sim.fields if data.flg_rnepost else sim.after_forward, slot)
        self._free_sims.append(sim)

    def _reset(self, slots: Slots, keyframe: int, qpos: Array | None, qvel: Array | None, k: int) -> None:
        slot = slots[k]
        model, sim = self._model(slot), self._acquire_sim()
        data = sim.data
        if keyframe < 0:
            mujoco.mj_resetData(model, data)
        else:
            mujoco.mj_resetDataKeyframe(model, data, keyframe)
        if qpos is not None:
            data.qpos[:] = qpos[k]
        if qvel is not None:
            data.qvel[:] = qvel[k]
        mujoco.mj_forward(model, data)
        mujoco.mj_getState(model, data, self._rows[slot], STATE)
        sim.copy_out(sim.fields, slot)
        self._free_sims.append(sim)

    def _slot_list(self, slots: Slots | None) -> list[int]:
        return self._all if slots is None else slots.tolist()

    def step(self, slots: Slots | None, nstep: int) -> None:
        self._threads.run(partial(self._step, nstep), self._slot_list(slots))

    def forward(self, slots: Slots | None) -> None:
        self._threads.run(self._forward, self._slot_list(slots))

    def reset(self, slots: Slots | None, keyframe: int, qpos: Array | None, qvel: Array | None) -> None:
        numbers = np.arange(self._num_sims) if slots is None else slots
        self._threads.run(partial(self._reset, numbers, keyframe, qpos, qvel), range(len(numbers)))

    def reset_and_step(self, resets: Slots, qpos: Array, qvel: Array, slots: Slots, nstep: int) -> None:
        reset = partial(self._reset, resets, -1, qpos, qvel)

        def do(item: int) -> None:
            if item < 0:
                reset(~item)
            else:
                self._step(nstep, item)

        self._threads.run(do, [*slots.tolist(), *(~k for k in range(len(resets)))])

    def get_states(self, slots: Slots, out: Array) -> None:
        self._state.take(slots, 0, out)

    def set_states(self, slots: Slots, states: Array) -> None:
        self._state[slots] = states

    def set_const(self, slots: Slots | None) -> None:
        # the models of other slots do not have the values written to their rows yet
        for slot in self._slot_list(slots):
            model = self._model(slot)
            mujoco.mj_setConst(model, mujoco.MjData(self._base_model))
            for name, field in self._fields.items():
                field[slot] = self._get(model, name)

    def close(self) -> None:
        self._threads.close()
        self._free_sims.clear()


def _state_views(model: Any, data: Any, states: Array) -> dict[str, Array]:
    """Return live views of rows of state, `(n, ...)`, by the field of MjData that each part is."""
    views: dict[str, Array] = {}
    for name, part in _STATE_PARTS.items():
        begin = mujoco.mj_stateSize(model, STATE & (int(part) - 1))  # parts are in the order of their bits
        shape = np.shape(getattr(data, name))
        views[name] = states[:, begin : begin + mujoco.mj_stateSize(model, int(part))].reshape(len(states), *shape)
    return views


# In a forked child a batch has no threads, for which its destructor would wait: leak it there.
_batches: weakref.WeakSet[Any] = weakref.WeakSet()


def _after_fork() -> None:
    for lost in list(_batches):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(lost))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
