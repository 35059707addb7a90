"""Envs of several actors as Gymnasium envs: PettingZoo's parallel envs, and envs whose steps have parts."""

from aioenv.envs.actors import ActorID
from aioenv.envs.pettingzoo import PettingZooEnv
from aioenv.envs.structured import StructuredEnv, SubStepEnv

__all__ = ["ActorID", "PettingZooEnv", "StructuredEnv", "SubStepEnv"]
