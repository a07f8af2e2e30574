"""Tensors that are larger than this machine's memory are planned as any other: nothing of them is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from dsx.planning import plan
from torch import nn

MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
_SETTING = Path("/proc/sys/vm/overcommit_memory")
pytestmark = pytest.mark.skipif(
    not _SETTING.is_file() or _SETTING.read_text().strip() == "2", reason="the system keeps memory for everything"
)


class Head(nn.Module):
    """Logits that no machine of tests holds."""

    def __init__(self, words):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, words, bias=False)

    def forward(self, x):
        return self.outer(self.inner(x)).float().logsumexp(-1).mean()


def planned(model, rows):
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }
    return plan(
        model,
        config,
        world_size=8,
        machine="H100-SXM",
        batch=torch.zeros(rows, 64, dtype=torch.bfloat16),
        changes=False,
    )


def test_an_activation_above_the_memory_of_this_machine():
    words = 1 << 20
    rows = 2 * MEMORY // (2 * words)
    found = planned(lambda: Head(words), rows)
    assert found.peak_bytes > 2 * rows * words
    # A quarter of the rows takes a quarter of the activations: the figures are those of any other size.
    less = planned(lambda: Head(words), rows // 4)
    large, small = (one.peak_parts["activations"] for one in (found, less))
    assert large == pytest.approx(4 * small, rel=0.01)


def test_a_parameter_above_the_memory_of_this_machine():
    words = 3 * MEMORY // (2 * 4 * 64)  # in fp32, as it is made; what is gathered has half of the bytes
    found = planned(lambda: Head(words), 1)
    assert found.parameters == 64 * words + 64 * 65
    assert found.peak_parts["gathered"] >= 64 * words * 2, "in bf16"
