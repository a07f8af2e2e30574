"""The lessons and the end-to-end pages are followed by copy and paste, and their pictures show what happened."""

from __future__ import annotations

import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from dsx_testkit.pages import commands_of, follow, same_text, save_files

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted(ROOT.glob("docs/course/[0-9]*.md"))
NOT_HERE = {"index.md", "qlora.md"}  # qlora.md needs packages of others: test_qlora_page.py
WHOLE = sorted(path for path in ROOT.glob("docs/end-to-end/*.md") if path.name not in NOT_HERE)
PICTURES = ROOT / "docs" / "assets" / "course"
pytest.importorskip("transformers")
sys.path.insert(0, str(ROOT / "tools"))
from pictures import prepare  # noqa: E402


def bytes_by_class(picture: str) -> list[tuple[str, str]]:
    return re.findall(r"<title>(\w+): (\d+) bytes</title>", picture)


def rows(picture: str) -> list[str]:
    """What stands before bars and lanes."""
    return re.findall(r'<text x="10" y="\d+">([^<]*)</text>', picture)


SAMPLE = ("01-data-parallel", "03-zero-3")  # the others take ten minutes together
MEASURED = {"budget-plan.svg"}  # blocks are timed to choose which are computed again
FOLLOWED = [page if page.stem in SAMPLE else pytest.param(page, marks=pytest.mark.slow) for page in (*LESSONS, *WHOLE)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.stem)
def test_a_page_runs_as_it_stands_and_its_pictures_are_what_it_makes(page, tmp_path):
    prepare(page, tmp_path)
    follow(page, tmp_path, warm=page != LESSONS[0])  # the first lesson as a reader does
    shown = re.findall(r"!\[[^\]]*\]\(\.\./assets/course/([\w-]+\.svg)\)", page.read_text())
    assert shown or page in WHOLE
    for name in shown:
        kept = (PICTURES / name).read_text()
        if not (tmp_path / name).is_file():
            assert page in WHOLE, f"{name}: the lesson makes no such picture"
            continue
        made = (tmp_path / name).read_text()  # times differ from run to run, lanes and classes of bytes do not
        assert rows(made) == rows(kept), f"{name}: run python tools/pictures.py"
        if name.endswith("-run.svg"):
            assert bytes_by_class(made) == bytes_by_class(kept), name
        elif name not in MEASURED:  # a few bytes of rounding differ
            assert [c for c, _ in bytes_by_class(made)] == [c for c, _ in bytes_by_class(kept)]
            for (_, one), (_, other) in zip(bytes_by_class(made), bytes_by_class(kept)):
                assert int(one) == pytest.approx(int(other), rel=0.01), f"{name}: run python tools/pictures.py"


@pytest.mark.parametrize("page", LESSONS, ids=lambda page: page.stem)
def test_a_lesson_has_a_plan_a_run_what_was_seen_and_an_exercise_with_its_answer(page):
    text = page.read_text()
    assert re.search(r"^dsx plan .*--picture [\w-]+-plan\.svg$", "\n".join(commands_of(page)), re.M)
    assert re.search(r"^dsx report .*--picture [\w-]+-run\.svg$", "\n".join(commands_of(page)), re.M)
    assert re.search(r"-plan\.svg\)", text) and re.search(r"-run\.svg\)", text)
    seen, exercise = text.index("## What you saw"), text.index("## Exercise")
    assert seen < exercise < text.index("<summary>Answer</summary>")


def test_there_are_twelve_lessons_and_each_leads_to_the_next():
    assert [page.name[:2] for page in LESSONS] == [f"{number:02}" for number in range(1, 13)]
    for page, following in pairwise(LESSONS):
        assert f"]({following.name})" in page.read_text().rpartition("\nNext: ")[2], page.name


def test_no_recorded_run_is_kept_that_no_page_shows():
    text = "".join(page.read_text() for page in ROOT.glob("docs/**/*.md"))
    assert [file.name for file in PICTURES.glob("*.svg") if f"/{file.name})" not in text] == []


def test_a_page_that_prints_something_else_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('```python title="a.py"\nprint("loss 1.234, 7 steps")\n```\n\n```sh\npython a.py\n```\n\n'
                    "```text\nloss 1.233, 7 steps\n```\n")  # fmt: skip
    assert follow(page, tmp_path) == ["loss 1.234, 7 steps\n"]
    for wrong in ("loss 1.230, 7 steps", "loss 1.234, 8 steps", "loss 1.234"):
        assert not same_text("loss 1.234, 7 steps", wrong)
    page.write_text(page.read_text().replace("1.233", "2.233"))
    with pytest.raises(AssertionError, match=r"(?s)says.*2\.233.*printed.*1\.234"):
        follow(page, tmp_path)
    save_files([page], tmp_path)
    shutil.copy(tmp_path / "a.py", tmp_path / "b.py")
    (tmp_path / "fails.md").write_text("```sh\npython missing.py\n```\n")
    with pytest.raises(AssertionError, match=r"python missing\.py"):
        follow(tmp_path / "fails.md", tmp_path)
