"""The two ways to step many simulations of one model: MuJoCo's own batch, and a loop over MjData on threads.

Both have the same methods and the same arrays. The batch is faster. The loop does what the batch can't: it calls
`mj_rnePostConstraint` after each step, which contact forces (`cfrc_ext`) need.
"""

# ruff: noqa: D102 (`Engine` says what the methods do)

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Protocol

import mujoco
import numpy as np
import numpy.typing as npt
from mujoco import batch

from aioenv.native.team import Team

__all__ = ["BatchEngine", "Engine", "LoopEngine"]

Array = npt.NDArray[Any]
Slots = npt.NDArray[np.int64]

STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
# fields that a write to the bound array changes
INPUTS = frozenset("qpos qvel act ctrl qfrc_applied xfrc_applied qacc_warmstart mocap_pos mocap_quat userdata".split())


class Engine(Protocol):
    """What `SimPool` needs; `slots` are distinct numbers, None is all of them."""

    models: list[Any]

    def bind(self, name: str) -> Array:
        """The live array of a field of MjData, `(num_sims, ...)`."""

    def field(self, name: str) -> Array:
        """The live array of a field of MjModel, `(num_sims, ...)`, from now on one for each simulation."""

    def step(self, slots: Slots | None, nstep: int) -> None:
        """`mj_step`, `nstep` times."""

    def forward(self, slots: Slots | None) -> None:
        """`mj_forward`."""

    def reset(self, slots: Slots | None, keyframe: int, qpos: Array | None, qvel: Array | None) -> None:
        """`mj_resetData`, then positions and velocities if given, then `mj_forward`."""

    def reset_and_step(self, resets: Slots, qpos: Array, qvel: Array, slots: Slots, nstep: int) -> None:
        """`reset` of some and `step` of others."""

    def get_states(self, slots: Slots, out: Array) -> None:
        """The states (`mjSTATE_INTEGRATION`) into the rows of `out`."""

    def set_states(self, slots: Slots, states: Array) -> None:
        """The states from rows; nothing is computed from them."""

    def set_const(self, slots: Slots | None) -> None:
        """`mj_setConst`."""

    def close(self) -> None:
        """End the threads; the arrays stay as they are."""


class BatchEngine:
    """`mujoco.batch.Batch` behind the interface of `Engine`."""

    def __init__(self, model: Any, num_sims: int, num_threads: int) -> None:
        self._batch: Any = batch.Batch(model, num_sims, num_threads)
        self.models = [model] * num_sims
        self._batch.reset()
        self._qpos, self._qvel = self._batch.bind("qpos"), self._batch.bind("qvel")
        self._state = self._batch.state
        data = mujoco.MjData(model)
        self._fresh = np.empty(self._batch.nstate)
        mujoco.mj_getState(model, data, self._fresh, STATE)
        # ours, and copied in before each call: the batch's own would keep its threads alive after `close`
        self._fields: dict[str, Array] = {}

    def bind(self, name: str) -> Array:
        array: Array = self._batch.bind(name)
        return array

    def field(self, name: str) -> Array:
        if name not in self._fields:
            self._fields[name] = self._batch.expand(name).copy()
        return self._fields[name]

    def _push(self) -> None:
        for name, array in self._fields.items():
            self._batch.expand(name)[...] = array

    def step(self, slots: Slots | None, nstep: int) -> None:
        if self._fields:
            self._push()
        self._batch.step(slots, nstep)

    def forward(self, slots: Slots | None) -> None:
        if self._fields:
            self._push()
        self._batch.forward(slots)

    def reset(self, slots: Slots | None, keyframe: int, qpos: Array | None, qvel: Array | None) -> None:
        if self._fields:
            self._push()
        if self._fields or keyframe >= 0:
            self._batch.reset(slots, keyframe, mujoco.mjtStage.mjSTAGE_NONE)
        else:
            self._state[... if slots is None else slots] = self._fresh
        if qpos is not None:
            self._qpos[... if slots is None else slots] = qpos
        if qvel is not None:
            self._qvel[... if slots is None else slots] = qvel
        self._batch.forward(slots)

    def reset_and_step(self, resets: Slots, qpos: Array, qvel: Array, slots: Slots, nstep: int) -> None:
        self.reset(resets, -1, qpos, qvel)
        if len(slots):
            self._batch.step(slots, nstep)

    def get_states(self, slots: Slots, out: Array) -> None:
        self._state.take(slots, 0, out)

    def set_states(self, slots: Slots, states: Array) -> None:
        self._state[slots] = states

    def set_const(self, slots: Slots | None) -> None:
        self._push()
        self._batch.set_const(slots)
        for name, array in self._fields.items():
            array[...] = self._batch.expand(name)

    def close(self) -> None:
        # its threads end with the last reference, and arrays that are bound refer to it
        del self._batch, self._qpos, self._qvel, self._state


class LoopEngine:
    """One MjData a simulation, stepped on threads that take the next one each; `mj_step` releases the GIL.

    Arrays are copied in and out by the thread that steps, while another one's physics goes on.

    Args:
        post_constraint: whether each step ends with `mj_rnePostConstraint`.
    """

    def __init__(self, model: Any, num_sims: int, num_threads: int, post_constraint: bool) -> None:
        self._n = num_sims
        self._post = post_constraint
        self.models = [model] * num_sims
        self._datas = [mujoco.MjData(model) for _ in range(num_sims)]
        self._arrays: dict[str, Array] = {}
        # (target, source) of what is copied before and after each call, a list for each simulation
        self._before: list[list[tuple[Array, Array]]] = [[] for _ in range(num_sims)]
        self._after: list[list[tuple[Array, Array]]] = [[] for _ in range(num_sims)]
        self._fields: dict[str, Array] = {}
        self._scalars: dict[str, Array] = {}
        self._team = Team(num_threads)
        self._all = list(range(num_sims))

    def bind(self, name: str) -> Array:
        if name not in self._arrays:
            sources: list[Any] = [getattr(data, name, None) for data in self._datas]
            if name not in batch.DATA_FIELDS or not isinstance(sources[0], np.ndarray):
                raise ValueError(f"bind: {name!r} is no field of MjData that every simulation has an array of")
            array = np.stack(sources)
            for i, source in enumerate(sources):
                if name in INPUTS:
                    self._before[i].append((source, array[i]))
                self._after[i].append((array[i], source))
            self._arrays[name] = array
        return self._arrays[name]

    def field(self, name: str) -> Array:
        known = self._fields.get(name, self._scalars.get(name))
        if known is not None:
            return known
        if name not in batch.MODEL_FIELDS:
            raise ValueError(f"model_field: {name!r} is no field of MjModel that can differ between simulations")
        if not (self._fields or self._scalars):
            self.models = [copy.copy(self.models[0]) for _ in self._all]
        if name.startswith("opt.") and not isinstance(getattr(self.models[0].opt, name[4:]), np.ndarray):
            self._scalars[name] = np.array([getattr(model.opt, name[4:]) for model in self.models])
            return self._scalars[name]
        arrays = [self._get(model, name) for model in self.models]
        self._fields[name] = field = np.stack(arrays)
        for i, array in enumerate(arrays):
            self._before[i].append((array, field[i]))
        return field

    @staticmethod
    def _get(model: Any, name: str) -> Array:
        array: Array = getattr(model.opt, name[4:]) if name.startswith("opt.") else getattr(model, name)
        return array

    def _load(self, slot: int) -> tuple[Any, Any]:
        for target, source in self._before[slot]:
            target[...] = source
        model = self.models[slot]
        for name, values in self._scalars.items():
            setattr(model.opt, name[4:], values[slot].item())
        return model, self._datas[slot]

    def _step(self, nstep: int, slot: int) -> None:
        model, data = self._load(slot)
        mujoco.mj_step(model, data, nstep)
        if self._post:
            mujoco.mj_rnePostConstraint(model, data)
        for target, source in self._after[slot]:
            target[...] = source

    def _forward(self, slot: int) -> None:
        model, data = self._load(slot)
        mujoco.mj_forward(model, data)
        for target, source in self._after[slot]:
            target[...] = source

    def _reset(self, slots: Slots, keyframe: int, qpos: Array | None, qvel: Array | None, k: int) -> None:
        slot = slots[k]
        model, data = self._load(slot)
        if keyframe < 0:
            mujoco.mj_resetData(model, data)
        else:
            mujoco.mj_resetDataKeyframe(model, data, keyframe)
        if qpos is not None:
            data.qpos[:] = qpos[k]
        if qvel is not None:
            data.qvel[:] = qvel[k]
        mujoco.mj_forward(model, data)
        for target, source in self._after[slot]:
            target[...] = source

    def _items(self, slots: Slots | None) -> list[int]:
        return self._all if slots is None else slots.tolist()

    def step(self, slots: Slots | None, nstep: int) -> None:
        self._team.run(partial(self._step, nstep), self._items(slots))

    def forward(self, slots: Slots | None) -> None:
        self._team.run(self._forward, self._items(slots))

    def reset(self, slots: Slots | None, keyframe: int, qpos: Array | None, qvel: Array | None) -> None:
        numbers = np.arange(self._n) if slots is None else slots
        self._team.run(partial(self._reset, numbers, keyframe, qpos, qvel), range(len(numbers)))

    def reset_and_step(self, resets: Slots, qpos: Array, qvel: Array, slots: Slots, nstep: int) -> None:
        reset = partial(self._reset, resets, -1, qpos, qvel)

        def do(item: int) -> None:
            if item < 0:
                reset(~item)
            else:
                self._step(nstep, item)

        self._team.run(do, [*slots.tolist(), *(~k for k in range(len(resets)))])

    def get_states(self, slots: Slots, out: Array) -> None:
        for row, slot in zip(out, slots.tolist(), strict=True):
            mujoco.mj_getState(*self._load(slot), row, STATE)

    def set_states(self, slots: Slots, states: Array) -> None:
        for row, slot in zip(states, slots.tolist(), strict=True):
            mujoco.mj_setState(self.models[slot], self._datas[slot], np.ascontiguousarray(row), STATE)
            for name in INPUTS & self._arrays.keys():
                self._arrays[name][slot] = getattr(self._datas[slot], name)

    def set_const(self, slots: Slots | None) -> None:
        for slot in self._items(slots):
            model, _ = self._load(slot)
            mujoco.mj_setConst(model, mujoco.MjData(model))
        for name, field in self._fields.items():
            for row, model in zip(field, self.models, strict=True):
                row[...] = self._get(model, name)

    def close(self) -> None:
        self._team.close()
