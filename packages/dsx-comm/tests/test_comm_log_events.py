"""The communication log on an accelerator: events are read as they pass, and nobody waits for them."""

from collections import Counter

import dsx_comm.log
import pytest
import torch
from dsx_comm.calls import Call
from dsx_comm.config import CommsLoggerConfig
from dsx_comm.log import CommsLogger


class StandIn:
    """A device whose calls take 2 ms each, and which is `behind` marks behind the host."""

    is_accelerator = True

    def __init__(self, behind):
        self.made, self.behind, self.asked, self.capturing = 0, behind, Counter(), False

    def of(self, what):
        assert what.type == "cuda"
        return self

    def is_capturing(self):
        return self.capturing

    def mark(self):
        self.made += 1
        return self.made

    def passed(self, mark):
        self.asked["passed"] += 1
        return mark <= self.made - self.behind

    def milliseconds(self, begin, end):
        self.asked["read"] += 1
        self.asked["waited"] += not end <= self.made - self.behind
        return 2.0 * (end - begin)


def calls_on(device, monkeypatch, count, *, every=lambda log: None):
    monkeypatch.setattr(dsx_comm.log, "Device", device)
    log = CommsLogger()
    log.config = CommsLoggerConfig(enabled=True)
    call = Call("all_reduce", None, 8, 1024, 1024, torch.device("cuda"), {})
    for _ in range(count):
        token = log.begin(call)
        if token is not None:
            log.end(token, call, None, is_async=False)
        every(log)
    return log


@pytest.mark.parametrize("behind", [0, 40, 3000])
def test_events_are_read_as_they_pass(monkeypatch, behind):
    device, most = StandIn(behind), 0

    def look(log):
        nonlocal most
        most = max(most, len(log._unread))

    log = calls_on(device, monkeypatch, 20_000, every=look)
    assert most <= max(512, 2 * behind) and device.asked["waited"] == 0
    assert device.asked["passed"] < 3 * 20_000  # a device that is behind is not asked about each call at each call
    entry = log.entries()["all_reduce", 1024, 8]
    assert (entry.count, entry.total_ms) == (20_000, 40_000.0) and device.asked["read"] == 20_000
    assert not log._unread


def test_calls_that_a_graph_captures_are_left_out(monkeypatch):
    device = StandIn(0)
    device.capturing = True
    assert calls_on(device, monkeypatch, 1000).entries() == {} and device.made == 0 and not device.asked


def test_a_reset_forgets_unread_events(monkeypatch):
    log = calls_on(StandIn(0), monkeypatch, 10)
    log.reset()
    assert log.entries() == {}
