"""Whether the libraries that this one is written for are there: another package may have had older ones installed."""

from __future__ import annotations

from importlib import metadata

__all__ = ["LEAST", "note_old_libraries"]

# as in pyproject.toml
LEAST = {"numpy": (2, 0), "gymnasium": (1, 4), "mujoco": (4, 0)}


def note_old_libraries(exc: ImportError) -> None:
    """Add to an import that failed which library is too old, if one is."""
    for name, least in LEAST.items():
        try:
            found = metadata.version(name)
            too_old = tuple(map(int, found.split(".")[:2])) < least
        except (metadata.PackageNotFoundError, ValueError):
            continue  # it is missing, which the error says; or it counts in another way
        if too_old:
            wanted = ".".join(map(str, least))
            exc.add_note(
                f"aioenv takes {name} {wanted} or later, and {name} {found} is installed; another package may have "
                f"asked for that (pip check). pip install '{name}>={wanted}', or use a virtual environment of its own"
            )
