"""
An evaluation in torch
======================

Load a policy that `ppo_torch.py` or `sac_torch.py` has saved, and run 100 seeded episodes, each exactly once.

::

    python examples/training/evaluate_torch.py ppo.pt --episodes 100

.. image:: /_static/examples/training/evaluate_torch.png
   :alt: A histogram of returns.
   :width: 500
"""

# sphinx_gallery_thumbnail_path = '_static/examples/training/evaluate_torch.png'

import argparse

import torch
from ppo_torch import Agent
from sac_torch import Actor

import aioenv
from aioenv.adapters.torch import TorchVectorEnv

POLICIES = {"ppo": Agent, "sac": Actor}


async def main(path: str, episodes: int, seed: int, backend: str, num_envs: int) -> aioenv.Evaluation:
    saved = torch.load(path)
    if saved["algorithm"] not in POLICIES:
        raise SystemExit(f"{path}: expected a policy of {' or '.join(POLICIES)}, got one of {saved['algorithm']}")
    async with TorchVectorEnv(
        aioenv.make_vec(saved["env"], num_envs, backend=backend), obs_dtype=torch.float32
    ) as envs:
        inputs, outputs = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        agent = POLICIES[saved["algorithm"]](inputs, outputs)
        agent.load_state_dict(saved["agent"])
        # `best` draws nothing and counts nothing: the same seed gives the same episodes
        return await aioenv.evaluate(envs.envs, envs.numpy_policy(agent.best), episodes, seed=seed)


def draw(evaluation: aioenv.Evaluation, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    axes.hist(evaluation.returns, bins=20, color="#0072b2", edgecolor="white")
    axes.set(xlabel="return", ylabel="episodes")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("policy", metavar="POLICY", help="the file that --save has written")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the episodes")
    parser.add_argument("--backend", default="native", choices=["native", "workers", "auto"])
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--curve", metavar="PATH", help="draw a histogram of the returns, as PNG")
    args = parser.parse_args()

    torch.set_num_threads(1)
    evaluation = aioenv.run(main(args.policy, args.episodes, args.seed, args.backend, args.num_envs))
    print(evaluation)
    if args.curve:
        draw(evaluation, args.curve)
