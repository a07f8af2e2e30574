"""Offload locks as many bytes as its state has: sizes that are no powers of two, at every stage."""

from __future__ import annotations

import pytest
from device_runs import run_code

PROGRAM = """
import sys, weakref
import torch
import torch.distributed as dist
from torch import nn

stage, low, world = int(sys.argv[1]), sys.argv[2] == "bf16", 1
PAGE = 4096
locked, most = {}, 0


def lock(address, nbytes):
    global most
    locked[address] = nbytes
    most = max(most, sum(locked.values()))


runtime = type(torch.cuda.cudart())
register, unregister, empty = runtime.cudaHostRegister, runtime.cudaHostUnregister, torch.empty


def counted_register(self, address, nbytes, flags):
    lock(address, -(-(address + nbytes) // PAGE) * PAGE - address // PAGE * PAGE)  # whole pages
    return register(self, address, nbytes, flags)


def counted_unregister(self, address):
    locked.pop(address)
    return unregister(self, address)


def counted_empty(*sizes, pin_memory=False, **options):
    made = empty(*sizes, pin_memory=pin_memory, **options)
    if pin_memory and made.nbytes:
        address = made.untyped_storage().data_ptr()
        lock(address, 1 << (made.nbytes - 1).bit_length())  # torch's allocator: the next power of two
        weakref.finalize(made.untyped_storage(), locked.pop, address, None)
    return made


runtime.cudaHostRegister, runtime.cudaHostUnregister, torch.empty = counted_register, counted_unregister, counted_empty

import dsx_zero

offload = {"device": "cpu", "pin_memory": True}
config = {"stage": stage, "offload_optimizer": offload, "stage3_param_persistence_threshold": 0}
if stage == 3:
    config["offload_param"] = offload
widths = [487, 613, 301, 755, 699, 487]  # units of 0.3 to 2.1 MB in fp32
model = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:])), nn.LayerNorm(487)).to("cuda")
model = model.bfloat16() if low else model
model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.AdamW(p, lr=1e-3), config=config)
x = torch.ones(3, 487, device="cuda", dtype=torch.bfloat16 if low else torch.float32)
for _ in range(2):
    for _ in range(2):
        model(x).float().square().mean().backward()
    optimizer.step(max_norm=1.0)
    optimizer.zero_grad()
tiers = optimizer.state_bytes_by_tier()
asked = sum(found.get("host", 0) for kind, found in tiers.items() if kind != "optimizer")
assert asked > 5_000_000, tiers
assert asked <= most <= 1.02 * asked, (most / asked, most, tiers)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("low", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_as_many_bytes_are_locked_as_state_is_on_the_host(stage, low):
    done = run_code(PROGRAM.replace("sys.argv[1]", str(stage)).replace("sys.argv[2]", repr(low)))
    assert (done.returncode, done.stderr) == (0, "")


READ_AHEAD = """
import tempfile, weakref
import torch
from torch import nn

PAGE = 4096
locked, most, asked, most_asked = {}, 0, {}, 0
runtime = type(torch.cuda.cudart())
register, unregister = runtime.cudaHostRegister, runtime.cudaHostUnregister


def counted_register(self, address, nbytes, flags):
    global most
    locked[address] = -(-nbytes // PAGE) * PAGE
    most = max(most, sum(locked.values()))
    return register(self, address, nbytes, flags)


def counted_unregister(self, address):
    locked.pop(address)
    return unregister(self, address)


runtime.cudaHostRegister, runtime.cudaHostUnregister = counted_register, counted_unregister

import dsx_nvme, dsx_simcuda, dsx_zero
from dsx_zero.homes.blocks import HostBlocks

empty = HostBlocks.empty


def counted_empty(self, numel, dtype, *, pin=False):
    global most_asked
    made = empty(self, numel, dtype, pin=pin)
    if pin:
        key = made.untyped_storage().data_ptr()
        asked[key] = made.nbytes
        most_asked = max(most_asked, sum(asked.values()))
        weakref.finalize(made.untyped_storage(), asked.pop, key, None)
    return made


HostBlocks.empty = counted_empty

place = {"device": "nvme", "pin_memory": True, "max_in_cpu": 0, "buffer_count": 3, "buffer_size": 3 << 20}
config = {"stage": 3, "offload_param": place, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
config["stage3_max_live_parameters"] = 1 << 20
widths = [487, 613, 301, 755, 699, 613, 301, 487]
torch.manual_seed(0)
plain = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:])))
x = torch.ones(3, 487)


def trained(model, optimizer, x):
    for _ in range(4):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield model(x).detach().cpu()


import copy

sgd = lambda p: torch.optim.SGD(p, lr=0.1)
reference = copy.deepcopy(plain)
expected = list(trained(reference, sgd(reference.parameters()), x))
with tempfile.TemporaryDirectory() as folder:
    store = dsx_nvme.TensorStore(folder, keep=False)
    model, optimizer = dsx_zero.shard(plain.to("cuda"), sgd, config=config, store=store)
    for got, wanted in zip(trained(model, optimizer, x.to("cuda")), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    optimizer.release()
    store.close()
assert most_asked > 2_000_000, most_asked
assert 0 < most <= 1.02 * most_asked, (most / most_asked, most, most_asked)
assert not dsx_simcuda.reports(), dsx_simcuda.reports()
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["random", "lazy"])
def test_buffers_that_are_read_ahead_are_locked_in_their_size_and_not_used_again_under_a_copy(mode):
    done = run_code(READ_AHEAD, mode=mode)
    assert (done.returncode, done.stderr) == (0, "")
