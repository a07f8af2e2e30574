"""Every guide has what a reader needs: something to run, what to expect, what does not work, and where to go next."""

from __future__ import annotations

import re
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
