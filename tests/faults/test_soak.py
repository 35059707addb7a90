"""A million env-steps with a worker killed every second on average: `make soak`."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import aioenv

NUM_ENVS = 16
ENV_STEPS = int(os.environ.get("SOAK_ENV_STEPS", 1_000_000))
MEAN_S = 1.0  # between two kills


def make() -> gym.Env:
    return gym.make("InvertedPendulum-v5")


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", ["forkserver"])
def test_nothing_is_lost_or_doubled_and_nothing_grows(start, capsys):
    policy = aioenv.RestartPolicy(max_restarts=1_000_000, backoff_s=0.0, resume=True)
    rng = np.random.default_rng(0)
    reference = SyncVectorEnv([make] * NUM_ENVS)
    reference.action_space.seed(0)
    kills = 0
    samples: list[tuple[int, int]] = []

    async def main() -> None:
        nonlocal kills
        async with aioenv.AsyncVectorEnv([make] * NUM_ENVS, num_workers=2, start=start, restart=policy) as envs:
            obs, _ = await envs.reset(seed=0)
            assert (obs == reference.reset(seed=0)[0]).all()
            steps = ENV_STEPS // NUM_ENVS
            due = time.monotonic() + rng.exponential(MEAN_S)
            for t in range(steps):
                actions = reference.action_space.sample()
                task = asyncio.ensure_future(envs.step(actions))
                if time.monotonic() > due:
                    if rng.integers(2):
                        await asyncio.sleep(0)  # in the middle of the step
                    pid = envs.workers[int(rng.integers(2))].pid
                    if pid is not None:
                        try:
                            os.kill(pid, signal.SIGKILL)
                            kills += 1
                        except ProcessLookupError:
                            pass
                    due = time.monotonic() + rng.exponential(MEAN_S)
                expected = reference.step(actions)
                result = await task
                for mine, theirs in zip(result[:4], expected[:4], strict=True):
                    assert mine.tobytes() == theirs.tobytes(), f"step {t}"
                assert result.info.keys() == expected[4].keys()
                if t % (steps // 20) == steps // 40:
                    samples.append((resident(), count_fds()))

    try:
        asyncio.run(main())
    finally:
        reference.close()
    memory, fds = zip(*samples, strict=True)
    with capsys.disabled():
        print(f"\n{ENV_STEPS} env-steps, {kills} workers killed, 0 steps lost or doubled")
        print(f"MiB: {[round(m / 2**20, 1) for m in memory]}\nfds: {list(fds)}")
    # a restart may be under way when they are counted, with some descriptors more
    assert max(fds[-5:]) <= max(fds[:5]) + 8 and min(fds[-5:]) <= min(fds[:5])
    assert np.median(memory[-5:]) - np.median(memory[3:8]) < 4 << 20
