"""Every exception that aioenv raises, and every warning.

Where Gymnasium or the standard library has an exception for the case, ours is also one of those, so that
`except` clauses written for `gymnasium.vector` keep working.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any, Self

import cloudpickle
from gymnasium import error as gym_error

__all__ = [
    "ActionError",
    "AioenvError",
    "ClosedError",
    "EnvError",
    "EpisodesDone",
    "LoopError",
    "NestedProcessError",
    "NoAsyncCallError",
    "OutOfStepError",
    "PausedError",
    "PendingCallError",
    "RenderError",
    "RenderTimeout",
    "ResetNeededError",
    "ResumeError",
    "SlotError",
    "SlotErrorGroup",
    "SoftwareRenderWarning",
    "SpaceMismatchError",
    "StaleViewWarning",
    "StartTimeout",
    "StepTimeout",
    "UnsendableError",
    "VersionError",
    "WireError",
    "WorkerDied",
    "WorkerStartError",
]

# Code between a call of this package and a warning: its own, and cloudpickle's, which pickles with it.
_OURS = (os.path.dirname(__file__) + os.sep, os.path.dirname(cloudpickle.__file__) + os.sep)


class AioenvError(Exception):
    """The base of every aioenv exception."""


class WireError(AioenvError):
    """Bytes on the wire are not a valid frame. The connection that they came from can't be used any more."""


class ClosedError(AioenvError, gym_error.ClosedEnvironmentError, RuntimeError):
    """An operation was asked of a vector env (or pool) after `close()`."""

    @classmethod
    def of(cls, what: str) -> Self:
        """That of whatever was closed: "the render pool", say."""
        return cls(f"{what} was closed: it can't be used any more, make another one")


class PendingCallError(AioenvError, gym_error.AlreadyPendingCallError):
    """A request was made of slots that still have one in flight. Nothing was sent."""

    def __init__(self, message: str, name: str = "step") -> None:
        super().__init__(message, name)

    def __str__(self) -> str:
        return str(self.args[0])


class PausedError(AioenvError, ValueError):
    """A request named slots that are paused. Nothing was sent; `resume` them first."""


class EpisodesDone(AioenvError):
    """For envs to raise in `reset`: there is no further episode. Their slot is paused, and `exhausted` names it.

    Attributes:
        partial: where `evaluate` raises it, since envs had fewer episodes than it was to run: an `Evaluation` of those.
    """

    partial: Any = None


class NoAsyncCallError(AioenvError, gym_error.NoAsyncCallError):
    """`recv()` was called with nothing in flight: it could never return."""

    def __init__(self, message: str, name: str = "recv") -> None:
        super().__init__(message, name)

    def __str__(self) -> str:
        return str(self.args[0])


class LoopError(AioenvError, RuntimeError):
    """An object was used from an event loop (or thread) other than the one that it belongs to."""


class NestedProcessError(AioenvError, pickle.PicklingError):
    """An env sends something of the user's script to a process that it starts by spawn or forkserver.

    The script does not run a second time there: fork such processes, or move what they need to a module.
    """


class StepTimeout(AioenvError, TimeoutError, multiprocessing.TimeoutError):
    """`timeout_s` passed before every reply was in. Nothing is lost: `recv()` takes the late result.

    Attributes:
        slots: those without a reply.
        running: those of them whose envs were being run just then: if one hangs, it is among these.
        partial: what there is of the batch, of the type that the call would have returned, in arrays of its own;
            slots without a reply hold zeros. None if there was no batch.
    """

    def __init__(self, message: str, *, slots: tuple[int, ...] = (), running: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.slots = slots
        self.running = running
        self.partial: Any = None


class ActionError(AioenvError, ValueError):
    """Actions don't fit the action space: the message says what was expected and what was got."""


class ResetNeededError(AioenvError, gym_error.ResetNeeded):
    """A slot was stepped although its episode is over (autoreset disabled), or before its first reset."""


class OutOfStepError(AioenvError, RuntimeError):
    """Envs of several actors are in different parts of their step; the message says which slot is where."""


class SpaceMismatchError(AioenvError, RuntimeError):
    """The spaces of two slots can't be batched together; the message names both."""


class VersionError(AioenvError, ImportError):
    """A library is too old, for aioenv or for what was asked of it; the message names the least version."""


class UnsendableError(AioenvError, TypeError):
    """An env used something that could not be sent to its worker; the message names it, its user and the reason."""


class ResumeError(AioenvError, ValueError):
    """Envs can't be resumed, or can't take on a state: the message names the env or the wrapper in the way."""


class RenderError(AioenvError, RuntimeError):
    """Images can't be had: no OpenGL, no render mode, or a render worker failed.

    Attributes:
        slots: those of a vector env whose images of a step are missing, ascending; empty if it is not about slots.
        partial: the images of the step as far as they came: as arrays of the usual shape, zero for `slots`; where envs
            draw themselves, as a tuple of one image a slot, None for `slots`. None if none came.
    """

    slots: tuple[int, ...] = ()
    partial: Any = None


class RenderTimeout(RenderError, TimeoutError):
    """A render worker finished nothing for `timeout_s`. It is killed, and started again if it may be."""


class WorkerStartError(AioenvError, RuntimeError):
    """A worker did not come up: its factory raised, its process died, or `start_timeout_s` passed.

    Attributes:
        slots: the slots that the worker was to hold.
        pid: the process id, or None if there never was a process.
        traceback: the worker's own traceback, or "".
        stderr: the last lines that the worker wrote to its stdout and stderr.
    """

    def __init__(
        self,
        message: str,
        *,
        slots: tuple[int, ...] = (),
        pid: int | None = None,
        traceback: str = "",
        stderr: str = "",
    ) -> None:
        super().__init__(message)
        self.slots = slots
        self.pid = pid
        self.traceback = traceback
        self.stderr = stderr


class StartTimeout(WorkerStartError, TimeoutError):
    """`start_timeout_s` passed before a worker was up. Its `stderr`, with which the message ends, shows where."""


class SlotError(AioenvError):
    """Something went wrong in some slots of a batch; the other slots are unharmed.

    Attributes:
        slot: the slot (the lowest one, if several failed).
        slots: every slot that this one error concerns.
        pid: the process id of its worker.
        traceback: the traceback in the worker, or "".
        stderr: the last lines that the worker wrote to its stdout and stderr.
        partial: the result of the batch as far as it came, of the type that the call would have returned;
            failed slots hold reward 0, flags False and an undefined observation. None if there was no batch.
        errors: all errors of the batch, this one among them, by slot.
    """

    def __init__(
        self,
        message: str,
        *,
        slots: tuple[int, ...],
        pid: int | None = None,
        traceback: str = "",
        stderr: str = "",
    ) -> None:
        super().__init__(message)
        self.slot = slots[0]
        self.slots = slots
        self.pid = pid
        self.traceback = traceback
        self.stderr = stderr
        self.partial: Any = None
        self.errors: tuple[SlotError, ...] = (self,)

    def __reduce__(self) -> tuple[Any, ...]:  # an exception's own calls the class with nothing but the message
        return _restore, (type(self), self.args), self.__dict__

    def concern(self, slots: tuple[int, ...]) -> None:
        """Make it an error of these slots alone."""
        self.slots = slots
        self.slot = slots[0]

    def _refer_to(self, slot: int) -> None:
        """Say in place of the traceback that it is that of another slot: a bug that all envs have is told once."""
        text = str(self)
        end = text.rfind("\n" + self.traceback)
        if end > 0:
            self.args = (f"{text[:end]} (traceback as slot {slot}'s)",)

    @staticmethod
    def join(errors: list[SlotError], partial: Any) -> SlotError:
        """One error of a batch: the only one there is, or a group of all, which goes by the lowest slot's.

        The group is an `ExceptionGroup`. It is also an `EnvError` or a `WorkerDied` if all of them are.
        """
        errors = sorted(errors, key=lambda error: error.slot)
        known: dict[str, int] = {}  # where tracebacks were raised, and the first slot that has each
        for error in errors:
            where = "".join(line for line in error.traceback.splitlines() if line.startswith("  "))
            if where and known.setdefault(where, error.slot) != error.slot:
                error._refer_to(known[where])
        for error in errors:
            error.partial = partial
            error.errors = tuple(errors)
        if len(errors) == 1:
            return errors[0]
        for kind, group in ((EnvError, EnvErrorGroup), (WorkerDied, WorkerDiedGroup)):
            if all(isinstance(error, kind) for error in errors):
                return group.of(errors)
        return SlotErrorGroup.of(errors)


def _restore(kind: type[SlotError], args: tuple[Any, ...]) -> SlotError:
    return kind.__new__(kind, *args)


class EnvError(SlotError):
    """An env raised. Its slot is FAILED until it is reset; the original exception is `__cause__` if it pickles."""


class WorkerDied(SlotError, EOFError):
    """A worker's process ended: by a signal, by an exit, or because its stream broke.

    It is also the EOFError that Gymnasium's AsyncVectorEnv raises then.

    Attributes:
        slot: the slot whose env was being run, where that is known.
        running: the same, or None if no env was being run, or if it is not known.
        returncode: the exit code, `-N` for signal N, or None if it is not known.
    """

    def __init__(
        self, message: str, *, returncode: int | None = None, running: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(message, **kwargs)
        self.returncode = returncode
        self.running = running
        self.concern(self.slots)

    def concern(self, slots: tuple[int, ...]) -> None:
        """See `SlotError`."""
        super().concern(slots)
        if self.running in slots:
            self.slot = self.running


class SlotErrorGroup(SlotError, ExceptionGroup[SlotError]):
    """Several errors of one batch. Its attributes are those of the first, but for `slots`, which has all.

    `except*` takes it apart; `errors` lists them.
    """

    def __new__(cls, message: str, errors: Sequence[SlotError]) -> Self:  # noqa: D102
        return ExceptionGroup.__new__(cls, message, errors)

    def __init__(self, message: str, errors: Sequence[SlotError]) -> None:
        first = errors[0]
        ExceptionGroup.__init__(self, message, errors)
        self.__dict__.update(first.__dict__)
        self.__dict__.pop("__notes__", None)
        self.slots = tuple(sorted({slot for error in errors for slot in error.slots}))
        self.__cause__ = first.__cause__

    @classmethod
    def of(cls, errors: Sequence[SlotError]) -> Self:
        """The group of these errors; the message is the first one's, and says how many more there are."""
        return cls(f"{errors[0]}\nand {len(errors) - 1} more, in slots {[e.slot for e in errors[1:]]}", errors)

    def __str__(self) -> str:
        return self.message

    def derive(self, excs: Sequence[Any], /) -> SlotErrorGroup:  # type: ignore[override]
        """The group of a part of them."""
        return SlotErrorGroup(self.message, excs)


class EnvErrorGroup(SlotErrorGroup, EnvError):
    """Several envs raised."""


class WorkerDiedGroup(SlotErrorGroup, WorkerDied):
    """Several workers died."""


def describe_exit(returncode: int | None) -> str:
    """Words for how a process ended: "was killed by SIGSEGV", "exited with code 3"."""
    if returncode is None:
        return "ended (how is not known)"
    if returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    return f"exited with code {returncode}"


class SoftwareRenderWarning(RuntimeWarning):
    """Images are drawn by the CPU though the machine has a GPU; the message says what is missing."""


class StaleViewWarning(RuntimeWarning):
    """With `copy=False`, and the loop in debug mode: a result is about to be overwritten that is still in use."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line that called this package, which is what filters and readers go by.

    In a task of its own, such as that of `asyncio.wait_for`, it is the line of asyncio that runs the task.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
