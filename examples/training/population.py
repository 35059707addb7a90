"""
A population
============

Evolution of policies: each member plays in a vector env of its own, all on one event loop. One task runs the policies
of all members, in one batch of what has arrived.

::

    python examples/training/population.py --generations 30 --curve population.png

.. image:: /_static/examples/training/population.png
   :alt: The mean return and the best one, by generation.
   :width: 500
"""

# sphinx_gallery_thumbnail_path = '_static/examples/training/population.png'

import argparse
import asyncio
import contextlib
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import aioenv

ELITE = 0.25  # the share of members that the next generation is drawn around


class Inference:
    """Runs the policies of all members, which are linear; their weights are stacked."""

    def __init__(self, bound: float) -> None:
        self.bound = bound  # of actions
        self.weights = self.bias = torch.empty(0)  # (members, inputs, outputs), (members, 1, outputs)
        self.requests: asyncio.Queue = asyncio.Queue()
        self.batches = self.asked = 0

    async def act(self, member: int, obs):
        """Ask for the actions of one member. The other members' envs go on meanwhile."""
        answer = asyncio.get_running_loop().create_future()
        self.requests.put_nowait((member, torch.from_numpy(obs).float(), answer))
        return await answer

    async def serve(self) -> None:
        while True:
            requests = [await self.requests.get()]
            await asyncio.sleep(0)  # the other members whose steps have arrived ask, too
            while not self.requests.empty():
                requests.append(self.requests.get_nowait())
            members, observations, answers = zip(*requests, strict=True)
            self.batches, self.asked = self.batches + 1, self.asked + len(requests)
            # members have different numbers of rows, as their last episodes end
            padded = torch.nn.utils.rnn.pad_sequence(observations, batch_first=True)
            which = list(members)
            actions = self.bound * torch.tanh(torch.baddbmm(self.bias[which], padded, self.weights[which]))
            for obs, own, answer in zip(observations, actions.numpy(), answers, strict=True):
                if not answer.cancelled():
                    answer.set_result(own[: len(obs)])


async def main(args: argparse.Namespace) -> list[tuple[float, float]]:
    curve = []
    async with contextlib.AsyncExitStack() as stack:
        made = [aioenv.make_vec(args.env, args.slots, backend=args.backend) for _ in range(args.members)]
        population = await asyncio.gather(*(stack.enter_async_context(envs) for envs in made))
        inputs, space = population[0].single_observation_space.shape[0], population[0].single_action_space
        inference = Inference(float(space.high[0]))
        serving = asyncio.create_task(inference.serve())
        mean, std = torch.zeros(inputs + 1, *space.shape), torch.ones(inputs + 1, *space.shape)
        steps, began = 0, time.perf_counter()
        for generation in range(args.generations):
            weights = mean + std * torch.randn(args.members, *mean.shape)
            inference.weights, inference.bias = weights.split((inputs, 1), dim=1)
            evaluations = await asyncio.gather(  # the same episodes for all members
                *(
                    aioenv.evaluate(envs, partial(inference.act, member), args.slots, seed=args.seed + generation)
                    for member, envs in enumerate(population)
                )
            )
            returns = np.array([evaluation.returns.mean() for evaluation in evaluations])
            elite = weights[np.argsort(returns)[-max(2, int(ELITE * args.members)) :].copy()]
            mean, std = elite.mean(0), elite.std(0) + 0.01  # and never stop to search
            steps += sum(int(evaluation.lengths.sum()) for evaluation in evaluations)
            curve.append((returns.mean(), returns.max()))
            rate = steps / (time.perf_counter() - began)
            members = inference.asked / inference.batches
            print(
                f"generation {generation}: mean return {returns.mean():.1f}, best {returns.max():.1f}, "
                f"{rate:.0f} steps/s, {members:.1f} members a batch",
                flush=True,
            )
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return curve


def log(curve: list[tuple[float, float]], directory: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(directory) as summary:
        for generation, (mean, best) in enumerate(curve):
            summary.add_scalars("return", {"mean": mean, "best": best}, generation)


def draw(curve: list[tuple[float, float]], env: str, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for returns, label, colour in zip(zip(*curve, strict=True), ("mean", "best"), ("#0072b2", "#d55e00"), strict=True):
        axes.plot(returns, label=label, color=colour)
    axes.set(xlabel="generation", ylabel="return", title=env)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="InvertedDoublePendulum-v5", help="with continuous actions")
    parser.add_argument("--backend", default="native", choices=["native", "workers", "auto"])
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--slots", type=int, default=4, help="of each member, and so its episodes in a generation")
    parser.add_argument("--generations", "--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curve", metavar="PATH", help="draw the returns, as PNG")
    parser.add_argument("--tensorboard", metavar="DIR")
    args = parser.parse_args()
    Path(args.curve or "").parent.mkdir(parents=True, exist_ok=True)  # or training would be lost

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    curve = aioenv.run(main(args))
    if args.tensorboard:
        log(curve, args.tensorboard)
    if args.curve:
        draw(curve, args.env, args.curve)
