"""`dsx bench comm` runs, prints a table, writes rows and a picture, and says what is wrong with its arguments."""

import json
import xml.etree.ElementTree

import pytest
from dsx_comm import CommArgumentError
from dsx_comm.benchmark import OPERATIONS, Row, bus_factor, floor_bytes, main, parse_size, plot, table


def test_it_measures_every_operation(tmp_path, capsys):
    rows, picture = tmp_path / "rows.json", tmp_path / "plot.svg"
    words = ["--sizes", "1K,4K", "--repeats", "2", "--warmup", "1", "--json", str(rows), "--plot", str(picture)]
    assert main([*words, "--backends", "dsx,gloo,dsx-symmetric"]) == 0
    text = capsys.readouterr().out
    measured = json.loads(rows.read_text())
    assert {r["op"] for r in measured} == set(OPERATIONS)
    assert all(set(r["times"]) == {"dsx", "gloo", "dsx-symmetric"} and min(r["times"].values()) > 0 for r in measured)
    assert all(op in text for op in OPERATIONS) and "x gloo" in text
    names = [e.text for e in xml.etree.ElementTree.parse(picture).getroot().iter() if e.tag.endswith("text")]
    assert "all_reduce" in names and "gloo" in names


@pytest.mark.parametrize(
    "words", [["--ops", "all_reduce,nonsense"], ["--calls", "0"], ["--sizes", "12Q"], ["--ranks", "1"]]
)
def test_wrong_arguments_are_refused(words, capsys):
    assert main(words) == 2
    assert "got" in capsys.readouterr().err


def test_the_arithmetic_of_bandwidths():
    assert parse_size("64K") == 65536 and parse_size("7") == 7
    with pytest.raises(CommArgumentError):
        parse_size("-1M")
    assert floor_bytes("all_reduce", 100, 2) == 200 and floor_bytes("reduce_scatter", 100, 2) == 150
    assert bus_factor("all_reduce", 4) == 1.5 and bus_factor("all_gather", 4) == 0.75
    row = Row("all_reduce", 1 << 20, 2, {"a": 1.0, "b": 8.0}, 0.5)
    line = table([row]).splitlines()[1].split()
    assert line[-4:] == ["8.0", "1.05", "1.05", "0.50"]
    assert plot([row]).startswith("<svg")
