"""Settings of the gallery of examples: their arguments, and their pictures.

The examples are run when the site is built, except those that train: `make curves` runs these. An example that draws
itself has a picture in `_static/examples`, which `example_pictures.py` makes.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["arguments", "pictures"]

HERE = Path(__file__).parent
logging.getLogger("aioenv.workers").setLevel(logging.WARNING)  # the build logs more than a program does
_COMMAND = re.compile(r"^ +python examples/\w+\.py([^&\n]*)", re.MULTILINE)
FILES = {  # where examples write when the site is built
    "episode_stats": ["--logs", tempfile.gettempdir()],
    "spare_envs": ["--out", os.path.join(tempfile.gettempdir(), "spare-envs")],
    "timeline": ["--out", os.path.join(tempfile.gettempdir(), "run.json")],
}
CAPTIONS = {
    "async_loop": "Four of the envs.",
    "blocking_loop": "The lengths of the episodes of a random policy.",
    "episode_stats": "Four of the envs.",
    "evaluate": "The returns of 101 episodes.",
    "event_driven": "The steps of each slot.",
    "multi_agent": "An episode: two hunters run after a hare, on a ring.",
    "native_task": "Four of the slots.",
    "pixels": "An observation, and what the policy makes of it.",
    "ppo": "The mean return in 40 updates.",
    "rendering": "Images of four envs.",
    "rollout": "The rewards of a rollout. Rows of white are resets, and no samples.",
    "spare_envs": "What the workers do, without spare envs and with them.",
    "timeline": "A part of the timeline.",
}


def arguments(conf: dict[str, Any], example: dict[str, Any]) -> list[str]:
    """Return the arguments of an example: those of the command in its text, so that the page shows its output."""
    path = Path(example["src_file"])
    command = _COMMAND.search(path.read_text(encoding="utf-8"))
    return [*(command[1].split() if command else ()), *FILES.get(path.stem, ())]


def pictures(block: Any, block_vars: dict[str, Any], conf: dict[str, Any]) -> str:
    """Return rST that shows the picture of an example above its output; the gallery shows it, too."""
    from sphinx_gallery.scrapers import figure_rst

    stem = Path(block_vars["src_file"]).stem
    found = HERE / "_static" / "examples" / f"{stem}.png"
    if block[0] != "code" or not found.exists():
        return ""
    path = next(block_vars["image_path_iterator"])
    shutil.copy(found, path)
    caption = CAPTIONS[stem]
    rst: str = figure_rst([path], conf["src_dir"], caption)
    return f"{rst}\n\n*{caption}*\n\n"
