"""A timeline given to dsx-nvme's swappers shows what they move to and from disk."""

import json

import torch
from dsx_monitor import Timeline, merge_traces
from dsx_nvme import OptimizerSwapper, ParameterSwapper


def test_reads_and_writes_of_swappers_are_in_the_swap_lane(tmp_path):
    timeline = Timeline(rank=0)
    with (
        OptimizerSwapper(
            tmp_path / "swap", {"a": 20_000}, buffer_size=4096, pipeline_read=True, pipeline_write=True,
            on_transfer=timeline.transfer,
        ) as states,
        ParameterSwapper(tmp_path / "swap", buffer_size=4096, on_transfer=timeline.transfer) as parameters,
    ):  # fmt: skip
        parameters.add("w", torch.ones(3000))
        with timeline.range("step"), parameters.use("w"):
            pieces = [f"a[{visit.start}:{visit.stop}]" for visit in states.sweep()]
        moved = states.times.bytes_read + states.times.bytes_written + 2 * 12_000
    timeline.write(tmp_path)
    events = [e for e in json.loads(merge_traces(tmp_path).read_text())["traceEvents"] if e["ph"] == "X"]
    swaps = [e for e in events if e["cat"] == "host-disk"]
    expected = ["write w", "read w", *(f"{op} {piece}" for piece in pieces for op in ("read", "write"))]
    assert sorted(e["name"] for e in swaps) == sorted(expected) and len(pieces) > 2
    assert sum(e["args"]["bytes"] for e in swaps) == moved and all(e["dur"] > 0 for e in swaps)
    (step,) = [e for e in events if e["name"] == "step"]
    inside = [e for e in swaps if e["name"] != "write w"]
    assert all(step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] for e in inside)
    rows = {e["tid"] for e in swaps}
    assert len(rows) > 1, "reads ahead and writes behind overlap"
