"""A device through one interface; on the CPU here, and the same program on a simulated accelerator in tests/device."""

import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
from dsx_core.device import Device  # noqa: E402


def test_dsx_core_itself_needs_no_torch():
    code = "import sys, dsx_core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("what", [torch.ones(1), torch.device("cpu"), "cpu"])
def test_the_cpu_is_found(what):
    device = Device.of(what)
    assert device == Device("cpu") and not device.is_accelerator and str(device) == device.name == "cpu"
    assert device.torch_device == torch.device("cpu")


def test_a_tensor_without_memory_has_a_device_too():
    assert Device.of(torch.ones(1, device="meta")).torch_device == torch.device("meta")


def test_a_device_that_torch_does_not_know_is_refused():
    with pytest.raises(RuntimeError, match="nonesuch"):
        Device.of("nonesuch")


def test_work_on_the_cpu_is_in_order():
    device = Device.of("cpu")
    assert device.new_stream() is None and device.stream() is None and device.event() is None
    with device.as_current(), device.on(None):
        device.wait_for(None)
        device.wait_for_stream(None)
        device.synchronize()
        device.make_current()
    assert not device.is_capturing()


def test_marks_on_the_cpu_are_the_hosts_time():
    device = Device.of("cpu")
    begin = device.mark()
    threading.Event().wait(0.01)
    end = device.mark()
    assert device.passed(end) and 10 <= device.milliseconds(begin, end) < 10_000


def test_the_memory_of_the_cpu_is_not_torchs_to_tell():
    device = Device.of("cpu")
    assert (device.allocated(), device.reserved(), device.peak_allocated(), device.peak_reserved()) == (0, 0, 0, 0)
    device.restart_peaks()
    device.empty_cache()
    with pytest.raises(ValueError, match="psutil"):
        device.free_and_total()


def test_random_numbers_go_on_where_a_state_was_taken():
    device = Device.of("cpu")
    before = device.random_state()
    try:
        device.seed(3)
        assert torch.equal(torch.randn(3), torch.randn(3, generator=torch.Generator().manual_seed(3)))
        kept = device.random_state()
        first = torch.randn(3)
        device.set_random_state(kept)
        assert torch.equal(torch.randn(3), first)
    finally:
        device.set_random_state(before)
