"""Pages for users of older systems: every public name of these is in a table, with a counterpart that exists."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS
from tests.kits.docs_kit import check_names

# all that each system had in public
NAMES = {
    "from-mujoco-py": """
        MjRenderPool device_ids n_workers max_batch_size max_image_size modder DEFAULT_MAX_IMAGE_SIZE render close
        MjBatchRenderer batch_offset map cuda_rgb_buffer_pointer MjSimPool create_from_sim reset step forward nsims sims
        MjSimState get_state set_state flatten from_flattened MjRenderContext udd_callback BaseModder LightModder
        CameraModder MaterialModder TextureModder whiten_materials randomize rand_all get_checker_matrices
        upload_texture get_rand_rgb add_marker add_overlay render_callback""",
    "from-habitat": """
        construct_envs NUM_PROCESSES MODE X_DISPLAY TEST_EPISODES get_env_class make_env_fn VectorEnv
        multiprocessing_start_method workers_ignore_signals auto_reset_done num_envs observation_spaces action_spaces
        orig_action_spaces number_of_episodes count_episodes current_episodes episode_over get_metrics reset step
        reset_at step_at async_step wait_step async_step_at wait_step_at pause_at resume_all call call_at render
        initialize_batch_renderer post_step ThreadedVectorEnv close""",
    "from-torchrl-envcreator": """
        EnvCreator create_env_kwargs share_memory make_variant meta_data get_env_metadata state_dict load_state_dict
        env_creator ParallelEnv metadata_from_workers serial_for_single num_sub_threads shutdown_timeout set_seed
        static_seed AsyncEnvPool VecNorm VecNormV2 in_keys out_keys decay eps lock shared_td freeze unfreeze frozen_copy
        denorm loc scale standard_normal to_observation_norm clone stateful TrajCounter""",
    "from-maze": """
        SubprocVectorEnv SequentialVectorEnv start_method n_envs step reset close terminal_observation seed MazeSeeding
        StructuredEnv actor_id is_actor_done get_actor_rewards get_env_time agent_counts_dict action_spaces_dict
        observation_spaces_dict RolloutGenerator logging_prefix get_stats get_stats_value write_epoch_stats
        clear_epoch_stats increment_log_step define_step_stats""",
}


PAGES = {name: (DOCS / "how-to" / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}


def rows(text):
    table = re.findall(r"^\| (.*) \| (.*) \|$", text, re.M)
    return [row for row in table if row[1] != "aioenv"]


@pytest.mark.parametrize("page", NAMES)
def test_every_name_of_the_older_systems_has_a_row(page):
    told = " ".join(old for old, _ in rows(PAGES[page]))
    assert [name for name in NAMES[page].split() if not re.search(rf"\b{name}\b", told)] == []


@pytest.mark.parametrize("page", NAMES)
def test_every_row_has_a_counterpart_or_says_why_not(page):
    for old, new in rows(PAGES[page]):
        assert new.strip() and (not new.startswith("**—**") or len(new) > 10), old


def test_what_the_tables_name_exists():
    told = " ".join(new for text in PAGES.values() for _, new in rows(text))
    assert len(check_names(told)) > 10
