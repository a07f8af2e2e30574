"""The line in the launcher's log that says where the time from a loss to the next update went."""

import logging
import time

import pytest
from dsx_launch.elastic_phases import ResumePhases
from dsx_launch.notes import AGENT_VARIABLE, BUILT, JOINED, LOADED, UPDATED, read_note, tell_agent


@pytest.fixture
def told(tmp_path, monkeypatch, caplog):
    """The phases of a host, what tells notes as ranks do, and the lines so far."""
    monkeypatch.setattr(logging.getLogger("dsx.launcher"), "propagate", True)
    monkeypatch.setenv(AGENT_VARIABLE, str(tmp_path))
    caplog.set_level("INFO", logger="dsx.launcher")
    return ResumePhases("node-0", tmp_path), lambda: [record.getMessage() for record in caplog.records]


def ranks_tell(began, update=13):
    tell_agent(JOINED, f"{began + 1}")
    tell_agent(BUILT, f"{began + 3}")
    tell_agent(LOADED, f"{began + 3.5} memory")
    tell_agent(UPDATED, f"{began + 5} {update}")


def test_one_line_per_resume_with_every_phase(told):
    phases, lines = told
    ranks_tell(time.time())
    phases.look()
    assert lines() == [], "the first round has nothing to resume"
    phases.forget_ranks()
    phases.begin()
    phases.end("stopping")
    phases.begin()  # noticed once more, before the ranks are back
    phases.end("rendezvous")
    phases.end("stopping")
    phases.look()
    assert lines() == []
    ranks_tell(time.time())
    phases.look()
    phases.look()
    (line,) = lines()
    assert line == (
        "node-0: update 13 is done 5.0 s after the change was noticed: stopping 0.0, rendezvous 0.0, the program up to"
        " join 1.0, building the engine 2.0, loading from memory 0.5, first update 1.5"
    )


def test_a_rank_may_be_at_work_before_the_agent_has_started_the_last_one(told):
    phases, lines = told
    phases.begin()
    tell_agent(JOINED, f"{time.time()}")
    time.sleep(0.02)
    phases.end("starting processes")
    tell_agent(UPDATED, f"{time.time() + 1} 4")
    phases.look()
    assert lines()[0].endswith(": the program up to join 0.0, starting processes 0.0, first update 1.0")


def test_ranks_that_say_less_and_no_agent_are_no_error(told, tmp_path, monkeypatch):
    phases, lines = told
    phases.begin()
    tell_agent(UPDATED, f"{time.time()} 1")  # its first rank waits for the next round, say
    phases.look()
    assert lines()[0].startswith("node-0: update 1 is done 0.0 s after") and lines()[0].endswith("first update 0.0")
    monkeypatch.setenv(AGENT_VARIABLE, str(tmp_path / "gone"))
    tell_agent(UPDATED, "1.0 1")
    monkeypatch.delenv(AGENT_VARIABLE)
    tell_agent(UPDATED, "1.0 1")
    assert read_note(tmp_path / "gone", UPDATED) == "" == read_note(None, UPDATED)
