"""docs/migrating.md: every public name of the older systems is there, the examples run, and what it names exists."""

from __future__ import annotations

import re

import pytest

import aioenv
from aioenv.stats.sharing import can_share
from tests.kits.docs_kit import cell, check_names, page, snippets

PAGE = page("docs/migrating.md")
INTRODUCTION, *SECTIONS = re.split(r"^## ", PAGE, flags=re.M)

# all that each system had in public
NAMES = {
    "mujoco_py": """
        MjRenderPool device_ids n_workers max_batch_size max_image_size modder DEFAULT_MAX_IMAGE_SIZE render close
        MjBatchRenderer batch_offset map cuda_rgb_buffer_pointer MjSimPool create_from_sim reset step forward nsims sims
        MjSimState get_state set_state flatten from_flattened MjRenderContext udd_callback BaseModder LightModder
        CameraModder MaterialModder TextureModder whiten_materials randomize rand_all get_checker_matrices
        upload_texture get_rand_rgb add_marker add_overlay render_callback""",
    "construct_envs": """
        construct_envs NUM_PROCESSES MODE X_DISPLAY TEST_EPISODES get_env_class make_env_fn VectorEnv
        multiprocessing_start_method workers_ignore_signals auto_reset_done num_envs observation_spaces action_spaces
        orig_action_spaces number_of_episodes count_episodes current_episodes episode_over get_metrics reset step
        reset_at step_at async_step wait_step async_step_at wait_step_at pause_at resume_all call call_at render
        initialize_batch_renderer post_step ThreadedVectorEnv close""",
    "EnvCreator": """
        EnvCreator create_env_kwargs share_memory make_variant meta_data get_env_metadata state_dict load_state_dict
        env_creator ParallelEnv metadata_from_workers serial_for_single num_sub_threads shutdown_timeout set_seed
        static_seed AsyncEnvPool VecNorm VecNormV2 in_keys out_keys decay eps lock shared_td freeze unfreeze frozen_copy
        denorm loc scale standard_normal to_observation_norm clone stateful TrajCounter""",
    "Maze": """
        SubprocVectorEnv SequentialVectorEnv start_method n_envs step reset close terminal_observation seed MazeSeeding
        StructuredEnv actor_id is_actor_done get_actor_rewards get_env_time agent_counts_dict action_spaces_dict
        observation_spaces_dict RolloutGenerator logging_prefix get_stats get_stats_value write_epoch_stats
        clear_epoch_stats increment_log_step define_step_stats""",
}


def rows(section):
    table = re.findall(r"^\| (.*) \| (.*) \|(.*)\|$", section, re.M)
    return [row for row in table if not row[1].startswith("aioenv")]


def test_every_name_of_the_older_systems_has_a_row():
    assert len(SECTIONS) == len(NAMES)
    for section, (system, names) in zip(SECTIONS, NAMES.items(), strict=True):
        assert section.split("\n")[0].startswith(system)
        told = " ".join(old for old, _, _ in rows(section))
        missing = [name for name in names.split() if not re.search(rf"\b{name}\b", told)]
        assert missing == [], system


def test_every_row_has_a_counterpart_or_says_why_not():
    for section in SECTIONS:
        for old, new, number in rows(section):
            assert new.strip() and (not new.startswith("**—**") or len(new) > 10), old
            for each in filter(None, map(str.strip, number.split(","))):
                assert f"# {each}: " in PAGE, old


def test_what_the_tables_name_exists():
    told = " ".join(new for section in SECTIONS for _, new, _ in rows(section))
    assert len(check_names(told)) > 20


@pytest.mark.skipif(not can_share(), reason="no memory without a name here")
@pytest.mark.timeout(180)
def test_the_examples_run(capsys):
    blocks = snippets(PAGE)
    numbers = [int(number) for number in re.findall(r"^# (\d+): ", "\n".join(blocks), re.M)]
    assert sorted(numbers) == list(range(1, len(blocks)))
    names = {"__name__": "__main__"}

    async def main():
        for block in blocks:
            await cell(block, names)

    try:
        aioenv.run(main())
    finally:
        for name in ("seen", "ids"):
            if name in names:
                names[name].close()
    printed = capsys.readouterr().out
    assert "eval: 3 slots on 2 workers" in printed
    assert "[0. 1. 0.] [1] 1.0" in printed
    assert "(2, 2, 2) 0\n" in printed or "(2, 2, 2) 1\n" in printed
    assert "[0, 1, 2, 3, 4, 5] (0, 1, 2)" in printed
    assert "2.0 [0 1]" in printed
