"""`spread` slots over workers; `plan_workers` assigns them episodes, scenes, displays, devices, ranks and seeds.

This is pure: nothing is started, and the same arguments give the same plan.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Assignment", "WorkerPlan", "construct_envs", "draw_seeds", "plan_workers", "spread"]

MODES = ("train", "eval")
VARIABLES = ("DISPLAY", "CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID")


def spread(num_envs: int, num_workers: int) -> list[tuple[int, int]]:
    """Split slots into ranges (start, stop) of equal length; the first ones may be longer by one."""
    base, extra = divmod(num_envs, num_workers)
    bounds = [0]
    for index in range(num_workers):
        bounds.append(bounds[-1] + base + (index < extra))
    return list(pairwise(bounds))


class Assignment(NamedTuple):
    """The assignment of one slot.

    Attributes:
        slot: its number.
        worker: the number of the worker that holds it.
        episodes: its share of the episodes, in the order to run them; None if the plan has no episodes.
        scenes: its scenes; None if the plan has no scenes.
        rank: 0 … num_envs-1 in evaluation; a number below 2**31 in training.
        seed: as `rank`. In training all ranks and seeds of a plan are distinct.
    """

    slot: int
    worker: int
    episodes: tuple[Any, ...] | None
    scenes: tuple[Any, ...] | None
    rank: int
    seed: int


class WorkerPlan(NamedTuple):
    """The assignments of all slots, made by `plan_workers`. It prints as a table.

    The vector env that it describes::

        AsyncVectorEnv(env_fns, num_workers=plan.num_workers, worker_env=plan.worker_env)

    Attributes:
        mode: "train" or "eval".
        slots: an `Assignment` for each slot.
        worker_env: the environment variables of each worker, to be set before it imports anything.
        entropy: the source of ranks and seeds of a training plan: `plan_workers(seed=plan.entropy)` draws the same
            again. None in evaluation, where nothing is drawn.
    """

    mode: str
    slots: tuple[Assignment, ...]
    worker_env: tuple[dict[str, str], ...]
    entropy: int | None

    @property
    def num_envs(self) -> int:
        """The number of slots: no more than episodes."""
        return len(self.slots)

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return len(self.worker_env)

    @property
    def seeds(self) -> list[int]:
        """One a slot, for `reset(seed=…)`."""
        return [slot.seed for slot in self.slots]

    def __str__(self) -> str:
        names = [name for name in VARIABLES if any(name in env for env in self.worker_env)]
        columns = ["slot", "worker", "rank", "seed"]
        columns += ["episodes"] if self.slots[0].episodes is not None else []
        columns += ["scenes"] if self.slots[0].scenes is not None else []
        rows = [[*columns, *names]]
        for slot in self.slots:
            cells = [str(slot.slot), str(slot.worker), str(slot.rank), str(slot.seed)]
            cells += [str(len(slot.episodes))] if slot.episodes is not None else []
            cells += [_shorten(slot.scenes)] if slot.scenes is not None else []
            rows.append([*cells, *(self.worker_env[slot.worker].get(name, "") for name in names)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        source = "" if self.entropy is None else f", drawn from seed={self.entropy}"
        title = f"{self.mode}: {_plural(self.num_envs, 'slot')} on {_plural(self.num_workers, 'worker')}{source}"
        return "\n".join([title, *lines])


def plan_workers(
    num_envs: int,
    *,
    mode: Literal["train", "eval"] = "train",
    episodes: Iterable[Any] | None = None,
    scene: Callable[[Any], Hashable] | None = None,
    scenes: Iterable[Any] | None = None,
    num_workers: int | None = None,
    displays: str | Iterable[str | int] | None = None,
    devices: int | str | Iterable[int | str] | None = None,
    egl_devices: int | str | Iterable[int | str] | None = None,
    seed: int | None = None,
) -> WorkerPlan:
    """Plan the assignments of slots and workers. Nothing is started, and no argument is changed.

    Args:
        num_envs: how many slots at most: with fewer episodes there are as many slots as episodes.
        mode: "train" draws ranks and seeds; "eval" counts them from 0.
        episodes: dealt to the slots round robin, in order: slot i gets `episodes[i::n]`. Each goes to one slot, once.
        scene: returns the scene of an episode. Then scenes are dealt to the slots instead, in the order of their first
            episodes. So as few envs as possible load each scene, and a slot runs all episodes of one scene before those
            of the next. With fewer scenes than slots, slots of the same scene share its episodes round robin.
        scenes: in place of episodes: slot i gets `scenes[i::n]`; with fewer scenes than slots, one scene each, in turn.
        num_workers: how many processes hold the slots, in equal shares; by default one for each slot.
        displays: X displays for the workers in turn: ":0,1", [0, 1], ["host:0.1"] …
        devices: CUDA devices for the workers in turn. They are ids or UUIDs, as a sequence or with commas as in
            CUDA_VISIBLE_DEVICES; an int n means 0 … n-1. A worker sees only its own device, and renders on it.
        egl_devices: devices to render on, if others than `devices`; if given alone, CUDA is left as it is.
        seed: the source of ranks and seeds in training; None for fresh entropy, which is an attribute of the plan.
            Those of slot i don't depend on the number of slots.

    Raises:
        ValueError: if an argument has an invalid value, or is an empty sequence of episodes, scenes, displays or
            devices.
    """
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(map(repr, MODES))}, got {mode!r}")
    num_envs = _positive("num_envs", num_envs)
    if episodes is not None and scenes is not None:
        raise ValueError("scenes: expected None beside episodes; say which scene an episode is of with scene=function")
    if scene is not None and episodes is None:
        raise ValueError("scene: expected episodes to go with it, got none")
    shards: list[tuple[Any, ...] | None] = [None] * num_envs
    views: list[tuple[Any, ...] | None] = [None] * num_envs
    if episodes is not None:
        items = _non_empty_list("episodes", episodes)
        dealt = _deal(items, num_envs) if scene is None else _deal_by_scene(items, num_envs, scene)
        shards = [*dealt]
        views = [None if scene is None else tuple(dict.fromkeys(map(scene, shard))) for shard in dealt]
    elif scenes is not None:
        items = _non_empty_list("scenes", scenes)
        views = [tuple(items[i::num_envs]) or (items[i % len(items)],) for i in range(num_envs)]
    n = len(shards)
    workers = min(_positive("num_workers", n if num_workers is None else num_workers), n)
    entropy, ranks, seeds = _draw(seed, n) if mode == "train" else (None, range(n), range(n))
    owners = [worker for worker, (start, stop) in enumerate(spread(n, workers)) for _ in range(start, stop)]
    slots = map(Assignment._make, zip(range(n), owners, shards, views, ranks, seeds, strict=True))
    return WorkerPlan(mode, tuple(slots), _worker_variables(workers, displays, devices, egl_devices), entropy)


def construct_envs(
    config: Any,
    env_class: Callable[..., Any],
    plan: WorkerPlan,
    *,
    configure: Callable[[Any, Assignment], Any] | None = None,
) -> list[Callable[[], Any]]:
    """Make a factory for each slot of a plan: `env_class(config=…)`, then `env.seed(rank)` if the env has that.

    The env of a slot with episodes also gets `finite_episodes = True`. When its `reset` raises StopIteration, since its
    episodes are done, the slot is paused, and `AsyncVectorEnv.exhausted` names it: no episode has to run twice.

    Args:
        config: any object; each slot gets a deep copy.
        env_class: makes an env from a config.
        plan: a plan of `plan_workers`.
        configure: called here with each slot's copy and its `Assignment`, to put episodes, scenes and so on where the
            env looks for them. It may change the copy, or return another config.

    Raises:
        TypeError: if the config can't be copied, or `plan` is no WorkerPlan.
        ValueError: if the plan has episodes or scenes, and there is no `configure` that gives them to the envs.
    """
    if not isinstance(plan, WorkerPlan):
        raise TypeError(f"plan: expected a WorkerPlan, as plan_workers gives it, got {plan!r}")
    has = [name for name in ("episodes", "scenes") if getattr(plan.slots[0], name) is not None]
    if has and configure is None:
        raise ValueError(
            f"configure: expected a function, since the plan has {has[0]} that envs must be told; got None"
        )
    factories: list[Callable[[], Any]] = []
    for slot in plan.slots:
        try:
            own = copy.deepcopy(config)
        except Exception as exc:
            got = f"{type(config).__name__}: {exc}"
            raise TypeError(f"config: expected one that copy.deepcopy can copy, got {got}") from exc
        if configure is not None:
            changed = configure(own, slot)
            own = own if changed is None else changed
        factories.append(partial(_construct, env_class, own, slot.rank, slot.episodes is not None))
    return factories


def _construct(env_class: Callable[..., Any], config: Any, rank: int, finite: bool) -> Any:
    env = env_class(config=copy.deepcopy(config))  # an env may change its config, and its factory be called again
    if callable(getattr(env, "seed", None)):
        env.seed(rank)
    if finite:
        with contextlib.suppress(AttributeError):
            env.finite_episodes = True  # see `AsyncVectorEnv.exhausted`
    return env


def _deal(items: Sequence[Any], n: int) -> list[tuple[Any, ...]]:
    return [tuple(items[i::n]) for i in range(min(n, len(items)))]


def _deal_by_scene(episodes: Sequence[Any], n: int, scene: Callable[[Any], Hashable]) -> list[tuple[Any, ...]]:
    groups: dict[Hashable, list[Any]] = {}
    for episode in episodes:
        groups.setdefault(scene(episode), []).append(episode)
    found = list(groups.values())
    if len(found) >= n:
        return [tuple(episode for group in found[i::n] for episode in group) for i in range(n)]
    # slot i gets episodes of scene i % S; a scene may have fewer episodes than slots
    shards = [_deal(group, len(range(index, n, len(found)))) for index, group in enumerate(found)]
    rounds = range(max(map(len, shards)))
    return [own[i] for i in rounds for own in shards if i < len(own)]


def _draw(seed: int | None, n: int) -> tuple[int, list[int], list[int]]:
    entropy, numbers = draw_seeds(seed, 2 * n)
    return entropy, numbers[::2], numbers[1::2]


def draw_seeds(seed: int | None, n: int) -> tuple[int, list[int]]:
    """Draw n distinct numbers below 2**31; the first numbers are the same for every n.

    Args:
        seed: their source; None for fresh entropy.
        n: how many.

    Returns:
        The entropy, to draw them again, and the numbers.

    Raises:
        ValueError: if the seed is no int from 0.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0):
        raise ValueError(f"seed: expected an int from 0, or None, got {seed!r}")
    source = np.random.SeedSequence(None if seed is None else int(seed))
    drawn: npt.NDArray[Any] = np.zeros(0, np.uint32)
    words = n
    while len(drawn) < n:
        drawn = source.generate_state(words) >> 1
        _, first = np.unique(drawn, return_index=True)
        drawn = drawn[np.sort(first)]
        words *= 2
    entropy = source.entropy
    assert isinstance(entropy, int)
    return entropy, drawn[:n].tolist()


def _worker_variables(workers: int, displays: Any, devices: Any, egl_devices: Any) -> tuple[dict[str, str], ...]:
    envs: list[dict[str, str]] = [{} for _ in range(workers)]
    cuda = _devices("devices", devices)
    columns = {
        "DISPLAY": _displays(displays),
        "CUDA_VISIBLE_DEVICES": cuda,
        # MuJoCo takes CUDA ids, not UUIDs; with one visible device it needs none
        "MUJOCO_EGL_DEVICE_ID": _devices("egl_devices", egl_devices, numbers=True)
        or [device if device.isdecimal() else "" for device in cuda],
    }
    for name, values in columns.items():
        for worker, env in enumerate(envs):
            if values and values[worker % len(values)]:
                env[name] = values[worker % len(values)]
    return tuple(envs)


def _displays(displays: Any) -> list[str]:
    if displays is None:
        return []
    items = displays.split(",") if isinstance(displays, str) else _non_empty_list("displays", displays)
    names = [str(item).strip() for item in items]
    names = [name if ":" in name else f":{name}" for name in names]
    for name in names:
        if not re.fullmatch(r"[^\s:]*:\d+(\.\d+)?", name) or any(isinstance(item, bool) for item in items):
            raise ValueError(
                f'displays: expected numbers or names such as ":0", with commas or as a list, got {displays!r}'
            )
    return names


def _devices(argument: str, devices: Any, *, numbers: bool = False) -> list[str]:
    if devices is None:
        return []
    if isinstance(devices, (int, np.integer)):
        return [str(index) for index in range(_positive(argument, devices))]
    items = devices.split(",") if isinstance(devices, str) else _non_empty_list(argument, devices)
    names = [str(item).strip() for item in items]
    pattern = r"\d+" if numbers else r"\d+|[A-Za-z]+-[\w./-]+"
    for name in names:
        if not re.fullmatch(pattern, name):
            kind = "ids" if numbers else "ids or UUIDs"
            raise ValueError(f"{argument}: expected how many, or {kind} with commas or as a list, got {devices!r}")
    return names


def _non_empty_list(argument: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{argument}: expected a sequence, got {values!r}")
    items = list(values)
    if not items:
        raise ValueError(f"{argument}: expected at least one, got none; leave it out if there are none to assign")
    return items


def _positive(argument: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{argument}: expected a positive int, got {value!r}")
    return int(value)


def _shorten(scenes: Iterable[Any]) -> str:
    text = ", ".join(map(str, scenes))
    return text if len(text) <= 40 else f"{text[:37]}..."


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")
