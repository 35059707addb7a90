"""A Stable-Baselines3 `VecEnv` over worker processes of several envs each, in place of its `SubprocVecEnv`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium import Env, spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector.utils import concatenate, create_empty_array

try:
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecEnv as _VecEnv
except ImportError as exc:
    raise ImportError("aioenv.adapters.sb3 needs Stable-Baselines3: pip install stable-baselines3") from exc

from aioenv import sync
from aioenv.adapters.sb3_worker import (
    ASSIGN,
    CALL,
    HAS,
    IS_WRAPPED,
    READ,
    AttributeMissing,
    CountInnerEpisodes,
    EnvQuery,
    QueryRefused,
)
from aioenv.core.env_calls import in_order
from aioenv.core.results import Ready, ResetResult, StepResult
from aioenv.core.scheduler import RequestScheduler
from aioenv.errors import ActionError, EnvError, NoAsyncCallError, PendingCallError
from aioenv.make import takes_mode
from aioenv.native_vector_env import NativeVectorEnv
from aioenv.rollout.subset import check_none_paused, row_infos
from aioenv.spaces.infos import merge_infos_or_rows
from aioenv.spaces.seeding import normalize_slot_seed
from aioenv.sync.blocking import BlockingStep
from aioenv.sync.portal import DeferredCall
from aioenv.vector_env import AsyncVectorEnv
from aioenv.worker.making import is_native_task

__all__ = ["VecEnv", "make_vec"]

# arguments of Stable-Baselines3's `make_vec_env` and `SubprocVecEnv`, and their replacements here
_SB3_ARGUMENTS = {
    "env_id": "env, the first argument",
    "env_kwargs": "keywords of their own, as in make_vec(id, 8, max_episode_steps=100)",
    "monitor_dir": 'wrappers=[lambda env: Monitor(env, "a file")]; infos have "episode" without it',
    "monitor_kwargs": "wrappers=[lambda env: Monitor(env, …)]",
    "n_envs": "num_envs; a VecEnv has a slot for each of env_fns",
    "start_index": "seed=; slot i gets seed + i",
    "start_method": 'start="forkserver" or start="spawn"',
    "vec_env_cls": "always aioenv's, so leave it out",
    "vec_env_kwargs": "keywords of their own, num_workers= for instance",
    "wrapper_class": "wrappers=[Wrapper]",
    "wrapper_kwargs": "wrappers=[functools.partial(Wrapper, …)]",
}

_FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")


class VecEnv(_VecEnv):  # type: ignore[misc]  # Stable-Baselines3 need not be installed where types are checked
    """A `VecEnv` of Stable-Baselines3: give it to `PPO`, or as `vec_env_cls` to Stable-Baselines3's `make_vec_env`.

    Observations, rewards, dones and infos are those of `SubprocVecEnv`, with "terminal_observation" and
    "TimeLimit.truncated"; the arrays are yours. Errors are aioenv's: an exception of an env is an `EnvError` that names
    the slot, the end of a worker a `WorkerDied`. After Ctrl-C in a step the next result is that of the next step.

    Args:
        env_fns: a factory for each slot; or a vector env of `aioenv.sync` that has
            `autoreset_mode=AutoresetMode.SAME_STEP`, which `close` then closes, too.
        episode_stats: count episodes here, outside all wrappers, so that infos have "episode" and no env needs a
            `Monitor`; `env_is_wrapped` is True for `Monitor` then. An "episode" of the env's own (a `Monitor` inside)
            stays.
        **kwargs: for `aioenv.sync.VectorEnv`: `num_workers`, `timeout_s`, `restart` and so on.

    Raises:
        ValueError: if there is another autoreset mode.
        WorkerStartError, SpaceMismatchError, TypeError: as `aioenv.sync.VectorEnv`.
    """

    def __init__(
        self,
        env_fns: Iterable[Callable[[], Env[Any, Any]]] | sync.VectorEnv,
        *,
        episode_stats: bool = False,
        **kwargs: Any,
    ) -> None:
        _refuse_sb3_arguments(kwargs)
        if isinstance(env_fns, sync.VectorEnv):
            if kwargs:
                raise TypeError(f"{', '.join(kwargs)}: for the vector env that is given, when it is made")
            envs = env_fns
        else:
            kwargs = {"autoreset_mode": "SameStep", **kwargs}
            envs = sync.VectorEnv(env_fns, episode_stats=episode_stats, **kwargs)
        self._envs = envs
        self._counts_episodes, self._counts_inside = episode_stats, False
        self._pending: BlockingStep | DeferredCall | None = None
        try:
            if envs.autoreset_mode.value != "SameStep":
                hint = 'make it with "SameStep", or leave it out of the arguments here'
                if envs.backend == "native":
                    hint = 'if the vector env does not let you choose it, backend="workers" takes any'
                raise ValueError(
                    "autoreset_mode: Stable-Baselines3 takes AutoresetMode.SAME_STEP, the vector env has "
                    f"{envs.autoreset_mode}: {hint}"
                )
            super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
            self.render_mode = envs.render_mode  # theirs is that of the envs, without `render=`
            self.metadata = {key: value for key, value in envs.metadata.items() if key != "autoreset_mode"}
            backend = envs._envs._backend
            if isinstance(backend, RequestScheduler):  # infos are split again, and each env's must be as it was
                backend.merge_infos = merge_infos_or_rows
        except BaseException:
            envs.close()
            raise

    # ------------------------------------------------------------ steps

    def reset(self) -> Any:
        """Begin an episode in every slot, with the seeds and options that were set; return the observations.

        Raises:
            EnvError, WorkerDied, StepTimeout: as `AsyncVectorEnv.reset`.
        """
        self._drop_pending()
        options, seeds = self._options, list(self._seeds)
        result: ResetResult | Ready
        if all(each is options[0] or not (each or options[0]) for each in options):
            # a list of None would let a `seed_plan`, and the numbers of episodes, go on
            given = any(seed is not None for seed in seeds)
            result = self._envs.reset(seed=seeds if given else None, options=options[0] or None)
        else:
            result = self._envs._portal.call(_reset_each, self._envs._envs, seeds, options)
        self.reset_infos = row_infos(result.info, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        return result.obs

    def step_async(self, actions: Any) -> None:
        """Send actions; `step_wait` gives the results.

        Actions are checked and copied here. Workers step meanwhile; a native env in this process (`backend="native"`
        without `num_workers`) steps in `step_wait`. With `num_workers=0` short steps are made here.

        Raises:
            PendingCallError: if a step is under way already.
            PausedError: if slots are paused, or their envs have no further episode. Nothing was sent.
            ActionError, EnvError, WorkerDied: as `AsyncVectorEnv.step`, if nothing was sent.
        """
        self._refuse_while_pending("step_async")
        check_none_paused(self._envs, "Stable-Baselines3")
        self._pending = self._envs._begin_step(self._batched(actions))

    def step_wait(self) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any], list[dict[str, Any]]]:
        """Wait for the step; return observations, float64 rewards and bool dones of `(num_envs,)`, and a dict a slot.

        Where an episode has ended, the observation is the first of the next one, and the last one is
        `infos[slot]["terminal_observation"]`.

        Raises:
            NoAsyncCallError: if there was no `step_async`.
            EnvError, WorkerDied, StepTimeout: as `AsyncVectorEnv.step`.
        """
        call = self._pending
        if call is None:
            raise NoAsyncCallError("step_wait: there was no step_async", "step")
        self._pending = None
        try:
            call.wait()
        except BaseException:
            call.cancel()
            raise
        return self._translated(call.result())

    def step(self, actions: Any) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any], list[dict[str, Any]]]:
        """Step every slot, as `step_async` and `step_wait` do, but faster.

        Raises:
            PendingCallError, PausedError, ActionError, EnvError, WorkerDied, StepTimeout: as these do.
        """
        if (type(self).step_async, type(self).step_wait) != (VecEnv.step_async, VecEnv.step_wait):
            return super().step(actions)  # type: ignore[no-any-return]  # a subclass has methods of its own
        self._refuse_while_pending("step")
        check_none_paused(self._envs, "Stable-Baselines3")
        return self._translated(self._envs.step(self._batched(actions)))

    def _translated(
        self, result: StepResult
    ) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any], list[dict[str, Any]]]:
        """Return a result as Stable-Baselines3 expects it, and keep the infos of resets."""
        obs, reward, terminated, truncated, info = result
        cut = (truncated & ~terminated).tolist()
        infos = row_infos(info, self.num_envs)
        dones = terminated | truncated
        for slot in dones.nonzero()[0].tolist():
            infos[slot] = self._last(slot, infos[slot])
        for own, was_cut in zip(infos, cut, strict=True):
            own["TimeLimit.truncated"] = was_cut
        return obs, reward, dones, infos

    def _last(self, slot: int, info: dict[str, Any]) -> dict[str, Any]:
        """Return the info of an episode's last step; the rest becomes the info of the reset after it."""
        last = dict(info.get("final_info", {}))
        if "final_obs" in info:
            last["terminal_observation"] = info["final_obs"]
        first = {key: value for key, value in info.items() if key not in _FINAL}
        if "restarted" in first:
            last["restarted"] = first.pop("restarted")
        if "episode" in first and not self._counts_inside:  # counted by the vector env
            last.setdefault("episode", first.pop("episode"))
        self.reset_infos[slot] = first
        return last

    def _batched(self, actions: Any) -> Any:
        """Return actions as a batch: Stable-Baselines3 gives one a slot, even dicts and tuples."""
        if not isinstance(self.action_space, (spaces.Dict, spaces.Tuple)) or isinstance(actions, dict):
            return actions
        if len(actions) != self.num_envs:
            raise ActionError(f"actions: expected one for each of {self.num_envs} envs, got {len(actions)}")
        out: Any = create_empty_array(self.action_space, self.num_envs)
        return concatenate(self.action_space, actions, out)

    def _slots(self, indices: Any) -> list[int]:
        """Return the slots of Stable-Baselines3's indices, which are those of a list: -1 is the last."""
        return [range(self.num_envs)[index] for index in self._get_indices(indices)]

    def _query(self, indices: Any, what: str, query: EnvQuery, *args: Any) -> list[Any]:
        """Run a query on some envs; none give an empty list, as in Stable-Baselines3."""
        slots = self._slots(indices)
        if not slots:
            return []
        try:
            return list(self._envs._portal.call(_query_envs, self._envs._envs, slots, what, query, args))
        except PendingCallError:
            self._refuse_while_pending(what)
            raise
        except EnvError as error:
            causes = [one.__cause__ for one in error.errors]
            if all(isinstance(cause, AttributeMissing) for cause in causes):
                raise AttributeError(f"{what}: {causes[0]}") from error
            if all(isinstance(cause, QueryRefused) for cause in causes):
                raise TypeError(f"{what}: {causes[0]}") from error
            raise

    def _refuse_while_pending(self, what: str) -> None:
        """Raise a PendingCallError if there was a `step_async`: aioenv's own names methods that this class lacks."""
        if self._pending is not None:
            raise PendingCallError(f"{what}: a step is under way, call step_wait first", "step") from None

    def _drop_pending(self) -> None:
        """Leave a step that was not waited for to `recv`."""
        if self._pending is not None:
            call, self._pending = self._pending, None
            call.cancel()

    # ------------------------------------------------------------ envs

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._drop_pending()
        self._envs.close()

    def get_images(self) -> Sequence[np.ndarray[Any, Any] | None]:
        """Return an image a slot, if the render mode is "rgb_array" or there is a `render=`."""
        try:
            images = self._envs.render()
        except PendingCallError:
            self._refuse_while_pending("get_images")
            raise
        return [None] * self.num_envs if images is None else list(images)

    def has_attr(self, attr_name: str) -> bool:
        """Return whether every env has an attribute, without calling it."""
        return all(self._query(None, f"has_attr({attr_name!r})", HAS, attr_name))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Read an attribute of some envs, as Python's `getattr` does: nothing is called.

        Raises:
            AttributeError: if they have no attribute of this name, as Stable-Baselines3 expects.
            TypeError: if it is a method of the env or does not pickle, so that it can't leave the env's process.
            EnvError, WorkerDied, StepTimeout: as `AsyncVectorEnv.call`.
        """
        return self._query(indices, f"get_attr({attr_name!r})", READ, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of some envs, on their outermost wrapper as `SubprocVecEnv` does.

        Raises:
            ValueError: if it is for some slots with `backend="native"`, where one env has it for all.
            EnvError, WorkerDied, StepTimeout: as `AsyncVectorEnv.call`.
        """
        slots = set(self._slots(indices))
        if 0 < len(slots) < self.num_envs and isinstance(self._envs._envs, NativeVectorEnv):
            raise ValueError(
                f'set_attr({attr_name!r}): with backend="native" all {self.num_envs} slots are one env, which has one '
                'for all of them: leave out `indices`, or use backend="workers"'
            )
        self._query(indices, f"set_attr({attr_name!r})", ASSIGN, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a method of some envs.

        Raises:
            AttributeError: if they have no method of this name.
            TypeError: if the attribute is no method.
            EnvError, WorkerDied, StepTimeout: as `AsyncVectorEnv.call`.
        """
        return self._query(indices, f"env_method({method_name!r})", CALL, method_name, method_args, method_kwargs)

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """Return whether some envs have a wrapper of a class around them."""
        if self._counts_episodes and wrapper_class is Monitor:
            return [True] * len(self._slots(indices))
        return self._query(indices, "env_is_wrapped", IS_WRAPPED, wrapper_class.__module__, wrapper_class.__qualname__)

    def __repr__(self) -> str:
        return f"<aioenv.adapters.sb3.VecEnv over {self._envs!r}>"


async def _query_envs(
    envs: AsyncVectorEnv, slots: list[int], what: str, query: EnvQuery, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run a query on some slots; return the results in the order of the slots."""
    backend = envs._check_running()
    function = query.rows if isinstance(envs, NativeVectorEnv) else query.single
    numbers = backend.table.slot_numbers(slots)
    with envs._clock.envs:
        spares: Literal[False, "living"] = "living" if query is ASSIGN else False  # both envs of a slot get its value
        results = await backend.call_service(numbers, what, "apply", lambda _: (function, args), spares=spares)
        return in_order(numbers, results)


async def _reset_each(envs: AsyncVectorEnv, seeds: list[int | None], options: list[dict[str, Any]]) -> Ready:
    """Reset every slot, each with options of its own."""
    await envs._check_running().drain()
    for slot, own in enumerate(options):
        envs.send_reset([slot], seed=[seeds[slot]], options=own or None)
    return await envs.recv(len(options))


def _refuse_sb3_arguments(kwargs: dict[str, Any]) -> None:
    """Raise if arguments of Stable-Baselines3's were given, which would otherwise be passed to the envs."""
    given = [(name, ours) for name, ours in _SB3_ARGUMENTS.items() if name in kwargs]
    if given:
        raise TypeError("\n".join(f"{name}: Stable-Baselines3 has that; here it is {ours}" for name, ours in given))


def make_vec(
    env: str | EnvSpec | Callable[..., Env[Any, Any]] | None = None,  # None: given under another name
    num_envs: int = 1,
    *,
    seed: int | None = None,
    **kwargs: Any,
) -> VecEnv:
    """Make copies of one env for Stable-Baselines3; arguments as for `aioenv.make_vec`.

    Infos have "episode" at the end of an episode, so that envs need no `Monitor`, and workers neither Stable-Baselines3
    nor torch. With `wrappers=` it counts the env's own rewards and steps, beneath these, as with `make_vec_env`.

    Args:
        env: an id, an `EnvSpec`, or a function that makes an env.
        num_envs: the number of copies.
        seed: the seed of the first reset, where slot i gets `seed + i`, and of `action_space`.
        **kwargs: `wrappers=`, `num_workers=`, keyword arguments of the env, and so on.

    Raises:
        TypeError: if an argument is one that only Stable-Baselines3's `make_vec_env` has.
        ValueError: as `VecEnv`: if a vector env of your own has another autoreset mode, and takes none.
    """
    _refuse_sb3_arguments(kwargs)
    if env is None:
        raise TypeError("env: expected an id, an EnvSpec or a function that makes an env; there is none")
    seed = normalize_slot_seed(seed)
    native = kwargs.get("backend") == "native"
    # a vector env of the user's may have a mode of its own, which `VecEnv` checks
    if not native or is_native_task(env) or takes_mode(env):
        kwargs = {"autoreset_mode": "SameStep", **kwargs}
    wrappers = kwargs.get("wrappers", ())
    if isinstance(wrappers, Iterable):
        kwargs["wrappers"] = wrappers = tuple(wrappers)
    counts = bool(kwargs.get("episode_stats", True))
    inside = counts and not native and isinstance(wrappers, tuple) and bool(wrappers) and all(map(callable, wrappers))
    if inside:
        kwargs["wrappers"] = (CountInnerEpisodes, *wrappers)
    if not inside or "stats_prefix" in kwargs:
        kwargs.setdefault("episode_stats", True)
    envs = VecEnv(sync.make_vec(env, num_envs, **kwargs), episode_stats=counts)
    envs._counts_inside = inside
    if seed is not None:
        try:
            envs.seed(seed)
            envs.action_space.seed(seed)
        except BaseException:
            envs.close()
            raise
    return envs
