"""The pages of the documentation: their code runs, their commands exist, their prose is short and plain."""

import importlib.util
import os
import re
import shlex
import statistics
import subprocess
import sys

import pytest

from aioenv.cli import main
from tests.docs.pages import DOCS, FRONT, PAGES, ROOT, blocks, name_of, needs, prose, python_blocks, sentences
from tests.kits.cli_kit import OPENGL

TEXTS = {name_of(path): path.read_text(encoding="utf-8") for path in [*FRONT, *PAGES]}
MAX_HOW_TO_WORDS = 600
MAX_WORDS = 26_000  # of prose in all pages
MAX_ARCHITECTURE_WORDS = 4_000  # with its tables and diagrams


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if python_blocks(text)])
def test_the_code_of_a_page_runs(name, tmp_path):
    for needed in needs(TEXTS[name]):
        if not OPENGL if needed == "opengl" else importlib.util.find_spec(needed) is None:
            pytest.skip(f"no {needed} here")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.docs.run_page", str(ROOT / name)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "aioenv.record(" in text])
def test_pages_that_write_a_video_say_what_they_need(name):
    assert "imageio_ffmpeg" in needs(TEXTS[name])


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "fragment" in text])
def test_fragments_are_python(name):
    """Code of other libraries, or of programs that the page does not have, is not run."""
    for line, language, code in blocks(TEXTS[name]):
        if language == "{code-block} python":
            compile("\n" * line + re.sub(r"\A(?::.*\n)+", "", code), name, "exec", 0x2000)


@pytest.mark.parametrize("name", TEXTS)
def test_commands_exist(name, capsys):
    for _, language, code in blocks(TEXTS[name]):
        if language not in ("console", "bash"):
            continue
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["aioenv"]:
                with pytest.raises(SystemExit) as exit_:
                    main([*words[1:2], "--help"])
                assert exit_.value.code == 0
                told = capsys.readouterr().out
                assert [word for word in words[2:] if word.startswith("--") and word.split("=")[0] not in told] == []
            if len(words) > 1 and words[0] == "python" and words[1].startswith("examples/"):
                assert (ROOT / words[1]).exists()


@pytest.mark.parametrize("name", TEXTS)
def test_sentences_are_short(name):
    lengths = {sentence: len(sentence.split()) for sentence in sentences(TEXTS[name])}
    assert [sentence for sentence, length in lengths.items() if length > 40] == []
    assert not lengths or statistics.mean(lengths.values()) <= 18


@pytest.mark.parametrize("name", [name for name in TEXTS if "how-to/" in name])
def test_a_how_to_page_has_one_question_and_few_words(name):
    text = TEXTS[name]
    assert len(prose(text).split()) <= MAX_HOW_TO_WORDS
    (title,) = re.findall(r"^# (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)
    assert title.endswith("?") or name.endswith("index.md")


def test_all_pages_together_have_few_words():
    """Without the pages on more than one machine, on collectors, on training, and on watching, which came later."""
    how_to = (
        "run-on-a-cluster",
        "collect-rollouts",
        "wrappers-of-batches",
        "replay-buffer-of-libraries",
        "pytorch-tensors",
        "rsl-rl",
        "torchrl",
        "tianshou",
        "watch-in-the-browser",
    )
    later = ("docs/explanation/cluster.md", *(f"docs/how-to/{name}.md" for name in how_to))
    training = {name for name, text in TEXTS.items() if name.startswith("docs/tutorials/") and "torch" in needs(text)}
    pages = [text for name, text in TEXTS.items() if name.startswith("docs/") and name not in {*later, *training}]
    reference = [path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")]
    assert sum(len(prose(text).split()) for text in pages + reference) <= MAX_WORDS


def test_the_page_on_architecture_is_short():
    assert len(TEXTS["docs/explanation/architecture.md"].split()) <= MAX_ARCHITECTURE_WORDS


def test_every_page_is_in_a_toctree():
    listed = set()
    for path in [DOCS / "index.md", *PAGES, *(DOCS / "reference").glob("*.md")]:
        for _, language, code in blocks(path.read_text(encoding="utf-8")):
            if language == "{toctree}":
                entries = [line for line in code.splitlines() if line and not line.startswith(":")]
                entries = [re.sub(r".*<(.*)>", r"\1", entry) for entry in entries]
                listed |= {(path.parent / f"{entry}.md").resolve() for entry in entries}
    assert [name_of(path) for path in PAGES if path.resolve() not in listed] == []
