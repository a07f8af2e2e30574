"""`dsx bench comm` runs, prints a table, writes rows and a picture, and says what is wrong with its arguments."""

import json
import xml.etree.ElementTree

import pytest
from dsx_comm.benchmark import OPERATIONS, Row, bus_factor, floor_bytes, main, parse_size, plot, table
from dsx_comm.benchmark_plot import TimeAxis, time_text
from dsx_comm.errors import CommArgumentError


def elements(text, kind):
    return [e for e in xml.etree.ElementTree.fromstring(text).iter() if e.tag.endswith("}" + kind)]


def words_of(text):
    return [e.text for e in elements(text, "text")]


def test_it_measures_every_operation(tmp_path, capsys):
    rows, picture = tmp_path / "rows.json", tmp_path / "plot.svg"
    words = ["--sizes", "1K,4K", "--repeats", "2", "--warmup", "1", "--json", str(rows), "--plot", str(picture)]
    assert main([*words, "--backends", "dsx,gloo,dsx-symmetric"]) == 0
    text = capsys.readouterr().out
    measured = json.loads(rows.read_text())
    assert {r["op"] for r in measured} == set(OPERATIONS)
    assert all(set(r["times"]) == {"dsx", "gloo", "dsx-symmetric"} and min(r["times"].values()) > 0 for r in measured)
    assert all(op in text for op in OPERATIONS) and "x gloo" in text
    said = words_of(picture.read_text("utf-8"))
    assert set(OPERATIONS) <= set(said) and {"gloo", "dsx", "dsx-symmetric"} <= set(said)
    assert "2 ranks" in said[0] and "float32, medians of up to 2 samples" in said[1]


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


def rows_of(sizes):
    times = lambda n: {"dsx": 0.01 + n / 1e7, "gloo": 0.4 + n / 1e6}  # noqa: E731
    rows = [Row(op, n, 4, times(n), n / 2e7) for op in ("all_reduce", "send") for n in sizes]
    return [*rows, Row("barrier", sizes[0], 4, {"dsx": 0.012, "gloo": 1.5}, 0.0)]


def test_the_picture_has_a_panel_for_each_operation_with_ticks_and_labels():
    sizes = [1 << n for n in range(10, 27, 2)]
    text = plot(rows_of(sizes), "how it was measured <&>")
    said = words_of(text)
    assert {"all_reduce", "send", "barrier"} <= set(said) and said[1] == "how it was measured <&>"
    assert said.count("time per call") == 3 and said.count("bytes of the larger side") == 2
    for label in ("10 µs", "100 µs", "1 ms", "10 ms", "100 ms"):  # decades that hold all times, on every panel
        assert said.count(label) == 3, label
    for label in ("1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB"):  # five of nine sizes have a label
        assert said.count(label) == 2, label
    assert "12 µs" in said and "1.5 ms" in said  # what the barrier took, above its bars
    colours = [line.get("stroke") for line in elements(text, "polyline") if not line.get("stroke-dasharray")]
    assert len(colours) == 4 and len(set(colours)) == 2  # a line per panel and backend
    drawn = [line.get("points").split() for line in elements(text, "polyline")]
    assert [len(points) for points in drawn] == [4, 9, 9, 4, 9, 9]  # floors from 1 MiB on
    heights = [float(point.split(",")[1]) for point in drawn[2]]
    assert heights == sorted(heights, reverse=True) and heights[0] > heights[-1]  # slower is higher


def test_places_in_the_picture_are_those_of_the_values():
    axis = TimeAxis.around([0.02, 3.0])
    assert (axis.low, axis.high) == (-2, 1)
    assert [axis.share(t) for t in (0.01, 0.1, 10.0)] == pytest.approx([0.0, 1 / 3, 1.0])
    assert axis.share(1e-9) == 0.0 and axis.share(1e9) == 1.0
    assert TimeAxis.around([1.0]).ticks() == pytest.approx([1.0, 2.0, 5.0, 10.0])
    assert [time_text(t) for t in (0.0004, 0.9999, 12.34, 4000.0)] == ["0.4 µs", "1 ms", "12.3 ms", "4 s"]


def test_one_size_is_drawn_as_bars():
    text = plot(rows_of([1 << 20]))
    assert not elements(text, "polyline") and words_of(text).count("1 MiB") == 2
    assert len([e for e in elements(text, "line") if e.get("stroke-dasharray")]) == 3  # in two panels and the legend
    assert plot(rows_of([1 << 20])[:1]).startswith("<svg")
