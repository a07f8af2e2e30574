"""Tables of benches: what they print, what they write, and what a file of figures must have."""

import json
import subprocess
import sys

import pytest
from dsx_testkit import results
from dsx_testkit.results import FiguresError, Record, Table


def test_rows_are_printed_as_they_come_and_kept_as_numbers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--steps", "5", "--json", "out.json"])
    table = Table({"system": "", "ms": "{:.1f}", "ratio": "{:.2f}x"})
    table.add("ours", 12.345, 2)
    assert capsys.readouterr().out == (
        "\nmade by: python bench.py --steps 5\n\n| system | ms | ratio |\n|---|---|---|\n| ours | 12.3 | 2.00x |\n"
    )
    table.add("theirs", 24.0)
    table.add("broken", "did not run")
    table.goal("at least 1.5x", "2.00x", met=True)
    table.goal("at most 3 ms", met=False)
    table.add("last", 1)
    table.save(tmp_path / "out.json")
    assert capsys.readouterr().out.splitlines() == [
        "| theirs | 24.0 |  |",
        "| broken | did not run |  |",
        "| last | 1.0 |  |",
        "",
        "- Goal: at least 1.5x: 2.00x, met.",
        "- Goal: at most 3 ms: missed.",
    ]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["rows"] == [
        {"system": "ours", "ms": 12.345, "ratio": 2},
        {"system": "theirs", "ms": 24.0},
        {"system": "broken", "ms": "did not run"},
        {"system": "last", "ms": 1},
    ]
    assert found["command"] == "python bench.py --steps 5" and found["bench"] == "bench.py"
    assert found["machine"].keys() >= {"cpu", "cores", "memory", "kernel"} and "torch" in found["versions"]
    assert found["goals"][0] == {"goal": "at least 1.5x", "measured": "2.00x", "met": True}


def test_a_file_that_was_written_reads_the_same(tmp_path):
    table = Table({"a": "", "b": "{:+,.1f} %"}, "part")
    table.add("x | y", -1234.56)
    table.add(None, True)
    table.goal("small")
    table.save(tmp_path / "bench.json")
    table.save(None)  # without --json nothing is written
    assert [path.name for path in tmp_path.iterdir()] == ["bench-part.json"]
    record = Record.load(tmp_path / "bench-part.json")
    assert record == table.record()
    assert record.dump() == (tmp_path / "bench-part.json").read_text()
    assert record.cells(record.rows[0]) == ["x | y", "-1,234.6 %"]
    assert record.cells(record.rows[1]) == ["", "True"]
    assert record.table().splitlines()[2] == r"| x \| y | -1,234.6 % |"


def test_more_cells_than_columns_are_refused(capsys):
    with pytest.raises(ValueError, match="a row of 2 cells, expected at most 1"):
        Table({"a": ""}).add(1, 2)
    assert capsys.readouterr().out == ""


def test_the_command_is_one_that_others_can_type(monkeypatch):
    words = ["bench.py", "--folder", "/scratch/a b", "--json=x.json", "--only", "stage 2", "--json", "y.json", "--last"]
    monkeypatch.setattr(sys, "argv", words)
    assert results.command(sys.argv) == "python bench.py --folder PATH --only 'stage 2' --last"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert results.command(sys.argv).startswith("torchrun --nproc-per-node 4 bench.py --folder")


def test_a_bench_of_a_checkout_records_its_commit(tmp_path, monkeypatch):
    """The script by its path from the root, the commit, and whether the code has been changed since."""
    bench = tmp_path / "packages" / "own" / "bench" / "speed.py"
    bench.parent.mkdir(parents=True)
    bench.write_text("")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "dev.py").write_text("")
    monkeypatch.setattr(sys, "argv", [str(bench)])
    assert results.script(sys.argv) == "packages/own/bench/speed.py"
    assert results.commit(sys.argv) == "not recorded"  # no git here

    def git(*words):
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "--short=12", "HEAD").strip()
    assert results.commit(sys.argv) == head
    (tmp_path / "figures.json").write_text("{}")  # what benches write is no change of the code
    assert results.commit(sys.argv) == head
    bench.write_text("changed = True\n")
    assert results.commit(sys.argv) == f"{head}, with changes"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("command"), "expected .*'command'"),
        (lambda found: found.update(extra=1), "got the keys .*'extra'"),
        (lambda found: found["rows"].append({"b": 1}), r"cells of unknown columns \['b'\]; there are \['a'\]"),
    ],
    ids=["missing", "unknown", "column"],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, change, message):
    table = Table({"a": ""})
    table.add(1)
    table.save(tmp_path / "x.json")
    found = json.loads((tmp_path / "x.json").read_text())
    change(found)
    (tmp_path / "x.json").write_text(json.dumps(found))
    with pytest.raises(FiguresError, match=message):
        Record.load(tmp_path / "x.json")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(FiguresError, match="a bench writes such a file with --json"):
        Record.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(FiguresError, match=r"bad\.json"):
        Record.load(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(FiguresError, match="got the keys list"):
        Record.load(tmp_path / "list.json")


def test_an_entry_by_the_name_of_a_peer_is_not_recorded_as_the_peer(tmp_path, monkeypatch):
    for name, summary in (("deepspeed", "Not DeepSpeed: its interface"), ("accelerate", "Accelerate")):
        folder = tmp_path / f"{name}-9.9.9.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9.9\nSummary: {summary}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = results.versions()
    assert found["accelerate"] == "9.9.9" and "deepspeed" not in found
