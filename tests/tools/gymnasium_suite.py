"""Run Gymnasium's own tests of vector envs, unchanged, on the drop-ins.

    python tests/tools/gymnasium_suite.py                # clones its repository at the installed version's tag
    python tests/tools/gymnasium_suite.py --source PATH  # a checkout, or a git repository (--ref REF)

What else it is given goes to pytest.

Gymnasium's source distribution does not hold its tests, so they come from its repository. They are run in three passes:

- "async": with the drop-in for `AsyncVectorEnv` in its place, before anything is collected;
- "sync": with the drop-in for `SyncVectorEnv` in its place, too, and with the tests of vector wrappers;
- "async-for-both": the same with the drop-in for `AsyncVectorEnv` in the place of both.

A pass counts the cases that built the drop-in that it is about; it fails if one of its cases fails, or if none did.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode

from aioenv.sync import AsyncVectorEnv, SyncVectorEnv

BUILD = Path(__file__).resolve().parents[2] / "build"
# the tests of wrappers build no AsyncVectorEnv, and some draw for minutes
PARTS: dict[str, tuple[str, ...]] = {"async": ("tests/vector", "tests/envs/registration/test_make_vec.py")}
PARTS["sync"] = PARTS["async-for-both"] = (*PARTS["async"], "tests/wrappers/vector")

NEEDED = ("cv2", "Box2D", "pygame")  # what its tests import, or the envs that they make

SAME_PROCESS = "it reads `envs.envs`, the env objects themselves, which are in other processes"
# Cases in which a drop-in is another than the class whose place it takes, and should be. In its own place none is.
DEPARTURES: dict[str, dict[str, str]] = {
    "async": {},
    "sync": {},
    "async-for-both": {
        "test_sync_vector_env.py::test_metadata_sync_vector_env": SAME_PROCESS,
        "test_sync_vector_env.py::test_check_spaces_sync_vector_env": "the message names AsyncVectorEnv",
        "test_make_vec.py::test_make_vec_wrappers": SAME_PROCESS,
        "test_make_vec.py::test_make_vec_with_spec_additional_wrappers": SAME_PROCESS,
        "test_normalize_reward.py::test_equivalence_with_wrapper": SAME_PROCESS,
    },
}


class InPlaceOfSync(AsyncVectorEnv[Any, Any]):
    """The drop-in for AsyncVectorEnv with SyncVectorEnv's arguments."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        copy: bool = True,
        observation_mode: Any = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        super().__init__(env_fns, False, copy, observation_mode=observation_mode, autoreset_mode=autoreset_mode)


class Swap:
    """A pytest plugin: it puts drop-ins in place of Gymnasium's classes, and counts the cases that build one."""

    def __init__(self, which: str) -> None:
        self.which = which
        self.case = ""
        self.built: set[str] = set()
        self.outcomes: dict[str, str] = {}
        # while it lives, its fork server does, which takes longer to start than a case to run
        self.kept = AsyncVectorEnv([partial(gymnasium.make, "CartPole-v1")])
        vector = gymnasium.vector
        counted: Any = AsyncVectorEnv
        vector.AsyncVectorEnv = vector.async_vector_env.AsyncVectorEnv = AsyncVectorEnv  # type: ignore[misc,assignment]
        if which == "sync":
            counted = SyncVectorEnv
        if which != "async":
            in_place = SyncVectorEnv if which == "sync" else InPlaceOfSync
            vector.SyncVectorEnv = vector.sync_vector_env.SyncVectorEnv = in_place  # type: ignore[misc,assignment]
        counted.__init__ = self._counted(counted.__init__)

    def _counted(self, init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def counting(*args: Any, **kwargs: Any) -> None:
            self.built.add(self.case)
            init(*args, **kwargs)

        return counting

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark what departs from Gymnasium's classes, and what can't run here."""
        for item in items:
            name = item.nodeid.split("[")[0].rsplit("/", 1)[-1]
            if name in DEPARTURES[self.which]:
                item.add_marker(pytest.mark.xfail(reason=DEPARTURES[self.which][name], strict=True))
            if name == "test_sync_vector_env.py::test_sync_vector_env_seed":
                item.add_marker(pytest.mark.skipif(not find_spec("Box2D"), reason="it needs Box2D"))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Know which case it is that builds one."""
        self.case = item.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how each case ends."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = "xfailed" if hasattr(report, "wasxfail") else report.outcome

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the count."""
        of_built = [self.outcomes.get(case, "?") for case in self.built]
        counts = ", ".join(f"{of_built.count(outcome)} {outcome}" for outcome in sorted(set(of_built)))
        terminalreporter.write_line(f"{self.which}: {len(self.built)} cases build its drop-in: {counts}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail if no case has built one."""
        self.kept.close()
        if not self.built and session.exitstatus == 0:
            session.exitstatus = 1


def main() -> int:
    """All passes, each in a process of its own; or the one that `--pass` names."""
    parser = argparse.ArgumentParser(description="Run Gymnasium's own tests of vector envs on the drop-ins.")
    parser.add_argument("--source", help="a checkout of Gymnasium, or a git repository of it")
    parser.add_argument("--ref", help="a commit, branch or tag of the repository")
    parser.add_argument("--pass", dest="which", choices=tuple(PARTS), help="only one of them")
    parser.add_argument("--suite", type=Path, help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.suite:
        arguments = [*rest, *"-q -rxX -p no:cacheprovider -p no:asyncio".split()]
        arguments += ["-c", str(options.suite / "pyproject.toml")]
        arguments += ["--ignore", str(options.suite / "tests/vector/utils")]  # plain functions
        arguments += [str(options.suite / part) for part in PARTS[options.which]]
        return pytest.main(arguments, plugins=[Swap(options.which)])
    missing = [name for name in NEEDED if not find_spec(name)]
    if missing:
        sys.stderr.write(f"without {', '.join(missing)} some cases fail for that alone: pip install 'aioenv[suite]'\n")
    suite = fetch(options.source, options.ref)
    # windows nowhere, where there is no display
    env = {"MUJOCO_GL": "egl", "SDL_VIDEODRIVER": "dummy", **os.environ}
    worst = 0
    for which in (options.which,) if options.which else PARTS:
        command = [sys.executable, __file__, "--suite", str(suite), "--pass", which, *rest]
        worst = max(worst, subprocess.run(command, cwd=suite, env=env, check=False).returncode)
    return worst


def fetch(source: str | None, ref: str | None) -> Path:
    """Gymnasium's tests, in a directory of their own that git ignores."""
    version = gymnasium.__version__
    suite = BUILD / f"gymnasium-{version}"
    if source is None and (suite / "tests").exists():
        return suite
    if source is None:
        urls = importlib.metadata.metadata("gymnasium").get_all("Project-URL") or []
        source = dict(url.split(", ", 1) for url in urls)["Repository"]
        clone = BUILD / "gymnasium.git"
        shutil.rmtree(clone, ignore_errors=True)
        subprocess.run(
            ["git", "clone", "--quiet", "--bare", "--depth=1", f"--branch=v{version}", source, str(clone)], check=True
        )
        source, ref = str(clone), "HEAD"
    shutil.rmtree(suite, ignore_errors=True)
    suite.mkdir(parents=True)
    if (Path(source) / "tests" / "vector").is_dir() and ref is None:
        shutil.copytree(Path(source) / "tests", suite / "tests")
        shutil.copy(Path(source) / "pyproject.toml", suite)
    else:
        archive = ["git", "-C", source, "archive", ref or "HEAD", "tests", "pyproject.toml"]
        subprocess.run(["tar", "-x", "-C", str(suite)], input=subprocess.check_output(archive), check=True)
    return suite


if __name__ == "__main__":
    sys.exit(main())
