"""Ranks of a process group do something together: all succeed, or all raise the same error."""

from __future__ import annotations

import dsx_comm
import pytest
from dsx_testkit import run_ranks


def rank_one_fails(rank, world_size):
    def action() -> int:
        if rank == 1:
            raise FileNotFoundError("no such shard")
        return rank

    ranks = dsx_comm.together(kinds=(ValueError, dsx_comm.CommError))
    good = ranks.run("counting", dsx_comm.get_rank)
    with pytest.raises(dsx_comm.CommError) as told:
        ranks.keep("reading", action)
    with pytest.raises(ValueError) as differs:
        ranks.agree("shard()", {"lr": str(rank)})
    return good, str(told.value), str(differs.value)


def test_a_failure_is_the_same_error_on_all_ranks():
    results = run_ranks(rank_one_fails, 2)
    assert results[0] == results[1]
    good, told, differs = results[0]
    assert good == [0, 1]
    assert told == "reading: rank 1 failed: FileNotFoundError: no such shard"
    assert "lr (rank 0: 0; rank 1: 1)" in differs


def test_one_process_needs_no_group():
    ranks = dsx_comm.together()
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.keep("counting", lambda: 7) == 7
    ranks.agree("shard()", {"lr": "0.1"})
