"""A timeline that listens to a store on disk shows what it moves."""

import json

import pytest
import torch
from dsx.swap_space import SwapSpace
from dsx_monitor import Timeline, merge_traces


def test_reads_and_writes_of_a_store_are_in_the_disk_lane(tmp_path):
    timeline, space, got = Timeline(rank=0), SwapSpace(tmp_path / "swap", "rank0"), torch.empty(3000)
    stop = space.listen(timeline.transfer)
    with timeline.range("step"):
        space.put("w", torch.ones(3000)).wait()
        first, second = space.get("w", got), space.put("v", torch.ones(500))
        assert first.wait() == 12_000 and second.exception() is None and first.done() and second.done()
        with pytest.raises(KeyError):
            space.get("unknown", got)
    stop()
    space.get("w", got).wait()  # nobody listens any more
    space.close()
    timeline.write(tmp_path)
    events = [e for e in json.loads(merge_traces(tmp_path).read_text())["traceEvents"] if e["ph"] == "X"]
    moved = [e for e in events if e["cat"] == "host-disk"]
    assert sorted(e["name"] for e in moved) == ["read unknown", "read w", "write v", "write w"]
    assert sum(e["args"]["bytes"] for e in moved) == 3 * 12_000 + 2_000 and torch.equal(got, torch.ones(3000))
    (step,) = [e for e in events if e["name"] == "step"]
    assert all(step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] for e in moved)
