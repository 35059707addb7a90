"""Gymnasium's three autoreset modes: what a step does when an episode has ended.

The same rules as `gymnasium.vector.SyncVectorEnv` 1.4 (https://farama.org/Vector-Autoreset-Mode).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gymnasium import Env
from gymnasium.vector import AutoresetMode

__all__ = ["Autoreset", "Stepped", "parse_mode"]


class Stepped:
    """What came of stepping some rows, in their order; a row that failed has reward 0 and flags False.

    Attributes:
        rewards, terminated, truncated: one value a row, as its env gave it.
        infos: rows with an info dict that is not empty; under SAME_STEP a row may stand here twice.
        failures: rows whose env raised, or gave an observation that does not fit, with the exception.
    """

    __slots__ = ("failures", "infos", "rewards", "terminated", "truncated")

    def __init__(self) -> None:
        self.rewards: list[Any] = []
        self.terminated: list[Any] = []
        self.truncated: list[Any] = []
        self.infos: list[tuple[int, dict[str, Any]]] = []
        self.failures: list[tuple[int, Exception]] = []


class Autoreset:
    """Envs that are stepped one after the other, and reset as the mode wants it.

    NEXT_STEP: the step after the last one of an episode resets; its action is ignored and its reward 0.
    SAME_STEP: the last step of an episode resets at once; terminal observation and info go into the infos.
    DISABLED: nothing resets by itself.

    Args:
        envs: the envs, one a row.
        mode: the autoreset mode.

    Attributes:
        due: for each row, whether its next step is a reset.
        resets_next_step: whether the mode is NEXT_STEP.
    """

    def __init__(self, envs: Sequence[Env[Any, Any]], mode: AutoresetMode) -> None:
        self._envs = envs
        self._resets = [env.reset for env in envs]
        self._steps = [env.step for env in envs]
        self.due = [False] * len(envs)
        self.resets_next_step = mode is AutoresetMode.NEXT_STEP
        self._same_step = mode is AutoresetMode.SAME_STEP

    def reset(self, row: int, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in one row; observation and info."""
        obs, info = self._resets[row](seed=seed, options=options)
        self.due[row] = False
        return obs, info

    def go_on(self, row: int, due: bool) -> None:
        """The env of a row has been put into the state of another, whose next step was a reset, or not."""
        self._resets[row] = self._envs[row].reset
        self.due[row] = due

    def restart(self, row: int, seed: int | None, due: bool) -> None:
        """Let a new env go on in the place of another.

        Args:
            row: its row.
            seed: for its next reset, unless that comes with a seed.
            due: whether its next step is the reset; only under NEXT_STEP.
        """
        reset = self._envs[row].reset

        def reset_once(*, seed: int | None = seed, options: dict[str, Any] | None = None, _seed: Any = seed) -> Any:
            self._resets[row] = reset
            return reset(seed=_seed if seed is None else seed, options=options)

        self._resets[row] = reset_once
        self.due[row] = due and self.resets_next_step

    def step(self, rows: Iterable[int], actions: Iterable[Any], write: Callable[[int, Any], None]) -> Stepped:
        """Step rows with one action each; `write(row, observation)` takes the observations."""
        out = Stepped()
        steps, due = self._steps, self.due
        rewards, terminated, truncated, infos = out.rewards, out.terminated, out.truncated, out.infos
        for row, action in zip(rows, actions, strict=True):
            reward: Any
            final = None
            try:
                if due[row]:
                    obs, info = self._resets[row]()
                    due[row] = False
                    reward, ends, cut = 0.0, False, False
                else:
                    obs, reward, ends, cut, info = steps[row](action)
                    if ends or cut:
                        if self.resets_next_step:
                            due[row] = True
                        elif self._same_step:
                            final = {"final_obs": obs, "final_info": info}
                            obs, info = self._resets[row]()
                write(row, obs)
            except Exception as exc:
                out.failures.append((row, exc))
                reward, ends, cut, info, final = 0.0, False, False, None, None
            rewards.append(reward)
            terminated.append(ends)
            truncated.append(cut)
            if final is not None:
                infos.append((row, final))
            if info:
                infos.append((row, info))
        return out


def parse_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """An autoreset mode, given as such or by value ("NextStep"), as Gymnasium takes it.

    Raises:
        ValueError: if it is neither; the message lists the modes.
    """
    try:
        return AutoresetMode(mode)
    except ValueError:
        known = ", ".join(repr(m.value) for m in AutoresetMode)
        raise ValueError(f"autoreset_mode: expected an AutoresetMode or one of {known}, got {mode!r}") from None
