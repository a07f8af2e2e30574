"""The `sparse_attention` section: every mode makes its class with its keys; typos and senseless values are refused."""

import pytest
from dsx_sparse_attn import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    VariableSparsityConfig,
)
from dsx_sparse_attn.config import SparseAttentionConfig
from dsx_sparse_attn.errors import LayoutError
from pydantic import ValidationError

# the example of DeepSpeed's documentation
DOCUMENTED = {
    "mode": "fixed", "block": 16, "different_layout_per_head": True, "num_local_blocks": 4, "num_global_blocks": 1,
    "attention": "bidirectional", "horizontal_global_attention": False, "num_different_global_patterns": 4,
    "num_random_blocks": 0, "local_window_blocks": [4], "global_block_indices": [0], "global_block_end_indices": None,
    "num_sliding_window_blocks": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    "mode, kind",
    [("dense", DenseSparsityConfig), ("fixed", FixedSparsityConfig), ("variable", VariableSparsityConfig),
     ("bigbird", BigBirdSparsityConfig), ("bslongformer", BSLongformerSparsityConfig),
     ("local", LocalSlidingWindowSparsityConfig)],
)  # fmt: skip
def test_every_mode_makes_its_class(mode, kind):
    made = SparseAttentionConfig(mode=mode, block=32).sparsity_config(4)
    assert type(made) is kind and made.num_heads == 4 and made.block == 32
    assert made.make_layout(256).shape == (4, 8, 8)


def test_keys_reach_the_class():
    fixed = SparseAttentionConfig(**DOCUMENTED).sparsity_config(4)
    assert fixed.num_different_global_patterns == 4 and fixed.different_layout_per_head
    section = SparseAttentionConfig(
        mode="variable", num_random_blocks=2, local_window_blocks=[1, 2], global_block_indices=[1],
        global_block_end_indices=[3], attention="bidirectional", horizontal_global_attention=True,
    )  # fmt: skip
    made = section.sparsity_config(2)
    assert (made.num_random_blocks, made.local_window_blocks, made.ranges) == (2, [1, 2], [(1, 3)])
    assert made.horizontal_global_attention
    bird = SparseAttentionConfig(mode="bigbird", num_random_blocks=3, num_sliding_window_blocks=5, num_global_blocks=2)
    made = bird.sparsity_config(2)
    assert (made.num_random_blocks, made.num_sliding_window_blocks, made.num_global_blocks) == (3, 5, 2)
    local = SparseAttentionConfig(mode="local", num_sliding_window_blocks=7, attention="unidirectional")
    assert local.sparsity_config(1).num_sliding_window_blocks == 7 and local.unread() == []


def test_keys_that_the_mode_does_not_read_are_known():
    assert SparseAttentionConfig(**DOCUMENTED).unread() == []
    assert SparseAttentionConfig(mode="fixed", num_random_blocks=2, local_window_blocks=[4]).unread() == [
        "num_random_blocks"
    ]


@pytest.mark.parametrize(
    "bad", [{"mode": "fxed"}, {"blok": 16}, {"block": 0}, {"attention": "causal"}, {"block": "16"}]
)
def test_typos_are_refused(bad):
    with pytest.raises(ValidationError):
        SparseAttentionConfig(**bad)


def test_senseless_combinations_name_the_section():
    with pytest.raises(LayoutError, match=r"sparse_attention .*'fixed'.*different_layout_per_head=True"):
        SparseAttentionConfig(num_different_global_patterns=2).sparsity_config(4)
