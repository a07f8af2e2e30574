"""Every public bug of the museum is named with its kind and tensor, and its right form gets a clean receipt."""

import functools

import pytest
from dsx_testkit import run_ranks
from dsx_verify import KINDS
from dsx_verify.museum import EXHIBITS, visit

MISNAMED = {}
"""Exhibits whose fault is found with another kind than it should have, and that kind."""


def all_of(rank, world):
    chosen = [exhibit for exhibit in EXHIBITS if exhibit.ranks == world]
    return {e.thread: {broken: visit(e, broken=broken) for broken in (True, False)} for e in chosen}


@functools.lru_cache
def receipts():
    found = {}
    for world in (1, 2):
        by_rank = run_ranks(all_of, world, timeout=120)
        assert all(str(other) == str(by_rank[0]) for other in by_rank), "all ranks have one receipt"
        found.update(by_rank[0])
    return found


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=[e.thread for e in EXHIBITS])
def test_the_bug_is_named_and_the_right_form_passes(exhibit):
    told = receipts()[exhibit.thread]
    assert told[False].ok, told[False]
    fault = told[True].fault
    assert fault is not None, "the broken form got a clean receipt"
    assert fault.kind == MISNAMED.get(exhibit.thread, exhibit.kind), fault
    assert exhibit.name in ("", fault.name), fault
    assert len(fault.evidence) <= 5 and all(fault.evidence)


def test_the_museum_has_twenty_bugs_of_known_kinds():
    assert len({e.thread for e in EXHIBITS}) >= 20
    assert {e.kind for e in EXHIBITS} <= set(KINDS)
    assert all(e.date >= "2025" for e in EXHIBITS)
