"""The folder of a search: one tuner at a time, results of something else are refused, a killed write loses one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from dsx_plan.autotuning import AutotuningError
from dsx_plan.autotuning.journal import Journal, only_tuner

ABOUT = {"script": "/a.py", "ranks": 2, "configuration fp16.enabled": True}


def test_a_journal_is_gone_on_with(tmp_path):
    journal = Journal.open(tmp_path, ABOUT, overwrite=False)
    journal.add({"event": "begun", "key": "k"})
    journal.add({"event": "ended", "key": "k", "metrics": {"latency": 1.0}})
    again = Journal.open(tmp_path, ABOUT, overwrite=False)
    assert again.entries == journal.entries and again.ended("k")["metrics"] == {"latency": 1.0}
    assert again.ended("other") is None and again.unfinished("k") == 0


def test_an_experiment_that_took_the_tuner_with_it_is_known(tmp_path):
    journal = Journal.open(tmp_path, ABOUT, overwrite=False)
    for event in ("begun", "begun", "stopped", "begun"):
        journal.add({"event": event, "key": "k"})
    assert Journal.open(tmp_path, ABOUT, overwrite=False).unfinished("k") == 2


@pytest.mark.parametrize(
    "other",
    [
        {**ABOUT, "script": "/b.py"},
        {**ABOUT, "configuration fp16.enabled": False},
        {"script": "/a.py", "ranks": 2},
        {**ABOUT, "configuration gradient_clipping": 1.0},
    ],
)
def test_results_of_something_else_are_refused_and_kept(tmp_path, other):
    before = Journal.open(tmp_path, ABOUT, overwrite=False)
    before.add({"event": "ended", "key": "k", "metrics": {"latency": 1.0}})
    text = (tmp_path / "journal.jsonl").read_text()
    (changed,) = [key for key in {**ABOUT, **other} if ABOUT.get(key) != other.get(key)]
    with pytest.raises(AutotuningError, match=f"another search .{changed}.*overwrite") as caught:
        Journal.open(tmp_path, other, overwrite=False)
    assert str(tmp_path) in str(caught.value) and (tmp_path / "journal.jsonl").read_text() == text
    second = Journal.open(tmp_path, other, overwrite=True)
    assert second.entries[0]["about"] == other and (tmp_path / "journal.1.jsonl").read_text() == text
    assert before.entries[0]["about"] == ABOUT


def test_a_journal_without_a_measurement_makes_room(tmp_path):
    failed = Journal.open(tmp_path, ABOUT, overwrite=False)
    failed.add({"event": "ended", "key": "k", "metrics": None, "reason": "never called initialize"})
    second = Journal.open(tmp_path, {**ABOUT, "ranks": 4}, overwrite=False)
    assert [one["event"] for one in second.entries] == ["search"] and (tmp_path / "journal.1.jsonl").exists()


def test_a_line_that_was_cut_off_is_dropped_and_a_broken_one_is_named(tmp_path):
    journal = Journal.open(tmp_path, ABOUT, overwrite=False)
    journal.add({"event": "begun", "key": "k"})
    path = tmp_path / "journal.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"event": "end')
    again = Journal.open(tmp_path, ABOUT, overwrite=False)
    again.add({"event": "ended", "key": "k"})
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["search", "begun", "ended"]
    path.write_text("nonsense\n" + whole)
    with pytest.raises(AutotuningError, match="line 1 is not JSON"):
        Journal.open(tmp_path, ABOUT, overwrite=False)


def test_two_tuners_do_not_share_a_folder(tmp_path):
    code = f"""
from pathlib import Path
from dsx_plan.autotuning import AutotuningError
from dsx_plan.autotuning.journal import only_tuner
try:
    with only_tuner(Path({str(tmp_path)!r})):
        print("entered")
except AutotuningError as error:
    print(error)
"""

    def other():
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    import os

    with only_tuner(tmp_path):
        said = other()
        assert "another tuner" in said and str(os.getpid()) in said and "results_dir" in said
    assert other() == "entered\n"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AutotuningError, match="results_dir"), only_tuner(tmp_path / "file" / "results"):
        pass
