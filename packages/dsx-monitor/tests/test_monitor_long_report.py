"""The report of a long run: what is kept while it is read does not grow with the run, and extremes stay."""

import itertools
import math

from dsx_monitor import write_report
from dsx_monitor.report.curve import Curve, Pieces
from dsx_monitor.report.read import read_run

NAN_AT, TOP_AT, BOTTOM_AT, STEPS = 700_001, 123_457, 999_998, 1_000_000


def value(step: int) -> float:
    return {NAN_AT: math.nan, TOP_AT: 99.0, BOTTOM_AT: -99.0}.get(step, (step * 7919) % 1009 / 1009)


def drawn_steps(curve: Curve) -> list[float]:
    """The steps of the points that are drawn: in order, not too many, spread over all steps, with both ends."""
    steps = [curve.steps[i] for i in curve.thinned(2000)]
    last = curve.count - 1
    assert len(steps) < 2100 and steps == sorted(steps) and (steps[0], steps[-1]) == (0, last)
    shares = [sum(1 for step in steps if step * 20 // curve.count == part) for part in range(20)]
    assert min(shares) > 45 and max(shares) < 110
    return steps


def test_a_million_steps_are_kept_as_some_thousand_points():
    curve, most = Curve("x"), 0
    for step in range(STEPS):
        curve.add(step, value(step), step + 0.5)
        most = max(most, len(curve.numbers))
    assert curve.count == STEPS and most <= 16384
    assert len(curve.steps) == len(curve.values) == len(curve.times) == len(curve.numbers)
    assert {NAN_AT, TOP_AT, BOTTOM_AT} <= set(drawn_steps(curve))
    assert all(time == step + 0.5 for step, time in zip(curve.steps, curve.times))


def test_a_file_is_read_into_few_points(tmp_path):
    with (tmp_path / "events.jsonl").open("w") as file:
        for step in range(40_000):
            file.write(f'{{"label": "train_loss", "value": {step * 7919 % 1009}, "step": {step}, "time": {step}}}\n')
    ((_, curve),) = read_run(tmp_path).curves["train_loss"].runs
    assert curve.count == 40_000 and len(curve.steps) <= 16384 and drawn_steps(curve)
    assert len(write_report(tmp_path).read_text()) < 300_000


def test_memory_is_bounded_at_every_moment():
    curve, most = Curve("x"), 0
    for step in range(100_000):
        curve.add(step, math.nan if step % 3 else float(step % 1009))  # most are not finite
        most = max(most, len(curve.steps))
    assert most <= 16384 and curve.times == []


def test_each_stretch_that_is_drawn_has_its_own_extremes():
    curve = Curve("x")
    for step in range(300_000):
        curve.add(step, value(step))
    drawn = {curve.numbers[i]: curve.values[i] for i in curve.thinned(2000)}
    stretch = -(-300 // curve.stretch) * curve.stretch  # 300 000 points in at most 1000 stretches
    assert curve.stretch > 1 and stretch < 600
    for first in range(0, 300_000, stretch):
        part = range(first, min(first + stretch, 300_000))
        inside, real = [drawn[number] for number in part if number in drawn], [value(step) for step in part]
        real = [one for one in real if math.isfinite(one)]
        assert (min(inside), max(inside)) == (min(real), max(real))


def test_short_curves_are_kept_whole():
    curve = Curve("x")
    for step in range(2000):
        curve.add(step, value(step), step)
    assert curve.thinned(2000) == list(range(2000)) and curve.values == [value(step) for step in range(2000)]


def test_a_run_that_went_back_by_one_step_after_a_long_time_is_cut_there():
    pieces = Pieces("x", [0.0, 50_000.0])
    for time, step in enumerate(itertools.chain(range(50_000), range(49_998, 90_000))):
        pieces.add(step, 1.0, float(time))
    (first, one), (second, other) = pieces.runs
    assert (
        (first, second) == (1, 2) and (one.steps[-1], other.steps[0]) == (49_999, 49_998) and other.steps[-1] == 89_999
    )
