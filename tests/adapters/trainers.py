"""PPO of each training library over its adapter, on CartPole; RSL-RL, whose policies are continuous, on HalfCheetah.

`make trainers` trains to the known return, also over the library's own vector env, and prints a table; or
`python -m tests.adapters.trainers sb3 tianshou --steps 50000`. The tests train in small.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from aioenv import sync

TASK, NUM_ENVS, ROLLOUT = "CartPole-v1", 8, 128  # steps of each slot in a rollout
RATE, GAMMA, LAMBDA, EPOCHS, MINIBATCH = 1e-3, 0.98, 0.8, 10, 256
EPISODES = 20  # of an evaluation, with the most probable actions


def make() -> gym.Env[Any, Any]:
    return gym.make(TASK)


def train_sb3(steps: int, own: bool = False, **kwargs: Any) -> float:
    """Return the mean return after this many steps; `kwargs` are those of the vector env, as in the others."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    from aioenv.adapters import sb3

    envs = make_vec_env(TASK, NUM_ENVS, seed=0) if own else sb3.make_vec(TASK, NUM_ENVS, seed=0, **kwargs)
    model = PPO(
        "MlpPolicy",
        envs,
        learning_rate=lambda left: left * RATE,
        n_steps=ROLLOUT,
        batch_size=MINIBATCH,
        n_epochs=EPOCHS,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        seed=0,
        device="cpu",
    )
    model.learn(steps)
    mean, _ = evaluate_policy(model, envs, EPISODES)
    envs.close()
    return float(mean)


def train_tianshou(steps: int, own: bool = False, **kwargs: Any) -> float:
    from tianshou.algorithm.modelfree.ppo import PPO
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory, LRSchedulerFactoryLinear
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.trainer import OnPolicyTrainerParams
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

    from aioenv.adapters.tianshou import TianshouVectorEnv

    torch.manual_seed(0)
    envs = DummyVectorEnv([make] * NUM_ENVS) if own else TianshouVectorEnv([make] * NUM_ENVS, **kwargs)
    envs.seed(0)
    space, actions = envs.observation_space[0], envs.action_space[0]

    def net() -> Any:
        return Net(state_shape=space.shape, hidden_sizes=[64, 64], activation=torch.nn.Tanh)

    actor = DiscreteActor(preprocess_net=net(), action_shape=int(actions.n), softmax_output=False)
    policy = DiscreteActorPolicy(actor=actor, action_space=actions, observation_space=space, deterministic_eval=True)
    optim = AdamOptimizerFactory(lr=RATE).with_lr_scheduler_factory(
        LRSchedulerFactoryLinear(1, steps, NUM_ENVS * ROLLOUT)
    )
    algorithm = PPO(
        policy=policy,
        critic=DiscreteCritic(preprocess_net=net()),
        optim=optim,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        ent_coef=0.0,
        max_grad_norm=0.5,
    )
    collector = Collector(algorithm, envs, VectorReplayBuffer(NUM_ENVS * ROLLOUT, NUM_ENVS))
    algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=steps,
            collection_step_num_env_steps=NUM_ENVS * ROLLOUT,
            update_step_num_repetitions=EPOCHS,
            batch_size=MINIBATCH,
            show_progress=False,
            verbose=False,
        )
    )
    evaluation = Collector(algorithm, envs)
    evaluation.reset()
    result = evaluation.collect(n_episode=EPISODES)
    envs.close()
    return float(np.mean(result.returns))


def train_torchrl(steps: int, own: bool = False, **kwargs: Any) -> float:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.envs import ExplorationType, GymEnv, SerialEnv, set_exploration_type
    from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    from aioenv.adapters.torchrl import AioEnv

    torch.manual_seed(0)
    if own:
        env = SerialEnv(NUM_ENVS, lambda: GymEnv(TASK))
    else:
        env = AioEnv(sync.make_vec(TASK, NUM_ENVS, autoreset_mode="Disabled", **kwargs))
    env.set_seed(0)
    sizes = {"num_cells": [64, 64], "activation_class": torch.nn.Tanh}
    logits = TensorDictModule(MLP(4, 2, **sizes), ["observation"], ["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
    critic = ValueOperator(MLP(4, 1, **sizes), in_keys=["observation"])
    advantage = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic)
    loss = ClipPPOLoss(
        actor, critic, entropy_bonus=False, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss.parameters(), RATE)
    frames = NUM_ENVS * ROLLOUT
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps // frames + 1)
    collector = Collector(env, actor, frames_per_batch=frames, total_frames=-1)  # or the last batch closes the env
    for _, batch in zip(range(steps // frames), collector, strict=False):
        for _ in range(EPOCHS):
            with torch.no_grad():
                advantage(batch)
            rows = batch.reshape(-1)
            for indices in torch.randperm(frames).split(MINIBATCH):
                losses = loss(rows[indices])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
        schedule.step()
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        data = env.rollout(500, actor, break_when_any_done=False, break_when_all_done=True)
    over = data["next", "done"].cumsum(1) - data["next", "done"].long()  # how many episodes have ended before
    returns = (data["next", "reward"] * (over == 0)).sum(1)
    collector.shutdown()
    return float(returns.mean())


def train_rsl_rl(steps: int, own: bool = False, **kwargs: Any) -> float:
    from rsl_rl.runners import OnPolicyRunner

    from aioenv.adapters.rsl_rl import RslRlVecEnv

    torch.manual_seed(0)
    num_envs, rollout = 64, 64
    vector_env = sync.make_vec(
        "HalfCheetah-v5", num_envs, backend="native", autoreset_mode="SameStep", episode_stats=True, **kwargs
    )
    envs = RslRlVecEnv(vector_env, seed=0)
    mlp = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh", "obs_normalization": True}
    config = {
        "num_steps_per_env": rollout,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 5, "num_mini_batches": 8, "entropy_coef": 0.0},
        "actor": {**mlp, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}},
        "critic": mlp,
    }
    runner = OnPolicyRunner(envs, config, log_dir=None)
    runner.learn(steps // (num_envs * rollout), init_at_random_ep_len=False)
    act = runner.get_inference_policy()
    vector_env.reset(seed=1)
    vector_env.episode_stats.clear()
    obs = envs.reset()[0]
    with torch.inference_mode():
        for _ in range(envs.max_episode_length):
            obs, *_ = envs.step(act(obs))
    mean = vector_env.episode_stats.epoch()["return/mean"]
    envs.close()
    return float(mean)


# the steps to the known return, the return, and the library's own vector env
FULL = {
    "sb3": (train_sb3, 100_000, 475.0, "DummyVecEnv"),
    "tianshou": (train_tianshou, 100_000, 475.0, "DummyVectorEnv"),
    "torchrl": (train_torchrl, 100_000, 475.0, "SerialEnv"),
    "rsl_rl": (train_rsl_rl, 2_000_000, 1500.0, None),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("libraries", nargs="*", choices=[*FULL, []], help="all, if none is named")
    parser.add_argument("--steps", type=int, help="instead of those to the known return")
    parser.add_argument("--num-workers", type=int, nargs="+", default=[0, 2], help="0: in this process")
    parser.add_argument("--no-own", action="store_true", help="leave out the libraries' own vector envs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    short = []
    print(f"{'library':10}{'vector env':16}{'steps':>9}{'s':>8}{'CPU s':>8}{'return':>9}")
    for name in args.libraries or FULL:
        train, steps, bar, theirs = FULL[name]
        ways: list[tuple[str, dict[str, Any]]] = [("native", {})]
        if theirs is not None:
            ways = [(f"num_workers={n}", {"num_workers": n}) for n in args.num_workers]
            ways += [] if args.no_own else [(theirs, {"own": True})]
        for label, kwargs in ways:
            began, cpu = time.perf_counter(), time.process_time()
            mean = train(args.steps or steps, **kwargs)
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            print(f"{name:10}{label:16}{args.steps or steps:9}{wall_s:8.0f}{cpu_s:8.0f}{mean:9.1f}", flush=True)
            if args.steps is None and mean < bar:
                short.append(f"{name} over {label}: {mean:.1f}, expected {bar} or more")
    print(*short, sep="\n")
    return bool(short)


if __name__ == "__main__":
    raise SystemExit(main())
