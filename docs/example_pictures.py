"""Draw the pictures of the gallery of examples, in `_static/examples`.

    MUJOCO_GL=egl python docs/example_pictures.py

A picture shows envs of the example, or a plot of its results.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from PIL import Image

matplotlib.use("agg")

import matplotlib.pyplot as plt

import aioenv
from aioenv.cli.trace_view import read as read_timeline

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
RESET_S, WINDOW_S = 0.1, 0.8  # of `spare_envs.py`: how long a reset takes, and what is shown
LEARNING_S = 0.1  # what is shown of `training/sac_torch.py`
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"  # told apart by the colour-blind
PLOTS: dict[str, Callable[[Any], None]] = {}


def output(name: str, *arguments: str) -> str:
    """Return what an example prints."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/tmp").stdout


def load(name: str) -> dict[str, Any]:
    """Return the names of an example."""
    names: dict[str, Any] = {"__name__": "__main__.example"}
    exec(compile((EXAMPLES / f"{name}.py").read_text(), name, "exec"), names)
    return names


def plot(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Make a function the plot of the example of its name."""
    PLOTS[function.__name__] = function
    return function


@plot
def ppo(axes: Any) -> None:
    """The mean return by update."""
    returns = [float(number) for number in re.findall(r"^update.*return ([\d.]+)$", output("ppo"), re.MULTILINE)]
    axes.plot(returns, color=BLUE)
    axes.set(xlabel="update", ylabel="mean return", ylim=(0, None))


@plot
def evaluate(axes: Any) -> None:
    """How many episodes had which return."""

    async def run() -> aioenv.Evaluation:
        async with aioenv.make_vec("CartPole-v1", num_envs=8) as envs:
            return await aioenv.evaluate(envs, load("evaluate")["policy"], 101, seed=0)

    returns = aioenv.run(run()).returns
    axes.hist(returns, bins=12, color=BLUE, edgecolor="white")
    axes.set(xlabel="return", ylabel="episodes")


@plot
def event_driven(axes: Any) -> None:
    """The steps of each slot."""
    steps = [int(number) for number in re.findall(r"\d+", re.findall(r"\[(.*)\]", output("event_driven"))[0])]
    axes.bar(range(8), steps, color=[BLUE, ORANGE] * 4)
    axes.set(xlabel="slot (odd ones are slow)", ylabel="steps")


@plot
def blocking_loop(axes: Any) -> None:
    """The lengths of the episodes of a random policy."""
    envs = aioenv.sync.make_vec("CartPole-v1", num_envs=16, episode_stats=True)
    envs.reset(seed=0)
    envs.action_space.seed(0)
    lengths: list[int] = []
    for _ in range(1000):
        info = envs.step(envs.action_space.sample())[4]
        if "episode" in info:
            lengths += info["episode"]["l"][info["_episode"]].tolist()
    envs.close()
    axes.hist(lengths, bins=30, color=BLUE, edgecolor="white")
    axes.set(xlabel="steps", ylabel="episodes")


@plot
def multi_agent(axes: Any) -> None:
    """Where the hare and the hunters are, for one episode."""
    game = load("multi_agent")["Chase"]()
    rng = np.random.default_rng(0)
    places: list[list[float]] = []
    seed = 0
    while not (25 < len(places) < 45 and abs(places[0][1] - places[0][2]) > 0.2):  # a chase that takes a while
        seed += 1
        obs, _ = game.reset(seed=seed)
        places = [list(game.place.values())]
        while game.agents:
            actions = {name: int(np.sign(obs[name][0])) + 1 for name in ("hunter_0", "hunter_1")}
            obs, *_ = game.step({"hare": rng.integers(3), **actions})
            places.append(list(game.place.values()))
    for column, name, colour in zip(np.transpose(places), game.possible_agents, (BLUE, ORANGE, GREEN), strict=True):
        axes.plot(column, color=colour, label=name, marker="o", markersize=3)
    axes.set(xlabel="step", ylabel="place on the ring")
    axes.legend(frameon=False)


@plot
def rollout(axes: Any) -> None:
    """The rewards of a rollout: slots by steps, with the rows that are no samples left out."""

    async def collect() -> aioenv.Rollout:
        async with aioenv.make_vec("HalfCheetah-v5", num_envs=16, max_episode_steps=100) as envs:
            await envs.reset(seed=0)
            return await envs.rollout(load("rollout")["Policy"](17, 6, 1), 128, 2)

    taken = aioenv.run(collect())
    rewards = np.where(taken.valid, taken.reward, np.nan).T
    drawn = axes.imshow(rewards, aspect="auto", cmap="cividis", interpolation="nearest")
    axes.set(xlabel="step (white: a reset)", ylabel="slot")
    axes.figure.colorbar(drawn, label="reward")


@plot
def spare_envs(axes: Any) -> None:
    """What each worker does, a line a worker: without spare envs, and with them."""
    with tempfile.TemporaryDirectory() as directory:
        output("spare_envs", "--out", f"{directory}/run")
        place = 0.8
        for kind in ("without spare envs", "with spare envs"):
            axes.text(0, place - 0.25, kind, fontsize=11)
            lines: dict[tuple[str, bool], list[Any]] = {}
            for span in read_timeline(Path(directory, f"run-{kind.split()[0]}.json")):
                if ": slot " in span.line and span.name in ("step", "reset") and span.begin_s < WINDOW_S:
                    lines.setdefault((span.line.partition(": ")[2], "spare" in span.line), []).append(span)
            for slot, spare in sorted(lines):
                bars = [(span.begin_s, span.end_s - span.begin_s) for span in lines[slot, spare]]
                for colour, long in ((BLUE, False), (ORANGE, True)):  # a step may be a reset
                    those = [bar for bar in bars if (bar[1] > RESET_S / 2) == long]
                    axes.broken_barh(those, (place, 0.8), color=colour, label="reset" if long else "step")
                if not spare:
                    axes.text(-0.01, place + 0.45, slot, ha="right", va="center", fontsize=10)
                place += 1
            place += 1.2
    axes.set(xlabel="seconds", xlim=(0, WINDOW_S), ylim=(place - 1.1, -0.2), yticks=[])
    axes.spines["left"].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:2], labels[:2], frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 0.97))


@plot
def sac_timeline(axes: Any) -> None:
    """What the learner of `training/sac_torch.py` does, and what its workers do."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "run.json")
        output("training/sac_torch", "--random", "400", "--steps", "1000", "--trace", str(path))
        spans = read_timeline(path)
    draw_learning(axes, spans, max(span.end_s for span in spans if span.name == "step") - 2 * LEARNING_S)


def draw_learning(axes: Any, spans: list[Any], begin_s: float) -> None:
    """Draw the spans of a learner and two workers, from a time on."""
    labels = {"policy": "acts, learns", "wait for envs": "sends, waits for envs", "step": "steps envs"}
    for name, colour in (("policy", BLUE), ("wait for envs", ORANGE), ("step", GREEN)):
        for span in spans:
            if span.name == name and span.end_s > begin_s:
                place = 1 + ("worker 1" in span.line) if name == "step" else 0
                bar = (1e3 * (span.begin_s - begin_s), 1e3 * (span.end_s - span.begin_s))
                axes.broken_barh([bar], (place, 0.8), color=colour, label=labels.pop(name, None))
    axes.set(xlabel="milliseconds", xlim=(0, 1e3 * LEARNING_S), ylim=(3.6, -0.2))
    axes.set_yticks([0.4, 1.4, 2.4], ["learner", "worker 0", "worker 1"])
    axes.legend(frameon=False, ncols=3, loc="lower center", fontsize=10)


def envs_of(env: Any, **look: Any) -> npt.NDArray[np.uint8]:
    """Return a picture of four envs after some random steps."""
    config = aioenv.RenderConfig(width=400, height=280, **look)

    async def draw() -> npt.NDArray[np.uint8]:
        async with aioenv.make_vec(env, 4, backend="native", render=config) as envs:
            await envs.reset(seed=0)
            envs.action_space.seed(0)
            for _ in range(12):
                await envs.step(envs.action_space.sample())
            images = await envs.render()
            return np.concatenate([np.concatenate(list(row), axis=1) for row in images.reshape(2, 2, 280, 400, 3)])

    return aioenv.run(draw())


def small(picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return an image of the policy of `pixels.py`, as it sees it: grey, 21x21."""
    grey = picture.mean(axis=-1).reshape(21, 4, 21, 4).mean(axis=(1, 3))
    return np.repeat(np.repeat(grey, 12, axis=0), 12, axis=1)[..., None].repeat(3, axis=-1).astype(np.uint8)


def observations() -> npt.NDArray[np.uint8]:
    """Return an observation of `pixels.py`, and how its policy shrinks it."""
    config = aioenv.RenderConfig(width=84, height=84, quality="fast", camera="track")

    async def draw() -> npt.NDArray[np.uint8]:
        async with aioenv.make_vec("HalfCheetah-v5", 1, pixels=config) as envs:
            obs: npt.NDArray[np.uint8] = (await envs.reset(seed=0)).obs
            first: npt.NDArray[np.uint8] = obs[0]
            return first

    image = aioenv.run(draw())
    large = np.repeat(np.repeat(image, 3, axis=0), 3, axis=1)
    return np.concatenate((large, np.full((252, 12, 3), 255, np.uint8), small(image)), axis=1)


PICTURES: dict[str, Callable[[], npt.NDArray[np.uint8]]] = {
    "async_loop": lambda: envs_of("HalfCheetah-v5", camera="track"),
    "episode_stats": lambda: envs_of("Hopper-v5", camera="track"),
    "native_task": lambda: envs_of(load("native_task")["Tray"]),
    "rendering": lambda: envs_of("HalfCheetah-v5", camera="track", quality="fast"),
    "pixels": observations,
    "timeline": lambda: np.asarray(Image.open(HERE / "images" / "trace.png").convert("RGB")),
}


def main(names: list[str], out: Path) -> None:
    """Draw some pictures, or all."""
    out.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
    for name in names or [*PICTURES, *PLOTS]:
        path = out / f"{name}.png"
        if name in PICTURES:
            picture = Image.fromarray(PICTURES[name]())
            picture.thumbnail((800, 600))
            picture.quantize(128).save(path, optimize=True)
        else:
            figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
            PLOTS[name](axes)
            figure.savefig(path, dpi=110)
            plt.close(figure)
            Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
        print(path, f"{path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=HERE / "_static" / "examples")
    args = parser.parse_args()
    main(args.names, args.out)
