"""Facts that pages tell: names that exist, versions, a plan as it is printed."""

import re

import pytest

import aioenv
from tests.docs.pages import DOCS, PAGES, name_of
from tests.kits.docs_kit import check_names

LOGGERS = {"aioenv.workers", "aioenv.workers.my_env", "aioenv.mujoco", "aioenv.stats"}
MINE = [path for path in PAGES if "/architecture" not in str(path)]


@pytest.mark.parametrize("path", MINE, ids=name_of)
def test_what_a_page_names_exists(path):
    check_names(path.read_text(encoding="utf-8"), but=LOGGERS)


def test_a_plan_is_printed_as_the_page_shows():
    plan = aioenv.plan_workers(4, mode="eval", episodes=range(10), num_workers=2, displays=":0,1", devices=2)
    assert str(plan) in (DOCS / "how-to" / "shards-of-episodes-and-scenes.md").read_text(encoding="utf-8")


def test_the_page_on_versions_names_the_oldest():
    text = (DOCS / "explanation" / "versions.md").read_text(encoding="utf-8")
    pyproject = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    for library, title in (("gymnasium", "Gymnasium"), ("mujoco", "MuJoCo"), ("numpy", "numpy")):
        (oldest,) = set(re.findall(rf'"{library}>=([\d.]+)', pyproject))
        assert f"| {title} {oldest} or later |" in text


def test_all_faults_are_in_the_comparison():
    from benchmarks.reliability import SCENARIOS

    lines = (DOCS / "explanation" / "faults-of-vector-envs.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(SCENARIOS)
    assert f"All {len(SCENARIOS)} faults" in (DOCS / "explanation" / "reliability.md").read_text(encoding="utf-8")
