"""The decoder: bytes become frames again.

It does no input or output. It says which buffers it wants filled (`buffers`), is told how many bytes
went into them (`advance`), and hands out finished frames (`next_frame`); `feed` is the same for bytes that are
already there. So one decoder serves a stream reader, a blocking `readv` and a scatter read alike. Who reads into
`buffers` can let it guess where the next frame's fixed part will go (`expect`): then one read usually brings the
whole frame, each part to its place; a guess that turns out wrong costs a copy.
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
    MAX_TAIL_BYTES,
    Buffer,
    Frame,
    Header,
    crc32,
    decode_header,
    new_tuple,
)
from aioenv.speedups.attributes import read_by_c

__all__ = ["Decoder"]

# What follows the fixed part that a reader guessed: the tails of most replies, in one read.
SPILL_BYTES = 1 << 16
# From here on memory comes in pages that the kernel gives as they are written: what a header announces costs
# nothing until it arrives.
LAZY_BYTES = 1 << 20
_NOTHING = memoryview(b"")


def allocate(size: int) -> memoryview:
    """Memory for what a header announces."""
    return memoryview(bytearray(size) if size < LAZY_BYTES else mmap.mmap(-1, size))


@read_by_c
class Decoder:
    """Turns bytes into frames, whatever chunks the bytes come in.

    Args:
        place: called once a header is complete and checked; gives the buffers (writable, of format "B") that
            the fixed part shall be read into, or None for scratch memory. Buffers whose lengths don't add up
            to `header.fixed` are passed over for scratch memory too, so that a reply that has grown can be
            looked at instead of being cut. It may be asked for a frame before the frames that came with it have
            been taken, so two frames that are both under way need buffers of their own.
        expect: called by `buffers` between two frames; gives what `place` will probably give for the next frame
            (the very same object), or None. Its buffers may be overwritten whatever frame comes.
        max_scratch: how long a fixed part for which `place` has no buffers of that length may be, in bytes.
        max_tail: how long a tail may be, in bytes.

    A header that asks for more breaks the stream before any memory is allocated.

    If any method raises anything but `WireError`, that is a bug, or `place` raised (which breaks the stream). A
    broken stream stays broken: `next_frame` first gives the frames before the fault, then raises the same error
    for ever.

    Attributes:
        chain: the CRC of the last header.
        place, expect: as given; others may take their place between two frames, if there was an `expect`.
        frames: those that are complete, and that nobody has taken.
        error: what broke the stream; None while it is whole.
    """

    def __init__(
        self,
        place: Callable[[Header], Sequence[memoryview] | None] | None = None,
        expect: Callable[[], Sequence[memoryview] | None] | None = None,
        *,
        max_scratch: int = MAX_FIXED_BYTES,
        max_tail: int = MAX_TAIL_BYTES,
    ) -> None:
        self._max_scratch = max_scratch
        self._max_tail = max_tail
        self.place = place
        self.expect = expect
        self._guess: Sequence[memoryview] | None = None  # what `buffers` handed out after the header's buffer
        self._spill = memoryview(bytearray(SPILL_BYTES if expect else 0))
        self._offered: Sequence[memoryview] | None = None  # the guess that `_offer` was made for
        self._offer: list[memoryview] = []
        self._offered_bytes = 0  # how long that guess is
        # C looks at these, too, between two frames (`offer` in speedups/frames.c)
        self._head = memoryview(bytearray(HEADER_BYTES))
        self.frames: deque[Frame] = deque()
        self.error: WireError | None = None
        self.chain = 0
        self._begin()

    def _begin(self) -> None:
        self._header: Header | None = None
        self._fixed: Sequence[memoryview] = ()
        self._tail = memoryview(b"")
        self._wanted: list[memoryview] = [self._head]

    @property
    def idle(self) -> bool:
        """Whether the last byte so far ended a frame: a stream may end here."""
        return self.error is None and self._header is None and len(self._wanted[0]) == HEADER_BYTES

    def buffers(self) -> list[memoryview]:
        """The buffers to fill next, in order: a scatter read may fill them all at once.

        Raises:
            WireError: if the stream is broken; nothing after this point can be understood.
        """
        if self.error:
            raise self.error.with_traceback(None)
        if self.expect is None or self._header is not None or len(self._wanted[0]) != HEADER_BYTES:
            return self._wanted
        guess = self._guess = self.expect() or ()
        if guess is not self._offered:
            self._offered = guess
            self._offer = [self._head, *guess, self._spill]
            self._offered_bytes = sum(map(len, guess))
        return self._offer

    @property
    def guesses(self) -> bool:
        """Whether `buffers` has just been called, and gave a header's buffer, a guess, and the spill."""
        return self._guess is not None

    def advance_by_frame(self, fields: tuple[int, int, int, int, int, int, int]) -> int:
        """Say that `buffers()`, with a guess, have been filled with one whole frame; otherwise as `advance`.

        Args:
            fields: of its header, as numbers; whoever read it has checked it, and found the guess full and no tail.

        Returns:
            How many bytes it has.
        """
        kind = KINDS.get(fields[0])
        count = HEADER_BYTES + fields[3]
        self.advance(count, None if kind is None else new_tuple(Header, (kind, *fields[1:])))
        return count

    def advance(self, count: int, checked: Header | None = None) -> None:
        """Say that the next `count` bytes of `buffers()` have been filled; what they were, `next_frame` tells.

        Args:
            count: how many.
            checked: the header that they begin with, if they are one whole frame that was found in order.

        Raises:
            WireError: if the stream was broken before.
        """
        if self.error:
            raise self.error.with_traceback(None)
        guess, self._guess = self._guess, None
        if guess is None or count < HEADER_BYTES:
            self._fill(count)
            return
        # the read may have gone past the header, into the guess and then into the spill
        rest = count - HEADER_BYTES
        try:
            header = decode_header(self._head, 0, self.chain, self._max_tail) if checked is None else checked
            fixed = self._claim(header)
        except WireError as error:
            self._break(error)
            return
        if fixed is not guess:
            self._move(header, fixed, guess, rest)
        elif checked is not None:
            self.chain = header.crc
            self.frames.append(new_tuple(Frame, (header.kind, header.request, header.generation, fixed, _NOTHING)))
        elif rest == header.fixed and not header.tail:  # the whole frame, and no more: the usual case
            self._finish_frame(header, fixed, _NOTHING)
        else:
            self._land(header, fixed, rest)

    def _fill(self, count: int) -> None:
        """Take `count` bytes of the wanted buffers as read."""
        wanted = self._wanted
        while count:
            size = len(wanted[0])
            if count < size:
                wanted[0] = wanted[0][count:]
                return
            count -= size
            del wanted[0]
        if not wanted:
            self._complete()

    def _land(self, header: Header, fixed: Sequence[memoryview], rest: int) -> None:
        """The guess was right: of the `rest` bytes after the header, what is over lies in the spill."""
        spilled = self._spill[: max(0, rest - header.fixed)]
        if header.tail <= rest - header.fixed:
            self._finish_frame(header, fixed, memoryview(bytes(spilled[: header.tail])))
            spilled = spilled[header.tail :]
        else:
            self._begin_body(header, fixed)
            self._fill(min(rest, header.fixed))
        if len(spilled):
            self.feed(spilled)

    def _move(self, header: Header, fixed: Sequence[memoryview], guess: Sequence[memoryview], rest: int) -> None:
        """The guess was wrong: the `rest` bytes after the header lie in it, and then in the spill."""
        spilled = self._spill[: max(0, rest - self._offered_bytes)]
        if guess:
            spilled = memoryview(b"".join((*guess, spilled)))[:rest]
        self._begin_body(header, fixed)
        if not self._wanted:
            self._complete()
        if len(spilled):
            self.feed(spilled)

    def feed(self, data: Buffer) -> None:
        """Take bytes that were read elsewhere: copies them to where they belong.

        Raises nothing of its own: what is wrong with the bytes comes out of `next_frame`, after the frames before it.
        """
        self._guess = None
        view = memoryview(data)
        offset, end = 0, len(view)
        while offset < end and not self.error:
            if end - offset >= HEADER_BYTES and self.idle:
                taken = self._take_whole(view, offset)
                if taken:
                    offset += taken
                    continue
            target = self._wanted[0]
            count = min(len(target), end - offset)
            target[:count] = view[offset : offset + count]
            offset += count
            self._fill(count)

    def _take_whole(self, view: memoryview, offset: int) -> int:
        """Take a frame that lies in `view` as a whole; gives its length, or 0 if that is not so.

        The usual case, at a fifth of the cost; and nothing is written into anybody's arrays before the check.
        """
        try:
            header = decode_header(view, offset, self.chain, self._max_tail)
        except WireError as error:
            self._break(error)
            return len(view) - offset
        body = offset + HEADER_BYTES
        end = body + header.fixed + header.tail
        if end > len(view):
            return 0
        if crc32(view[body:end], 0) != header.body_crc:
            self._break(WireError(f"the body of a {header.kind.name} frame does not match its CRC"))
            return len(view) - offset
        try:
            fixed = self._claim(header)
        except WireError as error:
            self._break(error)
            return len(view) - offset
        for part in fixed:
            size = len(part)
            part[:] = view[body : body + size]
            body += size
        tail = memoryview(bytes(view[body:end]))
        self.chain = header.crc
        self.frames.append(new_tuple(Frame, (header.kind, header.request, header.generation, fixed, tail)))
        return end - offset

    def next_frame(self) -> Frame | None:
        """The next complete frame; None if more bytes are needed.

        Raises:
            WireError: if the bytes after the last complete frame are not a frame.
        """
        if self.frames:
            return self.frames.popleft()
        if self.error:
            raise self.error.with_traceback(None)
        return None

    def finish(self) -> None:
        """Say that the stream has ended.

        Raises:
            WireError: if it ended inside a frame.
        """
        if not self.error and not self.idle:
            self.error = WireError("the stream ended inside a frame")
        if self.error and not self.frames:
            raise self.error.with_traceback(None)

    def _complete(self) -> None:
        """The wanted buffers are full: go from header to body, or from body to a frame."""
        header = self._header
        if header is None:
            try:
                header = decode_header(self._head, 0, self.chain, self._max_tail)
                fixed = self._claim(header)
            except WireError as error:
                self._break(error)
                return
            self._begin_body(header, fixed)
            if self._wanted:
                return
        self._finish_frame(header, self._fixed, self._tail)
        self._begin()

    def _finish_frame(self, header: Header, fixed: Sequence[memoryview], tail: memoryview) -> None:
        """The body is where it belongs: check it."""
        crc = 0
        for part in fixed:
            crc = crc32(part, crc)
        if len(tail):
            crc = crc32(tail, crc)
        if crc != header.body_crc:
            self._break(WireError(f"the body of a {header.kind.name} frame does not match its CRC"))
            return
        self.chain = header.crc
        self.frames.append(new_tuple(Frame, (header.kind, header.request, header.generation, fixed, tail)))

    def _begin_body(self, header: Header, fixed: Sequence[memoryview]) -> None:
        self._header = header
        self._fixed = fixed
        self._tail = allocate(header.tail)
        self._wanted = [part for part in (*fixed, self._tail) if len(part)]

    def _claim(self, header: Header) -> Sequence[memoryview]:
        """The buffers for a frame's fixed part: the caller's, if they fit, else scratch.

        Raises:
            WireError: if that is more scratch than allowed; the stream is broken then.
        """
        try:
            fixed = self.place(header) if self.place else None
        except BaseException:
            # the frame has no home, and whoever catches this must not find the next one half read
            self._break(WireError(f"no memory was given for the fixed part of a {header.kind.name} frame"))
            raise
        if fixed is None:
            size = 0
        else:
            size = self._offered_bytes if fixed is self._offered else sum(map(len, fixed))
            if size == header.fixed:
                return fixed
        if header.fixed > self._max_scratch:
            kind = header.kind.name
            raise WireError(f"a {kind} frame has a fixed part of {header.fixed} bytes where {size} are expected")
        return (allocate(header.fixed),) if header.fixed else ()

    def _break(self, error: WireError) -> None:
        """Remember the error; it is raised once the frames before it have been taken.

        Without its traceback, here and wherever it is raised: that would keep the caller's buffers, and would
        grow with every raise.
        """
        self.error = error.with_traceback(None)
