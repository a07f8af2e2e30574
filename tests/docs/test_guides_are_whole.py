"""Every guide has what a reader needs: something to run, what to expect, what does not work, and where to go next."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted(ROOT.glob("docs/guides/*.md"))
# These are tables of symptoms and names, or have a form of their own.
OTHER_FORM = {"migration", "troubleshooting", "planning", "autotuning", "elasticity"}


def names(text: str, *words: str) -> bool:
    """Whether a heading, or a word in italics that opens a sentence, says this."""
    return any(re.search(rf"^## {word}|\*{word}:\*|^{word}: ", text, re.M | re.I) for word in words)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_there_is_something_to_run(page):
    kinds = set(re.findall(r"^```(\w+)", page.read_text(), re.M))
    assert kinds & {"python", "sh"}


@pytest.mark.parametrize("page", [p for p in GUIDES if p.stem not in OTHER_FORM], ids=lambda page: page.stem)
def test_a_guide_says_what_to_expect_what_does_not_work_and_where_to_go(page):
    text = page.read_text()
    assert names(text, "What to expect", "How much to expect"), "what to expect"
    assert names(text, "What does not work", "Does not work"), "what does not work"
    assert re.search(r"^Next: |[.)] Next: ", text, re.M), "where next"


def test_pictures_and_the_pages_that_show_them_agree():
    """A page shows a file that is there, with a text for those who cannot see it; and no picture is without a page."""
    shown = set()
    for page in ROOT.glob("docs/**/*.md"):
        for text, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text()):
            assert text and (page.parent / target).is_file(), (page.name, target)
            shown.add((page.parent / target).resolve())
    assert {file for file in ROOT.glob("docs/assets/*.svg")} - shown == set()


def test_optimizers_that_pages_name_exist():
    import dsx_ops

    pages = [*GUIDES, *sorted(ROOT.glob("packages/*/README.md"))]
    named = {name for page in pages for name in re.findall(r"`((?:Fused|CPU)(?:Ada|L)\w+|Adam8bit)`", page.read_text())}
    assert named and sorted(name for name in named if not hasattr(dsx_ops, name)) == []


def test_everything_is_dsx_and_what_it_needs_and_no_module_named_deepspeed():
    """A glob over the packages would install dsx-compat, which other libraries take for DeepSpeed."""
    sys.path.insert(0, str(ROOT / "ci"))
    from workspace import all_packages, closure

    install = (ROOT / "docs" / "start" / "install.md").read_text().replace("\\\n", " ")
    readme = re.search(r"^\| everything \| `(.*)` \|$", (ROOT / "README.md").read_text(), re.M)[1]
    commands = [readme, *re.findall(r"^pip (?:install|wheel) .*\./packages/dsx .*$", install, re.M)]
    assert len(commands) == 3
    for command in commands:
        assert sorted(re.findall(r"\./packages/(\S+)", command)) == sorted(closure("dsx", all_packages()))
    assert "./packages/*" not in install
