"""`dsx_core.device.Device` on a simulated accelerator: it orders streams as told, and speaks of its own device only."""

from __future__ import annotations

import pytest
from device_runs import run_code

RIGHT = """
import torch
from dsx_core.device import Device

device = Device.current()
assert device == Device.of("cuda") == Device.of(torch.ones(1, device="cuda")) and device.is_accelerator
other = Device.of("cuda:1")
assert Device.count() == 2 and Device.in_use() == device and (str(other), other.index) == ("cuda:1", 1)
values = torch.zeros(1000, device=other.torch_device)  # the current device is 0, all along
stream, begin = other.new_stream(priority=-1), other.mark()
assert stream.device == other.torch_device
ready = other.event()
with other.on(stream):
    assert other.stream() == stream
    other.wait_for(ready)
    values.fill_(1)
other.wait_for_stream(stream)
end = other.mark()
assert values.sum().item() == 1000
assert other.milliseconds(begin, end) > 0 and other.passed(end) and not other.is_capturing()

other.seed(3)
state = other.random_state()
first = torch.randn(3, device=other.torch_device)
other.set_random_state(state)
assert torch.equal(first.cpu(), torch.randn(3, device=other.torch_device).cpu())
untouched = device.random_state()
other.seed(4)
assert torch.equal(untouched, device.random_state())

held = other.allocated()
more = torch.empty(1 << 20, device=other.torch_device)
assert other.allocated() == held + (4 << 20) and device.allocated() < 1 << 20
del more
assert other.peak_allocated() >= held + (4 << 20) and other.reserved() >= held
other.restart_peaks()
assert other.peak_allocated() == held
other.empty_cache()
free, total = other.free_and_total()
assert 0 < free < total == other.properties.total_memory
with other.as_current():
    assert Device.current() == other
assert Device.current() == device
other.make_current()
assert Device.current() == other
other.synchronize()
"""


@pytest.mark.timeout(900)
def test_a_device_is_what_torch_says_of_it_and_no_race_is_reported():
    done = run_code(RIGHT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("wait", ["other.wait_for(ready)", "other.wait_for_stream(stream)"])
def test_without_a_wait_a_race_is_reported(wait):
    done = run_code(RIGHT.replace(wait, "pass"))
    assert done.returncode == 86 and "cuda:1" in done.stderr, done.stderr


SHARED = """
import torch
from dsx_comm.lanes import CudaLane, TensorBuffer

device, made = torch.device("cuda", 0), []
lanes = [CudaLane(device) for _ in range(33)]  # torch has 32 streams: the last one is the first one's
first, last = lanes[0], lanes[-1]
first.submit(lambda: made.append(torch.ones(100_000, device=device))).wait()
total = (made[0] * 2).sum()  # the last use
first.free_after_use(TensorBuffer(made.pop()))
LATER.submit(lambda: made.append(torch.zeros(100_000, device=device))).wait()
assert total.item() == 200_000
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("later", ["first", "last"])
def test_lanes_that_share_a_stream_wait_for_the_last_use_of_its_memory(later):
    done = run_code(SHARED.replace("LATER", later), mode="slow-default")
    assert (done.returncode, done.stderr) == (0, "")
