"""The `sparse_attention` section through `dsx.initialize`: it reaches the model, trains, and is refused where it
means nothing.
"""

import dsx
import pytest
import torch
from dsx_sparse_attn import DenseSparsityConfig, SparseSelfAttention
from dsx_sparse_attn.errors import ArgumentError

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "sparse_attention": {"mode": "local", "block": 16, "num_sliding_window_blocks": 1, "attention": "unidirectional"},
}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 48)
        self.attention = SparseSelfAttention(DenseSparsityConfig(2, block=16), max_seq_length=64)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 64, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return self.attention(q, k, v)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_section_reaches_the_model_and_it_trains(stage):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 64, 8)
    engine, *_ = dsx.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": stage}})
    assert torch.equal(model.attention.master_layout[0], torch.eye(4, dtype=torch.uint8))
    losses = []
    for _ in range(5):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_model_without_attention_is_refused():
    with pytest.raises(ArgumentError, match="Linear has nothing to apply it to"):
        dsx.initialize(model=torch.nn.Linear(2, 2), config=CONFIG)


def test_typos_name_the_path():
    config = {**CONFIG, "sparse_attention": {"mode": "local", "blok": 16}}
    with pytest.raises(dsx.DsxConfigError, match=r"expected: sparse_attention\.block"):
        dsx.initialize(model=Model(), config=config)
