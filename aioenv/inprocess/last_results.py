"""What a vector env in this process has said last of its slots: where a rollout begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LastResults"]

Bools = npt.NDArray[np.bool_]


class LastResults:
    """Notes what each step and reset gave, where the env is; read it while nothing is in flight.

    A step is noted by reference, which takes no time: flags of which callers get copies, and observations that are the
    caller's too if the env has let go of them.

    Args:
        num_envs: how many slots there are.
        keeps_obs: whether to keep observations: of an env that can't be asked for them.

    Attributes:
        obs: the latest observations of all slots, as the env gave them; None if they are not kept.
    """

    __slots__ = ("_flags", "_keeps_obs", "_over", "obs")

    def __init__(self, num_envs: int, *, keeps_obs: bool) -> None:
        self._over: Bools = np.zeros(num_envs, np.bool_)
        self._flags: tuple[Any, Any] | None = None  # of the last whole step, and newer than `_over`
        self._keeps_obs = keeps_obs
        self.obs: Any = None

    def stepped(self, obs: Any, terminated: Any, truncated: Any, some: npt.NDArray[np.int64] | None) -> None:
        """A step has given this, of all slots or of some."""
        if self._keeps_obs:
            self.obs = obs
        if some is None:
            self._flags = terminated, truncated
        elif len(some):
            over = self.over()
            over[some] = _either(terminated, truncated)[some]
            self._over, self._flags = over, None

    def reset(self, obs: Any, mask: Bools | None) -> None:
        """A reset has given this, of all slots or of those of a mask."""
        if self._keeps_obs:
            self.obs = obs
        self._over, self._flags = (np.zeros_like(self._over) if mask is None else self.over() & ~mask), None

    def over(self) -> Bools:
        """Whose episode the slot's last step has ended, with no reset since; an array of the caller's."""
        return self._over.copy() if self._flags is None else _either(*self._flags)


def _either(terminated: Any, truncated: Any) -> Bools:
    return np.logical_or(np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_))
