"""Draw a timeline that `envs.trace` or AIOENV_TRACE has written, and say how much of it overlapped."""

from __future__ import annotations

import argparse
import importlib.util
import json
import reprlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aioenv.cli.arguments import picture_file
from aioenv.tracing.track import UNANSWERED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["HELP", "Span", "add_arguments", "overlap", "read", "run"]

HELP = "draw a timeline of envs.trace() or AIOENV_TRACE"

# Colours for all kinds of colour vision (Okabe and Ito), and grey ones for spans that are not work.
_COLOURS = {
    "step": "#0072B2",
    "reset": "#56B4E9",
    "render": "#E69F00",
    "draw": "#E69F00",
    "reply": "#999999",
    "call": "#CC79A7",
    "policy": "#009E73",
    "send": "#D55E00",
    "handle": "#F0E442",
    UNANSWERED: "#000000",
}
_WAIT = "wait"
_WAIT_COLOUR = "#E4E4E4"
_DEFAULT_STEPS = 6  # drawn of a longer timeline
_MOST_LABELS = 400


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
    parser.add_argument("--png", type=picture_file, metavar="OUT", help="draw it there (takes matplotlib)")
    parser.add_argument(
        "--steps", type=_range, metavar="A:B", help=f"draw steps A to B (default: {_DEFAULT_STEPS} in the middle)"
    )


def run(args: argparse.Namespace) -> int:
    """Print a summary of the timeline, and draw it with `--png`; 0 on success."""
    if args.steps is not None and args.png is None:
        print("aioenv trace: --steps says what is drawn: it goes with --png", file=sys.stderr)
        return 2
    if args.png is not None and importlib.util.find_spec("matplotlib") is None:
        print("aioenv trace: --png takes matplotlib: pip install 'aioenv[bench]'", file=sys.stderr)
        return 1
    try:
        spans = read(args.file)
    except (OSError, ValueError) as exc:
        print(f"aioenv trace: {exc}", file=sys.stderr)
        return 1
    if not spans:
        print(f"{args.file}: an empty timeline: nothing was done while it was collected, or it has not ended yet")
        return 0
    print_summary(spans)
    if args.png is not None:
        try:
            draw(spans, args.png, args.steps)
        except (OSError, ValueError) as exc:
            print(f"aioenv trace: {exc}", file=sys.stderr)
            return 1
        print(f"drawn: {args.png}")
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
    width = max(len(line) for line in lines)
    print(f"{'':<{width}}  {'':<16} {'times':>8} {'seconds':>9} {'share':>7}")
    for line, names in lines.items():
        for name, seconds in sorted(names.items(), key=lambda item: -sum(item[1])):
            total = sum(seconds)
            print(f"{line:<{width}}  {name:<16} {len(seconds):>8,} {total:>9.4f} {total / wall if wall else 1:>7.1%}")
    for inner in ("render", "draw"):
        within, total = overlap(spans, inner)
        if total:
            print(f"{inner}: {within:.4f} s of {total:.4f} s ({within / total:.1%}) while the next step was made")


def draw(spans: Sequence[Span], out: Path, steps: tuple[int, int] | None = None) -> None:
    """Draw a timeline, a line for each of its own.

    Args:
        spans: the spans of the timeline.
        out: the picture.
        steps: the first and the last step; None for a few in the middle.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    begin, end = _window(spans, steps)
    shown = [span for span in spans if span.end_s > begin and span.begin_s < end]
    lines = list(dict.fromkeys(span.line for span in spans))
    figure, axes = plt.subplots(figsize=(12, 0.8 + 0.5 * len(lines)), layout="constrained")
    labels = len(shown) <= _MOST_LABELS
    for row, line in enumerate(lines):
        for span in shown:
            if span.line == line:
                _draw_span(axes, row, span, begin, end, labels)
    axes.set_yticks(range(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlim(0, (end - begin) * 1e3)
    axes.set_xlabel("ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    names = [name for name in _COLOURS if any(span.name == name for span in shown)]
    handles: list[Any] = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[name]) for name in names]
    handles.append(plt.Rectangle((0, 0), 1, 1, color=_WAIT_COLOUR))
    axes.legend(
        handles, [*names, "wait"], ncols=len(names) + 1, loc="lower right", bbox_to_anchor=(1, 1), frameon=False
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=110)
    finally:
        plt.close(figure)


def _draw_span(axes: Axes, row: int, span: Span, begin: float, end: float, labels: bool) -> None:
    waits = span.name.startswith(_WAIT)
    left, right = max(span.begin_s, begin), min(span.end_s, end)
    colour = _WAIT_COLOUR if waits else _COLOURS.get(span.name, "#000000")
    height = 0.25 if waits else 0.75
    axes.broken_barh(
        [((left - begin) * 1e3, (right - left) * 1e3)], (row - height / 2, height), fc=colour, ec="white", lw=0.4
    )
    if labels and span.step is not None and not waits and right - left > (end - begin) / 60:
        middle = ((left + right) / 2 - begin) * 1e3
        axes.text(middle, row, str(span.step), ha="center", va="center", fontsize=8, color="white", clip_on=True)


def _window(spans: Sequence[Span], steps: tuple[int, int] | None) -> tuple[float, float]:
    """Return the time at which the drawing begins and ends."""
    known = sorted({span.step for span in spans if span.step is not None and span.name in ("step", "render")})
    if not known:
        return min(span.begin_s for span in spans), max(span.end_s for span in spans)
    if steps is None:
        middle = max(0, len(known) // 2 - _DEFAULT_STEPS // 2)
        picked = known[middle : middle + _DEFAULT_STEPS]
        steps = picked[0], picked[-1]
    first, last = steps
    chosen = [s for s in spans if s.step is not None and first <= s.step <= last and s.name in ("step", "render")]
    if not chosen:
        raise ValueError(f"--steps {first}:{last}: expected steps between {known[0]} and {known[-1]}")
    return min(span.begin_s for span in chosen), max(span.end_s for span in chosen)


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        pair = int(first), int(last)
    except ValueError:
        colon = ""
    if not colon or pair[0] > pair[1]:
        raise argparse.ArgumentTypeError(f"expected A:B with A ≤ B, say 10:16, got {text!r}")
    return pair
