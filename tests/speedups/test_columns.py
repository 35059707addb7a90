"""Infos of numbers and arrays are read and merged in C as in Python, byte for byte, or left to Python."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

import aioenv
from aioenv import speedups
from aioenv.core.requests import WorkerRequest, read_payload
from aioenv.spaces import infos as merging
from aioenv.spaces.infos import Columns, Schema, merge_infos
from tests.kits.process_kit import environment
from tests.speedups.columns_kit import (
    Ends,
    a_step,
    compiled,
    in_c,
    in_python,
    merged_in_c,
    merged_in_python,
    seen,
    view,
)
from tests.speedups.parent_kit import outcomes

pytestmark = compiled

TYPES = [float, np.float64, np.float32, np.float16]
# what makes a value of other sorts of a float
ARRAYS: list[Any] = [
    lambda x: np.full(2, x), lambda x: np.full((2, 3), x, np.float32), lambda x: np.full(3, x == x, np.bool_),
    lambda x: np.full((1, 0), x), lambda x: np.full(2, str(x)), lambda x: np.array([(x, 1)], "f4,i8"),
]  # fmt: skip
OTHERS: list[Any] = [lambda x: int(np.sign(np.nan_to_num(x))), lambda x: x > 0, lambda x: np.int16(x > 0)]
KEYS = ["x", "y", "xy", "x_position", "x_velocity", "reward_ctrl", "ö", "", "no float"]
# a sort of info: its keys, in order, and what makes their values
sort = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(TYPES), min_size=1, max_size=6)
mixed = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(TYPES + OTHERS + ARRAYS), min_size=1, max_size=6)
value = st.floats(width=16) | st.sampled_from([-0.0, float("nan"), float("inf")])


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[tuple[int, int], list[int], list[dict[str, Any]]]]:
    """By worker: its slots, those of its rows that step, and their infos, some of them empty."""
    sorts = draw(st.lists(draw(st.sampled_from([sort, mixed])), min_size=1, max_size=4))
    told, start = [], 0
    for count in draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)):
        rows = draw(st.just(list(range(count))) | st.sets(st.integers(0, count - 1), min_size=1).map(sorted))
        kinds = draw(st.lists(st.none() | st.sampled_from(sorts), min_size=len(rows), max_size=len(rows)))
        infos = [{key: of(draw(value)) for key, of in kind.items()} if kind else {} for kind in kinds]
        told.append(((start, start + count), rows, infos))
        start += count
    return told


@settings(deadline=None, max_examples=400)
@given(steps(), st.booleans())
def test_what_is_told_in_numbers_and_arrays_is_the_same_in_c(told, same_sorts):
    merging._named.clear()  # it forgets all at once when it is full, amid a merge perhaps
    same: dict[Schema, Schema] = {}
    columns: list[Columns] = []
    start = 0
    for (first, last), rows, infos in told:
        ends = Ends(first, last, same if same_sorts else {})
        part, payload = ends.tell(list(zip(rows, infos, strict=True)), rows, start)
        in_python(part, view(payload))
        got = in_c(part, view(payload))
        assert got is not None and seen(got) == seen(in_python(part, view(payload)))
        columns += got
        start = part.stop
    kinds: dict[str, set[Any]] = {}
    for _, _, infos in told:
        for info in infos:
            for key, item in info.items():
                kinds.setdefault(key, set()).add((np.asarray(item).dtype.str, np.shape(item)))
    floats = {each.schema.floats for each in columns}
    narrow = any(dtype in ("<f4", "<f2") for each in kinds.values() for dtype, _ in each)
    expected = merged_in_python(columns, start)
    assert seen(merge_infos(columns, start)) == seen(expected)
    got = merged_in_c(columns, start)
    if not columns or any(len(each) > 1 for each in kinds.values()):
        assert got is None
    elif got is not None or len(floats) == 1 or not narrow:  # a table of narrow ones is not for arrays
        assert seen(got) == seen(expected)
    assert seen(merge_infos(columns, start)) == seen(expected)


HOPPER = {"x_position": 1.25, "z_distance_from_origin": -0.5, "x_velocity": 3.5, "reward_survive": 1.0}
BEGUN = {"x_position": 0.5, "z_distance_from_origin": 0.0}
MORE = {"speed": np.float32(0.1), "x_velocity": 2.0}


def hoppers(*begun: int, n: int = 6) -> list[dict[str, Any]]:
    return [dict(BEGUN) if i in begun else {**HOPPER, "x_velocity": i / 3} for i in range(n)]


USUAL: dict[str, Sequence[Sequence[dict[str, Any]]]] = {
    "all alike": [hoppers(), hoppers()],
    "some have begun": [hoppers(1, 4), hoppers(0)],
    "all have begun": [hoppers(0, 1, 2, n=3), hoppers(0, n=1)],
    "one row": [hoppers(n=1)],
    "two of one batch": [[HOPPER, MORE], [MORE, BEGUN]],
    "narrow": [[{"a": np.float32(0.1), "b": np.float16(0.1), "c": 0.1}] * 3] * 2,
    "as many keys as there may be": [[{f"key {i}": float(i) for i in range(64)}]],
    "nothing told by one": [hoppers(n=2), [{}, {}]],
    "nothing told by a row": [[{}, HOPPER], [HOPPER, {}]],
    "numbers": [[{"lives": 3, "done": True, "frame": np.int32(7), "x": 0.5}] * 2] * 2,
    "arrays": [[{"x": 0.5, "tendons": np.arange(2.0), "mask": np.array([[True, False]])}] * 2] * 2,
    "arrays, and some have begun": [[{"x": 0.5, "v": np.ones(2), "n": 1}, {"x": 1.5}], [{"v": np.zeros(2)}]],
    "arrays of nothing": [[{"v": np.ones((3, 0)), "x": 1}]],
    "bytes and texts": [[{"s": np.array(["a", "bc"]), "b": np.array([b"x"]), "r": np.zeros(1, "i2,f8")}] * 2],
}


@pytest.mark.parametrize("name", USUAL)
def test_what_is_usual_is_done_in_c(name):
    columns: list[Columns] = []
    for part, payload in a_step(*USUAL[name]):
        got = in_c(part, view(payload))
        assert seen(got) == seen(in_python(part, view(payload)))
        assert all(isinstance(each, Columns) for each in got)
        assert all(isinstance(each.values, np.ndarray if each.schema.floats else list) for each in got)
        columns += got
    size = sum(map(len, USUAL[name]))
    expected = merged_in_python(columns, size)
    merge_infos(columns, size)
    got = merged_in_c(columns, size)
    assert seen(got) == seen(expected) == seen(merge_infos(tuple(columns), size))
    assert got and list(got)[1::2] == [f"_{key}" for key in list(got)[::2]]


def test_python_merges_what_is_new_and_c_what_it_has_merged():
    columns = [each for part, payload in a_step(*USUAL["some have begun"]) for each in in_c(part, view(payload))]
    for _ in range(2):
        merging._named.clear()
        assert merged_in_c(columns, 12) is None
        merge_infos(columns, 12)
        assert seen(merged_in_c(columns, 12)) == seen(merge_infos(columns, 12))


def test_a_group_of_no_rows_is_one_in_c():
    ((part, payload),) = a_step([HOPPER])
    none = payload[:9] + bytes(4 + 8)  # -1 rows of all become 0 of some, and 0 bytes
    got = in_c(part, view(none))
    assert len(got) == 1 and seen(got) == seen(in_python(part, view(none)))
    merge_infos(got, 1)
    assert seen(merged_in_c(got, 1)) == seen(merge_infos(got, 1)) and not merge_infos(got, 1)["_x_position"].any()


def test_columns_of_any_rows_merge_in_their_order():
    """The last of those that say something of a row counts, as in Python."""
    ((part, payload),) = a_step([BEGUN])
    schema = in_c(part, view(payload))[0].schema
    table = np.arange(6.0).reshape(2, 3)
    merge_infos([Columns(slice(0, 3), schema, table)], 3)
    cases = [
        [Columns(np.array([2, 0, 1]), schema, table)],
        [Columns(np.array([1, 1, 1]), schema, table)],
        [Columns(slice(0, 3), schema, table), Columns(np.array([4, 1, 2]), schema, -table)],
        [Columns(np.array([4, 1, 2]), schema, -table), Columns(slice(1, 4), schema, table)],
        [Columns(slice(None, 3), schema, table), Columns(slice(3, 3), schema, table[:, :0])],
    ]
    for parts in cases:
        assert seen(merged_in_c(parts, 5)) == seen(merged_in_python(parts, 5))


def test_slots_apart_stand_where_they_are():
    ends = Ends(10, 20, {})
    rows = [1, 2, 5, 8, 9]
    for told in ([0, 1, 2, 3, 4], [0], [4], [1, 3], [2, 3, 4]):
        infos = [(rows[i], HOPPER) for i in told]
        part, payload = ends.tell(infos, rows, 3)
        got = in_c(part, view(payload))
        assert seen(got) == seen(in_python(part, view(payload)))
        assert np.arange(99)[got[0].positions].tolist() == [3 + i for i in told]


def test_a_row_that_the_part_has_not_is_pythons():
    ends = Ends(10, 20, {})
    _, payload = ends.tell([(row, HOPPER) for row in (1, 2, 5)], [1, 2, 5, 6], 3)
    for rows in ([1, 2], [0, 1, 2, 6, 7], [2, 5], [6], [0, 1, 2]):
        part, _ = ends.tell([], rows, 3)
        assert in_c(part, view(payload)) is None
        read_payload(part, view(payload))
        assert len(part.columns) == 1
    part, _ = ends.tell([], [1, 2, 5, 6], 3)
    assert in_c(part, view(payload)) is not None


# ------------------------------------------------------------ payloads that are not what they were


def three_groups() -> tuple[WorkerRequest, bytes]:
    """Of a worker whose slots are not the first, and of which not all step."""
    ends = Ends(4, 12, {})
    infos = [HOPPER, BEGUN, MORE, HOPPER, BEGUN]
    ends.tell([(0, {"said": "a sort that is no floats"})], [0], 0)
    part, payload = ends.tell(list(zip([0, 2, 3, 4, 7], infos, strict=True)), [0, 2, 3, 4, 7], 2)
    assert len(in_c(part, view(payload))) == 3
    return part, payload


def check(part: WorkerRequest, payload: bytes) -> Any:
    """C has the same as Python, or nothing; and with C in its place, what is read is what it is without."""
    got, expected = in_c(part, view(payload)), in_python(part, view(payload))
    if got is not None:
        assert seen(got) == seen(expected)
    part.columns = ()
    try:
        read_payload(part, view(payload))
    except Exception as exc:
        assert f"{type(exc).__name__}: {exc}" == expected
    else:
        assert seen(part.columns) == seen(expected)
    return got


def test_a_payload_that_is_cut_short_or_too_long_is_left_to_python():
    part, payload = three_groups()
    for size in range(len(payload)):
        assert check(part, payload[:size]) is None
    for more in (b"\0", bytes(16), payload):
        assert check(part, payload + more) is None
    assert check(part, payload) is not None


@pytest.mark.parametrize("whole", [True, False], ids=["all rows", "some rows"])
def test_a_payload_with_any_byte_changed_is_read_as_in_python(whole):
    part, payload = a_step(hoppers(n=3))[0] if whole else three_groups()
    read = 0
    for place in range(len(payload)):
        for byte in {0, 1, 2, 3, 8, 127, 255, *(payload[place] ^ 1 << bit for bit in range(8))} - {payload[place]}:
            got = check(part, payload[:place] + bytes([byte]) + payload[place + 1 :])
            read += got is not None
    assert read > 500, "of what is spoilt in its numbers alone, C finds nothing"


@pytest.mark.parametrize("size", [0, 8, 31, 33, 1 << 32, (1 << 64) - 8, (1 << 64) - 1])
@pytest.mark.parametrize("count", [-1, -2, 0, 1, 2, (1 << 31) - 1, -(1 << 31)])
def test_sizes_and_counts_that_do_not_fit_are_pythons(size, count):
    ((part, payload),) = a_step([HOPPER])
    head = payload[:9] + (count % (1 << 32)).to_bytes(4, "little") + size.to_bytes(8, "little")
    got = check(part, head + payload[21:])
    assert got is None


@pytest.mark.parametrize("number", [1, 2, 1 << 31, (1 << 32) - 1])
def test_an_unknown_schema_is_left_to_python(number):
    ((part, payload),) = a_step([HOPPER])
    assert check(part, payload[:5] + number.to_bytes(4, "little") + payload[9:]) is None


def test_sorts_of_something_else_are_pythons():
    for info in ({"s": "s"}, {"x": 1.0, "o": None}, {"v": np.array([None])}, {"d": {"x": 1.0}}, {"_x": 1.0, "x": 1.0}):
        (told,) = a_step([info, info])
        assert check(*told) is None
    ((part, payload),) = a_step([HOPPER])
    (many,) = a_step([{f"key {i}": float(i) for i in range(65)}])
    assert check(*many) is None, "there are more keys than there is room for"
    assert check(part, payload) is not None and check(part, b"") is None and check(part, b"I") is None


# ------------------------------------------------------------ whose memory it is


def test_tables_keep_the_payload():
    (part, payload), *_ = a_step(hoppers(1))
    data = bytearray(payload)
    got = in_c(part, memoryview(data))
    assert [each.values.base is data for each in got + in_python(part, memoryview(data))] == [True] * 4
    expected = seen(in_python(part, view(payload)))
    del data, part
    gc.collect()
    _ = [bytearray(b"x" * len(payload)) for _ in range(1000)]
    assert seen(got) == expected
    ((part, payload),) = a_step(hoppers(1))
    assert [each.values.flags.writeable for each in in_c(part, memoryview(payload))] == [False] * 2


@pytest.mark.parametrize("name", USUAL)
def test_what_is_merged_is_the_callers_own(name):
    payloads = [(part, view(payload)) for part, payload in a_step(*USUAL[name])]
    columns = [each for told in payloads for each in in_c(*told)]
    size = sum(map(len, USUAL[name]))
    merge_infos(columns, size)
    first = merged_in_c(columns, size)
    before = seen(first)
    arrays = list(first.values())
    for i, array in enumerate(arrays):
        assert array.flags.aligned and array.flags.c_contiguous and array.flags.writeable
        assert not any(np.shares_memory(array, told) for each in columns for told in each.values)
        assert not any(np.shares_memory(array, other) for other in arrays[:i])
    second = merged_in_c(columns, size)
    for array in arrays:
        array[...] = array.dtype.type(7) if array.dtype.names is None else 7
    assert seen(second) == before == seen(merged_in_c(columns, size))
    columns.clear()
    del payloads
    gc.collect()
    assert seen(second) == before


# ------------------------------------------------------------ real envs


async def told_by_hoppers(mode: AutoresetMode) -> str:
    """A digest of all infos of a run in which episodes end."""
    said = hashlib.sha256()
    async with aioenv.make_vec("Hopper-v5", num_envs=4, num_workers=2, autoreset_mode=mode) as envs:
        said.update(repr(seen((await envs.reset(seed=3))[1])).encode())
        rng = np.random.default_rng(1)
        ends = 0
        for _ in range(150):
            result = await envs.step(rng.uniform(-1, 1, (4, 3)).astype(np.float32))
            said.update(repr(seen(result.info)).encode())
            ends += int(result.terminated.sum())
    assert ends > 5
    return said.hexdigest()


def say(mode: str) -> None:
    assert not speedups.compiled
    print(asyncio.run(told_by_hoppers(AutoresetMode[mode])))


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_real_infos_are_the_same_without_c(monkeypatch, mode):
    read, merged = outcomes(monkeypatch, "read_columns"), outcomes(monkeypatch, "merge_columns")
    in_c = asyncio.run(told_by_hoppers(AutoresetMode[mode]))
    assert sum(each is not None for each in read) > 200 and sum(each is not None for each in merged) > 100
    code = "from tests.speedups import test_columns as tests; "
    run = [sys.executable, "-c", code + f"tests.say({mode!r})"]
    environ = {**environment(), speedups.VARIABLE: "1"}
    said = subprocess.run(run, capture_output=True, text=True, check=False, env=environ)
    assert (said.stdout.strip(), said.stderr) == (in_c, "")
