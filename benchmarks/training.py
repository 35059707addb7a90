"""PPO end to end: rollouts, and learning from them. Every contender gets the same seeds, and so sees the same steps.

The loop and its numbers are those of CleanRL's `ppo.py`; the other contenders are Stable-Baselines3's own PPO. Learning
takes one thread of torch, or of numpy where torch is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium import Env
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics

from aioenv import sync
from aioenv.cli.contenders import NotApplicable, Workload

__all__ = ["TRAINING_KEYS", "TRAJECTORY", "train_cleanrl", "train_sb3"]

TRAINING_KEYS = ("fps", "mean return")
TRAJECTORY = "trajectory"  # a checksum of all observations, actions and rewards

UPDATES = 8  # timed; one more warms up
STEPS, EPOCHS, MINIBATCHES = 128, 4, 4
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, RATE, MAX_NORM = 0.99, 0.95, 0.2, 0.01, 0.5, 2.5e-4, 0.5
LAST_EPISODES = 100  # whose mean return is told

Array = npt.NDArray[Any]


class Batch(NamedTuple):
    """Steps to learn from; arrays with as many rows as steps."""

    obs: Array
    actions: Array
    logp: Array
    values: Array
    advantages: Array
    returns: Array


class Learner(Protocol):
    """A policy and a value function, and how they learn."""

    def act(self, obs: Array) -> tuple[Array, Array, Array]:
        """Draw actions; return them, their log-probabilities and the values of the observations."""

    def value(self, obs: Array) -> Array:
        """Return the values of observations."""

    def learn(self, batch: Batch) -> None:
        """Improve on a batch, in several epochs."""


# ---------------------------------------------------------------- CleanRL


def train_cleanrl(kind: Literal["gymnasium", "in process", "workers"], workload: Workload) -> dict[str, float]:
    """Train as CleanRL's `ppo.py`, with `SyncVectorEnv`, or with aioenv in its place."""
    factories = [partial(_recorded, workload.make_env)] * workload.num_envs
    with contextlib.closing(_make(kind, factories, workload)) as envs:
        return _train(envs, _learner(envs.single_observation_space, envs.single_action_space))


def _recorded(make_env: Callable[[], Env[Any, Any]]) -> Env[Any, Any]:
    return RecordEpisodeStatistics(make_env())


def _make(kind: str, factories: Sequence[Callable[[], Env[Any, Any]]], workload: Workload) -> Any:
    if kind == "gymnasium":
        return SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP)
    if kind == "in process":
        return sync.VectorEnv(factories, num_workers=0, autoreset_mode=AutoresetMode.SAME_STEP)
    return sync.VectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP, **workload.options)


def _train(envs: Any, learner: Learner) -> dict[str, float]:
    n = envs.num_envs
    obs_rows = np.empty((STEPS, n, *envs.single_observation_space.shape), np.float32)
    actions = np.empty((STEPS, n), np.int64)
    logp, values, rewards = (np.empty((STEPS, n), np.float32) for _ in range(3))
    ended = np.empty((STEPS, n), bool)
    episodes: list[float] = []
    checksum = 0
    began = 0.0
    obs, _ = envs.reset(seed=1)
    for update in range(1 + UPDATES):
        if update == 1:
            began = time.perf_counter()
        for t in range(STEPS):
            obs_rows[t] = obs
            actions[t], logp[t], values[t] = learner.act(obs)
            obs, rewards[t], terminated, truncated, infos = envs.step(actions[t])
            ended[t] = terminated | truncated
            if ended[t].any():  # `obs` begins the next episode there
                episodes += infos["final_info"]["episode"]["r"][ended[t]].tolist()
                cut = truncated & ~terminated
                if cut.any():  # more rewards would have followed
                    rewards[t, cut] += GAMMA * learner.value(np.stack(infos["final_obs"][cut]))
        for rows in (obs_rows, actions, rewards):
            checksum = zlib.crc32(rows.data, checksum)
        advantages = _advantages(rewards, values, ended, learner.value(obs))
        steps = (obs_rows, actions, logp, values, advantages, advantages + values)
        learner.learn(Batch(*(rows.reshape(STEPS * n, *rows.shape[2:]) for rows in steps)))
    return _told(UPDATES * STEPS * n / (time.perf_counter() - began), episodes, checksum)


def _advantages(rewards: Array, values: Array, ended: Array, last_values: Array) -> Array:
    """Return how much better each step was than its value had promised (GAE)."""
    advantages = np.zeros_like(rewards)
    later = np.zeros_like(last_values)
    next_values = last_values
    for t in reversed(range(len(rewards))):
        goes_on = ~ended[t]
        later = rewards[t] + GAMMA * next_values * goes_on - values[t] + GAMMA * LAMBDA * goes_on * later
        advantages[t] = later
        next_values = values[t]
    return advantages


def _told(fps: float, episodes: list[float], checksum: int) -> dict[str, float]:
    last = episodes[-LAST_EPISODES:]
    return {"fps": fps, "mean return": float(np.mean(last)) if last else 0.0, TRAJECTORY: checksum}


def _learner(observations: Any, actions: Any) -> Learner:
    """Make the agent of CleanRL's `ppo.py`, or that of examples/ppo.py where there is no torch.

    Raises:
        NotApplicable: if observations are no vectors, or actions are not discrete.
    """
    if not (isinstance(observations, Box) and len(observations.shape) == 1 and isinstance(actions, Discrete)):
        raise NotApplicable("takes observations that are vectors, and discrete actions")
    made = _torch_learner if importlib.util.find_spec("torch") is not None else NumpyLearner
    return made(observations.shape[0], int(actions.n))


def _torch_learner(inputs: int, outputs: int) -> Learner:
    import torch
    from torch import nn
    from torch.distributions import Categorical

    torch.set_num_threads(1)
    torch.manual_seed(1)
    rng = np.random.default_rng(1)

    def layer(fan_in: int, fan_out: int, scale: float = np.sqrt(2)) -> Any:
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, scale)
        nn.init.constant_(linear.bias, 0.0)
        return linear

    def network(out: int, scale: float) -> Any:
        return nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, out, scale))

    actor, critic = network(outputs, 0.01), network(1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=RATE, eps=1e-5)

    class TorchLearner:
        def act(self, obs: Array) -> tuple[Array, Array, Array]:
            with torch.no_grad():
                batch = torch.from_numpy(obs)
                policy = Categorical(logits=actor(batch))
                actions = policy.sample()
                return actions.numpy(), policy.log_prob(actions).numpy(), critic(batch)[:, 0].numpy()

        def value(self, obs: Array) -> Array:
            with torch.no_grad():
                values: Array = critic(torch.from_numpy(obs))[:, 0].numpy()
                return values

        def learn(self, batch: Batch) -> None:
            obs, actions, old_logp, old_values, advantages, returns = map(torch.from_numpy, batch)
            for _ in range(EPOCHS):
                for rows in np.split(rng.permutation(len(obs)), MINIBATCHES):
                    policy = Categorical(logits=actor(obs[rows]))
                    ratio = (policy.log_prob(actions[rows]) - old_logp[rows]).exp()
                    advantage = advantages[rows]
                    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                    policy_loss = torch.max(-advantage * ratio, -advantage * clipped).mean()
                    values = critic(obs[rows])[:, 0]
                    near = old_values[rows] + (values - old_values[rows]).clamp(-CLIP, CLIP)
                    errors = torch.max((values - returns[rows]) ** 2, (near - returns[rows]) ** 2)
                    loss = policy_loss - ENTROPY * policy.entropy().mean() + VALUE * 0.5 * errors.mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(parameters, MAX_NORM)
                    optimizer.step()

    return TorchLearner()


class NumpyLearner:
    """The agent of examples/ppo.py."""

    def __init__(self, inputs: int, outputs: int) -> None:
        path = Path(__file__).parents[1] / "examples" / "ppo.py"
        spec = importlib.util.spec_from_file_location("ppo", path)
        assert spec is not None
        assert spec.loader is not None
        self._ppo: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._ppo)
        self._agent = self._ppo.Agent(inputs, outputs, seed=1)

    def act(self, obs: Array) -> tuple[Array, Array, Array]:
        """Draw actions; return them, their log-probabilities and the values of the observations."""
        actions, extras = self._agent.act(obs)
        return actions, extras["logp"], extras["value"]

    def value(self, obs: Array) -> Array:
        """Return the values of observations."""
        values: Array = self._agent.critic(obs)[:, 0]
        return values

    def learn(self, batch: Batch) -> None:
        """Improve on a batch, in several epochs."""
        ppo, agent = self._ppo, self._agent
        advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
        for _ in range(EPOCHS):
            for rows in np.split(agent.rng.permutation(len(batch.obs)), MINIBATCHES):
                agent.critic.learn(batch.obs[rows], partial(ppo.value_gradient, batch.returns[rows]))
                gradient = partial(ppo.policy_gradient, batch.actions[rows], batch.logp[rows], advantages[rows])
                agent.actor.learn(batch.obs[rows], gradient)


# ---------------------------------------------------------------- Stable-Baselines3


def train_sb3(kind: Literal["dummy", "in process", "workers"], workload: Workload) -> dict[str, float]:
    """Train Stable-Baselines3's PPO, with its `DummyVecEnv`, or with aioenv's adapter in its place.

    Its arguments are the defaults, but for rollouts as short as CleanRL's.

    Raises:
        NotApplicable: if Stable-Baselines3 is not installed.
    """
    if importlib.util.find_spec("stable_baselines3") is None:
        raise NotApplicable("takes stable-baselines3")
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    from aioenv.adapters.sb3 import make_vec

    class Checksum(BaseCallback):  # type: ignore[misc]  # Stable-Baselines3 need not be installed
        value = 0

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            buffer = self.model.rollout_buffer
            for rows in (buffer.observations, buffer.actions, buffer.rewards):
                self.value = zlib.crc32(np.ascontiguousarray(rows).data, self.value)

    torch.set_num_threads(1)
    n, env = workload.num_envs, workload.make_env
    make: dict[str, Callable[[], Any]] = {
        "dummy": lambda: make_vec_env(env, n, seed=1),
        "in process": lambda: make_vec(env, n, seed=1, num_workers=0),
        "workers": lambda: make_vec(env, n, seed=1, **workload.options),
    }
    with contextlib.closing(make[kind]()) as envs:
        model = PPO("MlpPolicy", envs, n_steps=STEPS, seed=1, device="cpu")
        checksum = Checksum()
        model.learn(STEPS * n, checksum)
        began = time.perf_counter()
        model.learn(UPDATES * STEPS * n, checksum, reset_num_timesteps=False)
        fps = UPDATES * STEPS * n / (time.perf_counter() - began)
        return _told(fps, [each["r"] for each in model.ep_info_buffer], checksum.value)
