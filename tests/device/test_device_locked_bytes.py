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
