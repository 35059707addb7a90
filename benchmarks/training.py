"""PPO and SAC end to end: steps, and learning from them. All contenders get the same seeds, and so see the same steps.

The loops and their numbers are those of CleanRL's `ppo.py` and `sac_continuous_action.py`; the other contenders are
Stable-Baselines3's own PPO. Learning takes one thread of torch. Where torch is not installed, PPO with discrete actions
learns in numpy.
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
from gymnasium.spaces import Box, Discrete, Space
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics

from aioenv import sync
from aioenv.cli.contenders import NotApplicable, Workload

__all__ = ["TRAINING_KEYS", "TRAJECTORY", "train_cleanrl", "train_sac", "train_sb3"]

TRAINING_KEYS = ("fps", "mean return")
TRAJECTORY = "trajectory"  # a checksum of all observations, actions and rewards

UPDATES = 8  # timed; one more warms up
STEPS, EPOCHS, MINIBATCHES = 128, 4, 4
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, RATE, MAX_NORM = 0.99, 0.95, 0.2, 0.01, 0.5, 2.5e-4, 0.5
# SAC: batches of the vector env; those before the first update are drawn at random, and not timed
SAC_RANDOM, SAC_STEPS = 100, 500
SAC_BATCH, SAC_HIDDEN, TAU, ACTOR_RATE, CRITIC_RATE, ACTOR_EVERY = 256, 256, 0.005, 3e-4, 1e-3, 2
LAST_EPISODES = 100  # whose mean return is told

Array = npt.NDArray[Any]
Kind = Literal["gymnasium", "in process", "workers", "auto"]


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


def train_cleanrl(kind: Kind, workload: Workload) -> dict[str, float]:
    """Train as CleanRL's `ppo.py`, with `SyncVectorEnv`, or with aioenv in its place."""
    with contextlib.closing(_make_recorded(kind, workload)) as envs:
        return _train(envs, _learner(envs.single_observation_space, envs.single_action_space))


def _make_recorded(kind: Kind, workload: Workload) -> Any:
    if kind == "auto":
        mode = AutoresetMode.SAME_STEP
        return sync.make_vec(workload.env, workload.num_envs, backend="auto", autoreset_mode=mode, episode_stats=True)
    return _make(kind, [partial(_recorded, workload.make_env)] * workload.num_envs, workload)


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
    space = envs.action_space
    obs_rows = np.empty((STEPS, n, *envs.single_observation_space.shape), np.float32)
    actions = np.empty((STEPS, *space.shape), space.dtype)
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
            actions[t], logp[t], values[t] = learner.act(obs_rows[t])
            sent = actions[t].clip(space.low, space.high) if isinstance(space, Box) else actions[t]
            obs, rewards[t], terminated, truncated, infos = envs.step(sent)
            ended[t] = terminated | truncated
            if ended[t].any():  # `obs` begins the next episode there
                episodes += _returns(infos, ended[t])
                cut = truncated & ~terminated
                if cut.any():  # more rewards would have followed
                    rewards[t, cut] += GAMMA * learner.value(np.stack(infos["final_obs"][cut]).astype(np.float32))
        for rows in (obs_rows, actions, rewards):
            checksum = zlib.crc32(rows.data, checksum)
        advantages = _advantages(rewards, values, ended, learner.value(obs.astype(np.float32)))
        steps = (obs_rows, actions, logp, values, advantages, advantages + values)
        learner.learn(Batch(*(rows.reshape(STEPS * n, *rows.shape[2:]) for rows in steps)))
    return _told(UPDATES * STEPS * n / (time.perf_counter() - began), episodes, checksum)


def _returns(infos: dict[str, Any], ended: Array) -> list[float]:
    """Return the returns of ended episodes, as a wrapper of each env or of the vector env tells them."""
    found = infos if "episode" in infos else infos["final_info"]
    returns: list[float] = found["episode"]["r"][ended].tolist()
    return returns


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
        NotApplicable: if observations are no vectors, if actions are neither discrete nor vectors, or if they are
            vectors and there is no torch.
    """
    if not (isinstance(observations, Box) and len(observations.shape) == 1 and isinstance(actions, Discrete | Box)):
        raise NotApplicable("takes observations that are vectors, and actions that are discrete or vectors")
    inputs = observations.shape[0]
    if importlib.util.find_spec("torch") is not None:
        return _torch_learner(inputs, actions)
    if isinstance(actions, Box):
        raise NotApplicable("takes torch, where actions are vectors")
    return NumpyLearner(inputs, int(actions.n))


def _torch_learner(inputs: int, actions: Space[Any]) -> Learner:
    import torch
    from torch import nn
    from torch.distributions import Categorical, Distribution, Independent, Normal

    torch.set_num_threads(1)
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    discrete = isinstance(actions, Discrete)
    outputs = int(actions.n) if isinstance(actions, Discrete) else int(np.prod(actions.shape or ()))

    def layer(fan_in: int, fan_out: int, scale: float = np.sqrt(2)) -> Any:
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, scale)
        nn.init.constant_(linear.bias, 0.0)
        return linear

    def network(out: int, scale: float) -> Any:
        return nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, out, scale))

    actor, critic = network(outputs, 0.01), network(1, 1.0)
    log_std = nn.Parameter(torch.zeros(outputs))
    parameters = [*actor.parameters(), *critic.parameters(), *([] if discrete else [log_std])]
    optimizer = torch.optim.Adam(parameters, lr=RATE, eps=1e-5)

    def policy_of(obs: Any) -> Distribution:
        return Categorical(logits=actor(obs)) if discrete else Independent(Normal(actor(obs), log_std.exp()), 1)

    class TorchLearner:
        def act(self, obs: Array) -> tuple[Array, Array, Array]:
            with torch.no_grad():
                batch = torch.from_numpy(obs)
                policy = policy_of(batch)
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
                    policy = policy_of(obs[rows])
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


# ---------------------------------------------------------------- SAC


def train_sac(kind: Kind, workload: Workload) -> dict[str, float]:
    """Train as CleanRL's `sac_continuous_action.py`, with an update for each step of the vector env.

    Raises:
        NotApplicable: if torch is not installed, or if observations or actions are no vectors.
    """
    if importlib.util.find_spec("torch") is None:
        raise NotApplicable("takes torch")
    with contextlib.closing(_make_recorded(kind, workload)) as envs:
        for space in (envs.single_observation_space, envs.single_action_space):
            if not (isinstance(space, Box) and len(space.shape) == 1):
                raise NotApplicable("takes observations and actions that are vectors")
        return _train_sac(envs)


def _train_sac(envs: Any) -> dict[str, float]:
    n, space = envs.num_envs, envs.action_space
    inputs, outputs = envs.single_observation_space.shape[0], space.shape[1]
    act, learn = _sac_learner(inputs, envs.single_action_space)
    space.seed(1)
    rng = np.random.default_rng(1)
    # of each step of the vector env: obs, actions, reward, next obs, terminated
    kept = [np.empty((SAC_RANDOM + SAC_STEPS, n, width), np.float32) for width in (inputs, outputs, 1, inputs, 1)]
    episodes: list[float] = []
    began = 0.0
    obs = envs.reset(seed=1)[0]
    for t in range(SAC_RANDOM + SAC_STEPS):
        if t == SAC_RANDOM:
            began = time.perf_counter()
        actions = space.sample() if t < SAC_RANDOM else act(obs.astype(np.float32))
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        last_obs = next_obs
        if (ended := terminated | truncated).any():  # `next_obs` begins the next episode there
            episodes += _returns(infos, ended)
            last_obs = next_obs.copy()
            last_obs[ended] = np.stack(infos["final_obs"][ended])
        for rows, column in zip(kept, (obs, actions, rewards[:, None], last_obs, terminated[:, None]), strict=True):
            rows[t] = column
        obs = next_obs
        if t >= SAC_RANDOM:
            picked = rng.integers(0, t + 1, SAC_BATCH), rng.integers(0, n, SAC_BATCH)
            learn(*(rows[picked] for rows in kept))
    checksum = 0
    for rows in kept:
        checksum = zlib.crc32(rows.data, checksum)
    return _told(SAC_STEPS * n / (time.perf_counter() - began), episodes, checksum)


def _sac_learner(inputs: int, actions: Space[Any]) -> tuple[Callable[[Array], Array], Callable[..., None]]:
    """Return a function that draws actions, and one that learns from a batch of transitions."""
    import torch
    from torch import nn
    from torch.nn.functional import mse_loss, softplus

    torch.set_num_threads(1)
    torch.manual_seed(1)
    assert isinstance(actions, Box)
    outputs, bound = actions.shape[0], torch.from_numpy(actions.high)

    def network(fan_in: int, fan_out: int) -> Any:
        layers = (nn.Linear(fan_in, SAC_HIDDEN), nn.ReLU(), nn.Linear(SAC_HIDDEN, SAC_HIDDEN), nn.ReLU())
        return nn.Sequential(*layers, nn.Linear(SAC_HIDDEN, fan_out))

    actor = network(inputs, 2 * outputs)
    critics, targets = (nn.ModuleList(network(inputs + outputs, 1) for _ in range(2)) for _ in range(2))
    targets.load_state_dict(critics.state_dict())
    log_temperature = torch.zeros(1, requires_grad=True)
    actor_optimizer = torch.optim.Adam(actor.parameters(), ACTOR_RATE)
    critic_optimizer = torch.optim.Adam(critics.parameters(), CRITIC_RATE)
    temperature_optimizer = torch.optim.Adam([log_temperature], CRITIC_RATE)
    updates = 0

    def draw(obs: Any) -> tuple[Any, Any]:
        mean, log_std = actor(obs).chunk(2, -1)
        log_std = -5 + 0.5 * (2 - -5) * (log_std.tanh() + 1)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        log_slope = 2 * (np.log(2) - raw - softplus(-2 * raw))  # of tanh
        logp = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - log_slope - bound.log()
        return raw.tanh() * bound, logp.sum(-1)

    def values_of(networks: Any, obs: Any, actions: Any) -> Any:
        pairs = torch.cat((obs, actions), 1)
        return [each(pairs)[:, 0] for each in networks]

    def act(obs: Array) -> Array:
        with torch.no_grad():
            drawn: Array = draw(torch.from_numpy(obs))[0].numpy()
        return drawn

    def learn(*columns: Array) -> None:
        nonlocal updates
        obs, actions, rewards, next_obs, terminated = map(torch.from_numpy, columns)
        temperature = log_temperature.detach().exp()
        with torch.no_grad():
            next_actions, next_logp = draw(next_obs)
            next_value = torch.min(*values_of(targets, next_obs, next_actions)) - temperature * next_logp
            value = rewards[:, 0] + GAMMA * (1 - terminated[:, 0]) * next_value
        loss = sum(mse_loss(each, value) for each in values_of(critics, obs, actions))
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        updates += 1
        for _ in range(ACTOR_EVERY if updates % ACTOR_EVERY == 0 else 0):  # makes up for the updates without
            drawn, logp = draw(obs)
            loss = (temperature * logp - torch.min(*values_of(critics, obs, drawn))).mean()
            actor_optimizer.zero_grad()
            loss.backward()
            actor_optimizer.step()
            loss = (-log_temperature.exp() * (logp.detach() - outputs)).mean()
            temperature_optimizer.zero_grad()
            loss.backward()
            temperature_optimizer.step()
            temperature = log_temperature.detach().exp()
        with torch.no_grad():
            for target, critic in zip(targets.parameters(), critics.parameters(), strict=True):
                target.lerp_(critic, TAU)

    return act, learn


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
