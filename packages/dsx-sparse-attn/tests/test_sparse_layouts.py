"""Layouts: DeepSpeed's patterns bit for bit, validation, masks of one's own."""

import copy
import pickle
import random

import pytest
import torch
from dsx_sparse_attn import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    Layout,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from dsx_sparse_attn.errors import LayoutError


def rows(layout, head=0):
    return "/".join("".join(str(int(x)) for x in row) for row in layout[head])


# layouts without randomness, of the last DeepSpeed version that had them
GOLDEN = [
    (FixedSparsityConfig(1, attention="unidirectional"), 128,
     "10000000/11000000/11100000/11110000/00011000/00011100/00011110/00011111"),
    (FixedSparsityConfig(1), 96, "/".join(["111101"] * 4 + ["000111"] * 2)),
    (VariableSparsityConfig(1, local_window_blocks=[1, 2]), 96, "100000/111000/111000/100110/100110/100001"),
    (BSLongformerSparsityConfig(1), 96, "111111/111000/111100/101110/100111/100011"),
    (LocalSlidingWindowSparsityConfig(1), 64, "1000/1100/0110/0011"),
    (LocalSlidingWindowSparsityConfig(1, attention="bidirectional"), 64, "1100/1110/0111/0011"),
    (DenseSparsityConfig(1), 32, "11/11"),
    (BSLongformerSparsityConfig(1, attention="unidirectional"), 64, "1000/1100/1110/1011"),
    (VariableSparsityConfig(1, local_window_blocks=[2], global_block_indices=[1], global_block_end_indices=[3],
                            horizontal_global_attention=True), 80, "11100/11111/11111/01110/01101"),
]  # fmt: skip


@pytest.mark.parametrize("config, seq, expected", GOLDEN)
def test_golden_layouts(config, seq, expected):
    layout = config.make_layout(seq)
    assert layout.dtype == torch.int64 and rows(layout) == expected


def test_heads_go_round_the_global_patterns():
    config = FixedSparsityConfig(4, different_layout_per_head=True, num_different_global_patterns=4)
    layout = config.make_layout(128)
    assert [int(h.sum()) for h in layout] == [40, 40, 40, 40]
    assert len({rows(layout, h) for h in range(4)}) == 4
    assert all(layout[h, 0, 4 + 3 - h] == 1 for h in range(4))


def by_hand(kind, heads, blocks, per_head, random_blocks, causal):
    """Random blocks drawn exactly as specified, around the deterministic rest."""
    result = torch.zeros(heads, blocks, blocks, dtype=torch.int64)
    for h in range(heads if per_head else 1):
        for r in range(blocks):
            limit = r + 1 if causal else blocks
            for c in random.sample(range(0, limit), min(limit, random_blocks)):
                result[h, r, c] = 1
    if not per_head:
        result[1:] = result[0]
    rest = kind(heads, num_random_blocks=0).make_layout(blocks * 16)
    return ((result + rest) > 0).long()


@pytest.mark.parametrize("kind", [BigBirdSparsityConfig, VariableSparsityConfig])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_seed_gives_upstreams_random_blocks(kind, per_head):
    random.seed(11)
    expected = by_hand(kind, 3, 12, per_head, 2, causal=False)
    after = random.random()
    random.seed(11)
    layout = kind(3, different_layout_per_head=per_head, num_random_blocks=2).make_layout(192)
    assert torch.equal(layout, expected)
    assert random.random() == after, "another number of draws than specified"


def test_unidirectional_bigbird_works_where_upstream_raises():
    random.seed(0)
    layout = BigBirdSparsityConfig(2, num_random_blocks=2, attention="unidirectional").make_layout(128)
    assert torch.equal(layout, layout.tril()) and layout[0].diagonal().eq(1).all() and layout[:, :, 0].eq(1).all()
    random.seed(5)
    draws = [set(random.sample(range(0, r + 1), min(2, r + 1))) for r in range(8)]
    random.seed(5)
    layout = BigBirdSparsityConfig(1, num_random_blocks=2, attention="unidirectional").make_layout(128)
    assert all(layout[0, r, c] == 1 for r in range(8) for c in draws[r])


BAD = [
    (lambda: FixedSparsityConfig(1, num_local_blocks=4, num_global_blocks=3), "multiple"),
    (lambda: FixedSparsityConfig(1, attention="sideways"), "unidirectional"),
    (lambda: FixedSparsityConfig(1, attention="unidirectional", horizontal_global_attention=True), "bidirectional"),
    (lambda: FixedSparsityConfig(4, num_different_global_patterns=2), "different_layout_per_head=True"),
    (lambda: FixedSparsityConfig(9, different_layout_per_head=True, num_different_global_patterns=5), "at most 4"),
    (lambda: VariableSparsityConfig(1, global_block_indices=[0, 2], global_block_end_indices=[1]), "as many"),
    (lambda: VariableSparsityConfig(1, global_block_indices=[3], global_block_end_indices=[3]), "start < end"),
    (lambda: VariableSparsityConfig(1, local_window_blocks=[]), "local_window_blocks"),
    (lambda: BSLongformerSparsityConfig(1, global_block_indices=[-1]), ">= 0"),
    (lambda: BigBirdSparsityConfig(0), "num_heads=0"),
    (lambda: BigBirdSparsityConfig(1, block=0), "block=0"),
    (lambda: BigBirdSparsityConfig(1, num_random_blocks=9).make_layout(64), "num_random_blocks=9"),
    (lambda: BigBirdSparsityConfig(1, num_sliding_window_blocks=9).make_layout(64), "num_sliding_window_blocks=9"),
    (lambda: BigBirdSparsityConfig(1, num_global_blocks=9).make_layout(64), "num_global_blocks=9"),
    (lambda: LocalSlidingWindowSparsityConfig(1, num_sliding_window_blocks=9).make_layout(64), "window"),
    (lambda: SparsityConfig(1).make_layout(64), "no pattern"),
    (lambda: Layout.from_mask(torch.ones(2, 3), 16), "blocks, blocks"),
    (lambda: Layout.from_mask(torch.ones(2, 3, 3), 16, heads=3), "2 heads for 3"),
]  # fmt: skip


@pytest.mark.parametrize("make, text", BAD)
def test_parameters_are_checked(make, text):
    with pytest.raises(LayoutError, match=text):
        make()
    assert issubclass(LayoutError, ValueError)


@pytest.mark.parametrize("config", [DenseSparsityConfig(1), FixedSparsityConfig(1), BigBirdSparsityConfig(1)])
def test_lengths_must_be_whole_blocks(config):
    with pytest.raises(ValueError, match="got a sequence of 100, expected a multiple of the block, 16"):
        config.make_layout(100)
    assert config.covering(100).shape[-1] == 7


def test_any_block_mask_is_a_layout():
    mask = torch.rand(6, 6) < 0.5
    layout = Layout.from_mask(mask, 32, heads=3)
    assert layout.shape == (3, 6, 6) and layout.block == 32 and layout.seq_len == 192
    assert layout.density == pytest.approx(mask.float().mean().item()) and layout.per_head() == [layout.density] * 3
    assert type(layout + 0) is torch.Tensor and "density=" in repr(layout)
    for again in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert type(again) is Layout and again.block == 32 and torch.equal(again, layout)
