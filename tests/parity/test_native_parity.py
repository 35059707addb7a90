"""All of Gymnasium's MuJoCo tasks, stepped as one batch: bit for bit what single envs give (`make parity`)."""

from __future__ import annotations

import pytest
from gymnasium.vector import AutoresetMode

from tests.kits.mujoco_kit import OTHER_ARGUMENTS, compare

GRID = [(name, arguments) for name, others in OTHER_ARGUMENTS.items() for arguments in ({}, *others)]


@pytest.mark.parity
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=str)
@pytest.mark.parametrize(("name", "arguments"), GRID, ids=[f"{n}-{len(a)}" for n, a in GRID])
def test_all_of_it(name, arguments, mode):
    ends = compare(name, mode, arguments | {"max_episode_steps": 170}, num_envs=4, steps=1000, mask_every=97)
    assert ends >= 10
    compare(name, mode, arguments, num_envs=1, steps=1010, mask_every=1001)  # the registered limit, no reset by hand
