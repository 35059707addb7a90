"""
Curves of several seeds
=======================

Draw the returns that runs have logged with `--log`: each run thin, their median thick. Tell when they reached a bar.

::

    for seed in 1 2 3; do python examples/training/ppo_torch.py --seed $seed --log ppo-$seed.csv; done
    python examples/training/curves.py ppo-*.csv --png ppo.png --bar 2000

.. image:: /_static/examples/training/ppo_torch.png
   :alt: Thin curves of the mean return by env-steps, and their median.
   :width: 500
"""

# sphinx_gallery_thumbnail_path = '_static/examples/training/ppo_torch.png'

import argparse

import numpy as np


def read(path: str):
    """Return the columns of a log: steps, seconds, mean return."""
    with open(path) as file:
        rows = [line.split(",") for line in file][1:]
    if not rows:
        raise SystemExit(f"{path}: no episode has ended in this run")
    return np.array(rows, float).T


def median(runs: list):
    """Return steps, and the median of the runs there. A run that has ended counts with its last return."""
    steps = np.unique(np.concatenate([run[0] for run in runs]))
    steps = steps[steps >= max(run[0, 0] for run in runs)]
    return steps, np.median([np.interp(steps, run[0], run[2]) for run in runs], axis=0)


def tell(paths: list[str], runs: list, bar: float) -> None:
    """Print when each run reached a return, and the medians: half of the runs were as fast."""
    reached = []
    for path, run in zip(paths, runs, strict=True):
        there = run[:2, run[2] >= bar]
        steps, seconds = there[:, 0] if there.size else (np.inf, np.inf)
        reached.append((steps, seconds))
        print(f"{path}: {bar:g} after {steps:.0f} steps, {seconds:.0f} s; at last {run[2, -1]:.0f}")
    steps, seconds = np.median(reached, axis=0)
    print(f"median of {len(runs)}: {bar:g} after {steps:.0f} steps, {seconds:.0f} s")


def draw(runs: list, title: str, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        label = f"{len(runs)} runs" if number == 0 else None
        axes.plot(run[0], run[2], color="#0072b2", linewidth=0.8, alpha=0.5, label=label)
    axes.plot(*median(runs), color="#0072b2", linewidth=2.5, label="median")
    axes.set(xlabel="env-steps", ylabel="mean return", title=title)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("logs", nargs="+", metavar="LOG", help="what --log of a run has written")
    parser.add_argument("--png", metavar="PATH", help="draw the runs")
    parser.add_argument("--title", default="", help="of the picture")
    parser.add_argument("--bar", type=float, help="print when the runs reached this return")
    args = parser.parse_args()

    runs = [read(path) for path in args.logs]
    if args.bar is not None:
        tell(args.logs, runs, args.bar)
    if args.png:
        draw(runs, args.title, args.png)
