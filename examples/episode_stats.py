"""
Statistics of episodes
======================

Returns and lengths, an epoch at a time: as tables, and for TensorBoard if its library is there.

::

    python examples/episode_stats.py --epochs 3
"""

import argparse
from collections.abc import Mapping

import aioenv


class TensorBoard:
    """Writes statistics for TensorBoard, by PyTorch's writer or that of tensorboardX."""

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            from tensorboardX import SummaryWriter
        self.summary = SummaryWriter(directory)

    def write(self, prefix: str, step: int, stats: Mapping[str, float]) -> None:
        for name, value in stats.items():
            self.summary.add_scalar(f"{prefix}/{name}", value, step)


def writers(directory: str) -> list[TensorBoard]:
    try:
        return [TensorBoard(directory)]
    except ImportError:
        print("no TensorBoard here: pip install tensorboardX, and the same goes there")
        return []


async def main(epochs: int, steps: int, logs: str) -> None:
    events = [aioenv.EpisodeEvent("x_position", episode="last", epoch=("mean", "max"), name="distance")]
    stats = aioenv.EpisodeStats(events, prefix="train", writers=writers(logs))
    async with aioenv.make_vec("Hopper-v5", num_envs=8, max_episode_steps=100, episode_stats=stats) as envs:
        envs.action_space.seed(0)
        await envs.reset(seed=0)
        for _ in range(epochs):
            for _ in range(steps):
                await envs.step(envs.action_space.sample())
            print(stats.write())


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3, help="how many")
parser.add_argument("--steps", type=int, default=500, help="of an epoch")
parser.add_argument("--logs", default="runs", help="where TensorBoard looks")
args = parser.parse_args()
aioenv.run(main(args.epochs, args.steps, args.logs))
