"""Every exception and warning of aioenv.

Where Gymnasium or the standard library has an exception for the case, ours is a subclass of it. So `except` clauses
written for `gymnasium.vector` keep working.
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
    "ArgumentError",
    "ClosedError",
    "EnvError",
    "EpisodesDone",
    "LoopError",
    "NestedProcessError",
    "NoAsyncCallError",
    "NumericsError",
    "OutOfStepError",
    "PausedError",
    "PendingCallError",
    "PolicyError",
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

# Frames of these packages are skipped to find the caller of a warning; cloudpickle calls our picklers.
_SKIPPED_PATHS = (os.path.dirname(__file__) + os.sep, os.path.dirname(cloudpickle.__file__) + os.sep)


class AioenvError(Exception):
    """The base class of all aioenv exceptions."""


class WireError(AioenvError):
    """A message to or from a worker is damaged, which ends the worker, or it is too large."""


class ClosedError(AioenvError, gym_error.ClosedEnvironmentError, RuntimeError):
    """A vector env or pool was used after `close()`."""

    @classmethod
    def of(cls, what: str) -> Self:
        """Return the error of an object that was closed: "the render pool", say."""
        return cls(f"{what} was closed: it can't be used any more, make another one")


class PendingCallError(AioenvError, gym_error.AlreadyPendingCallError):
    """A request named slots that still have one in flight. Nothing was sent."""

    def __init__(self, message: str, name: str = "step") -> None:
        super().__init__(message, name)

    def __str__(self) -> str:
        return str(self.args[0])


class PausedError(AioenvError, ValueError):
    """A request named slots that are paused. Nothing was sent; `resume` them first."""


class EpisodesDone(AioenvError):
    """Raised by the `reset` of an env that has no further episode. Its slot is paused, and `exhausted` names it.

    Attributes:
        partial: if `evaluate` raises it, since envs had fewer episodes than it was to run: an `Evaluation` of those.
    """

    partial: Any = None


class NoAsyncCallError(AioenvError, gym_error.NoAsyncCallError):
    """`recv()` was called with nothing in flight, so it could never return."""

    def __init__(self, message: str, name: str = "recv") -> None:
        super().__init__(message, name)

    def __str__(self) -> str:
        return str(self.args[0])


class LoopError(AioenvError, RuntimeError):
    """An object was used from another event loop (or thread) than the one that it belongs to."""


class NestedProcessError(AioenvError, pickle.PicklingError):
    """An env sends an object of the user's script to a process that it starts by spawn or forkserver.

    The script does not run a second time there: fork such processes, or move the code that they need to a module.
    """


class StepTimeout(AioenvError, TimeoutError, multiprocessing.TimeoutError):
    """`timeout_s` passed before all replies arrived. Nothing is lost: `recv()` returns the late result.

    Attributes:
        slots: the slots without a reply.
        running: those of them whose envs were running at that moment: if one hangs, it is among these.
        partial: the partial result of the batch, of the type that the call would have returned, in arrays of its own.
            Slots without a reply hold zeros. None if there was no batch.
    """

    def __init__(self, message: str, *, slots: tuple[int, ...] = (), running: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.slots = slots
        self.running = running
        self.partial: Any = None


class ArgumentError(AioenvError, TypeError):
    """An unknown argument has a name that resembles one of ours."""


class ActionError(AioenvError, ValueError):
    """Actions don't fit the action space; the message has the expected and the given value."""


class NumericsError(AioenvError, ValueError):
    """An env returned a NaN or an infinite number, with `check_numerics=True`; it is the `__cause__` of an EnvError.

    Attributes:
        step: the step since the slot's reset; 0: the reset.
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


class ResetNeededError(AioenvError, gym_error.ResetNeeded):
    """A slot was stepped after the end of its episode (autoreset disabled), or before its first reset."""


class OutOfStepError(AioenvError, RuntimeError):
    """Envs of several actors are in different parts of their step; the message says which slot is where."""


class SpaceMismatchError(AioenvError, RuntimeError):
    """The spaces of two slots can't be batched together; the message names both."""


class VersionError(AioenvError, ImportError):
    """A library is too old for aioenv, or for the requested feature; the message names the least version."""


class UnsendableError(AioenvError, TypeError):
    """An env used a value that could not be sent to its worker; the message names it, its user and the reason."""


class ResumeError(AioenvError, ValueError):
    """Envs can't be resumed, or a state can't be set; the message names the env or wrapper that prevents it."""


class RenderError(AioenvError, RuntimeError):
    """Images can't be rendered: no OpenGL, no render mode, or a render worker failed.

    Attributes:
        slots: slots of a vector env whose images of a step are missing, ascending; empty if it does not concern slots.
        partial: the other images of the step: arrays of the usual shape, zero for `slots`. If envs render themselves, a
            tuple of one image a slot, None for `slots`. None if there are no images.
    """

    slots: tuple[int, ...] = ()
    partial: Any = None


class RenderTimeout(RenderError, TimeoutError):
    """A render worker finished nothing for `timeout_s`. It is killed, and restarted if its policy allows that."""


class WorkerStartError(AioenvError, RuntimeError):
    """A worker did not start: its factory raised, its process died, or `start_timeout_s` passed.

    Attributes:
        slots: the slots of the worker.
        pid: the process id, or None if no process was started.
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
    """`start_timeout_s` passed before a worker was ready. The message ends with its `stderr`, which shows where."""


class SlotError(AioenvError):
    """Some slots of a batch failed; the other slots are not affected.

    Attributes:
        slot: the slot (the lowest one, if several failed).
        slots: every slot that this error concerns.
        pid: the process id of its worker.
        traceback: the traceback in the worker, or "".
        stderr: the last lines that the worker wrote to its stdout and stderr.
        partial: the partial result of the batch, of the type that the call would have returned. Failed slots hold
            reward 0, flags False and an undefined observation. None if there was no batch.
        errors: all errors of the batch, including this one, by slot.
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

    def __reduce__(self) -> tuple[Any, ...]:  # the one of Exception would call the class with the message alone
        return _restore, (type(self), self.args), self.__dict__

    def concern(self, slots: tuple[int, ...]) -> None:
        """Restrict the error to these slots."""
        self.slots = slots
        self.slot = slots[0]

    def _refer_to(self, slot: int) -> None:
        """Replace the traceback in the message by a reference to another slot's: a bug of all envs is reported once."""
        text = str(self)
        end = text.rfind("\n" + self.traceback)
        if end > 0:
            self.args = (f"{text[:end]} (traceback as slot {slot}'s)",)

    @staticmethod
    def join(errors: list[SlotError], partial: Any) -> SlotError:
        """Join the errors of a batch: return the only one, or a group with the attributes of the lowest slot's error.

        The group is an `ExceptionGroup`. It is also an `EnvError` or a `WorkerDied` if all errors are.
        """
        errors = sorted(errors, key=lambda error: error.slot)
        known: dict[str, int] = {}  # the first slot of each traceback, by its lines of code
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
    """An env raised. Its slot is FAILED until it is reset.

    The original exception is `__cause__`, with its own causes, contexts and members. Attributes that do not pickle are
    left out, and a note says so. If its class can't be sent, `__cause__` is None, and a note gives the reason.
    """


class PolicyError(SlotError):
    """The policy of a `RolloutCollector` raised; `slots` are those of the collector.

    The original exception is `__cause__`, as for an `EnvError`.
    """

    @classmethod
    def of(cls, error: SlotError) -> Self:
        """Make it of the error of a whole collector."""
        how = {"slots": error.slots, "pid": error.pid, "traceback": error.traceback, "stderr": error.stderr}
        made = cls(f"the policy of {error}", **how)  # type: ignore[arg-type]
        made.__cause__ = error.__cause__
        for note in getattr(error, "__notes__", ()):
            made.add_note(note)
        return made


class WorkerDied(SlotError, EOFError):
    """A worker's process ended: by a signal, by an exit, or because its stream broke.

    It is also an EOFError, which Gymnasium's AsyncVectorEnv raises in this case.

    Attributes:
        slot: the slot whose env was running, if that is known.
        running: that slot, or None if no env was running or it is not known.
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
    """Several errors of one batch. Its attributes are those of the first error, except `slots`, which has all slots.

    `except*` splits it; `errors` lists the errors.
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
        """Make a group of errors; its message is that of the first, and the number of the others."""
        return cls(f"{errors[0]}\nand {len(errors) - 1} more, in slots {[e.slot for e in errors[1:]]}", errors)

    def __str__(self) -> str:
        return self.message

    def derive(self, excs: Sequence[Any], /) -> SlotErrorGroup:  # type: ignore[override]
        """Make a group of a part of the errors, for `except*`."""
        return SlotErrorGroup(self.message, excs)


class EnvErrorGroup(SlotErrorGroup, EnvError):
    """Several envs raised."""


class WorkerDiedGroup(SlotErrorGroup, WorkerDied):
    """Several workers died."""


def describe_exit(returncode: int | None) -> str:
    """Describe how a process ended: "was killed by SIGSEGV", "exited with code 3"."""
    if returncode is None:
        return "ended (how is not known)"
    if returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    return f"exited with code {returncode}"


class SoftwareRenderWarning(RuntimeWarning):
    """Images are rendered on the CPU although the machine has a GPU; the message names the missing part."""


class StaleViewWarning(RuntimeWarning):
    """A result that is still in use is about to be overwritten; with `copy=False` and the loop in debug mode."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line that called this package, by which filters match and users find the cause.

    In a task of its own, such as that of `asyncio.wait_for`, this is the line of asyncio that runs the task.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED_PATHS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
