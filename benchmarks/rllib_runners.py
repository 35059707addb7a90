"""Sample with RLlib's env runners, two hidden layers of 64 and no learner; print JSON.

RLlib pins a version of Gymnasium of its own. So this is a program for another Python, which imports nothing of aioenv:

    python -m venv rllib && rllib/bin/pip install 'ray[rllib]==2.60.*' 'gymnasium[mujoco]' torch
    RLLIB_PYTHON=rllib/bin/python python -m benchmarks collectors

As many actors as CPUs hold a `SingleAgentEnvRunner` each. It steps its share of the envs as a vector, in the actor's
process. Whatever is optional and takes time is off: exploration, and so probabilities of actions. An actor is asked for
its next sample before the driver takes the last one, so it never waits. The driver gets the episodes as numpy arrays.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WARM_UP_SAMPLES = 2  # of each actor


def main() -> None:
    """Sample for some seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env")
    parser.add_argument("--runners", type=int, required=True)
    parser.add_argument("--envs", type=int, required=True, help="of each actor")
    parser.add_argument("--steps", type=int, required=True, help="of each env, in a sample")
    parser.add_argument("--hidden", type=int, required=True, help="units of each of two layers")
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    import ray

    ray.init("local", num_cpus=args.runners, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        print(json.dumps(_sample(ray, args)))
    finally:
        ray.shutdown()


def _sample(ray: Any, args: argparse.Namespace) -> dict[str, float]:
    actors = _actors(ray, args)
    pids = ray.get([actor.apply.remote(_pid) for actor in actors])

    def ask(actor: Any) -> Any:
        return actor.sample.remote(num_timesteps=args.steps * args.envs)

    for _ in range(WARM_UP_SAMPLES):
        ray.get([ask(actor) for actor in actors])
    steps = 0
    asked = {ask(actor): actor for actor in actors}
    began, cpu_s = time.perf_counter(), _cpu_s(pids)
    while time.perf_counter() < began + args.seconds:
        (ready,), _ = ray.wait([*asked])
        actor = asked.pop(ready)
        asked[ask(actor)] = actor
        steps += sum(len(episode) for episode in ray.get(ready))
    return {"env_steps": steps, "seconds": time.perf_counter() - began, "cpu_s": _cpu_s(pids) - cpu_s}


def _actors(ray: Any, args: argparse.Namespace) -> list[Any]:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    layers = [args.hidden] * 2
    config = (
        PPOConfig()
        .environment(args.env)
        .env_runners(
            num_env_runners=args.runners,
            num_envs_per_env_runner=args.envs,
            rollout_fragment_length=args.steps,
            gym_env_vectorize_mode="sync",
            explore=False,
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=layers, fcnet_activation="tanh", vf_share_layers=True))
    )
    make = ray.remote(num_cpus=1)(SingleAgentEnvRunner)
    return [make.remote(config=config, worker_index=number + 1) for number in range(args.runners)]


def _pid(_: Any) -> int:
    return os.getpid()


def _cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time of processes and of this one."""
    total = time.process_time()
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            total += int(file.read_text(encoding="utf-8").split()[0]) / 1e9
    return total


if __name__ == "__main__":
    main()
