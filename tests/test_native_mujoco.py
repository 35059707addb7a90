"""Gymnasium's MuJoCo tasks as one batch, and the base that others are written on."""

from __future__ import annotations

import itertools

import pytest
from gymnasium.vector import AutoresetMode
from mujoco_kit import OTHER_ARGUMENTS, TASKS, compare

MODES = list(AutoresetMode)


@pytest.mark.parametrize(
    ("name", "mode"), [(n, m) for n, m in zip(TASKS, itertools.cycle(MODES), strict=False)], ids=str
)
def test_a_task_is_gymnasiums(name, mode):
    arguments = OTHER_ARGUMENTS[name][0] | {"max_episode_steps": 23}
    assert compare(name, mode, arguments, num_envs=3, steps=30, mask_every=17)
    assert compare(
        name, MODES[(MODES.index(mode) + 1) % 3], {"max_episode_steps": 11}, num_envs=4, steps=30, mask_every=9
    )
