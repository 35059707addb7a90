"""What a notebook shows: tables of vector envs and results, prints of envs, and a cell that is interrupted."""

from __future__ import annotations

import html.parser
import io
import logging
from functools import partial

import gymnasium as gym
import nbformat
import numpy as np
import pytest

import aioenv
from aioenv import sync
from tests.definitions.script_kit import write_notebook
from tests.kits.process_kit import run_alone


class _Cells(html.parser.HTMLParser):
    """The captions and the texts of all cells; each tag must be closed in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data)


def cells(html_text: str) -> list[str]:
    parser = _Cells()
    parser.feed(html_text)
    assert not parser.open
    return parser.texts


def zeros(obs):
    return np.zeros(len(obs), int)


def test_vector_envs_and_results_are_tables():
    with sync.make_vec("CartPole-v1", 4, num_workers=2) as envs:
        shown = cells(envs._repr_html_())
        assert shown[1:7] == ["env", "CartPole-v1", "num_envs", "4", "backend", "workers"]
        assert {"2 workers", "ready", "0, 1", "2, 3", str(envs.workers[0].pid)} <= set(shown)
        assert "env-steps" not in shown
        envs.reset(seed=0)
        rollout = envs.rollout(zeros, 20)
        assert "80, " in cells(envs._repr_html_())[cells(envs._repr_html_()).index("env-steps") + 1]
        shown = cells(rollout._repr_html_())
        assert shown[shown.index("obs") + 1 :][:2] == ["float32", "(20, 4, 4)"]
        assert shown[0].endswith(f"{(rollout.terminated | rollout.truncated).sum()} episodes ended")
        shown = cells(envs.stats()._repr_html_())
        assert shown[1:4] == ["waited for", "seconds", "share"] and {"envs", "images", "policy"} <= set(shown)
        evaluation = sync.evaluate(envs, zeros, 30, seed=0)
        shown = cells(evaluation._repr_html_())
        assert "30 episodes" in shown[0] and shown.count("…") == 8 and "terminated" in shown
    assert "closed" in cells(envs._repr_html_())


def test_many_workers_are_shortened():
    with sync.make_vec("CartPole-v1", 20, num_workers=20) as envs:
        shown = cells(envs._repr_html_())
    assert "20 workers, the first 16 of them" in shown and shown.count("this machine") == 16


@pytest.mark.parametrize("make", [{"num_workers": 0}, {"backend": "native"}])
def test_vector_envs_of_this_process_are_tables(make):
    with sync.make_vec("CartPole-v1", 3, **make) as envs:
        shown = cells(envs._repr_html_())
    assert shown[6] == envs.backend


def test_a_rollout_of_dicts_is_a_table(tmp_path):
    class Named(gym.Env):
        observation_space = gym.spaces.Dict(
            {"<x>": gym.spaces.Box(0, 1, (2,)), "t": gym.spaces.Tuple([gym.spaces.Text(3)])}
        )
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return {"<x>": np.zeros(2, np.float32), "t": ("abc",)}, {}

        def step(self, action):
            return {"<x>": np.zeros(2, np.float32), "t": ("abc",)}, 0.0, False, False, {}

    with sync.make_vec(Named, 2, num_workers=1) as envs:
        envs.reset(seed=0)
        shown = cells(envs.rollout(lambda obs: np.zeros(len(obs["t"][0]), int), 2)._repr_html_())
    assert "obs['<x>']" in shown and "obs['t'][0]" in shown


class Listed(gym.Env):
    """Its observations are no arrays, but tuples of arrays."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Sequence(gym.spaces.Box(0, 1, (2,)), seed=0),
        gym.spaces.Graph(gym.spaces.Box(0, 1, (2,)), gym.spaces.Discrete(3), seed=0),
        gym.spaces.OneOf([gym.spaces.Discrete(2), gym.spaces.Box(0, 1, (2,))], seed=0),
    ],
)
def test_last_observations_that_are_no_arrays_are_one_row(space):
    """Not a row for each of the envs, or for each of the parts of theirs."""
    with sync.make_vec(partial(Listed, space), 5, num_workers=1) as envs:
        envs.reset(seed=0)
        shown = cells(envs.rollout(lambda obs: np.zeros(len(obs), int), 2, groups=1)._repr_html_())
    assert shown[shown.index("last_obs") + 1 :] == ["object", "(5,)"]


def test_a_recording_plays(tmp_path):
    recording = sync.record("CartPole-v1", tmp_path / "a.mp4", steps=3, num_envs=1)
    shown = recording._repr_html_()
    assert 'src="data:video/mp4;base64,' in shown and "4 pictures, 0 episodes ended" in shown
    recording.path.unlink()
    assert "video" not in recording._repr_html_().replace(str(recording.path), "")


# ---------------------------------------------------------------- output of envs

SCRIPT = """
import sys
import gymnasium as gym
import aioenv

class Talks(gym.Wrapper):
    def reset(self, **kwargs):
        print("here I am")
        return self.env.reset(**kwargs)

aioenv.show_output({arguments})
with aioenv.sync.make_vec("CartPole-v1", 4, num_workers=2, wrappers=[Talks]) as envs:
    envs.reset(seed=0)
aioenv.show_output(False)
with aioenv.sync.make_vec("CartPole-v1", 2, num_workers=1, wrappers=[Talks]) as envs:
    envs.reset(seed=0)
"""


@pytest.mark.parametrize(("arguments", "name"), [("", "stdout"), ("stream=sys.stderr", "stderr")])
def test_a_script_shows_prints_of_envs(arguments, name):
    done = run_alone(SCRIPT.format(arguments=arguments))
    lines = getattr(done, name).splitlines()
    assert sorted(lines) == ["slots 0, 1: here I am"] * 2 + ["slots 2, 3: here I am"] * 2


def test_a_handler_is_added_once_and_removed():
    logger = logging.getLogger("aioenv.workers")
    before = list(logger.handlers), logger.level
    stream = io.StringIO()
    aioenv.show_output(stream=io.StringIO())
    aioenv.show_output(stream=stream)
    try:
        assert len(logger.handlers) == len(before[0]) + 1 and logger.level == logging.INFO
        logger.info("%s (pid %d): %s", "worker 1", 3, "hello", extra={"slots": (3, 4, 5), "worker": "worker 1"})
        logger.getChild("my").warning("of %s", "mine", extra={"slots": (7,)})
        logger.warning("plain")
    finally:
        aioenv.show_output(False)
    assert stream.getvalue() == "slots 3 to 5: hello\nslot 7: of mine\nenv: plain\n"
    assert (list(logger.handlers), logger.level) == before


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG, logging.WARNING])
def test_a_level_that_the_user_has_set_remains(level):
    logger = logging.getLogger("aioenv.workers")
    before = logger.level
    logger.setLevel(level)
    try:
        aioenv.show_output(stream=io.StringIO())
        aioenv.show_output(stream=io.StringIO())
        aioenv.show_output(False)
        assert logger.level == level
    finally:
        aioenv.show_output(False)
        logger.setLevel(before)


# ---------------------------------------------------------------- a notebook

RUN = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=100, allow_errors=True).execute()
nbformat.write(notebook, sys.argv[1])
"""


def run_cells(folder, *codes: str) -> list[dict]:
    """Run cells in a kernel of their own, and return each one's outputs; an error is one of them."""
    write_notebook(folder / "code.ipynb", [code.strip() for code in codes])
    run_alone(RUN, str(folder / "code.ipynb"))
    return [cell.outputs for cell in nbformat.read(folder / "code.ipynb", as_version=4).cells]


def texts(outputs) -> str:
    return "\n".join(out.get("text", "") or "\n".join(out.get("traceback", [])) for out in outputs)


MAKE = """
import os, signal
import gymnasium as gym
import aioenv

class Interrupts(gym.Wrapper):
    # slot 0 interrupts the kernel in its step 20, which the kernel waits for, as the stop button does
    pid, seed, steps = os.getpid(), None, 0

    def reset(self, *, seed=None, options=None):
        print("here I am")
        self.seed = self.seed if seed is None else seed
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        if self.seed == 0 and self.steps == 20:
            os.kill(self.pid, signal.SIGINT)
        return self.env.step(action)

envs = await aioenv.make_vec("CartPole-v1", num_envs=2, num_workers=2, wrappers=[Interrupts])
envs
"""
INTERRUPTED = """
await envs.reset(seed=0)
while True:
    await envs.step(envs.action_space.sample())
"""
BLOCKING = """
blocking = aioenv.sync.make_vec("CartPole-v1", num_envs=1, wrappers=[Interrupts])
blocking.reset(seed=0)
while True:
    blocking.step(blocking.action_space.sample())
"""
OF_THE_USER = """
def wait():
    os.kill(os.getpid(), signal.SIGINT)

wait()
"""


def test_a_notebook_shows_tables_and_prints_and_a_short_interruption(tmp_path):
    made, interrupted, on, blocking, after, other, _ = run_cells(
        tmp_path,
        MAKE,
        INTERRUPTED,
        "(await envs.step(envs.action_space.sample())).reward.shape",
        BLOCKING,
        "blocking.step(blocking.action_space.sample())[1].shape",
        OF_THE_USER,
        "await envs.close(); blocking.close()",
    )
    assert "<table>" in made[-1]["data"]["text/html"] and "CartPole-v1" in made[-1]["data"]["text/plain"]
    assert {"slot 0: here I am", "slot 1: here I am"} <= set(texts(interrupted).splitlines())
    assert on[-1]["data"]["text/plain"] == "(2,)" and after[-1]["data"]["text/plain"] == "(1,)"
    for outputs, number in ((interrupted, 3), (blocking, 4)):
        (line,) = (line for line in texts(outputs).splitlines() if line and "here I am" not in line)
        assert line.endswith(
            f": the cell was interrupted in line {number}. Envs that are open can be stepped on in the next cell."
        )
    assert "wait()" in texts(other), "IPython's own traceback"
