"""The faults of clusters as a table at the end of a run."""

from __future__ import annotations

import math
from collections import defaultdict


def pytest_terminal_summary(terminalreporter):
    held: dict[str, bool] = {}
    about: dict[str, tuple[str, float, float]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if "fault" in properties:
                # a test that leaves something behind fails in its teardown
                held[report.nodeid] = held.get(report.nodeid, True) and report.outcome == "passed"
                seconds = (properties.get(name, float("nan")) for name in ("named_s", "replaced_s"))
                about[report.nodeid] = properties["fault"], *seconds
    if not held:
        return
    rows = defaultdict(list)
    for nodeid, (fault, *seconds) in about.items():
        rows[fault].append((held[nodeid], *seconds))
    terminalreporter.section("faults of clusters: how many held, seconds until they were named, and a worker replaced")
    terminalreporter.write_line(f"{'':44}{'held':>8}{'median':>8}{'longest':>8}{'replaced':>10}{'longest':>8}")
    for fault, cells in rows.items():
        kept, named, replaced = zip(*cells, strict=True)
        line = f"{fault:44}{f'{sum(kept)}/{len(cells)}':>8}{sorted(named)[len(cells) // 2]:8.2f}{max(named):8.2f}"
        if not math.isnan(replaced[0]):
            line += f"{sorted(replaced)[len(cells) // 2]:10.2f}{max(replaced):8.2f}"
        terminalreporter.write_line(line)
