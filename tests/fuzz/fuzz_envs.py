"""Envs for random operations: what they observe is the whole of their state, so that nothing can go wrong unseen."""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

RAISE, EXIT, SLOW = 13, 14, 15  # actions; smaller ones are just remembered


class Boom(Exception):
    """What an env raises."""


class Exit(BaseException):
    """What the model's envs raise where a worker's would end its process."""


def mix(number: int) -> int:
    """The key of an episode: of its seed, or of the episode before."""
    return (number * 2654435761 + 12345) % 2**31


class Chain(gym.Env):
    """Remembers every action in a digest. An episode follows from its key, and the next key from that.

    Attributes:
        model: whether this is one of the model's, which must not end its process.
    """

    observation_space = spaces.Dict(
        key=spaces.Box(0, 2**31, (), np.int64),
        count=spaces.Box(0, 2**31, (3,), np.int64),  # steps of the episode, of all, and the digest
        image=spaces.Box(0, 255, (4, 5), np.uint8),
    )
    action_space = spaces.Discrete(16)
    model = False

    def __init__(self) -> None:
        self.key = self.t = self.ops = self.digest = self.mark = 0

    def clone(self) -> Chain:
        return copy.copy(self)

    @property
    def length(self) -> int:
        return 1 + self.key % 6

    def observe(self) -> dict[str, Any]:
        image = np.full((4, 5), (self.digest + self.t) % 256, np.uint8)
        return {"key": np.int64(self.key), "count": np.array([self.t, self.ops, self.digest]), "image": image}

    def adopt(self, obs: dict[str, Any]) -> None:
        """Be the env that observes this."""
        self.key = int(obs["key"])
        self.t, self.ops, self.digest = (int(x) for x in obs["count"])

    def reset(self, *, seed=None, options=None):
        self.ops += 1
        self.key = mix(self.key + 1 if seed is None else seed)
        self.t = self.digest = 0
        if options and options.get("raise") == self.key % 3:
            raise Boom("reset")
        return self.observe(), {"fresh": True, "key": self.key, "options": str(options or None)}

    def step(self, action):
        self.ops += 1
        self.t += 1
        self.digest = (31 * self.digest + int(action) + 1) % 1_000_003
        if action == EXIT:
            if self.model:
                raise Exit
            os._exit(3)
        if action == RAISE:
            raise Boom("step")
        if action == SLOW and not self.model:
            time.sleep(0.005)
        over = self.t >= self.length
        info: dict[str, Any] = {}
        if self.t % 3:
            info = {"t": self.t, "word": f"w{self.digest}", "more": {"half": self.digest / 2}}
            if self.t % 2:
                info["what"] = [self.key, None]
        return self.observe(), float(self.digest % 7), over and self.key % 2 == 0, over and self.key % 2 == 1, info

    def peek(self):
        return self.key, self.t, self.ops, self.digest, self.mark

    def bump(self, by):
        self.digest += by
        if by == RAISE:
            raise Boom("bump")
        return self.digest

    def get_state(self):
        return np.array([self.key, self.t, self.ops, self.digest])

    def set_state(self, state):
        self.key, self.t, self.ops, self.digest = (int(x) for x in state)


class Chains(VectorEnv):
    """The same as one vector env. What would raise in one slot raises before any slot is stepped."""

    def __init__(self, num_envs: int, mode: str) -> None:
        self.num_envs = num_envs
        self.envs = [Chain() for _ in range(num_envs)]
        self.single_observation_space, self.single_action_space = Chain.observation_space, Chain.action_space
        self.observation_space = batch_space(Chain.observation_space, num_envs)
        self.action_space = batch_space(Chain.action_space, num_envs)
        self.mode = AutoresetMode(mode)
        self.metadata = {"autoreset_mode": self.mode}
        self.due = [False] * num_envs
        self.obs = [env.observe() for env in self.envs]

    def _batch(self):
        return {key: np.stack([obs[key] for obs in self.obs]) for key in self.obs[0]}

    def reset(self, *, seed=None, options=None):
        options = dict(options or {})
        mask = options.pop("reset_mask", np.ones(self.num_envs, bool))
        if options.get("raise"):
            raise Boom("reset")
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)] if np.ndim(seed) == 0 else seed
        info: dict[str, Any] = {}
        for i, env in enumerate(self.envs):
            if mask[i]:
                self.obs[i], own = env.reset(seed=seeds[i], options=options or None)
                self.due[i] = False
                info = self._add_info(info, own, i)
        return self._batch(), info

    def step(self, actions):
        return self._step(actions, range(self.num_envs))

    def get_state(self, slots):
        return [{"at": self.envs[slot].get_state(), "due": self.due[slot]} for slot in slots]

    def set_state(self, states, slots):
        for state, slot in zip(states, slots, strict=True):
            self.envs[slot].set_state(state["at"])
            self.due[slot] = bool(state["due"])

    def _step(self, actions, slots):
        if any(actions[i] == RAISE and not self.due[i] for i in slots):
            raise Boom("step")
        reward, ends, cuts = np.zeros(self.num_envs), np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        info: dict[str, Any] = {}
        for i in slots:
            env = self.envs[i]
            if self.due[i]:
                self.obs[i], own = env.reset()
                self.due[i] = False
            else:
                self.obs[i], reward[i], ends[i], cuts[i], own = env.step(actions[i])
                if ends[i] or cuts[i]:
                    if self.mode is AutoresetMode.SAME_STEP:
                        info = self._add_info(info, {"final_obs": self.obs[i], "final_info": own}, i)
                        self.obs[i], own = env.reset()
                    self.due[i] = self.mode is AutoresetMode.NEXT_STEP
            info = self._add_info(info, own, i)
        return self._batch(), reward, ends, cuts, info


class PatientChains(Chains):
    """Chains of which some can be stepped without the others."""

    def step_some(self, actions, slots):
        return self._step(actions, [int(slot) for slot in slots])
