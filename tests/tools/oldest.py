"""Print pip's constraints for the oldest versions that pyproject.toml allows: `make oldest` runs the suite on them."""

import re
import tomllib
from pathlib import Path


def main() -> None:
    """Print `name==version` for each requirement `name>=version` of the package and of its extras for tests."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    floors = {}
    for requirement in [*project["dependencies"], *extras["video"], *extras["dev"]]:
        if found := re.match(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", requirement):
            floors[found[1]] = found[2]
    print("\n".join(f"{name}=={version}" for name, version in floors.items()))


if __name__ == "__main__":
    main()
