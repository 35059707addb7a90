"""Build the sdist and the wheel into dist/, and test them outside of the checkout; arguments are pytest's.

The sdist must have every file that git tracks. The wheel is installed into a virtual environment of its own, and the
tests of the unpacked sdist run against it: the package's own folder is deleted there first.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICK = "not parity and not faults and not stress and not soak and not ecosystem and not cluster"
# at the top level, only files of git itself are left out of the sdist
LEFT_OUT = {".gitignore"}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command; return what it prints."""
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> None:
    """Build, look, install, test."""
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(sdist) as tar:
            tar.extractall(folder, filter="data")
        source = folder / sdist.name.removesuffix(".tar.gz")
        tracked = {line for line in run("git", "ls-files").splitlines() if line not in LEFT_OUT}
        if missing := sorted(name for name in tracked if not (source / name).exists()):
            sys.exit(f"{sdist.name} lacks {len(missing)} files: {', '.join(missing[:10])}")
        shutil.rmtree(source / "aioenv")
        python = folder / "venv" / "bin" / "python"
        venv.create(folder / "venv", with_pip=True)
        run(python, "-m", "pip", "install", "--quiet", f"aioenv[dev] @ {wheel.as_uri()}")
        compiled = run(python, "-c", "from aioenv import speedups; print(speedups.compiled)", cwd=source)
        print(
            f"{sdist.name}: {len(tracked)} files; {wheel.name}: C {'is' if 'True' in compiled else 'is not'} compiled"
        )
        arguments = sys.argv[1:] or ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal", "-q"]
        sys.exit(subprocess.run([python, "-m", "pytest", "-m", QUICK, *arguments], cwd=source, check=False).returncode)


if __name__ == "__main__":
    main()
