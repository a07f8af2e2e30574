"""Copies of a save behind training, of values on a device that is not current: nothing overtakes them."""

from __future__ import annotations

import pytest
from device_runs import run_code

COPIES = """
import torch
from dsx_checkpoint.behind import _copy_from
from dsx_core.device import Device

device = Device.of("cuda:1")  # the current device is 0, all along
value = torch.ones(1 << 16, device="cuda:1")
copy = torch.empty(1 << 16, pin_memory=True)
end = _copy_from(device, [(copy, value)])
value.add_(1)  # training goes on
end.synchronize()
assert copy.eq(1).all() and value.eq(2).all().item()
"""


@pytest.mark.timeout(900)
def test_copies_run_beside_the_stream_of_the_values_device():
    done = run_code(COPIES, mode="slow-side")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.timeout(900)
def test_values_that_are_read_before_the_copies_end_are_reported():
    done = run_code(COPIES.replace("end.synchronize()", ""), mode="slow-side")
    assert done.returncode != 0 and ("host" in done.stderr or "AssertionError" in done.stderr), done.stderr


@pytest.mark.timeout(900)
def test_copies_beside_the_stream_of_the_current_device_are_reported():
    done = run_code(COPIES.replace('Device.of("cuda:1")', 'Device.of("cuda:0")'), mode="slow-side")
    assert done.returncode == 86 and "behind.py" in done.stderr, done.stderr
