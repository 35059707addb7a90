"""
An evaluation
=============

Run a given number of episodes, each exactly once, with the same results for any number of workers.

::

    python examples/evaluate.py --episodes 101 --kill

With `--kill` a worker is killed on the way. Its episodes are run again, and the results are the same.
"""

import argparse
import os
import signal

import numpy as np

import aioenv


def policy(obs):
    return (obs[:, 2] > 0).astype(np.int64)


async def main(episodes: int, num_envs: int, num_workers: int, kill: bool) -> None:
    restart = aioenv.RestartPolicy() if kill else None
    async with aioenv.make_vec("CartPole-v1", num_envs, num_workers=num_workers, restart=restart) as envs:

        def on_episode(episode: aioenv.Episode) -> None:
            if kill and not killed:
                killed.append(envs.workers[0].pid)
                os.kill(killed[0], signal.SIGKILL)

        killed: list[int] = []
        evaluation = await aioenv.evaluate(envs, policy, episodes, seed=0, progress=on_episode)
        print(evaluation)
        again = [episode.number for episode in evaluation.episodes if episode.attempts > 1]
        print(f"begun more than once: {again}" if again else "nothing was begun twice")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=101)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--kill", action="store_true")
    args = parser.parse_args()
    aioenv.run(main(args.episodes, args.num_envs, args.num_workers, args.kill))
