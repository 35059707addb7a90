"""Programs under `-X warn_default_encoding`, where text without an encoding of its own is a warning, or an error."""

from __future__ import annotations

import pytest

from tests.kits.process_kit import environment, run_alone

STRICT = {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONWARNINGS": "error::EncodingWarning"}

KIT = """
    import asyncio, sys
    import gymnasium as gym, numpy as np
    import aioenv
    from aioenv import sync
    from aioenv.testing import leak_check
    from aioenv.process.launch import START_METHODS

    class Strict(gym.Env):
        observation_space, action_space = gym.spaces.Box(0, 255, (3,), np.uint8), gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            told = {"strict": sys.flags.warn_default_encoding, "warns": " ".join(sys.warnoptions)}
            return np.zeros(3, np.uint8), told

        def step(self, action):
            return np.zeros(3, np.uint8), 0.0, False, False, {}
"""
WORKERS = """
    async def main(start):
        # no MuJoCo: glfw and PyOpenGL use the default encoding
        async with aioenv.make_vec("CartPole-v1", 2, start=start, restart=aioenv.RestartPolicy()) as envs:
            await envs.reset()
            await envs.step(envs.action_space.sample())
            assert all(worker.memory.rss > 0 for worker in envs.workers)
        async with aioenv.make_vec(Strict, 2, start=start) as envs:
            info = (await envs.reset()).info
            assert info["strict"].all() and "error::EncodingWarning" in info["warns"][0], info

    with leak_check():
        for start in START_METHODS:
            asyncio.run(main(start))
"""
BLOCKING = """
    envs = sync.AsyncVectorEnv([Strict] * 2)
    envs.reset()
    envs.step([0, 1])
    envs.close()
    with sync.make_vec("CartPole-v1", 2, backend="native") as envs:
        envs.reset()
        envs.step(envs.action_space.sample())
"""


@pytest.mark.parametrize("code", [WORKERS, BLOCKING], ids=["workers", "blocking"])
def test_all_goes_where_the_default_encoding_is_an_error(code, own_fork_server):
    run_alone(KIT + code, env={**environment(), **STRICT})


def test_workers_have_the_option_of_the_parent(own_fork_server):
    """Not only its variables."""
    code = KIT + WORKERS
    lines = "\n".join(line[4:] for line in code.splitlines())
    restart = f"""
    import os, sys
    if not sys.flags.warn_default_encoding:
        options = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
        os.execv(sys.executable, [sys.executable, *options, "-c", {lines!r}])
    """
    run_alone(restart)


def test_doctor_goes_there_too():
    code = "import sys; from aioenv.cli import main; sys.exit(main(['doctor']))"
    run_alone(code, env={**environment(), **STRICT})
