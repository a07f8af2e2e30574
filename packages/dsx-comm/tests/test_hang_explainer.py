"""A hang is explained on every rank, whoever causes it, and the waiting calls fail with the explanation."""

import dsx_comm
import pytest
import torch
from dsx_testkit import run_ranks


def one_is_missing(rank, n, missing, later):
    import time

    import dsx_comm

    dsx_comm.explain_hangs(limit=1.0, notice=0.5)
    tensor = torch.ones(100)
    for _ in range(3):
        dsx_comm.all_reduce(tensor)
    if rank == missing:
        time.sleep(6.0)  # the line that the report has to show
        return ""
    with pytest.raises(dsx_comm.HangError) as caught:
        with dsx_comm.unit("layers.7.mlp"):
            handle = dsx_comm.all_gather_into_tensor(torch.empty(n * 100), tensor, async_op=later)
        if later:
            handle.wait()
    return str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
@pytest.mark.parametrize("missing, later", [(1, False), (0, True)])
def test_the_missing_rank_and_its_place_are_named(backend, missing, later, capfd):
    texts = run_ranks(one_is_missing, 3, missing, later, backend=backend)
    for rank, text in enumerate(texts):
        if rank == missing:
            continue
        assert f"Rank(s) {missing} did not enter it" in text, text
        assert "all_gather" in text.splitlines()[0] and "call #4" in text
        assert f"rank {missing}: in no communication; last call of this group: #3 all_reduce" in text
        line = next(t for t in text.splitlines() if t.startswith(f"  rank {missing}:"))
        assert "in one_is_missing" in line and "test_hang_explainer.py" in line
        assert "for layers.7.mlp" in next(t for t in text.splitlines() if t.startswith(f"  rank {rank}:"))


def slow_but_fine(rank, n):
    import time

    import dsx_comm

    dsx_comm.explain_hangs(limit=30.0, notice=0.5)
    tensor = torch.ones(4)
    dsx_comm.all_reduce(tensor)
    if rank == 1:
        time.sleep(2.5)
    dsx_comm.all_reduce(tensor)
    return tensor[0].item()


def test_a_notice_stops_nothing(capfd):
    assert run_ranks(slow_but_fine, 2, backend="gloo") == [4.0, 4.0]


def off(rank, n):
    import time

    import dsx_comm

    dsx_comm.explain_hangs(limit=0)
    if rank == 1:
        time.sleep(1.0)
    dsx_comm.barrier()
    import threading

    return [t.name for t in threading.enumerate() if t.name == "dsx-comm-watch"]


def test_it_can_be_turned_off():
    assert run_ranks(off, 2, backend="gloo") == [[], []]
    with pytest.raises(dsx_comm.CommArgumentError, match="at least 0"):
        dsx_comm.explain_hangs(limit=-1.0)


def test_a_report_tells_who_is_missing_who_is_silent_and_who_calls_something_else():
    from dsx_comm.hang import explain

    raised = {"group": "0", "what": "barrier of 0 bytes", "number": 3, "waited": 12.0, "final": True}
    inside = {"group": "0", "what": "broadcast of 4 bytes", "number": 3, "label": ""}
    answer = {"issued": 3, "last": "x", "member": True, "in": inside, "for": 11.0, "at": "a.py:1 in f"}
    text = explain(raised, {0: answer, 1: {**answer, "issued": 2, "in": None, "for": None}})
    assert "Rank(s) 1 did not enter it" in text
    text = explain(raised, {0: answer, 1: answer})
    assert "All ranks have issued it: they may differ" in text and "in broadcast of 4 bytes" in text
