"""Every fault at every moment: a named error in bounded time, everybody else unharmed, nothing left.

`make faults` plays all cells and prints them as a table; `make test` plays a sample.
"""

from __future__ import annotations

import itertools

import pytest

from aioenv.sync import portal
from aioenv.testing import FAULTS, MOMENTS
from tests.faults.grid import ALL, AXES, PAIRS, SAMPLE, SPARES, TABLE
from tests.faults.play import Play, without_loop
from tests.kits.loop_kit import LOOPS, run_on


def cells(chosen):
    return [pytest.param(cell, id=str(cell)) for cell in chosen]


def play(cell, monkeypatch):
    if cell.door == "sync":
        monkeypatch.setattr(portal, "new_event_loop", LOOPS[cell.loop])
        without_loop(Play(cell).run())
    else:

        async def run():
            await Play(cell).run()

        run_on(cell.loop, run())


@pytest.mark.parametrize("cell", cells(SAMPLE))
def test_sample(cell, monkeypatch):
    play(cell, monkeypatch)


@pytest.mark.faults
@pytest.mark.parametrize("cell", cells(ALL))
def test_grid(cell, monkeypatch, record_property):
    record_property("cell", list(cell[:2]))  # xdist sends plain objects alone
    play(cell, monkeypatch)


@pytest.mark.parametrize("cell", cells(SPARES[::9]))
def test_sample_with_spare_envs(cell, monkeypatch):
    play(cell, monkeypatch)


@pytest.mark.faults
@pytest.mark.parametrize("cell", cells(SPARES))
def test_grid_with_spare_envs(cell, monkeypatch, record_property):
    record_property("cell", list(cell[:2]))  # xdist sends plain objects alone
    play(cell, monkeypatch)


def test_the_table_and_its_sample_leave_nothing_out():
    assert set(TABLE) == set(FAULTS)
    assert [cell[:2] for cell in SAMPLE] == PAIRS
    assert {when for _, when in PAIRS} == set(MOMENTS)
    for field, values in AXES.items():
        for place, names in enumerate((FAULTS, MOMENTS)):
            met = {(cell[place], getattr(cell, field)) for cell in SAMPLE}
            assert met == set(itertools.product(names, values))
