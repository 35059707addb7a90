"""The pages of the documentation, as text: their code blocks, their prose, the libraries that they need."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for folder in ("tutorials", "how-to", "explanation") for path in (DOCS / folder).rglob("*.md"))
FRONT = [ROOT / "README.md", DOCS / "index.md"]
_BLOCK = re.compile(
    r"^(?P<fence>`{3,}|:{3,})(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=fence)\s*$", re.MULTILINE | re.DOTALL
)


def name_of(path: Path) -> str:
    """The name of a page: its path in docs/."""
    return str(path.relative_to(ROOT))


def blocks(text: str) -> list[tuple[int, str, str]]:
    """The fenced blocks: line, language, code. Blocks of tabs and grids are looked into."""
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        if match["fence"].startswith(":") or len(match["fence"]) > 3:
            found += [(line + inner, language, code) for inner, language, code in blocks(match["code"])]
        else:
            found.append((line, match["language"].strip(), match["code"]))
    return found


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The blocks that run: line and code. In ```{code-cell} blocks, lines of options (`:tags:`) are left out."""
    return [
        (line, re.sub(r"\A(?::.*\n)+", lambda options: "\n" * options[0].count("\n"), code))
        for line, language, code in blocks(text)
        if language in ("python", "{code-cell} python", "{code-cell} ipython3")
    ]


def needs(text: str) -> list[str]:
    """The modules that a page needs, and "opengl" if it draws, from its front matter: `needs: opengl imageio_ffmpeg`.

    The README, which has no front matter, says it in a comment: `<!-- needs: opengl -->`.
    """
    match = re.search(r"\A---\n.*?^needs: (.*?)$.*?^---$|^<!-- needs: (.*?) -->$", text, re.MULTILINE | re.DOTALL)
    return (match[1] or match[2]).split() if match else []


def prose(text: str) -> str:
    """The text without front matter, code, tables, headings and directives."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<picture>.*?</picture>", "", text, flags=re.DOTALL)
    text = re.sub(r"^(:{3,}.*|:[\w-]+:.*|#.*|\|.*)$", "\n", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[str]:
    """The sentences of the prose; items of lists are sentences of their own."""
    items = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", prose(text), flags=re.MULTILINE)
    parts = [part for item in items for part in re.split(r"(?<=[.:?!])\s+(?=[A-Z`\"(*\[])", " ".join(item.split()))]
    return [part for part in parts if len(part.split()) > 1]


def reference_names() -> dict[str, list[str]]:
    """The names that the reference lists, by module; each has a page of its own in the built documentation."""
    found: dict[str, list[str]] = {}
    for path in (DOCS / "reference").glob("*.md"):
        for module, names in re.findall(
            r"currentmodule:: (\S+)\n\n.*?nosignatures:\n\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL
        ):
            found.setdefault(module, []).extend(names.split())
    return found


def installed(module: str) -> bool:
    """Whether the library that a module of aioenv needs is installed."""
    needed = {"sb3": "stable_baselines3"}.get(name := module.rpartition(".")[2], name)
    return not module.startswith("aioenv.adapters") or importlib.util.find_spec(needed) is not None
