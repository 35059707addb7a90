"""The grid of faults as a table at the end of `make faults`."""

from __future__ import annotations

from collections import defaultdict

import pytest

from aioenv.testing import FAULTS, MOMENTS

pytest.register_assert_rewrite("tests.faults.play")


def pytest_terminal_summary(terminalreporter):
    reports = [r for rs in terminalreporter.stats.values() for r in rs if dict(getattr(r, "user_properties", ()))]
    held: dict[str, bool] = {}
    pairs: dict[str, tuple[str, str]] = {}
    for report in reports:
        cell = dict(report.user_properties).get("cell")
        if cell is not None:
            # a cell that leaves something behind fails in its teardown
            held[report.nodeid] = held.get(report.nodeid, True) and report.outcome == "passed"
            pairs[report.nodeid] = tuple(cell)
    if not held:
        return
    counts = defaultdict(lambda: [0, 0])
    for nodeid, pair in pairs.items():
        counts[pair][0] += held[nodeid]
        counts[pair][1] += 1
    write = terminalreporter.write_line
    terminalreporter.section("faults: cells that held, of all")
    write(f"{'':20}" + "".join(f"{when:>9}" for when in MOMENTS))
    for fault in FAULTS:
        row = [counts.get((fault, when)) for when in MOMENTS]
        write(f"{fault:20}" + "".join(f"{f'{n[0]}/{n[1]}' if n else '':>9}" for n in row))
    write(f"{sum(held.values())} of {len(held)} cells held")
