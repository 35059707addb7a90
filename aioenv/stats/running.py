"""`SharedRunningStats`: running mean and variance of samples from envs in many processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from aioenv.stats import sharing
from aioenv.stats.moments import Floats, Moments, MomentsTable, combine, merge, moments_of
from aioenv.stats.sharing import SharedBlock, can_share

__all__ = ["SharedRunningStats", "SlotStats"]

_STATE = ("count", "weight", "mean", "m2")


class SharedRunningStats:
    """Mean, variance and count of samples, shared by all processes that get it or one of its slots in a factory.

    With slots, the default, each slot's samples wait in memory of its own until `merge` adds them to the whole, in the
    order of slots. Called once a step, it gives the same bits for any number of workers. With `live=True` samples count
    at once, in the order in which they arrive, which is not reproducible.

    Keep it (and don't close it) as long as workers may start. It pickles only to processes of this machine. A writer
    that dies, at any moment, blocks no other process and leaves the statistics as they were before its sample.

    Args:
        shape: of one sample.
        num_slots: how many slots there are; None only with `live`.
        live: whether samples count at once.
        decay: the factor of a sample's weight for each later sample; 1 for infinite memory.
        shared: whether to use shared memory; None: if the platform has it. Without it each worker has a copy, and
            `exchange` moves new samples to the parent and the result back.

    Attributes:
        shape, num_slots, live, decay, shared: as above; `num_slots` is 0 without slots.
        key: identifies the statistics in any process.

    Raises:
        ValueError: if an argument has an invalid value.
        RuntimeError: if shared memory is required and not available.
    """

    def __init__(
        self,
        shape: int | Sequence[int] = (),
        num_slots: int | None = None,
        *,
        live: bool = False,
        decay: float = 1.0,
        shared: bool | None = None,
    ) -> None:
        lengths = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        if any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1 for n in lengths):
            raise ValueError(f"shape: expected positive ints, got {shape!r}")
        if num_slots is None and not live:
            raise ValueError(
                "num_slots: expected how many envs there are, got None; samples are merged in their order, and only "
                "with live=True as they come"
            )
        if num_slots is not None:
            if isinstance(num_slots, bool) or not isinstance(num_slots, (int, np.integer)) or num_slots < 1:
                raise ValueError(f"num_slots: expected a positive int, got {num_slots!r}")
            num_slots = int(num_slots)
        if isinstance(decay, bool) or not isinstance(decay, Real) or not 0 < decay <= 1:
            raise ValueError(f"decay: expected a number above 0 and up to 1, got {decay!r}")
        if shared is None:
            shared = can_share()
        elif shared and not can_share():
            raise RuntimeError("shared=True: this platform has no memory without a name that workers can open")
        if live and not shared:
            raise RuntimeError("live=True takes shared memory: use slots, and `exchange` once a step")
        lengths = tuple(map(int, lengths))
        block = SharedBlock(MomentsTable.size(lengths, num_slots or 0), shared=shared)
        self._set_up(lengths, num_slots or 0, live, float(decay), block)
        if not shared:
            sharing.unshared_stats[self.key] = self

    def _set_up(self, shape: tuple[int, ...], num_slots: int, live: bool, decay: float, block: SharedBlock) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self.live = live
        self.decay = decay
        self.shared = block.shared
        self.key = block.key
        self._table = MomentsTable(shape, num_slots, block)

    def __repr__(self) -> str:
        kind = "live" if self.live else f"{self.num_slots} slots"
        return f"<{type(self).__name__} of shape {self.shape}, {kind}, {self.count} samples>"

    # ------------------------------------------------------------ reading

    @property
    def reproducible(self) -> bool:
        """Whether the same samples give the same bits, however many workers there are."""
        return not self.live

    @property
    def moments(self) -> Moments:
        """A consistent copy of count, weight, mean and sum of squares."""
        return self._table.whole.read()[0]

    @property
    def count(self) -> int:
        """The number of samples so far."""
        return int(self.moments.count)

    @property
    def mean(self) -> Floats:
        """The mean, float64 of the samples' shape; 0 without samples."""
        return self.moments.mean

    @property
    def var(self) -> Floats:
        """The variance, float64 of the samples' shape; 1 without samples."""
        return self.moments.var

    @property
    def std(self) -> Floats:
        """The standard deviation, float64 of the samples' shape; 1 without samples."""
        return self.moments.std

    def normalize(self, x: Any, *, epsilon: float = 1e-8, clip: float | None = None) -> Floats:
        """See `Moments.normalize`."""
        return self.moments.normalize(x, epsilon=epsilon, clip=clip)

    def denormalize(self, y: Any, *, epsilon: float = 1e-8) -> Floats:
        """See `Moments.denormalize`."""
        return self.moments.denormalize(y, epsilon=epsilon)

    # ------------------------------------------------------------ updating

    def at(self, slot: int) -> SlotStats:
        """Return the part that the env of a slot writes to, for its factory.

        Raises:
            ValueError: if there is no such slot. Live statistics take any.
        """
        if isinstance(slot, bool) or not isinstance(slot, (int, np.integer)):
            raise ValueError(f"slot: expected an int, got {slot!r}")
        if not self.live and not 0 <= slot < self.num_slots:
            raise ValueError(f"slot: expected 0 … {self.num_slots - 1}, got {slot}: num_slots is {self.num_slots}")
        return SlotStats(self, int(slot))

    def update(self, x: Any) -> None:
        """Add a sample, or a batch of them, to the whole at once; a no-op while frozen.

        Args:
            x: of the samples' shape, or `(n, *shape)`. In a batch all have the same weight.

        Raises:
            ValueError: if it has another shape, or it or its square is not finite.
            ClosedError: if this is closed.
        """
        self._add(x, None)

    def _add(self, x: Any, slot: int | None) -> None:
        table = self._table
        block = table.block
        if type(x) is not np.ndarray:
            x = np.asarray(x)
        one = x.shape == self.shape
        if not one and (x.ndim != len(self.shape) + 1 or x.shape[1:] != self.shape or not len(x)):
            raise ValueError(f"expected a sample of shape {self.shape} or a batch of them, got shape {x.shape}")
        block.acquire()
        try:
            if table.flag[0] or not sharing.counting:
                return
            if one:
                if slot is None:
                    table.whole.add(x, self.decay)
                else:
                    table.slots[slot].add(x, table.whole.epoch)
                return
            if not np.isfinite(x).all():
                raise ValueError("expected finite numbers, got others: they would stay in the statistics")
            cell, decay = (table.whole, self.decay) if slot is None else (table.slots[slot], 1.0)
            old, old_epoch = cell.copy()
            epoch = table.whole.epoch
            if old_epoch != epoch:
                old = self._nothing
            with np.errstate(over="ignore", invalid="ignore"):
                new = combine(old, moments_of(x), decay)
            if not np.isfinite(new.m2).all():
                raise ValueError("expected numbers whose squares are finite: they would stay in the statistics")
            cell.write(new, epoch)
        finally:
            block.release()

    @property
    def _nothing(self) -> Moments:
        return Moments(0.0, 0.0, np.zeros(self.shape), np.zeros(self.shape))

    def merge(self) -> int:
        """Add the samples that slots got since the last merge to the whole, in the order of slots; return their number.

        Call it between steps; then the result is the same for any number of workers. `AsyncVectorEnv` calls it whenever
        it returns results and nothing else is in flight.

        Raises:
            TimeoutError: if a worker that hangs, or is stopped, holds the lock; nothing has changed then.
            ClosedError: if this is closed.
        """
        with self._table.block.locked():
            return self._merge()

    def _merge(self) -> int:
        whole = self._table.whole
        old, epoch = whole.copy()
        pending = self._table.pending(epoch)
        if pending is None or self._table.flag[0]:
            return 0
        new = merge(*pending)
        whole.write(combine(old, new, self.decay), epoch + 1)
        return int(new.count)

    def put(self, moments: Mapping[int, Moments]) -> None:
        """Set the samples of slots since the last merge, which were taken elsewhere, for the next merge."""
        with self._table.block.locked():
            for slot, seen in moments.items():
                self._table.slots[slot].write(seen, self._table.whole.epoch)

    def forget(self, slots: Iterable[int]) -> None:
        """Drop the samples of slots since the last merge; slots that don't exist are ignored."""
        self.put({slot: self._nothing for slot in slots if slot < self.num_slots})

    def take(self) -> dict[int, Moments]:
        """Remove and return the samples of slots since the last merge."""
        taken = {slot: self.at(slot).take() for slot in range(self.num_slots)}
        return {slot: moments for slot, moments in taken.items() if moments.count}

    async def exchange(self, envs: Any, kind: str = "observation") -> int:
        """Merge; if memory is not shared, first fetch the samples of the workers, and then send them the result.

        Await it between steps, unless the vector env does so itself, as `AsyncVectorEnv` does. If this is cancelled,
        samples since the last merge may be lost.

        Args:
            envs: a vector env whose `call` is awaited, with `NormalizeObservation` or `NormalizeReward` in each slot.
            kind: "observation" or "reward", the wrapper that has these statistics.

        Returns:
            How many samples were new.
        """
        if self.shared:
            return self.merge()
        taken = await envs.call(f"take_{kind}_moments")
        for cell, moments in zip(self._table.slots, taken, strict=True):
            cell.write(moments, self._table.whole.epoch)
        number = self.merge()
        await envs.call(f"load_{kind}_stats", self.state_dict())
        return number

    # ------------------------------------------------------------ state

    @property
    def frozen(self) -> bool:
        """Whether samples are ignored, in every process."""
        return bool(self._table.flag[0])

    def freeze(self) -> None:
        """Merge, and then ignore samples in every process."""
        with self._table.block.locked():
            self._merge()
            self._table.flag[0] = 1

    def unfreeze(self) -> None:
        """Count samples again, in every process."""
        with self._table.block.locked():
            self._table.flag[0] = 0

    def frozen_copy(self) -> Moments:
        """Return a constant copy of the moments, which wrappers accept in place of statistics."""
        moments = self.moments
        for array in (moments.mean, moments.m2):
            array.flags.writeable = False
        return moments

    def unshared(self) -> SharedRunningStats:
        """Return a private copy in the same state: samples of one don't count in the other."""
        return _rebuild(self.shape, self.num_slots, self.live, self.decay, None, self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the merged state: `count`, `weight`, `mean`, `m2` and `frozen`, as copies. Also when closed."""
        with contextlib.nullcontext() if self.closed else self._table.block.locked():
            moments, _ = self._table.whole.copy()
            return {**{name: getattr(moments, name) for name in _STATE}, "frozen": self.frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`, in every process; samples that were not merged are dropped.

        Where memory is not shared, running workers get it with the next merge (see `exchange`).

        Raises:
            ValueError: if it is the state of samples of another shape, or no such state; nothing has changed then.
        """
        try:
            count, weight, mean, m2 = (np.asarray(state[name], np.float64) for name in _STATE)
            frozen = bool(state["frozen"])
        except KeyError as exc:
            raise ValueError(f"expected a state of state_dict(), got one without {exc}") from exc
        except (TypeError, ValueError, IndexError) as exc:
            raise ValueError(f"expected a state of state_dict(), got {state!r}") from exc
        if mean.shape != self.shape or m2.shape != self.shape or count.shape or weight.shape:
            raise ValueError(f"expected the state of samples of shape {self.shape}, got {mean.shape}")
        if not all(np.isfinite(part).all() for part in (count, weight, mean, m2)) or min(count, weight, m2.min()) < 0:
            raise ValueError("expected a state of finite numbers, with a count and squares from 0, got others")
        with self._table.block.locked():
            whole = self._table.whole
            whole.write(Moments(float(count), float(weight), mean, m2), whole.epoch + 1)
            self._table.flag[0] = frozen

    @property
    def closed(self) -> bool:
        """Whether `close` was called in this process."""
        return self._table.block.closed

    def close(self) -> None:
        """Release the memory in this process. The statistics can still be read here; workers keep theirs."""
        old = self._table
        if self.closed:
            return
        block = SharedBlock(MomentsTable.size(self.shape, self.num_slots), shared=False)
        self._table = MomentsTable(self.shape, self.num_slots, block)
        self._table.whole.write(old.whole.read()[0], 0)
        self._table.flag[0] = old.flag[0]
        block.close()
        old.block.close()

    def __enter__(self) -> SharedRunningStats:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        sharing.note_pickled(self)
        options = (self.shape, self.num_slots, self.live, self.decay)
        if self.shared:
            return _rebuild, (*options, self._table.block, None)
        return _rebuild, (*options, None, self.state_dict(), self.key)


def _rebuild(
    shape: tuple[int, ...],
    num_slots: int,
    live: bool,
    decay: float,
    block: SharedBlock | None,
    state: dict[str, Any] | None,
    key: bytes | None = None,
) -> SharedRunningStats:
    known: SharedRunningStats | None = None if key is None else sharing.unshared_stats.get(key)
    if known is not None:
        return known
    stats = SharedRunningStats.__new__(SharedRunningStats)
    if block is None:
        block = SharedBlock(MomentsTable.size(shape, num_slots), shared=False)
    stats._set_up(shape, num_slots, live, decay, block)
    if state is not None:
        stats.load_state_dict(state)
    if key is not None:
        stats.key = key
        sharing.unshared_stats[key] = stats
    return stats


class SlotStats:
    """The part of `SharedRunningStats` of one slot: the whole, and the slot's own samples since the last merge.

    `SharedRunningStats.at` makes it, for the factory of the slot.

    Attributes:
        stats: the whole.
        slot: the number of the slot.
    """

    def __init__(self, stats: SharedRunningStats, slot: int) -> None:
        self.stats = stats
        self.slot = slot

    def __repr__(self) -> str:
        return f"<slot {self.slot} of {self.stats!r}>"

    def update(self, x: Any) -> None:
        """Add a sample as `SharedRunningStats.update`; without `live`, other slots see it after the next merge."""
        self.stats._add(x, None if self.stats.live else self.slot)

    @property
    def moments(self) -> Moments:
        """The moments of the whole and of this slot's samples since the last merge, without those of other slots."""
        table = self.stats._table
        whole, epoch = table.whole.read()
        if self.stats.live:
            return whole
        own = table.slots[self.slot].since(epoch)
        return combine(whole, own, self.stats.decay) if own is not None else whole

    def take(self) -> Moments:
        """Remove and return this slot's samples since the last merge."""
        table = self.stats._table
        nothing = self.stats._nothing
        with table.block.locked():
            cell, epoch = table.slots[self.slot], table.whole.epoch
            own, own_epoch = cell.copy()
            cell.write(nothing, epoch)
            return own if own_epoch == epoch else nothing
