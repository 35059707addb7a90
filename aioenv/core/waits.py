"""The time of a run, split into waits for envs, for images, and for the policy."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from aioenv.display import table

if TYPE_CHECKING:
    from aioenv.tracing.timeline import Trace

__all__ = ["Clock", "Stats"]


class Stats(NamedTuple):
    """The waits of a run, from the first request to the last result; `print` shows them as a table.

    Time that the caller spent in an await of the engine is a wait for envs, or for images if it waited for `render`
    alone. The rest is the caller's: the policy, and all else between a result and the next request. Where both go on at
    once (`rollout`, `send` and `recv`) only the time that the caller waited is counted.

    Attributes:
        env_s, image_s, policy_s: in seconds.
        env_steps: steps of single envs that were asked for, automatic resets among them.
        num_envs: how many slots there are.
        spare_waits: how often a slot's next episode had to be waited for, since its spare env was still being reset
            (see `spare_envs=`).
        spare_wait_s: how long, in seconds; slots that wait at the same time are added up.
    """

    env_s: float
    image_s: float
    policy_s: float
    env_steps: int
    num_envs: int
    spare_waits: int = 0
    spare_wait_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """All of it, in seconds."""
        return self.env_s + self.image_s + self.policy_s

    @property
    def steps(self) -> float:
        """The number of steps that a slot has made, on average."""
        return self.env_steps / self.num_envs

    @property
    def env_steps_per_s(self) -> float:
        """Steps of single envs in a second; 0 if there were none."""
        return self.env_steps / self.wall_s if self.wall_s else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """The part of the time that went to "envs", "images" and "policy", from 0 to 1."""
        wall_s = self.wall_s or 1.0
        return {"envs": self.env_s / wall_s, "images": self.image_s / wall_s, "policy": self.policy_s / wall_s}

    @property
    def bound(self) -> str:
        """The bottleneck of the run: "env-bound", "image-bound" or "policy-bound"; "idle" if nothing was asked yet."""
        if not self.wall_s:
            return "idle"
        shares = {"env-bound": self.env_s, "image-bound": self.image_s, "policy-bound": self.policy_s}
        return max(shares, key=lambda name: shares[name])

    def __str__(self) -> str:
        seconds = (self.env_s, self.image_s, self.policy_s)
        lines = ["waited for     seconds   share"]
        lines += [f"{n:<10} {s:>11.3f} {p:>7.1%}" for (n, p), s in zip(self.shares.items(), seconds, strict=True)]
        lines.append(
            f"{self.steps:,.0f} steps of {self.num_envs} envs in {self.wall_s:.3f} s: "
            f"{self.env_steps_per_s:,.0f} env-steps/s, {self.bound}"
        )
        if self.spare_waits:
            lines.append(f"waits for spare envs: {self.spare_waits:,}, {self.spare_wait_s:.3f} s in all")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        seconds = (self.env_s, self.image_s, self.policy_s)
        rows = [
            (name, f"{s:.3f}", f"{share:.1%}") for (name, share), s in zip(self.shares.items(), seconds, strict=True)
        ]
        title = f"{self.env_steps:,} env-steps, {self.env_steps_per_s:,.0f} a second, {self.bound}"
        return table(title, rows, ["waited for", "seconds", "share"])


class Clock:
    """Measures how long a run waits for envs and for images; a step reads the time twice.

    Attributes:
        envs: waits for envs.
        images: waits for images alone.
    """

    def __init__(self) -> None:
        self._trace: Trace | None = None
        self.restart_count(0)

    def restart_count(self, steps: int, spare_waits: tuple[int, float] = (0, 0.0)) -> None:
        """Count from zero again, when so many steps had been made; waits in progress are left out.

        Args:
            steps: of single envs.
            spare_waits: how many waits for spare envs there had been, and how long they were, in seconds.
        """
        self._spare_waits_before = spare_waits
        self.envs = Wait()
        self.images = Wait(self.envs)
        self._before = steps
        self.trace(self._trace)

    def trace(self, trace: Trace | None) -> None:
        """Note each wait in a timeline from now on; None: no longer."""
        self._trace = trace
        for name, wait in (("envs", self.envs), ("images", self.images)):
            wait.on_end = trace.wait_recorder(name) if trace is not None else None

    def stats(self, num_envs: int, steps: int, spare_waits: tuple[int, float] = (0, 0.0)) -> Stats:
        """Return the times until now, when so many steps, and waits for spare envs, have been made."""
        now, steps = perf_counter(), steps - self._before
        spares = spare_waits[0] - self._spare_waits_before[0], spare_waits[1] - self._spare_waits_before[1]
        waits = [wait for wait in (self.envs, self.images) if wait.first]
        if not waits:
            return Stats(0.0, 0.0, 0.0, steps, num_envs, *spares)
        begin = min(wait.first for wait in waits)
        end = now if any(wait.open for wait in waits) else max(wait.last for wait in waits)
        env_s, image_s = self.envs.until(now), self.images.until(now)
        return Stats(env_s, image_s, max(0.0, end - begin - env_s - image_s), steps, num_envs, *spares)


class Wait:
    """The time of one kind of wait, as a context manager. Waits that overlap count once.

    Args:
        greater: a wait that counts instead, as long as both are open; None: there is none.
    """

    __slots__ = ("_before", "_greater", "first", "last", "on_end", "open", "seconds", "since")

    def __init__(self, greater: Wait | None = None) -> None:
        self._greater = greater
        self._before = 0.0  # the time of the greater one when this one began
        self.on_end: Callable[[float, float], None] | None = None  # called with the begin and end of a wait
        self.open = 0
        self.seconds = 0.0  # of waits that have ended
        self.first = 0.0  # when the first one began; 0: there was none
        self.since = 0.0  # when the one that is open began
        self.last = 0.0  # when the last one ended

    # a `with` would cost a step 150 ns more
    def begin(self) -> Wait:
        """Begin a wait, and return this object, whose `end` ends it."""
        if not self.open:
            self.since = perf_counter()
            if not self.first:
                self.first = self.since
            if self._greater is not None:
                self._before = self._greater.until(self.since)
        self.open += 1
        return self

    def end(self) -> None:
        """End a wait."""
        self.open -= 1
        if not self.open:
            self.last = now = perf_counter()
            self.seconds += now - self.since
            if self._greater is not None:
                self.seconds -= self._greater.until(now) - self._before
            if self.on_end is not None:
                self.on_end(self.since, now)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *exc: object) -> None:
        self.end()

    def until(self, now: float) -> float:
        """Return the time until now, in seconds."""
        if not self.open:
            return self.seconds
        seconds = self.seconds + now - self.since
        return seconds if self._greater is None else seconds - (self._greater.until(now) - self._before)
