"""The faults of clusters as a table at the end of a run."""

from __future__ import annotations

from collections import defaultdict


def pytest_terminal_summary(terminalreporter):
    held: dict[str, bool] = {}
    about: dict[str, tuple[str, float]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if "fault" in properties:
                # a test that leaves something behind fails in its teardown
                held[report.nodeid] = held.get(report.nodeid, True) and report.outcome == "passed"
                about[report.nodeid] = properties["fault"], properties.get("named_s", float("nan"))
    if not held:
        return
    rows = defaultdict(list)
    for nodeid, (fault, seconds) in about.items():
        rows[fault].append((held[nodeid], seconds))
    terminalreporter.section("faults of clusters: how many held, and the seconds until they were named")
    terminalreporter.write_line(f"{'':44}{'held':>8}{'median':>8}{'longest':>8}")
    for fault, cells in rows.items():
        seconds = sorted(cell[1] for cell in cells)
        count = f"{sum(cell[0] for cell in cells)}/{len(cells)}"
        terminalreporter.write_line(f"{fault:44}{count:>8}{seconds[len(cells) // 2]:8.2f}{seconds[-1]:8.2f}")
