"""Counters see what the kernels compute: both passes, uneven last blocks, layouts per head, grouped queries."""

from __future__ import annotations

import dsx_sparse_attn
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode


def by_hand(layout, batch, heads, seq, dim, block):
    pairs = 0
    for head in range(heads):
        plan = layout[head if layout.shape[0] > 1 else 0]
        for row in range(plan.shape[0]):
            for column in range(plan.shape[1]):
                if plan[row, column]:
                    pairs += min(block, seq - row * block) * min(block, seq - column * block)
    return 2 * batch * dim * pairs


@pytest.mark.parametrize(
    ("heads", "kv_heads", "per_head", "seq"), [(2, 2, True, 128), (4, 2, False, 100), (1, 1, True, 33)]
)
def test_forward_and_backward_are_two_and_five_products(heads, kv_heads, per_head, seq):
    block, dim, batch = 32, 16, 3
    blocks = -(-seq // block)
    layout = (torch.rand(heads if per_head else 1, blocks, blocks) < 0.5).long()
    layout[:, :, 0] = 1
    q = torch.randn(batch, heads, seq, dim, requires_grad=True)
    k, v = (torch.randn(batch, kv_heads, seq, dim, requires_grad=True) for _ in range(2))
    dsx_sparse_attn.flops.register_flop_formulas()
    with FlopCounterMode(display=False) as counter:
        out = dsx_sparse_attn.block_sparse_attention(q, k, v, layout, block=block)
        forward = counter.get_total_flops()
        out.sum().backward()
    product = by_hand(layout, batch, heads, seq, dim, block)
    assert forward == 2 * product
    assert counter.get_total_flops() == 7 * product
