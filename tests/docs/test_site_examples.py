"""The example programs are on the site: each has a page with its whole text, and the list links to it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "site"))
from hooks import example_pages  # noqa: E402

PAGES = example_pages()


def test_every_program_has_a_page_with_its_text():
    programs = sorted(ROOT.glob("packages/*/examples/*.py"))
    assert len(PAGES) == len(programs) + 1
    for program in programs:
        page = PAGES[f"examples/{program.parents[1].name}-{program.stem}.md"]
        assert program.read_text().rstrip() in page and page.startswith(f"# {program.stem}\n\n")


def test_the_list_links_to_every_program_that_it_names():
    listed = PAGES["examples/index.md"]
    linked = re.findall(r"\| \[`[^`]+\.py`\]\((\S+\.md)\)", listed)
    assert len(linked) > 15 and all(f"examples/{page}" in PAGES for page in linked)
    assert re.findall(r"^\| `[^`]+\.py`", listed, re.M) == ["| `elastic/train.py`"], "it is several files"
