"""Libraries that are too old, missing or broken: an error says so before they are imported, and `doctor` lists them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import aioenv
from aioenv import requirements
from aioenv.cli import doctor
from aioenv.requirements import check_requirements, require, require_batch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def found(monkeypatch):
    """Versions that are found, by name."""
    versions = {"numpy": "2.0.0", "gymnasium": "1.2.0", "mujoco": "3.3.0"}

    def version(name):
        try:
            return versions[name]
        except KeyError:
            raise requirements.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr(requirements, "_checked", False)
    return versions


@pytest.mark.parametrize(
    ("name", "version", "problem"),
    [
        ("gymnasium", "1.1.1", "aioenv needs gymnasium >= 1.2, found 1.1.1: pip install -U gymnasium"),
        ("gymnasium", "0.29.1", "aioenv needs gymnasium >= 1.2, found 0.29.1: pip install -U gymnasium"),
        ("mujoco", "3.2.7", "aioenv needs mujoco >= 3.3, found 3.2.7: pip install -U mujoco"),
        ("mujoco", "2.3.1.post1", "aioenv needs mujoco >= 3.3, found 2.3.1.post1: pip install -U mujoco"),
        ("numpy", "1.26.4", "aioenv needs numpy >= 2.0, found 1.26.4: pip install -U numpy"),
    ],
)
def test_a_library_that_is_too_old(found, name, version, problem):
    found[name] = version
    with pytest.raises(aioenv.VersionError) as caught:
        check_requirements()
    assert str(caught.value).splitlines()[0] == problem and "pip check" in str(caught.value)
    assert isinstance(caught.value, aioenv.AioenvError) and isinstance(caught.value, ImportError)


@pytest.mark.parametrize("version", ["1.2", "1.10.0.dev1", "2.0.0", "v1.3.0", "unknown", None])
def test_a_library_that_is_new_enough(found, version):
    found["gymnasium"] = version
    check_requirements()
    found["numpy"] = "1.0"
    check_requirements()  # once is enough
    requirements._checked = False
    with pytest.raises(ImportError, match="numpy"):
        check_requirements()


def test_a_library_that_is_missing_says_so_itself(found):
    found.clear()
    check_requirements()
    require_batch()


def test_a_feature_of_newer_versions(found):
    require("gymnasium", "1.2", "this")
    with pytest.raises(aioenv.VersionError, match=r"^this needs gymnasium >= 1.4, this is 1.2.0: pip install -U "):
        require("gymnasium", "1.4", "this")
    why = r'backend="native" of MuJoCo tasks .* needs mujoco >= 3.17, this is 3.3.0: pip install -U mujoco'
    with pytest.raises(aioenv.VersionError, match=why):
        aioenv.make_vec("Hopper-v5", 2, backend="native")
    assert aioenv.make_vec("CartPole-v1", 2, backend="native").num_envs == 2  # without MuJoCo
    assert aioenv.make_vec("Hopper-v5", 2).num_envs == 2


def test_the_least_versions_are_those_of_the_project():
    wanted = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name, least in requirements.LEAST.items():
        assert f'"{name}>={least}"' in wanted


# ------------------------------------------------------------ in processes of their own


def pretend(folder, **versions):
    """Have processes with this folder in front of their path find libraries of these versions."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def python(folder, *args):
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, *args], env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    "code",
    [
        "import aioenv.sync",
        "import aioenv; aioenv.make_vec",
        "from aioenv import RenderPool",
        "from aioenv.adapters import sb3",
    ],
)
def test_an_import_says_which_library_is_too_old(tmp_path, code):
    pretend(tmp_path, gymnasium="1.1.1", mujoco="3.2.0")
    package = tmp_path / "mujoco"
    package.mkdir()
    (package / "__init__.py").write_text("raise TypeError('no code shall get here')")
    done = python(tmp_path, "-c", code)
    assert done.returncode == 1
    problems = [line for line in done.stderr.splitlines() if "aioenv needs" in line]
    assert problems == [
        "aioenv.errors.VersionError: aioenv needs gymnasium >= 1.2, found 1.1.1: pip install -U gymnasium",
        "aioenv needs mujoco >= 3.3, found 3.2.0: pip install -U mujoco",
    ]


def test_nothing_is_imported_to_know_that(tmp_path):
    """Where even our errors can't be imported, since they are Gymnasium's too, it is an ImportError."""
    pretend(tmp_path, gymnasium="0.21.0")
    (tmp_path / "gymnasium.py").write_text("raise TypeError('of another world')")
    done = python(tmp_path, "-c", "import aioenv.sync")
    assert done.stderr.count("ImportError: aioenv needs gymnasium >= 1.2, found 0.21.0") == 1


BROKEN = {
    "an exception": (
        "gymnasium",
        "raise TypeError('not a generic class')",
        "TypeError: not a generic class",
    ),
    "an exit": ("gymnasium", "import sys; sys.exit(3)", "the process ended with status 3"),
    "a crash": ("numpy", "import os; os.abort()", "the process ended with signal 6"),
    "one that MuJoCo needs": ("mujoco", "raise OSError('libmujoco.so: bad')", "OSError: libmujoco.so: bad"),
    "our own errors": ("cloudpickle", "raise RuntimeError('no pickles')", "RuntimeError: no pickles"),
}


@pytest.mark.parametrize(("name", "code", "said"), BROKEN.values(), ids=BROKEN)
def test_doctor_outlives_a_library_that_can_not_be_imported(tmp_path, name, code, said):
    (tmp_path / f"{name}.py").write_text(code)
    done = python(tmp_path, "-m", "aioenv", "doctor")
    assert done.returncode == 1 and "Traceback" not in done.stderr + done.stdout
    assert f"it can't be imported: {said}" in done.stdout
    assert ("Event loop: not known" in done.stdout) == (name != "mujoco")
    assert "does not work here" in done.stdout


def test_doctor_names_what_is_too_old(tmp_path):
    pretend(tmp_path, gymnasium="1.1.1", mujoco="3.2.0")
    done = python(tmp_path, "-m", "aioenv", "doctor")
    assert done.returncode == 1 and "Traceback" not in done.stderr + done.stdout
    for problem in ("gymnasium >= 1.2, found 1.1.1", "mujoco >= 3.3, found 3.2.0"):
        assert f"aioenv needs {problem}" in done.stdout
    done = python(tmp_path, "-m", "aioenv", "tune", "CartPole-v1")
    assert done.returncode == 1 and done.stderr.startswith("aioenv: aioenv needs gymnasium >= 1.2, found 1.1.1")


def test_metadata_that_is_broken(monkeypatch):
    for broken in (lambda name: None, {}.__getitem__):
        monkeypatch.setattr("importlib.metadata.version", broken)
        assert requirements.installed("gymnasium") is None and doctor.installed("gymnasium") is not None
    assert doctor.installed("nothing-of-that-name") is None
