"""The command line: analysis, picture, resume, conversion, and mistakes that are named."""

import sys

import numpy as np
import pytest
from dsx_data import MMapIndexedDataset, open_index
from dsx_data.cli import main
from dsx_data.index import MMapIndexedDatasetBuilder
from dsx_data.sources import TextLines

LINES = ["a", "", "hello world", "zz" * 30, "ünï"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("\n".join(LINES), encoding="utf-8")
    return path


def test_analyze_writes_indexes_and_pictures(text, tmp_path, capsys):
    out = tmp_path / "out"
    code = main(
        ["analyze", str(text), "-o", str(out), "--metrics", "seqlen,vocabularyrarity", "--vocabulary-size", "256"]
    )
    shown = capsys.readouterr()
    assert code == 0 and "seqlen: 5 samples, from 0 to 60, median 5" in shown.out
    assert "analysing [########################] 100% 5/5 samples" in shown.err
    lengths = [len(line.encode()) for line in LINES]
    assert open_index(out / "seqlen" / "seqlen_sample_to_metric").values.tolist() == lengths
    assert len(open_index(out / "vocabularyrarity" / "vocabularyrarity_sample_to_metric").values) == 5
    assert (out / "seqlen" / "seqlen.svg").read_text().startswith("<svg")
    picture = tmp_path / "p.svg"
    assert main(["picture", str(out / "seqlen" / "seqlen_sample_to_metric"), "-o", str(picture), "--bins", "5"]) == 0
    assert "seqlen: 5 samples" in picture.read_text()
    assert main(["info", "--verify", str(out / "seqlen" / "seqlen_index_to_sample")]) == 0
    assert "5 values, longest row 1" in (shown := capsys.readouterr().out) and "checksums fit" in shown


def test_workers_share_the_work_and_the_last_one_merges(text, tmp_path, capsys):
    base = ["analyze", str(text), "-o", str(tmp_path / "o"), "--quiet", "--no-picture", "--workers", "2"]
    assert main([*base, "--worker-id", "1"]) == 0 and "parts of other workers are missing" in capsys.readouterr().out
    assert main([*base, "--worker-id", "0"]) == 0 and "seqlen: 5 samples" in capsys.readouterr().out


def test_conversion_goes_both_ways(tmp_path, capsys):
    builder = MMapIndexedDatasetBuilder(tmp_path / "a.bin", np.uint16)
    for row in ([1, 2], [], [3]):
        builder.add_item(row)
    builder.end_document()
    builder.finalize(tmp_path / "a.idx")
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b.dsxi")]) == 0
    assert main(["convert", str(tmp_path / "b.dsxi"), str(tmp_path / "c")]) == 0
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "d")]) == 0
    for found in (open_index(tmp_path / "b"), open_index(tmp_path / "c")):
        assert [found[i].tolist() for i in range(3)] == [[1, 2], [], [3]] and found.dtype == np.uint16
    assert (tmp_path / "d.idx").read_bytes() == (tmp_path / "a.idx").read_bytes()
    assert MMapIndexedDataset(tmp_path / "d").doc_idx.tolist() == [0, 3]
    assert main(["info", str(tmp_path / "a")]) == 0 and "indexed dataset (Megatron): 3 rows" in capsys.readouterr().out


def test_schedule_prints_the_steps_at_which_it_changes(capsys):
    assert main(["schedule", "fixed_linear", "--min", "8", "--max", "32", "--steps", "6"]) == 0
    assert capsys.readouterr().out == "step 1: 8\nstep 2: 16\nstep 4: 24\nstep 6: 32\n"


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["info", "nothing"], "there is no index; expected the file nothing.dsxi"),
        (["analyze", "no_module:x", "-o", "o"], "No module named 'no_module'"),
        (["analyze", "json:dumps2", "-o", "o"], "has no attribute 'dumps2'"),
        (["analyze", "{text}", "-o", "o", "--metrics", "beauty"], "expected seqlen, vocabularyrarity or both"),
        (["analyze", "{text}", "-o", "o", "--metrics", "vocabularyrarity"], "--vocabulary-size: got nothing"),
    ],
)
def test_mistakes_are_named_and_end_with_two(arguments, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "t.txt"
    file.write_text("x\n")
    assert main([a.replace("{text}", str(file)) for a in arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"dsx-data {arguments[0]}: ") and text in shown and "Traceback" not in shown


def test_a_module_beside_the_user_is_a_dataset(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_data_of_test.py").write_text("def rows():\n    return [[1, 2], [3]]\n")
    path = list(sys.path)
    assert main(["analyze", "my_data_of_test:rows", "-o", "o", "--quiet"]) == 0 and sys.path == path
    assert open_index("o/seqlen/seqlen_sample_to_metric").values.tolist() == [2, 1]


def test_lines_are_mapped_bytes(text):
    lines = TextLines(text)
    assert [bytes(lines[i]).decode() for i in range(len(lines))] == LINES
    with pytest.raises(IndexError, match="it has 5 lines"):
        lines[5]
