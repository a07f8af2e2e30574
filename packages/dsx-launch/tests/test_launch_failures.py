"""Which failure is the cause, how it is shown, and that death by signal is never success."""

import json

from dsx_launch.failures import RankFailure, first_cause, from_json, read_records, render, shell_code, to_json


def failure(rank: int, time: float, *, exitcode: int = 1, kind: str = "", message: str = "") -> RankFailure:
    text = f"Traceback (most recent call last):\n  somewhere\n{kind}: {message}\n" if kind else ""
    return RankFailure(rank=rank, host="h", time=time, exitcode=exitcode, type=kind, message=message, traceback=text)


def test_the_cause_comes_before_broken_connections_whatever_the_clock_says():
    gone = failure(0, 1.0, kind="RuntimeError", message="[pair.cc:553] Connection closed by peer [10.0.0.1]:4242")
    cause = failure(3, 1.2, kind="ValueError", message="bad sample")
    killed = failure(2, 1.5, exitcode=-9)
    assert first_cause([gone, killed, cause]) is cause
    assert first_cause([gone, killed]) is killed
    assert first_cause([gone]) is gone
    assert first_cause([]) is None


def test_the_report_shows_one_traceback_and_one_line_for_each_other():
    cause = failure(3, 1.2, kind="ValueError", message="bad sample")
    gone = failure(0, 1.0, kind="RuntimeError", message="Connection closed by peer")
    same = failure(1, 1.3, kind="ValueError", message="bad sample")
    lines = render(cause, [gone, same]).splitlines()
    assert lines[0] == "[rank 3] Traceback (most recent call last):"
    assert lines[2] == "[rank 3] ValueError: bad sample"
    assert "the same on rank 1" in lines[4]
    assert "rank 0 failed after it: RuntimeError" in lines[5]
    assert len(lines) == 6


def test_exit_codes():
    assert shell_code(0) == 0
    assert shell_code(7) == 7
    assert shell_code(-9) == 137
    assert shell_code(256) == 1


def test_records_travel_and_are_read(tmp_path):
    first = failure(3, 1.25, kind="KeyError", message="'ü'")
    assert from_json(to_json(first)) == first
    record = {"rank": 3, "local_rank": 1, "pid": 5, "time": 2.0, "type": "E", "message": "m", "traceback": "t"}
    (tmp_path / "rank3.json").write_text(json.dumps(record))
    (tmp_path / "rank4.json.part").write_text("{")
    (found,) = read_records(tmp_path, host="h")
    assert (found.rank, found.exitcode, found.type) == (3, 1, "E")
