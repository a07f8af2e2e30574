"""The lane of a CUDA device: what waits for what, with streams and events that only note it.

Left to right in a log is the order in which the host asks. `test_stage3_gpu.py` has the same on a device.
"""

from __future__ import annotations

import pytest
import torch
from dsx_comm.lanes import CudaLane, TensorBuffer, make_lane
from dsx_testkit import FakeCuda


@pytest.fixture
def cuda():
    with FakeCuda().installed() as fake:
        yield fake


class Noted:
    """A pending collective that notes on which stream it is waited for."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def wait(self) -> None:
        self._cuda.note(f"{self._cuda.current.name} waits for the collective")


def lane_of(cuda: FakeCuda) -> CudaLane:
    lane = make_lane(torch.device("cuda"))
    assert isinstance(lane, CudaLane)
    return lane


def test_a_job_runs_on_the_lanes_stream_and_its_user_waits_there(cuda):
    lane = lane_of(cuda)
    ticket = lane.submit(lambda: cuda.note(f"job on {cuda.current.name}"))
    assert cuda.log == ["job on stream 1", "event 1 on stream 1"]
    assert not ticket.is_completed()
    ticket.wait()
    ticket.wait()
    assert cuda.log[2:] == ["default waits for event 1"] * 2  # and the host for nothing
    ticket.synchronize()
    assert cuda.log[4:] == ["host waits for event 1"]


def test_a_collective_holds_up_the_lane_and_not_the_host(cuda):
    lane = lane_of(cuda)
    lane.submit(lambda: Noted(cuda)).wait()
    assert cuda.log == ["stream 1 waits for the collective", "event 1 on stream 1", "default waits for event 1"]


@pytest.mark.parametrize("way", ["call", "submit"])
def test_a_job_sees_what_its_user_has_written_so_far(cuda, way):
    lane = lane_of(cuda)
    if way == "call":
        lane.see_writes_so_far()
    lane.submit(lambda: cuda.note("job"), see_writes_so_far=way == "submit")
    lane.submit(lambda: cuda.note("next"))
    assert cuda.log == ["stream 1 waits for default", "job", "event 1 on stream 1", "next", "event 2 on stream 1"]


def test_memory_is_taken_again_only_behind_its_last_use(cuda):
    """Which is behind the latest buffer that was freed: the user's stream is in order."""
    lane, freed = lane_of(cuda), []

    class Buffer(TensorBuffer):
        def free(self) -> None:
            freed.append(len(cuda.log))

    for _ in range(2):
        lane.free_after_use(Buffer(torch.empty(1)))
    assert cuda.log == ["event 1 on default", "event 2 on default"]
    assert freed == [1, 2]
    for _ in range(2):
        lane.submit(lambda: cuda.note("allocates"))
    assert cuda.log[2:] == [
        "stream 1 waits for event 2",
        "allocates",
        "event 3 on stream 1",
        "allocates",
        "event 4 on stream 1",
    ]


def test_two_streams_that_free_memory_in_turn_are_both_waited_for(cuda):
    lane, other = lane_of(cuda), torch.cuda.Stream()
    lane.free_after_use(TensorBuffer(torch.empty(1)))
    with torch.cuda.stream(other):
        lane.free_after_use(TensorBuffer(torch.empty(1)))
    lane.submit(lambda: cuda.note("allocates"))
    waits = ["stream 1 waits for event 1", "stream 1 waits for event 2"]
    assert cuda.log == ["event 1 on default", "event 2 on stream 2", *waits, "allocates", "event 3 on stream 1"]


def test_a_later_lane_on_the_same_stream_waits_for_memory_that_an_earlier_one_has_freed(cuda, monkeypatch):
    """Torch has 32 streams and hands them out in turn; memory that is freed goes back to its stream."""
    shared = torch.cuda.Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: shared)
    lane_of(cuda).free_after_use(TensorBuffer(torch.empty(1)))  # the lane is gone before it has another job
    lane_of(cuda).submit(lambda: cuda.note("allocates"))
    assert cuda.log == ["event 1 on default", "stream 1 waits for event 1", "allocates", "event 2 on stream 1"]


def test_the_callers_stream_is_that_of_the_lanes_device(cuda):
    """Not of the device that happens to be current."""
    lane = make_lane(torch.device("cuda", 1))
    ticket = lane.submit(lambda: cuda.note(f"job on {cuda.current.name}"), see_writes_so_far=True)
    ticket.wait()
    lane.free_after_use(TensorBuffer(torch.empty(1)))
    assert cuda.log == [
        "stream 1 waits for default of 1",
        "job on stream 1",
        "event 1 on stream 1",
        "default of 1 waits for event 1",
        "event 2 on default of 1",
    ]
    assert torch.cuda.current_device() == 0


def test_an_event_is_of_the_stream_that_used_the_memory(cuda):
    lane = lane_of(cuda)
    with torch.cuda.stream(torch.cuda.Stream()):
        lane.free_after_use(TensorBuffer(torch.empty(1)))
        lane.submit(lambda: None).wait()
    assert cuda.log == [
        "event 1 on stream 2",
        "stream 1 waits for event 1",
        "event 2 on stream 1",
        "stream 2 waits for event 2",
    ]
