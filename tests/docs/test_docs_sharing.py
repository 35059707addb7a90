"""The examples of docs/sharing.md run, and print what the page says."""

from __future__ import annotations

import re

import pytest

from aioenv.stats.sharing import can_share
from tests.kits.docs_kit import page, snippets

PAGE = page("docs/sharing.md")


@pytest.mark.skipif(not can_share(), reason="no memory without a name here")
def test_the_examples_run(capsys):
    names = {"__name__": "__main__"}
    for code in snippets(PAGE):
        exec(code, names)
    (table,) = re.findall(r"```\n(eval.*?)```", PAGE, re.S)
    printed = capsys.readouterr().out
    assert printed.startswith(table)
    assert "[0, 4, 8]" in printed
    assert "\n808 [" in printed  # 8 resets, 100 steps of 8
    assert "(4,) CartPole-v1\n44 {'counts': [" in printed  # 4 resets, 10 steps of 4
