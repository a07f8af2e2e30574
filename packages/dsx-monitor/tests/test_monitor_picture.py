"""Pictures of a step: what a run has recorded is drawn to the byte and to the span; what is missing is said."""

import re
from xml.etree import ElementTree

import pytest
from dsx_monitor import Timeline, start_run
from dsx_monitor.errors import ReportError
from dsx_monitor.monitor import JSONLMonitor
from dsx_monitor.picture import Bar, Lane, run_picture, step_picture


def shapes(picture):
    """[(kind, x, width, title)] of every shape that has a title."""
    root = ElementTree.fromstring(picture)
    name = "{http://www.w3.org/2000/svg}"
    return [
        (r.get("class"), float(r.get("x")), float(r.get("width")), r.find(f"{name}title").text)
        for r in root.iter(f"{name}rect")
        if r.find(f"{name}title") is not None
    ]


def test_bars_share_a_scale_and_lanes_an_axis():
    bars = [Bar("a", {"params": 100, "grads": 300}), Bar("b", {"parameters": 200, "unheard of": 200})]
    lanes = [Lane("compute", [("forward", "forward", 5.0, 6.0), ("step", "step", 8.0, 9.0)])]
    found = shapes(step_picture("A < B", bars, lanes))
    widths = {title: width for _, _, width, title in found}
    assert widths["gradients: 300 bytes"] == pytest.approx(3 * widths["parameters: 100 bytes"], rel=1e-2)
    assert widths["parameters: 200 bytes"] == pytest.approx(widths["workspace: 200 bytes"], rel=1e-2)
    (forward,) = [one for one in found if one[0] == "forward" and one[3].startswith("forward,")]
    (step,) = [one for one in found if one[3].startswith("step,")]
    assert step[1] - forward[1] == pytest.approx(3 * forward[2], rel=1e-2) and forward[3] == "forward, 1000.000 ms"


def test_the_key_tells_messages_apart_where_one_lane_has_both_kinds():
    gather, reduce = ("gather", "all_gather", 0.0, 1.0), ("reduce", "reduce_scatter", 1.0, 2.0)
    mixed = step_picture("t", [], [Lane("messages", [gather, reduce])])
    apart = step_picture("t", [], [Lane("all-gather", [gather]), Lane("reduce-scatter", [reduce])])
    assert ">gather</text>" in mixed and ">reduce</text>" in mixed
    assert ">gather</text>" not in apart and ">reduce</text>" not in apart


def test_a_class_has_one_name_by_whatever_name_a_recorder_or_the_planner_calls_it():
    recorded = {"params": 1, "master": 2, "grads": 3, "optimizer": 4, "model buffers": 5}
    planned = {"parameters": 1, "masters": 2, "gradients": 3, "states": 4, "buffers": 5}
    left, right = (shapes(step_picture("t", [Bar("x", parts)], [])) for parts in (recorded, planned))
    assert left == right and not any("workspace" in one[3] for one in left)
    assert [one[3] for one in left][1] == "master: 2 bytes"


def test_a_generator_has_colours_of_its_own_in_pictures_that_have_one():
    picture = step_picture("t", [Bar("push", {"params": 1, "generator": 2, "keys and values": 3})], [])
    assert [one[0] for one in shapes(picture)] == ["forward", "generator", "cache"]
    assert picture.count(".generator{fill:") == picture.count(".cache{fill:") == 2  # light and dark
    assert ".generator" not in step_picture("t", [Bar("train", {"params": 1})], [])


def test_everything_stays_inside_the_picture():
    kinds = ("params", "master", "grads", "optimizer", "activations", "x", "buffers", "generator", "keys and values")
    bars = [Bar("wide", dict.fromkeys(kinds, 1e9))]
    lanes = [Lane("compute", [("forward", "f", 0.0, 1e-9), ("backward", "b", 1.0, 2.0)])]
    root = ElementTree.fromstring(step_picture("t", bars, lanes))
    width, height = map(float, root.get("viewBox").split()[2:])
    for one in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(one.get("x")) + float(one.get("width")) <= width
        assert float(one.get("y")) + float(one.get("height")) <= height
    for one in root.iter("{http://www.w3.org/2000/svg}text"):  # about seven units a letter
        extent = 7 * len(one.text) * {"middle": 0.5, "end": 0.0}.get(one.get("text-anchor"), 1.0)
        assert float(one.get("x")) + extent <= width, one.text


def test_a_run_is_drawn_from_its_last_step(tmp_path):
    start_run(tmp_path, title="mine")
    monitor = JSONLMonitor({"enabled": True, "output_path": str(tmp_path), "job_name": ""})
    for step, nbytes in ((1, 10.0), (2, 4096.0)):
        monitor.write_events([("Train/Memory/params", nbytes, step), ("Train/Memory/other", 1e9, step)])
    monitor.close()
    timeline = Timeline(0)
    for name in ("forward", "backward", "step", "forward", "backward"):
        with timeline.range(name):
            pass
    with timeline.range("all_gather", lane="gather"):
        pass
    with timeline.range("step"):
        pass
    timeline.write(tmp_path)
    found = shapes(run_picture(tmp_path))
    assert [title for *_, title in found if "bytes" in title] == ["parameters: 4096 bytes"]
    kinds = [kind for kind, _, _, title in found if "bytes" not in title]
    assert kinds == ["forward", "backward", "step", "gather"], "the second step only"


def test_nothing_recorded_is_an_error_that_names_the_sections(tmp_path):
    start_run(tmp_path, title="empty")
    monitor = JSONLMonitor({"enabled": True, "output_path": str(tmp_path), "job_name": ""})
    monitor.write_events([("Train/loss", 1.0, 1)])
    monitor.close()
    with pytest.raises(ReportError, match=r"'memory_breakdown'.*'timeline'"):
        run_picture(tmp_path)
    with pytest.raises(ReportError, match="neither bytes nor spans"):
        step_picture("t", [Bar("a", {"params": 0})], [Lane("x", [])])
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank00000.json").write_text("{}")
    with pytest.raises(ReportError, match="no trace"):
        run_picture(tmp_path)


def test_titles_are_escaped():
    assert re.search(r"<text[^>]*>A &lt; B</text>", step_picture("A < B", [Bar("x", {"params": 1})], []))
