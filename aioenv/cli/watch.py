"""Step envs and show them in the browser, MuJoCo envs in 3D. Ctrl-C ends it."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
import webbrowser
from itertools import count
from typing import Any

import gymnasium
import numpy as np

import aioenv
from aioenv.cli.arguments import not_registered, positive_int, registered, seed
from aioenv.cli.record import policy
from aioenv.cli.terminal import say
from aioenv.loops.record import fps_of
from aioenv.make import BACKENDS
from aioenv.native_vector_env import vector_env_factory
from aioenv.rollout.rollout import is_pair_space, split_answer, takes_slots

__all__ = ["HELP", "add_arguments", "run"]

HELP = "step envs and show them in the browser"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("env", metavar="ENV", help="an id of Gymnasium, or module:id")
    parser.add_argument(
        "--policy", metavar="MODULE:FUNCTION", type=policy, help="gives actions for observations (default: at random)"
    )
    parser.add_argument("--num-envs", type=positive_int, default=16, help="how many envs (default: 16)")
    parser.add_argument("--slots", type=positive_int, help="how many of them are shown (default: all)")
    parser.add_argument("--port", type=port, default=0, help="of the page (default: any that is free)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--fast", action="store_true", help="step as fast as possible (default: in real time)")
    parser.add_argument("--steps", type=positive_int, help="steps of every env (default: until Ctrl-C)")
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="workers",
        help="single envs in worker processes, or the env's version as one vector env (default: workers)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the envs and of random actions (default: 0)")


def port(text: str) -> int:
    """Parse the number of a port.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port, 0 to 65535, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Step and show envs; 0 after `--steps`."""
    try:
        registered(args.env)
    except (gymnasium.error.Error, ImportError) as exc:
        print(f"aioenv watch: {not_registered(args.env, exc)}", file=sys.stderr)
        return 2
    try:
        if args.backend == "native":
            vector_env_factory(args.env, {})
    except (gymnasium.error.Error, ImportError, ValueError) as exc:
        print(f"aioenv watch: {args.env}: {exc}", file=sys.stderr)
        return 2
    try:
        aioenv.run(_watch(args))
    except ImportError as exc:
        if exc.name != "viser":
            raise
        print(f"aioenv watch: {exc}", file=sys.stderr)
        return 1
    return 0


async def _watch(args: argparse.Namespace) -> None:
    # MuJoCo envs send states alone; others draw themselves
    config = aioenv.RenderConfig(workers=0)
    async with aioenv.make_vec(args.env, args.num_envs, backend=args.backend, render=config) as envs:
        page = await envs.watch(args.slots or args.num_envs, args.port)
        say(page.url, "bold", wrap=False)
        if args.open:
            webbrowser.open_new_tab(page.url)
        envs.action_space.seed(args.seed)
        given = {"slots": np.arange(envs.num_envs)} if args.policy is not None and takes_slots(args.policy) else {}
        pairs = is_pair_space(envs.single_action_space)
        period_s = 0.0 if args.fast else 1 / fps_of(envs.metadata)
        loop = asyncio.get_running_loop()
        obs: Any
        obs, _ = await envs.reset(seed=args.seed)
        due_s = loop.time()
        for _ in count() if args.steps is None else range(args.steps):
            if args.policy is None:
                actions = envs.action_space.sample()
            else:
                answer = args.policy(obs, **given)
                actions = split_answer(await answer if inspect.isawaitable(answer) else answer, pairs)[0]
            obs, *_ = await envs.step(actions)
            due_s = max(due_s + period_s, loop.time() - period_s)  # after a delay it does not catch up
            if (left_s := due_s - loop.time()) > 0:
                await asyncio.sleep(left_s)
