"""Add the page "Reference" to the documentation: every public name with its signature and its docstring.

This is a hook of mkdocs: it writes no file, so the page can't be older than the code.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["MODULES", "on_files", "page"]

MODULES = ("aioenv", "aioenv.sync", "aioenv.stats", "aioenv.envs", "aioenv.testing")

_INTRODUCTION = """# Reference

This page is what `help()` shows. Stable-Baselines3's adapter: [From others](from-others.md).
"""
_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):$")
_ENTRY = re.compile(r"    ([\w*`]+(?:, [\w*`]+)*): (.*)")


def on_files(files: Any, config: Any) -> Any:
    """Add the page; mkdocs calls this with all files."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference.md", content=page()))
    return files


def page() -> str:
    """Return the page, in Markdown."""
    return "\n".join([_INTRODUCTION, *(line for name in MODULES for line in _module(name))]) + "\n"


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"## {name}\n"
    if name != "aioenv":
        yield f"{_text(module)}\n"
    names = sorted(module.__all__, key=str.lower)
    names = [each for each in names if not inspect.ismodule(getattr(module, each)) and each[0] != "_"]
    known = importlib.import_module("aioenv") if name != "aioenv" else None
    values = [(each, getattr(module, each)) for each in names]
    values = [(each, value) for each, value in values if getattr(known, each, None) is not value]
    public = [value for _, value in values if inspect.isclass(value)]
    errors = [(each, value) for each, value in values if _is_error(value)]
    for each, value in values:
        if not _is_error(value):
            yield from _name(f"{name}.{each}", value, public)
    if errors:
        yield f"### Errors of {name}\n"
        for each, value in errors:
            bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
            yield f"#### {name}.{each}\n\n({bases}) {_text(value)}\n"


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def _name(path: str, value: Any, public: list[type]) -> Iterator[str]:
    yield f"### {path}\n"
    if not callable(value):
        yield f"`{value!r}`\n"
        return
    if not getattr(value, "_is_protocol", False):
        yield _signature(path, value)
    yield f"{_text(value)}\n"
    if inspect.isclass(value):
        for name, member in _members(value, public):
            if isinstance(member, property):
                yield f"#### {path}.{name}\n\n(attribute) {_text(member)}\n"
            else:
                kind = "async " if inspect.iscoroutinefunction(member) else ""
                yield f"#### {path}.{name}\n\n{_signature(name, member, kind)}{_text(member)}\n"


def _members(kind: type, public: list[type]) -> Iterator[tuple[str, Any]]:
    """List the members of a class, without those of a public base or of another package."""
    seen = {name for base in kind.__mro__[1:] if base in public for name in dir(base)} - {*vars(kind)}
    for base in kind.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("aioenv.") else ():
            member = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if name[0] != "_" and name not in seen and (inspect.isfunction(member) or isinstance(member, property)):
                seen.add(name)
                yield name, member


def _signature(name: str, function: Any, kind: str = "") -> str:
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    shown: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown and not any(s[0] == "*" for s in shown):
            shown.append("*")
        stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) or "**" * (parameter.kind is parameter.VAR_KEYWORD)
        text = stars + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            default = parameter.default
            text += f" = {default if isinstance(default, enum.Enum) else repr(default)}"
        shown.append(text)
    result = "" if signature.return_annotation is signature.empty else _annotation(signature.return_annotation)
    result = f" -> {result}" if result and not inspect.isclass(function) else ""
    line = f"{kind}{name}({', '.join(shown)}){result}"
    if len(line) > 100:
        line = f"{kind}{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){result}"
    return f"```python\n{line}\n```\n\n"


def _annotation(annotation: Any) -> str:
    text = getattr(annotation, "__forward_arg__", annotation)
    return text.strip('"') if isinstance(text, str) else getattr(text, "__name__", str(text))


def _text(value: Any) -> str:
    """Return a docstring in Markdown, sections as lists."""
    lines: list[str] = []
    section = False
    for line in inspect.cleandoc(value.__doc__ or "").splitlines():
        if found := _SECTION.match(line):
            section = True
            lines += [f"**{found[1]}**", ""]
        elif section and (entry := _ENTRY.match(line)):
            names = ", ".join(f"`{name.strip('`')}`" for name in entry[1].split(", "))
            lines.append(f"- {names}: {entry[2]}")
        elif section and line.startswith("    "):
            lines.append(line[4:] if not line.startswith("        ") else "  " + line.strip())
        else:
            section = section and not line
            lines.append(line[:-1] if line.endswith("::") else line)
    return "\n".join(lines)
