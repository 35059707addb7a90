"""Gymnasium's MuJoCo tasks side by side with ours."""

from __future__ import annotations

import contextlib
import functools
import warnings

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from aioenv.worker.making import make_registered
from tests.kits.compare import assert_same


def given(**arguments):
    return arguments


# Each argument that is not about drawing has another value than its default in one of these.
OTHER_ARGUMENTS = {
    "Ant-v5": [
        given(
            frame_skip=3, forward_reward_weight=2, ctrl_cost_weight=0.3, contact_cost_weight=1e-3, healthy_reward=2,
            main_body="aux_1", healthy_z_range=(0.4, 0.8), contact_force_range=(-0.5, 2.0), reset_noise_scale=0.2,
        ),
        given(
            terminate_when_unhealthy=False, exclude_current_positions_from_observation=False,
            include_cfrc_ext_in_observation=False, xml_file="swimmer.xml", main_body=2, frame_skip=2,
        ),
    ],
    "HalfCheetah-v5": [
        given(
            frame_skip=3, forward_reward_weight=2, ctrl_cost_weight=1, reset_noise_scale=0.3,
            exclude_current_positions_from_observation=False,
        ),
        given(xml_file="walker2d.xml"),
    ],
    "Hopper-v5": [
        given(
            frame_skip=2, forward_reward_weight=2, ctrl_cost_weight=1, healthy_reward=3, reset_noise_scale=0.1,
            healthy_state_range=(-2.0, 2.0), healthy_z_range=(1.0, 1.4), healthy_angle_range=(-0.3, 0.1),
            exclude_current_positions_from_observation=False,
        ),
        given(terminate_when_unhealthy=False, xml_file="walker2d.xml"),
    ],
    "Humanoid-v5": [
        given(
            frame_skip=3, forward_reward_weight=2, ctrl_cost_weight=1, contact_cost_weight=1e-5,
            contact_cost_range=(0.5, 2.0), healthy_reward=1, healthy_z_range=(1.2, 1.6), reset_noise_scale=0.1,
            exclude_current_positions_from_observation=False, include_cinert_in_observation=False,
            include_qfrc_actuator_in_observation=False,
        ),
        given(
            terminate_when_unhealthy=False, include_cvel_in_observation=False, include_cfrc_ext_in_observation=False,
            xml_file="humanoidstandup.xml",
        ),
    ],
    "HumanoidStandup-v5": [
        given(
            frame_skip=3, uph_cost_weight=2, ctrl_cost_weight=1, impact_cost_weight=1e-5, impact_cost_range=(0.5, 2.0),
            reset_noise_scale=0.1, exclude_current_positions_from_observation=False,
            include_cinert_in_observation=False, include_qfrc_actuator_in_observation=False,
        ),
        given(include_cvel_in_observation=False, include_cfrc_ext_in_observation=False, xml_file="humanoid.xml"),
    ],
    "InvertedDoublePendulum-v5": [given(frame_skip=2, healthy_reward=3, reset_noise_scale=0.3)],
    "InvertedPendulum-v5": [given(frame_skip=3, reset_noise_scale=0.1)],
    "Pusher-v5": [
        given(frame_skip=2, reward_near_weight=2, reward_dist_weight=0.3, reward_control_weight=1),
        given(xml_file="pusher.xml"),
    ],
    "Reacher-v5": [given(frame_skip=3, reward_dist_weight=0.3, reward_control_weight=2.5)],
    "Swimmer-v5": [
        given(
            frame_skip=2, forward_reward_weight=2, ctrl_cost_weight=1, reset_noise_scale=0.3,
            exclude_current_positions_from_observation=False,
        ),
    ],
    "Walker2d-v5": [
        given(
            frame_skip=2, forward_reward_weight=2, ctrl_cost_weight=1, healthy_reward=3, healthy_z_range=(1.0, 1.4),
            healthy_angle_range=(-0.3, 0.1), reset_noise_scale=0.1, exclude_current_positions_from_observation=False,
        ),
        given(terminate_when_unhealthy=False, xml_file="walker2d.xml"),
    ],
}  # fmt: skip
TASKS = list(OTHER_ARGUMENTS)


@contextlib.contextmanager
def both(name, num_envs, mode, arguments):
    """Gymnasium's SyncVectorEnv and ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        theirs = SyncVectorEnv([functools.partial(gym.make, name, **arguments)] * num_envs, autoreset_mode=mode)
        ours = make_registered(name, {"autoreset_mode": mode, **arguments}, num_envs=num_envs)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def compare(name, mode, arguments, *, num_envs, steps, mask_every):
    """Step both, resetting slots by hand now and then; how many episodes have ended."""
    rng = np.random.default_rng(7)
    ends = 0
    with both(name, num_envs, mode, arguments) as (ours, theirs):
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.single_action_space == theirs.single_action_space and ours.metadata == theirs.metadata
        assert_same(ours.reset(seed=5), theirs.reset(seed=5), "reset")
        theirs.action_space.seed(1)
        for step in range(steps):
            actions = theirs.action_space.sample()
            expected = theirs.step(actions)
            assert_same(ours.step(actions), expected, f"step {step}")
            over = expected[2] | expected[3]
            ends += int(over.sum())
            if mode is AutoresetMode.DISABLED and over.any():
                mask, seeds = over, None
            elif step % mask_every == mask_every - 1:
                mask = rng.random(num_envs) < 0.5
                mask[rng.integers(num_envs)] = True
                if mode is AutoresetMode.DISABLED:
                    mask |= over
                seeds = [None if slot % 2 else step + slot for slot in range(num_envs)]
            else:
                continue
            results = [env.reset(seed=seeds, options={"reset_mask": mask.copy()}) for env in (ours, theirs)]
            assert_same(*results, f"reset at {step}")
        assert_same(ours.np_random_seed, theirs.np_random_seed)
        states = [[rng.bit_generator.state for rng in env.np_random] for env in (ours, theirs)]
        assert_same(*states)
    return ends
