"""The decoder: turns the bytes of a stream into frames, without doing input or output.

`buffers` returns the buffers to fill next, `advance` takes the number of bytes that were read into them, and
`next_frame` returns finished frames. `feed` takes bytes that have already been read. So one decoder serves a stream
reader, a blocking `readv` and a scatter read alike. A reader of `buffers` can let the decoder predict where the next
frame's fixed part will go (`predict_buffers`). One read then usually brings the whole frame, each part to its place. A
wrong prediction costs a copy.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence

from aioenv.errors import WireError
from aioenv.ipc.frames import (
    HEADER_BYTES,
    KINDS,
    MAX_FIXED_BYTES,
    MAX_PAYLOAD_BYTES,
    Buffer,
    Frame,
    Header,
    crc32,
    decode_header,
    new_tuple,
)
from aioenv.speedups import read_by_c

__all__ = ["Decoder"]

# Room for bytes after a predicted fixed part, so that most payloads come in the same read.
SPILL_BYTES = 1 << 16
# From this size on, memory is mapped: the kernel provides pages as they are written, so an announced body costs nothing
# until it arrives.
LAZY_BYTES = 1 << 20
_NOTHING = memoryview(b"")


def _crc_of(parts: Sequence[memoryview]) -> int:
    crc = 0
    for part in parts:
        crc = crc32(part, crc)
    return crc


def allocate(size: int) -> memoryview:
    """Allocate memory for a part that a header announces."""
    return memoryview(bytearray(size) if size < LAZY_BYTES else mmap.mmap(-1, size))


@read_by_c
class Decoder:
    """Decode the frames of one stream, whose bytes may come in any chunks.

    If any method raises anything but `WireError`, that is a bug, or `buffers_for` raised (which breaks the stream). A
    broken stream stays broken: `next_frame` first returns the frames before the fault, then raises the same error
    forever. A header that announces more than the limits breaks the stream before any memory is allocated.

    Args:
        buffers_for: called once a header is complete and checked. Returns the buffers (writable, of format "B") for the
            fixed part, or None for scratch memory. If the lengths of the buffers don't add up to `header.fixed`,
            scratch memory is used too. So a reply that has grown can be inspected instead of being cut. It may be
            called before the preceding frames have been taken, so frames in flight need buffers of their own.
        predict_buffers: called by `buffers` between two frames. Returns the object that `buffers_for` will probably
            return for the next frame, or None. Its buffers may be overwritten by any frame.
        max_scratch: the maximum length of a fixed part in scratch memory, in bytes.
        max_payload: the maximum length of a payload, in bytes.

    Attributes:
        chain: the CRC of the last header.
        buffers_for, predict_buffers: as given; they may be replaced between two frames if there was a
            `predict_buffers`.
        frames: complete frames that have not been taken.
        error: the error that broke the stream; None while it is whole.
    """

    def __init__(
        self,
        buffers_for: Callable[[Header], Sequence[memoryview] | None] | None = None,
        predict_buffers: Callable[[], Sequence[memoryview] | None] | None = None,
        *,
        max_scratch: int = MAX_FIXED_BYTES,
        max_payload: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._max_scratch = max_scratch
        self._max_payload = max_payload
        self.buffers_for = buffers_for
        self.predict_buffers = predict_buffers
        self._predicted: Sequence[memoryview] | None = None  # the prediction that `buffers` has just handed out
        self._spill = memoryview(bytearray(SPILL_BYTES if predict_buffers else 0))
        self._read_list_for: Sequence[memoryview] | None = None  # the prediction that `_read_list` was made for
        self._read_list: list[memoryview] = []
        self._predicted_bytes = 0
        # C reads these too, between two frames (`prepare_read` in speedups/frames.c)
        self._head = memoryview(bytearray(HEADER_BYTES))
        self.frames: deque[Frame] = deque()
        self.error: WireError | None = None
        self.chain = 0
        self._expect_header()

    def _expect_header(self) -> None:
        self._header: Header | None = None
        self._fixed: Sequence[memoryview] = ()
        self._payload = memoryview(b"")
        self._body_crc = 0  # of the part of the body that has come
        self._wanted: list[memoryview] = [self._head]

    @property
    def idle(self) -> bool:
        """Return whether the last byte so far ended a frame: a stream may end here."""
        return self.error is None and self._header is None and len(self._wanted[0]) == HEADER_BYTES

    def buffers(self) -> list[memoryview]:
        """Return the buffers to fill next, in order: a scatter read may fill them all at once.

        Raises:
            WireError: if the stream is broken.
        """
        if self.error:
            raise self.error.with_traceback(None)
        if self.predict_buffers is None or self._header is not None or len(self._wanted[0]) != HEADER_BYTES:
            return self._wanted
        predicted = self._predicted = self.predict_buffers() or ()
        if predicted is not self._read_list_for:
            self._read_list_for = predicted
            self._read_list = [self._head, *predicted, self._spill]
            self._predicted_bytes = sum(map(len, predicted))
        return self._read_list

    @property
    def has_prediction(self) -> bool:
        """Return whether the latest `buffers()` were a header's buffer, a prediction and the spill buffer."""
        return self._predicted is not None

    def advance_whole_frame(self, fields: tuple[int, int, int, int, int, int, int]) -> int:
        """Note that `buffers()`, with a prediction, were filled with exactly one whole frame; see `advance`.

        Args:
            fields: the fields of its header. The reader has checked it: the prediction is full, the payload empty.

        Returns:
            The frame's length in bytes.
        """
        kind = KINDS.get(fields[0])
        count = HEADER_BYTES + fields[3]
        self.advance(count, None if kind is None else new_tuple(Header, (kind, *fields[1:])))
        return count

    def advance(self, count: int, checked: Header | None = None) -> None:
        """Note that the next `count` bytes of `buffers()` have been filled.

        Args:
            count: the number of bytes.
            checked: the header, if the bytes are exactly one whole frame that was checked already.

        Raises:
            WireError: if the stream was broken before.
        """
        if self.error:
            raise self.error.with_traceback(None)
        predicted, self._predicted = self._predicted, None
        if predicted is None or count < HEADER_BYTES:
            self._fill(count)
            return
        # the read may have gone past the header, into the prediction and then into the spill buffer
        rest = count - HEADER_BYTES
        try:
            header = decode_header(self._head, 0, self.chain, self._max_payload) if checked is None else checked
            fixed = self._choose_buffers(header)
        except WireError as error:
            self._fail(error)
            return
        if fixed is not predicted:
            self._reject_prediction(header, fixed, predicted, rest)
        elif checked is not None:
            self.chain = header.crc
            self.frames.append(new_tuple(Frame, (header.kind, header.request, header.generation, fixed, _NOTHING)))
        elif rest == header.fixed and not header.payload:  # exactly one whole frame: the usual case
            self._finish_frame(header, fixed, _NOTHING, _crc_of(fixed))
        else:
            self._accept_prediction(header, fixed, rest)

    def _fill(self, count: int) -> None:
        """Note that the first `count` bytes of the wanted buffers were read; their CRC is computed while more come."""
        wanted = self._wanted
        while count:
            part = wanted[0]
            here = min(count, len(part))
            if self._header is not None:
                self._body_crc = crc32(part[:here], self._body_crc)
            if here < len(part):
                wanted[0] = part[here:]
                return
            count -= here
            del wanted[0]
        if not wanted:
            self._complete()

    def _accept_prediction(self, header: Header, fixed: Sequence[memoryview], rest: int) -> None:
        """Continue after a correct prediction: bytes after the fixed part lie in the spill buffer."""
        spilled = self._spill[: max(0, rest - header.fixed)]
        if header.payload <= rest - header.fixed:
            payload = memoryview(bytes(spilled[: header.payload]))
            self._finish_frame(header, fixed, payload, crc32(payload, _crc_of(fixed)))
            spilled = spilled[header.payload :]
        else:
            self._start_body(header, fixed)
            self._fill(min(rest, header.fixed))
        if len(spilled):
            self.feed(spilled)

    def _reject_prediction(
        self, header: Header, fixed: Sequence[memoryview], predicted: Sequence[memoryview], rest: int
    ) -> None:
        """Copy the `rest` bytes after the header out of a wrong prediction and the spill buffer."""
        spilled = self._spill[: max(0, rest - self._predicted_bytes)]
        if predicted:
            spilled = memoryview(b"".join((*predicted, spilled)))[:rest]
        self._start_body(header, fixed)
        if not self._wanted:
            self._complete()
        if len(spilled):
            self.feed(spilled)

    def feed(self, data: Buffer) -> None:
        """Decode bytes that were read elsewhere: copies them to where they belong.

        It raises no error about the bytes: `next_frame` does, after the frames before the fault.
        """
        self._predicted = None
        view = memoryview(data)
        offset, end = 0, len(view)
        while offset < end and not self.error:
            if end - offset >= HEADER_BYTES and self.idle:
                taken = self._decode_whole_frame(view, offset)
                if taken:
                    offset += taken
                    continue
            target = self._wanted[0]
            count = min(len(target), end - offset)
            target[:count] = view[offset : offset + count]
            offset += count
            self._fill(count)

    def _decode_whole_frame(self, view: memoryview, offset: int) -> int:
        """Decode a frame that lies in `view` as a whole; return its length, or 0 if it is incomplete.

        This is the usual case, at a fifth of the cost. Nothing is written into the caller's arrays before the check.
        """
        try:
            header = decode_header(view, offset, self.chain, self._max_payload)
        except WireError as error:
            self._fail(error)
            return len(view) - offset
        body = offset + HEADER_BYTES
        end = body + header.fixed + header.payload
        if end > len(view):
            return 0
        if crc32(view[body:end], 0) != header.body_crc:
            self._fail(WireError(f"the body of a {header.kind.name} frame does not match its CRC"))
            return len(view) - offset
        try:
            fixed = self._choose_buffers(header)
        except WireError as error:
            self._fail(error)
            return len(view) - offset
        for part in fixed:
            size = len(part)
            part[:] = view[body : body + size]
            body += size
        payload = memoryview(bytes(view[body:end]))
        self.chain = header.crc
        self.frames.append(new_tuple(Frame, (header.kind, header.request, header.generation, fixed, payload)))
        return end - offset

    def next_frame(self) -> Frame | None:
        """Return the next complete frame; None if more bytes are needed.

        Raises:
            WireError: if the bytes after the last complete frame are not a frame.
        """
        if self.frames:
            return self.frames.popleft()
        if self.error:
            raise self.error.with_traceback(None)
        return None

    def finish(self) -> None:
        """Note that the stream has ended.

        Raises:
            WireError: if it ended inside a frame.
        """
        if not self.error and not self.idle:
            self.error = WireError("the stream ended inside a frame")
        if self.error and not self.frames:
            raise self.error.with_traceback(None)

    def _complete(self) -> None:
        """Go on from a full header to its body, or from a full body to a frame."""
        header = self._header
        if header is None:
            try:
                header = decode_header(self._head, 0, self.chain, self._max_payload)
                fixed = self._choose_buffers(header)
            except WireError as error:
                self._fail(error)
                return
            self._start_body(header, fixed)
            if self._wanted:
                return
        self._finish_frame(header, self._fixed, self._payload, self._body_crc)
        self._expect_header()

    def _finish_frame(self, header: Header, fixed: Sequence[memoryview], payload: memoryview, crc: int) -> None:
        """Check the body, which is where it belongs and has this CRC, and add the frame."""
        if crc != header.body_crc:
            self._fail(WireError(f"the body of a {header.kind.name} frame does not match its CRC"))
            return
        self.chain = header.crc
        self.frames.append(new_tuple(Frame, (header.kind, header.request, header.generation, fixed, payload)))

    def _start_body(self, header: Header, fixed: Sequence[memoryview]) -> None:
        self._header = header
        self._fixed = fixed
        self._payload = allocate(header.payload)
        self._wanted = [part for part in (*fixed, self._payload) if len(part)]

    def _choose_buffers(self, header: Header) -> Sequence[memoryview]:
        """Return the buffers for a frame's fixed part: the caller's if they fit, else scratch memory.

        Raises:
            WireError: if that is more scratch memory than allowed; the stream is broken then.
        """
        try:
            fixed = self.buffers_for(header) if self.buffers_for else None
        except BaseException:
            # the frame has no buffers, and a caller that catches this must not find the next frame half read
            self._fail(WireError(f"no memory was given for the fixed part of a {header.kind.name} frame"))
            raise
        if fixed is None:
            size = 0
        else:
            size = self._predicted_bytes if fixed is self._read_list_for else sum(map(len, fixed))
            if size == header.fixed:
                return fixed
        if header.fixed > self._max_scratch:
            kind = header.kind.name
            raise WireError(f"a {kind} frame has a fixed part of {header.fixed} bytes where {size} are expected")
        return (allocate(header.fixed),) if header.fixed else ()

    def _fail(self, error: WireError) -> None:
        """Store the error; it is raised once the frames before it have been taken.

        Its traceback is removed, here and on each raise: it would keep the caller's buffers alive, and grow with every
        raise.
        """
        self.error = error.with_traceback(None)
