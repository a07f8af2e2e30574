"""What scripts read from DeepSpeed's schedules; the values are those of 0.19.8."""

from __future__ import annotations

import dsx_compat
import pytest
import torch

dsx_compat.activate()
from deepspeed.runtime.lr_schedules import OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR  # noqa: E402


def optimizer():
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.1, 0.2)]
    return torch.optim.SGD(groups)


@pytest.mark.parametrize("make", [WarmupLR, lambda o, *rest: WarmupDecayLR(o, 10, *rest)])
def test_warm_up(make):
    found = make(optimizer(), 0.0, 0.5, 4)
    assert (found.min_lrs, found.max_lrs, found.warmup_num_steps) == ([0.0, 0.0], [0.5, 0.5], 4)
    assert WarmupLR(optimizer(), warmup_num_steps=0).warmup_num_steps == 2


def test_one_cycle():
    found = OneCycle(optimizer(), cycle_min_lr=0.25, cycle_max_lr=0.5)
    assert (found.min_lrs, found.max_lrs) == ([0.25, 0.25], [0.5, 0.5])
    assert not hasattr(found, "warmup_num_steps")


def test_cosine():
    found = WarmupCosineLR(optimizer(), total_num_steps=6, warmup_num_steps=2, warmup_type="linear")
    ratios = [found.get_lr_ratio()]
    for _ in range(4):
        found.step()
        ratios.append(found.get_lr_ratio())
    assert ratios == pytest.approx([0.0, 0.0, 0.5, 0.853568, 0.50005], rel=1e-5)
    assert found.warmup_num_steps == 2 and not hasattr(found, "min_lrs")
