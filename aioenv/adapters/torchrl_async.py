"""Requests to some slots of a vector env, as those of TorchRL's `AsyncEnvPool`; see `aioenv.adapters.torchrl`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict

from aioenv.core.results import Ready
from aioenv.errors import SlotError

__all__ = ["AsyncRequests", "Kind"]

Kind = Literal["reset", "step", "step_and_maybe_reset"]
INDEX = "env_index"


class AsyncRequests:
    """Requests of one `AioEnv` to some of its slots, and their results as tensordicts.

    A slot is busy from `send` until `recv` has returned its result. A step of "step_and_maybe_reset" that ends an
    episode is followed by a reset, which is sent when its result arrives: in any `recv`.

    Args:
        envs: the `TorchVectorEnv`.
        read_actions: makes arrays of the actions of a tensordict.
        make_next: makes a tensordict of a `Ready` of tensors, with reward and flags.
        step_mdp: makes the root of the next step of one.
        seeds: the seeds of slots that were not reset since they were set; they are taken out of it.
    """

    def __init__(
        self,
        envs: Any,
        read_actions: Callable[[Any], Any],
        make_next: Callable[[Ready], Any],
        step_mdp: Callable[[Any], Any],
        seeds: dict[int, int],
    ) -> None:
        self._envs = envs
        self._read_actions, self._make_next, self._step_mdp = read_actions, make_next, step_mdp
        self._seeds = seeds
        self._busy: dict[int, tuple[Kind, bool]] = {}  # and whether its result is for `recv(env_index=slot)`
        self._in_flight: dict[int, tuple[tuple[Any, ...], int]] = {}  # tensordicts that were sent, and the slot's row
        self._resetting: set[int] = set()  # whose episode has ended in a step_and_maybe_reset
        self._arrived: dict[tuple[Kind, bool], list[tuple[list[int], tuple[Any, ...]]]] = {}

    @property
    def pending(self) -> bool:
        """Whether there are results that `recv` has not returned."""
        return bool(self._busy)

    # ------------------------------------------------------------ requests

    def send(self, kind: Kind, tensordict: Any, env_index: int | Sequence[int] | None) -> None:
        """Send a request to the slots of `env_index`, or to those that the tensordict names.

        Raises:
            RuntimeError: if one of them is busy. Nothing was sent.
            ValueError: if no slots are named, or the tensordict has another number of rows.
            ActionError, IndexError and others: as `AsyncVectorEnv.send`.
        """
        alone = isinstance(env_index, int)
        slots = self._slots(tensordict, env_index)
        if busy := sorted(self._busy.keys() & slots):
            raise RuntimeError(f"async_{kind}_send: envs {busy} are busy: receive their results first")
        if tensordict is None:
            tensordict = TensorDict(batch_size=[len(slots)], device=self._envs.device)
        elif alone:
            tensordict = tensordict.unsqueeze(0) if not tensordict.batch_dims else tensordict
        if tuple(tensordict.batch_size) != (len(slots),):
            found = tuple(tensordict.batch_size)
            raise ValueError(f"async_{kind}_send: expected a batch size of ({len(slots)},), got {found}")
        if kind == "reset":
            self._reset(slots)
        else:
            self._envs.send(self._read_actions(tensordict), slots)
        sent = (tensordict.clone(recurse=False),)  # whose keys are ours to change
        for row, slot in enumerate(slots):
            self._busy[slot] = kind, alone
            self._in_flight[slot] = sent, row

    def _slots(self, tensordict: Any, env_index: int | Sequence[int] | None) -> list[int]:
        named: Any = env_index
        if named is None:
            named = range(self._envs.num_envs) if tensordict is None else tensordict.get(INDEX, None)
            if named is None:
                raise ValueError('env_index: expected slots, or a tensordict with "env_index"')
            named = named.tolist() if hasattr(named, "tolist") else named
        return [int(slot) for slot in named] if isinstance(named, Iterable) else [int(named)]

    def _reset(self, slots: list[int]) -> None:
        seeds = [self._seeds.get(slot) for slot in slots]
        self._envs.send_reset(slots, seed=None if seeds == [None] * len(slots) else seeds)
        for slot in slots:
            self._seeds.pop(slot, None)

    # ------------------------------------------------------------ results

    def recv(
        self, kind: Kind, min_get: int, env_index: int | None, max_get: int | None, timeout: float | None
    ) -> tuple[Any, ...]:
        """Wait for results of one kind; return the tensordicts: two of "step_and_maybe_reset", else one.

        Raises:
            RuntimeError: if fewer than `min_get` slots have such requests, or `env_index` has none of its own.
            ValueError: if an argument is out of range.
            TimeoutError: if fewer have arrived in time. No result is lost.
            EnvError, WorkerDied: if slots failed, which are not busy then. The results of others are kept.
        """
        if env_index is not None:
            return self._recv_alone(kind, env_index)
        if min_get < 1 or (max_get is not None and max_get < min_get) or (timeout is not None and timeout < 0):
            raise ValueError(
                "expected 1 <= min_get <= max_get, and no negative timeout, "
                f"got min_get={min_get}, max_get={max_get}, timeout={timeout}"
            )
        requested = sum(request == (kind, False) for request in self._busy.values())
        if min_get > requested:
            raise RuntimeError(f"async_{kind}_recv: min_get is {min_get}, but {requested} envs have such requests")
        deadline = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while (arrived := self._number_arrived(kind)) < min_get:
            if left == 0.0 and deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"async_{kind}_recv: {arrived} of {min_get} results after {timeout} s")
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._take(min_get - arrived, left)
        limit = requested if max_get is None else min(max_get, requested)
        while (arrived := self._number_arrived(kind)) < limit:  # those that may come besides
            left = 0.0 if deadline is None else max(0.0, deadline - time.monotonic())
            self._take(limit - arrived, left)
            if left == 0.0:
                break
        return self._pick(kind, limit)

    def _recv_alone(self, kind: Kind, slot: int) -> tuple[Any, ...]:
        if self._busy.get(slot) != (kind, True):
            raise RuntimeError(f"async_{kind}_recv: env {slot} has no request that was sent with env_index={slot}")
        blocks = self._arrived.setdefault((kind, True), [])
        while True:
            for number, (slots, tensordicts) in enumerate(blocks):
                if slot in slots:
                    del blocks[number]
                    del self._busy[slot]
                    return tuple(one[0] for one in tensordicts)
            self._take(1, None)

    def _number_arrived(self, kind: Kind) -> int:
        return sum(len(slots) for slots, _ in self._arrived.get((kind, False), ()))

    def _pick(self, kind: Kind, limit: int) -> tuple[Any, ...]:
        """Return the first results that have arrived, in the order of the slots."""
        taken: list[int] = []
        parts, rest = [], []
        for slots, tensordicts in self._arrived[kind, False]:
            room = limit - len(taken)
            if room < len(slots):
                rest.append((slots[room:], tuple(one[room:] for one in tensordicts)))
                slots, tensordicts = slots[:room], tuple(one[:room] for one in tensordicts)
            if slots:
                taken += slots
                parts.append(tensordicts)
        whole = tuple(_cat(each) for each in zip(*parts, strict=True))
        self._arrived[kind, False] = rest
        for slot in taken:
            del self._busy[slot]
        if taken == sorted(taken):
            return whole
        order = sorted(range(len(taken)), key=taken.__getitem__)
        return tuple(one[order] for one in whole)

    def _take(self, min_slots: int, deadline_s: float | None) -> None:
        """Take results of the vector env."""
        try:
            ready = self._envs.recv(min_slots, deadline_s=deadline_s)
        except SlotError as error:
            failed = [slot for one in error.errors for slot in one.slots]
            for slot in failed:
                self._busy.pop(slot, None)
                self._in_flight.pop(slot, None)
                self._resetting.discard(slot)
            if error.partial is not None:
                self._file(self._envs._ready(error.partial), failed)
            raise
        self._file(ready, ())

    def _file(self, ready: Ready, failed: Iterable[int]) -> None:
        """Make tensordicts of results: one for each request, as the others may have had other keys."""
        groups: dict[tuple[Kind, bool, bool, int], list[int]] = {}
        slots = ready.slots.tolist()
        for row, slot in enumerate(slots):
            if slot not in failed:
                key = *self._busy[slot], slot in self._resetting, id(self._in_flight[slot][0])
                groups.setdefault(key, []).append(row)
        whole = self._make_next(ready)
        for (kind, alone, again, _), rows in groups.items():
            result = whole if len(rows) == len(slots) else whole[rows]
            own = [slots[row] for row in rows]
            sent = self._sent(own)
            if kind == "reset":
                self._arrive(kind, alone, own, (sent[0].update(result.exclude("reward")),))
            elif again:
                self._resetting.difference_update(own)
                self._arrive(kind, alone, own, (sent[0], sent[1].update(result.exclude("reward"))))
            elif kind == "step":
                self._arrive(kind, alone, own, (sent[0].set("next", result),))
            else:
                self._stepped(alone, own, sent[0].set("next", result))

    def _stepped(self, alone: bool, slots: list[int], step: Any) -> None:
        """Reset the slots whose episode is over; the others' step_and_maybe_reset has ended."""
        following = self._step_mdp(step)
        done = step["next", "done"].reshape(-1).tolist()
        ended = [row for row, over in enumerate(done) if over]
        if not ended:
            self._arrive("step_and_maybe_reset", alone, slots, (step, following))
            return
        going = [row for row, over in enumerate(done) if not over]
        if going:
            tensordicts = step[going], following[going]
            self._arrive("step_and_maybe_reset", alone, [slots[row] for row in going], tensordicts)
        own = [slots[row] for row in ended]
        self._reset(own)
        self._resetting.update(own)
        sent = step, following
        for row, slot in zip(ended, own, strict=True):
            self._in_flight[slot] = sent, row

    def _arrive(self, kind: Kind, alone: bool, slots: list[int], tensordicts: tuple[Any, ...]) -> None:
        for tensordict in tensordicts:
            tensordict[INDEX] = torch.tensor(slots, device=tensordict.device)
        blocks = self._arrived.setdefault((kind, alone), [])
        if alone:
            blocks += [([slot], tuple(one[row : row + 1] for one in tensordicts)) for row, slot in enumerate(slots)]
        else:
            blocks.append((slots, tensordicts))

    def _sent(self, slots: list[int]) -> tuple[Any, ...]:
        """Return what was sent to slots in one request, in tensordicts of their own."""
        found = [self._in_flight.pop(slot) for slot in slots]
        rows = [row for _, row in found]
        return tuple(one if rows == [*range(len(one))] else one[rows] for one in found[0][0])


def _cat(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
