"""Workers on a Ray cluster of two nodes, which Ray simulates on this machine; one node is killed and replaced.

Cheetahs run on both nodes, and are drawn there. Each slot gets its next action as soon as its result is here, so the
slots of one node go on while the other node is down. With `resume=True` its slots then go on from their last step.

    make demo-cluster
"""

import argparse
import asyncio
import contextlib
import io
import itertools
import logging
import os
import sys
import time

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or Ray warns of what it will do one day

import numpy as np
import ray
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

import aioenv

ENV = "HalfCheetah-v5"
CPUS = 2  # of a node: as many workers fit
REPORT_S = 2.0
# Ray notices that a node is dead after 5 s, and not after 15
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}

console = Console(highlight=False, file=sys.stdout)


class Demo:
    """Steps all slots, each by itself, and reports what happens.

    Args:
        nodes: Ray's nodes.
        envs: the vector env.
    """

    def __init__(self, nodes: Cluster, envs: aioenv.AsyncVectorEnv) -> None:
        self.nodes = nodes
        self.envs = envs
        self.steps = np.zeros(envs.num_envs, int)
        self.images = np.zeros(envs.observation_space.shape, np.uint8)
        self.begun = time.perf_counter()
        self.next_report = self.begun + REPORT_S
        self.reported = 0

    def say(self, text: str, style: str = "") -> None:
        console.print(f"{time.perf_counter() - self.begun:6.1f} s  {text}", style=style)

    async def run(self, seconds: float) -> None:
        """Step for some time."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            await self.step()

    async def step(self) -> None:
        """Take the results that there are, and send the next actions to their slots."""
        result = await self.envs.recv(deadline_s=0.1)
        slots = result.slots
        if len(slots):
            self.steps[slots] += 1
            self.images[slots] = result.obs
            self.envs.send(np.stack([self.envs.single_action_space.sample() for _ in slots]), slots)
        if time.perf_counter() >= self.next_report:
            self.report()

    def report(self) -> None:
        now = time.perf_counter()
        rate = (self.steps.sum() - self.reported) / (now - self.next_report + REPORT_S)
        self.next_report, self.reported = now + REPORT_S, self.steps.sum()
        up = sum(worker.state in ("ready", "busy") for worker in self.envs.workers)
        self.say(f"{rate:6,.0f} steps with an image a second, {up} of {len(self.envs.workers)} workers are up")

    def table(self) -> None:
        """Print the workers by node."""
        table = Table("node", "worker", "pid", "slots", "steps of each")
        workers = sorted(enumerate(self.envs.workers), key=lambda pair: (pair[1].node, pair[0]))
        for node, group in itertools.groupby(workers, key=lambda pair: pair[1].node):
            for place, (number, worker) in enumerate(group):
                slots = [*worker.slots]
                least, most = self.steps[slots].min(), self.steps[slots].max()
                row = number, worker.pid, f"{slots[0]} to {slots[-1]}", f"{least} to {most}"
                table.add_row("" if place else node, *map(str, row))
        console.print(table)

    async def kill_a_node(self) -> None:
        """Kill the node that this process is not connected to, and add another one."""
        head = ray.get_runtime_context().get_node_id()
        (doomed,) = (node for node in self.nodes.list_all_nodes() if node.node_id != head)
        lost = [number for number, one in enumerate(self.envs.workers) if doomed.node_id[:8] in one.node]
        pids = {self.envs.workers[number].pid for number in lost}
        others = np.setdiff1d(np.arange(self.envs.num_envs), [s for n in lost for s in self.envs.workers[n].slots])
        self.say(f"node {doomed.node_id[:8]} is killed, with workers {' and '.join(map(str, lost))}", "bold red")
        before, killed = self.steps.copy(), time.perf_counter()
        killing = asyncio.ensure_future(asyncio.to_thread(self.nodes.remove_node, doomed, allow_graceful=False))
        while not killing.done():
            await self.step()
        await killing
        new = self.nodes.add_node(num_cpus=CPUS)  # Ray starts nodes on the main thread alone
        self.say(f"node {new.node_id[:8]} has joined", "bold")
        while any(one.pid in pids or one.state not in ("ready", "busy") for one in self.envs.workers):
            await self.step()
        while (self.steps == before).any():
            await self.step()
        went_on = (self.steps - before)[others].sum()
        self.say(f"all workers are up again, {time.perf_counter() - killed:.1f} s after the kill", "bold green")
        self.say(f"the other slots have gone on meanwhile: {went_on:,} steps; the lost slots go on where they were")


async def main(num_envs: int, seconds: float, out: str) -> None:
    console.print(f"Two nodes of {CPUS} CPUs, simulated by Ray; {num_envs} x {ENV}, drawn where they are stepped")
    head = {"num_cpus": CPUS, "include_dashboard": False, "_system_config": QUICK}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes.add_node(num_cpus=CPUS)
        ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
        async with aioenv.make_vec(
            ENV,
            num_envs,
            num_workers=2 * CPUS,
            cluster=aioenv.RayCluster(),
            pixels=aioenv.RenderConfig(width=84, height=84, quality="fast", camera="track"),
            restart=aioenv.RestartPolicy(resume=True),
        ) as envs:
            await envs.reset(seed=0)
            demo = Demo(nodes, envs)
            envs.send(envs.action_space.sample())
            await demo.run(seconds / 3)
            demo.table()
            await demo.kill_a_node()
            await demo.run(seconds / 3)
            demo.table()
            save(out, demo.images)
    finally:
        ray.shutdown()
        nodes.shutdown()


def save(out: str, images: np.ndarray) -> None:
    """Save the last images of all slots, side by side."""
    import imageio.v3 as iio

    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    iio.imwrite(out, np.concatenate(images, axis=1))
    console.print(f"The last images: {os.path.abspath(out)}", soft_wrap=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=18.0, help="how long it runs, the replacement aside")
    parser.add_argument("--out", default="out/cluster.png")
    args = parser.parse_args()
    logging.getLogger("aioenv").setLevel(logging.ERROR)  # it warns of restarts, which are reported here
    with contextlib.redirect_stdout(io.StringIO()):  # Ray prints the state of the node that was killed
        aioenv.run(main(args.num_envs, args.seconds, args.out))
