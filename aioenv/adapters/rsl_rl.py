"""An RSL-RL `VecEnv` over a blocking vector env, so that its runners train on CPU envs."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Self

import numpy as np
from gymnasium import spaces

try:
    import torch
    from rsl_rl.env import VecEnv as _VecEnv
    from tensordict import TensorDict
except ImportError as exc:
    raise ImportError("aioenv.adapters.rsl_rl needs RSL-RL: pip install rsl-rl-lib") from exc

from aioenv.adapters.torch import TorchVectorEnv, check_blocking, reuses_arrays
from aioenv.core.results import ResetResult
from aioenv.errors import ActionError
from aioenv.rollout.subset import check_none_paused

__all__ = ["RslRlVecEnv"]


class RslRlVecEnv(_VecEnv):  # type: ignore[misc]  # RSL-RL need not be installed where types are checked
    """A `VecEnv` of RSL-RL 5: give it to an `OnPolicyRunner`::

        envs = aioenv.sync.make_vec("HalfCheetah-v5", 64, backend="native", autoreset_mode="SameStep")
        runner = OnPolicyRunner(RslRlVecEnv(envs, seed=0), config, "logs")

    The observations of a Dict space are groups by its keys, all others the group "policy". They are float32 of shape
    `(num_envs, …)`, single numbers `(num_envs, 1)`. `extras["time_outs"]` are the episodes that were truncated and not
    terminated, of which RSL-RL bootstraps the rewards. Where `extras` has "final_obs", they are the observations that
    the step led to: the last ones of episodes that ended, others as returned.

    `episode_length_buf` may be written to, as `learn(init_at_random_ep_len=True)` does. A slot whose number reaches
    `max_episode_length` is a time-out, and is reset, even if its env would go on.

    Args:
        envs: a vector env of `aioenv.sync` (or another `gymnasium.vector.VectorEnv`) with `AutoresetMode.SAME_STEP`,
            which `close` closes.
        device: where tensors are put.
        seed: of the first reset; None: fresh entropy.
        max_episode_length: in steps; None: the time limit of the envs' `spec`.
        clip_actions: whether actions are clipped to the bounds of the action space.
        cfg: what RSL-RL's loggers store; None: the id, the number of envs and the backend.

    Attributes:
        envs: the `TorchVectorEnv` over the vector env.
        num_envs: the number of slots.
        num_actions: how many numbers an action has.
        max_episode_length: in steps.
        episode_length_buf: the steps of each episode so far, int64 of shape `(num_envs,)`.
        device: of all tensors.
        cfg: as the argument.

    Raises:
        TypeError: if `envs` is no vector env, or an asynchronous one.
        ValueError: if it has another autoreset mode; if an action is not a Box of floating-point numbers; if
            observations are not arrays, or a Dict of them; if there is no time limit and `max_episode_length` is None;
            or if it is less than 1.
    """

    def __init__(
        self,
        envs: Any,
        device: Any = "cpu",
        *,
        seed: int | None = None,
        max_episode_length: int | None = None,
        clip_actions: bool = True,
        cfg: Any = None,
    ) -> None:
        check_blocking(envs, "SameStep", "RSL-RL")
        space = envs.single_action_space
        if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
            raise ValueError(
                f"single_action_space: RSL-RL's policies are for a Box of floating-point numbers, got {space}"
            )
        self._groups = _groups_of(envs.single_observation_space)
        limit = max_episode_length
        if limit is None and envs.spec is not None:  # a vector env's own limit is among its arguments
            limit = envs.spec.kwargs.get("max_episode_steps", envs.spec.max_episode_steps)
            limit = None if limit == -1 else limit  # Gymnasium's for none
        if limit is None:
            raise ValueError("max_episode_length: the envs' spec has no time limit, so say after how many steps to end")
        if limit < 1:
            raise ValueError(f"max_episode_length: expected 1 or more steps, got {limit}")
        self.envs = TorchVectorEnv(envs, device, obs_dtype=torch.float32, reward_dtype=torch.float32)
        self.device = self.envs.device
        self.num_envs, self.num_actions = envs.num_envs, prod(space.shape)
        self.max_episode_length = int(limit)
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
        known = {"env": getattr(envs.spec, "id", None), "num_envs": self.num_envs}
        self.cfg = {**known, "backend": getattr(envs, "backend", None)} if cfg is None else cfg
        self._action_shape = (self.num_envs, *space.shape)
        self._bounds = [torch.as_tensor(b, device=self.device) for b in (space.low, space.high)] if clip_actions else []
        self._copies = reuses_arrays(envs)  # RSL-RL stores observations after the next step
        self._seed = seed
        self._obs: Any = None

    @property
    def unwrapped(self) -> Self:
        """This; RSL-RL looks for `step_dt` there."""
        return self

    @property
    def step_dt(self) -> float:
        """The seconds of a step, by which RSL-RL weighs curiosity: of `metadata["render_fps"]`.

        Raises:
            AttributeError: if the envs' metadata have none.
        """
        fps = self.envs.metadata.get("render_fps")
        if not fps:
            raise AttributeError('step_dt: the envs\' metadata have no "render_fps"')
        return 1.0 / float(fps)

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every slot; return observations and an empty dict.

        Raises:
            EnvError, WorkerDied, StepTimeout: as the vector env.
        """
        self._obs = self._grouped(self.envs.reset(seed=self._seed).obs)
        self._seed = None
        self.episode_length_buf.zero_()
        return self._obs, {}

    def get_observations(self) -> Any:
        """Return the latest observations; the first call begins an episode in every slot."""
        if self._obs is None:
            self.reset()
        return self._obs

    def step(self, actions: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Step every slot.

        Args:
            actions: `(num_envs, num_actions)`, on any device.

        Returns:
            observations, float32 rewards and bool dones of shape `(num_envs,)`, and extras.

        Raises:
            ActionError, EnvError, WorkerDied, StepTimeout: as the vector env.
            PausedError: if slots are paused, or their envs have no further episode. Nothing was sent.
        """
        if self._obs is None:
            self.reset()
        check_none_paused(self.envs.envs, "RSL-RL")
        found = tuple(actions.shape)
        if found[:1] != (self.num_envs,) or prod(found) != prod(self._action_shape):
            raise ActionError(f"actions: expected shape ({self.num_envs}, {self.num_actions}), got {found}")
        actions = actions.detach().reshape(self._action_shape)
        if self._bounds:
            low, high = self._bounds
            actions = actions.to(low).clamp(low, high)
        obs, reward, terminated, truncated, info = self.envs.step(actions)
        dones, time_outs = terminated | truncated, truncated & ~terminated
        final_obs = self._grouped(info["final_obs"]) if "final_obs" in info else None
        self.episode_length_buf += 1
        over = (self.episode_length_buf >= self.max_episode_length) & ~dones
        if over.any():
            final_obs = self._grouped(obs) if final_obs is None else final_obs
            result: ResetResult = self.envs.reset(options={"reset_mask": over.cpu().numpy()})
            obs = result.obs
            dones, time_outs = dones | over, time_outs | over
        self.episode_length_buf.masked_fill_(dones, 0)
        self._obs = self._grouped(obs)
        extras = {"time_outs": time_outs}
        if final_obs is not None:
            extras["final_obs"] = final_obs
        return self._obs, reward, dones, extras

    def _grouped(self, obs: Any) -> Any:
        obs = obs if isinstance(obs, Mapping) else {"policy": obs}
        groups = {name: obs[name].to(torch.float32, copy=self._copies) for name in self._groups}
        return TensorDict(
            {name: groups[name].reshape(self.num_envs, *shape) for name, shape in self._groups.items()},
            batch_size=[self.num_envs],
            device=self.device,
        )

    def close(self) -> None:
        """Close the vector env."""
        self.envs.close()


def _groups_of(space: Any) -> dict[str, tuple[int, ...]]:
    """Return the groups of observations, with the shape of a row.

    Raises:
        ValueError: if they are not arrays, or a Dict of arrays.
    """
    groups = space.spaces if isinstance(space, spaces.Dict) else {"policy": space}
    for name, part in groups.items():
        if not isinstance(part, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise ValueError(f"single_observation_space: RSL-RL takes arrays, or a Dict of them, got {name!r}: {part}")
    return {name: tuple(np.shape(part.sample())) or (1,) for name, part in groups.items()}
