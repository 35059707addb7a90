"""Sum up a timeline that `envs.trace` or AIOENV_TRACE has written: the time of each line, and the overlap.

https://ui.perfetto.dev draws it.
"""

from __future__ import annotations

import argparse
import bisect
import json
import reprlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aioenv.cli.terminal import say, show_table

__all__ = ["HELP", "Span", "add_arguments", "beside_policy", "overlap", "read", "run"]

HELP = "sum up a timeline of envs.trace() or AIOENV_TRACE"


class Span(NamedTuple):
    """A span of time in which one thing was done.

    Attributes:
        line: the process or loop that did it: "loop", "worker 0: slots 0-7", "render worker 0", …
        name: "step", "render", "wait", …
        begin_s, end_s: in seconds since the trace began.
        step: the step that it was part of; None for none.
    """

    line: str
    name: str
    begin_s: float
    end_s: float
    step: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("file", type=Path, help="the timeline, as envs.trace() wrote it")


def run(args: argparse.Namespace) -> int:
    """Print a summary of the timeline; return 0 on success."""
    try:
        spans = read(args.file)
    except (OSError, ValueError) as exc:
        print(f"aioenv trace: {exc}", file=sys.stderr)
        return 1
    if not spans:
        say(f"{args.file}: an empty timeline: nothing was done while it was collected, or it has not ended yet")
        return 0
    print_summary(spans)
    return 0


def read(path: Path) -> list[Span]:
    """Read the spans of a file, line by line, each in order.

    Raises:
        OSError: if it can't be read.
        ValueError: if it is no timeline.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        return [_span(event, names) for event in events if event["ph"] == "X"]
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        problem = f"{type(exc).__name__}: {reprlib.repr(exc.object) if isinstance(exc, UnicodeDecodeError) else exc}"
        raise ValueError(f"{path}: expected a timeline as envs.trace() writes it, got none: {problem}") from exc


def _span(event: dict[str, Any], names: dict[int, str]) -> Span:
    begin = event["ts"] / 1e6
    step = event.get("args", {}).get("step")
    return Span(names[event["tid"]], event["name"], begin, begin + event["dur"] / 1e6, step)


def overlap(spans: Iterable[Span], inner: str = "render", outer: str = "step") -> tuple[float, float]:
    """Measure how much of the work for step t overlapped with another process's work for step t + 1.

    Args:
        spans: the spans of a timeline.
        inner: the name of the work for step t: "render", or "draw" where envs draw themselves.
        outer: the name of the work for step t + 1.

    Returns:
        Seconds of `inner` that lie within an `outer` of the next step, and seconds of `inner` in all.
    """
    spans = list(spans)
    by_step: dict[int, list[Span]] = {}
    for span in spans:
        if span.name == outer and span.step is not None:
            by_step.setdefault(span.step, []).append(span)
    within = total = 0.0
    for span in spans:
        if span.name != inner:
            continue
        total += span.end_s - span.begin_s
        following = by_step.get(span.step + 1, []) if span.step is not None else []
        within += _covered(span, [other for other in following if other.line != span.line])
    return within, total


def beside_policy(spans: Iterable[Span]) -> tuple[float, float]:
    """Measure how much of the workers' steps ran while the loop had other work than to wait for them.

    Args:
        spans: the spans of a timeline.

    Returns:
        Seconds of "step" that lie within a "policy" of the loop, and seconds of "step" in all.
    """
    spans = list(spans)
    policy = sorted((span for span in spans if span.name == "policy"), key=lambda span: span.begin_s)
    ends = [span.end_s for span in policy]
    within = total = 0.0
    for span in spans:
        if span.name == "step":
            total += span.end_s - span.begin_s
            first, last = bisect.bisect(ends, span.begin_s), bisect.bisect(ends, span.end_s)
            within += _covered(span, policy[first : last + 1])
    return within, total


def _covered(span: Span, others: Iterable[Span]) -> float:
    """Return how much of a span lies within any of the others, in seconds."""
    covered, until = 0.0, span.begin_s
    for other in sorted(others, key=lambda other: other.begin_s):
        begin, end = max(other.begin_s, until), min(other.end_s, span.end_s)
        if end > begin:
            covered += end - begin
            until = end
    return covered


def print_summary(spans: Sequence[Span]) -> None:
    """Print a table of the time that each line spent, by name, and the overlap."""
    begin, end = min(span.begin_s for span in spans), max(span.end_s for span in spans)
    wall = end - begin
    lines: dict[str, dict[str, list[float]]] = {}
    for span in spans:
        lines.setdefault(span.line, {}).setdefault(span.name, []).append(span.end_s - span.begin_s)
    rows = []
    for line, names in lines.items():
        for name, seconds in sorted(names.items(), key=lambda item: -sum(item[1])):
            total = sum(seconds)
            rows.append((line, name, f"{len(seconds):,}", f"{total:.4f}", f"{total / wall if wall else 1:.1%}"))
    show_table(("", "", "times", "seconds", "share"), rows, texts=2)
    within, total = beside_policy(spans)
    if total:
        say(f"step: {within:.4f} s of {total:.4f} s ({within / total:.1%}) while the loop ran the policy")
    for inner in ("render", "draw"):
        within, total = overlap(spans, inner)
        if total:
            say(f"{inner}: {within:.4f} s of {total:.4f} s ({within / total:.1%}) while the next step was made")
