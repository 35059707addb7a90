"""The path of a plain step in C (see `speedups/__init__.py`)."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from numpy.typing import NDArray

stopped_clock: int  # the address of a function of C that takes nothing and gives 0.0

_Columns = TypeVar("_Columns", bound=tuple[Any, ...])

def crc32(data: Any, crc: int) -> int:
    """`zlib.crc32`, four times as fast; None instead of this where the CPU can't multiply without carrying.

    Args:
        data: a C-contiguous buffer.
        crc: of what came before it; 0: of nothing.
    """

def write_frame(
    fd: int, chain: int, kind: int, request: int, generation: int, fixed: Sequence[Any], tail: Any
) -> int | tuple[int, bytes, int] | None:
    """Write a frame with one gathered write, as `ipc.frames.Encoder` would have encoded it.

    Args:
        fd: where to.
        chain: the CRC of the header before.
        kind, request, generation, fixed, tail: as `Encoder.encode` takes them.

    Returns:
        The header's CRC, if all was written; that, the header, and how many bytes were written, if not. None if there
        are too many buffers, or one is too large, or a number: nothing was written.

    Raises:
        OSError: if `writev` says so; what `EAGAIN` and `EINTR` say is that no bytes were written.
    """

def read_frame(fd: int, chain: int, buffers: list[Any]) -> int | tuple[int, int, int, int, int, int, int]:
    """Fill buffers with one scatter read.

    Args:
        fd: where from.
        chain: the CRC of the header before.
        buffers: as `ipc.decoder.Decoder.buffers` gives them; if they begin with a header's and end with the spill,
            what has come is looked at.

    Returns:
        How many bytes were read; or what a `Header` is made of, if they are one whole frame that is in order, whose
        fixed part fills the buffers between the first and the last, and that has no tail.

    Raises:
        OSError: if `readv` says so; after `EINTR` it is called again, once Python's signal handlers have run.
    """

def send_express(parts: list[Any], views: list[memoryview], cuts: list[list[slice]], tails: list[bytes], /) -> int:
    """Send a step to workers, in order, up to the first to which it can't be written just like that.

    To one that is away, is traced, has something left to send or whose requests were abandoned, or whose part of an
    exchange says that more is to be done, it can't; nor if the kernel takes nothing. What it takes in part its channel
    sends on.

    Args:
        parts: `core.requests.WorkerRequest`s: their `express` is what will await the reply, and their
            `member.worker.fast_channel` the channel. `request` is set.
        views: arrays of actions, of all parts, as bytes.
        cuts: for each part, where its bytes are in each of these.
        tails: for each part, what is not arrays.

    Returns:
        How many were sent.

    Raises:
        TypeError, ValueError, AttributeError: if the arguments are no such objects.
    """

def take_express(channel: Any, /) -> int | None:
    """Read what has come, and count it if it is whole replies, to the oldest requests, which are to be counted.

    Args:
        channel: a `process.channel.ScatterChannel`; see `process.connection.PendingReply` for what is counted.

    Returns:
        -1 if that was done, or there was nothing to read; -2 if something else came behind the first one, which the
        decoder has now. If what came begins with something else, how many bytes of it lie in
        `channel.decoder.buffers()`; 0 at the end of the stream. None: nothing was read, since the decoder is amid a
        frame, or the next reply is not to be counted.

    Raises:
        TypeError, ValueError, AttributeError: if the channel has not what it should have.
    """

def read_columns(part: Any, tail: memoryview, kind: type[_Columns], /) -> list[_Columns] | None:
    """The infos of a reply, if `ipc.messages.dump_columns` made its tail, and all of their columns have a dtype.

    Args:
        part: the `core.requests.WorkerRequest` that the reply is to.
        tail: what tables and columns are views of.
        kind: `spaces.infos.Columns`.

    Returns:
        What `core.payloads.read_tail` makes of it. None if the worker's schemas have no such number, or one of objects
        or dicts, if sizes do not fit, or if a row is none of the part's: that is Python's, which says what is wrong.

    Raises:
        TypeError, ValueError, AttributeError: if the arguments are no such objects.
    """

def merge_columns(
    parts: Sequence[Any],
    size: int,
    named: dict[int, tuple[Any, tuple[tuple[Any, str, Any, tuple[int, ...]], ...] | None]],
    /,
) -> dict[str, Any] | None:
    """Merge columns into the info dict of a batch.

    Args:
        parts: `spaces.infos.Columns`.
        size: how many rows the batch has.
        named: by the identity of a schema, itself, and what `spaces.infos._names` says of it (None: it is not for C).

    Returns:
        What `spaces.infos.merge_infos` gives. None if there are no parts, if a schema is not among those, a key is no
        string or comes with two dtypes or shapes, or positions or values do not fit: that is Python's, which names what
        is new.

    Raises:
        TypeError: if there are not three arguments, of which the last is a dict.
    """

def within(array: NDArray[Any], low: int, count: int, /) -> bool:
    """Whether all numbers of an array are among `count` ones from `low` on.

    Raises:
        TypeError: if it is no array of int64.
        ValueError: if it is not C-contiguous.
        OverflowError: if `low` or `count` is beyond 64 bits.
    """

def spin(fd: int, seconds: float, /) -> bool:
    """Whether there is something to read within so many seconds, during which this thread does not sleep."""

def serve_express(
    read_fd: int,
    write_fd: int,
    decoder: Any,
    encoder: Any,
    plan: tuple[
        list[memoryview],
        NDArray[Any],
        list[Callable[[Any], Any]],
        list[Callable[..., Any]],
        list[int],
        dict[int, int],
        int,
        memoryview,
        list[tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], list[Any]]],
        Callable[[int, int], list[memoryview]],
        list[tuple[int, list[Any], list[type], list[NDArray[Any]], Callable[[bytes], dict[Any, Any]]]],
        list[memoryview],
        Callable[[int, int], bool] | None,
    ],
    seconds: float,
    /,
) -> int | tuple[int, int, int, int, int, list[Any], list[tuple[int, dict[str, Any]]], int, Any, bool] | None:
    """Answer plain steps of a worker's envs, all or successive rows, until something else comes, or nothing.

    Args:
        read_fd, write_fd: of the channel; there is something to read.
        decoder, encoder: of the same.
        plan: where actions are read into, after the number of a lane of shared memory, if there are several; the array
            that they are then; `steps`, `resets`, `due`, `seeds`, `at_end`, `mark` and, for each lane, `into` as
            `step_rows` takes them; what tells what travels of so many rows from one on; the sorts of infos that the
            parent knows as columns (see `spaces.infos.Gatherer.c_schemas`); what travels of all; and what is called
            when so many rows from one on were stepped, and says whether there is no more to tell than that; or None.
        seconds: how long not to sleep after a reply, before that is nothing.

    Returns:
        * -1 after steps were answered, the last of them so many seconds ago, less one for each time that something came
          after a reply before that;
        * how many bytes lie in `decoder.buffers()`, if they are no plain step; 0 at the end of the stream;
        * None if nothing was read, since the decoder is amid a frame;
        * of a step that is not usual, or has infos of other sorts, what `host.service.Begun` is made of, with the first
          row and how many instead of `rows`. What came behind it in the same read the decoder has been given.

    Raises:
        OSError: if a reply can't be written.
        TypeError, ValueError, AttributeError: if the arguments are no such objects.
    """

def step_rows(
    row: int,
    first: int,
    actions: list[Any],
    steps: list[Callable[[Any], Any]],
    resets: list[Callable[..., Any]],
    due: list[int],
    seeds: dict[int, int],
    at_end: int,
    mark: memoryview,
    infos: list[tuple[int, dict[str, Any]]],
    into: tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], list[Any]],
    /,
) -> tuple[int, Any, bool]:
    """Step envs, from one row on, up to the first that is not usual.

    Args:
        row: the one to begin with.
        first: the row of the first action.
        actions: of that and the rows after it.
        steps, resets: the envs' `step` and `reset`.
        due: what a row's next step is: one of its env (0), a reset (1); anything else is not usual.
        seeds: for the next resets; nothing is usual about one then.
        at_end: what is due after the end of an episode; -1: that is not usual.
        mark: `mark[0]` becomes row + 1 before an env runs.
        infos: row and info dict are appended, unless it is empty.
        into: where results go: observations of any dtype, in dicts and tuples as an env gives them, reward float64,
            terminated and truncated bool, all with the rows as first axis; and the list of the last observations.

    Returns:
        The row that was not usual, or the one after the last; what its `step` or `reset` gave, or raised, or
        NotImplemented if neither was called: nothing of it was put down; and whether what was not usual, like the dtype
        of an observation, is probably so each time.
    """
