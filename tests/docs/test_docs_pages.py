"""The snippets of pages run, with what the text around them speaks of, and print what the page says."""

from __future__ import annotations

import asyncio
import re
import sys
import types
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

import aioenv
from tests.kits.docs_kit import cell, page, snippets

MODEL = f"{gym.__path__[0]}/envs/mujoco/assets/half_cheetah.xml"
N = 8  # slots, in place of 64


def blocks(name):
    """The snippets of a page, with fewer slots and steps, and a model that is there."""
    for block in snippets(page(name)):
        block = re.sub(r"\b(100|200|500|1000)\b", "3", re.sub(r"\b(64|16)\b", str(N), block))
        yield re.sub(r'"(model|robot)\.xml"', repr(MODEL), block)


def still(*shape):
    """A policy whose actions are zeros."""
    return lambda obs: np.zeros((len(obs), *shape), np.float32)


async def run(*cells, **names):
    names = {"aioenv": aioenv, "np": np, "asyncio": asyncio, "__name__": "__main__", **names}
    for each in cells:
        await cell(each, names)


@pytest.mark.asyncio
async def test_vector_envs():
    begin, some, step_some, states, own_states, checkpoints = blocks("docs/vector-envs.md")
    await run(begin, make_it=lambda num_envs: CartPoleVectorEnv(num_envs))
    policy, actions = still(3), np.zeros((N, 3), np.float32)
    await run(some, policy=policy, actions=actions, action=actions[0])
    make = partial(aioenv.make_vec, "Hopper-v5", N, backend="native")
    async with make() as envs, make(num_workers=2) as others:
        await envs.reset(seed=0)
        await others.reset()
        await run(states, envs=envs, others=others)
        ours, theirs = await envs.step(actions), await others.step(actions)
        assert (ours.obs[[3, 1]] == theirs.obs[[0, 7]]).all()
    await run(step_some, own_states, checkpoints)  # that they are Python


def test_statistics(monkeypatch, capsys):
    loop, events, writer = blocks("docs/statistics.md")
    written = []
    summary = types.SimpleNamespace(add_scalar=lambda *args: written.append(args))
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.utils", types.ModuleType("torch.utils"))
    tensorboard = types.ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = lambda directory: summary
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    names = {"aioenv": aioenv, "np": np}
    exec(loop.replace("range(3)", "range(60)"), names)
    assert "an episode ended with return" in (told := capsys.readouterr().out) and "return/mean" in told
    exec(events, names)
    exec(writer, names)
    names["stats"].write(7)
    assert ("train/episode_count", 0.0, 7) in written


EVALUATION = page("docs/evaluation.md")


def test_the_examples_of_evaluation_run(capsys):
    names = {"__name__": "__main__"}
    for code in snippets(EVALUATION):
        exec(code, names)
    printed = capsys.readouterr().out
    assert printed.startswith("101 episodes, drawn from seed=0\nepisode")
    promised = re.findall(r"```\n([^`]+?)```", EVALUATION)
    assert len(promised) == 2
    for text in promised:
        assert text in printed
