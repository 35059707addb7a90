"""The examples of docs/evaluation.md run, and print what the page says."""

from __future__ import annotations

import re

from tests.kits.docs_kit import page, snippets

PAGE = page("docs/evaluation.md")


def test_the_examples_run(capsys):
    names = {"__name__": "__main__"}
    for code in snippets(PAGE):
        exec(code, names)
    printed = capsys.readouterr().out
    assert printed.startswith("101 episodes, drawn from seed=0\nepisode")
    promised = re.findall(r"```\n([^`]+?)```", PAGE)
    assert len(promised) == 2
    for text in promised:
        assert text in printed
