"""The reference page is what the schema says, today."""

from __future__ import annotations

from pathlib import Path

import pytest
from dsx.config.availability import MEANINGLESS
from dsx.config.reference import reference
from dsx.config.sections import judged, whole_model
from dsx.config.translate import all_paths

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


@pytest.mark.skipif(not PAGE.parent.is_dir(), reason="outside of the repository there is no docs folder")
def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: python -m dsx.config reference > docs/config.md"


def test_the_page_lists_every_key_and_every_state():
    page = reference()
    for path in all_paths(whole_model()):
        assert f"| `{path.rsplit('.', 1)[-1]}` |" in page
    for text in {*judged(whole_model(), "NOT_YET").values()}:
        assert f"not available: {text}" in page
    for text in {*MEANINGLESS.values(), *judged(whole_model(), "NO_EFFECT").values()}:
        assert f"no effect: {text}" in page


def test_the_page_is_printed_by_the_command(capsys):
    from dsx.config.cli import main

    assert main(["reference"]) == 0
    assert capsys.readouterr().out == reference()
