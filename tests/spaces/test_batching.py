"""Batching: infos merge as Gymnasium's `_add_info` does, layouts take apart and put together what they should."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import given, settings
from hypothesis import strategies as st

from aioenv.assign import spread
from aioenv.errors import ActionError, WireError
from aioenv.ipc.messages import dump, dump_columns, load, load_columns
from aioenv.native.hook_results import merge_reset_infos
from aioenv.spaces.autoreset import parse_mode
from aioenv.spaces.infos import MAX_SCHEMAS, ColumnGroup, Gatherer, SchemaTable, merge_infos
from aioenv.spaces.layout import Layout, byte_view
from tests.kits.compare import assert_same
from tests.kits.zoo import SPACES


class Holder(VectorEnv):
    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs


def by_gymnasium(infos: list[dict]) -> dict:
    holder, merged = Holder(len(infos)), {}
    for row, info in enumerate(infos):
        merged = holder._add_info(merged, info, row)
    return merged


def by_workers(steps: list[list[dict]], workers: int) -> list[dict]:
    """Several steps through the same gatherers and tables, with the journey in between."""
    spans = spread(len(steps[0]), workers)
    same: dict = {}
    ends = [(Gatherer(), SchemaTable(same)) for _ in spans]
    results = []
    for infos in steps:
        parts = []
        for (gatherer, table), (start, stop) in zip(ends, spans, strict=True):
            groups = gatherer.gather(list(enumerate(infos[start:stop])), range(stop - start))
            table.update(load(dump(gatherer.take_new_schemas())))
            if any(group.objects for group in groups):
                groups = load(dump(groups))
            else:
                groups = [ColumnGroup(*group, []) for group in load_columns(memoryview(dump_columns(groups)))]
            for group in groups:
                rows = range(stop - start) if group.rows is None else group.rows
                whole = group.rows is None
                positions = slice(start, stop) if whole else np.array(rows) + start
                parts.append(table.unpack(group, positions, len(rows)))
        results.append(merge_infos(parts, len(infos)))
    return results


# what a key holds is of one kind in all envs, as in real infos, or Gymnasium itself may raise
values = {
    "number": st.floats(-1e6, 1e6) | st.integers(-1000, 1000),
    "narrow": st.floats(width=32).map(np.float32),
    "flag": st.booleans(),
    "thing": st.text(max_size=3) | st.none() | st.booleans().map(np.bool_),
    "vector": st.lists(st.floats(), min_size=2, max_size=2).map(np.array),
    "final_obs": st.lists(st.floats(), min_size=1, max_size=3).map(np.array),
}
flat = st.fixed_dictionaries({}, optional=values)
info = st.fixed_dictionaries({}, optional={**values, "nested": flat, "deep": st.fixed_dictionaries({"er": flat})})


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(info, min_size=n, max_size=n), min_size=1, max_size=3)),
    st.integers(1, 3),
)
def test_infos_merge_as_gymnasiums(steps, workers):
    workers = min(workers, len(steps[0]))
    steps = [*steps, *steps]  # the second time their sorts are known
    for got, infos in zip(by_workers(steps, workers), steps, strict=True):
        assert_same(got, by_gymnasium(infos))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_usual_step_and_the_unusual_one(workers):
    usual = [{"a": 1.5 * i, "b": np.float32(i), "c": {"d": i}} for i in range(6)]
    arrays = [{"x": np.arange(3) + i, "y": float(i)} for i in range(6)]
    other_shape = [{"x": np.zeros((2, 2)), "y": 0.0} for _ in range(6)]
    odd = [*usual[:3], {"a": 7.0}, {}, {"a": 1, "z": "text"}]
    wide = [{"n": 2**70}, *({"n": i} for i in range(5))]
    floats = [{"a": 1.5 * i, "b": np.float32(i), "c": float(i)} for i in range(6)]
    fewer = [*floats[:2], {"c": 1.0, "a": 2.0}, *floats[3:5], {"d": 3.0, "b": np.float32(1)}]
    other_type = [*floats[:4], {"c": np.float32(1), "a": 2.0}, floats[5]]
    steps = [usual, arrays, other_shape, arrays, odd, usual, [{}] * 6, floats, fewer, other_type, fewer]
    for got, infos in zip(by_workers(steps, workers), steps, strict=True):
        assert_same(got, by_gymnasium(infos))
    # past 64 bits: an object comes first, and decides
    (got,) = by_workers([wide], workers)
    assert got["n"].dtype == object and got["n"].tolist() == [2**70, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "infos",
    [
        [{"x": 1}, {"_x": False}],
        [{"x": 1, "_x": False}, {"x": 2, "_x": True}],
        [{"a": np.zeros(2, [("p", "i4"), ("q", "f8")])}, {"a": np.ones(2, [("p", "i4"), ("q", "f8")])}],
        [{"a": None}, {"a": 5}],
        [{"a": "x"}, {"a": 2.5}, {"a": True}],
        [{"n": {"a": None}}, {"n": {"a": 5}}],
        [{"a": np.array(1.5)}, {"a": np.array(2.5)}],
        [{"a": np.array(["x", None], object)}, {"a": np.array([1, 2], object)}],
        [{"a": np.float32(1)}, {"a": 1.1}, {"a": 3}],
        [{1: "int keys", (2, 3): 4.0}, {}],
        [{"final_obs": np.zeros(2), "final_info": {"t": 1, "d": {}}}, {"t": 2}],
        [{"final_obs": np.zeros(2), "_x": True}, {"x": 2}],
        [{"final_obs": np.zeros(2, np.float32)}, {"final_obs": np.zeros(2)}, {"final_obs": {"a": np.zeros(2)}}],
        [{"final_obs": np.int64(3)}, {"final_obs": 4}, {"final_obs": np.array(5)}, {"final_obs": (6, "x")}],
        [{"final_obs": np.array([None, 1])}, {"final_obs": np.arange(6.0).reshape(2, 3).T}],
        [{"d": {"e": {}}}, {"d": {}}, {"d": {"e": {"x": 1}}}],
        [{"d": OrderedDict(x=1)}, {"d": {"x": 2}}],
        [{"episode": {"r": np.float32(1.5), "l": 7, "t": 0.25}, "lives": 3}, {"lives": 2}],
    ],
)
def test_unusual_infos_merge_as_gymnasiums(infos, workers):
    for got in by_workers([infos, infos], workers):
        assert_same(got, by_gymnasium(infos))


@pytest.mark.parametrize("starts", [[0], [2], [0, 1], [1, 2], [0, 1, 2]])
def test_infos_of_native_slots_that_begin_and_of_others_merge_as_gymnasiums(starts):
    """The dtype of a column is that of the first slot, as there."""
    columns = {"x": np.array([0.5, 1.5, 2.5]), "stepped": np.array([1, 2, 3])}
    begun = {"x": np.array([7, 8, 9])[starts], "begun": np.array([0.25, 0.5, 0.75])[starts]}
    infos = [{name: column[slot] for name, column in columns.items()} for slot in range(3)]
    for index, slot in enumerate(starts):
        infos[slot] = {name: rows[index] for name, rows in begun.items()}
    got = merge_reset_infos({name: column.copy() for name, column in columns.items()}, begun, np.array(starts), 3)
    assert_same(dict(sorted(got.items())), dict(sorted(by_gymnasium(infos).items())))


def test_last_observations_are_arrays_of_their_own():
    infos = [{"final_obs": np.full((2, 3), float(row)), "final_info": {}} for row in range(4)]
    got = by_workers([infos, infos], 2)[1]["final_obs"]
    for row, obs in enumerate(got):
        assert obs.flags.writeable and obs.flags.owndata
        obs += 10
        assert [float(each[0, 0]) for each in got] == [10.0 + i if i <= row else float(i) for i in range(4)]


def test_columns_that_are_cut_short_are_an_error_of_the_wire():
    groups = [ColumnGroup(3, (0, 2), b"12345678", []), ColumnGroup(4, None, b"", [])]
    payload = dump_columns(groups)
    assert [ColumnGroup(*group, []) for group in load_columns(memoryview(payload))] == groups
    for wrong in (*(payload[:i] for i in range(1, len(payload))), payload + b"x"):
        with pytest.raises(WireError):
            load_columns(memoryview(wrong))


def test_dicts_whose_keys_never_repeat_within_one_sort_do_not_fill_the_memory():
    gatherer = Gatherer()
    for t in range(3 * MAX_SCHEMAS):
        gatherer.gather([(0, {"thing": type(f"T{t}", (), {})()})], range(1))
    assert len(gatherer._ids) == 1 and len(gatherer._known) <= MAX_SCHEMAS


def test_dicts_of_the_usual_sort_are_looked_at_together_and_others_are_not_taken_for_them(monkeypatch):
    gatherer = Gatherer()
    usual = [(0, {"a": 1.0, "b": 2.0}), (1, {"a": 3.0, "b": 4.0})]
    first = gatherer.gather(usual, range(2))
    for odd in (
        [usual[0], (0, usual[1][1])],  # twice the same row
        [usual[0], (1, {"b": 4.0, "a": 3.0})],
        [usual[0], (1, {"a": 3.0, "b": 4})],
        usual[:1],
    ):
        got = [(group.rows, group.data) for group in gatherer.gather(odd, range(2))]
        assert got == [(group.rows, group.data) for group in Gatherer().gather(odd, range(2))]
        assert got != [(group.rows, group.data) for group in first]
    assert gatherer.gather(usual, range(2)) == first
    monkeypatch.delattr(Gatherer, "_gather")  # that sort is the usual one again
    assert gatherer.gather(usual, range(2)) == first


@pytest.mark.parametrize(
    "infos",
    [
        [{"x": float(row), "n": row} for row in range(4)],
        [{"x": 1.0, "y": 2.0}, {"x": 3.0}, {"x": 4.0}, {"z": 5.0, "x": 6.0}],
    ],
)
def test_usual_parts_are_joined_as_a_whole(infos, monkeypatch):
    expected = by_gymnasium(infos)
    monkeypatch.delattr("aioenv.spaces.infos._assign")  # one row after the other
    assert_same(by_workers([infos, infos], 2)[1], expected)


def test_what_gymnasium_can_not_merge_is_given_as_objects():
    infos = [{"a": np.timedelta64(5, "s")}, {"a": np.timedelta64(7, "ms")}]
    with pytest.raises(TypeError):
        by_gymnasium(infos)
    (got,) = by_workers([infos], 2)
    assert got["a"].tolist() == [np.timedelta64(5, "s"), np.timedelta64(7, "ms")]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_int_past_64_bits_is_an_object_and_spoils_no_later_step(workers):
    steps = [[{"a": 1}, {"a": 2**70}], [{"a": 1}, {"a": 2}], [{"a": 2**70}, {"a": 1}], [{"a": 3}, {"a": 4}]]
    first, second, third, last = by_workers(steps, workers)
    assert first["a"].tolist() == [1, 2**70] and third["a"].tolist() == [2**70, 1]
    assert_same(second, by_gymnasium(steps[1]))
    assert_same(last, by_gymnasium(steps[3]))


def test_arrays_of_different_shapes_become_objects_and_nothing_is_lost(caplog):
    infos = [{"x": np.zeros(2), "t": 1}, {"x": np.zeros(3), "t": 2}]
    (got,) = by_workers([infos], 2)
    assert got["x"].dtype == object and [len(x) for x in got["x"]] == [2, 3]
    assert got["t"].tolist() == [1, 2] and got["_x"].all()
    assert "do not fit one array" in caplog.text


@pytest.mark.parametrize(
    "values",
    [
        (np.zeros(2, np.int64), np.array([np.nan, 1.0])),
        (np.zeros(1, "f4,i8"), np.float64("nan")),
        (np.float32(1), np.float64(1e300)),
        (1.0, np.complex128(1j)),
    ],
    ids=str,
)
@pytest.mark.parametrize("workers", [1, 2])
def test_values_that_a_cast_would_spoil_are_objects(values, workers, caplog):
    with pytest.warns(RuntimeWarning):  # Gymnasium's array has something else
        by_gymnasium([{"x": value} for value in values])
    (got,) = by_workers([[{"x": value} for value in values]], workers)
    assert got["x"].dtype == object
    for value, kept in zip(values, got["x"], strict=True):
        np.testing.assert_array_equal(kept, value)
    assert "given as objects" in caplog.text


def test_infos_that_never_repeat_do_not_fill_the_memory():
    gatherer, table = Gatherer(), SchemaTable({})
    for t in range(3 * MAX_SCHEMAS):
        infos = [{"common": t}, {f"key{t}": float(t)}]
        groups = gatherer.gather(list(enumerate(infos)), range(2))
        table.update(gatherer.take_new_schemas())
        parts = [table.unpack(g, np.array(g.rows), len(g.rows)) for g in groups]
        assert_same(merge_infos(parts, 2), by_gymnasium(infos))
    assert len(gatherer._ids) <= MAX_SCHEMAS + 2 and len(table._schemas) <= MAX_SCHEMAS + 2


@pytest.mark.parametrize("name", SPACES)
def test_what_a_layout_writes_and_assembles_is_what_gymnasium_concatenates(name):
    space, n = SPACES[name], 4
    space.seed(1)
    items = [space.sample() for _ in range(n)]
    layout = Layout(space)
    expected = concatenate(space, items, create_empty_array(space, n))
    arrays, objects = layout.zeros(n), layout.no_objects(n)
    write = layout.writer(arrays, objects).write
    for row, item in enumerate(items):
        write(row, item)
    assert_same(layout.assemble(arrays, objects), expected)
    arrays, objects = layout.zeros(n), layout.no_objects(n)
    layout.writer(arrays, objects).write_run(0, items[:1])
    layout.writer(arrays, objects).write_run(1, items[1:])
    assert_same(layout.assemble(arrays, objects), expected)


@pytest.mark.parametrize("name", SPACES)
def test_actions_are_taken_apart_and_put_together_by_row(name):
    space, n = SPACES[name], 4
    batched = batch_space(space, n)
    batched.seed(2)
    batch = batched.sample()
    layout = Layout(space)
    arrays, objects = layout.take_apart(batch, n)
    for array, leaf in zip(arrays, layout.leaves, strict=True):
        assert array.shape == (n, *leaf.shape) and array.dtype == leaf.dtype and array.flags.c_contiguous
    for got, expected in zip(layout.rows(arrays, objects), iterate(batched, batch), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize(
    ("space", "batch", "message"),
    [
        (SPACES["dict"], [1, 2], r"expected a dict of \['button', 'position'\], got list"),
        (SPACES["dict"], {"button": [0, 1]}, r"got \['button'\]"),
        (SPACES["dict"], {"button": [0, 1], "position": [[0, 0]] * 2}, r"\['position'\]: expected shape \(2, 3\)"),
        (SPACES["tuple"], ([0, 1],), r"expected a tuple of 2, got 1"),
        (SPACES["text"], ["a"], "expected a sequence of 2 elements, got 1 of them"),
        (SPACES["discrete"], [0.5, 1], "expected dtype int64, got float64"),
        (SPACES["image"], np.full((2, 5, 4, 3), 256), "expected uint8, 0 to 255, got numbers from 256 to 256"),
        (SPACES["box"], None, r"expected shape \(2, 2, 3\)"),
    ],
)
def test_actions_that_do_not_fit_are_refused(space, batch, message):
    with pytest.raises(ActionError, match=message):
        Layout(space).take_apart(batch, 2)


def test_actions_that_fit_are_cast():
    (array,), _ = Layout(SPACES["image"]).take_apart(np.full((2, 5, 4, 3), 255), 2)
    assert array.dtype == np.uint8 and (array == 255).all()
    (array,), _ = Layout(SPACES["box"]).take_apart(np.ones((2, 2, 3)).tolist(), 2)
    assert array.dtype == np.float32
    (array,), _ = Layout(spaces.Discrete(3)).take_apart((np.int8(1), 2), 2)
    assert array.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("value", "error"),
    [(np.zeros(3, np.float32), ValueError), (0.0, ValueError), (np.zeros((2, 3), complex), TypeError)],
)
def test_an_observation_that_does_not_fit_is_refused(value, error):
    layout = Layout(SPACES["box"])
    with pytest.raises(error, match="observation: expected"):
        layout.writer(layout.zeros(1), []).write(0, value)


@pytest.mark.parametrize("dtype", [np.float16, np.bool_, np.complex64, np.uint8, np.float64])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,), (2, 0)])
def test_byte_views_are_the_memory_itself(dtype, shape):
    array = np.zeros(shape, dtype)
    view = byte_view(array)
    assert view.format == "B" and len(view) == array.nbytes
    view[:] = b"\x01" * array.nbytes
    assert array.tobytes() == b"\x01" * array.nbytes


@given(st.integers(1, 50), st.integers(1, 50))
def test_slots_are_spread_evenly(num_envs, num_workers):
    num_workers = min(num_envs, num_workers)
    spans = spread(num_envs, num_workers)
    assert [slot for start, stop in spans for slot in range(start, stop)] == list(range(num_envs))
    sizes = [stop - start for start, stop in spans]
    assert len(sizes) == num_workers and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_modes():
    assert parse_mode("SameStep") is AutoresetMode.SAME_STEP
    assert parse_mode(AutoresetMode.DISABLED) is AutoresetMode.DISABLED
    with pytest.raises(ValueError, match="'NextStep', 'SameStep', 'Disabled', got 'never'"):
        parse_mode("never")


def test_infos_that_fit_no_array_nor_their_masks(caplog):
    """Gymnasium itself raises: a key that is called as another's mask, and values of changing shapes."""
    infos = [{"a": (1, 2), "_a": np.zeros((2, 2))}, {"a": 3, "_a": np.zeros(1)}, {"b": np.zeros(2)}]
    (got,) = by_workers([infos], 2)
    assert got["a"].tolist() == [(1, 2), 3, None] and got["_a"][1].shape == (1,)
    assert got["_b"].tolist() == [False, False, True]
    assert "given as objects" in caplog.text
