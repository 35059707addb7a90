"""The examples that learn, in small; they need torch, and so run in `make adapters`."""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.cli.trace_view import read
from tests.kits.cli_kit import OPENGL
from tests.kits.process_kit import environment

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

TRAINING = Path(__file__).parents[2] / "examples" / "training"
ROOT = TRAINING.parents[1]
PPO = ("--steps", "8500", "--num-envs", "8")  # one episode of each slot
CARTPOLE = ("--local", "--env", "CartPole-v1", "--num-envs", "8", "--steps", "1500")
PIXELS = ("--num-envs", "2", "--size", "32", "--in-turn", "--until", "1")  # one rollout
SAC = ("--steps", "300", "--random", "250")
SMALL = {
    "ppo_torch.py": PPO,
    "sac_torch.py": SAC,
    "population.py": ("--generations", "2", "--members", "4"),
    "curriculum.py": ("--steps", "4000", "--episodes", "4"),
    "ray_ppo.py": (*CARTPOLE, "--mode", "sync"),
}
if OPENGL:
    SMALL["pixels_ppo_torch.py"] = PIXELS


def run(script: str, *args: str, cwd: Path) -> str:
    command = [sys.executable, str(TRAINING / script), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment(), cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """What a short run of PPO prints; its folder has the policy."""
    folder = tmp_path_factory.mktemp("policy")
    return folder, run("ppo_torch.py", *PPO, "--save", "ppo.pt", "--log", "log.csv", cwd=folder)


def returns(said: str) -> list[tuple[str, str]]:
    """Steps and mean returns, without rates."""
    return re.findall(r"^(\d+) steps.*mean return (-?[\d.]+)", said, re.MULTILINE)


def definitions(script: str) -> dict:
    """The names that a script defines."""
    names: dict = {"__name__": "example"}
    exec(compile((TRAINING / script).read_text(), script, "exec"), names)
    return names


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.mark.parametrize("script", ["ppo_torch.py", "sac_torch.py", "population.py"])
def test_help_says_which_envs_are_for_it(script, tmp_path):
    assert "--env ENV with continuous actions" in " ".join(run(script, "--help", cwd=tmp_path).split())


def test_ppo(policy):
    folder, said = policy
    header, *rows = (folder / "log.csv").read_text().splitlines()
    assert header == "steps,seconds,return" and len(rows) == len(returns(said)) == 1
    assert rows[0].startswith(returns(said)[0][0]) and float(rows[0].split(",")[1]) > 0


def test_curves_of_several_seeds(tmp_path):
    """The third run was stopped early, and counts on with its last return."""
    logs = {
        "a": [(100, 1, 0), (200, 2, 10), (300, 3, 20)],
        "b": [(100, 2, 0), (200, 4, 30), (300, 6, 40)],
        "c": [(100, 3, 5), (200, 6, 15)],
    }
    for name, rows in logs.items():
        lines = ["steps,seconds,return", *(",".join(map(str, row)) for row in rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    names = [f"{name}.csv" for name in logs]
    said = run("curves.py", *names, "--bar", "20", "--png", "p.png", "--title", "Hopper-v5", cwd=tmp_path)
    assert said.splitlines() == [
        "a.csv: 20 after 300 steps, 3 s; at last 20",
        "b.csv: 20 after 200 steps, 4 s; at last 40",
        "c.csv: 20 after inf steps, inf s; at last 15",
        "median of 3: 20 after 300 steps, 4 s",
    ]
    assert is_picture(tmp_path / "p.png")
    curves = definitions("curves.py")
    steps, values = curves["median"]([curves["read"](str(tmp_path / name)) for name in names])
    assert steps.tolist() == [100, 200, 300] and values.tolist() == [0, 15, 20]


def test_a_log_without_episodes_says_so(tmp_path):
    (tmp_path / "a.csv").write_text("steps,seconds,return\n")
    with pytest.raises(SystemExit, match="no episode"):
        definitions("curves.py")["read"](str(tmp_path / "a.csv"))


def test_the_twins_of_ppo_have_the_same_results(policy, tmp_path):
    """Networks, statistics and draws: with `await` and without."""
    import torch

    folder, said = policy
    awaited = run("ppo_torch.py", *PPO, "--awaited", "--save", "ppo.pt", cwd=tmp_path)
    assert returns(awaited) == returns(said)
    ours, theirs = (torch.load(path / "ppo.pt")["agent"] for path in (folder, tmp_path))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_seed_counts(policy, tmp_path):
    _folder, said = policy
    assert returns(run("ppo_torch.py", *PPO, "--seed", "1", cwd=tmp_path)) != returns(said)


def test_evaluation_is_repeatable(policy, tmp_path):
    folder, _ = policy
    command = ("evaluate_torch.py", str(folder / "ppo.pt"), "--episodes", "3", "--num-envs", "2")
    first, second = (re.findall(r"^return: .*", run(*command, "--curve", "h.png", cwd=tmp_path), re.M) for _ in "12")
    assert first == second and len(first) == 1 and is_picture(tmp_path / "h.png")


def test_another_policy_is_refused_by_name(tmp_path):
    import torch

    torch.save({"algorithm": "ray_ppo", "env": "CartPole-v1", "agent": {}}, tmp_path / "other.pt")
    command = [sys.executable, str(TRAINING / "evaluate_torch.py"), "other.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment(), cwd=tmp_path)
    assert done.returncode == 1 and "expected a policy of ppo or sac, got one of ray_ppo" in done.stderr


class Ladder(gym.Env):
    """Its observations tell episode, time and the last action. Even episodes are terminated at 5, odd ones cut at 7."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,))
    action_space = gym.spaces.Box(-2, 2, (2,))
    episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return np.array([self.episode, 0, 0, 0], np.float32), {}

    def step(self, action):
        self.time += 1
        even = self.episode % 2 == 0
        obs = np.array([self.episode, self.time, *action], np.float32)
        return obs, float(self.time), even and self.time == 5, not even and self.time == 7, {}


def sac(names: dict, **settings):
    """Train in this process; each update is cheap."""
    names.update(HIDDEN=16, BATCH=32, REPORT=100)
    usual = {"env": Ladder, "num_envs": 4, "workers": 2, "min_slots": 1, "steps": 600, "random": 100, "ratio": 0.2}
    usual |= {"buffer": 500, "until": math.inf, "seed": 0, "log": None, "tensorboard": None, "trace": None}
    return aioenv.run(names["train"](argparse.Namespace(**usual | settings)))


def test_sac_learns_from_real_transitions():
    """No row leads into another episode, and only terminated ones have nothing after them."""
    import torch

    learner = sac(definitions("sac_torch.py"))
    rows = learner.buffer.rows
    assert learner.buffer.added >= 600 and len(rows) == 500  # the buffer is full, and went round
    obs, actions, reward, next_obs, terminated = rows.split(learner.buffer.widths, 1)
    assert torch.equal(obs[:, 0], next_obs[:, 0])  # one episode
    assert torch.equal(obs[:, 1] + 1, next_obs[:, 1]) and torch.equal(next_obs[:, 1], reward[:, 0])
    assert torch.equal(next_obs[:, 2:], actions) and actions.abs().max() <= 2 and actions.abs().max() > 1
    even, last = obs[:, 0] % 2 == 0, next_obs[:, 1]
    assert torch.equal(terminated[:, 0] == 1, even & (last == 5))
    assert last[even].max() == 5 and last[~even].max() == 7  # the last observations are there
    assert learner.updates == math.ceil(0.2 * (learner.buffer.added - 100))
    assert learner.log_temperature.item() != 0


def test_sac_stops_at_a_return(tmp_path):
    """Episodes earn 1 + 2 + … + 5 and 1 + 2 + … + 7."""
    learner = sac(definitions("sac_torch.py"), until=20, log=str(tmp_path / "log.csv"))
    assert 100 <= learner.buffer.added < 300
    steps, _, mean = (tmp_path / "log.csv").read_text().splitlines()[-1].split(",")
    assert int(steps) == learner.buffer.added and 15 < float(mean) < 28


def test_sac_bootstraps_unless_terminated():
    """A reward of 1 is all that a terminated step earns; one that goes on earns more."""
    import torch

    names = definitions("sac_torch.py")
    names.update(HIDDEN=16, BATCH=32, GAMMA=0.5, TAU=0.1)
    torch.manual_seed(0)
    learner = names["Learner"](1, 1, [1.0], 2)
    obs = torch.tensor([[0.0], [1.0]])
    learner.buffer.add(obs, torch.zeros(2, 1), torch.ones(2), obs, torch.tensor([True, False]))
    for _ in range(300):
        learner.update()
    ended, goes_on = learner.critics(obs, torch.zeros(2, 1)).mean(0).tolist()
    assert abs(ended - 1) < 0.2 and goes_on > ended + 0.4


def test_sac(tmp_path):
    command = ("sac_torch.py", *SAC, "--save", "made/for/it/sac.pt", "--log", "log.csv", "--trace", "run.json")
    said = run(*command, cwd=tmp_path)
    (row,) = (tmp_path / "log.csv").read_text().splitlines()[1:]
    assert row.split(",")[0] == re.findall(r"^(\d+) steps", said, re.MULTILINE)[0]
    assert {"loop", "worker 0: slots 0-3"} <= {span.line for span in read(tmp_path / "run.json")}
    told = run("evaluate_torch.py", "made/for/it/sac.pt", "--episodes", "3", "--num-envs", "2", cwd=tmp_path)
    assert re.search(r"^return: ", told, re.MULTILINE)


def test_sac_is_repeatable_if_it_waits_for_all_slots():
    import torch

    learners = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        learners.append(sac(definitions("sac_torch.py"), steps=200, min_slots=4, seed=seed))
    one, again, other = (learner.buffer.rows[:200] for learner in learners)
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_population_learns(tmp_path):
    said = run("population.py", "--generations", "4", "--members", "16", "--curve", "made/curve.png", cwd=tmp_path)
    means = [float(number) for number in re.findall(r"mean return ([\d.]+)", said)]
    batches = [float(number) for number in re.findall(r"([\d.]+) members a batch", said)]
    assert len(means) == 4 and means[-1] > 1.3 * means[0], said
    assert batches[-1] > 2 and is_picture(tmp_path / "made" / "curve.png")  # one call serves several members


def test_curriculum_learns(tmp_path):
    said = run("curriculum.py", "--steps", "30000", "--episodes", "8", "--curve", "curve.png", cwd=tmp_path)
    assert is_picture(tmp_path / "curve.png")
    means = {
        task: [float(n) for n in re.findall(f"{task}: mean return ([\\d.]+)", said)]
        for task in ("hardest", "curriculum")
    }
    assert len(means["curriculum"]) > 5 and max(means["hardest"][-3:]) > 2 * means["hardest"][0], said


def test_ppo_with_collectors(tmp_path):
    """Without Ray; tests/cluster has it on Ray."""
    import torch

    said = run("ray_ppo.py", *CARTPOLE, "--prefetch", "1", "--save", "ppo.pt", "--log", "log.csv", cwd=tmp_path)
    lags = [float(number) for number in re.findall(r"weights ([\d.]+) updates old", said)]
    assert len(returns(said)) == len(lags) >= 2 and 0 < max(lags) <= 3, said
    assert "rollouts of 2 collectors" in said
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1 + len(lags)
    assert torch.load(tmp_path / "ppo.pt")["agent"]["stats.count"] > 1500


def test_curriculum_grows():
    names = definitions("curriculum.py")
    reach = [names["options"](1, episode)["high"] for episode in range(200)]
    assert reach == sorted(reach) and reach[0] == names["EASY"] and reach[-1] == names["HARD"]
    assert names["options"](4, 0) == {"low": -names["HARD"], "high": names["HARD"]}


@pytest.mark.asyncio
@pytest.mark.skipif(not OPENGL, reason="no OpenGL here")
async def test_pixels_ppo_has_the_same_results_again(tmp_path):
    """Though one thread collects while another one learns."""
    import torch

    example = definitions("pixels_ppo_torch.py")

    async def train():
        torch.manual_seed(0)
        args = argparse.Namespace(env="InvertedPendulum-v5", num_envs=2, num_workers=1, size=32, stack=2, steps=300)
        args.seed, args.until, args.in_turn = 0, math.inf, False
        args.log, args.tensorboard = tmp_path / "log.csv", None
        return await example["train"](args)

    first, second = await train(), await train()
    states = zip(first.agent.state_dict().values(), second.agent.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in states)
    header, *rows = (tmp_path / "log.csv").read_text().splitlines()
    assert header == "steps,seconds,return" and [float(row.split(",")[0]) for row in rows][-1] == first.steps


@pytest.mark.asyncio
@pytest.mark.skipif(not OPENGL, reason="no OpenGL here")
async def test_pixels_ppo_learns_from_whole_episodes():
    """No stack mixes two episodes, and the row after a step has what it led to."""
    import torch

    from aioenv.adapters.torch import TorchVectorEnv

    example = definitions("pixels_ppo_torch.py")
    async with TorchVectorEnv(example["make_envs"]("InvertedPendulum-v5", 2, size=32)) as envs:
        await envs.reset(seed=0)
        rollout = await envs.rollout(lambda obs: torch.full((len(obs), 1), 3.0), 24)
    assert rollout.obs.shape == (24, 2, 3, 32, 32) and rollout.obs.dtype == torch.uint8
    after = torch.cat([rollout.obs[1:], rollout.last_obs[None]])
    assert torch.equal(after[rollout.valid], rollout.next_obs[rollout.valid])
    begun = after[~rollout.valid]  # the first stacks of episodes
    assert len(begun) > 4 and all((stack == stack[-1]).all() for stack in begun)
    ended = after[rollout.terminated]
    assert all((stack[0] != stack[1]).any() and (stack[1] != stack[2]).any() for stack in ended)


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="no tensorboard here")
@pytest.mark.parametrize("script", SMALL)
def test_tensorboard(script, tmp_path):
    run(script, *SMALL[script], "--tensorboard", "runs", cwd=tmp_path)
    assert list(tmp_path.glob("runs/**/events.out.tfevents.*"))


def test_make_runs_and_draws_every_script():
    """`make examples` and `make curves` leave none out, and the gallery has a picture of each that learns."""
    scripts = {path.stem for path in TRAINING.glob("*.py")}
    makefile = (ROOT / "Makefile").read_text()
    for target in ("examples", "curves"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert recipe is not None
        assert {name for name in scripts if f"/{name}.py" in recipe[1]} == scripts
    pictures = {path.stem for path in (ROOT / "docs" / "_static" / "examples" / "training").glob("*.png")}
    assert pictures == scripts - {"curves"}
