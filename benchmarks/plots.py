"""Plot a run of the suite: tasks over bare loops and over physics alone, and the cost of an env over their number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.contenders import CONTENDERS
from benchmarks.rows import COST_ENVS, RAW

__all__ = ["draw"]

# A title, and bars: contenders with their values.
Block: TypeAlias = tuple[str, list[tuple[str, float]]]

BAR = 0.11  # inches
OURS = "C0"
COLORS = {name: f"C{1 + i % 9}" for i, name in enumerate(n for n in CONTENDERS if not n.startswith("aioenv"))}
COLORS |= {"bare-all": "0.3", "bare-lockstep": "0.6"}
# Too many bars of aioenv beside the first.
LEFT_OUT = {"aioenv-asyncio", "aioenv-drop-in", "aioenv-native-sync", "aioenv-sb3", "aioenv-sync", "bare"}


def draw(path: Path, content: dict[str, Any]) -> list[Path]:
    """Draw a run of the suite.

    Args:
        path: `bench.svg` makes `bench-tasks.svg`, `bench-native.svg` and `bench-cost.svg`; the suffix says which
            format.
        content: a run of the suite.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for name, plot in (("tasks", _tasks), ("native", _native), ("cost", _cost)):
        figure = plot(content)
        if figure is not None:
            file = path.with_name(f"{path.stem}-{name}{path.suffix}")
            figure.savefig(file, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
            written.append(file)
    return written


def _tasks(content: dict[str, Any]) -> Any:
    """Draw bars, a block for each task: env-steps/s over those of bare loops on all CPUs."""
    cpus = content["machine"]["usable_cpus"]
    blocks = _blocks(content, lambda ratios: ratios["bare"] / cpus if "bare" in ratios else None)
    return _bars(blocks, f"env-steps/s over {cpus} x those of a bare loop")


def _native(content: dict[str, Any]) -> Any:
    """Draw bars of MuJoCo's tasks: env-steps/s over those of the physics alone, stepped in the faster way."""
    blocks = _blocks(content, lambda ratios: min((ratios[raw] for raw in RAW if raw in ratios), default=None))
    return _bars(blocks, "env-steps/s over those of the physics alone")


def _blocks(content: dict[str, Any], value: Callable[[dict[str, float]], float | None]) -> list[Block]:
    blocks = []
    for row in content["rows"].values():
        if row["metric"] == "throughput":
            drawn = [r for r in row["results"] if r["rounds"] and r["contender"] not in LEFT_OUT]
            found = [(r["contender"], value(r["ratios"])) for r in drawn]
            bars = [(contender, number) for contender, number in found if number is not None]
            blocks.append((f"{row['env']} x {row['num_envs']}", bars))
    return [block for block in blocks if block[1]]


def _bars(blocks: list[Block], label: str) -> Any:
    from matplotlib.figure import Figure

    if not blocks:
        return None
    height = BAR * sum(len(bars) + 1 for _, bars in blocks)
    figure = Figure(figsize=(8, height + 1.6), layout="constrained")
    panel = figure.subplots()
    place, ticks, known = 0, [], set()
    for _, bars in blocks:
        ticks.append(place + (len(bars) - 1) / 2)
        for contender, value in bars:
            name = CONTENDERS[contender].label
            panel.barh(
                place,
                value,
                height=0.9,
                color=COLORS.get(contender, OURS),
                alpha=1.0 if contender in ("aioenv", *COLORS) else 0.5,
                label=None if name in known else name,
            )
            known.add(name)
            place += 1
        place += 1
    panel.set_yticks(ticks, [title for title, _ in blocks])
    panel.invert_yaxis()
    panel.margins(y=0.01)
    panel.set_xscale("log")
    panel.axvline(1, color="0.3", linewidth=0.8)
    panel.set_xlabel(label)
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    return figure


def _cost(content: dict[str, Any]) -> Any:
    """Draw lines: microseconds of an env-step over the number of envs."""
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[int, float]]] = {}
    for n in COST_ENVS:
        for result in content["rows"].get(f"cost-{n}", {}).get("results", ()):
            if result["rounds"]:
                points.setdefault(result["contender"], []).append((n, 1e6 / result["env_steps_per_s"]))
    if not points:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    for contender, line in points.items():
        ours = contender.startswith("aioenv")
        panel.plot(
            *zip(*line, strict=True),
            marker="o",
            label=CONTENDERS[contender].label,
            color=OURS if ours else COLORS[contender],
            linestyle="-" if contender != "aioenv-native" else "--",
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(COST_ENVS, [f"{n:,}" for n in COST_ENVS])
    panel.set_xlabel("envs")
    panel.set_ylabel("µs of an env-step, CartPole-v1")
    panel.legend()
    return figure
