"""The times of a step on a device come from its events. The host waits for an event only when its time is read."""

import time

import pytest
import torch
from dsx_pipe.runtime.clock import DeviceClock


class Event:
    """An event of a device that reaches every mark two seconds after the host."""

    waited = 0

    def __init__(self, device, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.at = time.perf_counter() + 2.0

    def synchronize(self):
        Event.waited += 1

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def test_marks_on_a_device_are_placed_on_the_hosts_clock(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    clock = DeviceClock(torch.device("cuda", 0))
    before = time.perf_counter()
    first, second = clock.mark(), clock.mark()
    second.at = first.at + 0.5
    assert Event.waited == 0
    assert clock.seconds(second) - clock.seconds(first) == pytest.approx(0.5, abs=1e-9)
    assert clock.seconds(first) == pytest.approx(before, abs=0.5) and Event.waited == 3


def test_the_host_needs_no_events():
    clock, before = DeviceClock(torch.device("cpu")), time.perf_counter()
    mark = clock.mark()
    assert before <= mark <= time.perf_counter() and clock.seconds(mark) == pytest.approx(mark, abs=1e-9)
