"""Check the versions of required libraries: another package may have installed older ones.

Only their metadata is read: the import of a library that is too old may fail, with an error that says less.
"""

from __future__ import annotations

import re
from importlib import metadata

__all__ = ["LEAST", "check_requirements", "has_batch", "installed", "problem_of", "require", "require_batch"]

# as in pyproject.toml
LEAST = {"numpy": "2.0", "gymnasium": "1.2", "mujoco": "3.3"}

# The first MuJoCo that has `mujoco.batch`.
_BATCH = "3.17"

_checked = False


def check_requirements() -> None:
    """Raise unless all libraries are new enough; checked once a process.

    Raises:
        VersionError: if one is too old; a plain ImportError if `aioenv.errors` can't be imported with it.
    """
    global _checked
    if _checked:
        return
    problems = [problem for name in LEAST if (problem := problem_of(name)) is not None]
    if problems:
        raise _error(
            "\n".join(problems) + "\nIf another package asks for the old version (`pip check` says which), give "
            "aioenv a virtual environment of its own"
        )
    _checked = True


def problem_of(name: str) -> str | None:
    """Return a message if a library is too old; None if it is new enough, or not installed."""
    found, least = installed(name), LEAST.get(name)
    if found is None or least is None or not _is_older(found, least):
        return None
    return f"aioenv needs {name} >= {least}, found {found}: pip install -U {name}"


def require(name: str, least: str, feature: str) -> None:
    """Raise unless a library is new enough for one feature.

    Args:
        name: of the library.
        least: the first version that is new enough.
        feature: the feature that needs it, as the subject of a sentence.

    Raises:
        VersionError: if the library is older.
    """
    found = installed(name)
    if found is not None and _is_older(found, least):
        raise _error(f"{feature} needs {name} >= {least}, this is {found}: pip install -U {name}")


def has_batch() -> bool:
    """Return whether the installed MuJoCo can step many simulations as one batch."""
    found = installed("mujoco")
    return found is None or not _is_older(found, _BATCH)


def require_batch() -> None:
    """Raise unless MuJoCo can step many simulations as one batch.

    Raises:
        VersionError: if it is too old for that.
    """
    require("mujoco", _BATCH, 'backend="native" of MuJoCo tasks (NativeMujocoEnv, SimPool: by mujoco.batch)')


def installed(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed, or its metadata is broken."""
    try:
        version: str | None = metadata.version(name)
    except Exception:  # a broken installation may raise anything
        return None
    return version


def _is_older(found: str, least: str) -> bool:
    """Return whether a version is older than another; a version of another format is not."""
    numbers = re.match(r"v?(\d+)(?:\.(\d+))?", found)
    if numbers is None:
        return False
    return (int(numbers[1]), int(numbers[2] or 0)) < tuple(map(int, least.split(".")))


def _error(text: str) -> ImportError:
    try:
        from aioenv.errors import VersionError
    except Exception:  # it imports Gymnasium
        return ImportError(text)
    return VersionError(text)
