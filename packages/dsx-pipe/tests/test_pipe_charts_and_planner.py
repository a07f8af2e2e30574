"""Charts are well-formed and to scale; the planner's choice is the best of a sweep and respects the memory limit."""

import itertools
import xml.etree.ElementTree as ET

import pytest
from dsx_pipe import PipelineError, plan
from dsx_pipe.cli import main
from dsx_pipe.errors import ScheduleError
from dsx_pipe.planner import LayerCost, candidates, save_costs, stage_times
from dsx_pipe.schedule import build, load_timeline, save_chart, save_timeline, simulate, svg, uniform_times

SPACE = "{http://www.w3.org/2000/svg}"


def test_svg_has_one_box_per_action_and_boxes_to_scale():
    timeline = simulate(build("zb-h1", 2, 3), uniform_times(2))
    root = ET.fromstring(svg(timeline, width=900))
    boxes = [r for r in root.iter(f"{SPACE}rect") if r.find(f"{SPACE}title") is not None]
    assert len(boxes) == 2 * 3 * 3
    widths = {float(b.get("width")) for b in boxes}
    assert widths == {900 / timeline.length}


def test_show_writes_charts_of_plans_and_of_measured_steps(tmp_path, capsys):
    chart, text = tmp_path / "a.svg", tmp_path / "own.txt"
    assert main(["show", "1f1b", "--ranks", "2", "--micro-batches", "2", "--text", "--out", str(chart)]) == 0
    out = capsys.readouterr().out
    assert "rank 1: 1F0 1B0 1F1 1B1" in out and "step 9" in out
    ET.parse(chart)
    text.write_text(out[: out.index("activations")])
    assert main(["show", "--file", str(text), "--communication", "--text"]) == 0
    assert "0SEND_F0" in capsys.readouterr().out
    measured = tmp_path / "m.json"
    timeline = simulate(build("gpipe", 2, 2), uniform_times(2))
    save_timeline(timeline, measured)
    assert load_timeline(measured) == timeline
    assert main(["show", "--timeline", str(measured), "--out", str(tmp_path / "m.svg")]) == 0


def test_png_with_pillow(tmp_path):
    pytest.importorskip("PIL")
    save_chart(simulate(build("zbv", 2, 2), uniform_times(4)), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_on_the_command_line_end_with_one_line(tmp_path, capsys):
    assert main(["show"]) == 2
    assert main(["show", "1f1b", "--out", "chart.gif"]) == 2
    assert main(["show", "--file", str(tmp_path / "none.txt")]) == 2
    (tmp_path / "bad.txt").write_text("schedule: x\nmicro_batches: 1\nstage_ranks: 0 1\nrank 0: 0F0 0B0\nrank 1: 1F0\n")
    assert main(["show", "--file", str(tmp_path / "bad.txt")]) == 2
    errors = capsys.readouterr().err
    save_timeline(simulate(build("gpipe", 1, 1), uniform_times(1)), tmp_path / "measured.json")
    assert main(["show", "--timeline", str(tmp_path / "measured.json"), "--text"]) == 2
    assert "leave them out" in capsys.readouterr().err
    assert "1B0 is missing" in errors and ".svg or .png" in errors and "Traceback" not in errors
    with pytest.raises(PipelineError, match="chart"):
        save_chart(simulate(build("gpipe", 1, 1), uniform_times(1)), "a.jpg")


LAYERS = [LayerCost(0.002 * (1 + i % 3), 0.003, 0.002, 1000, 5000, overhead=0.0005) for i in range(9)]


def test_the_choice_is_the_best_of_an_exhaustive_sweep_over_splits():
    best = plan(LAYERS, 3, 12)
    lengths = []
    for m, name in itertools.product((1, 2, 3, 4, 6, 12), ("gpipe", "1f1b", "zb-h1")):
        for cut in itertools.combinations(range(1, 9), 2):
            parts = (0, *cut, 9)
            lengths.append(simulate(build(name, 3, m), stage_times(LAYERS, parts, 12 / m)).length)
    assert len(lengths) >= 40
    assert best.seconds <= min(lengths) * 1.03


def test_the_memory_limit_holds_and_an_impossible_one_is_named():
    unlimited = candidates(LAYERS, 3, 12)
    tight = sorted({max(c.bytes_per_rank) for c in unlimited})[2]
    for c in candidates(LAYERS, 3, 12, memory=tight):
        assert max(c.bytes_per_rank) <= tight
    with pytest.raises(ScheduleError, match="the least that a candidate needs is"):
        candidates(LAYERS, 3, 12, memory=10)
    with pytest.raises(ScheduleError, match="no schedule"):
        candidates(LAYERS[:2], 3, 12)


def test_plan_command(tmp_path, capsys):
    costs, chosen = tmp_path / "costs.json", tmp_path / "plan.txt"
    save_costs(LAYERS, costs)
    assert (
        main(["plan", "--costs", str(costs), "--ranks", "3", "--batch", "12", "--memory", "1M", "--save", str(chosen)])
        == 0
    )
    assert "schedule" in capsys.readouterr().out
    assert main(["show", "--file", str(chosen)]) == 0
    costs.write_text('[{"forwards": 1}]')
    assert main(["plan", "--costs", str(costs), "--ranks", "3", "--batch", "12"]) == 2
    assert "layer 0" in capsys.readouterr().err
