"""The fast path of a plain step in C (see `speedups/__init__.py`)."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from numpy.typing import NDArray

stopped_clock: int  # the address of a C function without arguments that returns 0.0

_Columns = TypeVar("_Columns", bound=tuple[Any, ...])
# a `worker.service.FastPath`
_FastPath: TypeAlias = tuple[
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
]

def crc32(data: Any, crc: int) -> int:
    """Compute zlib's CRC-32, about four times as fast; None if the CPU has no carry-less multiplication.

    Args:
        data: a C-contiguous buffer.
        crc: the CRC of the bytes before it; 0: there are none.
    """

def write_frame(
    fd: int, chain: int, kind: int, request: int, generation: int, fixed: Sequence[Any], payload: Any
) -> int | tuple[int, bytes, int] | None:
    """Write a frame, as `ipc.frames.Encoder` would encode it, in one gathered write.

    Args:
        fd: the descriptor to write to.
        chain: the CRC of the previous header.
        kind, request, generation, fixed, payload: as for `Encoder.encode`.

    Returns:
        The header's CRC if all bytes were written; else the CRC, the header and the number of bytes written. None if
        nothing was written, because there are too many buffers, or a buffer or a number is too large.

    Raises:
        OSError: if `writev` fails. `EAGAIN` and `EINTR` don't raise: no bytes were written then.
    """

def read_frame(fd: int, chain: int, buffers: list[Any]) -> int | tuple[int, int, int, int, int, int, int]:
    """Fill buffers with one scatter read.

    Args:
        fd: the descriptor to read from.
        chain: the CRC of the previous header.
        buffers: as `ipc.decoder.Decoder.buffers` returns them. The bytes are only checked if the buffers begin with
            that of a header and end with the spill.

    Returns:
        The fields of a `Header` if the bytes are one whole, correct frame without a payload, whose fixed part fills the
        buffers between the first and the last. Otherwise the number of bytes read.

    Raises:
        OSError: if `readv` fails. After `EINTR` and Python's signal handlers, the read is repeated.
    """

def send_steps(parts: list[Any], views: list[memoryview], cuts: list[list[slice]], payloads: list[bytes], /) -> int:
    """Send a step to workers, in order, up to the first that Python must send to.

    Python sends if the worker is down or traced, has unsent bytes or abandoned requests, or its worker request has no
    `fast_reply`; also if the kernel takes no bytes. If the kernel takes some of the bytes, the channel sends the others
    later.

    Args:
        parts: the `core.requests.WorkerRequest`s. Their `fast_reply` will process the reply, and
            `member.worker.fast_channel` is the channel. Their `request_id` is set.
        views: the arrays of actions of all worker requests, as bytes.
        cuts: for each worker request, the slice of its bytes in each view.
        payloads: for each worker request, the payload.

    Returns:
        The number of worker requests sent.

    Raises:
        TypeError, ValueError, AttributeError: if an argument is not as described.
    """

def take_replies(channel: Any, /) -> int | None:
    """Read from a channel once, and process the replies to the oldest requests if they are whole and on the fast path.

    Args:
        channel: a `process.channel.ScatterChannel`. See `process.connection.PendingReply` for the fast path.

    Returns:
        * -1 if all bytes were processed, or there were none;
        * -2 if a processed reply was followed by other bytes, which the decoder was fed with;
        * the number of bytes in `channel.decoder.buffers()` if they start with something else; 0 at the end of the
          stream;
        * None if nothing was read, because the decoder is inside a frame or the next reply is not on the fast path.

    Raises:
        TypeError, ValueError, AttributeError: if an attribute of the channel is not as described.
    """

def read_columns(part: Any, payload: memoryview, columns_type: type[_Columns], /) -> list[_Columns] | None:
    """Read the infos of a reply if `ipc.messages.dump_columns` made the payload and all columns have a dtype.

    Args:
        part: the `core.requests.WorkerRequest` that the reply answers.
        payload: the tables and columns are views of it.
        columns_type: `spaces.infos.Columns`.

    Returns:
        The columns that `core.requests.read_payload` would make. None if the worker has no such schema, if a column
        holds objects or dicts, if sizes don't fit, or if a row is not in the worker request. Python then reads the
        payload, and reports errors.

    Raises:
        TypeError, ValueError, AttributeError: if an argument is not as described.
    """

def merge_columns(
    parts: Sequence[Any],
    size: int,
    named: dict[int, tuple[Any, tuple[tuple[Any, str, Any, tuple[int, ...]], ...] | None]],
    /,
) -> dict[str, Any] | None:
    """Merge columns into the info dict of a batch.

    Args:
        parts: the `spaces.infos.Columns`.
        size: the number of rows in the batch.
        named: by the `id` of a schema, the schema and its `spaces.infos.ColumnName`s; None: Python must merge it.

    Returns:
        The dict that `spaces.infos.merge_infos` would return. None if there are no parts, a schema is not in `named`, a
        key is not a string or has two dtypes or shapes, or positions or values don't fit. Python then merges, and adds
        new schemas to `named`.

    Raises:
        TypeError: if there are not three arguments, or the last is not a dict.
    """

def within(array: NDArray[Any], low: int, count: int, /) -> bool:
    """Return whether all numbers of an array are in `range(low, low + count)`.

    Raises:
        TypeError: if it is not an array of int64.
        ValueError: if it is not C-contiguous.
        OverflowError: if `low` or `count` does not fit 64 bits.
    """

def spin(fd: int, seconds: float, /) -> bool:
    """Poll a descriptor without sleeping, and return whether it is readable within so many seconds."""

def serve_steps(
    read_fd: int,
    write_fd: int,
    decoder: Any,
    encoder: Any,
    fast_path: _FastPath,
    seconds: float,
    /,
) -> int | tuple[int, int, int, int, int, list[Any], list[tuple[int, dict[str, Any]]], int, Any, bool, Any] | None:
    """Answer plain steps of all or successive rows, until another request comes, or none in time.

    Args:
        read_fd, write_fd: the channel's descriptors; `read_fd` is readable.
        decoder, encoder: the channel's.
        fast_path: a `worker.service.FastPath`. `step_rows` explains `steps`, `resets`, `pending_reset`, `seeds`,
            `at_end`, `current_row` and the entries of `into`.
        seconds: how long to poll without sleeping after a reply.

    Returns:
        * -1 minus the number of steps that came within `seconds` of a reply, if the last reply was not followed by
          another request in that time;
        * the number of bytes in `decoder.buffers()` if they are not a plain step; 0 at the end of the stream;
        * None if nothing was read, because the decoder is inside a frame;
        * the fields of a `worker.service.PartialStep` without `kind`, with the first row and the number of rows instead
          of `rows`, if Python must finish the step. The decoder was fed with the bytes that came after the request.

    Raises:
        OSError: if a reply can't be written.
        TypeError, ValueError, AttributeError: if an argument is not as described.
    """

def step_here(
    fast_path: _FastPath, first: int, count: int, actions: NDArray[Any], into: list[memoryview] | None, /
) -> bytes | tuple[int, int, int, int, int, list[Any], list[tuple[int, dict[str, Any]]], int, Any, bool, Any]:
    """Step successive rows of a service in this process, and copy the results into buffers.

    Args:
        fast_path: see `serve_steps`.
        first, count: the rows.
        actions: one a row, in an array that nothing else uses.
        into: a buffer for each array of results, as `fast_path.fixed` has them; None: they are not copied.

    Returns:
        The payload of the reply; if Python must finish the step, a tuple as of `serve_steps`, with 0 for request and
        generation.

    Raises:
        TypeError, ValueError: if an argument is not as described.
    """

def step_rows(
    row: int,
    first: int,
    actions: list[Any],
    steps: list[Callable[[Any], Any]],
    resets: list[Callable[..., Any]],
    pending_reset: list[int],
    seeds: dict[int, int],
    at_end: int,
    current_row: memoryview,
    infos: list[tuple[int, dict[str, Any]]],
    into: tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], list[Any]],
    /,
) -> tuple[int, Any, bool, Any]:
    """Step envs, from one row on, up to the first row that is left to Python.

    Args:
        row: the first row to step.
        first: the row of the first action.
        actions: the actions of that row and the rows after it.
        steps, resets: the envs' `step` and `reset`.
        pending_reset: the next step of each row: a step of its env (0) or a reset (1). Other values are left to Python.
        seeds: for the next resets, by row. If there are any, a reset is left to Python.
        at_end: the value of `pending_reset` after the end of an episode; -1: the end of an episode is left to Python;
            -2: the env is reset at once, and the row gets another info before that of its reset, with `final_obs` and
            `final_info`.
        current_row: `current_row[0]` is set to row + 1 before an env runs.
        infos: row and info dict are appended, unless the dict is empty.
        into: the arrays that results go to: observations of any dtype, in dicts and tuples as an env returns them,
            reward float64, terminated and truncated bool. The first axis of each is the rows. The last entry is the
            list of the last observations.

    Returns:
        * the row that is left to Python, or the one after the last;
        * the result or exception of that row's `step` or `reset`, of which nothing was stored; NotImplemented if
          neither was called;
        * whether the env will probably do the same each time, as with the dtype of an observation;
        * a copy of the result of that row's last step, if the outcome is that of the reset after it; else None.
    """

def step_below(
    outer_step: Callable[[Any], Any],
    chain: tuple[Any, ...],
    conditions: list[tuple[Any, str]],
    limit: Any,
    unpack: Callable[[Any], tuple[Any, Any, Any, Any, Any]],
    /,
) -> Callable[[Any], Any]:
    """Return a function that steps an env as the wrappers around it do.

    Args:
        outer_step: the `step` of the outermost wrapper, which is called if a wrapper wraps another env than before, or
            a condition is not fulfilled.
        chain: the wrappers from the outermost one on, and the env.
        conditions: wrappers and names of attributes that must be True. Once they all are, they are not checked again.
        limit: the wrapper of the chain that is a TimeLimit; None: there is none.
        unpack: makes a tuple of an outcome that is none of five, or raises.

    Raises:
        TypeError: if an argument is not as described.
    """
