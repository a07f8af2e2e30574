"""Every page has a picture, or a reason why not; no source of a diagram is shown; no sentence in a table is cut."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "site")]
import hooks  # noqa: E402
import page_pictures  # noqa: E402

TABLE = "it is read by looking up a row"
MEASURED = "it is tables of measured figures, made from files"
WORDS = "it is a list of commands to copy, in their order"
REASONS = {
    "CONTRIBUTING.md": WORDS,
    "architecture.md": "its map of the packages is a table, which the tests hold against the packages",
    "checkpoint-format.md": "it is a format, field by field",
    "config.md": TABLE,
    "contributing/extending.md": "it is code to begin from",
    "end-to-end/index.md": "its drawing of the way is text",
    "end-to-end/preferences.md": "its result is numbers; the course draws what happens at stage 3",
    "end-to-end/qlora.md": "its result is numbers; the course draws what happens at stage 3",
    "end-to-end/serve.md": "it is about files",
    "figures.md": MEASURED,
    **{f"figures/{name}.md": MEASURED for name in (
        "communication", "compression", "disk", "kernels", "memory", "monitoring", "pipelines", "training", "tried"
    )},
    "guides/accumulation.md": "it is about the order of four calls, which its code shows",
    "guides/autotuning.md": "a search prints a table",
    "guides/debugging.md": "it goes from symptom to command",
    "guides/device-without-gpu.md": "it shows the texts of reports",
    "guides/disk-io.md": "the timeline of its transfers is on the page about offload",
    "guides/interoperation.md": TABLE,
    "guides/megatron.md": "it is about names of arguments",
    "guides/migration.md": "it is code before and after",
    "guides/ops.md": TABLE,
    "guides/scale-groups.md": TABLE,
    "guides/scale.md": TABLE,
    "guides/sparse-attention.md": "`dsx sparse show` draws the layout that the reader has",
    "guides/trainers.md": TABLE,
    "guides/troubleshooting.md": "it goes from symptom to cause",
    "launcher.md": WORDS,
    "log.md": "it is a list of open points",
    "ports.md": TABLE,
    "reference/commands.md": TABLE,
    "reference/compatibility.md": TABLE,
    "reference/environment.md": TABLE,
    "reference/errors.md": TABLE,
    "reference/releases.md": WORDS,
    "reference/support.md": TABLE,
    "start/first-run.md": "its third step is to look at a report that the reader has made",
    "start/install.md": WORDS,
    "start/machines.md": WORDS,
    "verify.md": TABLE,
}  # fmt: skip
DIAGRAM = re.compile(r"^ *(graph (TD|LR|TB)|flowchart |sequenceDiagram|digraph |@startuml|gantt$)", re.M)
END = re.compile(r"[.:!?)`]$")


def test_a_page_has_a_picture_or_a_reason():
    without = {
        page.relative_to(DOCS).as_posix()
        for page in DOCS.glob("**/*.md")
        if page.parent.name != "decisions" and not re.search(r"!\[[^\]]+\]\([^)\s]+\)", page.read_text())
    }  # decisions are records in words
    assert without - set(REASONS) == set(), "give the page a picture, or a reason here"
    assert set(REASONS) - without == set(), "these have a picture, or are gone: take the reason out"


PLANNED = {"between-nodes.svg", "one-bit.svg", "matrices.svg", "fine-tune.svg"}  # plans take ten seconds each


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in PLANNED else ()) for n in page_pictures.PICTURES]
)
def test_pictures_of_guides_are_what_dsx_says_now(name):
    if name == "fine-tune.svg":
        pytest.importorskip("transformers")
    drawn = page_pictures.PICTURES[name]()
    assert (DOCS / "assets" / name).read_text() == drawn, "run python tools/pictures.py"
    assert "prefers-color-scheme: dark" in drawn


def test_no_source_of_a_diagram_is_shown():
    pages = [*DOCS.glob("**/*.md"), ROOT / "README.md", *ROOT.glob("packages/*/README.md")]
    assert [page.name for page in pages if DIAGRAM.search(page.read_text())] == []
    assert DIAGRAM.search("text\ngraph TD\n  a --> b\n") and not DIAGRAM.search("a graph of steps\n")


def said_in(rows: str) -> list[str]:
    """The last cell with words of each row of a table."""
    found = []
    for row in re.findall(r"^\| \[.*\|$", rows, re.M):
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        found.append(cells[2].strip())
    return found


def test_no_sentence_of_the_lists_is_cut():
    """The lists of packages and modules show a first sentence: it ends, and its brackets and quotes are closed."""
    lists = [hooks.api_pages()["reference/api/index.md"], hooks.package_pages()["packages/index.md"]]
    sentences = [one for text in lists for one in said_in(text)]
    assert len(sentences) > 30
    cut = [one for one in sentences if not END.search(one) or one.count("(") != one.count(")") or one.count("`") % 2]
    assert cut == []
    assert not END.search("Makes wheels of a"), "a sentence that is cut is seen"
