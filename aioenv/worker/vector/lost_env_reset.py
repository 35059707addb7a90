"""A vector env in the place of one that was lost with its process: how its slots' episodes end and begin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from aioenv.ipc.messages import LostRow
from aioenv.worker.vector.access import reset_vector_env, steps_some
from aioenv.worker.vector.results import step_result

__all__ = ["Infos", "LostEnvReset"]

# Infos of a vector env, and the rows that they are of.
Infos = Sequence[tuple[Mapping[Any, Any], Sequence[int]]]

# Instead of a step, a row's next step is: nothing else; a reset; the end of the episode that was lost.
_NOT, _RESET, _LOST = 0, 1, 2


class LostEnvReset:
    """Tells the ends of lost episodes in the next step of their rows, and begins others as the env's mode wants it.

    As a rule all rows are lost at once, and the env is not stepped before it is reset. Where some have been reset by
    themselves meanwhile, it steps for those, and the others are reset by a mask.

    Args:
        env: the new vector env.
        lost: its rows that had begun an episode. Those whose episode was over have lost one without any step.

    Attributes:
        begun: for each row whether this env has begun an episode in it, or was put into a state: else it does not show
            what is told of the row.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], lost: Iterable[LostRow]) -> None:
        self._env = env
        self._mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._due = np.zeros(env.num_envs, np.int8)
        self._obs: dict[int, Any] = {}
        self._seed: int | None = None
        self._untouched = True  # whether the env was never reset
        self.begun = np.zeros(env.num_envs, np.bool_)
        for row, seed, obs, _, _ in lost:
            self._due[row] = _LOST
            self._obs[row] = obs
            if self._seed is None and seed is not None:
                self._seed = seed  # one for all: a vector env spreads it over its slots itself, if it has one each

    @property
    def is_over(self) -> bool:
        """Whether the env can be stepped from now on as any other."""
        return bool(self.begun.all()) and not self._due.any()

    @property
    def last_obs(self) -> Any:
        """The last observations of all rows, as a batch; None if some are not lost."""
        if len(self._obs) < len(self._due):
            return None
        return self._mixed(self._due == _LOST, [self._obs[row] for row in range(len(self._due))], None)

    def go_on(self, rows: Sequence[int]) -> None:
        """These rows have been reset, or put into a state."""
        self._due[list(rows)] = _NOT
        self.begun[list(rows)] = True
        self._untouched = False

    def reset(
        self, seed: Any, mask: npt.NDArray[np.bool_] | None, options: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all rows, or those of a mask."""
        if self._untouched:
            first, self._seed = self._seed, None
            if mask is None:
                seed = first if seed is None else seed
            else:  # what it steps beside the others must have begun, too
                self._env.reset(seed=first)
        result = reset_vector_env(self._env, seed, mask, options)
        self.go_on(np.flatnonzero(self._due >= 0 if mask is None else mask).tolist())
        return result

    def step(self, actions: Any, rows: Sequence[int] | None = None) -> tuple[Any, Any, Any, Any, Infos]:
        """What a step of all rows gives, or of some (where the env can do that)."""
        n = self._env.num_envs
        asked = np.ones(n, np.bool_)
        if rows is not None:
            asked[:] = False
            asked[list(rows)] = True
        lost, resets = asked & (self._due == _LOST), asked & (self._due == _RESET)
        rest = asked & ~(lost | resets)
        obs, infos = None, []
        reward: npt.NDArray[Any] = np.zeros(n)
        terminated: npt.NDArray[Any] = np.zeros(n, np.bool_)
        truncated: npt.NDArray[Any] = np.zeros(n, np.bool_)
        if rest.any():
            alone = not rest.all() and steps_some(self._env)
            step = partial(self._env.step_some, slots=np.flatnonzero(rest)) if alone else self._env.step  # type: ignore[attr-defined]
            obs, *columns, info = step_result(step(actions))
            reward, terminated, truncated = (np.where(rest, column, 0) for column in columns)
            infos.append((info, np.flatnonzero(rest).tolist()))
        at_once = self._mode is AutoresetMode.SAME_STEP
        new = resets | lost if at_once else resets
        if new.any():
            fresh, info = self.reset(None, None if new.all() else new, None)
            obs = fresh if obs is None else self._mixed(new, fresh, obs)
            infos.append((info, np.flatnonzero(new).tolist()))
        if lost.any():
            old = [self._obs.pop(row, None) if lost[row] else self._obs.get(row) for row in range(n)]
            truncated = truncated | lost
            infos.append((_restarted(lost, old if at_once else None), np.flatnonzero(lost).tolist()))
            if not at_once:
                obs = self._mixed(lost, old, obs)
                self._due[lost] = _RESET if self._mode is AutoresetMode.NEXT_STEP else _NOT
        return obs, reward, terminated.astype(np.bool_), truncated.astype(np.bool_), infos

    def _mixed(self, mask: npt.NDArray[np.bool_], ours: Any, theirs: Any) -> Any:
        """A batch of observations: where the mask is True `ours`, else `theirs`, which is a batch, or None."""
        space, single, n = self._env.observation_space, self._env.single_observation_space, len(mask)
        mine = ours if isinstance(ours, list) else list(iterate(space, ours))
        rest = mine if theirs is None else list(iterate(space, theirs))
        each = [mine[row] if mask[row] else rest[row] for row in range(n)]
        if theirs is None:  # nobody looks at the others
            each = [mine[int(mask.argmax())] if item is None else item for item in each]
        return concatenate(single, each, create_empty_array(single, n=n))  # type: ignore[arg-type]


def _restarted(lost: npt.NDArray[np.bool_], final_obs: Sequence[Any] | None) -> dict[str, Any]:
    """The info of the last step of lost episodes."""
    info: dict[str, Any] = {"restarted": lost.copy(), "_restarted": lost}
    if final_obs is not None:
        objects = np.empty(len(lost), object)
        for row, obs in enumerate(final_obs):
            objects[row] = obs
        info = {**info, "final_obs": objects, "_final_obs": lost, "final_info": dict(info), "_final_info": lost}
    return info
