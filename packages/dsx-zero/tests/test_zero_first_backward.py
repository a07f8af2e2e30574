"""The first backward reduces units while it runs, as later ones do: it needs no more memory than they do.

What a unit gets in its first backward is not known before. One gradient per trainable parameter is expected; models
where that is wrong (recomputation inside backward, unused and frozen parameters) have to train as in plain PyTorch.
"""

from __future__ import annotations

import copy

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from dsx_testkit.allocated import count_allocations, most_allocated
from dsx_testkit.stores import MemoryStore
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH = 1024, 10  # a smaller block would share a unit with its neighbours at stage 2
CONFIG = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": WIDTH**2,
}


class Layers(nn.Module):
    """Each layer is a unit of one weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class OutsideMemory(MemoryStore):
    """Keeps tensors where PyTorch's allocator does not count them, as a disk does."""

    def put(self, name, tensor):
        done = super().put(name, tensor)
        self.tensors[name] = bytearray(tensor.numpy().tobytes())
        return done

    def get(self, name, out):
        kept = self.tensors[name]
        self.tensors[name] = torch.frombuffer(kept, dtype=out.dtype)
        done = super().get(name, out)
        self.tensors[name] = kept
        return done


def peaks(rank, world, stage, disk):
    """Bytes above those in use before, of each of four backwards, and the bytes of all gradients."""
    count_allocations()
    torch.manual_seed(0)
    model = Layers()
    total = sum(p.numel() * 4 for p in model.parameters())
    config, store = dict(CONFIG), None
    if disk:
        config |= {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "max_in_cpu": 0}}
        store = OutsideMemory()
    model, optimizer = dsx_zero.shard(
        model, lambda p: torch.optim.SGD(p, lr=0.1), stage=stage, config=config, store=store
    )
    x, found = torch.ones(2, WIDTH), []
    for _ in range(4):
        with most_allocated() as memory:
            model(x).square().mean().backward()
        found.append(memory.most - memory.first)
        optimizer.step()
        optimizer.zero_grad()
    return found, total


@pytest.mark.parametrize(
    ("stage", "world", "disk", "units"), [(2, 2, False, 5.7), (3, 2, False, 5.7), (3, 1, True, 7.7)]
)
def test_first_backward_holds_the_shard_and_a_few_units(stage, world, disk, units):
    for found, total in run_ranks(peaks, world, stage, disk):
        unit, shard = total / DEPTH, 0 if disk else total / world
        # Beside the shard of all gradients: units whose reductions are in flight, the one that fills, and what is
        # gathered. Without reductions during backward it would be all of them.
        assert found[0] <= shard + units * unit, [f"{p / unit:.1f} units" for p in found]


class Shared(nn.Module):
    """A block that two recomputed segments share, one without, one that is not used, and a frozen bias."""

    def __init__(self, shared_first):
        super().__init__()
        self.shared, self.plain, self.unused = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.head.bias.requires_grad_(False)
        self.shared_first = shared_first

    def forward(self, x):
        x = checkpoint(self.shared, x, use_reentrant=True)
        x = self.plain(x) if self.shared_first else x
        x = checkpoint(self.shared, x, use_reentrant=True)
        return self.head(x)


def against_torch(rank, world, stage, shared_first, dtype):
    torch.manual_seed(0)
    plain = Shared(shared_first).to(dtype)
    model = copy.deepcopy(plain)
    model, optimizer = dsx_zero.shard(
        model, lambda p: torch.optim.AdamW(p, lr=1e-2), stage=stage, config={"stage3_param_persistence_threshold": 0}
    )
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    for step in range(4):
        for micro in range(2):
            whole = torch.randn(2 * world, 8, dtype=dtype, generator=torch.Generator().manual_seed(10 * step + micro))
            plain(whole.clone().requires_grad_()).square().mean().backward()
            model(whole[2 * rank : 2 * rank + 2].clone().requires_grad_()).square().mean().backward()
        for p in plain.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)  # a parameter that no rank used counts as zeros
        reference.step()
        reference.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        with dsx_zero.GatheredParameters(list(model.parameters())):
            for (name, want), got in zip(plain.named_parameters(), model.named_parameters(), strict=True):
                torch.testing.assert_close(got[1].data, want.data, rtol=0, atol=1e-9, msg=f"{name} after step {step}")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_recomputed_in_backward_trains_as_plain_torch(stage, world):
    for shared_first in (False, True):
        run_ranks(against_torch, world, stage, shared_first, torch.float64)
