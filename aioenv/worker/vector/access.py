"""A `gymnasium.vector.VectorEnv` as one env of many slots: how all or some are reset and stepped. Wherever it lives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.errors import ActionError
from aioenv.spaces.layout import Layout
from aioenv.worker.vector.making import AnyVectorEnv
from aioenv.worker.vector.results import reset_result

__all__ = [
    "has_one_generator",
    "refuse_some",
    "reset_vector_env",
    "steps_some",
    "take_observations",
    "with_rows",
]


class _Options(dict[str, Any]):
    """Reset options that notice whether anybody looked for the mask: an env that does not has reset every slot."""

    looked = False

    def _look(self, key: Any) -> None:
        self.looked = self.looked or key == "reset_mask"

    def __getitem__(self, key: str) -> Any:
        self._look(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._look(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._look(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._look(key)
        return super().pop(key, *default)

    # whoever takes all of it has the mask too
    def __iter__(self) -> Iterator[str]:
        self.looked = True
        return super().__iter__()

    def keys(self) -> Any:
        self.looked = True
        return super().keys()

    def items(self) -> Any:
        self.looked = True
        return super().items()

    def copy(self) -> dict[str, Any]:
        self.looked = True
        return super().copy()


def reset_vector_env(
    env: AnyVectorEnv, seed: Any, mask: npt.NDArray[np.bool_] | None, options: dict[str, Any] | None
) -> tuple[Any, dict[str, Any]]:
    """Reset a vector env, or those of its slots that a mask names.

    Raises:
        ValueError: if a mask is given and the env did not look at it: all of its slots have been reset.
        TypeError, ValueError: if what it gives is no result of a reset.
    """
    if mask is None:
        return reset_result(env.reset(seed=seed, options=options))  # type: ignore[no-any-return]
    masked = _Options({**(options or {}), "reset_mask": mask})
    result: tuple[Any, dict[str, Any]] = reset_result(env.reset(seed=seed, options=masked))
    if not masked.looked:
        raise ValueError(
            f"{type(env.unwrapped).__name__} can't reset some of its slots: it did not look at options['reset_mask'] "
            'and has reset all of them. Call reset() for all, or use backend="workers"'
        )
    return result


def steps_some(env: AnyVectorEnv) -> bool:
    """Whether a vector env can step some of its slots: whether it has `step_some`.

        def step_some(self, actions, slots): ...

    It takes actions of all slots, and int64 numbers of those that are stepped, ascending, maybe none. It gives what
    `step` does; for the other slots, which are as they were, their last observations (zeros, if they had none). What
    else it says of those is not looked at.
    """
    return callable(getattr(env, "step_some", None))


def has_one_generator(env: AnyVectorEnv) -> bool:
    """Whether slots draw from a generator that they share: whether it says so, by an attribute `one_generator`.

    Then what a slot draws depends on who was reset before it, and so on which slots are stepped together.
    """
    return bool(getattr(env.unwrapped, "one_generator", False))


def refuse_some(name: str, env: Any) -> ValueError:
    """The error of a vector env that can't step some of its slots."""
    kind = env if isinstance(env, str) else type(env).__name__
    return ValueError(
        f"{name}: {kind} steps all of its slots at once; give it step_some(actions, slots), or use "
        'backend="workers", which steps slots alone'
    )


def with_rows(
    layout: Layout, num_envs: int, rows: Sequence[int], arrays: Sequence[Any], objects: Sequence[Sequence[Any]]
) -> Any:
    """A batch of actions of all slots, given those of some; the others are zero, or one of these."""
    whole = layout.zeros(num_envs)
    for mine, theirs in zip(whole, arrays, strict=True):
        mine[rows] = theirs
    columns = []
    for column in objects:
        by_row = dict(zip(rows, column, strict=True))
        columns.append([by_row.get(row, column[0]) for row in range(num_envs)])
    return layout.assemble(whole, columns)


def take_observations(layout: Layout, obs: Any, num_envs: int) -> tuple[Any, Any]:
    """The arrays and objects of a batch of observations (see `Layout.take_apart`).

    Raises:
        ValueError: if it does not fit the space.
    """
    try:
        return layout.take_apart(obs, num_envs)
    except ActionError as exc:
        raise ValueError(str(exc).replace("actions", "observations", 1)) from None
