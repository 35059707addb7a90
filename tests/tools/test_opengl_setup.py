"""`tests/tools/opengl.sh`, which `make demo` and `make test` call: what it installs, and its message where it can't."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.process_kit import environment

SCRIPT = Path(__file__).parent / "opengl.sh"

# draws with the backends that a file names; all else is Python's
PYTHON = f"""#!/bin/sh
case "$2" in
    *GLContext*) while read -r line; do [ "$line" = "$MUJOCO_GL" ] && exit 0; done < works; exit 1;;
    *) exec {sys.executable} "$@";;
esac
"""
APT = """#!/bin/sh
echo "$@" >> asked
if [ "$1" = install ] && [ "$DEBIAN_FRONTEND" != noninteractive ]; then exit 1; fi
if [ "$1" = install ]; then printf 'egl\\nosmesa\\n' > works; fi
"""
NO_NETWORK = '#!/bin/sh\necho "$@" >> asked\nexit 100\n'
SUDO = '#!/bin/sh\nunset DEBIAN_FRONTEND\n[ "$1" = -n ] && shift\nexec "$@"\n'
ROOT, USER = "#!/bin/sh\necho 0\n", "#!/bin/sh\necho 1000\n"
INSTALLED = "libegl1 libgl1-mesa-dri libosmesa6"


class Machine:
    """Where nothing is to be found but what a test puts there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "bin").mkdir()
        for tool in ("sh", "true", "env"):
            (path / "bin" / tool).symlink_to(shutil.which(tool))
        self.put("python", PYTHON)

    def put(self, name: str, code: str) -> None:
        file = self.path / "bin" / name
        file.write_text(code)
        file.chmod(0o755)

    def run(self, *arguments: str, works: str = "", **variables: str) -> tuple[str, str]:
        """What the script asked apt for, and what it said to people."""
        (self.path / "works").write_text("".join(f"{name}\n" for name in works.split()))
        known = {name: value for name, value in environment().items() if name not in ("MUJOCO_GL", "DISPLAY")}
        done = subprocess.run(
            ["sh", str(SCRIPT), str(self.path / "bin/python"), *arguments],
            env={**known, "PATH": str(self.path / "bin"), **variables},
            cwd=self.path,
            capture_output=True,
            text=True,
            check=True,  # everything but images works without
        )
        asked = self.path / "asked"
        return asked.read_text() if asked.exists() else "", done.stderr


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "machine").mkdir()
    return Machine(tmp_path / "machine")


@pytest.mark.parametrize(
    ("works", "variables"),
    [
        ("egl", {}),
        ("osmesa", {}),
        ("glfw", {"DISPLAY": ":0"}),  # a desktop whose driver has no EGL
        ("osmesa", {"MUJOCO_GL": "osmesa"}),
    ],
)
def test_what_draws_is_left_alone(machine, works, variables):
    machine.put("id", ROOT)
    machine.put("apt-get", APT)
    assert machine.run(works=works, **variables) == ("", "")


@pytest.mark.parametrize("tools", [{"id": ROOT}, {"id": USER, "sudo": SUDO}], ids=["root", "sudo"])
@pytest.mark.parametrize(("arguments", "works"), [((), ""), (("all",), "egl")], ids=["demo", "tests"])
def test_mesa_is_installed_where_that_can_be(machine, tools, arguments, works):
    for name, code in {**tools, "apt-get": APT}.items():
        machine.put(name, code)
    asked, said = machine.run(*arguments, works=works)
    update, install = asked.splitlines()
    assert update.startswith("update") and install.startswith("install") and install.endswith(INSTALLED)
    assert not said


@pytest.mark.parametrize("arguments", [(), ("all",)], ids=["demo", "tests"])
@pytest.mark.parametrize(
    "tools",
    [
        {"id": ROOT},
        {"id": ROOT, "apt-get": NO_NETWORK},
        {"id": USER, "apt-get": APT},
        {"id": USER, "apt-get": APT, "sudo": "#!/bin/sh\nexit 1\n"},
    ],
    ids=["no apt", "no network", "no sudo", "sudo that asks"],
)
def test_else_it_says_what_to_install(machine, tools, arguments):
    for name, code in tools.items():
        machine.put(name, code)
    asked, said = machine.run(*arguments)
    assert f"\n    apt-get install {INSTALLED}\n" in said
    assert bool(asked) is (tools.get("apt-get") == NO_NETWORK)
