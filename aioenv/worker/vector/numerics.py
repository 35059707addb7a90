"""NaN and infinite numbers in what a vector env gives: found in whole batches, by slot and step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from aioenv.spaces.outcomes import first_bad, refuse
from aioenv.worker.vector.access import steps_some
from aioenv.worker.vector.results import reset_result, step_result

__all__ = ["CheckedNumerics"]

if TYPE_CHECKING:
    _Wrapper = VectorWrapper[Any, Any, Any, Any, Any]
else:
    _Wrapper = VectorWrapper  # of older versions of Gymnasium it takes no types


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
        self._over = np.zeros(env.num_envs, np.bool_)

    @property
    def any_thread(self) -> bool:
        """As the env says."""
        return getattr(self.env, "any_thread", False) is True

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin episodes."""
        obs, info = reset_result(self.env.reset(seed=seed, options=options))
        # not by the dict's own method: who passed it wants to know whether the env looks for a mask
        mask = None if options is None else dict.get(options, "reset_mask")
        begun = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        self._steps[begun], self._over[begun] = 0, False
        self._look("observation", obs, begun)
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
            self._steps[slots[self._over[slots]]] = 0
        over = np.logical_or(terminated, truncated)
        ended = self._over[slots] = over[slots]
        self._look("reward", reward, slots)
        if self._mode is AutoresetMode.SAME_STEP and ended.any():
            self._look_at_last(info, slots[ended])
            self._steps[slots[ended]] = 0
        self._look("observation", obs, slots)

    def _look_at_last(self, info: dict[str, Any], slots: npt.NDArray[np.int64]) -> None:
        last: Any = info.get("final_obs")
        for slot in slots.tolist() if last is not None else ():
            obs = {key: part[slot] for key, part in last.items()} if isinstance(last, dict) else last[slot]
            if (found := first_bad(obs, "final observation")) is not None:
                self._refuse(slot, *found)

    def _look(self, where: str, batch: Any, slots: npt.NDArray[np.int64]) -> None:
        """Raise if a number is bad in one of these slots' rows of a batch."""
        if isinstance(batch, dict):
            for key, part in batch.items():
                self._look(f"{where}[{key!r}]", part, slots)
        elif isinstance(batch, tuple) and all(isinstance(part, (np.ndarray, dict, tuple)) for part in batch):
            for index, part in enumerate(batch):
                self._look(f"{where}[{index}]", part, slots)
        elif isinstance(batch, (tuple, list)) or (isinstance(batch, np.ndarray) and batch.dtype.kind == "f"):
            if isinstance(batch, np.ndarray) and np.isfinite(batch).all():
                return
            for slot in slots.tolist() if len(batch) == self.num_envs else ():
                if (found := first_bad(batch[slot], where)) is not None:
                    self._refuse(slot, *found)

    def _refuse(self, slot: int, where: str, number: Any) -> None:
        refuse(f"slot {self._first + slot}: {where}", number, int(self._steps[slot]))
