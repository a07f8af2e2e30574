"""`shard(device=...)`: a model goes to its device unit by unit, and one that is larger than the device never lies
there.
"""

from __future__ import annotations

import copy

import dsx_zero
import pytest
import torch
from dsx_testkit import LabelledDevice, assert_close_named, run_ranks

UNITS, WIDTH = 8, 32
UNIT = (WIDTH * WIDTH + WIDTH) * 4
WHOLE = UNITS * UNIT


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def placed(stage, config, steps=2):
    """Bytes on the device at most while sharding, and at most while training; compared with plain PyTorch."""
    plain = Blocks()
    reference = sgd(plain.parameters())
    model = copy.deepcopy(plain)
    with LabelledDevice() as device:
        settings = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, **config}
        model, optimizer = dsx_zero.shard(model, sgd, stage=stage, config=settings, device=device.label)
        sharding, device.peak = device.peak, 0
        x = torch.ones(2, WIDTH)
        for _ in range(steps):
            for one, step in ((model, optimizer), (plain, reference)):
                one(x).backward()
                step.step()
                step.zero_grad()
    whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p.detach()) for n, p in model.named_parameters()}
    assert_close_named(whole, {n: p.detach() for n, p in plain.named_parameters()}, rtol=1e-5, atol=1e-6)
    return sharding, device.peak


def offloaded(rank, world):
    host = {"device": "cpu"}
    sharding, training = placed(3, {"offload_param": host, "offload_optimizer": host})
    assert 0 < sharding <= 2 * UNIT, (sharding, WHOLE)
    assert training <= WHOLE / 2, (training, WHOLE)


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_larger_than_the_device_never_lies_on_it_whole(world):
    run_ranks(offloaded, world)


def divided(rank, world):
    sharding, _ = placed(3, {})
    assert WHOLE / world <= sharding <= WHOLE / world + 2 * UNIT


def test_shards_are_all_that_stays_on_the_device():
    run_ranks(divided, 2)


def resident(rank, world):
    for stage in (0, 1, 2):
        sharding, _ = placed(stage, {})
        assert WHOLE <= sharding <= 2 * WHOLE + UNIT  # and, at most, masters


def test_lower_stages_move_the_model_once():
    run_ranks(resident, 1)
    run_ranks(resident, 2)


def test_the_label_counts_what_is_moved_and_freed():
    with LabelledDevice() as device:
        moved = torch.ones(10).to(device.label)
        assert device.in_use == device.peak == 40
        moved.untyped_storage().resize_(0)
        assert device.in_use == 0
        torch.nn.Linear(2, 2, bias=False).to(device.label)
        assert device.peak == 40 and torch.ones(3) is not None and device.in_use == 0
