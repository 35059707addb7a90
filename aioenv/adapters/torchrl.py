"""A TorchRL `EnvBase` over a blocking vector env: batched, with partial and asynchronous resets and steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

try:
    import torch
    from tensordict import TensorDict
    from torchrl.data import Categorical, Composite, Unbounded
    from torchrl.data.utils import numpy_to_torch_dtype_dict
    from torchrl.envs import EnvBase as _EnvBase
    from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform as _as_spec
except ImportError as exc:
    raise ImportError("aioenv.adapters.torchrl needs TorchRL: pip install torchrl") from exc

from aioenv.adapters.torch import TorchVectorEnv, check_blocking, reuses_arrays
from aioenv.adapters.torchrl_async import AsyncRequests, Kind
from aioenv.core.results import Ready
from aioenv.errors import ActionError, SlotError, StepTimeout
from aioenv.rollout.subset import check_none_paused

__all__ = ["AioEnv"]

_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class AioEnv(_EnvBase):  # type: ignore[misc]  # TorchRL need not be installed where types are checked
    """A batched `EnvBase` of TorchRL: give it to `TransformedEnv`, `Collector`, `rollout`::

        env = AioEnv(aioenv.sync.make_vec("CartPole-v1", 8, autoreset_mode="Disabled"))
        data = env.rollout(100, break_when_any_done=False)

    TorchRL resets the slots whose episodes are over, by "_reset"; so `("next", "observation")` is always what the
    action led to. A masked step (`break_when_all_done=True`) steps the other slots alone. "next" of the slots that it
    does not step has what the tensordict has of them, and reward 0. After Ctrl-C or a `StepTimeout` the late results
    are dropped by the next call. A step of slots that are paused, or whose envs have no further episode, is a
    `PausedError`.

    The calls of TorchRL's `AsyncEnvPool` step and reset slots each in its own time::

        env.async_reset_send()
        root = env.async_reset_recv(min_get=env.num_envs)
        while training:
            env.async_step_and_maybe_reset_send(policy(root))
            data, root = env.async_step_and_maybe_reset_recv(min_get=4)

    They go to the slots of `env_index`, or to those that the tensordict has as "env_index", a batch size of as many.
    Results have "env_index" as int64, and are ordered by it. `recv` waits for `min_get` slots (None: the attribute) and
    returns all that have arrived, at most `max_get`; with `timeout` it waits so many seconds for more. With an int as
    `env_index`, requests have no batch size, and `recv` with that `env_index` waits for its result. Transforms around
    this have no part in it, as with `AsyncEnvPool`.

    Keys and specs are those of `GymEnv`: "observation" (or the keys of a Dict space), "action", "reward", "done",
    "terminated", "truncated". Images are "observation", too, not "pixels"; observations of Discrete and MultiDiscrete
    spaces are numbers, not one-hot. Rewards are float32 of shape `(num_envs, 1)`. Infos are not in the tensordicts.

    Args:
        envs: a vector env of `aioenv.sync` with `AutoresetMode.DISABLED` and `copy=True`, which `close` closes. Another
            `gymnasium.vector.VectorEnv` will do, a wrapper for instance, if its `reset` takes masks. But it has neither
            masked steps nor the asynchronous calls, which raise a TypeError.
        device: where tensors are put; None: on the CPU.
        obs_dtype: of observations that are floating-point numbers; None: as they are.
        categorical_action_encoding: whether actions of a Discrete space are numbers, instead of one-hot.

    Attributes:
        envs: the `TorchVectorEnv` over the vector env.
        num_envs: the number of slots.
        min_get: how many slots the asynchronous calls wait for, if they are not told; 1.

    Raises:
        TypeError: if `envs` is no vector env, or an asynchronous one.
        ValueError: if it has another autoreset mode, or `copy=False`; if an action is not an array, or an observation
            neither an array nor a Dict of arrays; or if TorchRL has no spec for one: a MultiDiscrete or MultiBinary of
            several axes, a Box of uint16.
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
        if reuses_arrays(envs):
            raise ValueError(
                "copy: TorchRL keeps the arrays of a step while the next ones are made, so it takes a vector env with "
                f"copy=True; got {envs.unwrapped}, which has copy=False"
            )
        single = envs.single_action_space
        if not isinstance(single, _ARRAYS):
            raise ValueError(f"single_action_space: expected an array, got {single}")
        _check_spec("single_action_space", single)
        device = torch.device("cpu" if device is None else device)
        self.num_envs = n = envs.num_envs
        self.min_get = 1
        super().__init__(device=device, batch_size=[n])
        self.envs = TorchVectorEnv(envs, device, obs_dtype=obs_dtype, reward_dtype=torch.float32)
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
        self._single_action = single, action
        self._seeds: dict[int, int] = {}  # of the next resets
        # what slots returned last as `terminated` and `truncated`; None: not known; empty: before the first reset
        self._last: tuple[Any, ...] | None = ()
        self._late = False  # whether a step of some envs may have left results
        self._requests = AsyncRequests(self.envs, self._numpy_actions, self._next_of, self.step_mdp, self._seeds)

    def _set_seed(self, seed: int | None) -> None:
        """Seed the next reset of each slot: slot i with `seed + i`."""
        if seed is not None and seed < 0:
            raise ValueError(f"seed: expected an int from 0, or None, got {seed}")
        self._seeds.clear()
        if seed is not None:
            self._seeds.update({slot: seed + slot for slot in range(self.num_envs)})

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        """Reset all slots, or those of "_reset"."""
        self._check_idle("reset")
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is not None and not bool(mask.any()):
            return self._unchanged(tensordict)
        self._drop_late_results()
        options = dict(kwargs.get("options") or {})
        if mask is None or bool(mask.all()) or self._last == ():
            seeds = [self._seeds.get(slot) for slot in range(self.num_envs)] if self._seeds else None
            flags = tuple(torch.zeros(2, *self.batch_size, dtype=torch.bool, device=self.device))
            with self._noting_flags(flags):
                obs = self.envs.reset(seed=kwargs.get("seed", seeds), options=options or None).obs
            self._seeds.clear()
        else:
            known = self._known_last("a reset of some envs")
            mask = mask.reshape(self.batch_size)
            options["reset_mask"] = mask.cpu().numpy()
            flags = tuple(flag & ~mask for flag in known)
            with self._noting_flags(flags):
                obs = self.envs.reset(seed=kwargs.get("seed"), options=options).obs
        self._last = tuple(flag.clone() for flag in flags)
        return TensorDict({**self._by_key(obs), **self._flags(*flags)}, batch_size=self.batch_size, device=self.device)

    def _step(self, tensordict: Any) -> Any:
        """Step all slots, or those of "_step"."""
        self._check_idle("step")
        actions = self._numpy_actions(tensordict)
        mask = tensordict.get("_step", None)
        self._drop_late_results()
        if mask is None or bool(mask.all()):
            check_none_paused(self.envs.envs, "TorchRL")
            with self._noting_flags():
                results = self.envs.step(actions)
            self._last = results.terminated.clone(), results.truncated.clone()  # the caller may write to the others
            return TensorDict(self._results(*results), batch_size=self.batch_size, device=self.device)
        self._check_steps_some('a step of some envs ("_step")')
        rows = np.flatnonzero(mask.reshape(self.batch_size).cpu().numpy())
        self._late = True
        with self._noting_flags():
            self.envs.send(actions[rows], rows)
            ready = self.envs.recv(min_slots=len(rows))
        self._late = False
        rows = torch.as_tensor(rows, device=self.device)
        for flag, new in zip(self._last or (), (ready.terminated, ready.truncated), strict=False):
            flag[rows] = new
        whole = self._unchanged(tensordict)
        whole["reward"] = torch.zeros(*self.batch_size, 1, device=self.device)
        whole[rows] = self._next_of(ready)
        return whole

    @contextlib.contextmanager
    def _noting_flags(self, flags: tuple[Any, ...] | None = None) -> Iterator[None]:
        """Note the flags of the other slots if a request raises for some, or that they are not known.

        Args:
            flags: those after a reset; None: those of a step, which the error has.
        """
        try:
            yield
        except SlotError as error:
            partial: Any = error.partial
            if partial is not None and flags is not None:
                self._last = flags
            elif partial is not None:
                rows = partial.slots if isinstance(partial, Ready) else slice(None)
                for flag, new in zip(self._last or (), (partial.terminated, partial.truncated), strict=False):
                    flag[rows] = torch.as_tensor(new, device=self.device)
            raise
        except (KeyboardInterrupt, StepTimeout):
            self._last = None
            raise

    def _unchanged(self, tensordict: Any) -> Any:
        """Return a copy of the observations and flags of a tensordict; those that it does not have are zeros."""
        same = self.full_observation_spec.zero().update(self.full_done_spec.zero())
        return same.update_(tensordict.select(*same.keys(True, True), strict=False))

    def _drop_late_results(self) -> None:
        """Wait for what an interrupted step of some envs has left, and drop it."""
        while self._late and self.envs.outstanding:
            self._last = None
            with contextlib.suppress(SlotError):  # its slots have to be reset, which the next step says
                self.envs.recv()
        self._late = False

    def _check_idle(self, what: str) -> None:
        if self._requests.pending:
            raise RuntimeError(f"{what}: there are results of asynchronous calls, which must be received first")

    def _check_steps_some(self, what: str) -> None:
        envs = self.envs.envs
        if not hasattr(type(envs), "send"):  # a wrapper may pass the name on, but not its work
            raise TypeError(
                f"{what}: TorchRL needs a vector env of `aioenv.sync` for it, which steps slots without the others; "
                f"got {type(envs).__name__}. In place of a wrapper of the whole batch take wrappers of each env "
                "(wrappers=), or TorchRL's transforms around the AioEnv"
            )

    def _known_last(self, what: str) -> tuple[Any, ...]:
        if self._last is None:
            raise RuntimeError(f"{what}: after asynchronous calls, or an interrupted step, reset all envs first")
        return self._last

    def _numpy_actions(self, tensordict: Any) -> Any:
        space, spec = self._single_action
        actions = tensordict.get("action", None)
        if actions is None:
            raise KeyError('"action": it is missing in the tensordict')
        if actions.shape[1:].numel() != spec.shape.numel():
            expected = (len(actions), *spec.shape)
            raise ActionError(f"actions: expected shape {expected}, got {tuple(actions.shape)}")
        arrays = spec.to_numpy(actions, safe=False).reshape(len(actions), *(space.shape or ()))
        return arrays if (start := _start(space)) is None else arrays + start

    def _results(self, obs: Any, reward: Any, terminated: Any, truncated: Any, _: Any) -> dict[str, Any]:
        return {**self._by_key(obs), **self._flags(terminated, truncated), "reward": reward.unsqueeze(-1)}

    def _next_of(self, ready: Ready) -> Any:
        slots, *results = ready
        return TensorDict(self._results(*results), batch_size=[len(slots)], device=self.device)

    # ------------------------------------------------------------ some slots, each in its own time

    def async_step_send(self, tensordict: Any, env_index: int | Sequence[int] | None = None) -> None:
        """Step some slots, without waiting.

        Raises:
            RuntimeError: if results of one of them were not received. Nothing was sent.
            ValueError: if no slots are named, or the batch size is not their number.
            ActionError, ResetNeededError, WorkerDied: as `AsyncVectorEnv.send`.
        """
        self._send("step", tensordict, env_index)

    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return steps: the tensordicts that were sent, with "next".

        Raises:
            RuntimeError: if fewer slots than `min_get` have such requests.
            ValueError: if `max_get` is less than `min_get`, or a number is out of range.
            TimeoutError: if fewer than `min_get` have arrived after `timeout` seconds. No result is lost.
            EnvError, WorkerDied: if slots failed, which must be reset. Results of others are not lost.
        """
        return self._recv("step", min_get, env_index, max_get, timeout)[0]

    def async_step_and_maybe_reset_send(self, tensordict: Any, env_index: int | Sequence[int] | None = None) -> None:
        """Step some slots, and reset those whose episodes are over, without waiting; otherwise as `async_step_send`."""
        self._send("step_and_maybe_reset", tensordict, env_index)

    def async_step_and_maybe_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> tuple[Any, Any]:
        """Return steps, and the roots of the next ones; otherwise as `async_step_recv`.

        A slot whose episode is over comes when it is reset.
        """
        step, root = self._recv("step_and_maybe_reset", min_get, env_index, max_get, timeout)
        return step, root

    def async_reset_send(self, tensordict: Any = None, env_index: int | Sequence[int] | None = None) -> None:
        """Reset some slots, without waiting; all, if neither argument is given; otherwise as `async_step_send`."""
        self._send("reset", tensordict, env_index)

    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return first observations; otherwise as `async_step_recv`."""
        return self._recv("reset", min_get, env_index, max_get, timeout)[0]

    def _send(self, kind: Kind, tensordict: Any, env_index: int | Sequence[int] | None) -> None:
        self._check_steps_some(f"async_{kind}_send")
        self._requests.send(kind, tensordict, env_index)
        self._last = None

    def _recv(
        self, kind: Kind, min_get: int | None, env_index: int | None, max_get: int | None, timeout: float | None
    ) -> tuple[Any, ...]:
        return self._requests.recv(kind, self.min_get if min_get is None else min_get, env_index, max_get, timeout)

    # ------------------------------------------------------------ keys

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


def _obs_spec(space: Space[Any], dtype: Any, device: Any, name: str = "single_observation_space") -> Any:
    """Return the spec of an observation, with floating-point numbers of a dtype.

    Raises:
        ValueError: if it is neither an array nor a Dict of such spaces, or TorchRL has no spec for one.
    """
    if isinstance(space, spaces.Dict):
        parts = {key: _obs_spec(part, dtype, device, f"{name}[{key!r}]") for key, part in space.spaces.items()}
        return Composite(parts, device=device)
    if not isinstance(space, _ARRAYS):
        raise ValueError(f"{name}: expected arrays, or a Dict of them, got {space}")
    given = dtype if dtype is not None and np.dtype(space.dtype).kind == "f" else None
    _check_spec(name, space)
    return _as_spec(space, dtype=given, device=device, categorical_action_encoding=True)


def _check_spec(name: str, space: Space[Any]) -> None:
    """Raise a ValueError if TorchRL has no spec for a space of arrays."""
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)) and len(space.shape) != 1:
        kind = type(space).__name__
        raise ValueError(f"{name}: TorchRL takes a {kind} of one axis, got {space}: flatten it in a wrapper of the env")
    if isinstance(space, spaces.Box) and space.dtype not in numpy_to_torch_dtype_dict:
        raise ValueError(f"{name}: TorchRL takes no {space.dtype}, got {space}: cast it in a wrapper of the env")


def _start(space: Space[Any]) -> Any:
    """Return the least numbers of a Discrete or MultiDiscrete space, which are 0 in a spec; None if they are."""
    start = np.asarray(space.start if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) else 0)
    return start if start.any() else None


def _as_specified(space: Space[Any], obs: Any) -> Any:
    """Return observations as their spec has them: numbers from 0 on, and one number of a Box on an axis of its own."""
    if isinstance(space, spaces.Dict):
        return {key: _as_specified(space[key], part) for key, part in obs.items()}
    if isinstance(space, spaces.Box) and not space.shape:
        return obs.unsqueeze(-1)
    start = _start(space)
    return obs if start is None else obs - torch.as_tensor(start, dtype=obs.dtype, device=obs.device)
