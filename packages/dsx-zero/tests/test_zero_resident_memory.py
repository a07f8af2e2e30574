"""With everything on disk the resident memory of an ordinary process stays within what the settings allow.

The counters of dsx and of torch do not see what the C library keeps after it was freed, so the kernel is asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from dsx_zero.homes.freed_memory import keep_freed_blocks, keep_heap_small

pytest.importorskip("dsx_nvme")
LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs the kernel's figures")

WIDTH, DEPTH = 1024, 16
UNIT = WIDTH * WIDTH
"""Elements of a unit."""

SETTINGS = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 3 * UNIT,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": UNIT,
    "reduce_bucket_size": UNIT,
    "sub_group_size": UNIT // 2,
    "offload_optimizer": {"device": "nvme"},
    "offload_param": {"device": "nvme", "max_in_cpu": 0, "buffer_count": 2, "buffer_size": UNIT},
}

PROGRAM = """
import json, sys
import dsx_nvme, dsx_zero, torch
from torch import nn

folder, width, depth, low, settings = sys.argv[1], *json.loads(sys.argv[2])
torch.set_num_threads(1)
dtype = torch.bfloat16 if low else torch.float32

def resident(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

def train(depth, steps):
    store = dsx_nvme.TensorStore(f"{folder}/{depth}", keep=False)
    with dsx_zero.Init(dtype=dtype, remote_device="nvme", config=settings, store=store):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(depth)))
    model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.AdamW(p), config=settings, store=store)
    for _ in range(steps):
        model(torch.ones(4, width, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    on_disk = sum(held.get("disk", 0) for held in optimizer.state_bytes_by_tier().values())
    optimizer.release()
    store.close()
    return on_disk

train(1, 2)  # code that is loaded when it is first used
before = resident("VmRSS")
forget_peak()
on_disk = train(depth, 3)
peak, after = resident("VmHWM"), resident("VmRSS")
print(json.dumps({"on_disk": on_disk, "peak": peak - before, "kept": after - before}))
"""


def grown(low: bool, folder: object, **environment: str) -> dict[str, int]:
    """Train three steps in a fresh process that has no settings for its allocator."""
    usual = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES", "DSX_RETURN"))}
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps([WIDTH, DEPTH, low, SETTINGS])]
    done = subprocess.run(command, env=usual | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def allowed(low: bool) -> int:
    """Bytes that the settings allow beside the disk."""
    size = 2 if low else 4
    gathered = 3 * UNIT * size
    read_ahead = 2 * UNIT * size
    reductions = 2 * UNIT * size
    sub_groups = 3 * 4 * (UNIT // 2) * 4  # one read, one stepped, one written: master, gradient and two moments
    store = 32 * 2**20  # its queue of 32 blocks
    return gathered + read_ahead + reductions + sub_groups + store


EXTRA = 16 << 20
"""Bytes for all else: activations, small objects, the heap's own pages."""


@LINUX
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_resident_memory_is_bounded_with_everything_on_disk(low, tmp_path):
    found = grown(low, tmp_path)
    assert found["on_disk"] >= DEPTH * UNIT * (14 if low else 12) > 1.5 * (allowed(low) + EXTRA)
    assert found["peak"] <= allowed(low) + EXTRA, found
    assert found["kept"] <= EXTRA, found


@pytest.mark.parametrize(
    "name, value", [("DSX_RETURN_FREED_MEMORY", "0"), ("MALLOC_TRIM_THRESHOLD_", "1"), ("MALLOC_MMAP_THRESHOLD_", "1"),
                    ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.mmap_threshold=4096")],
)  # fmt: skip
def test_the_allocator_is_left_alone_where_the_user_says_so(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert not keep_heap_small.__wrapped__()
    assert not keep_freed_blocks.__wrapped__()


def test_what_returns_memory_has_precedence_over_what_keeps_it():
    order = "keep_heap_small(), keep_freed_blocks()"
    code = f"from dsx_zero.homes.freed_memory import keep_freed_blocks, keep_heap_small; print({order})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() in (["True", "False"], ["False", "False"])  # the second: another C library


FREED = """
import torch, dsx_zero
from dsx_zero.homes.freed_memory import keep_heap_small
model = torch.nn.Linear(8, 8)
settings = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.Adam(p), config=settings)
assert optimizer.state_bytes_by_tier()["master"]["host"]
print(keep_heap_small.cache_info().misses)
"""


def test_the_allocator_is_left_alone_where_the_model_is_in_host_memory_itself():
    """Its activations are in the same heap, and nothing leaves host memory. Their pages would be cleared every step."""
    found = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0"]
