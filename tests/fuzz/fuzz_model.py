"""What a vector env of `Chain`s must do, in the plainest way: each slot an env here, each request done when it is sent.

Where the contract leaves it open what has happened (was a cancelled step sent?), the driver keeps one `World` for
each possibility, and drops those that what follows contradicts.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv.errors import EnvError, PendingCallError, ResetNeededError, WorkerDied
from tests.fuzz.fuzz_envs import RAISE, Boom, Chain, Exit, mix
from tests.kits.compare import assert_same


class Outcome:
    """What a request does to one slot.

    Attributes:
        error: None, "env" or "died"; a result otherwise.
        maybe: whether it may be an error "died" as well.
        wild: a process was started again: it begins at a key that only the result tells.
        abandoned: it is not awaited: the next step drops it, unless `recv` takes it.
        shown: it is the last observation, of a slot that a reset leaves alone.
        overtaken: the slot was put into another state since.
        lost: its worker may have ended since.
        bumped: by how much calls have changed the digest since, which the result does not tell yet.
    """

    def __init__(self, stepped: bool) -> None:
        self.stepped = stepped
        self.obs: Any = None
        self.reward, self.terminated, self.truncated = 0.0, False, False
        self.infos: list[dict[str, Any]] = []
        self.error: str | None = None
        self.maybe = self.wild = self.abandoned = self.overtaken = self.lost = self.shown = False
        self.seed: int | None = None
        self.bumped = 0


class Slot:
    """One slot: its env, and what is known of it."""

    def __init__(self) -> None:
        self.env = Chain()
        self.env.model = True
        self.due = self.over = self.failed = self.paused = False
        self.dying = False  # its worker was killed: the parent may not know it yet
        self.wild = False  # its env is another one, of which nothing is known yet
        self.last: Any = None  # its last observation, where that is known
        self.pending: Outcome | None = None

    def clone(self) -> Slot:
        other = copy.copy(self)
        other.env = self.env.clone()
        other.pending = copy.copy(self.pending)
        return other


class World:
    """One course that things may have taken.

    Args:
        workers: the slots of each.
        mode: the autoreset mode.
        vector: whether the slots of a worker are one vector env, which fails as one.
        restart: None, "lose" or "resume".
    """

    def __init__(self, workers: list[tuple[int, ...]], mode: AutoresetMode, *, vector: bool, restart: str | None):
        self.workers, self.mode, self.vector, self.restart = workers, mode, vector, restart
        self.slots = [Slot() for mine in workers for _ in mine]
        self.snapshots: list[list[tuple[Chain, bool, bool]]] = []
        self.n = len(self.slots)

    def clone(self) -> World:
        other = copy.copy(self)
        other.slots = [slot.clone() for slot in self.slots]
        other.snapshots = list(self.snapshots)
        return other

    def signature(self) -> str:
        return repr([({**vars(s.env)}, s.due, s.over, s.failed, s.dying, s.wild, s.paused,
                      s.pending and {**vars(s.pending)}) for s in self.slots])  # fmt: skip

    # ------------------------------------------------------------ questions

    @property
    def live(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if not slot.paused]

    @property
    def pending(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if slot.pending is not None]

    def worker_of(self, slot: int) -> tuple[int, ...]:
        return next(mine for mine in self.workers if slot in mine)

    def refusals(self, slots: list[int], *, reset: bool) -> set[type[BaseException] | None]:
        """How a request to these slots is refused; None: not at all."""
        some = [self.slots[i] for i in slots]
        dead = any(s.dying for s in some)
        if any(s.pending is not None for s in some):
            return {PendingCallError, *([WorkerDied] if dead else [])}
        otherwise: type[BaseException] | None = None
        if not reset and any(s.failed for s in some):
            otherwise = EnvError
        elif not reset and any(s.over for s in some):
            otherwise = ResetNeededError
        allowed = {otherwise}
        if not reset and any(s.wild for s in some):  # dropped results of them were not seen
            allowed |= {None, EnvError, ResetNeededError}
        return {WorkerDied, *allowed} if dead else allowed

    # ------------------------------------------------------------ requests

    def begin(self, slots: list[int], actions: Any = None, seeds: Any = None, options: Any = None) -> None:
        """Step or reset these slots; outcomes are pending then. Actions and seeds by slot."""
        for mine in self.workers:
            rows = [i for i in sorted(slots) if i in mine]
            if not rows:
                continue
            stepped = actions is not None
            fails = stepped and self.vector and any(actions[i] == RAISE and not self.slots[i].due for i in rows)
            fails |= not stepped and self.vector and bool(options and options.get("raise"))
            exited = False
            for i in rows:
                slot = self.slots[i]
                outcome = slot.pending = Outcome(stepped)
                if slot.dying:
                    outcome.error = "died"
                elif slot.wild:
                    outcome.wild = True
                    if not stepped:
                        outcome.seed = seeds[i]
                elif fails:
                    outcome.error = "env"
                else:
                    try:
                        if stepped:
                            self._step(slot, outcome, actions[i])
                        else:
                            self._reset(slot, outcome, seed=seeds[i], options=options)
                    except Boom:
                        outcome.error = "env"
                        outcome.reward, outcome.terminated, outcome.truncated = 0.0, False, False
                        outcome.infos, outcome.obs = [], None
                    except Exit:
                        exited = True
                slot.last = outcome.obs
                if not stepped:
                    slot.failed = slot.over = False
            if exited:
                self.lose(mine, rows)

    def _step(self, slot: Slot, outcome: Outcome, action: int) -> None:
        env = slot.env
        if slot.due:
            self._reset(slot, outcome)
            return
        obs, reward, ends, cuts, info = env.step(action)
        if ends or cuts:
            if self.mode is AutoresetMode.SAME_STEP:
                outcome.infos.append({"final_obs": obs, "final_info": info})
                obs, info = env.reset()
            slot.due = self.mode is AutoresetMode.NEXT_STEP
        outcome.obs, outcome.reward, outcome.terminated, outcome.truncated = obs, reward, ends, cuts
        outcome.infos.append(info)

    def _reset(self, slot: Slot, outcome: Outcome, **kwargs: Any) -> None:
        outcome.obs, info = slot.env.reset(**kwargs)
        outcome.infos.append(info)
        slot.due = False

    def lose(self, mine: tuple[int, ...], just_sent: list[int] | None = None) -> None:
        """A worker has ended; what was sent to it just now is lost, what was before that may be done."""
        for i in mine:
            slot = self.slots[i]
            outcome = slot.pending
            slot.last = None
            if self.restart is None:
                slot.dying = True
                if outcome is not None:
                    if just_sent is None:
                        outcome.maybe = True
                    elif i in just_sent:
                        outcome.error = "died"
            elif self.restart == "lose":
                slot.wild = True
                if outcome is not None:
                    outcome.wild |= just_sent is None or i in just_sent
                    outcome.lost |= just_sent is None or i not in just_sent

    # ------------------------------------------------------------ results

    def take(self, slots: list[int]) -> list[Outcome]:
        outcomes = []
        for i in slots:
            slot = self.slots[i]
            outcome = slot.pending
            assert outcome is not None, f"slot {i} has given a result that was not asked for"
            slot.pending = None
            if not outcome.overtaken:
                slot.failed |= outcome.error == "env"
                if self.mode is AutoresetMode.DISABLED and outcome.stepped:
                    slot.over |= outcome.terminated or outcome.truncated
            outcomes.append(outcome)
        return outcomes

    def abandon(self, slots: list[int]) -> None:
        for i in slots:
            self.slots[i].pending.abandoned = True  # type: ignore[union-attr]

    def drop(self) -> None:
        """Drop the results that are not awaited."""
        for i in self.pending:
            if self.slots[i].pending.abandoned:  # type: ignore[union-attr]
                self.lose_results([i])

    def lose_results(self, slots: list[int]) -> World:
        """They were taken, and not seen."""
        for i, outcome in zip(slots, self.take(slots), strict=True):
            if outcome.wild:
                self.slots[i].wild = True
        return self

    def fail_together(self, slots: list[int]) -> World:
        """A vector env has failed: that was due, or it had an env of which nothing was known."""
        outcomes = self.take(slots)
        if any(outcome.wild for outcome in outcomes):
            for i, outcome in zip(slots, outcomes, strict=True):
                self.slots[i].failed |= not outcome.overtaken
                self.slots[i].wild = True  # how far it came is not known
        else:
            assert all(outcome.error == "env" for outcome in outcomes)
        return self

    def check(self, slots: list[int], rows: list[int], n: int, result: Any, failed: dict[int, str]) -> None:
        """Take the outcomes of some slots, and compare them with these rows of a result.

        Args:
            slots: whose.
            rows: where they stand.
            n: how many rows there are.
            result: obs, reward, terminated, truncated, info.
            failed: slots of errors, with "env" or "died".
        """
        obs, reward, terminated, truncated, info = result
        maker = VectorEnv()
        maker.num_envs = n
        expected_info: dict[str, Any] = {}
        wild = False
        expected = set()
        for i, row, outcome in zip(slots, rows, self.take(slots), strict=True):
            error = failed.get(i)
            mine = {key: obs[key][row] for key in obs}
            flags = reward[row], bool(terminated[row]), bool(truncated[row])
            if error is not None and (outcome.maybe or outcome.error == error):
                expected.add(i)
                assert flags == (0.0, False, False), f"slot {i} has failed: {flags}"
                continue
            if error == "env" and outcome.wild:
                wild = True
                self.slots[i].failed |= not outcome.overtaken
                expected.add(i)
                continue
            # a process that ended was perhaps still to raise it
            due = None if outcome.wild else outcome.error
            assert error is None and due is None, f"slot {i}: {error} where {due} was due"
            if outcome.shown and (outcome.wild or outcome.obs is None):
                assert flags == (0.0, False, False)
                continue
            if outcome.wild:
                wild = True
                self._adopt(i, outcome, mine, flags, bool(info.get("restarted", [False] * n)[row]))
                continue
            assert_same(mine, {k: np.asarray(v)[()] for k, v in outcome.obs.items()}, f"slot {i} obs")
            assert flags == (outcome.reward, outcome.terminated, outcome.truncated), (i, flags, vars(outcome))
            for one in outcome.infos:
                expected_info = maker._add_info(expected_info, one, row)
        assert set(failed) <= expected, f"errors of {sorted(failed)}, expected {expected}"
        if not wild:
            info = {key: value for key, value in info.items() if key != "_active"}
            assert_same(info, expected_info, "info")

    def _adopt(self, i: int, outcome: Outcome, obs: Any, flags: Any, restarted: bool) -> None:
        """The result of a slot whose env is another one now: go on from what it says."""
        slot = self.slots[i]
        if outcome.overtaken:
            return
        _, terminated, truncated = flags
        t = int(obs["count"][0])
        env = slot.env
        slot.failed = False
        if not outcome.stepped:
            assert flags == (0.0, False, False) and not restarted and t == 0
            if outcome.seed is not None:
                assert int(obs["key"]) == mix(outcome.seed)
        elif restarted:
            assert flags == (0.0, False, True), f"slot {i} was restarted: {flags}"
            if self.mode is not AutoresetMode.SAME_STEP:
                slot.due = self.mode is AutoresetMode.NEXT_STEP
                slot.over = self.mode is AutoresetMode.DISABLED
                slot.wild = True
                slot.last = None
                return
        env.adopt(obs)
        env.digest += outcome.bumped
        slot.wild = outcome.lost
        slot.due = False
        if self.mode is not AutoresetMode.SAME_STEP and t:
            over = t >= env.length
            assert over == (terminated or truncated), f"slot {i}: t={t} {flags}"
            slot.due = over and self.mode is AutoresetMode.NEXT_STEP
            slot.over = over and self.mode is AutoresetMode.DISABLED
        slot.last = None

    def check_paused(self, result: Any) -> None:
        """Rows of paused slots in a whole batch."""
        obs, reward, terminated, truncated, info = result
        active = np.array([not slot.paused for slot in self.slots])
        if not active.all():
            assert_same(info["_active"], active)
        else:
            assert "_active" not in info
        for i in np.flatnonzero(~active).tolist():
            slot = self.slots[i]
            assert (reward[i], bool(terminated[i]), bool(truncated[i])) == (0.0, False, False)
            mine = {key: obs[key][i] for key in obs}
            zeros = {k: np.zeros_like(v)[()] for k, v in mine.items()}
            if slot.failed or slot.dying or slot.wild or slot.last is None:
                continue
            last = {k: np.asarray(v)[()] for k, v in slot.last.items()}
            if str(mine) == str(zeros):  # its worker may be busy, with a call that was cancelled, say
                continue
            assert_same(mine, last, f"paused slot {i}")
