"""An `EnvService` in the test's own process, and what it needs to be run and compared."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from aioenv.core.requests import load_reply
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.messages import ResetRequest, StepRequest, dump, load
from aioenv.spaces.infos import SchemaTable, merge_infos
from aioenv.spaces.layout import Layout, byte_view
from aioenv.worker.env_service import EnvService


class Bench:
    """An `EnvService` in this process, and the arrays of its replies."""

    def __init__(self, factories, mode=AutoresetMode.NEXT_STEP, *, extra=0):
        self.service = EnvService(factories, mode, False, checkpoints=True)
        self.n = len(factories)
        self.mode = mode
        described = self.service.describe()
        self.sizes = [d.checkpoint_size for d in described]
        self.obstacles = [d.checkpoint_obstacle for d in described]
        self.space, self.action_space = load(described[0].observation_space), load(described[0].action_space)
        self.table = SchemaTable({})
        if all(self.sizes):
            self.size = max(self.sizes) + extra
            self.checkpoint, _ = self.service.configure(self.space, self.action_space, 0, False, self.size)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.service.close()

    def _take(self, reply, stepped):
        layout = Layout(self.space)
        arrays = layout.empty(self.n)
        if stepped:
            arrays += [np.empty(self.n), np.empty(self.n, bool), np.empty(self.n, bool)]
        arrays.append(np.empty((self.n, self.size)))
        assert len(arrays) == len(reply.fixed)
        for array, data in zip(arrays, reply.fixed, strict=True):
            byte_view(array)[:] = data
        *arrays, self.checkpoint = arrays
        infos: dict[str, Any] = {}
        if reply.payload:
            payload = load_reply(memoryview(reply.payload))
            assert not payload.failures
            self.table.update(payload.schemas)
            parts = []
            for group in payload.infos:
                positions = np.arange(self.n) if group.rows is None else np.array(group.rows)
                parts.append(self.table.unpack(group, positions, len(positions)))
            infos = merge_infos(parts, self.n)
        return [*arrays, infos]

    def reset(self, seeds, options=None):
        request = ResetRequest(tuple(range(self.n)), tuple(seeds), options, True)
        return self._take(self.service.handle(frame(Kind.RESET, request)), False)

    def step(self, actions):
        return self._take(self.service.handle(frame(Kind.STEP, StepRequest(None, None, list(actions)))), True)

    def do(self, operations):
        """One operation a row, all steps or all resets."""
        if operations[0][0] == "step":
            return self.step([action for _, action in operations])
        return self.reset([seed for _, seed, _, _ in operations], operations[0][2])


def frame(kind, request):
    return Frame(kind, 1, 0, [], dump(request))


def make(task, max_episode_steps=9, wrap=(), **kwargs):
    env = gym.make(task, max_episode_steps=max_episode_steps, **kwargs)
    for wrapper in wrap:
        env = wrapper(env)
    return env


def record(bench, count, seeds=(5, 6), watch=lambda count: None):
    """Run a bench: for each operation what was done, what came of it, and the checkpoints before and after."""
    rng = np.random.default_rng(3)
    space = bench.action_space
    resets_itself = bench.mode is not AutoresetMode.DISABLED
    history: list[Any] = []
    over = True
    while len(history) < count:
        if over:
            operations = [("reset", seeds[row] if not history else None, None, False) for row in range(bench.n)]
        else:
            actions = rng.uniform(np.maximum(space.low, -2), np.minimum(space.high, 2), (bench.n, *space.shape)).astype(
                space.dtype
            )
            operations = [("step", action) for action in actions]
        before = bench.checkpoint
        out = bench.do(operations)
        over = not resets_itself and len(out) == 5 and bool((out[2] | out[3]).any())
        history.append((operations, out, before, bench.checkpoint))
        watch(len(history))
    return history


def without_clock(out):
    """RecordEpisodeStatistics tells how long an episode took."""
    for info in (out[-1], out[-1].get("final_info", {})):
        info.get("episode", {}).pop("t", None)
    return out
