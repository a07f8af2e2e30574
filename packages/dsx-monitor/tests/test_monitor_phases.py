"""`PhaseMemory` over an allocator whose counters the test sets; the simulated device is in tests/device (pushed)."""

from __future__ import annotations

import pytest
from dsx_monitor import phases as module
from dsx_monitor.errors import ReportError


class Counters:
    """What the allocator of a device counts."""

    def __init__(self):
        self.now = self.most = 0

    def take(self, nbytes):
        self.now += nbytes
        self.most = max(self.most, self.now)

    def allocated(self):
        return self.now

    def peak_allocated(self):
        return self.most

    def restart_peaks(self):
        self.most = self.now


@pytest.fixture
def device(monkeypatch):
    counters = Counters()
    monkeypatch.setattr(module, "_device", lambda: counters)
    return counters


def test_a_phase_has_its_own_peak_and_what_lies_there_at_its_end(device):
    held = {"params": {"device": 1 << 20, "host": 5}, "optimizer": {"device": 2 << 20}, "grads": {}}
    phases = module.PhaseMemory(lambda: held)
    device.take(3 << 20)
    with phases("train"):
        device.take(4 << 20)
        device.take(-(4 << 20))
    with phases("sleep"):
        device.take(-(2 << 20))
        held["optimizer"] = {"host": 2 << 20}
    train, sleep = phases.phases
    assert (train.before, train.peak, train.after) == (3 << 20, 7 << 20, 3 << 20)
    assert train.parts == {"params": 1 << 20, "optimizer": 2 << 20, "activations": 4 << 20}
    assert (sleep.before, sleep.peak, sleep.after) == (3 << 20, 3 << 20, 1 << 20)
    assert sleep.classes == {"params": 1 << 20}
    lines = phases.report().splitlines()
    assert lines[1].split()[:8] == ["train", "1", "3.00", "MiB", "7.00", "MiB", "3.00", "MiB"] and len(lines) == 3
    picture = phases.picture()
    assert picture.startswith("<svg") and ">train<" in picture and ">sleep<" in picture and "4194304 bytes" in picture


def test_of_a_phase_that_comes_again_the_highest_peak_stays(device):
    phases = module.PhaseMemory()
    for nbytes in (10, 30, 20):
        with phases("generate"):
            device.take(nbytes)
            device.take(-nbytes)
    (found,) = phases.phases
    assert (found.times, found.peak, found.parts) == (3, 30, {"activations": 30})


def test_a_phase_that_raises_is_not_counted_and_phases_do_not_nest(device):
    phases = module.PhaseMemory()
    with pytest.raises(KeyError), phases("train"):
        raise KeyError("x")
    with phases("train"):
        with pytest.raises(ReportError, match="inside of 'train'"), phases("sleep"):
            pass
    assert [one.name for one in phases.phases] == ["train"]
    with pytest.raises(ReportError, match="neither bytes"):
        module.PhaseMemory().picture()


def test_without_an_accelerator_only_the_classes_are_known():
    phases = module.PhaseMemory(lambda: {"params": {"device": 100}})
    with phases("train"):
        pass
    (found,) = phases.phases
    assert found.parts["params"] == 100 and found.parts["activations"] == max(0, found.peak - 100)
