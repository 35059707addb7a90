"""Reading and merging of infos in C survives any input, and leaks nothing."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioenv import speedups
from aioenv.spaces import infos as merging
from aioenv.spaces.infos import NO_RESULT, Columns, Schema, merge_infos
from tests.speedups.columns_kit import a_step, compiled, in_c, in_python, merged_in_c, merged_in_python, seen, view
from tests.speedups.growth_kit import check_nothing_grows

pytestmark = compiled

gone = memoryview(b"gone")
gone.release()
THREE = np.arange(3)
ODD: list[Any] = [
    None, True, -1, 1 << 70, 1.5, "x", b"", b"I\0\0\0\0", [], [None], [()], (), (1, 2, 3), {}, {1: 2}, object(),
    int, time.struct_time, THREE, np.zeros((2, 2)), np.array(None), np.float64(1), memoryview(b""), gone,
    memoryview(b"I\0\0\0\0")[::-1], memoryview(b"I\0\0\0\0").cast("c"), memoryview(b"I\0\0\0").cast("I"),
    memoryview(bytes(16)).cast("B", (4, 4)),
]  # fmt: skip
HARMLESS = (TypeError, ValueError, AttributeError, OverflowError)
INFO = {"x": 1.5, "y": np.float32(0.1)}


def harmless(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except HARMLESS as exc:
        return exc


def usual() -> tuple[Any, memoryview]:
    ((part, payload),) = a_step([INFO, {"z": 1.0}, INFO])
    return part, view(payload)


def named(n: int = 3) -> tuple[list[Columns], Schema]:
    """Columns of all n rows, and their schema, which Python has merged before."""
    ((part, payload),) = a_step([INFO] * n)
    columns = in_c(part, view(payload))
    merge_infos(columns, n)
    return columns, columns[0].schema


# ------------------------------------------------------------ to read


def test_reading_takes_any_arguments():
    part, payload = usual()
    read: Any = speedups.read_columns
    for args in ((), (part,), (part, payload), (part, payload, Columns, None)):
        assert isinstance(harmless(read, *args), TypeError)
    for odd in ODD:
        assert isinstance(harmless(in_c, odd, payload), AttributeError)
        assert harmless(in_c, part, odd) is None
        assert isinstance(harmless(read, part, payload, odd), TypeError), "struct_time, too: it needs more than three"


@pytest.mark.parametrize("name", ["start", "stop", "slots", "member", "member.start", "member.schemas", "_schemas"])
def test_reading_takes_any_part(name):
    part, payload = usual()
    for odd in ODD:
        schemas = SimpleNamespace(_schemas=part.member.schemas._schemas)
        member = SimpleNamespace(start=0, stop=3, schemas=schemas)
        its = SimpleNamespace(start=0, stop=3, slots=part.slots, member=member)
        assert len(in_c(its, payload)) == 2
        of = schemas if name == "_schemas" else member if name.startswith("member.") else its
        setattr(of, name.removeprefix("member."), odd)
        got = harmless(in_c, its, payload)
        assert got is None or isinstance(got, AttributeError) or (name == "slots" and odd is THREE)


def test_reading_takes_any_schema():
    part, payload = usual()
    known = part.member.schemas._schemas
    column = known[0].columns[0]
    for odd in [*ODD, (ODD, True, False), ((), True, False), ((column,), True, False), ((1,) * 70, True, False)]:
        known[0] = odd
        assert harmless(in_c, part, payload) is None
    known[0] = NO_RESULT
    assert in_c(part, payload) is None


@pytest.mark.parametrize(
    "slots",
    [
        np.arange(3, dtype=np.int32), np.arange(3, dtype=np.uint64), np.arange(3, dtype=">i8"), np.arange(3.0),
        np.arange(6)[::2], np.arange(6).reshape(3, 2), np.arange(4), np.arange(2), np.arange(0), [0, 1, 2],
        np.array([-(1 << 63), 1, (1 << 63) - 1]), np.array([5, 6, 7]), np.arange(3, dtype=object),
    ],
    ids=repr,
)  # fmt: skip
def test_slots_that_are_not_the_parts_are_pythons(slots):
    part, payload = usual()
    part.slots = slots
    assert in_c(part, payload) is None


def test_slots_that_are_not_aligned_are_slots():
    part, payload = usual()
    part.slots = np.ndarray((3,), np.int64, bytearray(b"-") + part.slots.tobytes(), 1)
    assert seen(in_c(part, payload)) == seen(in_python(part, payload))


def test_a_payload_that_is_not_contiguous_is_left_to_python():
    part, payload = usual()
    several = np.repeat(np.frombuffer(payload, np.uint8), 2)
    whole = np.frombuffer(payload, np.uint8)
    for odd in (
        payload.cast("b"),
        payload.cast("B", (1, len(payload))),
        view(bytes(payload)[::-1])[::-1],
        memoryview(several)[::2],
    ):
        assert in_c(part, odd) is None
    assert (
        in_c(part, memoryview(whole)) is not None
        and in_c(part, bytes(payload)) is in_c(part, bytearray(payload)) is None
    )


def test_nothing_is_read_beyond_the_end_of_a_payload():
    """Memory whose end is followed by no memory: a read beyond it ends the process."""
    part, payload = usual()
    whole = bytes(payload)
    space = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    here = ctypes.c_char.from_buffer(space)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(ctypes.addressof(here) + mmap.PAGESIZE)
    assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    for size in range(len(whole) + 1):
        space[mmap.PAGESIZE - size : mmap.PAGESIZE] = whole[:size]
        with memoryview(space) as all_of_it, all_of_it[mmap.PAGESIZE - size : mmap.PAGESIZE] as short:
            assert (in_c(part, short) is not None) is (size == len(whole))
    space[mmap.PAGESIZE - len(whole) : mmap.PAGESIZE] = whole[::-1]
    with memoryview(space) as all_of_it, all_of_it[mmap.PAGESIZE - len(whole) : mmap.PAGESIZE][::-1] as backwards:
        assert bytes(backwards) == whole and in_c(part, backwards) is None
    for place in range(5, 40):  # numbers of rows, of bytes, and rows
        spoilt = whole[:place] + b"\x7f" + whole[place + 1 :]
        space[mmap.PAGESIZE - len(whole) : mmap.PAGESIZE] = spoilt
        with memoryview(space) as all_of_it, all_of_it[mmap.PAGESIZE - len(whole) : mmap.PAGESIZE] as short:
            assert seen(in_c(part, short)) in (None, seen(in_python(part, view(spoilt))))
    del here
    gc.collect()
    space.close()


# ------------------------------------------------------------ to merge


def test_merging_takes_any_arguments():
    columns, schema = named()
    merge_columns: Any = speedups.merge_columns
    for args in ((), (columns,), (columns, 3), (columns, 3, merging._named, None)):
        assert isinstance(harmless(merge_columns, *args), TypeError)
    for odd in ODD:
        assert harmless(merged_in_c, odd, 3) is None
        assert harmless(merged_in_c, [odd], 3) is None
        assert harmless(merged_in_c, [*columns, odd], 3) is None
        assert harmless(merged_in_c, columns, odd) is None
        got = harmless(merged_in_c, columns, 3, odd)
        assert got is None if isinstance(odd, dict) else isinstance(got, TypeError)
        for place in range(3):
            each: list[Any] = [slice(0, 3), schema, columns[0].values]
            each[place] = odd
            assert harmless(merged_in_c, [tuple(each)], 3) is None or (place == 0 and odd is THREE)
    assert merged_in_c(columns, 3) is not None


NAMES: list[Any] = [
    None, [], (), (("x", "_x", None, ()),), (("x", "_x", None, ()),) * 3, (None, None), (1, 2), (("x",), ("y",)),
    ((1, "_1", None, ()), ("y", "_y", None, ())), (("x", 1, None, ()), ("y", "_y", None, ())),
    [("x", "_x", None, ()), ("y", "_y", None, ())], (("x", "_x", None, ()), ("x", "_x", np.dtype("f4"), ())),
    (("x", "_x", np.dtype("f2"), ()), ("x", "_x", np.dtype("f4"), ())),
    tuple((f"{i}", f"_{i}", None, ()) for i in range(70)), (("x", "_x", None, ()),) * 9999,
    (("x", "_x", None), ("y", "_y", None)), (("x", "_x", None, None), ("y", "_y", None, ())),
    (("x", "_x", None, ()), ("x", "_x", None, (1,))), (("x", "_x", None, ()), ("x", "_x", np.dtype("f8"), ())),
]  # fmt: skip


@pytest.mark.parametrize("names", NAMES, ids=lambda names: f"{names!r:.60}")
def test_merging_takes_any_names(names):
    columns, schema = named()
    assert merged_in_c(columns, 3, {id(schema): (schema, names)}) is None


def test_merging_takes_any_schema_and_what_is_said_of_it():
    columns, schema = named()
    _, names = merging._named[id(schema)]
    for odd in (*ODD, (Schema(*schema), names), (schema,), (schema, names, 1), [schema, names]):
        assert harmless(merged_in_c, columns, 3, {id(schema): odd}) is None
    for floats, by_row in ((False, False), (True, True), (1, False), (True, 0), (False, True)):
        other = schema._replace(floats=floats, by_row=by_row)
        assert merged_in_c([columns[0]._replace(schema=other)], 3, {id(other): (other, names)}) is None
    assert merged_in_c(columns, 3, {id(schema): (schema, names)}) is not None


def test_dtypes_that_raise_are_pythons():
    class Raising:
        def __eq__(self, other: object) -> Any:
            raise LookupError("compared")

        __hash__ = None  # type: ignore[assignment]

    columns, schema = named()
    names = (("x", "_x", Raising(), ()), ("x", "_x", Raising(), ()))
    assert merged_in_c(columns, 3, {id(schema): (schema, names)}) is None
    with pytest.raises(TypeError):  # as numpy does of what is no dtype
        merged_in_c(columns, 3, {id(schema): (schema, (("x", "_x", Raising(), ()), ("y", "_y", None, ())))})


def apart(table: Any) -> Any:
    """The same, not aligned."""
    return np.ndarray(table.shape, table.dtype, bytearray(b"-") + table.tobytes(), 1)


TABLE = np.arange(6.0).reshape(2, 3)
ROWS = np.array([2, 0, 1])
# positions and values in a batch of 3 rows, and whether C merges them
FITS: dict[str, tuple[Any, Any, bool]] = {
    "usual": (slice(0, 3), TABLE, True),
    "rows": (ROWS, TABLE, True),
    "not aligned": (apart(ROWS), apart(TABLE), True),
    "no end": (slice(0, None), TABLE, False),
    "up to": (slice(None, 3), TABLE, True),
    "every": (slice(0, 3, 1), TABLE, True),
    "backwards": (slice(2, None, -1), TABLE, False),
    "by twos": (slice(0, 3, 2), TABLE[:, :2].copy(), False),
    "by twos, but all": (slice(0, 3, 2), TABLE, False),
    "too few": (slice(0, 2), TABLE, False),
    "too many": (slice(0, 4), np.zeros((2, 4)), False),
    "one for all": (slice(0, 3), TABLE[:, :1].copy(), False),
    "behind the end": (slice(2, 5), TABLE, False),
    "before the beginning": (slice(-3, 3), TABLE, False),
    "as many before the beginning": (slice(-1, 2), TABLE, False),
    "the wrong way round": (slice(3, 1), TABLE[:, :0], False),
    "the end of which is too small a number": (slice(1, -(1 << 80)), TABLE, False),
    "no number": (slice("a", "b"), TABLE, False),
    "negative rows": (np.array([-1, 0, 1]), TABLE, False),
    "a row too many": (np.array([1, 2, 3]), TABLE, False),
    "fewer rows": (ROWS[:2], TABLE, False),
    "int32": (ROWS.astype(np.int32), TABLE, False),
    "uint64": (ROWS.astype(np.uint64), TABLE, False),
    "a mask": (np.ones(3, np.bool_), TABLE, False),
    "a list": ([2, 0, 1], TABLE, False),
    "every other row": (np.arange(6)[::2] // 2, TABLE, True),
    "a view of rows": (np.array([2, 9, 0, 9, 1])[::2], TABLE, False),
    "rows of rows": (ROWS[None], TABLE, False),
    "rows of another order": (ROWS.astype(">i8"), TABLE, False),
    "float32": (slice(0, 3), TABLE.astype(np.float32), False),
    "int64": (slice(0, 3), TABLE.astype(np.int64), False),
    "complex": (slice(0, 3), TABLE.astype(np.complex64), False),
    "another order": (slice(0, 3), TABLE.astype(">f8"), False),
    "Fortran's": (slice(0, 3), np.asfortranarray(TABLE), False),
    "columns": (slice(0, 3), list(TABLE), False),
    "a key more": (slice(0, 3), np.zeros((3, 3)), False),
    "a key less": (slice(0, 3), np.zeros((1, 3)), False),
    "one axis": (slice(0, 3), np.zeros(3), False),
    "three axes": (slice(0, 3), np.zeros((2, 3, 1)), False),
    "a masked array": (slice(0, 3), np.ma.masked_array(TABLE), False),
    "a scalar": (slice(0, 3), np.float64(1), False),
}


@pytest.mark.parametrize("name", FITS)
def test_positions_and_values_that_do_not_fit_are_pythons(name):
    _, schema = named()
    positions, values, by_c = FITS[name]
    for others in ([], [Columns(slice(0, 3), schema, -TABLE)]):  # alone it may be all alike
        parts = [*others, Columns(positions, schema, values)]
        got = merged_in_c(parts, 3)
        assert (got is not None) is by_c
        expected = merged_in_python(parts, 3)
        if by_c:
            assert seen(got) == seen(expected)


def test_many_sorts_are_pythons():
    parts: list[Columns] = []
    for number in range(17):
        ((part, payload),) = a_step([{f"key {number}": 1.0}])
        parts += in_c(part, view(payload))
    merge_infos(parts, 1)
    assert merged_in_c(parts, 1) is None
    assert seen(merged_in_c(parts[:16], 1)) == seen(merge_infos(parts[:16], 1))


def test_many_keys_are_pythons():
    ((part, payload),) = a_step([{f"key {number}": 1.0 for number in range(64)}, {"one more": 2.0}])
    parts = in_c(part, view(payload))
    assert len(parts) == 2
    expected = merge_infos(parts, 2)
    assert merged_in_c(parts, 2) is None
    assert seen(merged_in_c(parts[:1], 2)) == seen(merge_infos(parts[:1], 2)) and len(expected) == 130


# ------------------------------------------------------------ what stays behind


@pytest.mark.parametrize("way", ["usual", "cut short", "a row too many", "no such sort", "no part", "no columns"])
def test_reading_leaves_nothing_behind(way):
    part, payload = usual()
    kind: Any = Columns
    match way:
        case "cut short":
            payload = payload[:-1]
        case "a row too many":
            part.slots, part.stop = part.slots[:2], 2
        case "no such sort":
            del part.member.schemas._schemas[1]
        case "no part":
            part = SimpleNamespace(slots=part.slots, start=0, stop=3, member=part.member.schemas)
        case "no columns":
            kind = int
    read: Any = speedups.read_columns

    def act() -> None:
        if way in ("no part", "no columns"):
            with pytest.raises((AttributeError, TypeError)):
                read(part, payload, kind)
        else:
            assert (read(part, payload, kind) is not None) is (way == "usual")

    member: Any = part.member
    schemas = list(member.schemas._schemas.values()) if hasattr(member, "schemas") else []
    check_nothing_grows(act, part, payload, payload.obj, part.slots, member, *schemas, kind, times=20_000)


@pytest.mark.parametrize("way", ["usual", "two dtypes", "not named", "does not fit", "odd names", "odd dtype"])
def test_merging_leaves_nothing_behind(way):
    ((part, payload),) = a_step([INFO, {"z": 1.0}, {"y": 1.0} if way == "two dtypes" else INFO])
    columns: Any = in_c(part, view(payload))
    names = dict(merging._named)
    merge_infos(columns, 3)
    names = {id(each.schema): merging._named[id(each.schema)] for each in columns}
    first = columns[-1].schema
    match way:
        case "not named":
            del names[id(first)]
        case "does not fit":
            columns.append(Columns(np.array([0, 3]), first, np.zeros((len(first.columns), 2))))
        case "odd names":
            names[id(first)] = first, (("z", "_z", None),)
        case "odd dtype":
            names[id(first)] = first, (("z", "_z", "no dtype", ()),)

    def act() -> None:
        if way == "odd dtype":
            with pytest.raises(TypeError):
                merged_in_c(columns, 3, names)
        else:
            assert (merged_in_c(columns, 3, names) is not None) is (way == "usual")

    held = [item for each in columns for item in each]
    said = [its for _, its in names.values()]
    texts = [item for its in said for name in its for item in name]
    check_nothing_grows(act, columns, *columns, *held, names, *names.values(), *said, *texts, times=20_000)


def test_an_array_is_all_that_is_new():
    columns, _ = named()
    got = merged_in_c(columns, 3)
    assert all(sys.getrefcount(got[key]) == 2 for key in got)
    tables = {id(got[key].base): got[key].base for key in ("x", "_x", "_y")}
    assert len(tables) == 2 and got["y"].base is None and got["y"].dtype == np.float32
