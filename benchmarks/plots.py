"""Draw the plots of docs/explanation/performance.md from the tables: `python -m benchmarks.plots TABLES DIR`.

They are readable at a phone's width: few bars, large labels. A contender has one colour in all of them; the colours
are those of Okabe and Ito, which people with any colour vision can tell apart.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.network import DELAYS_MS, PREDICTED, ROUND_TRIPS_MS, STEP_S, WORKERS, Model, measured_of, step_bytes
from benchmarks.rows import COST_ENVS
from benchmarks.tables import Row, newest, read

__all__ = ["COLORS", "LIMIT", "draw", "from_directory"]

Tables = Mapping[str, Sequence[Row]]

# A contender's name in the plots -> its names in the tables, of which the fastest is drawn.
CONTENDERS = {
    "aioenv, native": ("aioenv (backend=native)", "aioenv.sync (backend=native)"),
    "aioenv, num_workers=0": ("aioenv (num_workers=0)",),
    "aioenv, workers": ("aioenv (uvloop)",),
    "EnvPool": ("EnvPool",),
    "Gymnasium Sync": ("gymnasium SyncVectorEnv",),
    "Gymnasium Async": ("gymnasium AsyncVectorEnv",),
}
COLORS = {
    "aioenv, native": "#0072B2",
    "aioenv, num_workers=0": "#CC79A7",
    "aioenv, workers": "#56B4E9",
    "EnvPool": "#E69F00",
    "Gymnasium Sync": "#009E73",
    "Gymnasium Async": "#D55E00",
}
MARKERS = dict(zip(COLORS, "oPs^Dv", strict=True))
LIMIT = ("mujoco.batch, its clock stopped", "MjData loop, its clock stopped")

MUJOCO = ("HalfCheetah-v5", "Ant-v5", "Humanoid-v5")
# A bar's name, its contender, and its name in the table of images.
IMAGES = (
    ("aioenv, coarse", "aioenv, workers", "aioenv-coarse"),
    ("aioenv, fast", "aioenv, workers", "aioenv-fast"),
    ("aioenv, exact", "aioenv, workers", "aioenv-exact"),
    ("Gymnasium Async", "Gymnasium Async", "gymnasium-async"),
)

WIDTH = 4.4  # inches: 420 px, of which a phone shows 360 or so
BAR = 0.3  # inches
STYLE = {"font.size": 12, "svg.hashsalt": "aioenv", "axes.spines.top": False, "axes.spines.right": False}


def from_directory(directory: Path) -> Tables:
    """Read the newest measurements of the tables that are drawn."""
    paths = [
        path for name in ("throughput", "cost", "images", "network") if (path := directory / f"{name}.csv").exists()
    ]
    return {path.stem: newest(read(path)) for path in paths}


def draw(directory: Path, tables: Tables) -> list[Path]:
    """Draw the measurements.

    Args:
        directory: `bench-mujoco.svg`, `bench-cost.svg`, `bench-images.svg` and `bench-network.svg` are written there,
            unless nothing was measured for them.
        tables: measurements by the names of their tables.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        for name, plot in (("mujoco", _mujoco), ("cost", _cost), ("images", _images), ("network", _network)):
            figure = plot(tables)
            if figure is not None:
                file = directory / f"bench-{name}.svg"
                figure.savefig(file, metadata={"Date": None})
                written.append(file)
    return written


def _medians(tables: Tables, table: str, task: str, num_envs: int) -> dict[str, float]:
    """Return the medians of a task, by contenders' names in the table."""
    wanted = {"task": task, "num_envs": str(num_envs)}
    rows = [row for row in tables.get(table, ()) if wanted.items() <= row.items()]
    return {row["contender"]: float(row["median"]) for row in rows if row["unit"] in ("env-steps/s", "µs")}


def _mujoco(tables: Tables) -> Any:
    """Draw bars, a panel for each task: env-steps/s, and a line at those of the physics alone."""
    from matplotlib.figure import Figure

    panels = []
    for task in MUJOCO:
        medians = _medians(tables, "throughput", task, 64)
        bars = {}
        for name, labels in CONTENDERS.items():
            if rates := [medians[label] for label in labels if label in medians]:
                bars[name] = max(rates)
        if bars:
            panels.append((task, bars, max((medians[label] for label in LIMIT if label in medians), default=None)))
    if not panels:
        return None
    height = sum(BAR * len(bars) + 0.95 for _, bars, _ in panels)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    shares = [len(bars) for _, bars, _ in panels]
    for axes, (task, bars, limit) in zip(
        figure.subplots(len(panels), squeeze=False, height_ratios=shares)[:, 0], panels, strict=True
    ):
        _bars(axes, [(name, name, rate) for name, rate in bars.items()], limit)
        axes.set_title(task, loc="left", fontsize=12, fontweight="bold")
        if limit is not None:
            axes.axvline(limit, color="0.2", linestyle="--", linewidth=1.5)
            axes.text(limit, len(bars) - 1, "physics alone ", ha="right", va="center", fontsize=11)
    axes.set_xlabel("env-steps per second, 64 envs")
    return figure


def _bars(axes: Any, bars: Sequence[tuple[str, str, float]], limit: float | None = None) -> None:
    """Draw bars, each with its value at its end; a bar is a name, a contender and a value."""
    names, contenders, values = zip(*bars, strict=True)
    most = max(*values, limit or 0.0)
    axes.barh(range(len(bars)), values, height=0.8, color=[COLORS[contender] for contender in contenders])
    for place, value in enumerate(values):
        inside = value > 0.7 * most
        axes.text(
            value + (-0.015 if inside else 0.015) * most,
            place,
            f"{value / 1000:.1f} k" if value >= 1000 else f"{value:.0f}",
            ha="right" if inside else "left",
            va="center",
            color="white" if inside and COLORS[contenders[place]] == COLORS["aioenv, native"] else "black",
        )
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.04 * most)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda number, _: f"{number / 1000:g} k" if number else "0")


def _cost(tables: Tables) -> Any:
    """Draw lines: microseconds of an env-step of CartPole over the number of envs."""
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[int, float]]] = {}
    for num_envs in COST_ENVS:
        medians = _medians(tables, "cost", "CartPole-v1", num_envs)
        for name, labels in CONTENDERS.items():
            if costs := [medians[label] for label in labels if label in medians]:
                points.setdefault(name, []).append((num_envs, min(costs)))
    if not points:
        return None
    figure = Figure(figsize=(WIDTH, 4.9), layout="constrained")
    axes = figure.subplots()
    for name, line in points.items():
        axes.plot(*zip(*line, strict=True), marker=MARKERS[name], color=COLORS[name], label=name, linewidth=2)
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_xticks(COST_ENVS, [f"{n:,}" for n in COST_ENVS])
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlabel("CartPole-v1 envs")
    axes.set_title("microseconds per env-step", loc="left", fontsize=12, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=11)
    return figure


def _images(tables: Tables) -> Any:
    """Draw bars: env-steps/s where an image of 84x84 is the observation."""
    from matplotlib.figure import Figure

    medians = _medians(tables, "images", "HalfCheetah-v5", 16)
    bars = [(name, contender, medians[label]) for name, contender, label in IMAGES if label in medians]
    if not bars:
        return None
    figure = Figure(figsize=(WIDTH, BAR * len(bars) + 1.1), layout="constrained")
    axes = figure.subplots()
    _bars(axes, bars)
    axes.set_title("Images of HalfCheetah-v5", loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("env-steps per second, 16 envs")
    return figure


_TICKS = (50, 100, 200, 300)  # steps a second
# Okabe and Ito's, by the round trip or by what is measured.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#E69F00", "#009E73"


def _network(tables: Tables) -> Any:
    """Draw steps a second over the round trip, measured and as the model has it; and predictions by workers."""
    from matplotlib.figure import Figure

    measured = measured_of(tables.get("network", ()))
    if len({env for env, _ in measured}) < 2:
        return None
    model = Model.fit(measured)
    figure = Figure(figsize=(WIDTH, 8.2), layout="constrained")
    upper, lower = figure.subplots(2)
    names = {"noop": ("few bytes", _BLUE), "pixels": ("(84, 84, 4)", _ORANGE)}
    for env, (name, color) in names.items():
        for workers, marker in zip(WORKERS, "o^s", strict=True):
            if (each := measured.get((env, workers))) is None:
                continue
            relay_s = (each["step ms, 0"] - each["step ms"]) / 1e3
            trips = [each[f"trip ms, {delay:g}"] - each["trip ms, 0"] for delay in DELAYS_MS]
            worker_s = STEP_S + model.wake_s[env]
            steps = [model.step_s(workers, step_bytes(env), worker_s, trip / 1e3) + relay_s for trip in trips]
            upper.plot(trips, [1 / step for step in steps], color=color, alpha=0.6, linewidth=1.5)
            rates = [1e3 / each[f"step ms, {delay:g}"] for delay in DELAYS_MS]
            label = f"{name}, {workers} workers"
            upper.plot(trips, rates, color=color, marker=marker, linestyle="", markersize=7, label=label)
    upper.set_xscale("log")
    upper.set_yscale("log")
    upper.set_xlabel("round trip in ms")
    upper.set_title("steps per second, measured and model", loc="left", fontsize=12, fontweight="bold")
    upper.legend(frameon=False, fontsize=10, loc="lower left")
    counts = [round(10 ** (i / 10)) for i in range(31)]
    for task, style in zip(PREDICTED, ("-", "--"), strict=True):
        for trip, color in zip(ROUND_TRIPS_MS, (_BLUE, _GREEN, _ORANGE), strict=True):
            shares = [100 * model.predict(task, count, trip)[1] for count in counts]
            lower.plot(counts, shares, color=color, linestyle=style, linewidth=2, label=f"{task}, {trip:g} ms")
    lower.set_xscale("log")
    lower.set_ylim(0, 100)
    lower.set_xlabel("workers, 16 envs each, 5 ms a step")
    lower.set_title("% of workers' time in steps, predicted", loc="left", fontsize=12, fontweight="bold")
    lower.legend(fontsize=9, framealpha=0.9, edgecolor="none", borderpad=0)
    for axes in (upper, lower):
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:,g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    upper.set_yticks(_TICKS, [str(rate) for rate in _TICKS])
    upper.minorticks_off()
    return figure


if __name__ == "__main__":
    print(*draw(Path(sys.argv[2]), from_directory(Path(sys.argv[1]))), sep="\n")
