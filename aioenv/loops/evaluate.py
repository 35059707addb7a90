"""`evaluate`: run n numbered episodes of a policy, each exactly once, and sum them up in a table.

`progress_bar` shows a progress bar, if tqdm is installed.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from aioenv.display import table
from aioenv.errors import EpisodesDone, SlotError, StepTimeout
from aioenv.rollout.numbered_episodes import Episode, episode_seeds

if TYPE_CHECKING:
    from aioenv.rollout.rollout import Policy
    from aioenv.vector_env import AsyncVectorEnv

__all__ = ["Bar", "Evaluation", "Progress", "counted", "evaluate", "no_bar", "progress_bar", "set_partial", "summary"]


class Bar(Protocol):
    """The methods of a tqdm bar that are used here."""

    def update(self, n: int) -> Any:
        """Add n to the count."""

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        """Set the text after the bar."""

    def close(self) -> None:
        """End the bar."""


def progress_bar(total: int, unit: str = "steps") -> Bar:
    """Make a tqdm bar; without tqdm, one that shows nothing.

    Args:
        total: the count at the end.
        unit: the noun after the count.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return no_bar()
    # no monitor thread, and no lock of all processes, which takes a process if they are not forked: both outlive it
    kind = type("Progress", (tqdm,), {"monitor_interval": 0, "_lock": RLock()})
    layout = "{percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt} {unit}, {elapsed}{postfix}"
    bar: Bar = kind(total=total, unit=unit, bar_format=layout, file=sys.stdout, mininterval=0.25)
    return bar


def no_bar() -> Bar:
    """Make a bar that shows nothing."""
    return _NoBar()


class _NoBar:
    def update(self, n: int) -> None:
        pass

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        pass

    def close(self) -> None:
        pass


Progress = bool | Callable[[Episode], object]

_COLUMNS = ("episode", "seed", "slot", "return", "length", "seconds", "end", "attempts")
_ROWS = 20  # the most that the table shows: of longer ones the first and the last rows


class Evaluation(NamedTuple):
    """The episodes of an evaluation, by number; it prints as a table.

    Attributes:
        episodes: one `Episode` each.
        seed: the seed from which theirs were drawn: `evaluate(…, seed=…)` draws them again. None if they were given.
    """

    episodes: tuple[Episode, ...]
    seed: int | None

    @property
    def returns(self) -> npt.NDArray[np.float64]:
        """The return of each episode, float64 `(n,)`."""
        return np.array([episode.total_reward for episode in self.episodes])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of steps of each episode, int64 `(n,)`."""
        return np.array([episode.length for episode in self.episodes], np.int64)

    def __repr__(self) -> str:
        if not self.episodes:
            return f"<Evaluation of no episodes, seed={self.seed}>"
        returns = self.returns
        return f"<Evaluation of {len(self.episodes)} episodes, return {returns.mean():.6g} +/- {returns.std():.6g}>"

    def __str__(self) -> str:
        rows = [list(_COLUMNS), *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        if len(self.episodes) > _ROWS:
            lines.insert(1 + _ROWS // 2, "...")
        if self.episodes:
            lines += [_spread("return", self.returns), _spread("length", self.lengths)]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        title = [self._title()]
        if self.episodes:
            title += [_spread("return", self.returns), _spread("length", self.lengths)]
        rows = self._rows()
        if len(self.episodes) > _ROWS:
            rows.insert(_ROWS // 2, ["…"] * len(_COLUMNS))
        return table("; ".join(title), rows, _COLUMNS)

    def _title(self) -> str:
        source = "" if self.seed is None else f", drawn from seed={self.seed}"
        return f"{len(self.episodes)} episodes{source}"

    def _rows(self) -> list[list[str]]:
        """Return the texts of the episodes that are shown, a row each."""
        shown = list(self.episodes)
        if len(shown) > _ROWS:
            shown = [*shown[: _ROWS // 2], *shown[-_ROWS // 2 :]]
        rows = []
        for e in shown:
            end = "terminated" if e.terminated else "truncated"
            seed = "" if e.seed is None else str(e.seed)
            numbers = [f"{e.total_reward:.6g}", str(e.length), f"{e.time_s:.3f}", end, str(e.attempts)]
            rows.append([str(e.number), seed, str(e.slot), *numbers])
        return rows


def _spread(name: str, values: npt.NDArray[Any]) -> str:
    return f"{name}: {values.mean():.6g} +/- {values.std():.6g}, from {values.min():.6g} to {values.max():.6g}"


async def evaluate(
    envs: AsyncVectorEnv,
    policy: Policy,
    episodes: int = 100,
    *,
    seed: int | Sequence[int | None] | None = None,
    progress: Progress = False,
) -> Evaluation:
    """Run episodes 0 … n-1, each exactly once and to its end, and sum them up (see `AsyncVectorEnv.episodes`).

    If this is cancelled, steps in flight are left as by a cancelled `step`.

    Args:
        envs: a vector env that has been started.
        policy: as for `AsyncVectorEnv.episodes`.
        episodes: the number of episodes.
        seed: the seed from which theirs are drawn; None for fresh entropy, which the result has; or a list of one each.
        progress: True shows a bar, if `tqdm` is installed; a function is called with each episode as it ends.

    Raises:
        TypeError: if `progress` is a coroutine function; and as `AsyncVectorEnv.episodes`.
        ValueError, PausedError, PendingCallError, ActionError: likewise.
        EnvError, WorkerDied, StepTimeout, EpisodesDone: likewise; `error.partial` is an `Evaluation` of the episodes
            that had ended.
    """
    is_blocking = isinstance(getattr(envs, "unwrapped", None), VectorEnv)  # also within a TorchVectorEnv
    if is_blocking or not hasattr(envs, "__aenter__"):
        hint = "; for blocking code there is aioenv.sync.evaluate" * is_blocking
        raise TypeError(
            f"evaluate: expected a vector env of the async API, as aioenv.make_vec gives it, got {envs!r}{hint}"
        )
    entropy, seeds = episode_seeds(episodes, seed)
    done: list[Episode] = []
    with counted(progress, len(seeds)) as count:
        try:
            async with contextlib.aclosing(envs.episodes(policy, len(seeds), seed=seeds)) as running:
                async for episode in running:
                    done.append(episode)
                    count(episode)
        except (EpisodesDone, SlotError, StepTimeout) as error:
            set_partial(error, summary(done, entropy))
            raise
    return summary(done, entropy)


def set_partial(error: EpisodesDone | SlotError | StepTimeout, evaluation: Evaluation) -> None:
    """Attach the episodes that had ended to an error and its parts."""
    for one in (error, *getattr(error, "errors", ())):
        one.partial = evaluation


def summary(done: list[Episode], entropy: int | None) -> Evaluation:
    """Return the episodes, ordered by number."""
    return Evaluation(tuple(sorted(done, key=lambda episode: episode.number)), entropy)


@contextlib.contextmanager
def counted(progress: Progress, total: int) -> Iterator[Callable[[Episode], object]]:
    """Return the function to call with each episode; a bar is closed at the end of the block."""
    if callable(progress):
        if inspect.iscoroutinefunction(progress):
            raise TypeError(f"progress: expected a bool or a plain function, got {progress!r}, which is never awaited")
        yield progress
    elif not progress:
        yield lambda episode: None
    else:
        bar = progress_bar(total, "episodes")
        ended, total_return = 0, 0.0

        def count(episode: Episode) -> None:
            nonlocal ended, total_return
            ended += 1
            total_return += episode.total_reward
            bar.set_postfix_str(f"return {total_return / ended:.4g}", refresh=False)
            bar.update(1)

        try:
            yield count
        finally:
            bar.close()
