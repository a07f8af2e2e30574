"""Traces in the Trace Event Format, merged over ranks; waits and stragglers from what clocks heard."""

import json
import random
import statistics
import time
from types import SimpleNamespace

import pytest
from dsx_monitor import StragglerMonitor, Timeline, WallClock, merge_traces
from dsx_monitor.errors import ReportError
from dsx_monitor.straggler import PHASES, judge_stragglers
from dsx_monitor.timers import phase_times


def call(op="all_gather_into_tensor", nbytes=8):
    return SimpleNamespace(op=op, message=nbytes, sent=nbytes, per=2, size=2, device=SimpleNamespace(type="cpu"))


class Handle:
    """An operation that arrives when told."""

    def on_arrival(self, callback):
        self.arrive = callback


def spans_of(path, phase="X"):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


def test_ranges_calls_and_waits_become_spans_of_their_lanes(tmp_path):
    timeline = Timeline(rank=3)
    with timeline.range("forward", batch=4), timeline.range("inner"):
        token = timeline.begin(call())
        handle = Handle()
        timeline.end(token, call(), handle, True)
        with timeline.range("later"):
            time.sleep(0.001)
        handle.arrive()
        timeline.end(timeline.begin(call("reduce_scatter_tensor")), call("reduce_scatter_tensor"), None, False)
        outer, inner = timeline.begin_wait(), timeline.begin_wait()
        timeline.end_wait(inner)
        timeline.end_wait(outer)
    events = spans_of(timeline.write(tmp_path))
    found = {event["name"]: event for event in events}
    assert {name: event["cat"] for name, event in found.items()} == {
        "forward": "compute",
        "inner": "compute",
        "later": "compute",
        "all_gather_into_tensor": "gather",
        "reduce_scatter_tensor": "reduce",
        "wait": "wait",
    }
    assert len(events) == 6  # a wait inside a wait is one
    gather, later = found["all_gather_into_tensor"], found["later"]
    assert gather["ts"] <= later["ts"] and gather["ts"] + gather["dur"] >= later["ts"] + later["dur"]
    assert gather["args"] == {"bytes": 8, "sent": 4.0, "ranks": 2} and found["forward"]["args"] == {"batch": 4}
    assert all(event["pid"] == 3 for event in events) and abs(gather["ts"] / 1e6 - time.time()) < 60


def test_spans_that_overlap_get_rows_of_their_own(tmp_path):
    timeline = Timeline(rank=0)
    handles = [Handle() for _ in range(3)]
    for handle in handles[:2]:
        timeline.end(timeline.begin(call()), call(), handle, True)
    for handle in handles[:2]:
        handle.arrive()
    timeline.end(timeline.begin(call()), call(), None, False)
    path = timeline.write(tmp_path)
    first, second, third = spans_of(path)
    assert first["tid"] == third["tid"] != second["tid"]
    names = {e["tid"]: e["args"]["name"] for e in spans_of(path, "M") if e["name"] == "thread_name"}
    assert (names[first["tid"]], names[second["tid"]]) == ("gather", "gather 2")


def test_traces_of_all_ranks_merge_and_other_hosts_clocks_are_shifted(tmp_path):
    for rank in range(3):
        timeline = Timeline(rank=rank)
        timeline.mark_meeting()
        with timeline.range("step"):
            pass
        path = timeline.write(tmp_path)
        if rank == 2:  # another host, whose clock is an hour ahead
            content = json.loads(path.read_text())
            content["otherData"]["host"] = "elsewhere"
            content["otherData"]["meeting"] += 3600 * 10**9
            for event in content["traceEvents"]:
                if "ts" in event:
                    event["ts"] += 3600 * 1e6
            path.write_text(json.dumps(content))
    merged = merge_traces(tmp_path)
    events = spans_of(merged)
    assert merged == tmp_path / "trace.json" and [event["pid"] for event in events] == [0, 1, 2]
    assert max(e["ts"] for e in events) - min(e["ts"] for e in events) < 60e6
    names = {e["args"]["name"] for e in spans_of(merged, "M") if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}


def test_a_full_timeline_counts_what_it_drops(tmp_path):
    timeline = Timeline(rank=0, limit=2)
    for _ in range(5):
        with timeline.range("step"):
            pass
    assert len(timeline.spans()) == 2 and timeline.dropped == 3


def test_missing_and_broken_traces_are_named(tmp_path):
    with pytest.raises(ReportError, match="no trace/rank"):
        merge_traces(tmp_path)
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank00000.json").write_text("{}")
    with pytest.raises(ReportError, match=r"rank00000\.json is no trace"):
        merge_traces(tmp_path)


# - Waits and stragglers


def test_waits_count_once_under_the_phase_they_happen_in():
    clock = WallClock()
    with clock.range("backward"):
        outer = clock.begin_wait()
        inner = clock.begin_wait()
        time.sleep(0.01)
        clock.end_wait(inner)
        clock.end_wait(outer)
    with clock.range("step"):
        pass
    clock.end_wait(clock.begin_wait())
    elapsed = dict(clock.elapsed())
    assert set(elapsed) == {"waiting:backward", "backward", "step", "waiting:outside"}
    assert 10 <= elapsed["waiting:backward"] <= elapsed["backward"]
    reported = dict(phase_times(elapsed.items()))
    assert list(reported) == ["backward", "backward_inner", "backward_allreduce", "step"]
    assert reported["backward_allreduce"] == elapsed["waiting:backward"]
    assert reported["backward_inner"] + reported["backward_allreduce"] == pytest.approx(reported["backward"])


def test_the_slow_rank_and_its_phase_are_named_and_not_those_who_wait():
    calm = [2.0, 30.0, 60.0, 5.0]
    rows = [[*calm, 31.0], [*calm, 30.0], [2.0, 60.0, 60.0, 5.0, 1.0], [*calm, 30.5]]
    report = judge_stragglers(rows)
    assert [(s.rank, s.phase, s.own, s.middle) for s in report.found] == [(2, "forward", 60.0, 30.0)]
    assert "rank 2 holds the others up in forward: 60.0 ms" in str(report.found[0])
    assert "waiting" in report.table() and len(report.table().splitlines()) == 6
    two = judge_stragglers([[40.0, *calm[1:], 0.0], [*calm, 38.0]])
    assert [(s.rank, s.phase) for s in two.found] == [(0, "outside")]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 33])
def test_each_rank_is_compared_with_the_median_of_the_others(ranks):
    draw = random.Random(ranks)
    for _ in range(20):
        rows = [[float(draw.choice([1, 5, 5, 9, 40])) for _ in range(5)] for _ in range(ranks)]
        step = max(map(sum, rows))
        wanted = set()
        for place, phase in enumerate(PHASES):
            for rank in range(ranks):
                middle = statistics.median(row[place] for other, row in enumerate(rows) if other != rank)
                own = rows[rank][place]
                if own > 1.3 * middle and own - middle > 0.1 * step:
                    wanted.add((rank, phase, own, middle))
        found = judge_stragglers(rows).found
        assert {(s.rank, s.phase, s.own, s.middle) for s in found} == wanted


def test_small_differences_and_lone_ranks_raise_no_alarm():
    base = [1.0, 30.0, 60.0, 5.0]
    assert not judge_stragglers([[*base, 2.0], [3.0, 33.0, 66.0, 7.0, 0.0]]).found
    assert not judge_stragglers([[*base, 0.0]]).found


def test_the_monitor_smooths_and_compares_every_few_steps(monkeypatch):
    now, asked = [100.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def gather(own):
        asked.append(own)
        return [own, [0.0, 10.0, 20.0, 2.0, 18.0]]

    monitor = StragglerMonitor(gather, every=4, memory=1)
    for step in range(8):
        now[0] += 0.050  # a step of 50 ms: 10 outside, of which 3 in a wait
        elapsed = {"forward": 10.0, "backward": 28.0, "waiting:backward": 8.0, "step": 2.0, "waiting:outside": 3.0}
        report = monitor.step(elapsed.items())
        assert (report is not None) == (step in (3, 7))
    assert asked[0] == pytest.approx([7.0, 10.0, 20.0, 2.0, 11.0])
    assert [(s.rank, s.phase) for s in monitor.latest.found] == [(0, "outside")]
