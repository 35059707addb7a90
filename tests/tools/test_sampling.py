"""The sample of a grid leaves out no value, and no pair of values; the other cells are stress runs."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.kits.sampling import sample

GRID = [{"mode": mode, "loop": loop, "kind": kind} for mode, loop, kind in product(range(3), range(2), range(4))]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_each_combination_of_values_occurs(strength):
    chosen = [GRID[number] for number in sample(GRID, strength)]
    for names in combinations(GRID[0], strength):
        assert {tuple(cell[n] for n in names) for cell in chosen} == {tuple(cell[n] for n in names) for cell in GRID}
    assert len(chosen) == {1: 4, 2: 12, 3: 24}[strength]


def test_cells_that_do_not_exist_are_not_asked_for():
    cells = [cell for cell in GRID if cell["mode"] == cell["kind"]]
    assert sample(cells, 2) == [0, 1, 2, 3, 4, 5] == sample(cells, 9)
    assert sample(cells, 1) == [0, 3, 4]
    assert sample([{}], 2) == [0] and sample([], 2) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("one", range(3))
@pytest.mark.parametrize("other", [0, 1, pytest.param(2, marks=pytest.mark.stress)])
def test_the_others_are_stress_runs(one, other, request):
    assert (request.node.get_closest_marker("stress") is None) == ((one, other) in [(0, 0), (1, 1), (2, 0)])
