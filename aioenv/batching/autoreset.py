"""Gymnasium's three autoreset modes, for one env: what a step does when an episode has ended.

The same rules as `gymnasium.vector.SyncVectorEnv` 1.4 (https://farama.org/Vector-Autoreset-Mode), one object an
env, so that every place that steps envs shares them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from gymnasium import Env
from gymnasium.vector import AutoresetMode

__all__ = ["Outcome", "Stepper", "parse_mode", "stepper"]


# obs, reward, terminated, truncated, info, and what SAME_STEP adds to the infos before `info` (or None)
Outcome: TypeAlias = "tuple[Any, Any, Any, Any, dict[str, Any], dict[str, Any] | None]"


class NextStep:
    """The step after the last one of an episode resets: its action is ignored and its reward 0."""

    def __init__(self, env: Env[Any, Any]) -> None:
        self._env = env
        self._ended = False

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        obs, info = self._env.reset(seed=seed, options=options)
        self._ended = False
        return obs, info

    def step(self, action: Any) -> Outcome:
        """Step, or reset if the episode has ended."""
        if self._ended:
            obs, info = self._env.reset()
            self._ended = False
            return obs, 0.0, False, False, info, None
        obs, reward, terminated, truncated, info = self._env.step(action)
        self._ended = terminated or truncated
        return obs, reward, terminated, truncated, info, None


class SameStep:
    """The last step of an episode resets at once; the terminal observation and info go into the infos."""

    def __init__(self, env: Env[Any, Any]) -> None:
        self._env = env

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        obs, info = self._env.reset(seed=seed, options=options)
        return obs, info

    def step(self, action: Any) -> Outcome:
        """Step, and reset if that ended the episode."""
        obs, reward, terminated, truncated, info = self._env.step(action)
        if not (terminated or truncated):
            return obs, reward, terminated, truncated, info, None
        final = {"final_obs": obs, "final_info": info}
        obs, info = self._env.reset()
        return obs, reward, terminated, truncated, info, final


class Disabled(SameStep):
    """Nothing resets by itself; the caller has to, with `options["reset_mask"]`."""

    def step(self, action: Any) -> Outcome:
        """Step."""
        return (*self._env.step(action), None)


Stepper: TypeAlias = "NextStep | SameStep | Disabled"

_STEPPERS: dict[AutoresetMode, type[NextStep] | type[SameStep] | type[Disabled]] = {
    AutoresetMode.NEXT_STEP: NextStep,
    AutoresetMode.SAME_STEP: SameStep,
    AutoresetMode.DISABLED: Disabled,
}


def stepper(env: Env[Any, Any], mode: AutoresetMode) -> Stepper:
    """The object that steps `env` under `mode`."""
    return _STEPPERS[mode](env)


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
