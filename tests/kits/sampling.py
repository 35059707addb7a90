"""Samples of grids of parameters: `make test` runs a sample, `make stress` the other cells.

A test asks for it with `@pytest.mark.sampled(strength)`; `tests/conftest.py` marks the cells that are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Cell = Mapping[str, Hashable]


def sample(cells: Sequence[Cell], strength: int) -> list[int]:
    """Choose cells in which all combinations of values occur that occur in any cell.

    Args:
        cells: the value of each parameter; all cells have the same parameters.
        strength: how many parameters are combined: 1 for each value of each parameter, 2 for each pair of values.

    Returns:
        the numbers of the chosen cells, ascending; the same ones for the same cells.
    """
    covers = [set(combinations(sorted(cell.items()), min(strength, len(cell)))) for cell in cells]
    missing = set().union(*covers)
    chosen, used = [], Counter()  # how often each value was chosen: the others are preferred

    def gain(number: int) -> tuple[int, int]:
        return len(covers[number] & missing), -sum(used[value] for value in cells[number].items())

    while missing:
        best = max(range(len(cells)), key=gain)
        chosen.append(best)
        missing -= covers[best]
        used.update(cells[best].items())
    return sorted(chosen)
