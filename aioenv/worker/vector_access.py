"""Reset, step and call a `gymnasium.vector.VectorEnv`, all slots or some, and check its results.

The vector env may live in a worker or in the parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from aioenv.errors import ActionError
from aioenv.spaces.checks import find_not_finite, raise_not_finite
from aioenv.spaces.layout import Layout
from aioenv.state.snapshot import Misfit, RawState
from aioenv.worker.making import AnyVectorEnv
from aioenv.worker.vector_states import read_vector_states, write_vector_states

__all__ = [
    "CheckedNumerics",
    "VectorCalls",
    "call_vector_env",
    "check_numbers",
    "has_one_generator",
    "refuse_some",
    "reset_result",
    "reset_vector_env",
    "set_vector_attr",
    "step_result",
    "steps_some",
    "take_observations",
    "with_rows",
]

_STEP = ("obs", "reward", "terminated", "truncated", "info")
_RESET = ("obs", "info")


def step_result(result: Any) -> Any:
    """Check the result of `step`, and return it with a mask for "final_obs" if it lacks one (as Atari's does).

    Raises:
        TypeError: if it is no tuple, or the info no dict.
        ValueError: if it has another length.
    """
    if type(result) is not tuple or len(result) != 5 or type(result[4]) is not dict:
        result = _checked("step", result, _STEP)
    info = result[4]
    if "final_obs" in info and "_final_obs" not in info:  # its values for other slots are no observations
        return (*result[:4], {**info, "_final_obs": np.logical_or(result[2], result[3])})
    return result


def reset_result(result: Any) -> Any:
    """Check the result of `reset`, and return it.

    Raises:
        TypeError, ValueError: as `step_result`.
    """
    return _checked("reset", result, _RESET)


def check_numbers(name: str, values: Any) -> None:
    """Raise a TypeError if rewards or flags are not numbers, but values that numpy converts to numbers: None, say."""
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if array.dtype.kind in "biuf":
        return
    if array.dtype.kind != "O" or not all(isinstance(value, (Real, np.bool_)) for value in array.ravel().tolist()):
        what = "numbers" if name == "reward" else "bools"
        raise TypeError(f"{name}: expected {what}, got {values!r:.200}")


def _checked(method: str, result: Any, names: Sequence[str]) -> Any:
    expected = f"{method}: expected {len(names)} values ({', '.join(names)}) from the vector env"
    if not isinstance(result, (tuple, list)):
        raise TypeError(f"{expected}, got {type(result).__name__}")
    if len(result) != len(names):
        hint = "; what was `done` is `terminated` and `truncated`" if method == "step" and len(result) == 4 else ""
        raise ValueError(f"{expected}, got {len(result)}{hint}")
    info = result[-1]
    if not isinstance(info, Mapping):
        hint = (
            "; `VectorEnv._add_info(infos, info, slot)` merges those of single envs" if isinstance(info, list) else ""
        )
        raise TypeError(
            f"{method}: expected info from the vector env as a dict, with an element a slot in each array, got "
            f"{type(info).__name__}{hint}"
        )
    return result


# ------------------------------------------------------------ resets and steps


class _Options(dict[str, Any]):
    """Reset options that record whether the mask was read: an env that does not read it has reset every slot."""

    mask_read = False

    def _note_access(self, key: Any) -> None:
        self.mask_read = self.mask_read or key == "reset_mask"

    def __getitem__(self, key: str) -> Any:
        self._note_access(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note_access(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note_access(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._note_access(key)
        return super().pop(key, *default)

    # reading all options includes the mask
    def __iter__(self) -> Iterator[str]:
        self.mask_read = True
        return super().__iter__()

    def keys(self) -> Any:
        self.mask_read = True
        return super().keys()

    def items(self) -> Any:
        self.mask_read = True
        return super().items()

    def copy(self) -> dict[str, Any]:
        self.mask_read = True
        return super().copy()


def reset_vector_env(
    env: AnyVectorEnv, seed: Any, mask: npt.NDArray[np.bool_] | None, options: dict[str, Any] | None
) -> tuple[Any, dict[str, Any]]:
    """Reset a vector env, or those of its slots that a mask names.

    Raises:
        ValueError: if a mask is given and the env did not read it: all of its slots have been reset.
        TypeError, ValueError: if the result is not that of a reset.
    """
    if mask is None:
        return reset_result(env.reset(seed=seed, options=options))  # type: ignore[no-any-return]
    masked = _Options({**(options or {}), "reset_mask": mask})
    result: tuple[Any, dict[str, Any]] = reset_result(env.reset(seed=seed, options=masked))
    if not masked.mask_read:
        raise ValueError(
            f"{type(env.unwrapped).__name__} can't reset some of its slots: it did not look at options['reset_mask'] "
            'and has reset all of them. Call reset() for all, or use backend="workers"'
        )
    return result


def steps_some(env: AnyVectorEnv) -> bool:
    """Return whether a vector env can step some of its slots: whether it has `step_some`.

        def step_some(self, actions, slots): ...

    It takes actions of all slots, and the int64 numbers of those to step, ascending, possibly none. It returns what
    `step` does. For the other slots, which it leaves unchanged, it returns their last observations (zeros if they had
    none); their rewards, flags and infos are ignored.
    """
    return callable(getattr(env, "step_some", None))


def has_one_generator(env: AnyVectorEnv) -> bool:
    """Return whether slots share one random generator, which the env's attribute `one_generator` says.

    Then the numbers that a slot draws depend on the slots that were reset before it, and so on which are stepped
    together.
    """
    return bool(getattr(env.unwrapped, "one_generator", False))


def refuse_some(name: str, env: Any) -> ValueError:
    """Return the error of a vector env that can't step some of its slots."""
    kind = env if isinstance(env, str) else type(env).__name__
    return ValueError(
        f"{name}: {kind} steps all of its slots at once; give it step_some(actions, slots), or use "
        'backend="workers", which steps slots alone'
    )


def with_rows(
    layout: Layout, num_envs: int, rows: Sequence[int], arrays: Sequence[Any], objects: Sequence[Sequence[Any]]
) -> Any:
    """Return a batch of actions of all slots, given those of some; the others are zero, or copies of one of these."""
    whole = layout.zeros(num_envs)
    for mine, theirs in zip(whole, arrays, strict=True):
        mine[rows] = theirs
    columns = []
    for column in objects:
        by_row = dict(zip(rows, column, strict=True))
        columns.append([by_row.get(row, column[0]) for row in range(num_envs)])
    return layout.assemble(whole, columns)


def take_observations(layout: Layout, obs: Any, num_envs: int) -> tuple[Any, Any]:
    """Split a batch of observations into arrays and objects (see `Layout.take_apart`).

    Raises:
        ValueError: if it does not fit the space.
    """
    try:
        return layout.take_apart(obs, num_envs)
    except ActionError as exc:
        raise ValueError(str(exc).replace("actions", "observations", 1)) from None


# ------------------------------------------------------------ methods and attributes


def call_vector_env(env: AnyVectorEnv, rows: Sequence[int], name: str, args: Sequence[Any], kwargs: Any) -> list[Any]:
    """Call a method, or read an attribute, and return one result for each of `rows`.

    A vector env with a `call` method, as Gymnasium's SyncVectorEnv, is asked by that. For any other it is the vector
    env's own method or attribute. An array, list or tuple of `num_envs` has one result a slot; anything else is the
    result of every slot. `get_wrapper_attr`, `has_wrapper_attr` and `set_wrapper_attr` work as on a single env.

    Raises:
        ValueError: if the env can't be asked about some slots alone.
    """
    whole = len(rows) == env.num_envs
    per_slot = _find(env, "call", None)
    if not whole:
        single = getattr(env.unwrapped, "envs", None)
        if isinstance(single, (list, tuple)) and len(single) == env.num_envs:
            values = [single[row].get_wrapper_attr(name) for row in rows]
            return [value(*args, **kwargs) if callable(value) else value for value in values]
        reads = name in ("get_wrapper_attr", "has_wrapper_attr")
        if callable(per_slot) or (not reads and callable(_own(env, name))):
            raise ValueError(
                f"call_at: {type(env.unwrapped).__name__} is one env of {env.num_envs} slots, of which none can be "
                f"called alone; call({name!r}) calls it for all"
            )
    if name == "render" and whole:  # the vector env's own
        value = env.render()
    elif callable(per_slot):
        value = per_slot(name, *args, **kwargs)
    else:
        value = _own(env, name)
        value = value(*args, **kwargs) if callable(value) else value
    each = _each(value, env.num_envs)
    return [each[row] for row in rows]


_ERROR = object()
_OF_ONE_SLOT = {"action_space": "single_action_space", "observation_space": "single_observation_space"}


def _own(env: AnyVectorEnv, name: str) -> Any:
    """Find an attribute as `_find` does, or a method of single envs about their wrappers, which vector envs lack.

    The spaces are those of one slot, as single envs have them.
    """
    try:
        return _find(env, _OF_ONE_SLOT.get(name, name))
    except AttributeError:
        if name not in _ANSWERS:
            raise
    return partial(_ANSWERS[name], env)


def _has(env: AnyVectorEnv, name: str) -> bool:
    try:
        _own(env, name)
    except AttributeError:
        return False
    return True


def _set(env: AnyVectorEnv, name: str, value: Any, *, force: bool = True) -> bool:
    """Set an attribute that exists, or any with `force`; return whether it was set."""
    if force or _has(env, name):
        set_vector_attr(env, name, [value] * env.num_envs)
        return True
    return False


def _find(env: AnyVectorEnv, name: str, default: Any = _ERROR) -> Any:
    """Return an attribute of the outermost layer of wrappers that has it: vector wrappers don't forward attributes."""
    layer: Any = env
    while layer is not env.unwrapped and not hasattr(layer, name):
        layer = layer.env
    return getattr(layer, name) if default is _ERROR else getattr(layer, name, default)


_ANSWERS: dict[str, Callable[..., Any]] = {"get_wrapper_attr": _own, "has_wrapper_attr": _has, "set_wrapper_attr": _set}


def _each(value: Any, num_envs: int) -> Sequence[Any]:
    if isinstance(value, np.ndarray) and value.ndim and len(value) == num_envs:
        return list(value)
    if isinstance(value, (list, tuple)) and len(value) == num_envs:
        return value
    return [value] * num_envs


def set_vector_attr(env: AnyVectorEnv, name: str, values: Sequence[Any]) -> None:
    """Set an attribute, given one value a slot: by the env's own `set_attr` if it has one, else on the vector env.

    Raises:
        ValueError: if the env has one such attribute for all slots, and the values differ.
    """
    per_slot = _find(env, "set_attr", None)
    if callable(per_slot):
        per_slot(name, list(values))
        return
    first = values[0]
    if not all(value is first or bool(np.array_equal(value, first)) for value in values):
        raise ValueError(
            f"set_attr: {type(env.unwrapped).__name__} has one {name!r} for all of its slots; "
            "pass one value, not a list"
        )
    layer: Any = env
    while layer is not env.unwrapped and name not in vars(layer):
        layer = layer.env
    setattr(layer, name, first)


# ------------------------------------------------------------ calls


class VectorCalls:
    """Calls of a vector env beside steps and resets; each method returns one result for each of `rows`.

    An exception of the env is raised as it is, and concerns all of its rows.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self._env = env

    def call_envs(self, rows: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method, or read an attribute (see `call_vector_env`)."""
        return call_vector_env(self._env, rows, name, args, kwargs)

    def call_if_any(self, rows: Sequence[int], name: str) -> list[Any]:
        """Call a method without arguments; None for each row if there is no such method."""
        return self.call_envs(rows, name, (), {}) if hasattr(self._env, name) else [None] * len(rows)

    def apply(self, rows: Sequence[int], function: Callable[..., list[Any]], args: tuple[Any, ...]) -> list[Any]:
        """Call a function with the env, rows and some arguments; it returns one result for each of `rows`."""
        return function(self._env, rows, *args)

    def set_attr(self, rows: Sequence[int], name: str, values: Sequence[Any]) -> list[Any]:
        """Set an attribute (see `set_vector_attr`)."""
        set_vector_attr(self._env, name, values)
        return [None] * len(rows)

    def get_states(self, rows: Sequence[int]) -> list[RawState] | list[str]:
        """Return the state of each row or, as a string, why it can't be read."""
        try:
            return read_vector_states(self._env, rows)
        except Misfit as exc:
            return [str(exc)] * len(rows)

    def set_states(self, rows: Sequence[int], states: Sequence[RawState]) -> Sequence[str | None]:
        """Bring each row into a state; return None for each row, or a string that says why nothing was done."""
        try:
            return write_vector_states(self._env, rows, states)
        except Misfit as exc:
            return [str(exc)] * len(rows)


# ------------------------------------------------------------ NaN and infinite numbers


if TYPE_CHECKING:
    _Wrapper = VectorWrapper[Any, Any, Any, Any, Any]
else:
    _Wrapper = VectorWrapper  # in older versions of Gymnasium it takes no type arguments


class CheckedNumerics(_Wrapper):
    """A vector env that raises a NumericsError if a reward or an observation is NaN or infinite.

    Args:
        env: the vector env.
        first: the slot of its first row.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], first: int = 0) -> None:
        super().__init__(env)
        self._first = first
        self._mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._steps = np.zeros(env.num_envs, np.int64)  # since the slot's reset
        self._ended = np.zeros(env.num_envs, np.bool_)

    @property
    def any_thread(self) -> bool:
        """Whether any thread may step the env."""
        return getattr(self.env, "any_thread", False) is True

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start episodes."""
        obs, info = reset_result(self.env.reset(seed=seed, options=options))
        # not by the dict's own method, which would count as an access of the env's (see `_Options`)
        mask = None if options is None else dict.get(options, "reset_mask")
        begun = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        self._steps[begun], self._ended[begun] = 0, False
        self._check_values("observation", obs, begun)
        return obs, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every slot."""
        obs, reward, terminated, truncated, info = step_result(self.env.step(actions))
        self._check(obs, reward, terminated, truncated, info, np.arange(self.num_envs))
        return obs, reward, terminated, truncated, info

    @property
    def step_some(self) -> Any:
        """Steps some of the slots (see `steps_some`); None if the env can't."""
        return self._step_some if steps_some(self.env) else None

    def _step_some(self, actions: Any, slots: npt.NDArray[np.int64]) -> Any:
        result = step_result(self.env.step_some(actions, slots))  # type: ignore[attr-defined]
        obs, reward, terminated, truncated, info = result
        self._check(obs, reward, terminated, truncated, info, slots)
        return result

    def _check(
        self,
        obs: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: dict[str, Any],
        slots: npt.NDArray[np.int64],
    ) -> None:
        self._steps[slots] += 1
        if self._mode is AutoresetMode.NEXT_STEP:
            self._steps[slots[self._ended[slots]]] = 0
        over = np.logical_or(terminated, truncated)
        ended = self._ended[slots] = over[slots]
        self._check_values("reward", reward, slots)
        if self._mode is AutoresetMode.SAME_STEP and ended.any():
            self._check_final_obs(info, slots[ended])
            self._steps[slots[ended]] = 0
        self._check_values("observation", obs, slots)

    def _check_final_obs(self, info: dict[str, Any], slots: npt.NDArray[np.int64]) -> None:
        last: Any = info.get("final_obs")
        for slot in slots.tolist() if last is not None else ():
            obs = {key: part[slot] for key, part in last.items()} if isinstance(last, dict) else last[slot]
            if (found := find_not_finite(obs, "final observation")) is not None:
                self._refuse(slot, *found)

    def _check_values(self, where: str, batch: Any, slots: npt.NDArray[np.int64]) -> None:
        """Raise if a number is NaN or infinite in one of these slots' rows of a batch."""
        if isinstance(batch, dict):
            for key, part in batch.items():
                self._check_values(f"{where}[{key!r}]", part, slots)
        elif isinstance(batch, tuple) and all(isinstance(part, (np.ndarray, dict, tuple)) for part in batch):
            for index, part in enumerate(batch):
                self._check_values(f"{where}[{index}]", part, slots)
        elif isinstance(batch, (tuple, list)) or (isinstance(batch, np.ndarray) and batch.dtype.kind == "f"):
            if isinstance(batch, np.ndarray) and np.isfinite(batch).all():
                return
            for slot in slots.tolist() if len(batch) == self.num_envs else ():
                if (found := find_not_finite(batch[slot], where)) is not None:
                    self._refuse(slot, *found)

    def _refuse(self, slot: int, where: str, number: Any) -> None:
        raise_not_finite(f"slot {self._first + slot}: {where}", number, int(self._steps[slot]))
