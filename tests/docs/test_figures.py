"""The pages of figures and the files that benches write: they agree, and a table without its file is noticed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dsx_testkit.results import FiguresError, Record

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import figures  # noqa: E402

FILES = sorted(figures.FOLDER.glob("*.json"))
BENCHES = sorted(path for path in ROOT.glob("packages/*/bench/*.py") if not path.name.startswith("_"))
# Scripts in bench/ that measure nothing for a page: a picture, two tables that are part of the sources, and a layer.
NO_TABLE = {"offload_timeline.py", "receipt_picture.py", "cuda_kernels.py", "triton_table.py", "sleepers.py"}
WRITES = ("add_json_option(", "run_parts(", "from _measure import")


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_and_files_agree(page):
    text = page.read_text()
    assert figures.filled(text) == text, "python3 tools/dev.py figures"


def test_every_file_is_shown():
    assert len(FILES) > 30
    assert figures.unused() == []


@pytest.mark.parametrize("page", sorted(figures.FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_no_table_is_written_by_hand(page):
    by_hand = figures.MARKS.sub("", page.read_text())
    assert not re.findall(r"^\|.*", by_hand, re.M), "write it as docs/figures/NAME.json, see docs/figures.md"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_table_names_its_bench_and_command(file):
    record = Record.load(file)
    assert (ROOT / record.bench).is_file()
    assert record.bench in record.command or "tools/dev.py" in record.command
    options = re.findall(r"--[a-z-]+", record.command.replace("--nproc-per-node", ""))
    scripts = (ROOT / record.bench).parents[1].glob("*/*.py")  # options may be those of an example that a bench runs
    text = "".join(script.read_text() for script in scripts)
    assert [option for option in options if option.removeprefix("--") not in text] == []
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", record.date)
    assert record.rows and record.commit and record.machine.keys() >= {"cpu", "cores", "memory", "kernel"}
    assert record.dump() == file.read_text()


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.relative_to(ROOT / "packages").as_posix())
def test_every_bench_can_write_its_figures(bench):
    text = bench.read_text()
    assert bench.name in NO_TABLE or any(mark in text for mark in WRITES)


def test_a_bench_renews_a_page(tmp_path):
    """A bench as a user runs it, in small: its file fills in a page, with command, machine and goals."""
    script = "packages/dsx-compress/bench/sizes.py"
    file = tmp_path / "sizes.json"
    done = subprocess.run(
        [sys.executable, script, "--rows", "64", "--json", str(file)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"made by: python {script} --rows 64\n" in done.stdout
    page = "# Sizes\n\n<!-- figures: sizes -->\nan old table\n<!-- end of figures -->\n\nafter\n"
    made = figures.filled(page, tmp_path)
    assert made.startswith("# Sizes\n") and made.endswith("\n\nafter\n") and "an old table" not in made
    printed = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert printed == [line for line in made.splitlines() if line.startswith("| ") and "---" not in line]
    assert f"Made by `python {script} --rows 64` on 20" in made
    assert "- Goal: 8 bits at least 3.97x: 3.9" in made
    assert figures.filled(made, tmp_path) == made


def test_marks_without_a_file_or_an_end_are_refused(tmp_path):
    with pytest.raises(FiguresError, match=r"none\.json.*--json"):
        figures.filled("<!-- figures: none -->\n<!-- end of figures -->\n", tmp_path)
    with pytest.raises(FiguresError, match="has no `<!-- end of figures -->`"):
        figures.filled("<!-- figures: none -->\n", tmp_path)


def test_the_command_says_what_is_out_of_date(tmp_path, monkeypatch, capsys):
    """`--check` names the page, changes nothing and fails; without it the page is filled in."""
    folder, page = tmp_path / "docs" / "figures", tmp_path / "docs" / "figures.md"
    folder.mkdir(parents=True)
    (folder / "sizes.json").write_bytes((figures.FOLDER / "sizes.json").read_bytes())
    page.write_text("<!-- figures: sizes -->\n<!-- end of figures -->\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FOLDER", folder)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    before = page.read_text()
    assert figures.main() == 1 and page.read_text() == before
    assert "not up to date: docs/figures.md" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 0 and "| bits |" in page.read_text()
    (folder / "more.json").write_bytes((figures.FOLDER / "sizes.json").read_bytes())
    assert figures.main() == 1
    assert "no page shows docs/figures/more.json" in capsys.readouterr().err


def test_the_last_table_of_an_example_is_kept(tmp_path, monkeypatch, capsys):
    """An example prints two tables; the last one becomes a file, and the page that shows it is filled in."""
    folder, page, script = tmp_path / "docs" / "figures", tmp_path / "docs" / "figures.md", tmp_path / "example.py"
    folder.mkdir(parents=True)
    page.write_text("<!-- figures: speed -->\n<!-- end of figures -->\n")
    script.write_text(
        "import sys\n"
        "print('| a |\\n|---|\\n| 1 |\\n\\nmeans')\n"
        "print('| model | loss |\\n|-------|-----:|\\n| dense | 3.006 |\\n| MoE |  |')\n"
        "print('done', sys.argv[1:])\n"
    )
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FOLDER", folder)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--take", "speed", str(script), "--seeds", "2"])
    assert figures.main() == 0
    assert "done ['--seeds', '2']" in capsys.readouterr().out
    assert Record.load(folder / "speed.json").rows == [{"model": "dense", "loss": "3.006"}, {"model": "MoE"}]
    assert "| dense | 3.006 |\n| MoE |  |\n\nMade by `python example.py --seeds 2` on 20" in page.read_text()


def test_an_example_without_a_table_leaves_the_file_as_it_was(tmp_path, monkeypatch, capsys):
    folder, script = tmp_path / "docs" / "figures", tmp_path / "example.py"
    folder.mkdir(parents=True)
    (folder / "speed.json").write_text("as it was")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FOLDER", folder)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--take", "speed", str(script)])
    for text, message in [
        ("print('no table')", "has printed no Markdown table"),
        ("print('| a | a |\\n|---|---|\\n| 1 | 2 |')", "titles of their own"),
        ("print('| a |\\n|---|\\n| 1 |')\nraise SystemExit(3)", "ended with exit code 3"),
    ]:
        script.write_text(text)
        assert figures.main() == 2
        assert message in capsys.readouterr().err
        assert (folder / "speed.json").read_text() == "as it was"
    monkeypatch.setattr(sys, "argv", ["figures.py", "example.py"])
    with pytest.raises(SystemExit):
        figures.main()
