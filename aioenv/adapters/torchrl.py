"""A TorchRL `EnvBase` over a blocking vector env: batched, with partial resets and partial steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

try:
    import torch
    from tensordict import TensorDict
    from torchrl.data import Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase as _EnvBase
    from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform as _as_spec
except ImportError as exc:
    raise ImportError("aioenv.adapters.torchrl needs TorchRL: pip install torchrl") from exc

from aioenv.adapters.torch import TorchVectorEnv, check_blocking

__all__ = ["AioEnv"]

_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class AioEnv(_EnvBase):  # type: ignore[misc]  # TorchRL need not be installed where types are checked
    """A batched `EnvBase` of TorchRL: give it to `TransformedEnv`, `Collector`, `rollout`::

        env = AioEnv(aioenv.sync.make_vec("CartPole-v1", 8, autoreset_mode="Disabled"))
        data = env.rollout(100, break_when_any_done=False)

    TorchRL resets the slots whose episodes are over, by "_reset"; so `("next", "observation")` is always what the
    action led to. A masked step (`break_when_all_done=True`) steps the other slots alone.

    Keys and specs are those of `GymEnv`: "observation" (or the keys of a Dict space), "action", "reward", "done",
    "terminated", "truncated". Rewards are float32 of shape `(num_envs, 1)`. Infos are not in the tensordicts.

    Args:
        envs: a vector env of `aioenv.sync` (or another `gymnasium.vector.VectorEnv` whose `reset` takes masks) with
            `AutoresetMode.DISABLED` and `copy=True`, which `close` closes.
        device: where tensors are put; None: on the CPU.
        obs_dtype: of observations that are floating-point numbers; None: as they are.
        categorical_action_encoding: whether actions of a Discrete space are numbers, instead of one-hot.

    Attributes:
        envs: the `TorchVectorEnv` over the vector env.

    Raises:
        TypeError: if `envs` is no vector env, or an asynchronous one.
        ValueError: if it has another autoreset mode; if an action is not an array, or an observation neither an array
            nor a Dict of arrays.
    """

    def __init__(
        self,
        envs: Any,
        device: Any = None,
        *,
        obs_dtype: Any = torch.float32,
        categorical_action_encoding: bool = False,
    ) -> None:
        check_blocking(envs, "Disabled", "TorchRL")
        single = envs.single_action_space
        if not isinstance(single, _ARRAYS):
            raise ValueError(f"single_action_space: expected an array, got {single}")
        device = torch.device("cpu" if device is None else device)
        n = envs.num_envs
        super().__init__(device=device, batch_size=[n])
        self.envs = TorchVectorEnv(envs, device, obs_dtype=obs_dtype, reward_dtype=torch.float32)
        self._actions = (n, *(single.shape or ())), _start(single)
        self._obs_space = envs.single_observation_space
        obs = _obs_spec(envs.single_observation_space, obs_dtype, device)
        if not isinstance(obs, Composite):
            obs = Composite(observation=obs, device=device)
        self.observation_spec = obs.expand(n)
        action = _as_spec(single, device=device, categorical_action_encoding=categorical_action_encoding)
        self.action_spec = action.expand(n, *action.shape)
        self.reward_spec = Unbounded(shape=(n, 1), device=device)
        flag = Categorical(2, shape=(n, 1), dtype=torch.bool, device=device)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=(n,), device=device
        )
        self._seeded: int | None = None
        self._last: dict[str, Any] = {}  # by key, what the slots returned last

    def _set_seed(self, seed: int | None) -> None:
        """Seed the next reset of all slots: slot i with `seed + i`."""
        self._seeded = seed

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        """Reset all slots, or those of "_reset"."""
        mask = None if tensordict is None else tensordict.get("_reset", None)
        options = dict(kwargs.get("options") or {})
        if mask is None or bool(mask.all()) or not self._last:
            seed, self._seeded = kwargs.get("seed", self._seeded), None
            obs = self.envs.reset(seed=seed, options=options or None).obs
            self._last = self._flags(torch.zeros(self.batch_size, dtype=torch.bool, device=self.device))
        else:
            mask = mask.reshape(self.batch_size)
            obs = self.envs.reset(options={**options, "reset_mask": mask.cpu().numpy()}).obs
            flags = ("done", "terminated", "truncated")
            self._last.update({name: self._last[name] & ~mask.unsqueeze(-1) for name in flags})
        self._last.update(self._by_key(obs))
        return TensorDict(_without(self._last, "reward"), batch_size=self.batch_size, device=self.device)

    def _step(self, tensordict: Any) -> Any:
        """Step all slots, or those of "_step"."""
        shape, start = self._actions
        actions = self.action_spec.to_numpy(tensordict.get("action"), safe=False).reshape(shape) + start
        mask = tensordict.get("_step", None)
        if mask is None or bool(mask.all()):
            obs, reward, terminated, truncated, _ = self.envs.step(actions)
            last = {**self._by_key(obs), **self._flags(terminated, truncated), "reward": reward.unsqueeze(-1)}
        else:
            rows = np.flatnonzero(mask.reshape(self.batch_size).cpu().numpy())
            self.envs.send(actions[rows], rows)
            _, obs, reward, terminated, truncated, _ = self.envs.recv(min_slots=len(rows))
            new = {**self._by_key(obs), **self._flags(terminated, truncated), "reward": reward.unsqueeze(-1)}
            old = {"reward": torch.zeros(*self.batch_size, 1, device=self.device), **_without(self._last, "reward")}
            last = {key: _put(old[key], rows, value) for key, value in new.items()}
        self._last = last
        return TensorDict(last, batch_size=self.batch_size, device=self.device)

    def _flags(self, terminated: Any, truncated: Any = None) -> dict[str, Any]:
        terminated = terminated.unsqueeze(-1)
        truncated = torch.zeros_like(terminated) if truncated is None else truncated.unsqueeze(-1)
        return {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}

    def _by_key(self, obs: Any) -> dict[str, Any]:
        obs = obs if isinstance(self._obs_space, spaces.Dict) else {"observation": obs}
        space = self._obs_space if isinstance(self._obs_space, spaces.Dict) else {"observation": self._obs_space}
        return {key: _as_specified(space[key], part) for key, part in obs.items()}

    def close(self, **kwargs: Any) -> None:
        """Close the vector env."""
        super().close(**kwargs)
        self.envs.close()


def _obs_spec(space: Space[Any], dtype: Any, device: Any) -> Any:
    """Return the spec of an observation, with floating-point numbers of a dtype.

    Raises:
        ValueError: if it is neither an array nor a Dict of such spaces.
    """
    if isinstance(space, spaces.Dict):
        return Composite({key: _obs_spec(part, dtype, device) for key, part in space.spaces.items()}, device=device)
    if not isinstance(space, _ARRAYS):
        raise ValueError(f"single_observation_space: expected arrays, or a Dict of them, got {space}")
    given = dtype if dtype is not None and np.dtype(space.dtype).kind == "f" else None
    return _as_spec(space, dtype=given, device=device, categorical_action_encoding=True)


def _start(space: Space[Any]) -> Any:
    """Return the least number of a Discrete space, which is 0 in a spec."""
    return int(space.start) if isinstance(space, spaces.Discrete) else 0


def _as_specified(space: Space[Any], obs: Any) -> Any:
    """Return observations as their spec has them: numbers from 0 on, and one number of a Box on an axis of its own."""
    if isinstance(space, spaces.Dict):
        return {key: _as_specified(space[key], part) for key, part in obs.items()}
    if isinstance(space, spaces.Box) and not space.shape:
        return obs.unsqueeze(-1)
    return obs - start if (start := _start(space)) else obs


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _put(old: Any, rows: Any, new: Any) -> Any:
    """Return a copy of a batch with other values in some rows."""
    if isinstance(old, Mapping):
        return {key: _put(part, rows, new[key]) for key, part in old.items()}
    whole = old.clone()
    whole[torch.as_tensor(rows, device=old.device)] = new
    return whole
