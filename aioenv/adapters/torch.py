"""Vector envs that take and give torch tensors, asynchronous and blocking ones; rollouts as tensors."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv

try:
    import torch
except ImportError as exc:
    raise ImportError("aioenv.adapters.torch needs PyTorch: pip install torch") from exc

from aioenv.adapters.torch_transfer import DirectTransfer, StreamTransfer, transfer_to
from aioenv.core.results import Ready, ResetResult, StepResult
from aioenv.errors import ActionError
from aioenv.rollout.recorder import Rollout, of_slot
from aioenv.rollout.rollout import is_pair_space, split_answer

__all__ = ["TensorRollout", "TorchVectorEnv", "as_tensors"]

_ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_NUMPY_FLOATS = (torch.float64, torch.float32, torch.float16)  # the others are float32 for numpy


class TorchVectorEnv:
    """A vector env that takes and gives tensors: `step` and the like of an asynchronous one are awaited as before::

        async with TorchVectorEnv(aioenv.make_vec("HalfCheetah-v5", 64), obs_dtype=torch.float32) as envs:
            obs, info = await envs.reset(seed=0)
            obs, reward, terminated, truncated, info = await envs.step(policy(obs))

        with TorchVectorEnv(aioenv.sync.make_vec("HalfCheetah-v5", 64)) as envs:
            obs, info = envs.reset(seed=0)

    Without a device, tensors are the memory of the vector env's arrays, which is not copied. So their lifetime is that
    of the arrays. By default they are yours: memory is used again once no tensor and no view of it is left. With
    `copy=False` they are valid until the second next step (of a native vector env in this process: the next one).
    Tensors that were converted (`obs_dtype`, `reward_dtype`), or are on a device, are always yours.

    On a CUDA (or XPU) device, batches go through two pinned buffers in turn, and uploads run on a stream of their own.
    `step` returns before the upload has ended: only work on the device waits for it. Actions come back through pinned
    memory; an asynchronous `step` lets other tasks run until they are there.

    Observations of Dict and Tuple spaces are dicts and tuples of tensors; those of Text, Graph, Sequence and custom
    spaces stay as they are. Infos are numpy's, but for "final_obs". Attributes and methods that are not listed here are
    those of the vector env, and numpy's: `num_envs`, spaces, `autoreset_mode`, `render`, `episodes` (see
    `numpy_policy`), `step_at`. They are set there, too. Errors are its own; `error.partial` has arrays of numpy.

    Args:
        envs: a vector env, started or not: `AsyncVectorEnv`, `NativeVectorEnv`, one of `aioenv.sync`, or any
            `gymnasium.vector.VectorEnv`.
        device: where tensors are put; None: on the CPU.
        obs_dtype: of observations that are floating-point numbers, converted in one pass; None: as they are.
            Integers, bools and uint8 images stay as they are.
        reward_dtype: of rewards; None: as they are, float64.

    Raises:
        TypeError: if `envs` is no vector env, or a dtype is not one of torch's floating-point types.
    """

    def __init__(
        self,
        envs: Any,
        device: Any = None,
        *,
        obs_dtype: Any = None,
        reward_dtype: Any = None,
    ) -> None:
        if not callable(getattr(envs, "step", None)) or not hasattr(envs, "num_envs"):
            raise TypeError(f"envs: expected a vector env, got {type(envs).__name__}")
        _check_dtype("obs_dtype", obs_dtype)
        _check_dtype("reward_dtype", reward_dtype)
        self.device = torch.device("cpu" if device is None else device)
        self.obs_dtype, self.reward_dtype = obs_dtype, reward_dtype
        self._is_async = inspect.iscoroutinefunction(envs.step)
        self._transfer = transfer_to(self.device)
        self._tensors: _Tensors | None = None  # needs the spaces, which an asynchronous one has from its start on
        self.envs = envs  # the last one: from here on, attributes may be those of the vector env

    # ------------------------------------------------------------ start and close

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self.envs.__await__()
        return self

    async def __aenter__(self) -> Self:
        await self.envs.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.envs.__aexit__(*exc_info)

    def __enter__(self) -> Self:
        if self._is_async or hasattr(self.envs, "__enter__"):
            self.envs.__enter__()  # an asynchronous one refuses it
        return self

    def __exit__(self, *exc_info: object) -> None:
        if hasattr(self.envs, "__exit__"):
            self.envs.__exit__(*exc_info)
        else:  # Gymnasium's vector envs and wrappers
            self.envs.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "envs" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.envs, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if own or "envs" not in self.__dict__ or not hasattr(self.envs, name):
            super().__setattr__(name, value)
        else:
            setattr(self.envs, name, value)

    def __repr__(self) -> str:
        return f"<TorchVectorEnv of {self.envs!r} on {self.device}>"

    # ------------------------------------------------------------ whole batches

    def reset(self, **kwargs: Any) -> Any:
        """Begin episodes; arguments and errors are those of the vector env's `reset`.

        `options["reset_mask"]` may also be a tensor, `terminated | truncated` of a step; one on a device is waited for.

        Returns:
            `ResetResult(obs, info)` of tensors; of an asynchronous vector env an awaitable of it.
        """
        options = kwargs.get("options")
        if isinstance(options, dict) and isinstance(mask := options.get("reset_mask"), torch.Tensor):
            kwargs["options"] = {**options, "reset_mask": mask.numpy(force=True)}
        result = self.envs.reset(**kwargs)
        return self._convert(result, self._reset_result) if self._is_async else self._reset_result(result)

    def step(self, actions: Any, **kwargs: Any) -> Any:
        """Step every slot.

        Args:
            actions: tensors, or what the vector env takes. They may be on any device, require grad, be of bfloat16 or
                not contiguous. Floating-point numbers are taken for integers if they are whole numbers.
            **kwargs: those of the vector env's `step`: `timeout_s`.

        Returns:
            `StepResult(obs, reward, terminated, truncated, info)`: tensors of shape `(num_envs, …)`, flags torch.bool.
            Where `info` has "final_obs" (SAME_STEP), it is a batch of tensors as `obs`. Rows without a last observation
            (`info["_final_obs"]` is False) are those of `obs`, so `info.get("final_obs", obs)` is what the actions
            led to. Of an asynchronous vector env this is an awaitable; its cancellation is that of the vector env's
            `step`, and has no effect if the actions were still on their way from the device.

        Raises:
            ActionError: if floating-point numbers for an integer space are no whole numbers, or actions don't fit the
                action space. Nothing was sent.
        """
        if self._is_async:
            return self._step_async(actions, kwargs)
        return self._step_result(self.envs.step(self._arrays(actions), **kwargs))

    async def _step_async(self, actions: Any, kwargs: dict[str, Any]) -> StepResult:
        tensors = self._tensors or self._ready_tensors
        arrays = await tensors.arrays_async(actions) if tensors.streams else tensors.arrays(actions)
        return StepResult(*tensors.step(*await self.envs.step(arrays, **kwargs)))

    async def _convert(self, result: Coroutine[Any, Any, Any], convert: Callable[[Any], Any]) -> Any:
        return convert(await result)

    @property
    def _ready_tensors(self) -> _Tensors:
        if self._tensors is None:
            self._tensors = _Tensors(self.envs, self._transfer, self.obs_dtype, self.reward_dtype)
        return self._tensors

    def _arrays(self, actions: Any) -> Any:
        return self._ready_tensors.arrays(actions)

    def _reset_result(self, result: ResetResult) -> ResetResult:
        obs, info = result
        return ResetResult(self._ready_tensors.obs(obs), info)

    def _step_result(self, result: StepResult) -> StepResult:
        return StepResult(*self._ready_tensors.step(*result))

    # ------------------------------------------------------------ some slots

    def send(self, actions: Any, slots: Iterable[int] | None = None) -> None:
        """Send actions to some slots, as `AsyncVectorEnv.send`; actions on a device are waited for."""
        self.envs.send(self._arrays(actions), slots)

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        """Take results as they arrive, as `AsyncVectorEnv.recv`.

        Returns:
            `Ready` of tensors, or an awaitable of it, as `step`; `slots` is numpy's, for `send` and to index tensors.
        """
        result = self.envs.recv(*args, **kwargs)
        return self._convert(result, self._ready) if self._is_async else self._ready(result)

    def ready(self, *args: Any, **kwargs: Any) -> AsyncIterator[Ready] | Iterator[Ready]:
        """Iterate over results as they arrive, as `AsyncVectorEnv.ready`; each is one of `recv`."""
        return self._ready_async(*args, **kwargs) if self._is_async else self._ready_blocking(*args, **kwargs)

    async def _ready_async(self, *args: Any, **kwargs: Any) -> AsyncIterator[Ready]:
        while self.envs.outstanding:
            yield self._ready(await self.envs.recv(*args, **kwargs))

    def _ready_blocking(self, *args: Any, **kwargs: Any) -> Iterator[Ready]:
        while self.envs.outstanding:
            yield self._ready(self.envs.recv(*args, **kwargs))

    def _ready(self, result: Ready) -> Ready:
        slots, *rest = result
        return Ready(slots, *self._ready_tensors.step(*rest))

    # ------------------------------------------------------------ policies

    def numpy_policy(self, policy: Callable[..., Any]) -> Callable[..., Any]:
        """Return a policy of numpy's arrays that calls a policy of tensors: for `episodes` and `aioenv.evaluate`.

        Args:
            policy: gets observations as tensors on the device, and returns actions, or actions and a dict of extras.
                Parameters `slots`, `episodes` and `started` get numpy's arrays, as without this. It may be a coroutine
                function, for an asynchronous vector env.
        """

        async def after(answer: Any) -> Any:
            return await self._ready_tensors.answer_async(await answer)

        @functools.wraps(policy, updated=())  # the signature tells which of the parameters it has
        def numpy_policy(obs: Any, **kwargs: Any) -> Any:
            tensors = self._ready_tensors
            answer = policy(tensors.obs(obs), **kwargs)
            if inspect.isawaitable(answer):
                return after(answer) if self._is_async else answer  # which a blocking one refuses
            if self._is_async and tensors.streams:
                return tensors.answer_async(answer)
            return tensors.answer(answer)

        return numpy_policy

    def rollout(self, policy: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Collect steps of every slot, as `AsyncVectorEnv.rollout`, with a policy of tensors.

        Args:
            policy: as for `numpy_policy`. Its extras come to the CPU with the actions; bfloat16 ones become float32.
            *args: those of the vector env's `rollout`: `steps`, `groups`.
            **kwargs: its others: `split`.

        Returns:
            A `TensorRollout` on the device; of an asynchronous vector env an awaitable of it.

        Raises:
            ActionError, EnvError, WorkerDied, StepTimeout and others: as `AsyncVectorEnv.rollout`; `error.partial` is a
                `Rollout`, of which `as_tensors` makes tensors.
        """
        result = self.envs.rollout(self.numpy_policy(policy), *args, **kwargs)
        convert = functools.partial(
            as_tensors, device=self.device, obs_dtype=self.obs_dtype, reward_dtype=self.reward_dtype
        )
        return self._convert(result, convert) if self._is_async else convert(result)


# ---------------------------------------------------------------- rollouts


@dataclasses.dataclass(frozen=True, repr=False)
class TensorRollout:
    """A `Rollout` of tensors: `[t, i]` is the t-th step of slot i.

    Attributes:
        obs: as in `Rollout`, as are all of them; tensors.
        actions: tensors.
        reward: a tensor.
        terminated: a tensor.
        truncated: a tensor.
        valid: a tensor.
        last_obs: tensors.
        infos: the info dicts, as they are in the `Rollout`.
        extras: the other tensors of the policy, by name.
    """

    obs: Any
    actions: Any
    reward: Any
    terminated: Any
    truncated: Any
    valid: Any
    last_obs: Any
    infos: Any
    extras: dict[str, Any]
    _make_next_obs: Callable[[], Any]

    @functools.cached_property
    def next_obs(self) -> Any:
        """The observations after each step (see `Rollout.next_obs`), made on first access."""
        return self._make_next_obs()

    def __getstate__(self) -> dict[str, Any]:
        next_obs = self.next_obs  # made now, since the function that makes it needs the `Rollout`
        return {**vars(self), "_make_next_obs": functools.partial(_same, next_obs)}

    def to(self, device: Any) -> TensorRollout:
        """Return the rollout on another device; tensors that are there already are not copied."""
        names = ("obs", "actions", "reward", "terminated", "truncated", "valid", "last_obs", "extras")

        def move(value: Any) -> Any:
            return _map(lambda tensor: tensor.to(device), value)

        moved = {name: move(getattr(self, name)) for name in names}
        return TensorRollout(**moved, infos=self.infos, _make_next_obs=lambda: move(self.next_obs))

    def __repr__(self) -> str:
        steps, num_envs = self.reward.shape
        return f"<TensorRollout steps={steps} num_envs={num_envs} device={self.reward.device}>"


def _same(value: Any) -> Any:
    return value


def as_tensors(
    rollout: Rollout, device: Any = None, *, obs_dtype: Any = None, reward_dtype: Any = None
) -> TensorRollout:
    """Return a rollout as tensors: also one of a rollout collector, or an error's `partial`.

    Args:
        rollout: the rollout. On the CPU tensors use its arrays' memory, which is not copied.
        device, obs_dtype, reward_dtype: as for `TorchVectorEnv`.

    Raises:
        TypeError: if a dtype is not one of torch's floating-point types.
    """
    _check_dtype("obs_dtype", obs_dtype)
    _check_dtype("reward_dtype", reward_dtype)

    def tensors(value: Any, dtype: Any = None) -> Any:
        return _map_arrays(lambda array: _float_as(_tensor(array), dtype).to(device), value)

    return TensorRollout(
        tensors(rollout.obs, obs_dtype),
        tensors(rollout.actions),
        tensors(rollout.reward, reward_dtype),
        tensors(rollout.terminated),
        tensors(rollout.truncated),
        tensors(rollout.valid),
        _map_arrays(lambda array: _float_as(_tensor(array), obs_dtype).to(device), rollout.last_obs, like=rollout.obs),
        rollout.infos,
        tensors(rollout.extras),
        lambda: tensors(rollout.next_obs, obs_dtype),
    )


def _map_arrays(function: Callable[[Any], Any], value: Any, like: Any = None) -> Any:
    """Apply a function to the arrays of numbers in dicts and tuples; `like` tells where `value` is one object.

    Batches of Text, Graph and Sequence spaces are tuples, too; in a rollout they are arrays of objects.
    """
    like = value if like is None else like
    if isinstance(like, Mapping):
        return {key: _map_arrays(function, value[key], part) for key, part in like.items()}
    if isinstance(like, tuple):
        return tuple(_map_arrays(function, item, part) for item, part in zip(value, like, strict=True))
    return function(value) if like.dtype.kind in "biufc" else value


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the tensors in dicts and tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(function, part) for key, part in value.items()}
    return tuple(_map(function, part) for part in value) if isinstance(value, tuple) else value


# ---------------------------------------------------------------- conversion


class _Tensors:
    """Converts batches of one vector env to tensors, and actions to arrays.

    Args:
        envs: has the spaces.
        transfer: copies to and from the device.
        obs_dtype, reward_dtype: as for `TorchVectorEnv`.
    """

    def __init__(self, envs: Any, transfer: DirectTransfer | StreamTransfer, obs_dtype: Any, reward_dtype: Any) -> None:
        self._transfer = transfer
        self.streams = isinstance(transfer, StreamTransfer)  # whether actions on the device are waited for
        self._stays = isinstance(transfer, DirectTransfer) and transfer.device.type == "cpu"
        self._obs_dtype, self._reward_dtype = obs_dtype, reward_dtype
        self._obs_space, self._action_space = envs.single_observation_space, envs.single_action_space
        self._actions_are_pairs = is_pair_space(self._action_space)
        # whether a result is arrays whose memory becomes that of tensors, and nothing else
        self._plain = self._stays and obs_dtype is reward_dtype is None and isinstance(self._obs_space, _ARRAY_SPACES)
        self._plain_dtype = None  # actions of this dtype are arrays already
        if isinstance(self._action_space, _ARRAY_SPACES):
            self._plain_dtype = _tensor(np.empty(0, self._action_space.dtype)).dtype

    # ------------------------------------------------------------ to tensors

    def obs(self, obs: Any, name: str = "obs") -> Any:
        """Return a batch of observations as tensors."""
        return self._obs(self._obs_space, obs, name)

    def _obs(self, space: Space[Any], obs: Any, name: str) -> Any:
        if isinstance(space, _ARRAY_SPACES):
            return self._upload(obs, self._obs_dtype, name)
        if isinstance(space, spaces.Dict):
            return {key: self._obs(part, obs[key], f"{name}.{key}") for key, part in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            parts = zip(space.spaces, obs, strict=True)
            return tuple(self._obs(part, item, f"{name}.{i}") for i, (part, item) in enumerate(parts))
        return obs

    def step(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]) -> Any:
        """Return the parts of a step's result as tensors."""
        if self._plain and "final_obs" not in info:  # while caches are cold, each further call counts
            return _tensor(obs), _tensor(reward), _tensor(terminated), _tensor(truncated), info
        last = info.get("final_obs")
        if last is not None:
            rows = np.flatnonzero(info.get("_final_obs", np.logical_or(terminated, truncated))).tolist()
            whole = _with_rows(self._obs_space, obs, rows, [of_slot(last, row) for row in rows])
            info = {**info, "final_obs": self.obs(whole, "final_obs")}
        return (
            self.obs(obs),
            self._upload(reward, self._reward_dtype, "reward"),
            self._upload(terminated, None, "terminated"),
            self._upload(truncated, None, "truncated"),
            info,
        )

    def _upload(self, array: Any, dtype: Any, name: str) -> Any:
        tensor = _tensor(array)
        if dtype is None or not tensor.is_floating_point():
            if self._stays:
                return tensor
            dtype = tensor.dtype
        return self._transfer.upload(name, tensor, dtype)

    # ------------------------------------------------------------ to arrays

    def arrays(self, actions: Any) -> Any:
        """Return actions with arrays in place of tensors."""
        if type(actions) is torch.Tensor and actions.dtype is self._plain_dtype:
            try:
                return actions.numpy()
            except (RuntimeError, TypeError):  # it is on a device, requires grad, or is no plain memory
                pass
        if isinstance(actions, torch.Tensor) and actions.device.type == "cpu":
            return self._array(self._action_space, actions, "")
        copies, event = self._download(actions)
        if event is not None:
            event.synchronize()
        return self._replaced(self._action_space, actions, copies, "")

    async def arrays_async(self, actions: Any) -> Any:
        """Do the same, and let other tasks run until actions have arrived from the device."""
        copies, event = self._download(actions)
        await _until(event)
        return self._replaced(self._action_space, actions, copies, "")

    def answer(self, answer: Any) -> Any:
        """Return a policy's answer, actions or a pair of actions and extras, with arrays in place of tensors."""
        copies, event = self._download(answer)
        if event is not None:
            event.synchronize()
        return self._answer(answer, copies)

    async def answer_async(self, answer: Any) -> Any:
        """Do the same, and let other tasks run until the tensors have arrived from the device."""
        copies, event = self._download(answer)
        await _until(event)
        return self._answer(answer, copies)

    def _answer(self, answer: Any, copies: dict[int, Any]) -> Any:
        actions, extras = split_answer(answer, self._actions_are_pairs)
        actions = self._replaced(self._action_space, actions, copies, "")
        if not extras:
            return actions
        return actions, {name: self._replaced(None, value, copies, "") for name, value in extras.items()}

    def _download(self, value: Any) -> tuple[dict[int, Any], Any]:
        """Begin to copy all tensors in a structure to the CPU; return the copies by identity, and their event."""
        found = list({id(tensor): tensor for tensor in _tensors_in(value)}.values())
        copies, event = self._transfer.download([tensor.detach() for tensor in found])
        return {id(tensor): copy for tensor, copy in zip(found, copies, strict=True)}, event

    def _replaced(self, space: Space[Any] | None, value: Any, copies: dict[int, Any], path: str) -> Any:
        """Return a structure with arrays in place of tensors; one that does not fit the space is refused by `step`."""
        if isinstance(value, torch.Tensor):
            return self._array(space, copies[id(value)], path)
        if isinstance(value, Mapping):
            parts = space.spaces if isinstance(space, spaces.Dict) else {}
            return {k: self._replaced(parts.get(k), item, copies, f"{path}[{k!r}]") for k, item in value.items()}
        if isinstance(value, (tuple, list)):
            each: Any = space.spaces if isinstance(space, spaces.Tuple) else ()
            known = dict(enumerate(each))
            items = [self._replaced(known.get(i), item, copies, f"{path}[{i}]") for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _array(self, space: Space[Any] | None, tensor: Any, path: str) -> Any:
        """Return a tensor as an array: of integers if the space has integers and it has whole numbers."""
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_floating_point():
            if tensor.dtype not in _NUMPY_FLOATS:
                tensor = tensor.float()
            if space is not None and space.dtype is not None and space.dtype.kind in "iu":
                tensor = _whole_numbers(tensor, space, path)
        return tensor.numpy(force=True)


async def _until(event: Any) -> None:
    """Wait for an event of a device, and let other tasks run meanwhile."""
    while event is not None and not event.query():  # noqa: ASYNC110  # devices wake no event loop
        await asyncio.sleep(0)


def _tensors_in(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)


def _whole_numbers(tensor: Any, space: Space[Any], path: str) -> Any:
    """Return floating-point numbers as int64.

    Raises:
        ActionError: if they have the shape of actions and are no whole numbers.
    """
    if tuple(tensor.shape[1:]) != space.shape:  # `step` says so
        return tensor
    tensor = tensor.detach()
    whole = tensor.to(torch.int64)
    wrong = (whole.to(tensor.dtype) != tensor).nonzero()
    if len(wrong):
        index = wrong[0].tolist()
        raise ActionError(
            f"actions{path}: expected {space.dtype}, got {tensor[tuple(index)].item()} of {tensor.dtype} in row "
            f"{index[0]}, which is no whole number: a policy of integer actions returns `logits.argmax(-1)`, or samples"
        )
    return whole


def _tensor(array: Any) -> Any:
    """Return an array as a tensor of the same memory; a copy if torch can't use the memory."""
    if type(array) is np.ndarray and array.flags.writeable:
        try:
            return torch.from_numpy(array)
        except ValueError:  # another byte order, or negative strides
            pass
    array = np.array(array)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def _float_as(tensor: Any, dtype: Any) -> Any:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _with_rows(space: Space[Any], batch: Any, rows: list[int], items: list[Any]) -> Any:
    """Return a copy of a batch with some rows replaced by these observations."""
    if isinstance(space, spaces.Dict):
        return {k: _with_rows(part, batch[k], rows, [item[k] for item in items]) for k, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        columns = [[item[index] for item in items] for index in range(len(space.spaces))]
        return tuple(
            _with_rows(part, column, rows, own) for part, column, own in zip(space.spaces, batch, columns, strict=True)
        )
    if isinstance(space, _ARRAY_SPACES):
        whole = np.array(batch)
        for row, item in zip(rows, items, strict=True):
            whole[row] = np.reshape(item, whole.shape[1:])
        return whole
    if isinstance(batch, tuple):
        by_row = dict(zip(rows, items, strict=True))
        return tuple(by_row.get(row, item) for row, item in enumerate(batch))
    return batch


def _check_dtype(name: str, dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{name}: expected a floating-point dtype of torch, torch.float32 say, got {dtype!r}")


def check_blocking(envs: Any, mode: str, library: str) -> None:
    """Check a vector env for a library that steps it by blocking calls.

    Raises:
        TypeError: if it is no `gymnasium.vector.VectorEnv`.
        ValueError: if it has another autoreset mode.
    """
    if not isinstance(envs, VectorEnv):
        hint = "; aioenv.sync.make_vec makes one" * inspect.iscoroutinefunction(getattr(envs, "step", None))
        raise TypeError(f"envs: {library} takes a blocking vector env, got {type(envs).__name__}{hint}")
    found = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
    if AutoresetMode(found).value != mode:
        raise ValueError(f'autoreset_mode: {library} takes autoreset_mode="{mode}", the vector env has {found}')


def reuses_arrays(envs: Any) -> bool:
    """Return whether a blocking vector env was made with `copy=False`, so that later steps write into its results."""
    owner = envs.unwrapped
    return getattr(getattr(owner, "_envs", owner), "copy", True) is False  # that of a vector env of `aioenv.sync`
