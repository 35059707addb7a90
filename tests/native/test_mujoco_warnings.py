"""MuJoCo's warnings of native tasks: log records, and nothing in the working directory."""

from __future__ import annotations

import logging
from pathlib import Path

import mujoco
import numpy as np
import pytest

from aioenv import sync
from aioenv.native.sim_pool import SimPool
from tests.kits.process_kit import run_alone

LOOSE = """
<mujoco><worldbody><body><joint type="slide"/><geom size=".1" mass="1"/></body></worldbody>
<actuator><motor joint=""/></actuator></mujoco>
""".replace('joint type="slide"', 'joint name="j" type="slide"').replace('motor joint=""', 'motor joint="j"')


def warned(caplog):
    return [(record.name, record.levelname) for record in caplog.records if "unstable" in record.getMessage()]


def step_badly(pool):
    pool.reset()
    pool.bind("ctrl")[:] = np.nan
    pool.step()


@pytest.mark.parametrize("post_constraint", [False, True], ids=["batch", "loop"])
def test_they_are_logged_and_written_nowhere(post_constraint, caplog, capfd, tmp_path):
    """The first of those that differ in numbers alone as a warning, of each pool."""
    caplog.set_level(logging.INFO, "aioenv.mujoco")
    for _ in range(2):
        caplog.clear()
        with SimPool(LOOSE, 3, num_threads=2, post_constraint=post_constraint) as pool:
            step_badly(pool)
            first, *others = warned(caplog)  # the loop's simulations share what MuJoCo counts warnings in
            assert first == ("aioenv.mujoco", "WARNING") and set(others) <= {("aioenv.mujoco", "INFO")}
            assert len(others) == 2 or post_constraint
        assert mujoco.get_mju_user_warning() is None
    assert not list(Path.cwd().iterdir()) and capfd.readouterr() == ("", "")


def test_a_handler_of_the_programs_own_is_kept(caplog):
    own = []
    mujoco.set_mju_user_warning(own.append)
    try:
        with SimPool(LOOSE, 2, num_threads=1) as pool:
            step_badly(pool)
        assert len(own) == 2 and not warned(caplog)
        assert mujoco.get_mju_user_warning() is not None
    finally:
        mujoco.set_mju_user_warning(None)
    with SimPool(LOOSE, 2, num_threads=1) as pool:
        mujoco.set_mju_user_warning(own.append)  # and one that comes later
        step_badly(pool)
    assert len(own) == 4 and mujoco.get_mju_user_warning() is not None
    mujoco.set_mju_user_warning(None)


def test_it_lasts_as_long_as_any_pool(caplog):
    first, second = SimPool(LOOSE, 1), SimPool(LOOSE, 1)
    first.close()
    first.close()
    step_badly(second)
    assert len(warned(caplog)) == 1
    del first, second
    assert mujoco.get_mju_user_warning() is None


def test_a_vector_env_leaves_nothing_in_the_working_directory(caplog, capfd):
    for _ in range(2):
        caplog.clear()
        with sync.make_vec("Hopper-v5", 3, backend="native") as envs:
            envs.reset(seed=0)
            with np.errstate(all="ignore"):
                envs.step(np.full((3, 3), np.nan, np.float32))
        assert warned(caplog) == [("aioenv.mujoco", "WARNING")]
    assert not list(Path.cwd().iterdir()) and capfd.readouterr().err == ""


def test_who_logs_nothing_sees_the_first_alone():
    code = """
    import numpy as np
    from aioenv import sync
    for _ in range(2):
        with sync.make_vec("Hopper-v5", 3, backend="native") as envs:
            envs.reset(seed=0)
            with np.errstate(all="ignore"):
                envs.step(np.full((3, 3), np.nan, np.float32))
    """
    assert run_alone(code).stderr.count("unstable") == 2
    assert not list(Path.cwd().iterdir())
